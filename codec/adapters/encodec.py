"""EnCodec: the causal 24 kHz model, and the 48 kHz one that works on overlapping chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from codec.adapters import seanet
from codec.adapters.base import Adapter, fold_weight_norm, weights_hash
from codec.adapters.layers import Layer, Lstm, Stack
from codec.errors import CheckpointError, InputError
from codec.model.interface import StreamDecoder, StreamEncoder
from codec.spec import CodecSpec

CHUNKS_AT_ONCE = 32
"""Chunks of the 48 kHz model that go through the network together."""

WARMUP_FRAMES = 75
"""Frames of the 24 kHz model before an excerpt: see the table in `benchmarks/adapters.md`."""

EDGE_FRAMES = 8
"""A stream's first frames wait for this many, because the start of the wave is reflected about its first sample."""


def encodec(model: Any, name: str) -> Adapter:
    """A `transformers` `EncodecModel` → its adapter."""
    config = model.config
    tensors = [t for k, t in model.state_dict().items() if not k.endswith(("inited", "cluster_size", "embed_avg"))]
    facts = {
        "family": "encodec",
        "sample_rate": config.sampling_rate,
        "channels": config.audio_channels,
        "ratios": list(config.upsampling_ratios),
        "causal": config.use_causal_conv,
        "pad_mode": config.pad_mode,
        "normalize": config.normalize,
        "chunk": [config.chunk_length, config.chunk_stride],
    }
    identity = weights_hash(facts, tensors)
    if (config.chunk_length is None) == config.normalize:
        raise CheckpointError(
            f"{name}: normalize is {config.normalize} with chunks of {config.chunk_length} samples; this reads models "
            "that have both (like encodec_48khz) or neither (like encodec_24khz)"
        )
    # The configuration's own count follows the highest bandwidth; codebooks beyond it exist in no checkpoint.
    num_levels = len(model.quantizer.layers)
    fold_weight_norm(model)
    if config.chunk_length is None:
        return Encodec(model, name, identity, num_levels)
    return ChunkedEncodec(model, name, identity, num_levels)


class _Quantizer(nn.Module):
    """EnCodec's residual quantizer."""

    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def encode(self, latents: Tensor, n_quantizers: int) -> Tensor:
        """Latents `[B, D, T]` → codes `[B, K, T]`."""
        residual, codes = latents.float().transpose(1, 2).flatten(0, 1), []
        for layer in self.layers[:n_quantizers]:
            entries: Tensor = layer.codebook.embed
            # In the original's order of operations, for the same rounding.
            distance = (-2 * residual) @ entries.t()
            distance.add_(residual.pow(2).sum(1, keepdim=True)).add_(entries.pow(2).sum(1))
            codes.append(distance.argmin(1))
            residual = residual - F.embedding(codes[-1], entries)
        return torch.stack(codes).view(len(codes), latents.shape[0], -1).transpose(0, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Codes `[B, K, T]` → latents `[B, D, T]`."""
        total: Tensor = self.layers[0].decode(codes[:, 0])
        for level in range(1, codes.shape[1]):
            total = total + self.layers[level].decode(codes[:, level])
        return total


class Encodec(Adapter):
    """The causal model (`encodec_24khz`).

    Its LSTMs remember all of the past: contexts are unbounded, an excerpt is decoded after a warm-up of
    `decode_warmup_frames` and is approximate. Streams carry the LSTM's state and are exact, in bounded memory.
    """

    streams_encoding = True

    def __init__(self, model: Any, name: str, weights_hash: str, num_levels: int) -> None:
        config = model.config
        spec = CodecSpec(
            name=name,
            weights_hash=weights_hash,
            sample_rate=config.sampling_rate,
            hop_length=config.hop_length,
            channels=config.audio_channels,
            n_quantizers=num_levels,
            codebook_size=config.codebook_size,
            encode_context=None,
            decode_context=None,
        )
        super().__init__(spec, decode_warmup_frames=WARMUP_FRAMES)
        self.encoder = seanet.stack(model.encoder.layers)
        self.decoder = seanet.stack(model.decoder.layers)
        self.quantizer = _Quantizer(model.quantizer.layers)

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        latents, _ = self.encoder.run(wave, lengths)
        return self.quantizer.encode(latents, n_quantizers)

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        return self.decoder.run(self.quantizer.decode(codes), lengths)[0]

    def stream_encoder(self, *, n_quantizers: int | None = None) -> StreamEncoder:
        """Exact, with the LSTM's state carried along; see `Codec.stream_encoder`."""
        return _EncodecStreamEncoder(self, self._check_quantizers(n_quantizers))

    def stream_decoder(self) -> StreamDecoder:
        """Exact, with the LSTM's state carried along; see `Codec.stream_decoder`."""
        return _EncodecStreamDecoder(self)


class _Stage:
    """A stack with a finite context, run on pieces.

    Args:
        per_in: Input steps per frame.
        per_out: Output steps per frame.
    """

    def __init__(self, layers: Sequence[Layer], per_in: int, per_out: int) -> None:
        self.stack = Stack(layers)
        self.per_in, self.per_out = per_in, per_out
        frame = 1 << 20
        first, _ = self.stack.span(frame * per_out, (frame + 1) * per_out - 1)
        self.left = frame - first // per_in
        self.buffer: Tensor | None = None
        self.first = 0  # frame at which the buffer begins
        self.emitted = 0

    def push(self, x: Tensor, *, final: bool) -> Tensor | None:
        """The outputs that are complete; all that are left with `final`."""
        self.buffer = x if self.buffer is None else torch.cat([self.buffer, x], -1)
        complete = self.first + self.buffer.shape[-1] // self.per_in
        if final:
            complete = self.first - (-self.buffer.shape[-1] // self.per_in)
        elif complete < EDGE_FRAMES:
            return None
        if complete <= self.emitted:
            return None
        used = self.buffer if final else self.buffer[..., : (complete - self.first) * self.per_in]
        out = self.stack.run(used, None)[0]
        out = out[..., (self.emitted - self.first) * self.per_out : (complete - self.first) * self.per_out]
        self.emitted = complete
        keep = max(0, complete - max(self.left, EDGE_FRAMES))
        self.buffer = self.buffer[..., (keep - self.first) * self.per_in :].clone()
        self.first = keep
        return out


class _LstmStages:
    """Layers before the LSTM, the LSTM with its state, layers after it: stream in, stream out."""

    def __init__(self, stack: Stack, per_in: int, per_out: int) -> None:
        layers: list[Any] = list(stack.layers)
        at = next(n for n, layer in enumerate(layers) if isinstance(layer, Lstm))
        self.before = _Stage(layers[:at], per_in, 1)
        self.lstm: Lstm = layers[at]
        self.state: tuple[Tensor, Tensor] | None = None
        self.after = _Stage(layers[at + 1 :], 1, per_out)

    def push(self, x: Tensor, *, final: bool) -> Tensor | None:
        middle = self.before.push(x, final=final)
        if middle is None:
            if not final or self.after.buffer is None:
                return None
            middle = self.after.buffer[..., :0]
        else:
            middle, self.state = self.lstm.steps(middle, self.state)
        return self.after.push(middle, final=final)


class _EncodecStreamEncoder(StreamEncoder):
    def __init__(self, codec: Encodec, n_quantizers: int) -> None:
        self._own, self._levels = codec, n_quantizers
        self._begin()

    def _begin(self) -> None:
        self._stages = _LstmStages(self._own.encoder, self._own.spec.hop_length, 1)
        self._begun = False

    @torch.no_grad()
    def push(self, wave: Tensor) -> Tensor:
        self._begun = self._begun or wave.shape[-1] > 0
        return self._codes(self._stages.push(wave.to(self._own.device, torch.float32), final=False), wave.shape[0])

    @torch.no_grad()
    def flush(self) -> Tensor:
        buffer = self._stages.before.buffer
        if not self._begun or buffer is None:
            raise InputError("flush before any sample was pushed; a wave has at least 1 sample")
        codes = self._codes(self._stages.push(buffer[..., :0], final=True), buffer.shape[0])
        self._begin()
        return codes

    def _codes(self, latents: Tensor | None, num_rows: int) -> Tensor:
        if latents is None:
            return torch.zeros(num_rows, self._levels, 0, dtype=torch.int64, device=self._own.device)
        return self._own.quantizer.encode(latents, self._levels)


class _EncodecStreamDecoder(StreamDecoder):
    def __init__(self, codec: Encodec) -> None:
        self._own = codec
        self._begin()

    def _begin(self) -> None:
        self._stages = _LstmStages(self._own.decoder, 1, self._own.spec.hop_length)
        self._begun = False

    @torch.no_grad()
    def push(self, codes: Tensor) -> Tensor:
        self._begun = self._begun or codes.shape[-1] > 0
        latents = self._own.quantizer.decode(codes.to(self._own.device))
        return self._wave(self._stages.push(latents, final=False), codes.shape[0])

    @torch.no_grad()
    def flush(self) -> Tensor:
        buffer = self._stages.before.buffer
        if not self._begun or buffer is None:
            raise InputError("flush before any frame was pushed; codes have at least 1 frame")
        wave = self._wave(self._stages.push(buffer[..., :0], final=True), buffer.shape[0])
        self._begin()
        return wave

    def _wave(self, wave: Tensor | None, num_rows: int) -> Tensor:
        if wave is None:
            return torch.zeros(num_rows, self._own.spec.channels, 0, device=self._own.device)
        return wave.float()


class ChunkedEncodec(Adapter):
    """The model on overlapping chunks (`encodec_48khz`), each normalised by its own level.

    A chunk's stride (47,520 samples) isn't a whole number of the network's steps (320 samples), so a frame here is
    the smallest span that holds whole numbers of both: 1584 samples, 5 steps; 30 frames are a chunk. Its codes are

    - row 0: place of the frame in its chunk, and how many of its steps hold codes: `place * 6 + steps`;
    - rows 1 and 2: the chunk's level, a float of 20 bits;
    - then for each codebook one row per step.

    With place and level among the codes, an excerpt decodes alone, exactly, wherever it was cut. Its networks
    normalise over time, so only chunks of equal length go through together.
    """

    def __init__(self, model: Any, name: str, weights_hash: str, num_levels: int) -> None:
        config = model.config
        self.chunk, self.stride, self.step = config.chunk_length, config.chunk_stride, config.hop_length
        steps = self.chunk // self.step
        self.per_frame = steps // math.gcd(steps, self.stride)
        hop = self.stride * self.per_frame // steps
        self.period = self.stride // hop
        overlap = self.chunk - self.stride
        if self.chunk % self.step or self.stride % hop or overlap > self.stride or overlap < 0:
            raise CheckpointError(
                f"{name}: chunks of {self.chunk} samples every {self.stride} with steps of {self.step} don't fit "
                "together; the overlap must be less than half a chunk"
            )
        into = -(-overlap // hop)  # frames of a chunk that the one before reaches into
        spec = CodecSpec(
            name=name,
            weights_hash=weights_hash,
            sample_rate=config.sampling_rate,
            hop_length=hop,
            channels=config.audio_channels,
            n_quantizers=3 + self.per_frame * num_levels,
            codebook_size=config.codebook_size,
            encode_context=(self.period - 1, self.period - 1 + into),
            decode_context=(max(self.period - 1, self.period + into - 1), self.period - 1),
        )
        needed = max(self.period * (self.per_frame + 1), 1024)
        if needed > config.codebook_size:
            raise CheckpointError(
                f"{name}: codebooks have {config.codebook_size} entries; place and level of a chunk take {needed}"
            )
        super().__init__(spec)
        self.encoder = seanet.stack(model.encoder.layers)
        self.decoder = seanet.stack(model.decoder.layers)
        self.quantizer = _Quantizer(model.quantizer.layers)

    def _check_quantizers(self, n_quantizers: int | None) -> int:
        limit, m = self._spec.n_quantizers, self.per_frame
        if n_quantizers is None:
            return limit
        if not 3 + m <= n_quantizers <= limit or (n_quantizers - 3) % m:
            raise InputError(
                f"n_quantizers is {n_quantizers}; {self._spec.name} has 3 rows of place and level and {m} rows per "
                f"codebook: give 3 + {m} k, from {3 + m} to {limit}"
            )
        return n_quantizers

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        num_rows, _, longest = wave.shape
        own = [longest] * num_rows if lengths is None else lengths.tolist()
        pieces: dict[int, list[tuple[int, int]]] = {}
        for row, n in enumerate(own):
            for start in range(0, n, self.stride):
                pieces.setdefault(min(self.chunk, n - start), []).append((row, start))
        hop = self._spec.hop_length
        codes = torch.zeros(num_rows, n_quantizers, -(-longest // hop), dtype=torch.int64, device=wave.device)
        for size, places in sorted(pieces.items()):
            for first in range(0, len(places), CHUNKS_AT_ONCE):
                group = places[first : first + CHUNKS_AT_ONCE]
                chunks = torch.stack([wave[row, :, start : start + size] for row, start in group])
                steps, scale = self._encode_chunks(chunks, (n_quantizers - 3) // self.per_frame)
                packed = self.pack(steps, scale)
                for (row, start), one in zip(group, packed, strict=True):
                    at = start // hop
                    end = min(at + self.period, -(-own[row] // hop))
                    codes[row, :, at:end] = one[:, : end - at]
        return codes

    def _encode_chunks(self, chunks: Tensor, num_levels: int) -> tuple[Tensor, Tensor]:
        """Chunks `[b, C, n]` of equal length → codes `[b, K, steps]`, level `[b]`."""
        mono = chunks.sum(1, keepdim=True) / chunks.shape[1]
        scale = mono.pow(2).mean(-1, keepdim=True).sqrt() + 1e-8
        latents, _ = self.encoder.run(chunks / scale, None)
        return self.quantizer.encode(latents, num_levels), scale.flatten()

    def pack(self, steps: Tensor, scale: Tensor) -> Tensor:
        """Codes `[b, K, steps]` and levels `[b]` of chunks → the codes of their frames `[b, 3 + m K, period]`."""
        m, period = self.per_frame, self.period
        b, k, count = steps.shape
        padded = torch.zeros(b, k, period * m, dtype=torch.int64, device=steps.device)
        padded[..., :count] = steps[..., : period * m]
        levels = padded.view(b, k, period, m).transpose(2, 3).reshape(b, k * m, period)
        place = torch.arange(period, device=steps.device)
        valid = (count - place * m).clamp(0, m)
        # The upper 20 bits below the sign, rounded: 8 of exponent, 12 of fraction.
        bits = (scale.float().view(torch.int32).to(torch.int64) + (1 << 10)) >> 11
        head = torch.stack([(place * (m + 1) + valid).expand(b, -1)], 1)
        level = torch.stack([bits >> 10, bits & 1023], 1)[..., None].expand(-1, -1, period)
        return torch.cat([head, level, levels], 1)

    def unpack(self, codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Frames of one chunk `[b, 3 + m K, f]` → codes `[b, K, m f]`, steps in use `[b]`, levels `[b]`."""
        m = self.per_frame
        b, rows, f = codes.shape
        steps = codes[:, 3:].view(b, (rows - 3) // m, m, f).transpose(2, 3).reshape(b, (rows - 3) // m, m * f)
        bits = ((codes[:, 1, 0] & 1023) << 10 | (codes[:, 2, 0] & 1023)) << 11
        scale = torch.nan_to_num(bits.to(torch.int32).view(torch.float32), nan=0.0, posinf=0.0)
        return steps, (codes[:, 0] % (m + 1)).clamp(max=m).sum(1), scale

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        num_rows, rows, longest = codes.shape
        self._check_quantizers(rows)
        m, hop, device = self.per_frame, self._spec.hop_length, codes.device
        own = [longest] * num_rows if lengths is None else lengths.tolist()
        starts = codes[:, 0] // (m + 1) == 0
        # A chunk begins where its place is 0, and at the row's start: what was cut off there is gone.
        pieces: dict[tuple[int, int], list[tuple[int, int]]] = {}
        flags = starts.tolist()
        places = (codes[:, 0] // (m + 1)).tolist()
        for row, n in enumerate(own):
            begins = [0] + [t for t in range(1, n) if flags[row][t] or places[row][t] != places[row][t - 1] + 1]
            for a, b in zip(begins, [*begins[1:], n], strict=True):
                pieces.setdefault((b - a, int((codes[row, 0, a:b] % (m + 1)).sum())), []).append((row, a))
        size = longest * hop + self.chunk
        out = torch.zeros(num_rows, self._spec.channels, size, device=device)
        weights = torch.zeros(num_rows, 1, size, device=device)
        ramp = torch.linspace(0, 1, self.chunk + 2, device=device)[1:-1]
        triangle = 0.5 - (ramp - 0.5).abs()
        for (f, count), group in sorted(pieces.items()):
            if count == 0:
                continue
            for first in range(0, len(group), CHUNKS_AT_ONCE):
                part = group[first : first + CHUNKS_AT_ONCE]
                frames = torch.stack([codes[row, :, a : a + f] for row, a in part])
                steps, _, scale = self.unpack(frames)
                wave = self.decoder.run(self.quantizer.decode(steps[..., :count]), None)[0]
                wave = wave.float() * scale[:, None, None]
                for (row, a), one in zip(part, wave, strict=True):
                    # Where a chunk lacks its beginning, the fade is that of the part there is.
                    skip = places[row][a] * hop
                    fade = triangle[skip : skip + one.shape[-1]]
                    one = one[..., : fade.shape[-1]]
                    out[row, :, a * hop : a * hop + one.shape[-1]] += fade * one
                    weights[row, :, a * hop : a * hop + one.shape[-1]] += fade
        return (out / weights.clamp(min=1e-12))[..., : longest * hop]

    def stream_encoder(self, *, n_quantizers: int | None = None) -> StreamEncoder:
        """Chunk by chunk; see `Codec.stream_encoder`."""
        return _ChunkStreamEncoder(self, self._check_quantizers(n_quantizers))


class _ChunkStreamEncoder(StreamEncoder):
    def __init__(self, codec: ChunkedEncodec, n_quantizers: int) -> None:
        self._own, self._rows = codec, n_quantizers
        self._held: Tensor | None = None

    def push(self, wave: Tensor) -> Tensor:
        self._held = wave if self._held is None else torch.cat([self._held, wave], -1)
        own, n = self._own, self._held.shape[-1]
        # A chunk is complete only when its overlap with the next has come, and a next one is sure to follow.
        whole = max(0, (n - own.chunk) // own.stride)
        if not whole:
            return torch.zeros(self._held.shape[0], self._rows, 0, dtype=torch.int64, device=own.device)
        used = self._held[..., : (whole - 1) * own.stride + own.chunk]
        codes = own.encode(used, n_quantizers=self._rows).codes[..., : whole * own.period]
        self._held = self._held[..., whole * own.stride :].clone()
        return codes

    def flush(self) -> Tensor:
        if self._held is None or self._held.shape[-1] == 0:
            raise InputError("flush before any sample was pushed; a wave has at least 1 sample")
        codes = self._own.encode(self._held, n_quantizers=self._rows).codes
        self._held = None
        return codes
