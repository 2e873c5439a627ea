"""Windows, mel filters and the cosine transform, from their definitions in float64."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from codec.features.settings import MelSettings

Array = NDArray[np.float64]


def window_values(window: str, num_samples: int, position: Array | None = None) -> Array:
    """A window of `MelSettings.window`, float64 `[num_samples]`.

    Args:
        window: Its name.
        num_samples: Its length.
        position: Where to sample it, in samples from its start, instead of 0 … num_samples - 1; 0 outside.
    """
    t = np.arange(num_samples, dtype=np.float64) if position is None else position
    period = num_samples if window == "hann" else num_samples - 1
    values = 0.5 - 0.5 * np.cos(2 * np.pi * t / period)
    if window == "povey":
        values = values**0.85
    return np.where((t < 0) | (t > period), 0.0, values)


def mel_filters(settings: MelSettings) -> Array:
    """Triangular mel filters, float64 `[n_mels, n_fft // 2 + 1]`.

    The triangles are the ones of librosa.filters.mel and torchaudio.functional.melscale_fbanks; with mel_scale
    "kaldi", those of torchaudio.compliance.kaldi.

    Warns:
        UserWarning: Some filters fall between two Fourier bins and are all zero.
    """
    filters = filter_weights(
        settings, np.arange(settings.n_fft // 2 + 1, dtype=np.float64) * settings.sample_rate / settings.n_fft
    )
    empty = np.flatnonzero(filters.max(axis=1) == 0)
    if empty.size:
        warnings.warn(
            f"mel bins {empty.tolist()} of {settings.n_mels} are always zero: their filters are narrower "
            f"than the {settings.sample_rate / settings.n_fft:g} Hz between Fourier bins; raise n_fft "
            f"(now {settings.n_fft}) or lower n_mels",
            UserWarning,
            stacklevel=3,
        )
    return filters


def filter_weights(settings: MelSettings, hz: Array) -> Array:
    """What each filter weighs the frequencies with: `[K]` in Hz → float64 `[n_mels, K]`."""
    corners = filter_corners(settings)
    x = _htk_mel(hz) if settings.mel_scale == "kaldi" else hz
    rising = (x - corners[:-2, None]) / (corners[1:-1] - corners[:-2])[:, None]
    falling = (corners[2:, None] - x) / (corners[2:] - corners[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    if settings.norm == "slaney":
        filters *= (2 / (corners[2:] - corners[:-2]))[:, None]
    return np.asarray(filters)


def filter_corners(settings: MelSettings) -> Array:
    """Where triangle m starts, peaks and ends: elements m, m + 1, m + 2; in Hz, for "kaldi" in mel. `[n_mels + 2]`."""
    to_mel, to_hz = (_slaney_mel, _slaney_hz) if settings.mel_scale == "slaney" else (_htk_mel, _htk_hz)
    low, high = to_mel(np.array([settings.f_min, settings.f_max]))
    mel = np.linspace(low, high, settings.n_mels + 2)
    return np.asarray(mel if settings.mel_scale == "kaldi" else to_hz(mel))


def cosine_transform(num_outputs: int, num_inputs: int) -> Array:
    """The orthonormal DCT-II, float64 `[num_outputs, num_inputs]`."""
    k, n = np.arange(num_outputs)[:, None], np.arange(num_inputs)
    basis = np.cos(np.pi * k * (2 * n + 1) / (2 * num_inputs)) * np.sqrt(2 / num_inputs)
    basis[0] /= np.sqrt(2)
    return np.asarray(basis)


def _htk_mel(hz: Any) -> Any:
    return 2595 * np.log10(1 + hz / 700)


def _htk_hz(mel: Any) -> Any:
    return 700 * (10 ** (mel / 2595) - 1)


# Slaney's Auditory Toolbox: 3 mel per 200 Hz up to 1 kHz, then 27 mel per factor of 6.4.
def _slaney_mel(hz: Any) -> Any:
    return np.where(hz < 1000, hz * 3 / 200, 15 + 27 * np.log(np.maximum(hz, 1000) / 1000) / np.log(6.4))


def _slaney_hz(mel: Any) -> Any:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((np.maximum(mel, 15) - 15) * np.log(6.4) / 27))
