"""What was expensive to make is kept in a file that all workers share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import InputError
from codec.sources.base import Excerpt, PathLike, Source, padded
from codec.sources.wrappers import Wrap


class Cache(Wrap):
    """Keeps what a source gives, in blocks, in one memory-mapped file for all processes and later runs.

    When it is full, what is in it stays and the rest is made anew each time: under random draws no other rule
    hits more often. Put it above what is deterministic and below what uses named values.

    Args:
        source: Gives tensors with time last, of one shape and dtype; an excerpt must be the slice of its whole item.
        folder: Where to; made if missing, and reused by the next run on the same items.
        max_bytes: Size of the file.
        block: Positions per block.

    Raises:
        InputError: No room for one block, or the folder is another source's cache.

    Example:
        >>> mels = Cache(Mel(AudioFiles("music", sample_rate=16000)), "/tmp/mels", max_bytes=10**9)
    """

    def __init__(self, source: Source, folder: PathLike, *, max_bytes: int, block: int = 4096) -> None:
        super().__init__(source)
        if block < 1:
            raise InputError(f"block is {block}; it must be at least 1 position")
        self._folder = Path(folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._block = block
        lengths = np.asarray(source.lengths())
        keys = source.keys()
        self._blocks = np.concatenate([[0], np.cumsum(-(-lengths // block))]).astype(np.int64)
        self._number = {key: number for number, key in enumerate(keys)}
        sample: Any = source.get([Excerpt(keys[0], 0, 1)])
        if not isinstance(sample, Tensor):
            raise InputError(f"Cache keeps tensors, {type(source).__name__} gives {type(sample).__name__}")
        self._shape = (*sample.shape[1:-1], block)
        self._dtype = sample.numpy().dtype
        block_bytes = int(np.prod(self._shape)) * self._dtype.itemsize
        self._slots = min(max_bytes // block_bytes, int(self._blocks[-1]))
        if self._slots < 1:
            raise InputError(f"max_bytes is {max_bytes}, one block takes {block_bytes}; raise it, or lower block")
        listing = hashlib.sha256("\0".join(keys).encode("utf-8", "surrogateescape") + lengths.tobytes()).hexdigest()
        self._identity = json.dumps(
            [str(source.rate()), listing, list(self._shape), self._dtype.str, type(source).__name__, self._slots]
        )
        self._open: tuple[NDArray[np.int64], NDArray[Any]] | None = None
        self._make_files()

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """What the source gives."""
        index, data = self._files()
        wanted: dict[int, tuple[str, int]] = {}
        for key, start, length in excerpts:
            stop = min(start + length, self.source.length(key))
            for block in range(start // self._block, -(-stop // self._block)):
                wanted[int(self._blocks[self._number[key]]) + block] = (key, block * self._block)
        missing = [number for number in wanted if index[number] == 0]
        made: dict[int, NDArray[Any]] = {}
        if missing:
            # Blocks of one item that follow each other are read in one go.
            for run in _runs(missing, wanted):
                key, start = wanted[run[0]]
                length = min(len(run) * self._block, self.source.length(key) - start)
                piece = self.source.get([Excerpt(key, start, length)])[0]
                for place, number in enumerate(run):
                    part = piece[..., place * self._block : (place + 1) * self._block].numpy()
                    made[number] = part
                    self._keep(number, part)
        rows = []
        for key, start, length in excerpts:
            stop = min(start + length, self.source.length(key))
            first = int(self._blocks[self._number[key]])
            numbers = range(first + start // self._block, first - (-stop // self._block))
            parts = [made[n] if n in made else data[index[n] - 1] for n in numbers]
            joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
            skip = start % self._block
            rows.append(torch.from_numpy(np.array(joined[..., skip : skip + stop - start])))
        return padded(rows, max(length for _, _, length in excerpts))

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept."""
        return int(self._files()[0][-1])

    def _keep(self, number: int, part: NDArray[Any]) -> None:
        index, data = self._files()
        with _locked(self._folder / "lock"):
            used = int(index[-1])
            if index[number] == 0 and used < self._slots:
                data[used, ..., : part.shape[-1]] = part
                index[-1] = used + 1
                # Last, so that whoever reads the number finds the data.
                index[number] = used + 1

    def _make_files(self) -> None:
        identity = self._folder / "source.json"
        with _locked(self._folder / "lock"):
            if identity.exists():
                if identity.read_text() != self._identity:
                    raise InputError(
                        f"{self._folder} is the cache of another source or size; give another folder, or remove it"
                    )
                return
            num_blocks = int(self._blocks[-1])
            np.lib.format.open_memmap(
                self._folder / "index.npy", mode="w+", dtype=np.int64, shape=(num_blocks + 1,)
            ).flush()
            np.lib.format.open_memmap(
                self._folder / "data.npy", mode="w+", dtype=self._dtype, shape=(self._slots, *self._shape)
            ).flush()
            identity.write_text(self._identity)

    def _files(self) -> tuple[NDArray[np.int64], NDArray[Any]]:
        if self._open is None:
            self._open = (
                np.load(self._folder / "index.npy", mmap_mode="r+"),
                np.load(self._folder / "data.npy", mmap_mode="r+"),
            )
        return self._open

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among all processes; let go of even if this one is killed."""
    import fcntl  # not on Windows, where everything but the cache works

    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _runs(numbers: list[int], wanted: dict[int, tuple[str, int]]) -> list[list[int]]:
    """Block numbers in groups that follow each other within one item."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1 and wanted[number][0] == wanted[runs[-1][0]][0]:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs
