"""Threads that decode: how many this process may use, and a pool that leaves the others' threads alone."""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import get_worker_info

from codec.errors import InputError

T = TypeVar("T")

_MAX_THREADS = 1024
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")
_pools: dict[tuple[str, int], ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()
_local = threading.local()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, and its container's share of time, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):
        quota, period = _CGROUP_LIMIT.read_text().split()
        cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def default_threads() -> int:
    """Decoding threads of this process: its cores, shared with the DataLoader's workers and the node's ranks.

    Reads `torch.utils.data.get_worker_info()` and the environment's LOCAL_WORLD_SIZE (set by torchrun).
    """
    worker = get_worker_info()
    workers = worker.num_workers if worker is not None else 1
    return max(1, usable_cores() // (workers * _local_ranks()))


def recommended_threads(*, num_workers: int = 0, ranks: int | None = None) -> str:
    """What to set for a job, in words, so that its processes together use each core once.

    Args:
        num_workers: The DataLoader's workers in each rank; 0 if it decodes in the training process.
        ranks: Processes on this node; LOCAL_WORLD_SIZE, or 1, if None.

    Raises:
        InputError: A number that is none, or out of range.
    """
    ranks = _local_ranks() if ranks is None else checked_threads("ranks", ranks)
    if num_workers:
        checked_threads("num_workers", num_workers)
    cores = usable_cores()
    processes = ranks * max(1, num_workers)
    each = max(1, cores // processes)
    most = max(1, cores // ranks - 1)
    lines = [
        f"{cores} cores here, {ranks} ranks with {num_workers} DataLoader workers each",
        f"read_audio_batch(num_threads={each}) in each of the {processes} processes that decode (the default there)",
        f"torch.set_num_threads({max(1, cores // ranks - num_workers)}) in each rank: "
        f"OMP_NUM_THREADS={max(1, cores // ranks - num_workers)} torchrun --nproc-per-node={ranks} …",
    ]
    if processes > cores:
        lines.append(f"{processes} processes are more than the cores: {most} workers each, or fewer, would be faster")
    return "\n".join(lines)


def checked_threads(name: str, value: int) -> int:
    """The number, if it is one of threads or processes."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 1 <= int(value) <= _MAX_THREADS:
        raise InputError(f"{name} is {value!r}; it must be an integer of 1 … {_MAX_THREADS}")
    return int(value)


def submit(kind: str, num_threads: int, function: Callable[[], T]) -> Future[T]:
    """Runs the function in a pool of `num_threads`, shared by all who ask for that kind and number.

    torch's own threads are off inside: a pool thread that resamples doesn't wake a team of others.
    """
    with _pools_lock:
        pool = _pools.get((kind, num_threads))
        if pool is None:
            pool = ThreadPoolExecutor(num_threads, f"codec-{kind}", initializer=_work_alone)
            _pools[kind, num_threads] = pool
    return pool.submit(function)


def _forget_pools() -> None:
    # Threads don't survive a fork, nor does a lock's state make sense after one.
    global _pools_lock
    _pools.clear()
    _pools_lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)


def _work_alone() -> None:
    # torch applies the process's setting at a thread's first parallel operation, which this call stands for;
    # OpenMP's setting after that holds for this thread only, as torch.set_num_threads would not.
    torch.get_num_threads()
    openmp = _openmp()
    if openmp is not None:
        openmp.omp_set_num_threads(1)
    _local.in_pool = True


def in_pool() -> bool:
    """This thread is one of a pool's: it mustn't wait for others of its kind, which may all wait like it."""
    return getattr(_local, "in_pool", False)


@functools.lru_cache(maxsize=1)
def _openmp() -> Any:
    """The OpenMP library that torch runs on, or None."""
    folder = Path(torch.__file__).parent / "lib"
    for path in sorted(folder.glob("*omp*")):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(os.fspath(path))
            library.omp_set_num_threads.argtypes = [ctypes.c_int]
            return library
    return None


@contextmanager
def permit(permits: threading.Semaphore | None) -> Iterator[None]:
    """Holds one of the permits to decode; `waiting()` lends it to others."""
    if permits is None:
        yield
        return
    with permits:
        _local.permits = permits
        try:
            yield
        finally:
            _local.permits = None


@contextmanager
def waiting() -> Iterator[None]:
    """Around a wait for the network: this thread's permit to decode, if it holds one, is another's meanwhile."""
    permits: threading.Semaphore | None = getattr(_local, "permits", None)
    if permits is None:
        yield
        return
    _local.permits = None
    permits.release()
    try:
        yield
    finally:
        permits.acquire()
        _local.permits = permits


def _local_ranks() -> int:
    try:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    except ValueError:
        return 1
