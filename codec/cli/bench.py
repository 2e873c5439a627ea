"""`codec bench`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from codec.cli.common import AsJson, Device, app, duration, load, out, progress_bar
from codec.errors import InputError


@app.command()
def bench(
    inputs: Annotated[list[Path], typer.Argument(help="Audio files and folders.", show_default=False)],
    codec: Annotated[
        list[str], typer.Option(help="A codec's name, folder, file or hf:owner/name; NAME@K uses K codebooks. Repeat.")
    ],
    device: Device = "auto",
    seconds: Annotated[float, typer.Option(help="Of each file, from its start.")] = 10.0,
    files: Annotated[int, typer.Option(help="At most so many files, spread over those found.")] = 32,
    batch_size: Annotated[int, typer.Option(help="Files per batch.")] = 8,
    as_json: AsJson = False,
) -> None:
    """Compare codecs on this machine and these files: speed, size and quality.

    Speed is × real time. The mel distance, SI-SDR, PESQ and STOI are means over the files, all at 16 kHz.
    """
    from codec.bench import bench_codecs

    def loaded() -> Iterator[tuple[Any, int | None]]:
        for name, count in map(_split, codec):
            yield load(name, device), count

    with progress_bar("measuring", "files", hidden=as_json) as update:
        rows = bench_codecs(
            loaded(),
            inputs,
            max_seconds=seconds,
            max_files=files,
            batch_size=batch_size,
            on_progress=lambda _, done: update(done, None),
        )
    if as_json:
        print(json.dumps({"codecs": [row.to_dict() for row in rows]}))
        return
    heads = ["codec", "Hz", "kbps", "encode ×", "decode ×", "M weights", "mel", "SI-SDR", "PESQ", "STOI"]
    table = [heads, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [line[0].ljust(widths[0])] + [cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True)]
        out.print("  ".join(cells), markup=False)
    out.print(f"{rows[0].num_files} files, {duration(rows[0].audio_seconds)} of audio")


def _split(name: str) -> tuple[str, int | None]:
    before, at, count = name.rpartition("@")
    if not at:
        return name, None
    if not count.isdigit():
        raise InputError(f"--codec {name}: after @ comes the number of codebooks, such as {before}@8")
    return before, int(count)


def _cells(row: Any) -> list[str]:
    def shown(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    return [
        row.name,
        str(row.sample_rate),
        f"{row.bitrate_bps / 1000:.2f}",
        f"{row.encode_speed:.1f}",
        f"{row.decode_speed:.1f}",
        f"{row.parameters / 1e6:.1f}",
        shown(row.mel_distance, 3),
        shown(row.si_sdr_db, 2),
        shown(row.pesq, 2),
        shown(row.stoi, 3),
    ]
