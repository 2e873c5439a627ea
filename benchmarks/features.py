"""Mel spectrograms beside librosa, torchaudio, torch.stft, nnAudio and kaldi-native-fbank; writes features.md.

    python benchmarks/features.py [--peers FOLDER]

FOLDER is where `pip install --target` put peers that the environment itself lacks. Each thread count runs in a process
of its own, the libraries in interleaved rounds; the median call counts. The column of errors is the largest
difference to the float64 definition in parts of its peak. About three minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchaudio

from codec.audio import read_audio
from codec.features import MFCC, PRESETS, Fbank, MelSpectrogram, Spectrogram

DATA = Path(__file__).parents[1] / "tests" / "data"
REALTIME = PRESETS["realtime"]
SIZES = {"33 ms": ((528,), 9, 100), "1 s": ((16000,), 7, 30), "32 × 10 s": ((32, 160000), 4, 1)}
"""Shape, rounds, calls per round."""
Call = Callable[[torch.Tensor], Any]


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.1


# --- the libraries, at the `realtime` settings


def libraries() -> dict[str, Call]:
    s = REALTIME
    ours = MelSpectrogram(s)
    calls: dict[str, Call] = {"codec": ours}
    mel = torchaudio.transforms.MelSpectrogram(
        s.sample_rate, s.n_fft, s.win_length, s.hop_length, s.f_min, s.f_max, n_mels=s.n_mels,
        power=1, mel_scale="slaney", norm="slaney", pad_mode="constant",
    )  # fmt: skip
    calls["torchaudio"] = mel
    window, filters = ours.window.clone(), ours.filters.clone()

    def stft(wave: torch.Tensor) -> torch.Tensor:
        spectrum = torch.stft(wave, s.n_fft, s.hop_length, window=window, pad_mode="constant", return_complex=True)
        return filters @ spectrum.abs()

    calls["torch.stft, cached window and filters"] = stft
    try:
        import librosa

        calls["librosa"] = lambda wave: librosa.feature.melspectrogram(
            y=wave.numpy(), sr=s.sample_rate, n_fft=s.n_fft, hop_length=s.hop_length, n_mels=s.n_mels, fmin=s.f_min,
            fmax=s.f_max, power=1, pad_mode="constant",
        )  # fmt: skip
    except ImportError:
        pass
    try:
        from nnAudio.features.mel import MelSpectrogram as NnMel

        nn = NnMel(
            s.sample_rate, s.n_fft, s.win_length, s.n_mels, s.hop_length, pad_mode="constant", power=1, htk=False,
            fmin=s.f_min, fmax=s.f_max, norm=1, verbose=False,
        )  # fmt: skip
        calls["nnAudio"] = lambda wave: nn(wave)
    except ImportError:
        pass
    try:
        import kaldi_native_fbank as knf

        options = knf.FbankOptions()
        options.frame_opts.dither = 0
        options.frame_opts.frame_length_ms, options.frame_opts.frame_shift_ms = 50, 12.5
        options.mel_opts.num_bins, options.mel_opts.low_freq, options.mel_opts.high_freq = 80, 55, 7600

        def fbank(wave: torch.Tensor) -> list[Any]:
            frames = []
            for row in wave.reshape(-1, wave.shape[-1]).numpy():
                online = knf.OnlineFbank(options)
                online.accept_waveform(16000, row)
                online.input_finished()
                frames.append([online.get_frame(i) for i in range(online.num_frames_ready)])
            return frames

        calls["kaldi-native-fbank (its own window and mel)"] = fbank
    except ImportError:
        pass
    return calls


def timed(call: Callable[[], Any], count: int) -> list[float]:
    call()
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


@torch.inference_mode()
def speeds() -> dict[str, Any]:
    """Median and 99th percentile seconds, and error, of each library and size."""
    calls = libraries()
    results: dict[str, Any] = {}
    for size, (shape, rounds, count) in SIZES.items():
        wave = noise(*shape)
        exact = MelSpectrogram(REALTIME).double()(wave.double()).numpy()
        cases = {name: lambda call=call, wave=wave: call(wave) for name, call in calls.items()}
        if size == "33 ms":
            stream = MelSpectrogram(REALTIME).stream()
            cases["codec, one chunk of a stream"] = lambda stream=stream, wave=wave: stream.push(wave)
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(rounds):
            for name, case in cases.items():
                slow = size == "32 × 10 s" and name.startswith(("nnAudio", "kaldi"))
                if not (slow and times[name]):
                    times[name] += timed(case, count)
        for name, seconds in times.items():
            error = None
            if name in calls and not name.startswith("kaldi"):
                result = np.asarray(calls[name](wave)).reshape(exact.shape)
                error = float(np.abs(result - exact).max() / exact.max())
            results.setdefault(size, {})[name] = [
                statistics.median(seconds), float(np.percentile(seconds, 99)), error
            ]  # fmt: skip
    return results


@torch.inference_mode()
def contended() -> dict[str, list[float]]:
    """33 ms calls while another process keeps as many threads as there are cores busy.

    Returns:
        Seconds: median, 99th percentile, 99th percentile of the calls during which the scheduler took the core away
        from the calling thread not once; the share of those it did take it in; and what other threads of this process
        computed per call, spinning included.
    """
    busy = subprocess.Popen([sys.executable, "-c", "import torch\nx = torch.randn(1500, 1500)\nwhile True: x @ x"])
    try:
        time.sleep(4)
        calls, wave = libraries(), noise(528)
        chunks = MelSpectrogram(REALTIME).stream()
        calls["codec, one chunk of a stream"] = chunks.push
        names = ("codec", "codec, one chunk of a stream", "torchaudio", "torch.stft, cached window and filters")
        wall: dict[str, list[float]] = {name: [] for name in names}
        taken: dict[str, list[bool]] = {name: [] for name in names}
        others = dict.fromkeys(names, 0.0)
        for _ in range(8):
            for name in names:
                calls[name](wave)
                time.sleep(0.3)  # Threads of the library before it may still be spinning.
                before = time.process_time() - time.thread_time()
                for _ in range(250):
                    switches = resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw
                    start = time.perf_counter()
                    calls[name](wave)
                    wall[name].append(time.perf_counter() - start)
                    taken[name].append(resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw > switches)
                others[name] += time.process_time() - time.thread_time() - before
    finally:
        busy.kill()
        busy.wait()
    results = {}
    for name, times in wall.items():
        kept = [seconds for seconds, away in zip(times, taken[name], strict=True) if not away]
        tails = [float(np.percentile(some, 99)) for some in (times, kept)]
        share = sum(taken[name]) / len(times)
        results[name] = [statistics.median(times), *tails, share, max(0.0, others[name] / len(times))]
    return results


# --- agreement with the references


def references() -> list[list[str]]:
    wave, _ = read_audio(DATA / "speech_ru_female_first-in-queue_16k.flac")
    wave = wave[0, :48000]
    rows: list[list[str]] = []

    def add(preset: str, reference: str, unit: str, ours: Any, theirs: Any) -> None:
        a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
        rows.append([preset, reference, f"{np.abs(a - b).max():.1e}", f"{np.ptp(b):.3g}", unit])

    def version(name: str) -> str:
        return f"{name} {importlib.metadata.version(name)}"

    kaldi = torchaudio.compliance.kaldi
    a16 = wave * 32768
    add("kaldi (16-bit scale)", version("torchaudio"), "ln", Fbank()(a16),
        kaldi.fbank(a16[None], num_mel_bins=80, dither=0).T)  # fmt: skip
    add("MFCC (kaldi, 23 bins)", version("torchaudio"), "ln", MFCC(replace(PRESETS["kaldi"], n_mels=23))(a16),
        kaldi.mfcc(a16[None], dither=0).T)  # fmt: skip
    add("torchaudio", version("torchaudio"), "power", MelSpectrogram("torchaudio")(wave),
        torchaudio.transforms.MelSpectrogram()(wave))  # fmt: skip
    add("Spectrogram", version("torchaudio"), "power", Spectrogram("torchaudio")(wave),
        torchaudio.transforms.Spectrogram()(wave))  # fmt: skip
    vocos = torchaudio.transforms.MelSpectrogram(24000, 1024, hop_length=256, n_mels=100, power=1)
    add("vocos", "its steps in torchaudio", "ln", MelSpectrogram("vocos")(wave), vocos(wave).clamp_min(1e-7).log())
    try:
        import librosa

        x = wave.numpy()
        add("librosa", version("librosa"), "power", MelSpectrogram("librosa")(wave),
            librosa.feature.melspectrogram(y=x, sr=22050))  # fmt: skip
        decibel = replace(PRESETS["librosa"], log="db", floor=1e-10, log_range=80)
        add("MFCC (librosa)", version("librosa"), "dB", MFCC(decibel, n_mfcc=20, lifter=0)(wave),
            librosa.feature.mfcc(y=x, sr=22050))  # fmt: skip
        filters = torch.from_numpy(librosa.filters.mel(sr=22050, n_fft=1024, n_mels=80, fmin=0, fmax=8000))
        hann = torch.hann_window(1024)
        tacotron = torch.stft(wave, 1024, 256, window=hann, return_complex=True).abs()
        add("tacotron", "its steps in torch, librosa", "ln", MelSpectrogram("tacotron")(wave),
            (filters @ tacotron).clamp_min(1e-5).log())  # fmt: skip
        padded = torch.nn.functional.pad(wave[None, None], (384, 384), "reflect")[0]
        hifigan = torch.stft(padded, 1024, 256, window=hann, center=False, return_complex=True).abs()
        add("hifigan", "its steps in torch, librosa", "ln", MelSpectrogram("hifigan")(wave),
            (filters @ (hifigan.square() + 1e-9).sqrt())[0].clamp_min(1e-5).log())  # fmt: skip
        padded = torch.nn.functional.pad(padded, (0, -(padded.shape[1] - 1024) % 256))
        encodec = torchaudio.transforms.MelSpectrogram(24000, 1024, hop_length=256, f_min=64, n_mels=64, center=False)
        add("encodec", "its steps in torchaudio", "log10", MelSpectrogram("encodec")(wave),
            (1e-5 + encodec(padded)).log10()[0])  # fmt: skip
    except ImportError:
        pass
    try:
        import kaldi_native_fbank as knf

        options = knf.FbankOptions()
        options.frame_opts.dither = 0
        options.mel_opts.num_bins = 80
        online = knf.OnlineFbank(options)
        online.accept_waveform(16000, a16.numpy())
        online.input_finished()
        frames = np.array([online.get_frame(i) for i in range(online.num_frames_ready)]).T
        add("kaldi (16-bit scale)", version("kaldi-native-fbank"), "ln", Fbank()(a16), frames)
    except ImportError:
        pass
    try:
        import whisper

        for bins, name in ((80, "whisper"), (128, "whisper_128")):
            add(name, version("openai-whisper"), "log10 / 4", MelSpectrogram(name)(wave),
                whisper.audio.log_mel_spectrogram(wave, bins))  # fmt: skip
    except ImportError:
        pass
    try:
        from transformers import ParakeetFeatureExtractor

        extractor = ParakeetFeatureExtractor(feature_size=80)
        theirs = extractor(wave.numpy(), sampling_rate=16000, return_tensors="pt")["input_features"][0].T
        ours = MelSpectrogram("nemo")(wave)
        add("nemo", version("transformers") + " (Parakeet)", "deviations", ours, theirs[:, : ours.shape[1]])
    except (ImportError, AttributeError):
        pass
    return rows


# --- pitch, tempo and rate in the filterbank against the waveform route


def changes() -> list[list[str]]:
    mel = MelSpectrogram("hifigan")
    rows = []

    def add(
        name: str, ours: torch.Tensor, theirs: torch.Tensor, cheap: Callable[[], Any], wave: Callable[[], Any]
    ) -> None:
        n = min(ours.shape[-1], theirs.shape[-1])
        difference = (ours[..., 3 : n - 3] - theirs[..., 3 : n - 3]).abs()
        signed = (ours[..., 3 : n - 3] - theirs[..., 3 : n - 3]).mean()
        ratio = statistics.median(timed(wave, 3)) / statistics.median(timed(cheap, 5))
        rows.append([name, f"{difference.mean():.4f}", f"{signed:+.4f}", f"{difference.max():.2f}", f"{ratio:.1f}"])

    high, rate = read_audio(DATA / "speech_ru_female_please-hold_44k.flac")
    high = high[:1, : 4 * rate]
    add("44.1 kHz → 22.05 kHz, speech", mel.transformed(high, sample_rate=rate)[0],
        mel(torchaudio.functional.resample(high, rate, 22050, lowpass_filter_width=64)),
        lambda: mel.transformed(high, sample_rate=rate),
        lambda: mel(torchaudio.functional.resample(high, rate, 22050, lowpass_filter_width=64)))  # fmt: skip
    music, music_rate = read_audio(DATA / "music_piano_stereo_48k.ogg")
    music = music[:1, : 4 * music_rate]
    add("48 kHz → 22.05 kHz, piano", mel.transformed(music, sample_rate=music_rate)[0],
        mel(torchaudio.functional.resample(music, music_rate, 22050, lowpass_filter_width=64)),
        lambda: mel.transformed(music, sample_rate=music_rate),
        lambda: mel(torchaudio.functional.resample(music, music_rate, 22050, lowpass_filter_width=64)))  # fmt: skip
    speech = torchaudio.functional.resample(high, rate, 22050)

    def stretched(speed: float) -> torch.Tensor:
        window = torch.hann_window(1024)
        spectrum = torch.stft(speech, 1024, 256, window=window, return_complex=True)
        spectrum = torchaudio.transforms.TimeStretch(256, 513)(spectrum, speed)
        return torch.istft(spectrum, 1024, 256, window=window, length=math.ceil(speech.shape[1] / speed))

    def repitched(ratio: Fraction) -> torch.Tensor:
        return torchaudio.functional.resample(stretched(float(1 / ratio)), ratio.numerator, ratio.denominator)

    for ratio in (Fraction(4, 5), Fraction(11, 10), Fraction(5, 4)):
        r = float(ratio)
        add(f"speed and pitch {r:g}, speech (resampling)", mel.transformed(speech, speed=r, pitch=r)[0],
            mel(torchaudio.functional.resample(speech, ratio.numerator, ratio.denominator, lowpass_filter_width=64)),
            lambda r=r: mel.transformed(speech, speed=r, pitch=r),
            lambda q=ratio: mel(torchaudio.functional.resample(speech, q.numerator, q.denominator)))  # fmt: skip
        add(f"speed {r:g}, speech (phase vocoder)", mel.transformed(speech, speed=r)[0], mel(stretched(r)),
            lambda r=r: mel.transformed(speech, speed=r),
            lambda r=r: mel(stretched(r)))  # fmt: skip
        add(f"pitch {r:g}, speech (phase vocoder, resampling)", mel.transformed(speech, pitch=r)[0],
            mel(repitched(ratio)),
            lambda r=r: mel.transformed(speech, pitch=r),
            lambda q=ratio: mel(repitched(q)))  # fmt: skip
    return rows


# --- the report


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds > 2e-3 else f"{seconds * 1e6:,.0f} µs"


def in_process(threads: int, task: str, peers: str | None) -> Any:
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--task", task, "--threads", str(threads)]
    command += ["--peers", peers] if peers else []
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers")
    parser.add_argument("--task", choices=["speeds", "contended", "references", "changes"], help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peers:
        # After the environment's own packages, so that codec runs with what it is installed with.
        sys.path.append(arguments.peers)
    if arguments.task:
        warnings.simplefilter("ignore")
        torch.set_num_threads(arguments.threads)
        print(json.dumps(globals()[arguments.task]()))
        return
    started, load = time.monotonic(), os.getloadavg()[0]
    sections = []
    alone = {}
    for threads in (1, 2):
        results = in_process(threads, "speeds", arguments.peers)
        for size, cases in results.items():
            ours = cases["codec"][0]
            if size == "33 ms" and threads == 1:
                alone = {name: times[0] for name, times in cases.items()}
            rows = [
                [name, duration(median), duration(tail), f"{median / ours:.2f}", f"{error:.0e}" if error else "–"]
                for name, (median, tail, error) in cases.items()
            ]
            heading = f"## {size}, {threads} thread{'s' * (threads > 1)}\n\n"
            sections.append(heading + table(["library", "median", "p99", "time / codec", "max error / peak"], rows))
    rows = [
        [
            name, duration(alone[name]), duration(median), duration(tail), f"{share:.1%}", duration(kept),
            f"{kept / alone[name]:.1f}", duration(others),
        ]
        for name, (median, tail, kept, share, others) in in_process(2, "contended", arguments.peers).items()
    ]  # fmt: skip
    head = [
        "library", "median alone, 1 thread", "median", "p99", "calls the core was taken from", "p99 of the others",
        "the same / median alone", "other threads' CPU time per call",
    ]  # fmt: skip
    sections.append(
        "## 33 ms, 2 threads, while another process keeps every core busy\n\n"
        + table(head, rows)
        + "\nA call whose core the scheduler gives to the other process waits for its return, milliseconds, whatever "
        "the library; those calls are counted apart. What is left of the tail is the library's own: waiting for "
        "threads of its pool, and caches that the other process filled.\n"
    )
    head = ["features", "reference", "max difference", "range of values", "unit"]
    sections.append(
        "## Agreement with the references (3 s of speech)\n\n"
        + table(head, in_process(1, "references", arguments.peers))
        + "\nLogarithms magnify float32 rounding where a bin is far below its frame's peak, in the reference as here; "
        "before the logarithm every preset is within 4.2e-7 of the peak of its float64 definition "
        "(`tests/test_features.py`).\n"
    )
    head = ["change", "mean difference, ln", "signed", "max", "time, waveform route / codec"]
    sections.append(
        "## Pitch, tempo and rate in the filterbank against the waveform route (hifigan preset)\n\n"
        + table(head, in_process(1, "changes", arguments.peers))
        + "\nResampling is exact, so those rows are the filterbank's own error; a phase vocoder approximates too. With "
        "magnitude mels, noise shifted by a ratio r comes out ln(r) / 2 lower in the filterbank. Synthetic voices with "
        "a known answer are in `tests/test_features_warp.py`.\n"
    )
    versions = []
    for name in ("torch", "torchaudio", "numpy", "librosa", "nnAudio", "kaldi-native-fbank"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} absent")
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].split(":")[1].strip()
    Path(__file__).with_suffix(".md").write_text(
        "# Features: measured\n\n"
        f"Written by `python benchmarks/features.py` on {date.today()} in {time.monotonic() - started:.0f} s: "
        f"{processor}, {os.cpu_count()} shared cores, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {', '.join(versions)}. The `realtime` settings at 16 kHz (50 ms window, "
        "12.5 ms hop, 80 slaney bins, magnitude) unless said otherwise; interleaved rounds, median call. Other "
        f"jobs ran beside it (load average {load:.1f} at the start): trust ratios. Not measured on a GPU.\n\n"
        + "\n".join(sections)
    )


if __name__ == "__main__":
    main()
