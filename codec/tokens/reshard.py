"""Shards cut and joined without touching the codes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from codec.errors import InputError
from codec.tokens.files import SUFFIX, StorePath, local_path
from codec.tokens.store import TokenStore
from codec.tokens.writer import TokenWriter

Progress = Callable[[int], None]


def merge(
    source: StorePath | Sequence[StorePath],
    path: StorePath,
    *,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> None:
    """Copy all items of a store, in order, into one shard.

    Args:
        source: What `TokenStore` takes.
        path: The shard to write.
        resume: Go on with what an interrupted call left.
        force: Replace what is at `path`.
        progress: Called with the number of items copied since the last call.

    Raises:
        InputError: `path` exists and neither `resume` nor `force` is given.
        TokenFileError: An item is damaged; the disk is full, say.
    """
    with TokenStore(source) as store:
        _copy(store, store.keys(), path, resume, force, progress)


def split(
    source: StorePath | Sequence[StorePath],
    folder: StorePath,
    num_shards: int,
    *,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> list[str]:
    """Copy all items of a store, in order, into shards of about equal duration.

    Args:
        source: What `TokenStore` takes.
        folder: Where to write `00000.ctok`, `00001.ctok`, ...; made if need be.
        num_shards: How many: at most one per item.
        resume: Go on with what an interrupted call left.
        force: Replace shards of these names.
        progress: Called with the number of items copied since the last call.

    Returns:
        The shards' paths.

    Raises:
        InputError: `num_shards` is out of range; a shard exists and neither `resume` nor `force` is given.
        TokenFileError: An item is damaged; the disk is full, say.
    """
    with TokenStore(source) as store:
        if not 1 <= num_shards <= len(store):
            raise InputError(f"num_shards is {num_shards}; the store has {len(store)} items; give 1 to as many")
        # Item i goes where the middle of its frames lies, but no shard stays empty.
        frames = store.num_frames
        middles = np.cumsum(frames) - frames / 2
        targets = np.arange(1, num_shards) * (frames.sum() / num_shards)
        cuts = [0]
        for shard, cut in enumerate(np.searchsorted(middles, targets).tolist(), 1):
            cuts.append(min(max(cut, cuts[-1] + 1), len(store) - num_shards + shard))
        cuts.append(len(store))
        target = local_path(folder)
        os.makedirs(target, exist_ok=True)
        paths = [os.path.join(target, f"{shard:05d}{SUFFIX}") for shard in range(num_shards)]
        keys = store.keys()
        for path, first, last in zip(paths, cuts, cuts[1:], strict=False):
            _copy(store, keys[first:last], path, resume, force, progress)
    return paths


def _copy(
    store: TokenStore,
    keys: Sequence[str],
    path: StorePath,
    resume: bool,
    force: bool,
    progress: Progress | None,
) -> None:
    writer = TokenWriter(
        path,
        store.spec,
        n_quantizers=store.n_quantizers,
        frame_divisors=store.frame_divisors,
        resume=resume,
        force=force,
    )
    with writer:
        for key in keys:
            if key not in writer:
                writer.copy(store, key)
            if progress is not None:
                progress(1)
