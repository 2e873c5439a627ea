"""Conventional decoding against its peers; writes audio.md beside this file.

    python benchmarks/audio.py [--speech FILE_OR_FOLDER] [--music FILE_OR_FOLDER] [--longest 60] [--quick]

Files of 5 and 60 s (and 600 s with `--longest 600`) in each format are made from real speech (16 kHz, mono) and music
(44.1 kHz, stereo), the test clips in a loop by default. One thread, warm page cache; the calls of all peers alternate
within each round, and of each peer's rounds the lower quartile counts, which other jobs on the machine lengthen less
than the median: CPU seconds (of child processes too) for one thread, wall time where threads are compared. How far
peers with the same decoder lie apart is printed: smaller differences mean nothing. The peers that are measured are
those that are installed: pip install librosa miniaudio spdl-io av. Takes some five minutes on two quiet cores, half
with `--quick`.

Every peer gives a contiguous float32 [C, N], what a model takes: interleaved results are copied.

Correct means: the whole file has its number of samples and equals soundfile's decode (mp3 of two decoders differs by
less than 2e-4); excerpts are bit-equal to that slice of the same peer's whole decode.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray

from codec.audio import find_audio, read_audio, read_audio_batch, resample, submit_audio_batch, write_audio
from codec.audio.ffmpeg import torchcodec_decoder
from codec.errors import CodecError

# format: (suffix, subtype, written by write_audio)
FORMATS = ("wav", "flac", "mp3", "ogg", "opus", "m4a")
EXCERPT_SECONDS = 2
DRAWS = 4
TOLERANCE = 2e-4
Wave = NDArray[np.float32]
# (path, first sample, samples, rate) → [C, N]; None reads all.
Read = Callable[[str, int | None, int, int], Wave]


def ours(path: str, start: int | None, num: int, rate: int) -> Wave:
    if start is None:
        return read_audio(path)[0].numpy()
    return read_audio(path, start_sample=start, num_samples=num)[0].numpy()


def with_soundfile(path: str, start: int | None, num: int, rate: int) -> Wave:
    frames = {} if start is None else {"start": start, "frames": num}
    return soundfile.read(path, dtype="float32", always_2d=True, **frames)[0].T.copy()


def peers() -> dict[str, Read]:
    found: dict[str, Read] = {"codec": ours, "soundfile": with_soundfile}
    decoder = torchcodec_decoder()[0]
    if decoder is not None:
        import torchaudio

        def with_torchcodec(path: str, start: int | None, num: int, rate: int) -> Wave:
            audio = decoder(path)
            if start is None:
                return audio.get_all_samples().data.numpy()
            begin = audio.metadata.begin_stream_seconds or 0
            return audio.get_samples_played_in_range(begin + start / rate, begin + (start + num) / rate).data.numpy()

        def with_torchaudio(path: str, start: int | None, num: int, rate: int) -> Wave:
            frames = {} if start is None else {"frame_offset": start, "num_frames": num}
            return torchaudio.load(path, **frames)[0].numpy()

        found |= {"torchcodec": with_torchcodec, "torchaudio": with_torchaudio}
    try:
        import librosa

        def with_librosa(path: str, start: int | None, num: int, rate: int) -> Wave:
            span = {} if start is None else {"offset": start / rate, "duration": num / rate}
            return np.atleast_2d(librosa.load(path, sr=None, mono=False, **span)[0])

        found["librosa"] = with_librosa
    except ImportError:
        pass
    try:
        import spdl.io

        def with_spdl(path: str, start: int | None, num: int, rate: int) -> Wave:
            span = {} if start is None else {"timestamp": (start / rate, (start + num) / rate)}
            return spdl.io.to_numpy(spdl.io.load_audio(path, **span))

        found["spdl"] = with_spdl
    except ImportError:
        pass
    try:
        import miniaudio

        def with_miniaudio(path: str, start: int | None, num: int, rate: int) -> Wave:
            channels = miniaudio.get_file_info(path).nchannels
            options = {"output_format": miniaudio.SampleFormat.FLOAT32, "nchannels": channels, "sample_rate": rate}
            if start is None:
                samples = miniaudio.decode_file(path, **options).samples
                return np.frombuffer(samples, np.float32).reshape(-1, channels).T.copy()
            stream = miniaudio.stream_file(path, frames_to_read=num, seek_frame=start, **options)
            return np.frombuffer(next(stream), np.float32).reshape(-1, channels).T.copy()

        found["miniaudio"] = with_miniaudio
    except ImportError:
        pass
    try:
        import av

        def with_av(path: str, start: int | None, num: int, rate: int) -> Wave:
            with av.open(path) as container:
                resampler = av.AudioResampler(format="fltp")
                parts = [f.to_ndarray() for frame in container.decode(audio=0) for f in resampler.resample(frame)]
            wave = np.concatenate(parts, 1)
            return wave if start is None else wave[:, start : start + num]

        found["PyAV"] = with_av
    except ImportError:
        pass
    return found


def material(given: str | None, default: list[str], seconds: int, rate: int, channels: int) -> torch.Tensor:
    """`[C, N]`: real audio in a loop."""
    paths = [path for _, path in find_audio(given)] if given else [Path(__file__).parents[1] / name for name in default]
    parts, total = [], 0
    for path in paths:
        try:
            wave, _ = read_audio(path, sample_rate=rate)
        except CodecError:
            continue
        parts.append(wave.expand(channels, -1) if wave.shape[0] == 1 else wave[:channels])
        total += wave.shape[1]
        if total >= seconds * rate:
            break
    loop = torch.cat(parts, 1)
    return loop.repeat(1, -(-seconds * rate // loop.shape[1]))[:, : seconds * rate].clamp(-1, 1)


def make(folder: Path, name: str, wave: torch.Tensor, rate: int) -> dict[str, Path]:
    files = {}
    for format in FORMATS:
        path = folder / f"{name}.{format}"
        if format == "m4a":
            try:
                from torchcodec.encoders import AudioEncoder

                AudioEncoder(wave, sample_rate=rate).to_file(path)
            except (ImportError, OSError, RuntimeError):
                continue
        elif format == "opus":
            opus_rate = 48000 if rate == 44100 else rate
            write_audio(path, resample(wave, rate, opus_rate).clamp(-1, 1), opus_rate)
        else:
            write_audio(path, wave, rate)
        files[format] = path
    return files


def check(read: Read, path: str, reference: Wave, rate: int) -> tuple[str, str]:
    """What the whole decode and the excerpts are, in words."""
    try:
        whole = read(path, None, 0, rate)
    except Exception as error:
        return f"fails ({type(error).__name__})", "-"
    if whole.shape != reference.shape:
        difference = whole.shape[1] - reference.shape[1]
        verdict = f"{difference:+d} samples" if whole.shape[0] == reference.shape[0] else f"shape {whole.shape}"
    else:
        error = float(np.abs(whole - reference).max())
        verdict = "yes" if error <= TOLERANCE else f"off by {error:.1g}"
    draws = random.Random(0)
    num = min(whole.shape[1], EXCERPT_SECONDS * rate)
    wrong = 0
    for index in range(DRAWS):
        last = whole.shape[1] - num
        start = last - index if index < 2 and last > 2 else draws.randint(0, last)
        try:
            wrong += not np.array_equal(read(path, start, num, rate), whole[:, start : start + num])
        except Exception:
            wrong += 1
    return verdict, f"{DRAWS - wrong} of {DRAWS}"


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def lower_quartile(values: list[float]) -> float:
    return sorted(values)[len(values) // 4]


def interleaved(
    calls: dict[str, Callable[[], object]],
    seconds: float,
    clock: Callable[[], float],
    few: frozenset[str] = frozenset(),
) -> dict[str, list[float]]:
    """Seconds of each call in rounds of changing order until the time is used up.

    Short calls run twice and the second one counts: whoever came before has left the caches, and threads that still
    wind down, to the first. Those of `few` are in the first 3 rounds only.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    shuffle = random.Random(0)
    begin, rounds = time.perf_counter(), 0
    least = 3 if seconds < 0.5 else 9
    while (taken := time.perf_counter() - begin) < seconds or (rounds < least and taken < 4 * seconds) or rounds < 2:
        for name in shuffle.sample(list(calls), len(calls)):
            if name in few and rounds >= 3:
                continue
            for again in (False, True):
                start = clock()
                calls[name]()
                spent = clock() - start
                if again or spent > 0.1:
                    times[name].append(spent)
                    break
        rounds += 1
    return times


def read_all(read: Read, path: str, spans: list[tuple[int | None, int]], rate: int) -> None:
    for start, num in spans:
        read(path, start, num, rate)


def compare(files: dict[tuple[str, int, str], tuple[Path, int]], quick: bool) -> Iterator[str]:
    everyone = peers()
    best: dict[tuple[str, str], list[tuple[float, float]]] = {}
    twins: list[float] = []
    totals: dict[str, list[tuple[float, bool]]] = {}
    for kind in ("whole file", f"{EXCERPT_SECONDS} s excerpts"):
        yield f"\n## {kind[0].upper()}{kind[1:]}: CPU time of each peer / codec's (above 1: codec is faster)\n"
        yield "| audio | s | format | codec, × real time | " + " | ".join(n for n in everyone if n != "codec") + " |"
        yield "|---|---|---|---|" + "---|" * (len(everyone) - 1)
        for (name, seconds, format), (path, rate) in files.items():
            whole = kind == "whole file"
            info_rate = soundfile.info(path).samplerate if format != "m4a" else rate
            length = read_audio(path)[0].shape[1]
            num = EXCERPT_SECONDS * info_rate
            seeds = range(1 if seconds > 5 else 3)
            spans = [(random.Random(seed).randint(0, length - num), num) for seed in seeds]
            calls: dict[str, Callable[[], object]] = {}
            once: dict[str, float] = {}
            for peer, read in everyone.items():
                if format == "opus" and peer in ("torchcodec", "torchaudio", "spdl", "PyAV") and info_rate != 48000:
                    # FFmpeg decodes opus at 48 kHz only: three times the samples of a 16 kHz file.
                    continue
                call = partial(read_all, read, str(path), [(None, 0)] if whole else spans, info_rate)
                begin = cpu_seconds()
                try:
                    call()
                except Exception:
                    continue
                once[peer] = cpu_seconds() - begin
                calls[peer] = call
            # Who takes several times as long needs no exact number.
            few = frozenset(peer for peer, taken in once.items() if taken > max(5 * once["codec"], 0.01))
            limit = (0.1 if quick else 2.0) if seconds < 600 else 0.4
            rounds = interleaved(calls, limit, cpu_seconds, few)
            times = {peer: lower_quartile(values) for peer, values in rounds.items()}
            medians = {peer: statistics.median(values) for peer, values in rounds.items()}
            base = times["codec"]
            if whole and "torchaudio" in times:
                twins.append(times["torchaudio"] / times["torchcodec"])
            audio_seconds = seconds if whole else EXCERPT_SECONDS * len(spans)
            row = []
            for peer in everyone:
                if peer == "codec":
                    continue
                ratio = times[peer] / base if peer in times else None
                correct = verdicts.get((name, seconds, format, peer), ("yes", f"{DRAWS} of {DRAWS}"))[0 if whole else 1]
                good = correct in ("yes", f"{DRAWS} of {DRAWS}")
                row.append("-" if ratio is None else f"{ratio:.2f}{'' if good else ' ✗'}")
                if ratio is not None:
                    totals.setdefault(peer, []).append((ratio, good))
                    if good:
                        best.setdefault((kind, format), []).append((ratio, medians[peer] / medians["codec"]))
            yield f"| {name} | {seconds} | {format} | {audio_seconds / base:,.0f} | " + " | ".join(row) + " |"
    yield "\n✗: this peer's result is wrong there (above). -: cannot read it, or reads it at another rate.\n"
    yield "Geometric mean of the ratios over both tables, and over the rows where the peer is right: " + ", ".join(
        f"{peer} {statistics.geometric_mean(r for r, _ in ratios):.2f} and "
        f"{statistics.geometric_mean([r for r, good in ratios if good] or [1]):.2f}"
        for peer, ratios in totals.items()
    )
    yield "\nThe worst ratio to any correct peer (in brackets: that of the medians): " + ", ".join(
        "{} {} {:.2f} ({:.2f})".format(*key, *map(min, zip(*ratios, strict=True))) for key, ratios in best.items()
    )
    if twins:
        yield (
            "\nNoise: torchaudio and torchcodec run the same decoder; for whole files, the times of the first are "
            f"{min(twins):.2f} to {max(twins):.2f} of the second's, {statistics.median(twins):.2f} in the middle."
        )


verdicts: dict[tuple[str, int, str, str], tuple[str, str]] = {}


def correctness(files: dict[tuple[str, int, str], tuple[Path, int]]) -> Iterator[str]:
    everyone = peers()
    yield "\n## Correct: whole file; 2 s excerpts of 5 that are that slice of the peer's own whole decode\n"
    yield "| audio | s | format | " + " | ".join(everyone) + " |"
    yield "|---|---|---|" + "---|" * len(everyone)
    for (name, seconds, format), (path, rate) in files.items():
        if seconds != 60:
            continue
        if format == "m4a":
            reference, info_rate = read_audio(path)[0].numpy(), rate
        else:
            info_rate = soundfile.info(path).samplerate
            reference = with_soundfile(str(path), None, 0, info_rate)
        row = []
        for peer, read in everyone.items():
            verdict = check(read, str(path), reference, info_rate)
            for other in (5, 60, 600):
                verdicts[name, other, format, peer] = verdict
            row.append("; ".join(verdict))
        yield f"| {name} | {seconds} | {format} | " + " | ".join(row) + " |"


def first_readings(files: dict[tuple[str, int, str], tuple[Path, int]], folder: Path) -> Iterator[str]:
    yield "\n## The first reading of a file, 5 s, whole: CPU time of soundfile / codec's\n"
    yield "What was found out about a file is kept for the next reading; this is without."
    yield "\n| audio | " + " | ".join(FORMATS[:-1]) + " |"
    yield "|---|" + "---|" * (len(FORMATS) - 1)
    for name in ("speech", "music"):
        row = []
        for format in FORMATS[:-1]:
            path, rate = files[name, 5, format]
            times: dict[str, list[float]] = {"codec": [], "soundfile": []}
            for copy in range(15):
                for peer, read in (("codec", ours), ("soundfile", with_soundfile)):
                    fresh = folder / f"fresh_{peer}_{copy}.{format}"
                    shutil.copy(path, fresh)
                    begin = cpu_seconds()
                    read(str(fresh), None, 0, rate)
                    times[peer].append(cpu_seconds() - begin)
                    fresh.unlink()
            row.append(f"{lower_quartile(times['soundfile']) / lower_quartile(times['codec']):.2f}")
        yield f"| {name} | " + " | ".join(row) + " |"


def passes(files: dict[tuple[str, int, str], tuple[Path, int]]) -> Iterator[str]:
    yield "\n## Many excerpts of one file: CPU time\n"
    yield "| 20 excerpts of 2 s | one by one, ms | read_audio_batch, ms | ratio | same result |"
    yield "|---|---|---|---|---|"
    for format in ("opus", "m4a"):
        if ("music", 60, format) not in files:
            continue
        path, rate = files["music", 60, format]
        draws = random.Random(2)
        excerpts = [(str(path), draws.randint(0, 57 * rate), 2 * rate) for _ in range(20)]
        calls = {
            "alone": lambda e=excerpts: torch.stack([read_audio(p, start_sample=s, num_samples=n)[0] for p, s, n in e]),
            "batch": lambda e=excerpts: read_audio_batch(e, num_threads=1).wave,
        }
        same = torch.equal(calls["alone"](), calls["batch"]())
        times = interleaved(calls, 0, cpu_seconds)
        alone, batch = lower_quartile(times["alone"]), lower_quartile(times["batch"])
        yield (
            f"| 60 s {format}, stereo | {alone * 1e3:,.0f} | {batch * 1e3:,.0f} | {alone / batch:.1f} | "
            f"{'yes' if same else 'NO'} |"
        )


def threads(files: dict[tuple[str, int, str], tuple[Path, int]], folder: Path, quick: bool) -> Iterator[str]:
    yield "\n## Threads (wall time)\n"
    yield "| what | 1 thread, ms | 2 threads, ms | ratio | same result |"
    yield "|---|---|---|---|---|"
    draws = random.Random(1)
    paths = [path for (name, seconds, format), (path, _) in files.items() if name == "speech" and seconds == 60]
    paths = [path for path in paths if path.suffix != ".m4a"]
    excerpts = [(str(draws.choice(paths)), draws.randint(0, 50 * 16000), 32000) for _ in range(200)]
    calls = {n: lambda n=n: read_audio_batch(excerpts, num_threads=n) for n in (1, 2)}
    same = torch.equal(calls[1]().wave, calls[2]().wave)
    times = interleaved(calls, 0.4 if quick else 6, time.perf_counter)
    yield row_of("batch of 200 mixed 2 s excerpts (wav, flac, mp3, vorbis, opus)", times, same)
    futures = {
        n: lambda n=n: [f.result() for f in [submit_audio_batch(excerpts, num_threads=n) for _ in range(2)]]
        for n in (1, 2)
    }
    yield row_of(
        "two such batches in the background", interleaved(futures, 0.4 if quick else 4, time.perf_counter), True
    )
    longest = max(seconds for _, seconds, _ in files)
    hour = folder / "hour.flac"
    with soundfile.SoundFile(hour, "w", 44100, 2, "PCM_16") as file:
        block = soundfile.read(files["music", longest, "wav"][0], dtype="int16")[0]
        for _ in range((600 if quick else 3600) // longest):
            file.write(block)
    long = {"1-hour flac, 44.1 kHz stereo" if not quick else "10-minute flac": hour}
    long |= {f"{longest} s {format}": files["music", longest, format][0] for format in ("wav", "mp3", "ogg")}
    sums = [memoryview(block.tobytes()) for _ in range(2)]
    pool = ThreadPoolExecutor(2)
    machine: dict[int, Callable[[], object]] = {
        1: lambda: [zlib.crc32(part) for part in sums],
        2: lambda: list(pool.map(zlib.crc32, sums)),
    }
    yield row_of("the machine: two checksums (nothing shared)", interleaved(machine, 0.4, time.perf_counter), True)
    for name, path in long.items():
        calls = {n: lambda n=n, path=path: read_audio(path, num_threads=n, dtype=torch.int16) for n in (1, 2)}
        same = torch.equal(calls[1]()[0], calls[2]()[0])
        yield row_of(name, interleaved(calls, 0.4 if quick else 2, time.perf_counter), same)


def row_of(what: str, times: dict[int, list[float]], same: bool) -> str:
    first, second = lower_quartile(times[1]), lower_quartile(times[2])
    return f"| {what} | {first * 1e3:,.0f} | {second * 1e3:,.0f} | {first / second:.2f} | {'yes' if same else 'NO'} |"


def resampling() -> Iterator[str]:
    yield "\n## Resampling: error on tones and CPU time (10 s, mono)\n"
    yield "| rates | method | pass band, dB | stop band, dB | CPU ms | excerpt = slice |"
    yield "|---|---|---|---|---|---|"
    import torchaudio

    methods = {
        "resample (torchaudio, kaiser, width 64)": lambda w, a, b: resample(w, a, b),
        "torchaudio's default": lambda w, a, b: torchaudio.functional.resample(w, a, b),
    }
    try:
        import soxr

        for quality in ("HQ", "VHQ"):
            methods[f"soxr {quality}"] = lambda w, a, b, q=quality: torch.from_numpy(soxr.resample(w.numpy(), a, b, q))
    except ImportError:
        pass
    for rates in ((44100, 16000), (48000, 24000), (16000, 48000)):
        low = min(rates) / 2
        time_in, time_out = (torch.arange(10 * rate, dtype=torch.float64) / rate for rate in rates)
        inner = slice(rates[1], 9 * rates[1])
        tones = [(2 * torch.pi * f * low, f < 1) for f in (0.1, 0.5, 0.8, 1.1, 1.2)]
        wave = torch.sin(1000 * time_in).float()
        calls = {n: lambda m=m, w=wave, r=rates: m(w, *r) for n, m in methods.items()}
        times = {n: lower_quartile(t) for n, t in interleaved(calls, 0.4, cpu_seconds).items()}
        for name, method in methods.items():
            errors: dict[bool, float] = {True: 1e-12, False: 1e-12}
            for omega, kept in tones:
                if not kept and rates[1] > rates[0]:
                    continue
                got = method(torch.sin(omega * time_in).float(), *rates)[: len(time_out)].double()
                wanted = torch.sin(omega * time_out) if kept else 0
                errors[kept] = max(errors[kept], float((got - wanted)[inner].abs().max()))
            stop = f"{20 * np.log10(errors[False]):.0f}" if rates[1] < rates[0] else "-"
            exact = "yes" if name.startswith("resample") else "no" if "soxr" in name else "whole periods only"
            yield (
                f"| {rates[0]} → {rates[1]} | {name} | {20 * np.log10(errors[True]):.0f} | {stop} | "
                f"{times[name] * 1e3:.1f} | {exact} |"
            )


def heading() -> str:
    model = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    versions = []
    for name in (
        "numpy",
        "torch",
        "torchaudio",
        "torchcodec",
        "soundfile",
        "librosa",
        "spdl",
        "miniaudio",
        "av",
        "soxr",
    ):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return (
        f"# Conventional decoding: measured\n\nWritten by `python benchmarks/audio.py {' '.join(sys.argv[1:])}` on "
        f"{date.today()}: {model or platform.processor()}, {os.cpu_count()} shared cores, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, libsndfile {soundfile.__libsndfile_version__}, "
        f"{', '.join(versions)}. One thread unless said, warm page cache; other jobs ran beside it: trust ratios."
    )


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", help="file or folder of speech")
    parser.add_argument("--music", help="file or folder of music")
    parser.add_argument("--longest", type=int, default=60, choices=(60, 600), help="seconds of the longest files")
    parser.add_argument(
        "--quick", action="store_true", help="short rounds, ten minutes instead of the hour, and audio.md stays"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = Path("tests/data")
    clips = {
        "speech": [str(path) for path in sorted((Path(__file__).parents[1] / data).glob("speech_*.flac"))],
        "music": [str(path) for path in sorted((Path(__file__).parents[1] / data).glob("music_*.flac"))],
    }
    lines = [heading()]
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        files: dict[tuple[str, int, str], tuple[Path, int]] = {}
        for name, rate, channels, given in (
            ("speech", 16000, 1, options.speech),
            ("music", 44100, 2, options.music),
        ):
            for seconds in (5, 60, 600):
                if seconds > options.longest or (seconds == 600 and name == "speech"):
                    continue
                wave = material(given, clips[name], seconds, rate, channels)
                made = make(folder, f"{name}{seconds}", wave, rate)
                files |= {(name, seconds, format): (path, rate) for format, path in made.items()}
        for part in (
            correctness(files),
            compare(files, options.quick),
            first_readings(files, folder),
            passes(files),
            threads(files, folder, options.quick),
            resampling(),
        ):
            for line in part:
                print(line, flush=True)
                lines.append(line)
            print(f"({time.perf_counter() - begin:.0f} s)", file=sys.stderr)
    if not options.quick:
        Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
