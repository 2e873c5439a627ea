"""Random numbers and permutations as pure functions of (seed, stream, counter), for whole arrays at once."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
# Measured on all permutations of 2 to 7 elements: fewer rounds favour some. Wide halves need far fewer.
_ROUNDS_SMALL, _ROUNDS = 24, 8
_SMALL_BITS = np.uint64(12)


def philox(seed: int, stream: int | Words, counters: NDArray[np.int64] | Words) -> tuple[Words, Words]:
    """128 random bits per counter: Philox 4x32-10 (Salmon et al. 2011), keyed by the seed.

    For one seed the function is a bijection of (stream, counter), so no two draws share a block; another seed is
    another key, unrelated to it by any shift of the counter.

    Args:
        seed: 0 … 2**64 - 1.
        stream: 0 … 2**64 - 1, one for all or one per counter.
        counters: Any shape.

    Returns:
        Two arrays of 64 random bits, of the counters' shape.
    """
    counters = np.asarray(counters).astype(np.uint64)
    shape = counters.shape
    streams = np.broadcast_to(np.asarray(stream, np.uint64), shape).reshape(-1)
    flat = counters.reshape(-1)
    # Rows of `even` are words 0 and 2, those of `odd` words 1 and 3: the two products of a round are one.
    even = np.stack([flat & _LOW, streams & _LOW])
    odd = np.stack([flat >> _32, streams >> _32])
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        product = even * _MULTIPLIERS
        key = np.array([[keys[0]], [keys[1]]], np.uint64)
        even = (product >> _32)[::-1] ^ odd ^ key
        odd = (product & _LOW)[::-1]
        keys = [(k + w) & 0xFFFFFFFF for k, w in zip(keys, _WEYL, strict=True)]
    words = even | (odd << _32)
    return words[0].reshape(shape), words[1].reshape(shape)


def unit(words: Words) -> NDArray[np.float64]:
    """Random words as numbers in `[0, 1)`, multiples of 2**-53."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(words: Words, limits: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Random words as integers in `[0, limit)`; a value's odds are off by at most limit / 2**64 of themselves."""
    return (words % np.asarray(limits).astype(np.uint64)).astype(np.int64)


def permuted(index: NDArray[np.int64], sizes: NDArray[np.int64] | int, keys: Words) -> NDArray[np.int64]:
    """Where each index goes in its own random permutation of `range(size)`; nothing is stored.

    A Feistel network over the next power of two, walked until it falls inside `size` (less than two steps on
    average).

    Args:
        index: `[n]`, from 0 to size - 1.
        sizes: One for all or `[n]`, 1 … 2**62.
        keys: 64 random bits `[n]` each: equal keys and sizes are the same permutation.
    """
    sizes = np.broadcast_to(np.asarray(sizes, np.int64), index.shape)
    # frexp is exact up to 2**53 and at most one bit too generous beyond.
    bits = np.frexp((sizes - 1).astype(np.float64))[1].astype(np.uint64)
    result = _feistel(index.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= sizes.astype(np.uint64))
    while outside.size:
        again = _feistel(result[outside], bits[outside], keys[outside])
        result[outside] = again
        outside = outside[again >= sizes[outside].astype(np.uint64)]
    return result.astype(np.int64)


def _feistel(value: Words, bits: Words, keys: Words) -> Words:
    right_bits = (bits + np.uint64(1)) >> np.uint64(1)
    left, right = value >> right_bits, value & ((np.uint64(1) << right_bits) - np.uint64(1))
    left, right = _rounds(left, right, bits, keys, range(_ROUNDS))
    small = np.flatnonzero(bits < _SMALL_BITS)
    if small.size:
        more = range(_ROUNDS, _ROUNDS_SMALL)
        left[small], right[small] = _rounds(left[small], right[small], bits[small], keys[small], more)
    return (left << right_bits) | right


def _rounds(left: Words, right: Words, bits: Words, keys: Words, steps: range) -> tuple[Words, Words]:
    right_bits = (bits + np.uint64(1)) >> np.uint64(1)
    right_mask = (np.uint64(1) << right_bits) - np.uint64(1)
    left_mask = (np.uint64(1) << (bits - right_bits)) - np.uint64(1)
    for step in steps:
        key = keys + np.uint64((step + 1) * 0x9E3779B97F4A7C15 % 2**64)
        if step % 2:
            right = right ^ (_mixed(left + key) & right_mask)
        else:
            left = left ^ (_mixed(right + key) & left_mask)
    return left, right


def _mixed(words: Words) -> Words:
    """SplitMix64's finaliser."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def stream_of(name: str) -> int:
    """A name's 64-bit stream, the same in every process. It is odd; the loaders' own streams are even."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1
