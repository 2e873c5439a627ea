"""Reconstruction and adversarial losses. All run in float32, whatever autocast is around them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed
import torchaudio.functional as AF
from torch import Tensor, nn
from torch.nn import functional as F

from codec.nn.discriminators import Judgement

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


def discriminator_hinge(real: Sequence[Judgement], decoded: Sequence[Judgement]) -> Tensor:
    """What the discriminators minimise: mean of `max(0, 1 - real) + max(0, 1 + decoded)` over positions and scales."""
    terms = [
        F.relu(1 - ours.float()).mean() + F.relu(1 + theirs.float()).mean()
        for (ours, _), (theirs, _) in zip(real, decoded, strict=True)
    ]
    return torch.stack(terms).mean()


def adversarial_hinge(decoded: Sequence[Judgement]) -> Tensor:
    """What the codec minimises: mean of `max(0, 1 - decoded)` over positions and scales."""
    return torch.stack([F.relu(1 - logits.float()).mean() for logits, _ in decoded]).mean()


def feature_matching(real: Sequence[Judgement], decoded: Sequence[Judgement]) -> Tensor:
    """Mean over layers and scales of `mean|Δ| / mean|real|`: layers count alike, whatever their range."""
    terms = []
    for (_, ours), (_, theirs) in zip(real, decoded, strict=True):
        for layer, other in zip(ours, theirs, strict=True):
            layer = layer.detach().float()
            terms.append((other.float() - layer).abs().mean() / layer.abs().mean().clamp(min=1e-5))
    return torch.stack(terms).mean()


class LossBalancer(nn.Module):
    """Weights of losses as shares of the gradient at the decoded wave, whatever their scales.

    The loss balancer of EnCodec (Défossez et al. 2022, arXiv:2210.13438, section 3.4): each loss's gradient is
    divided by the moving average of its norm and multiplied by its share of the weights.

    Args:
        names: Of the losses.
        decay: Of the moving averages, per step.
    """

    norms: Tensor
    steps: Tensor

    def __init__(self, names: Sequence[str], *, decay: float = 0.999) -> None:
        super().__init__()
        self.names = tuple(names)
        self.decay = decay
        self.register_buffer("norms", torch.zeros(len(self.names)))
        self.register_buffer("steps", torch.zeros(len(self.names)))

    def forward(self, terms: Mapping[str, Tensor], weights: Mapping[str, float], wave: Tensor) -> Tensor:
        """The gradient to send back from the wave.

        Args:
            terms: Unweighted losses by name, any of `names`, each a function of `wave`.
            weights: One per name of `terms`.
            wave: `[B, C, N]`, requires a gradient.

        Returns:
            `[B, C, N]`: its norm per example is about 1 / B where the losses agree.
        """
        gradients = {name: torch.autograd.grad(term, wave, retain_graph=True)[0] for name, term in terms.items()}
        found = torch.stack([gradient.flatten(1).norm(dim=1).sum() for gradient in gradients.values()])
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
            found = found / torch.distributed.get_world_size()
        places = [self.names.index(name) for name in terms]
        self.steps[places] += 1
        # The average of what has been seen so far, not of the zeros before.
        share = (1 - self.decay) / (1 - self.decay ** self.steps[places])
        self.norms[places] = torch.lerp(self.norms[places], found, share)
        total = sum(weights[name] for name in terms)
        scales = torch.tensor([weights[name] / total for name in terms], device=wave.device)
        scales = scales / self.norms[places].clamp(min=1e-12)
        return torch.stack([s * g for s, g in zip(scales, gradients.values(), strict=True)]).sum(0)
