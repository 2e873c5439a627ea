"""`codec encode`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from codec.cli.common import (
    SOME_FAILED,
    AsJson,
    Device,
    Force,
    app,
    bar_of,
    duration,
    errors,
    load,
    out,
    print_facts,
    size_text,
)
from codec.errors import InputError


class Channels(StrEnum):
    """What becomes of several channels."""

    MIX = "mix"
    SPLIT = "split"


class Engine(StrEnum):
    """Where parts are encoded."""

    local = "local"
    ray = "ray"


class Compare(StrEnum):
    """How a changed file is told."""

    time = "size+mtime"
    content = "content"


_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@app.command()
def encode(
    output: Annotated[
        str,
        typer.Option("-o", "--output", help="NAME.ctok: one token file. Any other name: a folder of them, or a URL."),
    ],
    inputs: Annotated[
        list[str] | None,
        typer.Argument(
            help="Audio files, folders, globs, fsspec URLs; tar archives, Parquet and Arrow files; manifests "
            "(.jsonl .csv .tsv .scp, also .gz); Kaldi folders."
        ),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="A shipped checkpoint's name, a folder or file, or hf:owner/name.")
    ] = "speech_16k",
    quantizers: Annotated[int | None, typer.Option(help="Codebooks to store; fewer are smaller and coarser.")] = None,
    manifest: Annotated[list[str] | None, typer.Option(help="A manifest, whatever its suffix.")] = None,
    meta: Annotated[str | None, typer.Option(help="Manifest columns to keep, with commas; all by default.")] = None,
    recursive: Annotated[bool, typer.Option(help="Look into subfolders.")] = True,
    glob: Annotated[str | None, typer.Option(help="Take only files of a folder whose path inside it fits.")] = None,
    channels: Annotated[Channels, typer.Option(help="Mix channels, or make one item of each.")] = Channels.MIX,
    loudness: Annotated[
        float | None, typer.Option(help="Bring items to this loudness (LUFS, such as -23); decoding undoes it.")
    ] = None,
    device: Device = "auto",
    devices: Annotated[
        str | None, typer.Option(help="One process per device: all, or a list such as cuda:0,cuda:1.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes on this machine's CPU cores.")] = 1,
    rank: Annotated[int, typer.Option(help="Of processes started apart, the number of this one.")] = 0,
    world_size: Annotated[int, typer.Option(help="How many of them there are.")] = 1,
    engine: Annotated[Engine, typer.Option(help="local, or ray: on a Ray cluster.")] = Engine.local,
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster.")] = None,
    batch_seconds: Annotated[float, typer.Option(help="Audio per batch; lower it if memory runs out.")] = 64.0,
    shard_size: Annotated[
        str, typer.Option(help="Size from which on a folder's shards are closed, such as 500MB; 0: no limit.")
    ] = "1GB",
    threads: Annotated[int, typer.Option(help="Threads that read and decode files, per process.")] = 2,
    check: Annotated[str, typer.Option(help="Share of the items to decode again and compare, such as 1%.")] = "0%",
    compare: Annotated[Compare, typer.Option(help="How changed files are told.")] = Compare.time,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read headers only: say hours, sizes, and what encoding will take.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first file that fails.")] = False,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Encode a corpus of audio into a token store.

    Files of any rate and channel count are resampled and mixed to the codec's. Files that can't be read are listed in
    errors.jsonl (OUTPUT.errors.jsonl for one token file) and left out; the exit code is then 3. The same command
    again goes on where it stopped: new files are added, changed ones encoded again.
    """
    if not inputs and not manifest:
        raise InputError("nothing to encode; give files, folders, URLs or a --manifest")
    names = meta.split(",") if meta is not None else None
    share = _share(check)
    size = 0 if output.endswith(".ctok") and shard_size == "1GB" else _bytes(shard_size)
    if dry_run:
        _dry_run(codec, device, inputs or [], manifest or [], recursive, glob, names, channels, quantizers, as_json)
        return
    from codec.encode import encode_corpus, name_of_errors
    from codec.encode.corpus import json_lines

    several = _devices(devices)
    model = load(codec, several[0] if several else device)
    with _bar(hidden=as_json) as update:
        report = encode_corpus(
            model,
            inputs or [],
            output,
            manifests=manifest or [],
            recursive=recursive,
            glob=glob,
            meta=names,
            n_quantizers=quantizers,
            channels=channels.value,
            loudness_lufs=loudness,
            batch_seconds=batch_seconds,
            num_threads=threads,
            shard_bytes=size,
            workers=workers,
            devices=several,
            rank=rank,
            world_size=world_size,
            engine=engine.value,
            address=address,
            compare=compare.value,
            resume=resume,
            force=force,
            strict=strict,
            check=share,
            on_progress=update,
        )
    place, name = name_of_errors(output, rank, world_size)
    place.write_text(name, json_lines(report.failures))
    where = f"{place.url or place.folder}/{name}"
    if as_json:
        print(json.dumps({**report.to_dict(), "store": output}))
    else:
        _print_encoded(report, output, where, model.spec)
    if report.failures:
        raise typer.Exit(SOME_FAILED)


@contextmanager
def _bar(*, hidden: bool, title: str = "encoding") -> Iterator[Any]:
    """Files, audio-hours per second, an estimate; yields `update(done, total, audio_seconds)`."""
    started = time.monotonic()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("files  {task.fields[rate]}"),
        TimeRemainingColumn(),
    ]
    with bar_of(*columns, hidden=hidden) as bar:
        task = bar.add_task(title, total=None, rate="")

        def update(done: int, total: int, audio_seconds: float) -> None:
            elapsed = max(time.monotonic() - started, 1e-9)
            hours = audio_seconds / 3600
            speed = f"{hours / elapsed:.3f} audio-hours/s ({audio_seconds / elapsed:.0f} × real time)"
            rate = f"{hours:.2f} h of audio, {speed}"
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise InputError(f"--check is {text!r}; it must be a share such as 1% or 0.01")
    return share


def _bytes(text: str) -> int:
    digits = text.upper().rstrip("BKMGI ")
    unit = text.upper()[len(digits) :].strip()
    try:
        return int(float(digits) * _SIZES[unit])
    except (ValueError, KeyError) as error:
        raise InputError(f"--shard-size is {text!r}; it must be a size such as 500MB, 2GB, or 0") from error


def _devices(text: str | None) -> list[str]:
    if text is None:
        return []
    if text != "all":
        return [name.strip() for name in text.split(",") if name.strip()]
    import torch

    if not torch.cuda.is_available():
        raise InputError("--devices all, but torch sees no GPU here; use --workers N for CPU cores")
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())]


def _dry_run(
    codec: str,
    device: str,
    inputs: list[str],
    manifests: list[str],
    recursive: bool,
    glob: str | None,
    meta: list[str] | None,
    channels: Channels,
    quantizers: int | None,
    as_json: bool,
) -> None:
    from codec.encode import EncodeSettings, find_items, scan

    model = load(codec, device)
    settings = EncodeSettings(n_quantizers=quantizers, channels=channels.value).checked(model.spec)
    items = find_items(inputs, manifests=manifests, recursive=recursive, glob=glob, meta=meta)
    with _bar(hidden=as_json, title="reading headers") as update:
        report = scan(model, items, settings, update)
    if as_json:
        print(json.dumps(report.to_dict()))
    else:
        facts = {
            "items": report.num_items,
            "audio": duration(report.audio_seconds),
            "longest": duration(report.longest_seconds),
            "size": size_text(report.source_bytes),
            "token store": f"about {size_text(report.store_bytes)}",
            "encoding": f"about {duration(report.encode_seconds)} on {model.device}, one process",
            "headers that fail": len(report.failures),
        }
        print_facts(facts)
        for kind, count in report.kinds.items():
            out.print(f"  {count:,} × {kind}", markup=False)
        for failure in report.failures[:10]:
            errors.print(f"  {failure['error']}", markup=False)
    if report.failures:
        raise typer.Exit(SOME_FAILED)


def _print_encoded(report: Any, output: str, listing: str, spec: Any) -> None:
    seconds = report.audio_seconds
    skipped = f" ({report.num_skipped} were there already)" if report.num_skipped else ""
    out.print(f"{output}: {report.num_items} files encoded{skipped}, {duration(seconds)} of audio")
    if seconds:
        elapsed = max(report.elapsed_seconds, 1e-9)
        rate = f"{seconds / 3600 / elapsed:.3f} audio-hours/s, {seconds / elapsed:.0f} × real time"
        out.print(f"  {elapsed:.1f} s, {rate}; the bottleneck was {report.bottleneck}")
    if report.num_changed:
        out.print(f"  {report.num_changed} had changed and were encoded again")
    if report.num_updated:
        out.print(f"  {report.num_updated} had other metadata, which was renewed")
    if report.num_removed:
        out.print(
            f"  {report.num_removed} in the store are not among the inputs any more; they stay, such as "
            f"{report.removed[0]}",
            markup=False,
        )
    if report.held:
        out.print(f"  {len(report.held)} have changed in a shard that another process writes; run again after it")
    if not report.num_skipped and report.num_items and report.source_bytes:
        pcm = report.audio_seconds * spec.sample_rate * 2
        rate = f"{spec.sample_rate / 1000:g} kHz mono"
        out.print(
            f"  {size_text(report.store_bytes)} from {size_text(report.source_bytes)} of files: "
            f"{report.source_bytes / report.store_bytes:.1f} × smaller "
            f"({pcm / report.store_bytes:.0f} × smaller than 16-bit PCM at {rate})"
        )
    _print_oddities(report)
    if report.failures:
        errors.print(f"files that failed: {len(report.failures)}, see {listing}; the first:")
        errors.print(f"  {report.failures[0]['error']}", markup=False)


def _print_oddities(report: Any) -> None:
    kinds: dict[str, list[str]] = {}
    for warning in report.warnings:
        kinds.setdefault(warning["warning"].split(":", 1)[0], []).append(f"{warning['key']}: {warning['warning']}")
    for kind, found in kinds.items():
        out.print(f"  {kind}: {len(found)} items, such as {found[0]}", markup=False)
    if report.check:
        check = report.check
        out.print(
            f"  checked {check['num_items']} items: mel distance {check['mel_distance_median']:.2f} (median), "
            f"{check['mel_distance_max']:.2f} at most; {check['num_outliers']} outliers"
        )
        for outlier in check["outliers"][:5]:
            out.print(f"    {outlier['key']}: {'; '.join(outlier['reasons'])}", markup=False)
