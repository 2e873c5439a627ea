"""The CPU path for float32: what takes microseconds is kept off allocators, thread pools and slow loops.

Measured against one-call STFTs: frames go through in blocks whose intermediates stay in the cache, in buffers that
are kept, with the plan of their transform; NumPy's complex magnitude is several times faster than torch's; each group
of neighbouring filters is multiplied only with the Fourier bins it covers. With several threads, threads take blocks:
a pool that splits every small operation waits for its slowest thread hundreds of times per batch, and on busy cores
one such wait takes milliseconds.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from codec.features.edges import mirror_numpy
from codec.features.settings import MelSettings
from codec.features.transform import real_transform

Array = NDArray[np.float32]

# Multiplications up to which OpenBLAS keeps a matrix product on the calling thread.
_SERIAL_PRODUCT = 1 << 18
_MAX_BLOCK = 128
_MAX_BLOCK_SAMPLES = 1 << 17
_GROUP = 16
# Blocks from which on threads are worth starting.
_MANY_BLOCKS = 16
# Frames up to which one product with all filters is faster than one per group.
_FEW_FRAMES = 8
_MAX_SCRATCH = 16


class NotFiniteError(ArithmeticError):
    """A result is NaN or infinite."""


class _Scratch:
    """What a block of F frames of R rows becomes on its way, kept from call to call."""

    def __init__(
        self, num_rows: int, num_frames: int, n_fft: int, win_length: int, hop_length: int, outputs: int
    ) -> None:
        count, num_bins = num_rows * num_frames, n_fft // 2 + 1
        self.samples = _zeros(num_rows, (num_frames - 1) * hop_length + win_length)
        # The span beyond which samples are zero, if there is one.
        self.inside: tuple[int, int] | None = None
        self.frames = np.lib.stride_tricks.sliding_window_view(self.samples, win_length, 1)[:, ::hop_length]
        windowed = _zeros(num_rows, num_frames, n_fft)
        self.windowed = windowed[:, :, :win_length]
        # NumPy's annotations only know complex128 here.
        self.spectrum: Any = _zeros(count, 2 * num_bins).view(np.complex64)
        self.transform = real_transform(windowed.reshape(count, n_fft), self.spectrum)
        self.value = _zeros(count, num_bins)
        self.value_columns = self.value.T
        self.mel = self.value if outputs == 0 else _zeros(count, outputs)
        self.result = self.mel.reshape(num_rows, num_frames, -1).transpose(0, 2, 1)


def _zeros(*shape: int) -> Array:
    """At the start of a cache line, where vector instructions and their rounding are the same each time."""
    size = math.prod(shape)
    memory = np.zeros(size + 15, np.float32)
    first = -memory.ctypes.data % 64 // 4
    return memory[first : first + size].reshape(shape)


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
    """Rows of samples → `|X| ** power` `[R, K, F]`, or its projection on filters `[R, M, F]`; new memory.

    Calls raise NotFiniteError where a result is NaN or infinite.

    Args:
        settings: Framing, window length and power.
        window: float32 `[win_length]`.
        filters: float32 `[M, K]`, or None for the spectrum itself.
    """

    def __init__(self, settings: MelSettings, window: Array, filters: Array | None) -> None:
        self._settings = settings
        self._window = window
        self._shape = (settings.n_fft, settings.win_length, settings.hop_length, 0 if filters is None else len(filters))
        self._filters = filters
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
        s = self._settings
        return self._run(rows, lengths if s.mirrors else None, num_frames, s.window_start, 0)

    def part(self, rows: Array, offset: int, start: int, num_frames: int) -> Array:
        """Samples from `offset` to the end of waves `[R, n]` → `[R, M, F]`, frame 0's window at sample `start`."""
        return self._run(rows, None, num_frames, start, offset)

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

    def _run(self, rows: Array, lengths: list[int] | None, num_frames: int, start: int, offset: int) -> Array:
        num_rows = len(rows)
        if num_rows * num_frames <= self._block:
            scratch = _memory.get(num_rows, num_frames, *self._shape)
            self._fill_rows(scratch, rows, lengths, start, offset)
            # What overflows is found, and said better, at the end.
            with np.errstate(all="ignore"):
                return _finite(self._whole(scratch))
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
                    self._fill_rows(scratch, some, some_lengths, start + first * self._settings.hop_length, offset)
                    self._transform(scratch)
                    self._project(scratch)
                    out[row : row + size, :, first : first + step] = scratch.result

        num_threads = torch.get_num_threads()
        if num_threads == 1 or len(blocks) < _MANY_BLOCKS:
            work(blocks)
        else:
            with ThreadPoolExecutor(num_threads) as pool:
                share = -(-len(blocks) // num_threads)
                list(pool.map(work, (blocks[i : i + share] for i in range(0, len(blocks), share))))
        return _finite(out)

    def _whole(self, scratch: _Scratch) -> Array:
        """Samples → a new array: what fits in one block."""
        self._transform(scratch)
        num_rows, _, num_frames = scratch.result.shape
        if self._filters is None or num_rows * num_frames > _FEW_FRAMES:
            self._project(scratch)
            return scratch.result.copy()
        mel: Array = self._filters.dot(scratch.value_columns)
        if num_rows > 1:
            return mel.reshape(-1, num_rows, num_frames).transpose(1, 0, 2).copy()
        return mel[np.newaxis]

    def _transform(self, scratch: _Scratch) -> None:
        """Samples → value."""
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
        if status := scratch.transform():
            raise MemoryError(f"no memory for a Fourier transform of {scratch.frames.shape} (MKL's status {status})")
        np.abs(scratch.spectrum, out=value)
        if s.power != 1 or s.magnitude_eps:
            self._raise(value)

    def _project(self, scratch: _Scratch) -> None:
        """Value → result."""
        for bins, channels, weights in self._groups:
            np.matmul(scratch.value[:, bins], weights, out=scratch.mel[:, channels])

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

    def _fill_rows(self, scratch: _Scratch, rows: Array, lengths: list[int] | None, start: int, offset: int) -> None:
        """Copies what lies from sample `start` on, padding included; rows begin at sample `offset`."""
        if not self._settings.mirrors:
            target = scratch.samples
            width = target.shape[1]
            left = min(-start, width) if start < 0 else 0
            first = (start if start > 0 else 0) - offset
            inside = left + max(0, min(rows.shape[1] - first, width - left))
            target[:, left:inside] = rows[:, first : first + inside - left]
            if scratch.inside != (left, inside):
                target[:, :left] = 0
                target[:, inside:] = 0
                scratch.inside = (left, inside)
            return
        scratch.inside = None
        if lengths is None:
            self._fill(scratch.samples, rows, start, offset)
        else:
            for samples, row, length in zip(scratch.samples, rows, lengths, strict=True):
                self._fill(samples, row[:length], start, offset)

    def _fill(self, target: Array, source: Array, start: int, offset: int) -> None:
        """The same where the edges mirror."""
        n, width = offset + source.shape[-1], target.shape[-1]
        left = min(-start, width) if start < 0 else 0
        first = start if start > 0 else 0
        inside = left + max(0, min(n, start + width) - first)
        target[..., left:inside] = source[..., first - offset : first - offset + inside - left]
        for outside in (slice(0, left), slice(inside, width)):
            if outside.start < outside.stop:
                position = np.arange(outside.start, outside.stop) + start
                target[..., outside] = source[..., mirror_numpy(position, n) - offset]
        if self._settings.pad_mode == "reflect_zero":
            target[..., max(0, n + self._settings.left_padding - start) :] = 0


def _finite(values: Array) -> Array:
    # Values are at least 0, so their maximum is finite only if all of them are.
    if not math.isfinite(np.maximum.reduce(values, axis=None)):
        raise NotFiniteError
    return values
