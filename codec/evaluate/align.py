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

_CLEAR_PEAK = 0.3
_ENVELOPE_SECONDS = 0.001


@dataclass(frozen=True)
class Delay:
    """By how much a codec's copies come late.

    Attributes:
        samples: Samples by which the copy is late; negative if it is early.
        method: "waveform" (cross-correlation), "envelope" (of codecs that keep no phase: exact to a millisecond),
            or "none": no clip had a clear peak, and nothing is shifted.
        num_clips: Clips that had one.
    """

    samples: int
    method: str
    num_clips: int


def find_delay(pairs: Sequence[tuple[Tensor, Tensor]], sample_rate: int) -> Delay:
    """The constant delay of copies against their originals: the median over the clips that tell.

    Args:
        pairs: (original `[C, N]`, copy `[C, M]`) at the same rate.
        sample_rate: Hz.
    """
    for method in ("waveform", "envelope"):
        found = []
        for original, copy in pairs:
            if min(float(original.abs().max()), float(copy.abs().max())) < SILENCE_PEAK:
                continue
            shift, peak = _peak(original.mean(0).double(), copy.mean(0).double(), sample_rate, method)
            if peak > _CLEAR_PEAK:
                found.append(shift)
        if found and 2 * len(found) >= len(pairs):
            return Delay(sorted(found)[len(found) // 2], method, len(found))
    return Delay(0, "none", 0)


def _peak(original: Tensor, copy: Tensor, sample_rate: int, method: str) -> tuple[int, float]:
    """The shift in samples of the greatest correlation of two waves `[N]`, and that correlation, up to 1."""
    step = 1
    if method == "envelope":
        step = max(1, round(_ENVELOPE_SECONDS * sample_rate))
        original, copy = (_envelope(wave, step) for wave in (original, copy))
    limit = math.ceil(MAX_DELAY_SECONDS * sample_rate / step)
    size = 1 << (original.shape[0] + copy.shape[0] + limit - 1).bit_length()
    product = torch.fft.rfft(copy, size) * torch.fft.rfft(original, size).conj()
    correlation = torch.fft.irfft(product, size)
    norm = float(original.norm() * copy.norm())
    if norm == 0:
        return 0, 0.0
    near = torch.cat([correlation[-limit:], correlation[: limit + 1]])
    if method == "waveform":
        near = near.abs()  # an inverted copy is as late as an upright one
    best = int(near.argmax())
    return (best - limit) * step, float(near[best]) / norm


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
