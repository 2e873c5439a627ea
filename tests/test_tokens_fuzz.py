"""The fuzz target of fuzz_tokens.py, for as long as a test may take, and what the long runs found."""

import json
import random
import zlib
from pathlib import Path
from zlib import crc32

import fuzz_tokens
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tokens import ITEMS, SPEC, make_spec
from test_tokens_hostile import put, with_column

from codec.errors import InputError, TokenFileError
from codec.tokens import TokenStore, TokenWriter, layout, summarise


@pytest.mark.parametrize("seed", range(4))
def test_mutated_files(seed: int) -> None:
    rng = random.Random(seed)
    pool = list(fuzz_tokens.seeds())
    for data in pool:
        fuzz_tokens.one_input(data)
    for _ in range(400):
        data = fuzz_tokens.mutate(rng.choice(pool), rng)
        fuzz_tokens.one_input(data)
        pool.append(data)


def test_the_target_reaches_what_lies_behind_the_checksums() -> None:
    """A file whose checksums are made right opens and reads, so the target would see what goes wrong there."""
    good = next(fuzz_tokens.seeds())
    broken = bytearray(good[1:])
    start = 24 + int.from_bytes(broken[12:16], "little")
    for i in (16, start, -10, -20):
        broken[i] ^= 1
    path = fuzz_tokens._FOLDER / "sealed.ctok"
    path.write_bytes(fuzz_tokens.sealed(bytes(broken), fuzz_tokens.SEALED))
    with TokenStore(path) as store:
        assert not list(store.verify())
    path.write_bytes(broken)
    with pytest.raises(TokenFileError):
        TokenStore(path)


def one_item(path: Path) -> bytes:
    with TokenWriter(path, SPEC) as writer:
        writer.add("x", ITEMS["item 7"], num_samples=7 * 320, meta={"field": "a text of some length"})
    return path.read_bytes()


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999", '"\\ud800"'])
def test_meta_that_could_not_be_written_again(tmp_path: Path, value: str) -> None:
    """Python's JSON takes more than JSON is: such a record was read, but resuming or copying it failed."""
    path = tmp_path / "a.ctok"
    data = one_item(path)
    old = b'{"field":"a text of some length"}'
    new = f'{{"field":{value}}}'.encode().ljust(len(old))
    start = 24 + int.from_bytes(data[12:16], "little")
    stop = data.index(old) + len(old)
    head = data[start + 4 : stop - len(old)] + new
    forged = data[:start] + crc32(head).to_bytes(4, "little") + head + data[stop:]
    path.write_bytes(forged)
    with TokenStore(path) as store:
        with pytest.raises(TokenFileError, match="an item's meta isn't JSON"):
            store.info("x")
        assert [problem.key for problem in store.verify()] == ["x"]
    path.rename(tmp_path / "b.ctok.unfinished")
    with TokenWriter(tmp_path / "b.ctok", SPEC, resume=True) as writer:
        assert not len(writer)


def test_spec_that_is_no_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"can't be written as JSON .*; give names of valid Unicode"):
        TokenWriter(tmp_path / "a.ctok", make_spec(name="\ud800"))
    assert not list(tmp_path.iterdir())


def test_summary_of_a_store_that_does_not_find_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "a.ctok"
    path.write_bytes(with_column("hash", put(0, 1), "u4")(one_item(path)))
    with (
        TokenStore(path) as store,
        pytest.raises(TokenFileError, match=r"the index lists key 'x' but doesn't find it; verify\(\) names"),
    ):
        summarise(store)


@given(st.binary(max_size=100), st.integers(0, 2**32 - 1))
def test_block_checks(data: bytes, start: int) -> None:
    """Whichever CRC-32 is installed, and that a block with its check behind it has a known one."""
    assert layout.crc32(data, start) == zlib.crc32(data, start)
    whole = data + zlib.crc32(data, start).to_bytes(4, "little")
    assert zlib.crc32(whole, start) == layout._CRC_OF_ALL


def test_json_is_as_strict_as_the_writer() -> None:
    for value in ({"a": [1, 2.5, None, True, "é\U0001f600\n"]}, [], 10**400, "\\ud800"):
        text = json.dumps(value).encode()
        assert layout.parse_json("a.ctok", 0, text, "it") == value
        assert layout.parse_json("a.ctok", 0, layout.compact_json(value), "it") == value
    for text in (b"\xff", b"1" * 5000, '"a"'.encode("utf-16"), b"[" * 100_000):
        with pytest.raises(TokenFileError, match="it isn't JSON"):
            layout.parse_json("a.ctok", 0, text, "it")
