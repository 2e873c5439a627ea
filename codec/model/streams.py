"""Streams of `SoundStream` that carry the layers' states: each piece costs what it weighs, whatever came before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codec.errors import InputError
from codec.model.interface import StreamDecoder, StreamEncoder, check_codes, check_wave
from codec.nn.streaming import decoder_stream, encoder_stream

if TYPE_CHECKING:
    from codec.model.soundstream import SoundStream


class StatefulEncoder(StreamEncoder):
    """See `StreamEncoder`. A chunk's codes come out as soon as the samples they depend on are there."""

    def __init__(self, codec: SoundStream, *, n_quantizers: int, denoise: bool) -> None:
        self._own = codec
        self._levels = n_quantizers
        self._denoise = denoise
        self._begin()

    def _begin(self) -> None:
        self._stream = encoder_stream(
            self._own.encoder, torch.ones(1, dtype=torch.bool, device=self._own.device) if self._denoise else None
        )
        self._rows: int | None = None
        self._num_samples = 0

    @torch.no_grad()
    def push(self, wave: Tensor) -> Tensor:
        """Takes `[B, C, n]` or `[C, n]`, n ≥ 0, returns int64 `[B, K, t]`, t ≥ 0: the codes that are complete."""
        if wave.ndim == 2:
            wave = wave[None]
        if wave.ndim == 3 and wave.shape[2]:
            wave, _, _ = check_wave(self._own.spec, self._own.device, wave, None)
            self._rows = _same_rows(self._rows, wave)
            self._num_samples += wave.shape[2]
            return self._codes(self._stream.push(wave, False))
        rows = self._rows or len(wave)
        return torch.zeros(rows, self._levels, 0, dtype=torch.int64, device=self._own.device)

    @torch.no_grad()
    def flush(self) -> Tensor:
        """Ends the wave: returns the remaining frames, the last one zero-padded, and starts afresh."""
        if self._rows is None:
            raise InputError("flush before any sample was pushed; a wave has at least 1 sample")
        spec = self._own.spec
        tail = torch.zeros(self._rows, spec.channels, -self._num_samples % spec.hop_length, device=self._own.device)
        codes = self._codes(self._stream.push(tail, True))
        self._begin()
        return codes

    def _codes(self, latents: Tensor) -> Tensor:
        return self._own.quantizer.encode(latents, self._levels)


class StatefulDecoder(StreamDecoder):
    """See `StreamDecoder`. A chunk's samples come out as soon as the codes they depend on are there."""

    def __init__(self, codec: SoundStream) -> None:
        self._own = codec
        self._begin()

    def _begin(self) -> None:
        self._stream = decoder_stream(self._own.decoder)
        self._rows: int | None = None
        self._last: Tensor | None = None

    @torch.no_grad()
    def push(self, codes: Tensor) -> Tensor:
        """Takes int64 `[B, K, t]` or `[K, t]`, t ≥ 0, returns wave `[B, C, n]`, n ≥ 0: what is complete."""
        if codes.ndim == 2:
            codes = codes[None]
        if codes.ndim == 3 and codes.shape[2]:
            codes, _, _ = check_codes(self._own.spec, self._own.device, codes, None)
            self._rows = _same_rows(self._rows, codes)
            quantized = self._own.quantizer.decode(codes)
            self._last = quantized[:, :0]
            return self._stream.push(quantized, False)
        return torch.zeros(self._rows or len(codes), self._own.spec.channels, 0, device=self._own.device)

    @torch.no_grad()
    def flush(self) -> Tensor:
        """Ends the codes: returns the remaining samples and starts afresh."""
        if self._last is None:
            raise InputError("flush before any frame was pushed; codes have at least 1 frame")
        wave = self._stream.push(self._last, True)
        self._begin()
        return wave


def _same_rows(rows: int | None, chunk: Tensor) -> int:
    if rows is not None and len(chunk) != rows:
        raise InputError(f"the chunk has {len(chunk)} rows, the stream began with {rows}; rows advance together")
    return len(chunk)
