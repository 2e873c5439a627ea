"""What a store holds, in numbers people ask for."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from codec.errors import TokenFileError
from codec.tokens.store import TokenStore

# Read for the codebook statistics: enough for stable figures, quick on any store.
_SAMPLED_ITEMS = 1000
_SAMPLED_FRAMES = 2048


@dataclass(frozen=True)
class CodebookUsage:
    """How one codebook is used.

    Attributes:
        used_entries: Entries that occur.
        entropy_bits: Order-0 entropy of a code, in bits; at most `log2(codebook_size)`.
    """

    used_entries: int
    entropy_bits: float


@dataclass(frozen=True)
class StoreSummary:
    """A store in numbers.

    Attributes:
        codec: Name of the codec.
        weights_hash: Its identity.
        sample_rate: Hz.
        hop_length: Samples per frame.
        num_quantizers_stored: Codebooks in the store, of `num_quantizers_codec`.
        num_quantizers_codec: Codebooks of the codec.
        codebook_size: Entries per codebook.
        num_shards: Files.
        num_items: Items.
        hours: Duration of all items.
        num_bytes: Size of all shards.
        bits_per_second: All bytes over all seconds.
        times_smaller_than_pcm16: 16-bit PCM at the codec's rate and channels over the shards' size.
        lengths: (lower bound in seconds, items that are at least that and below the next bound).
        usage: One per codebook, from the beginnings of `num_items_sampled` items evenly spread.
        num_items_sampled: Items read for `usage`.
    """

    codec: str
    weights_hash: str
    sample_rate: int
    hop_length: int
    num_quantizers_stored: int
    num_quantizers_codec: int
    codebook_size: int
    num_shards: int
    num_items: int
    hours: float
    num_bytes: int
    bits_per_second: float
    times_smaller_than_pcm16: float
    lengths: list[tuple[float, int]]
    usage: list[CodebookUsage]
    num_items_sampled: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


LENGTH_BOUNDS = (0, 0.5, 1, 2, 5, 10, 20, 30, 60, 300, 1800, 3600)


def summarise(store: TokenStore) -> StoreSummary:
    """Counts, sizes, lengths and codebook usage of a store.

    Raises:
        TokenFileError: An item that is read for the codebook usage is damaged.
    """
    spec = store.spec
    samples = store.num_samples
    total = int(samples.sum())
    seconds = samples / spec.sample_rate
    edges = np.array([*LENGTH_BOUNDS, np.inf])
    counts = np.histogram(seconds, edges)[0]
    usage, sampled = _usage(store)
    return StoreSummary(
        codec=spec.name,
        weights_hash=spec.weights_hash,
        sample_rate=spec.sample_rate,
        hop_length=spec.hop_length,
        num_quantizers_stored=store.n_quantizers,
        num_quantizers_codec=spec.n_quantizers,
        codebook_size=spec.codebook_size,
        num_shards=len(store.paths),
        num_items=len(store),
        hours=total / spec.sample_rate / 3600,
        num_bytes=store.num_bytes,
        bits_per_second=store.num_bytes * 8 * spec.sample_rate / total if total else 0.0,
        times_smaller_than_pcm16=total * 2 * spec.channels / store.num_bytes,
        lengths=[(float(low), int(count)) for low, count in zip(LENGTH_BOUNDS, counts, strict=True) if count],
        usage=usage,
        num_items_sampled=sampled,
    )


def _usage(store: TokenStore) -> tuple[list[CodebookUsage], int]:
    size, keys = store.spec.codebook_size, store.keys()
    count = min(len(keys), _SAMPLED_ITEMS)
    histogram = np.zeros((store.n_quantizers, size), np.int64)
    for i in range(count):
        key = keys[i * len(keys) // count]
        if key not in store:
            found = f"{store!r}: the index lists key {key!r} but doesn't find it"
            raise TokenFileError(f"{found}; verify() names the damage; restore the file from a copy")
        codes = store.read(key, 0, min(store.info(key).num_frames, _SAMPLED_FRAMES))
        for level, (row, divisor) in enumerate(zip(codes, store.frame_divisors, strict=True)):
            histogram[level] += np.bincount(row[::divisor], minlength=size)
    usage = []
    for row in histogram if count else ():
        share = row[row > 0] / row.sum()
        usage.append(CodebookUsage(int((row > 0).sum()), float(-(share * np.log2(share)).sum())))
    return usage, count
