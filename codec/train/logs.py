"""Logs that people look at: TensorBoard pages with sound and pictures, and learning curves as one image."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor

from codec.train.module import CodecTraining

CURVES = (
    ("valid/full_mel", "log-mel L1, all codebooks"),
    ("valid/half_mel", "log-mel L1, half of them"),
    ("valid/full_mel_head", "log-mel L1 of the mel head"),
    ("valid/full_waveform", "waveform, relative L1"),
)


def has(module: str) -> bool:
    """Whether a module that an extra brings is installed."""
    return importlib.util.find_spec(module) is not None


def loggers(output: Path, start: int) -> list[Logger]:
    """CSV always; TensorBoard where it is installed."""
    found: list[Logger] = [CSVLogger(output, name="logs", version=f"from_step_{start}")]
    if has("tensorboard"):
        found.append(TensorBoardLogger(output, name="tensorboard", version=""))
    return found


class Pages(Callback):
    """After each validation: sound, spectrograms and codebook usage to TensorBoard, curves to `curves.png`."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """See the class."""
        assert isinstance(pl_module, CodecTraining)
        if not trainer.is_global_zero:
            return
        board = next((x.experiment for x in trainer.loggers if isinstance(x, TensorBoardLogger)), None)
        if board is not None:
            self._write_page(board, pl_module, trainer.global_step)
        if has("matplotlib"):
            draw_curves(self._output)

    def _write_page(self, board: Any, module: CodecTraining, step: int) -> None:
        rate = module.config.model.sample_rate
        for name, wave, decoded, head in module.listened:
            mels = [module._mel_of(x[None].to(module.device))[0].cpu() for x in (wave, decoded)]
            board.add_image(f"{name} original · decoded · mel head", picture([*mels, head]), step)
            board.add_audio(f"{name} original", wave.mean(0, keepdim=True), step, sample_rate=rate)
            board.add_audio(f"{name} decoded", decoded.mean(0, keepdim=True), step, sample_rate=rate)
        for level, (perplexity, used) in enumerate(zip(*module.usage, strict=True)):
            board.add_scalar(f"codebooks/perplexity_{level}", perplexity, step)
            board.add_scalar(f"codebooks/used_share_{level}", used, step)
        # One row per codebook, its entries from the most used one on.
        size = module.config.model.codebook_size
        counts = torch.stack([torch.bincount(row, minlength=size) for row in module.codes[0].cpu()])
        share = counts.sort(1, descending=True).values / counts.amax(1, keepdim=True).clamp(min=1)
        board.add_image("codebooks/usage, sorted", share.repeat_interleave(8, 0)[None], step)


def picture(mels: list[Tensor]) -> Tensor:
    """Log-mels `[M, F]` below each other, in one range: `[1, rows, F]` in 0…1, low frequencies at the bottom."""
    frames = min(mel.shape[1] for mel in mels)
    rows = torch.cat([mel[:, :frames].flip(0) for mel in mels])
    low, high = rows.min(), rows.max()
    return ((rows - low) / (high - low).clamp(min=1e-6))[None]


def read_logs(output: Path) -> list[dict[str, float]]:
    """All lines of the CSV logs, in the order of steps; what a resumed run repeated, from its last try."""
    lines: dict[tuple[int, bool], dict[str, float]] = {}
    starts = sorted((output / "logs").glob("from_step_*/metrics.csv"), key=lambda p: int(p.parent.name.split("_")[-1]))
    for path in starts:
        start = int(path.parent.name.split("_")[-1])
        lines = {key: line for key, line in lines.items() if key[0] <= start}
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                line = {name: float(value) for name, value in row.items() if value}
                lines[int(line["step"]), "valid/full_mel" in line] = line
    return [lines[key] for key in sorted(lines)]


def draw_curves(output: Path) -> None:
    """Validation curves of a run as `output/curves.png`."""
    from matplotlib.figure import Figure

    lines = read_logs(output)
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 2).flat, CURVES, strict=True):
        points = [(line["step"], line[name]) for line in lines if name in line]
        if points:
            axes.plot(*zip(*points, strict=True), marker=".")
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
    figure.savefig(output / "curves.png", dpi=100)
