"""What isn't audio: precomputed arrays, labels in time, and strings."""

from __future__ import annotations

import csv
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import InputError
from codec.frames import Seconds, exact_seconds
from codec.sources.base import Excerpt, ItemSpec, PathLike, Source, padded, unknown_key

OPEN_ARRAYS = 64
"""Memory-mapped arrays kept open at once by one source in one process."""

UNLABELLED = -1
"""Class index of a time or an item without label."""


class Arrays(Source):
    """Arrays whose last axis is time: precomputed features, pitch tracks, waves.

    Args:
        arrays: Key → array `[..., N]`, or the path of one saved by `np.save`, which is memory-mapped.
        rate: Positions per second, exact: an integer, or "22050/512".
        fill: What stands where a span passes its item's end.

    Raises:
        InputError: No arrays, an empty one, a file that isn't an array, a rate that isn't above 0.

    Example:
        >>> mels = Arrays({"a": "mels/a.npy"}, rate=100)
        >>> mels.get([Excerpt("a", 50, 100)]).shape
        torch.Size([1, 80, 100])
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any] | Tensor | PathLike], rate: Seconds, *, fill: float = 0
    ) -> None:
        if not arrays:
            raise InputError("arrays is empty; give at least one, such as {'a': 'features/a.npy'}")
        self._rate = exact_rate(rate)
        self._fill = fill
        self._arrays = {str(key): data for key, data in arrays.items()}
        self._number = {key: number for number, key in enumerate(self._arrays)}
        self._open: OrderedDict[str, NDArray[Any]] = OrderedDict()
        shapes = [self._array(key).shape for key in self._arrays]
        for key, shape in zip(self._arrays, shapes, strict=True):
            if not shape or shape[-1] < 1:
                raise InputError(f"array {key!r} has shape {list(shape)}; its last axis is time and needs ≥ 1 position")
        self._lengths = np.array([shape[-1] for shape in shapes], dtype=np.int64)

    def keys(self) -> Sequence[str]:
        """Item keys, in the order given."""
        return list(self._arrays)

    def rate(self) -> Fraction:
        """Positions per second."""
        return self._rate

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: size of each array's last axis."""
        return self._lengths

    def length(self, key: str) -> int:
        """Positions of one item."""
        if key not in self._number:
            raise unknown_key(self, key, self._arrays)
        return int(self._lengths[self._number[key]])

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """`[B, ..., N]` of the arrays' dtype, N the longest span; `fill` where a span passes its item's end."""
        rows = []
        for key, start, length in excerpts:
            if key not in self._arrays:
                raise unknown_key(self, key, self._arrays)
            rows.append(torch.from_numpy(np.array(self._array(key)[..., start : start + length])))
        return padded(rows, max(length for _, _, length in excerpts), self._fill)

    def _array(self, key: str) -> NDArray[Any]:
        data = self._arrays[key]
        if isinstance(data, Tensor):
            return data.numpy()
        if not isinstance(data, str | os.PathLike):
            return np.asarray(data)
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        try:
            array: NDArray[Any] = np.load(data, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"{os.fspath(data)}: can't be read as an array ({error}); save it with np.save") from error
        self._open[key] = array
        if len(self._open) > OPEN_ARRAYS:
            self._open.popitem(last=False)
        return array

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}


class Strings(Source):
    """One string per item, such as a transcript or a speaker's name. A batch of them is a list.

    Args:
        strings: Key → string.
    """

    def __init__(self, strings: Mapping[str, str]) -> None:
        if not strings:
            raise InputError("strings is empty; leave the source out instead")
        self._strings = dict(strings)

    def keys(self) -> Sequence[str]:
        """Item keys, in the order given."""
        return list(self._strings)

    def rate(self) -> None:
        """None: strings have no time."""

    def lengths(self) -> NDArray[np.int64]:
        """Ones."""
        return np.ones(len(self._strings), dtype=np.int64)

    def spec(self, key: str) -> ItemSpec:
        """No tensor."""
        self.get([Excerpt(key, 0, 1)])
        return ItemSpec((), None, None)

    def get(self, excerpts: Sequence[Excerpt]) -> list[str]:
        """The item's string of each row."""
        for excerpt in excerpts:
            if excerpt.key not in self._strings:
                raise unknown_key(self, excerpt.key, self._strings)
        return [self._strings[excerpt.key] for excerpt in excerpts]


class Segments(Source):
    """Labels given as segments `[start, stop)` in seconds.

    Times are exact: "0.1" and 0.1 are one tenth of a second, whatever the rate. Rows may come in any order.

    Args:
        table: A `.csv` or `.tsv` file with a header, a DataFrame (pandas, polars), or rows: mappings, or tuples in
            the order of `columns`.
        mode: What the label of an excerpt is.
            "global": the item's only label, int64 `[B]`; start and stop are not looked at and may be missing.
            "center": the label at the middle of the excerpt, int64 `[B]`.
            "sequence": the label at the middle of each position, int64 `[B, N]`.
            "mask": which labels hold at the middle of each position, float32 `[B, classes, N]`: segments may
            overlap.
        rate: Positions per second in which excerpts are counted, exact; not for "global".
        classes: The labels in the order of their class indices; those of the table, sorted, if None. Give them where
            two tables must agree.
        columns: Names of the columns of key, start, stop and label.

    Where nothing is labelled, the class is -1.

    Raises:
        InputError: A missing column, a bad time, overlapping segments (but in "mask"), several labels of one item in
            "global", a label that isn't in `classes`.

    Example:
        >>> rows = [("a", 0, "0.5", "speech"), ("a", "0.5", 2, "music")]
        >>> Segments(rows, "sequence", rate=4).get([Excerpt("a", 0, 4)])
        tensor([[1, 1, 0, 0]])
    """

    annotates = True

    def __init__(
        self,
        table: Any,
        mode: Literal["global", "center", "sequence", "mask"],
        *,
        rate: Seconds | None = None,
        classes: Sequence[str] | None = None,
        columns: tuple[str, str, str, str] = ("key", "start", "stop", "label"),
    ) -> None:
        if mode not in ("global", "center", "sequence", "mask"):
            raise InputError(f"mode is {mode!r}; it must be 'global', 'center', 'sequence' or 'mask'")
        if (rate is None) != (mode == "global"):
            raise InputError(f"mode {mode!r} with rate={rate!r}; give a rate in all modes but 'global'")
        self.mode = mode
        self._rate = None if rate is None else exact_rate(rate)
        rows = list(_rows(table, columns, with_times=mode != "global"))
        if not rows:
            raise InputError(f"{table!r}: no segments; leave the source out if there are no labels")
        self.classes = list(classes) if classes is not None else sorted({label for _, _, _, label in rows})
        indices = {label: index for index, label in enumerate(self.classes)}
        by_key: dict[str, list[tuple[Fraction, Fraction, int]]] = {}
        for key, start, stop, label in rows:
            if label not in indices:
                raise InputError(f"{key!r}: label {label!r} [{start}, {stop}) s isn't in classes {self.classes}")
            by_key.setdefault(key, []).append((start, stop, indices[label]))
        self._keys = list(by_key)
        self._number = {key: number for number, key in enumerate(self._keys)}
        if self._rate is None:
            self._check_global(by_key)
            doubled = Fraction(0)
        else:
            doubled = 2 * self._rate
            for key, segments in by_key.items():
                segments.sort()
                if mode != "mask":
                    self._check_overlap(key, segments)
        counts = [len(segments) for segments in by_key.values()]
        self._offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        # In half positions: the middle of position k is 2k + 1, a segment holds at those from begin to end - 1.
        flat = [segment for segments in by_key.values() for segment in segments]
        self._begin = np.array([_ceil(start * doubled) for start, _, _ in flat], dtype=np.int64)
        self._end = np.array([_ceil(stop * doubled) for _, stop, _ in flat], dtype=np.int64)
        self._label = np.array([label for _, _, label in flat], dtype=np.int64)

    def keys(self) -> Sequence[str]:
        """Item keys, in the order of the table."""
        return self._keys

    def rate(self) -> Fraction | None:
        """Positions per second; None in mode "global"."""
        return self._rate

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: whole positions before the last segment's end."""
        if self._rate is None:
            return np.ones(len(self._keys), dtype=np.int64)
        return np.maximum.reduceat(self._end, self._offsets[:-1]) // 2

    def spec(self, key: str) -> ItemSpec:
        """See `mode`."""
        if key not in self._number:
            raise unknown_key(self, key, self._number)
        shape = {"sequence": (None,), "mask": (len(self.classes), None)}.get(self.mode, ())
        return ItemSpec(shape, torch.float32 if self.mode == "mask" else torch.int64, self._rate)

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """The labels of each span, see `mode`. Spans may begin before the item and pass its end."""
        length = max(excerpt.length for excerpt in excerpts)
        shape = {"sequence": (length,), "mask": (len(self.classes), length)}.get(self.mode, ())
        dtype, fill = (np.float32, 0) if self.mode == "mask" else (np.int64, UNLABELLED)
        out = np.full((len(excerpts), *shape), fill, dtype=dtype)
        for row, (key, start, span) in enumerate(excerpts):
            if key not in self._number:
                raise unknown_key(self, key, self._number)
            first, last = self._offsets[self._number[key]], self._offsets[self._number[key] + 1]
            begin, end, label = self._begin[first:last], self._end[first:last], self._label[first:last]
            if self.mode == "global":
                out[row] = label[0]
            elif self.mode == "mask":
                for index, low, high in zip(label, begin // 2 - start, end // 2 - start, strict=True):
                    out[row, index, min(max(low, 0), span) : min(max(high, 0), span)] = 1
            else:
                middle = 2 * start + np.array(span if self.mode == "center" else 2 * np.arange(span) + 1)
                segment = np.searchsorted(begin, middle, side="right") - 1
                inside = (segment >= 0) & (middle < end[np.maximum(segment, 0)])
                labels = np.where(inside, label[segment], UNLABELLED)
                out[(row, slice(span)) if self.mode == "sequence" else row] = labels
        return torch.from_numpy(out)

    def _check_global(self, by_key: Mapping[str, list[tuple[Fraction, Fraction, int]]]) -> None:
        for key, segments in by_key.items():
            found = sorted({self.classes[label] for _, _, label in segments})
            if len(found) > 1:
                raise InputError(f"{key!r} has the labels {found}; mode 'global' takes one: use 'center' or 'mask'")

    def _check_overlap(self, key: str, segments: list[tuple[Fraction, Fraction, int]]) -> None:
        for (start, stop, label), (later, end, other) in pairwise(segments):
            if later < stop:
                raise InputError(
                    f"{key!r}: {self.classes[label]!r} [{float(start):g}, {float(stop):g}) s and "
                    f"{self.classes[other]!r} [{float(later):g}, {float(end):g}) s overlap; use mode='mask' or cut one"
                )


def exact_rate(rate: Seconds) -> Fraction:
    """A rate as an exact fraction above 0."""
    exact = exact_seconds(rate)
    if exact <= 0:
        raise InputError(f"rate is {rate!r}; it must be above 0 per second")
    return exact


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _rows(
    table: Any, columns: tuple[str, str, str, str], *, with_times: bool
) -> Iterable[tuple[str, Fraction, Fraction, str]]:
    """Rows of any kind of table, checked."""
    wanted = columns if with_times else (columns[0], columns[3])
    if isinstance(table, str | os.PathLike):
        path = Path(table)
        with path.open(newline="", encoding="utf-8-sig") as file:
            records: list[Any] = list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    elif hasattr(table, "to_dicts"):
        records = table.to_dicts()
    elif hasattr(table, "to_dict"):
        records = table.to_dict("records")
    else:
        records = [row if isinstance(row, Mapping) else dict(zip(columns, row, strict=False)) for row in table]
    for number, record in enumerate(records):
        missing = [name for name in wanted if record.get(name) is None]
        if missing:
            raise InputError(f"row {number} of the segments lacks {missing}; it has {dict(record)}")
        key, label = str(record[columns[0]]), str(record[columns[3]])
        start = stop = Fraction(0)
        if with_times:
            start, stop = (_seconds(record[name], number, key) for name in columns[1:3])
            if not 0 <= start < stop:
                raise InputError(f"row {number} of the segments: {key!r} [{start}, {stop}) s; give 0 ≤ start < stop")
        yield key, start, stop, label


def _seconds(value: Any, number: int, key: str) -> Fraction:
    if isinstance(value, np.generic):
        value = str(value)
    try:
        return exact_seconds(value)
    except (InputError, TypeError) as error:
        raise InputError(f"row {number} of the segments: {key!r} has time {value!r}; give seconds") from error
