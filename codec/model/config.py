"""`SoundStreamConfig`: the hyperparameters of a `SoundStream`, as `config.json` and a recipe's `model:` hold them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from codec.errors import ConfigError

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

# Fields that version 1 of config.json didn't have from the start. At their defaults they stay out of it, and so out of
# the content hash: a checkpoint's identity doesn't change because a later release can do more.
ADDED_LATER = (
    "body",
    "strides",
    "seanet_channels",
    "seanet_kernel_size",
    "seanet_dilations",
    "seanet_depthwise",
    "denoise",
    "codebook_dim",
    "normalise_codes",
    "codes_of",
)

# What the codes don't depend on.
OF_THE_DECODER = ("name", "codes_of", "decoder_n_fft", "decoder_dims", "decoder_blocks", "mel_hidden", "mel")


@dataclass(frozen=True)
class SoundStreamConfig:
    """Hyperparameters of `SoundStream`; what `config.json` holds.

    Attributes:
        name: The checkpoint's name.
        sample_rate: Hz.
        channels: Channels of the wave.
        hop_length: Samples per codec frame.
        subframes: Mel frames, and with the spectral body STFT frames, per codec frame; divides `hop_length`.
        encoder_n_fft: Encoder STFT size in samples.
        decoder_n_fft: Inverse STFT size: a multiple of the subframe, an odd one with `lookahead`.
        encoder_dims: Widths at (subframe, frame) rate.
        encoder_blocks: Blocks at (subframe, frame) rate.
        decoder_dims: Widths at (frame, subframe) rate.
        decoder_blocks: Blocks at (frame, subframe) rate.
        expansion: Hidden width of a block over its width.
        kernel_size: Taps of the blocks' convolutions, in frames of their rate.
        lookahead: Centred kernels and windows (declared, bounded lookahead) instead of causal ones.
        latent_dim: D.
        n_quantizers: Codebooks, K.
        codebook_size: Entries per codebook, V.
        mel_hidden: Hidden width of the mel head.
        mel: Settings of the mel that the mel head predicts: the fields of `codec.features.MelSettings`.
        body: "spectral" (short-time spectra at frame rate) or "seanet" (strided convolutions on samples). The STFT
            sizes and the encoder's and decoder's dims and blocks are the spectral body's; the next five the other's.
        strides: Downsampling of the encoder's stages, first to last; their product is `hop_length`. The decoder has
            them backwards.
        seanet_channels: Width of (encoder, decoder) at the sample rate; it doubles with each stage.
        seanet_kernel_size: Taps of the residual units' dilated convolutions.
        seanet_dilations: Dilations of the residual units of one stage.
        seanet_depthwise: Depthwise dilated convolutions, far cheaper, instead of full ones.
        denoise: Conditioned on whether to remove noise: `encode(..., denoise=True)`.
        codebook_dim: Size in which entries are compared and stored, projected from and to D; D itself if None.
        normalise_codes: Compare directions only: entries and what they are compared to have unit length.
        codes_of: The checkpoint whose encoder and codebooks this one has, so that its codes are that one's: `name`,
            `weights_hash` and `decode_context` of that checkpoint, and `codes_hash` of what the two share. Not chosen:
            `SoundStream.share_codes` fills it in, for a training of the decoder or of the mel head.
    """

    name: str = "soundstream"
    sample_rate: int = 16000
    channels: int = 1
    hop_length: int = 320
    subframes: int = 2
    encoder_n_fft: int = 512
    decoder_n_fft: int = 480
    encoder_dims: tuple[int, int] = (192, 256)
    encoder_blocks: tuple[int, int] = (2, 8)
    decoder_dims: tuple[int, int] = (256, 192)
    decoder_blocks: tuple[int, int] = (9, 1)
    expansion: int = 2
    kernel_size: int = 3
    lookahead: bool = True
    latent_dim: int = 64
    n_quantizers: int = 8
    codebook_size: int = 1024
    mel_hidden: int = 384
    mel: dict[str, Any] = field(default_factory=lambda: dict(DEFAULT_MEL))
    body: str = "spectral"
    strides: tuple[int, ...] = (2, 4, 5, 8)
    seanet_channels: tuple[int, int] = (16, 16)
    seanet_kernel_size: int = 7
    seanet_dilations: tuple[int, ...] = (1, 3, 9)
    seanet_depthwise: bool = False
    denoise: bool = False
    codebook_dim: int | None = None
    normalise_codes: bool = False
    codes_of: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("encoder_dims", "encoder_blocks", "decoder_dims", "decoder_blocks", "seanet_channels"):
            self._check_integers(name, "two integers ≥ 1", length=2)
        for name in ("strides", "seanet_dilations"):
            self._check_integers(name, "integers ≥ 1")
        for name in ("sample_rate", "channels", "hop_length", "subframes", "latent_dim", "mel_hidden", "expansion"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"model.{name} is {value!r}; it must be an integer ≥ 1")
        if self.hop_length % self.subframes:
            raise ConfigError(
                f"model.hop_length {self.hop_length} is not a multiple of model.subframes {self.subframes}"
            )
        if self.body == "spectral":
            self._check_spectral()
        elif self.body == "seanet":
            self._check_seanet()
        else:
            raise ConfigError(f"model.body is {self.body!r}; it must be 'spectral' or 'seanet'")
        if self.kernel_size < 1 or (self.lookahead and self.kernel_size % 2 == 0):
            raise ConfigError(f"model.kernel_size is {self.kernel_size}; with lookahead it must be odd")
        if self.codebook_dim is not None and not 1 <= self.codebook_dim <= self.latent_dim:
            raise ConfigError(
                f"model.codebook_dim is {self.codebook_dim}; it must be from 1 to model.latent_dim, "
                f"{self.latent_dim}, or null for no projection"
            )
        if self.normalise_codes and self.codebook_dim is None:
            raise ConfigError(
                "model.normalise_codes needs model.codebook_dim, whose projection back gives entries their length"
            )
        self._check_mel()
        self._check_codes_of()

    def _check_integers(self, name: str, wanted: str, length: int | None = None) -> None:
        value = getattr(self, name)
        good = isinstance(value, list | tuple) and len(value) == (length or len(value)) and len(value) > 0
        if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in value):
            raise ConfigError(f"model.{name} is {value!r}; it must be {wanted}")
        object.__setattr__(self, name, tuple(value))

    def _check_spectral(self) -> None:
        subframe = self.hop_length // self.subframes
        for name in ("encoder_n_fft", "decoder_n_fft"):
            if getattr(self, name) < subframe or getattr(self, name) % 2:
                raise ConfigError(f"model.{name} is {getattr(self, name)}; it must be even and ≥ {subframe} samples")
        if self.decoder_n_fft % subframe or (self.lookahead and self.decoder_n_fft // subframe % 2 == 0):
            kind = "an odd multiple" if self.lookahead else "a multiple"
            raise ConfigError(
                f"model.decoder_n_fft is {self.decoder_n_fft}; it must be {kind} of the subframe, {subframe} samples"
            )

    def _check_seanet(self) -> None:
        if math.prod(self.strides) != self.hop_length:
            raise ConfigError(
                f"model.strides {list(self.strides)} multiply to {math.prod(self.strides)}; "
                f"they must multiply to model.hop_length, {self.hop_length}"
            )
        size = self.seanet_kernel_size
        if size < 1 or (self.lookahead and size % 2 == 0):
            raise ConfigError(f"model.seanet_kernel_size is {size}; with lookahead it must be odd")

    def _check_mel(self) -> None:
        if not isinstance(self.mel.get("n_mels"), int):
            raise ConfigError(f"model.mel is {self.mel!r}; it must hold the fields of MelSettings, n_mels among them")
        subframe = self.hop_length // self.subframes
        mel_hop = self.mel.get("hop_length", subframe)
        if mel_hop != subframe:
            raise ConfigError(
                f"model.mel.hop_length is {mel_hop}; the mel head gives one mel frame per subframe, {subframe} samples"
            )
        mel_rate = self.mel.get("sample_rate", self.sample_rate)
        if mel_rate != self.sample_rate:
            raise ConfigError(f"model.mel.sample_rate is {mel_rate}; model.sample_rate is {self.sample_rate}")

    def _check_codes_of(self) -> None:
        if self.codes_of is None:
            return
        texts = {name: self.codes_of.get(name) for name in ("name", "weights_hash", "codes_hash")}
        context = self.codes_of.get("decode_context")
        good = len(self.codes_of) == 4 and all(isinstance(text, str) for text in texts.values())
        good = good and isinstance(context, list) and len(context) == 2
        if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in context or ()):
            raise ConfigError(
                f"model.codes_of is {self.codes_of!r}; it must have the strings {', '.join(texts)} and decode_context, "
                "two integers ≥ 0, as SoundStream.share_codes writes them"
            )

    def encoder_settings(self) -> dict[str, Any]:
        """What the codes depend on, as JSON types."""
        settings = {k: v for k, v in self.to_dict().items() if k not in OF_THE_DECODER}
        if "seanet_channels" in settings:
            settings["seanet_channels"] = self.seanet_channels[0]
        return settings

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types; those of `ADDED_LATER` only where they differ from their defaults."""
        defaults = {f.name: f.default for f in fields(self)}
        kept = {k: v for k, v in asdict(self).items() if k not in ADDED_LATER or v != defaults[k]}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> SoundStreamConfig:
        """The inverse of `to_dict`; an unknown field raises `ConfigError`."""
        known = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(known))
        if unknown:
            raise ConfigError(f"unknown model settings {unknown}; known: {', '.join(known)}")
        return cls(**settings)
