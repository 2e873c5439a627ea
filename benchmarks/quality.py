"""Speech quality of a checkpoint beside Opus on the same clips, written as Markdown.

    python benchmarks/quality.py --codec speech_16k --speech corpora/speech/test -o benchmarks/quality.md

Needs `pip install 'codec[eval]'` and Debian's opus-tools (opusenc, opusdec). One row per codec and folder: PESQ-WB,
STOI, SI-SDR (dB) and log-mel L1 (natural log, the codec's own mel settings), means over the clips.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from pesq import PesqError, pesq
from pystoi import stoi

from codec import load_codec, read_audio, write_audio
from codec.audio import find_audio
from codec.features import MelSettings, MelSpectrogram

RATE = 16000
Coder = Callable[[torch.Tensor], tuple[torch.Tensor, float]]  # wave [1, N] -> decoded wave [1, N], bits


def clips(folder: Path, count: int, low: float, high: float) -> list[torch.Tensor]:
    """`count` clips of `low` to `high` seconds, evenly spread over the folder's files in order of name."""
    waves = [read_audio(path, sample_rate=RATE, mono=True)[0] for _, path in find_audio([folder])]
    fitting = [wave for wave in waves if low <= wave.shape[1] / RATE <= high]
    if len(fitting) < count:
        raise SystemExit(f"{folder}: {len(fitting)} clips of {low}-{high} s; {count} wanted")
    return [fitting[round(i * (len(fitting) - 1) / (count - 1))] for i in range(count)]


def neural(codec, n_quantizers: int) -> Coder:
    def code(wave):
        codes = codec.encode(wave[None], n_quantizers=n_quantizers)
        bits = codes.codes.numel() * codec.spec.bits_per_code
        return codec.decode(codes)[0], bits

    return code


def opus(kbps: int) -> Coder:
    def code(wave):
        with tempfile.TemporaryDirectory() as folder:
            plain, packed, decoded = (str(Path(folder, name)) for name in ("in.wav", "x.opus", "out.wav"))
            write_audio(plain, wave, RATE)
            subprocess.run(["opusenc", "--quiet", "--bitrate", str(kbps), plain, packed], check=True)
            subprocess.run(["opusdec", "--quiet", "--rate", str(RATE), packed, decoded], check=True)
            return read_audio(decoded)[0][:, : wave.shape[1]], Path(packed).stat().st_size * 8

    return code


def si_sdr(reference: np.ndarray, decoded: np.ndarray) -> float:
    scale = decoded @ reference / max(reference @ reference, 1e-12)
    error = decoded - scale * reference
    return 10 * np.log10(max((scale * reference) @ (scale * reference), 1e-12) / max(error @ error, 1e-12))


def score(wave: torch.Tensor, decoded: torch.Tensor, mel: MelSpectrogram) -> list[float]:
    assert decoded.shape == wave.shape
    reference, ours = wave[0].numpy(), decoded[0].numpy()
    try:
        perceptual = pesq(RATE, reference, ours, "wb")
    except PesqError:
        perceptual = float("nan")
    distance = (mel(decoded) - mel(wave)).abs().mean().item()
    return [perceptual, stoi(reference, ours, RATE), si_sdr(reference, ours), distance]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="speech_16k")
    parser.add_argument("--speech", type=Path, required=True, help="folder with one folder per voice")
    parser.add_argument("--clips", type=int, default=24, help="per voice")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    codec = load_codec(arguments.codec)
    mel = MelSpectrogram(MelSettings.from_dict(codec.config.mel))
    total = codec.spec.n_quantizers
    coders = {f"{codec.spec.name}, {k} codebooks": neural(codec, k) for k in (total, total // 2, total // 4) if k} | {
        f"Opus {kbps} kbps": opus(kbps) for kbps in (6, 8, 12)
    }
    lines = [
        f"# Speech quality: {codec.spec.name} (weights {codec.spec.weights_hash[:12]})",
        "",
        f"{datetime.date.today()}, {platform.machine()}, torch {torch.__version__}; {arguments.clips} clips, 2 to 8 s, "
        "per voice, evenly spread; means. Opus: opusenc of opus-tools, its default settings; kbps as measured, "
        "container included (its headers weigh on short clips).",
        "",
        "| voice | codec | kbps | PESQ-WB | STOI | SI-SDR, dB | log-mel L1 |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder in sorted(p for p in arguments.speech.iterdir() if p.is_dir()):
        waves = clips(folder, arguments.clips, 2, 8)
        seconds = sum(wave.shape[1] for wave in waves) / RATE
        for name, coder in coders.items():
            with ThreadPoolExecutor(2) as pool:
                decoded = list(pool.map(coder, waves))
            scores = np.array([score(wave, out, mel) for wave, (out, _) in zip(waves, decoded, strict=True)])
            missing = int(np.isnan(scores[:, 0]).sum())
            means = np.nanmean(scores, 0)
            rate = sum(bits for _, bits in decoded) / seconds / 1000
            note = f" ({missing} without PESQ)" if missing else ""
            cells = [folder.name, name + note, f"{rate:.2f}", f"{means[0]:.2f}", f"{means[1]:.3f}"]
            cells += [f"{means[2]:.1f}", f"{means[3]:.3f}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
