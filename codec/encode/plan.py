"""Which items go into which shard: a function of the corpus alone, whatever processes there are.

Items in order of their keys are cut into units, among which batches are made, and units into parts. A part is written
by one process, to a shard of its own (or several, where it grows too large). So the same corpus gives the same shards
on any number of processes, and after any number of deaths.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from codec.encode.items import Item
from codec.encode.pipeline import Unit
from codec.encode.settings import EncodeSettings
from codec.encode.state import Examined
from codec.spec import CodecSpec

UNIT_ITEMS = 256
"""Most items in a unit."""

UNITS = 16
"""Units that even a small corpus is cut into, if it has as many items."""

PART_SECONDS = 3600
"""Audio, roughly, from which on a part isn't made larger until there are `MAX_SMALL_PARTS`."""

MAX_SMALL_PARTS = 64

# Bytes per second, roughly: what a file's size says of its length before it is opened.
_RATES = {".wav": 48000, ".wave": 48000, ".aif": 88200, ".aiff": 88200, ".flac": 40000}
_OTHER_RATE = 12000


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


def guessed_seconds(item: Item) -> float:
    """A rough guess at an item's length from its size and its name."""
    if item.start is not None and item.stop is not None:
        return float(item.stop - item.start)
    rate = _RATES.get(os.path.splitext(item.path if item.member is None else item.key)[1].lower(), _OTHER_RATE)
    return max(0.1, item.num_bytes / rate)


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
    size = min(UNIT_ITEMS, max(1, -(-len(numbers) // UNITS)))
    cuts = list(range(0, len(numbers), size))
    units = []
    for first in cuts:
        members = numbers[first : first + size]
        stored, rows = examined.stored[members].tolist(), examined.rows[members].tolist()
        units.append(Unit(0, [items[i] for i in members], stored, rows))
    if name is not None:
        counts = [len(units)]
    else:
        seconds = np.array([sum(map(guessed_seconds, unit.items)) for unit in units])
        counts = _part_sizes(seconds, spec, settings)
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


def _part_sizes(
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]], spec: CodecSpec, settings: EncodeSettings
) -> list[int]:
    """Units per part: parts of about the same duration, none empty."""
    quantizers = settings.n_quantizers or spec.n_quantizers
    bytes_per_second = float(spec.bitrate_bps) * quantizers / spec.n_quantizers / 8
    total = float(seconds.sum())
    wanted = max(1, min(MAX_SMALL_PARTS, round(total / PART_SECONDS)))
    if settings.shard_bytes:
        wanted = max(wanted, int(total * bytes_per_second / settings.shard_bytes))
    wanted = min(wanted, len(seconds))
    middles = np.cumsum(seconds) - seconds / 2
    bounds = np.searchsorted(middles, np.arange(1, wanted) * total / wanted).tolist()
    sizes, before = [], 0
    for part, bound in enumerate([*bounds, len(seconds)], 1):
        stop = min(max(bound, before + 1), len(seconds) - wanted + part)
        sizes.append(stop - before)
        before = stop
    return sizes
