"""Looking before leaping: a dry run of a recipe, and where the time of a step goes."""

from __future__ import annotations

import dataclasses
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from codec.errors import TrainingError
from codec.train.config import TrainConfig
from codec.train.data import TrainingData
from codec.train.module import CodecTraining
from codec.train.run import check_resumable, make_trainer

PROFILED_STEPS = 20
WARM_UP_STEPS = 3


def check(config: TrainConfig) -> tuple[dict[str, Any], list[str]]:
    """A dry run: data, one full step with everything switched on, one validation file. Writes nothing that stays.

    Returns:
        Facts by name, and remarks: what is worth knowing before hours are spent, though it is no error.

    Raises:
        CodecError: What would stop the run, or make it pointless.
    """
    last = Path(config.run.output) / "last.ckpt"
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    data = TrainingData(config)
    remarks = data.remarks()
    if silent := data.check_sound():
        remarks.append(f"{silent:.0%} of the training excerpts are silent")
    facts = data.facts()
    if last.exists():
        facts["resumes at step"] = check_resumable(config, last)
    module = CodecTraining(config)
    for name in ("encoder", "quantizer", "decoder"):
        part = getattr(module.model, name)
        tensors = list(part.parameters()) or list(part.buffers())
        facts[f"{name}, M parameters"] = f"{sum(p.numel() for p in tensors) / 1e6:.2f}"
    if module.discriminators is not None:
        count = sum(p.numel() for p in module.discriminators.parameters())
        facts["discriminators, M parameters"] = f"{count / 1e6:.2f}"
    timer = StepTimer()
    trainer = _dry_run(config, module, data, steps=1, callbacks=[timer])
    facts["first step, s"] = f"{timer.seconds[0]:.2f}"
    facts["loss"] = f"{timer.loss:.4g}"
    if trainer.strategy.root_device.type == "cuda":
        facts["memory, GB"] = f"{torch.cuda.max_memory_allocated() / 1e9:.2f}"
    else:
        facts["memory, GB"] = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f}"
    return facts, remarks


def profile(config: TrainConfig, *, steps: int = PROFILED_STEPS) -> list[tuple[str, float]]:
    """Runs a few steps with everything switched on and says where the time goes.

    Returns:
        (part of a step, milliseconds): medians over the steps. Parts: "data" (waiting for the loader), "augment",
        "forward", "discriminators", "losses", "backward", "optimiser", "rest".
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    module = CodecTraining(config)
    timer = StepTimer(module)
    _dry_run(config, module, TrainingData(config), steps=WARM_UP_STEPS + steps, callbacks=[timer])
    parts = {name: _median(values[WARM_UP_STEPS:]) for name, values in timer.parts.items()}
    whole = _median(timer.seconds[WARM_UP_STEPS:])
    order = ("data", "augment", "forward", "discriminators", "losses", "backward", "optimiser")
    table = [(name, 1e3 * parts[name]) for name in order if name in parts]
    inside = sum(value for name, value in parts.items() if name != "data")
    return [*table, ("rest", 1e3 * max(0.0, whole - inside))]


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _dry_run(
    config: TrainConfig, module: CodecTraining, data: TrainingData, *, steps: int, callbacks: list[Callback]
) -> L.Trainer:
    """Trains for a few steps as the run will when all of its losses have begun, and validates one file."""
    config = dataclasses.replace(
        config,
        optim=dataclasses.replace(config.optim, max_steps=steps),
        adversarial=dataclasses.replace(config.adversarial, start_step=0, lead_steps=0),
        trainer=dataclasses.replace(config.trainer, devices=1, num_nodes=1),
    )
    module.config = config
    module.quantizing.fill_(True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(
            config,
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=False,
            limit_val_batches=1,
            callbacks=callbacks,
        )
        try:
            trainer.fit(module, data.loader(start_batch=0))
            trainer.validate(module, data.valid_loader(), verbose=False)
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise TrainingError(
                f"a step of {config.data.batch_size} excerpts of {config.data.segment_seconds:g} s doesn't fit into "
                f"memory ({error}); lower data.batch_size or data.segment_seconds"
            ) from error
    return trainer


class StepTimer(Callback):
    """Times steps and, given the module, their parts."""

    def __init__(self, module: CodecTraining | None = None) -> None:
        self.seconds: list[float] = []
        self.parts: dict[str, list[float]] = defaultdict(list)
        self.loss = 0.0
        self._mark = 0.0
        if module is not None:
            module.timed = self._timed

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = _now()
        yield
        self.parts[part].append(_now() - started)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Starts waiting for the first batch."""
        self._mark = _now()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch is there."""
        now = _now()
        self.parts["data"].append(now - self._mark)
        self._mark = now

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The step is done."""
        now = _now()
        self.seconds.append(now - self._mark)
        self._mark = now
        self.loss = float(outputs["loss"])


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()
