"""Random excerpts: which item and where, as a pure function of (seed, n)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from codec.errors import AudioFileError, InputError, TokenFileError
from codec.excerpts.counters import Words, below, permuted, philox, stream_of, unit
from codec.excerpts.distributions import Distribution
from codec.excerpts.loading import FixedLoader, LoaderOptions, ResumableLoader
from codec.excerpts.timeline import Batch, Timeline
from codec.frames import Seconds
from codec.sources import Source

Integers = NDArray[np.int64]
_Drawn = tuple[Integers, Integers, Integers]

# The loaders' own streams are even; those of named values are odd. Redraws count up from the first one.
_ROUND, _GROUP, _SLOT, _LENGTH, _REPLACE, _DRAW = 2, 4, 6, 8, 1 << 33, 1 << 34
_VISITS = 64
"""Draws of each item per round in items="uniform" with positions="grid"."""
_BLOCK = 1024
"""Excerpts drawn at once, and kept, where one call follows the other."""
_MAX_ATTEMPTS = 1000
_EVEN_FROM = 32
"""After so many vain redraws for a batch of unlike items, all items are equally likely."""


class RandomExcerpts(Dataset[Batch]):
    """Endless batches of random excerpts; batch n is a pure function of (seed, n).

    All sources of one loader give the same span of time of the same item. Positions lie on the finest grid on
    which every source has an exact position (the greatest common divisor of their rates), so that every excerpt has
    the same number of samples, frames and labels; a last frame of tokens that its item fills only partly is left out.

    No excerpt is ever listed: start-up and memory are proportional to the number of items, shuffles are
    permutations computed where they are asked for.

    Args:
        sources: Name → source; only keys that all of them have are drawn. A source whose labels are missing, as at
            inference, is left out.
        length: Seconds per excerpt, as an exact number ("0.5", `Fraction(51, 50)`); a whole number of positions
            of every source. Or (shortest, longest): each batch has one length between, evenly drawn, and its
            excerpts come from items that are as long.
        batch_size: Excerpts per batch.
        seed: Any integer from 0 to 2**64 - 1.
        items: "duration": every possible excerpt is equally likely. "uniform": every item is. "shuffle": every
            item once in as many draws as there are items, in another order each time. Or a function from key to a
            whole number ≥ 0: as "duration", but every excerpt of that item counts as often.
        positions: "uniform": every position of an item is equally likely, at each draw anew. "grid": excerpts of
            an item don't overlap until all of its slots have been drawn: an item of N positions has
            `max(1, (N - length + 1) // length)` of them, shifted as a whole at each pass so that every position
            remains equally likely. With "duration", all slots of all items come once per pass. With "uniform",
            each item comes 64 times in 64 draws per item.
        unique_items_per_batch: No item twice in a batch. With "shuffle" (and "uniform" on the grid), the remainder
            of the items by `batch_size` is left out of a pass, others each time. Otherwise, items drawn twice are
            redrawn.
        short: What to do with items shorter than `length`: "skip"; "pad" (start at 0, zeros at the end);
            "repeat" (start at 0, again and again); "error".
        rngs: Name → distribution: a value per excerpt, in the batch under its name, and in the request that the
            sources get. Each name has its own random stream: adding one changes no other.
        unreadable: "raise" what a source raises for a damaged file; or "replace": draw another item for that row,
            also as a function of (seed, n), and count the rows in the batch's entry `replaced`.
        align: Grid steps per second, exact (50, "22050/512"): excerpts begin and end at whole steps, such as the
            frames of a codec that is to encode them. A divisor of every source's rate. With the frame rate of a token
            store, its audio files are drawn as the store itself would be.

    Batches are dicts: one entry per source (whatever its `get` returns), `key` (list of str), `start` and `length`
    (int64 `[B]`, in grid steps of `rate` per second; the length that the item has, where it is padded), and
    float32 `[B]` per name of `rngs`.

    Raises:
        InputError: No common keys, no item long enough, a length that isn't whole on the grid, a bad seed, a rate
            that can't be aligned, labels beyond their item's end, settings that exclude each other.

    Example:
        >>> draws = RandomExcerpts({"x": AudioFiles("tests/data", sample_rate=16000)}, 1, batch_size=4, seed=0)
        >>> draws[0]["x"].shape
        torch.Size([4, 1, 16000])
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        length: Seconds | tuple[Seconds, Seconds],
        *,
        batch_size: int,
        seed: int,
        items: Literal["duration", "uniform", "shuffle"] | Callable[[str], int] = "duration",
        positions: Literal["uniform", "grid"] = "uniform",
        unique_items_per_batch: bool = False,
        short: Literal["skip", "pad", "repeat", "error"] = "skip",
        rngs: Mapping[str, Distribution] | None = None,
        unreadable: Literal["raise", "replace"] = "raise",
        align: Seconds | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; it must be at least 1")
        if not 0 <= seed < 2**64:
            raise InputError(f"seed is {seed}; it must be from 0 to 2**64 - 1")
        for name, value, choices in (
            ("items", "duration" if callable(items) else items, ("duration", "uniform", "shuffle")),
            ("positions", positions, ("uniform", "grid")),
            ("short", short, ("skip", "pad", "repeat", "error")),
            ("unreadable", unreadable, ("raise", "replace")),
        ):
            if value not in choices:
                raise InputError(f"{name}={value!r}; it must be one of {choices}")
        taken = set(rngs or ()) & {*sources, "key", "start", "length", "replaced"}
        if taken:
            raise InputError(f"rngs {sorted(taken)} would overwrite other batch entries; rename them")
        self.timeline = Timeline(sources, whole=False, padded=short == "pad", align=align, stacklevel=3)
        self.sources = self.timeline.sources
        self.rate = self.timeline.rate
        self.keys = self.timeline.keys
        self.batch_size = batch_size
        self.seed = seed
        self.unique_items_per_batch = unique_items_per_batch
        self._items = "duration" if callable(items) else items
        self._grid = positions == "grid"
        self._short = short
        self._rngs = dict(rngs or {})
        self._replace = unreadable == "replace"
        # Sources that stretch time read more than they return, by an amount that is drawn.
        self._stretched = [name for name, source in self.sources.items() if type(source).reach is not Source.reach]

        low, high = length if isinstance(length, tuple) else (length, length)
        self.min_steps, self.num_steps = (self.timeline.steps("length", bound) for bound in (low, high))
        if self.min_steps > self.num_steps:
            raise InputError(f"length ({low}, {high}) s is no range; give (shortest, longest)")
        if self._grid and self.min_steps < self.num_steps:
            raise InputError("positions='grid' needs one length for all batches; give that, or positions='uniform'")
        # Draws made ahead: batches (first, stride, …) and ranges (first, …), and what was asked for last.
        self._batches: tuple[int, int, _Drawn, dict[str, NDArray[np.float32]]] | None = None
        self._range: tuple[int, _Drawn] | None = None
        self._last = self._stride = self._next = -1
        self._prepare(items if callable(items) else None)

    def _prepare(self, weight_of: Callable[[str], int] | None) -> None:
        """Sorts the items by length, longest first, so that those that are long enough are the first ones."""
        steps = self.timeline.num_steps
        too_short = np.flatnonzero(steps < self.min_steps)
        if too_short.size and self._short == "error":
            item = int(too_short[0])
            raise InputError(
                f"{self.keys[item]!r} has {float(steps[item] / self.rate):g} s, less than length "
                f"{float(self.min_steps / self.rate):g} s ({too_short.size} such items); "
                "lower length, or pass short='skip', 'pad' or 'repeat'"
            )
        fills = self._short in ("pad", "repeat")
        if not fills and too_short.size == len(steps):
            raise InputError(
                f"no item is as long as {float(self.min_steps / self.rate):g} s (the longest has "
                f"{float(int(steps.max()) / self.rate):g} s); lower length, or pass short='pad'"
            )
        least = 1 if fills else self.min_steps
        if fills and (empty := np.flatnonzero(steps < 1)).size:
            raise InputError(
                f"{self.keys[int(empty[0])]!r} is shorter than one step of {1 / self.rate} s, the sources' common grid "
                f"({empty.size} such items); leave it out"
            )
        order = np.argsort(-steps, kind="stable")
        order = order[: int(np.count_nonzero(steps >= least))]
        self._order = order.astype(np.uint32 if len(steps) < 2**32 else np.int64)
        self._steps = steps[self._order]
        weights: Integers | None = None
        if weight_of is not None:
            given = [weight_of(self.keys[item]) for item in self._order.tolist()]
            if min(given) < 0 or sum(given) == 0 or any(int(weight) != weight for weight in given):
                raise InputError(f"items gives weights from {min(given)} to {max(given)}; whole numbers ≥ 0, not all 0")
            weights = np.array(given, dtype=np.int64)
            self._order, self._steps = self._order[weights > 0], self._steps[weights > 0]
            weights = weights[weights > 0]
        if not fills:
            self.num_steps = min(self.num_steps, int(self._steps[0]))
        total = float(self._steps.sum(dtype=np.float64))
        if weights is not None:
            total = float(weights.astype(np.float64) @ self._steps)
        if total > 2**62:
            most = 1 if weights is None else weights.max()
            raise InputError(f"weights up to {most} times the items' lengths pass 2**62; give smaller ones")
        if self.unique_items_per_batch:
            if self.num_items < self.batch_size:
                raise InputError(
                    f"{self.num_items} items for batches of {self.batch_size} different ones; lower batch_size"
                )
            if self._grid and self._items == "duration":
                raise InputError(
                    "unique_items_per_batch with positions='grid' needs items='shuffle' or 'uniform': a long item "
                    "may hold more than its share of all slots"
                )
        # Eight bytes for each of a million items add up: only what the mode looks things up in is kept.
        if self.min_steps < self.num_steps:
            self._negative_steps = -self._steps  # ascending, to be searched
        self._num_long = int(np.count_nonzero(self._steps >= self.num_steps))
        self._weight_sum = None if weights is None else _summed(weights)
        if self._items == "duration" and not (self._grid and not self._replace):
            self._weighted_steps = _summed(self._steps if weights is None else weights * self._steps)
        if self._grid:
            self._slots = np.maximum(1, (self._steps - self.num_steps + 1) // self.num_steps)
            self._visits = self._slots if weights is None else weights * self._slots
        if self._grid and self._items == "duration":
            self._tickets = _summed(self._visits)

    @property
    def num_items(self) -> int:
        """Items that can be drawn."""
        return len(self._order)

    def draw(self, n: int) -> tuple[str, int]:
        """Item and start (grid steps) of excerpt n."""
        items, starts, _ = self.draw_range(n, 1)
        return self.keys[int(items[0])], int(starts[0])

    def draw_range(self, first: int, count: int) -> tuple[Integers, Integers, Integers]:
        """Excerpts `first` to `first + count - 1`, all at once. Batch n has those from n * batch_size on.

        Where named values stretch an excerpt beyond its item's end, the batch has an earlier start instead.

        Returns:
            int64 `[count]` each: items (as numbers of `keys`), starts and lengths (grid steps).
        """
        ahead = self._range
        if ahead is None or not ahead[0] <= first <= first + count <= ahead[0] + len(ahead[1][0]):
            # Drawing a thousand excerpts at once costs little more than drawing thirty.
            size = max(count, _BLOCK) if first == self._next else count
            self._range = ahead = first, self._draw_range(first, size)
        self._next = first + count
        start, (items, starts, lengths) = ahead
        cut = slice(first - start, first - start + count)
        return items[cut].copy(), starts[cut].copy(), lengths[cut].copy()

    def _draw_range(self, first: int, count: int) -> _Drawn:
        if self.unique_items_per_batch or self.min_steps < self.num_steps:
            batches = np.arange(first // self.batch_size, -(-(first + count) // self.batch_size))
            numbers = batches[:, None] * self.batch_size + np.arange(self.batch_size)
        else:
            numbers = np.arange(first, first + count)[:, None]
        ranks, starts, lengths = self._draw(numbers)
        cut = slice(first - int(numbers[0, 0]), first - int(numbers[0, 0]) + count)
        items = self._order[ranks].astype(np.int64)
        return items.reshape(-1)[cut], starts.reshape(-1)[cut], lengths.reshape(-1)[cut]

    def _draw(self, numbers: Integers) -> tuple[Integers, Integers, Integers]:
        """Excerpt numbers `[batches, rows]` → places in `_order`, starts, lengths of the same shape."""
        if self._grid:
            ranks, visits = self._visit(numbers)
            return ranks, self._slot(ranks, visits), np.full_like(numbers, self.num_steps)
        lengths = self._batch_lengths(numbers)
        item_words, position_words = philox(self.seed, _DRAW, numbers)
        if self._items == "shuffle":
            ranks, _ = self._visit(numbers)
            longest = np.maximum(self._steps[ranks].min(axis=1, keepdims=True), self.min_steps)
            lengths = np.minimum(lengths, longest)
        else:
            ranks = self._independent(item_words, lengths)
            if self.unique_items_per_batch:
                self._make_unique(ranks, numbers, lengths)
        room = np.maximum(self._steps[ranks] - lengths + 1, 1)
        return ranks, below(position_words, room), lengths

    def _batch_lengths(self, numbers: Integers) -> Integers:
        span = self.num_steps - self.min_steps
        if not span:
            return np.full_like(numbers, self.num_steps)
        words, _ = philox(self.seed, _LENGTH, numbers[:, :1] // self.batch_size)
        return np.broadcast_to(self.min_steps + below(words, span + 1), numbers.shape).copy()

    def _independent(self, words: Words, lengths: Integers, *, even: bool = False) -> Integers:
        """Items drawn with replacement, among those that are as long as `lengths`, any shape."""
        fills = self._short in ("pad", "repeat")
        if self.min_steps < self.num_steps:
            enough = np.searchsorted(self._negative_steps, -lengths, side="right")
        else:
            enough = np.full(lengths.shape, self._num_long)
        last = np.full_like(enough, len(self._steps)) if fills else enough
        if self._items != "duration" or even:
            return below(words, last)

        summed = self._weight_sum

        def before(place: Integers) -> Integers:
            """Excerpts of the items before a place; a padded item has one."""
            long = np.minimum(place, enough)
            weight, of_place = (long, place) if summed is None else (summed[long], summed[place])
            return np.asarray(self._weighted_steps[long] - lengths * weight + of_place)

        tickets = below(words, before(last))
        low, high = np.zeros_like(last), last - 1
        for _ in range(int(last.max() - 1).bit_length()):
            middle = (low + high + 1) // 2
            right = before(middle) <= tickets
            low, high = np.where(right, middle, low), np.where(right, high, middle - 1)
        return low

    def _make_unique(self, ranks: Integers, numbers: Integers, lengths: Integers) -> None:
        """Redraws, in place, items that an earlier row of the batch has."""
        for attempt in range(1, _MAX_ATTEMPTS):
            order = np.argsort(ranks, axis=1, kind="stable")
            sorted_ranks = np.take_along_axis(ranks, order, axis=1)
            again = np.zeros(ranks.shape, dtype=bool)
            again[:, 1:] = sorted_ranks[:, 1:] == sorted_ranks[:, :-1]
            twice = np.zeros_like(again)
            np.put_along_axis(twice, order, again, axis=1)
            if not twice.any():
                return
            words, _ = philox(self.seed, _DRAW + 2 * attempt, numbers[twice])
            ranks[twice] = self._independent(words, lengths[twice], even=attempt >= _EVEN_FROM)
        raise InputError(
            f"no batch of {self.batch_size} different items in {_MAX_ATTEMPTS} tries: too few items are as long as "
            f"{float(lengths.max() / self.rate):g} s; lower batch_size or length"
        )

    def _visit(self, numbers: Integers) -> tuple[Integers, Integers]:
        """Items drawn so that each comes equally often per pass: places in `_order`, and how often they came before."""
        shape, flat = numbers.shape, numbers.reshape(-1)
        num_items = len(self._order)
        if self._items == "duration":
            passes, within = np.divmod(flat, self._tickets[-1])
            tickets = permuted(within, int(self._tickets[-1]), self._keys_of(_ROUND, passes))
            ranks = np.searchsorted(self._tickets, tickets, side="right") - 1
            visits = passes * self._visits[ranks] + tickets - self._tickets[ranks]
            return ranks.reshape(shape), visits.reshape(shape)
        per_pass = 1 if self._items == "shuffle" else _VISITS
        if not self.unique_items_per_batch:
            passes, within = np.divmod(flat, num_items * per_pass)
            tickets = permuted(within, num_items * per_pass, self._keys_of(_ROUND, passes))
            ranks, visits = tickets % num_items, passes * per_pass + tickets // num_items
            return ranks.reshape(shape), visits.reshape(shape)
        # Row r takes its items from group r of the pass; groups have no item in common.
        batches, rows = np.divmod(flat, self.batch_size)
        group_size = num_items // self.batch_size
        passes, within = np.divmod(batches, group_size * per_pass)
        tickets = permuted(within, group_size * per_pass, self._keys_of(_GROUP, passes * self.batch_size + rows))
        members = tickets % group_size * self.batch_size + rows
        ranks = permuted(members, num_items, self._keys_of(_ROUND, passes))
        return ranks.reshape(shape), (passes * per_pass + tickets // group_size).reshape(shape)

    def _slot(self, ranks: Integers, visits: Integers) -> Integers:
        """Start of an item's visit: slots in another order and with another shift at each pass over them."""
        shape, ranks, visits = ranks.shape, ranks.reshape(-1), visits.reshape(-1)
        slots = self._slots[ranks]
        passes, within = np.divmod(visits, slots)
        keys, shifts = philox(self.seed, _SLOT, (passes << 32) | self._order[ranks].astype(np.int64))
        room = np.maximum(self._steps[ranks] - self.num_steps + 1, 1)
        # slot * room + shift is evenly distributed over slots * room, so the start is over the room.
        starts = (permuted(within, slots, keys) * room + below(shifts, room)) // slots
        return np.asarray(starts.reshape(shape), dtype=np.int64)

    def _keys_of(self, stream: int, counters: Integers) -> Words:
        return philox(self.seed, stream, counters)[0]

    def __getitem__(self, n: int) -> Batch:
        """Batch n: excerpts n * batch_size … (n + 1) * batch_size - 1."""
        return self.finish(self.fetch(n))

    def fetch(self, n: int, *, out: Mapping[str, Tensor] | None = None) -> Batch:
        """Batch n as a worker hands it out, before what `Batched` marks; `finish` does that.

        Args:
            n: Its number.
            out: Source name → tensor to read into, such as a page-locked one that is used again and again; its shape
                is `[batch_size]` and that of the source's `spec`.
        """
        if n < 0:
            raise InputError(f"batch {n}; batches are numbered from 0")
        (ranks, starts, lengths), values = self._drawn(n)
        if not self._replace:
            return self._assemble(ranks, starts, lengths, values, out)
        numbers = n * self.batch_size + np.arange(self.batch_size)
        replaced: set[int] = set()
        for attempt in range(_MAX_ATTEMPTS):
            try:
                batch = self._assemble(ranks, starts, lengths, values, out)
            except (AudioFileError, TokenFileError):
                bad = self._unreadable(ranks, starts, lengths, values)
                if not bad or attempt == _MAX_ATTEMPTS - 1:
                    raise
                replaced |= set(bad)
                items, places = philox(self.seed, _REPLACE + 2 * attempt, numbers[bad])
                ranks[bad] = self._independent(items, lengths[bad])
                starts[bad] = below(places, np.maximum(self._steps[ranks[bad]] - lengths[bad] + 1, 1))
            else:
                batch["replaced"] = torch.tensor(len(replaced))
                return batch
        raise AssertionError("unreachable")

    def finish(self, batch: Batch) -> Batch:
        """What `fetch` gave → what the loader's user gets."""
        return self.timeline.finish(batch)

    def _drawn(self, n: int) -> tuple[_Drawn, dict[str, NDArray[np.float32]]]:
        """The draws of batch n, made ahead for those that will follow: a worker of four asks for every fourth."""
        ahead = self._batches
        row, beside = (0, 1) if ahead is None else divmod(n - ahead[0], ahead[1])
        if ahead is None or beside or not 0 <= row < len(ahead[2][0]):
            stride = n - self._last
            follows = self._last >= 0 and stride > 0 and stride in (1, self._stride)
            count = max(1, _BLOCK // self.batch_size) if follows else 1
            stride = stride if follows else 1
            numbers = (n + stride * np.arange(count))[:, None] * self.batch_size + np.arange(self.batch_size)
            self._batches = ahead = n, stride, self._draw(numbers), self._values(numbers)
            row = 0
        self._stride, self._last = n - self._last, n
        ranks, starts, lengths = (part[row].copy() for part in ahead[2])
        return (ranks, starts, lengths), {name: column[row] for name, column in ahead[3].items()}

    def _unreadable(
        self, ranks: Integers, starts: Integers, lengths: Integers, values: Mapping[str, NDArray[np.float32]]
    ) -> list[int]:
        bad = []
        for row in range(len(ranks)):
            one = slice(row, row + 1)
            try:
                self._assemble(ranks[one], starts[one], lengths[one], {k: v[one] for k, v in values.items()})
            except (AudioFileError, TokenFileError):
                bad.append(row)
        return bad

    def _values(self, numbers: Integers) -> dict[str, NDArray[np.float32]]:
        values = {}
        for name, distribution in self._rngs.items():
            words, _ = philox(self.seed, stream_of(name), numbers)
            values[name] = np.asarray(distribution.draw(unit(words))).astype(np.float32)
        return values

    def _assemble(
        self,
        ranks: Integers,
        starts: Integers,
        lengths: Integers,
        values: Mapping[str, NDArray[np.float32]],
        out: Mapping[str, Tensor] | None = None,
    ) -> Batch:
        keys = [self.keys[item] for item in self._order[ranks].tolist()]
        names, columns = list(values), [column.tolist() for column in values.values()]
        requests: Sequence[Mapping[str, float]] = [
            dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)
        ] or [{}] * len(keys)
        steps = self._steps[ranks]
        if self._stretched:
            starts = np.array(
                [
                    self._fitted(*row)
                    for row in zip(*(c.tolist() for c in (starts, lengths, steps)), requests, strict=True)
                ]
            )
        batch = Batch()
        for name in self.sources:
            into = None if out is None else out.get(name)
            data = self.timeline.read(name, keys, starts.tolist(), lengths.tolist(), requests, into)
            if self._short == "repeat":
                data = self.timeline.repeated(name, data, steps.tolist(), int(lengths[0]))
            batch[name] = data
        batch["key"] = keys
        batch["start"] = torch.from_numpy(starts.copy())
        batch["length"] = torch.from_numpy(np.minimum(lengths, steps) if self._short == "pad" else lengths.copy())
        for name, column in values.items():
            batch[name] = torch.from_numpy(column.copy())
        return batch

    def _fitted(self, start: int, length: int, steps: int, values: Mapping[str, float]) -> int:
        """A start from which the stretched excerpt fits into the item, if any does."""
        needs = length
        for name in self._stretched:
            factor = self.timeline.factors.get(name)
            if factor is not None:
                needs = max(needs, -(-self.sources[name].reach(length * factor, values) // factor))
        return start * max(steps - needs + 1, 1) // max(steps - length + 1, 1)

    @overload
    def loader(
        self, *, start_batch: int, num_batches: int | None = None, **options: Unpack[LoaderOptions]
    ) -> FixedLoader: ...
    @overload
    def loader(self, *, num_batches: int, **options: Unpack[LoaderOptions]) -> FixedLoader: ...
    @overload
    def loader(self, *, epoch_batches: int | None = None, **options: Unpack[LoaderOptions]) -> ResumableLoader: ...
    def loader(
        self,
        *,
        start_batch: int | None = None,
        num_batches: int | None = None,
        epoch_batches: int | None = None,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> FixedLoader | ResumableLoader:
        """A torch DataLoader over the batches; they are the same for any number of workers.

        Two ways to use it. With `start_batch` or `num_batches` it is a fixed span: every iteration gives the same
        batches, and where to resume is the caller's integer. Without, each iteration goes on where the last one
        ended, and `state_dict` has where that is, for `load_state_dict`, also on another number of workers or ranks.

        Args:
            start_batch: First batch (of each rank), 0 if None.
            num_batches: How many; endless if None.
            epoch_batches: Batches after which an iteration pauses, which is an epoch; endless if None, but then
                Lightning fetches one batch ahead of what it trains on, and a state that it saves counts that one.
            num_workers: Worker processes, with one torch thread each.
            rank: This process's; torch.distributed's if None, or 0. Rank r has batches r, r + world_size, …
            world_size: Number of ranks; torch.distributed's if None, or 1. All ranks have equally many batches.
            pin_memory: Put tensors in page-locked memory.
            start_method: How workers start, "fork" or "spawn"; torch's default if None.

        Raises:
            InputError: A bad number, or a fixed span together with `epoch_batches`.
        """
        options: LoaderOptions = {
            "num_workers": num_workers,
            "rank": rank,
            "world_size": world_size,
            "pin_memory": pin_memory,
            "start_method": start_method,
        }
        if start_batch is None and num_batches is None:
            identity = {"seed": self.seed, "batch_size": self.batch_size}
            return ResumableLoader(self, epoch_batches=epoch_batches, identity=identity, **options)
        if epoch_batches is not None:
            raise InputError("epoch_batches goes on from iteration to iteration; leave out start_batch and num_batches")
        return FixedLoader(self, start_batch=start_batch or 0, num_batches=num_batches, **options)


def _summed(counts: Integers) -> Integers:
    """How much comes before each: one number more than there are."""
    sums = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=sums[1:])
    return sums
