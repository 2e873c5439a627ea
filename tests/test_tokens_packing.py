"""Bit packing against a bit-by-bit reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import InputError
from codec.tokens.packing import pack, packed_bytes, unpack


def reference_pack(codes: np.ndarray, bits: int) -> np.ndarray:
    ones = (codes[..., None] >> np.arange(bits)) & 1
    return np.packbits(ones.reshape(*codes.shape[:-1], -1).astype(np.uint8), axis=-1, bitorder="little")


@settings(max_examples=200, deadline=None)
@given(bits=st.integers(1, 16), rows=st.integers(1, 4), n=st.integers(1, 300), seed=st.integers(0, 2**32))
def test_pack_is_the_reference_and_unpack_its_inverse(bits: int, rows: int, n: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, n))
    packed = pack(codes, bits)
    assert packed.dtype == np.uint8
    assert packed.shape == (rows, packed_bytes(n, bits))
    np.testing.assert_array_equal(packed, reference_pack(codes, bits))
    unpacked = unpack(packed, bits, n)
    assert unpacked.dtype == np.int64
    np.testing.assert_array_equal(unpacked, codes)


@pytest.mark.parametrize("bits", range(1, 17))
def test_extreme_codes_across_many_groups(bits: int) -> None:
    # More groups than are worked on at once, with every bit set and every other code zero.
    codes = np.zeros(8 * 4096 * 2 + 5, np.int64)
    codes[::2] = (1 << bits) - 1
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits, len(codes)), codes)


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_any_integer_dtype_and_stride(dtype: type) -> None:
    codes = np.arange(60, dtype=dtype).reshape(3, 20)[:, ::2]
    np.testing.assert_array_equal(pack(codes, 6), reference_pack(codes.astype(np.int64), 6))


def test_literal_bytes() -> None:
    # 10 bits each, least significant first: 0x001, 0x3ff, 0x155, 0x2aa.
    assert pack(np.array([0x001, 0x3FF, 0x155, 0x2AA]), 10).tobytes().hex() == "01fc5f95aa"


def test_errors() -> None:
    with pytest.raises(InputError, match="bits per code is 17; it must be 1 to 16"):
        pack(np.zeros(3, np.int64), 17)
    with pytest.raises(InputError, match="5 codes of 10 bits take 7 bytes; the runs have 6"):
        unpack(np.zeros(6, np.uint8), 10, 5)
