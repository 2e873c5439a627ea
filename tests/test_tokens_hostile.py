"""Damaged and forged files give the data as written or a TokenFileError that says what is wrong."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokens import make_spec, random_codes

from codec.errors import TokenFileError
from codec.tokens import TokenStore, TokenWriter

SPEC = make_spec(4, 1000, name="a name long enough to make room for other fields")
ITEMS = {f"speaker {n % 3}/item {n}": random_codes(SPEC, n, n) for n in (1, 300, 20, 256)}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("hostile") / "good.ctok"
    with TokenWriter(path, SPEC) as writer:
        for key, codes in ITEMS.items():
            n = codes.shape[1]
            writer.add(key, codes, num_samples=n * 320, gain=n / 2 if n > 1 else None, meta={"speaker": n % 3})
    return path.read_bytes()


def everything(path: Path) -> dict[str, Any]:
    with TokenStore(path) as store:
        keys = list(store.keys())
        excerpts = [(key, 0, store.info(key).num_frames) for key in keys]
        rows, lengths = store.read_batch(excerpts).unpack()
        return {
            "spec": store.spec,
            "infos": [store.info(key) for key in keys],
            "speakers": store.meta_column("speaker").tolist(),
            "codes": [store.read(key).tolist() for key in keys],
            "batch": [row[:, :n].tolist() for row, n in zip(rows, lengths, strict=True)],
        }


@pytest.fixture(scope="module")
def truth(good: bytes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("truth") / "x.ctok"
    path.write_bytes(good)
    return everything(path)


def same_or_error(path: Path, truth: dict[str, Any]) -> None:
    text = ""
    try:
        found = everything(path)
    except TokenFileError as error:
        text = str(error)
    if text:
        assert str(path) in text or "in a batch" in text
        assert text.count(";") >= 2
    else:
        assert found == truth


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_flipped_bit(
    good: bytes, truth: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.getbasetemp() / "flipped.ctok"
    path.write_bytes(damaged)
    same_or_error(path, truth)
    if bytes(damaged) != good:
        try:
            with TokenStore(path) as store:
                problems = list(store.verify())
        except TokenFileError:
            return
        # Only the zeros between columns are covered by no checksum, and nothing depends on them.
        assert problems or everything(path) == truth


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "flipped.ctok"
    with TokenWriter(path, SPEC) as writer:
        for key in "ab":
            writer.add(key, ITEMS["speaker 1/item 1"], num_samples=7, gain=2, meta={"speaker": key})
    good = path.read_bytes()
    covered = np.ones(len(good), bool)
    at, end = directory_span(good)
    directory = json.loads(good[at:end])
    covered[directory["data_end"] : at] = False
    meta = directory["meta"]["speaker"]
    for _, start, size, _ in [*directory["columns"].values(), *meta.values()]:
        covered[start : start + size] = True
    assert not any(good[i] for i in np.flatnonzero(~covered))  # the zeros between columns
    for i in np.flatnonzero(covered):
        path.write_bytes(good[:i] + bytes([good[i] ^ 0x10]) + good[i + 1 :])
        try:
            with TokenStore(path) as store:
                assert list(store.verify()), f"byte {i}"
        except TokenFileError:
            pass


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_truncation_or_insertion(
    good: bytes, truth: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    a, b = sorted((data.draw(st.integers(0, len(good))), data.draw(st.integers(0, len(good)))))
    forms = st.sampled_from(
        [good[:a], good[a:], good[:a] + good[b:], good[:b] + good[a:], good[:a] + bytes(b - a) + good[b:]]
    )
    path = tmp_path_factory.getbasetemp() / "cut.ctok"
    path.write_bytes(data.draw(forms))
    same_or_error(path, truth)


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(max_size=300), start=st.integers(0, 60), stop=st.integers(0, 60))
def test_foreign_bytes(
    good: bytes, tmp_path_factory: pytest.TempPathFactory, junk: bytes, start: int, stop: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk.ctok"
    path.write_bytes(good[:start] + junk + (good[-stop:] if stop else b""))
    with pytest.raises(TokenFileError):
        TokenStore(path)


# --- forged files: all checksums right, the content hostile


def directory_span(data: bytes) -> tuple[int, int]:
    at, size = struct.unpack_from("<QI", data, len(data) - 48)
    return at, at + size


def forge(data: bytes, change: Callable[[dict[str, Any]], None], **footer: int) -> bytes:
    """Change the directory, and make all that follows fit again."""
    at, end = directory_span(data)
    directory = json.loads(data[at:end])
    change(directory)
    return sealed(data[:at], json.dumps(directory).encode(), directory.get("num_items", 0), **footer)


def sealed(content: bytes, directory: bytes, count: Any, **footer: int) -> bytes:
    fields = {
        "offset": len(content),
        "size": len(directory),
        "crc": crc32(directory),
        "num_items": count if type(count) is int else 0,
        "file_size": len(content) + len(directory) + 48,
        "version": 1,
        **footer,
    }
    start = struct.pack("<QIIQQI", *fields.values())
    return content + directory + start + struct.pack("<I", crc32(start)) + b"CTOK-END"


def with_column(name: str, change: Callable[[np.ndarray], Any], dtype: str = "u8") -> Callable[[bytes], bytes]:
    """Replace a column by a changed copy, put in front of the directory."""

    def apply(data: bytes) -> bytes:
        at, end = directory_span(data)
        directory = json.loads(data[at:end])
        kind, start, size, _ = directory["columns"][name]
        values = np.frombuffer(data[start : start + size], "u1" if kind == "bytes" else f"<{kind}").astype(f"<{dtype}")
        changed = change(values)
        column = (values if changed is None else changed).tobytes()
        content = data[:at] + bytes(-at % 8)
        directory["columns"][name] = [
            "bytes" if kind == "bytes" else dtype,
            len(content),
            len(column),
            crc32(column),
        ]
        return sealed(content + column, json.dumps(directory).encode(), directory["num_items"])

    return apply


def with_directory(change: Callable[[dict[str, Any]], Any], **footer: int) -> Callable[[bytes], bytes]:
    return lambda data: forge(data, lambda directory: (change(directory), None)[1], **footer)


def with_header(change: Callable[[dict[str, Any]], Any], version: int = 1) -> Callable[[bytes], bytes]:
    """Change the header's JSON but for its size, the name making room."""

    def apply(data: bytes) -> bytes:
        size = int.from_bytes(data[12:16], "little")
        header = json.loads(data[24 : 24 + size])
        header["codec"]["name"] = ""
        change(header)
        text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
        assert len(text) == size
        start = data[:8] + struct.pack("<II", version, size)
        return start + struct.pack("<II", crc32(text, crc32(start)), 0) + text + data[24 + size :]

    return apply


def put(index: int, value: float) -> Callable[[np.ndarray], None]:
    return lambda values: values.__setitem__(index, value)


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", r"the file has 0 bytes; a token file has at least 72"),
    "only a header": (lambda data: data[: 24 + data[12] + 256 * data[13]], r"end magic is .*; .*resume=True"),
    "another format": (lambda data: b"RIFF" + data[4:], r"at byte 0: magic is b'RIFF.*; give a \.ctok file"),
    "text mode": (lambda data: data.replace(b"\r\n", b"\n"), "magic is"),
    "version 2": (
        with_header(lambda h: None, version=2),
        "at byte 8: format version is 2; this version reads 1",
    ),
    "footer of version 3": (with_directory(lambda d: None, version=3), "format version is 3"),
    "appended": (lambda data: data + b"x", "end magic is"),
    "two files in one": (lambda data: data + data, "the footer says .* bytes; the file has"),
    "no codec": (with_header(lambda h: h.__setitem__("codec", None)), "the codec's identity is unusable"),
    "codec of wrong types": (
        with_header(lambda h: h["codec"].__setitem__("encode_context", 5)),
        "is unusable",
    ),
    "no hop": (with_header(lambda h: h["codec"].__setitem__("hop_length", 0)), "hop_length is 0"),
    "more codebooks": (
        with_header(lambda h: h.__setitem__("n_quantizers", 5)),
        "n_quantizers is 5; it must be 1 to 4",
    ),
    "true codebooks": (with_header(lambda h: h.__setitem__("n_quantizers", [])), r"n_quantizers is \[\]"),
    "directory beyond": (with_directory(lambda d: None, offset=2**63), "it must end at the footer"),
    "directory before": (with_directory(lambda d: None, offset=0), "it must end at the footer"),
    "directory crc": (with_directory(lambda d: None, crc=1), "directory CRC is"),
    "directory a list": (lambda d: sealed(d[: directory_span(d)[0]], b"[1]", 4), "the directory is unusable"),
    "directory a number": (lambda d: sealed(d[: directory_span(d)[0]], b"9" * 5000, 4), "the directory"),
    "directory deep": (
        lambda d: sealed(d[: directory_span(d)[0]], b"[" * 100_000, 4),
        "the directory isn't JSON",
    ),
    "directory binary": (
        lambda d: sealed(d[: directory_span(d)[0]], b"\xff\x00", 4),
        "the directory isn't JSON",
    ),
    "no columns": (with_directory(lambda d: d["columns"].clear()), r"columns \['offset', .*\] are missing"),
    "columns a list": (with_directory(lambda d: d.__setitem__("columns", [1])), "the directory is unusable"),
    "meta a number": (
        with_directory(lambda d: d.__setitem__("meta", {"speaker": 1})),
        "the directory is unusable",
    ),
    "many items": (with_directory(lambda d: d.__setitem__("num_items", 2**60)), r"items of u4 take \d+"),
    "few items": (with_directory(lambda d: d.__setitem__("num_items", 3)), "3 items of u4 take 12"),
    "float items": (
        with_directory(lambda d: d.__setitem__("num_items", 4.0), num_items=4),
        r"num_items is 4\.0",
    ),
    "other items": (with_directory(lambda d: None, num_items=9), "num_items is 4; the footer says 9"),
    "data_end beyond": (
        with_directory(lambda d: d.__setitem__("data_end", 2**70)),
        "data_end is 1180591620717411303424",
    ),
    "data_end negative": (with_directory(lambda d: d.__setitem__("data_end", -1)), "data_end is -1"),
    "column beyond": (
        with_directory(lambda d: d["columns"]["offset"].__setitem__(1, 2**40)),
        "it must lie in",
    ),
    "column in data": (with_directory(lambda d: d["columns"]["offset"].__setitem__(1, 0)), "it must lie in"),
    "column odd": (
        with_directory(lambda d: d["columns"]["hash"].__setitem__(1, d["columns"]["hash"][1] + 4)),
        "from a multiple of 8",
    ),
    "column size": (with_directory(lambda d: d["columns"]["offset"].__setitem__(2, 2**62)), "it must lie in"),
    "column negative": (
        with_directory(lambda d: d["columns"]["offset"].__setitem__(2, -16)),
        r"it must be \[u4\|u8, ",
    ),
    "column type": (
        with_directory(lambda d: d["columns"]["offset"].__setitem__(0, "f8")),
        r"it must be \[u4\|u8, ",
    ),
    "column a list type": (
        with_directory(lambda d: d["columns"]["offset"].__setitem__(0, ["u4"])),
        r"it must be \[u4",
    ),
    "column short": (
        with_directory(lambda d: d["columns"]["offset"].pop()),
        r"it must be \[u4\|u8, offset, bytes, crc32\]",
    ),
    "column crc": (
        with_directory(lambda d: d["columns"]["offset"].__setitem__(3, 5)),
        "column 'offset' has CRC",
    ),
    "overlap": (with_column("offset", lambda v: v.__setitem__(2, v[1])), "item 2 has its blocks at"),
    "swapped": (with_column("offset", lambda v: v[::-1].copy()), "item [01] has its blocks at"),
    "offset zero": (with_column("offset", put(0, 0)), "item 0 has its blocks at 0"),
    "offset huge": (with_column("offset", put(3, 2**63 + 5)), "item 3 has its blocks at"),
    "offset past the data": (
        with_column("offset", lambda v: v.__setitem__(3, v[3] + 1)),
        "and the data ends at",
    ),
    "no samples": (with_column("num_samples", put(1, 0)), "item 1 has 0 samples"),
    "endless samples": (
        with_column("num_samples", put(1, 2**64 - 1)),
        "item 1 has 18446744073709551615 samples",
    ),
    "many samples": (with_column("num_samples", put(3, 2**33)), "item 3 has 8589934592 samples"),
    "more samples": (with_column("num_samples", put(3, 257 * 320)), "item 3 has its blocks at"),
    "key ends descend": (with_column("key_end", lambda v: v.__setitem__(1, 3)), "the key of item 1 is bytes"),
    "key beyond": (with_column("key_end", put(3, 2**63)), "the key of item 3 is bytes"),
    "keys left over": (with_column("key_end", lambda v: v.__setitem__(3, v[3] - 1)), "the last key ends at"),
    "order beyond": (with_column("order", put(1, 4)), "the hash table is out of order"),
    "order huge": (with_column("order", put(1, 2**64 - 1)), "the hash table is out of order"),
    "hashes descend": (with_column("hash", lambda v: v[::-1].copy(), "u4"), "the hash table is out of order"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_hostile_files_do_not_open(good: bytes, tmp_path: Path, name: str) -> None:
    make, text = HOSTILE[name]
    path = tmp_path / "hostile.ctok"
    path.write_bytes(make(good))
    tracemalloc.start()
    try:
        with pytest.raises(TokenFileError, match=text) as caught:
            TokenStore(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "at byte" in str(caught.value)


@pytest.mark.parametrize(
    "divisors",
    [[1, 1, 1], [1] * 5, [1, 1, 1, 3], [1, 1, 1, 512], [1, 1, 1, 0], [1, 1, 1, -2], [1, 1, 1, 2.0], 1, "1111"],
)
def test_unusable_frame_divisors(good: bytes, tmp_path: Path, divisors: Any) -> None:
    path = tmp_path / "divisors.ctok"
    path.write_bytes(with_header(lambda h: h.__setitem__("frame_divisors", divisors))(good))
    with pytest.raises(TokenFileError, match=r"frame_divisors is .*; it must be 4 powers of two from 1 to 256; rest"):
        TokenStore(path)


def test_other_frame_divisors_than_the_items_have(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "divisors.ctok"
    path.write_bytes(with_header(lambda h: h.__setitem__("frame_divisors", [1, 1, 2, 4]))(good))
    with TokenStore(path) as store:
        assert list(store.verify())
        with pytest.raises(TokenFileError, match="block 0 of item 'speaker 0/item 300' isn't what was written"):
            store.read("speaker 0/item 300")
    path.write_bytes(with_header(lambda h: h.__setitem__("frame_divisors", [1, 1, 1, 1]))(good))
    assert len(TokenStore(path)) == 4


def test_codes_beyond_the_codebook(tmp_path: Path) -> None:
    """1001 entries leave room for codes up to 1023, which must not reach an embedding table."""
    path = tmp_path / "codes.ctok"
    with TokenWriter(path, make_spec(4, 1024)) as writer:
        writer.add("x", np.full((4, 300), 1023), num_samples=300 * 320)
    path.write_bytes(with_header(lambda h: h["codec"].__setitem__("codebook_size", 1001))(path.read_bytes()))
    store = TokenStore(path)
    with pytest.raises(TokenFileError, match="item 'x' holds code 1023; codebooks have 1001 entries"):
        store.read("x")
    with pytest.raises(TokenFileError, match="code 1023 in a batch; codebooks have 1001 entries"):
        store.read_batch([("x", 0, 10)]).unpack()
    assert [problem.block for problem in store.verify()] == [0, 1]


@pytest.fixture
def two_keys(tmp_path: Path) -> bytes:
    with TokenWriter(tmp_path / "two.ctok", SPEC) as writer:
        for key in ("aa", "ab"):
            writer.add(key, ITEMS["speaker 1/item 1"], num_samples=1)
    return (tmp_path / "two.ctok").read_bytes()


def test_same_key_twice_in_a_shard(two_keys: bytes, tmp_path: Path) -> None:
    twice = with_column("keys", lambda v: v.__setitem__(3, ord("a")), "u1")(two_keys)
    twice = with_column("hash", lambda v: v.__setitem__(slice(None), crc32(b"aa")), "u4")(twice)
    path = tmp_path / "twice.ctok"
    path.write_bytes(twice)
    with pytest.raises(TokenFileError, match=r"key 'aa' is in .* already"):
        TokenStore(path)


def test_index_that_names_another_item(two_keys: bytes, tmp_path: Path) -> None:
    """An index that lies consistently is found out by the blocks, whose check includes the key."""
    swapped = with_column("keys", lambda v: np.frombuffer(b"abaa", "u1"), "u1")(two_keys)
    swapped = with_column("order", lambda v: v[::-1].copy())(swapped)
    path = tmp_path / "swapped.ctok"
    path.write_bytes(swapped)
    with TokenStore(path) as store:
        with pytest.raises(TokenFileError, match="block 0 of item 'aa' isn't what was written"):
            store.read("aa")
        found = [(problem.key, problem.block) for problem in store.verify()]
        assert found == [("ab", None), ("ab", 0), ("aa", None), ("aa", 0)]


def test_wrong_hashes_are_found(two_keys: bytes, tmp_path: Path) -> None:
    path = tmp_path / "hash.ctok"
    path.write_bytes(with_column("hash", put(0, 1), "u4")(two_keys))
    with TokenStore(path) as store:
        assert ["1 hashes aren't those of their keys" in problem.message for problem in store.verify()] == [True]


def test_index_that_contradicts_the_records(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "contradiction.ctok"
    for name, value in (("gain", 3.0), ("num_samples", 300 * 320 - 1)):
        dtype = "f4" if name == "gain" else "u4"
        path.write_bytes(with_column(name, put(1, value), dtype)(good))
        with TokenStore(path) as store:
            problems = list(store.verify())
        assert [(problem.key, problem.block) for problem in problems] == [("speaker 0/item 300", None)]
        assert "the record is RecordHead(" in problems[0].message
        assert "the index has b'speaker 0/item 300'" in problems[0].message


def test_key_that_is_no_text(two_keys: bytes, tmp_path: Path) -> None:
    path = tmp_path / "key.ctok"
    path.write_bytes(with_column("keys", put(0, 0xFF), "u1")(two_keys))
    with TokenStore(path) as store:
        with pytest.raises(TokenFileError, match="the key of item 0 isn't UTF-8"):
            list(store.keys())
        assert list(store.verify())


def test_meta_column_that_lies(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "meta.ctok"
    path.write_bytes(with_directory(lambda d: d["meta"]["speaker"]["values"].__setitem__(2, 2**40))(good))
    with TokenStore(path) as store:
        with pytest.raises(TokenFileError, match="column 'meta speaker' is at"):
            store.meta_column("speaker")
        assert [problem.key for problem in store.verify()] == [None]


def test_damage_is_named_and_contained(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "damaged.ctok"
    path.write_bytes(good)
    with TokenStore(path) as store:
        start, _ = store._shards[0].span(1)
    damaged = bytearray(good)
    damaged[start + store._layout.block_stride + 3] ^= 1  # block 1 of item 1
    path.write_bytes(damaged)
    with TokenStore(path) as store:
        key = store.keys()[1]
        text = rf"damaged\.ctok: at byte {start + store._layout.block_stride}: block 1 of item '{key}'"
        with pytest.raises(TokenFileError, match=text):
            store.read(key)
        with pytest.raises(TokenFileError, match=text):
            store.read_batch([(store.keys()[0], 0, 1), (key, 250, 50)])
        np.testing.assert_array_equal(store.read(key, 0, 256), ITEMS[key][:, :256])
        for other in set(ITEMS) - {key}:
            np.testing.assert_array_equal(store.read(other), ITEMS[other])
        problems = list(store.verify())
        assert [(problem.path, problem.key, problem.block) for problem in problems] == [(str(path), key, 1)]
        assert "the other items are readable; encode this one again" in problems[0].message
    unchecked = TokenStore(path, verify_blocks=False)
    assert (unchecked.read(key) != ITEMS[key]).sum() == 1


def test_verify_reports_progress(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "good.ctok"
    path.write_bytes(good)
    seen: list[int] = []
    with TokenStore(path) as store:
        assert not list(store.verify(seen.append))
    assert sum(seen) == len(good)
