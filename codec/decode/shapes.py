"""A handful of shapes per run, chosen as batches come; on a CUDA device each is recorded as a graph once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from codec.decode.transfer import Staged
from codec.tokens import PackedBatch

MAX_SHAPES = 8
"""Shapes of one run; batches that fit none of them are decoded as they are."""

MAX_WASTE = 1.25
"""A batch takes a shape that is at most so much larger; while there is room, a new one otherwise."""

WARM_UPS = 3
"""Runs before a recording: they plan transforms and allocate, which a recording can't."""


class Packing(NamedTuple):
    """What unpacking needs to know of a batch besides its rows."""

    n_quantizers: int
    bits: int
    block_stride: int
    codebook_size: int

    @classmethod
    def of(cls, packed: PackedBatch, n_quantizers: int) -> Packing:
        """That of a batch of which so many codebooks are wanted."""
        return cls(n_quantizers, packed.bits, packed.block_stride, packed.codebook_size)


class Shape(NamedTuple):
    """Rows, frames read and frames of the excerpt, each at most."""

    num_rows: int
    num_read: int
    num_frames: int

    def holds(self, other: Shape) -> bool:
        """Whether a batch of the other shape fits."""
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    @property
    def cost(self) -> int:
        """Padded frames to decode."""
        return self.num_rows * self.num_read


class ShapeBook:
    """The shapes of a run."""

    def __init__(self) -> None:
        self.shapes: list[Shape] = []

    def fit(self, batch: Shape) -> Shape | None:
        """The shape to pad a batch to; None if it is best left as it is."""
        fitting = [shape for shape in self.shapes if shape.holds(batch)]
        best = min(fitting, key=lambda shape: shape.cost, default=None)
        full = len(self.shapes) >= MAX_SHAPES
        if best is not None and best.cost <= (2 if full else MAX_WASTE) * batch.cost:
            return best
        if full:
            return None
        new = Shape(batch.num_rows, -(-batch.num_read // 8) * 8, -(-batch.num_frames // 8) * 8)
        self.shapes.append(new)
        return new


Run = Callable[[Tensor, Tensor, Packing, Shape], tuple[Tensor, Tensor, Tensor]]
"""Packed bytes, table, packing, shape → data `[B, ..., N]`, lengths `[B]`, flags; looks at no value."""


@dataclass
class _Recording:
    data: Tensor
    table: Tensor
    graph: torch.cuda.CUDAGraph | None
    outputs: tuple[Tensor, Tensor, Tensor]


class StaticRuns:
    """Runs batches at a few static shapes: padded with copies of their first row, cut again afterwards."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._books: dict[Packing, ShapeBook] = {}
        self._recordings: dict[tuple[Packing, Shape], _Recording] = {}
        self._pool: Any = None
        self._fails = False
        self._stream: torch.cuda.Stream | None = None

    @property
    def shapes(self) -> list[Shape]:
        """Those in use."""
        return [shape for book in self._books.values() for shape in book.shapes]

    def __call__(self, staged: Staged, packing: Packing) -> tuple[Tensor, Tensor, Tensor] | None:
        """Data, lengths and flags, which the next call overwrites; None if the batch fits no shape."""
        num_rows = staged.table.shape[1]
        host = staged.host
        shape = self._books.setdefault(packing, ShapeBook()).fit(
            Shape(num_rows, int(host[3].max()), int(host[5].max()))
        )
        if shape is None or self._fails or len(staged.data) > _num_bytes(packing, shape):
            return None
        device = staged.data.device
        if device.type == "cuda":
            current = torch.cuda.current_stream(device)
            if self._stream not in (None, current):  # whose work on the buffers may not be done
                current.wait_stream(self._stream)  # type: ignore[arg-type]
            self._stream = current
        recording = self._recordings.get((packing, shape))
        if recording is None:
            data = torch.zeros(_num_bytes(packing, shape), dtype=torch.uint8, device=device)
            table = torch.zeros(len(staged.table), shape.num_rows, dtype=torch.int64, device=device)
            recording = _Recording(data, table, None, (data, data, data))
            _fill(recording, staged)
            if device.type == "cuda" and not self._record(recording, packing, shape):
                return None
            self._recordings[packing, shape] = recording
        else:
            _fill(recording, staged)
        if recording.graph is not None:
            recording.graph.replay()
            data, lengths, flags = recording.outputs
        else:
            data, lengths, flags = self._run(recording.data, recording.table, packing, shape)
        return data[:num_rows], lengths[:num_rows], flags

    def _record(self, recording: _Recording, packing: Packing, shape: Shape) -> bool:
        """Records the graph; False, with a warning and for good, if this codec can't be recorded."""
        current = torch.cuda.current_stream(recording.data.device)
        side = torch.cuda.Stream(recording.data.device)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._run(recording.data, recording.table, packing, shape)
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # One pool: what a graph leaves is taken out before the next one runs. Other threads, such as a loader's
            # that pins memory, may go on meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                recording.outputs = self._run(recording.data, recording.table, packing, shape)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._fails = True
            warnings.warn(f"decoding runs without CUDA graphs: recording one failed ({error})", stacklevel=2)
            return False
        self._pool = self._pool or graph.pool()
        recording.graph = graph
        return True


def _num_bytes(packing: Packing, shape: Shape) -> int:
    """Bytes of the packed excerpts of a shape, at most."""
    blocks = (shape.num_read + 254) // 256 + 1
    return shape.num_rows * blocks * packing.block_stride + 8


def _fill(recording: _Recording, staged: Staged) -> None:
    num_rows = staged.table.shape[1]
    recording.data[: len(staged.data)].copy_(staged.data)
    recording.table[:, :num_rows].copy_(staged.table)
    recording.table[:, num_rows:].copy_(staged.table[:, :1].expand(-1, recording.table.shape[1] - num_rows))
