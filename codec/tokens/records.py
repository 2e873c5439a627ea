"""What precedes an item's blocks, made from untrusted arguments and read from untrusted files."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np

from codec.errors import InputError, TokenFileError
from codec.frames import num_frames
from codec.tokens.files import ByteFile
from codec.tokens.layout import Header, bad_blocks, compact_json, damaged, parse_json

RECORD = struct.Struct("<IQHBB")
_U32 = struct.Struct("<I")
_F32 = struct.Struct("<f")
_HAS_GAIN, _HAS_META = 1, 2
_LONGEST_START = RECORD.size + 8  # as far as the last field of fixed size

MAX_SAMPLES = 2**62 - 1
MAX_KEY_BYTES = 65535
MAX_META_BYTES = 2**32 - 1


@dataclass(frozen=True)
class RecordHead:
    """What precedes an item's blocks.

    Attributes:
        key: The item's key, UTF-8.
        num_samples: Exact length of the wave.
        gain: Factor by which the codec's input was scaled; None if it wasn't.
        meta: A JSON object as UTF-8 text; None if absent.
    """

    key: bytes
    num_samples: int
    gain: float | None
    meta: bytes | None

    def encode(self) -> bytes:
        """The bytes from the record's start to its first block."""
        flags = _HAS_GAIN * (self.gain is not None) | _HAS_META * (self.meta is not None)
        tail = self.key + (self.meta or b"")
        if self.meta is not None:
            tail = _U32.pack(len(self.meta)) + tail
        if self.gain is not None:
            tail = _F32.pack(self.gain) + tail
        fixed = RECORD.pack(0, self.num_samples, len(self.key), flags, 0)[4:]
        return _U32.pack(crc32(tail, crc32(fixed))) + fixed + tail


def make_head(key: str, num_samples: int, gain: float | None, meta: dict[str, Any] | None) -> RecordHead:
    """Check a writer's arguments and put them into their stored form.

    Raises:
        InputError: One of them is out of its range.
    """
    if not isinstance(key, str) or not key:
        raise InputError(f"key is {key!r}; it must be a string of at least one character")
    try:
        encoded = key.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"key {key!r} isn't valid Unicode ({error.reason}); rename the item") from error
    if len(encoded) > MAX_KEY_BYTES:
        raise InputError(f"key {key[:40]!r}... takes {len(encoded)} bytes; at most {MAX_KEY_BYTES}; shorten it")
    check_num_samples(key, num_samples)
    if gain is not None:
        gain = _stored_gain(key, gain)
    text = None
    if meta:
        if not isinstance(meta, dict) or not all(isinstance(field, str) for field in meta):
            raise InputError(f"{key!r}: meta is {meta!r}; it must be a dict with string keys")
        try:
            text = compact_json(meta)
        except (TypeError, ValueError, RecursionError) as error:
            remedy = "give strings, finite numbers, lists and dicts"
            raise InputError(f"{key!r}: meta isn't JSON ({error}); {remedy}") from error
        if len(text) > MAX_META_BYTES:
            raise InputError(f"{key!r}: meta takes {len(text)} bytes; at most {MAX_META_BYTES}; shorten it")
    return RecordHead(encoded, int(num_samples), gain, text)


def check_num_samples(key: str, num_samples: int) -> None:
    """Raise `InputError` unless `num_samples` is an integer in range."""
    is_integer = isinstance(num_samples, int | np.integer) and not isinstance(num_samples, bool)
    if not is_integer or not 1 <= num_samples <= MAX_SAMPLES:
        raise InputError(f"{key!r}: num_samples is {num_samples!r}; it must be an integer from 1 to 2**62 - 1")


def _stored_gain(key: str, gain: float) -> float:
    try:
        stored = float(_F32.unpack(_F32.pack(gain))[0])
    except (struct.error, OverflowError):
        stored = math.nan
    if not math.isfinite(stored):
        raise InputError(f"{key!r}: gain is {gain!r}; it must be a finite number that fits a float32")
    return stored


def head_bytes(path: str, offset: int, start: bytes | memoryview) -> int:
    """Size of the head whose first 24 bytes (or all the rest of the file) are `start`; CRC not checked."""
    if len(start) < RECORD.size:
        raise damaged(path, offset, f"{len(start)} bytes are left", f"a record head takes at least {RECORD.size}")
    _, num_samples, key_size, flags, zero = RECORD.unpack(start[: RECORD.size])
    in_range = 1 <= num_samples <= MAX_SAMPLES and key_size >= 1 and flags <= (_HAS_GAIN | _HAS_META)
    if not in_range or zero:
        found = f"num_samples {num_samples}, key size {key_size}, flags {flags:#x}, {zero}"
        raise damaged(path, offset, found, "a record has at least 1 sample, a key, flags 0 to 3, and a 0")
    size: int = RECORD.size + key_size + 4 * (flags & _HAS_GAIN)
    if flags & _HAS_META:
        at = RECORD.size + 4 * (flags & _HAS_GAIN)
        if len(start) < at + 4:
            raise damaged(path, offset, f"{len(start)} bytes are left", "the record has a meta size")
        size += 4 + _U32.unpack(start[at : at + 4])[0]
    return size


def parse_head(path: str, offset: int, head: bytes | memoryview) -> RecordHead:
    """Parse and check a head that takes all of `head`."""
    size = head_bytes(path, offset, head[:_LONGEST_START])
    if size != len(head):
        raise damaged(path, offset, f"the record head takes {size} bytes", f"its place has {len(head)}")
    crc, num_samples, key_size, flags, _ = RECORD.unpack(head[: RECORD.size])
    expected = crc32(head[4:])
    if crc != expected:
        raise damaged(path, offset, f"record CRC is {crc:#010x}", f"its content has {expected:#010x}")
    at = RECORD.size
    gain = meta = None
    if flags & _HAS_GAIN:
        gain = _F32.unpack(head[at : at + 4])[0]
        at += 4
        if not math.isfinite(gain):
            raise damaged(path, at - 4, f"gain is {gain}", "it must be finite")
    if flags & _HAS_META:
        at += 4
        meta = bytes(head[at + key_size :])
    return RecordHead(bytes(head[at : at + key_size]), num_samples, gain, meta)


def parse_meta(path: str, offset: int, text: bytes | None) -> dict[str, Any]:
    """An item's meta as a dict; empty if it has none."""
    if text is None:
        return {}
    meta = parse_json(path, offset, text, "an item's meta")
    if not isinstance(meta, dict):
        raise damaged(path, offset, f"meta is {type(meta).__name__}", "it must be a JSON object")
    return meta


def whole_records(file: ByteFile, header: Header) -> Iterator[tuple[RecordHead, int, int]]:
    """The records from the start of an unfinished shard to the first that is incomplete or damaged.

    Yields:
        The head, where its first block starts, where its last one ends.
    """
    at, layout = header.data_start, header.layout
    while True:
        try:
            first = at + head_bytes(file.path, at, file.read(at, min(at + _LONGEST_START, file.size)))
            if first > file.size:
                return
            head = parse_head(file.path, at, file.read(at, first))
            head.key.decode()
            parse_meta(file.path, at, head.meta)
        except (TokenFileError, UnicodeDecodeError):
            return
        end = first + layout.item_bytes(num_frames(head.num_samples, header.spec.hop_length))
        if end > file.size or bad_blocks(file.read(first, end), layout.block_stride, crc32(head.key), 0):
            return
        yield head, first, end
        at = end
