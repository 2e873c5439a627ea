"""Item → wave: fetched, decoded, measured, mixed; long ones in pieces."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from codec import audio
from codec.audio import AudioSource
from codec.encode.archives import FETCHED_WHOLE, NamedBytes, open_member
from codec.encode.items import Item, remote_system
from codec.encode.measures import Levels, LoudnessMeter
from codec.encode.settings import EncodeSettings
from codec.errors import AudioFileError, CodecError, InputError
from codec.frames import resampled_length, seconds_to_samples
from codec.spec import CodecSpec

STOP_SLACK_SECONDS = Fraction(1, 20)
"""How far a manifest's rounded `stop` may lie beyond the file's end."""

FALLBACK_REMEDY = "check that the file plays; if it does, report this"


@dataclass(slots=True)
class Entry:
    """An item on its way through the pipeline.

    Attributes:
        item: What it is.
        number: Its place among the part's items.
        keys: Keys of its rows: one, or one per channel with `channels="split"`.
        num_samples: Samples of each row at the codec's rate.
        rate: Hz of `wave`.
        wave: `[rows, C, n]`; None for a long item, one that is stored already, or one that failed.
        gains: What each row is multiplied by before encoding; None leaves it alone.
        long: Whether it is encoded in pieces.
        stored: Whether the store has all of its rows.
        excerpt: (start, samples) at the codec's rate; None for the whole file.
        source_rate: Hz of the file.
        source_channels: Channels of the file.
        digest: Hash of the file's content, where that is compared.
        warnings: What a listener should know.
        error: Why it can't be encoded.
        codes: int64 `[K, T]` of each row, once they are there.
        finished: Whether nothing more happens to it.
        cpu_seconds: Time its thread computed.
        wall_seconds: Time its thread took.
    """

    item: Item
    number: int
    keys: list[str] = field(default_factory=list)
    num_samples: int = 0
    rate: int = 0
    wave: Tensor | None = None
    gains: list[float | None] = field(default_factory=list)
    long: bool = False
    stored: bool = False
    excerpt: tuple[int, int] | None = None
    source_rate: int = 0
    source_channels: int = 0
    digest: str | None = None
    warnings: list[str] = field(default_factory=list)
    error: CodecError | None = None
    codes: list[Any] = field(default_factory=list)
    finished: bool = False
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def num_rows(self) -> int:
        """Rows, that is items of the store."""
        return len(self.keys)


def row_keys(key: str, num_rows: int) -> list[str]:
    """Keys of an item's rows: its own, or one per channel."""
    return [key] if num_rows == 1 else [f"{key}#{row}" for row in range(num_rows)]


def fetch(item: Item) -> AudioSource:
    """The item's audio as `codec.audio` takes it: small remote files and members of archives as their bytes."""
    if item.member is not None:
        return open_member(item)
    if "://" in item.path and 0 < item.num_bytes <= FETCHED_WHOLE:
        system, name = remote_system(item.path)
        return NamedBytes(system.cat_file(name), item.path)
    return item.path


def content_digest(item: Item) -> str:
    """A hash of the file's or member's bytes."""
    digest = hashlib.blake2b(digest_size=8)
    if item.member is not None:
        with open_member(item) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    elif "://" in item.path:
        system, name = remote_system(item.path)
        with system.open(name, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    else:
        with open(item.path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


class ItemReader:
    """Reads items for one codec. Threads may share it.

    Args:
        spec: The codec.
        settings: How items become codes.
        resample_here: Resample to the codec's rate; otherwise short items come at their own, for the device to do.
        streams: Whether the codec encodes in pieces what is long; otherwise all is read whole.
    """

    def __init__(self, spec: CodecSpec, settings: EncodeSettings, *, resample_here: bool, streams: bool) -> None:
        self._spec, self._settings = spec, settings
        self._resample_here, self._streams = resample_here, streams

    def read(self, item: Item, number: int, source: AudioSource | None = None) -> Entry:
        """The item, decoded if it is short. Whatever goes wrong is in the entry: it is that item's failure."""
        started, started_cpu = time.perf_counter(), time.thread_time()
        entry = Entry(item, number)
        try:
            if item.error is not None:
                raise AudioFileError(item.error)
            self._read(entry, fetch(item) if source is None else source)
        except Exception as error:
            entry.error, entry.wave = named(error, item), None
        entry.cpu_seconds = time.thread_time() - started_cpu
        entry.wall_seconds = time.perf_counter() - started
        return entry

    def _read(self, entry: Entry, source: AudioSource) -> None:
        item, spec, settings = entry.item, self._spec, self._settings
        if settings.compare == "content":
            entry.digest = content_digest(item)
        info = audio.audio_info(source)
        entry.source_rate, entry.source_channels = info.sample_rate, info.channels
        if item.channel is not None and not 0 <= item.channel < info.channels:
            raise InputError(f"channel {item.channel} was asked for; the file has {info.channels}, counted from 0")
        total = resampled_length(info.num_samples, info.sample_rate, spec.sample_rate)
        entry.num_samples = self._place(entry, total)
        split = settings.channels == "split" and item.channel is None
        entry.keys = row_keys(item.key, info.channels if split else 1)
        entry.gains = [None] * entry.num_rows
        # What can only be encoded whole is read whole, whatever its length.
        if self._streams and entry.num_samples > settings.long_seconds * spec.sample_rate:
            entry.long = True
            return
        if entry.excerpt is None:
            wave, rate = audio.read_audio(source)
        else:
            start, length = entry.excerpt
            wave, rate = audio.read_audio(source, start_sample=start, num_samples=length, sample_rate=spec.sample_rate)
        levels = Levels()
        levels.add(wave)
        entry.warnings += levels.warnings()
        rows = self.rows(item, wave)
        if settings.loudness_lufs is not None:
            entry.gains = [_gain(row, rate, settings.loudness_lufs) for row in rows]
        if self._resample_here and rate != spec.sample_rate:
            rows, rate = audio.resample(rows, rate, spec.sample_rate), spec.sample_rate
        entry.wave, entry.rate = rows, rate

    def _place(self, entry: Entry, total: int) -> int:
        """Samples of the item at the codec's rate; sets `entry.excerpt` if that isn't the whole file."""
        item, rate = entry.item, self._spec.sample_rate
        if item.start is None and item.stop is None:
            return total
        start = seconds_to_samples(item.start or 0, rate)
        stop = total if item.stop is None else seconds_to_samples(item.stop, rate)
        if total < stop <= total + STOP_SLACK_SECONDS * rate:
            entry.warnings.append(
                f"its stop, {float(item.stop or 0):g} s, is rounded beyond the end, {total / rate:g} s"
            )
            stop = total
        if not start < stop <= total:
            raise InputError(
                f"{item.where}: {start / rate:g} s to {stop / rate:g} s were asked for, it has {total / rate:g} s; "
                "correct the manifest"
            )
        entry.excerpt = start, stop - start
        return stop - start

    def rows(self, item: Item, wave: Tensor) -> Tensor:
        """A file's wave `[C, n]` as the rows `[rows, C, n]` that are encoded."""
        channels = self._spec.channels
        if item.channel is not None:
            wave = wave[item.channel : item.channel + 1]
        elif self._settings.channels == "split":
            return wave[:, None]
        if wave.shape[0] != channels:
            if wave.shape[0] > 1:
                wave = wave.mean(dim=0, keepdim=True)
            wave = wave.expand(channels, -1)
        return wave[None]

    def pieces(self, entry: Entry, row: int) -> Iterator[tuple[Tensor, int]]:
        """A long item's row piece by piece: (`[1, C, n]`, Hz)."""
        item, rate = entry.item, entry.source_rate if entry.excerpt is None else self._spec.sample_rate
        size = max(1, round(self._settings.long_seconds * rate))
        if entry.excerpt is None:
            waves = audio.stream_audio(fetch(item), piece_samples=size)
        else:
            start, length = entry.excerpt
            waves = audio.stream_audio(
                fetch(item), start_sample=start, num_samples=length, sample_rate=rate, piece_samples=size
            )
        for wave in waves:
            rows = self.rows(item, wave)
            yield (rows[row : row + 1] if entry.num_rows > 1 else rows), rate

    def long_gain(self, entry: Entry, row: int) -> float | None:
        """The gain of a long item's row: reads it once more."""
        if self._settings.loudness_lufs is None:
            return None
        meter: LoudnessMeter | None = None
        for wave, rate in self.pieces(entry, row):
            meter = meter or LoudnessMeter(rate)
            meter.push(wave[0].mean(0))
        return None if meter is None else meter.gain(self._settings.loudness_lufs)


def _gain(row: Tensor, rate: int, target_lufs: float) -> float | None:
    meter = LoudnessMeter(rate)
    meter.push(row.mean(0))
    return meter.gain(target_lufs)


def named(error: Exception, item: Item) -> CodecError:
    """Any error as one of ours that names the item."""
    text = str(error) if isinstance(error, CodecError) else f"{error!r}; {FALLBACK_REMEDY}"
    if item.where not in text and item.path not in text:
        text = f"{item.where}: {text}"
    return type(error)(text) if isinstance(error, CodecError) else AudioFileError(text)


def failure(item: Item, error: CodecError) -> dict[str, str]:
    """An entry of errors.jsonl."""
    text = str(error)
    _, _, remedy = text.rpartition("; ")
    return {"key": item.key, "path": item.path, "error": text, "remedy": remedy if remedy != text else FALLBACK_REMEDY}


def item_meta(entry: Entry, row: int, spec: CodecSpec) -> dict[str, Any] | None:
    """What the store says of a row: the item's own metadata, and the file's rate and channels where they differ."""
    meta = dict(entry.item.meta or {})
    if entry.source_rate != spec.sample_rate or "sample_rate" in meta:
        meta["sample_rate"] = entry.source_rate
    if entry.num_rows > 1:
        meta["channel"] = row
    elif entry.item.channel is not None:
        meta["channel"] = entry.item.channel
    if entry.source_channels != spec.channels:
        meta["channels"] = entry.source_channels
    return meta or None
