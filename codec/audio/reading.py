"""Audio file → wave: any format, any excerpt, exactly.

An excerpt is bit-equal to that slice of the whole decode, whichever decoder reads it (readers.py, BACKENDS.md).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import threads
from codec.audio.info import SALVAGE, AudioInfo, Reader
from codec.audio.opening import AudioSource, Source
from codec.audio.readers import open_reader
from codec.audio.resampling import native_span, resample
from codec.errors import AudioFileError, CodecError, InputError
from codec.frames import resampled_length

__all__ = ["AudioInfo", "audio_info", "check_arguments", "read_audio", "read_excerpts"]

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int16)
# Values for which memory is taken at a header's word; a longer wave's memory grows as the file proves it, unless
# the claim is one that a file of this size can hold.
_VALUES_ON_TRUST = 1 << 24
_VALUES_PER_BYTE = 64
# The channel that lies in the low half of both as one integer.
_LOW = 0 if sys.byteorder == "little" else 1
# Seconds of the result below which another thread would cost more than it saves.
_MIN_SEGMENT_SECONDS = 2


class Span(NamedTuple):
    """A range of the result, and the range of the file that it takes.

    Attributes:
        start: First sample of the result, at `sample_rate`.
        stop: End of the result.
        first: First sample of the file, at its own rate.
        last: End in the file.
        skip: Resampled samples of these that lie before `start`.
        sample_rate: Hz of the result.
        whole: The file's range is all of it.
    """

    start: int
    stop: int
    first: int
    last: int
    skip: int
    sample_rate: int
    whole: bool


def span_of(name: str, info: AudioInfo, start_sample: int, num_samples: int | None, sample_rate: int | None) -> Span:
    """What is to be read. Raises AudioFileError if there is nothing, InputError for a range beyond the end."""
    rate, total = info.sample_rate, info.num_samples
    to_rate = sample_rate or rate
    length = total if to_rate == rate else resampled_length(total, rate, to_rate)
    stop = length if num_samples is None else start_sample + num_samples
    if length == 0:
        raise AudioFileError(f"{name}: holds no samples; remove it")
    if start_sample >= length or stop > length:
        raise InputError(
            f"{name}: samples {start_sample} … {stop} were asked for, it has {length} at {to_rate} Hz; ask for less"
        )
    first, last, skip = start_sample, stop, 0
    if to_rate != rate:
        first, last, skip = native_span(start_sample, stop, rate, to_rate)
        last = min(last, total)
    return Span(start_sample, stop, first, last, skip, to_rate, last - first == total)


def audio_info(path: AudioSource, *, allow_truncated: bool = False) -> AudioInfo:
    """What an audio file is, and its exact length.

    Reads headers where they can be trusted. An mp3 file without a Xing header is scanned; what only FFmpeg
    reads is decoded to count its samples.

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object.
        allow_truncated: Don't raise for a file that ends early, but decode it to count what is there.

    Raises:
        AudioFileError: The file is missing, empty, cut, or no audio.
    """
    with Source(path) as source:
        reader = open_reader(source, allow_truncated)
        if not allow_truncated:
            return reader.info
        num_samples = sum(map(len, reader.blocks(0, reader.info.num_samples)))
    return replace(reader.info, num_samples=num_samples, scanned=True)


def read_audio(
    path: AudioSource,
    *,
    start_sample: int = 0,
    num_samples: int | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
    dtype: torch.dtype = torch.float32,
    allow_truncated: bool = False,
    num_threads: int = 1,
) -> tuple[Tensor, int]:
    """Reads an audio file, or an excerpt of one.

    The excerpt is that slice of reading the whole with the same options: bit-equal, and after resampling equal
    to float rounding. Positions therefore count samples of the result, at `sample_rate` if it is given.

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object. One object can't be read
            from two threads at once; everything else can.
        start_sample: First sample.
        num_samples: Samples to read; all from `start_sample` on if None.
        sample_rate: Hz of the result; the file's own if None.
        mono: Average the channels.
        dtype: float32, float16, bfloat16 or int16. Integer files come out scaled by their full scale to −1 … 1,
            or at int16 in their own values.
        allow_truncated: Return what is there, in the range asked, of a file that ends early.
        num_threads: Threads that decode segments of one long excerpt, with the same result. Pays for local wav,
            flac, mp3 and ogg/vorbis files; what is decoded from its beginning (opus, what only FFmpeg reads) is
            decoded by one.

    Returns:
        The wave `[C, N]` and its sample rate in Hz.

    Raises:
        AudioFileError: The file is missing, empty, cut, damaged, no audio, or holds NaN or infinite samples.
        InputError: A bad argument, or a range beyond the file's end.
    """
    check_arguments(start_sample, num_samples, sample_rate, dtype)
    threads.checked_threads("num_threads", num_threads)
    with Source(path) as source:
        reader = open_reader(source, allow_truncated)
        span = span_of(source.name, reader.info, start_sample, num_samples, sample_rate)
        if span.whole and not allow_truncated:
            reader.check()
        native = _native_dtype(reader.info, span, mono, dtype)
        wave = _read_segments(source, reader, span.first, span.last, native, allow_truncated, num_threads)
        return _finished(source.name, reader.info, span, wave, mono, dtype, allow_truncated), span.sample_rate


def read_excerpts(
    path: AudioSource,
    excerpts: Sequence[tuple[int, int | None]],
    *,
    sample_rate: int | None = None,
    mono: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[int, Tensor | CodecError, int]]:
    """Reads several excerpts of a file in one pass from front to back; each is `read_audio` of it, bit by bit.

    For files that are decoded from their beginning: all excerpts together cost what the last one costs.

    Args:
        path: As in `read_audio`.
        excerpts: (start_sample, num_samples) of each, as in `read_audio`; they may overlap.
        sample_rate: As in `read_audio`, like the following.
        mono: Average the channels.
        dtype: Of the waves.

    Yields:
        The number of an excerpt, its wave `[C, N]` or what is wrong with it, and Hz (0 if something is wrong);
        in the order in which the file gives them.
    """
    options: dict[str, Any] = {"sample_rate": sample_rate, "mono": mono, "dtype": dtype}
    alone = set(range(len(excerpts)))
    try:
        with Source(path) as source:
            reader = open_reader(source, False)
            for number, wave in _pass(source, reader, excerpts, sample_rate, mono, dtype):
                alone.remove(number)
                yield number, wave, sample_rate or reader.info.sample_rate
    except CodecError:
        # Which excerpts it concerns, and in which words, their own reading tells.
        pass
    for number in sorted(alone):
        start_sample, num_samples = excerpts[number]
        try:
            wave, rate = read_audio(path, start_sample=start_sample, num_samples=num_samples, **options)
        except CodecError as error:
            yield number, error, 0
        else:
            yield number, wave, rate


def _pass(
    source: Source,
    reader: Reader,
    excerpts: Sequence[tuple[int, int | None]],
    sample_rate: int | None,
    mono: bool,
    dtype: torch.dtype,
) -> Iterator[tuple[int, Tensor]]:
    """(number, wave) of the excerpts in which nothing is wrong."""
    waiting: list[tuple[Span, int]] = []
    for number, (start_sample, num_samples) in enumerate(excerpts):
        with suppress(CodecError):
            waiting.append((span_of(source.name, reader.info, start_sample, num_samples, sample_rate), number))
    if not waiting:
        return
    waiting.sort(key=lambda item: item[0].first)
    if any(span.whole for span, _ in waiting):
        reader.check()
    native = _native_dtype(reader.info, waiting[0][0], mono, dtype)
    begin, end = waiting[0][0].first, max(span.last for span, _ in waiting)
    under_way: list[tuple[Span, int, list[Tensor]]] = []
    at = begin
    for block in reader.blocks(begin, end - begin, integers=native == torch.int16):
        stop = at + len(block)
        while waiting and waiting[0][0].first < stop:
            under_way.append((*waiting.pop(0), []))
        for span, number, parts in under_way:
            part = block[max(0, span.first - at) : span.last - at]
            parts.append(torch.empty(part.shape[1], len(part), dtype=native))
            put(part, parts[-1].numpy())
            if span.last <= stop:
                with suppress(CodecError):
                    wave = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
                    yield number, _finished(source.name, reader.info, span, wave, mono, dtype, False)
        under_way = [item for item in under_way if item[0].last > stop]
        at = stop


def check_arguments(start_sample: int, num_samples: int | None, sample_rate: int | None, dtype: torch.dtype) -> None:
    """Raises InputError for positions, rates and dtypes that can't be."""
    if (
        type(start_sample) is int
        and start_sample >= 0
        and dtype in _DTYPES
        and (num_samples is None or (type(num_samples) is int and num_samples > 0))
        and (sample_rate is None or (type(sample_rate) is int and sample_rate > 0))
    ):
        return
    lowest = {"start_sample": 0, "num_samples": 1, "sample_rate": 1}
    values = {"start_sample": start_sample, "num_samples": num_samples, "sample_rate": sample_rate}
    for name, value in values.items():
        if value is None and name != "start_sample":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < lowest[name]:  # type: ignore[arg-type]
            raise InputError(f"{name} is {value!r}; it must be an integer of at least {lowest[name]}")
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}")


def _native_dtype(info: AudioInfo, span: Span, mono: bool, dtype: torch.dtype) -> torch.dtype:
    """What is decoded: float32, or int16 where the result is the file's own values."""
    own = dtype == torch.int16 and span.sample_rate == info.sample_rate and not mono
    return torch.int16 if own and not _is_float(info) else torch.float32


def _is_float(info: AudioInfo) -> bool:
    return info.codec in ("float", "double")


def _finished(
    name: str, info: AudioInfo, span: Span, wave: Tensor, mono: bool, dtype: torch.dtype, allow_truncated: bool
) -> Tensor:
    """The result `[C, stop - start]` of what was decoded for it; shorter only if the file may be."""
    if wave.shape[1] < span.last - span.first:
        report_short(name, span.first + wave.shape[1], span.last, allow_truncated)
    if _is_float(info):
        check_finite(name, wave, span.first)
    if mono and wave.shape[0] > 1:
        wave = wave.mean(dim=0, keepdim=True)
    if span.sample_rate != info.sample_rate:
        wave = resample(wave, info.sample_rate, span.sample_rate)[:, span.skip : span.skip + span.stop - span.start]
    if wave.shape[1] == 0:
        raise AudioFileError(f"{name}: ends before sample {span.start}; fetch it again")
    return _to_dtype(wave, dtype)


def report_short(name: str, found: int, expected: int, allow_truncated: bool) -> None:
    """Raises, or logs, that the audio ends before the sample that was expected last."""
    text = f"{name}: its audio ends at sample {found}, {expected} were expected"
    if not allow_truncated:
        raise AudioFileError(f"{text}; it is cut or damaged: {SALVAGE}")
    _log.warning(text)


def _to_dtype(wave: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16 and wave.dtype != torch.int16:
        return (wave * 32768).round_().clamp_(-32768, 32767).to(torch.int16)
    return wave if wave.dtype == dtype and wave.is_contiguous() else wave.to(dtype).contiguous()


def _read_segments(
    source: Source,
    reader: Reader,
    first: int,
    last: int,
    dtype: torch.dtype,
    allow_truncated: bool,
    num_threads: int,
) -> Tensor:
    """`[C, last - first]`, float32 or int16; shorter only where the file ends early."""
    if num_threads == 1:
        return _read(source, reader, first, last, dtype)
    most = (last - first) // (_MIN_SEGMENT_SECONDS * reader.info.sample_rate)
    # Where they can be long, several for each thread: one that is held up leaves its next ones to the others.
    num_segments = min(num_threads, most) if most < 8 * num_threads else 4 * num_threads
    if num_segments < 2 or source.path is None or not reader.splits() or allow_truncated:
        return _read(source, reader, first, last, dtype)
    wave = _empty(source, reader, last - first, dtype)
    if wave is None:
        return _read(source, reader, first, last, dtype)
    path = source.path

    def decode(start: int, stop: int) -> int:
        with Source(path) as own:
            return _fill(open_reader(own, False), first + start, wave[:, start:stop])

    bounds = [(last - first) * index // num_segments for index in range(num_segments + 1)]
    parts: list[Future[int]] = [
        threads.submit("segment", num_threads, lambda a=a, b=b: decode(a, b))  # type: ignore[misc]
        for a, b in pairwise(bounds)
    ]
    for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
        if (found := part.result()) < b - a:
            return torch.from_numpy(wave[:, : a + found])
    return torch.from_numpy(wave)


def _read(source: Source, reader: Reader, first: int, last: int, dtype: torch.dtype) -> Tensor:
    if (given := reader.wave(first, last - first)) is not None:
        return given if dtype == torch.float32 else _to_dtype(given, dtype)
    wave = _empty(source, reader, last - first, dtype)
    if wave is not None:
        found = _fill(reader, first, wave)
        return torch.from_numpy(wave if found == last - first else wave[:, :found])
    # What the header claims is more than such a file holds: take memory as it turns out.
    parts = []
    for block in reader.blocks(first, last - first, integers=dtype == torch.int16):
        part = torch.empty(block.shape[1], len(block), dtype=dtype)
        put(block, part.numpy())
        parts.append(part)
    return torch.cat(parts, 1) if parts else torch.empty(reader.info.channels, 0, dtype=dtype)


def _empty(source: Source, reader: Reader, num_samples: int, dtype: torch.dtype) -> NDArray[Any] | None:
    """Memory for the wave; None if its size can't be trusted."""
    channels = reader.info.channels
    if num_samples * channels > max(_VALUES_ON_TRUST, _VALUES_PER_BYTE * source.size):
        return None
    # NumPy's memory, unlike torch's, comes in huge pages where it is large: several times fewer page faults.
    return np.empty((channels, num_samples), np.int16 if dtype == torch.int16 else np.float32)


def _fill(reader: Reader, start: int, wave: NDArray[Any]) -> int:
    """Decodes into `[C, N]`; the samples that there were."""
    done = 0
    for block in reader.blocks(start, wave.shape[1], integers=wave.dtype == np.int16):
        put(block, wave[:, done : done + len(block)])
        done += len(block)
    return done


def put(block: NDArray[Any], wave: NDArray[Any]) -> None:
    """Writes `[n, C]`, int16 or float32, into `[C, n]`, int16 or float32."""
    if block.dtype != np.int16 and wave.dtype == np.int16:
        block = np.clip(np.rint(block * np.float32(32768)), -32768, 32767)
    if block.dtype == np.int16 and wave.dtype != np.int16 and len(wave) == 2 and block.flags.c_contiguous:
        # Two channels as one integer: each step runs on the processor's vectors.
        pairs = block.view(np.int32)[:, 0]
        half = np.bitwise_and(pairs, -65536)
        wave[1 - _LOW] = half
        np.left_shift(pairs, 16, out=half)
        wave[_LOW] = half
        wave *= np.float32(2**-31)
        return
    # Channel by channel is several times faster than a transposed copy.
    for channel in range(len(wave)):
        wave[channel] = block[:, channel]
    if block.dtype == np.int16 and wave.dtype != np.int16:
        wave *= np.float32(2**-15)


def check_finite(name: str, wave: Tensor, start: int) -> None:
    """Raises for NaN and infinite samples in `[C, n]`, the samples from `start` on."""
    if wave.isfinite().all():
        return
    bad = (~wave.isfinite()).any(dim=0).nonzero()[:, 0]
    raise AudioFileError(
        f"{name}: {len(bad)} of {wave.shape[1]} samples are NaN or infinite, the first at "
        f"{start + int(bad[0])}; rewrite it without them (torch.nan_to_num)"
    )
