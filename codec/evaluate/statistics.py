"""Summaries that say how sure they are: mean, median, worst five per cent, bootstrap intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WORST_SHARE = 0.05


@dataclass(frozen=True)
class Statistic:
    """A measure over clips.

    Attributes:
        mean: Mean over the clips where it is defined; None if there are none.
        low: Lower end of the mean's bootstrap interval of 95 %; None of fewer than two clips.
        high: Its upper end.
        median: Median.
        worst: Mean of the worst five per cent of the clips, at least one.
        count: Clips where it is defined.
    """

    mean: float | None
    low: float | None
    high: float | None
    median: float | None
    worst: float | None
    count: int


def summarise(
    values: Sequence[float | None], *, higher_is_better: bool | None = True, resamples: int = 2000
) -> Statistic:
    """Statistics of values, of which those that are None or NaN are left out.

    The bootstrap's random numbers are always the same ones, so that the same values give the same interval.

    Args:
        values: One per clip.
        higher_is_better: Which end is worst. None: far from zero.
        resamples: Of the bootstrap.
    """
    known = np.array([v for v in values if v is not None and math.isfinite(v)], np.float64)
    if len(known) == 0:
        return Statistic(None, None, None, None, None, 0)
    low = high = None
    if len(known) > 1:
        drawn = np.random.default_rng(0).integers(0, len(known), (resamples, len(known)))
        low, high = map(float, np.quantile(known[drawn].mean(1), (0.025, 0.975)))
    order = known if higher_is_better else -known
    if higher_is_better is None:
        order = -np.abs(known)
    number = max(1, round(WORST_SHARE * len(known)))
    worst = known[np.argsort(order, kind="stable")[:number]]
    return Statistic(float(known.mean()), low, high, float(np.median(known)), float(worst.mean()), len(known))
