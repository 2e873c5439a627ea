"""The `Codec` interface: what every codec offers, how its arguments are checked, how it streams."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.errors import InputError
from codec.nn.spectral import frame_mask
from codec.spec import CodecSpec


@dataclass(frozen=True)
class Codes:
    """A batch of encoded waves.

    Attributes:
        codes: int64 `[B, K, T]`; entries beyond a row's length are 0 and mean nothing.
        lengths: int64 `[B]`, valid frames of each row.
        num_samples: int64 `[B]`, samples of each row's wave: `lengths == ceil(num_samples / hop_length)`.
    """

    codes: Tensor
    lengths: Tensor
    num_samples: Tensor

    def __repr__(self) -> str:
        shape, frames, samples = list(self.codes.shape), self.lengths.tolist(), self.num_samples.tolist()
        return f"Codes(codes={shape}, lengths={frames}, num_samples={samples})"


class Codec(ABC):
    """What every codec offers. Rows of a batch may have any lengths; each comes out as it would alone."""

    decode_warmup_frames: int = 0
    """Of a codec whose decode context is unbounded: frames around an excerpt after which what is left of the
    difference to the whole is small."""

    streams_encoding: bool = False
    """Of a codec whose encode context is unbounded: whether its `stream_encoder` carries the state along and so gives
    what `encode` gives."""

    records_graphs: bool = False
    """Whether `decode_static` looks at no value, so that a CUDA graph can record it."""

    @property
    @abstractmethod
    def spec(self) -> CodecSpec:
        """Identity and geometry."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    @abstractmethod
    def mel_hop_length(self) -> int:
        """Samples per frame of `decode_mel`; divides `spec.hop_length`."""

    @property
    @abstractmethod
    def mel_floor(self) -> float:
        """What `decode_mel` holds beyond a row's end: the log-mel of silence."""

    @abstractmethod
    def encode(self, wave: Tensor, lengths: Tensor | None = None, *, n_quantizers: int | None = None) -> Codes:
        """Encodes a batch of waves.

        Args:
            wave: `[B, C, N]` (or `[C, N]`: a batch of one), float, nominal range −1…1, at `spec.sample_rate`.
            lengths: int64 `[B]`, valid samples of each row, each ≥ 1; all N if None.
            n_quantizers: Codebooks to use, the first ones; all if None.

        Returns:
            `Codes` with T = `ceil(max(lengths) / hop_length)`.

        Raises:
            InputError: A wrong shape, dtype, channel count, length or number of quantizers.
        """

    @abstractmethod
    def decode(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """Decodes a batch of codes to waves `[B, C, N]`, float32, zeros beyond each row's end.

        Args:
            codes: `Codes` (the wave then has exactly the encoded samples), or int64 `[B, K, T]` / `[K, T]` with
                any 1 ≤ K ≤ `spec.n_quantizers` (the wave then has `hop_length` samples per frame).
            lengths: int64 `[B]`, valid frames of each row, when `codes` is a tensor.

        Raises:
            InputError: A wrong shape or dtype, codes outside the codebook, lengths outside the batch.
        """

    @abstractmethod
    def decode_mel(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """Decodes straight to log-mel `[B, M, F]`, float32, without making a wave.

        Arguments as for `decode`. A row of n samples has `ceil(n / mel_hop_length)` mel frames; beyond them the
        result holds `mel_floor`.
        """

    def decode_static(self, codes: Tensor, lengths: Tensor | None = None, *, output: str = "wave") -> Tensor:
        """As `decode`, for codes that are known to be good: nothing is checked, nothing is cut.

        Args:
            codes: int64 `[B, K, T]` on the codec's device, each below the codebook size.
            lengths: int64 `[B]` on the device, 1 … T; all T if None.
            output: "wave", "mel" or "latents" (the sum of codebook entries that the decoder begins with).

        Returns:
            `[B, C, T * hop_length]`, `[B, M, T * hop_length / mel_hop_length]` or `[B, D, T]`, float32; what lies
            beyond a row's end means nothing.

        Raises:
            InputError: The codec doesn't show its latents.
        """
        if output == "latents":
            raise InputError(f"{self.spec.name} doesn't show its latents; take 'wave', 'mel' or 'codes'")
        return self.decode_mel(codes, lengths) if output == "mel" else self.decode(codes, lengths)

    def stream_encoder(self, *, n_quantizers: int | None = None) -> StreamEncoder:
        """A stateful encoder: chunks of any size in, the codes that are complete out; equals one `encode`."""
        return StreamEncoder(self, n_quantizers=n_quantizers)

    def stream_decoder(self) -> StreamDecoder:
        """A stateful decoder: chunks of codes in, the wave that is complete out; equals one `decode`."""
        return StreamDecoder(self)


def check_wave(
    spec: CodecSpec, device: torch.device, wave: Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """What `Codec.encode` takes → wave `[B, C, N]` on the device, lengths `[B]`, whether any row is shorter than N.

    Beyond each row's end the wave is zero.
    """
    if wave.ndim == 2:
        wave = wave[None]
    if wave.ndim != 3 or wave.shape[0] < 1 or wave.shape[2] < 1:
        raise InputError(f"wave has shape {list(wave.shape)}; it must be [B, C, N] or [C, N] with B and N ≥ 1")
    if wave.shape[1] != spec.channels:
        raise InputError(f"wave has {wave.shape[1]} channels; {spec.name} has {spec.channels}: mix or split them first")
    if not wave.is_floating_point():
        raise InputError(f"wave has dtype {wave.dtype}; it must be float in −1…1: divide int16 by 32768")
    wave = wave.to(device)
    lengths, ragged = _check_lengths(lengths, wave.shape[0], wave.shape[2], "samples", device)
    wave = wave[..., : int(lengths.max())]
    ragged = ragged and bool((lengths < wave.shape[2]).any())
    if ragged:
        wave = torch.where(frame_mask(lengths, wave.shape[2]).transpose(1, 2), wave, 0.0)
    if not bool(torch.isfinite(wave).all()):
        raise InputError("wave holds NaN or infinite samples; repair or drop them before encoding")
    return wave, lengths, ragged


def check_codes(
    spec: CodecSpec, device: torch.device, codes: Codes | Tensor, lengths: Tensor | None
) -> tuple[Tensor, Tensor, bool]:
    """What `Codec.decode` takes → codes int64 `[B, K, T]` on the device, lengths `[B]`, whether any row is shorter."""
    if isinstance(codes, Codes):
        if lengths is not None:
            raise InputError("lengths is given beside Codes, which carry their own; pass only one of them")
        lengths = codes.lengths
        codes = codes.codes
    if codes.ndim == 2:
        codes = codes[None]
    limit = spec.n_quantizers
    if codes.ndim != 3 or codes.shape[0] < 1 or codes.shape[2] < 1 or not 1 <= codes.shape[1] <= limit:
        raise InputError(
            f"codes have shape {list(codes.shape)}; they must be [B, K, T] or [K, T] with K from 1 to {limit}"
        )
    if codes.is_floating_point() or codes.dtype == torch.bool:
        raise InputError(f"codes have dtype {codes.dtype}; they must be integers")
    codes = codes.to(device, torch.int64)
    low, high = int(codes.min()), int(codes.max())
    if low < 0 or high >= spec.codebook_size:
        raise InputError(f"codes range from {low} to {high}; the codebook has 0 to {spec.codebook_size - 1}")
    lengths, ragged = _check_lengths(lengths, codes.shape[0], codes.shape[2], "frames", device)
    return codes, lengths, ragged


def _check_lengths(
    lengths: Tensor | None, num_rows: int, limit: int, unit: str, device: torch.device
) -> tuple[Tensor, bool]:
    if lengths is None:
        return torch.full((num_rows,), limit, device=device), False
    if lengths.shape != (num_rows,) or lengths.is_floating_point():
        raise InputError(f"lengths is {lengths.dtype} {list(lengths.shape)}; it must be integer [{num_rows}]")
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > limit:
        raise InputError(f"lengths range from {low} to {high} {unit}; they must lie in 1…{limit}")
    return lengths.to(device, torch.int64), low < limit


def cut_rows(data: Tensor, lengths: Tensor, fill: float) -> Tensor:
    """`[B, X, N]` cut at the longest row, `fill` beyond each row's end."""
    data = data[..., : int(lengths.max())]
    if bool((lengths < data.shape[-1]).any()):
        data = torch.where(frame_mask(lengths, data.shape[-1]).transpose(1, 2), data, fill)
    return data


class StreamEncoder:
    """Encodes a wave that arrives in chunks; the codes equal those of one `encode` over the whole.

    Keeps the declared context and no more, so memory is constant. Rows of a batch advance together.

    Example:
        >>> codec = SoundStream(SoundStreamConfig())
        >>> stream = codec.stream_encoder()
        >>> wave = torch.zeros(1, 1, 8000)
        >>> parts = [stream.push(wave[..., :5000]), stream.push(wave[..., 5000:]), stream.flush()]
        >>> torch.equal(torch.cat(parts, -1), codec.encode(wave).codes)
        True
    """

    def __init__(self, codec: Codec, *, n_quantizers: int | None = None) -> None:
        if codec.spec.encode_context is None:
            raise InputError(f"{codec.spec.name} has unbounded encode context; it can't be streamed by chunks")
        self._codec = codec
        self._n_quantizers = n_quantizers
        self._left, self._right = codec.spec.encode_context
        self._buffer: Tensor | None = None
        self._first_frame = 0  # frame at which the buffer begins
        self._emitted = 0  # frames handed out

    def push(self, wave: Tensor) -> Tensor:
        """Takes `[B, C, n]`, returns int64 `[B, K, t]`, t ≥ 0: the frames whose context is complete."""
        self._buffer = wave if self._buffer is None else torch.cat([self._buffer, wave], -1)
        hop = self._codec.spec.hop_length
        complete = self._first_frame + self._buffer.shape[-1] // hop
        return self._emit(complete - self._right)

    def flush(self) -> Tensor:
        """Ends the wave: returns the remaining frames, the last one zero-padded, and starts afresh."""
        if self._buffer is None or self._buffer.shape[-1] == 0:
            raise InputError("flush before any sample was pushed; a wave has at least 1 sample")
        hop = self._codec.spec.hop_length
        codes = self._emit(self._first_frame - (-self._buffer.shape[-1] // hop))
        self._buffer, self._first_frame, self._emitted = None, 0, 0
        return codes

    def _emit(self, end: int) -> Tensor:
        assert self._buffer is not None
        if end <= self._emitted:
            num_rows, k = self._buffer.shape[0], self._n_quantizers or self._codec.spec.n_quantizers
            return torch.zeros(num_rows, k, 0, dtype=torch.int64, device=self._codec.device)
        codes = self._codec.encode(self._buffer, n_quantizers=self._n_quantizers).codes
        codes = codes[..., self._emitted - self._first_frame : end - self._first_frame]
        self._emitted = end
        keep_from = max(0, end - self._left)
        self._buffer = self._buffer[..., (keep_from - self._first_frame) * self._codec.spec.hop_length :].clone()
        self._first_frame = keep_from
        return codes


class StreamDecoder:
    """Decodes codes that arrive in chunks; the wave equals that of one `decode` over the whole (float32 rounding)."""

    def __init__(self, codec: Codec) -> None:
        if codec.spec.decode_context is None:
            raise InputError(f"{codec.spec.name} has unbounded decode context; it can't be streamed by chunks")
        self._codec = codec
        self._left, self._right = codec.spec.decode_context
        self._buffer: Tensor | None = None
        self._first_frame = 0
        self._emitted = 0

    def push(self, codes: Tensor) -> Tensor:
        """Takes int64 `[B, K, t]`, returns wave `[B, C, n]`, n ≥ 0: the samples whose context is complete."""
        self._buffer = codes if self._buffer is None else torch.cat([self._buffer, codes], -1)
        return self._emit(self._first_frame + self._buffer.shape[-1] - self._right)

    def flush(self) -> Tensor:
        """Ends the codes: returns the remaining samples and starts afresh."""
        if self._buffer is None or self._buffer.shape[-1] == 0:
            raise InputError("flush before any frame was pushed; codes have at least 1 frame")
        wave = self._emit(self._first_frame + self._buffer.shape[-1])
        self._buffer, self._first_frame, self._emitted = None, 0, 0
        return wave

    def _emit(self, end: int) -> Tensor:
        assert self._buffer is not None
        spec = self._codec.spec
        if end <= self._emitted:
            return torch.zeros(self._buffer.shape[0], spec.channels, 0, device=self._codec.device)
        wave = self._codec.decode(self._buffer)
        first, last = (n - self._first_frame for n in (self._emitted, end))
        wave = wave[..., first * spec.hop_length : last * spec.hop_length]
        self._emitted = end
        keep_from = max(0, end - self._left)
        self._buffer = self._buffer[..., keep_from - self._first_frame :].clone()
        self._first_frame = keep_from
        return wave
