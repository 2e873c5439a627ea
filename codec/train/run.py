"""A training run: from a configuration to exported checkpoints, resumable to the step."""

from __future__ import annotations

import ctypes
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from lightning.pytorch.strategies import DDPStrategy, Strategy

from codec.errors import ConfigError
from codec.train.config import TrainConfig
from codec.train.data import TrainingData
from codec.train.logs import Pages, loggers
from codec.train.module import CodecTraining


class Keeping(Callback):
    """Writes `last.ckpt` now and then, and exports the averaged weights.

    `checkpoint/` has the best by `valid/full_mel`, `checkpoint_last/` the latest. Only validations of one phase
    compare: the best is written anew when the codebooks, or the discriminators, come in, for the distance to the
    original rises where the sound gets better.
    """

    def __init__(self, output: Path, *, every_seconds: float) -> None:
        self.last = output / "last.ckpt"
        self.best_folder, self.last_folder = output / "checkpoint", output / "checkpoint_last"
        self._every_seconds = every_seconds
        self._saved_at = time.monotonic()
        self._phase: list[bool] = []
        self._value = float("inf")
        self.validated_step = -1

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"phase": self._phase, "value": self._value, "validated_step": self.validated_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The counterpart."""
        self._phase, self._value = state_dict["phase"], state_dict["value"]
        self.validated_step = state_dict["validated_step"]

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Saves by the clock."""
        due = time.monotonic() - self._saved_at >= self._every_seconds
        if trainer.strategy.broadcast(due) if trainer.world_size > 1 else due:
            trainer.save_checkpoint(self.last)
            self._saved_at = time.monotonic()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Exports the best."""
        assert isinstance(pl_module, CodecTraining)
        self.validated_step = trainer.global_step
        value, phase = float(trainer.callback_metrics["valid/full_mel"]), pl_module.phase()
        if not pl_module.quantizing or (phase == self._phase and not value < self._value):
            return
        self._phase, self._value = phase, value
        if trainer.is_global_zero:
            pl_module.average.save(self.best_folder)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Exports the latest, and the best if there is none yet."""
        assert isinstance(pl_module, CodecTraining)
        if trainer.is_global_zero and bool(pl_module.quantizing):
            pl_module.average.save(self.last_folder)
            if not self._phase:
                pl_module.average.save(self.best_folder)


def keep_freed_memory() -> None:
    """Has the C library keep what this process frees, where that library is glibc; call it before a training on a CPU.

    A step's large tensors then don't come from the kernel as pages to be cleared, each time anew: a sixth of the
    time of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mmap_max, trim_threshold = -4, -1  # M_MMAP_MAX, M_TRIM_THRESHOLD of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def train(config: TrainConfig, *, resume: bool = True, progress: bool = True) -> Path:
    """Trains a codec; resumes from `output/last.ckpt` if that is there.

    Args:
        config: See `load_config`.
        resume: Go on from `last.ckpt`; otherwise an existing one is an error.
        progress: Show a progress bar.

    Returns:
        The exported folder of the best checkpoint, `output/checkpoint`, ready for `load_codec`; the latest is in
        `output/checkpoint_last`.

    Raises:
        ConfigError: A setting that can't work, a run of another model in the same folder.
        TrainingError: No training audio, files all shorter than the segment or silent, a number that isn't finite.
    """
    output = Path(config.run.output)
    last = output / "last.ckpt"
    if last.exists() and not resume:
        raise ConfigError(f"{last} exists; resume it, remove it, or give another run.output")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    data = TrainingData(config)
    data.check_sound()
    start = check_resumable(config, last) if last.exists() else 0
    L.seed_everything(config.data.seed % 2**32, verbose=False)
    module = CodecTraining(config)
    keeping = Keeping(output, every_seconds=config.run.checkpoint_minutes * 60)
    trainer = make_trainer(
        config,
        logger=loggers(output, start),
        default_root_dir=output,
        enable_progress_bar=progress,
        enable_checkpointing=False,
        callbacks=[
            keeping,
            Pages(output),
            *([RichProgressBar()] if progress else []),
        ],
    )
    trainer.fit(
        module,
        data.loader(start_batch=start),
        data.valid_loader(),
        ckpt_path=last if last.exists() else None,
        weights_only=False,
    )
    if keeping.validated_step != trainer.global_step:
        trainer.validate(module, data.valid_loader(), verbose=False)
    trainer.save_checkpoint(last)
    return keeping.best_folder


def make_trainer(config: TrainConfig, **options: Any) -> L.Trainer:
    """Lightning's trainer for a configuration."""
    settings, optim = config.trainer, config.optim
    try:
        return L.Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=_strategy(config),
            precision=settings.precision,
            use_distributed_sampler=False,
            max_steps=optim.max_steps,
            val_check_interval=config.run.valid_every,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            enable_model_summary=False,
            **options,
        )
    except (RuntimeError, ValueError, L.fabric.utilities.exceptions.MisconfigurationException) as error:
        raise ConfigError(
            f"trainer.accelerator {settings.accelerator!r} with trainer.devices {settings.devices!r} can't be used: "
            f"{error}"
        ) from error


def _strategy(config: TrainConfig) -> Strategy | str:
    """Data-parallel processes where there are several devices."""
    devices, accelerator = config.trainer.devices, config.trainer.accelerator
    if devices in ("auto", -1, "-1"):
        count = torch.cuda.device_count() if accelerator in ("auto", "gpu", "cuda") else 1
    else:
        count = int(devices) if str(devices).isdigit() else len(str(devices).split(","))
    if count * config.trainer.num_nodes < 2:
        return "auto"
    # A step of the discriminators, a frozen part and the warm-up leave parameters without a gradient. Buffers are the
    # same everywhere: codebooks are synchronised by the quantizer, the rest is constant.
    return DDPStrategy(find_unused_parameters=True, broadcast_buffers=False)


def check_resumable(config: TrainConfig, last: Path) -> int:
    """Training batches that an interrupted run has used, one per step.

    Raises:
        ConfigError: The run is of another model, or of other discriminators.
    """
    try:
        state = torch.load(last, map_location="cpu", weights_only=False, mmap=True)
    except Exception as error:  # torch has no one type for a damaged file
        raise ConfigError(f"{last} can't be read ({error}); remove it, or give another run.output") from error
    if "matrix_learning_rate" not in state.get("config", {}).get("optim", {}):
        raise ConfigError(
            f"{last} was written by another version of this program, which can't be resumed; remove it, or give "
            f"another run.output and --run.init_from {last.parent / 'checkpoint'}"
        )
    ours, theirs = dataclasses.asdict(config), state["config"]
    for section, keys in (("model", None), ("adversarial", ("kinds", "channels")), ("optim", ("parts", "balance"))):
        for key in keys or ours[section]:
            if ours[section][key] != theirs[section].get(key):
                raise ConfigError(
                    f"{last} is of another run: {section}.{key} is {theirs[section].get(key)!r} there and "
                    f"{ours[section][key]!r} here; give another run.output (and --run.init_from to start from its "
                    "weights), or remove it"
                )
    return int(state["global_step"])
