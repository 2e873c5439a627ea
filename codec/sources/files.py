"""Audio files and token stores as sources."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from codec import audio
from codec.errors import InputError
from codec.sources.base import NO_VALUES, Excerpt, PathLike, Source, padded, unknown_key
from codec.spec import CodecSpec
from codec.tokens import PackedBatch, TokenStore

MANIFEST_COLUMNS = ["key", "path", "sample_rate", "num_samples"]
STREAM_SAMPLES = 1 << 20
"""Samples read at once by `stream`, at least: opening a file may cost more than a small piece of it."""


class AudioFiles(Source):
    """Audio files as a source of waves, resampled and mixed to mono as they are read.

    Args:
        paths: Files and folders, or `{key: path}`, or one `.tsv` manifest as `save_manifest` writes it, which
            spares opening every file. A folder's files are keyed by their path inside it.
        sample_rate: Hz of the waves; the files' own if None, which must then be one and the same.
        mono: Mix the channels of each file.

    Raises:
        InputError: Nothing found, a key twice, different rates without `sample_rate`, a bad manifest.
        AudioFileError: A file can't be read.

    Example:
        >>> source = AudioFiles("tests/data", sample_rate=16000)
        >>> source.get([Excerpt(source.keys()[0], 8000, 16000)]).shape
        torch.Size([1, 1, 16000])
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
        *,
        sample_rate: int | None = None,
        mono: bool = True,
    ) -> None:
        if isinstance(paths, str | os.PathLike) and Path(paths).suffix == ".tsv":
            self._number, self._paths, rates, lengths = _read_manifest(Path(paths))
        else:
            if isinstance(paths, Mapping):
                items = [(str(key), Path(path)) for key, path in paths.items()]
            else:
                items = audio.find_audio([paths] if isinstance(paths, str | os.PathLike) else list(paths))
            self._number = {key: number for number, (key, _) in enumerate(items)}
            self._paths = [os.fspath(path) for _, path in items]
            infos = [audio.audio_info(path) for path in self._paths]
            rates, lengths = [info.sample_rate for info in infos], [info.num_samples for info in infos]
        if not self._paths:
            raise InputError(f"no audio files in {paths!r}; give at least one")
        found = sorted(set(rates))
        if sample_rate is None and len(found) > 1:
            raise InputError(f"the files have sample rates {found} Hz; give sample_rate to resample them to one")
        self.sample_rate = sample_rate or found[0]
        self._mono = mono
        self._keys = list(self._number)
        self._native_rates = np.array(rates, dtype=np.int64)
        self._native_lengths = np.array(lengths, dtype=np.int64)
        self._lengths = -(-self._native_lengths * self.sample_rate // self._native_rates)

    def keys(self) -> Sequence[str]:
        """Item keys, in a fixed order."""
        return self._keys

    def rate(self) -> Fraction:
        """Samples per second."""
        return Fraction(self.sample_rate)

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: samples of each item at `sample_rate`."""
        return self._lengths

    def length(self, key: str) -> int:
        """Samples of one item at `sample_rate`."""
        if key not in self._number:
            raise unknown_key(self, key, self._keys)
        return int(self._lengths[self._number[key]])

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`, float32, N the longest span asked for; zeros where a span passes its item's end."""
        longest = max(excerpt.length for excerpt in excerpts)
        lengths = [min(excerpt.length, self.length(excerpt.key) - excerpt.start) for excerpt in excerpts]
        numbers = [self._number[excerpt.key] for excerpt in excerpts]
        spans = [(self._paths[n], e.start, length) for n, e, length in zip(numbers, excerpts, lengths, strict=True)]
        if len(spans) == 1 or all(self._is_quick(number) for number in numbers):
            waves = [
                audio.read_audio(
                    path, start_sample=start, num_samples=length, sample_rate=self.sample_rate, mono=self._mono
                )[0]
                for path, start, length in spans
            ]
            return padded(waves, longest)
        batch = audio.read_audio_batch(spans, sample_rate=self.sample_rate, mono=self._mono)
        assert isinstance(batch.wave, Tensor)
        missing = longest - batch.wave.shape[2]
        return F.pad(batch.wave, (0, missing)) if missing else batch.wave

    def _is_quick(self, number: int) -> bool:
        """Whether reading the file takes less than handing it to another thread."""
        return self._paths[number].lower().endswith(".wav") and int(self._native_rates[number]) == self.sample_rate

    def stream(self, key: str, size: int, values: Mapping[str, float] = NO_VALUES) -> Iterator[Tensor]:
        """The whole file in waves `[1, C, size]`, the last one shorter; see `Source.stream`."""
        if size >= STREAM_SAMPLES or size < 1:
            yield from super().stream(key, size, values)
            return
        for block in super().stream(key, STREAM_SAMPLES // size * size, values):
            yield from block.split(size, dim=-1)

    def save_manifest(self, path: PathLike) -> None:
        """Writes what was found out about the files as tab-separated text, for `AudioFiles(path)`.

        Raises:
            InputError: A key or a path with a tab or a line break in it.
        """
        with Path(path).open("w", newline="\n", encoding="utf-8") as file:
            file.write("\t".join(MANIFEST_COLUMNS) + "\n")
            rows = zip(self._keys, self._paths, self._native_rates, self._native_lengths, strict=True)
            for key, place, rate, length in rows:
                line = f"{key}\t{os.path.abspath(place)}\t{rate}\t{length}"
                if line.count("\t") != 3 or "\n" in line or "\r" in line:
                    raise InputError(f"{key!r} at {place!r} holds a tab or a line break; rename it for a manifest")
                file.write(line + "\n")


def _read_manifest(path: Path) -> tuple[dict[str, int], list[str], list[int], list[int]]:
    """Numbers by key, paths, sample rates, lengths."""
    numbers: dict[str, int] = {}
    paths: list[str] = []
    rates: list[int] = []
    lengths: list[int] = []
    with path.open(newline="\n", encoding="utf-8") as file:
        header = file.readline().rstrip("\n").split("\t")
        if header != MANIFEST_COLUMNS:
            raise InputError(f"{path}: the columns are {header}; a manifest has {MANIFEST_COLUMNS}: see save_manifest")
        for number, line in enumerate(file):
            try:
                key, place, rate, length = line.split("\t")
                rates.append(int(rate))
                lengths.append(int(length))
            except ValueError as error:
                cells = line.rstrip("\n").split("\t")
                raise InputError(f"{path}: line {number + 2} is {cells}; it must be {MANIFEST_COLUMNS}") from error
            if key in numbers:
                raise InputError(f"{path}: line {number + 2}: key {key!r} comes twice; make the keys differ")
            if rates[-1] < 1 or lengths[-1] < 1:
                raise InputError(
                    f"{path}: line {number + 2}: {key!r} has {lengths[-1]} samples at {rates[-1]} Hz; both must be ≥ 1"
                )
            numbers[key] = number
            paths.append(place)
    return numbers, paths, rates, lengths


@dataclass(frozen=True)
class TokenBatch:
    """Token excerpts as they leave the store: packed bytes, and how to trim what they decode to.

    Attributes:
        packed: The stored bytes of every row, context included.
        skip: int64 `[B]`, context frames before each row's excerpt.
        lengths: int64 `[B]`, frames of each excerpt, context not counted.
        num_samples: int64 `[B]`, samples of each excerpt's wave: the item's last frame may be partly filled.
        spec: The codec that wrote the tokens.
    """

    packed: PackedBatch
    skip: Tensor
    lengths: Tensor
    num_samples: Tensor
    spec: CodecSpec


class Tokens(Source):
    """A token store as a source of codes: spans are frames, batches are the stored bytes, packed.

    Decode with `codec.BatchDecoder`, or take the codes with `batch.packed.unpack()`.

    Args:
        store: A `TokenStore`, or a path or URL that it opens.
        context: (left, right) frames to read around each excerpt, where the item has them. By default the decode
            context of the codec that wrote the store, so that a decoded excerpt equals that slice of the whole
            item; (0, 0) for the bare codes.
        n_quantizers: Codebooks to read, the first ones; all if None.
    """

    def __init__(
        self,
        store: TokenStore | PathLike,
        *,
        context: tuple[int, int] | None = None,
        n_quantizers: int | None = None,
    ) -> None:
        self.store = store if isinstance(store, TokenStore) else TokenStore(store)
        self.context = (self.store.spec.decode_context or (0, 0)) if context is None else context
        self.n_quantizers = n_quantizers

    def keys(self) -> Sequence[str]:
        """Item keys, in the store's order."""
        return self.store.keys()

    def rate(self) -> Fraction:
        """Frames per second."""
        return self.store.spec.frame_rate

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: frames of each item."""
        return self.store.num_frames

    def length(self, key: str) -> int:
        """Frames of one item."""
        return self.store.info(key).num_frames

    def get(self, excerpts: Sequence[Excerpt]) -> TokenBatch:
        """The spans as one packed batch; spans beyond an item's end are cut there."""
        left, right = self.context
        hop = self.store.spec.hop_length
        spans, skip, lengths, num_samples = [], [], [], []
        for key, start, length in excerpts:
            info = self.store.info(key)
            stop = min(start + length, info.num_frames)
            first = max(0, start - left)
            spans.append((key, first, min(stop + right, info.num_frames) - first))
            skip.append(start - first)
            lengths.append(stop - start)
            num_samples.append(min(stop * hop, info.num_samples) - start * hop)
        packed = self.store.read_batch(spans, n_quantizers=self.n_quantizers)
        return TokenBatch(packed, torch.tensor(skip), torch.tensor(lengths), torch.tensor(num_samples), self.store.spec)


def output_names(keys: Sequence[str], suffix: str) -> list[str]:
    """Relative file names for what is made of each item: the audio suffix of its key replaced by `suffix`.

    Keys that would fall together ("a.wav" and "a.mp3") keep their own suffix before the new one.

    Raises:
        InputError: A key that would leave the folder: keys come from files, and files from anyone.
    """
    for key in keys:
        path = PurePosixPath(key)
        if path.is_absolute() or ".." in path.parts or "\0" in key or "\\" in key or not path.name:
            raise InputError(f"key {key!r} can't be a file name inside a folder; read this item through the API")
    plain = [
        str(PurePosixPath(key).with_suffix("")) if PurePosixPath(key).suffix.lower() in audio.AUDIO_SUFFIXES else key
        for key in keys
    ]
    count = Counter(plain)
    return [(stem if count[stem] == 1 else key) + suffix for key, stem in zip(keys, plain, strict=True)]


def write_array(path: Path, data: Tensor) -> None:
    """Writes a tensor as `.npy`, whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        np.save(file, data.cpu().numpy())
    temporary.replace(path)
