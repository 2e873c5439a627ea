"""Encoding corpora: the pipeline against the encoder alone, memory, resuming, and loops around the peers' models.

    python benchmarks/encode.py [--quick] [-o benchmarks/encode.md] [--only throughput,memory,resume,peers]

Peers are built at their published sizes with random weights, by `benchmarks/adapters.py` (needs transformers).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import soundfile
import torch

REPOSITORY = Path(__file__).parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "benchmarks"), str(REPOSITORY / "tests")]

from codec import load_codec  # noqa: E402
from codec.audio import read_audio  # noqa: E402
from codec.encode import encode_corpus  # noqa: E402
from codec.encode.pipeline import CPU_BATCH_SECONDS  # noqa: E402
from codec.model import Codec, Codes  # noqa: E402
from codec.spec import CodecSpec  # noqa: E402
from codec.tokens import TokenStore, TokenWriter  # noqa: E402

DATA = REPOSITORY / "tests" / "data"
RATE = 16000


class CheapCodec(Codec):
    """As good as no work: what is left is the pipeline's own time and memory."""

    @property
    def spec(self):
        return CodecSpec("cheap", "0" * 64, RATE, 320, 1, 8, 1024, (2, 2), (2, 2))

    @property
    def device(self):
        return torch.device("cpu")

    @property
    def mel_hop_length(self):
        return 160

    @property
    def mel_floor(self):
        return -11.0

    def encode(self, wave, lengths=None, *, n_quantizers=None):
        wave = wave[None] if wave.ndim == 2 else wave
        lengths = torch.full((len(wave),), wave.shape[2]) if lengths is None else lengths
        frames = -(-lengths // 320)
        first = wave[:, 0, ::320].abs().mul(1023).clamp(0, 1023).long()
        return Codes(first[:, None].expand(-1, 8, -1).contiguous(), frames, lengths)

    def decode(self, codes, lengths=None):
        raise NotImplementedError

    decode_mel = decode


def speech():
    """The shipped speech, joined: 16 kHz."""
    clips = sorted(DATA.glob("speech_*"))
    return torch.cat([read_audio(clip, sample_rate=RATE, mono=True)[0] for clip in clips], 1)[0].numpy()


def short_files(folder, count):
    """WAV files of 0.5 to 4 s of real speech."""
    wave, rng = speech(), np.random.default_rng(0)
    for number in range(count):
        length = int(rng.uniform(0.5, 4) * RATE)
        start = int(rng.integers(0, len(wave) - length))
        path = folder / f"{number // 1000:03d}" / f"{number:06d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(path, wave[start : start + length], RATE, "PCM_16")


def long_file(path, seconds, kind, subtype="PCM_16"):
    """Real speech over and over."""
    wave = (speech() * 32767).astype(np.int16)
    left = int(seconds * RATE)
    with soundfile.SoundFile(path, "w", RATE, 1, subtype, format=kind) as file:
        while left:
            part = wave[:left]
            file.write(part)
            left -= len(part)


def used():
    """CPU and wall seconds so far."""
    return time.process_time(), time.perf_counter()


def alone(codec, waves, batch_seconds=CPU_BATCH_SECONDS):
    """CPU and wall seconds that the encoder takes for waves that are in memory, sorted, in batches."""
    waves = sorted(waves, key=len)
    started = used()
    batch = []
    for wave in [*waves, None]:
        if batch and (wave is None or len(wave) * (len(batch) + 1) > batch_seconds * RATE):
            lengths = torch.tensor([len(row) for row in batch])
            padded = torch.zeros(len(batch), 1, int(lengths.max()))
            for target, row in zip(padded, batch, strict=True):
                target[0, : len(row)] = torch.from_numpy(row)
            codec.encode(padded, lengths).codes.numpy()
            batch = []
        batch.append(wave)
    stopped = used()
    return stopped[0] - started[0], stopped[1] - started[1]


def throughput(quick):
    codec = load_codec("speech_16k")
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        count = 500 if quick else 10_000
        short_files(top / "short", count)
        (top / "long").mkdir()
        for number in range(2 if quick else 4):
            long_file(top / "long" / f"{number}.flac", 120 if quick else 600, "FLAC")
        codec.encode(torch.zeros(1, 1, 16 * RATE))
        for name, title in (("short", f"{count:,} WAV files of 0.5 to 4 s"), ("long", "FLAC files of 10 min")):
            files = sorted((top / name).rglob("*.*"))
            if name == "long":
                title = f"{len(files)} FLAC files of {2 if quick else 10} min"
            # A part of the corpus each, in turn, so that what else the machine does hits both alike.
            cpu, wall, own_cpu, own_wall, seconds = 0.0, 0.0, 0.0, 0.0, 0.0
            parts = [files[n::4] for n in range(min(4, len(files)))]
            for number, part in enumerate(parts):
                waves = [soundfile.read(path, dtype="float32")[0] for path in part]
                pieces = [wave[at : at + 60 * RATE] for wave in waves for at in range(0, len(wave), 60 * RATE)]
                a, b = alone(codec, pieces)
                own_cpu, own_wall = own_cpu + a, own_wall + b
                started = used()
                report = encode_corpus(codec, part, top / f"{name}-{number}.ctok")
                stopped = used()
                cpu, wall = cpu + stopped[0] - started[0], wall + stopped[1] - started[1]
                assert not report.failures
                seconds += report.audio_seconds
                same(codec, waves[0], TokenStore(top / f"{name}-{number}.ctok"), part[0].name)
            rows.append(
                f"| {title} ({seconds / 3600:.2f} h) | {seconds / own_wall:.0f} | {seconds / wall:.0f} | "
                f"{wall / own_wall - 1:+.1%} | {cpu / own_cpu - 1:+.1%} | {report.bottleneck} |"
            )
    return [
        "## The pipeline and the encoder alone",
        "",
        "`speech_16k`, one process, all cores. Alone: the same waves, in memory, all sorted by length, in batches of "
        f"{CPU_BATCH_SECONDS:.0f} s (the pipeline's size on a CPU; long ones in pieces of 60 s). Both over quarters of "
        "the corpus in turn; the codes of one file in each quarter are those that it gives alone.",
        "",
        "| corpus | encoder alone, × real time | pipeline | overhead, wall | overhead, CPU time | bottleneck |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def same(codec, wave, store, key):
    """The stored codes of a file are those that it gives alone, but for ties."""
    theirs = codec.encode(torch.from_numpy(wave)[None]).codes[0].numpy()
    differing = (store.read(key) != theirs).any(0).mean()
    assert differing < 1e-3, f"{key}: {differing:.2%} of the frames differ"


def child(arguments):
    """A run in a process of its own: its report, with the peak of its memory."""
    command = [sys.executable, __file__, "--child", json.dumps(arguments)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def run_child(arguments):
    codec = CheapCodec() if arguments["codec"] == "cheap" else load_codec(arguments["codec"])
    before = peak_mb()
    cpu = time.process_time()
    report = encode_corpus(codec, arguments["inputs"], arguments["store"])
    cpu = time.process_time() - cpu
    assert not report.failures, report.failures[0]
    print(json.dumps({**report.to_dict(), "peak_mb": peak_mb(), "before_mb": before, "cpu_s": cpu}))


def peak_mb():
    """This process's own; `getrusage` would count what its parent had when it was started."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


ITEM_SECONDS = 3.6  # so that 1,000 items are an hour


def memory(quick):
    rows = []

    def measured(what, codec, source, store):
        report = child({"codec": codec, "inputs": [str(source)], "store": str(store)})
        store.unlink()
        speed = report["audio_seconds"] / report["elapsed_seconds"]
        peak, before = report["peak_mb"], report["before_mb"]
        rows.append(f"| {what} | {codec} | {before:.0f} | {peak:.0f} | {peak - before:.0f} | {speed:,.0f} |")

    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        for hours in (1 / 60, 1, 10) if quick else (1 / 60, 1, 10, 100):
            long_file(top / "long.w64", hours * 3600, "W64")
            name = f"{hours:g} h" if hours >= 1 else "1 min"
            for codec in ("speech_16k", "cheap") if hours <= (0.1 if quick else 1) else ("cheap",):
                measured(f"one item of {name}", codec, top / "long.w64", top / "x.ctok")
            (top / "long.w64").unlink()
        wave = speech()[: int(ITEM_SECONDS * RATE)]
        for hours in (1, 5) if quick else (1, 10, 100):
            for number in range(1000 * hours):
                path = top / "short" / f"{number // 1000:03d}" / f"{number:06d}.wav"
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists():
                    continue
                if number % 30_000 == 0:  # a file has at most so many names
                    soundfile.write(path, wave, RATE, "PCM_16")
                    first = path
                else:
                    os.link(first, path)
            measured(f"{1000 * hours:,} items of {ITEM_SECONDS} s: {hours} h", "cheap", top / "short", top / "y.ctok")
    return [
        "## Peak memory",
        "",
        "Of a process that encodes one W64 file (the shipped speech over and over, 16 kHz), or a folder of WAV files. "
        "`cheap`: a codec that does next to nothing, so that 100 h take minutes; the pipeline around it is the same.",
        "",
        "| corpus | codec | before encoding, MB | peak, MB | more | × real time |",
        "|---|---|---|---|---|---|",
        *rows,
    ]


def resuming(quick):
    count = 50_000 if quick else 1_000_000
    codec = CheapCodec()
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        started = time.perf_counter()
        codes = np.zeros((8, 1), np.int64)
        store = top / "store.ctok"
        with TokenWriter(store, codec.spec) as writer, (top / "store.ctok.sources.jsonl").open("w") as sources:
            sources.write('{"channels":"mix","loudness_lufs":null}\n')
            for number in range(count):
                key = f"{number // 1000:04d}/{number:07d}.wav"
                if number % 1000 == 0:
                    (top / "corpus" / key).parent.mkdir(parents=True)
                descriptor = os.open(top / "corpus" / key, os.O_CREAT | os.O_WRONLY)
                os.utime(descriptor, ns=(10**18, 10**18))
                os.close(descriptor)
                writer.add(key, codes, num_samples=320)
                sources.write(f'["{key}",0,{10**18},1]\n')
        made = time.perf_counter() - started
        report = child({"codec": "cheap", "inputs": [str(top / "corpus")], "store": str(store)})
    assert (report["num_items"], report["num_skipped"], report["num_changed"]) == (0, count, 0)
    return [
        "## Resuming a finished store",
        "",
        f"{count:,} items: {report['elapsed_seconds']:.1f} s ({report['cpu_s']:.1f} s of CPU time) to list the folder, "
        "compare every file's size and time, and find that nothing is to be done; peak "
        f"{report['peak_mb']:.0f} MB. (The files are empty, each item has one frame; making both took {made:.0f} s.)",
    ]


def peers(quick):
    import adapters

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        short_files(top / "files", 16 if quick else 32)
        files = sorted((top / "files").rglob("*.wav"))
        for name in ("encodec_24khz", "mimi", "dac_16khz"):
            try:
                model, codec = adapters.built(name, top)
            except KeyError:
                rows.append(f"| {name} | not built here | - | - |")
                continue
            theirs, ours, seconds = [0.0, 0.0], [0.0, 0.0], 0.0
            with torch.no_grad():
                loop(adapters, name, model, codec.spec.sample_rate, files[:1], top)
                encode_corpus(codec, files[:1], top / f"warm-{name}.ctok")
                # Halves in turn, so that what else the machine does hits both alike.
                for number in range(2):
                    a = used()
                    loop(adapters, name, model, codec.spec.sample_rate, files[number::2], top)
                    b = used()
                    report = encode_corpus(codec, files[number::2], top / f"{name}-{number}.ctok")
                    c = used()
                    assert not report.failures, report.failures[0]
                    seconds += report.audio_seconds
                    for clock in (0, 1):  # CPU, wall
                        theirs[clock] += b[clock] - a[clock]
                        ours[clock] += c[clock] - b[clock]
            rows.append(
                f"| {name} | {seconds / theirs[0]:.1f} | {seconds / ours[0]:.1f} | {theirs[0] / ours[0]:.2f} | "
                f"{theirs[1] / ours[1]:.2f} |"
            )
    return [
        "## Loops around the peers' models",
        "",
        "Published sizes, random weights, the same in both columns. Loop: each file is read, resampled by torchaudio, "
        "encoded by the model of `transformers` by itself and saved with `np.save`, as the peers' own scripts do. "
        f"codec: `encode_corpus` with its adapter. {len(files)} WAV files of 0.5 to 4 s. torch has as many threads in "
        f"both ({torch.get_num_threads()}). × real time is audio per CPU time.",
        "",
        "| model | loop, × real time | codec | codec / loop, CPU time | wall |",
        "|---|---|---|---|---|",
        *rows,
    ]


def loop(adapters, name, model, rate, files, top):
    """What a user writes around a model."""
    import torchaudio

    for path in files:
        wave, native = soundfile.read(path, dtype="float32", always_2d=True)
        wave = torchaudio.functional.resample(torch.from_numpy(wave.T).mean(0, keepdim=True), native, rate)
        codes = adapters.their_encode(name, model, wave[None])
        codes = getattr(codes, "audio_codes", codes)
        np.save(top / "codes.npy", codes.numpy())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="throughput,memory,resume,peers", help="sections of the report to renew")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--child")
    options = parser.parse_args()
    if options.child:
        run_child(json.loads(options.child))
        return
    if unknown := set(options.only.split(",")) - set(SECTIONS):
        parser.error(f"--only has {', '.join(unknown)}; the sections are {', '.join(SECTIONS)}")
    cores = len(os.sched_getaffinity(0))
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1] for line in facts if "model name" in line), "?").strip()
    quick = " --quick" if options.quick else ""
    head = [
        "# Encoding corpora: measured",
        "",
        f"Written by `python benchmarks/encode.py{quick} -o benchmarks/encode.md`: {model}, {cores} shared cores, "
        f"{platform.system()}, Python {platform.python_version()}, torch {torch.__version__} with "
        f"{torch.get_num_threads()} threads. Each section says when it was measured, and the load that other work "
        "put on the machine just before.",
    ]
    written = sections_of(options.output)
    for name in options.only.split(","):
        load, started = os.getloadavg()[0], time.perf_counter()
        title, *rest = SECTIONS[name](options.quick)
        took = time.perf_counter() - started
        written[title] = [*rest, "", f"({date.today()}, load {load:.1f}, took {took:.0f} s{quick}.)"]
        print(title, *written[title], sep="\n", flush=True)
        if options.output:
            parts = [line for title, lines in written.items() for line in ["", title, *lines]]
            options.output.write_text("\n".join([*head, *parts]) + "\n")


def sections_of(path):
    """The sections that a report has already: lines by title."""
    found = {}
    for line in path.read_text().splitlines() if path and path.exists() else ():
        if line.startswith("## "):
            found[line] = []
        elif found:
            found[list(found)[-1]].append(line)
    return {title: "\n".join(lines).rstrip().splitlines() for title, lines in found.items()}


SECTIONS = {"throughput": throughput, "memory": memory, "resume": resuming, "peers": peers}


if __name__ == "__main__":
    main()
