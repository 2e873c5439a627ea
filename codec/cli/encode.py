"""`codec encode`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

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


@app.command()
def encode(
    inputs: Annotated[list[Path], typer.Argument(help="Audio files and folders.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .ctok file to write.", show_default=False)],
    codec: Annotated[str, typer.Option(help="A shipped checkpoint's name, or a folder.")] = "speech_16k",
    quantizers: Annotated[int | None, typer.Option(help="Codebooks to store; fewer are smaller and coarser.")] = None,
    device: Device = "auto",
    batch_seconds: Annotated[float, typer.Option(help="Audio per batch; lower it if memory runs out.")] = 64.0,
    threads: Annotated[int, typer.Option(help="Threads that read and decode files.")] = 2,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Encode audio files into a token file.

    Files of any rate and channel count are resampled and mixed to the codec's. Files that can't be read are listed in
    OUTPUT.errors.jsonl and left out; the exit code is then 3.
    """
    from codec.encode import encode_corpus, write_failures

    model = load(codec, device)
    failures = output.with_name(output.name + ".errors.jsonl")
    with progress_bar("encoding", "files", hidden=as_json) as update:
        report = encode_corpus(
            model,
            inputs,
            output,
            n_quantizers=quantizers,
            batch_seconds=batch_seconds,
            num_threads=threads,
            resume=resume,
            force=force,
            on_progress=update,
        )
    write_failures(report.failures, failures)
    if as_json:
        print(json.dumps({**report.to_dict(), "store": str(output)}))
    else:
        _print_encoded(report, output, failures)
    if report.failures:
        raise typer.Exit(SOME_FAILED)


def _print_encoded(report: Any, output: Path, failures: Path) -> None:
    seconds = report.audio_seconds
    skipped = f" ({report.num_skipped} were there already)" if report.num_skipped else ""
    out.print(f"{output}: {report.num_items} files encoded{skipped}, {duration(seconds)} of audio")
    print_speed(report)
    if not report.num_skipped and report.num_items:
        pcm = report.audio_seconds * 32000
        out.print(
            f"  {size_text(report.store_bytes)} from {size_text(report.source_bytes)} of files: "
            f"{report.source_bytes / report.store_bytes:.1f} × smaller "
            f"({pcm / report.store_bytes:.0f} × smaller than 16-bit PCM at 16 kHz mono)"
        )
    if report.failures:
        errors.print(f"files that failed: {len(report.failures)}, see {failures}; the first:")
        errors.print(f"  {report.failures[0]['error']}", markup=False)
