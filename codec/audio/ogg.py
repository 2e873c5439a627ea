"""Ogg pages: where they are, what they say, whether they are what their checksums say."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from codec.audio.info import ByteSource

_MAX_PAGE = 27 + 255 + 255 * 255
_READ_AT_ONCE = 1 << 22
# Bytes looked at for a page.
_NEAR = 1 << 14
# A page that begins a stream.
_BEGIN = b"OggS\0\2"


class OggPage(NamedTuple):
    """One Ogg page's header: where it is, and what it says.

    Attributes:
        offset: Its first byte.
        num_bytes: Its length.
        granule: Samples of its stream up to its end; −1 if no packet ends in it.
        serial: Its stream's number.
        number: Its own, one more than the page's before.
        num_packets: Packets that end in it.
    """

    offset: int
    num_bytes: int
    granule: int
    serial: int
    number: int
    num_packets: int


def _page(data: bytes, offset: int, start: int = 0) -> OggPage | None:
    """The page at `offset` of the data, which begin at `start` in their file."""
    if len(data) < offset + 27:
        return None
    magic, version, _, granule, serial, number, _, segments = struct.unpack_from("<4sBBqIIIB", data, offset)
    if magic != b"OggS" or version != 0:
        return None
    table = data[offset + 27 : offset + 27 + segments]
    num_bytes = 27 + segments + sum(table) if len(table) == segments else len(data)
    return OggPage(start + offset, num_bytes, granule, serial, number, segments - table.count(255))


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
        page = _page(data, offset, start)
        if page is None:
            offset = data.find(b"OggS", offset + 1)
            continue
        pages.append(page)
        offset = data.find(b"OggS", offset + page.num_bytes)
    return pages


def all_pages(source: ByteSource) -> Iterator[OggPage]:
    """Every page from the beginning on, as far as they follow one another."""
    return pages_from(source, 0, _READ_AT_ONCE)


def pages_from(source: ByteSource, start: int, at_once: int = 2 * _MAX_PAGE) -> Iterator[OggPage]:
    """The pages from the one at byte `start` on, as far as they follow one another."""
    offset, data = 0, b""
    while True:
        if len(data) - offset < _MAX_PAGE and start + len(data) < source.size:
            start, offset, data = start + offset, 0, source.read_at(start + offset, at_once)
        page = _page(data, offset, start)
        if page is None:
            return
        yield page
        offset += page.num_bytes


def find_page(source: ByteSource, serial: int, position: int, first: int, num_samples: int) -> int:
    """The first byte of a page that ends at sample `position` or before, near it; `first` if there is none.

    Args:
        source: The file.
        serial: The stream's number.
        position: A sample.
        first: The first byte of the first page of audio.
        num_samples: The position at which the last page ends.
    """
    low, low_sample, high, high_sample = first, 0, source.size, num_samples
    while high - low > 2 * _NEAR and low_sample < position < high_sample:
        guess = low + (high - low) * (position - low_sample) // (high_sample - low_sample) - _NEAR // 2
        at = max(low + 1, guess)
        data = source.read_at(at, min(_NEAR, high - at) + 27)
        offset = data.find(b"OggS")
        known = low, high
        while offset >= 0:
            page = _page(data, offset, at)
            if page is not None and page.serial == serial and low_sample <= page.granule <= high_sample:
                if page.granule > position:
                    high, high_sample = page.offset, page.granule
                    break
                low, low_sample = page.offset, page.granule
            offset = data.find(b"OggS", offset + 1)
        if known == (low, high):
            # A page longer than what was looked at, or none where it should be: from here on, page by page.
            break
    return low


_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


def checksum(page: bytes) -> int:
    """The checksum of a page whose own checksum field is zero."""
    # zlib's, of the same polynomial, is of mirrored bits, and inverted before and after: a start value of −1 undoes
    # the first inversion, the mask the second.
    mirrored = zlib.crc32(page.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(mirrored.to_bytes(4, "little").translate(_REVERSED), "big")


def damaged(source: ByteSource, page: OggPage) -> bool:
    """The page isn't what its checksum says."""
    return is_damaged(source.read_at(page.offset, page.num_bytes))


def is_damaged(page: bytes) -> bool:
    """The page's bytes aren't what their checksum says."""
    data = bytearray(page)
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


def end_before_gap(source: ByteSource) -> int | None:
    """The granule up to which no page of the first page's stream is missing; None if none is."""
    before, granule = None, 0
    for page in all_pages(source):
        if before is None or page.serial == before.serial:
            if before is not None and page.number != before.number + 1:
                return granule
            before, granule = page, max(granule, page.granule)
    return None


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
