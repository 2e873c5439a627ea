import json
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import InputError
from codec.features import MFCC, PRESETS, Fbank, MelSettings, MelSpectrogram, Spectrogram, mel_filters

# Some filters of torchaudio's defaults fall between Fourier bins, in torchaudio as here.
pytestmark = pytest.mark.filterwarnings("ignore:mel bins")
# The published combinations as their authors write them:
# rate, n_fft, win, hop, mels, f_min, f_max, scale, norm.
NUMBERS = {
    "codec": (16000, 512, 512, 160, 80, 0, 8000, "slaney", True),
    "librosa": (22050, 2048, 2048, 512, 128, 0, 11025, "slaney", True),
    "torchaudio": (16000, 400, 400, 200, 128, 0, 8000, "htk", False),
    "hifigan": (22050, 1024, 1024, 256, 80, 0, 8000, "slaney", True),
    "vocos": (24000, 1024, 1024, 256, 100, 0, 12000, "htk", False),
    "whisper": (16000, 400, 400, 160, 80, 0, 8000, "slaney", True),
    "realtime": (16000, 800, 800, 200, 80, 55, 7600, "slaney", True),
    "whisper_128": (16000, 400, 400, 160, 128, 0, 8000, "slaney", True),
    "tacotron": (22050, 1024, 1024, 256, 80, 0, 8000, "slaney", True),
    "encodec": (24000, 1024, 1024, 256, 64, 64, 12000, "htk", False),
    "kaldi": (16000, 512, 400, 160, 80, 20, 8000, "kaldi", False),
    "nemo": (16000, 512, 400, 160, 80, 0, 8000, "slaney", True),
}


def reference_filters(rate, n_fft, mels, f_min, f_max, scale, norm):
    """Triangles by the definition, one weight at a time."""

    def to_mel(hz):
        if scale == "kaldi":
            return 1127 * math.log(1 + hz / 700)
        if scale == "htk":
            return 2595 * math.log10(1 + hz / 700)
        return 3 * hz / 200 if hz < 1000 else 15 + math.log(hz / 1000) / (math.log(6.4) / 27)

    def to_hz(mel):
        if scale == "kaldi":
            return mel  # Its triangles are over mel.
        if scale == "htk":
            return 700 * (10 ** (mel / 2595) - 1)
        return 200 * mel / 3 if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)

    low, high = to_mel(f_min), to_mel(f_max)
    edges = [to_hz(low + (high - low) * i / (mels + 1)) for i in range(mels + 2)]
    filters = np.zeros((mels, n_fft // 2 + 1))
    for m in range(mels):
        left, top, right = edges[m : m + 3]
        for k in range(n_fft // 2 + 1):
            hz = to_mel(k * rate / n_fft) if scale == "kaldi" else k * rate / n_fft
            weight = (hz - left) / (top - left) if hz <= top else (right - hz) / (right - top)
            filters[m, k] = max(0, weight) * (2 / (right - left) if norm else 1)
    return filters


def reference_mel(name, wave):
    """The preset's features by its authors' own steps, in float64 numpy; `[N]` → `[M, F]`."""
    rate, n_fft, win, hop, mels, f_min, f_max, scale, norm = NUMBERS[name]
    n = len(wave)
    symmetric = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win) / (win - 1))
    periodic = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(win) / win)
    filters = reference_filters(rate, n_fft, mels, f_min, f_max, scale, norm)

    def power_of(padded, num, window=periodic):
        frames = [padded[j * hop : j * hop + len(window)] * window for j in range(num)]
        return np.abs(np.fft.rfft(np.array(frames).reshape(num, len(window)), n_fft)).T ** 2

    if name == "kaldi":
        frames = []
        for start in range(0, n - win + 1, hop):
            frame = wave[start : start + win] - wave[start : start + win].mean()
            frame = np.concatenate([[frame[0] * (1 - 0.97)], frame[1:] - 0.97 * frame[:-1]])
            frames.append(frame * symmetric**0.85)
        frames = np.concatenate([np.array(frames).reshape(-1, win), np.zeros((len(frames), n_fft - win))], 1)
        power = np.abs(np.fft.rfft(frames)).T[:-1] ** 2  # Kaldi leaves the Nyquist bin out.
        return np.log(np.maximum(filters[:, :-1] @ power, np.finfo(np.float32).eps))
    if name == "nemo":
        wave = np.concatenate([wave[:1], wave[1:] - 0.97 * wave[:-1]])
        window = np.pad(symmetric, 56)
        log = np.log(filters @ power_of(np.pad(wave, (256, 512)), n // hop, window) + 2**-24)
        if n // hop == 0:
            return log
        deviation = log.std(1, ddof=1, keepdims=True) if n // hop > 1 else 0
        return (log - log.mean(1, keepdims=True)) / (deviation + 1e-5)
    if name in ("codec", "hifigan"):
        mode = "constant" if name == "codec" else "reflect"
        before = (n_fft - hop) // 2
        power = power_of(np.pad(wave, (before, before + hop), mode=mode), -(-n // hop) if name == "codec" else n // hop)
        return np.log(np.maximum(filters @ np.sqrt(power + (1e-9 if name == "hifigan" else 0)), 1e-5))
    if name == "encodec":
        padded = np.pad(np.pad(wave, 384, mode="reflect"), (0, hop))
        return np.log10(1e-5 + filters @ power_of(padded, -(-n // hop)))
    mode = "constant" if name in ("librosa", "realtime") else "reflect"
    whisper = name.startswith("whisper")
    power = power_of(np.pad(wave, (n_fft // 2, n_fft // 2), mode=mode), 1 + n // hop - whisper)
    if name in ("librosa", "torchaudio"):
        return filters @ power
    if name == "realtime":
        return filters @ np.sqrt(power)
    if name in ("vocos", "tacotron"):
        return np.log(np.maximum(filters @ np.sqrt(power), 1e-7 if name == "vocos" else 1e-5))
    assert whisper
    log = np.log10(np.maximum(filters @ power, 1e-10))
    if log.size:
        log = np.maximum(log, log.max() - 8)
    return (log + 4) / 4


def linear_of(name, mel):
    if name == "nemo":
        return mel
    if name == "encodec":
        return 10**mel
    log = PRESETS[name].log
    return np.exp(mel) if log == "natural" else 10 ** (4 * mel - 4) if log == "log10" else mel


def noise(*shape, seed=0, scale=0.1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_every_preset_has_a_reference():
    assert set(NUMBERS) == set(PRESETS)


@pytest.mark.parametrize("name", sorted(PRESETS))
@pytest.mark.parametrize("num_samples", [1, 2, 255, 256, 399, 1000, 12800, 12801])
def test_presets_equal_their_definition(name, num_samples):
    wave = noise(num_samples, seed=num_samples)
    expected = reference_mel(name, wave.double().numpy())
    module = MelSpectrogram(name)
    # float32 rounding is relative to the loudest value, so it is judged before the logarithm: at most 4.2e-7 here.
    # Normalised values are in standard deviations: at most 2.8e-5.
    linear, rounded = (linear_of(name, mel) for mel in (expected, module(wave).double().numpy()))
    bound = 2e-4 if name == "nemo" else 2e-6 * linear.max(initial=0)
    assert np.abs(rounded - linear).max(initial=0) <= bound
    with_gradient = module(wave.clone().requires_grad_()).detach().double().numpy()
    assert np.abs(linear_of(name, with_gradient) - linear).max(initial=0) <= bound
    exact = module.double()(wave.double()).numpy()
    assert exact.shape == expected.shape == (PRESETS[name].n_mels, module.num_frames(num_samples))
    np.testing.assert_allclose(exact, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["torchaudio", "vocos", "librosa"])
def test_equals_torchaudio(name):
    transforms = pytest.importorskip("torchaudio").transforms
    s = PRESETS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = transforms.MelSpectrogram(
            s.sample_rate, s.n_fft, s.win_length, s.hop_length, s.f_min, s.f_max, n_mels=s.n_mels,
            power=s.power, mel_scale=s.mel_scale, norm=s.norm, pad_mode=s.pad_mode,
        )  # fmt: skip
    wave = noise(2, 20000)
    expected = peer(wave)
    if s.log:
        expected = expected.clamp_min(s.floor).log()
    assert (MelSpectrogram(name)(wave) - expected).abs().max() < 2e-5 * expected.abs().max()


def test_spectrogram_is_what_the_filters_are_applied_to():
    for name in ("realtime", "kaldi", "encodec", "nemo"):
        s = replace(PRESETS[name], log=None, normalize=None, add_floor=False)
        wave = noise(2, 3000).double()
        spectrum = Spectrogram(s).double()(wave)
        assert spectrum.shape == (2, s.n_fft // 2 + 1, s.num_frames(3000))
        torch.testing.assert_close(torch.from_numpy(mel_filters(s)) @ spectrum, MelSpectrogram(s).double()(wave))


def test_spectrogram_equals_torchaudio():
    peer = pytest.importorskip("torchaudio").transforms.Spectrogram()
    wave = noise(2, 5000)
    expected = peer(wave)
    assert (Spectrogram("torchaudio")(wave) - expected).abs().max() < 2e-6 * expected.max()


@pytest.mark.parametrize("lifter", [0, 22])
def test_mfcc_by_its_definition(lifter):
    s = replace(PRESETS["kaldi"], n_mels=23)
    wave = noise(2000)
    log_mel = MelSpectrogram(s).double()(wave.double()).numpy()
    expected = np.zeros((13, log_mel.shape[1]))
    for k in range(13):
        for m in range(23):
            scale = math.sqrt((1 if k == 0 else 2) / 23)
            expected[k] += scale * math.cos(math.pi * k * (m + 0.5) / 23) * log_mel[m]
        if lifter:
            expected[k] *= 1 + lifter / 2 * math.sin(math.pi * k / lifter)
    module = MFCC(s, lifter=lifter)
    np.testing.assert_allclose(module(wave).numpy(), expected, atol=2e-3)
    np.testing.assert_allclose(module.double()(wave.double()).numpy(), expected, atol=1e-10)


@pytest.mark.parametrize("num_samples", [400, 559, 560, 8000])
@pytest.mark.parametrize("sample_rate", [16000, 8000])
def test_fbank_and_mfcc_equal_torchaudios_kaldi(num_samples, sample_rate):
    kaldi = pytest.importorskip("torchaudio").compliance.kaldi
    wave = noise(num_samples) * 32768
    expected = kaldi.fbank(wave[None], num_mel_bins=40, sample_frequency=sample_rate, dither=0).T
    result = Fbank(40, sample_rate=sample_rate)(wave)
    # torchaudio's own float32 rounding; against float64 the fast path is closer.
    assert (result - expected).abs().max() < 1e-3
    if sample_rate == 16000:
        expected = kaldi.mfcc(wave[None], dither=0).T
        assert (MFCC(replace(PRESETS["kaldi"], n_mels=23))(wave) - expected).abs().max() < 5e-3


def test_mfcc_equals_torchaudios():
    transforms = pytest.importorskip("torchaudio").transforms
    wave = noise(8000)
    expected = transforms.MFCC(16000, 40, melkwargs={"n_fft": 400, "hop_length": 160, "n_mels": 64})(wave)
    s = replace(PRESETS["torchaudio"], hop_length=160, n_mels=64, log="db", floor=1e-10, log_range=80)
    assert (MFCC(s, n_mfcc=40, lifter=0)(wave) - expected).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"settings": "realtime"}, "MFCC needs log-mel values and the settings have log None; set log"),
        ({"n_mfcc": 81}, "n_mfcc is 81; it must be 1 … 80, the settings' n_mels"),
        ({"n_mfcc": 0}, "n_mfcc is 0; it must be 1 … 80"),
        ({"lifter": -1}, "lifter is -1; it must be at least 0"),
    ],
)
def test_bad_mfcc(arguments, message):
    with pytest.raises(InputError, match=message):
        MFCC(**arguments)


@pytest.mark.parametrize("kind", [MelSpectrogram, Spectrogram, MFCC])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_feature_of_a_padded_row_is_that_of_the_row_alone(name, kind):
    if kind is MFCC and PRESETS[name].log is None:
        return
    module = kind(name).double()
    lengths = [1, 159, 161, 399, 400, 401, 1024, 2999]
    batch = torch.full((len(lengths), 3000), math.nan, dtype=torch.float64)
    for row, n in zip(batch, lengths, strict=True):
        row[:n] = noise(n, seed=n)
    features, num_frames = module(batch, torch.tensor(lengths))
    assert features.isfinite().all()
    for row, num, n in zip(features, num_frames.tolist(), lengths, strict=True):
        alone = module(noise(n, seed=n).double())
        assert num == alone.shape[1] == module.num_frames(n)
        torch.testing.assert_close(row[:, :num], alone, rtol=1e-8, atol=1e-8)
        assert (row[:, num:] == module.padding_value).all()
    # Float32 amplifies its rounding by a logarithm only where there is next to nothing.
    single, _ = kind(name)(batch.float(), torch.tensor(lengths))
    assert single.isfinite().all()


@pytest.mark.parametrize("framing", ["center", "hop", "valid", "snip"])
@pytest.mark.parametrize("pad_mode", ["constant", "reflect", "reflect_zero"])
@settings(deadline=None, max_examples=25)
@given(lengths=st.lists(st.integers(1, 900), min_size=1, max_size=4), stereo=st.booleans(), junk=st.booleans())
def test_a_padded_row_equals_the_row_alone(framing, pad_mode, lengths, stereo, junk):
    s = MelSettings(
        sample_rate=8000, n_fft=256, win_length=200, hop_length=80, n_mels=20, f_min=0, f_max=4000,
        framing=framing, pad_mode=pad_mode, log="log10", log_range=3.0, preemphasis=0.5,
    )  # fmt: skip
    module = MelSpectrogram(s)
    waves = [noise(1 + stereo, n, seed=n) for n in lengths]
    batch = torch.full((len(waves), 1 + stereo, max(lengths) + 7), math.nan if junk else 9.0)
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[1]] = wave
    mel, mel_lengths = module(batch, torch.tensor(lengths))
    assert not mel.isnan().any()
    assert mel_lengths.dtype == torch.int64
    for row, num, wave in zip(mel, mel_lengths.tolist(), waves, strict=True):
        alone = module(wave) if stereo else module(wave)[0]
        assert num == alone.shape[-1] == module.num_frames(wave.shape[1])
        assert (row[..., :num] - alone).abs().max() < 1e-5 if num else True
        assert (row[..., num:] == module.padding_value).all()


def test_padding_value_is_silence():
    for name in PRESETS:
        s = replace(PRESETS[name], log_range=None)
        module = MelSpectrogram(s)
        assert torch.allclose(module(torch.zeros(8000)), torch.tensor(module.padding_value), atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    num_samples=st.integers(1, 700),
    n_fft=st.integers(3, 128),
    hop=st.integers(1, 128),
    framing=st.sampled_from(["center", "hop", "valid"]),
    pad_mode=st.sampled_from(["constant", "reflect"]),
    whole_hops=st.booleans(),
)
def test_shapes_at_any_length(num_samples, n_fft, hop, framing, pad_mode, whole_hops):
    s = MelSettings(
        sample_rate=8000, n_fft=n_fft, win_length=max(1, n_fft - 2), hop_length=min(hop, n_fft), n_mels=2,
        f_min=0, f_max=4000, framing=framing, pad_mode=pad_mode, whole_hops=whole_hops and framing != "valid",
    )  # fmt: skip
    module = MelSpectrogram(s)
    expected = {"hop": -(-num_samples // s.hop_length), "center": 1 + num_samples // s.hop_length}.get(framing)
    mel = module(noise(3, num_samples))
    assert mel.shape == (3, 2, module.num_frames(num_samples))
    assert mel.isfinite().all()
    if s.whole_hops:
        assert mel.shape[2] == num_samples // s.hop_length
    elif expected is not None and (framing == "hop" or n_fft % 2 == 0):
        assert mel.shape[2] == expected


def test_many_frames_go_through_in_blocks():
    module = MelSpectrogram("codec")
    wave = noise(2, 160 * 700)
    whole = module(wave)
    assert (whole[:, :, :100] - module(wave[:, : 160 * 102])[:, :, :100]).abs().max() < 1e-5
    assert (whole[1] - module(wave[1])).abs().max() < 1e-5
    short = noise(300, 480)
    assert (module(short)[123] - module(short[123])).abs().max() < 1e-5


@pytest.mark.parametrize("hz", [200, 1000, 3456.7])
@pytest.mark.parametrize("name", ["codec", "torchaudio", "realtime"])
def test_a_tone_lands_in_its_mel_bin(name, hz):
    s = PRESETS[name]
    wave = torch.sin(2 * math.pi * hz * torch.arange(16000) / s.sample_rate)
    mel = MelSpectrogram(name)(wave)[:, 20]
    response = mel_filters(s)[:, round(hz * s.n_fft / s.sample_rate)]
    assert abs(int(mel.argmax()) - int(response.argmax())) <= 1


def test_hop_frames_are_centred_on_their_hop():
    wave = torch.zeros(16000)
    wave[160 * 30 + 80] = 1.0
    mel = MelSpectrogram("codec")(wave).exp().sum(0)
    assert int(mel.argmax()) == 30
    assert mel[29] == pytest.approx(mel[31].item(), rel=1e-3)


def test_shapes_of_inputs():
    module = MelSpectrogram("codec")
    assert module(noise(1600)).shape == (80, 10)
    assert module(noise(1, 1600)).shape == (1, 80, 10)
    assert module(noise(3, 1, 1600)).shape == (3, 80, 10)
    assert module(noise(3, 2, 1600)).shape == (3, 2, 80, 10)
    mel, lengths = module(noise(3, 2, 1600), torch.tensor([1600, 1, 161], dtype=torch.int32))
    assert mel.shape == (3, 2, 80, 10)
    assert lengths.tolist() == [10, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_in_float32(dtype):
    wave = noise(1600).to(dtype)
    expected = MelSpectrogram("codec")(wave.float())
    for module in (MelSpectrogram("codec"), MelSpectrogram("codec").to(dtype)):
        mel = module(wave)
        assert mel.dtype == torch.float32
        assert torch.equal(mel, expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(MelSpectrogram("codec")(wave.float()), expected)


def test_double_computes_from_the_exact_definition():
    module = MelSpectrogram("codec").double()
    assert module.window.dtype == module.filters.dtype == torch.float64
    np.testing.assert_array_equal(module.filters.numpy(), mel_filters(PRESETS["codec"]))
    assert module(noise(1600)).dtype == torch.float64
    assert module.float().window.dtype == torch.float32


def test_buffers_move_and_are_not_saved():
    module = MelSpectrogram("codec")
    assert module.state_dict() == {}
    assert module.to("meta").filters.device.type == "meta"


@pytest.mark.parametrize("name", ["codec", "whisper", "hifigan"])
def test_gradients(name):
    module = MelSpectrogram(name).double()
    wave = noise(1, 700).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda w: module(w)[:, ::20], (wave,), fast_mode=True)
    silence = torch.zeros(2, 1, 1000, requires_grad=True)
    module.float()(silence, torch.tensor([1000, 3]))[0].sum().backward()
    assert silence.grad.isfinite().all()


def test_settings_survive_json():
    for s in PRESETS.values():
        assert MelSettings.from_dict(json.loads(json.dumps(s.to_dict()))) == s


def test_settings_with_unknown_or_missing_fields():
    fields = PRESETS["codec"].to_dict()
    with pytest.raises(InputError, match=r"unknown fields \['n_mel'\].*n_mels"):
        MelSettings.from_dict({**fields, "n_mel": 3})
    del fields["n_mels"]
    with pytest.raises(InputError, match=r"incomplete.*n_mels"):
        MelSettings.from_dict(fields)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_fft": 256}, "n_fft 256 is shorter than win_length 512; raise n_fft"),
        (
            {"f_max": 9000},
            "f_max 9000 Hz is above the Nyquist frequency 8000 Hz.*lower f_max, or resample.*18000",
        ),
        ({"f_min": 8000}, "f_min 8000 Hz must be at least 0 and below f_max 8000 Hz"),
        ({"n_mels": 0}, "n_mels is 0; it must be a positive integer"),
        ({"hop_length": 2.5}, "hop_length is 2.5; it must be a positive integer"),
        ({"hop_length": 513}, "n_fft 512 is shorter than hop_length 513"),
        ({"power": 0}, "power is 0; it must be above 0"),
        ({"floor": 0}, "floor is 0; the logarithm needs a floor above 0"),
        ({"floor": math.nan}, "floor is nan; it must be a finite number"),
        ({"log": "ln"}, "log is 'ln'; it must be one of .*'natural'"),
        ({"pad_mode": "edge"}, "pad_mode is 'edge'; it must be one of"),
        ({"log": None, "log_scale": 2}, "need a logarithm"),
        ({"framing": "valid", "whole_hops": True}, "whole_hops needs padding"),
        ({"magnitude_eps": -1}, "magnitude_eps is -1; it must be at least 0"),
        ({"log_range": 0}, "log_range is 0; it must be above 0"),
        ({"whole_hops": 1}, "whole_hops is 1; it must be True or False"),
        ({"framing": "snip", "whole_hops": True}, "whole_hops needs padding, which framing 'snip' has not"),
        ({"window": "hamming"}, "window is 'hamming'; it must be one of .*'povey'"),
        ({"window": "povey", "win_length": 1}, "win_length is 1; a symmetric window such as 'povey' needs 2"),
        ({"preemphasis": 1}, "preemphasis is 1; it must be at least 0 and below 1, usually 0.97"),
        ({"frame_preemphasis": -0.1}, "frame_preemphasis is -0.1; it must be at least 0 and below 1"),
        ({"mel_scale": "kaldi"}, "triangles over mel, which have no area over Hz; set norm=None"),
        ({"normalize": "all"}, "normalize is 'all'; it must be one of"),
    ],
)
def test_bad_settings(change, message):
    with pytest.raises(InputError, match=message):
        replace(PRESETS["codec"], **change)


@pytest.mark.filterwarnings("default:mel bins")
def test_empty_filters_are_named():
    with pytest.warns(UserWarning, match=r"mel bins \[0, 3, 6, 13\] of 128 are always zero.*raise n_fft \(now 400\)"):
        MelSpectrogram("torchaudio")


@pytest.mark.parametrize(
    ("wave", "lengths", "message"),
    [
        (torch.zeros(100, dtype=torch.int16), None, "dtype torch.int16; it must be floating"),
        (torch.zeros(0), None, r"shape \[0\].*not empty"),
        (torch.zeros(1, 1, 1, 9), None, r"shape \[1, 1, 1, 9\]; it must be \[N\]"),
        (torch.zeros(2, 1, 9), torch.tensor([9]), r"shape \[1\] for a wave of shape \[2, 1, 9\]"),
        (torch.zeros(2, 1, 9), torch.tensor([9.0, 9.0]), "dtype torch.float32"),
        (torch.zeros(2, 1, 9), torch.tensor([9, 10]), "lengths are 9 … 10; they must be 1 … 9"),
        (torch.zeros(2, 1, 9), torch.tensor([0, 9]), "lengths are 0 … 9; they must be 1 … 9"),
        (torch.zeros(9), torch.tensor([9]), "one per row"),
    ],
)
def test_bad_input(wave, lengths, message):
    with pytest.raises(InputError, match=message):
        MelSpectrogram("codec")(wave, lengths)


def test_unknown_preset():
    with pytest.raises(InputError, match="no mel preset 'libros'; there are codec, encodec, hifigan, kaldi, librosa"):
        MelSpectrogram("libros")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_device_gives_the_same_numbers():
    for name in PRESETS:
        module = MelSpectrogram(name)
        wave, lengths = noise(3, 1, 9000), torch.tensor([9000, 1, 4444])
        expected, frames = module(wave, lengths)
        mel, device_frames = module.to("cuda")(wave.cuda(), lengths)
        assert mel.device.type == device_frames.device.type == "cuda"
        assert frames.tolist() == device_frames.tolist()
        assert (mel.cpu() - expected).abs().max() < (1e-3 if PRESETS[name].log else 1e-5 * expected.max())
