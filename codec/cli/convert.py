"""`codec convert`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from codec.cli.common import (
    SOME_FAILED,
    AsJson,
    Device,
    Force,
    app,
    duration,
    errors,
    load,
    out,
    print_speed,
    progress_bar,
    size_text,
)
from codec.errors import InputError

convert_app = typer.Typer(help="Take over what other projects wrote.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(convert_app, name="convert")


@convert_app.command()
def lyra(
    source: Annotated[Path, typer.Argument(help="lyra/model_coeffs of a checkout of google/lyra.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The checkpoint folder to write.", show_default=False)],
    name: Annotated[str, typer.Option(help="The codec's name in token files.")] = "lyra_v2",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of Lyra V2's published TFLite files."""
    from codec.adapters.lyra import import_lyra

    if (output / "config.json").exists() and not force:
        raise InputError(f"{output} holds a checkpoint; give another folder, or --force to replace it")
    spec = import_lyra(source, output, name=name)
    if as_json:
        print(json.dumps({"checkpoint": str(output), "codec": spec.to_dict()}))
        return
    rate = float(spec.bitrate_bps) / 1000
    out.print(
        f"{output}: {spec.name}, {spec.sample_rate} Hz, {spec.n_quantizers} codebooks, {rate:g} kbps", markup=False
    )


@convert_app.command()
def codes(
    inputs: Annotated[
        list[Path], typer.Argument(help=".ecdc, .dac, .npy, .pt files and folders of them.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .ctok file to write.", show_default=False)],
    codec: Annotated[str, typer.Option(help="The codec that made the codes: name, folder, file or hf:owner/name.")],
    quantizers: Annotated[int | None, typer.Option(help="Codebooks to store; as the first file if not given.")] = None,
    device: Device = "auto",
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Import codes into a token file.

    Files that can't be read are listed in OUTPUT.errors.jsonl and left out; the exit code is then 3.
    """
    from codec.convert import import_codes

    model = load(codec, device)
    with progress_bar("importing", "files", hidden=as_json) as update:
        report = import_codes(
            model, inputs, output, n_quantizers=quantizers, resume=resume, force=force, on_progress=update
        )
    failures = output.with_name(output.name + ".errors.jsonl")
    failures.unlink(missing_ok=True)
    if report.failures:
        failures.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in report.failures))
    if as_json:
        print(json.dumps({**report.to_dict(), "store": str(output)}))
    else:
        skipped = f" ({report.num_skipped} were there already)" if report.num_skipped else ""
        out.print(f"{output}: {report.num_items} items imported{skipped}, {duration(report.audio_seconds)} of audio")
        print_speed(report)
        out.print(f"  {size_text(report.store_bytes)}")
        if report.num_encoded_again:
            out.print(f"  {report.num_encoded_again} were written in chunks off the grid of frames and encoded again")
        if report.failures:
            errors.print(f"files that failed: {len(report.failures)}, see {failures}; the first:")
            errors.print(f"  {report.failures[0]['error']}", markup=False)
    if report.failures:
        raise typer.Exit(SOME_FAILED)
