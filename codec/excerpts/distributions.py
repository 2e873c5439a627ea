"""What named random values are drawn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from codec.errors import InputError


class Distribution(Protocol):
    """What a named random value is drawn from."""

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Values for uniform random numbers in `[0, 1)`, one each: the inverse of the cumulative distribution."""


@dataclass(frozen=True)
class Uniform:
    """Real numbers in `[low, high)`."""

    low: float
    high: float

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """One value per uniform number."""
        return self.low + (self.high - self.low) * uniform


@dataclass(frozen=True)
class Choice:
    """One of `values`, with even odds or `weights`."""

    values: tuple[float, ...]
    weights: tuple[float, ...] | None = field(default=None)

    def __post_init__(self) -> None:
        if not self.values or (self.weights is not None and len(self.weights) != len(self.values)):
            raise InputError(f"{self}: give at least one value, and as many weights as values")
        if self.weights is not None and (min(self.weights) < 0 or sum(self.weights) <= 0):
            raise InputError(f"{self}: weights must be ≥ 0, not all 0")

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """One value per uniform number."""
        edges = np.cumsum(self.weights or np.ones(len(self.values)))
        chosen = np.searchsorted(edges / edges[-1], uniform, side="right")
        return np.asarray(self.values, dtype=np.float64)[np.minimum(chosen, len(self.values) - 1)]
