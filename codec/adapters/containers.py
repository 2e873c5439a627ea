"""Files of codes that other projects write: EnCodec's `.ecdc`, DAC's `.dac`, arrays in `.npy` and `.pt`."""

from __future__ import annotations

import io
import json
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from codec.adapters.original import load_tensors
from codec.errors import CheckpointError, TokenFileError

Codes = npt.NDArray[np.int64]

SUFFIXES = (".ecdc", ".dac", ".npy", ".pt", ".pth")

_ECDC_HEAD = struct.Struct("!4sBI")
_ECDC_BITS = 10
_ECDC_STEP = 320


@dataclass(frozen=True)
class EcdcFile:
    """What an `.ecdc` file holds.

    Attributes:
        model: `encodec_24khz` or `encodec_48khz`.
        num_samples: Samples of the wave.
        chunks: int64 `[K, T]` of each chunk; one chunk for the 24 kHz model.
        scales: Level of each chunk; empty for the 24 kHz model.
    """

    model: str
    num_samples: int
    chunks: list[Codes]
    scales: list[float]


@dataclass(frozen=True)
class DacFile:
    """What a `.dac` file holds.

    Attributes:
        codes: int64 `[C, K, T]`, one row of codebooks per channel.
        chunk_length: Frames per chunk.
        is_chunked: Whether chunks were encoded without padding, so that their frames lie on no common grid.
        original_length: Samples of the file that was encoded, at its own rate.
        sample_rate: Of that file, Hz.
        input_db: Its loudness, LUFS; the codec's input was brought to another one.
    """

    codes: Codes
    chunk_length: int
    is_chunked: bool
    original_length: int
    sample_rate: int
    input_db: float | None


def read_ecdc(path: Path) -> EcdcFile:
    """Reads an `.ecdc` file that was written without the language model.

    Raises:
        TokenFileError: Damaged, of another version, or entropy-coded by the language model.
    """
    data = _read(path)
    if len(data) < _ECDC_HEAD.size or data[:4] != b"ECDC":
        raise TokenFileError(f"{path}: no .ecdc file: it starts with {data[:4]!r}, not b'ECDC'")
    _, version, size = _ECDC_HEAD.unpack_from(data)
    position = _ECDC_HEAD.size + size
    if version != 0 or position > len(data):
        limit = f"version 0 and a header within {len(data)} bytes are read"
        raise TokenFileError(
            f"{path}: version {version}, header of {size} bytes; {limit}; the file is damaged or newer"
        )
    try:
        head = json.loads(data[_ECDC_HEAD.size : position])
        model, length, levels, has_lm = (head[key] for key in ("m", "al", "nc", "lm"))
    except (ValueError, KeyError, TypeError) as error:
        raise TokenFileError(f"{path}: damaged header ({error!r}); copy the file again") from error
    if has_lm:
        raise TokenFileError(
            f"{path}: entropy-coded by EnCodec's language model, which this doesn't read (and which differs across "
            "devices); write it with `encodec` without --lm"
        )
    known = {"encodec_24khz": None, "encodec_48khz": (48000, 47520)}
    if model not in known or not _is_count(length, 2**40) or not _is_count(levels, 32):
        found = f"model {model!r}, {length!r} samples, {levels!r} codebooks"
        raise TokenFileError(f"{path}: {found}; known are {', '.join(known)}, ≥ 1 samples, 1 to 32 codebooks")
    layout = known[model]
    size, stride = (length, length) if layout is None else layout
    starts = range(0, length, stride)
    # Compared before anything is allocated: the header's numbers could be anything.
    bytes_needed = position
    if len(starts) > len(data):
        raise TokenFileError(f"{path}: {len(starts)} chunks in {len(data)} bytes; the file is damaged")
    counts = [-(-min(size, length - start) // _ECDC_STEP) for start in starts]
    bytes_needed += sum(-(-count * levels * _ECDC_BITS // 8) + (4 if layout else 0) for count in counts)
    if bytes_needed != len(data):
        raise TokenFileError(
            f"{path}: {len(data)} bytes; {length} samples in {levels} codebooks take {bytes_needed}: cut off or damaged"
        )
    chunks, scales = [], []
    for count in counts:
        if layout:
            scales.append(float(struct.unpack_from("!f", data, position)[0]))
            position += 4
        num_bytes = -(-count * levels * _ECDC_BITS // 8)
        bits = np.unpackbits(np.frombuffer(data, np.uint8, num_bytes, position), bitorder="little")
        values = bits[: count * levels * _ECDC_BITS].reshape(-1, _ECDC_BITS).astype(np.int64) @ (
            1 << np.arange(_ECDC_BITS)
        )
        chunks.append(values.reshape(count, levels).T.copy())
        position += num_bytes
    if not all(np.isfinite(scale) and scale > 0 for scale in scales):
        raise TokenFileError(f"{path}: chunk levels {scales[:3]} …; they must be positive: the file is damaged")
    return EcdcFile(model, length, chunks, scales)


def read_dac(path: Path) -> DacFile:
    """Reads a `.dac` file. It is a pickle, which could execute anything: only plain values and number arrays pass.

    Raises:
        TokenFileError: Damaged, or it holds anything else.
    """
    stream = io.BytesIO(_read(path))
    try:
        version = np.lib.format.read_magic(stream)
        read_header = np.lib.format.read_array_header_1_0 if version[0] == 1 else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(stream)
        if dtype.hasobject and shape == ():
            document = _NumbersOnly(stream).load()
        else:
            raise ValueError(f"an array of {dtype} {shape} where DAC pickles one object")
        if isinstance(document, np.ndarray):
            document = document[()]  # the dictionary lies in an array of one object
        codes, meta = document["codes"], document["metadata"]
        levels = meta["input_db"]
        found = DacFile(
            codes=_numbers(codes, 3),
            chunk_length=int(meta["chunk_length"]),
            is_chunked=not bool(meta["padding"]),
            original_length=int(meta["original_length"]),
            sample_rate=int(meta["sample_rate"]),
            input_db=None if levels is None else float(np.asarray(levels, np.float64).reshape(-1)[0]),
        )
        if not (found.chunk_length > 0 and 0 < found.original_length < 2**48 and 0 < found.sample_rate < 2**31):
            raise ValueError(
                f"chunk length, length or rate out of range: {found.chunk_length}, {found.original_length}"
            )
    except TokenFileError:
        raise
    except Exception as error:  # unpickling what isn't a pickle ends in any exception there is
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise TokenFileError(f"{path}: no .dac file that can be read safely ({reason})") from error
    return found


def read_codes(path: Path) -> Any:
    """Codes of a `.npy`, `.pt` or `.pth` file: int64 `[..., K, T]`, or a list of arrays, one per codebook.

    Raises:
        TokenFileError: Unreadable, or it holds no codes.
    """
    try:
        found = np.load(path, allow_pickle=False) if path.suffix == ".npy" else load_tensors(path)
    except CheckpointError as error:
        raise TokenFileError(str(error)) from error
    except (OSError, ValueError, EOFError) as error:
        raise TokenFileError(f"{path}: can't be read as an array ({error}); codes are integers [K, T]") from error
    if isinstance(found, dict):
        key = next((k for k in ("codes", "audio_codes", "tokens") if k in found), None)
        if key is None:
            raise TokenFileError(f"{path}: a dictionary of {sorted(map(str, found))[:8]}; codes lie under 'codes'")
        found = found[key]
    try:
        if isinstance(found, list | tuple) and found and all(isinstance(part, torch.Tensor) for part in found):
            return [_numbers(part.numpy(), part.ndim) for part in found]
        array = found.numpy() if isinstance(found, torch.Tensor) else np.asarray(found)
        return _numbers(array, array.ndim)
    except (ValueError, TypeError) as error:
        raise TokenFileError(f"{path}: {error}") from error


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TokenFileError(f"{path}: can't be read ({error.strerror})") from error


def _numbers(array: Any, ndim: int) -> Codes:
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim != ndim or array.size == 0:
        what = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"codes are {what}; they must be integers in {ndim} dimensions, not empty")
    return array.astype(np.int64)


class _ArrayType:
    """Stands for `numpy.ndarray`, which would allocate whatever size it is called with."""


def _plain_dtype(*args: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(*args)
    if dtype.kind not in "iufbO":
        raise pickle.UnpicklingError(f"dtype {dtype} is no number's")
    return dtype


def _empty_array(kind: Any, shape: Any, code: Any) -> npt.NDArray[Any]:
    return np.ndarray((0,), np.int8)  # what numpy pickles first; the state that follows makes it the array


def _scalar(dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, np.dtype) or dtype.kind not in "iufb" or not isinstance(data, bytes):
        raise pickle.UnpicklingError("a scalar that is no number")
    return np.frombuffer(data, dtype, 1)[0]


class _NumbersOnly(pickle.Unpickler):
    """Admits what arrays of numbers need, and no more."""

    def find_class(self, module: str, name: str) -> Any:
        admitted = {
            "_reconstruct": _empty_array,
            "scalar": _scalar,
            "dtype": _plain_dtype,
            "ndarray": _ArrayType,
        }
        homes = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
        if module not in homes or name not in admitted:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a file of codes has no use for")
        return admitted[name]
