"""A copy in line with its original: constant delay, length, channels, level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from codec.errors import InputError

MAX_DELAY_SECONDS = 0.2
"""Delays are looked for up to this, to both sides."""

SILENCE_PEAK = 1e-4
"""Waves that stay below this (−80 dB of full scale) are silence: nothing can be said of their copies."""

# Correlations above which a peak is one.
_CLEAR_PEAKS = {"waveform": 0.4, "envelope": 0.2}
_ENVELOPE_SECONDS = 0.001


@dataclass(frozen=True)
class Delay:
    """By how much a codec's copies come late.

    Attributes:
        samples: Samples by which the copy is late; negative if it is early.
        method: "waveform" (cross-correlation), "envelope" (of codecs that keep no phase: exact to a millisecond),
            or "none": there is no clear peak, and nothing is shifted.
        num_clips: Clips that were looked at.
    """

    samples: int
    method: str
    num_clips: int


def find_delay(pairs: Sequence[tuple[Tensor, Tensor]], sample_rate: int) -> Delay:
    """The constant delay of copies against their originals: where their correlations, averaged over clips, peak.

    A single clip's pitch has peaks of its own a period away; the average over clips has not.

    Args:
        pairs: (original `[C, N]`, copy `[C, M]`) at the same rate; pairs with a silent wave are left out.
        sample_rate: Hz.
    """
    waves = [(original.mean(0).double(), copy.mean(0).double()) for original, copy in pairs]
    waves = [pair for pair in waves if min(float(wave.abs().max()) for wave in pair) >= SILENCE_PEAK]
    for method, least in _CLEAR_PEAKS.items():
        step = max(1, round(_ENVELOPE_SECONDS * sample_rate)) if method == "envelope" else 1
        limit = math.ceil(MAX_DELAY_SECONDS * sample_rate / step)
        curves = [_correlation(original, copy, step, limit) for original, copy in waves]
        if not curves:
            break
        mean = torch.stack(curves).mean(0)
        if method == "waveform":
            mean = mean.abs()  # an inverted copy is as late as an upright one
        best = int(mean.argmax())
        if float(mean[best]) > least:
            return Delay((best - limit) * step, method, len(curves))
    return Delay(0, "none", 0)


def _correlation(original: Tensor, copy: Tensor, step: int, limit: int) -> Tensor:
    """Normalised correlation of two waves `[N]`, or of their levels by steps, at shifts −limit … limit."""
    if step > 1:
        original, copy = _envelope(original, step), _envelope(copy, step)
    size = 1 << (original.shape[0] + copy.shape[0] + limit - 1).bit_length()
    product = torch.fft.rfft(copy, size) * torch.fft.rfft(original, size).conj()
    correlation = torch.fft.irfft(product, size)
    near = torch.cat([correlation[-limit:], correlation[: limit + 1]])
    norm: Tensor = (original.norm() * copy.norm()).clamp(min=1e-12)
    return near / norm


def _envelope(wave: Tensor, step: int) -> Tensor:
    """Level of each step in the range of speech, its mean removed."""
    whole = wave[: wave.shape[0] // step * step].view(-1, step)
    if whole.shape[0] == 0:
        return wave.new_zeros(1)
    level = whole.square().mean(1)
    level = (level + level.max() * 1e-4 + 1e-12).log()
    return level - level.mean()


def align(original: Tensor, copy: Tensor, delay_samples: int) -> Tensor:
    """The copy `[C, N]` of an original `[C, N]`, its delay taken off, cut or filled with zeros to N.

    Raises:
        InputError: What is left is shorter than nine tenths of the original, so that it can't be its copy.
    """
    copy = copy[:, delay_samples:] if delay_samples > 0 else F.pad(copy, (-delay_samples, 0))
    missing = original.shape[1] - copy.shape[1]
    if missing > max(0.1 * original.shape[1], 1):
        raise InputError(
            f"the copy has {copy.shape[1]} samples after its delay of {delay_samples}, the original "
            f"{original.shape[1]}: it isn't of this original, or was cut"
        )
    return F.pad(copy, (0, missing)) if missing > 0 else copy[:, : original.shape[1]]


def match_channels(original: Tensor, copy: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same channels: as they are, or both mixed to one."""
    if original.shape[0] == copy.shape[0]:
        return original, copy
    return original.mean(0, keepdim=True), copy.mean(0, keepdim=True)


def match_level(original: Tensor, copy: Tensor) -> tuple[Tensor, float | None]:
    """The copy at the original's RMS level, and the gain in dB that this took; None and unchanged for silence."""
    ours, theirs = (float(wave.double().square().mean().sqrt()) for wave in (original, copy))
    if min(ours, theirs) <= 1e-7:
        return copy, None
    return copy * (ours / theirs), 20 * math.log10(ours / theirs)
