"""Flac through miniaudio's dr_flac, the fastest decoder there is for it, made exact.

dr_flac steps over a damaged frame in silence and goes on with the next one's samples. So it gets spans of frames whose
number of samples is known, one after the other, and where it gives fewer, libsndfile decodes the span, or says what is
wrong. Flac loses nothing: both give the same samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import flac
from codec.audio.info import AudioInfo, Reader
from codec.audio.opening import Source
from codec.audio.sndfile import SoundFileReader

# Values decoded and checked at once.
_VALUES_AT_ONCE = 1 << 19
# libsndfile reads flac of other depths not at all.
_BIT_DEPTHS = (8, 16, 24)


def drflac_reader(source: Source) -> DrFlacReader | None:
    """The reader; None without miniaudio, and for files that libsndfile must look at first."""
    if library() is None:
        return None
    stream = flac.whole_stream(source)
    return None if stream is None or stream.bit_depth not in _BIT_DEPTHS else DrFlacReader(source, stream)


@functools.lru_cache(maxsize=1)
def library() -> Any:
    """The module that has dr_flac, or None where it isn't installed."""
    try:
        import miniaudio
    except (ImportError, OSError):
        return None
    return miniaudio if hasattr(miniaudio.lib, "ma_dr_flac_open_memory") else None


class DrFlacReader:
    """Reads a whole flac file of blocks of one size."""

    def __init__(self, source: Source, stream: flac.Stream) -> None:
        self._source, self._stream = source, stream
        self.info = AudioInfo(
            sample_rate=stream.sample_rate,
            num_samples=stream.num_samples,
            channels=stream.channels,
            container="flac",
            codec="flac",
            bit_depth=stream.bit_depth,
            scanned=False,
        )

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        stream, size = self._stream, self._stream.block_size
        wide = stream.bit_depth > 16
        stop = min(start + num_samples, stream.num_samples)
        span = max(1, _VALUES_AT_ONCE // (size * stream.channels))
        frame = start // size
        offset = flac.find_frame(self._source, stream, frame, 0, stream.first)
        while start < stop:
            last = min(-(-stop // size), frame + span)
            end = None if offset is None else flac.find_frame(self._source, stream, last, frame, offset)
            length = min(stop, last * size) - start
            block = None
            if offset is not None and end is not None:
                block = self._decoded(offset, end, start - frame * size, length, wide)
            if block is None:
                fallback = SoundFileReader(self._source, "flac", False)
                yield from fallback.blocks(start, stop - start, integers=integers)
                return
            yield _scaled(block) if wide else block
            start, frame, offset = start + length, last, end

    def _decoded(self, offset: int, end: int, skip: int, num_samples: int, wide: bool) -> NDArray[Any] | None:
        """`[n, C]` of the frames in these bytes, without the first `skip`; None if they aren't all there.

        The bytes end with the frame that holds the last sample, or a frame that were left out would not show.
        """
        head = self._stream.header
        data = np.empty(len(head) + end - offset, np.uint8)
        data[: len(head)] = np.frombuffer(head, np.uint8)
        if self._source.read_into(data.data[len(head) :], offset) < end - offset:
            return None
        miniaudio = library()
        lib, ffi = miniaudio.lib, miniaudio.ffi
        decoder = lib.ma_dr_flac_open_memory(ffi.from_buffer(data), len(data), ffi.NULL)
        if decoder == ffi.NULL:
            return None
        try:
            samples = np.empty((skip + num_samples, self._stream.channels), np.int32 if wide else np.int16)
            if wide:
                found = lib.ma_dr_flac_read_pcm_frames_s32(decoder, len(samples), ffi.from_buffer("int[]", samples))
            else:
                found = lib.ma_dr_flac_read_pcm_frames_s16(decoder, len(samples), ffi.from_buffer("short[]", samples))
        finally:
            lib.ma_dr_flac_close(decoder)
        return samples[skip:] if found == len(samples) else None

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`."""
        return None

    def splits(self) -> bool:
        """As `Reader.splits`."""
        return True

    def check(self) -> None:
        """As `Reader.check`."""

    def again(self) -> Callable[[Source], Reader]:
        """As `Reader.again`."""
        return functools.partial(DrFlacReader, stream=self._stream)


def _scaled(values: NDArray[np.int32]) -> NDArray[np.float32]:
    """−1 … 1 of values at the scale of 32 bits."""
    floats = values.astype(np.float32)
    floats *= np.float32(2**-31)
    return floats
