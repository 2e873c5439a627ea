"""Several processes on one machine: each with its own codec, on its CPU cores or its GPU; parts as they get free."""

from __future__ import annotations

import copy
import multiprocessing
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from typing import Any

import torch

from codec.audio.threads import usable_cores
from codec.encode.pipeline import PartResult
from codec.encode.place import Place
from codec.encode.plan import Part
from codec.encode.settings import EncodeSettings
from codec.errors import InputError, TokenFileError
from codec.model import Codec

Tell = Callable[[int, int, float], None]

_state: dict[str, Any] = {}


def on_device(codec: Codec, device: str) -> Codec:
    """The codec on a device; itself if it is there."""
    if torch.device(device) == codec.device:
        return codec
    if not isinstance(codec, torch.nn.Module):
        raise InputError(f"{codec.spec.name} can't be moved to {device}; load it there")
    moved: Any = codec.to(device)
    return moved  # type: ignore[no-any-return]


def portable(codec: Codec) -> Codec:
    """A copy of the codec that can be sent to another process: on the CPU."""
    return codec if codec.device.type == "cpu" else on_device(copy.deepcopy(codec), "cpu")


def _begin(codec: Codec, devices: Any, num_threads: int, messages: Any) -> None:
    torch.set_num_threads(num_threads)
    _state["codec"] = on_device(codec, devices.get())
    _state["messages"] = messages
    messages.cancel_join_thread()  # what hasn't been heard at the end doesn't keep this process


def _encode(part: Part, place: Place, settings: EncodeSettings) -> PartResult:
    from codec.encode.corpus import encode_part

    def tell(number: int, done: int, audio_seconds: float) -> None:
        _state["messages"].put((number, done, audio_seconds))

    try:
        return encode_part(_state["codec"], part, place, settings, tell)
    finally:
        place.clean_up()


def run_parts(
    codec: Codec,
    parts: Sequence[Part],
    place: Place,
    settings: EncodeSettings,
    tell: Tell,
    workers: int,
    devices: Sequence[str],
) -> list[PartResult]:
    """Encodes the parts in `workers` processes on the codec's device, or in one per device.

    Raises:
        CodecError: What a process raised.
        TokenFileError: A process was killed: nothing is lost, the same call goes on.
    """
    names = list(devices) or [str(codec.device)] * workers
    names = names[: len(parts)]
    context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks, and can't use CUDA
    queued, messages = context.Queue(), context.Queue()
    for name in names:
        queued.put(name)
    threads = max(1, usable_cores() // len(names))
    start = (portable(codec), queued, threads, messages)
    results: list[PartResult] = []
    with ProcessPoolExecutor(len(names), context, initializer=_begin, initargs=start) as pool:
        waiting: set[Future[PartResult]] = {pool.submit(_encode, part, place, settings) for part in parts}
        while waiting:
            done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_COMPLETED)
            with suppress(queue.Empty):
                while True:
                    tell(*messages.get_nowait())
            for future in done:
                try:
                    results.append(future.result())
                except BrokenProcessPool as error:
                    raise TokenFileError(
                        f"{place.url or place.folder}: a process that was encoding was killed (by a lack of memory, "
                        "perhaps); what is written is safe: the same command goes on, try fewer workers"
                    ) from error
                except BaseException:
                    for other in waiting:
                        other.cancel()
                    raise
    return results
