"""Which excerpts: random draws that are a pure function of (seed, n).

Draw n — the item, the position, every augmentation value — follows from counter-based random numbers
(Philox 4x64, Salmon et al. 2011) keyed by the seed and counted by n. Workers, ranks, restarts and batch order change
nothing, and a loader resumes from one integer.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from codec.errors import InputError
from codec.frames import Seconds, exact_seconds
from codec.sources import Excerpt, Source

POSITION_STREAM = 0


class Distribution(Protocol):
    """What a named random value is drawn from."""

    def draw(self, generator: np.random.Generator) -> float:
        """One value."""


@dataclass(frozen=True)
class Uniform:
    """Real numbers in `[low, high)`."""

    low: float
    high: float

    def draw(self, generator: np.random.Generator) -> float:
        """One value."""
        return float(generator.uniform(self.low, self.high))


@dataclass(frozen=True)
class Choice:
    """One of `values`, with even odds or `weights`."""

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = field(default=None)

    def draw(self, generator: np.random.Generator) -> float:
        """One value."""
        odds = None if self.weights is None else np.asarray(self.weights) / sum(self.weights)
        return float(generator.choice(self.values, p=odds))


class RandomExcerpts(Dataset[dict[str, Any]]):
    """Endless batches of random excerpts; batch n is a pure function of (seed, n).

    All sources of one loader give the same span of time of the same item. Positions lie on the coarsest grid on
    which every source has an exact position (the greatest common divisor of their rates).

    Args:
        sources: Name → source; only keys that all of them have are drawn.
        length: Seconds per excerpt, as an exact number ("0.5", `Fraction(51, 50)`); a whole number of positions
            of every source.
        batch_size: Excerpts per batch.
        seed: Any integer from 0 to 2**64 - 1.
        items: "duration": every possible excerpt is equally likely; "uniform": every item is; or a function from
            key to a whole number ≥ 0: every excerpt of that item counts as often.
        short: What to do with items shorter than `length`: "skip", or "pad" (start at 0, zeros at the end).
        rngs: Name → distribution: a value per excerpt, in the batch under its name. Each name has its own
            random stream: adding one changes no other.

    Batches are dicts: one entry per source (whatever its `get` returns), `key` (list of str), `start` and `length`
    (int64 `[B]`, in grid steps of `rate` per second), and float32 `[B]` per name of `rngs`.

    Raises:
        InputError: No common keys, no item long enough, a length that isn't whole on the grid, a bad seed.

    Example:
        >>> draws = RandomExcerpts({"x": AudioFiles("tests/data/prompts", sample_rate=16000)}, 1, batch_size=4, seed=0)
        >>> draws[0]["x"].shape
        torch.Size([4, 1, 16000])
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        length: Seconds,
        *,
        batch_size: int,
        seed: int,
        items: Literal["duration", "uniform"] | Callable[[str], int] = "duration",
        short: Literal["skip", "pad"] = "skip",
        rngs: Mapping[str, Distribution] | None = None,
    ) -> None:
        if not sources:
            raise InputError("sources is empty; give at least one, such as {'x': AudioFiles(folder)}")
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= seed < 2**64:
            raise InputError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
        if (not callable(items) and items not in ("duration", "uniform")) or short not in ("skip", "pad"):
            raise InputError(f"items={items!r}, short={short!r}; they must be 'duration'|'uniform' and 'skip'|'pad'")
        taken = set(rngs or ()) & {*sources, "key", "start", "length"}
        if taken:
            raise InputError(f"rngs {sorted(taken)} would overwrite other batch entries; rename them")
        self.sources = dict(sources)
        self.batch_size = batch_size
        self.seed = seed
        self._rngs = dict(rngs or {})
        self._by_item = items == "uniform"

        rates = {name: source.rate() for name, source in self.sources.items()}
        self.rate = _common_rate(list(rates.values()))
        self._factors = {name: int(rate / self.rate) for name, rate in rates.items()}
        seconds = exact_seconds(length)
        steps = seconds * self.rate
        if steps.denominator != 1 or steps < 1:
            nearest = max(1, round(steps)) / self.rate
            raise InputError(
                f"length {seconds} s is {float(steps):g} steps of 1/{self.rate} s, the grid that the sources' rates "
                f"{[str(r) for r in rates.values()]} share; it must be a whole number ≥ 1: take {nearest} s"
            )
        self.num_steps = int(steps)
        self._keys, num_steps = self._common_items()
        positions = num_steps - self.num_steps + 1
        if short == "pad":
            positions = np.maximum(positions, 1)
        longest = int(num_steps.max())
        keep = positions > 0
        if not keep.any():
            raise InputError(
                f"no item is as long as {seconds} s (the longest has {float(longest / self.rate):g} s); "
                "lower length, or pass short='pad'"
            )
        self._keys = [key for key, kept in zip(self._keys, keep, strict=True) if kept]
        self._positions = positions[keep]
        weights = [items(key) for key in self._keys] if callable(items) else [1] * len(self._keys)
        if min(weights) < 0 or sum(weights) == 0 or any(int(weight) != weight for weight in weights):
            raise InputError(f"items gives weights from {min(weights)} to {max(weights)}; whole numbers ≥ 0, not all 0")
        self._cumulative = np.cumsum(self._positions * np.array(weights, dtype=np.int64))

    def _common_items(self) -> tuple[list[str], np.ndarray[Any, np.dtype[np.int64]]]:
        """Keys that every source has, and the grid steps that all of them cover."""
        tables = {
            name: dict(zip(source.keys(), source.lengths() // self._factors[name], strict=True))
            for name, source in self.sources.items()
        }
        first = next(iter(tables.values()))
        common = [key for key in first if all(key in table for table in tables.values())]
        if not common:
            counts = {name: len(table) for name, table in tables.items()}
            raise InputError(f"the sources have no common key (items: {counts}); make their keys agree")
        dropped = len(set().union(*tables.values())) - len(common)
        if dropped:
            warnings.warn(f"{dropped} keys are not in every source and are left out", stacklevel=3)
        return common, np.array([min(table[key] for table in tables.values()) for key in common], dtype=np.int64)

    @property
    def num_items(self) -> int:
        """Items that can be drawn."""
        return len(self._keys)

    def draw(self, n: int) -> tuple[str, int]:
        """Item and start (grid steps) of excerpt n."""
        generator = self._generator(n, POSITION_STREAM)
        if self._by_item:
            item = int(generator.integers(len(self._keys)))
            return self._keys[item], int(generator.integers(self._positions[item]))
        ticket = int(generator.integers(self._cumulative[-1]))
        item = int(np.searchsorted(self._cumulative, ticket, side="right"))
        before = int(self._cumulative[item - 1]) if item else 0
        return self._keys[item], (ticket - before) % int(self._positions[item])

    def __getitem__(self, n: int) -> dict[str, Any]:
        """Batch n: excerpts n * batch_size … (n + 1) * batch_size - 1."""
        numbers = range(n * self.batch_size, (n + 1) * self.batch_size)
        draws = [self.draw(number) for number in numbers]
        batch: dict[str, Any] = {}
        for name, source in self.sources.items():
            factor = self._factors[name]
            batch[name] = source.get([Excerpt(k, s * factor, self.num_steps * factor) for k, s in draws])
        batch["key"] = [key for key, _ in draws]
        batch["start"] = torch.tensor([start for _, start in draws])
        batch["length"] = torch.full((self.batch_size,), self.num_steps)
        for name, distribution in self._rngs.items():
            stream = _stream_of(name)
            values = [distribution.draw(self._generator(number, stream)) for number in numbers]
            batch[name] = torch.tensor(values, dtype=torch.float32)
        return batch

    def _generator(self, n: int, stream: int) -> np.random.Generator:
        # The low 128 bits of the counter are the draw's own: no two (n, stream) overlap.
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, n, stream]))

    def loader(
        self,
        *,
        start_batch: int = 0,
        num_batches: int | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> DataLoader[dict[str, Any]]:
        """A torch DataLoader over batches `start_batch`, `start_batch + 1` and so on.

        Args:
            start_batch: Where to resume: the number of batches consumed so far.
            num_batches: How many; endless if None.
            num_workers: Worker processes; the batches are the same for any number.
            pin_memory: Put tensors in page-locked memory.
        """
        return DataLoader(
            self,
            batch_size=None,
            sampler=_Count(start_batch, num_batches),
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=False,
        )


class _Count(Sampler[int]):
    """Counts from `start`, `num` times or for ever."""

    def __init__(self, start: int, num: int | None) -> None:
        self._start = start
        self._num = num

    def __iter__(self) -> Iterator[int]:
        n = self._start
        while self._num is None or n < self._start + self._num:
            yield n
            n += 1

    def __len__(self) -> int:
        if self._num is None:
            raise TypeError("an endless loader has no length")
        return self._num


def _common_rate(rates: list[Fraction]) -> Fraction:
    """Greatest common divisor of the rates."""
    common = rates[0]
    for rate in rates[1:]:
        numerator = math.gcd(common.numerator * rate.denominator, rate.numerator * common.denominator)
        common = Fraction(numerator, common.denominator * rate.denominator)
    return common


def _stream_of(name: str) -> int:
    """A 64-bit stream number of a name, stable across processes; never POSITION_STREAM."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
