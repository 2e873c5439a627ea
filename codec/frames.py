"""Exact arithmetic between samples, frames and seconds. Integers and fractions, never float seconds."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from fractions import Fraction

from codec.errors import InputError

Seconds = int | float | str | Decimal | Fraction


def num_frames(num_samples: int, hop_length: int) -> int:
    """Frames that cover `num_samples` samples: the last one may be partly filled.

    >>> num_frames(321, 320)
    2
    """
    return -(-num_samples // hop_length)


def resampled_length(num_samples: int, from_rate: int, to_rate: int) -> int:
    """Samples at `to_rate` that cover `num_samples` at `from_rate`: `ceil(N * to / from)`.

    >>> resampled_length(44100, 44100, 16000)
    16000
    """
    return -(-num_samples * to_rate // from_rate)


def exact_seconds(seconds: Seconds) -> Fraction:
    """A duration as an exact fraction. Strings may be decimals or ratios ("0.1", "51/70").

    A float is read as the shortest decimal that prints it (0.1 is one tenth), which is what people mean.

    Raises:
        InputError: Not a finite number.
    """
    try:
        if isinstance(seconds, float):
            return Fraction(Decimal(repr(seconds)))
        return Fraction(seconds)
    except (ValueError, OverflowError, InvalidOperation, ZeroDivisionError) as error:
        raise InputError(f"{seconds!r} is not a finite duration; give a number or a ratio such as '51/70'") from error


def seconds_to_samples(seconds: Seconds, sample_rate: int) -> int:
    """The sample position nearest to `seconds` (halves round up).

    >>> seconds_to_samples(0.1, 44100)
    4410
    """
    return (exact_seconds(seconds) * sample_rate + Fraction(1, 2)).__floor__()
