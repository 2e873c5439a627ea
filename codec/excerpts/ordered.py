"""Ordered excerpts: items from beginning to end, with overlap, and their predictions put together again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from codec.errors import AudioFileError, InputError, TokenFileError
from codec.excerpts.loading import BatchLoader, LoaderOptions
from codec.excerpts.timeline import Batch, Timeline
from codec.frames import Seconds, exact_seconds
from codec.sources import Source


class Excerpts(Dataset[Batch]):
    """Items in order, each cut into excerpts from its beginning to its end: for validation and prediction.

    An item ends with the last grid step that it begins, so that nothing of it is left out.

    Args:
        sources: Name → source; only keys that all of them have are read.
        length: Seconds per excerpt, a whole number of positions of every source; None for whole items.
        overlap: Seconds that an excerpt shares with the one before it; exact, less than `length`.
        last: What to do where an item's rest is shorter than `length`: "short" (the batch is as long as its longest
            row, shorter ones end in zeros), "pad" (zeros up to `length`), "drop", or "shift" (the last excerpt
            begins earlier; items shorter than `length` are as in "short").
        batch_size: Excerpts per batch; the last batch has the rest.
        min_per_item: Leave out items with fewer excerpts.
        max_per_item: Only the first so many excerpts of each item.
        unreadable: "raise" what a source raises for a damaged file; or "skip" such rows: their keys are in the
            batch's entry `skipped`, once per row. A batch without any other is left out by `loader()`, whose
            `skipped` counts all of them by key.

    Batches are as those of `RandomExcerpts`; `length` is what each row has of its item, in grid steps.

    Raises:
        InputError: No common keys, a length or an overlap that isn't whole on the grid, nothing left to read.

    Example:
        >>> files = AudioFiles("tests/data", sample_rate=16000)
        >>> excerpts = Excerpts({"x": files}, 2, overlap="0.5", batch_size=8)
        >>> predictions = ((batch, model(batch["x"])) for batch in excerpts.loader())
        >>> waves = dict(excerpts.overlap_add(predictions, rate=16000))
        >>> all(waves[key].shape == (1, files.length(key)) for key in files.keys())
        True
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        length: Seconds | None,
        *,
        overlap: Seconds = 0,
        last: Literal["short", "pad", "drop", "shift"] = "short",
        batch_size: int = 1,
        min_per_item: int = 1,
        max_per_item: int | None = None,
        unreadable: Literal["raise", "skip"] = "raise",
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; it must be at least 1")
        if unreadable not in ("raise", "skip"):
            raise InputError(f"unreadable={unreadable!r}; it must be 'raise' or 'skip'")
        if last not in ("short", "pad", "drop", "shift"):
            raise InputError(f"last={last!r}; it must be 'short', 'pad', 'drop' or 'shift'")
        if min_per_item < 1 or (max_per_item is not None and max_per_item < min_per_item):
            raise InputError(f"min_per_item={min_per_item}, max_per_item={max_per_item}; give 1 ≤ min ≤ max")
        self.timeline = Timeline(sources, whole=True, stacklevel=3)
        self.sources = self.timeline.sources
        self.rate = self.timeline.rate
        self.batch_size = batch_size
        self._last = last
        self._skip = unreadable == "skip"
        steps = self.timeline.num_steps
        if length is None:
            if exact_seconds(overlap):
                raise InputError(f"overlap is {overlap} s of whole items; give a length, or no overlap")
            self.num_steps = hop = max(1, int(steps.max()))
        else:
            self.num_steps = self.timeline.steps("length", length)
            hop = self.num_steps - self.timeline.steps("overlap", overlap, least=0)
            if hop < 1:
                raise InputError(f"overlap is {overlap} s of {length} s; it must be less than length")
        self._hop = hop
        rest = steps - self.num_steps
        counts = 1 + (rest // hop if last == "drop" else -(-np.maximum(rest, 0) // hop))
        counts = np.where((steps < (self.num_steps if last == "drop" else 1)) | (counts < min_per_item), 0, counts)
        if max_per_item is not None:
            counts = np.minimum(counts, max_per_item)
        if not counts.any():
            raise InputError(
                f"no excerpts of {float(self.num_steps / self.rate):g} s in {len(steps)} items (the longest has "
                f"{float(int(steps.max()) / self.rate):g} s); lower length or min_per_item"
            )
        self._items = np.flatnonzero(counts)
        self._counts: NDArray[np.int64] = counts[self._items]
        self._before = np.concatenate([[0], np.cumsum(self._counts)])

    @property
    def num_excerpts(self) -> int:
        """Excerpts of all items."""
        return int(self._before[-1])

    def __len__(self) -> int:
        """Batches."""
        return -(-self.num_excerpts // self.batch_size)

    def __getitem__(self, n: int) -> Batch:
        """Batch n, 0 ≤ n < len. Where all of its rows are skipped, it has no sources' entries."""
        return self.finish(self.fetch(n))

    def fetch(self, n: int) -> Batch:
        """Batch n as a worker hands it out, before what `Batched` marks; `finish` does that."""
        if not 0 <= n < len(self):
            raise IndexError(f"batch {n} of {len(self)}")
        numbers = np.arange(n * self.batch_size, min((n + 1) * self.batch_size, self.num_excerpts))
        places = np.searchsorted(self._before, numbers, side="right") - 1
        items = self._items[places]
        steps = self.timeline.num_steps[items]
        starts = (numbers - self._before[places]) * self._hop
        if self._last == "shift":
            starts = np.minimum(starts, np.maximum(steps - self.num_steps, 0))
        lengths = np.minimum(self.num_steps, steps - starts)
        asked = np.full_like(lengths, self.num_steps) if self._last == "pad" else lengths
        keys = [self.timeline.keys[item] for item in items.tolist()]
        rows, skipped = np.arange(len(keys)), []
        try:
            data = self._read(keys, starts, asked)
        except (AudioFileError, TokenFileError):
            if not self._skip:
                raise
            readable = [self._is_readable(keys[r : r + 1], starts[r : r + 1], asked[r : r + 1]) for r in rows]
            if all(readable):
                raise
            skipped = [key for key, fine in zip(keys, readable, strict=True) if not fine]
            rows = np.flatnonzero(readable)
            keys = [keys[row] for row in rows.tolist()]
            data = self._read(keys, starts[rows], asked[rows]) if keys else {}
        batch = Batch(data)
        batch["key"] = keys
        batch["start"] = torch.from_numpy(starts[rows])
        batch["length"] = torch.from_numpy(lengths[rows])
        if self._skip:
            batch["skipped"] = skipped
        return batch

    def finish(self, batch: Batch) -> Batch:
        """What `fetch` gave → what the loader's user gets."""
        return self.timeline.finish(batch)

    def _read(self, keys: list[str], starts: NDArray[np.int64], asked: NDArray[np.int64]) -> dict[str, Any]:
        values: list[Mapping[str, float]] = [{}] * len(keys)
        return {name: self.timeline.read(name, keys, starts.tolist(), asked.tolist(), values) for name in self.sources}

    def _is_readable(self, keys: list[str], starts: NDArray[np.int64], asked: NDArray[np.int64]) -> bool:
        try:
            self._read(keys, starts, asked)
        except (AudioFileError, TokenFileError):
            return False
        return True

    def loader(
        self,
        *,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> OrderedLoader:
        """A torch DataLoader over all batches, or this rank's share of them.

        All ranks have equally many: where the last round lacks some, batches from the beginning come again.

        Args:
            num_workers: Worker processes; the batches are the same for any number.
            rank: This process's; torch.distributed's if None, or 0.
            world_size: Number of ranks; torch.distributed's if None, or 1.
            pin_memory: Put tensors in page-locked memory.
            start_method: How workers start, "fork" or "spawn"; torch's default if None.
        """
        options: LoaderOptions = {
            "num_workers": num_workers,
            "rank": rank,
            "world_size": world_size,
            "pin_memory": pin_memory,
            "start_method": start_method,
        }
        return OrderedLoader(self, **options)

    def overlap_add(
        self, predictions: Iterable[tuple[Mapping[str, Any], Tensor]], *, rate: Seconds | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Puts predictions of consecutive excerpts together: one tensor per item, exactly as long as the item.

        Where excerpts overlap they are cross-faded linearly, by weights that add up to one: predictions that agree
        come out as they are.

        Args:
            predictions: (batch, prediction `[B, ..., n]`) in the order of one process's `loader()`, n proportional to
                `length`; what lies beyond a row's own length is ignored.
            rate: Positions per second of the predictions, a multiple of the grid's; the grid's if None.

        Yields:
            key and `[..., N]` as soon as an item is complete. N is the item's number of positions in the source
            of that rate, if there is one, or the positions of its grid steps; up to the last excerpt where
            `last="drop"` or `max_per_item` end it before.

        Raises:
            InputError: A rate that isn't on the grid, a prediction too short, items that aren't complete; with
                `unreadable="skip"`, those are left out.
        """
        exact = self.rate if rate is None else exact_seconds(rate)
        factor = exact / self.rate
        if factor.denominator != 1:
            raise InputError(f"rate {exact} isn't a multiple of the grid's {self.rate} per second; resample to one")
        like = next((n for n, r in self.timeline.source_rates.items() if r == exact), None)
        items = self._items.tolist()
        counts = {self.timeline.keys[i]: int(n) for i, n in zip(items, self._counts, strict=True)}
        steps = {self.timeline.keys[i]: int(self.timeline.num_steps[i]) for i in items}
        key: str | None = None
        lost: str | None = None
        seen, done, values, weights = 0, 0, torch.empty(0), torch.empty(0)
        for batch, prediction in predictions:
            spans = zip(batch["key"], batch["start"].tolist(), batch["length"].tolist(), prediction, strict=True)
            for now, start, length, row in spans:
                if self._skip:
                    key = key if now == key else None  # the item before may have lost its end
                    lost = now if start > (done if now == key else 0) else lost
                    if now == lost:
                        key = None
                        continue
                if key is None:
                    key, seen, done = now, 0, 0
                    weights = row.new_zeros(steps[now] * int(factor))
                    values = row.new_zeros(*row.shape[:-1], len(weights))
                if now != key or start > done:
                    raise self._incomplete(key, done, f"step {start} of {now!r}")
                first, size = start * int(factor), length * int(factor)
                # What a whole prediction lacks of the last step is beyond the item's end.
                size = min(size, row.shape[-1] if start + length == steps[now] else size)
                if row.shape[-1] < size:
                    raise InputError(
                        f"the prediction for {now!r} has {row.shape[-1]} positions, its excerpt {size} at "
                        f"{exact} per second; give the rate of the predictions"
                    )
                # A triangle that reaches zero outside the excerpt, so that its own positions all count.
                ramp = torch.arange(1, size + 1, device=row.device, dtype=weights.dtype)
                weight = torch.minimum(ramp, ramp.flip(0))
                values[..., first : first + size] += row[..., :size] * weight
                weights[first : first + size] += weight
                seen, done = seen + 1, start + length
                if seen == counts[now]:
                    end = done * int(factor)
                    if like is not None:
                        end = min(end, self.sources[like].length(now))
                    yield now, values[..., :end] / weights[:end]
                    key = None
        if key is not None and not self._skip:
            raise self._incomplete(key, done, "the end")

    def _incomplete(self, key: str, done: int, found: str) -> InputError:
        return InputError(
            f"{key!r} is put together up to step {done}, then comes {found}; "
            "give all batches of one process's loader, in order"
        )


class OrderedLoader(BatchLoader):
    """All batches once, in order, or a rank's share of them.

    Attributes:
        skipped: Unreadable excerpts that were left out of the last iteration, by key.
    """

    def __init__(self, excerpts: Excerpts, **options: Unpack[LoaderOptions]) -> None:
        self._num_all = len(excerpts)
        self.skipped: Counter[str] = Counter()
        self._around = _Around(excerpts)
        super().__init__(self._around, **options)

    def __len__(self) -> int:
        """Batches of one rank."""
        return -(-self._num_all // self._topology()[1])

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The batches that have rows."""
        self.skipped.clear()
        self._around.even = self._topology()[1] > 1
        for batch in self._from(0, len(self)):
            self.skipped.update(batch.get("skipped", ()))
            if batch["key"]:
                yield batch


class _Around:
    """The batches again and again."""

    def __init__(self, excerpts: Excerpts) -> None:
        self._excerpts = excerpts
        self.even = False
        """Whether another batch stands in for one that is skipped as a whole, since ranks must have equally many."""

    def fetch(self, n: int) -> Batch:
        total = len(self._excerpts)
        batch = self._excerpts.fetch(n % total)
        for other in range(n + 1, n + total) if self.even and not batch["key"] else ():
            instead = self._excerpts.fetch(other % total)
            if instead["key"]:
                return instead.replace(skipped=batch["skipped"])
        return batch

    def finish(self, batch: Batch) -> Batch:
        return self._excerpts.finish(batch)
