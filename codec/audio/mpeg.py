"""MPEG audio frame headers: how many frames a file holds, against what its first frame claims.

A variable-rate file without a Xing header gives libsndfile no length, and what it estimates is up to 42 %
short. Counting the frames and putting a Xing header in front makes it decode the whole file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codec.audio.info import ByteSource

_BITRATES_KBPS = {
    (1, 1): (32, 64, 96, 128, 160, 192, 224, 256, 288, 320, 352, 384, 416, 448),
    (1, 2): (32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384),
    (1, 3): (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    (2, 1): (32, 48, 56, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    (2, 2): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
    (2, 3): (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
# Bits of a header that can't change from frame to frame: sync, version, layer, sample rate.
_SAME = 0xFFFE0C00
_MAX_JUNK = 1 << 17
_RESERVOIR = 511
_TURN = 8
# Samples that every decoder is late; a gapless one drops them behind each Xing header, with the encoder's own delay.
_DECODER_DELAY = 529
_MAX_TAGS = 4096


@dataclass(frozen=True, slots=True)
class FrameHeader:
    """One frame's header: its 32 bits, and what they say."""

    word: int
    mpeg1: bool
    layer: int
    mono: bool
    num_bytes: int
    num_samples: int

    def overhead(self) -> int:
        """Most bytes of a layer III frame that hold no samples: header, checksum, side information."""
        if self.mpeg1:
            return 6 + (17 if self.mono else 32)
        return 6 + (9 if self.mono else 17)


@dataclass(frozen=True, slots=True)
class Scan:
    """What a scan of all frames found.

    Attributes:
        header: The first frame's that holds audio.
        num_frames: Whole frames.
        missing_bytes: Bytes by which the last frame is cut; 0 if it is whole.
        pieces: Byte ranges of the file that hold whole frames and nothing else.
    """

    header: FrameHeader
    num_frames: int
    missing_bytes: int
    pieces: tuple[tuple[int, int], ...]

    def stream(self, source: ByteSource) -> bytes:
        """The whole frames behind a Xing header with their number, nothing between them."""
        frames = [source.read_at(begin, end - begin) for begin, end in self.pieces]
        return xing_frame(self.header, self.num_frames) + b"".join(frames)


@dataclass(frozen=True)
class FrameIndex:
    """Where the audio frames of a layer III file lie, one right behind the other.

    Attributes:
        header: The first one's.
        offsets: int64 `[F + 1]`, the first byte of each, and the last one's end.
        delay: Samples that decoders drop at the beginning of the file.
        padding: Samples that they drop at its end.
    """

    header: FrameHeader
    offsets: NDArray[np.int64]
    delay: int
    padding: int

    def num_samples(self) -> int:
        """Samples of the whole file as decoded."""
        return (len(self.offsets) - 1) * self.header.num_samples - self.delay - self.padding

    def span(self, start: int, num_samples: int) -> tuple[int, int, int, int]:
        """Frames to decode for these samples.

        A frame's samples depend on its bits, which may begin in earlier frames (the reservoir: up to 511 bytes
        back), on one granule before it (the transform's overlap) and on 15 × 32 samples before that (the filter
        bank). The decoder's filter bank turns its buffer of 16 places by 18 each granule and adds in that order:
        only a decode that begins a multiple of 8 granules earlier adds in the same order.

        Returns:
            The first frame, the first one that must decode as it is, the end, and how many samples come before.
        """
        size = self.header.num_samples
        begin, end = start + self.delay, start + self.delay + num_samples
        first = needed = max(0, begin // size - 2)
        overhead = self.header.overhead()
        reservoir = 0
        while first > 0 and reservoir < _RESERVOIR:
            first -= 1
            reservoir += max(0, int(self.offsets[first + 1] - self.offsets[first]) - overhead)
        first -= first % _TURN
        # The last samples of a frame leave the filter bank with the next one's.
        last = min(len(self.offsets) - 1, -(-end // size) + 1)
        return first, needed, last, begin - first * size - _DECODER_DELAY

    def stream(self, frames: bytes, first: int, needed: int, last: int) -> bytes:
        """The bytes of the frames `first` … `last` as a file that decodes like them from `needed` on.

        Those before are silenced: parts of their bits lie in frames that aren't there, of which the decoder would
        complain. Their bodies still fill the reservoir.
        """
        data = bytearray(frames)
        side = self.header.overhead() - 6
        for offset in (self.offsets[first:needed] - self.offsets[first]).tolist():
            # Where its bits begin (8 or 9 bits) stays: decoders copy the reservoir from frame to frame by it. The
            # flag that a checksum follows goes: it wouldn't fit.
            at = offset + (4 if data[offset + 1] & 1 else 6)
            begin = data[at : at + 2] if self.header.mpeg1 else data[at : at + 1]
            if self.header.mpeg1:
                begin[1] &= 128
            data[offset + 1] |= 1
            data[offset + 4 : offset + 4 + side] = begin.ljust(side, b"\0")
        return xing_frame(self.header, last - first) + bytes(data)


def frame_header(data: bytes, offset: int) -> FrameHeader | None:
    """The header at `offset`, or None if there is none there (or one of the free format)."""
    if offset + 4 > len(data):
        return None
    (word,) = struct.unpack_from(">I", data, offset)
    version, layer = word >> 19 & 3, 4 - (word >> 17 & 3)
    bitrate_index, rate_index = word >> 12 & 15, word >> 10 & 3
    if word >> 21 != 0x7FF or version == 1 or layer == 4 or bitrate_index in (0, 15) or rate_index == 3:
        return None
    bits = _BITRATES_KBPS[1 if version == 3 else 2, layer][bitrate_index - 1] * 1000
    sample_rate, padding = _SAMPLE_RATES[version][rate_index], word >> 9 & 1
    if layer == 1:
        num_samples, num_bytes = 384, (12 * bits // sample_rate + padding) * 4
    else:
        num_samples = 576 if layer == 3 and version != 3 else 1152
        num_bytes = num_samples // 8 * bits // sample_rate + padding
    return FrameHeader(word, version == 3, layer, word >> 6 & 3 == 3, num_bytes, num_samples)


def id3_length(head: bytes) -> int:
    """Bytes of the ID3v2 tag that `head` begins with; 0 if none."""
    if len(head) < 10 or head[:3] != b"ID3":
        return 0
    size = (head[6] & 127) << 21 | (head[7] & 127) << 14 | (head[8] & 127) << 7 | head[9] & 127
    return 10 + size + (10 if head[5] & 16 else 0)


def find_frame(data: bytes, offset: int, like: FrameHeader | None = None) -> tuple[int, FrameHeader] | None:
    """The first frame at or after `offset` that another one of its kind, or the end, follows.

    The first frame of a file (`like` is None) is looked for in the first 128 KB only.
    """
    stop = len(data) if like else min(len(data), offset + _MAX_JUNK)
    while (offset := data.find(b"\xff", offset, stop)) >= 0:
        header = frame_header(data, offset)
        if header and (like is None or (header.word ^ like.word) & _SAME == 0):
            end = offset + header.num_bytes
            following = frame_header(data, end)
            if end == len(data) or (following and (following.word ^ header.word) & _SAME == 0):
                return offset, header
        offset += 1
    return None


def xing_claim(data: bytes, offset: int, header: FrameHeader) -> tuple[int, int] | None:
    """(frames, bytes) that the Xing header in the frame at `offset` claims; 0 for what it leaves out."""
    at = offset + _xing_offset(header)
    if data[at : at + 4] not in (b"Xing", b"Info") or at + 16 > len(data):
        return None
    (flags,) = struct.unpack_from(">I", data, at + 4)
    fields = struct.unpack_from(">II", data, at + 8)
    num_frames = fields[0] if flags & 1 else 0
    num_bytes = fields[flags & 1] if flags & 2 else 0
    return num_frames, num_bytes


def scan(data: bytes) -> Scan | None:
    """Counts the frames of a whole file; None if it has none.

    Junk between frames (a damaged span, tags of joined files) is stepped over, and not counted.
    """
    found = find_frame(data, id3_length(data))
    if found is None:
        return None
    first, header = found
    # A Xing or VBRI frame holds a table, and no audio.
    if xing_claim(data, first, header) is not None or data[first + 36 : first + 40] == b"VBRI":
        first += header.num_bytes
    offset, num_frames, missing = first, 0, 0
    pieces, begin = [], first
    while True:
        current = frame_header(data, offset)
        if current is None or (current.word ^ header.word) & _SAME:
            # A header that nothing follows is chance, unless the file ends inside its frame.
            found = find_frame(data, offset, header)
            if found is None:
                break
            pieces.append((begin, offset))
            offset, current = found
            begin = offset
        if offset + current.num_bytes > len(data):
            missing = offset + current.num_bytes - len(data)
            break
        num_frames += 1
        offset += current.num_bytes
    pieces.append((begin, offset))
    return Scan(header, num_frames, missing, tuple(pieces))


def frame_index(data: bytes) -> FrameIndex | None:
    """The index of a whole layer III file; None if anything but tags lies between or behind its frames."""
    found = find_frame(data, id3_length(data))
    if found is None or found[1].layer != 3:
        return None
    first, header = found
    delay, padding = _DECODER_DELAY, 0
    claim = xing_claim(data, first, header)
    if claim is not None:
        delay, padding = _gapless(data, first + _xing_offset(header))
    if claim is not None or data[first + 36 : first + 40] == b"VBRI":
        first += header.num_bytes
    offsets = _chain(data, first, header)
    if len(offsets) < 2 or len(data) - offsets[-1] > _MAX_TAGS:
        return None
    return FrameIndex(header, offsets, delay, padding)


def _gapless(data: bytes, xing: int) -> tuple[int, int]:
    """Samples that gapless decoders drop at both ends, by LAME's part of the Xing header."""
    (flags,) = struct.unpack_from(">I", data, xing + 4)
    # Frames, bytes, seek table, quality; then the encoder's name and 12 bytes of settings.
    at = xing + 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1) + 4 * (flags >> 3 & 1) + 21
    both = int.from_bytes(data[at : at + 3].ljust(3, b"\0"), "big")
    return (both >> 12) + _DECODER_DELAY, max(0, (both & 0xFFF) - _DECODER_DELAY)


def _chain(data: bytes, first: int, header: FrameHeader) -> NDArray[np.int64]:
    """Offsets of the frames that follow one another from `first` on, and the end of the last whole one."""
    values = np.frombuffer(data, np.uint8)
    at = np.flatnonzero(values[first:-3] == 255) + first
    at = at[values[at + 1] & 0xFE == header.word >> 16 & 0xFE]
    at = at[values[at + 2] & 0x0C == header.word >> 8 & 0x0C]
    sizes = np.zeros(128, np.int64)
    for index in range(16):
        for padding in (0, 1):
            word = header.word & ~0xF200 | index << 12 | padding << 9
            known = frame_header(struct.pack(">I", word), 0)
            sizes[index << 3 | padding] = known.num_bytes if known else 0
    ends = at + sizes[values[at + 2] >> 1 & 0x79]
    following = np.searchsorted(at, ends)
    is_frame = np.append(at, -1)[following] == ends
    steps = np.where((ends > at) & is_frame, following, -1).tolist()
    chain = []
    current = 0 if len(at) and at[0] == first else -1
    while current >= 0:
        chain.append(current)
        current = steps[current]
    if not chain:
        return np.zeros(0, np.int64)
    offsets = at[chain]
    end = int(ends[chain[-1]])
    # A frame that the file's end cuts doesn't count.
    return np.append(offsets, end) if offsets[-1] < end <= len(data) else offsets


def _xing_offset(header: FrameHeader) -> int:
    if header.mpeg1:
        return 4 + (17 if header.mono else 32)
    return 4 + (9 if header.mono else 17)


def xing_frame(header: FrameHeader, num_frames: int) -> bytes:
    """A frame of the highest bit rate, without checksum, that carries only the number of frames."""
    word = header.word & ~(0xF << 12) | 14 << 12 | 1 << 16
    word &= ~(1 << 9)
    size = frame_header(struct.pack(">I", word), 0)
    assert size is not None
    frame = bytearray(size.num_bytes)
    struct.pack_into(">I", frame, 0, word)
    struct.pack_into(">4sII", frame, _xing_offset(header), b"Xing", 1, num_frames)
    return bytes(frame)
