"""Every choice between a wave and its mel spectrogram, and the published combinations."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from codec.errors import InputError

_CHOICES: dict[str, tuple[str | None, ...]] = {
    "window": ("hann", "hann_symmetric", "povey"),
    "mel_scale": ("htk", "slaney", "kaldi"),
    "norm": (None, "slaney"),
    "log": (None, "natural", "log10", "db"),
    "framing": ("center", "hop", "valid", "snip"),
    "pad_mode": ("constant", "reflect", "reflect_zero"),
    "normalize": (None, "per_feature"),
}


@dataclass(frozen=True, kw_only=True)
class MelSettings:
    """Everything that determines a mel spectrogram. The defaults are the house codec's choices.

    Attributes:
        sample_rate: Hz.
        n_fft: Length of the Fourier transform in samples; at least `win_length`.
        win_length: Samples of the window, centred in the `n_fft` samples of a frame.
        hop_length: Samples from one frame to the next.
        n_mels: Mel bins, M.
        f_min: Hz, lower edge of the lowest filter.
        f_max: Hz, upper edge of the highest filter; at most `sample_rate / 2`.
        power: Exponent of the magnitude: 1 is magnitude, 2 is power.
        mel_scale: "slaney" (linear below 1 kHz; librosa's default), "htk" (torchaudio's default), or "kaldi" (the
            HTK scale, with filters that are triangles over mel instead of Hz).
        norm: None (filters peak at 1) or "slaney" (each filter has unit area over Hz).
        log: None, "natural", "log10", or "db" (`20 / power * log10`).
        floor: Mel values are raised to at least this before the logarithm. Unused without one.
        framing: Which samples frame j sees, F frames of N samples.
            "center": around sample `j * hop_length`; F = 1 + N // hop_length (for even `n_fft`).
            "hop": around the middle of hop j; F = ceil(N / hop_length). Lines up with codec frames.
            "valid": `n_fft` from sample `j * hop_length` on, no padding; F = 1 + (N - n_fft) // hop_length, or 0.
            "snip": `win_length` from sample `j * hop_length` on, no padding (Kaldi's snip_edges);
                F = 1 + (N - win_length) // hop_length, or 0.
        pad_mode: Samples outside the wave are zeros ("constant"), mirrored at its edges ("reflect"), or mirrored
            for as many samples as "center" or "hop" has before the wave, then zeros ("reflect_zero", audiocraft's).
        whole_hops: Keep only the first N // hop_length frames, as Whisper and HiFi-GAN do.
        magnitude_eps: Added to re² + im² (HiFi-GAN has 1e-9).
        log_range: Raise log values to at least the row's maximum minus this, or None: Whisper's 8, or the top_db
            of librosa with log "db".
        log_offset: Added to log values, after `log_range`.
        log_scale: Multiplies log values, after `log_offset`.
        window: "hann" (periodic), "hann_symmetric", or "povey" (Kaldi's: symmetric Hann to the power of 0.85).
        preemphasis: p of `x[n] - p * x[n - 1]` over the whole wave, whose first sample stays as it is.
        frame_preemphasis: The same within each frame, whose first sample is multiplied by 1 - p (Kaldi).
        remove_dc: Subtract each frame's mean, before `frame_preemphasis` (Kaldi).
        add_floor: Add the floor to mel values, instead of raising them to it (NeMo, audiocraft).
        normalize: None, or "per_feature": each bin of a row minus its mean over the row's frames, divided by its
            standard deviation (with F - 1) plus 1e-5 (NeMo). The last step.
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
    window: str = "hann"
    preemphasis: float = 0.0
    frame_preemphasis: float = 0.0
    remove_dc: bool = False
    add_floor: bool = False
    normalize: str | None = None

    def __post_init__(self) -> None:
        self._check_types()
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
        for name in ("preemphasis", "frame_preemphasis"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name):g}; it must be at least 0 and below 1, usually 0.97")
        if self.window != "hann" and self.win_length < 2:
            raise InputError(f"win_length is {self.win_length}; a symmetric window such as {self.window!r} needs 2")
        if self.framing == "hop" and self.n_fft < self.hop_length:
            raise InputError(
                f"n_fft {self.n_fft} is shorter than hop_length {self.hop_length}: framing 'hop' would skip "
                "samples; raise n_fft or lower hop_length"
            )
        if self.mel_scale == "kaldi" and self.norm is not None:
            raise InputError("mel_scale 'kaldi' has triangles over mel, which have no area over Hz; set norm=None")
        if self.framing in ("valid", "snip") and self.whole_hops:
            raise InputError(
                f"whole_hops needs padding, which framing {self.framing!r} has not; use framing 'center' or 'hop'"
            )

    def _check_types(self) -> None:
        for name in ("sample_rate", "n_fft", "win_length", "hop_length", "n_mels"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise InputError(f"MelSettings.{name} is {value!r}; it must be a positive integer")
        numbers = ["f_min", "f_max", "power", "floor", "magnitude_eps", "log_offset", "log_scale"]
        numbers += ["preemphasis", "frame_preemphasis"]
        for name in numbers + (["log_range"] if self.log_range is not None else []):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"MelSettings.{name} is {value!r}; it must be a finite number")
            object.__setattr__(self, name, float(value))
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise InputError(f"MelSettings.{name} is {getattr(self, name)!r}; it must be one of {choices}")
        for name in ("whole_hops", "remove_dc", "add_floor"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"MelSettings.{name} is {getattr(self, name)!r}; it must be True or False")

    @property
    def left_padding(self) -> int:
        """Samples before the wave's first one that frame 0 reaches: its `n_fft` samples, window or not."""
        if self.framing == "center":
            return self.n_fft // 2
        return (self.n_fft - self.hop_length) // 2 if self.framing == "hop" else 0

    @property
    def window_start(self) -> int:
        """The sample, negative before the wave, where frame 0's window starts."""
        return 0 if self.framing == "snip" else (self.n_fft - self.win_length) // 2 - self.left_padding

    @property
    def mirrors(self) -> bool:
        """Whether frames see mirrored samples at the wave's edges."""
        return self.pad_mode != "constant" and self.framing in ("center", "hop")

    @property
    def is_framewise(self) -> bool:
        """Whether a frame depends on its own samples alone, not on the rest of the row: what a stream needs."""
        return self.log_range is None and self.normalize is None

    def num_frames(self, num_samples: int) -> int:
        """Frames that a wave of `num_samples` samples gives."""
        if self.whole_hops:
            return num_samples // self.hop_length
        if self.framing == "hop":
            return (num_samples + self.hop_length - 1) // self.hop_length
        seen = self.win_length if self.framing == "snip" else self.n_fft
        return max(0, 1 + (num_samples + 2 * self.left_padding - seen) // self.hop_length)

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


_WHISPER = MelSettings(
    sample_rate=16000, n_fft=400, win_length=400, hop_length=160, n_mels=80, f_min=0, f_max=8000,
    power=2, log="log10", floor=1e-10, framing="center", pad_mode="reflect", whole_hops=True,
    log_range=8, log_offset=4, log_scale=0.25,
)  # fmt: skip

PRESETS: dict[str, MelSettings] = {
    # The house codec: one mel frame per 10 ms, lined up with the codec's frames.
    "codec": MelSettings(
        sample_rate=16000, n_fft=512, win_length=512, hop_length=160, n_mels=80, f_min=0, f_max=8000,
    ),
    # librosa.feature.melspectrogram's defaults.
    "librosa": MelSettings(
        sample_rate=22050, n_fft=2048, win_length=2048, hop_length=512, n_mels=128, f_min=0, f_max=11025,
        power=2, log=None, framing="center",
    ),
    # torchaudio.transforms.MelSpectrogram's defaults. (Four of its filters are empty, as in torchaudio.)
    "torchaudio": MelSettings(
        sample_rate=16000, n_fft=400, win_length=400, hop_length=200, n_mels=128, f_min=0, f_max=8000,
        power=2, mel_scale="htk", norm=None, log=None, framing="center", pad_mode="reflect",
    ),
    # Kaldi's compute-fbank-feats with --dither=0 --num-mel-bins=80. Kaldi reads 16-bit integers: multiply the wave
    # by 32768 for its numbers; torchaudio.compliance.kaldi and kaldi-native-fbank take either.
    "kaldi": MelSettings(
        sample_rate=16000, n_fft=512, win_length=400, hop_length=160, n_mels=80, f_min=20, f_max=8000,
        power=2, mel_scale="kaldi", norm=None, floor=2**-23, framing="snip", window="povey",
        frame_preemphasis=0.97, remove_dc=True,
    ),
    # github.com/NVIDIA/tacotron2, layers.py and hparams.py.
    "tacotron": MelSettings(
        sample_rate=22050, n_fft=1024, win_length=1024, hop_length=256, n_mels=80, f_min=0, f_max=8000,
        framing="center", pad_mode="reflect",
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
    # The mel distance of EnCodec's training: github.com/facebookresearch/audiocraft, losses/specloss.py and
    # config/solver/compression/default.yaml, at 24 kHz.
    "encodec": MelSettings(
        sample_rate=24000, n_fft=1024, win_length=1024, hop_length=256, n_mels=64, f_min=64, f_max=12000,
        power=2, mel_scale="htk", norm=None, log="log10", add_floor=True, pad_mode="reflect_zero",
    ),
    # github.com/openai/whisper, audio.py. Whisper pads the wave to 30 s first; that is the caller's.
    "whisper": _WHISPER,
    # The same with the 128 bins of large-v3.
    "whisper_128": replace(_WHISPER, n_mels=128),
    # github.com/NVIDIA/NeMo, AudioToMelSpectrogramPreprocessor as its Conformer, Parakeet and Canary models set it
    # (version 2: zeros at the edges), without dither, and without padding to a multiple of frames.
    "nemo": MelSettings(
        sample_rate=16000, n_fft=512, win_length=400, hop_length=160, n_mels=80, f_min=0, f_max=8000,
        power=2, floor=2**-24, framing="center", whole_hops=True, window="hann_symmetric", preemphasis=0.97,
        add_floor=True, normalize="per_feature",
    ),
    # A published low-latency pipeline: 50 ms window, 12.5 ms hop, librosa's numbers.
    "realtime": MelSettings(
        sample_rate=16000, n_fft=800, win_length=800, hop_length=200, n_mels=80, f_min=55, f_max=7600,
        log=None, framing="center",
    ),
}  # fmt: skip


def resolve(settings: MelSettings | str) -> MelSettings:
    """The settings, or those of a preset.

    Raises:
        InputError: Unknown preset.
    """
    if isinstance(settings, MelSettings):
        return settings
    if settings not in PRESETS:
        raise InputError(f"no mel preset {settings!r}; there are {', '.join(sorted(PRESETS))}")
    return PRESETS[settings]
