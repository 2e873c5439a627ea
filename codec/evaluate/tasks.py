"""One clip through one coder, measured; and many of them in processes that may die without harm."""

from __future__ import annotations

import base64
import multiprocessing
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import read_audio
from codec.errors import CodecError, InputError
from codec.evaluate.align import Delay, align, find_delay, match_channels, match_level
from codec.evaluate.coders import ORIGINAL, Coder
from codec.evaluate.metrics import Clip, measure
from codec.evaluate.training import pooled_features

PROBES = 5
"""Clips from which a coder's delay is found."""


@dataclass(frozen=True)
class Source:
    """A clip: the first seconds of a file.

    Attributes:
        key: Its name, unique.
        path: The file.
        text: The words that are spoken, if they are known.
    """

    key: str
    path: str
    text: str | None = None

    @property
    def identity(self) -> str:
        """Key, size and time of change: another file under the same name is another clip."""
        status = os.stat(self.path)
        return f"{self.key}:{status.st_size}:{status.st_mtime_ns}"


@dataclass(frozen=True)
class Settings:
    """How clips are measured.

    Attributes:
        sample_rate: Hz at which originals and copies are compared.
        metrics: Names.
        max_seconds: Of each file, from its start.
        level: "kept", or "matched": the copy is brought to the original's RMS.
    """

    sample_rate: int
    metrics: tuple[str, ...]
    max_seconds: float
    level: Literal["kept", "matched"]


@dataclass
class Measured:
    """What came of one clip and one coder.

    Attributes:
        rows: One per condition.
        codes: Packed codes of all codebooks; see `unpack_codes`.
        features: Of each condition, packed features for a classifier; see `unpack_features`.
        failure: Why there are no rows.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    codes: str | None = None
    features: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


def read_clip(source: Source, settings: Settings) -> Tensor:
    """The clip's wave `[C, N]` at the settings' rate; channels beyond two are mixed to one."""
    num_samples = round(settings.max_seconds * settings.sample_rate)
    try:
        wave, _ = read_audio(source.path, num_samples=num_samples, sample_rate=settings.sample_rate)
    except InputError:  # the file is shorter
        wave, _ = read_audio(source.path, sample_rate=settings.sample_rate)
        wave = wave[:, :num_samples]
    return wave if wave.shape[0] <= 2 else wave.mean(0, keepdim=True)


def probe(coder: Coder, sources: Sequence[Source], settings: Settings) -> Delay:
    """The coder's constant delay, from some clips that can be read and coded."""
    pairs = []
    for source in sources:
        try:
            wave = read_clip(source, settings)
            pairs.append((wave, list(coder.code(wave, settings.sample_rate, source.key))[-1].wave))
        except CodecError:
            continue
        if len(pairs) == PROBES:
            break
    return find_delay(pairs, settings.sample_rate)


def run_task(coder: Coder, source: Source, settings: Settings, delay: Delay) -> Measured:
    """Codes and measures one clip; what goes wrong with it is recorded."""
    result = Measured()
    try:
        wave = read_clip(source, settings)
        for coded in coder.code(wave, settings.sample_rate, source.key):
            row, copy = _row(coded, wave, source, settings, delay)
            result.rows.append(row)
            result.features[coded.condition.label] = pack_features(pooled_features(copy, settings.sample_rate))
            if coded.codes is not None:
                result.codes = pack_codes(coded.codes)
    except CodecError as error:
        return Measured(failure=str(error))
    except Exception as error:  # a codec that breaks on one clip
        return Measured(failure=f"{type(error).__name__}: {error}")
    return result


def _row(coded: Any, wave: Tensor, source: Source, settings: Settings, delay: Delay) -> tuple[dict[str, Any], Tensor]:
    original, copy = match_channels(wave, coded.wave)
    copy = align(original, copy, delay.samples)
    if not bool(torch.isfinite(copy).all()):
        raise InputError(f"{source.key}: {coded.condition.label} decodes to NaN or infinity")
    level_db = None
    if settings.level == "matched":
        copy, level_db = match_level(original, copy)
    seconds = wave.shape[1] / settings.sample_rate

    def per_second(bits: int | None) -> float | None:
        return None if bits is None else bits * 8 / seconds

    def speed(spent: float | None) -> float | None:
        return None if not spent else seconds / spent

    row = {
        "key": source.key,
        "condition": coded.condition.label,
        "codec": coded.condition.codec,
        "n_quantizers": coded.condition.n_quantizers,
        "seconds": seconds,
        "channels": original.shape[0],
        "stored_bytes": coded.stored_bytes,
        "bitrate_bps": per_second(coded.stored_bytes),
        "file_bitrate_bps": per_second(coded.file_bytes),
        "encode_speed": speed(coded.encode_seconds),
        "decode_speed": speed(coded.decode_seconds),
        "level_db": level_db,
    }
    clip = Clip(original, copy, settings.sample_rate, source.text)
    values, reasons = measure(clip, settings.metrics, is_original=coded.condition.label == ORIGINAL)
    row |= {name: values.get(name) for name in settings.metrics}
    row["undefined"] = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return row, copy


def pack_codes(codes: NDArray[np.int64]) -> str:
    """`[K, T]` as text."""
    return f"{codes.shape[0]}:{base64.b64encode(zlib.compress(codes.astype('<u2').tobytes())).decode()}"


def unpack_codes(text: str) -> NDArray[np.int64]:
    """The inverse of `pack_codes`."""
    count, _, data = text.partition(":")
    flat = np.frombuffer(zlib.decompress(base64.b64decode(data)), "<u2")
    return flat.reshape(int(count), -1).astype(np.int64)


def pack_features(features: NDArray[np.float32]) -> str:
    """`[excerpts, D]` as text."""
    return f"{features.shape[1]}:{base64.b64encode(features.astype('<f2').tobytes()).decode()}"


def unpack_features(text: str) -> NDArray[np.float32]:
    """The inverse of `pack_features`."""
    count, _, data = text.partition(":")
    return np.frombuffer(base64.b64decode(data), "<f2").reshape(-1, int(count)).astype(np.float32)


# What worker processes were given at their start.
_given: tuple[Sequence[Coder], Settings] | None = None


def _begin(coders: Sequence[Coder], settings: Settings) -> None:
    global _given
    torch.set_num_threads(1)
    _given = (coders, settings)


def _probe_there(coder: int, sources: Sequence[Source]) -> Delay:
    assert _given is not None
    return probe(_given[0][coder], sources, _given[1])


def _run_there(coder: int, source: Source, delay: Delay) -> Measured:
    assert _given is not None
    return run_task(_given[0][coder], source, _given[1], delay)


class Workers:
    """Processes that measure. One that dies takes only the clip with it that kills it twice.

    Args:
        coders: What can be measured.
        settings: How.
        count: Processes; 0 measures in this one.
    """

    def __init__(self, coders: Sequence[Coder], settings: Settings, count: int) -> None:
        self._coders, self._settings, self._count = coders, settings, count
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self) -> ProcessPoolExecutor:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._count,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(self._coders, self._settings),
            )
        return self._pool

    def _stop(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def probes(self, wanted: Sequence[tuple[int, Sequence[Source]]]) -> Iterator[tuple[int, Delay]]:
        """Delays of coders, by number."""
        if self._count == 0:
            for number, sources in wanted:
                yield number, probe(self._coders[number], sources, self._settings)
            return
        futures = [(number, self._start().submit(_probe_there, number, sources)) for number, sources in wanted]
        for number, future in futures:
            try:
                yield number, future.result()
            except BrokenProcessPool:
                self._stop()
                yield number, Delay(0, "none", 0)

    def measure(
        self, tasks: Sequence[tuple[int, Source]], delays: dict[int, Delay]
    ) -> Iterator[tuple[int, Source, Measured]]:
        """Results of (coder, clip) pairs, in whatever order they come."""
        if self._count == 0:
            for number, source in tasks:
                yield number, source, run_task(self._coders[number], source, self._settings, delays[number])
            return
        rest = list(tasks)
        while rest:
            done: set[int] = set()
            try:
                for index, result in self._together(rest, delays):
                    done.add(index)
                    yield (*rest[index], result)
                return
            except BrokenProcessPool:
                self._stop()
            left = [task for index, task in enumerate(rest) if index not in done]
            # The first ones were at work when a process died: one after the other they show whose clip it was.
            suspects, rest = left[: 2 * self._count], left[2 * self._count :]
            for task in suspects:
                yield (*task, self._alone(task, delays))

    def _together(
        self, tasks: Sequence[tuple[int, Source]], delays: dict[int, Delay]
    ) -> Iterator[tuple[int, Measured]]:
        """Keeps only so many tasks in the pool that those at work when it breaks are known."""
        pool = self._start()
        waiting: dict[Future[Measured], int] = {}
        following = iter(enumerate(tasks))
        while True:
            while len(waiting) < 2 * self._count:
                index, task = next(following, (-1, None))
                if task is None:
                    break
                waiting[pool.submit(_run_there, task[0], task[1], delays[task[0]])] = index
            if not waiting:
                return
            finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                yield waiting.pop(future), future.result()

    def _alone(self, task: tuple[int, Source], delays: dict[int, Delay]) -> Measured:
        try:
            return self._start().submit(_run_there, task[0], task[1], delays[task[0]]).result()
        except BrokenProcessPool:
            self._stop()
            return Measured(failure="the process that measured this clip died (a crash in a metric's native code?)")


Progress = Callable[[int, int, float], None]


def default_workers() -> int:
    """One process per core that this one may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1
