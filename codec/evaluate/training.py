"""Does training notice? A small classifier on features of originals and of copies, accuracies side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from codec.audio.resampling import resample
from codec.features import MelSettings, MelSpectrogram

_RATE = 16000
_MEL = MelSettings(sample_rate=_RATE, n_fft=512, win_length=400, hop_length=160, n_mels=40, f_min=0, f_max=8000)
FOLDS = 5
FEWEST_CLIPS = 4
"""Of each class."""


def pooled_features(wave: Tensor, sample_rate: int) -> NDArray[np.float32]:
    """Mean and deviation of 40 log-mels over each second of a wave `[C, N]`, the last one whole: `[seconds, 80]`."""
    mono = resample(wave.mean(0, keepdim=True), sample_rate, _RATE)
    mel: Tensor = MelSpectrogram(_MEL)(mono[None])[0]
    count = max(1, mel.shape[1] // 100)
    parts = [part for part in torch.split(mel[:, : 100 * count], 100, 1) if part.shape[1] > 1] or [mel.expand(-1, 2)]
    pooled = torch.stack([torch.cat([part.mean(1), part.std(1)]) for part in parts])
    return pooled.numpy()


def classes_of(keys: Sequence[str]) -> dict[str, str]:
    """Key → class, its first folder; empty if there aren't two classes of at least four clips."""
    folders = {key: key.split("/")[0] for key in keys if "/" in key}
    sizes = Counter(folders.values())
    found = {key: name for key, name in folders.items() if sizes[name] >= FEWEST_CLIPS}
    return found if len(set(found.values())) > 1 else {}


@dataclass(frozen=True)
class Accuracy:
    """Accuracies of one condition, by clip-wise cross-validation.

    Attributes:
        condition: Its label.
        on_copies: Trained on copies, tested on copies of other clips.
        on_originals: Trained on copies, tested on originals of other clips.
        of_originals: Trained and tested on originals: what the two are to be held against.
        chance: Share of the largest class.
        num_excerpts: Seconds of audio that were classified.
    """

    condition: str
    on_copies: float
    on_originals: float
    of_originals: float
    chance: float
    num_excerpts: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def training_notices(
    features: Mapping[str, Mapping[str, NDArray[np.float32]]],
    classes: Mapping[str, str],
    original: str,
) -> list[Accuracy]:
    """Trains a linear classifier on pooled log-mels: of originals, and of each condition.

    Clips are dealt to five folds; a clip's seconds are all in one. The classifier is logistic regression with a
    penalty, fitted to convergence, so that nothing depends on a random start.

    Args:
        features: condition → key → `[excerpts, D]`.
        classes: key → class.
        original: The originals' condition.
    """
    keys = [key for key in sorted(classes) if all(key in per_clip for per_clip in features.values())]
    names = sorted({classes[key] for key in keys})
    if len(names) < 2:
        return []
    seen: Counter[str] = Counter()
    fold_of = {}
    for key in keys:
        fold_of[key] = seen[classes[key]] % FOLDS
        seen[classes[key]] += 1
    counts = [min(len(per_clip[key]) for per_clip in features.values()) for key in keys]
    folds = np.concatenate([[fold_of[key]] * n for key, n in zip(keys, counts, strict=True)])
    labels = np.concatenate([[names.index(classes[key])] * n for key, n in zip(keys, counts, strict=True)])
    data = {
        condition: np.concatenate([per_clip[key][:n] for key, n in zip(keys, counts, strict=True)])
        for condition, per_clip in features.items()
    }
    chance = float(np.bincount(labels).max() / len(labels))
    right: dict[str, list[float]] = {}
    for condition, own in data.items():
        hits = np.zeros(2)
        for fold in range(FOLDS):
            training, testing = folds != fold, folds == fold
            if not testing.any():
                continue
            predict = _fitted(own[training], labels[training], len(names))
            hits += [(predict(test[testing]) == labels[testing]).sum() for test in (own, data[original])]
        right[condition] = (hits / len(labels)).tolist()
    return [
        Accuracy(name, own, other, right[original][0], chance, len(labels))
        for name, (own, other) in right.items()
        if name != original
    ]


def _fitted(data: NDArray[np.float32], labels: NDArray[np.int64], num_classes: int) -> Any:
    x, y = torch.from_numpy(data).double(), torch.from_numpy(labels)
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    x = (x - mean) / scale
    weight = torch.zeros(x.shape[1] + 1, num_classes, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(x @ weight[:-1] + weight[-1], y) + 1e-3 * weight.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]

    def predict(values: NDArray[np.float32]) -> NDArray[np.int64]:
        with torch.no_grad():
            scores = (torch.from_numpy(values).double() - mean) / scale @ weight[:-1] + weight[-1]
        return scores.argmax(1).numpy()

    return predict
