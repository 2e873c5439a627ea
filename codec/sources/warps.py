"""Time and pitch changed by named values, on waves and on labels. For mels, `Mel` does it in the filterbank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from codec.errors import InputError
from codec.sources.base import NO_VALUES, Excerpt, Source, moved, padded, values_of
from codec.sources.wrappers import Wrap, stretched

_TAPS = 32


class _Stretching(Wrap):
    """A wrapper that reads `speed` times as much as it returns, from the same start."""

    def __init__(self, source: Source, *names: str) -> None:
        super().__init__(source)
        if not names:
            raise InputError(f"no named value is given; write {type(self).__name__}(source, 'stretch')")
        if source.rate() is None:
            raise InputError(f"{type(source).__name__} has no time to stretch; leave it as it is")
        self._names = names

    def reach(self, length: int, values: Mapping[str, float]) -> int:
        """See `Source.reach`."""
        return self.source.reach(stretched(length, values, self._names), values)

    def stream(self, key: str, size: int, values: Mapping[str, float] = NO_VALUES) -> Iterator[Any]:
        """Not possible: pieces begin at the item's own positions, so stretched ones wouldn't join."""
        raise InputError(f"{type(self).__name__} can't stream: its pieces wouldn't join; stream the source below it")

    def _speeds(self, excerpts: Sequence[Excerpt]) -> list[float]:
        speeds: list[float] = values_of(excerpts, self._names).prod(axis=1).tolist()
        if bad := [speed for speed in speeds if not (math.isfinite(speed) and speed > 0)]:
            raise InputError(f"{type(self).__name__}: {' × '.join(self._names)} is {bad[0]:g}; it must be above 0")
        return speeds


class TimeStretch(_Stretching):
    """Changes the tempo of waves, not their pitch: an excerpt at 1.5 holds 1.5 times as much of its item.

    The excerpt begins where it would anyway; random excerpts are drawn so that what they read lies inside the item,
    if it is long enough. In the time domain (WSOLA), so moments are off by up to a hundredth of a second. At 1 nothing
    changes. For mels, `Mel` does it exactly and far cheaper.

    Args:
        source: Gives waves `[B, C, N]`.
        names: Named values, multiplied where there are several.
    """

    def __init__(self, source: Source, *names: str) -> None:
        super().__init__(source, *names)
        self._hz = self._sample_rate()
        self._margin = self._hz // 25

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`."""
        speeds = self._speeds(excerpts)
        margins = [min(self._margin, int(e.start / speed)) for e, speed in zip(excerpts, speeds, strict=True)]
        asked: list[Excerpt] = []
        for excerpt, speed, margin in zip(excerpts, speeds, margins, strict=True):
            first = excerpt.start - round(margin * speed)
            asked.append(moved(excerpt, first, math.ceil((margin + excerpt.length + self._margin) * speed)))
        asked = [_clipped(e, self.source) for e in asked]
        rows = []
        for row, ask, excerpt, speed, margin in zip(self._tensor(asked), asked, excerpts, speeds, margins, strict=True):
            if speed == 1:
                rows.append(row[..., margin : min(margin + excerpt.length, ask.length)])
            else:
                rows.append(_slower(row[..., : ask.length], speed, self._hz)[..., margin : margin + excerpt.length])
        return padded(rows, max(excerpt.length for excerpt in excerpts))


class PitchShift(Wrap):
    """Changes the pitch of waves, not their tempo. At 0 nothing changes.

    Stretched in the time domain, then resampled; formants move with the pitch. For mels, `Mel` does it far cheaper.

    Args:
        source: Gives waves `[B, C, N]`.
        names: Named values in semitones, added up where there are several.

    Example:
        >>> x = PitchShift(audio, "a")  # and its target, b semitones from it
        >>> y = PitchShift(audio, "a", "b")
    """

    def __init__(self, source: Source, *names: str) -> None:
        super().__init__(source)
        if not names:
            raise InputError("no named value is given; write PitchShift(source, 'semitones')")
        self._names = names
        self._hz = self._sample_rate()
        self._margin = self._hz // 25

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`."""
        ratios = (2 ** (values_of(excerpts, self._names).sum(axis=1) / 12)).tolist()
        margins = [min(self._margin, e.start) for e in excerpts]
        asked = [
            _clipped(moved(e, e.start - margin, margin + e.length + self._margin), self.source)
            for e, margin in zip(excerpts, margins, strict=True)
        ]
        rows = []
        for row, ask, excerpt, ratio, margin in zip(self._tensor(asked), asked, excerpts, ratios, margins, strict=True):
            wave = row[..., : ask.length]
            if ratio != 1:
                wave = _faster(_slower(wave, 1 / ratio, self._hz), ratio, ask.length)
            rows.append(wave[..., margin : margin + excerpt.length])
        return padded(rows, max(excerpt.length for excerpt in excerpts))


class LabelTimeStretch(_Stretching):
    """What `TimeStretch` does to waves, for their labels: the same names, the same span of the item.

    Args:
        source: Gives labels, one per position (last axis) or one per excerpt.
        names: Named values, multiplied where there are several.
    """

    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """The source's shape."""
        speeds = self._speeds(excerpts)
        asked = [moved(e, e.start, math.ceil(e.length * speed)) for e, speed in zip(excerpts, speeds, strict=True)]
        data = self.source.get(asked)
        if not isinstance(data, Tensor) or data.ndim < 2:
            return data
        rows = []
        for row, excerpt, speed in zip(data, excerpts, speeds, strict=True):
            # The middle of each position, in the item.
            at = torch.from_numpy(np.floor((np.arange(excerpt.length) + 0.5) * speed).astype(np.int64))
            rows.append(row[..., at.clamp(max=row.shape[-1] - 1)])
        return padded(rows, max(excerpt.length for excerpt in excerpts))


class LabelPitchShift(Wrap):
    """What `PitchShift` does to waves, for pitches. NaN and, in Hz, 0 stay: without pitch.

    Args:
        source: Gives floating pitches.
        names: Named values in semitones, added up where there are several.
        unit: "semitones" (such as MIDI notes) or "hz".
    """

    def __init__(self, source: Source, *names: str, unit: Literal["semitones", "hz"]) -> None:
        super().__init__(source)
        if unit not in ("semitones", "hz") or not names:
            raise InputError(f"unit={unit!r}, names={names}; write LabelPitchShift(source, 'shift', unit='hz')")
        self._names = names
        self._unit = unit

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """The source's shape."""
        data = self._tensor(excerpts)
        if not data.is_floating_point():
            raise InputError(f"LabelPitchShift needs floating pitches, not {data.dtype}; use Arrays of float32")
        shift = torch.from_numpy(values_of(excerpts, self._names).sum(axis=1)).view(-1, *[1] * (data.ndim - 1))
        return (data * 2 ** (shift / 12) if self._unit == "hz" else data + shift).to(data.dtype)


def _clipped(excerpt: Excerpt, source: Source) -> Excerpt:
    total = source.length(excerpt.key)
    return moved(excerpt, excerpt.start, max(1, min(excerpt.length, total - excerpt.start)))


def _slower(wave: Tensor, speed: float, rate: int) -> Tensor:
    """`[C, N]` → `[C, ceil(N / speed)]` at the same pitch: WSOLA (Verhelst and Roelands 1993).

    Windows are taken `speed` times as far apart as they are put, each shifted by at most a hundredth of a second
    to where it goes on best from the one before it.
    """
    hop = max(2, rate // 50)
    reach = max(1, rate // 100)
    length = math.ceil(wave.shape[-1] / speed)
    num_windows = -(-length // hop) + 1
    edge = hop + reach
    beyond = max(0, math.ceil((num_windows - 1) * hop * speed) + edge + hop - wave.shape[-1])
    samples = np.pad(wave.numpy(), ((0, 0), (edge, beyond + edge)))
    window = 0.5 - 0.5 * np.cos(np.pi * np.arange(2 * hop) / hop).astype(np.float32)
    out = np.zeros((wave.shape[0], (num_windows + 1) * hop), dtype=np.float32)
    size = 1 << (2 * hop + 2 * reach + 2 * hop - 1).bit_length()
    place = reach
    for k in range(num_windows):
        if k:
            best = np.fft.rfft(samples[:, place + hop : place + 3 * hop], size)
            first = round(k * hop * speed)
            around = samples[:, first : first + 2 * hop + 2 * reach]
            likeness = np.fft.irfft((np.fft.rfft(around, size) * best.conj()).sum(0), size)[: 2 * reach + 1]
            energy = np.concatenate([[0], np.cumsum(np.square(around, dtype=np.float64).sum(0))])
            energy = energy[2 * hop : 2 * hop + 2 * reach + 1] - energy[: 2 * reach + 1]
            place = first + int(np.argmax(likeness / np.sqrt(energy + 1e-9)))
        out[:, k * hop : (k + 2) * hop] += samples[:, place : place + 2 * hop] * window
    return torch.from_numpy(out[:, hop : hop + length].copy())


def _faster(wave: Tensor, speed: float, length: int) -> Tensor:
    """Plays `[C, N]` faster and higher, by windowed-sinc interpolation: `[C, length]`."""
    at = torch.arange(length, dtype=torch.float64) * speed
    base = at.floor().long()
    offsets = torch.arange(1 - _TAPS // 2, 1 + _TAPS // 2)
    distance = (offsets - (at - base)[:, None]).float()
    cutoff = min(1.0, 1 / speed)
    kernel = cutoff * torch.sinc(cutoff * distance) * torch.cos(distance * (math.pi / _TAPS)).square()
    around = F.pad(wave, (_TAPS, _TAPS))
    index = (base[:, None] + offsets + _TAPS).clamp(0, around.shape[-1] - 1)
    return (around[:, index] * kernel).sum(-1)
