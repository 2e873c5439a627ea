"""What a run trains and validates on, and what is wrong with it, found before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from codec.audio import audio_info, find_audio, read_audio
from codec.errors import ConfigError, TrainingError
from codec.excerpts import Batch, FixedLoader, RandomExcerpts
from codec.sources import AudioFiles, Excerpt, Source, Wrap
from codec.train.augment import augmentations
from codec.train.config import TrainConfig

SILENCE = 1e-4
"""Peak below which an excerpt counts as silent, full scale being 1."""
PROBES = 64
"""Excerpts that are listened to, and files whose sample rate is looked at, before a run."""


class Channels(Wrap):
    """Waves with a fixed number of channels: mono files are doubled, more channels are mixed to mono first."""

    def __init__(self, source: Source, channels: int) -> None:
        super().__init__(source)
        self._channels = channels

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, channels, N]`."""
        longest = max(excerpt.length for excerpt in excerpts)
        batch = torch.zeros(len(excerpts), self._channels, longest)
        for row, excerpt in zip(batch, excerpts, strict=True):
            wave: Tensor = self.source.get([excerpt])[0]
            row[:, : wave.shape[-1]] = as_channels(wave, self._channels)
        return batch


def as_channels(wave: Tensor, channels: int) -> Tensor:
    """`[C, N]` → `[channels, N]`: as it is, or mixed to mono and repeated."""
    return wave if len(wave) == channels else wave.mean(0, keepdim=True).expand(channels, -1)


class _WithNoise:
    """Batches of excerpts with noise beside them."""

    def __init__(self, excerpts: RandomExcerpts, noise: RandomExcerpts) -> None:
        self._excerpts = excerpts
        self._noise = noise

    def __getitem__(self, n: int) -> Batch:
        """Batch n."""
        return self._excerpts[n].replace(noise=self._noise[n]["x"])


class TrainingData:
    """The training excerpts and the validation files of a configuration.

    Raises:
        ConfigError: No files named, every file at a lower rate than the model's.
        AudioFileError: A file or folder isn't there or can't be read.
        TrainingError: Every file is shorter than the segment, or silent.
    """

    def __init__(self, config: TrainConfig) -> None:
        data, rate = config.data, config.model.sample_rate
        if not data.train or not data.valid:
            raise ConfigError("data.train and data.valid are empty; name at least one file or folder in each")
        self._config = config
        self.rngs = augmentations(config.augment, denoise=bool(getattr(config.model, "denoise", False)))
        # A sped-up excerpt reads more than it returns.
        stretch = config.augment.speed if "speed" in self.rngs else 1.0
        length = f"{-(-config.num_samples * round(stretch * 1000) // 1000)}/{rate}"
        self.source = AudioFiles(list(data.train), sample_rate=rate, mono=config.model.channels == 1)
        files = [path for _, path in find_audio(list(data.train))]
        looked_at = files[:: -(-len(files) // PROBES)]
        self.native_rates = np.array([audio_info(path).sample_rate for path in looked_at])
        self._check_lengths()
        self._check_rates()
        self.excerpts = RandomExcerpts(
            {"x": self._as_channels(self.source)},
            length,
            batch_size=data.batch_size,
            seed=data.seed,
            short="pad",
            items=lambda key: next((w for start, w in data.weights.items() if key.startswith(start)), 1),
            rngs=self.rngs,
            unreadable="replace",
        )
        self.noise = None
        if data.noise and config.augment.noise_share:
            noise = AudioFiles(list(data.noise), sample_rate=rate, mono=config.model.channels == 1)
            self.noise = RandomExcerpts(
                {"x": self._as_channels(noise)},
                f"{config.num_samples}/{rate}",
                batch_size=data.batch_size,
                seed=data.seed,
                short="repeat",
            )
        valid = [path for _, path in find_audio(list(data.valid))]
        self.valid = valid[:: -(-len(valid) // data.max_valid_files)]

    def _as_channels(self, source: AudioFiles) -> Source:
        channels = self._config.model.channels
        return source if channels == 1 else Channels(source, channels)

    def _check_lengths(self) -> None:
        lengths, needed = self.source.lengths(), self._config.num_samples
        if lengths.max() < needed:
            rate = self._config.model.sample_rate
            raise TrainingError(
                f"all {len(lengths)} files of data.train are shorter than data.segment_seconds "
                f"{needed / rate:g} (the longest has {lengths.max() / rate:.3g} s): training would be on padding; "
                "lower data.segment_seconds or give longer files"
            )

    def _check_rates(self) -> None:
        rate, highest = self._config.model.sample_rate, int(self.native_rates.max())
        if highest < rate:
            raise ConfigError(
                f"model.sample_rate is {rate} Hz, but the {len(self.native_rates)} files of data.train looked at have "
                f"{highest} Hz at most: the upper band would be empty; lower model.sample_rate to {highest}, or give "
                "other files"
            )

    def remarks(self) -> list[str]:
        """What is worth knowing of the data and is no error: one sentence each."""
        lengths, rate = self.source.lengths(), self._config.model.sample_rate
        remarks = []
        if short := int((lengths < self._config.num_samples).sum()):
            remarks.append(f"{short} of {len(lengths)} training files are shorter than the segment: padded with zeros")
        if low := int((self.native_rates < rate).sum()):
            remarks.append(
                f"{low} of {len(self.native_rates)} training files looked at are recorded at less than {rate} Hz: "
                "their upper band is empty"
            )
        return remarks

    def check_sound(self) -> float:
        """Listens to a few excerpts; returns the share that is silent.

        Raises:
            TrainingError: All of them are.
        """
        size = self._config.data.batch_size
        batches = [self.excerpts[n] for n in range(max(1, -(-PROBES // size)))]
        peaks = torch.cat([batch["x"].abs().amax((1, 2)) for batch in batches])
        if bool((peaks < SILENCE).all()):
            raise TrainingError(
                f"{len(peaks)} random excerpts of data.train are all silent (peak {peaks.max():.1g} of full scale, "
                f"limit {SILENCE:g}), the first from {batches[0]['key'][0]!r}; are these the right files?"
            )
        return float((peaks < SILENCE).float().mean())

    def loader(self, *, start_batch: int) -> FixedLoader:
        """Training batches from a number on, endless; ranks share them among themselves."""
        batches: Any = self.excerpts if self.noise is None else _WithNoise(self.excerpts, self.noise)
        return FixedLoader(
            batches, start_batch=start_batch, num_batches=None, num_workers=self._config.data.num_workers
        )

    def valid_loader(self) -> torch.utils.data.DataLoader[dict[str, Any]]:
        """Validation files as batches of one."""
        model = self._config.model
        return torch.utils.data.DataLoader(_WholeFiles(self.valid, model.sample_rate, model.channels), batch_size=None)

    def facts(self) -> dict[str, Any]:
        """Counts of what there is to train on."""
        seconds = float(np.sum(self.source.lengths() / self._config.model.sample_rate))
        rates = sorted(set(self.native_rates.tolist()))
        return {
            "training files": len(self.source.keys()),
            "training hours": f"{seconds / 3600:.2f}",
            "recorded at, Hz": ", ".join(map(str, rates)),
            "validation files": len(self.valid),
        }


class _WholeFiles(torch.utils.data.Dataset[dict[str, Any]]):
    """Files as batches of one, resampled to the model's rate."""

    def __init__(self, paths: Sequence[Path], sample_rate: int, channels: int) -> None:
        self._paths = list(paths)
        self._sample_rate = sample_rate
        self._channels = channels

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self._paths[index]
        mono = self._channels == 1
        wave, _ = read_audio(path, sample_rate=self._sample_rate, mono=mono)
        return {"x": as_channels(wave, self._channels)[None], "key": path.name}
