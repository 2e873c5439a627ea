"""What can be excerpted. A source is deterministic: it gives the span it is asked for, and draws nothing itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import audio
from codec.errors import InputError
from codec.frames import resampled_length
from codec.spec import CodecSpec
from codec.tokens import PackedBatch, TokenStore

PathLike = str | os.PathLike[str]


class Excerpt(NamedTuple):
    """A half-open span `[start, start + length)` of one item, in samples or frames of the source asked."""

    key: str
    start: int
    length: int


class Source(Protocol):
    """What the excerpt loaders need of a source."""

    def keys(self) -> Sequence[str]:
        """Items, in a fixed order."""

    def rate(self) -> Fraction:
        """Positions per second."""

    def lengths(self) -> NDArray[np.int64]:
        """Length of each item of `keys()`, in positions."""

    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """The spans, batched."""


class AudioFiles:
    """Audio files as a source of waves, resampled and mixed to mono as they are read.

    Args:
        paths: Files and folders, or `{key: path}`. A folder's files are keyed by their path inside it.
        sample_rate: Hz of the waves; the files' own if None, which must then be one and the same.
        mono: Mix the channels of each file.

    Raises:
        InputError: Nothing found, a key twice, different rates without `sample_rate`.
        AudioFileError: A file can't be read.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike] | Mapping[str, PathLike],
        *,
        sample_rate: int | None = None,
        mono: bool = True,
    ) -> None:
        if isinstance(paths, Mapping):
            items = [(str(key), Path(path)) for key, path in paths.items()]
        else:
            items = audio.find_audio([paths] if isinstance(paths, str | os.PathLike) else list(paths))
        self._paths = dict(items)
        self._keys = list(self._paths)
        infos = [audio.audio_info(path) for path in self._paths.values()]
        self._native_rates = {key: info.sample_rate for key, info in zip(self._keys, infos, strict=True)}
        rates = sorted(set(self._native_rates.values()))
        if sample_rate is None and len(rates) > 1:
            raise InputError(f"the files have sample rates {rates} Hz; give sample_rate to resample them to one")
        self.sample_rate = sample_rate or rates[0]
        self._mono = mono
        self._native_lengths = {key: info.num_samples for key, info in zip(self._keys, infos, strict=True)}

    def keys(self) -> Sequence[str]:
        """Item keys, in a fixed order."""
        return self._keys

    def rate(self) -> Fraction:
        """Samples per second."""
        return Fraction(self.sample_rate)

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: samples of each item at `sample_rate`."""
        return np.array(
            [resampled_length(self._native_lengths[k], self._native_rates[k], self.sample_rate) for k in self._keys],
            dtype=np.int64,
        )

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`, float32, N the longest span asked for; zeros where a span passes its item's end."""
        waves = [self._read(excerpt) for excerpt in excerpts]
        batch = torch.zeros(len(waves), waves[0].shape[0], max(excerpt.length for excerpt in excerpts))
        for row, wave in zip(batch, waves, strict=True):
            row[:, : wave.shape[1]] = wave
        return batch

    def _read(self, excerpt: Excerpt) -> Tensor:
        total = resampled_length(self._native_lengths[excerpt.key], self._native_rates[excerpt.key], self.sample_rate)
        wave, _ = audio.read_audio(
            self._paths[excerpt.key],
            start_sample=excerpt.start,
            num_samples=min(excerpt.length, total - excerpt.start),
            sample_rate=self.sample_rate,
            mono=self._mono,
        )
        return wave


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


class Tokens:
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
