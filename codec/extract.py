"""Audio corpus → feature files: what `codec features` does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from codec.audio import find_audio
from codec.errors import CodecError, InputError
from codec.features import MelSettings, MelSpectrogram
from codec.sources import AudioFiles, Excerpt, output_names, write_array


@dataclass
class ExtractReport:
    """What an `extract_features` run did.

    Attributes:
        num_items: Files written.
        audio_seconds: Audio they stand for.
        elapsed_seconds: Wall time.
        failures: key, path and error of each file that couldn't be read.
    """

    num_items: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


def extract_features(
    inputs: Sequence[str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    settings: MelSettings | str = "codec",
    *,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> ExtractReport:
    """Writes the mel spectrogram of each audio file as float32 `.npy` `[M, F]`, to be memory-mapped by `np.load`.

    Files are resampled to the settings' rate and mixed to mono.

    Args:
        inputs: Files and folders.
        folder: Where to; made if missing. A file's array is named by its key.
        settings: Mel settings or a preset's name.
        force: Replace arrays that are there.
        on_progress: Called with (files done, files in all, audio seconds so far).

    Raises:
        InputError: No audio found, an unknown preset, an array is there already.
    """
    started = time.monotonic()
    mel = MelSpectrogram(settings)
    rate = mel.settings.sample_rate
    found = find_audio(inputs)
    root = Path(folder)
    targets = [root / name for name in output_names([key for key, _ in found], ".npy")]
    taken = [target for target in targets if target.exists()]
    if taken and not force:
        raise InputError(
            f"{taken[0]} exists ({len(taken)} files in all); give another folder, or --force to replace them"
        )
    report = ExtractReport()
    for (key, path), target in zip(found, targets, strict=True):
        try:
            source = AudioFiles({key: path}, sample_rate=rate)
            num_samples = int(source.lengths()[0])
            wave = source.get([Excerpt(key, 0, num_samples)])
        except CodecError as error:
            report.failures.append({"key": key, "path": str(path), "error": str(error)})
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_array(target, mel(wave)[0])
            report.num_items += 1
            report.audio_seconds += num_samples / rate
        if on_progress is not None:
            on_progress(report.num_items + len(report.failures), len(found), report.audio_seconds)
    report.elapsed_seconds = time.monotonic() - started
    return report
