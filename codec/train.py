"""Training: one YAML file in, a checkpoint folder out. `codec train recipes/speech_16k.yaml` runs this."""

from __future__ import annotations

import copy
import dataclasses
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, RichProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.nn import functional as F

from codec.audio import find_audio, read_audio
from codec.errors import ConfigError, TrainingError
from codec.excerpts import Choice, Distribution, RandomExcerpts, Uniform
from codec.features import MelSettings, MelSpectrogram
from codec.frames import seconds_to_samples
from codec.model import SoundStream, SoundStreamConfig
from codec.nn.losses import SpectralLosses, mel_head_l1, waveform_l1
from codec.sources import AudioFiles

EQ_BANDS = 6
KMEANS_BATCHES = 20


@dataclass(frozen=True)
class DataConfig:
    """What is trained and validated on.

    Attributes:
        train: Files and folders, relative to where the command runs.
        weights: Beginning of a key → how many times as often as by duration its excerpts are drawn (1 if not named).
        valid: Files and folders; whole files, never augmented.
        segment_seconds: Length of a training excerpt.
        batch_size: Excerpts per step.
        num_workers: Loader processes; the batches are the same for any number.
        seed: Of every draw.
        max_valid_files: Validation uses this many files, evenly spread over the list.
    """

    train: tuple[str, ...] = ()
    weights: dict[str, int] = field(default_factory=dict)
    valid: tuple[str, ...] = ()
    segment_seconds: float = 1.0
    batch_size: int = 8
    num_workers: int = 0
    seed: int = 0
    max_valid_files: int = 24


@dataclass(frozen=True)
class AugmentConfig:
    """Ranges of what happens to a training excerpt. 0 or an empty range switches a kind off.

    Attributes:
        gain_db: (low, high) of the level change.
        speed: Highest ratio of a change of speed and pitch, drawn from 1/speed…speed.
        speed_share: Part of the excerpts whose speed changes.
        eq_db: Largest boost or cut of a random smooth equaliser.
        eq_share: Part of the excerpts that are equalised.
        band_limit_share: Part of the excerpts that are low-passed between a quarter and all of the band.
    """

    gain_db: tuple[float, float] = (-18.0, 6.0)
    speed: float = 1.15
    speed_share: float = 0.5
    eq_db: float = 10.0
    eq_share: float = 0.3
    band_limit_share: float = 0.1


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, the schedule and the weights of the losses.

    Attributes:
        max_steps: Length of the training.
        learning_rate: AdamW's, after warm-up.
        betas: AdamW's.
        weight_decay: AdamW's.
        gradient_clip: Norm to which gradients are clipped.
        warmup_steps: Linear rise of the learning rate.
        decay_share: Last part of the training over which the learning rate falls to 2 %.
        average_decay: Decay of the moving average of the weights: what is validated and exported.
        quantize_from: Steps without quantizer, after which the codebooks are initialised by k-means.
        full_share: Quantizer dropout: part of the examples that use all codebooks.
        half_share: Part that uses half of them; the rest any number.
        waveform_weight: Of mean|y - x| / mean|x|.
        mel_weight: Of the multi-resolution log-mel L1.
        complex_weight: Of the compressed complex STFT L1.
        commitment_weight: Of the commitment loss.
        mel_head_weight: Of the mel head's log-mel L1.
    """

    max_steps: int = 10000
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.01
    gradient_clip: float = 1.0
    warmup_steps: int = 100
    decay_share: float = 0.3
    average_decay: float = 0.9985
    quantize_from: int = 150
    full_share: float = 0.5
    half_share: float = 0.2
    waveform_weight: float = 1.0
    mel_weight: float = 1.0
    complex_weight: float = 1.0
    commitment_weight: float = 0.25
    mel_head_weight: float = 0.25


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives and how Lightning drives it.

    Attributes:
        output: Folder for logs, `last.ckpt` and the exported `checkpoint/`.
        precision: Lightning's: "bf16-mixed" or "32-true". The quantizer and the losses are float32 in both.
        accelerator: Lightning's.
        devices: Lightning's.
        threads: CPU threads of torch; 0 leaves torch's default.
        valid_every: Steps between validations.
        checkpoint_minutes: Minutes between writes of `last.ckpt`.
        log_every: Steps between lines of `logs/from_step_N/metrics.csv`.
    """

    output: str = "runs/soundstream"
    precision: str = "bf16-mixed"
    accelerator: str = "auto"
    devices: int | str = "auto"
    threads: int = 0
    valid_every: int = 1000
    checkpoint_minutes: float = 3.0
    log_every: int = 50


@dataclass(frozen=True)
class TrainConfig:
    """A recipe: the sections of the YAML file."""

    model: SoundStreamConfig = field(default_factory=SoundStreamConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)


def load_config(path: str | os.PathLike[str], overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """Reads a recipe.

    Args:
        path: YAML with the sections of `TrainConfig`; what is left out keeps its default.
        overrides: `{"optim.max_steps": "100"}`; values are read as YAML.

    Raises:
        ConfigError: The file is missing or isn't YAML, a key doesn't exist, a value has the wrong type.
    """
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give a recipe such as recipes/speech_16k.yaml"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(document).__name__}")
    sections = {f.name: typing.get_type_hints(TrainConfig)[f.name] for f in dataclasses.fields(TrainConfig)}
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        document.setdefault(section, {})
        document[section] = {**(document[section] or {}), key: yaml.safe_load(text)}
    unknown = sorted(set(document) - set(sections))
    if unknown:
        raise ConfigError(f"{path}: unknown sections {unknown}; known: {', '.join(sections)}")
    return TrainConfig(
        **{name: _section(path, name, kind, document.get(name) or {}) for name, kind in sections.items()}
    )


def _section(path: str | os.PathLike[str], name: str, kind: type, values: Any) -> Any:
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: section {name!r} must be a mapping, not {values!r}")
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{path}: unknown key {name}.{key}; known: {', '.join(hints)}")
        values[key] = _coerce(f"{path}: {name}.{key}", hints[key], value)
    return kind(**values)


def _coerce(where: str, hint: Any, value: Any) -> Any:
    """Checks a YAML value against a field's type; ints pass as floats, lists become tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is float and isinstance(value, int | str) and not isinstance(value, bool):
        try:  # YAML reads 1e-3 as a string
            return float(value)
        except ValueError:
            pass
    elif origin is tuple:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, list | tuple):
            kinds = [args[0]] * len(values) if args[-1] is Ellipsis else list(args)
            if len(kinds) == len(values):
                return tuple(_coerce(where, kind, item) for kind, item in zip(kinds, values, strict=True))
    elif origin is dict:
        if isinstance(value, dict):
            return value
    else:
        allowed: tuple[type, ...] = args or (hint,)
        if isinstance(value, allowed) and (bool in allowed or not isinstance(value, bool)):
            return value
    raise ConfigError(f"{where} is {value!r}; it must be {getattr(hint, '__name__', hint)}")


def augmentations(config: AugmentConfig) -> dict[str, Distribution]:
    """The named random values that travel with each excerpt."""
    rngs: dict[str, Distribution] = {
        "gain_db": Uniform(*config.gain_db),
        "sign": Choice((-1.0, 1.0)),
        "level_draw": Uniform(0.0, 1.0),
    }
    if config.speed > 1 and config.speed_share:
        rngs["speed_on"] = Choice((0.0, 1.0), (1 - config.speed_share, config.speed_share))
        rngs["speed"] = Uniform(1 / config.speed, config.speed)
    if config.eq_db and config.eq_share:
        rngs["eq_on"] = Choice((0.0, 1.0), (1 - config.eq_share, config.eq_share))
        rngs |= {f"eq_{band}": Uniform(-config.eq_db, config.eq_db) for band in range(EQ_BANDS)}
    if config.band_limit_share:
        rngs["band_limit_on"] = Choice((0.0, 1.0), (1 - config.band_limit_share, config.band_limit_share))
        rngs["band_limit"] = Uniform(0.25, 1.0)
    return rngs


def augment(batch: Mapping[str, Any], num_samples: int) -> Tensor:
    """Applies the batch's named values: `batch["x"]` `[B, 1, N']` → `[B, 1, num_samples]`."""
    wave: Tensor = batch["x"]
    if "speed" in batch:
        speed = torch.where(batch["speed_on"] > 0, batch["speed"], 1.0)
        wave = change_speed(wave, speed, num_samples)
    wave = wave[..., :num_samples]
    curve_db = torch.zeros(len(wave), num_samples // 2 + 1, device=wave.device)
    position = torch.linspace(0, 1, curve_db.shape[1], device=wave.device)
    if "eq_on" in batch:
        points = torch.stack([batch[f"eq_{band}"] for band in range(EQ_BANDS)], 1)
        # Bands are even steps on the square root of frequency: between linear and logarithmic.
        curve = F.interpolate(points[:, None], size=1024, mode="linear", align_corners=True)[:, 0]
        curve_db = curve_db + batch["eq_on"][:, None] * curve[:, (position.sqrt() * 1023).long()]
    if "band_limit_on" in batch:
        over = (position - batch["band_limit"][:, None]).clamp(min=0)
        curve_db = curve_db - batch["band_limit_on"][:, None] * over * 2000
    if "eq_on" in batch or "band_limit_on" in batch:
        shaped = torch.fft.rfft(wave[:, 0]) * (10 ** (curve_db.clamp(min=-120) / 20))
        wave = torch.fft.irfft(shaped, n=num_samples)[:, None]
    gain = 10 ** (batch["gain_db"] / 20) * batch["sign"]
    wave = wave * gain[:, None, None]
    peak = wave.abs().amax((1, 2), keepdim=True)
    return wave / peak.clamp(min=1.0)


def change_speed(wave: Tensor, speed: Tensor, num_samples: int, *, taps: int = 16) -> Tensor:
    """Plays each row at its own speed by windowed-sinc interpolation.

    Args:
        wave: `[B, 1, N]`.
        speed: `[B]`, 1.1 is faster and higher.
        num_samples: Samples to return; what lies beyond the row's end is zero.
        taps: Interpolation kernel size, even.
    """
    at = torch.arange(num_samples, device=wave.device) * speed[:, None].double()
    base = at.floor().long()
    offsets = torch.arange(1 - taps // 2, 1 + taps // 2, device=wave.device)
    distance = (offsets - (at - base)[..., None]).float()
    cutoff = (1 / speed).clamp(max=1.0)[:, None, None]
    kernel = cutoff * torch.sinc(cutoff * distance) * torch.cos(distance * (torch.pi / taps)).square()
    half = taps // 2
    index = (base[..., None] + offsets + half).clamp(0, wave.shape[-1] + 2 * half - 1)
    padded = F.pad(wave[:, 0], (half, half))
    samples = padded.gather(1, index.flatten(1)).view(index.shape)
    return (samples * kernel).sum(-1)[:, None]


class CodecTraining(L.LightningModule):
    """Joint training of encoder, codebooks, decoder and mel head on reconstruction losses."""

    quantizing: Tensor

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.config = config
        self.model = SoundStream(config.model)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.spectral = SpectralLosses(config.model.sample_rate)
        self.mel = MelSpectrogram(MelSettings.from_dict(config.model.mel))
        self._num_samples = seconds_to_samples(config.data.segment_seconds, config.model.sample_rate)
        self._latents: list[Tensor] = []
        self.register_buffer("quantizing", torch.tensor(False))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """One batch: augment, pass, losses."""
        optim = self.config.optim
        # All randomness left (k-means, restarted entries) follows from the step, so that a resumed run is the same run.
        torch.manual_seed(self.config.data.seed * 2**32 + self.global_step)
        wave = augment(batch, self._num_samples)
        if not self.quantizing and self.global_step >= optim.quantize_from:
            self._start_quantizing()
        levels = _levels(batch["level_draw"], self.config) if self.quantizing else None
        decoded, mel, quantized, latents = self.model(wave, levels)
        if levels is None:
            self._latents = [*self._latents, latents.detach()][-KMEANS_BATCHES:]
        with torch.autocast(wave.device.type, enabled=False):
            mel_term, complex_term = self.spectral(decoded, wave)
            terms = {
                "waveform": optim.waveform_weight * waveform_l1(decoded, wave),
                "mel": optim.mel_weight * mel_term,
                "complex": optim.complex_weight * complex_term,
                "mel_head": optim.mel_head_weight * mel_head_l1(mel, self.mel(wave)),
            }
            if quantized is not None:
                terms["commitment"] = optim.commitment_weight * quantized.commitment
            loss = torch.stack(list(terms.values())).sum()
        if not bool(torch.isfinite(loss)):
            values = {name: value.item() for name, value in terms.items()}
            excerpts = list(zip(batch["key"], batch["start"].tolist(), strict=True))
            raise TrainingError(
                f"loss is {loss.item()} at step {self.global_step} ({values}) on excerpts {excerpts}; "
                "lower optim.learning_rate or look at these files"
            )
        if self.global_step % self.config.run.log_every == 0:
            logged = {f"train/{name}": value.detach() for name, value in terms.items()}
            if quantized is not None:
                logged |= _usage(quantized.codes, self.config.model.codebook_size)
            self.log_dict(logged)
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss

    def _start_quantizing(self) -> None:
        latents = torch.cat(self._latents).flatten(0, 1)
        size = self.config.model.codebook_size
        if len(latents) < size:
            raise TrainingError(
                f"{len(latents)} latent frames for k-means of {size} entries; raise optim.quantize_from, "
                "data.batch_size or data.segment_seconds"
            )
        self.model.quantizer.initialise(latents)
        self.average.quantizer.codebooks.copy_(self.model.quantizer.codebooks)
        self.quantizing = torch.ones_like(self.quantizing)
        self._latents = []

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Steps, then moves the average of the weights: before Lightning can save a checkpoint of this step."""
        super().optimizer_step(*args, **kwargs)
        # A short memory at first, or the average would still hold the random start.
        decay = min(self.config.optim.average_decay, self.global_step / (self.global_step + 10))
        ours, theirs = ([p.detach() for p in model.parameters()] for model in (self.average, self.model))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        # The codebooks too, or the averaged encoder would be read against newer entries than its own.
        self.average.quantizer.codebooks.lerp_(self.model.quantizer.codebooks, 1 - decay)

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Whole files through the averaged weights, at all codebooks and at half."""
        wave = batch["x"]
        for label, levels in (("full", None), ("half", max(1, self.config.model.n_quantizers // 2))):
            codes = self.average.encode(wave, n_quantizers=levels)
            decoded = self.average.decode(codes)
            target = self.mel(wave)
            self.log(f"valid/{label}_mel", mel_head_l1(self.mel(decoded), target), batch_size=1)
            self.log(f"valid/{label}_mel_head", mel_head_l1(self.average.decode_mel(codes), target), batch_size=1)
            self.log(f"valid/{label}_waveform", waveform_l1(decoded, wave), batch_size=1)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW; warm-up, constant, linear decay."""
        optim = self.config.optim
        optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optim.learning_rate,
            betas=optim.betas,
            weight_decay=optim.weight_decay,
            foreach=True,
        )
        decay_steps = max(1, round(optim.max_steps * optim.decay_share))

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(1, optim.warmup_steps))
            fall = min(1.0, (optim.max_steps - step) / decay_steps)
            return min(rise, max(fall, 0.02))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _levels(draw: Tensor, config: TrainConfig) -> Tensor:
    """Quantizer dropout: uniform numbers `[B]` → levels int64 `[B]`."""
    total, optim = config.model.n_quantizers, config.optim
    rest = 1 - optim.full_share - optim.half_share
    share = (draw - optim.full_share - optim.half_share) / max(rest, 1e-9)
    levels = (share * total).floor().clamp(0, total - 1).long() + 1
    levels = torch.where(draw < optim.full_share + optim.half_share, max(1, total // 2), levels)
    return torch.where(draw < optim.full_share, total, levels)


def _usage(codes: Tensor, codebook_size: int) -> dict[str, Tensor]:
    """Perplexity of the first and the last codebook within the batch."""
    values = {}
    for level in (0, codes.shape[1] - 1):
        share = torch.bincount(codes[:, level].flatten(), minlength=codebook_size).float()
        share = share / share.sum()
        values[f"train/perplexity_{level}"] = (-(share * share.clamp(min=1e-9).log()).sum()).exp()
    return values


class _WholeFiles(torch.utils.data.Dataset[dict[str, Any]]):
    """Files as batches of one, resampled to the model's rate."""

    def __init__(self, paths: Sequence[Path], sample_rate: int) -> None:
        self._paths = list(paths)
        self._sample_rate = sample_rate

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        wave, _ = read_audio(self._paths[index], sample_rate=self._sample_rate, mono=True)
        return {"x": wave[None]}


class _Export(Callback):
    """Writes the averaged weights as a checkpoint folder whenever Lightning saves, and at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        assert isinstance(pl_module, CodecTraining)
        if trainer.is_global_zero and bool(pl_module.quantizing):
            pl_module.average.save(self._folder)


def _consumed_batches(last: Path) -> int:
    """Training batches that an interrupted run has used: one per step."""
    if not last.exists():
        return 0
    state = torch.load(last, map_location="cpu", weights_only=False, mmap=True)
    return int(state["global_step"])


def train(config: TrainConfig, *, resume: bool = True, progress: bool = True) -> Path:
    """Trains a codec; resumes from `output/last.ckpt` if that is there.

    Args:
        config: See `load_config`.
        resume: Go on from `last.ckpt`; otherwise an existing one is an error.
        progress: Show a progress bar.

    Returns:
        The exported checkpoint folder, `output/checkpoint`, ready for `load_codec`.

    Raises:
        ConfigError: A setting that can't work.
        TrainingError: No training audio, files all shorter than the segment, a non-finite loss.
    """
    output = Path(config.run.output)
    last = output / "last.ckpt"
    if last.exists() and not resume:
        raise ConfigError(f"{last} exists; resume it, remove it, or give another run.output")
    if not config.data.train or not config.data.valid:
        raise ConfigError("data.train and data.valid are empty; name at least one file or folder in each")
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    L.seed_everything(config.data.seed, verbose=False)
    module = CodecTraining(config)
    rngs = augmentations(config.augment)
    # A sped-up excerpt reads more than it returns.
    stretch = config.augment.speed if "speed" in rngs else 1.0
    rate = config.model.sample_rate
    num_samples = seconds_to_samples(config.data.segment_seconds, rate)
    excerpts = RandomExcerpts(
        {"x": AudioFiles(list(config.data.train), sample_rate=rate)},
        f"{-(-num_samples * round(stretch * 1000) // 1000)}/{rate}",
        batch_size=config.data.batch_size,
        seed=config.data.seed,
        short="pad",
        items=lambda key: next((w for start, w in config.data.weights.items() if key.startswith(start)), 1),
        rngs=rngs,
    )
    valid = [path for _, path in find_audio(list(config.data.valid))]
    stride = -(-len(valid) // config.data.max_valid_files)
    start = _consumed_batches(last)
    trainer = L.Trainer(
        accelerator=config.run.accelerator,
        devices=config.run.devices,
        precision=config.run.precision,  # type: ignore[arg-type]
        max_steps=config.optim.max_steps,
        gradient_clip_val=config.optim.gradient_clip,
        val_check_interval=config.run.valid_every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=config.run.log_every,
        logger=CSVLogger(output, name="logs", version=f"from_step_{start}"),
        default_root_dir=output,
        enable_progress_bar=progress,
        enable_model_summary=False,
        callbacks=[
            ModelCheckpoint(
                output,
                filename="last",
                train_time_interval=timedelta(minutes=config.run.checkpoint_minutes),
                save_on_train_epoch_end=False,
                enable_version_counter=False,
            ),
            _Export(output / "checkpoint"),
            *([RichProgressBar()] if progress else []),
        ],
    )
    trainer.fit(
        module,
        excerpts.loader(start_batch=start, num_workers=config.data.num_workers),
        torch.utils.data.DataLoader(_WholeFiles(valid[::stride], rate), batch_size=None),
        ckpt_path=last if last.exists() else None,
        weights_only=False,
    )
    trainer.save_checkpoint(last)
    return output / "checkpoint"
