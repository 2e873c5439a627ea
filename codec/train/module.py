"""One training step, one validation: the Lightning module."""

from __future__ import annotations

import copy
import dataclasses
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import torch
import torch.distributed
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn

from codec.errors import ConfigError, TrainingError
from codec.features import MelSettings, MelSpectrogram
from codec.loading import load_codec
from codec.model import SoundStream
from codec.nn.discriminators import Discriminators
from codec.nn.linear import Linear
from codec.nn.losses import (
    LossBalancer,
    SpectralLosses,
    adversarial_hinge,
    discriminator_hinge,
    feature_matching,
    mel_head_l1,
    waveform_l1,
)
from codec.nn.rvq import CodebookUsage, codebook_usage
from codec.train.augment import Augmented, at_snr, augment, coloured_noise
from codec.train.config import KMEANS_BATCHES, TrainConfig

WAVE_TERMS = ("waveform", "mel", "complex", "adversarial", "feature")
"""Losses that are functions of the decoded wave alone: those that can be balanced."""
VALID_SNR_DB = 5.0
"""Of the noise, falling by 6 dB per octave, that a model which can denoise is validated on."""
LISTENED = 4
"""Validation files whose waves are kept for the logs."""


class CodecTraining(L.LightningModule):
    """Joint training of encoder, codebooks, decoder, mel head and, where configured, discriminators.

    The optimisers are stepped by hand; Lightning counts the codec's first one, so that `global_step` is the number of
    batches.

    Attributes:
        model: What is trained.
        average: The moving average of its weights: what is validated and exported.
        quantizing: Whether the codebooks are in use, which they aren't at first.
        timed: Called with the name of each part of a step, for a context around it.
        listened: (name, wave `[C, N]`, decoded `[C, N]`, mel of the mel head `[M, F]`) of the last validation.
        usage: How the last validation used the codebooks.
        codes: int64 `[1, K, T]`, those of all files of the last validation.
    """

    quantizing: Tensor
    usage: CodebookUsage

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.config = config
        if config.model.codes_of is not None:
            raise ConfigError(
                "model.codes_of is filled in by the training, where optim.parts leaves the codes as they are"
            )
        self.model = SoundStream(config.model)
        # Whether what is trained starts from random weights.
        self._starts_anew = not config.run.init_from
        if config.run.init_from:
            latents = config.data.batch_size * config.num_samples
            self._starts_anew = not start_from(
                self.model, config.run.init_from, parts=config.optim.parts, latents=latents
            )
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        _freeze(self.model, config.optim.parts)
        self.spectral = SpectralLosses(config.model.sample_rate)
        if config.run.compile:
            _need_compiler()
            self.spectral.compile()
        self.mel = MelSpectrogram(MelSettings.from_dict(config.model.mel))
        adversarial = config.adversarial
        self.discriminators = (
            Discriminators(adversarial.kinds, channels=config.model.channels, width=adversarial.channels)
            if adversarial.kinds
            else None
        )
        self.balancer = LossBalancer(WAVE_TERMS) if config.optim.balance else None
        self.register_buffer("quantizing", torch.tensor(bool(config.run.init_from)))
        self.timed: Callable[[str], AbstractContextManager[Any]] = lambda part: nullcontext()
        self.listened: list[tuple[str, Tensor, Tensor, Tensor]] = []
        self.codes = torch.zeros(1, config.model.n_quantizers, 0, dtype=torch.int64)
        self._latents: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """One batch: augment, pass, discriminators, losses, step. Returns the codec's loss."""
        step, optim, adversarial = self.global_step, self.config.optim, self.config.adversarial
        # All randomness left (k-means, restarted entries) follows from the step, so that a resumed run is the same run.
        torch.manual_seed((self.config.data.seed * 2**32 + step) % 2**63)
        with self.timed("augment"):
            data = augment(batch, self.config.num_samples, self.config.model.sample_rate)
        if not self.quantizing and step >= optim.quantize_from:
            self._start_quantizing()
        levels = _levels(batch["level_draw"], self.config) if self.quantizing else None
        with self.timed("forward"):
            decoded, mel, quantized, latents = self._pass(data, levels)
        if levels is None and step >= optim.quantize_from - KMEANS_BATCHES:
            everywhere: Any = self.all_gather(latents.detach())
            self._latents.append(everywhere.reshape(-1, latents.shape[-1]))
        judging = self.discriminators is not None and step >= adversarial.start_step
        terms: dict[str, Tensor] = {}
        if judging:
            with self.timed("discriminators"):
                if step % adversarial.every == 0:
                    terms["discriminator"] = self._train_discriminators(data.target, decoded.detach(), batch)
        with self.timed("losses"):
            terms |= self._losses(data.target, decoded, mel, judging and step >= adversarial.from_step)
            if quantized is not None and optim.parts == "all":
                terms["commitment"] = quantized.commitment
            loss = self._total(terms, decoded)
        self._guard(loss, terms, batch)
        with self.timed("backward"):
            self.manual_backward(loss)
        with self.timed("optimiser"):
            norm = self._step(terms, batch)
        if (step + 1) % self.config.run.log_every == 0:
            logged = {f"train/{name}": value.detach() for name, value in terms.items()}
            if quantized is not None:
                perplexity = codebook_usage(quantized.codes, self.config.model.codebook_size).perplexity
                logged |= {"train/perplexity_first": perplexity[0], "train/perplexity_last": perplexity[-1]}
            logged |= {"train/gradient_norm": norm, "train/replaced": batch["replaced"].float()}
            logged["train/learning_rate"] = torch.tensor(self.trainer.optimizers[0].param_groups[0]["lr"])
            # Not by Lightning, which counts from where a run was resumed and then writes at other steps.
            for logger in self.loggers:
                logger.log_metrics({name: float(value) for name, value in logged.items()}, self.global_step)
                logger.save()
        self.log("loss", loss.detach(), prog_bar=True, logger=False)
        return loss.detach()

    def _pass(self, data: Augmented, levels: Tensor | None) -> Any:
        if data.denoise is None:
            return self.model(data.wave, levels)
        return self.model(data.wave, levels, data.denoise)

    def _train_discriminators(self, target: Tensor, decoded: Tensor, batch: dict[str, Any]) -> Tensor:
        """One step of the discriminators' optimiser; returns their loss."""
        assert self.discriminators is not None
        real, fake = _split(self.discriminators(torch.cat([target, decoded])))
        loss = discriminator_hinge(real, fake)
        self._guard(loss, {"discriminator": loss}, batch)
        # Not Lightning's wrapper, which would count this step, too.
        optimizer = self.optimizers(use_pl_optimizer=False)[-1]  # type: ignore[index]
        self.manual_backward(loss)
        self._clip(self.discriminators.parameters(), {"discriminator": loss}, batch)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    def _losses(self, target: Tensor, decoded: Tensor, mel: Tensor, adversarial: bool) -> dict[str, Tensor]:
        """Unweighted losses by name."""
        terms: dict[str, Tensor] = {}
        if self.config.optim.parts != "mel_head":
            terms["waveform"] = waveform_l1(decoded, target)
            terms["mel"], terms["complex"] = self.spectral(decoded, target)
        if adversarial:
            assert self.discriminators is not None
            self.discriminators.requires_grad_(False)
            real, fake = _split(self.discriminators(torch.cat([target, decoded])))
            self.discriminators.requires_grad_(True)
            terms["adversarial"], terms["feature"] = adversarial_hinge(fake), feature_matching(real, fake)
        terms["mel_head"] = mel_head_l1(mel, self._mel_of(target))
        return terms

    def _mel_of(self, wave: Tensor) -> Tensor:
        """The mel that the mel head predicts: of the mono mix."""
        mel: Tensor = self.mel(wave.float().mean(1, keepdim=True))
        return mel

    def _weight(self, name: str) -> float:
        section = self.config.adversarial if name in ("adversarial", "feature") else self.config.optim
        weight: float = getattr(section, f"{name}_weight")
        return weight

    def _total(self, terms: dict[str, Tensor], decoded: Tensor) -> Tensor:
        """The codec's loss; with balanced losses, a number with the balanced gradient."""
        weights = {name: self._weight(name) for name in terms if name != "discriminator"}
        weights = {name: weight for name, weight in weights.items() if weight}
        if self.balancer is None:
            return torch.stack([weights[name] * terms[name].float() for name in weights]).sum()
        balanced = {name: weight for name, weight in weights.items() if name in WAVE_TERMS}
        total = sum(
            (weights[name] * terms[name].float() for name in weights if name not in balanced), decoded.sum() * 0
        )
        if balanced and decoded.requires_grad:
            gradient = self.balancer({name: terms[name] for name in balanced}, balanced, decoded)
            total = total + (decoded * gradient).sum()
        return total

    def _guard(self, loss: Tensor, terms: dict[str, Tensor], batch: dict[str, Any]) -> None:
        """Stops all processes if a number isn't finite in one of them."""
        finite = torch.isfinite(torch.stack([loss.detach(), *(v.detach() for v in terms.values())])).all()
        if self.trainer.world_size > 1:
            ours, finite = finite, finite.int()
            torch.distributed.all_reduce(finite, torch.distributed.ReduceOp.MIN)
            if ours and not finite:
                raise TrainingError(f"another process's loss isn't finite at step {self.global_step}; see its message")
        if not finite:
            self._stop(loss, terms, batch, "loss")

    def _stop(self, value: Tensor, terms: dict[str, Tensor], batch: dict[str, Any], what: str) -> NoReturn:
        values = {name: term.item() for name, term in terms.items()}
        excerpts = list(zip(batch["key"], batch["start"].tolist(), strict=True))
        raise TrainingError(
            f"{what} is {value.item()} at step {self.global_step} ({values}) on excerpts {excerpts} (file, first "
            f"sample); lower optim.learning_rate or look at these files. {self.config.run.output}/last.ckpt is from "
            "before"
        )

    def _clip(self, parameters: Iterable[nn.Parameter], terms: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        norm = nn.utils.clip_grad_norm_(parameters, self.config.optim.gradient_clip)
        if not torch.isfinite(norm):  # gradients are the same on all ranks
            self._stop(norm, terms, batch, "gradient norm")
        return norm

    def _step(self, terms: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
        """One step of the codec's optimiser, its schedule and the average; returns the gradient's norm."""
        norm = self._clip(self.model.parameters(), terms, batch)
        for index, schedule in enumerate(_listed(self.lr_schedulers())):
            # Lightning's wrapper, which counts, for the first alone.
            optimizer = _listed(self.optimizers(use_pl_optimizer=index == 0))[index]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
        decay = self.config.optim.average_decay
        if self._starts_anew:
            # A short memory at first, or the average would still hold the random start.
            decay = min(decay, self.global_step / (self.global_step + 10))
        ours, theirs = ([p.detach() for p in model.parameters()] for model in (self.average, self.model))
        torch._foreach_lerp_(ours, theirs, 1 - decay)
        # The codebooks too, or the averaged encoder would be read against newer entries than its own.
        self.average.quantizer.codebooks.lerp_(self.model.quantizer.codebooks, 1 - decay)
        return norm

    def _start_quantizing(self) -> None:
        # Kept from all ranks, so that any of them could save them; `initialise` joins the ranks' own.
        latents = torch.cat(self._latents[-KMEANS_BATCHES:])[self.global_rank :: self.trainer.world_size]
        self.model.quantizer.initialise(latents)
        self.average.quantizer.load_state_dict(self.model.quantizer.state_dict())
        self.quantizing = torch.ones_like(self.quantizing)
        self._latents = []

    def on_validation_start(self) -> None:
        """Forgets the last validation."""
        self.listened, self.codes = [], self.codes[..., :0]

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        """Whole files through the averaged weights, at all codebooks and at half."""
        wave = batch["x"]
        target = self._mel_of(wave)
        for label, levels in (("full", None), ("half", max(1, self.config.model.n_quantizers // 2))):
            codes = self.average.encode(wave, n_quantizers=levels)
            decoded, head = self.average.decode(codes), self.average.decode_mel(codes)
            values = {
                "mel": mel_head_l1(self._mel_of(decoded), target),
                "mel_head": mel_head_l1(head, target),
                "waveform": waveform_l1(decoded, wave),
            }
            self.log_dict({f"valid/{label}_{k}": v for k, v in values.items()}, batch_size=1, sync_dist=True)
            if label == "full":
                self.codes = torch.cat([self.codes.to(wave.device), codes.codes], -1)
                if len(self.listened) < LISTENED:
                    self.listened.append((batch["key"], *(x[0].float().cpu() for x in (wave, decoded, head))))

        if self.config.model.denoise:
            self._validate_denoising(wave, target)

    def _validate_denoising(self, wave: Tensor, target: Tensor) -> None:
        """Distance to the clean wave's mel from a noisy wave, with and without the flag."""
        values = {"noise_slope": 6.0, "noise_draw": 0.5}
        drawn = {name: torch.tensor([value], device=wave.device) for name, value in values.items()}
        noise = coloured_noise(drawn, wave.shape[1], wave.shape[2], self.config.model.sample_rate)
        noisy = wave + at_snr(wave, noise, torch.tensor([VALID_SNR_DB], device=wave.device))
        for label, flag in (("denoised", True), ("noisy", False)):
            decoded = self.average.decode(self.average.encode(noisy, denoise=flag))
            self.log(f"valid/{label}_mel", mel_head_l1(self._mel_of(decoded), target), batch_size=1, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Logs how the codebooks are used."""
        self.usage = codebook_usage(self.codes, self.config.model.codebook_size)
        self.log("step", float(self.global_step))  # Lightning's own count starts at 0, and errs after a resumed run
        self.log("valid/perplexity", self.usage.perplexity.mean())
        self.log("valid/used_share", self.usage.used_share.mean())

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Muon for the codec's matrices, AdamW for the rest of it and for the discriminators.

        The codec's learning rates rise, stay and fall; the discriminators' is constant.

        Muon: Jordan et al. 2024; the scale of its steps after Liu et al. 2025, "Muon is scalable for LLM training".
        """
        optim, adversarial = self.config.optim, self.config.adversarial
        matrices = [p for p in muon_matrices(self.model) if p.requires_grad]
        known = {id(p) for p in matrices}
        rest = [p for p in self.model.parameters() if p.requires_grad and id(p) not in known]
        decay = optim.weight_decay
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=optim.learning_rate, betas=optim.betas, weight_decay=decay, foreach=True)
        ]
        if matrices:
            rate = optim.matrix_learning_rate
            optimizers.append(torch.optim.Muon(matrices, rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"))
        decay_steps = max(1, round(optim.max_steps * optim.decay_share))

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / max(1, optim.warmup_steps))
            fall = min(1.0, (optim.max_steps - step) / decay_steps)
            return min(rise, max(fall, 0.02))

        schedules: Any = [
            {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, factor), "interval": "step"}
            for optimizer in optimizers
        ]
        if self.discriminators is not None:
            judges = self.discriminators.parameters()
            optimizers.append(
                torch.optim.AdamW(judges, lr=adversarial.learning_rate, betas=adversarial.betas, foreach=True)
            )
        return optimizers, schedules

    def phase(self) -> list[bool]:
        """Which losses have begun: a validation of one phase doesn't compare with one of another."""
        begun = self.discriminators is not None and self.global_step > self.config.adversarial.from_step
        return [bool(self.quantizing), begun]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adds what a resumed run needs besides weights."""
        checkpoint["config"] = dataclasses.asdict(self.config)
        checkpoint["latents"] = self._latents[-KMEANS_BATCHES:]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The counterpart."""
        self._latents = [latents.to(self.device) for latents in checkpoint["latents"]]


def muon_matrices(model: SoundStream) -> list[Tensor]:
    """Weights of the linear layers of encoder and decoder but for the mel head's."""
    return [layer.weight for name, layer in model.named_modules() if isinstance(layer, Linear) and ".mel" not in name]


def _need_compiler() -> None:
    """Raises `ConfigError` where `torch.compile` would fail for want of a C++ compiler, minutes later."""
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if not torch.cuda.is_available() and not any(map(shutil.which, names)):
        raise ConfigError(f"run.compile needs a C++ compiler ({' or '.join(names)}); install one, or leave it out")


def _listed(value: Any) -> list[Any]:
    """Lightning gives a list only where there are several."""
    return value if isinstance(value, list) else [value]


def start_from(model: SoundStream, name_or_path: str | Path, *, parts: str, latents: int) -> bool:
    """Gives a model the weights and codebooks of a checkpoint.

    Args:
        model: Of the same settings, but for its name; with the parts "decoder", its decoder may be another, which then
            keeps the weights it has.
        name_or_path: See `load_codec`.
        parts: `optim.parts`: where it isn't "all", the model's codes are declared to be the checkpoint's.
        latents: Latent frames per step, roughly: the weight that the codebooks start with.

    Returns:
        Whether the decoder's weights were taken, too.

    Raises:
        ConfigError: The checkpoint is of another architecture or other settings.
        CheckpointError: It isn't there, or damaged.
    """
    other = load_codec(name_or_path)
    if not isinstance(other, SoundStream):
        raise ConfigError(f"run.init_from {name_or_path} is a {type(other).__name__}; only SoundStream can be trained")
    different = _differences(model.config.to_dict(), other.config.to_dict())
    another_decoder = parts == "decoder" and bool(different)
    if another_decoder:
        different = _differences(model.config.encoder_settings(), other.config.encoder_settings())
    state, found = (
        {k: v for k, v in codec.state_dict().items() if not (another_decoder and k.startswith("decoder."))}
        for codec in (model, other)
    )
    listing = "; ".join(f"{k}: recipe {a!r}, checkpoint {b!r}" for k, (a, b) in different.items())
    if state.keys() != found.keys() or any(state[k].shape != found[k].shape for k in state):
        raise ConfigError(f"run.init_from {name_or_path} is a checkpoint of another architecture ({listing})")
    if different:
        raise ConfigError(f"run.init_from {name_or_path} has other settings ({listing}); make the recipe's the same")
    model.load_state_dict(found, strict=not another_decoder)
    quantizer = model.quantizer
    # The moving counts aren't part of a checkpoint: as if entries had been used evenly.
    quantizer.counts.fill_(latents / model.config.hop_length / quantizer.codebook_size)
    quantizer.sums.copy_(quantizer.codebooks * quantizer.counts[..., None])
    if parts != "all":
        model.share_codes(other)
    return not another_decoder


def _differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, but for those that say whose a checkpoint is."""
    names = [name for name in {**ours, **theirs} if name not in ("name", "codes_of")]
    return {k: (ours.get(k), theirs.get(k)) for k in names if ours.get(k) != theirs.get(k)}


def _freeze(model: SoundStream, parts: str) -> None:
    """Leaves only the parameters of `parts` trainable."""
    if parts == "all":
        return
    model.quantizer.eval()
    for name, parameter in model.named_parameters():
        within = name.startswith("decoder.mel") if parts == "mel_head" else name.startswith("decoder.")
        parameter.requires_grad_(within)


def _split(judgements: list[tuple[Tensor, list[Tensor]]]) -> tuple[list[Any], list[Any]]:
    """Judgements on a batch of real and decoded waves, one after the other → those on either."""
    real: list[Any] = []
    fake: list[Any] = []
    for logits, features in judgements:
        halves = [logits.chunk(2), *(feature.chunk(2) for feature in features)]
        for half, side in ((0, real), (1, fake)):
            side.append((halves[0][half], [feature[half] for feature in halves[1:]]))
    return real, fake


def _levels(draw: Tensor, config: TrainConfig) -> Tensor:
    """Quantizer dropout: uniform numbers `[B]` → levels int64 `[B]`."""
    total, optim = config.model.n_quantizers, config.optim
    rest = 1 - optim.full_share - optim.half_share
    share = (draw - optim.full_share - optim.half_share) / max(rest, 1e-9)
    levels = (share * total).floor().clamp(0, total - 1).long() + 1
    levels = torch.where(draw < optim.full_share + optim.half_share, max(1, total // 2), levels)
    return torch.where(draw < optim.full_share, total, levels)
