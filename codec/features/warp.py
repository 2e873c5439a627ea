"""Pitch, tempo and sample rate changed inside the filterbank, for the price of a mel spectrogram.

Resampling a wave is a Fourier transform of another length, a change of tempo is another hop, a change of pitch is
another frequency axis under the filters; nothing of it needs a new waveform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codec.errors import InputError
from codec.features.edges import mirror
from codec.features.filters import filter_corners, window_values
from codec.features.settings import MelSettings

if TYPE_CHECKING:
    from codec.features.mel import MelSpectrogram

PerRow = float | Sequence[float] | Tensor


def row_values(name: str, values: PerRow | None, default: float, num_rows: int) -> list[float]:
    """One positive number per row.

    Raises:
        InputError: Another count, or a number that isn't above 0.
    """
    if values is None:
        return [default] * num_rows
    if isinstance(values, int | float):
        listed = [float(values)] * num_rows
    else:
        listed = [float(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]
    if len(listed) != num_rows:
        raise InputError(f"{name} has {len(listed)} values for {num_rows} rows; give one number, or one per row")
    if bad := [value for value in listed if not (math.isfinite(value) and value > 0)]:
        raise InputError(f"{name} has {bad[0]:g}; it must be above 0 (1: unchanged)")
    return listed


def transformed_length(num_samples: int, step: float) -> int:
    """Samples of a wave of which `step` samples become one."""
    return max(1, math.ceil(num_samples / step - 1e-9))


def transformed_mel(
    module: MelSpectrogram, rows: Tensor, lengths: list[int], num_frames: list[int], rates: list[float],
    speeds: list[float], pitches: list[float],
) -> Tensor:  # fmt: skip
    """Rows `[R, N]`, zero beyond their lengths → mel before the logarithm `[R, M, max(num_frames)]`."""
    s, device = module.settings, rows.device
    mel = rows.new_zeros(len(rows), s.n_mels, max(num_frames))
    if mel.shape[2] == 0:
        return mel
    corners = torch.from_numpy(filter_corners(s)).to(device, rows.dtype)
    for rate in sorted(set(rates)):
        index = [i for i, other in enumerate(rates) if other == rate]
        chosen = torch.tensor(index, device=device)
        scale = rate / s.sample_rate
        width = math.ceil(s.win_length * scale)
        n_fft = max(width, round(s.n_fft * scale))
        # Samples lie `scale` times as close under the same window: its sum grows by that.
        positions = torch.arange(width, dtype=torch.float64).numpy() / scale
        window = torch.from_numpy(window_values(s.window, s.win_length, positions) / scale).to(device, rows.dtype)
        step = torch.tensor([scale * speeds[i] for i in index], dtype=torch.float64, device=device)[:, None]
        starts = torch.arange(mel.shape[2], dtype=torch.float64, device=device) * s.hop_length + s.window_start
        # A window's centre moves with the tempo, its length doesn't.
        starts = ((starts + s.win_length / 2) * step - s.win_length * scale / 2).round().long()
        n = torch.tensor([lengths[i] for i in index], device=device)
        frames = _gather(s, rows[chosen], n, starts, width, step)
        hz = torch.arange(n_fft // 2 + 1, device=device, dtype=torch.float64) * (rate / n_fft)
        pitch = torch.tensor([pitches[i] for i in index], dtype=torch.float64, device=device)[:, None]
        filters = _filters(s, (hz * pitch).to(rows.dtype), corners) * (s.n_fft * scale / n_fft)
        mel = mel.index_copy(0, chosen, torch.matmul(filters, module._power(frames, window, n_fft).mT))
    return mel


def _gather(s: MelSettings, rows: Tensor, lengths: Tensor, starts: Tensor, width: int, step: Tensor) -> Tensor:
    """`[r, N]` and first samples `[r, F]` → `[r, F, width]`, padded as the settings say."""
    before = max(0, -int(starts.min()))
    position = torch.arange(-before, int(starts.max()) + width, device=rows.device)
    if s.mirrors:
        inside = mirror(position, lengths[:, None])
        reach = lengths[:, None] + s.left_padding * step
        known = position < reach if s.pad_mode == "reflect_zero" else position > -before - 1
    else:
        inside = position.clamp(0, rows.shape[1] - 1).expand(len(rows), -1)
        known = (position >= 0) & (position < rows.shape[1])
    padded = rows.gather(1, inside) * known
    row = torch.arange(len(rows), device=rows.device)[:, None]
    return padded.unfold(1, width, 1)[row, starts + before]


def _filters(s: MelSettings, hz: Tensor, corners: Tensor) -> Tensor:
    """The settings' triangles at the frequencies `[r, K]` → `[r, M, K]`."""
    x = (2595 * torch.log10(1 + hz / 700) if s.mel_scale == "kaldi" else hz)[:, None]
    left, top, right = corners[:-2, None], corners[1:-1, None], corners[2:, None]
    weights = torch.minimum((x - left) / (top - left), (right - x) / (right - top)).clamp_min(0)
    return weights * (2 / (right - left)) if s.norm == "slaney" else weights
