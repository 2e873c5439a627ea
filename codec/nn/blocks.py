"""Convolutional blocks at frame rate. Inside the network tensors are `[B, T, D]`, so that Linear is one GEMM."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.kept import Kept
from codec.nn.linear import Linear, fuses


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
        self._filters = Kept()

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if self.left == self.right and self._fuses(x):
            return self._fused(x, self.left)
        return self.convolve(F.pad(x, (0, 0, self.left, self.right)))

    def _fuses(self, x: Tensor) -> bool:
        return fuses(x) and x.dtype == self.weight.dtype

    def _fused(self, x: Tensor, padding: int) -> Tensor:
        # [B, T, D] is, to a convolution over images of one row, the layout it likes best.
        filters = self._filters.get((self.weight,), lambda: self.weight.T.contiguous()[:, None, None])
        image = x.transpose(1, 2)[:, :, None]
        out = F.conv2d(image, filters, self.bias, padding=(0, padding), groups=len(self.bias))
        return out[:, :, 0].transpose(1, 2)

    def convolve(self, padded: Tensor) -> Tensor:
        """Without padding: `[B, left + T + right, D]` → `[B, T, D]`."""
        if self._fuses(padded):
            return self._fused(padded, 0)
        num_frames = padded.shape[1] - self.left - self.right
        weight = self.weight.to(padded.dtype)
        out = self.bias.to(padded.dtype) + padded[:, :num_frames] * weight[0]
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
        self.expand = Linear(dim, dim * expansion)
        self.contract = Linear(dim * expansion, dim)
        self.scale = nn.Parameter(torch.full((dim,), scale))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        return self.mix(x, self.conv(x if mask is None else x * mask))

    def mix(self, x: Tensor, h: Tensor) -> Tensor:
        """What comes after the convolution: x and its convolution h, both `[B, T, D]`."""
        return self.contract.scaled_sum(self.expand(self.norm(h), gelu=True), self.scale, x)


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
