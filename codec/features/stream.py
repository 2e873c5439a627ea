"""Features of a wave that arrives in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from codec.errors import InputError
from codec.features.edges import mirror

if TYPE_CHECKING:
    from codec.features.mel import Spectrogram


class FeatureStream:
    """Chunks of a wave in, complete frames out; together they are what one call gives, to float32 rounding.

    Holds the samples that later frames still see and no more, so memory is constant. A frame comes as soon as its
    last sample is there: `latency` samples after its window's first one. Rows of a batch advance together.

    Args:
        module: Computes the features.

    Attributes:
        latency: Samples of a window.

    Raises:
        InputError: The settings need the whole wave (log_range, normalize).

    >>> from codec.features import MelSpectrogram
    >>> mel, wave = MelSpectrogram("realtime"), torch.zeros(16000)
    >>> stream = mel.stream()
    >>> parts = [stream.push(chunk) for chunk in wave.split(528)] + [stream.flush()]
    >>> torch.allclose(torch.cat(parts, -1), mel(wave))
    True
    """

    def __init__(self, module: Spectrogram) -> None:
        s = module.settings
        if module.uses_log and not s.is_framewise:
            raise InputError(
                f"log_range {s.log_range} and normalize {s.normalize!r} need the whole wave, so they can't be "
                "streamed; use replace(settings, log_range=None, normalize=None), and apply them afterwards"
            )
        self._module = module
        self._settings = s
        self.latency = s.win_length
        self._window_start = s.window_start
        self._left = max(0, -s.window_start)
        self._mirrors = s.mirrors
        # What the end mirrors: a window's reach beyond the last sample, and that sample.
        self._history = s.win_length + s.window_start + 1 if self._mirrors else 0
        self._restart()

    def _restart(self) -> None:
        # A float32 array while the module's fast path takes the chunks, otherwise a tensor. `Any`: the two share what
        # is done with them.
        self._held: Any = None
        self._shape: tuple[int, ...] = ()
        self._start = 0
        self._total = 0
        self._emitted = 0
        self._last: Any = None

    def push(self, wave: Tensor) -> Tensor:
        """Takes the next samples, returns the frames that are complete.

        Args:
            wave: Floating `[n]`, `[C, n]` or `[B, C, n]`, n ≥ 0, of the same leading shape each time.

        Returns:
            `[K, f]`, `[C, K, f]`, `[B, K, f]` for mono batches or `[B, C, K, f]`, f ≥ 0.

        Raises:
            InputError: Another shape than before, integers, and on a CPU NaN or infinity in a frame.
        """
        if not wave.is_floating_point() or not 1 <= wave.ndim <= 3 or wave.shape[:-1].numel() == 0:
            raise InputError(
                f"chunk has dtype {wave.dtype} and shape {list(wave.shape)}; it must be floating [n], [C, n] or "
                "[B, C, n]"
            )
        if self._held is not None and wave.shape[:-1] != self._shape:
            raise InputError(
                f"chunk has shape {list(wave.shape)} after chunks of shape {[*self._shape, 'n']}; flush the stream "
                "before another wave"
            )
        module = self._module
        fast = module._is_fast(wave) and not isinstance(self._held, Tensor)
        rows: Any
        if fast:
            rows = module._samples(wave)
        else:
            rows = wave.reshape(wave.shape[:-1].numel(), wave.shape[-1]).to(module.window.dtype)
            if isinstance(self._held, np.ndarray):
                self._held = torch.from_numpy(self._held).to(module.window.dtype)
                self._last = None if self._last is None else torch.from_numpy(self._last).to(module.window.dtype)
        join: Any = np.concatenate if fast else torch.cat
        preemphasis = self._settings.preemphasis
        if preemphasis and rows.shape[1]:
            before = rows[:, :1] * 0 if self._last is None else self._last
            # Copied, as all that is held: a caller may use a chunk's memory again.
            self._last = join([rows[:, -1:]], 1)
            rows = rows - preemphasis * join([before, rows[:, :-1]], 1)
        self._shape = wave.shape[:-1]
        self._held = join([rows] if self._held is None else [self._held, rows], 1)
        self._total += rows.shape[1]
        s = self._settings
        end = (self._total - self._window_start - s.win_length) // s.hop_length + 1
        if self._mirrors and self._total <= self._left:
            # The start mirrors samples that aren't there yet.
            end = 0
        return self._emit(min(end, s.num_frames(self._total)))

    def flush(self) -> Tensor:
        """Ends the wave: returns the remaining frames, padded as the settings say, and starts afresh.

        Raises:
            InputError: No sample was pushed.
        """
        if self._total == 0:
            raise InputError("flush before any sample was pushed; a wave has at least 1 sample")
        features = self._emit(self._settings.num_frames(self._total))
        self._restart()
        return features

    def _emit(self, end: int) -> Tensor:
        s, held = self._settings, self._held
        count = max(0, end - self._emitted)
        first = self._emitted * s.hop_length + self._window_start
        if isinstance(held, np.ndarray):
            features = self._module._part(held, self._start, first, count, self._shape)
        else:
            width = (count - 1) * s.hop_length + s.win_length if count else 0
            features = self._module._of_padded(self._span(first, width), count, self._shape)
        self._emitted += count
        keep = min(self._emitted * s.hop_length + self._window_start, self._total - self._history)
        drop = max(0, min(keep, self._total) - self._start)
        if drop:
            self._held = held[:, drop:]
            if drop > 4 * self._held.shape[1]:
                # A view would keep the whole of a long chunk.
                self._held = self._held.copy() if isinstance(held, np.ndarray) else self._held.clone()
            self._start += drop
        return features

    def _span(self, first: int, width: int) -> Tensor:
        """Samples `[first, first + width)` of the wave with its padding, as far as it is known."""
        held: Tensor = self._held
        stop = first + width
        if first >= 0 and stop <= self._total:
            return held[:, first - self._start : stop - self._start]
        if not self._mirrors:
            inside = held[:, max(first, 0) - self._start : max(0, min(stop, self._total) - self._start)]
            left = min(max(0, -first), width)
            return F.pad(inside, (left, width - left - inside.shape[1]))
        position = torch.arange(first, stop, device=held.device)
        samples = held[:, mirror(position, self._total) - self._start]
        if self._settings.pad_mode == "reflect_zero":
            samples = samples * (position < self._total + self._settings.left_padding)
        return samples
