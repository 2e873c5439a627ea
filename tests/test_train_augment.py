import pytest
import torch
from conftest import DATA

from codec.audio import read_audio
from codec.train import AugmentConfig, augment, augmentations
from codec.train.augment import at_snr, change_speed, coloured_noise, convolve, hashed, room

EVERYTHING = AugmentConfig(room_share=0.5, mix_share=0.5, noise_share=0.5)


def make_batch(num_rows=1, channels=1, names=("eq", "band_limit", "speed"), **values):
    """Speech with all values of these kinds neutral but the given ones."""
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav", num_samples=20000)
    rows = torch.stack([wave.roll(1000 * n, -1) for n in range(num_rows)])
    batch = {"x": rows.repeat(1, channels, 1)}
    for name in augmentations(EVERYTHING, denoise=True):
        if name in ("gain_db", "sign", "level_draw") or name.startswith(tuple(names)):
            batch[name] = torch.zeros(num_rows)
    batch |= {"sign": torch.ones(num_rows)}
    if "speed_on" in batch:
        batch["speed"] = torch.ones(num_rows)
    return {**batch, **{k: torch.as_tensor(v).expand(num_rows).clone() for k, v in values.items()}}


def snr_db(wave, noise):
    return 10 * torch.log10(wave.square().sum((1, 2)) / noise.square().sum((1, 2)))


def test_speed_one_changes_nothing_and_others_move_a_tone():
    tone = torch.sin(torch.arange(20000) * 2 * torch.pi * 1000 / 16000)[None, None]
    same = change_speed(tone, torch.tensor([1.0]), 16000)
    torch.testing.assert_close(same[..., 100:], tone[..., 100:16000], atol=1e-4, rtol=0)
    for speed in (0.9, 1.1):
        moved = change_speed(tone, torch.tensor([speed]), 16000)[0, 0]
        spectrum = torch.fft.rfft(moved * torch.hann_window(16000)).abs()
        assert abs(spectrum.argmax().item() - 1000 * speed) <= 1
        expected = torch.sin(torch.arange(16000) * 2 * torch.pi * 1000 * speed / 16000)
        assert (moved - expected)[100:-100].abs().max() < 0.01


def test_speed_above_one_removes_what_would_alias():
    tone = torch.sin(torch.arange(24000) * 2 * torch.pi * 7700 / 16000)[None, None]
    assert change_speed(tone, torch.tensor([1.15]), 16000).square().mean() < 0.1 * tone.square().mean()


def test_gain_sign_equaliser_and_band_limit_do_what_their_names_say():
    def target(**values):
        return augment(make_batch(**values), 16000, 16000).target

    plain = target()
    torch.testing.assert_close(plain, make_batch()["x"][..., :16000], atol=1e-5, rtol=0)
    torch.testing.assert_close(target(sign=-1.0, gain_db=-6.0), -plain * 10 ** (-6 / 20), atol=1e-5, rtol=0)
    assert target(gain_db=60.0).abs().max() <= 1.0 + 1e-6
    power = torch.fft.rfft(target(band_limit_on=1.0, band_limit=0.5)[0, 0]).abs().square()
    assert power[4500:].sum() < 1e-4 * torch.fft.rfft(plain[0, 0]).abs().square()[4500:].sum()
    quiet = target(gain_db=-20.0)
    boosted = target(gain_db=-20.0, eq_on=1.0, **{f"eq_{i}": 10.0 for i in range(6)})
    torch.testing.assert_close(boosted, quiet * 10**0.5, atol=1e-5, rtol=0)
    low_cut = target(gain_db=-20.0, eq_on=1.0, eq_0=-10.0)
    spectra = [torch.fft.rfft(w[0, 0]).abs() for w in (quiet, low_cut)]
    assert spectra[1][3000:].norm().item() == pytest.approx(spectra[0][3000:].norm().item(), rel=1e-3)
    assert spectra[1][50:100].norm() < 0.6 * spectra[0][50:100].norm()


def test_mix_adds_the_next_row_at_the_drawn_level():
    batch = make_batch(3, names=("mix",), mix_on=1.0, mix_snr_db=7.0, gain_db=-30.0)
    plain = augment(make_batch(3, names=(), gain_db=-30.0), 16000, 16000).target
    added = augment(batch, 16000, 16000).target - plain
    torch.testing.assert_close(snr_db(plain, added), torch.full((3,), 7.0), atol=0.01, rtol=0)
    for row in range(3):
        other = plain[(row + 1) % 3].flatten()
        assert torch.cosine_similarity(added[row].flatten(), other, dim=0) > 0.999
    batch["mix_on"] = torch.tensor([0.0, 1.0, 0.0])
    some = augment(batch, 16000, 16000).target
    torch.testing.assert_close(some[0], plain[0])
    assert not torch.allclose(some[1], plain[1], atol=1e-4)


@pytest.mark.parametrize("denoise", [None, 0.0, 1.0])
def test_noise_is_in_the_target_unless_the_row_is_to_be_denoised(denoise):
    flags = {} if denoise is None else {"denoise_on": denoise}
    values = {"noise_on": 1.0, "noise_snr_db": 10.0, "noise_slope": 6.0, "noise_draw": 0.3, "gain_db": -30.0}
    batch = make_batch(2, names=("noise",), **values, **flags)
    plain = augment(make_batch(2, names=(), gain_db=-30.0), 16000, 16000).target
    wave, target, flag = augment(batch, 16000, 16000)
    torch.testing.assert_close(snr_db(plain, wave - plain), torch.full((2,), 10.0), atol=0.01, rtol=0)
    torch.testing.assert_close(target, plain if denoise else wave)
    assert flag is None if denoise is None else flag.tolist() == [bool(denoise)] * 2


def test_gain_and_peak_limit_are_the_same_for_wave_and_target():
    values = {"noise_on": 1.0, "noise_snr_db": 0.0, "noise_draw": 0.3, "denoise_on": 1.0, "gain_db": 40.0, "sign": -1.0}
    wave, target, _ = augment(make_batch(names=("noise",), **values), 16000, 16000)
    assert max(wave.abs().max(), target.abs().max()).item() == pytest.approx(1.0, abs=1e-5)
    clean = make_batch()["x"][..., :16000]
    ratio = (target / clean)[clean.abs() > 0.05]
    assert ratio.max() < 0 and ratio.std() < 1e-3 * ratio.mean().abs()


def test_noise_from_files_is_used_where_it_is_given():
    noise = torch.sin(torch.arange(16000) * 2 * torch.pi * 440 / 16000).expand(1, 1, -1)
    values = {"noise_on": 1.0, "noise_snr_db": 3.0, "noise_draw": 0.3, "gain_db": -30.0}
    batch = make_batch(names=("noise",), **values) | {"noise": noise}
    added = augment(batch, 16000, 16000).wave - augment(make_batch(names=(), gain_db=-30.0), 16000, 16000).wave
    assert torch.cosine_similarity(added.flatten(), noise.flatten(), dim=0) > 0.999


def test_synthetic_noise_has_the_drawn_slope_and_follows_from_its_draw():
    for slope in (0.0, 6.0, 12.0):
        drawn = {"noise_slope": torch.tensor([slope]), "noise_draw": torch.tensor([0.7])}
        noise = coloured_noise(drawn, 1, 16000, 16000)
        power = torch.fft.rfft(noise[0, 0]).abs().square()
        per_octave = 10 * torch.log10(power[2000:4000].mean() / power[1000:2000].mean())
        assert per_octave.item() == pytest.approx(-slope, abs=0.3)
        assert torch.equal(noise, coloured_noise(drawn, 1, 16000, 16000))
    other = coloured_noise(
        {"noise_slope": torch.tensor([12.0]), "noise_draw": torch.tensor([0.70001])}, 1, 16000, 16000
    )
    assert torch.cosine_similarity(noise.flatten(), other.flatten(), dim=0).abs() < 0.2


def test_hashed_numbers_are_uniform_and_independent():
    numbers = hashed(torch.tensor([0.1, 0.1 + 2**-20]), 100_000)
    assert numbers.min() >= 0 and numbers.max() <= 1
    counts = torch.histc(numbers[0], 100, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 150  # chi-square, 99 degrees: p = 0.0007
    centred = numbers - 0.5
    assert (centred[0] * centred[1]).mean().abs() < 0.001
    assert (centred[0, 1:] * centred[0, :-1]).mean().abs() < 0.001


def test_a_room_keeps_the_direct_sound_and_decays_by_60_db():
    seconds = torch.tensor([0.2, 0.5])
    response = room(seconds, torch.tensor([0.5, 0.5]), torch.tensor([0.1, 0.2]), 16000, 16000)
    assert response[:, 0].tolist() == [1, 1]
    torch.testing.assert_close(response[:, 1:].norm(dim=1), torch.tensor([0.5, 0.5]))
    for row, t60 in zip(response, seconds.tolist(), strict=True):
        early, late = (row[int(t * 16000) :][:800].square().mean() for t in (0.01, 0.01 + t60 / 2))
        assert 10 * torch.log10(early / late).item() == pytest.approx(30, abs=1.5)


def test_convolution_is_torchs_own():
    torch.manual_seed(0)
    wave, response = torch.randn(2, 3, 50), torch.randn(2, 1, 20)
    expected = torch.stack(
        [
            torch.nn.functional.conv1d(torch.nn.functional.pad(w[:, None], (19, 0)), r[None].flip(-1))[:, 0]
            for w, r in zip(wave, response, strict=True)
        ]
    )
    torch.testing.assert_close(convolve(wave, response), expected, atol=1e-4, rtol=1e-4)


def test_channels_are_treated_alike():
    values = {"eq_on": 1.0, "eq_2": 8.0, "speed_on": 1.0, "speed": 1.1, "room_on": 1.0, "room_seconds": 0.3}
    values |= {"room_level": 0.5, "room_draw": 0.4}
    stereo = augment(make_batch(2, channels=2, names=("eq", "speed", "room"), **values), 16000, 16000).wave
    assert stereo.shape == (2, 2, 16000)
    torch.testing.assert_close(stereo[:, 0], stereo[:, 1])


def test_noise_beside_silence_is_silence():
    assert at_snr(torch.zeros(1, 1, 100), torch.randn(1, 1, 100), torch.tensor([0.0])).abs().max() == 0


def test_only_what_is_switched_on_is_drawn():
    off = AugmentConfig(speed_share=0, eq_share=0, band_limit_share=0)
    assert set(augmentations(off)) == {"gain_db", "sign", "level_draw"}
    assert "denoise_on" in augmentations(off, denoise=True)
    names = set(augmentations(EVERYTHING))
    assert {"room_on", "mix_snr_db", "noise_draw", "speed", "eq_5", "band_limit_on"} <= names
