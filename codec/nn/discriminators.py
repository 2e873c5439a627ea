"""Discriminators: networks that learn to tell decoded waves from real ones. Training only.

Each takes waves `[B, C, N]` and gives, per scale, logits of any shape (positive: real) and the features of its
layers, which feature matching compares.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

Judgement = tuple[Tensor, list[Tensor]]
"""Logits, and the features of each layer."""

SLOPE = 0.2
"""Of the leaky ReLUs, below 0."""
GAIN = 10.0
"""Waves have a root mean square around 0.1; the first layer sees about 1."""


def _ready(layer: nn.Conv1d | nn.Conv2d) -> nn.Module:
    """A convolution that keeps variances through leaky ReLUs at the start, with weight norm."""
    nn.init.kaiming_normal_(layer.weight, a=SLOPE, nonlinearity="leaky_relu")
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    module: nn.Module = weight_norm(layer)
    return module


class _Spectrum(nn.Module):
    """Complex STFT as an image: `[B, C, N]` → `[B, 2 C, frames, n_fft / 2]`, float32, without the Nyquist bin."""

    window: Tensor

    def __init__(self, n_fft: int) -> None:
        super().__init__()
        self.n_fft = n_fft
        window = torch.hann_window(n_fft)
        self.register_buffer("window", window * (GAIN / window.square().sum().sqrt()), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        """See the class."""
        with torch.autocast(wave.device.type, enabled=False):
            spectrum = torch.stft(
                wave.float().flatten(0, 1),
                self.n_fft,
                self.n_fft // 4,
                window=self.window,
                pad_mode="constant",
                return_complex=True,
            )
            parts = torch.view_as_real(spectrum[:, :-1]).permute(0, 3, 2, 1)
            # As it comes, convolutions would take it for channels-last: far slower on a CPU, and oneDNN has crashed.
            return parts.reshape(len(wave), -1, *parts.shape[2:]).contiguous()


class _ResidualUnit(nn.Module):
    """A 3 × 3 convolution, then one that strides; a 1 × 1 convolution beside them."""

    def __init__(self, in_channels: int, out_channels: int, stride: tuple[int, int]) -> None:
        super().__init__()
        kernel = (stride[0] + 2, stride[1] + 2)
        self.first = _ready(nn.Conv2d(in_channels, in_channels, 3, padding=1))
        self.second = _ready(nn.Conv2d(in_channels, out_channels, kernel, stride, padding=1))
        self.skip = _ready(nn.Conv2d(in_channels, out_channels, 1, stride))
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """`[B, in, T, F]` → `[B, out, ceil(T / stride), F / stride]`."""
        # A kernel of stride + 2 with one cell of padding gives one frame too few where the stride doesn't divide T.
        odd = (-x.shape[2] % self.stride[0], -x.shape[3] % self.stride[1])
        h = F.leaky_relu(self.first(x), SLOPE)
        h = self.second(F.pad(h, (0, odd[1], 0, odd[0])))
        skip: Tensor = self.skip(x)
        return F.leaky_relu(h + skip, SLOPE)


class STFTDiscriminator(nn.Module):
    """The SoundStream paper's (Zeghidour et al. 2021, section III-E): residual 2-D convolutions on a complex STFT.

    A 7 × 7 convolution, six residual units that halve the frequencies each and the frames every other time, and one
    convolution over the frequencies that are left. Its STFT has 1024 samples per frame, hop 256.

    Args:
        channels: Of the wave, C.
        width: Channels of the first convolution; the paper's are 32.
    """

    N_FFT = 1024

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.spectrum = _Spectrum(self.N_FFT)
        self.first = _ready(nn.Conv2d(2 * channels, width, 7, padding=3))
        units = []
        for factor, stride in ((2, (1, 2)), (2, (2, 2)), (1, (1, 2)), (2, (2, 2)), (1, (1, 2)), (2, (2, 2))):
            units.append(_ResidualUnit(width, width * factor, stride))
            width = width * factor
        self.units = nn.ModuleList(units)
        self.last = _ready(nn.Conv2d(width, 1, (1, self.N_FFT // 2 // 2**6)))

    def forward(self, wave: Tensor) -> list[Judgement]:
        """See the module."""
        x = F.leaky_relu(self.first(self.spectrum(wave)), SLOPE)
        features = [x]
        for unit in self.units:
            x = unit(x)
            features.append(x)
        return [(self.last(x), features)]


class MultiSTFTDiscriminator(nn.Module):
    """EnCodec's (Défossez et al. 2022, arXiv:2210.13438, section 3.4): smaller 2-D convolutions on several STFTs.

    Args:
        channels: Of the wave, C.
        width: Channels of the convolutions; the paper's are 32.
    """

    N_FFTS = (2048, 1024, 512, 256, 128)

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.spectra = nn.ModuleList(_Spectrum(n_fft) for n_fft in self.N_FFTS)
        self.stacks = nn.ModuleList(self._stack(channels, width) for _ in self.N_FFTS)

    @staticmethod
    def _stack(channels: int, width: int) -> nn.ModuleList:
        layers: list[nn.Conv2d] = [nn.Conv2d(2 * channels, width, (3, 9), padding=(1, 4))]
        for dilation in (1, 2, 4):
            padding = (dilation, 4)
            layers.append(nn.Conv2d(width, width, (3, 9), (1, 2), padding=padding, dilation=(dilation, 1)))
        layers.append(nn.Conv2d(width, width, 3, padding=1))
        layers.append(nn.Conv2d(width, 1, 3, padding=1))
        return nn.ModuleList(_ready(layer) for layer in layers)

    def forward(self, wave: Tensor) -> list[Judgement]:
        """See the module."""
        judgements = []
        for spectrum, stack in zip(self.spectra, self.stacks, strict=True):
            assert isinstance(stack, nn.ModuleList)
            x, features = spectrum(wave), []
            for layer in stack[:-1]:
                x = F.leaky_relu(layer(x), SLOPE)
                features.append(x)
            judgements.append((stack[-1](x), features))
        return judgements


class WaveDiscriminator(nn.Module):
    """The SoundStream paper's multi-scale wave discriminator, after MelGAN (Kumar et al. 2019, arXiv:1910.06711).

    Three equal stacks of grouped strided 1-D convolutions, on the wave and on the wave at a half and at a quarter of
    its rate.

    Args:
        channels: Of the wave, C.
        width: Twice the channels of the first convolution, which are 16 in MelGAN.
    """

    NUM_SCALES = 3

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(self._stack(channels, width // 2) for _ in range(self.NUM_SCALES))

    @staticmethod
    def _stack(channels: int, width: int) -> nn.ModuleList:
        layers: list[nn.Conv1d] = [nn.Conv1d(channels, width, 15, padding=7)]
        widest = width * 64
        for _ in range(4):
            wider = min(width * 4, widest)
            # Groups of four channels, as MelGAN's; two of a width that four doesn't divide.
            groups = max(1, width // 4)
            layers.append(nn.Conv1d(width, wider, 41, 4, padding=20, groups=groups))
            width = wider
        layers.append(nn.Conv1d(width, width, 5, padding=2))
        layers.append(nn.Conv1d(width, 1, 3, padding=1))
        return nn.ModuleList(_ready(layer) for layer in layers)

    def forward(self, wave: Tensor) -> list[Judgement]:
        """See the module."""
        judgements = []
        for scale, stack in enumerate(self.stacks):
            assert isinstance(stack, nn.ModuleList)
            if scale:
                wave = F.avg_pool1d(wave, 4, 2, padding=1, count_include_pad=False)
            x, features = wave * GAIN, []
            for layer in stack[:-1]:
                x = F.leaky_relu(layer(x), SLOPE)
                features.append(x)
            judgements.append((stack[-1](x), features))
        return judgements


DISCRIMINATORS: dict[str, type[STFTDiscriminator | WaveDiscriminator | MultiSTFTDiscriminator]] = {
    "stft": STFTDiscriminator,
    "wave": WaveDiscriminator,
    "multi_stft": MultiSTFTDiscriminator,
}


class Discriminators(nn.Module):
    """Several discriminators, judging together.

    Args:
        kinds: Of `DISCRIMINATORS`.
        channels: Of the wave, C.
        width: See each.
    """

    def __init__(self, kinds: Sequence[str], *, channels: int, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(DISCRIMINATORS[kind](channels, width) for kind in kinds)

    def forward(self, wave: Tensor) -> list[Judgement]:
        """See the module."""
        return [judgement for part in self.parts for judgement in part(wave)]
