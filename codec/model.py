"""wave ↔ codes ↔ mel: the `Codec` interface, the SoundStream model, `load_codec` and `save`."""

from __future__ import annotations

import hashlib
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from codec.errors import CheckpointError, ConfigError, InputError
from codec.nn.rvq import QuantizerOutput, ResidualVectorQuantizer
from codec.nn.spectral import SpectralDecoder, SpectralEncoder, frame_mask
from codec.spec import CodecSpec

FORMAT_VERSION = 1
TRAINING_STATE = ("quantizer.counts", "quantizer.sums")


DEFAULT_MEL = {
    "sample_rate": 16000,
    "n_fft": 512,
    "win_length": 512,
    "hop_length": 160,
    "n_mels": 80,
    "f_min": 0.0,
    "f_max": 8000.0,
    "floor": 1e-5,
}


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

    def stream_encoder(self, *, n_quantizers: int | None = None) -> StreamEncoder:
        """A stateful encoder: chunks of any size in, the codes that are complete out; equals one `encode`."""
        return StreamEncoder(self, n_quantizers=n_quantizers)

    def stream_decoder(self) -> StreamDecoder:
        """A stateful decoder: chunks of codes in, the wave that is complete out; equals one `decode`."""
        return StreamDecoder(self)


@dataclass(frozen=True)
class SoundStreamConfig:
    """Hyperparameters of `SoundStream` with the spectral body; what `config.json` holds.

    Attributes:
        name: The checkpoint's name.
        sample_rate: Hz.
        channels: Channels of the wave.
        hop_length: Samples per codec frame.
        subframes: STFT frames per codec frame; `hop_length` is a multiple.
        encoder_n_fft: Encoder STFT size in samples.
        decoder_n_fft: Inverse STFT size: a multiple of the subframe, an odd one with `lookahead`.
        encoder_dims: Widths at (subframe, frame) rate.
        encoder_blocks: Blocks at (subframe, frame) rate.
        decoder_dims: Widths at (frame, subframe) rate.
        decoder_blocks: Blocks at (frame, subframe) rate.
        expansion: Hidden width of a block over its width.
        kernel_size: Taps of the convolutions, in frames of their rate.
        lookahead: Centred kernels and windows (declared, bounded lookahead) instead of causal ones.
        latent_dim: D.
        n_quantizers: Codebooks, K.
        codebook_size: Entries per codebook, V.
        mel_hidden: Hidden width of the mel head.
        mel: Settings of the mel that the mel head predicts: the fields of `codec.features.MelSettings`.
    """

    name: str = "soundstream"
    sample_rate: int = 16000
    channels: int = 1
    hop_length: int = 320
    subframes: int = 2
    encoder_n_fft: int = 512
    decoder_n_fft: int = 480
    encoder_dims: tuple[int, int] = (192, 256)
    encoder_blocks: tuple[int, int] = (2, 6)
    decoder_dims: tuple[int, int] = (256, 192)
    decoder_blocks: tuple[int, int] = (8, 2)
    expansion: int = 3
    kernel_size: int = 3
    lookahead: bool = True
    latent_dim: int = 64
    n_quantizers: int = 8
    codebook_size: int = 1024
    mel_hidden: int = 384
    mel: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_MEL))

    def __post_init__(self) -> None:
        for name in ("encoder_dims", "encoder_blocks", "decoder_dims", "decoder_blocks"):
            value = getattr(self, name)
            if len(value) != 2 or any(not isinstance(n, int) or n < 1 for n in value):
                raise ConfigError(f"model.{name} is {value!r}; it must be two integers ≥ 1")
            object.__setattr__(self, name, tuple(value))
        if self.hop_length % self.subframes:
            raise ConfigError(
                f"model.hop_length {self.hop_length} is not a multiple of model.subframes {self.subframes}"
            )
        subframe = self.hop_length // self.subframes
        for name in ("encoder_n_fft", "decoder_n_fft"):
            if getattr(self, name) < subframe or getattr(self, name) % 2:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be even and ≥ {subframe} samples")
        if self.decoder_n_fft % subframe or (self.lookahead and self.decoder_n_fft // subframe % 2 == 0):
            kind = "an odd multiple" if self.lookahead else "a multiple"
            raise ConfigError(
                f"model.decoder_n_fft is {self.decoder_n_fft}; it must be {kind} of the subframe, {subframe} samples"
            )
        if self.kernel_size < 1 or (self.lookahead and self.kernel_size % 2 == 0):
            raise ConfigError(f"model.kernel_size is {self.kernel_size}; with lookahead it must be odd")
        if not isinstance(self.mel.get("n_mels"), int):
            raise ConfigError(f"model.mel is {self.mel!r}; it must hold the fields of MelSettings, n_mels among them")
        mel_hop = self.mel.get("hop_length", subframe)
        if mel_hop != subframe:
            raise ConfigError(
                f"model.mel.hop_length is {mel_hop}; the mel head gives one mel frame per subframe, {subframe} samples"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> SoundStreamConfig:
        """The inverse of `to_dict`; an unknown field raises `ConfigError`."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(f"unknown model settings {unknown}; known: {', '.join(known)}")
        return cls(**settings)


class SoundStream(nn.Module, Codec):
    """encoder → residual vector quantizer → decoder with a wave head and a mel head.

    The scheme of SoundStream (Zeghidour et al. 2021, arXiv:2107.03312) around a body that works on short-time
    spectra at frame rate and ends in an inverse STFT, as Vocos does (Siuzdak 2023, arXiv:2306.00814).

    Example:
        >>> codec = SoundStream(SoundStreamConfig(n_quantizers=4))
        >>> codes = codec.encode(torch.zeros(2, 1, 16000), torch.tensor([16000, 321]))
        >>> codec.decode(codes).shape
        torch.Size([2, 1, 16000])
    """

    def __init__(self, config: SoundStreamConfig) -> None:
        super().__init__()
        self.config = config
        shared: dict[str, Any] = {
            "channels": config.channels,
            "hop_length": config.hop_length,
            "subframes": config.subframes,
            "kernel_size": config.kernel_size,
            "expansion": config.expansion,
            "lookahead": config.lookahead,
            "latent_dim": config.latent_dim,
        }
        self.encoder = SpectralEncoder(
            n_fft=config.encoder_n_fft, dims=config.encoder_dims, num_blocks=config.encoder_blocks, **shared
        )
        self.quantizer = ResidualVectorQuantizer(
            config.latent_dim, n_quantizers=config.n_quantizers, codebook_size=config.codebook_size
        )
        self.decoder = SpectralDecoder(
            n_fft=config.decoder_n_fft,
            dims=config.decoder_dims,
            num_blocks=config.decoder_blocks,
            n_mels=config.mel["n_mels"],
            mel_hidden=config.mel_hidden,
            **shared,
        )
        self._spec: CodecSpec | None = None

    @property
    def spec(self) -> CodecSpec:
        """Identity and geometry. The hash is of the present weights, computed once: don't train after asking."""
        if self._spec is None:
            self._spec = self._spec_of(content_hash(self.config, self.state_dict()))
        return self._spec

    def _spec_of(self, weights_hash: str) -> CodecSpec:
        c = self.config
        return CodecSpec(
            name=c.name,
            weights_hash=weights_hash,
            sample_rate=c.sample_rate,
            hop_length=c.hop_length,
            channels=c.channels,
            n_quantizers=c.n_quantizers,
            codebook_size=c.codebook_size,
            encode_context=self.encoder.context,
            decode_context=self.decoder.wave_context,
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.quantizer.codebooks.device

    @property
    def mel_hop_length(self) -> int:
        """Samples per mel frame."""
        return self.config.hop_length // self.config.subframes

    @property
    def mel_floor(self) -> float:
        """What frames beyond a row's end hold: the log-mel of silence."""
        return math.log(self.config.mel.get("floor", 1e-5))

    def latents(self, wave: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Latents before the quantizer: wave `[B, C, N]`, zero beyond each row's length → `[B, T, D]`, float32."""
        mask = None
        if lengths is not None:
            mask = frame_mask(-(-lengths // self.config.hop_length), -(-wave.shape[-1] // self.config.hop_length))
        tail = -wave.shape[-1] % self.config.hop_length
        latents: Tensor = self.encoder(nn.functional.pad(wave, (0, tail)), mask)
        return latents

    @torch.no_grad()
    def encode(self, wave: Tensor, lengths: Tensor | None = None, *, n_quantizers: int | None = None) -> Codes:
        """See `Codec.encode`."""
        wave, lengths, ragged = self._check_wave(wave, lengths)
        if n_quantizers is not None and not 1 <= n_quantizers <= self.config.n_quantizers:
            raise InputError(f"n_quantizers is {n_quantizers}; this codec has 1 to {self.config.n_quantizers}")
        codes = self.quantizer.encode(self.latents(wave, lengths if ragged else None), n_quantizers)
        frames = -(-lengths // self.config.hop_length)
        if ragged:
            codes = codes * frame_mask(frames, codes.shape[-1]).transpose(1, 2)
        return Codes(codes, frames, lengths)

    @torch.no_grad()
    def decode(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        trunk, mask, num_samples = self._trunk(codes, lengths)
        wave: Tensor = self.decoder.wave_head(trunk, mask)
        return _cut(wave, num_samples, 0.0)

    @torch.no_grad()
    def decode_mel(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """See `Codec.decode_mel`."""
        trunk, _, num_samples = self._trunk(codes, lengths)
        return _cut(self.decoder.mel_head(trunk), -(-num_samples // self.mel_hop_length), self.mel_floor)

    def _trunk(self, codes: Codes | Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The decoder's trunk, its frame mask if rows differ, and the samples of each row."""
        tensor, frames, ragged = self._check_codes(codes, lengths)
        mask = frame_mask(frames, tensor.shape[-1]) if ragged else None
        num_samples = codes.num_samples if isinstance(codes, Codes) else frames * self.config.hop_length
        return self.decoder.trunk(self.quantizer.decode(tensor), mask), mask, num_samples.to(tensor.device)

    def forward(
        self, wave: Tensor, n_quantizers: Tensor | None
    ) -> tuple[Tensor, Tensor, QuantizerOutput | None, Tensor]:
        """A training pass over waves of equal length.

        Args:
            wave: `[B, C, T * hop_length]`.
            n_quantizers: int64 `[B]`, levels per example; None leaves the latents unquantized (warm-up).

        Returns:
            (decoded wave, log-mel `[B, M, F]`, quantizer output or None, latents `[B, T, D]`).
        """
        latents = self.encoder(wave)
        quantized = None if n_quantizers is None else self.quantizer(latents, n_quantizers)
        trunk = self.decoder.trunk(latents if quantized is None else quantized.quantized)
        return self.decoder.wave_head(trunk), self.decoder.mel_head(trunk), quantized, latents

    def save(self, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> CodecSpec:
        """Writes `config.json` and `model.safetensors`; returns the spec of what was written.

        Args:
            folder: Created if missing; its two files are replaced.
            dtype: Of the stored weights; loading always gives float32 unless asked otherwise.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items() if k not in TRAINING_STATE}
        # Codebooks stay float32: rounding them would change which entry is the nearest.
        stored = {k: v if k.startswith("quantizer.") else v.to(dtype) for k, v in tensors.items()}
        digest = content_hash(self.config, stored)
        document = {"format_version": FORMAT_VERSION, "architecture": "SoundStream", "weights_hash": digest}
        document["model"] = self.config.to_dict()  # type: ignore[assignment]
        _replace(path / "model.safetensors", save_safetensors(stored))
        _replace(path / "config.json", (json.dumps(document, indent=2) + "\n").encode())
        return self._spec_of(digest)

    def _check_wave(self, wave: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        """`[B, C, N]` on the model's device, lengths `[B]`, and whether any row is shorter than N."""
        if wave.ndim == 2:
            wave = wave[None]
        if wave.ndim != 3 or wave.shape[0] < 1 or wave.shape[2] < 1:
            raise InputError(f"wave has shape {list(wave.shape)}; it must be [B, C, N] or [C, N] with B and N ≥ 1")
        if wave.shape[1] != self.config.channels:
            raise InputError(
                f"wave has {wave.shape[1]} channels; {self.config.name} has {self.config.channels}: "
                "mix or split them first"
            )
        if not wave.is_floating_point():
            raise InputError(f"wave has dtype {wave.dtype}; it must be float in −1…1: divide int16 by 32768")
        wave = wave.to(self.device)
        lengths, ragged = _check_lengths(lengths, wave.shape[0], wave.shape[2], "samples", self.device)
        wave = wave[..., : int(lengths.max())]
        ragged = ragged and bool((lengths < wave.shape[2]).any())
        if ragged:
            wave = torch.where(frame_mask(lengths, wave.shape[2]).transpose(1, 2), wave, 0.0)
        if not bool(torch.isfinite(wave).all()):
            raise InputError("wave holds NaN or infinite samples; repair or drop them before encoding")
        return wave, lengths, ragged

    def _check_codes(self, codes: Codes | Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor, bool]:
        if isinstance(codes, Codes):
            if lengths is not None:
                raise InputError("lengths is given beside Codes, which carry their own; pass only one of them")
            lengths = codes.lengths
            codes = codes.codes
        if codes.ndim == 2:
            codes = codes[None]
        limit = self.config.n_quantizers
        if codes.ndim != 3 or codes.shape[0] < 1 or codes.shape[2] < 1 or not 1 <= codes.shape[1] <= limit:
            raise InputError(
                f"codes have shape {list(codes.shape)}; they must be [B, K, T] or [K, T] with K from 1 to {limit}"
            )
        if codes.is_floating_point() or codes.dtype == torch.bool:
            raise InputError(f"codes have dtype {codes.dtype}; they must be integers")
        codes = codes.to(self.device, torch.int64)
        low, high = int(codes.min()), int(codes.max())
        if low < 0 or high >= self.config.codebook_size:
            raise InputError(f"codes range from {low} to {high}; the codebook has 0 to {self.config.codebook_size - 1}")
        lengths, ragged = _check_lengths(lengths, codes.shape[0], codes.shape[2], "frames", self.device)
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


def _cut(data: Tensor, lengths: Tensor, fill: float) -> Tensor:
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


def content_hash(config: SoundStreamConfig, tensors: dict[str, Tensor]) -> str:
    """The codec's identity: SHA-256 (hex) over configuration and weights as they will be loaded, in float32."""
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True).encode())
    for name in sorted(tensors):
        if name not in TRAINING_STATE:
            tensor = tensors[name].detach().cpu().float().contiguous()
            digest.update(f"{name}{list(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def checkpoint_folders() -> Iterator[Path]:
    """Where named checkpoints are looked for: inside an installed wheel, then beside a source checkout."""
    package = Path(__file__).parent
    yield package / "checkpoints"
    yield package.parent / "checkpoints"


def load_codec(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> SoundStream:
    """Loads a codec, ready to encode and decode.

    Args:
        name_or_path: The name of a shipped checkpoint (`speech_16k`), or a folder with `config.json` and
            `model.safetensors`.
        device: Where to put it.
        dtype: Of the network's weights (float32 if None). The quantizer, the inverse STFT and the outputs stay
            float32.

    Raises:
        CheckpointError: Not found, damaged, of another architecture or a newer version.

    Example:
        >>> codec = load_codec("speech_16k")
        >>> codec.spec.frame_rate
        Fraction(50, 1)
    """
    folder = _find_checkpoint(name_or_path)
    config_path, weights_path = folder / "config.json", folder / "model.safetensors"
    try:
        document = json.loads(config_path.read_bytes())
        architecture, version = document["architecture"], document["format_version"]
        settings, stated_hash = document["model"], document["weights_hash"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{config_path}: not a codec configuration ({error!r}); save the codec again") from error
    if architecture != "SoundStream" or version != FORMAT_VERSION:
        raise CheckpointError(
            f"{config_path}: architecture {architecture!r} in format version {version!r}; this release reads "
            f"'SoundStream' in version {FORMAT_VERSION}: upgrade codec or export the checkpoint again"
        )
    codec = SoundStream(SoundStreamConfig.from_dict(settings))
    try:
        tensors = load_safetensors(weights_path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{weights_path}: can't be read as safetensors ({error}); copy it again") from error
    expected = {k: v for k, v in codec.state_dict().items() if k not in TRAINING_STATE}
    wrong = sorted(set(tensors) ^ set(expected)) or sorted(k for k in tensors if tensors[k].shape != expected[k].shape)
    if wrong:
        raise CheckpointError(
            f"{weights_path}: {len(wrong)} tensors don't fit {config_path.name}, first {wrong[0]!r}; "
            "the two files are of different checkpoints"
        )
    found_hash = content_hash(codec.config, tensors)
    if found_hash != stated_hash:
        raise CheckpointError(
            f"{folder}: the weights hash to {found_hash[:12]}…, config.json says {str(stated_hash)[:12]}…; "
            "one of the files is damaged or was edited: copy both again"
        )
    codec.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    codec.requires_grad_(False).eval()
    _ = codec.spec  # hashed from the stored weights, before any change of dtype
    if dtype is not None:
        for part in (codec.encoder, codec.decoder):
            part.to(dtype)
    return codec.to(device)


def _find_checkpoint(name_or_path: str | os.PathLike[str]) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    shipped = []
    for folder in checkpoint_folders():
        if (folder / name_or_path / "config.json").is_file():
            return folder / name_or_path
        if folder.is_dir():
            shipped += sorted(p.name for p in folder.iterdir() if (p / "config.json").is_file())
    names = ", ".join(shipped) or "none shipped"
    raise CheckpointError(f"no codec {str(name_or_path)!r}: neither a folder nor a shipped checkpoint ({names})")


def _replace(path: Path, data: bytes) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
