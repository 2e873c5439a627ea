"""The stages of encoding, each in threads of its own, with bounded queues between them.

read and decode (threads) → batches (a thread) → resample, mix, encode (the caller's thread) → pack and write (a thread)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from codec import audio
from codec.audio import StreamResampler, threads
from codec.encode.check import Check, Checker, is_checked
from codec.encode.items import Item, guessed_seconds
from codec.encode.queues import Prefetched, Writer
from codec.encode.reading import Entry, ItemReader, failure, fetch, named, row_keys
from codec.encode.settings import EncodeSettings
from codec.encode.sink import Sink
from codec.errors import InputError, TokenFileError
from codec.model import Codec

READ_AHEAD = 16
"""Items, at least, that are read and decoded before their turn; as many again where they come over the network."""

READ_AHEAD_SECONDS = 300
"""Audio, roughly, up to which more items are read ahead: the threads go on while batches are encoded."""

MOST_AHEAD = 256
"""Items that are read ahead at most."""

IO_THREADS = 16
"""Files fetched at once over the network."""

POOL_BATCHES = 8
"""Audio, in multiples of `batch_seconds`, among which items of like length are looked for."""

CPU_BATCH_SECONDS = 16.0
"""Most audio per batch on a CPU, where larger ones gain nothing and their rows would differ more in length."""


_WRITTEN_AT_ONCE = 32


@dataclass
class Unit:
    """Consecutive items among which batches are made: what is encoded together doesn't depend on the run.

    Attributes:
        first: Number of the first item in the part.
        items: The items.
        stored: Samples of each item that the store has already; -1 of the others.
        rows: Rows of each of them.
    """

    first: int
    items: list[Item]
    stored: list[int]
    rows: list[int]


@dataclass
class PartResult:
    """What encoding one part did, as `EncodeReport` sums it up. Seconds are of this part's threads."""

    num_items: int = 0
    num_skipped: int = 0
    num_done: int = 0
    audio_seconds: float = 0.0
    source_bytes: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    warnings: list[dict[str, str]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("waiting for audio", "encoding", "waiting for the disk", "decode threads", "decode threads' cpu"), 0.0
        )
    )


@dataclass
class _Batch:
    """Short items of like length: of each native rate, which rows they are and their waves `[b, C, n]`."""

    entries: list[Entry]
    groups: list[tuple[int, list[int], Tensor]]
    lengths: Tensor


def _by_length(entry: Entry) -> tuple[int, int]:
    return entry.num_samples, entry.number


def compose(pool: list[Entry], max_samples: int) -> list[Entry]:
    """The entry that waits longest, and those of like length that fit into its batch; they leave the pool."""
    pool.sort(key=_by_length)
    low = high = min(range(len(pool)), key=lambda at: pool[at].number)
    rows = pool[low].num_rows
    while low and pool[high].num_samples * (rows + pool[low - 1].num_rows) <= max_samples:
        low -= 1
        rows += pool[low].num_rows
    while high + 1 < len(pool) and pool[high + 1].num_samples * (rows + pool[high + 1].num_rows) <= max_samples:
        high += 1
        rows += pool[high].num_rows
    chosen = pool[low : high + 1]
    del pool[low : high + 1]
    return chosen


def compose_all(pool: list[Entry], max_samples: int) -> Iterator[list[Entry]]:
    """All entries of the pool, which is emptied: the shortest together, then the next."""
    entries = sorted(pool, key=_by_length)
    pool.clear()
    first, rows = 0, 0
    for at, entry in enumerate(entries):
        if rows and entry.num_samples * (rows + entry.num_rows) > max_samples:
            yield entries[first:at]
            first, rows = at, 0
        rows += entry.num_rows
    if rows:
        yield entries[first:]


class Pipeline:
    """Encodes the items of one part.

    Args:
        codec: Encodes, on its device.
        settings: How.
        sink: Where the codes go.
        on_progress: Called in the caller's thread with the result so far and the seconds of a long item under way.
    """

    def __init__(
        self,
        codec: Codec,
        settings: EncodeSettings,
        sink: Sink,
        on_progress: Callable[[PartResult, float], None] = lambda result, seconds: None,
    ) -> None:
        self._codec, self._settings, self._sink = codec, settings, sink
        self._spec = codec.spec
        self._on_device = codec.device.type != "cpu"
        self._streams = codec.spec.encode_context is not None or codec.streams_encoding
        self._reader = ItemReader(codec.spec, settings, resample_here=not self._on_device, streams=self._streams)
        self._on_progress = on_progress
        self._checker = Checker(codec) if settings.check else None
        self.result = PartResult()
        self._order: dict[int, Entry] = {}
        self._next = 0
        self._unit_starts: dict[int, bool] = {}
        self._fetchers: ThreadPoolExecutor | None = None
        self._told = -1

    def run(self, units: Iterable[Unit]) -> PartResult:
        """Encodes the units; closes the sink, or abandons it on an error."""
        writer = Writer()
        self._writer = writer
        seconds = self.result.stage_seconds
        messages = Prefetched(self._messages(units), 2)
        try:
            while True:
                started = time.perf_counter()
                message = messages.take()
                seconds["waiting for audio"] += time.perf_counter() - started
                if message is None:
                    break
                started = time.perf_counter()
                self._encode(message)
                seconds["encoding"] += time.perf_counter() - started - writer.waited
                seconds["waiting for the disk"] += writer.waited
                writer.waited = 0.0
                self._tell()
            writer.put(self._sink.close)
            writer.finish()
            seconds["waiting for the disk"] += writer.waited
            self._tell()
        except BaseException:
            messages.stop()
            writer.finish(quietly=True)
            self._sink.abandon()
            raise
        finally:
            messages.stop()
            if self._fetchers is not None:
                self._fetchers.shutdown(wait=False, cancel_futures=True)
        return self.result

    def _tell(self, seconds: float = 0.0) -> None:
        if self._told != self.result.num_done or seconds:
            self._told = self.result.num_done
            self._on_progress(self.result, seconds)

    # --- reading, decoding, batching: in threads

    def _submit(self, item: Item, number: int) -> Future[Entry]:
        if "://" not in item.path or item.error is not None:
            return threads.submit("corpus", self._settings.num_threads, lambda: self._reader.read(item, number))
        if self._fetchers is None:
            self._fetchers = ThreadPoolExecutor(IO_THREADS, "codec-fetch")
        return self._fetchers.submit(self._fetch_and_read, item, number)

    def _fetch_and_read(self, item: Item, number: int) -> Entry:
        """Waits for the network here, and for a thread that decodes."""
        try:
            source = fetch(item)
        except Exception as error:
            return Entry(item, number, error=named(error, item))
        return threads.submit(
            "corpus", self._settings.num_threads, lambda: self._reader.read(item, number, source)
        ).result()

    def _entries(self, units: Iterable[Unit]) -> Iterator[tuple[bool, Entry]]:
        """All items in order: whether a unit begins, and the item decoded."""
        window: deque[tuple[bool, Future[Entry] | Entry, float]] = deque()
        ahead = max(READ_AHEAD, 4 * self._settings.num_threads)
        seconds = 0.0

        def ready() -> tuple[bool, Entry]:
            nonlocal seconds
            first, entry, length = window.popleft()
            seconds -= length
            return first, entry.result() if isinstance(entry, Future) else entry

        try:
            for unit in units:
                self._unit_starts[unit.first] = any(length >= 0 for length in unit.stored)
                for at, (item, stored, rows) in enumerate(zip(unit.items, unit.stored, unit.rows, strict=True)):
                    if stored >= 0:
                        entry = Entry(item, unit.first + at, row_keys(item.key, rows), stored, stored=True)
                        entry.long = stored > self._settings.long_seconds * self._spec.sample_rate
                        entry.long &= self._streams
                        window.append((at == 0, entry, 0.0))
                    else:
                        length = guessed_seconds(item)
                        window.append((at == 0, self._submit(item, unit.first + at), length))
                        seconds += length
                    least = 2 * ahead if "://" in item.path else ahead
                    while len(window) > least and (seconds > READ_AHEAD_SECONDS or len(window) > MOST_AHEAD):
                        yield ready()
            while window:
                yield ready()
        finally:
            for _, entry_or_future, _ in window:
                if isinstance(entry_or_future, Future):
                    entry_or_future.cancel()

    def _messages(self, units: Iterable[Unit]) -> Iterator[Entry | _Batch | list[Entry]]:
        """Failed and long items by themselves, the others in batches, those that are stored as lists."""
        rate, seconds = self._spec.sample_rate, self._settings.batch_seconds
        max_samples = int((seconds if self._on_device else min(seconds, CPU_BATCH_SECONDS)) * rate)
        max_pool, pooled = int(POOL_BATCHES * seconds * rate), 0
        pool: list[Entry] = []
        for begins, entry in self._entries(units):
            if begins or (entry.long and not entry.stored):
                yield from map(self._batch, compose_all(pool, max_samples))
                pooled = 0
            if entry.error is not None or entry.long:
                yield entry
                continue
            pool.append(entry)
            pooled += entry.num_samples * entry.num_rows
            while pooled > max_pool:
                chosen = compose(pool, max_samples)
                pooled -= sum(other.num_samples * other.num_rows for other in chosen)
                yield self._batch(chosen)
        yield from map(self._batch, compose_all(pool, max_samples))

    def _batch(self, entries: list[Entry]) -> _Batch | list[Entry]:
        if all(entry.stored for entry in entries):
            return entries
        for at, entry in enumerate(entries):
            if entry.stored:  # it was in this batch when it was stored: so it is again, for the others' sake
                again = self._reader.read(entry.item, entry.number)
                again.stored = True
                entries[at] = again if again.wave is not None else entry
        present = [entry for entry in entries if entry.wave is not None]
        by_rate: dict[int, list[int]] = {}
        for row, rate in enumerate(entry.rate for entry in present for _ in entry.keys):
            by_rate.setdefault(rate, []).append(row)
        rows = list(chain.from_iterable(entry.wave for entry in present if entry.wave is not None))
        lengths = torch.tensor([entry.num_samples for entry in present for _ in entry.keys])
        groups = []
        for rate, members in sorted(by_rate.items()):
            longest = max(rows[row].shape[1] for row in members)
            padded = torch.zeros(
                len(members), self._spec.channels, longest, pin_memory=self._on_device and torch.cuda.is_available()
            )
            for target, row in zip(padded.numpy(), members, strict=True):  # NumPy: leaves torch's threads alone
                target[:, : rows[row].shape[1]] = rows[row].numpy()
            groups.append((rate, members, padded))
        for entry in present:
            entry.wave = None
        return _Batch(entries, groups, lengths)

    # --- encoding: in the caller's thread

    def _encode(self, message: Entry | _Batch | list[Entry]) -> None:
        if isinstance(message, _Batch):
            self._encode_batch(message)
            entries = message.entries
        elif isinstance(message, list):
            entries = message
        else:
            entries = [message]
            if message.long and message.error is None and not message.stored:
                self._flush([])
                self._encode_long(message)
        self._flush(entries)

    def _device_rows(self, batch: _Batch) -> Tensor:
        """The batch's rows `[B, C, N]` at the codec's rate, on its device, gains applied."""
        device, rate = self._codec.device, self._spec.sample_rate
        present = [entry for entry in batch.entries if entry.rate]
        if len(batch.groups) == 1 and batch.groups[0][0] == rate:
            wave = batch.groups[0][2].to(device, non_blocking=True)
        else:
            wave = torch.zeros(len(batch.lengths), self._spec.channels, int(batch.lengths.max()), device=device)
            for native, members, padded in batch.groups:
                part = audio.resample(padded.to(device, non_blocking=True), native, rate)[..., : wave.shape[2]]
                wave[torch.tensor(members, device=device), :, : part.shape[2]] = part
        gains = [gain for entry in present for gain in entry.gains]
        if any(gain is not None for gain in gains):
            factors = torch.tensor([1.0 if gain is None else gain for gain in gains], device=device)
            wave = wave * factors[:, None, None]
        return wave

    def _encode_batch(self, batch: _Batch) -> None:
        wave = self._device_rows(batch)
        present = [entry for entry in batch.entries if entry.rate]
        codes: list[Any] = self._encoded(wave, batch.lengths)
        at = 0
        for entry in present:
            rows, at = slice(at, at + entry.num_rows), at + entry.num_rows
            found = codes[rows]
            error = next((part for part in found if isinstance(part, Exception)), None)
            if error is not None:
                entry.error = named(error, entry.item)
                continue
            entry.codes = found
            if entry.stored:
                entry.codes = []
                continue
            for row, key in enumerate(entry.keys):
                self._check(entry, key, wave[rows][row, :, : entry.num_samples], found[row])

    def _encoded(self, wave: Tensor, lengths: Tensor) -> list[Any]:
        """Of each row its codes `[K, T]`, or the exception that it raises by itself."""
        num_rows = wave.shape[0]
        try:
            encoded = self._codec.encode(
                wave[..., : int(lengths.max())], lengths, n_quantizers=self._settings.n_quantizers
            )
            codes = encoded.codes.cpu().numpy()
            return [row[:, :frames] for row, frames in zip(codes, encoded.lengths.tolist(), strict=True)]
        except torch.OutOfMemoryError as error:
            if num_rows == 1:
                seconds = int(lengths[0]) / self._spec.sample_rate
                limit = f"the device has no memory for {seconds:.0f} s at once"
                return [
                    InputError(f"{limit} ({str(error).splitlines()[0]}); lower --batch-seconds, or use --device cpu")
                ]
            torch.cuda.empty_cache()
        except Exception as error:  # whatever one row makes of it isn't the others' failure
            if num_rows == 1:
                return [error]
        half = (num_rows + 1) // 2
        return self._encoded(wave[:half], lengths[:half]) + self._encoded(wave[half:], lengths[half:])

    def _check(self, entry: Entry, key: str, wave: Tensor, codes: Any) -> None:
        if self._checker is None or not (is_checked(key, self._settings.check) or not self.result.checks):
            return
        check = self._checker(key, wave, torch.as_tensor(codes), entry.source_rate, entry.warnings)
        self.result.checks.append(check)

    def _encode_long(self, entry: Entry) -> None:
        """In pieces with context: equal to encoding it whole, in memory that doesn't depend on its length."""
        writer, sink = self._writer, self._sink
        for row, key in enumerate(entry.keys):
            if entry.num_rows > 1 and writer.ask(lambda key=key: sink.has(key)):  # type: ignore[misc]
                continue
            begun = False
            try:
                gain = self._reader.long_gain(entry, row)
                writer.ask(lambda row=row, gain=gain: sink.begin(entry, row, gain))  # type: ignore[misc]
                begun = True
                self._encode_pieces(entry, row, gain)
                writer.ask(lambda: sink.end(entry.num_samples))
            except TokenFileError:
                raise
            except Exception as error:
                if begun:
                    writer.ask(sink.cancel)
                entry.error = named(error, entry.item)
                return
        self._written(entry, entry.num_rows)

    def _encode_pieces(self, entry: Entry, row: int, gain: float | None) -> None:
        device, rate = self._codec.device, self._spec.sample_rate
        stream = self._codec.stream_encoder(n_quantizers=self._settings.n_quantizers)
        resampler: StreamResampler | None = None
        wave = torch.zeros(0)
        pieces = Prefetched(self._reader.pieces(entry, row), 2)
        seconds, done = 0.0, 0
        waited = self.result.stage_seconds
        try:
            while True:
                started = time.perf_counter()
                taken = pieces.take()
                waited["waiting for audio"] += (pause := time.perf_counter() - started)
                waited["encoding"] -= pause
                last = taken is None
                if taken is None:
                    if resampler is None:
                        break
                    wave = resampler.push(wave[..., :0], last=True)
                else:
                    wave, native = taken
                    if resampler is None:
                        resampler = StreamResampler(native, rate)
                    wave = resampler.push(wave.to(device))
                if gain is not None:
                    wave = wave * gain
                if wave.shape[-1]:
                    codes = stream.push(wave)[0].cpu().numpy()
                    if not done:
                        if codes.shape[1]:
                            self._check(entry, entry.keys[row], wave[0], codes)
                        done = 1
                    self._writer.put(lambda codes=codes: self._sink.append(codes))  # type: ignore[misc]
                    seconds += wave.shape[-1] / rate
                    self._tell(seconds)
                if last:
                    break
            codes = stream.flush()[0].cpu().numpy()
            self._writer.put(lambda: self._sink.append(codes))
        finally:
            pieces.stop()

    # --- writing: in order

    def _flush(self, entries: list[Entry]) -> None:
        """Takes what is done with, and hands on what is next in order."""
        for entry in entries:
            self._order[entry.number] = entry
        ready: list[Entry] = []
        while self._next in self._order:
            entry = self._order.pop(self._next)
            if self._next in self._unit_starts:
                ready = self._put(ready)
                begun = self._unit_starts.pop(self._next)
                self._writer.put(lambda begun=begun: self._sink.begin_unit(begun=begun))  # type: ignore[misc]
            self._next += 1
            if entry.error is not None and self._settings.strict:
                ready = self._put(ready)  # what comes before it is kept
            if self._is_to_write(entry):
                ready.append(entry)
            if len(ready) >= _WRITTEN_AT_ONCE:
                ready = self._put(ready)
        self._put(ready)

    def _put(self, entries: list[Entry]) -> list[Entry]:
        """Has entries written; none are left."""
        if entries:
            self._writer.put(lambda: self._write(entries))
        return []

    def _is_to_write(self, entry: Entry) -> bool:
        result = self.result
        result.stage_seconds["decode threads"] += entry.wall_seconds
        result.stage_seconds["decode threads' cpu"] += entry.cpu_seconds
        if entry.stored:
            result.num_skipped += 1
            result.num_done += 1
        elif entry.error is not None:
            self._fail(entry)
            if self._settings.strict:
                raise entry.error
        return not entry.stored and entry.error is None and not entry.finished

    def _fail(self, entry: Entry) -> None:
        assert entry.error is not None
        self.result.failures.append(failure(entry.item, entry.error))
        self.result.num_done += 1

    def _write(self, entries: list[Entry]) -> None:
        """In the writer's thread."""
        self._sink.announce(entries)
        for entry in entries:
            try:
                self._written(entry, self._sink.add(entry))
            except InputError as error:
                entry.error = named(error, entry.item)
                self._fail(entry)
                if self._settings.strict:
                    raise entry.error from error
            entry.codes = []

    def _written(self, entry: Entry, num_rows: int) -> None:
        result = self.result
        result.num_items += num_rows
        result.num_done += 1
        result.audio_seconds += num_rows * entry.num_samples / self._spec.sample_rate
        result.source_bytes += max(0, entry.item.num_bytes)
        for text in entry.warnings:
            result.warnings.append({"key": entry.item.key, "path": entry.item.path, "warning": text})
        entry.finished = True
