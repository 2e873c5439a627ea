"""What kind of audio file some bytes are, and whether all of it is there.

libsndfile and FFmpeg decode a file that was cut as if it ended there. These few looks at its headers, and at its
end, tell: they read some kilobytes, never the whole file.
"""

from __future__ import annotations

import struct

from codec.audio import mpeg, ogg
from codec.audio.info import ByteSource

# Containers that libsndfile reads, and those that need FFmpeg.
FFMPEG_CONTAINERS = frozenset({"mp4", "matroska", "adts", "asf"})
# RIFF sizes that writers to a pipe leave behind: not a length, but "until the end".
STREAMED = (range(0x7FFFF000, 0x80000000), range(0xFFFFF000, 0x100000000))


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


def decoded_from_start(source: ByteSource) -> bool:
    """An excerpt costs the decoding of all that precedes it, and several of one file are best read together."""
    return identify(source) in FFMPEG_CONTAINERS or source.read_at(28, 8) == b"OpusHead"


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
            elif size == -1 or (container == "wav" and any(size in sizes for sizes in STREAMED)):
                return None
            if size == 0 and container == "wav" and source.size > start:
                follow = source.size - start
                return f"its header was never finished: it promises 0 bytes of audio, {follow} follow"
            if container == "wav" and (follow := _unclaimed(source, start + size + (size & 1), big)):
                return f"its header promises {size} bytes of audio, {follow} more follow that are no chunk"
            return _missing(source, "audio", start, size)
        offset += size_format + size + (size & 1 if container != "caf" else 0)
    return "it has no audio among its first 1000 chunks"


def _unclaimed(source: ByteSource, offset: int, big: bool) -> int:
    """Bytes behind the audio that are neither a chunk nor tags nor zeros: more audio, likely."""
    rest = source.read_at(offset, 64)
    if len(rest) < 8 or not any(rest) or rest.startswith((b"TAG", b"ID3", b"APETAGEX", b"LYRICSBEGIN")):
        return 0
    name, size = struct.unpack_from(">4sI" if big else "<4sI", rest)
    # A writer that was killed may have left the last chunk's end out.
    if all(32 <= byte < 127 for byte in name) and offset + 8 + size <= source.size + 1:
        return 0
    return source.size - offset


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


def _missing_ogg(source: ByteSource) -> str | None:
    pages = ogg.last_pages(source)
    if not pages:
        return "no Ogg page begins in its last 130 KB"
    last = pages[-1]
    if last.offset + last.num_bytes > source.size:
        return f"its last page, at byte {last.offset}, is cut"
    # Whether it is flagged as the last one says nothing: many recorders stop without that.
    return None
