"""Augmentation: named random values that travel with each excerpt, and what they do to a batch of waves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from codec.excerpts import Choice, Distribution, Uniform
from codec.train.config import AugmentConfig

EQ_BANDS = 6
SLOPE_DB = 12.0
"""Steepest spectral slope of synthetic noise, dB per octave downwards."""


class Augmented(NamedTuple):
    """A batch ready for a training step.

    Attributes:
        wave: `[B, C, N]`, what the codec is given.
        target: `[B, C, N]`, what it should decode to.
        denoise: bool `[B]`: rows whose target lacks the noise that their wave has; None for models without the flag.
    """

    wave: Tensor
    target: Tensor
    denoise: Tensor | None


def augmentations(config: AugmentConfig, *, denoise: bool = False) -> dict[str, Distribution]:
    """The named random values that travel with each excerpt.

    Args:
        config: What is switched on.
        denoise: The model has a flag to denoise, which is drawn too.
    """
    rngs: dict[str, Distribution] = {
        "gain_db": Uniform(*config.gain_db),
        "sign": Choice((-1.0, 1.0)),
        "level_draw": Uniform(0.0, 1.0),
    }
    kinds: dict[str, tuple[float, dict[str, Distribution]]] = {
        "speed": (config.speed_share * (config.speed > 1), {"speed": Uniform(1 / config.speed, config.speed)}),
        "eq": (
            config.eq_share * (config.eq_db > 0),
            {f"eq_{band}": Uniform(-config.eq_db, config.eq_db) for band in range(EQ_BANDS)},
        ),
        "band_limit": (config.band_limit_share, {"band_limit": Uniform(0.25, 1.0)}),
        "room": (
            config.room_share,
            {
                "room_seconds": Uniform(*config.room_seconds),
                "room_level": Uniform(0.1, 1.0),
                "room_draw": Uniform(0.0, 1.0),
            },
        ),
        "mix": (config.mix_share, {"mix_snr_db": Uniform(*config.mix_snr_db)}),
        "noise": (
            config.noise_share,
            {
                "noise_snr_db": Uniform(*config.noise_snr_db),
                "noise_slope": Uniform(0.0, SLOPE_DB),
                "noise_draw": Uniform(0.0, 1.0),
            },
        ),
    }
    for kind, (share, values) in kinds.items():
        if share:
            rngs[f"{kind}_on"] = Choice((0.0, 1.0), (1 - share, share))
            rngs |= values
    if denoise:
        rngs["denoise_on"] = Choice((0.0, 1.0), (1 - config.denoise_share, config.denoise_share))
    return rngs


def augment(batch: Mapping[str, Any], num_samples: int, sample_rate: int) -> Augmented:
    """Applies the batch's named values, each to the rows that it is on for.

    Args:
        batch: `x` `[B, C, N']`, the values of `augmentations` that are switched on, `[B]` each, and `noise`
            `[B, C, N]` where it is drawn from files.
        num_samples: N ≤ N'.
        sample_rate: Hz.
    """
    wave: Tensor = batch["x"]
    if "speed_on" in batch and (rows := batch["speed_on"] > 0).any():
        faster = change_speed(wave[rows], batch["speed"][rows], num_samples)
        wave = _with_rows(wave[..., :num_samples], rows, faster)
    wave = wave[..., :num_samples]
    if "room_on" in batch and (rows := batch["room_on"] > 0).any():
        seconds, level, draw = (batch[f"room_{name}"][rows] for name in ("seconds", "level", "draw"))
        response = room(seconds, level, draw, num_samples, sample_rate)[:, None]
        wave = _with_rows(wave, rows, convolve(wave[rows], response))
    if "mix_on" in batch:
        mixed = wave + at_snr(wave, wave.roll(-1, 0), batch["mix_snr_db"])
        wave = torch.where(_column(batch["mix_on"]) > 0, mixed, wave)
    if "eq_on" in batch or "band_limit_on" in batch:
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
        if (rows := curve_db.any(1)).any():
            shaped = torch.fft.rfft(wave[rows]) * (10 ** (curve_db[rows].clamp(min=-120) / 20))[:, None]
            wave = _with_rows(wave, rows, torch.fft.irfft(shaped, n=num_samples))
    target = wave
    denoise = batch["denoise_on"] > 0 if "denoise_on" in batch else None
    if "noise_on" in batch:
        noise = batch["noise"] if "noise" in batch else coloured_noise(batch, wave.shape[1], num_samples, sample_rate)
        noise = at_snr(wave, noise, batch["noise_snr_db"]) * _column(batch["noise_on"])
        wave = wave + noise
        target = wave if denoise is None else torch.where(_column(denoise), target, wave)
    gain = _column(10 ** (batch["gain_db"] / 20) * batch["sign"])
    peak = torch.maximum(wave.abs().amax((1, 2), keepdim=True), target.abs().amax((1, 2), keepdim=True))
    gain = gain / (peak * gain.abs()).clamp(min=1.0)
    return Augmented(wave * gain, wave * gain if target is wave else target * gain, denoise)


def _with_rows(wave: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """A copy of `wave` whose `rows` are `values`."""
    wave = wave.clone()
    wave[rows] = values
    return wave


def _column(values: Tensor) -> Tensor:
    """`[B]` → `[B, 1, 1]`."""
    return values[:, None, None]


def change_speed(wave: Tensor, speed: Tensor, num_samples: int, *, taps: int = 16) -> Tensor:
    """Plays each row at its own speed by windowed-sinc interpolation.

    Args:
        wave: `[B, C, N]`.
        speed: `[B]`, 1.1 is faster and higher.
        num_samples: Samples to return; what lies beyond the row's end is zero.
        taps: Interpolation kernel size, even.
    """
    at = torch.arange(num_samples, device=wave.device) * speed[:, None].double()
    base = at.floor().long()
    offsets = torch.arange(1 - taps // 2, 1 + taps // 2, device=wave.device)
    distance = (offsets - (at - base)[..., None]).float()
    cutoff = _column((1 / speed).clamp(max=1.0))
    kernel = cutoff * torch.sinc(cutoff * distance) * torch.cos(distance * (torch.pi / taps)).square()
    half = taps // 2
    index = (base[..., None] + offsets + half).clamp(0, wave.shape[-1] + 2 * half - 1).flatten(1)
    padded = F.pad(wave, (half, half))
    channels = [padded[:, c].gather(1, index).view(kernel.shape) for c in range(wave.shape[1])]
    return torch.stack([(samples * kernel).sum(-1) for samples in channels], 1)


def at_snr(wave: Tensor, other: Tensor, snr_db: Tensor) -> Tensor:
    """`other` at the level that makes it `snr_db` (`[B]`) weaker than `wave`; both `[B, C, N]`.

    Beside silence it stays silent: there is nothing to be weaker than.
    """
    power, theirs = (x.square().mean((1, 2)) for x in (wave, other))
    scale: Tensor = (power / theirs.clamp(min=1e-12)).sqrt() * 10 ** (-snr_db / 20)
    return other * _column(scale)


def coloured_noise(batch: Mapping[str, Any], channels: int, num_samples: int, sample_rate: int) -> Tensor:
    """Stationary noise `[B, C, num_samples]`, of any level, a function of the batch's drawn values alone.

    Its spectrum is flat up to 100 Hz and falls by `noise_slope` dB per octave from there; phases are random.
    """
    bins = num_samples // 2 + 1
    octaves = (torch.arange(bins, device=batch["noise_slope"].device) * (sample_rate / num_samples / 100)).clamp(min=1)
    magnitude = 10 ** (-batch["noise_slope"][:, None] * octaves.log2() / 20)
    phase = 2 * torch.pi * hashed(batch["noise_draw"], channels * bins).view(-1, channels, bins)
    noise: Tensor = torch.fft.irfft(torch.polar(magnitude[:, None].expand_as(phase).contiguous(), phase), n=num_samples)
    return noise


def room(seconds: Tensor, level: Tensor, draw: Tensor, num_samples: int, sample_rate: int) -> Tensor:
    """Impulse responses of synthetic rooms: the direct sound, then noise that decays.

    Args:
        seconds: `[B]`, reverberation time: until the tail is 60 dB lower.
        level: `[B]`, level of the tail (root of its energy) over that of the direct sound.
        draw: `[B]` in 0…1, from which the tail's noise follows.
        num_samples: Samples to return; the tail is cut there.
        sample_rate: Hz.

    Returns:
        `[B, num_samples]`.
    """
    time = torch.arange(num_samples, device=draw.device) / sample_rate
    tail = (hashed(draw, num_samples) * 2 - 1) * 10 ** (-3 * time / seconds[:, None])
    tail[:, : sample_rate // 500] = 0  # 2 ms until the first reflection
    tail = tail * (level[:, None] / tail.norm(dim=1, keepdim=True).clamp(min=1e-9))
    tail[:, 0] = 1
    response: Tensor = tail
    return response


def convolve(wave: Tensor, response: Tensor) -> Tensor:
    """Causal convolution over time, cut at the wave's end: `[B, C, N]`, `[B, 1 or C, M]` → `[B, C, N]`."""
    size = wave.shape[-1] + response.shape[-1] - 1
    size += size % 2
    product = torch.fft.rfft(wave, size) * torch.fft.rfft(response, size)
    convolved: Tensor = torch.fft.irfft(product, size)[..., : wave.shape[-1]]
    return convolved


def hashed(draw: Tensor, count: int) -> Tensor:
    """Uniform numbers in 0…1 `[B, count]` that follow from one drawn number each: the same on every device.

    A 32-bit integer hash (multiply, xor-shift, twice) of the counter, begun with the draw.
    """
    state = (draw.double() * 2**31).long()[:, None] * 0x9E3779B1
    state = (state + torch.arange(count, device=draw.device) * 0x85EBCA6B) & 0xFFFFFFFF
    for multiplier in (0x7FEB352D, 0x846CA68B):
        state = ((state ^ (state >> 16)) * multiplier) & 0xFFFFFFFF
    return (state ^ (state >> 16)).float() / 2**32
