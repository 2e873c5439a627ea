"""The verbs on token stores as such: `codec verify | merge | split | export`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from codec.cli.common import FAILED, AsJson, Force, Store, app, bar_of, counted, errors, out, progress_bar, size_text
from codec.errors import InputError


@app.command()
def verify(store: Store, as_json: AsJson = False) -> None:
    """Check every checksum of a token store; exit code 1 and the places if anything is damaged."""
    from codec.tokens import TokenStore

    tokens = TokenStore(store)
    columns = [TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with bar_of(*columns, hidden=as_json) as bar:
        task = bar.add_task("", total=tokens.num_bytes)
        problems = [asdict(problem) for problem in tokens.verify(lambda size: bar.advance(task, size))]
    if as_json:
        print(json.dumps(problems))
    elif not problems:
        out.print(f"{store}: every checksum of {len(tokens):,} items is right")
    for problem in [] if as_json else problems:
        errors.print(problem["message"], markup=False)
    if problems:
        raise typer.Exit(FAILED)


@app.command()
def merge(
    stores: Annotated[list[Path], typer.Argument(help="Token files and folders of them.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .ctok file to write.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = False,
    force: Force = False,
) -> None:
    """Join token files into one, without touching the codes."""
    from codec.tokens import TokenStore, merge

    paths = [path for store in stores for path in TokenStore(store).paths]
    with progress_bar("merging", "items") as update:
        merge(paths, output, resume=resume, force=force, progress=counted(update, len(TokenStore(paths))))
    out.print(f"{output}: {len(TokenStore(output)):,} items of {len(paths)} shards, {size_text(output.stat().st_size)}")


@app.command()
def split(
    store: Store,
    output: Annotated[Path, typer.Option("-o", "--output-folder", help="Folder to write.", show_default=False)],
    shards: Annotated[int, typer.Option(help="How many.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = False,
    force: Force = False,
) -> None:
    """Cut a token store into shards of about equal duration, without touching the codes."""
    from codec.tokens import TokenStore, split

    with progress_bar("splitting", "items") as update:
        progress = counted(update, len(TokenStore(store)))
        paths = split(store, output, shards, resume=resume, force=force, progress=progress)
    out.print(f"{output}: {len(TokenStore(output)):,} items in {len(paths)} shards")


@app.command()
def export(
    store: Store,
    key: Annotated[str, typer.Option(help="The item.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.", show_default=False)],
    start_frame: Annotated[int, typer.Option(help="First frame.")] = 0,
    num_frames: Annotated[int | None, typer.Option(help="Frames; to the end if not given.")] = None,
    force: Force = False,
) -> None:
    """Write one item's codes as a NumPy .npz: codes [K, T], num_samples, gain, meta (JSON) and the codec (JSON)."""
    import numpy as np

    from codec.tokens import TokenStore

    if output.exists() and not force:
        raise InputError(f"{output} exists; give another path, or --force to replace it")
    tokens = TokenStore(store)
    facts = tokens.info(key)
    codes = tokens.read(key, start_frame, num_frames)
    with output.open("wb") as file:
        np.savez(
            file,
            codes=codes,
            start_frame=start_frame,
            num_samples=facts.num_samples,
            gain=np.nan if facts.gain is None else facts.gain,
            meta=json.dumps(facts.meta),
            codec=json.dumps(tokens.spec.to_dict()),
        )
    out.print(f"{output}: codes [{codes.shape[0]}, {codes.shape[1]}] of {key}", markup=False)
