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
    codes = "codes"


@app.command()
def decode(
    store: Store,
    output: Annotated[Path, typer.Option("-o", "--output-folder", help="Folder to write.", show_default=False)],
    kind: Annotated[
        Output, typer.Option("--output", help="wave: WAV files; mel: log-mel .npy [M, F]; codes: uint16 .npy [K, T].")
    ] = Output.wave,
    codec: Annotated[
        str | None, typer.Option(help="A checkpoint's name or folder; by default the one the store names.")
    ] = None,
    quantizers: Annotated[int | None, typer.Option(help="Use only the first codebooks.")] = None,
    original_rate: Annotated[
        bool, typer.Option("--original-rate", help="Resample waves to the rate of the files that were encoded.")
    ] = False,
    device: Device = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decode a token file into WAV files, or straight into log-mel arrays; or unpack its codes.

    Run again, it goes on where it was interrupted. decode.json in the folder records what the run is.
    """
    from codec.decode import decode_store
    from codec.tokens import TokenStore

    tokens = TokenStore(store)
    try:
        model = None if kind is Output.codes else load(codec or tokens.spec.name, device)
    except CheckpointError as error:
        if codec is not None:
            raise
        raise CheckpointError(f"{store} is of codec {tokens.spec.name!r}; pass --codec FOLDER ({error})") from error
    with progress_bar("decoding", "items", hidden=as_json) as update:
        report = decode_store(
            model,
            tokens,
            output,
            kind.value,
            n_quantizers=quantizers,
            original_rate=original_rate,
            force=force,
            on_progress=update,
        )
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(output)}))
    else:
        kept = f" ({report.num_skipped} were there already)" if report.num_skipped else ""
        out.print(
            f"{output}: {report.num_items} items, {duration(report.audio_seconds)} of audio as {kind.value}{kept}"
        )
        if report.num_clipped:
            out.print(f"  {report.num_clipped} samples beyond full scale were clipped")
        print_speed(report)
        for failure in report.failures:
            errors.print(f"  {failure['key']}: {failure['error']}")
    if report.failures:
        raise typer.Exit(SOME_FAILED)
