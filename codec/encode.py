"""Audio corpus → token store."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codec.audio import find_audio
from codec.errors import AudioFileError, CodecError, InputError
from codec.model import Codec
from codec.sources import AudioFiles, Excerpt
from codec.tokens import TokenWriter

LONG_SECONDS = 60
"""Items longer than this are read and encoded in pieces of this length."""

READ_AHEAD = 16
"""Files read and decoded in the background before their turn."""


@dataclass
class EncodeReport:
    """What an `encode_corpus` run did.

    Attributes:
        num_items: Items encoded in this run.
        num_skipped: Items that an interrupted run had already encoded.
        audio_seconds: Audio encoded in this run.
        elapsed_seconds: Wall time.
        source_bytes: Size of the files encoded in this run.
        store_bytes: Size of the finished store.
        failures: One entry per file that couldn't be encoded: key, path, error.
    """

    num_items: int = 0
    num_skipped: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    source_bytes: int = 0
    store_bytes: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


@dataclass
class _Item:
    key: str
    path: Path
    source: AudioFiles | None = None
    num_samples: int = 0
    num_bytes: int = 0
    wave: Tensor | None = None  # [C, N]; None for a long item, which is read in pieces
    error: CodecError | None = None


def encode_corpus(
    codec: Codec,
    inputs: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    *,
    n_quantizers: int | None = None,
    batch_seconds: float = 64.0,
    num_threads: int = 2,
    resume: bool = True,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> EncodeReport:
    """Encodes audio files into one token file.

    Files are resampled to the codec's rate and mixed to mono. A file that can't be read is reported and left out;
    the others are encoded all the same. Codes don't depend on the batch that a file happens to be in.

    Args:
        codec: Encodes; on whichever device it is.
        inputs: Files and folders. A folder's files are keyed by their path inside it.
        store: The `.ctok` file to write.
        n_quantizers: Codebooks to store; all if None.
        batch_seconds: Most audio per batch, padding included.
        num_threads: Threads that read and decode files.
        resume: Go on where an interrupted run stopped; otherwise its leftovers are an error.
        force: Replace an existing store.
        on_progress: Called after each batch with (files done, files in all, audio seconds so far).

    Raises:
        InputError: No audio found, bad settings.
        TokenFileError: `store` exists, can't be written, or was begun by another codec.
    """
    if codec.spec.channels != 1:
        raise InputError(f"{codec.spec.name} has {codec.spec.channels} channels; encode_corpus handles mono codecs")
    if Path(store).suffix != ".ctok":
        raise InputError(f"{store}: a token file's name ends in .ctok; write to {Path(store).with_suffix('.ctok')}")
    started = time.monotonic()
    report = EncodeReport()
    found = find_audio(inputs)
    with TokenWriter(store, codec.spec, n_quantizers=n_quantizers, resume=resume and not force, force=force) as writer:
        todo = [(key, path) for key, path in found if key not in writer]
        report.num_skipped = len(found) - len(todo)
        max_samples = int(batch_seconds * codec.spec.sample_rate)
        items = _read_ahead(todo, codec.spec.sample_rate, num_threads)
        for batch in _batches(items, max_samples):
            for item in _encode_batch(codec, batch, writer, n_quantizers):
                if item.error is not None:
                    failure = {"key": item.key, "path": str(item.path), "error": str(item.error)}
                    report.failures.append(failure)
                    continue
                report.num_items += 1
                report.audio_seconds += item.num_samples / codec.spec.sample_rate
                report.source_bytes += item.num_bytes
            if on_progress is not None:
                done = report.num_skipped + report.num_items + len(report.failures)
                on_progress(done, len(found), report.audio_seconds)
        if len(report.failures) == len(found):
            first = report.failures[0]
            raise InputError(f"none of the {len(found)} files could be encoded; the first error: {first['error']}")
    report.store_bytes = Path(store).stat().st_size
    report.elapsed_seconds = time.monotonic() - started
    return report


def write_failures(failures: Sequence[dict[str, str]], path: Path) -> None:
    """One JSON object per line; no file where nothing failed."""
    path.unlink(missing_ok=True)
    if failures:
        path.write_text("".join(json.dumps(failure, ensure_ascii=False) + "\n" for failure in failures))


def _read(key: str, path: Path, sample_rate: int) -> _Item:
    item = _Item(key, path)
    try:
        item.source = AudioFiles({key: path}, sample_rate=sample_rate)
        item.num_samples = int(item.source.lengths()[0])
        item.num_bytes = path.stat().st_size
        if item.num_samples <= LONG_SECONDS * sample_rate:
            item.wave = item.source.get([Excerpt(key, 0, item.num_samples)])[0]
    except Exception as error:  # whatever a decoder makes of someone's file is that file's failure, not the run's
        item.error = error if isinstance(error, CodecError) else AudioFileError(f"{path}: {error!r}")
    return item


def _read_ahead(todo: Sequence[tuple[str, Path]], sample_rate: int, num_threads: int) -> Iterator[_Item]:
    """Items in order, the next few of them being read in the background."""
    with ThreadPoolExecutor(num_threads) as pool:
        waiting = iter(todo)
        window = [pool.submit(_read, *entry, sample_rate) for entry in islice(waiting, READ_AHEAD)]
        while window:
            item = window.pop(0).result()
            window += [pool.submit(_read, *entry, sample_rate) for entry in islice(waiting, 1)]
            yield item


def _batches(items: Iterator[_Item], max_samples: int) -> Iterator[list[_Item]]:
    """Consecutive items whose padded batch has at most `max_samples`; long and failed items go alone."""
    batch: list[_Item] = []
    longest = 0
    for item in items:
        if item.wave is None:
            if batch:
                yield batch
            yield [item]
            batch, longest = [], 0
            continue
        longest = max(longest, item.num_samples)
        if batch and longest * (len(batch) + 1) > max_samples:
            yield batch
            batch, longest = [], item.num_samples
        batch.append(item)
    if batch:
        yield batch


def _encode_batch(codec: Codec, batch: list[_Item], writer: TokenWriter, n_quantizers: int | None) -> list[_Item]:
    if batch[0].wave is None:
        if batch[0].error is None:
            _encode_long(codec, batch[0], writer, n_quantizers)
        return batch
    lengths = torch.tensor([item.num_samples for item in batch])
    padded = torch.zeros(len(batch), 1, int(lengths.max()))
    for row, item in zip(padded, batch, strict=True):
        assert item.wave is not None
        row[:, : item.num_samples] = item.wave
    encoded = codec.encode(padded, lengths, n_quantizers=n_quantizers)
    codes = encoded.codes.cpu().numpy()
    for row_codes, num_frames, item in zip(codes, encoded.lengths.tolist(), batch, strict=True):
        writer.add(item.key, row_codes[:, :num_frames], num_samples=item.num_samples)
    return batch


def _encode_long(codec: Codec, item: _Item, writer: TokenWriter, n_quantizers: int | None) -> None:
    """Encodes an item in pieces; equal to encoding it whole, in memory that doesn't depend on its length."""
    assert item.source is not None
    stream = codec.stream_encoder(n_quantizers=n_quantizers)
    size = LONG_SECONDS * codec.spec.sample_rate
    writer.begin(item.key)
    try:
        for start in range(0, item.num_samples, size):
            length = min(size, item.num_samples - start)
            piece = item.source.get([Excerpt(item.key, start, length)])
            writer.append(stream.push(piece)[0].cpu().numpy())
        writer.append(stream.flush()[0].cpu().numpy())
    except CodecError as error:
        writer.cancel()
        item.error = error
        return
    writer.end(item.num_samples)
