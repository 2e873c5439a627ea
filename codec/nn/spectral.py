"""The frame-rate spectral body: short-time spectra in, inverse-STFT (and mel) heads out.

Time is cut into *subframes* of `hop_length / subframes` samples; the STFTs run at subframe rate, `subframes`
subframes are stacked into one codec frame. Nothing in here depends on frames outside the declared contexts.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.blocks import BlockStack

Context = tuple[int, int]


def frame_mask(lengths: Tensor, num_frames: int) -> Tensor:
    """1 on valid frames: lengths int64 `[B]` → bool `[B, T, 1]`."""
    steps = torch.arange(num_frames, device=lengths.device)
    return (steps < lengths[:, None])[..., None]


def _frames_of(context_subframes: Context, subframes: int) -> Context:
    """A context in subframes as whole codec frames, rounded up."""
    left, right = context_subframes
    return -(-left // subframes), -(-right // subframes)


def _sum(*contexts: Context) -> Context:
    return sum(left for left, _ in contexts), sum(right for _, right in contexts)


class SpectralEncoder(nn.Module):
    """Wave → latents: STFT, blocks at subframe rate, stacking, blocks at frame rate.

    Per bin the input is the compressed complex spectrum `X |X|^-0.7` (two numbers) and `log |X|` (one).

    Args:
        channels: Channels of the wave, C.
        hop_length: Samples per codec frame.
        subframes: STFT frames per codec frame.
        n_fft: STFT size in samples; the window is centred on the subframe with `lookahead`, else ends with it.
        dims: Widths at subframe rate and at frame rate.
        num_blocks: Blocks at subframe rate and at frame rate.
        latent_dim: D of the latents.

    Shape: wave `[B, C, T * hop_length]`, mask `[B, T, 1]` or None → latents `[B, T, D]`, float32.
    """

    def __init__(
        self,
        *,
        channels: int,
        hop_length: int,
        subframes: int,
        n_fft: int,
        dims: tuple[int, int],
        num_blocks: tuple[int, int],
        kernel_size: int,
        expansion: int,
        lookahead: bool,
        latent_dim: int,
    ) -> None:
        super().__init__()
        self.subframes = subframes
        self.n_fft = n_fft
        self.stft_hop = hop_length // subframes
        overhang = n_fft - self.stft_hop
        self.pad_right = overhang // 2 if lookahead else 0
        self.pad_left = overhang - self.pad_right
        window = torch.hann_window(n_fft)
        # Unit gain for white noise, so that the features' range doesn't depend on n_fft.
        self.register_buffer("window", window / window.square().sum().sqrt(), persistent=False)
        settings: dict[str, Any] = {"kernel_size": kernel_size, "expansion": expansion, "lookahead": lookahead}
        self.embed = nn.Linear(channels * 3 * (n_fft // 2 + 1), dims[0])
        self.fine = BlockStack(dims[0], num_blocks[0], **settings)
        self.stack = nn.Linear(dims[0] * subframes, dims[1])
        self.coarse = BlockStack(dims[1], num_blocks[1], **settings)
        self.norm = nn.LayerNorm(dims[1])
        self.project = nn.Linear(dims[1], latent_dim)
        stft = (-(-self.pad_left // self.stft_hop), -(-self.pad_right // self.stft_hop))
        self.context = _sum(_frames_of(_sum(stft, self.fine.context), subframes), self.coarse.context)

    def features(self, wave: Tensor) -> Tensor:
        """Spectral features `[B, T * subframes, 3 * C * bins]`, float32, of a wave `[B, C, N]`."""
        window: Tensor = self.window  # type: ignore[assignment]
        padded = F.pad(wave.float(), (self.pad_left, self.pad_right))
        pieces = padded.unfold(-1, self.n_fft, self.stft_hop) * window.float()
        spectrum = torch.view_as_real(torch.fft.rfft(pieces))
        magnitude = spectrum.square().sum(-1).sqrt()
        compressed = spectrum * (magnitude + 1e-6).pow(-0.7)[..., None]
        log_magnitude = (magnitude + 1e-4).log() * 0.25 + 1.0
        stacked = torch.cat([compressed, log_magnitude[..., None]], -1)
        return rearrange(stacked, "b c t bins parts -> b t (c parts bins)")

    def forward(self, wave: Tensor, mask: Tensor | None = None) -> Tensor:
        """See the class."""
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        x = self.embed(self.features(wave).to(self.embed.weight.dtype))
        x = self.fine(x, fine_mask)
        x = self.stack(rearrange(x, "b (t s) d -> b t (s d)", s=self.subframes))
        x = self.norm(self.coarse(x, mask))
        with torch.autocast(x.device.type, enabled=False):
            latents: Tensor = self.project(x.to(self.project.weight.dtype))
            return latents.float()


class SpectralDecoder(nn.Module):
    """Quantized latents → trunk at subframe rate → wave (inverse STFT head) or log-mel (mel head).

    Args:
        dims: Widths at frame rate and at subframe rate.
        num_blocks: Blocks at frame rate and at subframe rate.
        n_fft: Inverse STFT size: an odd multiple of the subframe with `lookahead`, else any multiple.
        n_mels: Bins of the mel head.
        mel_hidden: Hidden width of the mel head.
        Others as in `SpectralEncoder`.
    """

    def __init__(
        self,
        *,
        channels: int,
        hop_length: int,
        subframes: int,
        n_fft: int,
        dims: tuple[int, int],
        num_blocks: tuple[int, int],
        kernel_size: int,
        expansion: int,
        lookahead: bool,
        latent_dim: int,
        n_mels: int,
        mel_hidden: int,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.subframes = subframes
        self.n_fft = n_fft
        self.stft_hop = hop_length // subframes
        self.num_parts = n_fft // self.stft_hop
        assert n_fft % self.stft_hop == 0 and (not lookahead or self.num_parts % 2 == 1)
        # Part p of window j lands in subframe j + p - parts_before.
        self.parts_before = self.num_parts // 2 if lookahead else self.num_parts - 1
        self.register_buffer("window", torch.hann_window(n_fft), persistent=False)
        settings: dict[str, Any] = {"kernel_size": kernel_size, "expansion": expansion, "lookahead": lookahead}
        self.embed = nn.Linear(latent_dim, dims[0])
        self.coarse = BlockStack(dims[0], num_blocks[0], **settings)
        self.unstack = nn.Linear(dims[0], dims[1] * subframes)
        self.fine = BlockStack(dims[1], num_blocks[1], **settings)
        self.norm = nn.LayerNorm(dims[1])
        self.spectrum = nn.Linear(dims[1], channels * 3 * (n_fft // 2 + 1))
        with torch.no_grad():  # start near silence: an exponential of noise is loud
            self.spectrum.bias[: channels * (n_fft // 2 + 1)] = -4.0
        self.mel = nn.Sequential(
            nn.Linear(dims[1], mel_hidden), nn.GELU(approximate="tanh"), nn.Linear(mel_hidden, n_mels)
        )
        overlap = (self.num_parts - 1 - self.parts_before, self.parts_before)
        trunk = self.coarse.context
        self.wave_context = _sum(_frames_of(_sum(self.fine.context, overlap), subframes), trunk)

    def trunk(self, quantized: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[B, T, D]` → features `[B, T * subframes, dims[1]]`, shared by both heads."""
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        x = self.coarse(self.embed(quantized.to(self.embed.weight.dtype)), mask)
        x = rearrange(self.unstack(x), "b t (s d) -> b (t s) d", s=self.subframes)
        features: Tensor = self.norm(self.fine(x, fine_mask))
        return features

    def mel_head(self, trunk: Tensor) -> Tensor:
        """Trunk `[B, T * subframes, D]` → log-mel `[B, n_mels, T * subframes]`, float32."""
        mel: Tensor = self.mel(trunk)
        return mel.float().transpose(1, 2)

    def wave_head(self, trunk: Tensor, mask: Tensor | None = None) -> Tensor:
        """Trunk `[B, T * subframes, D]` → wave `[B, C, T * hop_length]`, float32.

        Magnitude is an exponential, phase a normalised pair; the overlap-add is divided by the windows' actual
        sum of squares, so that the first and last samples of an item are as loud as any other.
        """
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        with torch.autocast(trunk.device.type, enabled=False):
            x = self.spectrum(trunk.to(self.spectrum.weight.dtype)).float()
            x = rearrange(x, "b j (parts c bins) -> parts b c j bins", c=self.channels, parts=3)
            magnitude = x[0].clamp(max=6.0).exp()
            scale = magnitude * torch.rsqrt(x[1].square() + x[2].square() + 1e-8)
            spectrum = torch.complex(scale * x[1], scale * x[2])
            window: Tensor = self.window.float()  # type: ignore[union-attr, assignment, operator]
            pieces = torch.fft.irfft(spectrum, n=self.n_fft, norm="ortho") * window
            if fine_mask is not None:
                pieces = pieces * fine_mask[:, None]
            envelope = window.square().expand(1, 1, trunk.shape[1], -1)
            if fine_mask is not None:
                envelope = envelope * fine_mask[:, None]
            summed = self._overlap_add(pieces)
            # At a causal item's very end only the last window's tail remains: it fades instead of exploding.
            weight = self._overlap_add(envelope).clamp(min=0.1)
            return (summed / weight).flatten(-2)

    def _overlap_add(self, pieces: Tensor) -> Tensor:
        """Windowed pieces `[B, C, J, n_fft]` → `[B, C, J, stft_hop]`, what overhangs the ends dropped."""
        num_subframes = pieces.shape[2]
        parts = rearrange(pieces, "b c j (p h) -> p b c j h", p=self.num_parts)
        after = self.num_parts - 1 - self.parts_before
        parts = F.pad(parts, (0, 0, after, self.parts_before))
        total = parts[self.parts_before, :, :, after : after + num_subframes]
        for part in range(self.num_parts):
            if part != self.parts_before:
                first = after + self.parts_before - part
                total = total + parts[part, :, :, first : first + num_subframes]
        return total
