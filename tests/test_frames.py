from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from codec.errors import InputError
from codec.frames import exact_seconds, num_frames, resampled_length, seconds_to_samples
from codec.spec import CodecSpec

SPEC = CodecSpec("x", "00", 16000, 320, 1, 8, 1024, (8, 8), (10, 10))


@given(st.integers(1, 10**12), st.integers(1, 10**5))
def test_frames_cover_the_samples_and_no_more(num_samples, hop_length):
    frames = num_frames(num_samples, hop_length)
    assert (frames - 1) * hop_length < num_samples <= frames * hop_length


@given(st.integers(1, 10**12), st.integers(1, 10**6), st.integers(1, 10**6))
def test_resampled_length_is_exact_beyond_float(num_samples, from_rate, to_rate):
    length = resampled_length(num_samples, from_rate, to_rate)
    assert (length - 1) * from_rate < num_samples * to_rate <= length * from_rate


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.1, "1/10"), ("51/70", "51/70"), ("0.25", "1/4"), (3, "3"), (Fraction(2, 3), "2/3")],
)
def test_exact_seconds(seconds, expected):
    assert exact_seconds(seconds) == Fraction(expected)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), "ten", "1/0"])
def test_exact_seconds_errors(seconds):
    with pytest.raises(InputError, match="not a finite duration"):
        exact_seconds(seconds)


def test_positions_don_t_drift():
    """0.1 s steps over three hours at 44.1 kHz: float seconds would be off, fractions aren't."""
    step = exact_seconds(0.1)
    assert all(seconds_to_samples(step * n, 44100) == 4410 * n for n in range(0, 108_001, 999))


def test_spec_arithmetic_and_round_trip():
    assert SPEC.frame_rate == 50
    assert SPEC.bits_per_code == 10
    assert SPEC.bitrate_bps == 4000
    assert SPEC.num_frames(321) == 2
    assert CodecSpec.from_dict(SPEC.to_dict()) == SPEC
    unbounded = CodecSpec.from_dict({**SPEC.to_dict(), "encode_context": None})
    assert unbounded.encode_context is None


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("n_quantizers", 129, "n_quantizers is 129; it must be an integer from 1 to 128"),
        ("codebook_size", 1, "codebook_size is 1"),
        ("hop_length", True, "hop_length is True"),
        ("decode_context", [1, -1], r"decode_context is \(1, -1\)"),
    ],
)
def test_spec_errors(field, value, message):
    with pytest.raises(InputError, match=message):
        CodecSpec.from_dict({**SPEC.to_dict(), field: value})


def test_spec_refuses_unknown_fields():
    with pytest.raises(InputError, match="must have exactly"):
        CodecSpec.from_dict({**SPEC.to_dict(), "frame_rate": 50})
