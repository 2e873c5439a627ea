"""Random excerpts against other samplers; writes excerpts.md beside this file.

    python benchmarks/excerpts.py [--items 1000000] [--folder FOLDER]

Start-up and memory for many items, draws without reading, batches of 32 × 2 s from WAV files and tokens, memory of a
worker over many draws. One process, one core's worth of threads, no workers but for the last. Rounds are interleaved,
the median counts; CPU seconds of this process, and wall time beside them. Takes about four minutes. The peers that are
measured are those that are installed: pip install lhotse pescador webdataset spdl descript-audiotools.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset

from codec.excerpts import RandomExcerpts, Uniform
from codec.sources import AudioFiles, Source, Tokens
from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter

torch.set_num_threads(1)
RATE, SECONDS, BATCH = 16000, 2, 32
SIZE = RATE * SECONDS
FILES, ROUNDS, BATCHES = 120, 7, 12
PEERS = ("lhotse", "pescador", "webdataset", "spdl", "descript-audiotools")

Next = Callable[[], Any]  # one batch: (float32 [32, 1, 32000], [(file, start)] or None)


class Many(Source):
    """Items of 10 s to 3 h at 48 kHz."""

    def __init__(self, items: int) -> None:
        self._keys = [f"speaker{i % 1000}/{i}.flac" for i in range(items)]
        self._lengths = np.random.default_rng(0).integers(10, 3 * 3600, items) * 48000

    def keys(self) -> list[str]:
        return self._keys

    def rate(self) -> Fraction:
        return Fraction(48000)

    def lengths(self) -> Any:
        return self._lengths

    def get(self, excerpts: Any) -> Any:
        return [excerpt.start for excerpt in excerpts]


# --- start-up, each in its own process


def startup_ours(items: int) -> Callable[[], Any]:
    source = Many(items)
    return lambda: RandomExcerpts({"x": source}, 2, batch_size=BATCH, seed=0)[10**6]


def startup_manifest(items: int) -> Callable[[], Any]:
    path = Path(tempfile.gettempdir()) / f"excerpts-manifest-{os.getpid()}.tsv"
    source = Many(items)
    with path.open("w") as file:
        file.write("key\tpath\tsample_rate\tnum_samples\n")
        for key, length in zip(source.keys(), source.lengths().tolist(), strict=True):
            file.write(f"{key}\t/data/corpora/speech/{key}\t48000\t{length}\n")

    def start() -> Any:
        draws = RandomExcerpts({"x": AudioFiles(path)}, 2, batch_size=BATCH, seed=0)
        items, _, _ = draws.draw_range(10**6 * BATCH, BATCH)
        first = [draws.keys[item] for item in items.tolist()]
        path.unlink()
        return draws, first

    return start


def startup_shuffle(items: int) -> Callable[[], Any]:
    source = Many(items)
    options: dict[str, Any] = {"items": "shuffle", "positions": "grid"}
    return lambda: RandomExcerpts({"x": source}, 2, batch_size=BATCH, seed=0, **options)[10**6]


def startup_enumerated(items: int) -> Callable[[], Any]:
    lengths = Many(items).lengths()

    def start() -> Any:
        chunks = [(item, start) for item, total in enumerate(lengths) for start in range(0, total - 95999, 96000)]
        return next(iter(torch.utils.data.RandomSampler(chunks))), len(chunks)

    return start


def startup_lhotse(items: int) -> Callable[[], Any]:
    from lhotse import CutSet, Recording
    from lhotse.dataset import DynamicCutSampler

    source = Many(items)

    def start() -> Any:
        cuts = [
            Recording(key, [], 48000, int(n), int(n) / 48000).to_cut()
            for key, n in zip(source.keys(), source.lengths(), strict=True)
        ]
        sampler = DynamicCutSampler(CutSet.from_cuts(cuts).repeat(), max_cuts=BATCH, shuffle=True, seed=0)
        return next(iter(sampler))

    return start


STARTUPS: dict[str, tuple[Callable[[int], Callable[[], Any]], int]] = {
    "codec, by duration": (startup_ours, 1),
    "codec, by duration, of a manifest of paths, reading it included": (startup_manifest, 1),
    "codec, shuffle × grid": (startup_shuffle, 1),
    "map-style Dataset that lists its 2 s chunks, RandomSampler": (startup_enumerated, 1000),
    "lhotse CutSet + DynamicCutSampler": (startup_lhotse, 50),
}


def run_startup(name: str, items: int) -> None:
    make, share = STARTUPS[name]
    start = make(items // share)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before, began = peak_megabytes(), time.process_time()
    kept = start()
    seconds = time.process_time() - began
    print(seconds, peak_megabytes() - before)
    del kept


def peak_megabytes() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def startup_rows(items: int) -> Iterator[str]:
    for name, (_, share) in STARTUPS.items():
        command = [sys.executable, __file__, "--items", str(items), "--startup", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(name, "left out:", done.stderr.strip().splitlines()[-1])
            continue
        seconds, megabytes = (float(number) * share for number in done.stdout.split())
        measured = f"{items:,}" if share == 1 else f"{items // share:,}, × {share}"
        yield f"| {name} | {measured} | {seconds:,.2f} | {megabytes:,.0f} |"


# --- draws


def draw_rows(items: int) -> Iterator[str]:
    source = Many(items)
    for options in (
        {},
        {"items": "uniform"},
        {"items": "shuffle"},
        {"items": "uniform", "positions": "grid"},
        {"items": "shuffle", "positions": "grid"},
        {"positions": "grid"},
        {"unique_items_per_batch": True},
    ):
        loader = RandomExcerpts({"x": source}, 2, batch_size=BATCH, seed=0, **options)
        rates = []
        for per_call in (BATCH, 1024):
            loader.draw_range(0, per_call)
            seconds = []
            for turn in range(5):
                began = time.process_time()
                for call in range(8000 // per_call):
                    loader.draw_range((turn * 10**6 + call) * per_call, per_call)
                seconds.append((time.process_time() - began) / (8000 // per_call * per_call))
            rates.append(1 / statistics.median(seconds))
        seconds = []
        for turn in range(5):
            began = time.process_time()
            for call in range(50):
                loader.draw_range((turn * 50 + call) * 7919 * BATCH, BATCH)
            seconds.append((time.process_time() - began) / (50 * BATCH))
        rates.append(1 / statistics.median(seconds))
        name = ", ".join(f"{key}={value!r}" for key, value in options.items()) or "items='duration'"
        yield f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[2]:,.0f} |"


# --- batches


def make_corpus(folder: Path) -> dict[str, Path]:
    rng = np.random.default_rng(0)
    paths = {}
    for number in range(FILES):
        seconds = int(rng.integers(10, 120))
        samples = (rng.normal(size=seconds * RATE) * 3000).astype(np.int16)
        paths[f"{number:04d}"] = folder / f"{number:04d}.wav"
        soundfile.write(paths[f"{number:04d}"], samples, RATE)
    return paths


def ours(paths: dict[str, Path]) -> Next:
    batches = iter(RandomExcerpts({"x": AudioFiles(paths)}, SECONDS, batch_size=BATCH, seed=0).loader())

    def take() -> Any:
        batch = next(batches)
        return batch["x"], list(zip(batch["key"], batch["start"].tolist(), strict=True))

    return take


def ours_augmented(paths: dict[str, Path]) -> Next:
    rngs = {f"value{i}": Uniform(0, 1) for i in range(8)}
    source = {"x": AudioFiles(paths)}
    batches = iter(RandomExcerpts(source, SECONDS, batch_size=BATCH, seed=0, rngs=rngs, items="shuffle").loader())

    def take() -> Any:
        batch = next(batches)
        return batch["x"], list(zip(batch["key"], batch["start"].tolist(), strict=True))

    return take


class Chunks(Dataset[Any]):
    """What most people write: list the chunks, read one with soundfile."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self.paths = paths
        self.chunks = [
            (key, start)
            for key, path in paths.items()
            for start in range(0, soundfile.info(path).frames - SIZE + 1, SIZE)
        ]

    def __len__(self) -> int:
        return len(self.chunks)

    def __getitem__(self, index: int) -> Any:
        key, start = self.chunks[index]
        wave, _ = soundfile.read(self.paths[key], frames=SIZE, start=start, dtype="float32", always_2d=True)
        return torch.from_numpy(wave.T), key, start


def map_style(paths: dict[str, Path]) -> Next:
    data = Chunks(paths)
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**7)
    batches = iter(DataLoader(data, BATCH, sampler=sampler))

    def take() -> Any:
        waves, keys, starts = next(batches)
        return waves, list(zip(keys, starts.tolist(), strict=True))

    return take


def lhotse(paths: dict[str, Path]) -> Next:
    from lhotse import CutSet, Recording
    from lhotse.dataset import DynamicCutSampler
    from lhotse.dataset.collation import collate_audio

    cuts = CutSet.from_cuts(Recording.from_file(path, recording_id=key).to_cut() for key, path in paths.items())
    cuts = cuts.repeat().truncate(SECONDS, offset_type="random", preserve_id=True, rng=None)
    batches = iter(DynamicCutSampler(cuts, max_cuts=BATCH, shuffle=True, seed=0))

    def take() -> Any:
        chosen = next(batches)
        waves, _ = collate_audio(chosen)
        return waves[:, None], [(cut.recording_id, round(cut.start * RATE)) for cut in chosen]

    return take


def pescador(paths: dict[str, Path]) -> Next:
    import pescador as p

    def stream(key: str, path: Path) -> Iterator[Any]:
        rng = np.random.default_rng()
        with soundfile.SoundFile(path) as file:
            while True:
                start = int(rng.integers(0, file.frames - SIZE + 1))
                file.seek(start)
                yield {"x": file.read(SIZE, dtype="float32")[None], "at": np.array([int(key), start])}

    streamers = [p.Streamer(stream, key, path) for key, path in paths.items()]
    mux = p.StochasticMux(streamers, 32, rate=16, random_state=0)
    batches = iter(p.maps.buffer_stream(mux, BATCH))

    def take() -> Any:
        batch = next(batches)
        return torch.from_numpy(batch["x"]), [(f"{key:04d}", start) for key, start in batch["at"].tolist()]

    return take


def webdataset(paths: dict[str, Path]) -> Next:
    import io

    import webdataset as w

    folder = next(iter(paths.values())).parent
    with tarfile.open(folder / "all.tar", "w") as tar:
        for path in paths.values():
            tar.add(path, path.name)
    rng = np.random.default_rng(0)

    def crop(sample: Any) -> Any:
        wave, _ = soundfile.read(io.BytesIO(sample["wav"]), dtype="float32")
        start = int(rng.integers(0, len(wave) - SIZE + 1))
        return torch.from_numpy(wave[None, start : start + SIZE]), sample["__key__"], start

    data = w.WebDataset(str(folder / "all.tar"), shardshuffle=False, empty_check=False).shuffle(64).map(crop).repeat()
    batches = iter(DataLoader(data, BATCH))

    def take() -> Any:
        waves, keys, starts = next(batches)
        return waves, [(Path(key).name, start) for key, start in zip(keys, starts.tolist(), strict=True)]

    return take


def spdl(paths: dict[str, Path]) -> Next:
    import spdl.io as s

    rng = np.random.default_rng(0)
    keys, frames = list(paths), {key: soundfile.info(path).frames for key, path in paths.items()}

    def take() -> Any:
        rows, at = [], []
        for item in rng.integers(0, len(keys), BATCH):
            key = keys[item]
            start = int(rng.integers(0, frames[key] - SIZE + 1))
            data = np.asarray(s.load_wav(paths[key].read_bytes(), start / RATE, float(SECONDS)))
            rows.append(torch.from_numpy(data.copy()).reshape(1, -1).float() / 32768)
            at.append((key, start))
        return torch.stack(rows), at

    return take


def audiotools(paths: dict[str, Path]) -> Next:
    from audiotools import AudioSignal
    from audiotools.core import util

    rng = util.random_state(0)
    keys = list(paths)

    def take() -> Any:
        chosen = [keys[i] for i in rng.randint(0, len(keys), BATCH)]
        signals = [AudioSignal.excerpt(paths[key], duration=SECONDS, state=rng) for key in chosen]
        batch = AudioSignal.batch(signals, truncate_signals=True)
        offsets = [round(signal.metadata["offset"] * RATE) for signal in signals]
        return batch.audio_data, list(zip(chosen, offsets, strict=True))

    return take


def tokens(folder: Path) -> Next:
    spec = CodecSpec("bench", "0" * 16, RATE, 320, 1, 8, 1024, (0, 0), (8, 8))
    rng = np.random.default_rng(0)
    with TokenWriter(folder / "t.ctok", spec) as writer:
        for number in range(FILES):
            frames = int(rng.integers(10, 120)) * 50
            writer.add(f"{number:04d}", rng.integers(0, 1024, (8, frames)), num_samples=frames * 320)
    store = TokenStore(folder / "t.ctok")
    batches = iter(RandomExcerpts({"x": Tokens(store)}, SECONDS, batch_size=BATCH, seed=0).loader())

    def take() -> Any:
        batch = next(batches)
        return batch["x"].packed, None

    return take


def batch_rows(folder: Path, left_out: list[str]) -> Iterator[str]:
    paths = make_corpus(folder)
    makers: dict[str, Callable[[], Next]] = {
        "codec AudioFiles": lambda: ours(paths),
        "codec AudioFiles, shuffle, 8 named values": lambda: ours_augmented(paths),
        "map-style Dataset of listed chunks (soundfile)": lambda: map_style(paths),
        "lhotse DynamicCutSampler, truncated cuts": lambda: lhotse(paths),
        "pescador StochasticMux (soundfile, files kept open)": lambda: pescador(paths),
        "webdataset, whole files, cropped": lambda: webdataset(paths),
        "spdl load_wav": lambda: spdl(paths),
        "audiotools AudioSignal.excerpt": lambda: audiotools(paths),
        "codec Tokens, packed, before decoding": lambda: tokens(folder),
    }
    takes: dict[str, Next] = {}
    for name, make in makers.items():
        try:
            takes[name] = make()
            takes[name]()
        except Exception as error:
            left_out.append(f"{name}: {error!r}"[:200])
            takes.pop(name, None)
    cpu: dict[str, list[float]] = {name: [] for name in takes}
    wall: dict[str, list[float]] = {name: [] for name in takes}
    correct = dict.fromkeys(takes, 0)
    for turn in range(ROUNDS):
        for name, take in takes.items():
            began, began_wall = time.process_time(), time.perf_counter()
            for _ in range(BATCHES):
                waves, at = take()
            cpu[name].append((time.process_time() - began) / BATCHES)
            wall[name].append((time.perf_counter() - began_wall) / BATCHES)
            if turn == 0 and at is not None:
                truth = [soundfile.read(paths[k], SIZE, start, dtype="float32")[0] for k, start in at]
                correct[name] = sum(bool((w[0].numpy() == t).all()) for w, t in zip(waves, truth, strict=True))
    own = statistics.median(cpu["codec AudioFiles"])
    for name in takes:
        seconds, elapsed = statistics.median(cpu[name]), statistics.median(wall[name])
        right = f"{correct[name]} of {BATCH}" if "Tokens" not in name else "–"
        yield (
            f"| {name} | {seconds * 1e3:.2f} | {elapsed * 1e3:.2f} | {BATCH * SECONDS / seconds:,.0f} | "
            f"{seconds / own:.2f} | {right} |"
        )


# --- memory of a worker


class Grown(Source):
    """Megabytes of the reading process's own pages."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def keys(self) -> Any:
        return self.source.keys()

    def rate(self) -> Fraction | None:
        return self.source.rate()

    def lengths(self) -> Any:
        return self.source.lengths()

    def get(self, excerpts: Any) -> Any:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def memory_rows(folder: Path) -> Iterator[str]:
    paths = {f"{n}": folder / f"{n % FILES:04d}.wav" for n in range(100 * FILES)}
    sources = {"codec AudioFiles": AudioFiles(paths), "codec Tokens": Tokens(folder / "t.ctok")}
    for name, source in sources.items():
        for start_method in ("fork", "spawn"):
            draws = RandomExcerpts({"x": source, "grown": Grown(source)}, "0.2", batch_size=64, seed=0)
            loader = draws.loader(num_batches=1600, num_workers=1, start_method=start_method)
            grown = [batch["grown"] for batch in loader]
            at = " | ".join(f"{grown[n // 64 - 1]:.1f}" for n in (1000, 10_000, 50_000, 100_000))
            yield f"| {name}, {start_method} | {at} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--startup", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    if arguments.startup:
        run_startup(arguments.startup, arguments.items)
        return
    versions, left_out = [], []
    for package in ("torch", "numpy", "soundfile", *PEERS):
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            left_out.append(f"{package}: not installed")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        batches = "\n".join(batch_rows(Path(folder), left_out))
        memory = "\n".join(memory_rows(Path(folder)))
    starts = "\n".join(startup_rows(arguments.items))
    draws = "\n".join(draw_rows(arguments.items))
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    Path(__file__).with_suffix(".md").write_text(f"""# Random excerpts: measured

Written by `python benchmarks/excerpts.py` on {date.today()}: {cpu}, {os.cpu_count()} shared cores, \
{platform.system()} {platform.release()}, Python {platform.python_version()}, {", ".join(versions)}. One process, no \
workers, one torch thread, warm page cache. Other jobs ran beside it: trust ratios and CPU time. \
Left out: {"; ".join(left_out) or "none"}.

## Batches of {BATCH} × {SECONDS} s from {FILES} WAV files (16 kHz mono, 10 to 120 s)

| sampler | CPU ms per batch | wall ms | audio s / CPU s | CPU / codec's | rows equal to the file's slice |
|---|---|---|---|---|---|
{batches}

Rows that differ were read at a rounded position. spdl's load_wav and webdataset take whole files' bytes.

## Start-up with {arguments.items:,} items of 10 s to 3 h (48 kHz), first batch drawn, nothing read

| sampler | items | CPU s | MB |
|---|---|---|---|
{starts}

Memory is what the process grows by at most, beside the list of keys and lengths, where one is given. A second number
says by how much fewer items were measured, and the result multiplied.

## Draws per second and core, {arguments.items:,} items

One call after the other, as loaders do; then 1024 are drawn at once, whatever was asked for.

| mode | 32 at a time | 1024 at a time | 32 anywhere |
|---|---|---|---|
{draws}

## Memory of a worker over 100,000 draws, its own pages, MB

| source, start method | 1,000 draws | 10,000 | 50,000 | 100,000 |
|---|---|---|---|---|
{memory}
""")


if __name__ == "__main__":
    main()
