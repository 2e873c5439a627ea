"""`SoundStream`: the codec that this project trains."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from codec.errors import CheckpointError, CodecError, InputError
from codec.model.config import SoundStreamConfig
from codec.model.interface import Codec, Codes, StreamDecoder, StreamEncoder, check_codes, check_wave, cut_rows
from codec.model.streams import StatefulDecoder, StatefulEncoder
from codec.nn.rvq import QuantizerOutput, ResidualVectorQuantizer
from codec.nn.seanet import SeanetDecoder, SeanetEncoder
from codec.nn.spectral import SpectralDecoder, SpectralEncoder, frame_mask
from codec.spec import CodecSpec

FORMAT_VERSION = 1
TRAINING_STATE = ("quantizer.counts", "quantizer.sums")


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
            "lookahead": config.lookahead,
            "latent_dim": config.latent_dim,
        }
        mel_head: dict[str, Any] = {
            "subframes": config.subframes,
            "n_mels": config.mel["n_mels"],
            "mel_hidden": config.mel_hidden,
        }
        self.encoder: SpectralEncoder | SeanetEncoder
        self.decoder: SpectralDecoder | SeanetDecoder
        if config.body == "spectral":
            shared |= {
                "hop_length": config.hop_length,
                "kernel_size": config.kernel_size,
                "expansion": config.expansion,
            }
            self.encoder = SpectralEncoder(
                n_fft=config.encoder_n_fft,
                subframes=config.subframes,
                dims=config.encoder_dims,
                num_blocks=config.encoder_blocks,
                denoise=config.denoise,
                **shared,
            )
        else:
            shared |= {
                "strides": config.strides,
                "kernel_size": config.seanet_kernel_size,
                "dilations": config.seanet_dilations,
                "depthwise": config.seanet_depthwise,
            }
            self.encoder = SeanetEncoder(width=config.seanet_channels[0], denoise=config.denoise, **shared)
        self.quantizer = ResidualVectorQuantizer(
            config.latent_dim,
            n_quantizers=config.n_quantizers,
            codebook_size=config.codebook_size,
            codebook_dim=config.codebook_dim,
            normalise_codes=config.normalise_codes,
        )
        if config.body == "spectral":
            self.decoder = SpectralDecoder(
                n_fft=config.decoder_n_fft,
                dims=config.decoder_dims,
                num_blocks=config.decoder_blocks,
                **shared,
                **mel_head,
            )
        else:
            self.decoder = SeanetDecoder(width=config.seanet_channels[1], **shared, **mel_head)
        self._spec: CodecSpec | None = None
        self._geometry = self._spec_of("")

    @property
    def spec(self) -> CodecSpec:
        """Identity and geometry. The hash is of the present weights, computed once: don't train after asking."""
        if self._spec is None:
            self._spec = self._spec_of(content_hash(self.config, self.state_dict()))
        return self._spec

    def _spec_of(self, weights_hash: str) -> CodecSpec:
        c = self.config
        spec = CodecSpec(
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
        if c.codes_of is None:
            return spec
        shared = {name: c.codes_of[name] for name in ("name", "weights_hash", "decode_context")}
        return replace(spec, codes_of=replace(spec, **shared))

    def share_codes(self, other: SoundStream) -> None:
        """Declares this codec's codes to be those of `other`, whose encoder and codebooks it has.

        From then on it reads and writes the token files of `other`, or of the codec whose codes `other` has in turn.
        `save` and `load_codec` verify that encoder and codebooks are still the declared ones. That the checkpoint of
        the declared name and hash has them too is verified here, and can't be later, without that checkpoint: who
        writes a false `codes_of` into `config.json` and hashes anew gets a codec that takes the other's tokens and
        decodes noise.

        Raises:
            InputError: `other` has another encoder or other codebooks.
        """
        shared = codes_hash(self.config, self.state_dict())
        if shared != codes_hash(other.config, other.state_dict()):
            raise InputError(
                f"{self.config.name} has another encoder or other codebooks than {other.config.name}; its codes are "
                "its own: encode corpora anew with it"
            )
        origin = other.spec.token_spec
        assert origin.decode_context is not None
        codes_of = {
            "name": origin.name,
            "weights_hash": origin.weights_hash,
            "decode_context": list(origin.decode_context),
            "codes_hash": shared,
        }
        self.config = replace(self.config, codes_of=codes_of)
        self._spec = None

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

    def latents(self, wave: Tensor, lengths: Tensor | None = None, *, denoise: bool = False) -> Tensor:
        """Latents before the quantizer: wave `[B, C, N]`, zero beyond each row's length → `[B, T, D]`, float32."""
        mask = None
        if lengths is not None:
            mask = frame_mask(-(-lengths // self.config.hop_length), -(-wave.shape[-1] // self.config.hop_length))
        tail = -wave.shape[-1] % self.config.hop_length
        condition = torch.full((len(wave),), True, device=wave.device) if denoise else None
        latents: Tensor = self.encoder(nn.functional.pad(wave, (0, tail)), mask, condition)
        return latents

    @torch.no_grad()
    def encode(
        self,
        wave: Tensor,
        lengths: Tensor | None = None,
        *,
        n_quantizers: int | None = None,
        denoise: bool = False,
    ) -> Codes:
        """See `Codec.encode`.

        Args:
            wave: As there.
            lengths: As there.
            n_quantizers: As there.
            denoise: The codes are of the speech without its background noise; of a codec trained for it
                (`config.denoise`).
        """
        self._check_options(n_quantizers, denoise)
        wave, lengths, ragged = check_wave(self._geometry, self.device, wave, lengths)
        codes = self.quantizer.encode(self.latents(wave, lengths if ragged else None, denoise=denoise), n_quantizers)
        frames = -(-lengths // self.config.hop_length)
        if ragged:
            codes = codes * frame_mask(frames, codes.shape[-1]).transpose(1, 2)
        return Codes(codes, frames, lengths)

    def stream_encoder(self, *, n_quantizers: int | None = None, denoise: bool = False) -> StreamEncoder:
        """See `Codec.stream_encoder`; `denoise` as in `encode`."""
        self._check_options(n_quantizers, denoise)
        return StatefulEncoder(self, n_quantizers=n_quantizers or self.config.n_quantizers, denoise=denoise)

    def stream_decoder(self) -> StreamDecoder:
        """See `Codec.stream_decoder`."""
        return StatefulDecoder(self)

    def _check_options(self, n_quantizers: int | None, denoise: bool) -> None:
        if n_quantizers is not None and not 1 <= n_quantizers <= self.config.n_quantizers:
            raise InputError(f"n_quantizers is {n_quantizers}; this codec has 1 to {self.config.n_quantizers}")
        if denoise and not self.config.denoise:
            raise InputError(
                f"denoise=True, but {self.config.name} isn't conditioned on it; encode as it is, or train a codec "
                "with model.denoise: true"
            )

    @torch.no_grad()
    def decode(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        trunk, mask, num_samples = self._trunk(codes, lengths)
        wave: Tensor = self.decoder.wave_head(trunk, mask)
        return cut_rows(wave, num_samples, 0.0)

    @torch.no_grad()
    def decode_mel(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """See `Codec.decode_mel`."""
        trunk, mask, num_samples = self._trunk(codes, lengths)
        return cut_rows(self.decoder.mel_head(trunk, mask), -(-num_samples // self.mel_hop_length), self.mel_floor)

    records_graphs = True

    @torch.no_grad()
    def decode_static(self, codes: Tensor, lengths: Tensor | None = None, *, output: str = "wave") -> Tensor:
        """See `Codec.decode_static`."""
        quantized = self.quantizer.decode(codes)
        if output == "latents":
            return quantized.float().transpose(1, 2)
        mask = None if lengths is None else frame_mask(lengths, codes.shape[-1])
        trunk = self.decoder.trunk(quantized, mask)
        return self.decoder.mel_head(trunk, mask) if output == "mel" else self.decoder.wave_head(trunk, mask).float()

    def _trunk(self, codes: Codes | Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor]:
        """The decoder's trunk, its frame mask if rows differ, and the samples of each row."""
        tensor, frames, ragged = check_codes(self._geometry, self.device, codes, lengths)
        mask = frame_mask(frames, tensor.shape[-1]) if ragged else None
        num_samples = codes.num_samples if isinstance(codes, Codes) else frames * self.config.hop_length
        return self.decoder.trunk(self.quantizer.decode(tensor), mask), mask, num_samples.to(tensor.device)

    def forward(
        self, wave: Tensor, n_quantizers: Tensor | None, denoise: Tensor | None = None
    ) -> tuple[Tensor, Tensor, QuantizerOutput | None, Tensor]:
        """A training pass over waves of equal length.

        Args:
            wave: `[B, C, T * hop_length]`.
            n_quantizers: int64 `[B]`, levels per example; None leaves the latents unquantized (warm-up).
            denoise: bool `[B]`, whether an example is to come out without its noise (with `config.denoise`); None: no.

        Returns:
            (decoded wave, log-mel `[B, M, F]`, quantizer output or None, latents `[B, T, D]`).
        """
        latents = self.encoder(wave, None, denoise)
        quantized = None if n_quantizers is None else self.quantizer(latents, n_quantizers)
        trunk = self.decoder.trunk(latents if quantized is None else quantized.quantized)
        return self.decoder.wave_head(trunk), self.decoder.mel_head(trunk), quantized, latents

    def save(self, folder: str | os.PathLike[str], *, dtype: torch.dtype = torch.float32) -> CodecSpec:
        """Writes `config.json` and `model.safetensors`; returns the spec of what was written.

        Args:
            folder: Created if missing; its two files are replaced.
            dtype: Of the stored weights; loading always gives float32 unless asked otherwise.

        Raises:
            CheckpointError: The codes were declared to be another checkpoint's (`share_codes`) and aren't any more.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items() if k not in TRAINING_STATE}
        # Codebooks stay float32: rounding them would change which entry is the nearest.
        stored = {k: v if k.startswith("quantizer.") else v.to(dtype) for k, v in tensors.items()}
        _check_codes(str(path), self.config, stored)
        digest = content_hash(self.config, stored)
        document = {"format_version": FORMAT_VERSION, "architecture": "SoundStream", "weights_hash": digest}
        document["model"] = self.config.to_dict()  # type: ignore[assignment]
        _replace(path / "model.safetensors", save_safetensors(stored))
        _replace(path / "config.json", (json.dumps(document, indent=2) + "\n").encode())
        return self._spec_of(digest)


def content_hash(config: SoundStreamConfig, tensors: dict[str, Tensor]) -> str:
    """The codec's identity: SHA-256 (hex) over configuration and weights as they will be loaded, in float32."""
    return _hash(config.to_dict(), tensors)


def codes_hash(config: SoundStreamConfig, tensors: dict[str, Tensor]) -> str:
    """As `content_hash`, of what the codes depend on: encoder, codebooks and their settings."""
    return _hash(config.encoder_settings(), {k: v for k, v in tensors.items() if not k.startswith("decoder.")})


def _hash(settings: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in sorted(tensors):
        if name not in TRAINING_STATE:
            tensor = tensors[name].detach().cpu().float().contiguous()
            digest.update(f"{name}{list(tensor.shape)}".encode())
            digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def _check_codes(where: str, config: SoundStreamConfig, tensors: dict[str, Tensor]) -> None:
    if config.codes_of is not None and codes_hash(config, tensors) != config.codes_of["codes_hash"]:
        raise CheckpointError(
            f"{where}: encoder and codebooks aren't those of {config.codes_of['name']} "
            f"({config.codes_of['weights_hash'][:12]}…), though codes_of says so; a codec whose encoder, codebooks or "
            "their stored dtype have changed has codes of its own: set codes_of to None"
        )


def load_checkpoint(
    folder: Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> SoundStream:
    """Loads what `SoundStream.save` wrote; see `codec.load_codec`.

    Raises:
        CheckpointError: Damaged, of another architecture or a newer version.
    """
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
    if not isinstance(settings, dict):
        raise CheckpointError(f"{config_path}: 'model' is {settings!r}, not settings; copy the file again")
    try:
        config = SoundStreamConfig.from_dict(settings)
        with torch.device("meta"):  # shapes only: a damaged size must not cost memory
            expected = {k: v for k, v in SoundStream(config).state_dict().items() if k not in TRAINING_STATE}
    except (CodecError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{config_path}: {error}; this release can't build that model: upgrade codec or export the checkpoint again"
        ) from error
    try:
        tensors = load_safetensors(weights_path.read_bytes())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{weights_path}: can't be read as safetensors ({error}); copy it again") from error
    wrong = sorted(set(tensors) ^ set(expected)) or sorted(k for k in tensors if tensors[k].shape != expected[k].shape)
    if wrong:
        raise CheckpointError(
            f"{weights_path}: {len(wrong)} tensors don't fit {config_path.name}, first {wrong[0]!r}; "
            "the two files are of different checkpoints"
        )
    found_hash = content_hash(config, tensors)
    if found_hash != stated_hash:
        raise CheckpointError(
            f"{folder}: the weights hash to {found_hash[:12]}…, config.json says {str(stated_hash)[:12]}…; "
            "one of the files is damaged or was edited: copy both again"
        )
    _check_codes(str(folder), config, tensors)
    codec = SoundStream(config)
    codec.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    codec.requires_grad_(False).eval()
    _ = codec.spec  # hashed from the stored weights, before any change of dtype
    if dtype is not None:
        for part in (codec.encoder, codec.decoder):
            part.to(dtype)
    return codec.to(device)


def _replace(path: Path, data: bytes) -> None:
    """Writes the file whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
