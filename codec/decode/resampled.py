"""A wave that is resampled as it comes, equal to resampling it whole."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from codec import audio
from codec.audio.resampling import native_span
from codec.frames import resampled_length


class ResampledStream:
    """Chunks in, resampled chunks out; memory doesn't depend on the wave's length.

    Args:
        num_samples: Of the whole wave.
        from_rate: Hz.
        to_rate: Hz.
    """

    def __init__(self, num_samples: int, from_rate: int, to_rate: int) -> None:
        self._rates = (from_rate, to_rate)
        self._num_samples = num_samples
        self._length = resampled_length(num_samples, from_rate, to_rate)
        divisor = math.gcd(from_rate, to_rate)
        self._step_in, self._step_out = from_rate // divisor, to_rate // divisor
        _, ends, _ = native_span(0, self._step_out, from_rate, to_rate)
        self._ahead = ends // self._step_in - 1  # periods that an output period looks ahead
        self._held: Tensor | None = None
        self._first = 0  # sample at which `_held` begins
        self._done = 0

    def push(self, wave: Tensor) -> Tensor:
        """Takes `[C, n]`, returns what is complete, `[C, m]`, m ≥ 0."""
        self._held = wave if self._held is None else torch.cat([self._held, wave], 1)
        have = self._first + self._held.shape[1]
        return self._upto((have // self._step_in - self._ahead) * self._step_out)

    def flush(self) -> Tensor:
        """Returns the rest."""
        return self._upto(self._length)

    def _upto(self, stop: int) -> Tensor:
        assert self._held is not None
        stop = min(stop, self._length)
        if stop <= self._done:
            return self._held[:, :0]
        first, last, skip = native_span(self._done, stop, *self._rates)
        span = self._held[:, first - self._first : min(last, self._num_samples) - self._first]
        out = audio.resample(span, *self._rates)[:, skip : skip + stop - self._done]
        self._done = stop
        keep, _, _ = native_span(stop, stop + 1, *self._rates)
        self._held = self._held[:, keep - self._first :].clone()
        self._first = keep
        return out
