"""Mimi: SEANet, transformers and a split quantizer at 12.5 Hz."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from codec.adapters import seanet
from codec.adapters.base import Adapter, fold_weight_norm, weights_hash
from codec.adapters.layers import Layer, Rows, Span, Stack, decode_context, encode_context
from codec.spec import CodecSpec


class Transformer(Layer):
    """A causal transformer whose layers each see the last `window` steps: in all, `layers * (window - 1)` before."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module
        self.window = int(module.config.sliding_window)

    def forward(self, x: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """See `Layer`."""
        out = self.module(x.transpose(1, 2), use_cache=False).last_hidden_state
        return out.transpose(1, 2), rows

    def span(self, first: int, last: int) -> Span:
        """See `Layer`."""
        return first - len(self.module.layers) * (self.window - 1), last


def mimi(model: Any, name: str) -> Mimi:
    """A `transformers` `MimiModel` → its adapter."""
    config = model.config
    tensors = [t for k, t in model.state_dict().items() if not k.endswith("initialized")]
    facts = {"family": "mimi", "sample_rate": config.sampling_rate, "ratios": list(config.upsampling_ratios)}
    facts["window"] = config.sliding_window
    identity = weights_hash(facts, tensors)
    fold_weight_norm(model)
    return Mimi(model, name, identity)


class Mimi(Adapter):
    """Mimi: causal, with contexts that are finite but long.

    Each transformer layer attends to 250 steps, so that eight of them reach back 80 s. Little of what is far away
    counts: a reader may take `decode_warmup_frames` instead, and is then approximate (`benchmarks/adapters.py`
    measures how much, `--warm-up`).
    """

    def __init__(self, model: Any, name: str, weights_hash: str) -> None:
        config = model.config
        # Releases of transformers differ in where they keep the two transformers.
        inner, outer = getattr(model.encoder, "encoder_seanet", model.encoder), model.encoder
        outer = outer if hasattr(outer, "encoder_transformer") else model
        layers: list[Layer] = list(seanet.stack(inner.layers).layers)  # type: ignore[arg-type]
        layers += [Transformer(outer.encoder_transformer)]
        if outer.downsample is not None:
            layers += [seanet.conv(outer.downsample)]
        encoder = Stack(layers)
        inner, outer = getattr(model.decoder, "decoder_seanet", model.decoder), model.decoder
        outer = outer if hasattr(outer, "decoder_transformer") else model
        layers = [] if outer.upsample is None else [seanet.conv_transpose(outer.upsample)]
        layers += [Transformer(outer.decoder_transformer), *seanet.stack(inner.layers).layers]  # type: ignore[list-item]
        decoder = Stack(layers)
        hop = round(config.sampling_rate / config.frame_rate)
        spec = CodecSpec(
            name=name,
            weights_hash=weights_hash,
            sample_rate=config.sampling_rate,
            hop_length=hop,
            channels=config.audio_channels,
            n_quantizers=config.num_quantizers,
            codebook_size=config.codebook_size,
            encode_context=encode_context(encoder, hop),
            decode_context=decode_context(decoder, hop),
        )
        super().__init__(spec, decode_warmup_frames=WARMUP_FRAMES)
        self.encoder, self.decoder = encoder, decoder
        self.quantizer = copy.copy(model.quantizer)

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        latents, _ = self.encoder.run(wave, lengths)
        return torch.cat([self._levels(part, latents, k) for part, k in self._parts(n_quantizers)], 1)

    def _parts(self, n_quantizers: int) -> list[tuple[Any, int]]:
        """Semantic and acoustic quantizer, with the codebooks to use of each."""
        own = self.quantizer
        semantic = min(n_quantizers, own.num_semantic_quantizers)
        parts = [(own.semantic_residual_vector_quantizer, semantic)]
        if n_quantizers > semantic:
            parts.append((own.acoustic_residual_vector_quantizer, n_quantizers - semantic))
        return parts

    @staticmethod
    def _levels(part: Any, latents: Tensor, n_quantizers: int) -> Tensor:
        codes: Tensor = part.encode(latents, n_quantizers)
        return codes.transpose(0, 1)

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        return self.decoder.run(self.quantizer.decode(codes), lengths)[0]


WARMUP_FRAMES = 50
"""4 s; see the class."""
