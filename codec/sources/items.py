"""Keys and paths of many files in little memory: offsets into a manifest, or into one buffer."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self, overload

import numpy as np
from numpy.typing import NDArray

from codec.errors import InputError

COLUMNS = ("path", "sample_rate", "num_samples")
"""Columns that a manifest must have; `key` is the path where there is none."""

Integers = NDArray[np.int64]
Words = NDArray[np.uint64]

_CHUNK = 1 << 21
_MAX_LINE = 65535
_RECENT = 8192
_MASK = 2**64 - 1
_PRIME = 0x9E3779B97F4A7C15
# The lowest n bytes of a word, and the highest n.
_LOW = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
_HIGH = ~_LOW[::-1]


class Items(Sequence[str]):
    """Keys, as a sequence, and the path of each; found by number and by key.

    Text stays where it is, in the manifest's file or in one buffer; in memory are its offsets and a sorted hash of
    each key: about 30 bytes per item, without Python objects whose reference counts would copy a forked worker's
    memory page by page.
    """

    def __init__(
        self,
        lines: Integers,
        spans: NDArray[np.uint16],
        hashes: Words,
        *,
        buffer: bytes | None = None,
        file: Path | None = None,
        identity: tuple[int, int] = (0, 0),
    ) -> None:
        """Offsets of lines `[n]`; begin and end of key and path in each `[4, n]`; hashes of the keys `[n]`."""
        self._lines, self._spans = lines, spans
        self._buffer, self._file, self._identity = buffer, file, identity
        self._handle: int | None = None
        # What was asked for a moment ago, in both directions.
        self._recent: dict[str, int] = {}
        self._texts: dict[int, str] = {}
        self._order = np.argsort(hashes).astype(np.uint32 if len(lines) < 2**32 else np.int64)
        self._hashes = hashes[self._order]
        same = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        seen: dict[str, int] = {}
        for place in np.union1d(same, same + 1).tolist():
            number = int(self._order[place])
            first = seen.setdefault(self[number], number)
            if first != number:
                where = "" if file is None else f"{file}: line {number + 2}: "
                raise InputError(f"{where}key {self[number]!r} comes twice; make the keys differ")

    @classmethod
    def of(cls, keys: Sequence[str], paths: Sequence[str]) -> Self:
        """Keys and paths that are in memory."""
        texts = [(_encoded(key), _encoded(path)) for key, path in zip(keys, paths, strict=True)]
        sizes = np.array([(len(key), len(path)) for key, path in texts], np.int64).reshape(-1, 2)
        totals = sizes.sum(axis=1)
        if len(totals) and totals.max() > _MAX_LINE:
            raise InputError(f"{keys[int(totals.argmax())][:80]!r}… and its path have over {_MAX_LINE} bytes")
        buffer = b"".join(part for pair in texts for part in pair)
        lines = np.cumsum(totals) - totals
        zero = np.zeros_like(totals)
        spans = np.stack([zero, sizes[:, 0], sizes[:, 0], totals]).astype(np.uint16)
        hashes = _hashed(_Bytes(buffer), lines, lines + sizes[:, 0])
        return cls(lines, spans, hashes, buffer=buffer)

    def __len__(self) -> int:
        """Items."""
        return len(self._lines)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        """Key of an item."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        key = self._text(number, 0)
        self._recent[key] = number
        return key

    def __iter__(self) -> Iterator[str]:
        """All keys."""
        for first in range(0, len(self), 1 << 14):
            lines = self._lines[first : first + (1 << 14)]
            begins, ends = self._spans[:2, first : first + len(lines)].astype(np.int64)
            low, high = int(lines[0]), int(lines[-1]) + int(ends[-1])
            data = self._bytes(low, high - low)
            spans = zip((lines + begins - low).tolist(), (lines + ends - low).tolist(), strict=True)
            yield from [_decoded(data[begin:end]) for begin, end in spans]

    def __eq__(self, other: object) -> bool:
        """Equal to any sequence of the same keys."""
        if other is self:
            return True
        if not isinstance(other, Sequence) or len(other) != len(self):
            return False
        if isinstance(other, Items) and not np.array_equal(self._hashes, other._hashes):
            return False
        return all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __contains__(self, key: object) -> bool:
        """Whether there is such an item."""
        return isinstance(key, str) and self.find(key) is not None

    def find(self, key: str) -> int | None:
        """An item's number; None if there is no such item."""
        number = self._recent.get(key)
        if number is not None:
            return number
        place = int(np.searchsorted(self._hashes, np.uint64(_hash(_encoded(key)))))
        while place < len(self) and int(self._hashes[place]) == _hash(_encoded(key)):
            number = int(self._order[place])
            if self._text(number, 0) == key:
                return number
            place += 1
        return None

    def path(self, number: int) -> str:
        """Path of an item; one that is relative to its manifest, from here."""
        text = self._text(number, 2)
        if self._file is None or "://" in text:
            return text
        return os.path.join(self._file.parent, text)

    def _text(self, number: int, row: int) -> str:
        text = self._texts.get(2 * number + row // 2)
        if text is None:
            begin, end = self._spans[row : row + 2, number].tolist()
            text = _decoded(self._bytes(int(self._lines[number]) + begin, end - begin))
            if len(self._texts) >= _RECENT:
                self._texts.clear()
                self._recent.clear()
            self._texts[2 * number + row // 2] = text
        return text

    def _bytes(self, start: int, length: int) -> bytes:
        if self._buffer is not None:
            return self._buffer[start : start + length]
        assert self._file is not None
        if self._handle is None:
            self._handle = os.open(self._file, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        if _identity(self._handle) != self._identity:
            raise InputError(f"{self._file} has changed since it was read; make the AudioFiles anew")
        return os.pread(self._handle, length, start)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None, "_recent": {}, "_texts": {}}

    def __del__(self) -> None:
        if self.__dict__.get("_handle") is not None:
            os.close(self.__dict__["_handle"])


class Manifest(NamedTuple):
    """What a manifest lists: items, and int64 `[n]` each their sample rates and samples."""

    items: Items
    sample_rates: Integers
    num_samples: Integers


def read_manifest(path: Path) -> Manifest:
    """Reads a `.tsv` or `.csv` table whose first line names its columns, a million lines in half a second.

    Raises:
        InputError: Missing columns, a line that isn't like the others, a number that is none or below 1, a key twice.
    """
    delimiter = b"," if path.suffix == ".csv" else b"\t"
    with path.open("rb") as file:
        identity = _identity(file.fileno())
        header = file.readline(_MAX_LINE + 1)
        names = [name.strip() for name in header.decode("utf-8-sig", "replace").split(delimiter.decode())]
        names = [name[1:-1] if name[:1] == name[-1:] == '"' else name for name in names]
        if missing := [name for name in COLUMNS if name not in names]:
            raise InputError(
                f"{path}: the columns are {names[:10]}; {missing} missing: a manifest has {list(COLUMNS)}, maybe key "
                "and others, in any order: see AudioFiles.save_manifest"
            )
        columns = [names.index(name) for name in ("key" if "key" in names else "path", *COLUMNS)]
        parts: list[list[NDArray[Any]]] = [[], [], [], [], []]
        line, offset = 2, len(header)
        for data in _whole_lines(file, path):
            if b'"' in data and delimiter == b",":
                return _quoted(path)
            found: tuple[NDArray[Any], ...] = _parsed(path, data, delimiter, len(names), columns, line)
            found[0][:] += offset
            for column, part in zip(parts, found, strict=True):
                column.append(part)
            line, offset = line + len(found[0]), offset + len(data)
    if not parts[0]:
        raise InputError(f"no audio files in {path}; it has no line but the first")
    lines, spans, hashes, rates, lengths = (_joined(column) for column in parts)
    items = Items(lines, spans, hashes, file=path.absolute(), identity=identity)
    return Manifest(items, rates, lengths)


def _joined(parts: list[NDArray[Any]]) -> NDArray[Any]:
    joined = np.concatenate(parts, axis=-1)
    parts.clear()
    return joined


def _whole_lines(file: Any, path: Path) -> Iterator[bytes]:
    carry = b""
    while block := file.read(_CHUNK):
        data = carry + block
        cut = data.rfind(b"\n") + 1
        carry = data[cut:]
        if len(carry) > _MAX_LINE:
            raise InputError(f"{path}: a line of over {_MAX_LINE} bytes; it isn't a manifest, or needs shorter paths")
        if cut:
            yield data[:cut]
    if carry:
        yield carry + b"\n"


def _parsed(
    path: Path, data: bytes, delimiter: bytes, num_columns: int, columns: list[int], line: int
) -> tuple[Integers, NDArray[np.uint16], Words, Integers, Integers]:
    """Lines' offsets, spans of key and path in them, hashes of the keys, rates and lengths."""
    text = _Bytes(data)
    plain = text.plain
    separators = np.flatnonzero((plain == delimiter[0]) | (plain == 10))
    if len(separators) % num_columns or (plain[separators[num_columns - 1 :: num_columns]] != 10).any():
        raise _bad_line(path, data, delimiter, num_columns, line)
    ends = separators.reshape(-1, num_columns)
    if np.count_nonzero(plain[separators] == 10) != len(ends):
        raise _bad_line(path, data, delimiter, num_columns, line)
    lines = np.concatenate([[0], ends[:-1, -1] + 1])
    if int((ends[:, -1] - lines).max()) > _MAX_LINE:
        raise InputError(f"{path}: a line of over {_MAX_LINE} bytes; it isn't a manifest, or needs shorter paths")

    def span(column: int) -> tuple[Integers, Integers]:
        begin = ends[:, column - 1] + 1 if column else lines
        end = ends[:, column]
        if column == num_columns - 1:
            end = end - (plain[end - 1] == 13)
        return begin, end

    key, place, rate, length = (span(column) for column in columns)
    for number, at in (("sample_rate", rate), ("num_samples", length)):
        _, fine = _numbers(text, *at)
        if not fine.all():
            row = int(np.flatnonzero(~fine)[0])
            bad = data[int(at[0][row]) : int(at[1][row])].decode(errors="replace")
            raise InputError(f"{path}: line {line + row}: {number} is {bad!r}; it must be a whole number ≥ 1")
    for name, (begin, end) in (("key", key), ("path", place)):
        if (empty := np.flatnonzero(end <= begin)).size:
            raise InputError(f"{path}: line {line + int(empty[0])} has no {name}; give one")
    spans = np.stack([*(at - lines for at in key), *(at - lines for at in place)]).astype(np.uint16)
    return lines, spans, _hashed(text, *key), _numbers(text, *rate)[0], _numbers(text, *length)[0]


def _bad_line(path: Path, data: bytes, delimiter: bytes, num_columns: int, line: int) -> InputError:
    for number, text in enumerate(data.splitlines()):
        if (found := text.count(delimiter) + 1) != num_columns:
            return InputError(
                f"{path}: line {line + number} has {found} columns, the first line {num_columns}: "
                f"{text[:80].decode(errors='replace')!r}; make them agree"
            )
    raise AssertionError("unreachable")


def _quoted(path: Path) -> Manifest:
    """The slow way, for cells in quotes."""
    keys, paths, rates, lengths = [], [], [], []
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        for row in (reader := csv.DictReader(file)):
            cells = [row.get(name) or "" for name in ("path" if row.get("key") is None else "key", *COLUMNS)]
            numbers = [int(cell) if cell.isascii() and cell.isdigit() else 0 for cell in cells[2:]]
            if not all(cells[:2]) or min(numbers) < 1:
                raise InputError(f"{path}: line {reader.line_num} is {row}; give {list(COLUMNS)}, numbers ≥ 1")
            keys.append(cells[0])
            paths.append(cells[1] if "://" in cells[1] else os.path.join(path.absolute().parent, cells[1]))
            rates.append(numbers[0])
            lengths.append(numbers[1])
    return Manifest(Items.of(keys, paths), np.array(rates, np.int64), np.array(lengths, np.int64))


class _Bytes:
    """Bytes, and the 64-bit little-endian word at each of them, 8 bytes before the first one included."""

    def __init__(self, data: bytes) -> None:
        padded = np.zeros(len(data) + 24, np.uint8)
        padded[8 : 8 + len(data)] = np.frombuffer(data, np.uint8)
        self.plain = padded[8 : 8 + len(data)]
        self._aligned = padded[: len(padded) & ~7].view("<u8")

    def words(self, at: Integers) -> Words:
        """Words that begin at these bytes, -8 … size."""
        at = at + 8
        shift = ((at & 7) << 3).astype(np.uint64)
        at >>= 3
        low = self._aligned.take(at, mode="clip") >> shift
        at += 1
        low |= self._aligned.take(at, mode="clip") << (np.uint64(64) - shift)  # numpy shifts by 64 to zero
        return low


def _numbers(text: _Bytes, begin: Integers, end: Integers) -> tuple[Integers, NDArray[np.bool_]]:
    """Decimal numbers of up to 16 digits, and which of them are such numbers and ≥ 1."""
    width = end - begin
    fine = (width >= 1) & (width <= 16)
    total = np.zeros(len(begin), np.uint64)
    for k in range(1 if int(width.max()) <= 8 else 2):
        mask = _HIGH[np.clip(width - 8 * k, 0, 8)]
        word = (text.words(end - 8 * (k + 1)) & mask) | (~mask & np.uint64(0x3030303030303030))
        high = word & np.uint64(0xF0F0F0F0F0F0F0F0)
        over = (word + np.uint64(0x0606060606060606)) & np.uint64(0xF0F0F0F0F0F0F0F0)
        fine &= (high == np.uint64(0x3030303030303030)) & (over == high)
        # Eight digits at once: pairs, fours, all.
        word = (word & np.uint64(0x0F0F0F0F0F0F0F0F)) * np.uint64(2561) >> np.uint64(8)
        word = (word & np.uint64(0x00FF00FF00FF00FF)) * np.uint64(6553601) >> np.uint64(16)
        word = (word & np.uint64(0x0000FFFF0000FFFF)) * np.uint64(42949672960001) >> np.uint64(32)
        total += word * np.uint64(10 ** (8 * k))
    return total.astype(np.int64), fine & (total > 0)


def _hashed(text: _Bytes, begin: Integers, end: Integers) -> Words:
    """A 64-bit hash of each span; `_hash` for many."""
    size = end - begin
    value = size.astype(np.uint64) * np.uint64(_PRIME)
    rows: Any = slice(None)
    for at in range(0, int(size.max(initial=0)), 8):
        if at:
            rows = np.flatnonzero(size > at)
        word = text.words(begin[rows] + at) & _LOW[np.minimum(size[rows] - at, 8)]
        mixed = (value[rows] ^ word) * np.uint64(_PRIME)
        value[rows] = mixed ^ (mixed >> np.uint64(29))
    return value


def _hash(data: bytes) -> int:
    value = len(data) * _PRIME & _MASK
    for at in range(0, len(data), 8):
        value = (value ^ int.from_bytes(data[at : at + 8], "little")) * _PRIME & _MASK
        value ^= value >> 29
    return value


def _identity(handle: int) -> tuple[int, int]:
    status = os.fstat(handle)
    return status.st_size, status.st_mtime_ns


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
