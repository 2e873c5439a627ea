"""What is measured of each wave on its way to the codec: loudness, peak, clipping, DC offset."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from codec.errors import InputError

FULL_SCALE = 32766.5 / 32768
"""Samples at or above this are at full scale, in 16 bits and more."""

CLIPPED_RUN = 3
"""Samples at full scale in a row that count as clipping."""

DC_LIMIT = 0.01
SILENCE_PEAK = 1e-3


@dataclass
class Levels:
    """Levels of a wave, gathered over its pieces.

    Attributes:
        num_samples: Samples per channel.
        peak: Largest magnitude.
        num_clipped: Samples in runs of at least three at full scale, all channels.
        sums: Sum of each channel's samples.
    """

    num_samples: int = 0
    peak: float = 0.0
    num_clipped: int = 0
    sums: Tensor | None = None

    def add(self, wave: Tensor) -> None:
        """Takes the next piece, `[C, n]`, on the CPU."""
        if wave.shape[1] == 0:
            return
        low, high = torch.aminmax(wave)
        peak = max(float(-low), float(high))
        self.peak = max(self.peak, peak)
        if peak >= FULL_SCALE:
            full = wave.abs() >= FULL_SCALE
            if full.shape[1] >= CLIPPED_RUN:
                runs = full.unfold(1, CLIPPED_RUN, 1).all(2)
                # Every sample that lies in some run.
                padded = torch.nn.functional.pad(runs, (CLIPPED_RUN - 1, CLIPPED_RUN - 1))
                self.num_clipped += int(padded.unfold(1, CLIPPED_RUN, 1).any(2).sum())
        sums = wave.sum(1, dtype=torch.float64)
        self.sums = sums if self.sums is None else self.sums + sums
        self.num_samples += wave.shape[1]

    @property
    def dc(self) -> float:
        """The largest mean of a channel, by magnitude."""
        if self.sums is None:
            return 0.0
        return float((self.sums / self.num_samples).abs().max())

    def warnings(self) -> list[str]:
        """What a listener should know, in words."""
        found = []
        if self.peak < SILENCE_PEAK:
            found.append(f"silence: its peak is {_db(self.peak)}")
        if self.num_clipped:
            found.append(f"clipped: {self.num_clipped} samples at full scale in runs of {CLIPPED_RUN} or more")
        if self.dc >= DC_LIMIT:
            found.append(f"DC offset: its mean is {self.dc:.3f} of full scale")
        return found


def _db(value: float) -> str:
    return f"{20 * math.log10(value):.0f} dB of full scale" if value > 0 else "zero"


class LoudnessMeter:
    """Integrated loudness after ITU-R BS.1770-4, of one channel that may come in pieces.

    Args:
        sample_rate: Hz.
    """

    _STEPS = 4  # steps of 100 ms in a block of 400 ms

    def __init__(self, sample_rate: int) -> None:
        if sample_rate < 1000:
            raise InputError(f"sample_rate is {sample_rate} Hz; loudness needs at least 1000")
        self._rate = sample_rate
        self._step = round(0.4 * sample_rate) // self._STEPS
        self._history: Tensor | None = None  # what the filters still feel
        self._rest: Tensor = torch.zeros(0, dtype=torch.float64)
        self._energies: list[Tensor] = []
        self._total, self._num_samples = 0.0, 0
        self.peak = 0.0

    def push(self, wave: Tensor) -> None:
        """Takes the next samples, `[n]`, on the CPU."""
        from torchaudio.functional import highpass_biquad, treble_biquad

        if wave.shape[0] == 0:
            return
        self.peak = max(self.peak, float(wave.abs().max()))
        wave = wave.double()
        kept = 0 if self._history is None else self._history.shape[0]
        joined = wave if self._history is None else torch.cat([self._history, wave])
        weighted = treble_biquad(joined[None], self._rate, 4.0, 1500.0, 1 / math.sqrt(2))
        weighted = highpass_biquad(weighted, self._rate, 38.0, 0.5)[0, kept:]
        self._history = joined[-self._rate :]
        power = weighted.square()
        self._total += float(power.sum())
        self._num_samples += power.shape[0]
        power = torch.cat([self._rest, power])
        whole = power.shape[0] // self._step
        self._energies.append(power[: whole * self._step].view(whole, self._step).mean(1))
        self._rest = power[whole * self._step :]

    def loudness(self) -> float:
        """LUFS so far; of less than 400 ms without gates; −inf for silence."""
        steps = torch.cat(self._energies) if self._energies else torch.zeros(0, dtype=torch.float64)
        if steps.shape[0] < self._STEPS:
            return _lufs(self._total / max(1, self._num_samples))
        blocks = steps.unfold(0, self._STEPS, 1).mean(1)
        blocks = blocks[blocks > 10 ** ((-70 + 0.691) / 10)]
        if blocks.shape[0] == 0:
            return -math.inf
        blocks = blocks[blocks > blocks.mean() * 0.1]
        return _lufs(float(blocks.mean()))

    def gain(self, target_lufs: float) -> float | None:
        """The factor that brings the wave to the target without clipping it; None for silence."""
        measured = self.loudness()
        if not math.isfinite(measured) or self.peak == 0:
            return None
        # As stored: a float32.
        wanted = min(10 ** ((target_lufs - measured) / 20), 1 / self.peak)
        return float(torch.tensor(wanted, dtype=torch.float32))


def _lufs(power: float) -> float:
    return -0.691 + 10 * math.log10(power) if power > 0 else -math.inf
