"""Real Fourier transforms on the CPU that keep to the calling thread.

PyTorch's transform plans anew for every call and splits even three frames among its threads; NumPy's has no vector
instructions. MKL, which PyTorch brings along on Linux, takes a kept plan through its documented C interface (DFTI):
a third of the time for three frames, and no thread is woken. Where it isn't there, NumPy's transform is taken.
"""

from __future__ import annotations

import ctypes
import platform
import sys
import weakref
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

# Samples during whose transform, some microseconds, other Python threads wait: handing over and coming back may take
# longer.
_FEW = 8192

# mkl_dfti.h
_CREATE = "DftiCreateDescriptor_s_1d"
_REAL = 33
_NUMBER_OF_TRANSFORMS, _STORAGE, _PLACEMENT, _INPUT_DISTANCE, _OUTPUT_DISTANCE, _THREAD_LIMIT = 7, 10, 11, 14, 15, 27
_COMPLEX_COMPLEX, _NOT_INPLACE = 39, 44


def real_transform(frames: NDArray[np.float32], spectrum: NDArray[Any]) -> Callable[[], int]:
    """A function that puts the transforms of `frames`, as they are at each call, into `spectrum`; not 0: it failed.

    Args:
        frames: float32 `[F, n_fft]`, contiguous.
        spectrum: complex64 `[F, n_fft // 2 + 1]`, contiguous.
    """
    planned = _planned(frames, spectrum) if _mkl() is not None else None
    return planned or partial(_numpys, frames, spectrum)


def _numpys(frames: NDArray[np.float32], spectrum: NDArray[Any]) -> int:
    np.fft.rfft(frames, out=spectrum)
    return 0


def _planned(frames: NDArray[np.float32], spectrum: NDArray[Any]) -> Callable[[], int] | None:
    """MKL's transform, or None if it refuses the plan."""
    libraries = _mkl()
    assert libraries is not None
    waiting, handing_over = libraries
    num_frames, n_fft = frames.shape
    handle = ctypes.c_void_p()
    if getattr(waiting, _CREATE)(ctypes.byref(handle), _REAL, n_fft):
        return None
    values = {
        _PLACEMENT: _NOT_INPLACE,
        _STORAGE: _COMPLEX_COMPLEX,
        _NUMBER_OF_TRANSFORMS: num_frames,
        _INPUT_DISTANCE: n_fft,
        _OUTPUT_DISTANCE: n_fft // 2 + 1,
        _THREAD_LIMIT: 1,
    }
    compute = (waiting if frames.size <= _FEW else handing_over).DftiComputeForward
    # Pointers made thus keep their array alive.
    transform = partial(compute, handle, *(array.ctypes.data_as(ctypes.c_void_p) for array in (frames, spectrum)))
    weakref.finalize(transform, waiting.DftiFreeDescriptor, ctypes.byref(handle)).atexit = False
    refused = [waiting.DftiSetValue(handle, name, value) for name, value in values.items()]
    return None if any(refused) or waiting.DftiCommitDescriptor(handle) else transform


@cache
def _mkl() -> tuple[ctypes.CDLL, ctypes.CDLL] | None:
    """PyTorch's MKL, called with and without the interpreter's lock; None unless it is there and transforms."""
    if sys.platform != "linux" or platform.machine() != "x86_64" or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return None
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        libraries = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        for library in libraries:
            pointer = ctypes.c_void_p
            for name, arguments in (
                (_CREATE, [pointer, ctypes.c_int, ctypes.c_long]),
                ("DftiSetValue", [pointer, ctypes.c_int, ctypes.c_long]),
                ("DftiCommitDescriptor", [pointer]),
                ("DftiComputeForward", [pointer, pointer, pointer]),
                ("DftiFreeDescriptor", [pointer]),
            ):
                function = getattr(library, name)
                function.argtypes, function.restype = arguments, ctypes.c_long
    except (OSError, AttributeError):
        return None
    return libraries
