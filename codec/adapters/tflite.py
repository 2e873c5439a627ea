"""A reader of TFLite files: the graph's operators and constants, no more. TFLite is a FlatBuffer."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from codec.errors import CheckpointError

ADD, CONCATENATION, CONV, DEPTHWISE_CONV, DEQUANTIZE = 0, 2, 3, 4, 6
RESHAPE, GATHER, STRIDED_SLICE, TRANSPOSE_CONV, LEAKY_RELU, QUANTIZE = 22, 36, 45, 67, 98, 114

_DTYPES = {0: np.float32, 1: np.float16, 2: np.int32, 3: np.uint8, 4: np.int64, 6: np.bool_, 7: np.int16, 9: np.int8}


@dataclass(frozen=True)
class TfliteTensor:
    """One tensor of a graph.

    Attributes:
        shape: As stored.
        scale: float32, one per tensor or per `axis`; empty if not quantized.
        zero_point: int64, as `scale`.
        axis: The axis that `scale` is along.
        data: The constant's raw values, or None for what the graph computes.
    """

    shape: tuple[int, ...]
    scale: npt.NDArray[np.float32]
    zero_point: npt.NDArray[np.int64]
    axis: int
    data: npt.NDArray[Any] | None

    def values(self) -> npt.NDArray[np.float32]:
        """The constant, dequantized."""
        if self.data is None:
            raise CheckpointError("a tensor that should be a constant of the file isn't; this is another graph")
        if not len(self.scale):
            return self.data.astype(np.float32)
        along = [1] * len(self.shape)
        if len(self.scale) > 1:
            along[self.axis] = -1
        shifted = self.data.astype(np.int64) - self.zero_point.reshape(along)
        return (shifted * self.scale.astype(np.float64).reshape(along)).astype(np.float32)


@dataclass(frozen=True)
class TfliteOp:
    """One operator: its builtin code, tensor numbers, and the raw table of its options."""

    code: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    options: _Table | None = None

    def option(self, number: int, kind: str, default: float = 0) -> Any:
        """Field `number` of the options, of a `struct` kind."""
        return default if self.options is None else self.options.scalar(number, kind, default)


@dataclass(frozen=True)
class TfliteGraph:
    """A subgraph: tensors, and operators in order of execution."""

    name: str
    tensors: tuple[TfliteTensor, ...]
    ops: tuple[TfliteOp, ...] = field(default=())


class _Table:
    """A FlatBuffer table: fields found through its vtable."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data, self.position = data, position
        vtable = position - struct.unpack_from("<i", data, position)[0]
        if vtable < 0:
            raise ValueError("a vtable lies before the file")
        (size,) = struct.unpack_from("<H", data, vtable)
        self.offsets = struct.unpack_from(f"<{(size - 4) // 2}H", data, vtable + 4)

    def _at(self, number: int) -> int | None:
        offset = self.offsets[number] if number < len(self.offsets) else 0
        return self.position + offset if offset else None

    def scalar(self, number: int, kind: str, default: float = 0) -> Any:
        at = self._at(number)
        return default if at is None else struct.unpack_from("<" + kind, self.data, at)[0]

    def _target(self, at: int) -> int:
        offset: int = struct.unpack_from("<I", self.data, at)[0]
        return at + offset

    def table(self, number: int) -> _Table | None:
        at = self._at(number)
        return None if at is None else _Table(self.data, self._target(at))

    def tables(self, number: int) -> list[_Table]:
        at = self._at(number)
        if at is None:
            return []
        start = self._target(at)
        (count,) = struct.unpack_from("<I", self.data, start)
        if count > len(self.data) // 4:
            raise ValueError(f"a list of {count} tables in a file of {len(self.data)} bytes")
        return [_Table(self.data, self._target(start + 4 + 4 * n)) for n in range(count)]

    def array(self, number: int, dtype: Any) -> npt.NDArray[Any]:
        at = self._at(number)
        if at is None:
            return np.zeros(0, dtype)
        start = self._target(at)
        (count,) = struct.unpack_from("<I", self.data, start)
        return np.frombuffer(self.data, dtype, count, start + 4)


def read_tflite(path: Path) -> list[TfliteGraph]:
    """The subgraphs of a TFLite file.

    Raises:
        CheckpointError: Not a TFLite file, or damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error}); give the folder with Lyra's .tflite files") from error
    if data[4:8] != b"TFL3":
        raise CheckpointError(f"{path}: no TFLite file: its identifier is {data[4:8]!r}, not b'TFL3'")
    return _guarded(path, lambda: _read(data))


def _guarded(path: Path, read: Callable[[], list[TfliteGraph]]) -> list[TfliteGraph]:
    try:
        return read()
    except (struct.error, ValueError, IndexError, KeyError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{path}: a damaged TFLite file ({error}); copy it again") from error


def _read(data: bytes) -> list[TfliteGraph]:
    model = _Table(data, struct.unpack_from("<I", data, 0)[0])
    codes = [max(code.scalar(0, "b"), code.scalar(3, "i")) for code in model.tables(1)]
    buffers = model.tables(4)
    graphs = []
    for graph in model.tables(2):
        tensors = tuple(_tensor(table, buffers) for table in graph.tables(0))
        ops = tuple(
            TfliteOp(
                codes[op.scalar(0, "I")],
                tuple(op.array(1, "<i4").tolist()),
                tuple(op.array(2, "<i4").tolist()),
                op.table(4),
            )
            for op in graph.tables(3)
        )
        graphs.append(TfliteGraph(graph.array(4, np.uint8).tobytes().decode(errors="replace"), tensors, ops))
    return graphs


def _tensor(table: _Table, buffers: list[_Table]) -> TfliteTensor:
    shape = tuple(int(n) for n in table.array(0, "<i4"))
    quantization = table.table(4)
    scale = np.zeros(0, np.float32) if quantization is None else quantization.array(2, "<f4")
    zero = np.zeros(0, np.int64) if quantization is None else quantization.array(3, "<i8")
    axis = 0 if quantization is None else quantization.scalar(6, "i")
    raw = buffers[table.scalar(2, "I")].array(0, np.uint8)
    data: npt.NDArray[Any] | None = None
    if len(raw) and table.scalar(1, "b") in _DTYPES:
        data = np.frombuffer(raw.tobytes(), _DTYPES[table.scalar(1, "b")]).reshape(shape)
    return TfliteTensor(shape, scale, zero, axis, data)
