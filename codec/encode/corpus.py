"""Audio corpus → token store: the run as a whole."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from codec.encode.check import summary
from codec.encode.items import PathLike, find_items
from codec.encode.pipeline import PartResult, Pipeline
from codec.encode.place import Place
from codec.encode.plan import Part, corpus_hash, make_plan
from codec.encode.settings import LONG_SECONDS, EncodeSettings
from codec.encode.sink import Sink
from codec.encode.state import examine, is_held
from codec.errors import InputError, TokenFileError
from codec.model import Codec

Progress = Callable[[int, int, float], None]

MAX_LISTED = 1000
"""Keys of removed and changed items that a report lists."""


@dataclass
class EncodeReport:
    """What an `encode_corpus` run did.

    Attributes:
        num_items: Items encoded in this run.
        num_skipped: Items that the store had already.
        audio_seconds: Audio encoded in this run.
        elapsed_seconds: Wall time.
        source_bytes: Size of the files encoded in this run.
        store_bytes: Size of the finished store.
        failures: One entry per item that couldn't be encoded: key, path, error, remedy.
        warnings: One entry per oddity of an item that was encoded (silence, clipping, DC offset): key, path, warning.
        num_changed: Items encoded again because their source had changed.
        num_updated: Items whose metadata alone had changed: written anew with the codes that they had.
        num_removed: Keys in the store that the inputs don't have any more; they stay.
        removed: The first of them.
        held: Keys whose source has changed in a shard that another process is writing: run again after it.
        bottleneck: What the run waited for: "reading", "decoding", "encoding" or "writing".
        stage_seconds: Seconds by stage, summed over processes.
        check: Mel distance of the sample that was decoded again, and outliers; empty without `check`.
    """

    num_items: int = 0
    num_skipped: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    source_bytes: int = 0
    store_bytes: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    warnings: list[dict[str, str]] = field(default_factory=list)
    num_changed: int = 0
    num_updated: int = 0
    num_removed: int = 0
    removed: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    bottleneck: str = ""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def encode_corpus(
    codec: Codec,
    inputs: Sequence[PathLike],
    store: PathLike,
    *,
    manifests: Sequence[PathLike] = (),
    recursive: bool = True,
    glob: str | None = None,
    meta: Sequence[str] | None = None,
    n_quantizers: int | None = None,
    channels: Literal["mix", "split"] = "mix",
    loudness_lufs: float | None = None,
    batch_seconds: float = 64.0,
    num_threads: int = 2,
    shard_bytes: int = 0,
    workers: int = 1,
    devices: Sequence[str] = (),
    rank: int = 0,
    world_size: int = 1,
    engine: Literal["local", "ray"] = "local",
    address: str | None = None,
    compare: Literal["size+mtime", "content"] = "size+mtime",
    resume: bool = True,
    force: bool = False,
    strict: bool = False,
    check: float = 0.0,
    on_progress: Progress | None = None,
) -> EncodeReport:
    """Encodes a corpus of audio into a token store.

    Files are resampled to the codec's rate and mixed to its channels. A file that can't be read is reported and left
    out; the others are encoded all the same. Codes don't depend on the batch that a file happens to be in, and
    neither they nor the shards on the number of processes, or on how often they died: the same call again goes on.
    (Byte for byte on like processors with as many torch threads per process. Others round otherwise, and where two
    codebook entries are equally near within that rounding, either may be taken.)

    Args:
        codec: Encodes; on whichever device it is.
        inputs: Files, folders, globs, fsspec URLs, tar archives, Parquet and Arrow files, manifests, Kaldi folders:
            see `find_items`.
        store: The `.ctok` file to write; or a folder of shards, local or an fsspec URL (any other name).
        manifests: Manifests whose suffix doesn't tell.
        recursive: Also look into the folders' subfolders.
        glob: Take only those of a folder's files whose path inside it fits.
        meta: The manifest columns that become metadata; all if None.
        n_quantizers: Codebooks to store; all if None.
        channels: "mix" the channels to the codec's; or "split": one item per channel, `KEY#0`, `KEY#1` …
        loudness_lufs: Bring items to this loudness (ITU-R BS.1770), without clipping them; the factor is stored as
            the item's gain.
        batch_seconds: Most audio per batch, padding included.
        num_threads: Threads that read and decode files, per process.
        shard_bytes: Of a folder: size from which on a shard is closed and another begun; 0 doesn't limit it.
        workers: Processes on this machine's CPU cores; needs a folder.
        devices: Devices for one process each, such as `["cuda:0", "cuda:1"]`; needs a folder.
        rank: Of processes started apart (a SLURM array, say), the number of this one.
        world_size: How many there are. Each takes every n-th part of the same plan; needs a folder.
        engine: "local", or "ray": parts as tasks of a Ray cluster, done again elsewhere if a node is lost.
        address: Of the Ray cluster; None starts or finds one.
        compare: How a changed file is told: "size+mtime", or "content", which reads files again.
        resume: Go on where an interrupted run stopped; otherwise its leftovers are an error.
        force: Replace an existing store.
        strict: Stop at the first failure.
        check: Share of the items (0 … 1) that are decoded again and compared.
        on_progress: Called now and then with (items done, items in all, audio seconds so far).

    Raises:
        InputError: No audio found, bad settings.
        AudioFileError: An input is missing; with `strict`, a file can't be read.
        TokenFileError: `store` exists, can't be written, or was begun by another codec.
    """
    started = time.monotonic()
    settings = EncodeSettings(
        n_quantizers=n_quantizers,
        batch_seconds=batch_seconds,
        num_threads=num_threads,
        channels=channels,
        loudness_lufs=loudness_lufs,
        check=check,
        compare=compare,
        shard_bytes=shard_bytes,
        strict=strict,
        long_seconds=LONG_SECONDS,
    ).checked(codec.spec)
    place = Place(store)
    several = workers > 1 or len(devices) > 1 or world_size > 1 or engine == "ray"
    _check_processes(place, store, settings, several, workers, rank, world_size, engine)
    items = find_items(inputs, manifests=manifests, recursive=recursive, glob=glob, meta=meta)
    _check_free(place, store, resume=resume, force=force, world_size=world_size)
    try:
        examined = examine(place, items, codec.spec, settings, corpus_hash(item.key for item in items))
        parts = make_plan(items, examined, place.name, codec.spec, settings)
        mine = [part for part in parts if part.number % world_size == rank]
        report = EncodeReport(
            num_skipped=int(examined.elsewhere.sum()) if rank == 0 else 0,
            num_changed=len(examined.changed),
            num_updated=len(examined.updated),
            num_removed=len(examined.removed),
            removed=examined.removed[:MAX_LISTED],
            held=examined.held,
        )
        total = sum(part.num_items for part in mine) + report.num_skipped
        tally = _Tally(report.num_skipped, total, on_progress)
        results = _run(codec, mine, place, settings, tally, workers, devices, engine, address)
        for result in results:
            _add(report, result)
        _finish_report(report, results, place, len(items), total)
    finally:
        place.clean_up()
    report.elapsed_seconds = time.monotonic() - started
    return report


def _check_processes(
    place: Place,
    store: PathLike,
    settings: EncodeSettings,
    several: bool,
    workers: int,
    rank: int,
    world_size: int,
    engine: str,
) -> None:
    if workers < 1 or world_size < 1 or not 0 <= rank < world_size:
        raise InputError(
            f"workers is {workers}, rank {rank} of world_size {world_size}; there must be at least one process, "
            "and ranks count from 0"
        )
    if engine not in ("local", "ray"):
        raise InputError(f"engine is {engine!r}; it must be 'local' or 'ray'")
    if place.name is not None and (several or settings.shard_bytes):
        raise InputError(
            f"{os.fspath(store)}: one token file is written by one process; for several processes, or shards of a "
            "certain size, give a folder: a name without .ctok (`codec merge` makes one file of it)"
        )


def _check_free(place: Place, store: PathLike, *, resume: bool, force: bool, world_size: int) -> None:
    present = place.shards()
    if not present:
        return
    if force:
        if world_size > 1:
            raise InputError(f"{os.fspath(store)}: exists, and other ranks may be writing it; remove it yourself first")
        for shard, _ in present:
            place.remove(shard)
    elif not resume:
        raise InputError(
            f"{os.fspath(store)}: exists; give another path, or resume=True to add to it, or force=True to replace it"
        )


class _Tally:
    """Sums what several processes have done so far."""

    def __init__(self, skipped: int, total: int, on_progress: Progress | None) -> None:
        self._skipped, self._total, self._on_progress = skipped, total, on_progress
        self._parts: dict[int, tuple[int, float]] = {}

    def __call__(self, part: int, done: int, audio_seconds: float) -> None:
        self._parts[part] = done, audio_seconds
        if self._on_progress is not None:
            counts, seconds = zip(*self._parts.values(), strict=True)
            self._on_progress(self._skipped + sum(counts), self._total, sum(seconds))


def _run(
    codec: Codec,
    parts: list[Part],
    place: Place,
    settings: EncodeSettings,
    tally: _Tally,
    workers: int,
    devices: Sequence[str],
    engine: str,
    address: str | None,
) -> list[PartResult]:
    unfinished = [shard for shard, finished in place.shards() if not finished]
    todo = [part for part in parts if not part.is_done or any(map(part.owns, unfinished))]
    done = [PartResult(num_skipped=part.num_items) for part in parts if part not in todo]
    for number, result in enumerate(done):
        tally(-1 - number, result.num_skipped, 0.0)
    if engine == "ray" and todo:
        from codec.encode.ray import run_parts as run_on_ray

        return done + run_on_ray(codec, todo, place, settings, tally, address)
    if (workers > 1 or len(devices) > 1) and todo:
        from codec.encode.processes import run_parts as run_in_processes

        return done + run_in_processes(codec, todo, place, settings, tally, workers, devices)
    return done + [encode_part(codec, part, place, settings, tally) for part in todo]


def encode_part(
    codec: Codec, part: Part, place: Place, settings: EncodeSettings, tell: Callable[[int, int, float], None]
) -> PartResult:
    """Encodes one part in this process.

    Args:
        codec: The codec.
        part: The items.
        place: The store.
        settings: How.
        tell: Called now and then with (part number, items done, audio seconds).
    """
    sink = Sink(place, part.shard_name, codec.spec, settings)
    try:
        if place.name is not None or part.is_done:
            sink.hold()
    except TokenFileError as error:
        if not (part.is_done and is_held(error)):
            raise
        return PartResult(num_skipped=part.num_items)  # nothing to do here: whoever holds the shard finishes it

    def progress(result: PartResult, seconds: float) -> None:
        tell(part.number, result.num_done, result.audio_seconds + seconds)

    return Pipeline(codec, settings, sink, progress).run(part.units)


def _add(report: EncodeReport, result: PartResult) -> None:
    report.num_items += result.num_items
    report.num_skipped += result.num_skipped
    report.audio_seconds += result.audio_seconds
    report.source_bytes += result.source_bytes
    report.failures += result.failures
    report.warnings += result.warnings
    for stage, seconds in result.stage_seconds.items():
        report.stage_seconds[stage] = report.stage_seconds.get(stage, 0.0) + seconds


def _finish_report(report: EncodeReport, results: list[PartResult], place: Place, num_items: int, total: int) -> None:
    if total and len(report.failures) == num_items:
        first = report.failures[0]
        raise InputError(f"none of the {num_items} files could be encoded; the first error: {first['error']}")
    report.failures.sort(key=lambda failure: failure["key"])
    report.warnings.sort(key=lambda warning: warning["key"])
    report.bottleneck = bottleneck(report.stage_seconds)
    report.check = summary([check for result in results for check in result.checks])
    report.store_bytes = place.num_bytes()


def bottleneck(seconds: dict[str, float]) -> str:
    """The stage that the others waited for."""
    if not any(seconds.values()):
        return ""
    waits = {
        "audio": seconds["waiting for audio"],
        "encoding": seconds["encoding"],
        "writing": seconds["waiting for the disk"],
    }
    longest = max(waits, key=lambda stage: waits[stage])
    if longest != "audio":
        return longest
    computing = seconds["decode threads' cpu"] >= 0.5 * seconds["decode threads"]
    return "decoding" if computing else "reading"


def write_failures(failures: Sequence[dict[str, str]], path: Path) -> None:
    """One JSON object per line; no file where nothing failed."""
    path.unlink(missing_ok=True)
    if failures:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json_lines(failures), encoding="utf-8")


def json_lines(rows: Sequence[dict[str, str]]) -> str:
    """Rows as JSON, one per line."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def name_of_errors(store: PathLike, rank: int = 0, world_size: int = 1) -> tuple[Place, str]:
    """Where a store's errors.jsonl goes: inside a folder, beside a file; ranks have one each."""
    place = Place(store)
    ending = f"errors-{rank:05d}.jsonl" if world_size > 1 else "errors.jsonl"
    return place, ending if place.name is None else f"{place.name}.{ending}"
