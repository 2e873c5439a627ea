"""Batches by number, through torch's DataLoader: workers, ranks and resuming."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypedDict, Unpack

import torch
import torch.distributed
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from codec.errors import InputError
from codec.excerpts.timeline import Batch


class Numbered(Protocol):
    """What has a batch for every number."""

    def fetch(self, n: int) -> Batch:
        """Batch n, in a worker."""

    def finish(self, batch: Batch) -> Batch:
        """What remains to be done with it where it is consumed."""


class LoaderOptions(TypedDict, total=False):
    """Arguments that all loaders have; see `RandomExcerpts.loader`."""

    num_workers: int
    rank: int | None
    world_size: int | None
    pin_memory: bool
    start_method: str | None


class _Span(IterableDataset[Batch]):
    """Batches first, first + stride, …; worker w of W has every W-th of them, which keeps their order.

    Iterable, so that frameworks don't put a sampler of their own on top.
    """

    def __init__(self, batches: Numbered) -> None:
        self.batches = batches
        self.first = 0
        self.stride = 1
        self.count: int | None = None

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        position, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while self.count is None or position < self.count:
            yield self.batches.fetch(self.first + position * self.stride)
            position += step


class BatchLoader(DataLoader[Batch]):
    """A DataLoader over numbered batches, this rank's share of them."""

    def __init__(
        self,
        batches: Numbered,
        *,
        num_workers: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        pin_memory: bool = False,
        start_method: str | None = None,
    ) -> None:
        if (rank is None) != (world_size is None):
            raise InputError(f"rank={rank} and world_size={world_size}; give both or neither")
        if rank is not None and world_size is not None and not 0 <= rank < world_size:
            raise InputError(f"rank is {rank}; it must be from 0 to world_size - 1 = {world_size - 1}")
        self._span = _Span(batches)
        self._rank, self._world_size = rank, world_size
        super().__init__(
            self._span,
            batch_size=None,
            num_workers=num_workers,
            pin_memory=pin_memory,
            multiprocessing_context=start_method if num_workers else None,
            worker_init_fn=_prepared,
            collate_fn=_as_it_is,
        )

    def _topology(self) -> tuple[int, int]:
        if self._rank is not None and self._world_size is not None:
            return self._rank, self._world_size
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    def _from(self, first: int, count: int | None) -> Iterator[Batch]:
        """`count` batches of this rank, of all from `first` on."""
        rank, world_size = self._topology()
        self._span.first, self._span.stride, self._span.count = first + rank, world_size, count
        return map(self._span.batches.finish, super().__iter__())


class FixedLoader(BatchLoader):
    """The same batches at each iteration: `start_batch`, `start_batch + 1` and so on, of each rank."""

    def __init__(
        self, batches: Numbered, *, start_batch: int, num_batches: int | None, **options: Unpack[LoaderOptions]
    ) -> None:
        for name, value in (("start_batch", start_batch), ("num_batches", num_batches)):
            if value is not None and value < 0:
                raise InputError(f"{name} is {value}; it must be at least 0")
        self._start_batch, self._num_batches = start_batch, num_batches
        super().__init__(batches, **options)

    def __len__(self) -> int:
        """Batches of one rank.

        Raises:
            TypeError: It is endless.
        """
        if self._num_batches is None:
            raise TypeError("an endless loader has no length; give num_batches")
        return self._num_batches

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The batches."""
        return self._from(self._start_batch * self._topology()[1], self._num_batches)


class ResumableLoader(BatchLoader):
    """Each iteration goes on where the last one ended; `state_dict` says where that is."""

    def __init__(
        self,
        batches: Numbered,
        *,
        epoch_batches: int | None,
        identity: Mapping[str, int],
        **options: Unpack[LoaderOptions],
    ) -> None:
        if epoch_batches is not None and epoch_batches < 1:
            raise InputError(f"epoch_batches is {epoch_batches}; it must be at least 1, or None for no end")
        self._epoch_batches = epoch_batches
        self._identity = dict(identity)
        # Counted over all ranks, so that they mean the same on any number of them.
        self._consumed = 0
        self._epoch_start = 0
        super().__init__(batches, **options)

    def __len__(self) -> int:
        """Batches per iteration of one rank.

        Raises:
            TypeError: It is endless.
        """
        if self._epoch_batches is None:
            raise TypeError("an endless loader has no length; give epoch_batches")
        return self._epoch_batches

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        """The batches that are left of an epoch, or those of the next one."""
        _, world_size = self._topology()
        left = self._epoch_batches
        if left is not None:
            left = (self._epoch_start + left * world_size - self._consumed) // world_size
            if left < 1:
                self._epoch_start, left = self._consumed, self._epoch_batches
        for batch in self._from(self._consumed, left):
            self._consumed += world_size
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Where the loader is: a few integers, the same on every rank.

        A batch counts as consumed once it has been handed out, whatever the workers have fetched ahead.
        """
        return {**self._identity, "batches": self._consumed, "epoch_start": self._epoch_start}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on from there with the next iteration, on any number of workers and ranks.

        Raises:
            InputError: The state is of other draws, or not such a state.
        """
        expected = {*self._identity, "batches", "epoch_start"}
        if set(state) != expected:
            raise InputError(f"state has {sorted(state)}; it must have {sorted(expected)}, as state_dict() gives")
        for name, value in self._identity.items():
            if state[name] != value:
                raise InputError(
                    f"the state has {name} {state[name]}, this loader {value}: its batches would be others; "
                    f"make the loader with {name}={state[name]}"
                )
        self._consumed, self._epoch_start = int(state["batches"]), int(state["epoch_start"])


def _as_it_is(batch: Any) -> Any:
    return batch


def _prepared(_: int) -> None:
    # What a forked worker has from its parent isn't looked through for garbage, which would copy it page by page.
    gc.freeze()
    # torch's own is 1 in workers already; libraries that a spawned worker has yet to load read these.
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = "1"
    torch.set_num_threads(1)
