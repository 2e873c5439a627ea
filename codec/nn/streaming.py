"""The bodies piece by piece: every layer keeps the few steps it still needs, nothing is computed twice.

A stream object takes pieces of any length (zero too) and returns what is complete; with `final` the input ends, zeros
follow, and the rest comes out. What comes out in all equals the layer's `forward` on the whole. Rows advance together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.blocks import BlockStack, ConvNeXtBlock
from codec.nn.seanet import Conv, ResidualUnit, SeanetDecoder, SeanetEncoder, TransposedConv
from codec.nn.spectral import SpectralDecoder, SpectralEncoder


class Sliding:
    """Cuts what arrives into windows: `window` steps every `stride`, after `left` and before `right` steps of zeros.

    Args:
        left: Zeros before the first step.
        right: Zeros after the last step.
        window: Steps of a window.
        stride: Steps between windows.
        dim: The time axis.
    """

    def __init__(self, *, left: int, right: int, window: int, stride: int, dim: int) -> None:
        self._left, self._right, self._window, self._stride, self._dim = left, right, window, stride, dim
        self._rest: Tensor | None = None

    def push(self, x: Tensor, final: bool) -> Tensor:
        """The steps under the windows that are complete, none or at least one window."""
        rest = self._zeros(x, self._left) if self._rest is None else self._rest
        rest = torch.cat([rest, x, self._zeros(x, self._right)] if final else [rest, x], self._dim)
        size = rest.shape[self._dim]
        count = max(0, (size - self._window) // self._stride + 1)
        ready = rest.narrow(self._dim, 0, (count - 1) * self._stride + self._window if count else 0)
        self._rest = rest.narrow(self._dim, count * self._stride, size - count * self._stride).clone()
        return ready

    def _zeros(self, x: Tensor, steps: int) -> Tensor:
        shape = list(x.shape)
        shape[self._dim] = steps
        return x.new_zeros(shape)


class Delay:
    """Holds steps back until their partners on a slower path arrive."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._rest: Tensor | None = None

    def push(self, x: Tensor, steps: int) -> Tensor:
        """Takes steps in, gives the oldest `steps` out."""
        rest = x if self._rest is None else torch.cat([self._rest, x], self._dim)
        self._rest = rest.narrow(self._dim, steps, rest.shape[self._dim] - steps).clone()
        return rest.narrow(self._dim, 0, steps)


class Overlap:
    """Adds the ends of successive overlapping sums `[..., n * stride + overhang]`; drops the first `trim` steps.

    Args:
        overhang: Steps by which a sum reaches into the next one.
        trim: Steps dropped at the very beginning; as many of the last overhang are given out at the end.
    """

    def __init__(self, overhang: int, trim: int) -> None:
        self._overhang, self._trim, self._skip = overhang, trim, trim
        self._tail: Tensor | None = None

    def push(self, sums: Tensor | None, final: bool) -> Tensor:
        """Complete steps; `sums` is None if no new ones arrived, and isn't used afterwards."""
        if sums is None:
            assert self._tail is not None
            out, tail = self._tail[..., :0], self._tail
        else:
            if self._tail is not None and self._overhang:
                sums[..., : self._overhang] += self._tail
            split = sums.shape[-1] - self._overhang
            out, tail = sums[..., :split], sums[..., split:].clone()
        self._tail = tail
        if final:
            out = torch.cat([out, tail[..., : self._trim]], -1)
        dropped = min(self._skip, out.shape[-1])
        self._skip -= dropped
        return out[..., dropped:]


# --- blocks at frame rate, [B, T, D]


class _Block:
    def __init__(self, block: ConvNeXtBlock) -> None:
        conv = block.conv
        self._block = block
        self._window = Sliding(left=conv.left, right=conv.right, window=len(conv.weight), stride=1, dim=1)
        self._skip = Delay(1)

    def push(self, x: Tensor, final: bool) -> Tensor:
        ready = self._window.push(x, final)
        skip = self._skip.push(x, max(0, ready.shape[1] - len(self._block.conv.weight) + 1))
        return skip if skip.shape[1] == 0 else self._block.mix(skip, self._block.conv.convolve(ready))


class _Blocks:
    def __init__(self, stack: BlockStack) -> None:
        self._blocks = [_Block(block) for block in stack.blocks]  # type: ignore[arg-type]

    def push(self, x: Tensor, final: bool) -> Tensor:
        for block in self._blocks:
            x = block.push(x, final)
        return x


class SpectralEncoderStream:
    """`SpectralEncoder` on wave pieces `[B, C, n]` → latents `[B, t, D]`; the wave ends on a whole frame."""

    def __init__(self, encoder: SpectralEncoder, denoise: Tensor | None) -> None:
        self._encoder, self._denoise = encoder, denoise
        self._wave = Sliding(
            left=encoder.pad_left, right=encoder.pad_right, window=encoder.n_fft, stride=encoder.stft_hop, dim=2
        )
        self._fine, self._coarse = _Blocks(encoder.fine), _Blocks(encoder.coarse)
        self._group = Sliding(left=0, right=0, window=encoder.subframes, stride=encoder.subframes, dim=1)

    def push(self, wave: Tensor, final: bool) -> Tensor:
        """See the module."""
        encoder = self._encoder
        ready = self._wave.push(wave.float(), final)
        x = encoder.embedded(ready) if ready.shape[2] else encoder.nothing(wave, 0)
        x = self._group.push(self._fine.push(x, final), final)
        x = encoder.stacked(x, self._denoise) if x.shape[1] else encoder.nothing(wave, 1)
        return encoder.projected(self._coarse.push(x, final))


class SpectralDecoderStream:
    """`SpectralDecoder` on quantized pieces `[B, t, D]` → wave `[B, C, n]`."""

    def __init__(self, decoder: SpectralDecoder) -> None:
        self._decoder = decoder
        self._coarse, self._fine = _Blocks(decoder.coarse), _Blocks(decoder.fine)
        overhang, trim = decoder.n_fft - decoder.stft_hop, decoder.parts_before * decoder.stft_hop
        self._wave, self._envelope = Overlap(overhang, trim), Overlap(overhang, trim)

    def push(self, quantized: Tensor, final: bool) -> Tensor:
        """See the module."""
        decoder = self._decoder
        x = self._coarse.push(decoder.embedded(quantized), final)
        x = decoder.norm(self._fine.push(decoder.unstacked(x), final))
        if x.shape[1]:
            summed, envelope = decoder.overlapped(x)
            return self._wave.push(summed, final) / decoder.weight(self._envelope.push(envelope, final))
        if not final:
            return quantized.new_zeros(len(quantized), decoder.channels, 0)
        return self._wave.push(None, True) / decoder.weight(self._envelope.push(None, True))


# --- convolutions on samples, [B, D, T]


class _Conv:
    def __init__(self, conv: Conv) -> None:
        self._conv = conv
        self._window = Sliding(
            left=conv.pad_left, right=conv.pad_right, window=conv.reach_right + 1, stride=conv.stride, dim=2
        )

    def push(self, x: Tensor, final: bool) -> Tensor:
        ready = self._window.push(x, final)
        return self._conv.convolve(ready) if ready.shape[2] else x.new_zeros(len(x), self._conv.num_out, 0)


class _TransposedConv:
    def __init__(self, conv: TransposedConv) -> None:
        self._conv = conv
        self._overlap = Overlap(conv.overhang, conv.trim_left)
        self._begun = False

    def push(self, x: Tensor, final: bool) -> Tensor:
        if not x.shape[2] and not self._begun:
            return x.new_zeros(len(x), self._conv.num_out, 0)
        self._begun = True
        out = self._overlap.push(self._conv.pieces(x) if x.shape[2] else None, final)
        return self._conv.biased(out)


class _Unit:
    def __init__(self, unit: ResidualUnit) -> None:
        self._unit, self._dilated, self._skip = unit, _Conv(unit.dilated), Delay(2)

    def push(self, x: Tensor, final: bool) -> Tensor:
        ready = self._dilated.push(F.elu(x), final)
        skip = self._skip.push(x, ready.shape[2])
        return self._unit.mix(skip, ready) if skip.shape[2] else skip


def _units(units: Iterable[nn.Module]) -> list[_Unit]:
    return [_Unit(unit) for unit in units if isinstance(unit, ResidualUnit)]


class SeanetEncoderStream:
    """`SeanetEncoder` on wave pieces `[B, C, n]` → latents `[B, t, D]`; the wave ends on a whole frame."""

    def __init__(self, encoder: SeanetEncoder, denoise: Tensor | None) -> None:
        self._encoder, self._denoise = encoder, denoise
        self._first, self._last = _Conv(encoder.first), _Conv(encoder.last)
        self._stages = [(_units(stage.units), _Conv(stage.resample)) for stage in encoder.stages]  # type: ignore

    def push(self, wave: Tensor, final: bool) -> Tensor:
        """See the module."""
        x = self._first.push(wave.to(self._encoder.first.parts.bias.dtype), final)
        for index, (units, resample) in enumerate(self._stages):
            if self._encoder.film is not None and index == len(self._stages) - 1:
                x = self._encoder.modulate(x, self._denoise)
            for unit in units:
                x = unit.push(x, final)
            x = resample.push(F.elu(x), final)
        return self._last.push(F.elu(x), final).float().transpose(1, 2)


class SeanetDecoderStream:
    """`SeanetDecoder` on quantized pieces `[B, t, D]` → wave `[B, C, n]`."""

    def __init__(self, decoder: SeanetDecoder) -> None:
        self._decoder = decoder
        self._first, self._last = _Conv(decoder.first), _Conv(decoder.last)
        self._stages = [(_TransposedConv(s.resample), _units(s.units)) for s in decoder.stages]  # type: ignore

    def push(self, quantized: Tensor, final: bool) -> Tensor:
        """See the module."""
        x = self._first.push(quantized.transpose(1, 2).to(self._decoder.first.parts.bias.dtype), final)
        for resample, units in self._stages:
            x = resample.push(F.elu(x), final)
            for unit in units:
                x = unit.push(x, final)
        return self._last.push(F.elu(x), final).float()


def encoder_stream(
    encoder: SpectralEncoder | SeanetEncoder, denoise: Tensor | None
) -> SpectralEncoderStream | SeanetEncoderStream:
    """The stream of either encoder; denoise bool `[B]` or None."""
    if isinstance(encoder, SpectralEncoder):
        return SpectralEncoderStream(encoder, denoise)
    return SeanetEncoderStream(encoder, denoise)


def decoder_stream(decoder: SpectralDecoder | SeanetDecoder) -> SpectralDecoderStream | SeanetDecoderStream:
    """The stream of either decoder's wave."""
    return SpectralDecoderStream(decoder) if isinstance(decoder, SpectralDecoder) else SeanetDecoderStream(decoder)
