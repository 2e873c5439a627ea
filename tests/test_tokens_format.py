"""The format itself: golden files, literal bytes, and a second reader written from FORMAT.md."""

import json
import struct
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from test_tokens import make_spec, random_codes

from codec.tokens import TokenStore, TokenWriter

GOLDEN = Path(__file__).parent / "golden"
sys.path.insert(0, str(GOLDEN))

import make_tokens  # noqa: E402


# --- a reader that shares no code with the package: what FORMAT.md says, in plain Python
def read_everything(path: Path) -> tuple[dict[str, Any], dict[str, tuple[int, Any, Any, list[list[int]]]]]:
    """Returns the header's JSON and {key: (num_samples, gain, meta, codes)}."""
    data = path.read_bytes()
    magic, version, size, crc, zero = struct.unpack_from("<8sIIII", data)
    assert (magic, version, zero) == (b"\x89CTOK\r\n\x1a", 1, 0)
    assert crc == crc32(data[24 : 24 + size], crc32(data[:16]))
    header, data_start = json.loads(data[24 : 24 + size]), 24 + size
    quantizers, hop = header["n_quantizers"], header["codec"]["hop_length"]
    divisors = header.get("frame_divisors", [1] * quantizers)
    bits = (header["codec"]["codebook_size"] - 1).bit_length()

    footer = data[-48:]
    at, size, crc, num_items, file_size, version, footer_crc, magic = struct.unpack("<QIIQQII8s", footer)
    assert (version, magic, file_size, at + size) == (1, b"CTOK-END", len(data), len(data) - 48)
    assert footer_crc == crc32(footer[:36])
    assert crc == crc32(data[at : at + size])
    directory = json.loads(data[at : at + size])

    def column(entry: Any) -> Any:
        kind, start, length, crc = entry
        assert start % 8 == 0
        assert crc == crc32(data[start : start + length])
        if kind == "bytes":
            return data[start : start + length]
        code = {"u1": "B", "u2": "H", "u4": "I", "u8": "Q", "f4": "f"}[kind]
        return struct.unpack_from(f"<{num_items}{code}", data, start)

    columns = {name: column(entry) for name, entry in directory["columns"].items()}
    fields = {f: (column(m["codes"]), json.loads(column(m["values"]))) for f, m in directory["meta"].items()}
    items, key_start, end = {}, 0, data_start
    for i in range(num_items):
        key = columns["keys"][key_start : columns["key_end"][i]]
        key_start = columns["key_end"][i]
        num_samples, head, start = columns["num_samples"][i], end, columns["offset"][i]
        crc, samples, key_size, flags, zero = struct.unpack_from("<IQHBB", data, head)
        assert (samples, key_size, zero, crc) == (num_samples, len(key), 0, crc32(data[head + 4 : start]))
        gain = struct.unpack_from("<f", data, head + 16)[0] if flags & 1 else None
        meta = json.loads(data[head + 20 + 4 * (flags & 1) + key_size : start]) if flags & 2 else None
        assert (meta or {}) == {f: values[codes[i] - 1] for f, (codes, values) in fields.items() if codes[i]}
        assert gain == (columns["gain"][i] if flags & 1 else None)
        frames, codes = -(-num_samples // hop), [[] for _ in range(quantizers)]
        end = start
        for n in range(-(-frames // 256)):
            count, block = min(256, frames - 256 * n), end
            for k, d in enumerate(divisors):
                run = ((count + d - 1) // d * bits + 7) // 8
                word, end = int.from_bytes(data[end : end + run], "little"), end + run
                codes[k] += [word >> f // d * bits & (1 << bits) - 1 for f in range(count)]
            assert struct.pack("<I", crc32(data[block:end], crc32(key + struct.pack("<I", n)))) == data[end : end + 4]
            end += 4
        items[key.decode()] = num_samples, gain, meta, codes
    assert end == directory["data_end"]
    assert [crc32(columns["keys"][s:e]) for s, e in spans(columns, columns["order"])] == list(columns["hash"])
    assert sorted(columns["order"]) == list(range(num_items))
    return header, items


def spans(columns: dict[str, Any], order: Any) -> list[tuple[int, int]]:
    return [(columns["key_end"][i - 1] if i else 0, columns["key_end"][i]) for i in order]


@pytest.mark.parametrize("name", list(make_tokens.FILES))
def test_golden_files(name: str, tmp_path: Path) -> None:
    make_tokens.make(tmp_path)
    assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()


@pytest.mark.parametrize("name", list(make_tokens.FILES))
def test_two_readers_agree_on_golden_files(name: str) -> None:
    n_quantizers, stored, codebook_size, _, items = make_tokens.FILES[name]
    header, read = read_everything(GOLDEN / name)
    store = TokenStore(GOLDEN / name)
    assert header["codec"] == store.spec.to_dict()
    assert header["codec"]["n_quantizers"] == n_quantizers
    assert list(read) == list(store.keys()) == [key for key, *_ in items]
    for i, (key, num_samples, gain, meta) in enumerate(items):
        divisors = make_tokens.FRAME_DIVISORS.get(name)
        codes = make_tokens.codes_of(i, stored, store.info(key).num_frames, codebook_size, divisors)
        assert read[key] == (num_samples, gain, meta, codes.tolist())
        np.testing.assert_array_equal(store.read(key), codes)
        info = store.info(key)
        assert (info.num_samples, info.gain, info.meta) == (num_samples, gain, meta or {})


@pytest.mark.parametrize(("n_quantizers", "codebook_size"), [(1, 3), (5, 17), (64, 2), (8, 1024), (3, 65536)])
def test_second_reader_reads_what_the_package_writes(tmp_path: Path, n_quantizers: int, codebook_size: int) -> None:
    spec = make_spec(n_quantizers, codebook_size, hop_length=3)
    items = {f"é{n}": random_codes(spec, n, n) for n in (1, 5, 256, 300, 513)}
    with TokenWriter(tmp_path / "a.ctok", spec) as writer:
        for key, codes in items.items():
            writer.add(
                key,
                codes,
                num_samples=codes.shape[1] * 3 - 2,
                meta={"n": codes.shape[1]} if key > "é3" else None,
            )
    _, read = read_everything(tmp_path / "a.ctok")
    assert {key: value[3] for key, value in read.items()} == {key: codes.tolist() for key, codes in items.items()}


def test_literal_bytes(tmp_path: Path) -> None:
    """A record and its block, byte by byte."""
    with TokenWriter(tmp_path / "a.ctok", make_spec(2, 16, hop_length=10)) as writer:
        writer.add("ab", np.array([[1, 2, 3], [15, 0, 8]]), num_samples=29, gain=1.0, meta={"s": 1})
    data = (tmp_path / "a.ctok").read_bytes()
    start = 24 + int.from_bytes(data[12:16], "little")
    head = bytes.fromhex("1d00000000000000 0200 03 00 0000803f 07000000 6162") + b'{"s":1}'
    runs = bytes.fromhex("2103 0f08")
    block_crc = crc32(b"ab" + bytes(4) + runs).to_bytes(4, "little")
    record = crc32(head).to_bytes(4, "little") + head + runs + block_crc
    assert data[start : start + len(record)] == record
    assert data[:8] == b"\x89CTOK\r\n\x1a"
    assert data[-8:] == b"CTOK-END"
