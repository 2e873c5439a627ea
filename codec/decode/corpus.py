"""A whole store → files: WAV, log-mel or codes; goes on where an interrupted run stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from codec.decode.batch import BatchDecoder
from codec.decode.files import ArrayFile, PiecewiseFile, WaveFile
from codec.decode.record import recorded, store_fingerprint
from codec.decode.resampled import ResampledStream
from codec.errors import CodecError, DecodeError, InputError, TokenFileError
from codec.frames import resampled_length
from codec.model import Codec
from codec.sources import Excerpt, TokenBatch, Tokens, output_names
from codec.tokens import ItemInfo, TokenStore

FileOutput = Literal["wave", "mel", "codes"]

SUFFIX = {"wave": ".wav", "mel": ".npy", "codes": ".npy"}

CPU_BATCH_FRAMES = 6400
DEVICE_BATCH_FRAMES = 1 << 17
"""Frames decoded at once."""

WINDOW = 16
"""Batches of short items that are sorted by length together, so that little is padded."""

SAMPLE_RATES = (1000, 768_000)
"""Hz of the recorded rates that are believed."""


@dataclass
class DecodeReport:
    """What a `decode_store` run did.

    Attributes:
        num_items: Items written.
        num_skipped: Items that an interrupted run had already written.
        num_clipped: Samples beyond −1 … 1 that were clipped to it.
        audio_seconds: Audio that the written items stand for.
        elapsed_seconds: Wall time.
        failures: key and error of each item that couldn't be decoded.
    """

    num_items: int = 0
    num_skipped: int = 0
    num_clipped: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


class _Piece(NamedTuple):
    """A span of one item, in frames."""

    item: int
    excerpt: Excerpt
    is_last: bool


@dataclass
class _Job:
    """Pieces decoded at once, their data on its way to the host."""

    pieces: list[_Piece]
    data: Tensor | None = None  # [B, n, X]
    lengths: list[int] = field(default_factory=list)
    facts: Tensor | None = None  # int64 [2, B]: whether all is finite, samples clipped
    ready: torch.cuda.Event | None = None
    error: CodecError | None = None


def decode_store(
    codec: Codec | None,
    store: TokenStore,
    folder: str | os.PathLike[str],
    output: FileOutput = "wave",
    *,
    n_quantizers: int | None = None,
    original_rate: bool = False,
    dtype: torch.dtype | None = None,
    batch_frames: int | None = None,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> DecodeReport:
    """Decodes every item of a store into files: 16-bit WAV, log-mel float32 `[M, F]` or codes uint16 `[K, T]` (`.npy`).

    A file appears under its name when it is complete. Run again, it goes on with the items that have no file yet;
    `decode.json` in the folder says what the run was, and another store, codec or output is refused. Items are decoded
    in batches, long ones in pieces that go to disk as they come, so memory doesn't depend on their length. A damaged
    item is reported and left out. A gain that was applied before encoding is undone.

    Args:
        codec: The codec that wrote the store; not needed for codes.
        store: What to decode.
        folder: Where to; made if missing. An item's file is named by its key.
        output: "wave", "mel" (by the codec's mel head) or "codes".
        n_quantizers: Use the first codebooks only; all that are stored if None.
        original_rate: Resample waves to the `sample_rate` of an item's metadata, where it has one.
        dtype: Of the decoder; see `BatchDecoder`.
        batch_frames: Frames decoded at once; by default 6400 on a CPU, 131072 elsewhere.
        force: Begin anew and replace the files that are there.
        on_progress: Called with (items done, items in all, audio seconds so far).

    Raises:
        InputError: The folder is of another run or holds files of none, a key can't be a file name, options that
            don't fit each other.
        TokenFileError: The store is of another codec.
        DecodeError: Not even one item fits into the device's memory.
    """
    started = time.monotonic()
    if output not in SUFFIX:
        raise InputError(f"output is {output!r}; it must be one of {', '.join(SUFFIX)}")
    if original_rate and output != "wave":
        raise InputError(f"original_rate is given with output={output!r}; it goes with output='wave'")
    if codec is None and output != "codes":
        raise InputError(f"codec is None; output={output!r} needs the codec that wrote the store")
    if codec is not None:
        codec.spec.check_tokens(store.spec)
    quantizers = Tokens(store, n_quantizers=n_quantizers).n_quantizers or store.n_quantizers
    if not 1 <= quantizers <= store.n_quantizers:
        raise InputError(f"n_quantizers is {n_quantizers}; the store holds {store.n_quantizers}: ask for 1 to as many")
    keys = list(store.keys())
    root = Path(folder)
    targets = [root / name for name in output_names(keys, SUFFIX[output])]
    facts = {
        "store": store_fingerprint(store),
        "codec": _codec_named(codec, store),
        "output": output,
        "n_quantizers": quantizers,
        "original_rate": original_rate,
    }
    with recorded(root, facts, targets, force=force):
        run = _Run(codec, store, output, quantizers, original_rate, dtype, targets)
        if batch_frames is None:
            on_cpu = codec is None or codec.device.type == "cpu"
            batch_frames = CPU_BATCH_FRAMES if on_cpu else DEVICE_BATCH_FRAMES
        run.go(keys, batch_frames, on_progress)
    run.report.elapsed_seconds = time.monotonic() - started
    return run.report


def _codec_named(codec: Codec | None, store: TokenStore) -> str:
    """The store's codec by its name, another one that shares its codes by its weights too."""
    if codec is None or codec.spec.weights_hash == store.spec.weights_hash:
        return store.spec.name
    return f"{codec.spec.name} ({codec.spec.weights_hash[:12]})"


class _Run:
    def __init__(
        self,
        codec: Codec | None,
        store: TokenStore,
        output: FileOutput,
        n_quantizers: int,
        original_rate: bool,
        dtype: torch.dtype | None,
        targets: list[Path],
    ) -> None:
        self.report = DecodeReport()
        self._store, self._output, self._targets = store, output, targets
        self._n_quantizers, self._original_rate = n_quantizers, original_rate
        self._decoder: BatchDecoder | None = None
        self._mel_hop = 1
        context = (0, 0)
        if codec is not None and output != "codes":
            self._decoder = BatchDecoder(codec, output, dtype=dtype, split=True, check_finite=False)
            self._mel_hop = codec.mel_hop_length
            context = self._decoder.context
        self._tokens = Tokens(store, context=context, n_quantizers=n_quantizers)
        self._file: _ItemFile | None = None
        self._failed: dict[int, dict[str, str]] = {}

    def go(self, keys: list[str], batch_frames: int, on_progress: Callable[[int, int, float], None] | None) -> None:
        """Decodes what has no file yet."""
        frames = self._store.num_frames.tolist()
        todo = [item for item, target in enumerate(self._targets) if not target.exists()]
        self.report.num_skipped = len(keys) - len(todo)
        done = self.report.num_skipped

        def finish(job: _Job) -> None:
            self._finish(job)
            if on_progress is not None:
                on_progress(done + self.report.num_items + len(self._failed), len(keys), self.report.audio_seconds)

        waiting: _Job | None = None
        try:
            for pieces in _batches([(item, keys[item], frames[item]) for item in todo], batch_frames):
                for job in self._begin(pieces):
                    # While the device works on this one, the one before is written.
                    if waiting is not None:
                        finish(waiting)
                    waiting = job
            if waiting is not None:
                finish(waiting)
        finally:
            if self._file is not None:
                self._file.close()
        self.report.failures = [self._failed[item] for item in sorted(self._failed)]

    # --- decoding

    def _begin(self, pieces: list[_Piece]) -> list[_Job]:
        """Sets off decoding; of a batch with something damaged in it, one piece after the other."""
        pieces = [piece for piece in pieces if piece.item not in self._failed]
        if not pieces:
            return []
        try:
            return [self._decoded(pieces, self._tokens.get([piece.excerpt for piece in pieces]))]
        except TokenFileError as error:
            if len(pieces) == 1:
                return [_Job(pieces, error=error)]
            return [job for piece in pieces for job in self._begin([piece])]

    def _decoded(self, pieces: list[_Piece], batch: TokenBatch) -> _Job:
        packed = batch.packed
        is_odd = packed.codebook_size != 1 << packed.bits
        if self._decoder is None:
            codes = torch.from_numpy(packed.unpack()[0].astype(np.uint16))
            data = codes.transpose(1, 2)
            starts = batch.skip.tolist()
            if any(starts):
                data = torch.stack([row.roll(-start, 0) for row, start in zip(data, starts, strict=True)])
            return _Job(pieces, data, batch.lengths.tolist(), torch.tensor([[1], [0]]).expand(2, len(pieces)))
        if is_odd and self._decoder.device.type != "cpu":
            packed.unpack()  # raises here, and for this batch
        data = self._decoder.decode(batch).data
        finite = torch.isfinite(data).flatten(1).all(1).long()
        clipped = torch.zeros_like(finite)
        if self._output == "wave":
            gains = [self._store.info(piece.excerpt.key).gain for piece in pieces]
            if any(gain not in (None, 1.0) for gain in gains):
                factors = torch.tensor([1 / gain if gain else 1.0 for gain in gains])
                data = data * factors.to(data.device)[:, None, None]
            if not self._original_rate:
                clipped = (data.abs() > 1).flatten(1).sum(1)
                data = _int16(data)
        lengths = batch.num_samples
        if self._output == "mel":
            lengths = -(-lengths // self._mel_hop)
        return _fetched(_Job(pieces, data.transpose(1, 2), lengths.tolist(), torch.stack([finite, clipped])))

    # --- writing

    def _finish(self, job: _Job) -> None:
        if job.ready is not None:
            job.ready.synchronize()
        for row, piece in enumerate(job.pieces):
            if piece.item in self._failed:
                continue
            try:
                if job.error is not None:
                    raise job.error
                self._write(job, row, piece)
            except CodecError as error:
                self._failed[piece.item] = {"key": piece.excerpt.key, "error": str(error)}
                if self._file is not None:
                    self._file.close()
                    self._file = None

    def _write(self, job: _Job, row: int, piece: _Piece) -> None:
        assert job.data is not None and job.facts is not None
        key = piece.excerpt.key
        if not int(job.facts[0, row]):
            raise DecodeError(f"{key!r} decodes to NaN or infinity; decode it in float32, or load the checkpoint again")
        data = job.data[row, : job.lengths[row]]
        if self._file is None:
            self._file = self._open(piece, data)
        self.report.num_clipped += int(job.facts[1, row]) + self._file.write(data)
        if not piece.is_last:
            return
        self.report.num_clipped += self._file.finish()
        self._file.close()
        self._file = None
        self.report.num_items += 1
        self.report.audio_seconds += self._store.info(key).num_samples / self._store.spec.sample_rate

    def _open(self, piece: _Piece, data: Tensor) -> _ItemFile:
        info = self._store.info(piece.excerpt.key)
        path, rows = self._targets[piece.item], data.shape[1]
        if self._output == "codes":
            return _ItemFile(ArrayFile(path, num_rows=rows, length=info.num_frames, dtype=np.dtype(np.uint16)))
        if self._output == "mel":
            length = -(-info.num_samples // self._mel_hop)
            return _ItemFile(ArrayFile(path, num_rows=rows, length=length, dtype=np.dtype(np.float32)))
        if info.gain == 0:
            raise TokenFileError(f"{info.key!r} was encoded with gain 0, which can't be undone; encode it again")
        rate = _original_rate(info) if self._original_rate else info.sample_rate
        num_samples = resampled_length(info.num_samples, info.sample_rate, rate)
        stream = None if rate == info.sample_rate else ResampledStream(info.num_samples, info.sample_rate, rate)
        return _ItemFile(WaveFile(path, sample_rate=rate, channels=rows, num_samples=num_samples), stream)


class _ItemFile:
    """An item's file, and the resampler before it."""

    def __init__(self, file: PiecewiseFile, stream: ResampledStream | None = None) -> None:
        self._file, self._stream = file, stream

    def write(self, data: Tensor) -> int:
        """Writes `[n, X]`; returns how many samples it clipped itself."""
        if self._stream is None:
            return self._store(data)
        return self._store(self._stream.push(data.T).T)

    def finish(self) -> int:
        """Writes what the resampler holds."""
        return 0 if self._stream is None else self._store(self._stream.flush().T)

    def _store(self, data: Tensor) -> int:
        clipped = 0
        if isinstance(self._file, WaveFile) and data.is_floating_point():
            clipped = int((data.abs() > 1).sum())
            data = _int16(data)
        self._file.write(data.numpy())
        return clipped

    def close(self) -> None:
        """Keeps the file if it is complete."""
        self._file.close()


def _int16(wave: Tensor) -> Tensor:
    return (wave * 32768).round_().clamp_(-32768, 32767).to(torch.int16)


def _fetched(job: _Job) -> _Job:
    """The job with its tensors on their way to the host."""
    assert job.data is not None and job.facts is not None
    if job.data.device.type != "cuda":
        return job
    tensors = []
    for tensor in (job.data.contiguous(), job.facts):
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensors.append(host.copy_(tensor, non_blocking=True))
    job.data, job.facts = tensors
    job.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    job.ready.record()
    return job


def _original_rate(info: ItemInfo) -> int:
    """The rate in an item's metadata, or its codec's."""
    rate: Any = info.meta.get("sample_rate", info.sample_rate)
    low, high = SAMPLE_RATES
    if isinstance(rate, bool) or not isinstance(rate, int) or not low <= rate <= high:
        raise InputError(
            f"{info.key!r} has sample_rate {rate!r} in its metadata; it must be {low} to {high} Hz: decode it without "
            "original_rate"
        )
    return rate


def _batches(items: list[tuple[int, str, int]], batch_frames: int) -> Iterator[list[_Piece]]:
    """Pieces that together cover all items (number, key, frames).

    Batches of whole short items of similar lengths, and the pieces of one long item in order.
    """
    size = max(1, batch_frames // 4)
    window: list[_Piece] = []
    held = 0
    for item, key, total in items:
        if total > size:
            starts = range(0, total, size)
            pieces = [
                _Piece(item, Excerpt(key, start, min(size, total - start)), start + size >= total) for start in starts
            ]
            yield from (pieces[first : first + 4] for first in range(0, len(pieces), 4))
            continue
        window.append(_Piece(item, Excerpt(key, 0, total), True))
        held += total
        if held >= WINDOW * batch_frames:
            yield from _sorted_batches(window, batch_frames)
            window, held = [], 0
    yield from _sorted_batches(window, batch_frames)


def _sorted_batches(pieces: list[_Piece], batch_frames: int) -> Iterator[list[_Piece]]:
    batch: list[_Piece] = []
    for _, piece in sorted(((p.excerpt.length, p) for p in pieces), key=itemgetter(0)):
        if batch and piece.excerpt.length * (len(batch) + 1) > batch_frames:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch
