"""Ogg pages: where they are, what they say, whether they are what their checksums say."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from codec.audio.info import ByteSource

_MAX_PAGE = 27 + 255 + 255 * 255
_READ_AT_ONCE = 1 << 22
# A page that begins a stream.
_BEGIN = b"OggS\0\2"


@dataclass(frozen=True)
class OggPage:
    """One Ogg page's header: where it is, and what it says.

    Attributes:
        offset: Its first byte.
        num_bytes: Its length.
        granule: Samples of its stream up to its end; −1 if no packet ends in it.
        serial: Its stream's number.
    """

    offset: int
    num_bytes: int
    granule: int
    serial: int


def _page(data: bytes, offset: int) -> OggPage | None:
    if len(data) < offset + 27:
        return None
    magic, version, _, granule, serial, _, _, segments = struct.unpack_from("<4sBBqIIIB", data, offset)
    if magic != b"OggS" or version != 0:
        return None
    table = data[offset + 27 : offset + 27 + segments]
    num_bytes = 27 + segments + sum(table) if len(table) == segments else len(data)
    return OggPage(offset, num_bytes, granule, serial)


def first_pages(source: ByteSource) -> list[OggPage]:
    """The first pages in order, two at least if there are two."""
    return _pages(source, 0)


def last_pages(source: ByteSource) -> list[OggPage]:
    """The last pages in order, two at least if there are two."""
    return _pages(source, max(0, source.size - 2 * _MAX_PAGE))


def _pages(source: ByteSource, start: int) -> list[OggPage]:
    data = source.read_at(start, 2 * _MAX_PAGE)
    pages = []
    offset = data.find(b"OggS")
    while offset >= 0:
        page = _page(data, offset)
        if page is None:
            offset = data.find(b"OggS", offset + 1)
            continue
        pages.append(replace(page, offset=start + offset))
        offset = data.find(b"OggS", offset + page.num_bytes)
    return pages


def all_pages(source: ByteSource) -> Iterator[OggPage]:
    """Every page from the beginning on, as far as they follow one another."""
    start, offset, data = 0, 0, b""
    while True:
        if len(data) - offset < _MAX_PAGE and start + len(data) < source.size:
            start, offset, data = start + offset, 0, source.read_at(start + offset, _READ_AT_ONCE)
        page = _page(data, offset)
        if page is None:
            return
        yield replace(page, offset=start + offset)
        offset += page.num_bytes


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def checksum(page: bytes) -> int:
    """The checksum of a page whose own checksum field is zero."""
    # zlib's, of the same polynomial, is of mirrored bits, and inverted before and after: a start value of −1 undoes
    # the first inversion, the mask the second.
    mirrored = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4, "little").translate(_REVERSED), "big")


def damaged(source: ByteSource, page: OggPage) -> bool:
    """The page isn't what its checksum says."""
    data = bytearray(source.read_at(page.offset, page.num_bytes))
    (stored,) = struct.unpack_from("<I", data, 22)
    data[22:26] = bytes(4)
    return checksum(bytes(data)) != int(stored)


def opus_samples(source: ByteSource, granule: int, sample_rate: int) -> int:
    """Samples at `sample_rate` up to a page's granule, which counts at 48 kHz, with the encoder's delay."""
    pre_skip = int.from_bytes(source.read_at(38, 2), "little")
    return (granule - pre_skip) * sample_rate // 48000


def first_damaged(source: ByteSource) -> OggPage | None:
    """The first page that isn't what its checksum says."""
    return next((page for page in all_pages(source) if damaged(source, page)), None)


def links(source: ByteSource) -> list[tuple[int, int]]:
    """Byte ranges of the streams that lie one after the other in the file: one, or more in a chained file.

    Streams that run side by side (sound with a film) count as one.
    """
    starts: list[int] = []
    start, side_by_side = 0, -1
    while start < source.size:
        data = source.read_at(start, _READ_AT_ONCE)
        at = data.find(_BEGIN)
        while at >= 0:
            page = _page(source.read_at(start + at, _MAX_PAGE), 0)
            if page is not None:
                if start + at != side_by_side:
                    starts.append(start + at)
                side_by_side = start + at + page.num_bytes
            at = data.find(_BEGIN, at + 1)
        # What the next piece repeats is too short to be found twice.
        start += max(1, len(data) - len(_BEGIN) + 1)
    return list(pairwise([*starts, source.size])) or [(0, source.size)]
