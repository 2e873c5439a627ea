"""SNAC: a DAC-like codec whose codebooks run at several rates.

`transformers` has no SNAC, so the network is built here from the weights' own names.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.adapters.base import Adapter, weights_hash
from codec.adapters.dac import FactorisedQuantizer, conv, conv_transpose
from codec.adapters.layers import (
    Conv,
    Layer,
    Pointwise,
    Residual,
    Rows,
    Snake,
    Span,
    Stack,
    decode_context,
    encode_context,
)
from codec.errors import CheckpointError, InputError
from codec.spec import CodecSpec

_HASH_A, _HASH_B, _HASH_C = (
    0x9E3779B97F4A7C15 - (1 << 64),
    0xBF58476D1CE4E5B9 - (1 << 64),
    0x94D049BB133111EB - (1 << 64),
)


@dataclass(frozen=True)
class SnacConfig:
    """What SNAC's `config.json` holds."""

    sampling_rate: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (3, 3, 7, 7)
    latent_dim: int | None = None
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (7, 7, 3, 3)
    attn_window_size: int | None = 32
    codebook_size: int = 4096
    codebook_dim: int = 8
    vq_strides: tuple[int, ...] = (8, 4, 2, 1)
    noise: bool = True
    depthwise: bool = True

    @classmethod
    def from_dict(cls, settings: dict[str, Any], name: str) -> SnacConfig:
        """From JSON.

        Raises:
            CheckpointError: An unknown setting.
        """
        unknown = sorted(set(settings) - {f.name for f in fields(cls)})
        if unknown:
            raise CheckpointError(f"{name}: SNAC settings {unknown} are unknown to this release; upgrade codec")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
        return cls(**values)


_M = TypeVar("_M", nn.Conv1d, nn.ConvTranspose1d)


class _Weights:
    """A state dict, with weight norm (both of torch's spellings) folded."""

    def __init__(self, tensors: dict[str, Tensor], name: str) -> None:
        self.tensors, self.name = tensors, name

    def __call__(self, key: str) -> Tensor:
        if key not in self.tensors:
            raise CheckpointError(
                f"{self.name}: no tensor {key!r}; the weights and config.json are of different models"
            )
        return self.tensors[key].float()

    def normed(self, prefix: str) -> Tensor:
        if f"{prefix}.weight" in self.tensors:
            return self(f"{prefix}.weight")
        spelling = ("weight_g", "weight_v")
        if f"{prefix}.parametrizations.weight.original0" in self.tensors:
            spelling = ("parametrizations.weight.original0", "parametrizations.weight.original1")
        return torch._weight_norm(self(f"{prefix}.{spelling[1]}"), self(f"{prefix}.{spelling[0]}"), 0)

    def bias(self, prefix: str) -> Tensor | None:
        return self.tensors.get(f"{prefix}.bias")

    def conv(self, prefix: str, *, stride: int = 1, dilation: int = 1, padding: int, num_in: int) -> nn.Conv1d:
        weight, bias = self.normed(prefix), self.bias(prefix)
        own = nn.Conv1d(
            num_in,
            weight.shape[0],
            weight.shape[2],
            stride,
            padding,
            dilation,
            groups=num_in // weight.shape[1],
            bias=bias is not None,
        )
        return self._filled(own, weight, bias)

    def conv_transpose(self, prefix: str, stride: int) -> nn.ConvTranspose1d:
        weight, bias = self.normed(prefix), self.bias(prefix)
        own = nn.ConvTranspose1d(
            weight.shape[0],
            weight.shape[1],
            weight.shape[2],
            stride,
            math.ceil(stride / 2),
            output_padding=stride % 2,
            bias=bias is not None,
        )
        return self._filled(own, weight, bias)

    def _filled(self, module: _M, weight: Tensor, bias: Tensor | None) -> _M:
        if module.weight.shape != weight.shape:
            raise CheckpointError(
                f"{self.name}: a weight has shape {list(weight.shape)}, not {list(module.weight.shape)}"
            )
        module.weight.data.copy_(weight)
        if bias is not None:
            assert module.bias is not None
            module.bias.data.copy_(bias)
        return module


class LocalAttention(Layer):
    """Attention within windows that lie on a fixed grid, with rotary positions inside the window."""

    cos: Tensor
    sin: Tensor

    def __init__(self, weights: _Weights, prefix: str, window: int, head_dim: int = 64) -> None:
        super().__init__()
        self.window, self.head_dim = window, head_dim
        self.norm = nn.LayerNorm(weights(f"{prefix}.norm.weight").shape[0])
        self.norm.weight.data.copy_(weights(f"{prefix}.norm.weight"))
        self.norm.bias.data.copy_(weights(f"{prefix}.norm.bias"))
        self.to_qkv = nn.Parameter(weights(f"{prefix}.to_qkv.weight"), requires_grad=False)
        self.to_out = nn.Parameter(weights(f"{prefix}.to_out.weight"), requires_grad=False)
        angles = torch.arange(window).float()[:, None] * weights(f"{prefix}.rel_pos.inv_freq")
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin())

    def _rotated(self, x: Tensor) -> Tensor:
        half = self.head_dim // 2
        turned = torch.cat([-x[..., half:], x[..., :half]], -1)
        return x * self.cos + turned * self.sin

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        b, c, n = x.shape
        heads = c // self.head_dim
        qkv = F.linear(self.norm(x.transpose(1, 2)), self.to_qkv)
        # Every window of every row is a batch entry of its own: a row's end is always a window's end.
        parts = qkv.view(b * (n // self.window), self.window, 3, heads, self.head_dim).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(self._rotated(parts[0]), self._rotated(parts[1]), parts[2])
        out = F.linear(out.transpose(1, 2).reshape(b, n, c), self.to_out)
        return out.transpose(1, 2) + x, rows

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        return first // self.window * self.window, last // self.window * self.window + self.window - 1


class Noise(Layer):
    """`x + noise * linear(x)`.

    The original draws its noise anew in every call, so that no decode equals another. Here it is a function of the
    frame's codes: the same for a frame wherever it is decoded, and white all the same.
    """

    def __init__(self, linear: Conv, number: int) -> None:
        super().__init__()
        self.linear = linear
        self.number = number

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        assert rows.seeds is not None
        per_frame = x.shape[-1] // rows.seeds.shape[1]
        noise = normal_noise(rows.seeds + self.number, per_frame).to(x.dtype)
        return x + noise[:, None] * self.linear(x, rows)[0], rows


def _mixed(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in wrapping int64 arithmetic."""
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _HASH_B
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _HASH_C
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def normal_noise(seeds: Tensor, count: int) -> Tensor:
    """Standard normal numbers, `count` per seed: int64 `[B, T]` → float32 `[B, T * count]`."""
    steps = torch.arange(count, device=seeds.device) * _HASH_A
    bits = _mixed(_mixed(seeds)[..., None] + steps)
    radius = ((bits & 0xFFFFFF).float() + 1.0) / (1 << 24)
    angle = ((bits >> 32) & 0xFFFFFF).float() * (2 * math.pi / (1 << 24))
    return ((-2 * radius.log()).sqrt() * angle.cos()).flatten(1)


def code_seeds(codes: Tensor) -> Tensor:
    """A number for each frame that depends on all of its codes: `[B, K, T]` → int64 `[B, T]`."""
    seed = torch.zeros_like(codes[:, 0])
    for row in range(codes.shape[1]):
        seed = _mixed(seed + codes[:, row] + _HASH_A)
    return seed


def _unit(weights: _Weights, prefix: str, width: int, dilation: int) -> Residual:
    first = weights.conv(f"{prefix}.block.1", dilation=dilation, padding=3 * dilation, num_in=width)
    second = weights.conv(f"{prefix}.block.3", padding=0, num_in=width)
    alphas = weights(f"{prefix}.block.0.alpha"), weights(f"{prefix}.block.2.alpha")
    return Residual(Stack([Snake(alphas[0]), conv(first), Snake(alphas[1]), conv(second)]))


def _encoder(c: SnacConfig, weights: _Weights) -> Stack:
    width = c.encoder_dim
    layers: list[Layer] = [conv(weights.conv("encoder.block.0", padding=3, num_in=1))]
    at = 1
    for stride in c.encoder_rates:
        block = f"encoder.block.{at}"
        layers += [_unit(weights, f"{block}.block.{n}", width, 3**n) for n in range(3)]
        layers.append(Snake(weights(f"{block}.block.3.alpha")))
        down = weights.conv(f"{block}.block.4", stride=stride, padding=math.ceil(stride / 2), num_in=width)
        layers.append(conv(down))
        width, at = width * 2, at + 1
    if c.attn_window_size is not None:
        layers.append(LocalAttention(weights, f"encoder.block.{at}", c.attn_window_size))
        at += 1
    return Stack([*layers, conv(weights.conv(f"encoder.block.{at}", padding=3, num_in=width))])


def _decoder(c: SnacConfig, weights: _Weights, latent_dim: int) -> Stack:
    layers: list[Layer] = [conv(weights.conv("decoder.model.0", padding=3, num_in=latent_dim))]
    at = 1
    if c.depthwise:
        layers.append(conv(weights.conv("decoder.model.1", padding=0, num_in=latent_dim)))
        at = 2
    if c.attn_window_size is not None:
        layers.append(LocalAttention(weights, f"decoder.model.{at}", c.attn_window_size))
        at += 1
    width = c.decoder_dim
    for number, stride in enumerate(c.decoder_rates):
        block = f"decoder.model.{at}"
        layers.append(Snake(weights(f"{block}.block.0.alpha")))
        layers.append(conv_transpose(weights.conv_transpose(f"{block}.block.1", stride)))
        width, at, inner = width // 2, at + 1, 2
        if c.noise:
            linear = conv(weights.conv(f"{block}.block.2.linear", padding=0, num_in=width))
            layers.append(Noise(linear, number))
            inner = 3
        layers += [_unit(weights, f"{block}.block.{inner + n}", width, 3**n) for n in range(3)]
    layers.append(Snake(weights(f"decoder.model.{at}.alpha")))
    last = conv(weights.conv(f"decoder.model.{at + 1}", padding=3, num_in=width))
    return Stack([*layers, last, Pointwise(nn.Tanh())])


class _Projections:
    """One level's parts under the names that `FactorisedQuantizer` takes."""

    def __init__(self, weights: _Weights, prefix: str, latent_dim: int, codebook_dim: int) -> None:
        self.in_proj = weights.conv(f"{prefix}.in_proj", padding=0, num_in=latent_dim)
        self.out_proj = weights.conv(f"{prefix}.out_proj", padding=0, num_in=codebook_dim)
        entries = weights(f"{prefix}.codebook.weight")
        self.codebook = nn.Embedding(*entries.shape)
        self.codebook.weight.data.copy_(entries)


class Snac(Adapter):
    """SNAC, its rates flattened into one: a frame is the span of the slowest code (or of the attention's window).

    Of each codebook a frame holds as many codes as fall into it, slowest codebook first, in order of time within a
    codebook. `snac_24khz` has frames of 2048 samples with 1 + 2 + 4 = 7 codes; the models with attention have frames
    of 32 steps with 4 + 8 + 16 + 32 = 60. The first 1, 3 or 7 codes of `snac_24khz` are its first 1, 2 or 3 codebooks.
    """

    def __init__(self, config: SnacConfig, tensors: dict[str, Tensor], name: str) -> None:
        weights = _Weights(tensors, name)
        latent_dim = config.latent_dim or config.encoder_dim * 2 ** len(config.encoder_rates)
        encoder, decoder = _encoder(config, weights), _decoder(config, weights, latent_dim)
        step = math.prod(config.encoder_rates)
        period = math.lcm(config.vq_strides[0], config.attn_window_size or 1)
        self.counts = [period // stride for stride in config.vq_strides]
        hop = step * period
        facts = {
            "family": "snac",
            "sample_rate": config.sampling_rate,
            "rates": [list(config.encoder_rates), list(config.vq_strides), config.attn_window_size, config.noise],
        }
        spec = CodecSpec(
            name=name,
            weights_hash=weights_hash(facts, (t for k, t in tensors.items() if "rel_pos" not in k)),
            sample_rate=config.sampling_rate,
            hop_length=hop,
            channels=1,
            n_quantizers=sum(self.counts),
            codebook_size=config.codebook_size,
            encode_context=encode_context(encoder, hop, period),
            decode_context=decode_context(decoder, hop, period),
        )
        super().__init__(spec)
        self.encoder, self.decoder, self.period = encoder, decoder, period
        prefix = "quantizer.quantizers"
        self.quantizers = nn.ModuleList(
            FactorisedQuantizer(_Projections(weights, f"{prefix}.{n}", latent_dim, config.codebook_dim))
            for n in range(len(config.vq_strides))
        )

    def _check_quantizers(self, n_quantizers: int | None) -> int:
        k = super()._check_quantizers(n_quantizers)
        self._levels(k)
        return k

    def _levels(self, n_quantizers: int) -> int:
        """Codebooks that the first `n_quantizers` codes of a frame are."""
        sums = [sum(self.counts[: n + 1]) for n in range(len(self.counts))]
        if n_quantizers not in sums:
            raise InputError(
                f"n_quantizers is {n_quantizers}; a frame of {self._spec.name} holds whole codebooks only: give one of "
                f"{sums}, for 1 to {len(sums)} codebooks"
            )
        return sums.index(n_quantizers) + 1

    def flatten(self, codes: list[Tensor]) -> Tensor:
        """The original's codes, one `[B, T_k]` per codebook → `[B, K, T]`."""
        frames = codes[0].shape[1] // self.counts[0]
        parts = [c.view(c.shape[0], frames, n).transpose(1, 2) for c, n in zip(codes, self.counts, strict=False)]
        return torch.cat(parts, 1)

    def split(self, codes: Tensor) -> list[Tensor]:
        """The inverse of `flatten`."""
        sizes = self.counts[: self._levels(codes.shape[1])]
        return [part.transpose(1, 2).flatten(1) for part in torch.split(codes, sizes, 1)]

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        hop = self._spec.hop_length
        if lengths is not None:
            lengths = -(-lengths // hop) * hop
        residual, _ = self.encoder.run(F.pad(wave, (0, -wave.shape[-1] % hop)), lengths)
        codes = []
        for level in range(self._levels(n_quantizers)):
            stride = self.period // self.counts[level]
            pooled = F.avg_pool1d(residual, stride, stride) if stride > 1 else residual
            indices, quantized = self.quantizers[level].encode(pooled)  # type: ignore[operator]
            residual = residual - quantized.repeat_interleave(stride, -1)
            codes.append(indices)
        return self.flatten(codes)

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        total = torch.zeros((), device=codes.device)
        for level, own in enumerate(self.split(codes)):
            quantized = self.quantizers[level].decode(own)  # type: ignore[operator]
            total = total + quantized.repeat_interleave(self.period // self.counts[level], -1)
        if lengths is not None:
            lengths = lengths * self.period
        return self.decoder.run(total, lengths, code_seeds(codes))[0]
