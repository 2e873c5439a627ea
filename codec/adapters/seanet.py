"""EnCodec's and Mimi's SEANet, as `transformers` builds it, → a `Stack`."""

from __future__ import annotations

from typing import Any

from torch import nn

from codec.adapters.layers import Conv, ConvTranspose, Elu, Layer, Lstm, PadMode, Residual, Stack

_MODES: dict[str, PadMode] = {"constant": "zero", "zero": "zero", "reflect": "reflect", "replicate": "replicate"}


def conv(module: Any) -> Conv:
    """An `EncodecConv1d` or `MimiConv1d`."""
    own: nn.Conv1d = module.conv
    total = (int(own.kernel_size[0]) - 1) * int(own.dilation[0]) + 1 - int(own.stride[0])
    right = 0 if module.causal else total // 2
    mode = _MODES[module.pad_mode]
    return Conv(own, total - right, right, mode=mode, whole=True, norm=getattr(module, "norm", None))


def conv_transpose(module: Any) -> ConvTranspose:
    """An `EncodecConvTranspose1d` or `MimiConvTranspose1d`."""
    own: nn.ConvTranspose1d = module.conv
    total = int(own.kernel_size[0]) - int(own.stride[0])
    right = -int(-total * module.trim_right_ratio // 1) if module.causal else total // 2
    return ConvTranspose(own, total - right, right, norm=getattr(module, "norm", None))


def stack(layers: Any) -> Stack:
    """The `layers` of an encoder or decoder; weight norms must be folded already."""
    return Stack(_layer(module) for module in layers)


def _layer(module: Any) -> Layer:
    if isinstance(module, nn.ELU):
        return Elu()
    if hasattr(module, "lstm"):
        return Lstm(module.lstm)
    if hasattr(module, "block"):
        shortcut = None if isinstance(module.shortcut, nn.Identity) else conv(module.shortcut)
        return Residual(stack(module.block), shortcut)
    if isinstance(module.conv, nn.ConvTranspose1d):
        return conv_transpose(module)
    return conv(module)
