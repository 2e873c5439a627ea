"""Audio corpus or token store → feature files: what `codec features` does."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import find_audio
from codec.errors import AudioFileError, CodecError, InputError, TokenFileError
from codec.features import MelSettings, MelSpectrogram
from codec.model import Codec
from codec.sources import AudioFiles, Excerpt, output_names, write_array
from codec.tokens import TokenStore

Format = Literal["npy", "npz"]
PathLike = str | os.PathLike[str]
SUMMARY = "features.json"
"""Beside `.npy` files and inside an `.npz`: settings, and for each key its array, samples and frames."""
LONG_SECONDS = 60
"""Files longer than this are read, and their features computed and written, in pieces of this length."""


@dataclass
class ExtractReport:
    """What an `extract_features` run did.

    Attributes:
        num_items: Arrays written.
        audio_seconds: Audio they stand for.
        elapsed_seconds: Wall time.
        failures: key, path and error of each item that couldn't be read, or holds NaN.
    """

    num_items: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


@dataclass
class _Item:
    key: str
    path: str
    num_samples: int
    waves: Iterable[Tensor] = ()
    """Mono `[1, n]`, one after the other; a CodecError while they are taken is this item's."""
    error: CodecError | None = None


def token_store(inputs: Sequence[PathLike]) -> TokenStore | None:
    """The token store that the inputs are, or None if they are audio.

    Raises:
        InputError: Token files and other inputs mixed.
        TokenFileError: A token file can't be opened.
    """
    stores = [
        Path(path).suffix == ".ctok" or (Path(path).is_dir() and any(Path(path).glob("*.ctok"))) for path in inputs
    ]
    if not any(stores):
        return None
    if not all(stores):
        other = next(path for path, is_store in zip(inputs, stores, strict=True) if not is_store)
        raise InputError(f"{other} is no token store, but other inputs are; give stores and audio in two runs")
    paths = [path for store in inputs for path in TokenStore(store).paths]
    return TokenStore(paths)


def extract_features(
    inputs: Sequence[PathLike],
    output: PathLike,
    settings: MelSettings | str = "codec",
    *,
    output_format: Format = "npy",
    codec: Codec | None = None,
    device: torch.device | str = "cpu",
    batch_frames: int = 6400,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> ExtractReport:
    """Writes the features of each audio file, or of each item of a token store, as a float32 array `[M, F]`.

    Audio is resampled to the settings' rate and mixed to mono; tokens are decoded in batches on the codec's device.
    Long items go through in pieces, in memory that doesn't depend on their length, unless the settings (log_range,
    normalize) need the whole wave or the codec's context is unbounded. A bad item is reported; the others are written.

    Args:
        inputs: Audio files and folders; or token files and folders of them.
        output: The folder of `.npy` files, made if missing, each named by its key and ready for
            `np.load(mmap_mode="r")`; or the one `.npz` file, its arrays named by key.
        settings: Mel settings or a preset's name.
        output_format: "npy" or "npz". `features.json`, in either, holds the settings and each array's length.
        codec: Decodes a token store; not needed for audio.
        device: Where the features of audio files are computed; those of tokens, where the codec is.
        batch_frames: Codec frames decoded at once; longer items are decoded in pieces of this length.
        force: Replace what is there.
        on_progress: Called after each piece with (items done, items in all, audio seconds so far).

    Raises:
        InputError: No audio found, an unknown preset or format, an output is there already, audio and tokens
            mixed, a store without a codec, or settings for another rate than the codec's.
        TokenFileError: The store is damaged as a whole, or of another codec.
    """
    started = time.monotonic()
    if output_format not in ("npy", "npz"):
        raise InputError(f"output_format is {output_format!r}; it must be 'npy' or 'npz'")
    mel = MelSpectrogram(settings).requires_grad_(False)
    rate = mel.settings.sample_rate
    store = token_store(inputs)
    if store is None:
        found = find_audio(inputs)
        keys = [key for key, _ in found]
        items = _audio_items(found, rate)
    else:
        codec = _checked(codec, store, rate)
        device, keys = codec.device, list(store.keys())
        items = _token_items(store, codec, batch_frames)
    mel.to(device)
    report = ExtractReport()

    def progress(seconds: float) -> None:
        if on_progress is not None:
            on_progress(report.num_items + len(report.failures), len(keys), report.audio_seconds + seconds)

    with _writer(Path(output), output_format, keys, mel.settings, force=force) as writer:
        for item in items:
            try:
                if item.error is not None:
                    raise item.error
                blocks = _features(mel, item, lambda num_samples: progress(num_samples / rate))
                writer.write(item.key, item.num_samples, mel.num_frames(item.num_samples), blocks)
            except CodecError as error:
                text = str(error) if item.path in str(error) else f"{item.path}: {error}"
                report.failures.append({"key": item.key, "path": item.path, "error": text})
            else:
                report.num_items += 1
                report.audio_seconds += item.num_samples / rate
            progress(0)
    report.elapsed_seconds = time.monotonic() - started
    return report


def _features(mel: MelSpectrogram, item: _Item, on_samples: Callable[[int], None]) -> Iterator[Tensor]:
    """An item's features, in parts `[M, f]` that together are those of the whole."""
    waves = (wave.to(mel.window.device) for wave in item.waves)
    first = next(waves)
    if first.shape[1] == item.num_samples:
        yield _only(mel(first))
        return
    if not mel.settings.is_framewise:
        yield _only(mel(torch.cat([first, *waves], 1)))
        return
    stream, num_samples = mel.stream(), 0
    for wave in chain([first], waves):
        yield stream.push(wave)[0]
        num_samples += wave.shape[1]
        on_samples(num_samples)
    yield stream.flush()[0]


def _only(features: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(features, Tensor)
    return features[0]


def _checked(codec: Codec | None, store: TokenStore, rate: int) -> Codec:
    spec = store.spec
    if codec is None:
        raise InputError(f"the input is a token store of {spec.name}; give the codec that wrote it")
    codec.spec.check_tokens(spec)
    if spec.sample_rate != rate:
        raise InputError(
            f"the settings are for {rate} Hz and {spec.name} decodes to {spec.sample_rate} Hz; choose settings with "
            f"sample_rate {spec.sample_rate}, or run `codec decode` first and extract from its audio"
        )
    return codec


def _audio_items(found: Sequence[tuple[str, Path]], sample_rate: int) -> Iterator[_Item]:
    for key, path in found:
        with _named(path) as failed:
            source = AudioFiles({key: path}, sample_rate=sample_rate)
            num_samples = int(source.lengths()[0])
            if num_samples == 0:
                raise AudioFileError(f"{path}: holds no samples; leave it out")
        if failed:
            yield _Item(key, str(path), 0, error=failed[0])
        else:
            yield _Item(key, str(path), num_samples, _pieces(source, key, path, num_samples))


def _pieces(source: AudioFiles, key: str, path: Path, num_samples: int) -> Iterator[Tensor]:
    size = LONG_SECONDS * source.sample_rate
    for start in range(0, num_samples, size):
        with _named(path) as failed:
            wave = source.get([Excerpt(key, start, min(size, num_samples - start))])[0]
        if failed:
            raise failed[0]
        yield wave


@contextmanager
def _named(path: Path) -> Iterator[list[CodecError]]:
    """Catches an error into the list it gives: whatever a decoder makes of someone's file is that file's failure."""
    failed: list[CodecError] = []
    try:
        yield failed
    except Exception as error:
        failed.append(error if isinstance(error, CodecError) else AudioFileError(f"{path}: {error!r}"))


def _token_items(store: TokenStore, codec: Codec, batch_frames: int) -> Iterator[_Item]:
    """Items in the store's order, decoded in batches of about as many frames."""
    batch: list[tuple[str, NDArray[Any]]] = []
    longest = 0
    for key in store.keys():
        try:
            codes = store.read(key)
        except TokenFileError as error:
            yield from _decoded(store, codec, batch)
            batch, longest = [], 0
            yield _Item(key, key, 0, error=error)
            continue
        if batch and max(longest, codes.shape[1]) * (len(batch) + 1) > batch_frames:
            yield from _decoded(store, codec, batch)
            batch, longest = [], 0
        if codes.shape[1] > batch_frames and codec.spec.decode_context is not None:
            num_samples = store.info(key).num_samples
            yield _Item(key, key, num_samples, _decoded_pieces(codec, codes, num_samples, batch_frames))
            continue
        batch.append((key, codes))
        longest = max(longest, codes.shape[1])
    yield from _decoded(store, codec, batch)


def _decoded(store: TokenStore, codec: Codec, batch: Sequence[tuple[str, NDArray[Any]]]) -> Iterator[_Item]:
    if not batch:
        return
    lengths = [codes.shape[1] for _, codes in batch]
    padded = np.zeros((len(batch), batch[0][1].shape[0], max(lengths)), np.int64)
    for row, (_, codes) in zip(padded, batch, strict=True):
        row[:, : codes.shape[1]] = codes
    waves = codec.decode(torch.from_numpy(padded).to(codec.device), torch.tensor(lengths, device=codec.device))
    for wave, (key, _) in zip(waves, batch, strict=True):
        num_samples = store.info(key).num_samples
        yield _Item(key, key, num_samples, [wave[:, :num_samples].mean(0, keepdim=True)])


def _decoded_pieces(codec: Codec, codes: NDArray[Any], num_samples: int, size: int) -> Iterator[Tensor]:
    """`[K, T]` → the wave in pieces."""
    stream = codec.stream_decoder()
    for start in range(0, codes.shape[1] + size, size):
        piece = codes[None, :, start : start + size].astype(np.int64)
        wave = stream.push(torch.from_numpy(piece).to(codec.device)) if piece.size else stream.flush()
        wave = wave[0, :, :num_samples].mean(0, keepdim=True)
        num_samples -= wave.shape[1]
        yield wave


@contextmanager
def _writer(
    output: Path, output_format: Format, keys: Sequence[str], settings: MelSettings, *, force: bool
) -> Iterator[_Writer]:
    """Opens the output; at the end writes the summary, or after an error removes what is unfinished."""
    writer = _Writer(output, output_format, keys, force=force)
    try:
        yield writer
        writer.close(settings)
    except BaseException:
        writer.cancel()
        raise


class _Writer:
    """Arrays by key: `.npy` files in a folder, or members of one `.npz`, with a summary."""

    def __init__(self, output: Path, output_format: Format, keys: Sequence[str], *, force: bool) -> None:
        self._output = output
        self._names = dict(zip(keys, output_names(keys, ".npy"), strict=True))
        self._items: dict[str, dict[str, Any]] = {}
        self._archive: zipfile.ZipFile | None = None
        self._temporary: Path | None = None
        if output_format == "npz":
            targets = [output]
        else:
            targets = [output / name for name in [*self._names.values(), SUMMARY]]
        taken = [target for target in targets if target.exists()]
        if taken and not force:
            raise InputError(
                f"{taken[0]} exists ({len(taken)} files in all); give another output, or --force to replace them"
            )
        if output_format == "npz":
            output.parent.mkdir(parents=True, exist_ok=True)
            self._temporary = output.with_name(output.name + ".tmp")
            self._archive = zipfile.ZipFile(self._temporary, "w", zipfile.ZIP_STORED)

    def write(self, key: str, num_samples: int, num_frames: int, blocks: Iterator[Tensor]) -> None:
        """Writes an item's `[M, F]`, which comes in parts `[M, f]`."""
        first = next(blocks)
        name = self._names[key]
        target = self._output / name if self._archive is None else self._output
        target.parent.mkdir(parents=True, exist_ok=True)
        if first.shape[1] == num_frames:
            if self._archive is None:
                write_array(target, first)
            else:
                self._add(key, first.cpu().numpy())
        else:
            temporary = target.with_name(target.name + ".part")
            try:
                shape = (first.shape[0], num_frames)
                array = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
                end = 0
                for block in chain([first], blocks):
                    array[:, end : end + block.shape[1]] = block.cpu().numpy()
                    end += block.shape[1]
                assert end == num_frames
                array.flush()
                if self._archive is None:
                    temporary.replace(target)
                else:
                    self._add(key, array)
            finally:
                temporary.unlink(missing_ok=True)
        array_name = name if self._archive is None else key + ".npy"
        self._items[key] = {"array": array_name, "num_samples": num_samples, "num_frames": num_frames}

    def _add(self, key: str, array: NDArray[Any]) -> None:
        assert self._archive is not None
        # np.savez would need every array in memory at once; np.load drops the members' ".npy".
        with self._archive.open(key + ".npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, np.ascontiguousarray(array))

    def close(self, settings: MelSettings) -> None:
        """Adds the summary, and gives the archive its name."""
        summary = json.dumps({"settings": settings.to_dict(), "items": self._items}, indent=1)
        if self._archive is None:
            self._output.mkdir(parents=True, exist_ok=True)
            temporary = self._output / (SUMMARY + ".tmp")
            temporary.write_text(summary)
            temporary.replace(self._output / SUMMARY)
        else:
            assert self._temporary is not None
            self._archive.writestr(SUMMARY, summary)
            self._archive.close()
            self._temporary.replace(self._output)

    def cancel(self) -> None:
        """Leaves no half-written archive."""
        if self._archive is not None and self._temporary is not None:
            self._archive.close()
            self._temporary.unlink(missing_ok=True)
