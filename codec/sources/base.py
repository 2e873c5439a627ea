"""What a source is, and what it is asked."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import InputError

PathLike = str | os.PathLike[str]

NO_VALUES: Mapping[str, float] = {}


class Excerpt(NamedTuple):
    """A half-open span `[start, start + length)` of one item, in samples or frames of the source asked."""

    key: str
    start: int
    length: int


class Request(Excerpt):
    """An excerpt with the random values drawn for it, by name.

    Two sources that use the same name get the same number. Sources that use none take plain excerpts as well.
    """

    values: Mapping[str, float] = NO_VALUES

    def __new__(cls, key: str, start: int, length: int, values: Mapping[str, float] = NO_VALUES) -> Self:
        """A request for a span."""
        self = super().__new__(cls, key, start, length)
        self.values = values
        return self


@dataclass(frozen=True)
class ItemSpec:
    """What a source gives for one item.

    Attributes:
        shape: Of one row, the batch's axis left out; None where time is. `(1, None)` is a mono wave, `(80, None)` a
            mel, `(8, None)` are codes of 8 codebooks, `()` is one value.
        dtype: Of its tensors; None where it gives something else, such as packed tokens or strings.
        rate: Positions per second; None without time.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    rate: Fraction | None

    @property
    def channels(self) -> int | None:
        """What stands before time: channels, bins or codebooks; None if nothing or more than one axis does."""
        return self.shape[0] if len(self.shape) == 2 and self.shape[1] is None else None


def moved(excerpt: Excerpt, start: int, length: int) -> Request:
    """Another span of the same item, with the same values."""
    return Request(excerpt.key, start, length, drawn(excerpt))


def drawn(excerpt: Excerpt) -> Mapping[str, float]:
    """The named values of a request; none of a plain excerpt."""
    return excerpt.values if isinstance(excerpt, Request) else NO_VALUES


class Source(ABC):
    """Base of all sources: subclass it for your own, with at least `keys`, `rate`, `lengths` and `get`."""

    annotates: bool = False
    """True for labels: they say something of an item, so they may end before it does, but not after."""

    @abstractmethod
    def keys(self) -> Sequence[str]:
        """Items, in a fixed order."""

    @abstractmethod
    def rate(self) -> Fraction | None:
        """Positions per second; None where an item is one thing without time, such as a name."""

    @abstractmethod
    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: length of each item of `keys()`, in positions; 1 without time."""

    @abstractmethod
    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """The spans, batched: one row per excerpt, filled up where a span passes its item's end."""

    def length(self, key: str) -> int:
        """Positions of one item.

        Raises:
            InputError: No such item.
        """
        table: dict[str, int] | None = self.__dict__.get("_length_of")
        if table is None:
            table = dict(zip(self.keys(), self.lengths().tolist(), strict=True))
            self.__dict__["_length_of"] = table
        if key not in table:
            raise unknown_key(self, key, table)
        return table[key]

    def filled(self) -> NDArray[np.int64]:
        """int64 `[items]`: `lengths`, without a last position that the item fills only partly, as it may in tokens."""
        return self.lengths()

    def spec(self, key: str) -> ItemSpec:
        """Shape, dtype and rate of what `get` gives for one item; by itself it reads a position to find out.

        Raises:
            InputError: No such item.
        """
        # Whatever values wrappers ask for, they are 1.
        sample = self.get([Request(key, 0, 2, defaultdict(lambda: 1.0))])
        if not isinstance(sample, Tensor):
            return ItemSpec((), None, self.rate())
        shape: tuple[int | None, ...] = tuple(sample.shape[1:])
        if shape and self.rate() is not None and shape[-1] == 2:
            shape = (*shape[:-1], None)
        return ItemSpec(shape, sample.dtype, self.rate())

    def get_into(self, excerpts: Sequence[Excerpt], out: Tensor) -> None:
        """As `get`, into a tensor `[B, ..., N]` of the source's dtype; sources that read in place save a copy.

        Args:
            excerpts: Spans of up to N positions.
            out: Filled, what lies beyond the longest span with zeros.

        Raises:
            InputError: A tensor of another shape or dtype.
        """
        data = self.get(excerpts)
        if not isinstance(data, Tensor):
            raise InputError(f"{type(self).__name__} gives {type(data).__name__}, which doesn't go into a tensor")
        check_out(out, data.shape, data.dtype)
        out[..., : data.shape[-1]] = data
        out[..., data.shape[-1] :] = 0

    def reach(self, length: int, values: Mapping[str, float]) -> int:
        """Positions from its start on that an excerpt of `length` reads, which wrappers that stretch change."""
        return length

    def stream(self, key: str, size: int, values: Mapping[str, float] = NO_VALUES) -> Iterator[Any]:
        """The whole item in batches of one row and `size` positions, the last one shorter; without gap or seam.

        Args:
            key: The item.
            size: Positions per piece. Joined, the pieces are the same for every size.
            values: Named values for the wrappers that use some.

        Raises:
            InputError: No such item, a size below 1.
        """
        if size < 1:
            raise InputError(f"size is {size}; it must be at least 1 position")
        total = self.length(key)
        for start in range(0, total, size):
            yield self.get([Request(key, start, min(size, total - start), values)])


def unknown_key(source: Source, key: str, keys: Any) -> InputError:
    """The error for an item that isn't there."""
    some = ", ".join(repr(k) for k, _ in zip(keys, range(3), strict=False))
    return InputError(f"{type(source).__name__} has no item {key!r}; keys() lists its {len(keys)} items: {some} …")


def padded(rows: Sequence[Tensor], length: int, fill: float = 0) -> Tensor:
    """Rows `[..., n]` of any n ≤ length → `[B, ..., length]`."""
    if len({row.shape[:-1] for row in rows}) > 1:
        shapes = sorted({tuple(row.shape[:-1]) for row in rows})
        raise InputError(f"rows of one batch have shapes {shapes} before time; make them agree, such as by mono=True")
    if all(row.shape[-1] == length for row in rows):
        return torch.stack(list(rows))
    batch = rows[0].new_full((len(rows), *rows[0].shape[:-1], length), fill)
    for target, row in zip(batch, rows, strict=True):
        target[..., : row.shape[-1]] = row
    return batch


def check_out(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """Raises InputError unless the tensor takes rows of this shape, which may be shorter."""
    if out.dtype != dtype or out.shape[:-1] != tuple(shape)[:-1] or out.shape[-1] < shape[-1]:
        raise InputError(
            f"out is {list(out.shape)} of {out.dtype}; the batch needs {list(shape)} of {dtype}: see spec()"
        )


def values_of(excerpts: Sequence[Excerpt], names: Sequence[str]) -> NDArray[np.float64]:
    """The named values of each excerpt, float64 `[B, names]`.

    Raises:
        InputError: The request lacks one.
    """
    try:
        return np.array([[drawn(e)[name] for name in names] for e in excerpts], dtype=np.float64)
    except KeyError as error:
        have = sorted(drawn(excerpts[0]))
        name = error.args[0]
        raise InputError(
            f"the request for {excerpts[0].key!r} has no value {name!r} (it has {have}); "
            f"give the loader rngs={{{name!r}: a distribution}}"
        ) from None
