"""Token store against common ways to keep codes; writes tokens.md beside this file.

    python benchmarks/tokens.py [--items 100000] [--million 1000000] [--folder FOLDER]

Every format gives the same batch (32 random 2 s excerpts, [32, 8, 100] codes) from the same corpus of 10 s items
at 50 Hz, 8 codebooks of 1024. Rounds are interleaved, the median counts; CPU seconds of this process, and wall time
beside them. With 100,000 items it writes some 10 GB and takes a few minutes. The peers that are measured are those
that are installed: pip install h5py pyarrow safetensors webdataset litdata mosaicml-streaming megatron-core isal.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter
from codec.tokens.packing import pack, unpack

K, V, BITS, FRAMES, EXCERPT, BATCH = 8, 1024, 10, 500, 100, 32
ROUNDS, BATCHES = 11, 60
FLOOR = K * FRAMES * BITS // 8  # bytes of one item, packed
SPEC = CodecSpec("bench", "0" * 16, 16000, 320, 1, K, V, (0, 0), (8, 8))
POOL = np.random.default_rng(0).integers(0, V, (64, K, FRAMES))

Excerpts = list[tuple[int, int, str]]  # item, start frame, key
Read = Callable[[Excerpts], Any]


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


def open_store(folder: Path) -> Read:
    store = TokenStore(folder)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts]).unpack()[0]


def open_store_packed(folder: Path) -> Read:
    store = TokenStore(folder)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts])  # type: ignore


def open_store_unchecked(folder: Path) -> Read:
    store = TokenStore(folder, verify_blocks=False)
    return lambda excerpts: store.read_batch([(key, t, EXCERPT) for _, t, key in excerpts])  # type: ignore


def write_npy(folder: Path, items: int) -> None:
    for i in range(items):
        path = folder / f"{key_of(i)}.npy"
        if i < 997:
            path.parent.mkdir()
        np.save(path, codes_of(i).astype(np.uint16))


def open_npy(folder: Path) -> Read:
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


def open_safetensors(folder: Path) -> Read:
    from safetensors import safe_open

    def one(key: str, t: int) -> np.ndarray:
        with safe_open(f"{folder}/{key}.safetensors", "np") as file:
            return file.get_slice("codes")[:, t : t + EXCERPT]

    return lambda excerpts: np.stack([one(key, t) for _, t, key in excerpts]).astype(np.int64)


def write_flat(folder: Path, items: int) -> None:
    """One array of uint16, frame-major, and where items start: no keys, no checks, every item in one file."""
    with open(folder / "a.bin", "wb") as file:
        for i in range(items):
            file.write(codes_of(i).T.astype(np.uint16).tobytes())
    np.save(folder / "a.idx.npy", np.arange(items + 1) * FRAMES)


def open_flat_packed(folder: Path) -> Read:
    codes = np.memmap(folder / "a.bin", np.uint16, "r").reshape(-1, K)
    starts = np.load(folder / "a.idx.npy", mmap_mode="r")
    return lambda excerpts: np.stack([codes[starts[i] + t : starts[i] + t + EXCERPT] for i, t, _ in excerpts])


def as_codes(read: Read) -> Read:
    """Of [B, EXCERPT, K] in any integer type: int64 [B, K, EXCERPT]."""
    return lambda excerpts: read(excerpts).transpose(0, 2, 1).astype(np.int64)


def open_flat(folder: Path) -> Read:
    return as_codes(open_flat_packed(folder))


def write_megatron(folder: Path, items: int) -> None:
    """Megatron's own .bin and .idx: an item is a sequence of frames after frames."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "a.bin"), dtype=np.uint16)
    for i in range(items):
        builder.add_document(torch.from_numpy(codes_of(i).T.reshape(-1)), [FRAMES * K])
    builder.finalize(str(folder / "a.idx"))


def open_megatron_packed(folder: Path) -> Read:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(folder / "a"), mmap=True)

    def read(excerpts: Excerpts) -> np.ndarray:
        return np.stack([dataset.get(i, t * K, EXCERPT * K) for i, t, _ in excerpts]).reshape(-1, EXCERPT, K)

    return read


def open_megatron(folder: Path) -> Read:
    return as_codes(open_megatron_packed(folder))


def write_hdf5(folder: Path, items: int) -> None:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        for i in range(items):
            file.create_dataset(key_of(i), data=codes_of(i).astype(np.uint16))


def open_hdf5(folder: Path) -> Read:
    import h5py

    file = h5py.File(folder / "a.h5", "r")
    return lambda excerpts: np.stack([file[key][:, t : t + EXCERPT] for _, t, key in excerpts]).astype(np.int64)


def write_hdf5_flat(folder: Path, items: int) -> None:
    import h5py

    with h5py.File(folder / "a.h5", "w") as file:
        codes = file.create_dataset("codes", (items * FRAMES, K), np.uint16)
        for i in range(items):
            codes[i * FRAMES : (i + 1) * FRAMES] = codes_of(i).T


def open_hdf5_flat(folder: Path) -> Read:
    import h5py

    codes = h5py.File(folder / "a.h5", "r")["codes"]
    starts = [i * FRAMES for i in range(len(codes) // FRAMES)]
    return as_codes(lambda ex: np.stack([codes[starts[i] + t : starts[i] + t + EXCERPT] for i, t, _ in ex]))


def tables(items: int, at_once: int) -> Iterator[Any]:
    import pyarrow as pa

    for first in range(0, items, at_once):
        numbers = range(first, min(first + at_once, items))
        flat = np.concatenate([codes_of(i).reshape(-1) for i in numbers]).astype(np.uint16)
        offsets = np.arange(len(numbers) + 1, dtype=np.int32) * (K * FRAMES)
        codes = pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))
        yield pa.table({"key": [key_of(i) for i in numbers], "codes": codes})


ARROW_ROWS, PARQUET_ROWS = 1000, 100


def write_arrow(folder: Path, items: int) -> None:
    import pyarrow as pa

    writer = None
    for table in tables(items, ARROW_ROWS):
        writer = writer or pa.ipc.new_file(str(folder / "a.arrow"), table.schema)
        writer.write_table(table)
    writer.close()


def open_arrow_packed(folder: Path) -> Read:
    import pyarrow as pa

    file = pa.ipc.open_file(pa.memory_map(str(folder / "a.arrow")))
    lists = [file.get_batch(n).column("codes") for n in range(file.num_record_batches)]
    values = [(column.offsets.to_numpy(), column.values.to_numpy()) for column in lists]

    def one(i: int, t: int) -> np.ndarray:
        offsets, codes = values[i // ARROW_ROWS]
        row = i % ARROW_ROWS
        return codes[offsets[row] : offsets[row + 1]].reshape(K, -1)[:, t : t + EXCERPT]

    return lambda excerpts: np.stack([one(i, t) for i, t, _ in excerpts])


def open_arrow(folder: Path) -> Read:
    read = open_arrow_packed(folder)
    return lambda excerpts: read(excerpts).astype(np.int64)


def write_parquet(folder: Path, items: int) -> None:
    import pyarrow.parquet as pq

    writer = None
    for table in tables(items, PARQUET_ROWS):
        writer = writer or pq.ParquetWriter(folder / "a.parquet", table.schema, compression="none")
        writer.write_table(table)
    writer.close()


def open_parquet(folder: Path) -> Read:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(folder / "a.parquet", memory_map=True)

    def one(i: int, t: int) -> np.ndarray:
        group = file.read_row_group(i // PARQUET_ROWS, columns=["codes"], use_threads=False)
        codes = group["codes"].chunk(0)[i % PARQUET_ROWS].values.to_numpy()
        return codes.reshape(K, -1)[:, t : t + EXCERPT]

    return lambda excerpts: np.stack([one(i, t) for i, t, _ in excerpts]).astype(np.int64)


def write_webdataset(folder: Path, items: int) -> None:
    import webdataset

    with webdataset.TarWriter(str(folder / "a.tar")) as sink:
        for i in range(items):
            sink.write({"__key__": key_of(i), "npy": codes_of(i).astype(np.uint16)})


def open_webdataset(folder: Path) -> Read:
    """WebDataset itself reads a tar in order only; this is random access through the members' offsets."""
    with tarfile.open(folder / "a.tar") as tar:
        where = {member.name: (member.offset_data, member.size) for member in tar}
    data = np.memmap(folder / "a.tar", np.uint8, "r")

    def one(key: str, t: int) -> np.ndarray:
        at, size = where[key + ".npy"]
        return np.load(io.BytesIO(data[at : at + size]))[:, t : t + EXCERPT]

    return lambda excerpts: np.stack([one(key, t) for _, t, key in excerpts]).astype(np.int64)


def write_litdata(folder: Path, items: int) -> None:
    from litdata.streaming import Cache

    cache = Cache(str(folder), chunk_bytes="64MB")
    for i in range(items):
        cache[i] = codes_of(i).astype(np.uint16)
    cache.done()
    cache.merge()


def open_litdata(folder: Path) -> Read:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(folder))
    return lambda excerpts: np.stack([dataset[i][:, t : t + EXCERPT] for i, t, _ in excerpts]).astype(np.int64)


def write_mosaic(folder: Path, items: int) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(folder), columns={"codes": f"ndarray:uint16:{K},{FRAMES}"}) as writer:
        for i in range(items):
            writer.write({"codes": codes_of(i).astype(np.uint16)})


def open_mosaic(folder: Path) -> Read:
    from streaming import LocalDataset

    dataset = LocalDataset(str(folder))

    def read(excerpts: Excerpts) -> np.ndarray:
        return np.stack([dataset[i]["codes"][:, t : t + EXCERPT] for i, t, _ in excerpts]).astype(np.int64)

    return read


# name -> (write, open, package, what a batch is)
FORMATS: dict[str, tuple[Callable[[Path, int], None], Callable[[Path], Read], str | None, str]] = {
    "TokenStore": (write_store, open_store_packed, None, "packed"),
    "TokenStore, verify_blocks=False": (write_store, open_store_unchecked, None, "packed"),
    "bare uint16 memmap, no keys, no checks": (write_flat, open_flat_packed, None, "uint16"),
    "Megatron .bin/.idx (IndexedDataset.get)": (write_megatron, open_megatron_packed, "megatron-core", "uint16"),
    "Arrow IPC, memory-mapped, by row number": (write_arrow, open_arrow_packed, "pyarrow", "uint16"),
    "TokenStore, codes": (write_store, open_store, None, "int64"),
    "bare uint16 memmap, codes": (write_flat, open_flat, None, "int64"),
    "Megatron, codes": (write_megatron, open_megatron, "megatron-core", "int64"),
    "Arrow IPC, codes": (write_arrow, open_arrow, "pyarrow", "int64"),
    "HDF5, one array": (write_hdf5_flat, open_hdf5_flat, "h5py", "int64"),
    "HDF5, dataset per clip": (write_hdf5, open_hdf5, "h5py", "int64"),
    "safetensors per clip": (write_safetensors, open_safetensors, "safetensors", "int64"),
    ".npy per clip": (write_npy, open_npy, None, "int64"),
    "WebDataset tar, offsets indexed": (write_webdataset, open_webdataset, "webdataset", "int64"),
    "mosaicml-streaming (MDS)": (write_mosaic, open_mosaic, "mosaicml-streaming", "int64"),
    "litdata": (write_litdata, open_litdata, "litdata", "int64"),
    f"Parquet, {PARQUET_ROWS} rows a group": (write_parquet, open_parquet, "pyarrow", "int64"),
}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def correct(read: Read, excerpts: Excerpts) -> bool:
    rows = read(excerpts)
    rows = rows.unpack()[0] if hasattr(rows, "unpack") else rows
    if rows.shape[1] == EXCERPT:
        rows = rows.transpose(0, 2, 1)
    return all((row == codes_of(i)[:, t : t + EXCERPT]).all() for row, (i, t, _) in zip(rows, excerpts, strict=True))


def random_batches(items: int) -> list[list[Excerpts]]:
    rng = np.random.default_rng(1)
    shape = ROUNDS, BATCHES, BATCH
    numbers, starts = rng.integers(0, items, shape).tolist(), rng.integers(0, FRAMES - EXCERPT + 1, shape).tolist()
    return [
        [[(i, t, key_of(i)) for i, t in zip(*batch, strict=True)] for batch in zip(*one_round, strict=True)]
        for one_round in zip(numbers, starts, strict=True)
    ]


def installed(package: str | None) -> str | None:
    try:
        return importlib.metadata.version(package or "numpy")
    except importlib.metadata.PackageNotFoundError:
        return None


def read_batches(read: Read, batches: list[Excerpts]) -> tuple[float, float]:
    """CPU and wall seconds per excerpt, of as many of the batches as a third of a second allows."""
    wall, cpu, count = time.perf_counter(), time.process_time(), 0
    for batch in batches:
        read(batch)
        count += len(batch)
        if time.perf_counter() - wall > 1 / 3:
            break
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def formats_table(root: Path, items: int) -> list[str]:
    rounds = random_batches(items)
    written: dict[Any, tuple[Path, float]] = {}
    readers: dict[str, tuple[Read, bool]] = {}
    for name, (write, opener, package, _) in FORMATS.items():
        if not installed(package):
            print("not installed:", package)
            continue
        if write not in written:
            folder = root / write.__name__
            for count in (10, 0):  # first ten items, so that imports aren't timed
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                if count:
                    write(folder, count)
            _, cpu, wall = timed(lambda write=write, folder=folder: write(folder, items))
            written[write] = folder, cpu
            print(f"wrote {name}: {wall:.1f} s", flush=True)
        read = opener(written[write][0])
        readers[name] = read, correct(read, rounds[0][0])
        read_batches(read, rounds[0])
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in readers}
    names = list(readers)
    for n in range(ROUNDS):
        # Another order each round, and other excerpts for each: nobody finds the caches as its own file left them.
        for j in np.random.default_rng(n).permutation(len(names)).tolist():
            seconds[names[j]].append(read_batches(readers[names[j]][0], rounds[(n + j) % ROUNDS]))
    cpu_of = {name: statistics.median(cpu for cpu, _ in values) for name, values in seconds.items()}
    wall_of = {name: statistics.median(wall for _, wall in values) for name, values in seconds.items()}
    lines = [
        "| format | a batch is | excerpts/s per core (CPU) | excerpts/s (wall) | time / TokenStore, same kind of batch "
        "| bytes / packed floor | write, MB/s packed | correct |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, (_, ok) in readers.items():
        write, _, _, kind = FORMATS[name]
        folder, write_cpu = written[write]
        ours = "TokenStore, codes" if kind == "int64" else "TokenStore"
        lines.append(
            f"| {name} | {kind} | {1 / cpu_of[name]:,.0f} | {1 / wall_of[name]:,.0f} "
            f"| {cpu_of[name] / cpu_of[ours]:.2f} | {bytes_of(folder) / (items * FLOOR):.4f} "
            f"| {items * FLOOR / write_cpu / 1e6:.0f} | {'yes' if ok else 'NO'} |"
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
        print("\n".join(lines), flush=True)


def report(root: Path, items: int, million: int) -> list[str]:
    packages = ["numpy", "isal", *dict.fromkeys(package for *_, package, _ in FORMATS.values() if package)]
    versions = {name: installed(name) or "not installed" for name in packages}
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
        "Peers that aren't installed are left out. TokenStore finds items by key and checks the CRC of every block "
        "it reads unless told not to (with isal's CRC where that is installed; with zlib's a packed batch takes about "
        "a quarter longer); no other format here does by default. A packed batch (10 bits a code) or "
        "a uint16 one is what crosses to the device; the rest are int64 [32, 8, 100]. The bare memmap is no format "
        "but the bound: one slice per excerpt and a copy. WebDataset, litdata, MDS and Parquet are made for reading "
        "in order.",
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
