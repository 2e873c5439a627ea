"""DAC, and what it shares with SNAC: Snake convolutions around a factorised residual quantizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.adapters.base import Adapter, fold_weight_norm, weights_hash
from codec.adapters.layers import (
    FULL,
    Conv,
    ConvTranspose,
    Layer,
    Pointwise,
    Residual,
    Snake,
    Stack,
    decode_context,
    encode_context,
)
from codec.spec import CodecSpec


def conv(module: nn.Conv1d) -> Conv:
    """A convolution with zeros on both sides."""
    padding = int(module.padding[0])
    return Conv(module, padding, padding)


def conv_transpose(module: nn.ConvTranspose1d) -> ConvTranspose:
    """A transposed convolution trimmed on both sides."""
    padding = int(module.padding[0])
    return ConvTranspose(module, padding, padding - int(module.output_padding[0]))


def _unit(module: Any) -> Residual:
    parts = [Snake(module.snake1.alpha), conv(module.conv1), Snake(module.snake2.alpha), conv(module.conv2)]
    return Residual(Stack(parts))


def _units(block: Any) -> list[Layer]:
    return [_unit(block.res_unit1), _unit(block.res_unit2), _unit(block.res_unit3)]


def encoder_stack(encoder: Any) -> Stack:
    """A `DacEncoder`; weight norms must be folded already."""
    layers: list[Layer] = [conv(encoder.conv1)]
    for block in encoder.block:
        layers += [*_units(block), Snake(block.snake1.alpha), conv(block.conv1)]
    return Stack([*layers, Snake(encoder.snake1.alpha), conv(encoder.conv2)])


def decoder_stack(decoder: Any) -> Stack:
    """A `DacDecoder`; weight norms must be folded already."""
    layers: list[Layer] = [conv(decoder.conv1)]
    for block in decoder.block:
        layers += [Snake(block.snake1.alpha), conv_transpose(block.conv_t1), *_units(block)]
    return Stack([*layers, Snake(decoder.snake1.alpha), conv(decoder.conv2), Pointwise(nn.Tanh())])


class FactorisedQuantizer(nn.Module):
    """One level: a projection to few dimensions, the nearest entry by angle, a projection back."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj, self.codebook = module.in_proj, module.out_proj, module.codebook

    def encode(self, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Residual `[B, D, T]` → codes `[B, T]`, what they stand for `[B, D, T]`."""
        projected = self.in_proj(residual)
        flat = projected.transpose(1, 2).reshape(-1, projected.shape[1])
        vectors, entries = F.normalize(flat), F.normalize(self.codebook.weight)
        # In the originals' order of operations, for the same rounding.
        distance = vectors.pow(2).sum(1, keepdim=True) - 2 * vectors @ entries.t()
        distance = -distance - entries.pow(2).sum(1)
        codes = distance.argmax(1).view(projected.shape[0], -1)
        chosen = self.codebook(codes).transpose(1, 2)
        return codes, self.out_proj(projected + (chosen - projected))

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, T]` → `[B, D, T]`."""
        out: Tensor = self.out_proj(self.codebook(codes).transpose(1, 2))
        return out


def dac(model: Any, name: str) -> Dac:
    """A `transformers` `DacModel` → its adapter."""
    config = model.config
    facts = {"family": "dac", "sample_rate": config.sampling_rate, "ratios": list(config.downsampling_ratios)}
    identity = weights_hash(facts, model.state_dict().values())
    fold_weight_norm(model)
    return Dac(model, name, identity)


class Dac(Adapter):
    """The Descript Audio Codec: finite contexts on both sides, exact excerpts and streams.

    At 16 and 24 kHz the original returns 8 samples less than its frames stand for; those 8 are zeros here.
    """

    def __init__(self, model: Any, name: str, weights_hash: str) -> None:
        config = model.config
        encoder, decoder = encoder_stack(model.encoder), decoder_stack(model.decoder)
        hop = int(config.hop_length)
        spec = CodecSpec(
            name=name,
            weights_hash=weights_hash,
            sample_rate=config.sampling_rate,
            hop_length=hop,
            channels=1,
            n_quantizers=config.n_codebooks,
            codebook_size=config.codebook_size,
            encode_context=encode_context(encoder, hop),
            decode_context=decode_context(decoder, hop),
        )
        super().__init__(spec)
        self.encoder, self.decoder = encoder, decoder
        self.quantizers = nn.ModuleList(FactorisedQuantizer(q) for q in model.quantizer.quantizers)

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        hop = self._spec.hop_length
        if lengths is not None:
            lengths = -(-lengths // hop) * hop
        latents, _ = self.encoder.run(F.pad(wave, (0, -wave.shape[-1] % hop)), lengths)
        residual, codes = latents, []
        for quantizer in self.quantizers[:n_quantizers]:
            indices, quantized = quantizer.encode(residual)  # type: ignore[operator]
            residual = residual - quantized
            codes.append(indices)
        return torch.stack(codes, 1)

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        quantized = torch.zeros((), device=codes.device)
        for level in range(codes.shape[1]):
            quantized = quantized + self.quantizers[level].decode(codes[:, level])  # type: ignore[operator]
        wave, _ = self.decoder.run(quantized, lengths)
        short = codes.shape[2] * self._spec.hop_length - wave.shape[-1]
        if short > 0 and lengths is not None:
            steps = torch.arange(wave.shape[-1], device=wave.device)
            ends = lengths * self._spec.hop_length - short
            wave = torch.where((steps < ends[:, None])[:, None], wave, 0.0)
        return wave

    @torch.no_grad()
    def decode_unpadded(self, codes: Tensor) -> Tensor:
        """As the original decodes one chunk of a long file: codes `[1, K, T]` → the part of the wave without padding.

        Its samples lie on no grid of frames; this is for reading such files only.
        """
        quantized = sum(self.quantizers[k].decode(codes[:, k]) for k in range(codes.shape[1]))  # type: ignore[operator, misc]
        assert isinstance(quantized, Tensor)
        return _unpadded(self.decoder, quantized)


def _unpadded(layer: Any, x: Tensor) -> Tensor:
    if isinstance(layer, Stack):
        for part in layer.layers:
            x = _unpadded(part, x)
        return x
    if isinstance(layer, Residual):
        out = _unpadded(layer.body, x)
        cut = (x.shape[-1] - out.shape[-1]) // 2
        return x[..., cut : x.shape[-1] - cut] + out
    if isinstance(layer, Conv):
        own = layer.conv
        return F.conv1d(x, own.weight, own.bias, own.stride, 0, own.dilation, own.groups)
    if isinstance(layer, ConvTranspose):
        return F.conv_transpose1d(x, layer.conv.weight, layer.conv.bias, layer.conv.stride, groups=layer.conv.groups)
    out, _ = layer(x, FULL)
    return out  # type: ignore[no-any-return]
