"""Where everything lies in a token file: header, blocks, footer. FORMAT.md in code."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from zlib import crc32

from codec.errors import CodecError, TokenFileError
from codec.spec import CodecSpec

MAGIC = b"\x89CTOK\r\n\x1a"
END_MAGIC = b"CTOK-END"
VERSION = 1
BLOCK_FRAMES = 256
CRC_BYTES = 4

HEADER = struct.Struct("<8sIIII")
FOOTER = struct.Struct("<QIIQQII8s")
_U32 = struct.Struct("<I")
_RESTORE = "restore the file from a copy or encode it again"


def damaged(path: str, offset: int, found: str, limit: str, remedy: str = _RESTORE) -> TokenFileError:
    """The error of a file that isn't what it should be: where, what is there, the limit, what to do."""
    return TokenFileError(f"{path}: at byte {offset}: {found}; {limit}; {remedy}")


def compact_json(value: Any) -> bytes:
    """JSON as the files hold it: UTF-8, no spaces, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def parse_json(path: str, offset: int, text: bytes | memoryview, what: str) -> Any:
    """JSON from an untrusted file."""
    try:
        return json.loads(bytes(text))
    except (ValueError, RecursionError) as error:
        raise damaged(path, offset, f"{what} isn't JSON ({error})", "it must be a JSON text in UTF-8") from error


@dataclass(frozen=True)
class BlockLayout:
    """The arithmetic of blocks and runs, in bytes and frames.

    Attributes:
        n_quantizers: Codebooks stored, K.
        bits: Bits per code.
    """

    n_quantizers: int
    bits: int

    @cached_property
    def full_run_bytes(self) -> int:
        """Bytes of one codebook's run in a full block."""
        return BLOCK_FRAMES // 8 * self.bits

    @cached_property
    def block_stride(self) -> int:
        """Bytes from one block of an item to the next, its CRC included."""
        return self.n_quantizers * self.full_run_bytes + CRC_BYTES

    def run_bytes(self, num_frames: int) -> int:
        """Bytes of one codebook's run in a block of `num_frames` frames."""
        return (num_frames * self.bits + 7) >> 3

    def block_bytes(self, num_frames: int) -> int:
        """Bytes of a block of `num_frames` frames (at most 256), its CRC included."""
        return self.n_quantizers * self.run_bytes(num_frames) + CRC_BYTES

    def item_bytes(self, num_frames: int) -> int:
        """Bytes of all blocks of an item of `num_frames` frames."""
        full = (num_frames - 1) // BLOCK_FRAMES
        return full * self.block_stride + self.block_bytes(num_frames - full * BLOCK_FRAMES)


def block_crc(runs: bytes | memoryview, key_crc: int, block: int) -> int:
    """The check of block number `block` of the item whose key has CRC-32 `key_crc`."""
    return crc32(runs, crc32(_U32.pack(block), key_crc))


def bad_blocks(data: memoryview, stride: int, key_crc: int, block: int) -> list[int]:
    """Numbers of the blocks in `data` that fail their check; the first is number `block` of its item."""
    bad = []
    start, end = 0, len(data) - CRC_BYTES
    while start < end:
        stop = min(start + stride - CRC_BYTES, end)
        if crc32(data[start:stop], crc32(_U32.pack(block), key_crc)) != _U32.unpack_from(data, stop)[0]:
            bad.append(block)
        start += stride
        block += 1
    return bad


@dataclass(frozen=True)
class Header:
    """What a shard says of its codec, and where its records start.

    Attributes:
        spec: The codec's identity.
        n_quantizers: Codebooks stored, at most the codec's.
        data_start: Offset of the first record.
    """

    spec: CodecSpec
    n_quantizers: int
    data_start: int

    @property
    def layout(self) -> BlockLayout:
        """The blocks' arithmetic."""
        return BlockLayout(self.n_quantizers, self.spec.bits_per_code)


def codec_differences(header: Header, reference: Header) -> str:
    """What differs between the codecs of two shards, as text; empty if nothing does."""
    ours, theirs = reference.spec.to_dict(), header.spec.to_dict()
    ours["n_quantizers stored"], theirs["n_quantizers stored"] = reference.n_quantizers, header.n_quantizers
    return ", ".join(f"{name} ({theirs[name]!r}, not {ours[name]!r})" for name in ours if ours[name] != theirs[name])


def encode_header(spec: CodecSpec, n_quantizers: int) -> bytes:
    """The first bytes of a shard."""
    text = compact_json({"codec": spec.to_dict(), "n_quantizers": n_quantizers})
    start = HEADER.pack(MAGIC, VERSION, len(text), 0, 0)
    return HEADER.pack(MAGIC, VERSION, len(text), crc32(text, crc32(start[:16])), 0) + text


def header_bytes(path: str, start: bytes | memoryview, file_size: int) -> int:
    """Check magic, version and size in a shard's first 24 bytes; return the size of the whole header."""
    if len(start) < HEADER.size:
        raise damaged(path, 0, f"the file has {file_size} bytes", f"a token file has at least {HEADER.size}")
    magic, version, size, _, _ = HEADER.unpack(start[: HEADER.size])
    if magic != MAGIC:
        raise damaged(path, 0, f"magic is {magic!r}", f"a token file starts with {MAGIC!r}", "give a .ctok file")
    _check_version(path, 8, version)
    if HEADER.size + size > file_size:
        raise damaged(path, 12, f"header JSON takes {size} bytes", f"the file has {file_size} bytes in all")
    return int(HEADER.size + size)


def parse_header(path: str, header: bytes | memoryview) -> Header:
    """Parse a whole header (of the size that `header_bytes` gave)."""
    _, _, size, crc, zero = HEADER.unpack(header[: HEADER.size])
    text = header[HEADER.size :]
    expected = crc32(text, crc32(header[:16]))
    if crc != expected or zero:
        raise damaged(path, 16, f"header CRC is {crc:#010x}", f"its content has {expected:#010x}")
    fields = parse_json(path, HEADER.size, text, "the header")
    try:
        spec = CodecSpec.from_dict(fields["codec"])
        n_quantizers = fields["n_quantizers"]
        divisors = fields.get("frame_divisors")
        if not isinstance(spec.name, str) or not isinstance(spec.weights_hash, str):
            raise TypeError("name and weights_hash must be strings")
    except (CodecError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise damaged(path, HEADER.size, f"the codec's identity is unusable ({error})", "see FORMAT.md") from error
    if type(n_quantizers) is not int or not 1 <= n_quantizers <= spec.n_quantizers:
        limit = f"it must be 1 to {spec.n_quantizers}, the codec's"
        raise damaged(path, HEADER.size, f"n_quantizers is {n_quantizers!r}", limit)
    if divisors is not None and divisors != [1] * n_quantizers:
        limit = "this version reads codebooks at one frame rate only"
        raise damaged(path, HEADER.size, f"frame_divisors is {divisors!r}", limit, "use a newer version of codec")
    return Header(spec, n_quantizers, HEADER.size + size)


@dataclass(frozen=True)
class Footer:
    """Where a finished shard's directory is.

    Attributes:
        directory_offset: Offset of the directory.
        directory_bytes: Its size.
        directory_crc: Its CRC-32.
        num_items: Items in the shard.
        file_bytes: Size of the whole file.
    """

    directory_offset: int
    directory_bytes: int
    directory_crc: int
    num_items: int
    file_bytes: int

    def encode(self) -> bytes:
        """The last 48 bytes of a shard."""
        fields = (
            self.directory_offset,
            self.directory_bytes,
            self.directory_crc,
            self.num_items,
            self.file_bytes,
        )
        start = FOOTER.pack(*fields, VERSION, 0, END_MAGIC)[:36]
        return FOOTER.pack(*fields, VERSION, crc32(start), END_MAGIC)


def parse_footer(path: str, file_bytes: int, tail: bytes | memoryview) -> Footer:
    """Parse and check a file's last 48 bytes."""
    at = file_bytes - FOOTER.size
    *fields, version, crc, magic = FOOTER.unpack(tail)
    if magic != END_MAGIC:
        remedy = "an unfinished shard is completed by TokenWriter(resume=True); else restore the file from a copy"
        raise damaged(path, at + 40, f"end magic is {magic!r}", f"a finished shard ends with {END_MAGIC!r}", remedy)
    expected = crc32(tail[:36])
    if crc != expected:
        raise damaged(path, at + 36, f"footer CRC is {crc:#010x}", f"its content has {expected:#010x}")
    _check_version(path, at + 32, version)
    footer = Footer(*fields)
    if footer.file_bytes != file_bytes:
        raise damaged(path, at + 24, f"the footer says {footer.file_bytes} bytes", f"the file has {file_bytes}")
    if footer.directory_offset + footer.directory_bytes != at:
        found = f"the directory is at {footer.directory_offset}, {footer.directory_bytes} bytes"
        raise damaged(path, at, found, f"it must end at the footer, at {at}")
    return footer


def _check_version(path: str, offset: int, version: int) -> None:
    if version != VERSION:
        remedy = "use the version of codec that wrote it"
        raise damaged(path, offset, f"format version is {version}", f"this version reads {VERSION}", remedy)
