"""Audio corpus or token store → feature files: what `codec features` does."""

from __future__ import annotations

import json
import os
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import find_audio
from codec.errors import CodecError, InputError, TokenFileError
from codec.features import MelSettings, MelSpectrogram
from codec.model import Codec
from codec.sources import AudioFiles, Excerpt, output_names, write_array
from codec.tokens import TokenStore

Format = Literal["npy", "npz"]
PathLike = str | os.PathLike[str]
SUMMARY = "features.json"
"""Beside `.npy` files and inside an `.npz`: settings, and for each key its array, samples and frames."""


@dataclass
class ExtractReport:
    """What an `extract_features` run did.

    Attributes:
        num_items: Arrays written.
        audio_seconds: Audio they stand for.
        elapsed_seconds: Wall time.
        failures: key, path and error of each item that couldn't be read.
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
    wave: Tensor | None
    """Mono `[1, N]`, or None with `error`."""
    error: str = ""


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

    Args:
        inputs: Audio files and folders; or token files and folders of them.
        output: The folder of `.npy` files, made if missing, each named by its key and ready for
            `np.load(mmap_mode="r")`; or the one `.npz` file, its arrays named by key.
        settings: Mel settings or a preset's name.
        output_format: "npy" or "npz". `features.json`, in either, holds the settings and each array's length.
        codec: Decodes a token store; not needed for audio.
        device: Where the features of audio files are computed; those of tokens, where the codec is.
        batch_frames: Codec frames decoded at once.
        force: Replace what is there.
        on_progress: Called with (items done, items in all, audio seconds so far).

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
    writer = _Writer(Path(output), output_format, keys, force=force)
    report = ExtractReport()
    for item in items:
        if item.wave is None:
            report.failures.append({"key": item.key, "path": item.path, "error": item.error})
        else:
            features = mel(item.wave.to(device))
            writer.write(item.key, features[0], item.num_samples)
            report.num_items += 1
            report.audio_seconds += item.num_samples / rate
        if on_progress is not None:
            on_progress(report.num_items + len(report.failures), len(keys), report.audio_seconds)
    writer.close(mel.settings)
    report.elapsed_seconds = time.monotonic() - started
    return report


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
        try:
            source = AudioFiles({key: path}, sample_rate=sample_rate)
            num_samples = int(source.lengths()[0])
            wave = source.get([Excerpt(key, 0, num_samples)])
        except CodecError as error:
            yield _Item(key, str(path), 0, None, str(error))
        else:
            yield _Item(key, str(path), num_samples, wave[0])


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
            yield _Item(key, key, 0, None, str(error))
            continue
        if batch and max(longest, codes.shape[1]) * (len(batch) + 1) > batch_frames:
            yield from _decoded(store, codec, batch)
            batch, longest = [], 0
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
        yield _Item(key, key, num_samples, wave[:, :num_samples].mean(0, keepdim=True))


class _Writer:
    """Arrays by key: `.npy` files in a folder, or members of one `.npz`, with a summary."""

    def __init__(self, output: Path, output_format: Format, keys: Sequence[str], *, force: bool) -> None:
        self._output = output
        self._names = dict(zip(keys, output_names(keys, ".npy"), strict=True))
        self._items: dict[str, dict[str, Any]] = {}
        self._archive: zipfile.ZipFile | None = None
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

    def write(self, key: str, features: Tensor, num_samples: int) -> None:
        name = self._names[key]
        array = features.cpu()
        if self._archive is None:
            target = self._output / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_array(target, array)
        else:
            # np.savez would need every array in memory at once; np.load drops the members' ".npy".
            name = key + ".npy"
            with self._archive.open(name, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array.numpy()))
        self._items[key] = {"array": name, "num_samples": num_samples, "num_frames": array.shape[1]}

    def close(self, settings: MelSettings) -> None:
        summary = json.dumps({"settings": settings.to_dict(), "items": self._items}, indent=1)
        if self._archive is None:
            self._output.mkdir(parents=True, exist_ok=True)
            temporary = self._output / (SUMMARY + ".tmp")
            temporary.write_text(summary)
            temporary.replace(self._output / SUMMARY)
        else:
            self._archive.writestr(SUMMARY, summary)
            self._archive.close()
            self._temporary.replace(self._output)
