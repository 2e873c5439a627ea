"""Pictures that need no library to look at: spectrograms as PNG, rate–distortion plots as SVG."""

from __future__ import annotations

import html
import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from codec.features import MelSettings, MelSpectrogram

_RANGE_DB = 70.0
_DIFFERENCE_DB = 30.0
_MOST_COLUMNS = 320
_BANDS = 96
# From silence to loud: black over violet and orange to pale yellow. From quieter to louder: blue, black, red.
_HEAT = ((0, 0, 4), (60, 15, 110), (150, 45, 120), (230, 90, 75), (250, 180, 70), (252, 253, 200))
_CHANGE = ((90, 190, 255), (20, 70, 140), (12, 12, 14), (150, 40, 20), (255, 170, 90))

_WIDTH, _HEIGHT = 420, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 26, 36


def levels(wave: Tensor, sample_rate: int) -> NDArray[np.float64]:
    """Mel spectrogram of a wave `[C, N]` in dB, at most 320 columns: `[96, F]`, low bands first."""
    hop = max(round(0.01 * sample_rate), -(-wave.shape[1] // _MOST_COLUMNS))
    size = 1 << (max(hop, round(0.03 * sample_rate)) - 1).bit_length()
    settings = MelSettings(
        sample_rate=sample_rate,
        n_fft=size,
        win_length=size,
        hop_length=hop,
        n_mels=_BANDS,
        f_min=0,
        f_max=sample_rate / 2,
        norm=None,
        log="db",
        floor=1e-4,
    )
    found: Tensor = MelSpectrogram(settings)(wave.mean(0)[None, None])[0]
    return found.double().numpy()


def spectrogram(values: NDArray[np.float64], top: float) -> bytes:
    """Levels `[bands, F]` as a PNG, from `top` dB down by 70."""
    return _png((values - top + _RANGE_DB) / _RANGE_DB, _HEAT)


def difference(original: NDArray[np.float64], copy: NDArray[np.float64], top: float) -> bytes:
    """Where the copy is louder (red) or quieter (blue) than the original, by up to 30 dB, as a PNG.

    What lies below the spectrogram's range in both counts as equal.
    """
    floor = top - _RANGE_DB
    change = np.maximum(copy, floor) - np.maximum(original, floor)
    return _png(change / (2 * _DIFFERENCE_DB) + 0.5, _CHANGE)


def _png(values: NDArray[np.float64], anchors: Sequence[tuple[int, int, int]]) -> bytes:
    """Values `[rows, columns]` in 0 … 1, the first row at the bottom, in 64 colours."""
    steps = np.linspace(0, 1, 64)
    places = np.linspace(0, 1, len(anchors))
    palette = np.stack([np.interp(steps, places, [a[i] for a in anchors]) for i in range(3)], 1).round().astype("u1")
    pixels = (np.clip(values[::-1], 0, 1) * 63).round().astype("u1")
    rows = np.concatenate([np.zeros((len(pixels), 1), "u1"), pixels], 1)
    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 8, 3, 0, 0, 0)
    chunks = (
        (b"IHDR", head),
        (b"PLTE", palette.tobytes()),
        (b"IDAT", zlib.compress(rows.tobytes(), 9)),
        (b"IEND", b""),
    )
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@dataclass(frozen=True)
class Point:
    """A condition in a plot.

    Attributes:
        label: Its name.
        kbps: Where it is.
        value: The mean.
        low: Lower end of its interval.
        high: Upper end.
    """

    label: str
    kbps: float
    value: float
    low: float | None
    high: float | None


def rate_plot(title: str, note: str, series: dict[str, list[Point]], digits: int) -> str:
    """A rate–distortion plot as SVG: one line per codec, in the colours of the page's classes `s0` to `s7`."""
    points = [point for line in series.values() for point in line]
    rates = [math.log10(p.kbps) for p in points]
    x_low, x_high = min(rates) - 0.08, max(rates) + 0.08
    ends = [v for p in points for v in (p.value, p.low, p.high) if v is not None]
    y_low, y_high = min(ends), max(ends)
    margin = 0.06 * (y_high - y_low) or 0.5
    y_low, y_high = y_low - margin, y_high + margin

    def x(kbps: float) -> float:
        return _LEFT + (math.log10(kbps) - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - y_low) / (y_high - y_low) * (_HEIGHT - _TOP - _BOTTOM)

    name = html.escape(title)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} over bitrate">',
        f'<text x="{_LEFT}" y="15" class="title">{name} <tspan class="note">{html.escape(note)}</tspan></text>',
    ]
    for value in _ticks(y_low, y_high):
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" class="grid"/>'
        )
        shown = f"{value:.10f}".rstrip("0").rstrip(".")
        parts.append(f'<text x="{_LEFT - 5}" y="{y(value) + 4:.1f}" class="tick end">{shown}</text>')
    for kbps in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256):
        if x_low <= math.log10(kbps) <= x_high:
            parts.append(
                f'<line x1="{x(kbps):.1f}" x2="{x(kbps):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" class="grid"/>'
            )
            parts.append(f'<text x="{x(kbps):.1f}" y="{_HEIGHT - _BOTTOM + 15}" class="tick middle">{kbps:g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 5}" class="tick middle">kbps stored</text>')
    for number, (_, line) in enumerate(series.items()):
        line = sorted(line, key=lambda p: p.kbps)
        parts.append(f'<g class="s{number % 8}">')
        path = " ".join(f"{x(p.kbps):.1f},{y(p.value):.1f}" for p in line)
        parts.append(f'<polyline points="{path}"/>')
        for p in line:
            interval = ""
            if p.low is not None and p.high is not None:
                parts.append(
                    f'<line x1="{x(p.kbps):.1f}" x2="{x(p.kbps):.1f}" y1="{y(p.low):.1f}" y2="{y(p.high):.1f}" '
                    'class="bar"/>'
                )
                interval = f" ({p.low:.{digits}f} to {p.high:.{digits}f})"
            text = html.escape(f"{p.label}: {p.value:.{digits}f}{interval} at {p.kbps:.2f} kbps")
            parts.append(f'<circle cx="{x(p.kbps):.1f}" cy="{y(p.value):.1f}" r="4"><title>{text}</title></circle>')
        parts.append("</g>")
    return "".join([*parts, "</svg>"])


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers."""
    raw = (high - low) / 5
    power = 10 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw)
    return [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
