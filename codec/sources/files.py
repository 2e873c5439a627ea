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
from codec.sources.base import NO_VALUES, Excerpt, ItemSpec, PathLike, Source, check_out, padded, unknown_key
from codec.sources.items import COLUMNS, Items, read_manifest
from codec.spec import CodecSpec
from codec.tokens import PackedBatch, TokenStore


class AudioFiles(Source):
    """Audio files as a source of waves, resampled and mixed to mono as they are read.

    Args:
        paths: Files and folders, or `{key: path}`, or one manifest, which spares opening every file: a `.tsv` or
            `.csv` table with the columns path, sample_rate and num_samples, and key unless that is the path. Paths
            are relative to it. `save_manifest` writes one. A folder's files are keyed by their path inside it.
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
        if isinstance(paths, str | os.PathLike) and Path(paths).suffix in (".tsv", ".csv"):
            self._items, self._native_rates, self._native_lengths = read_manifest(Path(paths))
        else:
            if isinstance(paths, Mapping):
                found = [(str(key), os.fspath(path)) for key, path in paths.items()]
            else:
                listed = audio.find_audio([paths] if isinstance(paths, str | os.PathLike) else list(paths))
                found = [(key, os.fspath(path)) for key, path in listed]
            if not found:
                raise InputError(f"no audio files in {paths!r}; give at least one")
            infos = [audio.audio_info(path) for _, path in found]
            self._items = Items.of([key for key, _ in found], [path for _, path in found])
            self._native_rates = np.array([info.sample_rate for info in infos], np.int64)
            self._native_lengths = np.array([info.num_samples for info in infos], np.int64)
        rates = np.unique(self._native_rates).tolist()
        if sample_rate is None and len(rates) > 1:
            raise InputError(f"the files have sample rates {rates} Hz; give sample_rate to resample them to one")
        self.sample_rate = sample_rate or rates[0]
        self._mono = mono
        self._lengths = self._native_lengths
        if rates != [self.sample_rate]:
            self._lengths = -(-self._native_lengths * self.sample_rate // self._native_rates)

    def keys(self) -> Sequence[str]:
        """Item keys, in a fixed order."""
        return self._items

    def rate(self) -> Fraction:
        """Samples per second."""
        return Fraction(self.sample_rate)

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`: samples of each item at `sample_rate`."""
        return self._lengths

    def length(self, key: str) -> int:
        """Samples of one item at `sample_rate`."""
        return int(self._lengths[self._number(key)])

    def spec(self, key: str) -> ItemSpec:
        """`(channels, None)`, float32; without `mono`, the file's header is read for them."""
        number = self._number(key)
        channels = 1 if self._mono else audio.audio_info(self._items.path(number)).channels
        return ItemSpec((channels, None), torch.float32, self.rate())

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`, float32, N the longest span asked for; zeros where a span passes its item's end."""
        spans, quick = self._spans(excerpts)
        longest = max(excerpt.length for excerpt in excerpts)
        if quick:
            return padded([self._read(*span) for span in spans], longest)
        batch = audio.read_audio_batch(spans, sample_rate=self.sample_rate, mono=self._mono)
        assert isinstance(batch.wave, Tensor)
        missing = longest - batch.wave.shape[2]
        return F.pad(batch.wave, (0, missing)) if missing else batch.wave

    def get_into(self, excerpts: Sequence[Excerpt], out: Tensor) -> None:
        """Waves, read straight into `[B, C, N]`; see `Source.get_into`."""
        spans, quick = self._spans(excerpts)
        shape = [len(spans), out.shape[1] if out.ndim == 3 else 1, max(excerpt.length for excerpt in excerpts)]
        check_out(out, shape, torch.float32)
        if not quick and out.is_contiguous() and out.device.type == "cpu":
            audio.read_audio_batch(spans, sample_rate=self.sample_rate, mono=self._mono, out=out)
            return
        waves = [self._read(*span) for span in spans]
        for wave, (path, _, _) in zip(waves, spans, strict=True):
            if len(wave) != shape[1]:
                raise InputError(f"{path} has {len(wave)} channels, the batch {shape[1]}; give mono=True")
        if all(wave.shape[1] == out.shape[2] for wave in waves):
            torch.stack(waves, out=out)
            return
        for row, wave in zip(out, waves, strict=True):
            row[:, : wave.shape[1]] = wave
            row[:, wave.shape[1] :] = 0

    def _spans(self, excerpts: Sequence[Excerpt]) -> tuple[list[tuple[str, int, int]], bool]:
        """Path, start and samples of each, and whether reading takes less than handing it to other threads."""
        spans, quick = [], True
        for key, start, length in excerpts:
            number = self._number(key)
            path = self._items.path(number)
            spans.append((path, start, min(length, int(self._lengths[number]) - start)))
            quick &= path.lower().endswith(".wav") and int(self._native_rates[number]) == self.sample_rate
        return spans, quick or len(spans) == 1

    def _read(self, path: str, start: int, length: int) -> Tensor:
        return audio.read_audio(
            path, start_sample=start, num_samples=length, sample_rate=self.sample_rate, mono=self._mono
        )[0]

    def _number(self, key: str) -> int:
        number = self._items.find(key)
        if number is None:
            raise unknown_key(self, key, self._items)
        return number

    def stream(self, key: str, size: int, values: Mapping[str, float] = NO_VALUES) -> Iterator[Tensor]:
        """The whole file in waves `[1, C, size]`, the last one shorter: opened once, decoded once.

        See `Source.stream`; joined, the pieces are the same for every size, to the bit.
        """
        if size < 1:
            raise InputError(f"size is {size}; it must be at least 1 sample")
        path = self._items.path(self._number(key))
        for wave in audio.stream_audio(path, sample_rate=self.sample_rate, mono=self._mono, piece_samples=size):
            yield wave[None]

    def save_manifest(self, path: PathLike) -> None:
        """Writes what was found out about the files as tab-separated text, for `AudioFiles(path)`.

        Raises:
            InputError: A key or a path with a tab or a line break in it.
        """
        with Path(path).open("w", newline="\n", encoding="utf-8", errors="surrogateescape") as file:
            file.write("\t".join(["key", *COLUMNS]) + "\n")
            rows = zip(self._items, self._native_rates.tolist(), self._native_lengths.tolist(), strict=True)
            for number, (key, rate, length) in enumerate(rows):
                place = self._items.path(number)
                line = f"{key}\t{place if '://' in place else os.path.abspath(place)}\t{rate}\t{length}"
                if line.count("\t") != 3 or "\n" in line or "\r" in line:
                    raise InputError(f"{key!r} at {place!r} holds a tab or a line break; rename it for a manifest")
                file.write(line + "\n")


@dataclass(frozen=True)
class TokenBatch:
    """Token excerpts as they leave the store: packed bytes, and how to trim what they decode to.

    Attributes:
        packed: The stored bytes of every row, context included.
        skip: int64 `[B]`, context frames before each row's excerpt.
        lengths: int64 `[B]`, frames of each excerpt, context not counted.
        num_samples: int64 `[B]`, samples of each excerpt's wave: the item's last frame may be partly filled.
        read_samples: int64 `[B]`, samples of all frames read, context included.
        context: (left, right) frames that were asked for around each excerpt; a row has fewer at its item's ends.
        spec: The codec that wrote the tokens.
    """

    packed: PackedBatch
    skip: Tensor
    lengths: Tensor
    num_samples: Tensor
    read_samples: Tensor
    context: tuple[int, int]
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

    def filled(self) -> NDArray[np.int64]:
        """int64 `[items]`: frames whose samples are all there."""
        return self.store.num_samples // self.store.spec.hop_length

    def spec(self, key: str) -> ItemSpec:
        """`(n_quantizers, None)`; no dtype, since batches are packed."""
        self.store.info(key)
        return ItemSpec((self.n_quantizers or self.store.n_quantizers, None), None, self.rate())

    def get(self, excerpts: Sequence[Excerpt]) -> TokenBatch:
        """The spans as one packed batch; spans beyond an item's end are cut there.

        Raises:
            InputError: No excerpts, no such item, a span that begins outside its item.
        """
        if not excerpts:
            raise InputError("the batch is empty; ask for at least one excerpt")
        left, right = self.context
        hop, align = self.store.spec.hop_length, max(self.store.frame_divisors)
        spans, skip, lengths, num_samples, read_samples = [], [], [], [], []
        for key, start, length in excerpts:
            info = self.store.info(key)
            total = info.num_frames
            if not 0 <= start < total or length < 1:
                raise InputError(
                    f"{key!r}: frames [{start}, {start + length}) asked for; the item has frames [0, {total}); "
                    "begin within them, with at least one frame"
                )
            stop = min(start + length, total)
            # Where slower codebooks share a code among frames, a span begins with a whole one.
            first = max(0, start - left) // align * align
            last = min(-(-(stop + right) // align) * align, total)
            spans.append((key, first, last - first))
            skip.append(start - first)
            lengths.append(stop - start)
            num_samples.append(min(stop * hop, info.num_samples) - start * hop)
            read_samples.append(min(last * hop, info.num_samples) - first * hop)
        return TokenBatch(
            packed=self.store.read_batch(spans, n_quantizers=self.n_quantizers),
            skip=torch.tensor(skip),
            lengths=torch.tensor(lengths),
            num_samples=torch.tensor(num_samples),
            read_samples=torch.tensor(read_samples),
            context=self.context,
            spec=self.store.spec,
        )


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
