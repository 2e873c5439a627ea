"""Round trips through the token store, and what it says of bad input."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import InputError, TokenFileError
from codec.spec import CodecSpec
from codec.tokens import ItemInfo, PackedBatch, TokenStore, TokenWriter, merge, split, summarise


def make_spec(n_quantizers: int = 8, codebook_size: int = 1024, hop_length: int = 320, **fields: Any) -> CodecSpec:
    settings = {
        "name": "test_16k",
        "weights_hash": "c0ffee",
        "sample_rate": 16000,
        "hop_length": hop_length,
        "channels": 1,
        "n_quantizers": n_quantizers,
        "codebook_size": codebook_size,
        "encode_context": (0, 0),
        "decode_context": (8, 8),
    }
    return CodecSpec(**{**settings, **fields})


def random_codes(spec: CodecSpec, num_frames: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, spec.codebook_size, (spec.n_quantizers, num_frames))


LENGTHS = (1, 7, 255, 256, 257, 500, 512, 1000)
SPEC = make_spec()
ITEMS = {f"item {n}": random_codes(SPEC, n, n) for n in LENGTHS}


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "a.ctok"
    with TokenWriter(path, SPEC) as writer:
        for key, codes in ITEMS.items():
            meta = {"frames": codes.shape[1], "even": codes.shape[1] % 2 == 0}
            writer.add(key, codes, num_samples=codes.shape[1] * 320 - 5, gain=codes.shape[1] / 4, meta=meta)
    return path


@pytest.fixture
def store(shard: Path) -> Iterator[TokenStore]:
    with TokenStore(shard) as opened:
        yield opened


# --- round trips


@st.composite
def geometries(draw: st.DrawFn) -> tuple[CodecSpec, int, int, int]:
    """A codec, a length in frames, and a span within it."""
    spec = make_spec(
        n_quantizers=draw(st.sampled_from([1, 2, 3, 8, 64])),
        codebook_size=draw(st.one_of(st.integers(2, 65536), st.sampled_from([2, 255, 256, 257, 1024, 65536]))),
        hop_length=draw(st.sampled_from([1, 7, 320, 1920])),
    )
    total = draw(st.one_of(st.integers(1, 20), st.integers(250, 520)))
    start = draw(st.integers(0, total - 1))
    return spec, total, start, draw(st.integers(1, total - start))


@settings(max_examples=60, deadline=None)
@given(geometry=geometries(), seed=st.integers(0, 2**32), data=st.data())
def test_excerpts_are_slices_and_prefixes(
    tmp_path_factory: pytest.TempPathFactory,
    geometry: tuple[CodecSpec, int, int, int],
    seed: int,
    data: st.DataObject,
) -> None:
    spec, total, start, length = geometry
    codes = random_codes(spec, total, seed)
    path = tmp_path_factory.mktemp("round") / "x.ctok"
    with TokenWriter(path, spec) as writer:
        writer.add("other", codes[:, :1], num_samples=1)
        writer.add("key", codes, num_samples=total * spec.hop_length)
    with TokenStore(path) as store:
        assert store.spec == spec
        whole = store.read("key")
        assert whole.dtype == np.int64
        np.testing.assert_array_equal(whole, codes)
        k = data.draw(st.integers(1, spec.n_quantizers))
        np.testing.assert_array_equal(store.read("key", start, length, k), codes[:k, start : start + length])
        rows, lengths = store.read_batch([("key", start, length), ("other", 0, 1)], k).unpack()
        np.testing.assert_array_equal(rows[0, :, :length], codes[:k, start : start + length])
        np.testing.assert_array_equal(rows[1, :, 0], codes[:k, 0])
        assert (rows[1, :, 1:] == 0).all()
        assert lengths.tolist() == [length, 1]


def test_info_and_keys(store: TokenStore) -> None:
    assert list(store.keys()) == list(ITEMS) == list(store)
    assert store.keys()[1] == "item 7"
    assert store.keys()[-2:] == ["item 512", "item 1000"]
    assert len(store) == len(ITEMS)
    assert "item 500" in store
    assert "item 501" not in store
    assert 500 not in store
    assert store.n_quantizers == 8
    assert store.num_frames.tolist() == list(LENGTHS)
    assert store.num_samples.tolist() == [n * 320 - 5 for n in LENGTHS]
    info = store.info("item 7")
    assert info == ItemInfo("item 7", 7, 7 * 320 - 5, 16000, 1.75, {"frames": 7, "even": False})
    assert info.seconds == Fraction(2235, 16000)
    assert store.meta_column("frames").tolist() == list(LENGTHS)
    with pytest.raises(IndexError, match="item 8 of a store of 8"):
        store.keys()[8]


def test_meta_column_with_absent_and_compound_values(tmp_path: Path) -> None:
    metas: list[dict[str, Any] | None] = [None, {"a": [1, 2]}, {"b": None}, {"a": [1, 2], "b": "é"}, {}]
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        for i, meta in enumerate(metas):
            writer.add(str(i), ITEMS["item 1"], num_samples=1, meta=meta)
    store = TokenStore(tmp_path)
    assert store.meta_column("a").tolist() == [None, [1, 2], None, [1, 2], None]
    assert store.meta_column("b").tolist() == [None, None, None, "é", None]
    assert [store.info(key).meta for key in store] == [meta or {} for meta in metas]
    with pytest.raises(InputError, match=r"no item has the meta field 'c'; there are \['a', 'b'\]"):
        store.meta_column("c")


def test_more_meta_fields_than_columns(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        for i in range(3):
            meta = {f"field {j}": i for j in range(70)}
            writer.add(str(i), ITEMS["item 1"], num_samples=1, meta=meta if i != 1 else None)
    store = TokenStore(tmp_path / "a.ctok")
    assert store.meta_column("field 63").tolist() == [0, None, 2]
    assert store.meta_column("field 69").tolist() == [0, None, 2]
    assert store.info("2").meta["field 69"] == 2
    assert len(store._shards[0].meta_fields) == 64
    assert not list(store.verify())


def test_stored_prefix(tmp_path: Path) -> None:
    with TokenWriter(tmp_path / "a.ctok", SPEC, n_quantizers=3) as writer:
        writer.add("x", ITEMS["item 500"][:3], num_samples=500 * 320)
        with pytest.raises(InputError, match=r"shape \[8, 500\]; this shard takes \[3, T\]"):
            writer.add("y", ITEMS["item 500"], num_samples=500 * 320)
    store = TokenStore(tmp_path / "a.ctok")
    assert (store.spec.n_quantizers, store.n_quantizers) == (8, 3)
    np.testing.assert_array_equal(store.read("x"), ITEMS["item 500"][:3])
    with pytest.raises(InputError, match="n_quantizers is 4; the store holds 3; ask for 1 to 3"):
        store.read("x", n_quantizers=4)


def test_size_promise(tmp_path: Path) -> None:
    for frames, limit in ((500, 1.02), (3000, 1.01)):
        path = tmp_path / f"{frames}.ctok"
        with TokenWriter(path, SPEC) as writer:
            codes = random_codes(SPEC, frames)
            for i in range(400):
                writer.add(f"speaker{i % 7}/utt_{i:06d}", codes, num_samples=frames * 320)
        assert path.stat().st_size <= limit * 400 * frames * 8 * 10 / 8


# --- packed batches


def unpack_by_the_docstring(batch: PackedBatch, i: int, k: int, t: int) -> int:
    u = int(batch.first_frame[i]) + t
    n = u >> 8
    bit = (u & 255) * batch.bits
    last = int(batch.first_frame[i] + batch.lengths[i] - 1) >> 8
    run = int(batch.last_run_bytes[i]) if n == last else 32 * batch.bits
    p = int(batch.offsets[i]) + n * batch.block_stride + k * run + (bit >> 3)
    data = [int(byte) for byte in batch.data[p : p + 3]]
    word = data[0] | data[1] << 8 | data[2] << 16
    return (word >> (bit & 7)) & ((1 << batch.bits) - 1)


@pytest.mark.parametrize("n_quantizers", [None, 5])
@pytest.mark.parametrize("codebook_size", [16, 1000, 65536])
def test_packed_layout_is_as_documented(tmp_path: Path, n_quantizers: int | None, codebook_size: int) -> None:
    spec = make_spec(codebook_size=codebook_size)
    items = {str(n): random_codes(spec, n, n) for n in (3, 256, 700)}
    with TokenWriter(tmp_path / "a.ctok", spec) as writer:
        for key, codes in items.items():
            writer.add(key, codes, num_samples=codes.shape[1] * 320)
    excerpts = [("700", 250, 300), ("3", 1, 2), ("256", 0, 256), ("700", 513, 187), ("700", 3, 250)]
    batch = TokenStore(tmp_path / "a.ctok").read_batch(excerpts, n_quantizers)
    batch = pickle.loads(pickle.dumps(batch))
    rows, lengths = batch.unpack()
    assert lengths.dtype == rows.dtype == np.int64
    for i, (key, start, length) in enumerate(excerpts):
        for k in range(batch.n_quantizers):
            for t in {0, 1, 5, 6, length // 2, length - 1} & set(range(length)):
                assert unpack_by_the_docstring(batch, i, k, t) == items[key][k, start + t] == rows[i, k, t]
    assert repr(batch).startswith(f"PackedBatch(5 excerpts of up to 300 frames, {n_quantizers or 8} x ")


def test_prefix_leaves_the_rest_behind(store: TokenStore) -> None:
    run, short_run, spare = 320, 305, 8
    assert store.read_batch([("item 500", 10, 300)], 3).data.nbytes == 3 * run + 3 * short_run + spare
    assert store.read_batch([("item 500", 10, 300)]).data.nbytes == 8 * run + 8 * short_run + 2 * 4 + spare


def test_empty_batch(store: TokenStore) -> None:
    codes, lengths = store.read_batch([]).unpack()
    assert codes.shape == (0, 8, 0)
    assert lengths.shape == (0,)


@pytest.mark.parametrize(("start", "length"), [(-1, 5), (0, 0), (0, 8), (7, 1), (2**62, 1), (0, 2**62), (3, -1)])
def test_spans_outside_the_item(store: TokenStore, start: int, length: int) -> None:
    text = rf"'item 7': frames \[{start}, {start + length}\) asked for; the item has frames \[0, 7\)"
    with pytest.raises(InputError, match=text):
        store.read("item 7", start, length)
    with pytest.raises(InputError, match=text):
        store.read_batch([("item 500", 0, 500), ("item 7", start, length)])


def test_positions_are_integers(store: TokenStore) -> None:
    with pytest.raises(TypeError, match="float"):
        store.read("item 7", 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float"):
        store.read_batch([("item 7", 1.5, 2)])  # type: ignore[list-item]


def test_missing_keys(store: TokenStore) -> None:
    for call in (store.info, store.read, lambda key: store.read_batch([(key, 0, 1)])):
        with pytest.raises(InputError, match="no item 'nobody' in TokenStore"):
            call("nobody")
    with pytest.raises(InputError, match="valid Unicode"):
        store.read("\ud800")


# --- what the writer refuses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"codes": np.full((8, 4), 1024)}, "'new': code 1024; test_16k has codes 0 to 1023"),
        ({"codes": np.full((8, 4), -1)}, "'new': code -1; test_16k has codes 0 to 1023"),
        ({"codes": np.full((8, 4), 2**64 - 1, np.uint64)}, "code 18446744073709551615;"),
        ({"codes": np.zeros((7, 4), int)}, r"shape \[7, 4\]; this shard takes \[8, T\], T ≥ 1"),
        ({"codes": np.zeros((1, 8, 4), int)}, r"shape \[1, 8, 4\]"),
        ({"codes": np.zeros((8, 0), int)}, r"shape \[8, 0\]"),
        ({"codes": np.zeros((8, 4))}, "codes are float64; they must be integers"),
        ({"num_samples": 960}, "num_samples is 960; 4 frames of 320 samples fit 961 to 1280 samples"),
        ({"num_samples": 1281}, "num_samples is 1281; 4 frames of 320 samples fit 961 to 1280 samples"),
        ({"num_samples": 0}, "num_samples is 0; it must be an integer from 1"),
        ({"num_samples": 1280.0}, r"num_samples is 1280\.0; it must be an integer"),
        ({"key": "old"}, r"'old': this key is in .*a\.ctok already; keys are unique"),
        ({"key": ""}, "key is ''; it must be a string of at least one character"),
        ({"key": 5}, "key is 5; it must be a string"),
        ({"key": "\udcff"}, "isn't valid Unicode"),
        ({"key": "x" * 65536}, "takes 65536 bytes; at most 65535"),
        ({"gain": float("nan")}, "gain is nan; it must be a finite number"),
        ({"gain": 1e39}, r"gain is 1e\+39; it must be a finite number that fits a float32"),
        ({"gain": "loud"}, "gain is 'loud'"),
        ({"meta": {"a": float("inf")}}, "meta isn't JSON"),
        ({"meta": {"a": {1}}}, "meta isn't JSON"),
        ({"meta": {1: 2}}, "it must be a dict with string keys"),
        ({"meta": [1]}, "it must be a dict with string keys"),
    ],
)
def test_refused_items_leave_no_trace(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    good = {
        "key": "new",
        "codes": np.zeros((8, 4), np.int64),
        "num_samples": 1280,
        "gain": None,
        "meta": None,
    }
    undisturbed, disturbed = tmp_path / "undisturbed.ctok", tmp_path / "a.ctok"
    for path in (undisturbed, disturbed):
        with TokenWriter(path, SPEC) as writer:
            writer.add("old", ITEMS["item 7"], num_samples=7 * 320)
            if path == disturbed:
                with pytest.raises(InputError, match=text):
                    writer.add(**{**good, **change})
            writer.add(**good)
    assert undisturbed.read_bytes() == disturbed.read_bytes()


@pytest.mark.parametrize("dtype", ["uint16", "int32", "uint64", ">i8", "torch"])
def test_integer_dtypes(tmp_path: Path, dtype: str) -> None:
    codes = ITEMS["item 257"]
    if dtype == "torch":
        given: Any = pytest.importorskip("torch").from_numpy(codes).clone()
    else:
        given = codes.astype(dtype)
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        writer.add("x", given, num_samples=257 * 320)
    np.testing.assert_array_equal(TokenStore(tmp_path / "a.ctok").read("x"), codes)


# --- codebooks at different rates


@st.composite
def multiscale(draw: st.DrawFn) -> tuple[CodecSpec, tuple[int, ...], int, int, int]:
    """A codec, its divisors, a length in frames, and a span within it."""
    divisors = tuple(draw(st.lists(st.sampled_from([1, 2, 4, 16, 256]), min_size=1, max_size=6)))
    spec = make_spec(len(divisors), draw(st.sampled_from([2, 1000, 4096])), hop_length=512)
    total = draw(st.one_of(st.integers(1, 20), st.integers(250, 800)))
    start = draw(st.integers(0, total - 1))
    return spec, divisors, total, start, draw(st.integers(1, total - start))


def at_full_rate(spec: CodecSpec, divisors: tuple[int, ...], total: int, seed: int = 0) -> np.ndarray:
    codes = random_codes(spec, total, seed)
    return np.stack([np.repeat(row[::d], d)[:total] for row, d in zip(codes, divisors, strict=True)])


@settings(max_examples=60, deadline=None)
@given(geometry=multiscale(), data=st.data())
def test_codebooks_at_different_rates(
    tmp_path_factory: pytest.TempPathFactory,
    geometry: tuple[CodecSpec, tuple[int, ...], int, int, int],
    data: st.DataObject,
) -> None:
    spec, divisors, total, start, length = geometry
    codes = at_full_rate(spec, divisors, total)
    folder = tmp_path_factory.mktemp("scales")
    with TokenWriter(folder / "x.ctok", spec, frame_divisors=divisors) as writer:
        writer.add("one", codes[:, :1], num_samples=1)
        writer.add("key", codes, num_samples=total * 512)
        writer.begin("streamed")
        cut = data.draw(st.integers(0, total))
        writer.append(codes[:, :cut])
        writer.append(codes[:, cut:])
        writer.end(total * 512)
    with TokenStore(folder) as store:
        assert store.frame_divisors == divisors
        assert not list(store.verify())
        k = data.draw(st.integers(1, len(divisors)))
        for key in ("key", "streamed"):
            np.testing.assert_array_equal(store.read(key), codes)
            np.testing.assert_array_equal(store.read(key, start, length, k), codes[:k, start : start + length])
        rows, lengths = store.read_batch([("one", 0, 1), ("key", start, length)], k).unpack()
        np.testing.assert_array_equal(rows[1, :, :length], codes[:k, start : start + length])
        np.testing.assert_array_equal(rows[0, :, 0], codes[:k, 0])
        assert lengths.tolist() == [1, length]
        assert [usage.used_entries for usage in summarise(store).usage] == [len(np.unique(row)) for row in codes]


def test_multiscale_shards(tmp_path: Path) -> None:
    spec, divisors = make_spec(3, 4096, hop_length=512), (4, 2, 1)
    codes = at_full_rate(spec, divisors, 1000)
    with TokenWriter(tmp_path / "a.ctok", spec, frame_divisors=divisors) as writer:
        writer.add("x", codes, num_samples=1000 * 512)
        writer.add("y", codes, num_samples=1000 * 512)
    floor = 2 * (250 + 500 + 1000) * 12 / 8
    assert (tmp_path / "a.ctok").stat().st_size < 1.2 * floor
    split(tmp_path / "a.ctok", tmp_path / "parts", 2)
    merge(tmp_path / "parts", tmp_path / "b.ctok")
    assert (tmp_path / "a.ctok").read_bytes() == (tmp_path / "b.ctok").read_bytes()
    with pytest.raises(TokenFileError, match=r"frame_divisors \(\[4, 2, 1\], not \[1, 1, 1\]\)"):
        TokenWriter(tmp_path / "b.ctok", spec, resume=True)


def test_codes_that_change_where_they_are_shared(tmp_path: Path) -> None:
    spec, divisors = make_spec(3, 4096, hop_length=512), (1, 2, 4)
    codes = at_full_rate(spec, divisors, 300)
    wrong = codes.copy()
    wrong[2, 262] ^= 1
    with TokenWriter(tmp_path / "a.ctok", spec, frame_divisors=divisors) as writer:
        text = "'x': the code of codebook 2 changes at frame 262; it has one per 4 frames; give codes at the full rate"
        with pytest.raises(InputError, match=text):
            writer.add("x", wrong, num_samples=300 * 512)
        writer.begin("x")
        writer.append(codes[:, :261])
        with pytest.raises(InputError, match=text):
            writer.append(wrong[:, 261:])
        writer.append(codes[:, 261:])
        writer.end(300 * 512)
    np.testing.assert_array_equal(TokenStore(tmp_path).read("x"), codes)
    for bad in ((1, 2), (1, 2, 3), (1, 2, 512), (1, 2, True)):
        with pytest.raises(InputError, match=r"frame_divisors are .*; they must be 3 powers of two from 1 to 256"):
            TokenWriter(tmp_path / "b.ctok", spec, frame_divisors=bad)


# --- shards


def test_folder_list_and_single_shard_agree(tmp_path: Path) -> None:
    for name, keys in (("b", LENGTHS[:3]), ("a", LENGTHS[3:5]), ("c", LENGTHS[5:])):
        with TokenWriter(tmp_path / f"{name}.ctok", SPEC) as writer:
            for n in keys:
                writer.add(f"item {n}", ITEMS[f"item {n}"], num_samples=n * 320, meta={"shard": name})
    (tmp_path / "notes.txt").write_text("not a shard")
    store = TokenStore(tmp_path)
    assert list(store.keys()) == [f"item {n}" for n in (*LENGTHS[3:5], *LENGTHS[:3], *LENGTHS[5:])]
    assert store.meta_column("shard").tolist() == ["a"] * 2 + ["b"] * 3 + ["c"] * 3
    excerpts = [(key, 0, codes.shape[1]) for key, codes in ITEMS.items()]
    rows, lengths = store.read_batch(excerpts).unpack()
    for row, length, codes in zip(rows, lengths, ITEMS.values(), strict=True):
        np.testing.assert_array_equal(row[:, :length], codes)
    for key, codes in ITEMS.items():
        np.testing.assert_array_equal(store.read(key), codes)
    listed = TokenStore([tmp_path / "c.ctok", tmp_path / "b.ctok"])
    assert list(listed.keys()) == [f"item {n}" for n in (*LENGTHS[5:], *LENGTHS[:3])]


def test_key_in_two_shards(tmp_path: Path) -> None:
    for name in "ab":
        with TokenWriter(tmp_path / f"{name}.ctok", SPEC) as writer:
            writer.add("twice", ITEMS["item 1"], num_samples=1)
            writer.add(name, ITEMS["item 1"], num_samples=1)
    with pytest.raises(TokenFileError, match=r"b\.ctok: key 'twice' is in .*a\.ctok already; keys are unique"):
        TokenStore(tmp_path)


def test_keys_of_equal_hash(tmp_path: Path) -> None:
    twins = ("plumless", "buckeroo")
    assert crc32(b"plumless") == crc32(b"buckeroo")
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        writer.add("plumless", ITEMS["item 7"], num_samples=7 * 320)
    with TokenStore(tmp_path) as store:
        assert "buckeroo" not in store
        for call in (store.read, lambda key: store.read_batch([("plumless", 0, 1), (key, 0, 1)])):
            with pytest.raises(InputError, match="no item 'buckeroo'"):
                call("buckeroo")
    with TokenWriter(tmp_path / "a.ctok", SPEC, resume=True) as writer:
        writer.add("buckeroo", ITEMS["item 1"], num_samples=1)
    with TokenStore(tmp_path) as store:
        for key, item in zip(twins, ("item 7", "item 1"), strict=True):
            np.testing.assert_array_equal(store.read(key), ITEMS[item])
        codes, _ = store.read_batch([(key, 0, 1) for key in twins]).unpack()
        np.testing.assert_array_equal(codes, np.stack([ITEMS["item 7"][:, :1], ITEMS["item 1"]]))
    with TokenWriter(tmp_path / "b.ctok", SPEC) as writer:
        writer.add("buckeroo", ITEMS["item 1"], num_samples=1)
    with pytest.raises(TokenFileError, match=r"b\.ctok: key 'buckeroo' is in .*a\.ctok already"):
        TokenStore(tmp_path)


def test_shards_of_different_codecs(tmp_path: Path) -> None:
    for name, spec in (("a", SPEC), ("b", make_spec(weights_hash="decade"))):
        with TokenWriter(tmp_path / f"{name}.ctok", spec) as writer:
            writer.add(name, ITEMS["item 1"], num_samples=1)
    with pytest.raises(TokenFileError, match=r"differs from .*a\.ctok in weights_hash \('decade', not 'c0ffee'\)"):
        TokenStore(tmp_path)


def test_merge_and_split(shard: Path, tmp_path: Path) -> None:
    paths = split(shard, tmp_path / "parts", 3)
    assert [Path(path).name for path in paths] == ["00000.ctok", "00001.ctok", "00002.ctok"]
    assert all(len(TokenStore(path)) for path in paths)
    assert list(TokenStore(tmp_path / "parts").keys()) == list(ITEMS)
    merge(tmp_path / "parts", tmp_path / "again.ctok")
    assert (tmp_path / "again.ctok").read_bytes() == shard.read_bytes()
    assert [len(TokenStore(path)) for path in split(shard, tmp_path / "most", len(ITEMS))] == [1] * len(ITEMS)
    with TokenWriter(tmp_path / "long first.ctok", SPEC) as writer:
        for n in (1000, 1, 7, 255):
            writer.add(str(n), ITEMS[f"item {n}"], num_samples=n * 320)
    parts = split(tmp_path / "long first.ctok", tmp_path / "uneven", 3)
    assert [list(TokenStore(part).keys()) for part in parts] == [["1000"], ["1"], ["7", "255"]]
    with pytest.raises(InputError, match="num_shards is 9; the store has 8 items"):
        split(shard, tmp_path / "more", 9)
    with pytest.raises(InputError, match="exists"):
        merge(shard, tmp_path / "again.ctok")


# --- paths


def test_paths_that_are_no_store(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="no such token file or folder; check the path"):
        TokenStore(tmp_path / "nothing.ctok")
    with pytest.raises(TokenFileError, match=r"this folder holds no \.ctok file; give a token store"):
        TokenStore(tmp_path)
    with pytest.raises(TokenFileError, match="an empty list of token files"):
        TokenStore([])
    with pytest.raises(InputError, match="can't write to a URL"):
        TokenWriter("memory://a.ctok", SPEC)
    with pytest.raises(TokenFileError, match=r"can't be written \(No such file or directory\)"):
        TokenWriter(tmp_path / "missing" / "a.ctok", SPEC)


def test_import_needs_no_torch() -> None:
    code = "import sys, codec.tokens; sys.exit('torch' in sys.modules or 'fsspec' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
