"""`codec evaluate`, `codec compare` and `codec report`."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from codec.cli.common import SOME_FAILED, AsJson, Device, Force, Store, app, device_of, errors, out, progress_bar
from codec.errors import InputError


class Level(StrEnum):
    """What becomes of the copies' levels."""

    kept = "kept"
    matched = "matched"


Output = Annotated[Path, typer.Option("-o", "--output", help="Folder for the report.", show_default=False)]
MetricNames = Annotated[
    str | None,
    typer.Option(
        "--metrics", help="Names, with commas; by default all that are installed but for wer and speaker_similarity."
    ),
]
Rate = Annotated[
    int | None, typer.Option(help="Hz at which originals and copies are compared; the codecs' by default.")
]
Seconds = Annotated[float, typer.Option(help="Of each file, from its start.")]
Levels = Annotated[Level, typer.Option(help="matched: bring each copy to its original's RMS first.")]
Jobs = Annotated[int | None, typer.Option(help="Processes; one per core by default.")]
Page = Annotated[bool, typer.Option(help="Also write report.html, with clips to listen to.")]


@app.command()
def evaluate(
    inputs: Annotated[list[Path], typer.Argument(help="Audio files and folders.", show_default=False)],
    output: Output,
    codec: Annotated[
        list[str] | None,
        typer.Option(help="A codec's name, folder, file or hf:owner/name; NAME@2,4,8 for these codebooks. Repeat."),
    ] = None,
    against: Annotated[
        list[str] | None, typer.Option(help="opus:6,12 or mp3:16,32 (kbps), codec2:3200 (bps). Repeat.")
    ] = None,
    metrics: MetricNames = None,
    sample_rate: Rate = None,
    seconds: Seconds = 10.0,
    files: Annotated[int | None, typer.Option(help="At most so many files, spread over those found.")] = None,
    level: Levels = Level.kept,
    texts: Annotated[
        Path | None, typer.Option(help="KEY<tab>TEXT lines: the words spoken, for the word error rate.")
    ] = None,
    device: Device = "auto",
    workers: Jobs = None,
    page: Page = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure codecs on your audio beside Opus, MP3 and Codec2: is one good enough, and with how many codebooks?

    Writes rows.csv (each clip), summary.csv, report.json and report.html. Run again, it goes on where it was
    interrupted. Exit code 3: some clips couldn't be measured; the report lists them.
    """
    from codec.evaluate import evaluate as run

    with progress_bar("measuring", "clips", hidden=as_json) as update:
        evaluation = run(
            codec or [],
            inputs,
            output,
            against=against or [],
            metrics=_names(metrics),
            sample_rate=sample_rate,
            max_seconds=seconds,
            max_files=files,
            level=level.value,
            texts=None if texts is None else _read_texts(texts),
            device=device_of(device),
            workers=workers,
            force=force,
            on_progress=update,
        )
    _finish(evaluation, output, page, as_json)


@app.command()
def compare(
    store: Store,
    originals: Annotated[list[Path], typer.Argument(help="The audio files that were encoded.", show_default=False)],
    output: Output,
    codec: Annotated[
        str | None, typer.Option(help="What decodes it, NAME@2,4 for these codebooks; by default what the store names.")
    ] = None,
    metrics: MetricNames = None,
    sample_rate: Rate = None,
    seconds: Annotated[float, typer.Option(help="Longer items are left out.")] = 10.0,
    files: Annotated[int, typer.Option(help="Items to measure, spread over the store.")] = 50,
    level: Levels = Level.kept,
    device: Device = "auto",
    workers: Jobs = None,
    page: Page = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Measure a sample of a token store against the files it was made of."""
    from codec.evaluate import compare_store

    with progress_bar("measuring", "clips", hidden=as_json) as update:
        evaluation = compare_store(
            store,
            originals,
            output,
            codec=codec,
            max_files=files,
            metrics=_names(metrics),
            sample_rate=sample_rate,
            max_seconds=seconds,
            level=level.value,
            device=device_of(device),
            workers=workers,
            force=force,
            on_progress=update,
        )
    _finish(evaluation, output, page, as_json)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What codec evaluate or codec compare wrote.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; FOLDER/report.html by default.", show_default=False)
    ] = None,
    title: Annotated[str, typer.Option(help="Of the page.")] = "Codec evaluation",
    force: Force = False,
) -> None:
    """Make the HTML page of an evaluation: one file with plots, tables and clips, for any browser, offline."""
    from codec.evaluate import Evaluation, write_page

    evaluation = Evaluation.read(folder)
    if output is not None and output.exists() and not force:
        raise InputError(f"{output} exists; give another name, or --force to replace it")
    with progress_bar("coding clips", "copies") as update:
        path = write_page(evaluation, output, title=title, on_progress=update)
    out.print(f"{path}: {path.stat().st_size / 1e6:.1f} MB", markup=False)


def _finish(evaluation: Any, output: Path, page: bool, as_json: bool) -> None:
    from codec.evaluate import write_page

    if page:
        with progress_bar("coding clips", "copies", hidden=as_json) as update:
            write_page(evaluation, on_progress=update)
    if as_json:
        found = {"summary": evaluation.summary(), "failures": evaluation.failures, "training": evaluation.training}
        print(json.dumps({"folder": str(output), **found}, ensure_ascii=False))
    else:
        _print_table(evaluation)
        names = ["rows.csv", "summary.csv", "report.json", *(["report.html"] if page else [])]
        out.print(f"{output}: {', '.join(names)}", markup=False)
        if missing := evaluation.settings["metrics_missing"]:
            errors.print(f"not measured: {', '.join(missing)}; pip install 'codec[eval]' adds them", markup=False)
        for failure in evaluation.failures[:10]:
            errors.print(f"  {failure['key']}, {failure['codec']}: {failure['error']}", markup=False)
        if len(evaluation.failures) > 10:
            errors.print(f"  and {len(evaluation.failures) - 10} more, see {output / 'report.json'}", markup=False)
    if evaluation.failures:
        raise typer.Exit(SOME_FAILED)


def _print_table(evaluation: Any) -> None:
    from codec.evaluate.metrics import METRICS

    def shown(value: float | None, digits: int) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    summary = evaluation.summary()
    known = [name for name in evaluation.metrics if any(record[f"{name}_count"] for record in summary)]
    table = [["", "kbps", *(METRICS[name].title.partition(",")[0] for name in known)]]
    for record in summary:
        kbps = None if record["bitrate_bps"] is None else record["bitrate_bps"] / 1000
        cells = [shown(record[f"{name}_mean"], METRICS[name].digits) for name in known]
        table.append([record["condition"], shown(kbps, 2), *cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [line[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(line[1:], widths[1:], strict=True))]
        out.print("  ".join(cells), markup=False)


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def _read_texts(path: Path) -> dict[str, str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: can't be read ({error}); it must be UTF-8 lines of KEY<tab>TEXT") from error
    texts = {}
    for number, line in enumerate(lines, 1):
        key, tab, text = line.partition("\t")
        if line.strip() and not tab:
            raise InputError(f"{path}, line {number}: has no tab; write KEY<tab>TEXT")
        if tab:
            texts[key] = text
    return texts
