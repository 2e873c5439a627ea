"""Files written piece by piece: nothing is held but the piece, nothing half done is left under the final name."""

from __future__ import annotations

import io
import os
import struct
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

UNFINISHED = ".unfinished"
"""Suffix of the temporary names."""

_RIFF_LIMIT = 2**32 - 1


class PiecewiseFile:
    """A file of known size, filled in pieces; it gets its name when it is complete.

    Leaving the context before that, by an error or not, removes it.
    """

    def __init__(self, path: Path, header: bytes, num_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        # One name for all runs: a killed one's leftovers are overwritten when it goes on.
        self._temporary = path.with_name(f".{path.name}{UNFINISHED}")
        self._left = num_bytes
        self._file = self._temporary.open("wb")
        self._file.write(header)

    def write(self, piece: NDArray[Any]) -> None:
        """Appends the piece's bytes."""
        data = np.ascontiguousarray(piece)
        self._file.write(data.data)
        self._left -= data.nbytes

    def close(self) -> None:
        """Gives a complete file its name, and removes any other."""
        self._file.close()
        if self._left == 0:
            os.replace(self._temporary, self.path)
        else:
            with suppress(FileNotFoundError):
                self._temporary.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WaveFile(PiecewiseFile):
    """16-bit PCM in RIFF, or in RF64 beyond 4 GiB; pieces are int16 `[n, C]`."""

    def __init__(self, path: Path, *, sample_rate: int, channels: int, num_samples: int) -> None:
        size = num_samples * channels * 2
        super().__init__(path, wave_header(sample_rate, channels, size), size)


def wave_header(sample_rate: int, channels: int, num_bytes: int) -> bytes:
    """What stands before `num_bytes` of 16-bit samples, in a size that depends on the container only."""
    form = struct.pack(
        "<4sIHHIIHH", b"fmt ", 16, 1, channels, sample_rate, sample_rate * channels * 2, channels * 2, 16
    )
    size = 4 + len(form) + 8 + num_bytes
    if size <= _RIFF_LIMIT:
        return struct.pack("<4sI4s", b"RIFF", size, b"WAVE") + form + struct.pack("<4sI", b"data", num_bytes)
    sizes = struct.pack("<4sIQQQI", b"ds64", 28, size + 36, num_bytes, num_bytes // (2 * channels), 0)
    unknown = _RIFF_LIMIT
    return struct.pack("<4sI4s", b"RF64", unknown, b"WAVE") + sizes + form + struct.pack("<4sI", b"data", unknown)


class ArrayFile(PiecewiseFile):
    """A `.npy` array `[rows, N]` whose last axis is time: pieces are `[n, rows]`.

    It is stored in Fortran order, frame after frame; `numpy.load` and its `mmap_mode` give `[rows, N]` all the same.
    """

    def __init__(self, path: Path, *, num_rows: int, length: int, dtype: np.dtype[Any]) -> None:
        header = io.BytesIO()
        described = {
            "descr": np.lib.format.dtype_to_descr(dtype),
            "fortran_order": True,
            "shape": (num_rows, length),
        }
        np.lib.format.write_array_header_1_0(header, described)  # type: ignore[no-untyped-call]
        super().__init__(path, header.getvalue(), num_rows * length * dtype.itemsize)
