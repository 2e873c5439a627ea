"""The quality guard: a sample of the items is decoded again while the corpus is encoded, and compared."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from codec.features import MelSettings, MelSpectrogram
from codec.model import Codec

CHECK_SECONDS = 10
"""Of each item that is checked, its first seconds."""

_FEWEST = 8  # checks from which on outliers among them can be told
_BAND_LIMIT = 0.55
_BAND_DB = 60.0


@dataclass
class Check:
    """One item, decoded again.

    Attributes:
        key: The item.
        mel_distance: Mean absolute difference of the log-mels (natural logarithm) of original and decoded wave.
        reasons: What is odd about the original.
    """

    key: str
    mel_distance: float
    reasons: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def is_checked(key: str, share: float) -> bool:
    """Whether an item is in the sample: a function of its key alone."""
    return crc32(key.encode()) < share * 2**32


class Checker:
    """Decodes rows and compares them with what was encoded.

    Args:
        codec: The codec that encodes.
    """

    def __init__(self, codec: Codec) -> None:
        rate = codec.spec.sample_rate
        n_fft = 1 << (round(0.032 * rate) - 1).bit_length()
        settings = MelSettings(
            sample_rate=rate, n_fft=n_fft, win_length=n_fft, hop_length=rate // 100, n_mels=80, f_min=0, f_max=rate / 2
        )
        self._codec, self._rate = codec, rate
        self._mel = MelSpectrogram(settings).requires_grad_(False).to(codec.device)
        self._band = (n_fft, torch.hann_window(n_fft, device=codec.device))

    @torch.no_grad()
    def __call__(self, key: str, wave: Tensor, codes: Tensor, source_rate: int, warnings: Sequence[str]) -> Check:
        """Checks one row.

        Args:
            key: The row's key.
            wave: `[C, N]`, what was encoded, on the codec's device.
            codes: int64 `[K, T]` of at least its beginning.
            source_rate: Hz of the file.
            warnings: What is known to be odd about it.
        """
        hop = self._codec.spec.hop_length
        frames = min(codes.shape[1], -(-CHECK_SECONDS * self._rate // hop))
        decoded = self._codec.decode(codes[None, :, :frames].to(self._codec.device))[0]
        length = min(wave.shape[1], decoded.shape[1])
        original, decoded = wave[:, :length].float(), decoded[:, :length].float()
        distance = float((self._log_mel(original) - self._log_mel(decoded)).abs().mean())
        reasons = [text.split(":", 1)[0] for text in warnings]
        if source_rate < self._rate:
            reasons.append(f"recorded at {source_rate} Hz, below the codec's {self._rate}")
        elif (edge := self._upper_edge(original)) is not None:
            reasons.append(f"nothing above {edge:.0f} Hz: from a lower rate, or its header states the wrong one")
        return Check(key, distance, reasons)

    def _log_mel(self, wave: Tensor) -> Tensor:
        mel = self._mel(wave[None])
        assert isinstance(mel, Tensor)
        return mel

    def _upper_edge(self, wave: Tensor) -> float | None:
        """Hz above which the wave has next to nothing, if that is well below the codec's limit."""
        n_fft, window = self._band
        if wave.shape[1] < 4 * n_fft:
            return None
        frames = wave.mean(0).unfold(0, n_fft, n_fft // 2) * window
        power = torch.fft.rfft(frames).abs().square().mean(0)
        if float(power.max()) < 1e-9:
            return None
        loud = (power > power.max() * 10 ** (-_BAND_DB / 10)).nonzero()[-1, 0]
        edge = float(loud + 1) / n_fft * self._rate
        return edge if edge < _BAND_LIMIT * self._rate / 2 else None


def summary(checks: Sequence[Check]) -> dict[str, Any]:
    """Checks as a report has them: how many, mean, median, worst, and the outliers with what is odd about them."""
    if not checks:
        return {}
    distances = [check.mel_distance for check in checks]
    median = statistics.median(distances)
    spread = statistics.median(abs(value - median) for value in distances)
    limit = median + max(5 * spread, 0.5 * median)
    outliers = []
    for check in sorted(checks, key=lambda check: -check.mel_distance):
        reasons = list(check.reasons)
        if len(checks) >= _FEWEST and check.mel_distance > limit:
            reasons.insert(0, f"mel distance {check.mel_distance:.2f}, the median is {median:.2f}")
        if reasons:
            outliers.append({"key": check.key, "mel_distance": round(check.mel_distance, 4), "reasons": reasons})
    return {
        "num_items": len(checks),
        "mel_distance_mean": round(statistics.fmean(distances), 4),
        "mel_distance_median": round(median, 4),
        "mel_distance_max": round(max(distances), 4),
        "num_outliers": len(outliers),
        "outliers": outliers[:20],
    }
