"""Wave → mel: the reference implementations' numbers, from one module, on any device.

A frame is windowed, Fourier transformed, reduced to `|X| ** power`, projected on triangular mel filters, and
optionally put on a logarithmic scale. `MelSettings` names every choice on that way; `PRESETS` holds the
published combinations, each checked in the tests against an independent computation.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from codec.errors import InputError

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "mel_scale": ("htk", "slaney"),
    "norm": (None, "slaney"),
    "log": (None, "natural", "log10", "db"),
    "framing": ("center", "hop", "valid"),
    "pad_mode": ("constant", "reflect"),
}
# Frames transformed at once. On a CPU, 256 keep the intermediates in the cache; whole batches are far slower.
_CPU_BLOCK = 256
_DEVICE_BLOCK = 65536


@dataclass(frozen=True, kw_only=True)
class MelSettings:
    """Everything that determines a mel spectrogram. The defaults are the house codec's choices.

    Attributes:
        sample_rate: Hz.
        n_fft: Samples of a frame and length of the Fourier transform.
        win_length: Samples of the periodic Hann window, centred in the frame; at most `n_fft`.
        hop_length: Samples from one frame to the next.
        n_mels: Mel bins, M.
        f_min: Hz, lower edge of the lowest filter.
        f_max: Hz, upper edge of the highest filter; at most `sample_rate / 2`.
        power: Exponent of the magnitude: 1 is magnitude, 2 is power.
        mel_scale: "slaney" (linear below 1 kHz; librosa's default) or "htk" (torchaudio's default).
        norm: None (filters peak at 1) or "slaney" (each filter has unit area over Hz).
        log: None, "natural", "log10", or "db" (`20 / power * log10`).
        floor: Mel values are raised to at least this before the logarithm. Unused without one.
        framing: Which samples frame j sees, F frames of N samples.
            "center": around sample `j * hop_length`; F = 1 + N // hop_length (for even `n_fft`).
            "hop": around the middle of hop j; F = ceil(N / hop_length). Lines up with codec frames.
            "valid": from sample `j * hop_length` on, no padding; F = 1 + (N - n_fft) // hop_length, or 0.
        pad_mode: Samples outside the wave are zeros ("constant") or mirrored at its edges ("reflect").
        whole_hops: Keep only the first N // hop_length frames, as Whisper and HiFi-GAN do.
        magnitude_eps: Added to re² + im² (HiFi-GAN has 1e-9).
        log_range: Raise log values to at least the row's maximum minus this (Whisper has 8), or None.
        log_offset: Added to log values, after `log_range`.
        log_scale: Multiplies log values, after `log_offset`.
    """

    sample_rate: int
    n_fft: int
    win_length: int
    hop_length: int
    n_mels: int
    f_min: float
    f_max: float
    power: float = 1.0
    mel_scale: str = "slaney"
    norm: str | None = "slaney"
    log: str | None = "natural"
    floor: float = 1e-5
    framing: str = "hop"
    pad_mode: str = "constant"
    whole_hops: bool = False
    magnitude_eps: float = 0.0
    log_range: float | None = None
    log_offset: float = 0.0
    log_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("sample_rate", "n_fft", "win_length", "hop_length", "n_mels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InputError(f"MelSettings.{name} is {value!r}; it must be a positive integer")
        numbers = ["f_min", "f_max", "power", "floor", "magnitude_eps", "log_offset", "log_scale"]
        for name in numbers + (["log_range"] if self.log_range is not None else []):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"MelSettings.{name} is {value!r}; it must be a finite number")
            object.__setattr__(self, name, float(value))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"MelSettings.{name} is {getattr(self, name)!r}; it must be one of {choices}")
        if not isinstance(self.whole_hops, bool):
            raise InputError(f"MelSettings.whole_hops is {self.whole_hops!r}; it must be True or False")
        if self.n_fft < self.win_length:
            raise InputError(f"n_fft {self.n_fft} is shorter than win_length {self.win_length}; raise n_fft")
        if not 0 <= self.f_min < self.f_max:
            raise InputError(f"f_min {self.f_min:g} Hz must be at least 0 and below f_max {self.f_max:g} Hz")
        if self.f_max > self.sample_rate / 2:
            raise InputError(
                f"f_max {self.f_max:g} Hz is above the Nyquist frequency {self.sample_rate / 2:g} Hz of "
                f"sample_rate {self.sample_rate}; lower f_max, or resample to at least {2 * self.f_max:g} Hz"
            )
        if self.power <= 0:
            raise InputError(f"power is {self.power:g}; it must be above 0 (1: magnitude, 2: power)")
        if self.floor < 0 or (self.log is not None and self.floor == 0):
            raise InputError(f"floor is {self.floor:g}; the logarithm needs a floor above 0, such as 1e-5")
        if self.magnitude_eps < 0:
            raise InputError(f"magnitude_eps is {self.magnitude_eps:g}; it must be at least 0")
        if self.log_range is not None and self.log_range <= 0:
            raise InputError(f"log_range is {self.log_range:g}; it must be above 0, or None")
        if self.log is None and (self.log_range is not None or self.log_offset != 0 or self.log_scale != 1):
            raise InputError("log_range, log_offset and log_scale need a logarithm; set log, or leave them out")
        if self.framing == "hop" and self.n_fft < self.hop_length:
            raise InputError(
                f"n_fft {self.n_fft} is shorter than hop_length {self.hop_length}: framing 'hop' would skip "
                "samples; raise n_fft or lower hop_length"
            )
        if self.framing == "valid" and self.whole_hops:
            raise InputError("whole_hops needs padding, which framing 'valid' has not; use framing 'center' or 'hop'")

    @property
    def left_padding(self) -> int:
        """Samples before the wave's first one that frame 0 sees."""
        return {"center": self.n_fft // 2, "hop": (self.n_fft - self.hop_length) // 2, "valid": 0}[self.framing]

    def num_frames(self, num_samples: int) -> int:
        """Frames that a wave of `num_samples` samples gives."""
        if self.whole_hops:
            return num_samples // self.hop_length
        if self.framing == "hop":
            return -(-num_samples // self.hop_length)
        return max(0, 1 + (num_samples + 2 * self.left_padding - self.n_fft) // self.hop_length)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """The inverse of `to_dict`. A field that has a default may be left out.

        Raises:
            InputError: An unknown field, a missing one, or a bad value.
        """
        known = {field.name for field in fields(cls)}
        if unknown := set(settings) - known:
            raise InputError(f"mel settings have unknown fields {sorted(unknown)}; known are {sorted(known)}")
        try:
            return cls(**settings)
        except TypeError as error:
            raise InputError(f"mel settings {sorted(settings)} are incomplete: {error}") from error


_LIBROSA = MelSettings(
    sample_rate=22050, n_fft=2048, win_length=2048, hop_length=512, n_mels=128, f_min=0, f_max=11025,
    power=2, log=None, framing="center",
)  # fmt: skip

PRESETS: dict[str, MelSettings] = {
    # The house codec: one mel frame per 10 ms, lined up with the codec's frames.
    "codec": MelSettings(
        sample_rate=16000, n_fft=512, win_length=512, hop_length=160, n_mels=80, f_min=0, f_max=8000,
    ),
    # librosa.feature.melspectrogram's defaults.
    "librosa": _LIBROSA,
    # torchaudio.transforms.MelSpectrogram's defaults. (Four of its filters are empty, as in torchaudio.)
    "torchaudio": MelSettings(
        sample_rate=16000, n_fft=400, win_length=400, hop_length=200, n_mels=128, f_min=0, f_max=8000,
        power=2, mel_scale="htk", norm=None, log=None, framing="center", pad_mode="reflect",
    ),
    # github.com/jik876/hifi-gan, meldataset.py and config_v1.json.
    "hifigan": MelSettings(
        sample_rate=22050, n_fft=1024, win_length=1024, hop_length=256, n_mels=80, f_min=0, f_max=8000,
        pad_mode="reflect", whole_hops=True, magnitude_eps=1e-9,
    ),
    # github.com/gemelo-ai/vocos, feature_extractors.py and the vocos-mel-24khz configuration.
    "vocos": MelSettings(
        sample_rate=24000, n_fft=1024, win_length=1024, hop_length=256, n_mels=100, f_min=0, f_max=12000,
        mel_scale="htk", norm=None, floor=1e-7, framing="center", pad_mode="reflect",
    ),
    # github.com/openai/whisper, audio.py. Whisper pads the wave to 30 s first; that is the caller's.
    "whisper": MelSettings(
        sample_rate=16000, n_fft=400, win_length=400, hop_length=160, n_mels=80, f_min=0, f_max=8000,
        power=2, log="log10", floor=1e-10, framing="center", pad_mode="reflect", whole_hops=True,
        log_range=8, log_offset=4, log_scale=0.25,
    ),
    # A published low-latency pipeline: 50 ms window, 12.5 ms hop, librosa's numbers.
    "realtime": MelSettings(
        sample_rate=16000, n_fft=800, win_length=800, hop_length=200, n_mels=80, f_min=55, f_max=7600,
        log=None, framing="center",
    ),
}  # fmt: skip


def mel_filters(settings: MelSettings) -> NDArray[np.float64]:
    """Triangular mel filters over Hz, float64 `[n_mels, n_fft // 2 + 1]`.

    The triangles are the ones of librosa.filters.mel and torchaudio.functional.melscale_fbanks.

    Warns:
        UserWarning: Some filters fall between two Fourier bins and are all zero.
    """
    to_mel, to_hz = (_htk_mel, _htk_hz) if settings.mel_scale == "htk" else (_slaney_mel, _slaney_hz)
    low, high = to_mel(np.array([settings.f_min, settings.f_max]))
    edges = to_hz(np.linspace(low, high, settings.n_mels + 2))
    hz = np.fft.rfftfreq(settings.n_fft, 1 / settings.sample_rate)
    rising = (hz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hz) / (edges[2:] - edges[1:-1])[:, None]
    filters = np.maximum(0, np.minimum(rising, falling))
    if settings.norm == "slaney":
        filters *= (2 / (edges[2:] - edges[:-2]))[:, None]
    empty = np.flatnonzero(filters.max(axis=1) == 0)
    if empty.size:
        warnings.warn(
            f"mel bins {empty.tolist()} of {settings.n_mels} are always zero: their filters are narrower "
            f"than the {settings.sample_rate / settings.n_fft:g} Hz between Fourier bins; raise n_fft "
            f"(now {settings.n_fft}) or lower n_mels",
            UserWarning,
            stacklevel=3,
        )
    return np.asarray(filters)


def _htk_mel(hz: Any) -> Any:
    return 2595 * np.log10(1 + hz / 700)


def _htk_hz(mel: Any) -> Any:
    return 700 * (10 ** (mel / 2595) - 1)


# Slaney's Auditory Toolbox: 3 mel per 200 Hz up to 1 kHz, then 27 mel per factor of 6.4.
def _slaney_mel(hz: Any) -> Any:
    return np.where(hz < 1000, hz * 3 / 200, 15 + 27 * np.log(np.maximum(hz, 1000) / 1000) / np.log(6.4))


def _slaney_hz(mel: Any) -> Any:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((np.maximum(mel, 15) - 15) * np.log(6.4) / 27))


class MelSpectrogram(nn.Module):
    """Mel spectrogram of waves, single or in padded batches.

    Computes in float32, or in float64 after `.double()`: half-precision input, a `.half()` module and
    autocast change nothing, and the result has the computing type. Differentiable, also on silence.

    Args:
        settings: The settings, or the name of a preset in `PRESETS`.

    Attributes:
        settings: The resolved `MelSettings`.
        padding_value: What frames beyond a row's length hold: silence, so 0, or the floor on the log scale.

    Raises:
        InputError: Unknown preset.

    Shape:
        - wave: floating `[N]`, `[C, N]` or `[B, C, N]` with N ≥ 1.
        - lengths: integer `[B]` (or one per row of a 2-D wave): valid samples, 1 … N.
        - mel: `[M, F]`, `[C, M, F]` or `[B, M, F]` for mono batches, `[B, C, M, F]` for C > 1.

    >>> mel = MelSpectrogram("codec")(torch.zeros(2, 1, 16000))
    >>> mel.shape
    torch.Size([2, 80, 100])
    """

    window: Tensor
    filters: Tensor

    def __init__(self, settings: MelSettings | str = "codec") -> None:
        super().__init__()
        if isinstance(settings, str):
            if settings not in PRESETS:
                raise InputError(f"no mel preset {settings!r}; there are {', '.join(sorted(PRESETS))}")
            settings = PRESETS[settings]
        self.settings = settings
        n, pad = settings.win_length, settings.n_fft - settings.win_length
        hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(n) / n)
        self._window = np.pad(hann, (pad // 2, pad - pad // 2))
        self._filters = mel_filters(settings)
        for name in ("window", "filters"):
            self.register_buffer(name, torch.empty(0, dtype=torch.float32), persistent=False)
        self._fill_buffers(torch.device("cpu"), torch.float32)
        self.padding_value = float(self._scale(torch.zeros(1, 1, 1, dtype=torch.float64), None))

    def _fill_buffers(self, device: torch.device, dtype: torch.dtype) -> None:
        self.window = torch.from_numpy(self._window).to(device, dtype)
        self.filters = torch.from_numpy(self._filters).to(device, dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the buffers, from their float64 definition and never below float32."""
        before = self.window.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.window.dtype != before:
            wide = torch.float64 if self.window.dtype == torch.float64 else torch.float32
            self._fill_buffers(self.window.device, wide)
        return self

    def extra_repr(self) -> str:
        """The settings, for `print(module)`."""
        return repr(self.settings)

    def num_frames(self, num_samples: int) -> int:
        """Frames that a wave of `num_samples` samples gives."""
        return self.settings.num_frames(num_samples)

    def forward(self, wave: Tensor, lengths: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the mel spectrogram.

        Args:
            wave: Floating `[N]`, `[C, N]` or `[B, C, N]`, on the module's device.
            lengths: Valid samples of each row. Whatever lies beyond them, NaN too, is ignored.

        Returns:
            The mel; with `lengths`, also the mel's lengths (int64, on the wave's device). Each row is what it
            is alone; frames beyond its length hold `padding_value`.

        Raises:
            InputError: Integer or empty wave, wrong rank, lengths outside 1 … N.
        """
        rows, lengths = self._rows(wave, lengths)
        row_frames = None if lengths is None else self._num_frames_of(lengths)
        with torch.autocast(wave.device.type, enabled=False):
            mel = self._scale(self._mel(rows, lengths), row_frames)
        mel = mel.reshape(*wave.shape[:-1], *mel.shape[1:])
        if wave.ndim == 3 and wave.shape[1] == 1:
            mel = mel.squeeze(1)
        if row_frames is None:
            return mel
        return mel, row_frames[:: wave.shape[1]] if wave.ndim == 3 else row_frames

    def _rows(self, wave: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Checks the input; one row per channel, in the computing type, zero beyond each row's length."""
        if not wave.is_floating_point():
            raise InputError(f"wave has dtype {wave.dtype}; it must be floating, −1 … 1 (divide int16 by 32768)")
        if not 1 <= wave.ndim <= 3 or wave.numel() == 0:
            raise InputError(f"wave has shape {list(wave.shape)}; it must be [N], [C, N] or [B, C, N], not empty")
        rows = wave.reshape(-1, wave.shape[-1]).to(self.window.dtype)
        if lengths is None:
            return rows, None
        if wave.ndim == 1 or lengths.shape != wave.shape[:1] or lengths.is_floating_point():
            raise InputError(
                f"lengths has dtype {lengths.dtype} and shape {list(lengths.shape)} for a wave of shape "
                f"{list(wave.shape)}; it must be integer, one per row of a [B, C, N] or [C, N] wave"
            )
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > wave.shape[-1]:
            raise InputError(f"lengths are {low} … {high}; they must be 1 … {wave.shape[-1]}, the wave's samples")
        lengths = lengths.to(wave.device, torch.int64)
        if wave.ndim == 3:
            lengths = lengths.repeat_interleave(wave.shape[1])
        beyond = torch.arange(wave.shape[-1], device=wave.device) >= lengths[:, None]
        return rows.masked_fill(beyond, 0), lengths

    def _num_frames_of(self, lengths: Tensor) -> Tensor:
        s = self.settings
        if s.whole_hops:
            return lengths // s.hop_length
        if s.framing == "hop":
            return (lengths + s.hop_length - 1) // s.hop_length
        return (1 + (lengths + (2 * s.left_padding - s.n_fft)).div(s.hop_length, rounding_mode="floor")).clamp_min(0)

    def _mel(self, rows: Tensor, lengths: Tensor | None) -> Tensor:
        """`[R, N]` → linear mel `[R, M, F]`."""
        s = self.settings
        num_rows, num_frames = len(rows), self.num_frames(rows.shape[1])
        if num_frames == 0:
            return rows.new_zeros(num_rows, s.n_mels, 0)
        frames = self._pad(rows, lengths, num_frames).unfold(1, s.n_fft, s.hop_length)
        block = _CPU_BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
        if num_rows * num_frames <= block:
            return self._project(frames)
        # A block is a part of one row, or several whole short rows.
        some_rows = torch.split(frames, max(1, block // num_frames))
        return torch.cat(
            [torch.cat([self._project(part) for part in torch.split(rows, block, 1)], 2) for rows in some_rows]
        )

    def _project(self, frames: Tensor) -> Tensor:
        """`[r, f, n_fft]` → `[r, M, f]`."""
        s = self.settings
        spectrum = torch.fft.rfft(frames * self.window)
        # Several times faster than `spectrum.abs()` on a CPU.
        value = spectrum.real.square().add_(spectrum.imag.square())
        if s.magnitude_eps:
            value = value.add_(s.magnitude_eps)
        if s.power != 2:
            if value.requires_grad:
                # The root's slope at zero is infinite.
                value = value.clamp_min(1e-30)
            value = value.sqrt_() if s.power == 1 else value.pow_(s.power / 2)
        return torch.matmul(self.filters, value.mT)

    def _pad(self, rows: Tensor, lengths: Tensor | None, num_frames: int) -> Tensor:
        """Puts before and after each row what its frames see there: `[R, (F - 1) * hop_length + n_fft]`."""
        s = self.settings
        left = s.left_padding
        width = (num_frames - 1) * s.hop_length + s.n_fft
        right = width - left - rows.shape[1]
        if s.pad_mode == "constant" or s.framing == "valid":
            return F.pad(rows, (left, right))
        device = rows.device
        before = torch.arange(-left, 0, device=device)
        if lengths is None:
            after = torch.arange(max(right, 0), device=device) + rows.shape[1]
            n = torch.tensor(rows.shape[1], device=device)
            edges = [rows[:, _mirror(before, n)], rows, rows[:, _mirror(after, n)]]
            return torch.cat(edges, dim=1)[:, :width]
        # A row's last frame reaches less than n_fft - left samples beyond its end.
        after = torch.arange(s.n_fft - left, device=device) + lengths[:, None]
        head = rows.gather(1, _mirror(before.expand(len(rows), -1), lengths[:, None]))
        tail = rows.gather(1, _mirror(after, lengths[:, None]))
        padded = torch.cat([head, F.pad(rows, (0, max(s.n_fft - left, right)))], dim=1)
        return padded.scatter(1, after + left, tail)[:, :width]

    def _scale(self, mel: Tensor, row_frames: Tensor | None) -> Tensor:
        """Linear mel `[R, M, F]` → the settings' scale, with `padding_value` beyond each row's frames."""
        s = self.settings
        beyond = None
        if row_frames is not None:
            beyond = (torch.arange(mel.shape[2], device=mel.device) >= row_frames[:, None])[:, None]
        if s.log is not None:
            mel = mel.clamp_min(s.floor)
            mel = mel.log() if s.log == "natural" else mel.log10()
            if s.log == "db":
                mel = mel * (20 / s.power)
            if s.log_range is not None and mel.shape[2]:
                valid = mel if beyond is None else mel.masked_fill(beyond, -math.inf)
                mel = torch.maximum(mel, valid.amax(dim=(1, 2), keepdim=True) - s.log_range)
            if s.log_offset or s.log_scale != 1:
                mel = (mel + s.log_offset) * s.log_scale
        return mel if beyond is None else mel.masked_fill(beyond, self.padding_value)


def _mirror(index: Tensor, length: Tensor) -> Tensor:
    """Positions in `length` samples mirrored at both edges as often as needed, as numpy's "reflect"."""
    period = (2 * (length - 1)).clamp_min(1)
    index = index.remainder(period)
    return torch.where(index < length, index, period - index)
