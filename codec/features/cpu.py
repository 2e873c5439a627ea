"""The CPU path for float32: what takes microseconds is kept off allocators, thread pools and slow loops.

Measured against one-call STFTs: frames go through in blocks whose intermediates stay in the cache, in buffers that
are kept; NumPy's complex magnitude is several times faster than torch's; each group of neighbouring filters is
multiplied only with the Fourier bins it covers. With several threads, threads take blocks: a pool that splits every
small operation, as MKL's transforms do, waits for its slowest thread hundreds of times per batch, and on busy cores
one such wait takes milliseconds.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codec.features.edges import mirror_numpy
from codec.features.settings import MelSettings

Array = NDArray[np.float32]

# Multiplications up to which OpenBLAS keeps a matrix product on the calling thread.
_SERIAL_PRODUCT = 1 << 18
_MAX_BLOCK = 128
_MAX_BLOCK_SAMPLES = 1 << 17
_GROUP = 16
# Blocks from which on threads are worth starting.
_MANY_BLOCKS = 16
_FEW_FRAMES = 4
_MAX_SCRATCH = 16


class _Scratch:
    """What a block of F frames of R rows becomes on its way, kept from call to call."""

    def __init__(
        self, num_rows: int, num_frames: int, n_fft: int, win_length: int, hop_length: int, outputs: int
    ) -> None:
        count = num_rows * num_frames
        self.samples = np.zeros((num_rows, (num_frames - 1) * hop_length + win_length), np.float32)
        self.frames = np.lib.stride_tricks.sliding_window_view(self.samples, win_length, 1)[:, ::hop_length]
        windowed = np.zeros((num_rows, num_frames, n_fft), np.float32)
        self.windowed = windowed[:, :, :win_length]
        self.transformed = torch.from_numpy(windowed.reshape(count, n_fft))
        self.windowed_frames = windowed.reshape(count, n_fft)
        # NumPy's annotations only know complex128 here.
        self.spectrum: Any = np.empty((count, n_fft // 2 + 1), np.complex64)
        self.value = np.empty((count, n_fft // 2 + 1), np.float32)
        self.mel = self.value if outputs == 0 else np.empty((count, outputs), np.float32)
        self.result = self.mel.reshape(num_rows, num_frames, -1).transpose(0, 2, 1)


class _Memory(threading.local):
    """A thread's scratch memory."""

    def __init__(self) -> None:
        self._blocks: dict[tuple[int, ...], _Scratch] = {}

    def get(self, *shape: int) -> _Scratch:
        found = self._blocks.get(shape)
        if found is None:
            if len(self._blocks) >= _MAX_SCRATCH:
                self._blocks.clear()
            found = self._blocks[shape] = _Scratch(*shape)
        return found


_memory = _Memory()


class CpuKernel:
    """Rows of samples → `|X| ** power` `[R, K, F]`, or its projection on filters `[R, M, F]`.

    Args:
        settings: Framing, window length and power.
        window: float32 `[win_length]`.
        filters: float32 `[M, K]`, or None for the spectrum itself.
    """

    def __init__(self, settings: MelSettings, window: Array, filters: Array | None) -> None:
        self._settings = settings
        self._window = window
        self._shape = (settings.n_fft, settings.win_length, settings.hop_length, 0 if filters is None else len(filters))
        self._mirrors = settings.mirrors
        self._dense = None if filters is None else np.ascontiguousarray(filters.T)
        self.num_outputs = settings.n_fft // 2 + 1 if filters is None else len(filters)
        self._groups: list[tuple[slice, slice, Array]] = []
        self._block = max(8, min(_MAX_BLOCK, _MAX_BLOCK_SAMPLES // settings.n_fft))
        if filters is not None:
            for first in range(0, len(filters), _GROUP):
                covered = np.flatnonzero(filters[first : first + _GROUP].any(axis=0))
                bins = slice(int(covered[0]), int(covered[-1]) + 1) if covered.size else slice(0, 0)
                weights = np.ascontiguousarray(filters[first : first + _GROUP, bins].T)
                self._groups.append((bins, slice(first, first + _GROUP), weights))
            largest = max(weights.size for _, _, weights in self._groups)
            self._block = max(8, min(self._block, _SERIAL_PRODUCT // max(1, largest)))

    def __call__(self, rows: Array, lengths: list[int] | None, num_frames: int) -> Array:
        """`[R, N]` → `[R, M, F]`: pads as the settings say; a row shorter than N is padded at its own end."""
        return self._run(rows, lengths if self._mirrors else None, num_frames, self._settings.window_start)

    def framed(self, padded: Array, num_frames: int) -> Array:
        """`[R, (F - 1) * hop_length + win_length]`, frame 0's window at its start → `[R, M, F]`."""
        return self._run(padded, None, num_frames, 0)

    def logarithm(self, values: Array, row_frames: list[int] | None) -> None:
        """Puts mel values `[R, M, F]` on the settings' scale, in place.

        NumPy's logarithms are several times faster than those that torch takes from MKL, and serial.
        """
        s = self._settings
        if s.log is None or values.size == 0:
            return
        if s.add_floor:
            values += np.float32(s.floor)
        else:
            np.maximum(values, np.float32(s.floor), out=values)
        (np.log if s.log == "natural" else np.log10)(values, out=values)
        if s.log == "db":
            values *= np.float32(20 / s.power)
        if s.log_range is not None:
            for row, valid in zip(values, row_frames or [values.shape[2]] * len(values), strict=True):
                if valid:
                    np.maximum(row, row[:, :valid].max() - np.float32(s.log_range), out=row)
        if s.log_offset or s.log_scale != 1:
            values += np.float32(s.log_offset)
            values *= np.float32(s.log_scale)

    def _run(self, rows: Array, lengths: list[int] | None, num_frames: int, start: int) -> Array:
        num_rows, num_threads = len(rows), torch.get_num_threads()
        if num_rows * num_frames <= self._block:
            scratch = _memory.get(num_rows, num_frames, *self._shape)
            self._fill_rows(scratch.samples, rows, lengths, start)
            # What overflows is found, and said better, at the end.
            with np.errstate(all="ignore"):
                self._project(scratch, num_threads)
            return scratch.result.copy()
        # A block is a part of one row, or several whole short rows.
        out = np.empty((num_rows, self.num_outputs, num_frames), np.float32)
        size = max(1, self._block // num_frames)
        step = max(1, min(num_frames, self._block // size))
        blocks = [(row, first) for row in range(0, num_rows, size) for first in range(0, num_frames, step)]

        def work(some_blocks: list[tuple[int, int]]) -> None:
            with np.errstate(all="ignore"):
                for row, first in some_blocks:
                    some = rows[row : row + size]
                    some_lengths = None if lengths is None else lengths[row : row + size]
                    scratch = _memory.get(len(some), min(step, num_frames - first), *self._shape)
                    self._fill_rows(scratch.samples, some, some_lengths, start + first * self._settings.hop_length)
                    self._project(scratch, num_threads)
                    out[row : row + size, :, first : first + step] = scratch.result

        if num_threads == 1 or len(blocks) < _MANY_BLOCKS:
            work(blocks)
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                share = -(-len(blocks) // num_threads)
                list(pool.map(work, (blocks[i : i + share] for i in range(0, len(blocks), share))))
        return out

    def _project(self, scratch: _Scratch, num_threads: int) -> None:
        """Samples → result."""
        s = self._settings
        frames, windowed, value = scratch.frames, scratch.windowed, scratch.value
        if s.remove_dc or s.frame_preemphasis:
            if s.remove_dc:
                np.subtract(frames, frames.mean(-1, keepdims=True), out=windowed)
            else:
                windowed[:] = frames
            if s.frame_preemphasis:
                before = windowed[:, :, :-1] * np.float32(s.frame_preemphasis)
                windowed[:, :, 1:] -= before
                windowed[:, :, 0] *= np.float32(1 - s.frame_preemphasis)
            frames = windowed
        np.multiply(frames, self._window, out=windowed)
        if num_threads == 1:
            spectrum = torch.fft.rfft(scratch.transformed).numpy()
        else:
            # Half as fast, but MKL would wake its threads for two frames.
            spectrum = np.fft.rfft(scratch.windowed_frames, out=scratch.spectrum)
        np.abs(spectrum, out=value)
        self._raise(value)
        if self._dense is None:
            return
        if len(value) <= _FEW_FRAMES:
            np.dot(value, self._dense, out=scratch.mel)
        else:
            for bins, channels, weights in self._groups:
                np.matmul(value[:, bins], weights, out=scratch.mel[:, channels])

    def _raise(self, value: Array) -> None:
        """Magnitude → `(magnitude² + eps) ** (power / 2)`, in place."""
        s = self._settings
        if s.magnitude_eps:
            np.square(value, out=value)
            value += np.float32(s.magnitude_eps)
            if s.power == 1:
                np.sqrt(value, out=value)
            elif s.power != 2:
                np.power(value, np.float32(s.power / 2), out=value)
        elif s.power == 2:
            np.square(value, out=value)
        elif s.power != 1:
            np.power(value, np.float32(s.power), out=value)

    def _fill_rows(self, target: Array, rows: Array, lengths: list[int] | None, start: int) -> None:
        if lengths is None:
            self._fill(target, rows, start)
        else:
            for samples, row, length in zip(target, rows, lengths, strict=True):
                self._fill(samples, row[:length], start)

    def _fill(self, target: Array, source: Array, start: int) -> None:
        """Copies what lies from sample `start` on, padding included."""
        n, width = source.shape[-1], target.shape[-1]
        left = min(-start, width) if start < 0 else 0
        first = start if start > 0 else 0
        inside = left + max(0, min(n, start + width) - first)
        target[..., left:inside] = source[..., first : first + inside - left]
        if not self._mirrors:
            target[..., :left] = 0
            target[..., inside:] = 0
            return
        for outside in (slice(0, left), slice(inside, width)):
            if outside.start < outside.stop:
                position = np.arange(outside.start, outside.stop) + start
                target[..., outside] = source[..., mirror_numpy(position, n)]
        if self._settings.pad_mode == "reflect_zero":
            target[..., max(0, n + self._settings.left_padding - start) :] = 0
