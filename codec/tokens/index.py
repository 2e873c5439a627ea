"""The columns at the end of a shard: built by the writer, mapped and checked by the reader."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from codec.errors import TokenFileError
from codec.frames import num_frames
from codec.tokens.files import ByteFile
from codec.tokens.layout import (
    FOOTER,
    HEADER,
    BlockLayout,
    Footer,
    Header,
    compact_json,
    damaged,
    header_bytes,
    parse_footer,
    parse_header,
    parse_json,
)
from codec.tokens.records import MAX_KEY_BYTES, MAX_SAMPLES, RECORD, RecordHead, parse_head, parse_meta

MAX_META_COLUMNS = 64
_DTYPES = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "u8": "<u8", "f4": "<f4", "bytes": "u1"}
_CORE = {
    "offset": ("u4", "u8"),
    "num_samples": ("u4", "u8"),
    "key_end": ("u4", "u8"),
    "keys": ("bytes",),
    "hash": ("u4",),
    "order": ("u4", "u8"),
}
_GAIN = {"gain": ("f4",)}
_CHECK_ITEMS = 65536  # items validated at once when a shard is opened
_TAIL_BYTES = 65536  # fetched first from a remote file: footer, directory and, of small shards, the index

Array = npt.NDArray[Any]


class IndexBuilder:
    """Collects what the index says of each item."""

    def __init__(self) -> None:
        self._offset = array("Q")
        self._num_samples = array("Q")
        self._key_end = array("Q")
        self._keys = bytearray()
        self._gain = array("f")
        self._any_gain = False
        # Of each meta field: the code of each distinct value (as JSON text), and each item's code.
        self._meta: dict[str, tuple[dict[bytes, int], array[int]]] = {}
        self._meta_complete = True

    def __len__(self) -> int:
        return len(self._offset)

    def add(self, offset: int, num_samples: int, key: bytes, gain: float | None, meta: dict[str, Any]) -> None:
        """Add the next item; `offset` is that of its first block."""
        item = len(self)
        for field, value in meta.items():
            if field not in self._meta:
                if len(self._meta) == MAX_META_COLUMNS:
                    self._meta_complete = False
                    continue
                self._meta[field] = {}, array("I")
            values, codes = self._meta[field]
            codes.frombytes(bytes(codes.itemsize * (item - len(codes))))  # items before this one lack the field
            codes.append(values.setdefault(compact_json(value), len(values) + 1))
        self._offset.append(offset)
        self._num_samples.append(num_samples)
        self._keys += key
        self._key_end.append(len(self._keys))
        self._gain.append(math.nan if gain is None else gain)
        self._any_gain |= gain is not None

    def encode(self, data_end: int) -> Iterator[bytes]:
        """The bytes from `data_end` to the end of the file, in pieces."""
        position = data_end
        columns: dict[str, list[Any]] = {}
        meta: dict[str, dict[str, list[Any]]] = {}

        def place(kind: str, content: bytes) -> tuple[list[Any], bytes]:
            nonlocal position
            padding = bytes(-position % 8)
            entry = [kind, position + len(padding), len(content), crc32(content)]
            position += len(padding) + len(content)
            return entry, padding + content

        key_end = np.frombuffer(self._key_end, np.uint64)
        starts = [0, *self._key_end[:-1]]
        keys = memoryview(bytes(self._keys))
        hashes = np.fromiter(
            (crc32(keys[a:b]) for a, b in zip(starts, self._key_end, strict=False)), np.uint32, len(self)
        )
        order = np.argsort(hashes, kind="stable").astype(np.uint64)
        content: list[tuple[str, str, bytes]] = [
            ("offset", *_narrow(np.frombuffer(self._offset, np.uint64))),
            ("num_samples", *_narrow(np.frombuffer(self._num_samples, np.uint64))),
            ("key_end", *_narrow(key_end)),
            ("keys", "bytes", bytes(keys)),
            ("hash", "u4", hashes[order].astype("<u4").tobytes()),
            ("order", *_narrow(order)),
        ]
        if self._any_gain:
            content.append(("gain", "f4", np.frombuffer(self._gain, np.float32).astype("<f4").tobytes()))
        for name, kind, column in content:
            columns[name], piece = place(kind, column)
            yield piece
        for field, (values, codes) in self._meta.items():
            codes.frombytes(bytes(codes.itemsize * (len(self) - len(codes))))
            kind = "u1" if len(values) < 2**8 else "u2" if len(values) < 2**16 else "u4"
            entry, piece = place(kind, np.frombuffer(codes, np.uint32).astype(_DTYPES[kind]).tobytes())
            yield piece
            values_entry, piece = place("bytes", b"[" + b",".join(values) + b"]")
            yield piece
            meta[field] = {"codes": entry, "values": values_entry}
        directory = compact_json(
            {
                "num_items": len(self),
                "data_end": data_end,
                "columns": columns,
                "meta": meta,
                "meta_complete": self._meta_complete,
            }
        )
        end = position + len(directory) + FOOTER.size
        yield directory + Footer(position, len(directory), crc32(directory), len(self), end).encode()


def _narrow(values: npt.NDArray[np.uint64]) -> tuple[str, bytes]:
    kind = "u8" if len(values) and int(values.max()) >= 2**32 else "u4"
    return kind, values.astype(_DTYPES[kind]).tobytes()


class Shard:
    """One open token file: its header, and its index as arrays that look into the file.

    Opening checks header, footer, directory and the columns that locate items (CRCs, order, no overlap,
    nothing beyond the file), so that what follows may trust them.
    """

    def __init__(self, file: ByteFile) -> None:
        self.file = file
        self.path = file.path
        if file.size < HEADER.size + FOOTER.size:
            limit = f"a token file has at least {HEADER.size + FOOTER.size}"
            raise damaged(self.path, 0, f"the file has {file.size} bytes", limit)
        self._tail_start = max(0, file.size - _TAIL_BYTES)
        self._tail = file.read(self._tail_start, file.size)
        start = file.read(0, min(file.size, 4096))
        size = header_bytes(self.path, start, file.size)
        self.header: Header = parse_header(self.path, start[:size] if size <= len(start) else file.read(0, size))
        self.layout: BlockLayout = self.header.layout
        footer_bytes = self._range(file.size - FOOTER.size, file.size)
        self.footer: Footer = parse_footer(self.path, file.size, footer_bytes)
        self.fingerprint = bytes(footer_bytes)
        self._parse_directory()
        self._load_core()
        self._check_items()

    def __len__(self) -> int:
        return self.footer.num_items

    # --- opening

    def _range(self, start: int, stop: int) -> memoryview:
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : stop - self._tail_start]
        return self.file.read(start, stop)

    def _parse_directory(self) -> None:
        footer, path = self.footer, self.path
        at = footer.directory_offset
        text = self._range(at, at + footer.directory_bytes)
        if crc32(text) != footer.directory_crc:
            found = f"directory CRC is {crc32(text):#010x}"
            raise damaged(path, at, found, f"the footer says {footer.directory_crc:#010x}")
        directory = parse_json(path, at, text, "the directory")
        try:
            self._columns: dict[str, Any] = dict(directory["columns"])
            self._meta: dict[str, Any] = {
                field: (dict(column)["codes"], dict(column)["values"]) for field, column in directory["meta"].items()
            }
            self.meta_complete = bool(directory["meta_complete"])
            num_items, data_end = directory["num_items"], directory["data_end"]
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise damaged(path, at, f"the directory is unusable ({error!r})", "see FORMAT.md") from error
        if type(num_items) is not int or num_items != footer.num_items:
            raise damaged(path, at, f"num_items is {num_items!r}", f"the footer says {footer.num_items}")
        if type(data_end) is not int or not self.header.data_start <= data_end <= at:
            limit = f"it must be {self.header.data_start} to {at}"
            raise damaged(path, at, f"data_end is {data_end!r}", limit)
        self.data_end: int = data_end

    def _entry(self, name: str, entry: Any, kinds: Sequence[str]) -> tuple[str, int, int, int]:
        at = self.footer.directory_offset
        try:
            kind, offset, size, crc = entry
            numbers_ok = all(type(n) is int and n >= 0 for n in (offset, size, crc))
        except (TypeError, ValueError):
            numbers_ok = False
        if not numbers_ok or kind not in kinds:
            limit = f"it must be [{'|'.join(kinds)}, offset, bytes, crc32]"
            raise damaged(self.path, at, f"column {name!r} is {entry!r}", limit)
        if offset < self.data_end or offset + size > at or offset % 8:
            limit = f"it must lie in {self.data_end} to {at}, from a multiple of 8"
            raise damaged(self.path, at, f"column {name!r} is at {offset}, {size} bytes", limit)
        if kind != "bytes" and size != len(self) * int(kind[1]):
            limit = f"{len(self)} items of {kind} take {len(self) * int(kind[1])}"
            raise damaged(self.path, at, f"column {name!r} has {size} bytes", limit)
        return kind, offset, size, crc

    def _column(self, name: str, entry: Any, *kinds: str) -> Array:
        kind, offset, size, crc = self._entry(name, entry, kinds)
        content = self._range(offset, offset + size)
        if crc32(content) != crc:
            found = f"column {name!r} has CRC {crc32(content):#010x}"
            raise damaged(self.path, offset, found, f"the directory says {crc:#010x}")
        return np.frombuffer(content, _DTYPES[kind])

    def _load_core(self) -> None:
        at = self.footer.directory_offset
        missing = [name for name in _CORE if name not in self._columns]
        if missing:
            raise damaged(self.path, at, f"columns {missing} are missing", f"a shard has {list(_CORE)}")
        kinds = {name: kinds for name, kinds in (_CORE | _GAIN).items() if name in self._columns}
        spans = [self._entry(name, self._columns[name], kinds[name])[1:3] for name in kinds]
        first = min(offset for offset, _ in spans)
        if first < self._tail_start:  # a remote index comes in one request
            self._tail, self._tail_start = self.file.read(first, self.file.size), first
        arrays = {name: self._column(name, self._columns[name], *kinds[name]) for name in kinds}
        self.offset, self.num_samples, self.key_end = (arrays[n] for n in ("offset", "num_samples", "key_end"))
        self.hash, self.order, self.gain = arrays["hash"], arrays["order"], arrays.get("gain")
        self.keys = arrays["keys"].data
        # Meta columns are read when they are asked for; the rest of the tail isn't needed again.
        self._tail, self._tail_start = memoryview(b""), self.file.size

    def _check_items(self) -> None:
        """Keys ascend to their end; items ascend, apart and inside the data; hashes ascend and name items."""
        size = len(self)
        at = self.footer.directory_offset
        key_before, free_from = 0, self.header.data_start
        # More frames than bits in the file can't be; the bound keeps the arithmetic below in 64 bits.
        most_samples = min(8 * self.file.size * self.header.spec.hop_length, MAX_SAMPLES)
        for first in range(0, size, _CHECK_ITEMS):
            part = slice(first, first + _CHECK_ITEMS)
            key_end = self.key_end[part].astype(np.uint64).view(np.int64)
            key_start = np.concatenate([[key_before], key_end[:-1]])
            bad = (key_end <= key_start) | (key_end > len(self.keys)) | (key_end - key_start > MAX_KEY_BYTES)
            if bad.any():
                i = int(bad.argmax())
                found = f"the key of item {first + i} is bytes {key_start[i]} to {key_end[i]} of the keys"
                raise damaged(self.path, at, found, f"keys ascend within {len(self.keys)} bytes")
            samples = self.num_samples[part].astype(np.uint64)
            bad = (samples < 1) | (samples > most_samples)
            if bad.any():
                i = int(bad.argmax())
                found = f"item {first + i} has {samples[i]} samples"
                raise damaged(self.path, at, found, f"a file of {self.file.size} bytes can hold 1 to {most_samples}")
            offset = self.offset[part].astype(np.uint64).view(np.int64)
            end = offset + self.layout.item_bytes(self.num_frames_of(samples.view(np.int64)))
            free = np.concatenate([[free_from], end[:-1]])
            bad = (offset < free + RECORD.size + (key_end - key_start)) | (end > self.data_end)
            if bad.any():
                i = int(bad.argmax())
                found = f"item {first + i} has its blocks at {offset[i]} to {end[i]}"
                limit = f"its record head starts at {free[i]}, and the data ends at {self.data_end}"
                raise damaged(self.path, at, found, limit)
            hashes = self.hash[max(0, first - 1) : first + _CHECK_ITEMS]
            if (hashes[:-1] > hashes[1:]).any() or int(self.order[part].max()) >= size:
                found = f"the hash table is out of order near entry {first}"
                raise damaged(self.path, at, found, f"hashes ascend, and name items below {size}")
            key_before, free_from = int(key_end[-1]), int(end[-1])
        if key_before != len(self.keys):
            found = f"the keys take {len(self.keys)} bytes"
            raise damaged(self.path, at, found, f"the last key ends at {key_before}")

    # --- arithmetic

    def num_frames_of(self, num_samples: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Frames of items of so many samples."""
        return (num_samples - 1) // self.header.spec.hop_length + 1

    # --- items

    def key_bytes(self, item: int) -> memoryview:
        """The key of item number `item`, UTF-8."""
        return self.keys[int(self.key_end[item - 1]) if item else 0 : int(self.key_end[item])]

    def key_spans(self, items: npt.NDArray[np.int64]) -> tuple[list[int], list[int]]:
        """Where the keys of these items start and end in `keys`."""
        return np.where(items > 0, self.key_end[items - 1], 0).tolist(), self.key_end[items].tolist()

    def frames(self, item: int) -> int:
        """Frames of item number `item`."""
        return num_frames(int(self.num_samples[item]), self.header.spec.hop_length)

    def span(self, item: int) -> tuple[int, int]:
        """Where the blocks of item number `item` lie, in bytes."""
        start = int(self.offset[item])
        return start, start + self.layout.item_bytes(self.frames(item))

    def head_span(self, item: int) -> tuple[int, int]:
        """Where the record head of item number `item` lies: between the item before and its blocks."""
        return self.span(item - 1)[1] if item else self.header.data_start, int(self.offset[item])

    def head(self, item: int) -> RecordHead:
        """The record head of item number `item`, checked."""
        start, stop = self.head_span(item)
        return parse_head(self.path, start, self.file.read(start, stop))

    def block_error(self, item: int, block: int) -> TokenFileError:
        """The error of a block that fails its check."""
        key = bytes(self.key_bytes(item)).decode(errors="replace")
        return damaged(
            self.path,
            int(self.offset[item]) + block * self.layout.block_stride,
            f"block {block} of item {key!r} isn't what was written",
            "its bytes fail their CRC",
            "the other items are readable; encode this one again",
        )

    # --- meta

    def meta(self, item: int) -> dict[str, Any]:
        """The meta of item number `item`."""
        return parse_meta(self.path, self.head_span(item)[0], self.head(item).meta)

    @property
    def meta_fields(self) -> list[str]:
        """Meta fields that have a column."""
        return list(self._meta)

    def meta_column(self, field: str) -> tuple[Array, list[Any]] | None:
        """A field's codes (0 = absent, i = values[i - 1]) and values; None if it has no column."""
        if field not in self._meta:
            return None
        codes_entry, values_entry = self._meta[field]
        codes = self._column(f"meta {field}", codes_entry, "u1", "u2", "u4")
        text = self._column(f"meta {field}", values_entry, "bytes")
        at = self.footer.directory_offset
        values = parse_json(self.path, at, text.data, f"meta column {field!r}")
        if not isinstance(values, list) or (len(codes) and int(codes.max()) > len(values)):
            limit = "it must have a JSON array of values and codes up to their number"
            raise damaged(self.path, at, f"meta column {field!r} is unusable", limit)
        return codes, values

    def close(self) -> None:
        """Let go of the file and the arrays that look into it."""
        for name in ("offset", "num_samples", "key_end", "hash", "order", "gain", "keys", "_tail"):
            self.__dict__.pop(name, None)
        self.file.close()
