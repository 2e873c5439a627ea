"""Spans of rows, one gather for all of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def cut(data: Tensor, start: Tensor | int, length: int, unit: int, fill: float = 0) -> Tensor:
    """`[start, start + length)` of each row, in units of `unit` positions.

    Args:
        data: `[B, ..., T * unit]` (with `unit` 1, any length).
        start: int64 `[B]`, or one number for all rows, which takes a slice instead of a gather.
        length: Of all rows; what lies beyond the data is `fill`, or with a tensor `start`, any.
        unit: Positions.
        fill: See `length`.

    Returns:
        `[B, ..., length * unit]`.
    """
    if isinstance(start, int):
        piece = data[..., start * unit : (start + length) * unit]
        missing = length * unit - piece.shape[-1]
        return F.pad(piece, (0, missing), value=fill) if missing else piece
    num_units = data.shape[-1] // unit
    index = (start[:, None] + torch.arange(length, device=data.device)).clamp(max=num_units - 1)
    pieces = data.reshape(data.shape[0], -1, num_units, unit)
    picked = pieces.gather(2, index[:, None, :, None].expand(-1, pieces.shape[1], -1, unit))
    return picked.view(*data.shape[:-1], length * unit)


def filled(data: Tensor, lengths: Tensor, fill: float) -> Tensor:
    """`[B, ..., N]`, in memory of its own, with `fill` beyond each row's length."""
    steps = torch.arange(data.shape[-1], device=data.device)
    valid = (steps < lengths[:, None]).view(len(data), *[1] * (data.ndim - 2), -1)
    return torch.where(valid, data, fill)
