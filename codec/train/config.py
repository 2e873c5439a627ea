"""Recipes: the sections of a training's YAML file, read and checked."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from codec.errors import ConfigError
from codec.frames import seconds_to_samples
from codec.model import SoundStreamConfig
from codec.nn.discriminators import DISCRIMINATORS

KMEANS_BATCHES = 20
"""Batches before `optim.quantize_from` whose latents the codebooks are initialised on, at most."""

POSITIVE = math.nextafter(0.0, 1.0)


def _within(section: str, values: Any, **limits: tuple[float, float]) -> None:
    """Raises `ConfigError` for the first value outside its closed range."""
    for name, (low, high) in limits.items():
        value = getattr(values, name)
        if not low <= value <= high and not math.isnan(value):  # NaN weights are for the tests of the NaN guard
            least = "above 0" if low == POSITIVE else f"from {low:g}"
            most = "" if high == math.inf else f"{' and at most' if low == POSITIVE else ' to'} {high:g}"
            raise ConfigError(f"{section}.{name} is {value!r}; it must be {least}{most or ' on'}")


@dataclass(frozen=True)
class DataConfig:
    """What is trained and validated on.

    Attributes:
        train: Files and folders, relative to where the command runs. Read by excerpts as the training goes: a corpus
            may be bigger than memory.
        weights: Beginning of a key → how many times as often as by duration its excerpts are drawn (1 if not named).
        noise: Files and folders of noise; what is mixed in with `augment.noise_share` is drawn from there, or is
            synthetic if none is given.
        valid: Files and folders; whole files, never augmented.
        segment_seconds: Length of a training excerpt, a whole number of codec frames.
        batch_size: Excerpts per step and process.
        num_workers: Loader processes; the batches are the same for any number.
        seed: Of every draw.
        max_valid_files: Validation uses this many files, evenly spread over the list.
    """

    train: tuple[str, ...] = ()
    weights: dict[str, int] = field(default_factory=dict)
    noise: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    segment_seconds: float = 1.0
    batch_size: int = 8
    num_workers: int = 0
    seed: int = 0
    max_valid_files: int = 24

    def __post_init__(self) -> None:
        _within("data", self, segment_seconds=(POSITIVE, math.inf), batch_size=(1, math.inf))
        _within("data", self, num_workers=(0, math.inf), max_valid_files=(1, math.inf), seed=(0, 2**64 - 1))


@dataclass(frozen=True)
class AugmentConfig:
    """What happens to a training excerpt, in this order. A share is the part of the excerpts that it happens to.

    Attributes:
        speed: Highest ratio of a change of speed and pitch, drawn from 1/speed…speed.
        speed_share: Its share.
        room_seconds: (shortest, longest) reverberation time (−60 dB) of a synthetic room.
        room_share: Its share.
        mix_snr_db: (low, high) of the level above that of a second excerpt, which is mixed in.
        mix_share: Its share.
        eq_db: Largest boost or cut of a random smooth equaliser.
        eq_share: Its share.
        band_limit_share: Share that is low-passed between a quarter and all of the band.
        noise_snr_db: (low, high) of the level above that of noise, which is added: from `data.noise`, or synthetic
            with a spectral slope between that of white noise and −12 dB per octave.
        noise_share: Its share. A model with `denoise` learns to remove it where its flag is set, and to keep it
            elsewhere.
        denoise_share: Share whose flag is set, with such a model.
        gain_db: (low, high) of the level change; what would exceed full scale is lowered to it. The sign changes in
            half of the excerpts.
    """

    speed: float = 1.15
    speed_share: float = 0.5
    room_seconds: tuple[float, float] = (0.1, 0.6)
    room_share: float = 0.0
    mix_snr_db: tuple[float, float] = (0.0, 20.0)
    mix_share: float = 0.0
    eq_db: float = 10.0
    eq_share: float = 0.3
    band_limit_share: float = 0.1
    noise_snr_db: tuple[float, float] = (-5.0, 30.0)
    noise_share: float = 0.0
    denoise_share: float = 0.5
    gain_db: tuple[float, float] = (-18.0, 6.0)

    def __post_init__(self) -> None:
        shares = [f.name for f in dataclasses.fields(self) if f.name.endswith("_share")]
        _within("augment", self, speed=(1, 2), eq_db=(0, 60), **dict.fromkeys(shares, (0.0, 1.0)))
        for name in ("room_seconds", "mix_snr_db", "noise_snr_db", "gain_db"):
            low, high = getattr(self, name)
            if low > high or (name == "room_seconds" and low <= 0):
                raise ConfigError(f"augment.{name} is {[low, high]}; it must be [low, high] with low ≤ high")


@dataclass(frozen=True)
class OptimConfig:
    """The optimiser, the schedule and the weights of the losses.

    Attributes:
        max_steps: Length of the training.
        parts: What is trained: "all"; "decoder", which leaves the codes as they are; or "mel_head", which leaves the
            wave as it is, too. The other two start from `run.init_from`.
        learning_rate: AdamW's, after warm-up.
        matrix_learning_rate: Muon's, after warm-up: it trains the weights of linear layers, but for the mel head's,
            AdamW all else (and all of the SEANet body). Such steps are dearer and lead further.
        betas: AdamW's.
        weight_decay: Of both.
        gradient_clip: Norm to which gradients are clipped.
        warmup_steps: Linear rise of the learning rate.
        decay_share: Last part of the training over which the learning rate falls to 2 %.
        average_decay: Decay of the moving average of the weights: what is validated and exported.
        quantize_from: Steps without quantizer, after which the codebooks are initialised by k-means. A training that
            starts from a checkpoint quantizes from the first step.
        full_share: Quantizer dropout: part of the examples that use all codebooks.
        half_share: Part that uses half of them; the rest any number.
        waveform_weight: Of mean|y - x| / mean|x|.
        mel_weight: Of the multi-resolution log-mel L1.
        complex_weight: Of the compressed complex STFT L1.
        commitment_weight: Of the commitment loss.
        mel_head_weight: Of the mel head's log-mel L1.
        balance: The weights of what is asked of the wave (waveform, mel, complex, adversarial, feature) are shares of
            its gradient instead of factors of the losses.
    """

    max_steps: int = 10000
    parts: Literal["all", "decoder", "mel_head"] = "all"
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 3e-3
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
    balance: bool = False

    def __post_init__(self) -> None:
        weights = {f.name: (0.0, math.inf) for f in dataclasses.fields(self) if f.name.endswith("_weight")}
        _within("optim", self, max_steps=(1, math.inf), learning_rate=(POSITIVE, math.inf), weight_decay=(0, math.inf))
        _within("optim", self, matrix_learning_rate=(POSITIVE, math.inf))
        _within("optim", self, gradient_clip=(POSITIVE, math.inf), warmup_steps=(0, math.inf), decay_share=(0, 1))
        _within("optim", self, average_decay=(0, 1), quantize_from=(0, math.inf), full_share=(0, 1), **weights)
        _within("optim", self, half_share=(0, 1 - self.full_share))


@dataclass(frozen=True)
class AdversarialConfig:
    """The discriminators, which are trained beside the codec by an optimiser of their own.

    Attributes:
        kinds: "stft" and "wave" are the SoundStream paper's, "multi_stft" is EnCodec's; none: no discriminators.
        channels: Their width.
        start_step: Step from which they are trained.
        lead_steps: Steps for which they are trained before the codec hears of them.
        every: They are trained at every n-th step.
        learning_rate: AdamW's, constant.
        betas: AdamW's.
        adversarial_weight: Of the hinge loss.
        feature_weight: Of feature matching: mean |Δ| / mean | | over the discriminators' layers.
    """

    kinds: tuple[str, ...] = ()
    channels: int = 32
    start_step: int = 0
    lead_steps: int = 200
    every: int = 1
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.5, 0.9)
    adversarial_weight: float = 0.1
    feature_weight: float = 0.5

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds) - set(DISCRIMINATORS))
        if unknown:
            raise ConfigError(f"adversarial.kinds has {unknown}; there are {', '.join(DISCRIMINATORS)}")
        if self.channels < 4 or self.channels % 4:
            raise ConfigError(f"adversarial.channels is {self.channels}; it must be a multiple of 4")
        _within("adversarial", self, start_step=(0, math.inf), lead_steps=(0, math.inf), every=(1, math.inf))
        _within("adversarial", self, learning_rate=(POSITIVE, math.inf), adversarial_weight=(0, math.inf))
        _within("adversarial", self, feature_weight=(0, math.inf))

    @property
    def from_step(self) -> int:
        """Step from which the codec's loss has the adversarial terms."""
        return self.start_step + self.lead_steps


@dataclass(frozen=True)
class TrainerConfig:
    """What Lightning's Trainer gets.

    Attributes:
        accelerator: "auto", "cpu", "gpu" …
        devices: Processes, one per device: a number, or "auto" for every GPU there is.
        num_nodes: Machines.
        precision: "bf16-mixed" or "32-true". The quantizer and the losses are float32 in both.
    """

    accelerator: str = "auto"
    devices: int | str = "auto"
    num_nodes: int = 1
    precision: Literal["bf16-mixed", "32-true"] = "bf16-mixed"


@dataclass(frozen=True)
class RunConfig:
    """Where the run lives.

    Attributes:
        output: Folder for logs, `last.ckpt` and the exported checkpoints: `checkpoint/` is the best by validation,
            `checkpoint_last/` the latest.
        init_from: A checkpoint, by name or folder, whose weights a new run starts from.
        threads: CPU threads of torch; 0 leaves torch's default.
        compile: Compile the spectral losses (`torch.compile`): they take half the time, after a minute at the start.
            On a CPU it needs a C++ compiler.
        valid_every: Steps between validations.
        checkpoint_minutes: Minutes between writes of `last.ckpt`.
        log_every: Steps between lines of `logs/from_step_N/metrics.csv`.
    """

    output: str = "runs/soundstream"
    init_from: str = ""
    threads: int = 0
    compile: bool = False
    valid_every: int = 1000
    checkpoint_minutes: float = 3.0
    log_every: int = 50

    def __post_init__(self) -> None:
        _within("run", self, threads=(0, math.inf), valid_every=(1, math.inf), log_every=(1, math.inf))


@dataclass(frozen=True)
class TrainConfig:
    """A recipe: the sections of the YAML file."""

    model: SoundStreamConfig = field(default_factory=SoundStreamConfig)
    data: DataConfig = field(default_factory=DataConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    adversarial: AdversarialConfig = field(default_factory=AdversarialConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        rate, hop = self.model.sample_rate, self.model.hop_length
        if (given := self.model.mel.get("sample_rate", rate)) != rate:
            raise ConfigError(f"model.mel.sample_rate is {given} Hz, model.sample_rate {rate} Hz; make them the same")
        if self.num_samples % hop or not self.num_samples:
            frames = max(1, round(self.num_samples / hop))
            raise ConfigError(
                f"data.segment_seconds {self.data.segment_seconds:g} is {self.num_samples / hop:.2f} frames of {hop} "
                f"samples; it must be a whole number: {frames * hop / rate:g} is {frames}"
            )
        if self.augment.mix_share and self.data.batch_size < 2:
            raise ConfigError("augment.mix_share mixes excerpts of one batch; set data.batch_size to at least 2")
        if self.optim.parts != "all" and not self.run.init_from:
            raise ConfigError(
                f"optim.parts {self.optim.parts!r} trains a part of a trained codec; name that in run.init_from"
            )
        latents = min(KMEANS_BATCHES, self.optim.quantize_from) * self.data.batch_size * (self.num_samples // hop)
        if not self.run.init_from and latents < self.model.codebook_size:
            raise ConfigError(
                f"{latents} latent frames for k-means of {self.model.codebook_size} entries; raise "
                "optim.quantize_from, data.batch_size or data.segment_seconds"
            )
        if self.optim.parts == "mel_head" and self.adversarial.kinds:
            raise ConfigError("optim.parts 'mel_head' leaves the wave as it is; empty adversarial.kinds")

    @property
    def num_samples(self) -> int:
        """Samples of a training excerpt."""
        return seconds_to_samples(self.data.segment_seconds, self.model.sample_rate)


def load_config(path: str | os.PathLike[str], overrides: Mapping[str, str] | None = None) -> TrainConfig:
    """Reads a recipe.

    Args:
        path: YAML with the sections of `TrainConfig`; what is left out keeps its default.
        overrides: `{"optim.max_steps": "100"}`; values are read as YAML.

    Raises:
        ConfigError: The file is missing or isn't YAML, a key doesn't exist, a value has the wrong type or range.
    """
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ConfigError(
            f"{path}: can't be read ({error.strerror}); give a recipe such as recipes/speech_16k.yaml"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: must be a mapping of sections, not {type(document).__name__}")
    hints = typing.get_type_hints(TrainConfig)
    sections = {f.name: hints[f.name] for f in dataclasses.fields(TrainConfig)}
    values: dict[Any, Any] = {name: value or {} for name, value in document.items()}
    for name, text in (overrides or {}).items():
        section, _, key = name.partition(".")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--{name} {text!r} is not valid YAML: {error}") from error
        if not isinstance(values.setdefault(section, {}), dict):
            break  # refused below
        values[section] = {**values[section], key: value}
    unknown = sorted(map(str, set(values) - set(sections)))
    if unknown:
        raise ConfigError(f"{path}: unknown sections {unknown}; known: {', '.join(sections)}")
    return TrainConfig(**{name: _section(path, name, kind, values.get(name, {})) for name, kind in sections.items()})


def _section(path: str | os.PathLike[str], name: str, kind: type, values: Any) -> Any:
    hints = typing.get_type_hints(kind)
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: section {name!r} must be a mapping, not {values!r}")
    for key in values:
        if key not in hints:
            raise ConfigError(f"{path}: unknown key {name}.{key}; known: {', '.join(hints)}")
    return kind(**{key: _coerce(f"{path}: {name}.{key}", hints[key], value) for key, value in values.items()})


def _coerce(where: str, hint: Any, value: Any) -> Any:
    """Checks a YAML value against a field's type; ints pass as floats, lists become tuples."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in args:
            return value
        raise ConfigError(f"{where} is {value!r}; it must be one of {', '.join(map(repr, args))}")
    if origin in (typing.Union, types.UnionType):
        for kind in args:
            try:
                return _coerce(where, kind, value)
            except ConfigError:
                continue
    elif hint is float and isinstance(value, int | float | str) and not isinstance(value, bool):
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
    elif isinstance(value, origin or hint) and (hint is bool or not isinstance(value, bool)):
        return value
    raise ConfigError(f"{where} is {value!r}; it must be {getattr(hint, '__name__', hint)}")
