"""Conventional codecs at given bitrates, through FFmpeg: what people would use instead."""

from __future__ import annotations

import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from codec.audio.resampling import resample
from codec.errors import AudioFileError, InputError

RATES = {
    "opus": (8000, 12000, 16000, 24000, 48000),
    "mp3": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
    "codec2": (8000,),
}
ENCODERS = {"opus": "libopus", "mp3": "libmp3lame", "codec2": "libcodec2"}
CODEC2_BPS = (3200, 2400, 1600, 1400, 1300, 1200, 700)
COUNTED = {
    "opus": "Opus packets, without Ogg's pages and headers",
    "mp3": "MP3 frames, without tags",
    "codec2": "Codec2 frames, without a header",
}


def parse_against(text: str) -> list[tuple[str, int]]:
    """`opus:6,8,12` (kbps) or `codec2:3200` (bps) → (format, bits per second) of each.

    Raises:
        InputError: Another format, or a rate that isn't a number or that Codec2 doesn't have.
    """
    kind, colon, rates = text.partition(":")
    if kind not in ENCODERS or not colon or not rates:
        raise InputError(
            f"{text!r} is no codec to compare with; write opus:6,12 or mp3:16,32 (kbps), or codec2:3200 (bps)"
        )
    found = []
    for rate in rates.split(","):
        try:
            bps = round(float(rate) * (1 if kind == "codec2" else 1000))
        except ValueError:
            raise InputError(f"{text!r}: {rate!r} is not a bitrate; write numbers, such as {kind}:8,16") from None
        if kind == "codec2" and bps not in CODEC2_BPS:
            raise InputError(f"{text!r}: Codec2 has no {bps} bps; it has {', '.join(map(str, CODEC2_BPS))}")
        if bps < 500:
            raise InputError(f"{text!r}: {bps} bps is too little; opus and mp3 are given in kbps")
        found.append((kind, bps))
    return found


@functools.cache
def _encoders() -> str:
    return subprocess.run(["ffmpeg", "-hide_banner", "-encoders"], capture_output=True, text=True, check=False).stdout


def check_available(kind: str) -> None:
    """Raises `InputError` if FFmpeg, or its encoder of this format, is missing."""
    if shutil.which("ffmpeg") is None:
        raise InputError(f"{kind} is coded by ffmpeg, which isn't installed; apt-get install ffmpeg, or leave it out")
    if ENCODERS[kind] not in _encoders():
        raise InputError(
            f"this ffmpeg was built without {ENCODERS[kind]}, which {kind} needs; install a full build (Debian's and "
            f"conda-forge's have it), or leave {kind} out"
        )


def code_by_ffmpeg(wave: Tensor, sample_rate: int, kind: str, bps: int) -> tuple[Tensor, int, int]:
    """Encodes and decodes a wave.

    Args:
        wave: `[C, N]`; Codec2 is given its mix.
        sample_rate: Hz.
        kind: "opus", "mp3" or "codec2".
        bps: Bits per second.

    Returns:
        The decoded wave `[C, M]` at `sample_rate`, bytes of the coded audio alone, bytes of the file.

    Raises:
        AudioFileError: FFmpeg refuses.
    """
    if kind == "codec2":
        wave = wave.mean(0, keepdim=True)
    rate = _nearest_rate(kind, sample_rate)
    given = resample(wave, sample_rate, rate)
    raw = ["-f", "f32le", "-ar", str(rate), "-ac", str(wave.shape[0])]
    options = {
        "opus": ["-c:a", "libopus", "-b:a", str(bps), "-f", "opus"],
        "mp3": ["-c:a", "libmp3lame", "-b:a", str(bps), "-write_xing", "0", "-id3v2_version", "0", "-f", "mp3"],
        "codec2": ["-c:a", "libcodec2", "-mode", str(bps), "-f", "codec2raw"],
    }[kind]
    # MP3 and Codec2 decode at the rate they were coded at, Opus at any of its own.
    demuxer = ["-f", "codec2raw", "-mode", str(bps)] if kind == "codec2" else []
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "coded"))
        samples = given.clamp(-1, 1).T.contiguous().numpy().astype("<f4")
        _ffmpeg(kind, bps, [*raw, "-i", "-", *options, path], samples.tobytes())
        coded = Path(path).read_bytes()
        decoded = _ffmpeg(kind, bps, [*demuxer, "-i", path, *raw, "-"], b"")
    copy = torch.from_numpy(np.frombuffer(decoded, "<f4").reshape(-1, wave.shape[0]).T.copy())
    payload = opus_payload(coded) if kind == "opus" else len(coded)
    return resample(copy, rate, sample_rate), payload, len(coded)


def _nearest_rate(kind: str, sample_rate: int) -> int:
    """The rate a format is coded at: this one, or the next that loses nothing."""
    return next((rate for rate in RATES[kind] if rate >= sample_rate), RATES[kind][-1])


def _ffmpeg(kind: str, bps: int, arguments: list[str], data: bytes) -> bytes:
    command = ["ffmpeg", "-hide_banner", "-loglevel", "error", "-threads", "1", "-y", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        raise AudioFileError(f"ffmpeg can't code {kind} at {bps} bps: {text[-1] if text else 'no message'}")
    return done.stdout


def opus_payload(data: bytes) -> int:
    """Bytes of the audio packets of an Ogg Opus file: without pages, and without its two header packets."""
    position = total = packets = 0
    while data[position : position + 4] == b"OggS":
        count = data[position + 26]
        for size in data[position + 27 : position + 27 + count]:
            total += size if packets >= 2 else 0
            packets += size < 255
        position += 27 + count + sum(data[position + 27 : position + 27 + count])
    return total
