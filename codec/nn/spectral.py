"""The frame-rate spectral body: short-time spectra in, inverse-STFT (and mel) heads out.

Time is cut into *subframes* of `hop_length / subframes` samples; the STFTs run at subframe rate, `subframes`
subframes are stacked into one codec frame. Nothing in here depends on frames outside the declared contexts.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.blocks import BlockStack
from codec.nn.film import Film
from codec.nn.linear import Linear

Context = tuple[int, int]
LOG2_E = 1 / math.log(2)
SPECTRA_AT_ONCE = 1024
"""Spectra that the wave head turns into samples together."""


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
        denoise: Modulated, before the blocks at frame rate, by whether to remove noise.

    Shape: wave `[B, C, T * hop_length]`, mask `[B, T, 1]` or None, denoise bool `[B]` or None → latents `[B, T, D]`,
    float32.
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
        denoise: bool = False,
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
        self.embed = Linear(channels * 3 * (n_fft // 2 + 1), dims[0])
        self.fine = BlockStack(dims[0], num_blocks[0], **settings)
        self.stack = Linear(dims[0] * subframes, dims[1])
        self.film = Film(dims[1]) if denoise else None
        self.coarse = BlockStack(dims[1], num_blocks[1], **settings)
        self.norm = nn.LayerNorm(dims[1])
        self.project = Linear(dims[1], latent_dim)
        stft = (-(-self.pad_left // self.stft_hop), -(-self.pad_right // self.stft_hop))
        self.context = _sum(_frames_of(_sum(stft, self.fine.context), subframes), self.coarse.context)

    def features(self, wave: Tensor) -> Tensor:
        """Spectral features `[B, T * subframes, 3 * C * bins]`, float32, of a wave `[B, C, N]`."""
        return self._features(F.pad(wave.float(), (self.pad_left, self.pad_right)))

    def _features(self, padded: Tensor) -> Tensor:
        window: Tensor = self.window  # type: ignore[assignment]
        spectrum = torch.fft.rfft(padded.unfold(-1, self.n_fft, self.stft_hop) * window.float())
        real, imaginary = spectrum.real, spectrum.imag
        magnitude = torch.addcmul(real * real, imaginary, imaginary).sqrt()
        # Powers by way of base-2 logarithms and exponentials, which cost a fraction of the general function.
        factor = ((magnitude + 1e-6).log2() * -0.7).exp2()
        log_magnitude = (magnitude + 1e-4).log2() * (0.25 * math.log(2)) + 1.0
        stacked = torch.stack([real * factor, imaginary * factor, log_magnitude], -2)
        return rearrange(stacked, "b c t parts bins -> b t (c parts bins)")

    def forward(self, wave: Tensor, mask: Tensor | None = None, denoise: Tensor | None = None) -> Tensor:
        """See the class."""
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        x = self.fine(self.embedded(F.pad(wave.float(), (self.pad_left, self.pad_right))), fine_mask)
        return self.projected(self.coarse(self.stacked(x, denoise), mask))

    def embedded(self, padded: Tensor) -> Tensor:
        """A wave with its padding, `[B, C, n]` → `[B, T * subframes, dims[0]]`."""
        embedded: Tensor = self.embed(self._features(padded).to(self.embed.weight.dtype))
        return embedded

    def stacked(self, x: Tensor, denoise: Tensor | None) -> Tensor:
        """From subframe rate to frame rate, `[B, T * subframes, dims[0]]` → `[B, T, dims[1]]`, told the condition."""
        return self.modulate(self.stack(rearrange(x, "b (t s) d -> b t (s d)", s=self.subframes)), denoise)

    def projected(self, x: Tensor) -> Tensor:
        """`[B, T, dims[1]]` → latents `[B, T, D]`, float32."""
        x = self.norm(x)
        with torch.autocast(x.device.type, enabled=False):
            latents: Tensor = self.project(x.to(self.project.weight.dtype))
            return latents.float()

    def nothing(self, like: Tensor, level: int) -> Tensor:
        """No steps, in the width of subframe rate (0) or frame rate (1)."""
        linear = (self.embed, self.stack)[level]
        return linear.weight.new_zeros(len(like), 0, linear.out_features)

    def modulate(self, x: Tensor, denoise: Tensor | None) -> Tensor:
        """Features `[B, T, D]` as the condition (None: don't denoise) has them."""
        if self.film is None:
            return x
        condition = denoise if denoise is not None else torch.zeros(len(x), dtype=torch.bool, device=x.device)
        modulated: Tensor = self.film(x, condition)
        return modulated


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
        self.embed = Linear(latent_dim, dims[0])
        self.coarse = BlockStack(dims[0], num_blocks[0], **settings)
        self.unstack = Linear(dims[0], dims[1] * subframes)
        self.fine = BlockStack(dims[1], num_blocks[1], **settings)
        self.norm = nn.LayerNorm(dims[1])
        self.spectrum = Linear(dims[1], channels * 3 * (n_fft // 2 + 1))
        with torch.no_grad():  # start near silence: an exponential of noise is loud
            self.spectrum.bias[: channels * (n_fft // 2 + 1)] = -4.0
        self.mel = nn.Sequential(Linear(dims[1], mel_hidden), nn.GELU(approximate="tanh"), Linear(mel_hidden, n_mels))
        overlap = (self.num_parts - 1 - self.parts_before, self.parts_before)
        trunk = self.coarse.context
        self.wave_context = _sum(_frames_of(_sum(self.fine.context, overlap), subframes), trunk)

    def trunk(self, quantized: Tensor, mask: Tensor | None = None) -> Tensor:
        """`[B, T, D]` → features `[B, T * subframes, dims[1]]`, shared by both heads."""
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        x = self.unstacked(self.coarse(self.embedded(quantized), mask))
        features: Tensor = self.norm(self.fine(x, fine_mask))
        return features

    def embedded(self, quantized: Tensor) -> Tensor:
        """`[B, T, D]` → `[B, T, dims[0]]`."""
        embedded: Tensor = self.embed(quantized.to(self.embed.weight.dtype))
        return embedded

    def unstacked(self, x: Tensor) -> Tensor:
        """From frame rate to subframe rate, `[B, T, dims[0]]` → `[B, T * subframes, dims[1]]`."""
        x = self.unstack(x)
        return rearrange(x, "b t (s d) -> b (t s) d", s=self.subframes)

    def mel_head(self, trunk: Tensor, mask: Tensor | None = None) -> Tensor:
        """Trunk `[B, T * subframes, D]` → log-mel `[B, n_mels, T * subframes]`, float32."""
        mel: Tensor = self.mel(trunk)
        return mel.float().transpose(1, 2)

    def wave_head(self, trunk: Tensor, mask: Tensor | None = None) -> Tensor:
        """Trunk `[B, T * subframes, D]` → wave `[B, C, T * hop_length]`, float32.

        Magnitude is an exponential, phase a normalised pair; the overlap-add is divided by the windows' actual
        sum of squares, so that the first and last samples of an item are as loud as any other.
        """
        fine_mask = None if mask is None else mask.repeat_interleave(self.subframes, 1)
        summed, envelope = self.overlapped(trunk, fine_mask)
        first, size = self.parts_before * self.stft_hop, trunk.shape[1] * self.stft_hop
        return summed[..., first : first + size] / self.weight(envelope[..., first : first + size])

    def overlapped(self, trunk: Tensor, fine_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Windowed pieces, one per subframe, and the squares of their windows, added where they overlap.

        Both `[B or 1, C or 1, (T * subframes - 1) * stft_hop + n_fft]`, float32.
        """
        num_rows, num_subframes = trunk.shape[:2]
        size = num_subframes + self.num_parts - 1
        # Without gradient a stretch at a time: its spectra stay in the core's cache.
        step = num_subframes if torch.is_grad_enabled() else max(1, SPECTRA_AT_ONCE // num_rows)
        with torch.autocast(trunk.device.type, enabled=False):
            window: Tensor = self.window.float().view(self.num_parts, -1)  # type: ignore[operator, assignment]
            summed = window.new_zeros(num_rows, size, self.channels, self.stft_hop)
            for first in range(0, num_subframes, step):
                pieces = self._pieces(trunk[:, first : first + step])
                if fine_mask is not None:
                    pieces = pieces * fine_mask[:, first : first + step, :, None]
                self._add(summed[:, first:], pieces, window)
            valid = window.new_ones(1, num_subframes, 1, 1) if fine_mask is None else fine_mask[..., None].float()
            envelope = window.new_zeros(len(valid), size, 1, self.stft_hop)
            self._add(envelope, valid.expand(-1, -1, -1, self.n_fft), window.square())
        return rearrange(summed, "b j c h -> b c (j h)"), rearrange(envelope, "b j c h -> b c (j h)")

    def _pieces(self, trunk: Tensor) -> Tensor:
        """The inverse transform of each subframe, `[B, J, D]` → `[B, J, C, n_fft]`, float32."""
        x = self.spectrum(trunk.to(self.spectrum.weight.dtype)).float()
        log_magnitude, real, imaginary = x.view(*x.shape[:2], 3, self.channels, -1).unbind(2)
        magnitude = (log_magnitude.clamp(max=6.0) * LOG2_E).exp2()
        scale = magnitude * torch.rsqrt(torch.addcmul(real * real, imaginary, imaginary) + 1e-8)
        spectrum = torch.complex(real * scale, imaginary * scale)
        pieces: Tensor = torch.fft.irfft(spectrum, n=self.n_fft, norm="ortho")
        return pieces

    def _add(self, total: Tensor, pieces: Tensor, window: Tensor) -> None:
        """Adds windowed pieces `[B, J, C, n_fft]`, `stft_hop` apart, to `[B, ≥ J + parts - 1, C, stft_hop]`."""
        parts = pieces.unflatten(-1, (self.num_parts, self.stft_hop))  # type: ignore[no-untyped-call]
        for part in range(self.num_parts):
            total[:, part : part + pieces.shape[1]].addcmul_(parts[..., part, :], window[part])

    def weight(self, envelope: Tensor) -> Tensor:
        """What overlapped pieces are divided by.

        At a causal item's very end only the last window's tail remains: it fades instead of exploding.
        """
        return envelope.clamp(min=0.1)
