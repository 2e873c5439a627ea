"""The SEANet body of SoundStream (Zeghidour et al. 2021, section III-A/B): strided convolutions on samples.

Inside the body tensors are `[B, D, T]` at the rate of their stage. Every convolution pads with zeros so that a stage of
stride S turns T*S steps into exactly T, and back. No layer sees more than its declared reach.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.blocks import BlockStack
from codec.nn.film import Film
from codec.nn.kept import Kept
from codec.nn.linear import Linear

Span = tuple[int, int]
Context = tuple[int, int]

ELU_GAIN = 1.245
"""Keeps unit variance through an ELU and the convolution after it."""
BRANCH_GAIN = 0.2
"""Of a residual branch at the start: units begin near the identity."""
INPUT_GAIN = 10.0
"""Waves have a root mean square around 0.1; the first layer brings them to the unit scale of the rest."""
OUTPUT_GAIN = 0.1
"""The decoder starts no louder than a wave: from near silence (0.02) it learns the waveform far later."""


class _NormedWeight(nn.Module):
    """A convolution's weight as a length and a direction per first index (weight norm), and its bias.

    The product is kept between calls without gradient, so that inference doesn't pay for the split.
    """

    def __init__(self, shape: tuple[int, int, int], num_out: int, gain: float) -> None:
        super().__init__()
        self.direction = nn.Parameter(torch.randn(shape) / math.sqrt(shape[1] * shape[2]))
        self.gain = nn.Parameter(torch.full((shape[0], 1, 1), gain))
        self.bias = nn.Parameter(torch.zeros(num_out))
        self._kept = Kept()

    @torch.no_grad()
    def set_weight(self, weight: Tensor) -> None:
        """Makes the product this weight."""
        self.direction.copy_(weight)
        self.gain.copy_(weight.float().flatten(1).norm(dim=1)[:, None, None])

    def weight(self) -> Tensor:
        """The product, in the shape of torch's own weight."""
        if torch.is_grad_enabled() and self.direction.requires_grad:
            return self._product()
        return self._kept.get((self.direction, self.gain), self._product)

    def _product(self) -> Tensor:
        direction = self.direction.float()
        length = direction.flatten(1).norm(dim=1).clamp(min=1e-12)[:, None, None]
        product: Tensor = (direction * (self.gain.float() / length)).to(self.direction.dtype)
        return product


class Conv(nn.Module):
    """A weight-normed convolution over time with zero padding, causal or centred.

    Args:
        num_in: Features in.
        num_out: Features out.
        kernel_size: Taps; at least the stride.
        stride: Steps in per step out.
        dilation: Steps between taps.
        groups: As in torch: `num_in` for a depthwise convolution.
        lookahead: Half of the padding on the right instead of all of it on the left.
        gain: Length of each output's weight vector at the start.

    Shape: `[B, num_in, T * stride]`, mask `[B, 1, T * stride]` or None → `[B, num_out, T]`.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel_size: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        lookahead: bool,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.stride, self.dilation, self.groups = stride, dilation, groups
        self.reach_right = (kernel_size - 1) * dilation  # of the first tap's position
        total = self.reach_right + 1 - stride
        assert total >= 0
        self.pad_right = total // 2 if lookahead else 0
        self.pad_left = total - self.pad_right
        self.parts = _NormedWeight((num_out, num_in // groups, kernel_size), num_out, gain)

    def span(self, span: Span) -> Span:
        """The half-open steps in on which the half-open steps out depend."""
        first, last = span[0] * self.stride, (span[1] - 1) * self.stride
        return first - self.pad_left, last - self.pad_left + self.reach_right + 1

    def convolve(self, x: Tensor) -> Tensor:
        """Without padding."""
        parts = self.parts
        weight, bias = parts.weight(), parts.bias
        return F.conv1d(x, weight, bias, self.stride, dilation=self.dilation, groups=self.groups)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        if mask is not None and self.pad_right:
            x = x * mask
        return self.convolve(F.pad(x, (self.pad_left, self.pad_right)) if self.reach_right else x)


class TransposedConv(nn.Module):
    """A weight-normed transposed convolution: overlapping pieces of `kernel_size` steps, added `stride` apart.

    Args:
        num_in: Features in.
        num_out: Features out.
        kernel_size: Length of a piece, at least the stride.
        stride: Steps out per step in.
        groups: As in torch.
        lookahead: Pieces are centred on their steps instead of beginning with them.
        gain: Length of each input's weight vector at the start.

    Shape: `[B, num_in, T]`, mask `[B, 1, T]` or None → `[B, num_out, T * stride]`.
    """

    def __init__(
        self,
        num_in: int,
        num_out: int,
        kernel_size: int,
        *,
        stride: int,
        groups: int = 1,
        lookahead: bool,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_in, self.num_out = num_in, num_out
        self.kernel_size, self.stride, self.groups = kernel_size, stride, groups
        self.overhang = kernel_size - stride
        assert self.overhang >= 0
        self.trim_left = self.overhang - self.overhang // 2 if lookahead else 0
        self.parts = _NormedWeight((num_in, num_out // groups, kernel_size), num_out, gain)

    def span(self, span: Span) -> Span:
        """The half-open steps in on which the half-open steps out depend."""
        first, last = span[0] + self.trim_left, span[1] - 1 + self.trim_left
        return -((self.kernel_size - 1 - first) // self.stride), last // self.stride + 1

    def pieces(self, x: Tensor) -> Tensor:
        """All that the steps contribute, `[B, num_out, (T - 1) * stride + kernel_size]`, without the bias."""
        return F.conv_transpose1d(x, self.parts.weight(), None, self.stride, groups=self.groups)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        if mask is not None and self.trim_left:
            x = x * mask
        return self.biased(self.pieces(x)[..., self.trim_left : self.trim_left + x.shape[-1] * self.stride])

    def biased(self, out: Tensor) -> Tensor:
        """With the bias, once per step out."""
        bias: Tensor = self.parts.bias
        return out + bias[:, None].to(out.dtype)


class ResidualUnit(nn.Module):
    """ELU, dilated convolution, ELU, pointwise convolution; added to its input.

    Shape: `[B, dim, T]`, mask `[B, 1, T]` or None → `[B, dim, T]`.
    """

    def __init__(self, dim: int, kernel_size: int, dilation: int, *, depthwise: bool, lookahead: bool) -> None:
        super().__init__()
        groups = dim if depthwise else 1
        self.dilated = Conv(dim, dim, kernel_size, dilation=dilation, groups=groups, lookahead=lookahead, gain=ELU_GAIN)
        self.pointwise = Conv(dim, dim, 1, lookahead=lookahead, gain=ELU_GAIN * BRANCH_GAIN)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See the class."""
        return self.mix(x, self.dilated(F.elu(x), mask))

    def mix(self, x: Tensor, h: Tensor) -> Tensor:
        """What comes after the dilated convolution: x and its convolution h."""
        branch: Tensor = self.pointwise(F.elu(h), None)
        return x + branch


class Stage(nn.Module):
    """Residual units around a change of rate: the units first when encoding, last when decoding."""

    def __init__(self, units: Sequence[ResidualUnit], resample: Conv | TransposedConv) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.resample = resample


def _masks(mask: Tensor | None, rates: Sequence[int]) -> list[Tensor | None]:
    """A frame mask `[B, T, 1]` as masks `[B, 1, T * rate]`."""
    if mask is None:
        return [None] * len(rates)
    return [mask.transpose(1, 2).repeat_interleave(rate, 2) for rate in rates]


def _context_of(span: Span, hop: int) -> Context:
    """A span of steps around the `hop` steps of frame 0 as (left, right) whole frames, rounded up."""
    return max(0, -(span[0] // hop)), max(0, -((hop - span[1]) // hop))


class SeanetEncoder(nn.Module):
    """Wave → latents: a convolution, stages of residual units and strided convolutions, a convolution.

    Args:
        channels: Channels of the wave, C.
        strides: Downsampling of each stage; their product is the hop.
        width: Features at the sample rate; they double with each stage.
        kernel_size: Taps of the residual units.
        dilations: Of the residual units of a stage.
        depthwise: Depthwise dilated convolutions.
        lookahead: Centred instead of causal convolutions.
        latent_dim: D of the latents.
        denoise: Modulated, before the last stage, by whether to remove noise.

    Shape: wave `[B, C, T * hop]`, mask `[B, T, 1]` or None, denoise bool `[B]` or None → latents `[B, T, D]`, float32.
    """

    def __init__(
        self,
        *,
        channels: int,
        strides: Sequence[int],
        width: int,
        kernel_size: int,
        dilations: Sequence[int],
        depthwise: bool,
        lookahead: bool,
        latent_dim: int,
        denoise: bool,
    ) -> None:
        super().__init__()
        self.first = Conv(channels, width, 7, lookahead=lookahead, gain=INPUT_GAIN)
        stages, dim = [], width
        for stride in strides:
            units = [
                ResidualUnit(dim, kernel_size, dilation, depthwise=depthwise, lookahead=lookahead)
                for dilation in dilations
            ]
            resample = Conv(dim, 2 * dim, 2 * stride, stride=stride, lookahead=lookahead, gain=ELU_GAIN)
            stages.append(Stage(units, resample))
            dim *= 2
        self.stages = nn.ModuleList(stages)
        self.last = Conv(dim, latent_dim, 3, lookahead=lookahead, gain=ELU_GAIN)
        self.film = Film(dim // 2) if denoise else None
        hop = math.prod(strides)
        self.rates = [hop // math.prod(strides[:i]) for i in range(len(strides) + 1)]
        span = self.last.span((0, 1))
        for stage in reversed(stages):
            span = stage.resample.span(span)
            for unit in reversed(list(stage.units)):
                span = unit.dilated.span(span)  # type: ignore[union-attr, operator]
        self.context = _context_of(self.first.span(span), hop)

    def forward(self, wave: Tensor, mask: Tensor | None = None, denoise: Tensor | None = None) -> Tensor:
        """See the class."""
        masks = _masks(mask, self.rates)
        x = self.first(wave.to(self.first.parts.bias.dtype), masks[0])
        for index, (stage, stage_mask) in enumerate(zip(self.stages, masks, strict=False)):
            if self.film is not None and index == len(self.stages) - 1:
                x = self.modulate(x, denoise)
            for unit in stage.units:  # type: ignore[union-attr]
                x = unit(x, stage_mask)
            x = stage.resample(F.elu(x), stage_mask)  # type: ignore[operator]
        with torch.autocast(x.device.type, enabled=False):
            latents: Tensor = self.last(F.elu(x).to(self.last.parts.bias.dtype), masks[-1])
            return latents.float().transpose(1, 2)

    def modulate(self, x: Tensor, denoise: Tensor | None) -> Tensor:
        """Features `[B, D, T]` as the condition (None: don't denoise) has them."""
        assert self.film is not None
        condition = denoise if denoise is not None else torch.zeros(len(x), dtype=torch.bool, device=x.device)
        modulated: Tensor = self.film(x.transpose(1, 2), condition)
        return modulated.transpose(1, 2)


class SeanetDecoder(nn.Module):
    """Quantized latents → trunk at frame rate → wave (stages of transposed convolutions and residual units) or log-mel.

    The mel head doesn't climb to the sample rate: a few blocks at frame rate, on the trunk, give `subframes` mel frames
    per codec frame.

    Args:
        width: Features at the sample rate; twice as many at each stage below.
        subframes: Mel frames per codec frame.
        n_mels: Bins of the mel head.
        mel_hidden: Width of the mel head.
        Others as in `SeanetEncoder`; `strides` are the encoder's, used backwards.
    """

    MEL_BLOCKS = 4

    def __init__(
        self,
        *,
        channels: int,
        strides: Sequence[int],
        width: int,
        kernel_size: int,
        dilations: Sequence[int],
        depthwise: bool,
        lookahead: bool,
        latent_dim: int,
        subframes: int,
        n_mels: int,
        mel_hidden: int,
    ) -> None:
        super().__init__()
        self.subframes = subframes
        dim = width * 2 ** len(strides)
        self.first = Conv(latent_dim, dim, 7, lookahead=lookahead)
        stages = []
        for stride in reversed(strides):
            # Weight norm counts a transposed convolution's lengths per input; this gain keeps its outputs' variance.
            gain = ELU_GAIN * math.sqrt(stride / 2)
            resample = TransposedConv(dim, dim // 2, 2 * stride, stride=stride, lookahead=lookahead, gain=gain)
            dim //= 2
            units = [
                ResidualUnit(dim, kernel_size, dilation, depthwise=depthwise, lookahead=lookahead)
                for dilation in dilations
            ]
            stages.append(Stage(units, resample))
        self.stages = nn.ModuleList(stages)
        self.last = Conv(dim, channels, 7, lookahead=lookahead, gain=ELU_GAIN * OUTPUT_GAIN)
        trunk_dim = width * 2 ** len(strides)
        self.mel_embed = Linear(trunk_dim, mel_hidden)
        self.mel_blocks = BlockStack(mel_hidden, self.MEL_BLOCKS, kernel_size=3, expansion=2, lookahead=lookahead)
        self.mel_norm = nn.LayerNorm(mel_hidden)
        self.mel = Linear(mel_hidden, subframes * n_mels)
        hop = math.prod(strides)
        self.rates = [hop // math.prod(strides[: len(strides) - i]) for i in range(len(strides) + 1)]
        span = self.last.span((0, hop))
        for stage in reversed(stages):
            for unit in reversed(list(stage.units)):
                span = unit.dilated.span(span)  # type: ignore[union-attr, operator]
            span = stage.resample.span(span)
        wave = _context_of(self.first.span(span), 1)
        left, right = self.mel_blocks.context
        mel = _context_of(self.first.span((-left, 1 + right)), 1)
        self.wave_context = (max(wave[0], mel[0]), max(wave[1], mel[1]))

    def trunk(self, quantized: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[B, T, D]` → features `[B, T, trunk_dim]`, shared by both heads."""
        mask = None if mask is None else mask.transpose(1, 2)
        features: Tensor = self.first(quantized.transpose(1, 2).to(self.first.parts.bias.dtype), mask)
        return features.transpose(1, 2)

    def mel_head(self, trunk: Tensor, mask: Tensor | None = None) -> Tensor:
        """Trunk → log-mel `[B, n_mels, T * subframes]`, float32."""
        x = self.mel_norm(self.mel_blocks(self.mel_embed(trunk), mask))
        mel: Tensor = self.mel(x).float()
        return rearrange(mel, "b t (s m) -> b m (t s)", s=self.subframes)

    def wave_head(self, trunk: Tensor, mask: Tensor | None = None) -> Tensor:
        """Trunk → wave `[B, C, T * hop]`, float32."""
        masks = _masks(mask, self.rates)
        x = trunk.transpose(1, 2)
        for index, stage in enumerate(self.stages):
            x = stage.resample(F.elu(x), masks[index])  # type: ignore[operator]
            for unit in stage.units:  # type: ignore[union-attr]
                x = unit(x, masks[index + 1])
        with torch.autocast(x.device.type, enabled=False):
            wave: Tensor = self.last(F.elu(x).to(self.last.parts.bias.dtype), masks[-1])
            return wave.float()
