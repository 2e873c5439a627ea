"""Token store against common ways to keep codes; writes tokens.md beside this file.

    python benchmarks/tokens.py [--items 100000] [--million 1000000] [--folder FOLDER]

Every format gives the same batch (32 random 2 s excerpts, int64 [32, 8, 100]) from the same corpus of 10 s
items at 50 Hz, 8 codebooks of 1024. Rounds are interleaved, the median counts; CPU seconds of this process, and
wall time beside them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter
from codec.tokens.packing import pack, unpack

K, V, BITS, FRAMES, EXCERPT, BATCH = 8, 1024, 10, 500, 100, 32
ROUNDS, BATCHES = 11, 20
FLOOR = K * FRAMES * BITS // 8  # bytes of one item, packed
SPEC = CodecSpec("bench", "0" * 16, 16000, 320, 1, K, V, (0, 0), (8, 8))
POOL = np.random.default_rng(0).integers(0, V, (64, K, FRAMES))

Excerpts = list[tuple[int, int, str]]  # item, start frame, key


def key_of(item: int) -> str:
    return f"spk{item % 997:04d}/utt_{item:08d}"


def codes_of(item: int) -> np.ndarray:
    return POOL[item % len(POOL)]


def timed(call: Callable[[], Any]) -> tuple[Any, float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.process_time() - cpu, time.perf_counter() - wall


# --- the formats: write(folder, items), then open(folder) -> read(excerpts) -> int64 [B, K, EXCERPT]


def write_store(folder: Path, items: int) -> None:
    with TokenWriter(folder / "a.ctok", SPEC) as writer:
        for i in range(items):
            writer.add(key_of(i), codes_of(i), num_samples=FRAMES * 320)


def open_store(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    store = TokenStore(folder)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts]).unpack()[0]


def open_store_packed(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    store = TokenStore(folder)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts])  # type: ignore


def open_store_unchecked(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    store = TokenStore(folder, verify_blocks=False)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts])  # type: ignore


def write_npy(folder: Path, items: int) -> None:
    for i in range(items):
        path = folder / f"{key_of(i)}.npy"
        if i < 997:
            path.parent.mkdir()
        np.save(path, codes_of(i).astype(np.uint16))


def open_npy(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    def read(excerpts: Excerpts) -> np.ndarray:
        return np.stack([np.load(f"{folder}/{key}.npy")[:, t : t + EXCERPT] for _, t, key in excerpts]).astype(np.int64)

    return read


def write_safetensors(folder: Path, items: int) -> None:
    from safetensors.numpy import save_file

    for i in range(items):
        path = folder / f"{key_of(i)}.safetensors"
        if i < 997:
            path.parent.mkdir()
        save_file({"codes": codes_of(i).astype(np.uint16)}, path)


def open_safetensors(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    from safetensors import safe_open

    def one(key: str, t: int) -> np.ndarray:
        with safe_open(f"{folder}/{key}.safetensors", "np") as file:
            return file.get_slice("codes")[:, t : t + EXCERPT]

    return lambda excerpts: np.stack([one(key, t) for _, t, key in excerpts]).astype(np.int64)


def write_flat(folder: Path, items: int) -> None:
    """Megatron's .bin and .idx in spirit: one array of uint16, frame-major, and offsets; no checks."""
    with open(folder / "a.bin", "wb") as file:
        for i in range(items):
            file.write(codes_of(i).T.astype(np.uint16).tobytes())
    np.save(folder / "a.idx.npy", np.arange(items + 1) * FRAMES)


def open_flat(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    codes = np.memmap(folder / "a.bin", np.uint16, "r").reshape(-1, K)
    starts = np.load(folder / "a.idx.npy", mmap_mode="r")

    def read(excerpts: Excerpts) -> np.ndarray:
        rows = [codes[starts[i] + t : starts[i] + t + EXCERPT] for i, t, _ in excerpts]
        return np.stack(rows).transpose(0, 2, 1).astype(np.int64)

    return read


def write_hdf5(folder: Path, items: int) -> None:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        for i in range(items):
            file.create_dataset(key_of(i), data=codes_of(i).astype(np.uint16))


def open_hdf5(folder: Path) -> Callable[[Excerpts], np.ndarray]:
    import h5py

    file = h5py.File(folder / "a.h5", "r")
    return lambda excerpts: np.stack([file[key][:, t : t + EXCERPT] for _, t, key in excerpts]).astype(np.int64)


FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Any], str | None]] = {
    "TokenStore, codes": (write_store, open_store, None),
    "TokenStore, packed batch": (write_store, open_store_packed, None),
    "TokenStore, packed, verify_blocks=False": (write_store, open_store_unchecked, None),
    ".npy uint16 per clip": (write_npy, open_npy, "numpy"),
    "safetensors uint16 per clip": (write_safetensors, open_safetensors, "safetensors"),
    "flat uint16 memmap (Megatron-like), no checks": (write_flat, open_flat, "numpy"),
    "HDF5, dataset per clip": (write_hdf5, open_hdf5, "h5py"),
}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def correct(read: Callable[[Excerpts], Any], excerpts: Excerpts) -> bool:
    rows = read(excerpts)
    rows = rows.unpack()[0] if hasattr(rows, "unpack") else rows
    return all((row == codes_of(i)[:, t : t + EXCERPT]).all() for row, (i, t, _) in zip(rows, excerpts, strict=True))


def formats_table(root: Path, items: int) -> list[str]:
    rng = np.random.default_rng(1)
    items_of = rng.integers(0, items, (ROUNDS, BATCHES, BATCH)).tolist()
    starts_of = rng.integers(0, FRAMES - EXCERPT + 1, (ROUNDS, BATCHES, BATCH)).tolist()
    rounds: list[list[Excerpts]] = [
        [[(i, t, key_of(i)) for i, t in zip(*batch, strict=True)] for batch in zip(*one_round, strict=True)]
        for one_round in zip(items_of, starts_of, strict=True)
    ]
    written: dict[Any, tuple[Path, float, float]] = {}
    readers: dict[str, tuple[Callable[[Excerpts], Any], Path, float, bool]] = {}
    for name, (write, opener, package) in FORMATS.items():
        if package:
            try:
                importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                print("not installed:", package)
                continue
        if write not in written:
            folder = root / write.__name__
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            _, cpu, wall = timed(lambda write=write, folder=folder: write(folder, items))
            written[write] = folder, cpu, wall
            print(f"wrote {name}: {wall:.1f} s")
        folder, cpu, _ = written[write]
        read = opener(folder)
        readers[name] = read, folder, cpu, correct(read, rounds[0][0])
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    for batches in rounds:
        for name, (read, *_) in readers.items():
            _, cpu, wall = timed(lambda read=read, batches=batches: [read(batch) for batch in batches])
            seconds[name].append((cpu, wall))
    lines = [
        "| format | bytes / packed floor | write, MB/s packed | excerpts/s per core (CPU) | excerpts/s (wall) "
        "| time / TokenStore packed | correct |",
        "|---|---|---|---|---|---|---|",
    ]
    count = BATCH * len(rounds[0])
    cpu_of = {name: statistics.median(cpu for cpu, _ in values) for name, values in seconds.items()}
    for name, (_, folder, write_cpu, ok) in readers.items():
        wall = statistics.median(wall for _, wall in seconds[name])
        lines.append(
            f"| {name} | {bytes_of(folder) / (items * FLOOR):.4f} | {items * FLOOR / write_cpu / 1e6:.0f} "
            f"| {count / cpu_of[name]:,.0f} | {count / wall:,.0f} "
            f"| {cpu_of[name] / cpu_of['TokenStore, packed batch']:.2f} | {'yes' if ok else 'NO'} |"
        )
    return lines


def packing_table() -> list[str]:
    lines = ["| bits | pack, M codes/s | unpack, M codes/s | round trip exact |", "|---|---|---|---|"]
    for bits in (1, 7, 8, 9, 10, 11, 12, 16):
        codes = np.random.default_rng(bits).integers(0, 1 << bits, (1000, K, 256))
        packed = pack(codes, bits)
        exact = bool((unpack(packed, bits, 256) == codes).all())
        speeds = []
        for call in (
            lambda codes=codes, bits=bits: pack(codes, bits),
            lambda p=packed, bits=bits: unpack(p, bits, 256),
        ):
            speeds.append(codes.size / statistics.median(timed(call)[1] for _ in range(7)) / 1e6)
        lines.append(f"| {bits} | {speeds[0]:.0f} | {speeds[1]:.0f} | {'yes' if exact else 'NO'} |")
    return lines


def sizes_table(root: Path) -> list[str]:
    lines = ["| item | bytes / packed floor | promise |", "|---|---|---|"]
    for seconds, promise in ((2, "-"), (10, "1.02"), (60, "1.01"), (3600, "-")):
        frames, path = seconds * 50, root / "size.ctok"
        codes = np.random.default_rng(0).integers(0, V, (K, frames))
        with TokenWriter(path, SPEC, force=True) as writer:
            for i in range(1000 if seconds <= 60 else 3):
                writer.add(key_of(i), codes, num_samples=frames * 320)
        floor = len(TokenStore(path)) * frames * K * BITS / 8
        lines.append(f"| {seconds} s | {path.stat().st_size / floor:.4f} | {promise} |")
        path.unlink()
    return lines


def verify_lines(root: Path, items: int) -> list[str]:
    with TokenStore(root / "write_store") as store:
        runs = [timed(lambda: list(store.verify())) for _ in range(3)]
        size = store.num_bytes
    cpu, wall = (statistics.median(values) for values in zip(*[run[1:] for run in runs], strict=True))
    found = sum(len(run[0]) for run in runs)
    path = root / "long.ctok"
    with TokenWriter(path, SPEC, force=True) as writer:
        for i in range(20):
            writer.add(key_of(i), np.tile(POOL[i], (1, 360)), num_samples=360 * FRAMES * 320)
    with TokenStore(path) as store:
        _, long_cpu, _ = timed(lambda: list(store.verify()))
        long_speed = store.num_bytes / long_cpu / 1e6
        whole, read_cpu, _ = timed(lambda: [store.read(key_of(i)) for i in range(20)])
        codes = sum(item.size for item in whole) / read_cpu / 1e6
    path.unlink()
    return [
        f"- `verify()` of {items:,} 10 s items: {size / cpu / 1e6:.0f} MB/s per core (CPU), "
        f"{size / wall / 1e6:.0f} MB/s (wall), {found} problems found; of hour-long items: {long_speed:.0f} MB/s.",
        f"- `read()` of whole hour-long items, checked and unpacked to int64: {codes:.0f} M codes/s per core.",
    ]


MILLION = """
import json, pickle, sys, time
from codec.tokens import TokenStore

def memory(field):
    return int(open("/proc/self/status").read().split(field + ":")[1].split()[0]) / 1024

def timed(name, call):
    start = time.perf_counter()
    result = call()
    found[name] = time.perf_counter() - start
    return result

found = {"rss": -memory("VmRSS"), "anon": -memory("RssAnon")}
store = timed("open", lambda: TokenStore(sys.argv[1]))
found["rss"] += memory("VmRSS")
found["anon"] += memory("RssAnon")
found["items"], item = len(store), 777_777 % len(store)
column = timed("column", lambda: store.meta_column("speaker"))
timed("pickle", lambda: len(pickle.loads(pickle.dumps(store))))
info = timed("info", lambda: store.info(store.keys()[item]))
timed("keys", lambda: list(store.keys()))
print(json.dumps({**found, "ok": info.meta == {"speaker": column[item]}}))
"""


def million_lines(root: Path, items: int) -> list[str]:
    path = root / "million.ctok"
    with TokenWriter(path, SPEC, force=True) as writer:
        for i in range(items):
            writer.add(key_of(i), POOL[i % 64, :, :50], num_samples=50 * 320, meta={"speaker": f"spk{i % 997:04d}"})
    done = subprocess.run([sys.executable, "-c", MILLION, str(path)], capture_output=True, text=True, check=True)
    r = json.loads(done.stdout)
    path.unlink()
    return [
        f"- Opening {r['items']:,} items: {r['open'] * 1e3:.0f} ms; memory +{r['rss']:.0f} MB, of which "
        f"{max(r['anon'], 0):.1f} MB private (the rest is the mapped index, shared between processes). "
        f"Through pickle and open again: {r['pickle'] * 1e3:.0f} ms.",
        f"- `meta_column` over them: {r['column'] * 1e3:.0f} ms; `list(keys())`: {r['keys'] * 1e3:.0f} ms; "
        f"one `info` with meta: {r['info'] * 1e6:.0f} µs. Correct: {'yes' if r['ok'] else 'NO'}.",
    ]


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where to write some gigabytes; default: temporary")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        lines = report(Path(folder), arguments.items, arguments.million)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def report(root: Path, items: int, million: int) -> list[str]:
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "safetensors", "fsspec")}
    return [
        "# Token store: measured",
        "",
        f"Written by `python benchmarks/tokens.py --items {items} --million {million}` on "
        f"{date.today().isoformat()}: {processor()}, {os.cpu_count()} shared cores, {platform.system()} "
        f"{platform.release()}, Python {platform.python_version()}, "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ". One process, one thread, warm page cache. Other jobs ran beside it: trust ratios and CPU time.",
        "",
        f"## {items:,} items of 10 s (8 × 10 bits, 50 Hz): batches of {BATCH} random 2 s excerpts",
        "",
        *formats_table(root, items),
        "",
        "Peers that aren't installed here are left out. TokenStore finds items by key and checks the CRC of every "
        "block it reads unless told not to; the flat memmap has neither keys nor checks. A packed batch is what "
        "crosses to the device, where its codes are unpacked.",
        "",
        "## Size, everything included (20-byte keys)",
        "",
        *sizes_table(root),
        "",
        "## Bits",
        "",
        *packing_table(),
        "",
        "## Checking and opening",
        "",
        *verify_lines(root, items),
        *million_lines(root, million),
    ]


if __name__ == "__main__":
    main()
