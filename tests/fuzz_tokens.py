"""Fuzzes the token store: whatever the bytes, `TokenFileError` or `InputError`, in bounded memory.

    pip install atheris
    python tests/fuzz_tokens.py CORPUS_FOLDER -max_total_time=600      # libFuzzer's options

An input is a byte of flags and a token file. The flags say which checksums are made right again after the mutation,
so that the code behind them is reached too, and whether the bytes are a shard to open or one to resume. Without
atheris (as in test_tokens_fuzz.py) the same inputs come from `mutate` alone.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["codec"]) if atheris else contextlib.nullcontext():
    from codec.errors import InputError, TokenFileError
    from codec.spec import CodecSpec
    from codec.tokens import TokenStore, TokenWriter, summarise

import numpy as np

HEADER, FOOTER, COLUMNS, BLOCKS, RESUME, SUMMARY = (1 << n for n in range(6))
SEALED = HEADER | FOOTER | COLUMNS | BLOCKS
MAX_BYTES = 1 << 16
MEMORY = 512 << 20  # what inputs of MAX_BYTES may take, libFuzzer's own included
NUMBERS = [0, 1, 2, 3, 7, 8, 63, 64, 65, 255, 256, 257, 1000, 65535, 65536]
NUMBERS += [sign + (1 << bits) for bits in (31, 32, 62, 63, 64) for sign in (-1, 0, 1)]
VALUES = [*NUMBERS, -1, -(2**63), 2**100, 0.5, 1e308, float("nan"), True, None, "", "u1", "u8", "\ud800", [], [1], {}]

_FOLDER = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


# --- the inputs


def _spec(n_quantizers: int, codebook_size: int, hop_length: int) -> CodecSpec:
    name = "a name long enough to make room for other fields in the JSON of the header, whatever they are"
    return CodecSpec(name, "0", 16000, hop_length, 1, n_quantizers, codebook_size, (0, 0), (8, 8))


def seeds() -> Iterator[bytes]:
    """Inputs that are good files of several layouts."""
    rng = np.random.default_rng(0)
    for n_quantizers, size, hop, lengths, divisors in (
        (1, 2, 1, (1, 300), None),
        (4, 1000, 320, (1, 300, 20, 256), None),
        (3, 65536, 7, (), None),
        (3, 4096, 512, (5, 301), (4, 2, 1)),
    ):
        path = _FOLDER / "seed.ctok"
        with TokenWriter(path, _spec(n_quantizers, size, hop), frame_divisors=divisors, force=True) as writer:
            for n in lengths:
                gain, meta = (n / 2, {"speaker": n % 3, "n": [n]}) if n > 1 else (None, None)
                rows = rng.integers(0, size, (n_quantizers, n))
                codes = [np.repeat(row[::d], d)[:n] for row, d in zip(rows, divisors or (1,) * 4, strict=False)]
                writer.add(f"speaker/é{n}", codes, num_samples=n * hop, gain=gain, meta=meta)
        for flags in (SEALED, 0, SEALED | RESUME, SEALED | SUMMARY):
            yield bytes([flags]) + path.read_bytes()


def _header_span(data: bytes | bytearray) -> tuple[int, int]:
    return 24, min(24 + int.from_bytes(data[12:16], "little"), len(data))


def _directory_span(data: bytes | bytearray) -> tuple[int, int]:
    end = len(data) - 48
    at = int.from_bytes(data[end : end + 8], "little")
    return min(at, end), end


def sealed(file: bytes, flags: int) -> bytes:
    """The file with the checksums of `flags` made right, as far as it has the parts that they are of."""
    data = bytearray(file)
    if flags & HEADER and len(data) >= 24:
        start, stop = _header_span(data)
        data[:12] = b"\x89CTOK\r\n\x1a" + struct.pack("<I", 1)
        data[16:24] = struct.pack("<II", crc32(data[start:stop], crc32(data[:16])), 0)
    if flags & COLUMNS and len(data) >= 48:
        with contextlib.suppress(ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
            start, stop = _directory_span(data)
            directory = json.loads(data[start:stop])
            metas = [entry for meta in directory["meta"].values() for entry in meta.values()]
            for entry in [*directory["columns"].values(), *metas]:
                entry[3] = crc32(data[entry[1] : entry[1] + entry[2]])
            data[start:stop] = json.dumps(directory).encode()
    if flags & FOOTER and len(data) >= 48:
        start, stop = _directory_span(data)
        items = data[stop + 16 : stop + 24]
        footer = struct.pack("<QII", start, stop - start, crc32(data[start:stop])) + items
        footer += struct.pack("<QI", len(data), 1)
        data[stop:] = footer + struct.pack("<I", crc32(footer)) + b"CTOK-END"
    if flags & BLOCKS:
        with contextlib.suppress(Exception):
            _seal_records(data)
    return bytes(data)


def _seal_records(data: bytearray) -> None:
    start, stop = _header_span(data)
    header = json.loads(data[start:stop])
    quantizers, hop = min(header["n_quantizers"], 64), header["codec"]["hop_length"]
    bits = (header["codec"]["codebook_size"] - 1).bit_length()
    divisors = header.get("frame_divisors") or [1] * quantizers
    directory = json.loads(data[slice(*_directory_span(data))])

    def column(name: str) -> Any:
        kind, at, size, _ = directory["columns"][name]
        return np.frombuffer(data[at : at + size], "<" + kind).tolist()

    head, key_start = stop, 0
    _, keys_at, keys_size, _ = directory["columns"]["keys"]
    keys = data[keys_at : keys_at + keys_size]
    for at, samples, key_end in zip(column("offset"), column("num_samples"), column("key_end"), strict=True):
        key, key_start = keys[key_start:key_end], key_end
        data[head : head + 4] = struct.pack("<I", crc32(data[head + 4 : at]))
        frames = -(-samples // hop)
        for n in range(min(-(-frames // 256), 100)):
            count = min(256, frames - 256 * n)
            end = at + sum((-(-count // d) * bits + 7) // 8 for d in divisors)
            crc = crc32(data[at:end], crc32(struct.pack("<I", n), crc32(key)))
            if end + 4 > len(data):
                return
            data[end : end + 4] = struct.pack("<I", crc)
            at = end + 4
        head = at


def _changed(value: Any, rng: random.Random) -> Any:
    """JSON with one leaf, or one branch, replaced."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        copy = value.copy()
        key = rng.choice(list(copy) if isinstance(copy, dict) else range(len(copy)))
        if rng.random() < 0.1:
            del copy[key]
        else:
            copy[key] = _changed(copy[key], rng)
        return copy
    if type(value) is int and rng.random() < 0.3:
        return value + rng.choice([-8, -1, 1, 8])
    return rng.choice(VALUES)


def _mutate_json(data: bytearray, span: tuple[int, int], rng: random.Random) -> None:
    start, stop = span
    text = json.dumps(_changed(json.loads(data[start:stop]), rng), separators=(",", ":")).encode()
    text = text.ljust(stop - start)
    if start == 24:
        data[12:16] = struct.pack("<I", len(text))
    data[start:stop] = text


def _mutate_column(data: bytearray, rng: random.Random) -> None:
    directory = json.loads(data[slice(*_directory_span(data))])
    metas = [entry for meta in directory["meta"].values() for entry in meta.values()]
    kind, at, size, _ = rng.choice([*directory["columns"].values(), *metas])
    width = 1 if kind == "bytes" else int(kind[1])
    cell, other = (at + width * rng.randrange(max(1, size // width)) for _ in range(2))
    number = int.from_bytes(data[other : other + width], "little") + rng.choice([-1, 0, 1])
    if rng.random() < 0.5:
        number = rng.choice(NUMBERS)
    data[cell : cell + width] = (number % (1 << 8 * width)).to_bytes(width, "little")


def mutate(data: bytes, rng: random.Random) -> bytes:
    """An input changed where it matters: fields, columns, flags, or bytes anywhere."""
    flags, file = data[0] if data else 0, bytearray(data[1:])
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        a, b = sorted(rng.randrange(len(file) + 1) for _ in range(2))
        kind = rng.randrange(8)
        with contextlib.suppress(ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError):
            if kind == 0:
                _mutate_json(file, _header_span(file), rng)
            elif kind in (1, 2):
                _mutate_json(file, _directory_span(file), rng)
            elif kind in (3, 4):
                _mutate_column(file, rng)
            elif kind == 5:
                size = rng.choice([1, 2, 4, 8])
                file[a : a + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
            elif kind == 6:
                file[a:b] = rng.choice([b"", bytes(b - a), bytes(file[a:b] * 2), rng.randbytes(min(b - a, 16))])
            else:
                flags ^= 1 << rng.randrange(6)
    return bytes([flags & 63]) + bytes(file[: MAX_BYTES - 1])


# --- the target


def one_input(data: bytes) -> None:
    """Open and read what the bytes hold; any error but the two promised ones goes through."""
    if not data:
        return
    file = sealed(data[1:], data[0])
    if data[0] & RESUME:
        _resume(file)
        return
    path = _FOLDER / "a.ctok"
    path.write_bytes(file)
    try:
        store = TokenStore(path)
    except TokenFileError:
        return
    with store:
        intact = not list(store.verify())
        for number in range(min(len(store), 20)):
            try:
                _read(store, store.keys()[number])
            except (TokenFileError, InputError):
                if intact:
                    raise AssertionError("verify() found nothing, reading does") from None
        if data[0] & SUMMARY:
            with contextlib.suppress(TokenFileError):
                summarise(store).to_dict()
        for name in ("speaker", "n"):
            with contextlib.suppress(TokenFileError, InputError):
                assert len(store.meta_column(name)) == len(store)


def _read(store: TokenStore, key: str) -> None:
    info = store.info(key)
    codes = store.read(key)
    assert codes.shape == (store.n_quantizers, info.num_frames)
    assert 0 <= codes.min() <= codes.max() < store.spec.codebook_size
    start, few = info.num_frames // 2, 1 + store.n_quantizers // 2
    span = key, start, info.num_frames - start
    assert (store.read(*span, few) == codes[:few, start:]).all()
    assert (store.read_batch([span, span], few).unpack()[0][1] == codes[:few, start:]).all()


def _resume(file: bytes) -> None:
    path = _FOLDER / "b.ctok"
    Path(f"{path}.unfinished").write_bytes(file)
    path.unlink(missing_ok=True)
    try:
        fields = json.loads(file[slice(*_header_span(file))])
        spec, quantizers = CodecSpec.from_dict(fields["codec"]), int(fields["n_quantizers"])
        divisors = list(fields.get("frame_divisors") or (1,) * min(quantizers, 64))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError, InputError):
        return
    try:
        writer = TokenWriter(path, spec, n_quantizers=quantizers, frame_divisors=divisors, resume=True)
    except (TokenFileError, InputError):
        return
    writer.close()
    with TokenStore(path) as store:
        # What is resumed is whole. That a code is in the codebook is the reader's business.
        problems = [problem for problem in store.verify() if "holds code" not in problem.message]
        assert not problems, problems


def main() -> None:
    if atheris is None:
        sys.exit("atheris isn't installed: pip install atheris")
    corpus = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if corpus:
        os.makedirs(corpus[0], exist_ok=True)
        for number, seed in enumerate(seeds()):
            Path(corpus[0], f"seed{number}").write_bytes(seed)

    def custom(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        return atheris.Mutate(data, max_size) if rng.random() < 0.4 else mutate(data, rng)[:max_size]

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    atheris.Setup([sys.argv[0], f"-max_len={MAX_BYTES}", *sys.argv[1:]], one_input, custom_mutator=custom)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
