"""The common time of several sources: exact positions on the coarsest grid that all of them share."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import InputError
from codec.frames import Seconds, exact_seconds
from codec.sources import Batched, Request, Source


class Batch(dict[str, Any]):
    """A batch: one entry per source, `key`, `start`, `length`, and the drawn values, by name."""

    def as_tuple(self, *names: str) -> tuple[Any, ...]:
        """The entries of these names, for `x, y = batch.as_tuple("x", "y")`.

        Raises:
            InputError: No such entry.
        """
        missing = [name for name in names if name not in self]
        if missing:
            raise InputError(f"the batch has no entry {missing[0]!r}; it has {', '.join(self)}")
        return tuple(self[name] for name in names)

    def replace(self, **entries: Any) -> Batch:
        """Another batch with these entries exchanged or added; the rest is shared, not copied.

        Example:
            >>> batch = batch.replace(x=batch["x"].half(), **{"x mean": batch["x"].mean()})
        """
        return Batch({**self, **entries})


class Timeline:
    """Sources side by side: common items, common grid.

    Args:
        sources: Name → source.
        whole: Items end with the last step that they begin, for loaders that must reach every end; otherwise with
            the last step that they fill.
        padded: An item that fills no step has one all the same.
        align: Grid steps per second; the finest that all sources share if None.
        stacklevel: Frames between the user's call and this one, for the warning.

    Attributes:
        rate: Grid steps per second.
        keys: Items that all sources have.
        num_steps: int64 `[items]`, the span that all sources have of each, in steps.

    Raises:
        InputError: No sources, none with time, no common key, labels beyond an item's end.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        *,
        whole: bool,
        padded: bool = False,
        align: Seconds | None = None,
        stacklevel: int,
    ) -> None:
        if not sources:
            raise InputError("sources is empty; give at least one, such as {'x': AudioFiles(folder)}")
        taken = set(sources) & {"key", "start", "length", "replaced"}
        if taken:
            raise InputError(f"sources {sorted(taken)} would overwrite other batch entries; rename them")
        self.sources = dict(sources)
        rates = {name: rate for name, source in self.sources.items() if (rate := source.rate()) is not None}
        if not rates:
            raise InputError(f"the sources {sorted(sources)} have no time; give at least one that has, such as audio")
        self.rate = common_rate(list(rates.values()))
        self._grid = f"the grid that the sources' rates {[str(rate) for rate in rates.values()]} share"
        if align is not None:
            self.rate, self._grid = _aligned(align, rates, self.rate), f"the grid that align={align!r} asks for"
        self.source_rates = rates
        # What workers do; the rest is for the consumer.
        self._read_from = {n: s.in_worker if isinstance(s, Batched) else s for n, s in self.sources.items()}
        self.factors = {name: int(rate / self.rate) for name, rate in rates.items()}
        self.keys, numbers = self._common_keys(stacklevel + 1)
        self.num_steps = self._common_steps(numbers, whole, padded)

    def steps(self, name: str, seconds: Seconds, *, least: int = 1) -> int:
        """A duration as a whole number of grid steps.

        Raises:
            InputError: It isn't whole, or below `least`.
        """
        exact = exact_seconds(seconds)
        steps = exact * self.rate
        if steps.denominator != 1 or steps < least:
            nearest = max(least, round(steps)) / self.rate
            raise InputError(
                f"{name} {exact} s is {float(steps):g} steps of {1 / self.rate} s, {self._grid}; "
                f"it must be a whole number ≥ {least}: take {nearest} s"
            )
        return int(steps)

    def read(
        self,
        name: str,
        keys: Sequence[str],
        starts: Sequence[int],
        lengths: Sequence[int],
        values: Sequence[Mapping[str, float]],
        out: Tensor | None = None,
    ) -> Any:
        """What a source has of these spans, which are given in grid steps; before what `Batched` marks.

        Into `out`, if it is given.
        """
        source, factor = self._read_from[name], self.factors.get(name)
        rows = zip(keys, starts, lengths, values, strict=True)
        if factor is None:
            return source.get([Request(k, 0, 1, v) for k, _, _, v in rows])
        requests = [Request(k, s * factor, n * factor, v) for k, s, n, v in rows]
        if out is None:
            return source.get(requests)
        source.get_into(requests, out)
        return out

    def finish(self, batch: Batch) -> Batch:
        """A batch with what `Batched` marks."""
        done = {
            name: source.finish(batch[name], batch)
            for name, source in self.sources.items()
            if isinstance(source, Batched) and name in batch
        }
        return batch.replace(**done) if done else batch

    def repeated(self, name: str, data: Any, periods: Sequence[int], length: int) -> Any:
        """Rows of items of `periods` steps, repeated to fill `length` steps."""
        factor = self.factors.get(name)
        if factor is None or all(period >= length for period in periods):
            return data
        if not isinstance(data, Tensor):
            raise InputError(
                f"short='repeat' needs tensors, source {name!r} gives {type(data).__name__}; use 'pad' or 'skip'"
            )
        if data.ndim < 2 or data.shape[-1] != length * factor:
            return data  # one value per excerpt
        at = torch.arange(length * factor)
        rows = zip(data, periods, strict=True)
        return torch.stack([row[..., at % (min(period, length) * factor)] for row, period in rows])

    def _common_keys(self, stacklevel: int) -> tuple[Sequence[str], dict[str, NDArray[np.int64]]]:
        """Keys that every source has, and their numbers in each source."""
        keys = {name: source.keys() for name, source in self.sources.items()}
        first, *others = keys.values()
        if all(len(other) == len(first) and other == first for other in others):
            if not len(first):
                raise InputError(f"the sources {sorted(keys)} have no items; give some")
            return first, {}
        tables = {name: {key: number for number, key in enumerate(some)} for name, some in keys.items()}
        common = [key for key in first if all(key in table for table in tables.values())]
        if not common:
            some = {name: list(table)[:2] for name, table in tables.items()}
            raise InputError(f"the sources have no common key (their first ones: {some}); make their keys agree")
        dropped = len(set().union(*tables.values())) - len(common)
        if dropped:
            warnings.warn(f"{dropped} keys are not in every source and are left out", stacklevel=stacklevel)
        return common, {name: np.array([table[k] for k in common]) for name, table in tables.items()}

    def _common_steps(self, numbers: dict[str, NDArray[np.int64]], whole: bool, padded: bool) -> NDArray[np.int64]:
        def lengths(name: str, filled: bool = False) -> NDArray[np.int64]:
            source = self.sources[name]
            table = np.asarray(source.filled() if filled else source.lengths())
            return table[numbers[name]] if numbers else table

        timed = [name for name in self.factors if not self.sources[name].annotates]
        labels = [name for name in self.factors if self.sources[name].annotates]
        limiting = timed or labels
        begun = np.min([-(-lengths(name) // self.factors[name]) for name in limiting], axis=0)
        for name in labels if timed else []:
            ends = lengths(name)
            late = np.flatnonzero(ends > begun * self.factors[name])
            if late.size:
                item, rate = int(late[0]), self.source_rates[name]
                raise InputError(
                    f"{name!r}: the labels of {self.keys[item]!r} end at {float(ends[item] / rate):g} s, the item at "
                    f"{float(begun[item] / self.rate):g} s ({late.size} such items); correct the table"
                )
        if whole:
            return np.asarray(begun, dtype=np.int64)
        floor = np.min([lengths(name, filled=True) // self.factors[name] for name in limiting], axis=0)
        return np.asarray(np.maximum(floor, np.minimum(begun, 1)) if padded else floor, dtype=np.int64)


def _aligned(align: Seconds, rates: Mapping[str, Fraction], common: Fraction) -> Fraction:
    """The rate of `align`, a divisor of all rates."""
    exact = exact_seconds(align)
    if exact <= 0:
        raise InputError(f"align is {align!r}; it must be above 0 steps per second, such as the codec's frame rate")
    for name, rate in rates.items():
        if (rate / exact).denominator != 1:
            raise InputError(
                f"align is {exact} steps per second, source {name!r} has {rate} positions per second: a step would be "
                f"{float(rate / exact):g} of them; align to {common_rate([common, exact])} or a divisor of it, or "
                f"resample {name!r} to a multiple of {exact} per second"
            )
    return exact


def common_rate(rates: Sequence[Fraction]) -> Fraction:
    """Greatest common divisor of the rates: the finest grid that lies on all of theirs."""
    common = rates[0]
    for rate in rates[1:]:
        numerator = math.gcd(common.numerator * rate.denominator, rate.numerator * common.denominator)
        common = Fraction(numerator, common.denominator * rate.denominator)
    return common
