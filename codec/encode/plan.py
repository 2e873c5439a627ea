"""Which items go into which shard: a function of the corpus alone, whatever processes there are.

Items in order of their keys are cut into units, among which batches are made, and units into parts. A part is written
by one process, to a shard of its own (or several, where it grows too large). So the same corpus gives the same shards
on any number of processes, and after any number of deaths.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from codec.encode.items import Item, guessed_seconds
from codec.encode.pipeline import Unit
from codec.encode.settings import EncodeSettings
from codec.encode.state import Examined
from codec.spec import CodecSpec

UNIT_ITEMS = 256
"""Most items in a unit."""

UNIT_SECONDS = 600
"""Audio, roughly, from which on a unit is closed."""

PART_SECONDS = 3600
"""Audio, roughly, from which on a part isn't made larger until there are `MAX_SMALL_PARTS`."""

MAX_SMALL_PARTS = 64


@dataclass
class Part:
    """Items that one process encodes, and where they go.

    Attributes:
        number: Its place in the plan.
        name: What its shards' names begin with; the file name of the only shard of a store that is one file.
        units: Its items.
    """

    number: int
    name: str
    units: list[Unit]

    @property
    def num_items(self) -> int:
        """Items, those that are stored included."""
        return sum(len(unit.items) for unit in self.units)

    @property
    def is_done(self) -> bool:
        """Whether all of its items are stored."""
        return all(length >= 0 for unit in self.units for length in unit.stored)

    def owns(self, shard: str) -> bool:
        """Whether a shard of this name is one of the part's."""
        head, _, tail = self.name.partition("-")
        return shard == self.name or (shard.startswith(head) and shard.endswith(f"-{tail}.ctok") and bool(tail))

    def shard_name(self, number: int) -> str:
        """The file name of its n-th shard."""
        if self.name.endswith(".ctok"):
            return self.name
        head, _, tail = self.name.partition("-")
        return f"{head}{f'.{number:02d}' if number else ''}-{tail}.ctok"


def corpus_hash(keys: Iterable[str]) -> str:
    """A short hash of the keys: what tells the shards of one plan from those of another."""
    digest = hashlib.blake2b(digest_size=4)
    for key in keys:
        digest.update(key.encode() + b"\0")
    return digest.hexdigest()


def make_plan(
    items: Sequence[Item], examined: Examined, name: str | None, spec: CodecSpec, settings: EncodeSettings
) -> list[Part]:
    """Cuts the items that no shard of an earlier plan holds into parts.

    Args:
        items: All items of the corpus, in order.
        examined: What the store holds.
        name: The store's file name, if it is one file.
        spec: The codec.
        settings: How items become codes.
    """
    numbers = [i for i in range(len(items)) if not examined.elsewhere[i]]
    if not numbers:
        return []
    shard_seconds = settings.shard_bytes / _bytes_per_second(spec, settings)
    limit = min(UNIT_SECONDS, shard_seconds) if settings.shard_bytes else UNIT_SECONDS
    cuts, lengths = _unit_cuts([guessed_seconds(items[i]) for i in numbers], limit)
    units = []
    for first, stop in pairwise([*cuts, len(numbers)]):
        members = numbers[first:stop]
        stored, rows = examined.stored[members].tolist(), examined.rows[members].tolist()
        units.append(Unit(0, [items[i] for i in members], stored, rows))
    counts = [len(units)] if name is not None else _part_sizes(np.array(lengths), shard_seconds)
    parts: list[Part] = []
    digest = examined.plan
    at = 0
    for number, count in enumerate(counts):
        members_of = units[at : at + count]
        first = 0
        for unit in members_of:
            unit.first = first
            first += len(unit.items)
        parts.append(Part(number, name or f"{number:05d}-{digest}", members_of))
        at += count
    return parts


def _bytes_per_second(spec: CodecSpec, settings: EncodeSettings) -> float:
    """What a second of audio takes in the store."""
    quantizers = settings.n_quantizers or spec.n_quantizers
    return float(spec.bitrate_bps) * quantizers / spec.n_quantizers / 8


def _unit_cuts(seconds: Sequence[float], limit: float) -> tuple[list[int], list[float]]:
    """Where units begin, and the audio in each, for items of these lengths."""
    cuts, lengths = [0], [0.0]
    for at, length in enumerate(seconds):
        if at - cuts[-1] >= UNIT_ITEMS or (at > cuts[-1] and lengths[-1] + length > limit):
            cuts.append(at)
            lengths.append(0.0)
        lengths[-1] += length
    return cuts, lengths


def _part_sizes(seconds: np.ndarray[tuple[int], np.dtype[np.float64]], shard_seconds: float) -> list[int]:
    """Units per part: parts of about the same duration, none empty; of no limited shards with 0 seconds in each."""
    total = float(seconds.sum())
    wanted = max(1, min(MAX_SMALL_PARTS, round(total / PART_SECONDS)))
    if shard_seconds:
        wanted = max(wanted, int(total / shard_seconds))
    wanted = min(wanted, len(seconds))
    middles = np.cumsum(seconds) - seconds / 2
    bounds = np.searchsorted(middles, np.arange(1, wanted) * total / wanted).tolist()
    sizes, before = [], 0
    for part, bound in enumerate([*bounds, len(seconds)], 1):
        stop = min(max(bound, before + 1), len(seconds) - wanted + part)
        sizes.append(stop - before)
        before = stop
    return sizes
