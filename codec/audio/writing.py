"""Wave → audio file: whole or not at all, and never clipped in silence."""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import AudioFileError, InputError

# format → libsndfile's container, and the subtypes it may have, the default first.
_FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "wav": ("WAV", ("PCM_16", "PCM_24", "PCM_32", "FLOAT")),
    "flac": ("FLAC", ("PCM_16", "PCM_24")),
    "ogg": ("OGG", ("VORBIS",)),
    "opus": ("OGG", ("OPUS",)),
    "mp3": ("MP3", ("MPEG_LAYER_III",)),
}
_SUFFIXES = {
    ".wav": "wav",
    ".wave": "wav",
    ".flac": "flac",
    ".ogg": "ogg",
    ".oga": "ogg",
    ".opus": "opus",
    ".mp3": "mp3",
}
_SAMPLE_RATES = {
    "opus": (8000, 12000, 16000, 24000, 48000),
    "mp3": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
}
_MAX_CHANNELS = {"flac": 8, "mp3": 2}
_BITS = {"PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
# libsndfile's vorbis encoder overruns its stack on large pieces.
_SAMPLES_AT_ONCE = 1 << 14


@dataclass(frozen=True)
class WriteReport:
    """What was written.

    Attributes:
        path: The file.
        num_samples: Samples per channel.
        num_clipped: Values beyond −1 … 1, of all channels, that were clipped to it; 0 for "FLOAT".
        peak: Greatest magnitude before clipping.
    """

    path: Path
    num_samples: int
    num_clipped: int
    peak: float


def write_audio(
    path: str | os.PathLike[str],
    wave: Tensor,
    sample_rate: int,
    *,
    format: str | None = None,
    subtype: str | None = None,
    force: bool = False,
) -> WriteReport:
    """Writes a wave to a file under a temporary name, then renames it.

    16-bit waves that were read come back bit-equal: 1/32768 is one step.

    Args:
        path: The file; its folder must exist.
        wave: `[C, N]` or `[N]`, floating in −1 … 1 or int16, on any device.
        sample_rate: Hz.
        format: "wav", "flac", "ogg" (vorbis), "opus" or "mp3"; by the path's suffix if None.
        subtype: For wav "PCM_16" (default), "PCM_24", "PCM_32" or "FLOAT"; for flac "PCM_16" or "PCM_24".
        force: Replace a file that exists.

    Returns:
        What was written, and how many values were clipped.

    Raises:
        InputError: A bad wave, NaN or infinite samples, a rate, format or channel count that doesn't fit.
        AudioFileError: The file exists, or can't be written.
    """
    path = Path(path)
    format, container, subtype = _checked_format(path, format, subtype)
    channels = _check(wave, sample_rate, format)
    if path.is_dir():
        raise AudioFileError(f"{path}: is a folder; give a file name in it")
    if path.exists() and not force:
        raise AudioFileError(f"{path}: exists; give another name, or force=True to replace it")
    samples, num_clipped, peak = _stored(wave.detach().cpu().reshape(channels, -1), subtype)
    # The name keeps the suffix out: a folder scan never takes an unfinished file for audio.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with soundfile.SoundFile(temporary, "w", sample_rate, channels, subtype, format=container) as file:
            for start in range(0, len(samples), _SAMPLES_AT_ONCE):
                file.write(samples[start : start + _SAMPLES_AT_ONCE])
        os.replace(temporary, path)
    except (soundfile.SoundFileError, OSError, RuntimeError) as error:
        if not path.parent.is_dir():
            raise AudioFileError(f"{path}: there is no folder {path.parent}; make it first") from error
        raise AudioFileError(f"{path}: cannot be written as {container}/{subtype} ({error})") from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    return WriteReport(path, len(samples), num_clipped, peak)


def _check(wave: Tensor, sample_rate: int, format: str) -> int:
    """The wave's channels, if it can be written."""
    if not isinstance(wave, Tensor) or wave.ndim not in (1, 2) or wave.numel() == 0:
        shape = list(wave.shape) if isinstance(wave, Tensor) else type(wave).__name__
        raise InputError(f"wave is {shape}; it must be a tensor [C, N] or [N] of at least one sample")
    if not wave.is_floating_point() and wave.dtype != torch.int16:
        raise InputError(f"wave has dtype {wave.dtype}; it must be floating, −1 … 1, or int16")
    channels = 1 if wave.ndim == 1 else wave.shape[0]
    if channels > _MAX_CHANNELS.get(format, 255):
        raise InputError(f"wave has {channels} channels ([C, N]); {format} holds {_MAX_CHANNELS.get(format, 255)}")
    rates = _SAMPLE_RATES.get(format)
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, int) or not 1 <= sample_rate < 2**31:
        raise InputError(f"sample_rate is {sample_rate!r}; it must be a positive integer, in Hz")
    if rates and sample_rate not in rates:
        raise InputError(f"{format} has no sample rate {sample_rate}; resample to one of {rates} Hz")
    if format == "wav" and wave.numel() * 4 >= 2**32 - 2**16:
        raise InputError(f"wave has {wave.numel()} values; a wav file ends at 4 GiB, write flac or several files")
    return channels


def _checked_format(path: Path, format: str | None, subtype: str | None) -> tuple[str, str, str]:
    if format is None:
        format = _SUFFIXES.get(path.suffix.lower())
        if format is None:
            raise InputError(f"{path}: no format has the suffix {path.suffix!r}; use {', '.join(_SUFFIXES)} or format=")
    if format not in _FORMATS:
        raise InputError(f"format is {format!r}; it must be one of {', '.join(_FORMATS)}")
    container, subtypes = _FORMATS[format]
    if subtype is not None and subtype not in subtypes:
        raise InputError(f"{format} has no subtype {subtype!r}; it must be one of {', '.join(subtypes)}")
    return format, container, subtype or subtypes[0]


def _stored(wave: Tensor, subtype: str) -> tuple[NDArray[Any], int, float]:
    """`[C, N]` → `[N, C]` as libsndfile is to store it, the clipped values, the peak."""
    if wave.dtype == torch.int16:
        peak = float(wave.to(torch.int32).abs().max()) / 32768
        if subtype == "PCM_16":
            return wave.T.contiguous().numpy(), 0, peak
        wave = wave.to(torch.float32) / 32768
    wave = wave.to(torch.float64 if subtype in ("PCM_24", "PCM_32") else torch.float32)
    if not wave.isfinite().all():
        bad = int((~wave.isfinite()).sum())
        raise InputError(
            f"{bad} of {wave.numel()} values of the wave are NaN or infinite; torch.nan_to_num would mend it"
        )
    peak = float(wave.abs().max())
    if subtype == "FLOAT":
        return wave.T.contiguous().numpy(), 0, peak
    num_clipped = int((wave.abs() > 1).sum()) if peak > 1 else 0
    bits = _BITS.get(subtype)
    if bits is None:
        return wave.clamp(-1, 1).T.contiguous().numpy(), num_clipped, peak
    # libsndfile scales by 2^15 − 1 when it writes and by 2^15 when it reads, so it gets integers.
    full = 2 ** (bits - 1)
    quantized = (wave * full).round().clamp(-full, full - 1)
    if bits == 16:
        return quantized.to(torch.int16).T.contiguous().numpy(), num_clipped, peak
    return (quantized.to(torch.int32) << (32 - bits)).T.contiguous().numpy(), num_clipped, peak
