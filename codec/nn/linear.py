"""Linear layers that do, in one pass over their output, what comes after them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.kept import Kept

_HAS_FUSED = hasattr(torch.ops.mkldnn, "_linear_pointwise")
_HAS_BFLOAT16 = _HAS_FUSED and torch.ops.mkldnn._is_mkldnn_bf16_supported()


MIN_ROWS = 64
"""With fewer, as in a live stream, torch's own kernels are faster."""


def fuses(x: Tensor) -> bool:
    """Whether inference on this tensor goes through oneDNN's fused kernels: they know no gradient and no autocast."""
    return (
        _HAS_FUSED
        and x.device.type == "cpu"
        and (x.dtype == torch.float32 or (x.dtype == torch.bfloat16 and _HAS_BFLOAT16))
        and not torch.is_grad_enabled()
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and torch._C._get_mkldnn_enabled()
        and x.numel() >= MIN_ROWS * x.shape[-1]
    )


class Linear(nn.Linear):
    """`nn.Linear`; on a CPU without gradient its weight is kept in oneDNN's own layout, and GELU or a sum is fused.

    In numbers on one AVX-512 thread: 110 instead of 99 GFLOP/s in float32, 220 instead of 213 in bfloat16; a GELU costs
    a third of its own pass, a sum nothing.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self._packed = Kept()
        self._scaled_bias = Kept()

    def forward(self, x: Tensor, *, gelu: bool = False) -> Tensor:
        """`[..., in_features]` → `[..., out_features]`, through a GELU (its tanh form) if asked."""
        if fuses(x) and x.dtype == self.weight.dtype:
            packed = self._packed.get((self.weight,), lambda: _pack(self.weight))
            kind, algorithm = ("gelu", "tanh") if gelu else ("none", "")
            fused: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, self.bias, kind, [], algorithm)
            return fused
        out = F.linear(x, self.weight, self.bias)
        return F.gelu(out, approximate="tanh") if gelu else out

    def scaled_sum(self, x: Tensor, scale: Tensor, base: Tensor) -> Tensor:
        """`base + scale * layer(x)`: x `[..., in_features]`, scale `[out_features]`, base `[..., out_features]`.

        A layer that is called so is called no other way: it keeps its weight with the scale in it.
        """
        if fuses(x) and x.dtype == base.dtype == self.weight.dtype:
            weight, bias = self.weight, self.bias
            packed = self._packed.get((weight, scale), lambda: _pack((weight * scale[:, None]).to(weight.dtype)))
            scaled_bias = self._scaled_bias.get((bias, scale), lambda: (bias * scale).to(bias.dtype))
            fused: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, base, packed, scaled_bias, "add")
            return fused
        out = F.linear(x, self.weight, self.bias)
        return base + out * scale.to(out.dtype)


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return packed
