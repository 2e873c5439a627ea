"""Where everything lies in a token file: header, blocks, footer. FORMAT.md in code."""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib import import_module
from itertools import groupby
from operator import add
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from codec.errors import CodecError, InputError, TokenFileError
from codec.spec import CodecSpec

crc32: Callable[..., int] = zlib.crc32
with suppress(ImportError):  # the same CRC, several times as fast
    crc32 = import_module("isal.isal_zlib").crc32

MAGIC = b"\x89CTOK\r\n\x1a"
END_MAGIC = b"CTOK-END"
VERSION = 1
BLOCK_FRAMES = 256
CRC_BYTES = 4

HEADER = struct.Struct("<8sIIII")
FOOTER = struct.Struct("<QIIQQII8s")
_pack_number = struct.Struct("<I").pack
_CRC_OF_ALL = 0x2144DF1C  # of any bytes with their CRC-32 behind them, whatever it started from
Frames = TypeVar("Frames", int, npt.NDArray[np.int64])

_RESTORE = "restore the file from a copy or encode it again"


def damaged(path: str, offset: int, found: str, limit: str, remedy: str = _RESTORE) -> TokenFileError:
    """The error of a file that isn't what it should be: where, what is there, the limit, what to do."""
    return TokenFileError(f"{path}: at byte {offset}: {found}; {limit}; {remedy}")


def compact_json(value: Any) -> bytes:
    """JSON as the files hold it: UTF-8, no spaces, no NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _finite(text: str) -> float:
    value = float(text)  # NaN and Infinity, which Python's JSON has, and 1e999
    if not math.isfinite(value):
        raise ValueError(f"{text} isn't a finite number")
    return value


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)


def parse_json(path: str, offset: int, text: bytes | memoryview, what: str) -> Any:
    """JSON from an untrusted file: what `compact_json` can write again."""
    try:
        decoded = str(text, "utf-8")
        value = _JSON.decode(decoded)
        if "\\u" in decoded:
            compact_json(value)  # an escaped half of a surrogate pair is no text
        return value
    except (ValueError, RecursionError) as error:
        raise damaged(path, offset, f"{what} isn't JSON ({error})", "it must be a JSON text in UTF-8") from error


@dataclass(frozen=True)
class BlockLayout:
    """The arithmetic of blocks and runs, in bytes and frames.

    Attributes:
        n_quantizers: Codebooks stored, K.
        bits: Bits per code.
        frame_divisors: Of each codebook, the frames that share one of its codes.
    """

    n_quantizers: int
    bits: int
    frame_divisors: tuple[int, ...]

    @cached_property
    def one_rate(self) -> bool:
        """Whether every codebook has one code per frame."""
        return set(self.frame_divisors) == {1}

    @cached_property
    def groups(self) -> list[tuple[int, int, int]]:
        """Neighbouring codebooks of the same rate: (first, stop, divisor)."""
        groups, first = [], 0
        for divisor, members in groupby(self.frame_divisors):
            stop = first + len(list(members))
            groups.append((first, stop, divisor))
            first = stop
        return groups

    @cached_property
    def full_run_bytes(self) -> int:
        """Bytes of the run of a codebook with one code per frame in a full block."""
        return BLOCK_FRAMES // 8 * self.bits

    @cached_property
    def block_stride(self) -> int:
        """Bytes from one block of an item to the next, its CRC included."""
        return self.block_bytes(BLOCK_FRAMES)

    def run_bytes(self, num_frames: Frames, divisor: int = 1) -> Frames:
        """Bytes of the run of one codebook in a block of `num_frames` frames."""
        codes = num_frames if divisor == 1 else -(-num_frames // divisor)
        return (codes * self.bits + 7) >> 3

    def block_bytes(self, num_frames: Frames) -> Frames:
        """Bytes of a block of `num_frames` frames (at most 256), its CRC included."""
        runs = [(stop - first) * self.run_bytes(num_frames, divisor) for first, stop, divisor in self.groups]
        return reduce(add, runs) + CRC_BYTES

    def item_bytes(self, num_frames: Frames) -> Frames:
        """Bytes of all blocks of an item of `num_frames` frames (or of each of several)."""
        full = (num_frames - 1) >> 8
        return full * self.block_stride + self.block_bytes(num_frames - (full << 8))


def block_crc(runs: bytes | memoryview, key_crc: int, block: int) -> int:
    """The check of block number `block` of the item whose key has CRC-32 `key_crc`."""
    return crc32(runs, crc32(_pack_number(block), key_crc))


def bad_blocks(data: memoryview, stride: int, key_crc: int, block: int) -> list[int]:
    """Numbers of the blocks in `data` that fail their check; the first is number `block` of its item."""
    bad = []
    for start in range(0, len(data), stride):
        if crc32(data[start : start + stride], crc32(_pack_number(block), key_crc)) != _CRC_OF_ALL:
            bad.append(block)
        block += 1
    return bad


def first_bad_block(
    spans: Iterable[memoryview], stride: int, key_crcs: Iterable[int], blocks: Iterable[int]
) -> tuple[int, int] | None:
    """The first of these spans with a block that fails its check, and the block's number: `bad_blocks` of many."""
    for i, (data, key_crc, block) in enumerate(zip(spans, key_crcs, blocks, strict=True)):
        for start in range(0, len(data), stride):
            if crc32(data[start : start + stride], crc32(_pack_number(block), key_crc)) != _CRC_OF_ALL:
                return i, block
            block += 1
    return None


@dataclass(frozen=True)
class Header:
    """What a shard says of its codec, and where its records start.

    Attributes:
        spec: The codec's identity.
        n_quantizers: Codebooks stored, at most the codec's.
        frame_divisors: Of each codebook stored, the frames that share one of its codes.
        data_start: Offset of the first record.
    """

    spec: CodecSpec
    n_quantizers: int
    frame_divisors: tuple[int, ...]
    data_start: int

    @property
    def layout(self) -> BlockLayout:
        """The blocks' arithmetic."""
        return BlockLayout(self.n_quantizers, self.spec.bits_per_code, self.frame_divisors)


def codec_differences(header: Header, reference: Header) -> str:
    """What differs between the codecs of two shards, as text; empty if nothing does."""
    ours, theirs = reference.spec.to_dict(), header.spec.to_dict()
    for fields, shard in ((ours, reference), (theirs, header)):
        fields["n_quantizers stored"] = shard.n_quantizers
        fields["frame_divisors"] = list(shard.frame_divisors)
    return ", ".join(f"{name} ({theirs[name]!r}, not {ours[name]!r})" for name in ours if ours[name] != theirs[name])


def are_frame_divisors(divisors: Any, n_quantizers: int) -> bool:
    """Whether `divisors` are one power of two, 1 to 256, per codebook."""
    if not isinstance(divisors, list | tuple) or len(divisors) != n_quantizers:
        return False
    return all(type(d) is int and 1 <= d <= BLOCK_FRAMES and not d & (d - 1) for d in divisors)


def encode_header(spec: CodecSpec, n_quantizers: int, frame_divisors: tuple[int, ...]) -> bytes:
    """The first bytes of a shard."""
    fields: dict[str, Any] = {"codec": spec.to_dict(), "n_quantizers": n_quantizers}
    if set(frame_divisors) != {1}:
        fields["frame_divisors"] = list(frame_divisors)
    try:
        text = compact_json(fields)
    except (TypeError, ValueError) as error:
        raise InputError(f"{spec!r} can't be written as JSON ({error}); give names of valid Unicode") from error
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
    if divisors is None:
        divisors = [1] * n_quantizers
    if not are_frame_divisors(divisors, n_quantizers):
        limit = f"it must be {n_quantizers} powers of two from 1 to {BLOCK_FRAMES}"
        raise damaged(path, HEADER.size, f"frame_divisors is {divisors!r}", limit)
    return Header(spec, n_quantizers, tuple(divisors), HEADER.size + size)


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
