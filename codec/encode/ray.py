"""On a Ray cluster: each part is a task; Ray places it, and does it again elsewhere if its node is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

from codec.encode.pipeline import PartResult
from codec.encode.place import Place
from codec.encode.plan import Part
from codec.encode.processes import on_device, portable
from codec.encode.settings import EncodeSettings
from codec.encode.state import stored_since
from codec.errors import CodecError, InputError, TokenFileError
from codec.model import Codec
from codec.spec import CodecSpec

MAX_RETRIES = 20
"""Times that a part is begun again after the loss of its worker."""

_CONNECT_SECONDS = 20

_codecs: dict[str, Codec] = {}
"""Of a worker: the codec by its device, kept for its next task."""


def _encode(codec: Codec, device: str, part: Part, place: Place, settings: EncodeSettings) -> PartResult:
    """A task. What is wrong with the settings or the disk is returned, not raised: it isn't worth another try."""
    from codec.encode.corpus import encode_part

    key = f"{codec.spec.weights_hash} {device}"
    if key not in _codecs:
        _codecs.clear()
        _codecs[key] = on_device(codec, device)
    try:
        _look_again(part, place, codec.spec, settings)
        return encode_part(_codecs[key], part, place, settings, lambda number, done, seconds: None)
    finally:
        place.clean_up()


def _check_listening(address: str | None) -> None:
    """Raises OSError if nothing listens at `host:port`: Ray itself would wait for minutes."""
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()


def _look_again(part: Part, place: Place, spec: CodecSpec, settings: EncodeSettings) -> None:
    """Notes in the part what is stored of it: this may be its second try, after a worker that died."""
    items = [item for unit in part.units for item in unit.items]
    shards = [shard for shard, _ in place.shards() if part.owns(shard)]
    if shards:
        stored, rows = stored_since(place, shards, items, spec, settings)
        for unit in part.units:
            unit.stored = stored[unit.first : unit.first + len(unit.items)]
            unit.rows = rows[unit.first : unit.first + len(unit.items)]


def run_parts(
    codec: Codec,
    parts: Sequence[Part],
    place: Place,
    settings: EncodeSettings,
    tell: Callable[[int, int, float], None],
    address: str | None,
) -> list[PartResult]:
    """Encodes the parts as tasks: one GPU each if the codec is on one, `num_threads` CPU cores each otherwise.

    The store must be where every node sees it: a shared folder or a URL. A task that is begun again goes on with the
    shard that the lost one left, if it can see it.

    Raises:
        InputError: Ray isn't installed, or the cluster can't be reached.
        CodecError: What a task raised.
        TokenFileError: A part was lost again and again.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(f"engine 'ray' needs Ray ({error}); pip install 'codec[ray]'") from error
    started = False
    if not ray.is_initialized():
        try:
            _check_listening(address)
            ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, RuntimeError, ValueError) as error:
            raise InputError(f"no Ray cluster at {address!r} ({error}); check --address") from error
        started = True
    try:
        return _run(ray, codec, parts, place, settings, tell)
    finally:
        if started:
            ray.shutdown()


def _run(
    ray: Any,
    codec: Codec,
    parts: Sequence[Part],
    place: Place,
    settings: EncodeSettings,
    tell: Callable[[int, int, float], None],
) -> list[PartResult]:
    on_gpu = codec.device.type == "cuda"
    task = ray.remote(
        num_gpus=1 if on_gpu else 0,
        num_cpus=settings.num_threads if on_gpu else 1,
        max_retries=MAX_RETRIES,
        scheduling_strategy="SPREAD",
    )(_encode)
    sent = ray.put(portable(codec))
    pending = {task.remote(sent, "cuda" if on_gpu else "cpu", part, place, settings): part for part in parts}
    results = []
    while pending:
        done, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
        for reference in done:
            part = pending.pop(reference)
            try:
                result: PartResult = ray.get(reference)
            except ray.exceptions.RayTaskError as error:
                for other in pending:
                    ray.cancel(other, force=True)
                cause = error.cause
                raise cause if isinstance(cause, CodecError) else error from None
            except ray.exceptions.RayError as error:
                raise TokenFileError(
                    f"{place.url or place.folder}: part {part.number} was lost {MAX_RETRIES} times ({error}); what is "
                    "written is safe: the same command goes on"
                ) from error
            results.append(result)
            tell(part.number, result.num_done, result.audio_seconds)
    return results
