"""Audio file → wave: any format, any excerpt, exactly.

Our own reader takes uncompressed wav, dr_flac flac, FFmpeg (through torchcodec) vorbis of high rates and what only it
reads, libsndfile all else, and everything but the last where the others aren't there. An excerpt is bit-equal to that
slice of the whole decode; BACKENDS.md has the proof, and which backends break it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import ffmpeg, ogg, pcm, threads
from codec.audio.containers import FFMPEG_CONTAINERS, identify, missing_end
from codec.audio.drflac import drflac_reader
from codec.audio.facts import Facts
from codec.audio.info import SALVAGE, AudioInfo, Reader
from codec.audio.opening import AudioSource, Source
from codec.audio.resampling import native_span, resample
from codec.audio.sndfile import SoundFileReader
from codec.audio.vorbis import vorbis_reader
from codec.errors import AudioFileError, InputError
from codec.frames import resampled_length

__all__ = ["AudioInfo", "audio_info", "check_arguments", "read_audio"]

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int16)
# Values for which memory is taken at a header's word; a longer wave's memory grows as the file proves it, unless
# the claim is one that a file of this size can hold.
_VALUES_ON_TRUST = 1 << 24
_VALUES_PER_BYTE = 64
# Containers and what they lack, uncompressed files that are whole, and where Ogg files begin anew.
_kinds: Facts[tuple[str | None, str | None]] = Facts(100_000)
_layouts: Facts[pcm.Layout] = Facts(100_000)
_links: Facts[list[tuple[int, int]]] = Facts(100_000)
# The channel that lies in the low half of both as one integer.
_LOW = 0 if sys.byteorder == "little" else 1
# Seconds of the result below which another thread would cost more than it saves.
_MIN_SEGMENT_SECONDS = 2


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
        reader = _open(source, allow_truncated)
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
        reader = _open(source, allow_truncated)
        rate = reader.info.sample_rate
        to_rate = sample_rate or rate
        length = resampled_length(reader.info.num_samples, rate, to_rate)
        stop = length if num_samples is None else start_sample + num_samples
        if length == 0:
            raise AudioFileError(f"{source.name}: holds no samples; remove it")
        if start_sample >= length or stop > length:
            raise InputError(
                f"{source.name}: samples {start_sample} … {stop} were asked for, it has {length} at "
                f"{to_rate} Hz; ask for less"
            )
        first, last, skip = start_sample, stop, 0
        if to_rate != rate:
            first, last, skip = native_span(start_sample, stop, rate, to_rate)
            last = min(last, reader.info.num_samples)
        is_float = reader.info.codec in ("float", "double")
        native = (
            torch.int16 if dtype == torch.int16 and to_rate == rate and not mono and not is_float else torch.float32
        )
        if last - first == reader.info.num_samples and not allow_truncated:
            reader.check()
        wave = _read_segments(source, reader, first, last, native, allow_truncated, num_threads)
        if wave.shape[1] < last - first:
            _report_short(source, first + wave.shape[1], last, allow_truncated)
        if is_float:
            _check_finite(source, wave, first)
    if mono and wave.shape[0] > 1:
        wave = wave.mean(dim=0, keepdim=True)
    if to_rate != rate:
        wave = resample(wave, rate, to_rate)[:, skip : skip + stop - start_sample]
    if wave.shape[1] == 0:
        raise AudioFileError(f"{source.name}: ends before sample {start_sample}; fetch it again")
    return _to_dtype(wave, dtype), to_rate


def check_arguments(start_sample: int, num_samples: int | None, sample_rate: int | None, dtype: torch.dtype) -> None:
    """Raises InputError for positions, rates and dtypes that can't be."""
    lowest = {"start_sample": 0, "num_samples": 1, "sample_rate": 1}
    values = {"start_sample": start_sample, "num_samples": num_samples, "sample_rate": sample_rate}
    for name, value in values.items():
        if value is None and name != "start_sample":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < lowest[name]:  # type: ignore[arg-type]
            raise InputError(f"{name} is {value!r}; it must be an integer of at least {lowest[name]}")
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}")


def _report_short(source: Source, found: int, expected: int, allow_truncated: bool) -> None:
    text = f"{source.name}: its audio ends at sample {found}, {expected} were expected"
    if not allow_truncated:
        raise AudioFileError(f"{text}; it is cut or damaged: {SALVAGE}")
    _log.warning(text)


def _to_dtype(wave: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16 and wave.dtype != torch.int16:
        return (wave * 32768).round_().clamp_(-32768, 32767).to(torch.int16)
    return wave.to(dtype).contiguous()


def _open(source: Source, allow_truncated: bool) -> Reader:
    """The reader of the source's format. Raises if the file's own headers say that its end is missing."""
    if not allow_truncated and (known := _layouts.known(source)) is not None:
        return pcm.PcmReader(source, known)
    container, missing = _kinds.get(source, lambda: _kind(source))
    if missing and not allow_truncated:
        raise AudioFileError(f"{source.name}: is cut: {missing}; {SALVAGE}")
    if container in FFMPEG_CONTAINERS:
        return ffmpeg.FFmpegReader(source, container, allow_truncated)
    if container == "wav" and (layout := pcm.layout(source)) is not None:
        if not allow_truncated:
            _layouts.get(source, lambda: layout)
        return pcm.PcmReader(source, layout)
    if container == "ogg" and len(links := _links.get(source, lambda: ogg.links(source))) > 1:
        return _ChainedReader(source, links, allow_truncated)
    if container == "flac" and not allow_truncated and (reader := drflac_reader(source)) is not None:
        return reader
    if container == "ogg" and not allow_truncated and (vorbis := vorbis_reader(source)) is not None:
        return vorbis
    return SoundFileReader(source, container, allow_truncated)


def _kind(source: Source) -> tuple[str | None, str | None]:
    """The container, and what says that its end is missing."""
    container = identify(source)
    return container, None if container is None else missing_end(source, container)


class _ChainedReader:
    """Ogg streams one after the other in one file: their waves one after the other.

    Mono streams between others are given on all channels, as they would be played.
    """

    def __init__(self, source: Source, links: list[tuple[int, int]], allow_truncated: bool) -> None:
        self._readers: list[Reader] = []
        for start, stop in links:
            link = Source(source.read_at(start, stop - start), name=f"{source.name}, from byte {start} on")
            vorbis = None if allow_truncated else vorbis_reader(link)
            self._readers.append(vorbis or SoundFileReader(link, "ogg", allow_truncated))
        infos = [reader.info for reader in self._readers]
        self._channels = max(info.channels for info in infos)
        kinds = sorted({(info.sample_rate, info.channels) for info in infos})
        if len({rate for rate, _ in kinds}) > 1 or not {channels for _, channels in kinds} <= {1, self._channels}:
            raise AudioFileError(
                f"{source.name}: holds several Ogg streams of different (rate, channels): {kinds}; "
                "make them one with `ffmpeg -i IN OUT.flac`"
            )
        num_samples = sum(info.num_samples for info in infos)
        self.info = replace(infos[0], num_samples=num_samples, channels=self._channels)

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        for reader in self._readers:
            length = min(reader.info.num_samples - start, num_samples)
            if length > 0:
                for block in reader.blocks(start, length, integers=integers):
                    yield block.repeat(self._channels, 1) if block.shape[1] < self._channels else block
                num_samples -= length
            start = max(0, start - reader.info.num_samples)

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`."""
        return None

    def splits(self) -> bool:
        """As `Reader.splits`."""
        return False

    def check(self) -> None:
        """As `Reader.check`."""
        for reader in self._readers:
            reader.check()


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
    most = (last - first) // (_MIN_SEGMENT_SECONDS * reader.info.sample_rate)
    # Where they can be long, several for each thread: one that is held up leaves its next ones to the others.
    num_segments = min(num_threads, most) if most < 8 * num_threads else 4 * num_threads
    if num_threads < 2 or num_segments < 2 or source.path is None or not reader.splits() or allow_truncated:
        return _read(source, reader, first, last, dtype)
    wave = _empty(source, reader, last - first, dtype)
    if wave is None:
        return _read(source, reader, first, last, dtype)
    path = source.path

    def decode(start: int, stop: int) -> int:
        with Source(path) as own:
            return _fill(_open(own, False), first + start, wave[:, start:stop])

    bounds = [(last - first) * index // num_segments for index in range(num_segments + 1)]
    parts: list[Future[int]] = [
        threads.submit("segment", num_threads, lambda a=a, b=b: decode(a, b))  # type: ignore[misc]
        for a, b in pairwise(bounds)
    ]
    for part, (a, b) in zip(parts, pairwise(bounds), strict=True):
        if (found := part.result()) < b - a:
            return wave[:, : a + found]
    return wave


def _read(source: Source, reader: Reader, first: int, last: int, dtype: torch.dtype) -> Tensor:
    if (given := reader.wave(first, last - first)) is not None:
        return given if dtype == torch.float32 else _to_dtype(given, dtype)
    wave = _empty(source, reader, last - first, dtype)
    if wave is not None:
        return wave[:, : _fill(reader, first, wave)]
    # What the header claims is more than such a file holds: take memory as it turns out.
    parts = []
    for block in reader.blocks(first, last - first, integers=dtype == torch.int16):
        part = torch.empty(block.shape[1], len(block), dtype=dtype)
        _put(block, part.numpy())
        parts.append(part)
    return torch.cat(parts, 1) if parts else torch.empty(reader.info.channels, 0, dtype=dtype)


def _empty(source: Source, reader: Reader, num_samples: int, dtype: torch.dtype) -> Tensor | None:
    """Memory for the wave; None if its size can't be trusted."""
    values = num_samples * reader.info.channels
    if values > max(_VALUES_ON_TRUST, _VALUES_PER_BYTE * source.size):
        return None
    # NumPy's memory, unlike torch's, comes in huge pages where it is large: several times fewer page faults.
    memory = np.empty((reader.info.channels, num_samples), np.int16 if dtype == torch.int16 else np.float32)
    return torch.from_numpy(memory)


def _fill(reader: Reader, start: int, wave: Tensor) -> int:
    """Decodes into `[C, N]`; the samples that there were."""
    values = wave.numpy()
    done = 0
    for block in reader.blocks(start, wave.shape[1], integers=values.dtype == np.int16):
        _put(block, values[:, done : done + len(block)])
        done += len(block)
    return done


def _put(block: NDArray[Any], wave: NDArray[Any]) -> None:
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


def _check_finite(source: Source, wave: Tensor, start: int) -> None:
    if wave.isfinite().all():
        return
    bad = (~wave.isfinite()).any(dim=0).nonzero()[:, 0]
    raise AudioFileError(
        f"{source.name}: {len(bad)} of {wave.shape[1]} samples are NaN or infinite, the first at "
        f"{start + int(bad[0])}; rewrite it without them (torch.nan_to_num)"
    )
