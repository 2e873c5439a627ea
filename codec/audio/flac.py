"""Flac's frames: where they are, and whether a file's last one is there.

libsndfile notices a missing end only when it decodes up to it.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from codec.audio import mpeg
from codec.audio.info import ByteSource

_COLUMNS = 256
_MAX_FRAME = 1 << 22
# Tags and junk that may follow the last frame.
_MAX_TAGS = 1 << 16
_MIN_FRAME = 10
_MAX_METADATA = 1000
# A frame of blocks of one size begins so.
_SYNC = b"\xff\xf8"
_BLOCK_SIZES = {1: 192, **{2 + i: 576 << i for i in range(4)}, **{8 + i: 256 << i for i in range(8)}}


@dataclass(frozen=True, slots=True)
class Stream:
    """What STREAMINFO says of a file whose blocks are all of one size, and where its frames begin.

    Attributes:
        header: The beginning of a file of the same kind, up to its first frame.
        first: Offset of the first frame.
        longest: Bytes of the longest frame, or more.
        block_size: Samples of a frame; the last one may have fewer.
        sample_rate: Hz.
        channels: Channels, C.
        bit_depth: Bits of a value.
        num_samples: Samples per channel.
    """

    header: bytes
    first: int
    longest: int
    block_size: int
    sample_rate: int
    channels: int
    bit_depth: int
    num_samples: int


def whole_stream(source: ByteSource) -> Stream | None:
    """The stream, if all of it seems to be there and its frames can be found by their numbers."""
    start = mpeg.id3_length(source.read_at(0, 10)) + 4
    offset, last = start, False
    for _ in range(_MAX_METADATA):
        head = source.read_at(offset, 4)
        if len(head) < 4:
            return None
        last = head[0] >= 128
        offset += 4 + int.from_bytes(head[1:], "big")
        if last:
            break
    block = source.read_at(start, 38)
    if not last or len(block) < 38 or block[0] & 127 or block[1:4] != b"\0\0\x22":
        return None
    min_block, max_block = struct.unpack_from(">HH", block, 4)
    max_frame = int.from_bytes(block[11:14], "big")
    (packed,) = struct.unpack_from(">Q", block, 14)
    rate, channels, bits, total = packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1, packed & (1 << 36) - 1
    longest = max_frame or _longest(max_block, channels, bits)
    if min_block != max_block or min_block < 16 or not rate or not total or longest > _MAX_FRAME:
        return None
    if source.read_at(offset, 2) != _SYNC or missing_end(source) is not None:
        return None
    header = b"fLaC\x80" + block[1:]
    return Stream(header, offset, longest, max_block, rate, channels, bits, total)


def _longest(block_size: int, channels: int, bits: int) -> int:
    return 18 + (block_size * channels * (bits + 1) + 7) // 8


def find_frame(source: ByteSource, stream: Stream, number: int, before: int, offset: int) -> int | None:
    """The first byte of a frame, at or behind the frame `before`, which lies at `offset`; the file's end behind all.

    None if it isn't found.
    """
    end_number = -(-stream.num_samples // stream.block_size)
    end = source.size
    if number >= end_number:
        return end
    at, nothing_new = offset, 0
    while before < number:
        if nothing_new == 0:
            guess = offset + (end - offset) * (number - before) // (end_number - before) - stream.longest // 2
            at = max(offset, guess)
        else:
            # It began before what was looked at, or what was found is no frame: from here on, frame by frame.
            at = max(offset, at - stream.longest) if nothing_new == 1 else offset
        data = source.read_at(at, stream.longest + 16)
        known = before, end_number
        found = data.find(_SYNC, 1 if at == offset else 0)
        while found >= 0:
            stop = _frame_stop(data, found, stream.block_size)
            seen = -1 if stop is None else (stop - 1) // stream.block_size
            if before < seen <= number:
                before, offset = seen, at + found
            elif number < seen < end_number:
                end_number, end = seen, at + found
                break
            found = data.find(_SYNC, found + 1)
        if known == (before, end_number):
            if at == offset:
                return None
            nothing_new += 1
        else:
            nothing_new = 0
    return offset


def missing_end(source: ByteSource) -> str | None:
    """What says that the file's length isn't what its header says, in words.

    None if the last frame ends, with its checksum, at the sample that the header promises; also where the
    header promises nothing, or nothing like a frame is near the end: then only decoding can tell.
    """
    start = mpeg.id3_length(source.read_at(0, 10)) + 4
    head = source.read_at(start, 38)
    if len(head) < 38 or head[0] & 127:
        return None
    (max_block,) = struct.unpack_from(">H", head, 6)
    max_frame = int.from_bytes(head[11:14], "big")
    (packed,) = struct.unpack_from(">Q", head, 14)
    channels, bits, total = (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1, packed & (1 << 36) - 1
    longest = max_frame or _longest(max_block, channels, bits)
    if not total or longest > _MAX_FRAME:
        return None
    last = None
    for window in (longest, longest + _MAX_TAGS):
        tail = source.read_at(max(0, source.size - window), window)
        at = tail.rfind(b"\xff")
        while at >= 0:
            found = _frame_stop(tail, at, max_block)
            if found is not None:
                last = max(last or 0, found)
                if found == total and _is_whole(tail, at, longest):
                    return None
            at = tail.rfind(b"\xff", 0, at)
    if last is None:
        return None
    if last == total:
        return f"its last frame is not whole, {total} samples were promised"
    return f"its header promises {total} samples, its last frame ends at {last}"


def _frame_stop(data: bytes, at: int, max_block: int) -> int | None:
    """The sample at which the frame ends whose header is at `at`; None if there is no header."""
    head = data[at : at + 16]
    if len(head) < 6 or head[1] & 0xFE != 0xF8 or head[3] & 1:
        return None
    number, length = _number(head)
    size_code, rate_code = head[2] >> 4, head[2] & 15
    end = 4 + length + {6: 1, 7: 2}.get(size_code, 0) + {12: 1, 13: 2, 14: 2}.get(rate_code, 0)
    if number is None or len(head) <= end or _crc8(head[:end]) != head[end]:
        return None
    block = _BLOCK_SIZES.get(size_code, 0)
    if size_code in (6, 7):
        block = int.from_bytes(head[4 + length : 4 + length + size_code - 5], "big") + 1
    if not block:
        return None
    return (number if head[1] & 1 else number * max_block) + block


def _number(head: bytes) -> tuple[int | None, int]:
    """The frame's or sample's number, coded like UTF-8, and its bytes."""
    first = head[4]
    if first < 128:
        return first, 1
    length = 8 - (first ^ 255).bit_length()
    if not 2 <= length <= 7:
        return None, 0
    number = first & (127 >> length)
    for byte in head[5 : 4 + length]:
        if byte >> 6 != 2:
            return None, 0
        number = number << 6 | byte & 63
    return number, length


def _is_whole(data: bytes, at: int, longest: int) -> bool:
    """The frame at `at` ends with its checksum, at the end of the data or (before tags) anywhere."""
    if _crc16(data[at:]) == 0:
        return True
    state, table = 0, _table16()[-1].tolist()
    for index, byte in enumerate(data[at : at + longest]):
        state = (state << 8 & 0xFF00) ^ table[state >> 8 ^ byte]
        if state == 0 and index >= _MIN_FRAME - 1:
            return True
    return False


def _crc8(data: bytes) -> int:
    state = 0
    for byte in data:
        state = _TABLE_8[state ^ byte]
    return state


def _table8() -> bytes:
    table = range(256)
    for _ in range(8):
        table = [(state << 1 ^ (7 if state & 128 else 0)) & 255 for state in table]  # type: ignore[assignment]
    return bytes(table)


_TABLE_8 = _table8()


@functools.lru_cache(maxsize=1)
def _table16() -> NDArray[np.uint16]:
    """`[column, byte]`: what a byte adds to the checksum of a row that ends after the last column."""
    table = np.arange(256, dtype=np.uint32) << 8
    for _ in range(8):
        table = (table << 1 ^ np.where(table & 0x8000, 0x8005, 0)) & 0xFFFF
    columns = [table]
    for _ in range(_COLUMNS - 1):
        before = columns[-1]
        columns.append((before << 8 & 0xFF00) ^ table[before >> 8])
    return np.array(columns[::-1], np.uint16)


def _crc16(data: bytes) -> int:
    """The checksum, by rows: zeros in front change nothing."""
    table = _table16()
    padded = data.rjust(-(-len(data) // _COLUMNS) * _COLUMNS, b"\0")
    rows = np.frombuffer(padded, np.uint8).reshape(-1, _COLUMNS)
    state = 0
    for row in np.bitwise_xor.reduce(table[np.arange(_COLUMNS), rows], axis=1).tolist():
        # What the rows before left moves on by a row: as two bytes at its beginning do.
        state = int(table[0, state >> 8] ^ table[1, state & 255]) ^ row
    return state
