"""Codes ↔ packed bits, vectorised. Bit i of a run is bit i % 8 (0 = least significant) of its byte i // 8."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from codec.errors import InputError

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.int64]

_CHUNK_GROUPS = 4096  # groups of eight codes worked on at once: the temporaries stay in the cache


def packed_bytes(num_codes: int, bits: int) -> int:
    """Bytes of one run: `ceil(num_codes * bits / 8)`."""
    return (num_codes * bits + 7) >> 3


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 16:
        raise InputError(f"bits per code is {bits}; it must be 1 to 16 (codebooks of 2 to 65536 entries)")


def pack(codes: npt.NDArray[np.integer], bits: int) -> Bytes:
    """Pack codes along the last axis.

    Args:
        codes: Integers `[..., n]`, each in `[0, 2**bits)` (not checked: higher bits would spill).
        bits: Bits per code, 1 to 16.

    Returns:
        uint8 `[..., ceil(n * bits / 8)]`; the bits after the last code are zero.

    Raises:
        InputError: `bits` out of range.

    >>> pack(np.array([1, 2, 3]), 4).tolist()
    [33, 3]
    """
    _check_bits(bits)
    *rows, n = codes.shape
    groups = -(-n // 8)
    if n % 8 or codes.dtype != np.uint64 or not codes.flags.c_contiguous:
        aligned = np.zeros((*rows, groups * 8), np.uint64)
        aligned[..., :n] = codes
    else:
        aligned = codes
    # Eight codes become `bits` bytes: two codes, then four, then eight in a pair of 64-bit words.
    pairs = aligned.reshape(-1, 2)
    two = pairs[:, 0] | (pairs[:, 1] << np.uint64(bits))
    two = two.reshape(-1, 2)
    four = (two[:, 0] | (two[:, 1] << np.uint64(2 * bits))).reshape(-1, 2)
    words = np.zeros((len(four), 1 if bits <= 8 else 2), "<u8")
    words[:, 0] = four[:, 0] | (four[:, 1] << np.uint64(4 * bits))  # numpy shifts by 64 to zero
    if bits > 8:
        words[:, 1] = four[:, 1] >> np.uint64(64 - 4 * bits)
    packed = np.ascontiguousarray(words.view(np.uint8)[:, :bits]).reshape(*rows, groups * bits)
    return packed[..., : packed_bytes(n, bits)]


def unpack(data: Bytes, bits: int, num_codes: int) -> Codes:
    """The inverse of `pack`.

    Args:
        data: uint8 `[..., ceil(num_codes * bits / 8)]`.
        bits: Bits per code, 1 to 16.
        num_codes: Codes per run, n.

    Returns:
        int64 `[..., n]`.

    Raises:
        InputError: `bits` out of range, or the runs' size isn't that of n codes.
    """
    _check_bits(bits)
    *rows, size = data.shape
    if size != packed_bytes(num_codes, bits):
        expected = packed_bytes(num_codes, bits)
        raise InputError(f"{num_codes} codes of {bits} bits take {expected} bytes; the runs have {size}")
    groups = -(-num_codes // 8)
    total = int(np.prod(rows, dtype=np.int64)) * groups
    # Eight spare bytes, because each load below is 64 bits wide.
    padded = np.zeros(total * bits + 8, np.uint8)
    padded[: total * bits].reshape(*rows, groups * bits)[..., :size] = data
    codes = np.empty((total, 8), np.int64)
    for first in range(0, total, _CHUNK_GROUPS):
        count = min(_CHUNK_GROUPS, total - first)
        _unpack_groups(padded, bits, first, codes[first : first + count])
    return codes.reshape(*rows, groups * 8)[..., :num_codes]


def _load(padded: Bytes, offset: int, stride: int, count: int) -> npt.NDArray[np.uint64]:
    """`count` little-endian 64-bit words, `stride` bytes apart: unaligned loads, one per group."""
    view: npt.NDArray[np.uint64] = np.ndarray(count, "<u8", padded.data, offset, (stride,))
    return view.astype(np.uint64)


def _unpack_groups(padded: Bytes, bits: int, first: int, out: Codes) -> None:
    """Split groups of eight codes in two, three times; `out` is int64 [groups, 8]."""
    count = len(out)
    four = np.empty((count, 2), np.uint64)
    mask = np.uint64((1 << 4 * bits) - 1)
    np.bitwise_and(_load(padded, first * bits, bits, count), mask, out=four[:, 0])
    # The second four codes start at bit 4 * bits: in the middle of a byte if `bits` is odd.
    second = _load(padded, first * bits + bits // 2, bits, count)
    np.bitwise_and(second >> np.uint64(4) if bits % 2 else second, mask, out=four[:, 1])
    two = np.empty((count, 4), np.uint64)
    np.bitwise_and(four, np.uint64((1 << 2 * bits) - 1), out=two[:, 0::2])
    np.right_shift(four, np.uint64(2 * bits), out=two[:, 1::2])
    unsigned = out.view(np.uint64)
    np.bitwise_and(two, np.uint64((1 << bits) - 1), out=unsigned[:, 0::2])
    np.right_shift(two, np.uint64(bits), out=unsigned[:, 1::2])
