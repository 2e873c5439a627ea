"""Feature-wise linear modulation: one network that can do a thing or leave it, as told per example."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Film(nn.Module):
    """Scales and shifts features by values that a condition picks (Perez et al. 2018, arXiv:1709.07871).

    Starts as the identity for every condition.

    Args:
        dim: Features, D.
        num_conditions: Values the condition takes.

    Shape: x `[B, T, D]`, condition int64 or bool `[B]` → `[B, T, D]`.
    """

    def __init__(self, dim: int, num_conditions: int = 2) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_conditions, dim))
        self.shift = nn.Parameter(torch.zeros(num_conditions, dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """See the class."""
        rows = condition.long()
        scale, shift = self.scale[rows][:, None], self.shift[rows][:, None]
        return torch.addcmul(shift.to(x.dtype), x, scale.to(x.dtype))
