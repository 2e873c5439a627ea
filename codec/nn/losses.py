"""Reconstruction losses. All run in float32, whatever autocast is around them."""

from __future__ import annotations

import torch
import torchaudio.functional as AF
from torch import Tensor, nn
from torch.nn import functional as F

MEL_RESOLUTIONS = ((256, 40), (512, 64), (1024, 80), (2048, 128))
"""(n_fft, n_mels) of the log-mel terms, hop n_fft / 4."""

COMPLEX_N_FFT = 512
"""STFT size of the compressed complex term."""


def waveform_l1(decoded: Tensor, target: Tensor) -> Tensor:
    """Mean over the batch of `mean|y - x| / mean|x|`: the surest way to correct phase early in training.

    Each example counts alike, whatever its level, down to a mean of 0.005; below that it fades, for noise can't be
    predicted.

    Shape: `[B, C, N]` each → scalar.
    """
    error = (decoded - target).abs().mean((1, 2))
    return (error / target.abs().mean((1, 2)).clamp(min=5e-3)).mean()


class SpectralLosses(nn.Module):
    """Multi-resolution log-mel L1 and one compressed complex STFT L1.

    Args:
        sample_rate: Hz.

    Shape: decoded, target `[B, C, N]` → (log-mel term, complex term), scalars. The log-mel term is the mean over
    resolutions of the mean |Δ ln mel|; the complex term compares `X |X|^-0.7`.
    """

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        for n_fft, n_mels in MEL_RESOLUTIONS:
            basis = AF.melscale_fbanks(
                n_fft // 2 + 1, 0.0, sample_rate / 2, n_mels, sample_rate, norm="slaney", mel_scale="slaney"
            )
            # Short windows have fewer bins than low mel bands: drop the bands without a bin.
            basis = basis[:, basis.sum(0) > 0]
            self.register_buffer(f"basis_{n_fft}", basis, persistent=False)
            window = torch.hann_window(n_fft)
            self.register_buffer(f"window_{n_fft}", window / window.square().sum().sqrt(), persistent=False)

    def _spectrum(self, wave: Tensor, n_fft: int) -> Tensor:
        window = self.get_buffer(f"window_{n_fft}")
        return torch.stft(wave, n_fft, n_fft // 4, window=window, center=True, pad_mode="constant", return_complex=True)

    def forward(self, decoded: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See the class."""
        with torch.autocast(decoded.device.type, enabled=False):
            both = torch.cat([decoded, target]).float().flatten(0, 1)
            mel_term = decoded.new_zeros(())
            complex_term = decoded.new_zeros(())
            for n_fft, _ in MEL_RESOLUTIONS:
                spectrum = torch.view_as_real(self._spectrum(both, n_fft))
                magnitude = (spectrum.square().sum(-1) + 1e-10).sqrt()
                mel = magnitude.transpose(1, 2) @ self.get_buffer(f"basis_{n_fft}")
                ours, theirs = (mel + 1e-5).log().chunk(2)
                mel_term = mel_term + (ours - theirs).abs().mean() / len(MEL_RESOLUTIONS)
                if n_fft == COMPLEX_N_FFT:
                    compressed = spectrum * (magnitude + 1e-4).pow(-0.7)[..., None]
                    ours, theirs = compressed.chunk(2)
                    complex_term = (ours - theirs).abs().mean()
            return mel_term, complex_term


def mel_head_l1(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean |Δ ln mel|: predicted and target `[B, M, F]`."""
    return F.l1_loss(predicted.float(), target.float())
