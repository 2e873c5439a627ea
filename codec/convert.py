"""Codes that other projects wrote → a token store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codec.adapters.containers import SUFFIXES, DacFile, EcdcFile, read_codes, read_dac, read_ecdc
from codec.errors import CodecError, InputError, TokenFileError
from codec.frames import num_frames, resampled_length
from codec.model import Codec
from codec.tokens import TokenWriter


@dataclass
class ConvertReport:
    """What an `import_codes` run did.

    Attributes:
        num_items: Items written.
        num_skipped: Items that an interrupted run had already written.
        num_encoded_again: Items whose codes lay on no grid of frames: decoded as the original does, encoded again.
        audio_seconds: Audio that the items stand for.
        elapsed_seconds: Wall time.
        store_bytes: Size of the finished store.
        failures: One entry per file that couldn't be imported: key, path, error.
    """

    num_items: int = 0
    num_skipped: int = 0
    num_encoded_again: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    store_bytes: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class _Item:
    key: str
    codes: Tensor  # [K, T]
    num_samples: int
    meta: dict[str, Any]
    is_encoded_again: bool = False


def import_codes(
    codec: Codec,
    inputs: Sequence[str | os.PathLike[str]],
    store: str | os.PathLike[str],
    *,
    n_quantizers: int | None = None,
    resume: bool = True,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> ConvertReport:
    """Writes existing codes into one token file, as this codec's.

    Reads EnCodec's `.ecdc` (without its language model), DAC's `.dac`, and codes in `.npy`, `.pt` and `.pth`: integers
    `[K, T]`, with or without leading axes of length 1, or for SNAC a list of one array per codebook. Nothing in a
    file is executed. `.npy` and `.pt` don't say how long the wave was: it is taken as whole frames. DAC writes files
    longer than its window (5 s) in chunks whose frames lie on no common grid; those are decoded as the original
    decodes them and encoded again, which the item's meta says.

    Args:
        codec: The codec that made the codes. For arrays nothing in the file could tell.
        inputs: Files and folders. A folder's files are keyed by their path inside it.
        store: The `.ctok` file to write.
        n_quantizers: Codebooks to store, of files that have as many; by default as many as the first file has.
        resume: Go on where an interrupted run stopped; otherwise its leftovers are an error.
        force: Replace an existing store.
        on_progress: Called after each file with (files done, files in all, audio seconds so far).

    Raises:
        InputError: No files found, a wrong suffix, or none of the files could be imported.
        TokenFileError: `store` exists, can't be written, or was begun by another codec.
    """
    if Path(store).suffix != ".ctok":
        raise InputError(f"{store}: a token file's name ends in .ctok; write to {Path(store).with_suffix('.ctok')}")
    started = time.monotonic()
    report = ConvertReport()
    found = _find(inputs)
    if n_quantizers is None:
        n_quantizers = _first_count(codec, found)
    with TokenWriter(store, codec.spec, n_quantizers=n_quantizers, resume=resume and not force, force=force) as writer:
        done = set(writer.keys())
        for number, (key, path) in enumerate(found):
            try:
                for item in _items(codec, key, path):
                    if item.key in done:
                        report.num_skipped += 1
                        continue
                    if item.codes.shape[0] < n_quantizers:
                        raise InputError(
                            f"{path}: {item.codes.shape[0]} codebooks; this store takes {n_quantizers}: import files "
                            f"with fewer apart, or all with --quantizers {item.codes.shape[0]}"
                        )
                    writer.add(item.key, item.codes[:n_quantizers], num_samples=item.num_samples, meta=item.meta)
                    report.num_items += 1
                    report.num_encoded_again += item.is_encoded_again
                    report.audio_seconds += item.num_samples / codec.spec.sample_rate
            except CodecError as error:
                report.failures.append({"key": key, "path": str(path), "error": str(error)})
            if on_progress is not None:
                on_progress(number + 1, len(found), report.audio_seconds)
        if len(report.failures) == len(found):
            first = report.failures[0]
            raise InputError(f"none of the {len(found)} files could be imported; the first error: {first['error']}")
    report.store_bytes = Path(store).stat().st_size
    report.elapsed_seconds = time.monotonic() - started
    return report


def _find(inputs: Sequence[str | os.PathLike[str]]) -> list[tuple[str, Path]]:
    found: dict[str, Path] = {}
    for top in map(Path, inputs):
        if not top.exists():
            raise InputError(f"{top}: no such file or folder")
        paths = [top] if top.is_file() else sorted(p for p in top.rglob("*") if p.suffix in SUFFIXES and p.is_file())
        for path in paths:
            if path.suffix not in SUFFIXES:
                raise InputError(f"{path}: files of codes end in {', '.join(SUFFIXES)}")
            key = path.name if path == top else path.relative_to(top).as_posix()
            if found.setdefault(key, path) != path:
                raise InputError(
                    f"{found[key]} and {path} would both have the key {key!r}; give a common parent folder"
                )
    if not found:
        raise InputError(f"no files of codes in {', '.join(map(str, inputs))}; they end in {', '.join(SUFFIXES)}")
    return sorted(found.items())


def _first_count(codec: Codec, found: Sequence[tuple[str, Path]]) -> int:
    for key, path in found:
        try:
            return next(_items(codec, key, path)).codes.shape[0]
        except CodecError:
            continue
    return codec.spec.n_quantizers


def _items(codec: Codec, key: str, path: Path) -> Iterator[_Item]:
    """What a file holds, checked against the codec. DAC's channels are items of their own."""
    if path.suffix == ".ecdc":
        items: Iterator[_Item] = iter([_from_ecdc(codec, key, path, read_ecdc(path))])
    elif path.suffix == ".dac":
        items = _from_dac(codec, key, path, read_dac(path))
    else:
        codes = _from_arrays(codec, path, read_codes(path))
        items = iter([_Item(key, codes, codes.shape[1] * codec.spec.hop_length, {})])
    for item in items:
        _check(codec, path, item)
        yield item


def _check(codec: Codec, path: Path, item: _Item) -> None:
    spec = codec.spec
    k = item.codes.shape[0]
    if k > spec.n_quantizers:
        hint = f" (the other axis has {item.codes.shape[1]}: transpose it?)" if item.codes.shape[1] <= 64 else ""
        raise TokenFileError(f"{path}: {k} codebooks{hint}; {spec.name} has {spec.n_quantizers}; give its own codec")
    low, high = int(item.codes.min()), int(item.codes.max())
    if low < 0 or high >= spec.codebook_size:
        raise TokenFileError(
            f"{path}: codes from {low} to {high}; {spec.name} has 0 to {spec.codebook_size - 1}; give its own codec"
        )


def _from_ecdc(codec: Codec, key: str, path: Path, file: EcdcFile) -> _Item:
    from codec.adapters.encodec import ChunkedEncodec, Encodec

    is_chunked = bool(file.scales)
    fits = isinstance(codec, ChunkedEncodec if is_chunked else Encodec)
    if not fits or codec.spec.sample_rate != (48000 if is_chunked else 24000):
        raise TokenFileError(f"{path}: written by {file.model}, the codec given is {codec.spec.name}")
    if isinstance(codec, ChunkedEncodec):
        packed = []
        for chunk, scale in zip(file.chunks, file.scales, strict=True):
            packed.append(codec.pack(torch.from_numpy(chunk)[None], torch.tensor([scale]))[0])
        codes = torch.cat(packed, 1)[:, : num_frames(file.num_samples, codec.spec.hop_length)]
    else:
        codes = torch.from_numpy(file.chunks[0])
    return _Item(key, codes, file.num_samples, {})


def _from_dac(codec: Codec, key: str, path: Path, file: DacFile) -> Iterator[_Item]:
    from codec.adapters.dac import Dac

    spec = codec.spec
    if not isinstance(codec, Dac):
        raise TokenFileError(f"{path}: written by DAC, the codec given is {spec.name}")
    num_samples = resampled_length(file.original_length, file.sample_rate, spec.sample_rate)
    for channel, own in enumerate(torch.from_numpy(file.codes)):
        name = key if len(file.codes) == 1 else f"{key}#{channel}"
        meta: dict[str, Any] = {} if file.input_db is None else {"input_lufs": file.input_db}
        if not file.is_chunked:
            frames = own.shape[1]
            # The original's resampler may round the length otherwise than ours: the frames decide.
            fitted = min(max(num_samples, (frames - 1) * spec.hop_length + 1), frames * spec.hop_length)
            yield _Item(name, own, fitted, meta)
            continue
        _check(codec, path, _Item(name, own, 1, {}))
        chunks = own.to(codec.device).split(file.chunk_length, 1)
        try:
            wave = torch.cat([codec.decode_unpadded(chunk[None]) for chunk in chunks], -1)[..., :num_samples]
        except RuntimeError as error:
            raise TokenFileError(f"{path}: chunks of {file.chunk_length} frames can't be decoded ({error})") from error
        encoded = codec.encode(wave, n_quantizers=own.shape[0])
        meta["encoded_again"] = True
        yield _Item(name, encoded.codes[0].cpu(), int(encoded.num_samples[0]), meta, is_encoded_again=True)


def _from_arrays(codec: Codec, path: Path, found: Any) -> Tensor:
    """Arrays as they come → `[K, T]`."""
    from codec.adapters.snac import Snac

    if isinstance(found, list):
        if not isinstance(codec, Snac):
            raise TokenFileError(f"{path}: a list of {len(found)} arrays, as SNAC has; the codec is {codec.spec.name}")
        levels = [torch.from_numpy(_squeezed(path, level, 1)) for level in found]
        frames = levels[0].shape[0] // codec.counts[0]
        sizes = [frames * count for count in codec.counts[: len(levels)]]
        if [level.shape[0] for level in levels] != sizes or not frames:
            got = [level.shape[0] for level in levels]
            raise TokenFileError(f"{path}: codebooks of {got} codes; {frames} frames of {codec.spec.name} have {sizes}")
        return codec.flatten([level[None] for level in levels])[0]
    return torch.from_numpy(_squeezed(path, found, 2))


def _squeezed(path: Path, array: Any, ndim: int) -> Any:
    while array.ndim > ndim and array.shape[0] == 1:
        array = array[0]
    if array.ndim != ndim:
        axes = "[K, T]" if ndim == 2 else "[T]"
        raise TokenFileError(f"{path}: codes of shape {list(array.shape)}; one item is {axes}: save items apart")
    return np.ascontiguousarray(array)
