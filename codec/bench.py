"""Codecs side by side on this machine and these files: speed, size and quality."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from codec.audio import find_audio, read_audio
from codec.audio.resampling import resample
from codec.errors import AudioFileError, InputError
from codec.features import MelSettings, MelSpectrogram
from codec.model import Codec, Codes

QUALITY_RATE = 16000
"""Quality is measured at this rate for all codecs, so that their numbers can be compared."""

SKIP_SECONDS = 0.25
"""Shorter files are left out: speech measures need about as much."""


@dataclass(frozen=True)
class BenchRow:
    """One codec's results.

    Attributes:
        name: The codec's name, with its codebooks where not all are used.
        sample_rate: Hz.
        bitrate_bps: Bits of codes per second of audio, measured.
        encode_speed: Audio seconds per second of encoding.
        decode_speed: Audio seconds per second of decoding.
        parameters: Weights.
        mel_distance: Mean difference of the log-mels (natural logarithm) at 16 kHz.
        si_sdr_db: Mean scale-invariant signal-to-distortion ratio at 16 kHz.
        pesq: Mean PESQ-WB, or None where `pesq` isn't installed or no file is speech to it.
        stoi: Mean STOI, or None where `pystoi` isn't installed.
        num_files: Files measured.
        audio_seconds: Their duration.
    """

    name: str
    sample_rate: int
    bitrate_bps: float
    encode_speed: float
    decode_speed: float
    parameters: int
    mel_distance: float
    si_sdr_db: float
    pesq: float | None
    stoi: float | None
    num_files: int
    audio_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def bench_codecs(
    codecs: Iterable[tuple[Codec, int | None]],
    inputs: Sequence[str | os.PathLike[str]],
    *,
    max_seconds: float = 10.0,
    max_files: int = 32,
    batch_size: int = 8,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[BenchRow]:
    """Encodes and decodes the files with each codec in turn.

    Speed is that of batches of like lengths, reading and resampling not counted, after one batch that isn't timed.

    Args:
        codecs: Codecs, each with the codebooks to use (None: all). An iterator loads them one at a time.
        inputs: Audio files and folders.
        max_seconds: Of each file, from its start.
        max_files: At most so many files, spread evenly over those found.
        batch_size: Files per batch.
        on_progress: Called with (codecs done, files measured of the present one).

    Raises:
        InputError: No audio, a number out of range, or no file that can be used.
    """
    if max_seconds < SKIP_SECONDS or max_files < 1 or batch_size < 1:
        raise InputError(
            f"max_seconds {max_seconds}, max_files {max_files}, batch_size {batch_size}; they must be at least "
            f"{SKIP_SECONDS}, 1 and 1"
        )
    found = find_audio(inputs)
    step = max(1, len(found) / max_files)
    paths = [found[int(n * step)][1] for n in range(min(max_files, len(found)))]
    rows: list[BenchRow] = []
    for codec, n_quantizers in codecs:
        rows.append(_bench(codec, n_quantizers, paths, max_seconds, batch_size, on_progress, len(rows)))
    return rows


def _bench(
    codec: Codec,
    n_quantizers: int | None,
    paths: Sequence[Any],
    max_seconds: float,
    batch_size: int,
    on_progress: Callable[[int, int], None] | None,
    number: int,
) -> BenchRow:
    spec = codec.spec
    waves = []
    for path in paths:
        with contextlib.suppress(AudioFileError):  # `codec encode` reports files; here the others do
            wave, _ = read_audio(path, sample_rate=spec.sample_rate)
            wave = wave[:, : int(max_seconds * spec.sample_rate)]
            if wave.shape[1] >= SKIP_SECONDS * spec.sample_rate:
                waves.append(_mixed(wave, spec.channels))
    if not waves:
        raise InputError(f"none of {len(paths)} files can be read and has {SKIP_SECONDS} s; give other files")
    waves.sort(key=lambda wave: wave.shape[1])
    batches = [waves[n : n + batch_size] for n in range(0, len(waves), batch_size)]
    encode_seconds = decode_seconds = 0.0
    num_codes = 0
    measures: list[tuple[float, float, float | None, float | None]] = []
    for index, batch in enumerate([batches[0], *batches]):
        lengths = torch.tensor([wave.shape[1] for wave in batch])
        padded = torch.zeros(len(batch), spec.channels, int(lengths.max()))
        for row, wave in zip(padded, batch, strict=True):
            row[:, : wave.shape[1]] = wave
        padded, lengths = padded.to(codec.device), lengths.to(codec.device)
        encoded, seconds = _timed(codec, partial(codec.encode, padded, lengths, n_quantizers=n_quantizers))
        decoded, later = _timed(codec, partial(codec.decode, encoded))
        if index == 0:
            continue  # warm-up
        assert isinstance(encoded, Codes) and isinstance(decoded, Tensor)
        encode_seconds += seconds
        decode_seconds += later
        num_codes += int(encoded.lengths.sum()) * encoded.codes.shape[1]
        for wave, copy in zip(batch, decoded.cpu(), strict=True):
            measures.append(_quality(wave, copy[:, : wave.shape[1]], spec.sample_rate))
            if on_progress is not None:
                on_progress(number, len(measures))
    audio = sum(wave.shape[1] for wave in waves) / spec.sample_rate
    parameters = getattr(codec, "parameters", lambda: ())
    return BenchRow(
        name=spec.name if n_quantizers in (None, spec.n_quantizers) else f"{spec.name}@{n_quantizers}",
        sample_rate=spec.sample_rate,
        bitrate_bps=num_codes * spec.bits_per_code / audio,
        encode_speed=audio / max(encode_seconds, 1e-9),
        decode_speed=audio / max(decode_seconds, 1e-9),
        parameters=sum(p.numel() for p in parameters()),
        mel_distance=_mean([m[0] for m in measures]) or 0.0,
        si_sdr_db=_mean([m[1] for m in measures]) or 0.0,
        pesq=_mean([m[2] for m in measures]),
        stoi=_mean([m[3] for m in measures]),
        num_files=len(waves),
        audio_seconds=audio,
    )


def _mixed(wave: Tensor, channels: int) -> Tensor:
    if wave.shape[0] == channels:
        return wave
    return wave.mean(0, keepdim=True).expand(channels, -1)


def _timed(codec: Codec, run: Callable[[], Any]) -> tuple[Any, float]:
    def settle() -> None:
        if codec.device.type == "cuda":
            torch.cuda.synchronize(codec.device)

    settle()
    started = time.perf_counter()
    result = run()
    settle()
    return result, time.perf_counter() - started


_MEL = MelSettings(
    sample_rate=QUALITY_RATE, n_fft=512, win_length=512, hop_length=160, n_mels=80, f_min=0.0, f_max=8000.0
)


def _quality(wave: Tensor, copy: Tensor, rate: int) -> tuple[float, float, float | None, float | None]:
    """Mel distance, SI-SDR in dB, PESQ and STOI of a copy `[C, N]` of a wave."""
    clean, other = (resample(x.mean(0, keepdim=True), rate, QUALITY_RATE) for x in (wave, copy))
    mel = MelSpectrogram(_MEL)
    distance = float((mel(clean[None]) - mel(other[None])).abs().mean())
    a, b = clean[0].double(), other[0].double()
    target = a * ((a @ b) / (a @ a).clamp(min=1e-12))
    ratio = (target @ target).clamp(min=1e-12) / ((b - target) @ (b - target)).clamp(min=1e-12)
    return distance, float(10 * ratio.log10()), _pesq(clean, other), _stoi(clean, other)


def _pesq(clean: Tensor, other: Tensor) -> float | None:
    try:
        from pesq import PesqError, pesq
    except ImportError:
        return None
    try:
        return float(pesq(QUALITY_RATE, clean[0].numpy(), other[0].numpy(), "wb"))
    except (PesqError, ValueError):  # no speech found, say
        return None


def _stoi(clean: Tensor, other: Tensor) -> float | None:
    try:
        from pystoi import stoi
    except ImportError:
        return None
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # its way to say that a clip is too short or silent
        try:
            return float(stoi(clean[0].numpy(), other[0].numpy(), QUALITY_RATE))
        except (RuntimeWarning, ValueError):
            return None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
