import math
from dataclasses import replace

import pytest
import torch

from codec.errors import InputError
from codec.features import PRESETS, MelSettings, MelSpectrogram

pytestmark = pytest.mark.filterwarnings("ignore:mel bins")
LINEAR = MelSettings(
    sample_rate=16000, n_fft=512, win_length=400, hop_length=160, n_mels=40, f_min=60, f_max=7600,
    log=None, power=2, framing="center",
)  # fmt: skip


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 0.1


def voice(sample_rate, seconds, *, speed=1.0, pitch=1.0):
    """A gliding harmonic tone and its beats, sampled at any rate, tempo and pitch from its formula."""
    t = torch.arange(round(sample_rate * seconds), dtype=torch.float64) / sample_rate
    phase = 2 * math.pi * (180 * t * speed + 25 * (t * speed) ** 2) * (pitch / speed)
    envelope = 0.6 + 0.4 * torch.cos(2 * math.pi * 3 * t * speed)
    return envelope * sum(torch.cos(h * phase) / h for h in range(1, 16)) * 0.1


def mean_error(result, expected, edge=3):
    """Mean |Δ| in parts of the mean, away from the edges, where the signals differ in what lies beyond them."""
    assert result.shape == expected.shape
    result, expected = result[..., edge:-edge], expected[..., edge:-edge]
    return float((result - expected).abs().mean() / expected.abs().mean())


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("num_samples", [1, 399, 5000])
def test_nothing_changed_is_forward(name, num_samples):
    module, wave = MelSpectrogram(name).double(), noise(2, num_samples)
    mel, lengths = module.transformed(wave, pitch=1, speed=[1.0, 1.0], sample_rate=module.settings.sample_rate)
    torch.testing.assert_close(mel, module(wave), rtol=1e-9, atol=1e-9)
    assert lengths.tolist() == [module.num_frames(num_samples)] * 2


@pytest.mark.parametrize(("rate", "bound"), [(32000, 1e-6), (44100, 0.03), (24000, 0.03), (8000 * 5, 0.03)])
def test_another_rate_gives_the_features_of_the_resampled_wave(rate, bound):
    module = MelSpectrogram(LINEAR).double()
    mel, lengths = module.transformed(voice(rate, 1.0), sample_rate=rate)
    expected = module(voice(16000, 1.0))
    assert lengths.tolist() == [101]
    assert mean_error(mel, expected) < bound


def test_hifigan_features_of_44100_hz_audio():
    module = MelSpectrogram("hifigan").double()
    mel, _ = module.transformed(voice(44100, 1.0), sample_rate=44100)
    assert (mel - module(voice(22050, 1.0)))[:, 3:-3].abs().max() < 1e-3


@pytest.mark.parametrize("speed", [0.8, 1.1, 1.25])
def test_speed_keeps_the_pitch(speed):
    module = MelSpectrogram(LINEAR).double()
    mel, lengths = module.transformed(voice(16000, 1.0), speed=speed)
    expected = module(voice(16000, 1 / speed, speed=speed))
    assert lengths.tolist() == [module.num_frames(math.ceil(16000 / speed))]
    # The window sees the glide and the beats at the old tempo; a shift by one frame would give 0.4.
    assert mean_error(mel, expected) < 0.08


@pytest.mark.parametrize("pitch", [0.8, 1.06, 1.25])
def test_pitch_keeps_the_timing(pitch):
    module = MelSpectrogram(LINEAR).double()
    mel, lengths = module.transformed(voice(16000, 1.0), pitch=pitch)
    expected = module(voice(16000, 1.0, pitch=pitch))
    assert lengths.tolist() == [101]
    # Lines get wider with the pitch, as wide as the lowest filters; unshifted it would be 0.6 and more.
    assert mean_error(mel, expected) < 0.3
    assert (mel.sum(0) / expected.sum(0))[3:-3].log().abs().max() < 0.1


@pytest.mark.parametrize("pitch", [0.5, 1.0, 1.5])
def test_a_tone_moves_by_the_ratio_and_keeps_its_level(pitch):
    module = MelSpectrogram(LINEAR).double()
    tone = torch.sin(2 * math.pi * 2000 * torch.arange(16000, dtype=torch.float64) / 16000)
    moved = torch.sin(2 * math.pi * 2000 * pitch * torch.arange(16000, dtype=torch.float64) / 16000)
    mel, expected = module.transformed(tone, pitch=pitch)[0][:, 50], module(moved)[:, 50]
    assert mel.argmax() == expected.argmax()
    assert mel.max() == pytest.approx(expected.max().item(), rel=0.25)


@pytest.mark.parametrize("pad_mode", ["constant", "reflect", "reflect_zero"])
@pytest.mark.parametrize("framing", ["center", "hop", "valid", "snip"])
def test_rows_of_a_batch_are_what_they_are_alone(pad_mode, framing):
    module = MelSpectrogram(replace(LINEAR, pad_mode=pad_mode, framing=framing, log="log10", log_range=3))
    lengths, changes = (
        [4000, 1, 2777],
        {"pitch": [1.0, 0.9, 1.2], "speed": [1.1, 1, 0.7], "sample_rate": [16e3, 24e3, 32e3]},
    )
    batch = torch.full((3, 2, 4100), math.nan)
    for row, n in zip(batch, lengths, strict=True):
        row[:, :n] = noise(2, n, seed=n).float()
    mel, mel_lengths = module.transformed(batch, torch.tensor(lengths), **changes)
    assert not mel.isnan().any()
    for i, n in enumerate(lengths):
        one = {name: values[i] for name, values in changes.items()}
        alone, alone_lengths = module.transformed(batch[i : i + 1, :, :n], **one)
        assert alone_lengths.tolist() == [mel_lengths[i]]
        torch.testing.assert_close(mel[i, ..., : mel_lengths[i]], alone[0], rtol=1e-4, atol=1e-4)
        assert (mel[i, ..., mel_lengths[i] :] == module.padding_value).all()


def test_gradients():
    module, wave = MelSpectrogram(LINEAR).double(), noise(1, 900).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w: module.transformed(w, pitch=1.1, speed=0.9, sample_rate=24000)[0], (wave,), fast_mode=True
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pitch": [1.0]}, "pitch has 1 values for 2 rows; give one number, or one per row"),
        ({"speed": [1.0, 0.0]}, "speed has 0; it must be above 0"),
        ({"sample_rate": math.nan}, "sample_rate has nan; it must be above 0"),
    ],
)
def test_bad_changes(changes, message):
    with pytest.raises(InputError, match=message):
        MelSpectrogram(LINEAR).transformed(torch.zeros(2, 1, 900), **changes)


def test_preemphasis_belongs_to_its_rate():
    with pytest.raises(InputError, match=r"sample_rate \[44100.0\] with pre-emphasis at 16000 Hz.*resample"):
        MelSpectrogram("kaldi").transformed(torch.zeros(900), sample_rate=44100)
    with pytest.raises(InputError, match="NaN or infinity, first at sample 3 of row 1"):
        MelSpectrogram(LINEAR).transformed(torch.tensor([[0.0] * 5, [0, 0, 0, math.nan, 0]]))
