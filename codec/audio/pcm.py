"""Uncompressed wav: an excerpt costs its own bytes.

Read in ranges instead of mapped into memory: as fast or faster (BACKENDS.md), and a file that is cut while it is
read is an error instead of a signal that kills the process.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec.audio.containers import STREAMED
from codec.audio.info import AudioInfo, ByteSource, Reader
from codec.audio.opening import Source

# (format tag, bits) → codec's name; the bytes behind an extensible tag's first two are always these.
_CODECS = {
    (1, 8): "pcm_u8", (1, 16): "pcm_16", (1, 24): "pcm_24", (1, 32): "pcm_32",
    (3, 32): "float", (3, 64): "double", (6, 8): "alaw", (7, 8): "ulaw",
}  # fmt: skip
_EXTENSIBLE = 0xFFFE
_GUID_END = bytes.fromhex("000000001000800000aa00389b71")
_MAX_CHUNKS = 1000
# Bytes converted at once: they stay in the core's cache between reading and converting.
_BYTES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a wav file's samples lie.

    Attributes:
        codec: A value of the table above.
        channels: Channels, interleaved.
        sample_rate: Hz.
        bit_depth: Bits of one value.
        offset: First byte of the samples.
        num_bytes: Their bytes, none of them beyond the file's end.
    """

    codec: str
    channels: int
    sample_rate: int
    bit_depth: int
    offset: int
    num_bytes: int


def layout(source: ByteSource) -> Layout | None:
    """The layout of a little-endian RIFF or RF64 wav file of plain samples; None for all others."""
    if source.read_at(0, 4) not in (b"RIFF", b"RF64") or source.read_at(8, 4) != b"WAVE":
        return None
    offset, form, size_64 = 12, None, None
    for _ in range(_MAX_CHUNKS):
        head = source.read_at(offset, 8)
        if len(head) < 8:
            return None
        name, size = struct.unpack("<4sI", head)
        offset += 8
        if name == b"ds64":
            size_64 = int.from_bytes(source.read_at(offset + 8, 8), "little")
        elif name == b"fmt ":
            form = _form(source.read_at(offset, min(size, 40)))
        elif name == b"data":
            if form is None:
                return None
            if size == 0xFFFFFFFF and size_64 is not None:
                size = size_64
            elif size == 0 or any(size in sizes for sizes in STREAMED):
                size = source.size
            return Layout(*form, offset, max(0, min(size, source.size - offset)))
        offset += size + (size & 1)
    return None


def _form(chunk: bytes) -> tuple[str, int, int, int] | None:
    """codec, channels, rate and bits of a fmt chunk that describes plain samples."""
    if len(chunk) < 16:
        return None
    tag, channels, rate, _, align, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE:
        if len(chunk) < 40 or chunk[26:40] != _GUID_END:
            return None
        (tag,) = struct.unpack_from("<H", chunk, 24)
    codec = _CODECS.get((tag, bits))
    if codec is None or align != channels * bits // 8 or not channels or not 0 < rate < 1 << 31:
        return None
    return codec, channels, rate, bits


class PcmReader:
    """Reads a wav file of plain samples; gives what libsndfile gives, bit by bit."""

    def __init__(self, source: Source, where: Layout, info: AudioInfo | None = None) -> None:
        self._source, self._where = source, where
        self._step = where.channels * where.bit_depth // 8
        self.info = info or AudioInfo(
            sample_rate=where.sample_rate,
            num_samples=where.num_bytes // self._step,
            channels=where.channels,
            container="wav",
            codec=where.codec,
            bit_depth=where.bit_depth,
            scanned=False,
        )

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        offset = self._where.offset + start * self._step
        left = min(num_samples, self.info.num_samples - start)
        at_once = max(1, _BYTES_AT_ONCE // self._step)
        # One byte in front: values of three bytes are taken from the four that end with them.
        buffer = np.empty(1 + min(left, at_once) * self._step, np.uint8)
        buffer[0] = 0
        while left > 0:
            wanted = min(left, at_once) * self._step
            found = self._source.read_into(buffer.data[1 : 1 + wanted], offset) // self._step
            yield self._values(buffer, found)
            if found * self._step < wanted:
                return
            offset, left = offset + wanted, left - found

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
        return functools.partial(PcmReader, where=self._where, info=self.info)

    def _values(self, buffer: NDArray[np.uint8], num_samples: int) -> NDArray[Any]:
        codec, channels = self._where.codec, self._where.channels
        if codec == "pcm_24":
            shape, strides = (num_samples, channels), (3 * channels, 3)
            wide = np.ndarray(shape, "<i4", buffer, 0, strides) & np.int32(-256)
            return _scaled(wide)
        raw = buffer[1 : 1 + num_samples * self._step]
        if codec == "pcm_16":
            return raw.view("<i2").reshape(-1, channels)
        if codec in ("ulaw", "alaw"):
            return _table(codec)[raw].reshape(-1, channels)
        if codec == "pcm_u8":
            return ((raw.astype(np.int16) - 128) << 8).reshape(-1, channels)
        if codec == "pcm_32":
            return _scaled(raw.view("<i4")).reshape(-1, channels)
        return raw.view("<f4" if codec == "float" else "<f8").astype(np.float32, copy=False).reshape(-1, channels)


def _scaled(values: NDArray[np.int32]) -> NDArray[np.float32]:
    """−1 … 1; cast first, as libsndfile does: the scale is a power of two."""
    floats = values.astype(np.float32)
    floats *= np.float32(2**-31)
    return floats


@functools.lru_cache(maxsize=2)
def _table(codec: str) -> NDArray[np.int16]:
    """The values of G.711's 256 bytes, at the scale of 16 bits."""
    byte = np.arange(256)
    if codec == "ulaw":
        inverted = 255 - byte
        magnitude = (((inverted & 15) * 8 + 132) << (inverted >> 4 & 7)) - 132
        return np.where(inverted & 128, -magnitude, magnitude).astype(np.int16)
    toggled = byte ^ 0x55
    exponent, mantissa = toggled >> 4 & 7, toggled & 15
    magnitude = np.where(exponent == 0, mantissa * 16 + 8, (mantissa * 16 + 264) << np.maximum(exponent - 1, 0))
    return np.where(toggled & 128, magnitude, -magnitude).astype(np.int16)
