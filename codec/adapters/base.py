"""`Adapter`: what all pretrained codecs of others share: checks, grouping of rows, exact lengths, identity."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from codec.errors import InputError
from codec.model.interface import Codec, Codes, check_codes, check_wave, cut_rows
from codec.nn.spectral import frame_mask
from codec.spec import CodecSpec

GROUP_SECONDS = 120
"""Most padded audio that goes through a network at once; the group's rows don't change what comes out."""

CPU_GROUP_SAMPLES = 100_000
"""The same on a CPU: what goes beyond its caches (and malloc's 32 MB) costs several times as much."""

PADDING = 0.15
"""Part of a group that may be padding: rows of one group differ at most so much in length."""


class Adapter(nn.Module, Codec):
    """A pretrained codec behind the `Codec` interface.

    A child gives `_encode_rows` and `_decode_rows`, for rows whose padding it handles exactly. Rows are sorted by
    length and run in groups with little padding, so that a ragged batch costs what its rows cost.

    Args:
        spec: Identity and geometry.
        decode_warmup_frames: For an unbounded decode context: frames decoded before an excerpt and dropped, so that
            what is left of the difference to the whole is small.
    """

    def __init__(self, spec: CodecSpec, *, decode_warmup_frames: int = 0) -> None:
        super().__init__()
        self._spec = spec
        self.decode_warmup_frames = decode_warmup_frames

    @abstractmethod
    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        """Wave `[B, C, N]`, zero beyond `lengths` (None: all full) → codes `[B, K, T]`, any beyond each row's end."""

    @abstractmethod
    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        """Codes `[B, K, T]` → wave `[B, C, T * hop_length]` or a little less, any beyond each row's end."""

    @property
    def spec(self) -> CodecSpec:
        """Identity and geometry."""
        return self._spec

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def mel_hop_length(self) -> int:
        """One frame: there is no mel head."""
        return self._spec.hop_length

    @property
    def mel_floor(self) -> float:
        """Of the mel that there is not."""
        return 0.0

    def set_dtype(self, dtype: torch.dtype) -> None:
        """Makes the networks' weights of this dtype; the quantizer and all outputs stay float32."""
        for name in ("encoder", "decoder"):
            part: nn.Module = getattr(self, name)
            part.to(dtype)

    def _check_quantizers(self, n_quantizers: int | None) -> int:
        limit = self._spec.n_quantizers
        if n_quantizers is not None and not 1 <= n_quantizers <= limit:
            raise InputError(f"n_quantizers is {n_quantizers}; {self._spec.name} has 1 to {limit}")
        return limit if n_quantizers is None else n_quantizers

    @torch.no_grad()
    def encode(self, wave: Tensor, lengths: Tensor | None = None, *, n_quantizers: int | None = None) -> Codes:
        """See `Codec.encode`."""
        k = self._check_quantizers(n_quantizers)
        wave, lengths, _ = check_wave(self._spec, self.device, wave, lengths)
        hop = self._spec.hop_length
        frames = -(-lengths // hop)
        codes = torch.zeros(wave.shape[0], k, int(frames.max()), dtype=torch.int64, device=self.device)
        for rows in self._groups(lengths.tolist(), hop):
            own = lengths[rows]
            longest = int(own.max())
            part = wave[rows, :, :longest].float()
            full = bool((own == longest).all())
            coded = self._encode_rows(part, None if full else own, k)
            codes[rows, :, : coded.shape[-1]] = coded
        codes = codes * frame_mask(frames, codes.shape[-1]).transpose(1, 2)
        return Codes(codes, frames, lengths)

    @torch.no_grad()
    def decode(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """See `Codec.decode`."""
        tensor, frames, _ = check_codes(self._spec, self.device, codes, lengths)
        hop = self._spec.hop_length
        num_samples = (codes.num_samples if isinstance(codes, Codes) else frames * hop).to(self.device)
        wave = torch.zeros(tensor.shape[0], self._spec.channels, int(frames.max()) * hop, device=self.device)
        for rows in self._groups((frames * hop).tolist(), hop):
            own = frames[rows]
            longest = int(own.max())
            full = bool((own == longest).all())
            decoded = self._decode_rows(tensor[rows, :, :longest], None if full else own)
            decoded = decoded[..., : longest * hop].float()
            wave[rows, :, : decoded.shape[-1]] = decoded
        return cut_rows(wave, num_samples, 0.0)

    def decode_mel(self, codes: Codes | Tensor, lengths: Tensor | None = None) -> Tensor:
        """This codec has no mel head.

        Raises:
            InputError: Always.
        """
        raise InputError(
            f"{self._spec.name} has no mel head; decode to a wave and apply MelSpectrogram, or give BatchDecoder "
            "a MelSpectrogram as its features"
        )

    def _groups(self, num_samples: list[int], hop_length: int) -> list[Tensor]:
        """Row numbers in groups of like lengths, bounded in size."""
        is_cpu = self.device.type == "cpu"
        limit = CPU_GROUP_SAMPLES if is_cpu else GROUP_SECONDS * self._spec.sample_rate
        order = sorted(range(len(num_samples)), key=num_samples.__getitem__)
        groups: list[list[int]] = []
        for row in order:
            n = num_samples[row]
            group = groups[-1] if groups else None
            slack = max(PADDING * n, 4 * hop_length)
            if group is None or n - num_samples[group[0]] > slack or n * (len(group) + 1) > limit:
                groups.append([row])
            else:
                group.append(row)
        return [torch.tensor(group, device=self.device) for group in groups]


def weights_hash(facts: Mapping[str, Any], tensors: Iterable[Tensor]) -> str:
    """A codec's identity: SHA-256 (hex) over its configuration and the values of its weights.

    The tensors count as a set, whatever their names and order: layouts rename them, and the codec stays the same.
    """
    parts = []
    for tensor in tensors:
        values = tensor.detach().cpu().float().contiguous()
        digest = hashlib.sha256(str([n for n in values.shape if n != 1]).encode())
        digest.update(values.numpy().tobytes())
        parts.append(digest.digest())
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for part in sorted(parts):
        digest.update(part)
    return digest.hexdigest()


def fold_weight_norm(module: nn.Module) -> None:
    """Replaces normalised weights by their values: the same numbers, computed once."""
    for part in module.modules():
        if nn.utils.parametrize.is_parametrized(part):
            nn.utils.parametrize.remove_parametrizations(part, "weight")
        elif hasattr(part, "weight_g"):
            nn.utils.remove_weight_norm(part)
