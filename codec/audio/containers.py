"""What kind of audio file some bytes are, and whether all of it is there.

libsndfile and FFmpeg decode a file that was cut as if it ended there. These few looks at its headers, and at
its end,
tell: they read some kilobytes, never the whole file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Protocol

from codec.audio import mpeg

# Containers that libsndfile reads, and those that need FFmpeg.
FFMPEG_CONTAINERS = frozenset({"mp4", "matroska", "adts", "asf"})
_MAX_OGG_PAGE = 27 + 255 + 255 * 255
# RIFF sizes that writers to a pipe leave behind: not a length, but "until the end".
_STREAMED = (range(0x7FFFF000, 0x80000000), range(0xFFFFF000, 0x100000000))


class ByteSource(Protocol):
    """Random access to a file's bytes."""

    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset` on."""


def identify(source: ByteSource) -> str | None:
    """The container by content, whatever the file is called; None if unknown."""
    head = source.read_at(0, 64)
    if tag := mpeg.id3_length(head):
        head = source.read_at(tag, 64)
    if head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return "aiff"
    for magic, container in (
        (b"fLaC", "flac"),
        (b"OggS", "ogg"),
        (b"caff", "caf"),
        (b".snd", "au"),
        (b"riff\x2e\x91\xcf\x11", "w64"),
        (b"\x1a\x45\xdf\xa3", "matroska"),
        (b"\x30\x26\xb2\x75", "asf"),
    ):
        if head.startswith(magic):
            return container
    if head[4:8] in (b"ftyp", b"moov", b"mdat", b"wide"):
        return "mp4"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "adts"
    if mpeg.find_frame(source.read_at(tag, 1 << 16), 0):
        return "mp3"
    return None


def missing_end(source: ByteSource, container: str) -> str | None:
    """What says that the file ends early, in words; None if nothing does."""
    if container == "ogg":
        return _missing_ogg(source)
    if container == "mp4":
        return _missing_mp4(source)
    if container == "au":
        offset, size = struct.unpack_from(">II", source.read_at(0, 12).ljust(12, b"\0"), 4)
        return None if size == 0xFFFFFFFF else _missing(source, "audio", offset, size)
    if container in ("wav", "aiff", "caf"):
        return _missing_chunk(source, container)
    return None


def _missing(source: ByteSource, what: str, offset: int, size: int) -> str | None:
    if offset + size <= source.size:
        return None
    return (
        f"its header promises {size} bytes of {what} from byte {offset} on, the file holds "
        f"{max(0, source.size - offset)}"
    )


def _missing_chunk(source: ByteSource, container: str) -> str | None:
    head = source.read_at(0, 16)
    big = container != "wav" or head[:4] == b"RIFX"
    header, size_format = ("4sq", 12) if container == "caf" else ("4sI", 8)
    offset = 8 if container == "caf" else 12
    data_size_64 = None
    # Chunks may come in any number, but a file of thousands of empty ones is no audio.
    for _ in range(1000):
        raw = source.read_at(offset, size_format)
        if len(raw) < size_format:
            return f"it ends at byte {source.size}, before its audio begins"
        name, size = struct.unpack((">" if big else "<") + header, raw)
        if name == b"ds64":
            data_size_64 = struct.unpack("<Q", source.read_at(offset + 16, 8).ljust(8, b"\0"))[0]
        if size < 0 and (name, size) != (b"data", -1):
            return f"its chunk at byte {offset} claims {size} bytes"
        if name in (b"data", b"SSND"):
            start = offset + size_format
            if name == b"data" and data_size_64 is not None and size == 0xFFFFFFFF:
                size = data_size_64
            elif size == -1 or (container == "wav" and any(size in sizes for sizes in _STREAMED)):
                return None
            if size == 0 and container == "wav" and source.size > start:
                follow = source.size - start
                return f"its header was never finished: it promises 0 bytes of audio, {follow} follow"
            return _missing(source, "audio", start, size)
        offset += size_format + size + (size & 1 if container != "caf" else 0)
    return "it has no audio among its first 1000 chunks"


def _missing_mp4(source: ByteSource) -> str | None:
    offset = 0
    # A live recording has two boxes a fragment; a file of millions is made to keep us busy.
    for _ in range(100_000):
        if offset >= source.size:
            return None
        head = source.read_at(offset, 16)
        if len(head) < 8:
            return f"a box header at byte {offset} is cut"
        size, name = struct.unpack_from(">I4s", head)
        if size == 0:
            return None
        if size == 1 and len(head) == 16:
            (size,) = struct.unpack_from(">Q", head, 8)
        if size < 8:
            return f"the box at byte {offset} claims {size} bytes"
        if offset + size > source.size:
            return _missing(source, repr(name.decode("latin-1")), offset, size)
        offset += size
    return "it has more than 100000 boxes"


def _ogg_table() -> list[int]:
    table = []
    for byte in range(256):
        value = byte << 24
        for _ in range(8):
            value = (value << 1 ^ (0x04C11DB7 if value >> 31 else 0)) & 0xFFFFFFFF
        table.append(value)
    return table


_OGG_TABLE = _ogg_table()


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


def _ogg_page(data: bytes, offset: int) -> OggPage | None:
    if len(data) < offset + 27:
        return None
    magic, version, _, granule, serial, _, _, segments = struct.unpack_from("<4sBBqIIIB", data, offset)
    if magic != b"OggS" or version != 0:
        return None
    table = data[offset + 27 : offset + 27 + segments]
    num_bytes = 27 + segments + sum(table) if len(table) == segments else len(data)
    return OggPage(offset, num_bytes, granule, serial)


def first_ogg_pages(source: ByteSource) -> list[OggPage]:
    """The first pages in order, two at least if there are two."""
    return _ogg_pages(source, 0)


def last_ogg_pages(source: ByteSource) -> list[OggPage]:
    """The last pages in order, two at least if there are two."""
    return _ogg_pages(source, max(0, source.size - 2 * _MAX_OGG_PAGE))


def _ogg_pages(source: ByteSource, start: int) -> list[OggPage]:
    data = source.read_at(start, 2 * _MAX_OGG_PAGE)
    pages = []
    offset = data.find(b"OggS")
    while offset >= 0:
        page = _ogg_page(data, offset)
        if page is None:
            offset = data.find(b"OggS", offset + 1)
            continue
        pages.append(replace(page, offset=start + offset))
        offset = data.find(b"OggS", offset + page.num_bytes)
    return pages


def _missing_ogg(source: ByteSource) -> str | None:
    pages = last_ogg_pages(source)
    if not pages:
        return "no Ogg page begins in its last 130 KB"
    last = pages[-1]
    if last.offset + last.num_bytes > source.size:
        return f"its last page, at byte {last.offset}, is cut"
    # Whether it is flagged as the last one says nothing: many recorders stop without that.
    return None


def ogg_checksum(page: bytes) -> int:
    """The checksum of a page whose own checksum field is zero."""
    checksum = 0
    for byte in page:
        checksum = (checksum << 8) & 0xFFFFFFFF ^ _OGG_TABLE[checksum >> 24 ^ byte]
    return checksum


def ogg_damaged(source: ByteSource, page: OggPage) -> bool:
    """The page isn't what its checksum says."""
    data = bytearray(source.read_at(page.offset, page.num_bytes))
    (stored,) = struct.unpack_from("<I", data, 22)
    data[22:26] = bytes(4)
    return bool(ogg_checksum(bytes(data)) != stored)


def opus_samples(source: ByteSource, granule: int, sample_rate: int) -> int:
    """Samples at `sample_rate` up to a page's granule, which counts at 48 kHz, with the encoder's delay."""
    pre_skip = int.from_bytes(source.read_at(38, 2), "little")
    return (granule - pre_skip) * sample_rate // 48000


def ogg_joined(source: ByteSource) -> bool:
    """Several streams lie in the file, one after the other: decoders play the first one only."""
    first, last = first_ogg_pages(source), last_ogg_pages(source)
    return bool(first and last) and first[0].serial != last[-1].serial
