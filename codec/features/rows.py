"""What happens to rows of features at the end: `[R, K, F]`, padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from codec.errors import InputError
from codec.features.edges import at_least

_Rows = TypeVar("_Rows", bound=Any)
_NORMALIZE_EPS = 1e-5


def shaped(features: _Rows, leading: Sequence[int]) -> _Rows:
    """Rows `[R, K, F]`, tensor or array, in a wave's leading shape, where a mono batch has none for its channel."""
    if len(leading) == 0:
        first: _Rows = features[0]
        return first
    if len(leading) == 2 and leading[1] > 1:
        features = features.reshape(*leading, *features.shape[1:])
    return features


def not_finite(rows: Tensor) -> InputError:
    """Where rows `[R, N]` hold NaN or infinity."""
    bad = (~rows.isfinite()).nonzero()
    if len(bad) == 0:
        peak = float(rows.abs().max())
        return InputError(f"the wave's peak of {peak:g} overflows float32; scale it to −1 … 1, or use .double()")
    row, sample = bad[0].tolist()
    return InputError(
        f"wave holds NaN or infinity, first at sample {sample} of row {row}; repair it, or leave it out by lengths"
    )


def beyond_end(values: Tensor, row_frames: Tensor | None) -> Tensor | None:
    """Which frames of `[R, K, F]` lie beyond their row's end: bool `[R, 1, F]`."""
    if row_frames is None:
        return None
    return (torch.arange(values.shape[2], device=values.device) >= row_frames[:, None])[:, None]


def normalized(mel: Tensor, beyond: Tensor | None) -> Tensor:
    """Zero mean and unit deviation over the frames of each row and bin."""
    if mel.shape[2] == 0:
        return mel
    # Relative to frame 0, so that a constant bin gives exactly 0 whatever the order of summation.
    mel = mel - mel[:, :, :1]
    if beyond is None:
        mel = mel - mel.mean(2, keepdim=True)
        variance = mel.square().sum(2, keepdim=True) / at_least(mel.shape[2] - 1, 1)
    else:
        count = (~beyond).sum(2, keepdim=True)
        mel = mel.masked_fill(beyond, 0)
        mel = (mel - mel.sum(2, keepdim=True) / count.clamp_min(1)).masked_fill(beyond, 0)
        variance = mel.square().sum(2, keepdim=True) / (count - 1).clamp_min(1)
    # The root's slope at zero is infinite.
    return mel / (variance.clamp_min(1e-30).sqrt() + _NORMALIZE_EPS)
