"""Pitch of voices, by the normalised difference function: enough to say by how much a copy is off."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_LOW_HZ, _HIGH_HZ = 60.0, 500.0
_HOP_SECONDS = 0.01
_THRESHOLD = 0.15
_FEWEST_FRAMES = 10


def pitch(wave: Tensor, sample_rate: int) -> Tensor:
    """Fundamental frequency in Hz of each 10 ms of a wave `[N]`, 0 where it isn't voiced: `[F]`.

    Frame j is voiced if the difference function, divided by its running mean, dips below 0.15 at some period between
    1/500 and 1/60 s; the first such dip is the period, refined by a parabola. Frames 50 dB below the loudest one are
    not voiced.
    """
    longest, shortest = int(sample_rate / _LOW_HZ), int(sample_rate / _HIGH_HZ)
    size, hop = 2 * longest, round(_HOP_SECONDS * sample_rate)
    wave = wave.double()
    padded = F.pad(wave, (size // 2, size // 2 + longest))
    num_frames = -(-wave.shape[0] // hop)
    frames = padded.unfold(0, size + longest, hop) if padded.shape[0] >= size + longest else padded[None, :0]
    frames = frames[:num_frames]
    if frames.shape[0] == 0 or frames.shape[1] == 0:
        return torch.zeros(0, dtype=torch.float64)
    n_fft = 1 << (2 * size + longest - 1).bit_length()
    first = frames[:, :size]
    product = torch.fft.rfft(frames, n_fft) * torch.fft.rfft(first, n_fft).conj()
    correlation = torch.fft.irfft(product, n_fft)[:, : longest + 1]
    energy = F.pad(frames.square().cumsum(1), (1, 0))
    shifted = energy[:, size : size + longest + 1] - energy[:, : longest + 1]
    difference = (shifted[:, :1] + shifted - 2 * correlation).clamp(min=0)
    lags = torch.arange(longest + 1, dtype=torch.float64)
    mean = difference[:, 1:].cumsum(1) / lags[1:]
    normal = F.pad(difference[:, 1:] / mean.clamp(min=1e-12), (1, 0), value=1.0)
    inner = normal[:, shortest:longest]
    dips = (inner < _THRESHOLD) & (inner <= normal[:, shortest + 1 : longest + 1])
    loud = shifted[:, 0] > shifted[:, 0].max() * 1e-5
    voiced = dips.any(1) & loud & (shifted[:, 0] > 0)
    lag = dips.double().argmax(1) + shortest
    rows = torch.arange(lag.shape[0])
    before, here, after = normal[rows, lag - 1], normal[rows, lag], normal[rows, lag + 1]
    bend = (before - 2 * here + after).clamp(min=1e-9)
    period = lag + (0.5 * (before - after) / bend).clamp(-0.5, 0.5)
    return torch.where(voiced, sample_rate / period, 0.0)


def pitch_difference(original: Tensor, copy: Tensor, sample_rate: int) -> tuple[float | None, float | None]:
    """Median |Δ pitch| in cents over frames in which both `[N]` are voiced; share of frames in which just one is.

    The share is of the frames in which either is voiced. None where fewer than ten frames are concerned.
    """
    ours, theirs = pitch(original, sample_rate), pitch(copy, sample_rate)
    both, either = (ours > 0) & (theirs > 0), (ours > 0) | (theirs > 0)
    voicing = float(1 - both.sum() / either.sum()) if int(either.sum()) >= _FEWEST_FRAMES else None
    if int(both.sum()) < _FEWEST_FRAMES:
        return None, voicing
    return float((1200 * (theirs[both] / ours[both]).log2()).abs().median()), voicing
