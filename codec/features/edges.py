"""What lies beyond a wave's ends when it is mirrored there."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def mirror(index: Tensor, length: Tensor | int) -> Tensor:
    """Positions in `length` samples mirrored at both edges as often as needed, as numpy's "reflect"."""
    double = 2 * (length - 1)
    period = double.clamp_min(1) if isinstance(double, Tensor) else at_least(double, 1)
    index = index.remainder(period)
    return torch.where(index < length, index, period - index)


def mirror_numpy(index: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """`mirror` for arrays."""
    period = max(1, 2 * (length - 1))
    index = index % period
    return np.where(index < length, index, period - index)


def at_least(value: int, low: int) -> int:
    """The larger one; unlike Python's `max`, it doesn't tie an exported graph to one of its sides."""
    return cast(int, torch.sym_max(value, low))
