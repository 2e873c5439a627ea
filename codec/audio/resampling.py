"""Sample rates: band-limited resampling of exact length, whole or by excerpt."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from codec.errors import InputError
from codec.frames import resampled_length

# torchaudio's sinc with these numbers (resampy's "kaiser_best") errs by less than −105 dB up to 0.8 of the
# lower Nyquist frequency and lets through less than −140 dB from above it, measured with tones; its default
# −54 and −8 dB.
_FILTER_WIDTH = 64
_ROLLOFF = 0.9475937167399596
_BETA = 14.769656459379492
# Samples resampled at once, the more of input and output: bounds the memory that long waves need.
_CHUNK = 1 << 20
# Values of the filter for each phase: rates with a small common divisor need gigabytes.
_MAX_KERNEL = 1 << 27


def resample(wave: Tensor, from_rate: int, to_rate: int) -> Tensor:
    """Resamples `[..., N]` to `[..., ceil(N * to_rate / from_rate)]`, on its device, differentiably.

    Output sample k lies at time `k / to_rate`: the filter delays nothing, and beyond both ends the wave
    counts as zero. Half-precision waves are computed in float32 and returned in their own type.

    Args:
        wave: Floating `[..., N]`.
        from_rate: Hz of `wave`.
        to_rate: Hz of the result.

    Raises:
        InputError: An integer or zero-dimensional wave, a rate that is no positive integer, or rates whose common
            divisor is too small.
    """
    for name, rate in (("from_rate", from_rate), ("to_rate", to_rate)):
        if isinstance(rate, bool) or not isinstance(rate, int) or rate < 1:
            raise InputError(f"{name} is {rate!r}; it must be a positive integer, in Hz")
    if not wave.is_floating_point() or wave.ndim == 0:
        raise InputError(f"wave has dtype {wave.dtype} and shape {list(wave.shape)}; it must be floating [..., N]")
    if from_rate == to_rate or wave.shape[-1] == 0:
        return wave
    divisor = math.gcd(from_rate, to_rate)
    if from_rate * to_rate // divisor**2 > _MAX_KERNEL:
        raise InputError(
            f"{from_rate} and {to_rate} Hz have the greatest common divisor {divisor}, which needs a filter of "
            f"gigabytes; choose a to_rate that shares a greater one"
        )
    num_samples = wave.shape[-1]
    dtype = torch.float64 if wave.dtype == torch.float64 else torch.float32
    kernel = _kernel(from_rate, to_rate, dtype, wave.device)
    chunk = min(_CHUNK, resampled_length(_CHUNK, from_rate, to_rate))
    length = resampled_length(num_samples, from_rate, to_rate)
    parts = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        first, last, skip = native_span(start, stop, from_rate, to_rate)
        # torchaudio computes lengths in float32: whole periods of both rates leave nothing to round.
        part = F.pad(wave[..., first:last].to(dtype), (0, max(0, last - num_samples)))
        parts.append(kernel(part)[..., skip : skip + stop - start])
    return (torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]).to(wave.dtype)


def native_span(start: int, stop: int, from_rate: int, to_rate: int) -> tuple[int, int, int]:
    """The samples `[first, last)` at `from_rate` on which `[start, stop)` at `to_rate` depend.

    `last` may lie beyond the wave's end. The span begins where both rates meet, so that resampling it alone
    and dropping the first `skip` samples gives what resampling the whole wave gives there.

    Returns:
        first, last, skip.
    """
    divisor = math.gcd(from_rate, to_rate)
    step_in, step_out = from_rate // divisor, to_rate // divisor
    reach = math.ceil(_FILTER_WIDTH * step_in / (min(step_in, step_out) * _ROLLOFF))
    context = -(-reach // step_in) + 1
    first = max(0, start // step_out - context)
    last = -(-stop // step_out) + context
    return first * step_in, last * step_in, start - first * step_out


@functools.lru_cache(maxsize=32)
def _kernel(from_rate: int, to_rate: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    from torchaudio.transforms import Resample

    module: nn.Module = Resample(
        from_rate,
        to_rate,
        resampling_method="sinc_interp_kaiser",
        lowpass_filter_width=_FILTER_WIDTH,
        rolloff=_ROLLOFF,
        beta=_BETA,
        dtype=torch.float64,
    )
    return module.to(device, dtype)
