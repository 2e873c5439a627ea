"""Many excerpts at once: decoded by several threads, now or in the background."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codec.audio import threads
from codec.audio.containers import decoded_from_start
from codec.audio.opening import AudioSource, Source
from codec.audio.reading import check_arguments, read_audio, read_excerpts
from codec.errors import CodecError, InputError

AudioExcerpt = tuple[AudioSource, int, int | None]

_LAYOUTS = ("padded", "jagged", "list")
# Files being fetched at once where some come over the network.
_IO_THREADS = 16
# Batches in the background, decoding or waiting to; more would only wait with their memory allocated.
_MAX_PENDING = 8
_pending = threading.BoundedSemaphore(_MAX_PENDING)


def _forget_pending() -> None:
    global _pending
    _pending = threading.BoundedSemaphore(_MAX_PENDING)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pending)


@dataclass(frozen=True)
class AudioBatch:
    """Excerpts that were read together.

    Attributes:
        wave: By layout. "padded": `[B, C, N]`, zeros behind each row's end. "jagged": a nested tensor
            `[B, C, n]` of torch's jagged layout. "list": B waves `[C, n]`.
        lengths: int64 `[B]`, samples of each row; 0 where it failed.
        sample_rates: int64 `[B]`, Hz of each row; 0 where it failed.
        errors: What went wrong, by row. Empty with `errors="raise"`.
    """

    wave: Tensor | list[Tensor]
    lengths: Tensor
    sample_rates: Tensor
    errors: dict[int, CodecError]


def read_audio_batch(
    excerpts: Iterable[AudioExcerpt],
    *,
    num_threads: int | None = None,
    io_threads: int | None = None,
    layout: str = "padded",
    out: Tensor | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
    dtype: torch.dtype = torch.float32,
    allow_truncated: bool = False,
    errors: str = "raise",
) -> AudioBatch:
    """Reads excerpts of audio files with several threads; each row equals `read_audio` of it, bit by bit.

    The threads are this module's own: they neither use torch's (OpenMP's) threads nor depend on their number.
    Several excerpts of one file that can only be decoded from its beginning (opus, m4a) are cut from one decode.

    Args:
        excerpts: (path or other source, start_sample, num_samples) of each row; num_samples None reads to the
            end. Positions count samples of the result, at `sample_rate` if it is given.
        num_threads: Threads that decode; `default_threads()` if None: the cores this process may use, divided
            by the DataLoader's workers and the node's ranks.
        io_threads: Sources open at once while URLs are fetched: a row that waits for the network leaves its
            place among the decoding ones to another. At least `num_threads`; 16 if None. Without URLs it has
            no effect: local files are read by the threads that decode them.
        layout: "padded", "jagged" or "list".
        out: `[B, C, N]`, contiguous, of `dtype`, on the CPU (pinned or shared, say), to be filled and
            returned in the layout "padded".
        sample_rate: Hz of the result; each file's own if None.
        mono: Average the channels.
        dtype: float32, float16, bfloat16 or int16.
        allow_truncated: Return what is there of a file that ends early.
        errors: "raise" raises the error of the first row that fails; "return" puts errors into the batch, with
            empty rows in their places.

    Returns:
        The batch.

    Raises:
        AudioFileError: As `read_audio`.
        InputError: A bad argument, a range beyond a file's end, rows of different channels (but in a list),
            `out` too small.
    """
    job = _Job(excerpts, num_threads, io_threads, layout, out, sample_rate, mono, dtype, allow_truncated, errors)
    if threads.in_pool():
        job.run()
    else:
        job.start()
    return job.future.result()


def submit_audio_batch(excerpts: Iterable[AudioExcerpt], **options: Any) -> Future[AudioBatch]:
    """`read_audio_batch` in the background: same arguments, and the batch as a future.

    At most 8 batches are under way in a process: the call waits for one of them to be ready before it takes
    another. Ready batches belong to whoever holds their futures. Futures may be cancelled until their first
    row is begun. Nothing is started in the caller's thread, so it may hold locks or run an event loop.

    Raises:
        InputError: A bad argument. Errors of files are raised by the future's `result()`.
    """
    settings = {**_DEFAULTS, **options}
    if unknown := set(options) - set(_DEFAULTS):
        raise InputError(f"unknown options {', '.join(sorted(unknown))}; there are {', '.join(_DEFAULTS)}")
    job = _Job(excerpts, **settings)
    pending = _pending
    # A callback of a batch, in a thread that decodes them, mustn't wait for batches.
    if pending.acquire(blocking=not threads.in_pool()):
        job.future.add_done_callback(lambda _: pending.release())
    job.start()
    return job.future


_DEFAULTS: dict[str, Any] = {
    "num_threads": None,
    "io_threads": None,
    "layout": "padded",
    "out": None,
    "sample_rate": None,
    "mono": False,
    "dtype": torch.float32,
    "allow_truncated": False,
    "errors": "raise",
}


@dataclass
class _Rows:
    """What has been read so far."""

    waves: list[Tensor | None]
    sample_rates: Tensor
    errors: dict[int, CodecError] = field(default_factory=dict)
    crash: BaseException | None = None


class _SameFile:
    """Rows of one file, which are read together if it is decoded from its beginning."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._lock = threading.Lock()
        self._together: bool | None = None

    def add(self, row: int) -> None:
        """One more row."""
        self._rows.append(row)

    def claim(self, source: AudioSource, row: int) -> list[int]:
        """The rows to be read by the thread that took this one; none if another thread reads them all."""
        if len(self._rows) == 1:
            return [row]
        # Whoever has the lock may wait for the network, and for this thread's permit after that.
        with threads.waiting():
            self._lock.acquire()
        try:
            if self._together is None:
                self._together = _decoded_from_start(source)
            if not self._together:
                return [row]
            rows, self._rows = self._rows, []
            return rows
        finally:
            self._lock.release()


def _decoded_from_start(path: AudioSource) -> bool:
    try:
        with Source(path) as source:
            return decoded_from_start(source)
    except CodecError:
        # Which each row's own reading reports.
        return False


class _Job:
    """One batch: threads take its rows in turn, and the last one to finish puts it together."""

    def __init__(
        self,
        excerpts: Iterable[AudioExcerpt],
        num_threads: int | None,
        io_threads: int | None,
        layout: str,
        out: Tensor | None,
        sample_rate: int | None,
        mono: bool,
        dtype: torch.dtype,
        allow_truncated: bool,
        errors: str,
    ) -> None:
        self._excerpts = _checked_excerpts(excerpts)
        check_arguments(0, None, sample_rate, dtype)
        if layout not in _LAYOUTS:
            raise InputError(f"layout is {layout!r}; it must be one of {', '.join(_LAYOUTS)}")
        if errors not in ("raise", "return"):
            raise InputError(f"errors is {errors!r}; it must be raise or return")
        if out is not None:
            _check_out(out, len(self._excerpts), layout, dtype)
        self._layout, self._out, self._raise = layout, out, errors == "raise"
        self._channels = None if out is None else out.shape[1]
        self._options: dict[str, Any] = {
            "sample_rate": sample_rate,
            "mono": mono,
            "dtype": dtype,
        }
        self._allow_truncated = allow_truncated
        decoding = threads.checked_threads("num_threads", num_threads) if num_threads else threads.default_threads()
        fetching = threads.checked_threads("io_threads", io_threads) if io_threads else _IO_THREADS
        self._kind, self._num_threads, self._permits = "decode", decoding, None
        if any(isinstance(source, str) and "://" in source for source, _, _ in self._excerpts) and fetching > decoding:
            self._kind, self._num_threads, self._permits = "fetch", fetching, threading.Semaphore(decoding)
        self._files: dict[str, _SameFile] = {}
        if not allow_truncated:
            for row, (source, _, _) in enumerate(self._excerpts):
                if isinstance(source, str | os.PathLike):
                    self._files.setdefault(os.fspath(source), _SameFile()).add(row)
        num_rows = len(self._excerpts)
        with torch.inference_mode(False):  # the pool's threads, which are outside of a caller's, write to it
            self._rows = _Rows([None] * num_rows, torch.zeros(num_rows, dtype=torch.int64))
        self._lock = threading.Lock()
        self._next = 0
        self._running = min(self._num_threads, num_rows)
        self._begun = False
        self._stop = False
        self.future: Future[AudioBatch] = Future()

    def start(self) -> None:
        """Has the pool's threads read the rows."""
        for _ in range(self._running):
            threads.submit(self._kind, self._num_threads, self._work)

    def run(self) -> None:
        """Reads the rows in this thread."""
        self._running, self._permits = 1, None
        self._work()

    def _take(self) -> int | None:
        with self._lock:
            if not self._begun:
                self._begun = True
                self._stop = not self.future.set_running_or_notify_cancel()
            if self._stop or self._next == len(self._excerpts):
                return None
            self._next += 1
            return self._next - 1

    def _work(self) -> None:
        while (row := self._take()) is not None:
            try:
                with threads.permit(self._permits):
                    self._read(row)
            except BaseException as error:  # Whoever waits for the future must get it, whatever it is.
                self._rows.crash, self._stop = error, True
        with self._lock:
            self._running -= 1
            if self._running or self.future.cancelled():
                return
        try:
            if self._rows.crash is not None:
                raise self._rows.crash
            if self._raise and self._rows.errors:
                raise self._rows.errors[min(self._rows.errors)]
            batch = self._assemble()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(batch)

    def _read(self, row: int) -> None:
        """Reads the row, or all rows of its file, or none if another thread does."""
        source, start_sample, num_samples = self._excerpts[row]
        same = self._files.get(os.fspath(source)) if isinstance(source, str | os.PathLike) else None
        rows = [row] if same is None else same.claim(source, row)
        if len(rows) > 1:
            excerpts = [self._excerpts[row][1:] for row in rows]
            for number, wave, rate in read_excerpts(source, excerpts, **self._options):
                if isinstance(wave, CodecError):
                    self._fail(rows[number], wave)
                else:
                    self._put(rows[number], wave, rate)
                if self._stop:
                    return
        elif rows:
            try:
                wave, rate = read_audio(
                    source,
                    start_sample=start_sample,
                    num_samples=num_samples,
                    allow_truncated=self._allow_truncated,
                    **self._options,
                )
            except CodecError as error:
                self._fail(row, error)
            else:
                self._put(row, wave, rate)

    def _fail(self, row: int, error: CodecError) -> None:
        self._rows.errors[row] = error
        self._stop |= self._raise

    def _put(self, row: int, wave: Tensor, rate: int) -> None:
        if self._layout == "padded":
            padded = self._padded(wave)
            if padded is not None and _fits(padded, wave):
                wave = _placed(padded, row, wave)
        self._rows.waves[row] = wave
        self._rows.sample_rates[row] = rate

    def _padded(self, wave: Tensor) -> Tensor | None:
        """Where rows are placed; None as long as its size isn't known."""
        with self._lock:
            if self._out is None:
                lengths = [num_samples for _, _, num_samples in self._excerpts]
                if None in lengths:
                    return None
                longest = max(length for length in lengths if length is not None)
                self._out = wave.new_zeros(len(lengths), wave.shape[0], longest)
        return self._out

    def _name(self, row: int) -> str:
        source = self._excerpts[row][0]
        return os.fspath(source) if isinstance(source, str | os.PathLike) else type(source).__name__

    def _assemble(self) -> AudioBatch:
        waves, errors = self._rows.waves, self._rows.errors
        channels = self._channels or next((wave.shape[0] for wave in waves if wave is not None), 1)
        empty = torch.zeros(channels, 0, dtype=self._options["dtype"])
        rows = [empty if wave is None else wave for wave in waves]
        lengths = torch.tensor([row.shape[1] for row in rows])
        wave: Tensor | list[Tensor] = rows
        if self._layout != "list":
            for index, row in enumerate(rows):
                if row.shape[0] != channels:
                    raise InputError(
                        f"row {index} ({self._name(index)}) has {row.shape[0]} channels, the batch {channels}; "
                        "read them with mono=True or layout='list'"
                    )
        if self._layout == "padded":
            wave = self._assemble_padded(rows, lengths)
        elif self._layout == "jagged":
            offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
            torch.cumsum(lengths, 0, out=offsets[1:])
            wave = torch.nested.nested_tensor_from_jagged(torch.cat(rows, 1), offsets, jagged_dim=2)
        return AudioBatch(wave, lengths, self._rows.sample_rates, dict(sorted(errors.items())))

    def _assemble_padded(self, rows: list[Tensor], lengths: Tensor) -> Tensor:
        padded = self._out
        if padded is None:
            padded = rows[0].new_zeros(len(rows), rows[0].shape[0], int(lengths.max()))
        for index, row in enumerate(rows):
            if not _fits(padded, row):
                raise InputError(
                    f"row {index} ({self._name(index)}) has {row.shape[1]} samples, out ends at {padded.shape[2]}; "
                    "make it larger or give num_samples"
                )
            if row.untyped_storage().data_ptr() != padded.untyped_storage().data_ptr():
                _placed(padded, index, row)
        return padded


def _fits(padded: Tensor, wave: Tensor) -> bool:
    return wave.shape[0] == padded.shape[1] and wave.shape[1] <= padded.shape[2]


def _placed(padded: Tensor, row: int, wave: Tensor) -> Tensor:
    """The wave at its place in the batch, zeros behind it."""
    padded[row, :, : wave.shape[1]] = wave
    padded[row, :, wave.shape[1] :] = 0
    return padded[row, :, : wave.shape[1]]


def _checked_excerpts(excerpts: Iterable[AudioExcerpt]) -> list[AudioExcerpt]:
    checked = []
    for excerpt in excerpts:
        if not isinstance(excerpt, tuple | list) or len(excerpt) != 3:
            raise InputError(f"excerpt {excerpt!r} must be (path, start_sample, num_samples)")
        source, start_sample, num_samples = excerpt
        check_arguments(start_sample, num_samples, None, torch.float32)
        checked.append((source, int(start_sample), None if num_samples is None else int(num_samples)))
    if not checked:
        raise InputError("the list of excerpts is empty; give at least one (path, start_sample, num_samples)")
    return checked


def _check_out(out: Tensor, num_rows: int, layout: str, dtype: torch.dtype) -> None:
    if layout != "padded":
        raise InputError(f"out is given with layout {layout!r}; it holds the layout 'padded' only")
    if out.ndim != 3 or out.shape[0] != num_rows or out.device.type != "cpu" or not out.is_contiguous():
        raise InputError(
            f"out is {list(out.shape)} on {out.device}; it must be [{num_rows}, C, N], contiguous, on the CPU"
        )
    if out.dtype != dtype:
        raise InputError(f"out has dtype {out.dtype}, asked for is {dtype}; give dtype={out.dtype}")
