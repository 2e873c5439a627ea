"""Layers of other people's codecs, in a form that knows where each row of a ragged batch ends.

The originals pad a batch as if every row were as long as the longest. Here each layer continues a row at its own end
as the original continues a single item there (zeros, a reflection, the last value), so that a row of a batch is what
it is alone. Each layer also tells which of its inputs an output depends on: the declared contexts are computed, not
written down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.kept import Kept

PadMode = Literal["zero", "reflect", "replicate"]
Span = tuple[int, int]


class Unbounded(Exception):
    """A layer's output depends on all of its input before (or around) it."""


@dataclass(frozen=True)
class Rows:
    """What layers know of a batch beside its data.

    Attributes:
        lengths: int64 `[B]`, steps of each row at the present layer; None if every row is full.
        seeds: int64 `[B, T]`, one per codec frame, for layers that add noise; None otherwise.
    """

    lengths: Tensor | None = None
    seeds: Tensor | None = None


FULL = Rows()

_HAS_PACKED = hasattr(torch.ops.mkldnn, "_convolution_pointwise") and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def time_major(x: Tensor) -> Tensor:
    """X `[B, C, N]`; on a CPU with a step's channels side by side in memory, where convolutions are faster."""
    return x[:, :, None].contiguous(memory_format=torch.channels_last)[:, :, 0] if x.device.type == "cpu" else x


def packs(x: Tensor) -> bool:
    """Whether layers keep their weights in oneDNN's own layout for x, which saves converting them in every call."""
    return (
        _HAS_PACKED
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_grad_enabled()
        and torch._C._get_mkldnn_enabled()
    )


def zero_beyond(x: Tensor, lengths: Tensor, count: int) -> None:
    """Writes zeros over the `count` steps after each row's end; on a CPU."""
    for row, end in enumerate(lengths.tolist()):
        x[row, :, end : end + count] = 0.0


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The norm of x; one over all channels in the layout of `time_major`, which torch's own would leave."""
    if not isinstance(norm, nn.GroupNorm) or norm.num_groups != 1 or x.device.type != "cpu":
        out: Tensor = norm(x)
        return out
    steps = x.transpose(1, 2)
    flat = F.layer_norm(steps.flatten(1), (steps[0].numel(),), eps=norm.eps)
    return torch.addcmul(norm.bias, flat.view(steps.shape), norm.weight).transpose(1, 2)


class Layer(nn.Module):
    """x `[B, C, N]` and its rows → the same after the layer. Data beyond a row's end is arbitrary, before and after."""

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """Applies the layer."""
        raise NotImplementedError

    def span(self, first: int, last: int) -> Span:
        """First and last input step on which the output steps first … last depend.

        Raises:
            Unbounded: All of the input counts.
        """
        return first, last

    def num_out(self, num_in: int) -> int:
        """Output steps of a row of `num_in` steps."""
        return num_in


class Pointwise(Layer):
    """Any module that treats each step alone."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        return self.module(x), rows


class Elu(Layer):
    """`x` where positive, `exp(x) - 1` elsewhere."""

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        if x.device.type != "cpu" or x.requires_grad:
            return F.elu(x), rows
        # torch's own takes three times as long on a CPU: its expm1 is exact to the last bit, this to 6e-8.
        below = x.clamp(max=0.0).exp_().sub_(1.0)
        return torch.maximum(below, x, out=below), rows


class Snake(Layer):
    """`x + sin(alpha x)² / alpha`.

    Args:
        alpha: `[1, C, 1]`.
    """

    def __init__(self, alpha: Tensor) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha.detach(), requires_grad=False)
        self.inverse = nn.Parameter((alpha.detach() + 1e-9).reciprocal(), requires_grad=False)

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        wave = torch.mul(x, self.alpha).sin_()
        if x.requires_grad:
            return torch.addcmul(x, wave * self.inverse, wave), rows
        # Large tensors cost as much to allocate as to compute: there is one.
        return torch.addcmul(x, wave.mul_(wave), self.inverse, out=wave), rows


class Conv(Layer):
    """A convolution over rows that are continued at their own ends.

    Args:
        conv: Weights and geometry; its own padding is not used.
        left: Steps put before a row.
        right: Steps put after a row.
        mode: What they hold.
        whole: Further steps after a row so that its last window is full: `ceil(n / stride)` outputs.
        norm: A norm over channels and time, if the original has one: its rows must all be full.
    """

    def __init__(
        self,
        conv: nn.Conv1d,
        left: int,
        right: int,
        *,
        mode: PadMode = "zero",
        whole: bool = False,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.conv = conv
        conv.weight.data = time_major(conv.weight.data)
        self.norm = norm
        self.left, self.right, self.mode, self.whole = left, right, mode, whole
        self.stride = int(conv.stride[0])
        self.reach = (int(conv.kernel_size[0]) - 1) * int(conv.dilation[0]) + 1
        self._packed = Kept()

    def num_out(self, num_in: int) -> int:
        """See `Layer`."""
        if self.whole:
            return -(-num_in // self.stride)
        return (num_in + self.left + self.right - self.reach) // self.stride + 1

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        if self.norm is not None:
            raise Unbounded
        return first * self.stride - self.left, last * self.stride - self.left + self.reach - 1

    def forward(self, x: Tensor, rows: Rows, *, plus: Tensor | None = None) -> tuple[Tensor, Rows]:
        """See `Layer`; plus, of the output's shape, is added to it."""
        if plus is not None and self.norm is not None:
            out, rows = self(x, rows)
            return plus + out, rows
        lengths, longest = rows.lengths, x.shape[-1]
        extra = 0
        if self.whole:
            extra = -longest % self.stride if lengths is None else self.stride - 1
        after = self.right + extra
        # Nothing to copy where the convolution's own zeros do, with what is beyond the rows' ends made zero too.
        in_place = x.device.type == "cpu" and not x.requires_grad
        if after == self.left and (self.mode == "zero" or not after) and (lengths is None or in_place or not after):
            if lengths is not None and after:
                zero_beyond(x, lengths, after)
            out = self._convolved(x, after, plus)
        else:
            out = self._convolved(self._padded(x, lengths, after), 0, plus)
        if self.norm is not None:
            out = normed(self.norm, out)
        if lengths is not None:
            if self.whole:
                lengths = -(-lengths // self.stride)
            else:
                lengths = (lengths + (self.left + self.right - self.reach)) // self.stride + 1
        return out[..., : self.num_out(longest)], replace(rows, lengths=lengths)

    def _padded(self, x: Tensor, lengths: Tensor | None, after: int) -> Tensor:
        """Every row with what continues it on both sides."""
        padded = F.pad(x[:, :, None], (self.left, after))[:, :, 0]
        own = torch.full((x.shape[0],), x.shape[-1], device=x.device) if lengths is None else lengths
        if after and (lengths is not None or self.mode != "zero"):
            self._continue(padded, x, own, after)
        if self.left and self.mode != "zero":
            padded[..., : self.left] = self._before(x, own)
        return padded

    def _convolved(self, x: Tensor, padding: int, plus: Tensor | None) -> Tensor:
        """The convolution of x, in the layout that x has, and a sum in the same pass."""
        own, dilation = self.conv, int(self.conv.dilation[0])
        out: Tensor
        if x.device.type != "cpu":
            out = F.conv1d(x, own.weight, own.bias, self.stride, padding, dilation, own.groups)
            return out if plus is None else plus + out
        image, weight = x[:, :, None], own.weight[:, :, None]
        geometry = (0, padding), (1, self.stride), (1, dilation), own.groups
        if not packs(x):
            out = F.conv2d(image, weight, own.bias, geometry[1], geometry[0], geometry[2], own.groups)[:, :, 0]
            return out if plus is None else plus + out
        packed = self._packed.get(
            (own.weight,), lambda: torch.ops.mkldnn._reorder_convolution_weight(weight, *geometry, image.shape)
        )
        if plus is None:
            out = torch.ops.mkldnn._convolution_pointwise(image, packed, own.bias, *geometry, "none", [], "")
        else:
            out = torch.ops.mkldnn._convolution_pointwise.binary(
                image, plus[:, :, None], packed, own.bias, *geometry, "add", 1.0, None, [], ""
            )
        return out[:, :, 0]

    def _reflected(self, lengths: Tensor) -> Tensor:
        """The length about whose last step a row is reflected: the originals first lengthen very short rows."""
        right = lengths.new_full(lengths.shape, self.right)
        if self.whole:
            right = right + -lengths % self.stride
        return torch.maximum(lengths, right.clamp(min=self.left) + 1)

    def _before(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.mode == "replicate":
            return x[..., :1]
        if x.shape[-1] <= self.left:
            x = F.pad(x, (0, self.left + 1 - x.shape[-1]))
        steps = torch.arange(self.left, 0, -1, device=x.device)
        return x[..., 1 : self.left + 1].flip(-1) * (steps < lengths[:, None])[:, None]

    def _continue(self, padded: Tensor, x: Tensor, lengths: Tensor, count: int) -> None:
        """Writes the `count` steps after each row's end."""
        target = lengths[:, None] + torch.arange(count, device=x.device)  # [B, count], in steps of x
        where = (target + self.left)[:, None].expand(-1, x.shape[1], -1)
        if self.mode == "zero":
            padded.scatter_(2, where, 0.0)
            return
        if self.mode == "replicate":
            source = (lengths - 1)[:, None].expand(-1, count)
            valid = torch.ones_like(source, dtype=torch.bool)
        else:
            turn = self._reflected(lengths)[:, None]
            source = torch.where(target < turn, target, 2 * (turn - 1) - target)
            valid = (source < lengths[:, None]) & (source >= 0)
        source = source.clamp(0, x.shape[-1] - 1)
        values = x.gather(2, source[:, None].expand(-1, x.shape[1], -1)) * valid[:, None]
        padded.scatter_(2, where, values.to(padded.dtype))


class ConvTranspose(Layer):
    """A transposed convolution whose output is trimmed on both sides.

    Args:
        conv: Weights and geometry; its own padding is not used.
        trim_left: Output steps dropped at the start.
        trim_right: Output steps dropped at the end.
        norm: As for `Conv`.
    """

    def __init__(
        self, conv: nn.ConvTranspose1d, trim_left: int, trim_right: int, *, norm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.conv = conv
        conv.weight.data = time_major(conv.weight.data)
        self.norm = norm
        self.trim_left, self.trim_right = trim_left, trim_right
        self.stride = int(conv.stride[0])
        self.reach = int(conv.kernel_size[0])
        self._packed = Kept(), Kept()

    def num_out(self, num_in: int) -> int:
        """See `Layer`."""
        return num_in * self.stride + self.reach - self.stride - self.trim_left - self.trim_right

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        if self.norm is not None:
            raise Unbounded
        return -(-(first + self.trim_left - self.reach + 1) // self.stride), (last + self.trim_left) // self.stride

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        lengths = rows.lengths
        if lengths is not None:
            x = self._ended(x, lengths)
            lengths = lengths * self.stride + (self.reach - self.stride - self.trim_left - self.trim_right)
        own = self.conv
        if packs(x) and self.reach == 2 * self.stride and own.groups == 1:
            out = self._overlapped(x)
        elif x.device.type == "cpu":
            weight, stride = own.weight[:, :, None], (1, self.stride)
            out = F.conv_transpose2d(x[:, :, None], weight, own.bias, stride, groups=own.groups)[:, :, 0]
        else:
            out = F.conv_transpose1d(x, own.weight, own.bias, self.stride, groups=own.groups)
        if self.norm is not None:
            out = normed(self.norm, out)
        return out[..., self.trim_left : out.shape[-1] - self.trim_right], replace(rows, lengths=lengths)

    def _ended(self, x: Tensor, lengths: Tensor) -> Tensor:
        """X, zero beyond its rows' ends."""
        if x.device.type == "cpu" and not x.requires_grad:
            zero_beyond(x, lengths, x.shape[-1])
            return x
        steps = torch.arange(x.shape[-1], device=x.device)
        return torch.where((steps < lengths[:, None])[:, None], x, 0.0)

    def _overlapped(self, x: Tensor) -> Tensor:
        """Each step gives `stride` outputs at its place and as many after it: two products, the second added."""
        own, (here, after) = self.conv, self._packed
        steps = x.transpose(1, 2)
        first = torch.ops.mkldnn._linear_pointwise(
            F.pad(steps, (0, 0, 0, 1)), here.get((own.weight,), lambda: self._half(0)), self._bias(), "none", [], ""
        )
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(
            F.pad(steps, (0, 0, 1, 0)), first, after.get((own.weight,), lambda: self._half(1)), None, "add"
        )
        return out.view(x.shape[0], -1, own.out_channels).transpose(1, 2)

    def _half(self, which: int) -> Tensor:
        """Half of the taps, as the weight of a linear layer, packed."""
        taps = self.conv.weight.detach()[..., which * self.stride : (which + 1) * self.stride]
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(taps.permute(2, 1, 0).flatten(0, 1).contiguous())
        return packed

    def _bias(self) -> Tensor | None:
        return None if self.conv.bias is None else self.conv.bias.repeat(self.stride)


class Residual(Layer):
    """`shortcut(x) + body(x)`."""

    def __init__(self, body: Stack, shortcut: Layer | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        base = x if self.shortcut is None else self.shortcut(x, rows)[0]
        *first, last = self.body.layers
        out, rows_out = x, rows
        for layer in first:
            out, rows_out = layer(out, rows_out)
        if isinstance(last, Conv) and last.num_out(out.shape[-1]) == base.shape[-1]:
            summed: tuple[Tensor, Rows] = last(out, rows_out, plus=base)
            return summed
        out, rows_out = last(out, rows_out)
        return base + out, rows_out

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        a, b = self.body.span(first, last)
        return min(first, a), max(last, b)


class Lstm(Layer):
    """`x + lstm(x)` over time."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        self.lstm = lstm

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        return self.steps(x, None)[0], rows

    def steps(self, x: Tensor, state: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The next steps of a stream: output and state after them."""
        sequence = x.permute(2, 0, 1)
        out, state = self.lstm(sequence, state)
        return (out + sequence).permute(1, 2, 0), state

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        raise Unbounded


class Stack(Layer):
    """Layers one after another."""

    def __init__(self, layers: Iterable[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, rows: Rows = FULL) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        for layer in self.layers:
            x, rows = layer(x, rows)
        return x, rows

    def run(self, x: Tensor, lengths: Tensor | None, seeds: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """X `[B, C, N]` of any dtype in the weights' dtype → output, float32, and the lengths of its rows."""
        weight = next((p for p in self.parameters()), x)
        out, rows = self(time_major(x.to(weight.dtype)), Rows(lengths, seeds))
        return out.float().contiguous(), rows.lengths

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        for layer in reversed(self.layers):
            first, last = layer.span(first, last)  # type: ignore[operator]
        return first, last

    def num_out(self, num_in: int) -> int:
        """See `Layer`."""
        for layer in self.layers:
            num_in = layer.num_out(num_in)  # type: ignore[operator]
        return num_in


def encode_context(stack: Stack, hop_length: int, steps_per_frame: int = 1) -> tuple[int, int] | None:
    """(left, right) frames of wave on which a frame of latents depends; None if unbounded."""
    frame = 1 << 20  # any: the layers treat all alike
    try:
        first, last = stack.span(frame * steps_per_frame, (frame + 1) * steps_per_frame - 1)
    except Unbounded:
        return None
    return max(0, -(-(frame * hop_length - first) // hop_length)), max(0, last // hop_length - frame)


def decode_context(stack: Stack, hop_length: int, steps_per_frame: int = 1) -> tuple[int, int] | None:
    """(left, right) frames of latents on which a frame of wave depends; None if unbounded."""
    frame = 1 << 20
    try:
        first, last = stack.span(frame * hop_length, (frame + 1) * hop_length - 1)
    except Unbounded:
        return None
    return max(0, frame - first // steps_per_frame), max(0, last // steps_per_frame - frame)
