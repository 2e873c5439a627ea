"""The core measures while a codec is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from codec.audio import find_audio
from codec.errors import InputError
from codec.evaluate.align import align
from codec.evaluate.coders import checked_quantizers
from codec.evaluate.metrics import CORE, METRICS, Clip, chosen_metrics, measure
from codec.evaluate.run import PathLike, spread
from codec.evaluate.statistics import summarise
from codec.evaluate.tasks import Settings, Source, read_clip
from codec.model import Codec


def averaged_codec(module: L.LightningModule) -> Codec:
    """The codec that a training module would save: its averaged weights where it has them."""
    for name in ("average", "model"):
        if isinstance(found := getattr(module, name, None), Codec):
            return found
    raise InputError(f"{type(module).__name__} has no codec under `average` or `model`; pass codec_of")


class QualityCallback(Callback):
    """After each validation, logs the means of measures over some clips as `quality/METRIC@K`.

    Args:
        inputs: Audio files and folders; at most `max_files` of them, evenly spread.
        metrics: Names of `METRICS`; by default those of PESQ-WB, STOI, SI-SDR and mel distance that are installed.
        n_quantizers: Numbers of codebooks; by default all.
        max_files: Clips.
        max_seconds: Of each file, from its start.
        every: Only at every n-th validation.
        codec_of: Training module → codec; by default its averaged weights.

    Raises:
        InputError: No audio, or a metric whose package is missing.
    """

    def __init__(
        self,
        inputs: Sequence[PathLike],
        *,
        metrics: Sequence[str] | None = None,
        n_quantizers: Sequence[int] | None = None,
        max_files: int = 8,
        max_seconds: float = 5.0,
        every: int = 1,
        codec_of: Callable[[L.LightningModule], Codec] = averaged_codec,
    ) -> None:
        if every < 1:
            raise InputError(f"every is {every}; it must be at least 1")
        installed = [name for name in CORE if METRICS[name].is_installed]
        self._metrics = chosen_metrics(installed if metrics is None else metrics)
        self._inputs, self._n_quantizers, self._codec_of = list(inputs), n_quantizers, codec_of
        self._max_files, self._max_seconds, self._every = max_files, max_seconds, every
        self._validations = 0
        self._waves: list[Tensor] | None = None

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See the class."""
        if trainer.sanity_checking:
            return
        self._validations += 1
        if (self._validations - 1) % self._every == 0 and trainer.is_global_zero:
            for name, value in self.measure(self._codec_of(pl_module)).items():
                pl_module.log(f"quality/{name}", value, rank_zero_only=True)

    @torch.no_grad()
    def measure(self, codec: Codec) -> dict[str, float]:
        """Means by "METRIC@K"; what is undefined for all clips is left out."""
        rate = codec.spec.sample_rate
        if self._waves is None:
            settings = Settings(rate, (), self._max_seconds, "kept")
            found = spread(find_audio(self._inputs), self._max_files)
            waves = [read_clip(Source(key, str(path)), settings) for key, path in found]
            channels = codec.spec.channels
            self._waves = [w if len(w) == channels else w.mean(0, keepdim=True).expand(channels, -1) for w in waves]
        wanted = self._n_quantizers or [codec.spec.n_quantizers]
        scores: dict[str, list[float | None]] = {}
        for k in checked_quantizers(wanted, codec.spec.n_quantizers, codec.spec.name):
            for wave in self._waves:
                copy = codec.decode(codec.encode(wave[None].to(codec.device), n_quantizers=k))[0].float().cpu()
                values, _ = measure(Clip(wave, align(wave, copy, 0), rate), self._metrics)
                for name in self._metrics:
                    scores.setdefault(f"{name}@{k}", []).append(values.get(name))
        means = {name: summarise(values).mean for name, values in scores.items()}
        return {name: mean for name, mean in means.items() if mean is not None}
