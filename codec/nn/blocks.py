"""Convolutional blocks at frame rate. Inside the network tensors are `[B, T, D]`, so that Linear is one GEMM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class DepthwiseConv(nn.Module):
    """A depthwise convolution over time as `kernel_size` multiply-adds of shifted views.

    Args:
        dim: Features, D.
        kernel_size: Taps; odd when `lookahead` is set.
        lookahead: Centred kernel (`kernel_size // 2` frames each side) instead of a causal one.

    Shape: `[B, T, D]` → `[B, T, D]`, zeros assumed outside `[0, T)`.
    """

    def __init__(self, dim: int, kernel_size: int, *, lookahead: bool) -> None:
        super().__init__()
        assert kernel_size >= 1 and (not lookahead or kernel_size % 2 == 1)
        self.right = kernel_size // 2 if lookahead else 0
        self.left = kernel_size - 1 - self.right
        self.weight = nn.Parameter(torch.empty(kernel_size, dim))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.normal_(self.weight, std=kernel_size**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        num_frames = x.shape[1]
        weight = self.weight.to(x.dtype)
        padded = F.pad(x, (0, 0, self.left, self.right))
        out = self.bias.to(x.dtype) + padded[:, :num_frames] * weight[0]
        for tap in range(1, len(weight)):
            out = torch.addcmul(out, padded[:, tap : tap + num_frames], weight[tap])
        return out


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, LayerNorm, two-layer MLP with GELU, learned residual scale.

    After Liu et al. 2022, "A ConvNet for the 2020s", in one dimension as in Vocos (Siuzdak 2023).
    The norm is over features only: nothing but the convolution mixes frames, so the receptive field is finite.

    Shape: x `[B, T, D]`, mask `[B, T, 1]` (1 on valid frames) or None → `[B, T, D]`.
    """

    def __init__(self, dim: int, *, kernel_size: int, expansion: int, lookahead: bool, scale: float) -> None:
        super().__init__()
        self.conv = DepthwiseConv(dim, kernel_size, lookahead=lookahead)
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, dim * expansion)
        self.contract = nn.Linear(dim * expansion, dim)
        self.scale = nn.Parameter(torch.full((dim,), scale))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        h: Tensor = x if mask is None else x * mask
        h = self.norm(self.conv(h))
        h = self.contract(F.gelu(self.expand(h), approximate="tanh"))
        return x + h * self.scale.to(h.dtype)


class BlockStack(nn.Module):
    """`num_blocks` ConvNeXt blocks of one width; `context` is their summed (left, right) frames."""

    def __init__(self, dim: int, num_blocks: int, *, kernel_size: int, expansion: int, lookahead: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ConvNeXtBlock(dim, kernel_size=kernel_size, expansion=expansion, lookahead=lookahead, scale=1 / num_blocks)
            for _ in range(num_blocks)
        )
        right = kernel_size // 2 if lookahead else 0
        self.context = (num_blocks * (kernel_size - 1 - right), num_blocks * right)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        for block in self.blocks:
            x = block(x, mask)
        return x
