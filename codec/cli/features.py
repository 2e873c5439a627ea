"""`codec features`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from codec.cli.common import (
    SOME_FAILED,
    AsJson,
    Device,
    Force,
    app,
    device_of,
    duration,
    errors,
    load,
    out,
    print_speed,
    progress_bar,
)


@app.command()
def features(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Audio files and folders; or token files and folders of them.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write, or with --npz the file.", show_default=False)
    ],
    preset: Annotated[
        str, typer.Option(help="codec, librosa, whisper, kaldi, nemo, hifigan, vocos, realtime …")
    ] = "codec",
    npz: Annotated[bool, typer.Option("--npz", help="One .npz file instead of a folder of .npy files.")] = False,
    codec: Annotated[
        str | None, typer.Option(help="For tokens: a checkpoint's name or folder; by default the one the store names.")
    ] = None,
    device: Device = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compute mel spectrograms of audio files or of a token store: one float32 array [M, F] per item."""
    from codec.extract import extract_features, token_store

    device = device_of(device)
    store = token_store(inputs)
    kind = "files" if store is None else "items"
    with progress_bar("features", kind, hidden=as_json) as update:
        report = extract_features(
            inputs,
            output,
            preset,
            output_format="npz" if npz else "npy",
            codec=None if store is None else load(codec or store.spec.name, device),
            device=device,
            force=force,
            on_progress=update,
        )
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(output)}))
    else:
        out.print(f"{output}: {report.num_items} {kind}, {duration(report.audio_seconds)} of audio, preset {preset}")
        print_speed(report)
        for failure in report.failures:
            errors.print(f"  {failure['error']}", markup=False)
    if report.failures:
        raise typer.Exit(SOME_FAILED)
