"""`codec decode`."""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from codec.cli.common import (
    SOME_FAILED,
    AsJson,
    Device,
    Force,
    Store,
    app,
    duration,
    errors,
    load,
    out,
    print_speed,
    progress_bar,
)
from codec.errors import CheckpointError


class Output(StrEnum):
    """What `codec decode` writes."""

    wave = "wave"
    mel = "mel"


@app.command()
def decode(
    store: Store,
    output: Annotated[Path, typer.Option("-o", "--output-folder", help="Folder to write.", show_default=False)],
    kind: Annotated[Output, typer.Option("--output", help="wave: WAV files; mel: log-mel .npy [M, F].")] = Output.wave,
    codec: Annotated[
        str | None, typer.Option(help="A checkpoint's name or folder; by default the one the store names.")
    ] = None,
    quantizers: Annotated[int | None, typer.Option(help="Use only the first codebooks.")] = None,
    device: Device = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decode a token file into WAV files, or straight into log-mel arrays."""
    from codec.decode import decode_store
    from codec.tokens import TokenStore

    tokens = TokenStore(store)
    try:
        model = load(codec or tokens.spec.name, device)
    except CheckpointError as error:
        if codec is not None:
            raise
        raise CheckpointError(f"{store} is of codec {tokens.spec.name!r}; pass --codec FOLDER ({error})") from error
    with progress_bar("decoding", "items", hidden=as_json) as update:
        report = decode_store(
            model, tokens, output, kind.value, n_quantizers=quantizers, force=force, on_progress=update
        )
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(output)}))
    else:
        out.print(f"{output}: {report.num_items} items, {duration(report.audio_seconds)} of audio as {kind.value}")
        print_speed(report)
        for failure in report.failures:
            errors.print(f"  {failure['key']}: {failure['error']}")
    if report.failures:
        raise typer.Exit(SOME_FAILED)
