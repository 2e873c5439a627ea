"""MPEG audio frame headers: how many frames a file holds, against what its first frame claims.

A variable-rate file without a Xing header gives libsndfile no length, and what it estimates is up to 42 %
short. Counting the frames and putting a Xing header in front makes it decode the whole file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

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


@dataclass(frozen=True)
class FrameHeader:
    """One frame's header: its 32 bits, and what they say."""

    word: int
    mpeg1: bool
    layer: int
    mono: bool
    num_bytes: int
    num_samples: int


@dataclass(frozen=True)
class Scan:
    """What a scan of all frames found.

    Attributes:
        first: Offset of the first frame that holds audio.
        num_frames: Whole frames.
        missing_bytes: Bytes by which the last frame is cut; 0 if it is whole.
        stream: The frames behind a Xing header with their number.
    """

    first: int
    num_frames: int
    missing_bytes: int
    stream: bytes


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
    while True:
        current = frame_header(data, offset)
        if current is None or (current.word ^ header.word) & _SAME:
            # A header that nothing follows is chance, unless the file ends inside its frame.
            found = find_frame(data, offset, header)
            if found is None:
                break
            offset, current = found
        if offset + current.num_bytes > len(data):
            missing = offset + current.num_bytes - len(data)
            break
        num_frames += 1
        offset += current.num_bytes
    return Scan(first, num_frames, missing, _xing_frame(header, num_frames) + data[first:])


def _xing_offset(header: FrameHeader) -> int:
    if header.mpeg1:
        return 4 + (17 if header.mono else 32)
    return 4 + (9 if header.mono else 17)


def _xing_frame(header: FrameHeader, num_frames: int) -> bytes:
    """A frame of the highest bit rate, without checksum, that carries only the number of frames."""
    word = header.word & ~(0xF << 12) | 14 << 12 | 1 << 16
    word &= ~(1 << 9)
    size = frame_header(struct.pack(">I", word), 0)
    assert size is not None
    frame = bytearray(size.num_bytes)
    struct.pack_into(">I", frame, 0, word)
    struct.pack_into(">4sII", frame, _xing_offset(header), b"Xing", 1, num_frames)
    return bytes(frame)
