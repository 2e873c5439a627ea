"""Wrappers: what they ask of their source and what they make of it, by signal properties."""

import dataclasses
import fcntl
import math
import multiprocessing
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.audio import resample
from codec.errors import InputError
from codec.excerpts import Choice, RandomExcerpts, Uniform
from codec.features import PRESETS, MelSettings, MelSpectrogram
from codec.sources import (
    Arrays,
    AudioFiles,
    Cache,
    Excerpt,
    Gain,
    LabelPitchShift,
    LabelTimeStretch,
    Map,
    Mel,
    Mixup,
    Pad,
    PitchShift,
    Request,
    Resample,
    Segments,
    Strings,
    TimeStretch,
    Tokens,
)

RATE = 16000


def tone(hz: float, seconds: float = 3.0, rate: int = RATE) -> np.ndarray:
    return np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate, dtype=np.float32)[None]


def pitch(wave: torch.Tensor, rate: int = RATE) -> float:
    """Frequency of the strongest tone, in Hz, by interpolation between bins."""
    wave = wave.reshape(-1)
    spectrum = torch.fft.rfft(wave * torch.hann_window(len(wave))).abs().log()
    top = int(spectrum[1:-1].argmax()) + 1
    left, middle, right = spectrum[top - 1 : top + 2].tolist()
    return (top + (left - right) / (2 * (left - 2 * middle + right))) * rate / len(wave)


def noise(seed: int = 0, length: int = 30000, channels: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(channels, length)).astype(np.float32)


ARRAYS = {"a": noise(0, 30000), "b": noise(1, 700), "c": noise(2, 1)}


def a_slice(data, total: int, longest: int) -> tuple[int, int]:
    start = data.draw(st.integers(0, total - 1))
    return start, data.draw(st.integers(1, min(longest, total - start)))


# --- exact ones: an excerpt is that slice of the whole


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_padding_is_that_of_numpy(data):
    before, after = data.draw(st.integers(0, 900)), data.draw(st.integers(0, 900))
    mode = data.draw(st.sampled_from(["zero", "reflect"]))
    key = data.draw(st.sampled_from("abc"))
    source = Pad(Arrays(ARRAYS, RATE), mode, Fraction(before, RATE), Fraction(after, RATE))
    expected = np.pad(ARRAYS[key], ((0, 0), (before, after)), mode="reflect" if mode == "reflect" else "constant")
    assert source.length(key) == expected.shape[1]
    assert source.lengths().tolist() == [len(a[0]) + before + after for a in ARRAYS.values()]
    start, length = a_slice(data, expected.shape[1], 3000)
    other = Excerpt("a", 7, 20)
    batch = source.get([Excerpt(key, start, length), other])
    np.testing.assert_array_equal(batch[0, :, :length], expected[:, start : start + length])
    beyond = source.get([Excerpt(key, expected.shape[1] - 1, 10)])
    assert beyond[0, 0, 0] == expected[0, -1]
    assert not beyond[..., 1:].any()


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_resampled_excerpts_are_slices_of_the_resampled_whole(data):
    to = data.draw(st.sampled_from([8000, 11025, 22050, 16000]))
    source = Resample(Arrays(ARRAYS, RATE), to)
    key = data.draw(st.sampled_from("abc"))
    whole = resample(torch.from_numpy(ARRAYS[key]), RATE, to)
    assert source.rate() == to
    assert source.length(key) == whole.shape[1]
    start, length = a_slice(data, whole.shape[1], 2000)
    batch = source.get([Excerpt(key, start, length), Excerpt("a", 100, 50)])
    torch.testing.assert_close(batch[0, :, :length], whole[:, start : start + length], atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_mel_excerpts_are_slices_of_the_mel_of_the_whole(data):
    framing = data.draw(st.sampled_from(["hop", "center"]))
    preset = dataclasses.replace(
        PRESETS[data.draw(st.sampled_from(["codec", "realtime"]))],
        framing=framing,
        pad_mode=data.draw(st.sampled_from(["constant", "reflect"])),
        whole_hops=data.draw(st.booleans()),
    )
    source = Mel(Arrays(ARRAYS, RATE), preset)
    key = data.draw(st.sampled_from("abc"))
    mel = MelSpectrogram(preset)
    if not preset.num_frames(ARRAYS[key].shape[1]):
        assert source.length(key) == 0
        return
    whole = mel(torch.from_numpy(ARRAYS[key])[None])[0]
    assert source.rate() == Fraction(RATE, mel.settings.hop_length)
    assert source.length(key) == whole.shape[1]
    start, length = a_slice(data, whole.shape[1], 60)
    batch = source.get([Excerpt(key, start, length), Excerpt("a", 3, 4)])
    torch.testing.assert_close(batch[0, :, :length], whole[:, start : start + length], atol=2e-4, rtol=1e-4)
    beyond = source.get([Excerpt(key, whole.shape[1] - 1, 4)])
    assert (beyond[..., 1:] == mel.padding_value).all()


def test_streams_are_gapless_and_independent_of_the_cutting(monkeypatch):
    prompt = DATA / "speech_ru_female_please-hold_44k.flac"
    files = AudioFiles(prompt, sample_rate=RATE)
    sources = {"file": files, "mel": Mel(files), "pad": Pad(files, "reflect", "0.1"), "slow": Resample(files, 8000)}
    for name, source in sources.items():
        total = source.length(prompt.name)
        whole = source.get([Excerpt(prompt.name, 0, total)])
        for size in (total // 3 + 1, total - 1, total, 10 * total):
            pieces = list(source.stream(prompt.name, size))
            assert sum(piece.shape[-1] for piece in pieces) == total
            torch.testing.assert_close(torch.cat(pieces, -1), whole, atol=5e-4 if name == "mel" else 1e-5, rtol=1e-4)
    monkeypatch.setattr("codec.audio.streaming._RESAMPLED_AT_ONCE", 5000)
    pieces = list(files.stream(prompt.name, 777))
    assert {piece.shape[-1] for piece in pieces[:-1]} == {777}
    whole = files.get([Excerpt(prompt.name, 0, files.length(prompt.name))])
    torch.testing.assert_close(torch.cat(pieces, -1), whole, atol=1e-5, rtol=0)
    with pytest.raises(InputError, match="size is 0; it must be at least 1"):
        next(files.stream(prompt.name, 0))
    with pytest.raises(InputError, match="AudioFiles has no item 'x'"):
        next(files.stream("x", 5))


# --- named values


def test_gain_adds_decibels():
    source = Gain(Arrays(ARRAYS, RATE), "gain", "more")
    batch = source.get(
        [Request("a", 5, 9, {"gain": 20.0, "more": -26.0}), Request("b", 0, 9, {"gain": 0.0, "more": 0.0})]
    )
    torch.testing.assert_close(batch[0], torch.from_numpy(ARRAYS["a"][:, 5:14]) * 10 ** (-6 / 20))
    assert torch.equal(batch[1], torch.from_numpy(ARRAYS["b"][:, :9]))
    with pytest.raises(InputError, match=r"request for 'a' has no value 'gain' \(it has \[\]\); give the loader rngs="):
        source.get([Excerpt("a", 0, 9)])


def test_map_gets_the_batch_and_the_values():
    source = Map(Arrays(ARRAYS, RATE), lambda x, p: x * p[:, None, None], "p")
    batch = source.get([Request("a", 0, 4, {"p": 2.0}), Request("a", 0, 4, {"p": 3.0})])
    torch.testing.assert_close(batch[0] / 2, batch[1] / 3)


def test_mixup_mixes_waves_and_targets_alike():
    arrays = Arrays({"a": np.ones((1, 500), np.float32), "b": np.zeros((1, 500), np.float32)}, 100)
    targets = Arrays({"a": np.ones((500,), np.float32), "b": np.zeros((500,), np.float32)}, 100)
    loader = RandomExcerpts(
        {"x": Mixup(arrays, "m"), "y": Mixup(targets, "m")}, 1, batch_size=8, seed=0, rngs={"m": Uniform(0, 0.5)}
    )
    batch = loader[0]
    own = torch.tensor([float(key == "a") for key in batch["key"]])
    expected = own + (own.roll(-1) - own) * batch["m"]
    torch.testing.assert_close(batch["x"][:, 0, 0], expected)
    torch.testing.assert_close(batch["y"][:, 0], expected)


@pytest.mark.parametrize("semitones", [-7.0, -1.0, 0.0, 3.0, 12.0])
def test_pitch_shift_shifts_tones_and_keeps_time(semitones):
    arrays = Arrays({"a": tone(440)}, RATE)
    wave = PitchShift(arrays, "p").get([Request("a", 8000, 16000, {"p": semitones})])
    assert wave.shape == (1, 1, 16000)
    assert pitch(wave) == pytest.approx(440 * 2 ** (semitones / 12), rel=2e-3)
    assert wave.std() == pytest.approx(math.sqrt(0.5), rel=0.1)
    if semitones == 0:
        assert torch.equal(wave, arrays.get([Excerpt("a", 8000, 16000)]))
    click = np.zeros((1, 48000), np.float32)
    click[0, 20000:20100] = 1
    moved = PitchShift(Arrays({"a": click}, RATE), "p").get([Request("a", 15000, 10000, {"p": semitones})])
    energy = moved[0, 0].square()
    centre = float((energy * torch.arange(10000)).sum() / energy.sum())
    assert centre == pytest.approx(5050, abs=200)


@pytest.mark.parametrize("speed", [0.7, 1.0, 1.5])
def test_time_stretch_keeps_the_pitch_and_compresses_time(speed):
    wave = TimeStretch(Arrays({"a": tone(440)}, RATE), "s").get([Request("a", 8000, 16000, {"s": speed})])
    assert wave.shape == (1, 1, 16000)
    assert pitch(wave) == pytest.approx(440, rel=2e-3)
    click = np.zeros((1, 48000), np.float32)
    click[0, 14000:14100] = 1
    moved = TimeStretch(Arrays({"a": click}, RATE), "s").get([Request("a", 8000, 16000, {"s": speed})])
    energy = moved[0, 0].square()
    centre = float((energy * torch.arange(16000)).sum() / energy.sum())
    assert centre == pytest.approx(6050 / speed, abs=200)


def test_mels_are_stretched_and_shifted_in_the_filterbank():
    wave = np.concatenate([tone(440, 1.5), tone(880, 1.5)], axis=1)
    source = Mel(Arrays({"a": wave}, RATE), stretch="s", shift="p")
    plain = Mel(Arrays({"a": wave}, RATE))
    flat, low = Request("a", 100, 100, {"s": 1.0, "p": 0.0}), Request("a", 100, 100, {"s": 2.0, "p": 0.0})
    up = Request("a", 100, 100, {"s": 1.0, "p": 12.0})
    mel = source.get([flat, low, up]).exp()
    torch.testing.assert_close(mel[0], plain.get([flat])[0].exp(), atol=1e-3, rtol=1e-2)
    bins = mel.argmax(1)
    change = [int((row[:-1] != row[1:]).nonzero()[0]) for row in bins]
    assert change[0] == pytest.approx(49, abs=2)  # frame 150 of the item
    assert change[1] == pytest.approx(24, abs=2)
    assert abs(int(bins[2, 10]) - int(bins[0, 80])) <= 1  # an octave up, 440 Hz is where 880 Hz was
    assert source.reach(100, {"s": 1.5}) == 150


def test_labels_stretch_with_the_waves():
    """A tone begins at 2 s; the labels say so, at any speed and position."""
    wave = np.concatenate([noise(0, 32000) * 1e-3, tone(440, 2)], axis=1)
    rows = [("a", 0, 2, "noise"), ("a", 2, 4, "tone")]
    loader = RandomExcerpts(
        {
            "x": TimeStretch(Arrays({"a": wave}, RATE), "s"),
            "y": LabelTimeStretch(Segments(rows, "sequence", rate=50), "s"),
            "z": LabelTimeStretch(Segments(rows, "center", rate=RATE), "s"),
        },
        1,
        batch_size=16,
        seed=0,
        rngs={"s": Uniform(0.6, 1.7)},
    )
    checked = 0
    for n in range(4):
        batch = loader[n]
        loud = batch["x"][:, 0].unfold(1, 320, 320).std(-1) > 0.2
        for row, labels, middle in zip(loud, batch["y"], batch["z"], strict=True):
            assert (labels >= 0).all()
            assert abs(int(row.sum()) - int(labels.sum())) <= 3  # the vocoder smears over a window
            if 3 < int(labels.sum()) < 47:
                checked += 1
                assert middle == (1 if labels.sum() > 25 else 0)
    assert checked > 5


def test_the_challenge():
    """x is shifted by a, its target by a + b, and b is in the batch: what self-supervised pitch learning needs."""
    arrays = Arrays({f"{hz}": tone(hz) for hz in (220, 330, 440)}, RATE)
    notes = Arrays({f"{hz}": np.full(300, hz, np.float32) for hz in (220, 330, 440)}, 100)
    loader = RandomExcerpts(
        {
            "x": PitchShift(arrays, "a"),
            "y": PitchShift(arrays, "a", "b"),
            "mel": Mel(arrays, shift=("a", "b")),
            "note": LabelPitchShift(notes, "a", unit="hz"),
            "name": Strings({f"{hz}": f"{hz} Hz" for hz in (220, 330, 440)}),
        },
        1,
        batch_size=4,
        seed=1,
        rngs={"a": Uniform(-3, 3), "b": Choice((-4.0, 2.0, 5.0))},
    )
    seen = set()
    for n in range(3):
        batch = loader[n]
        assert batch["mel"].shape == (4, 80, 100)
        for row in range(4):
            a, b, hz = float(batch["a"][row]), float(batch["b"][row]), float(batch["key"][row])
            assert pitch(batch["x"][row]) == pytest.approx(hz * 2 ** (a / 12), rel=2e-3)
            assert pitch(batch["y"][row]) == pytest.approx(hz * 2 ** ((a + b) / 12), rel=2e-3)
            assert batch["note"][row, 0] == pytest.approx(hz * 2 ** (a / 12), rel=1e-5)
            assert batch["name"][row] == f"{batch['key'][row]} Hz"
            seen.add(b)
    assert seen == {-4.0, 2.0, 5.0}


# --- cache


class Counting(Arrays):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.count = 0
        self.lock = threading.Lock()

    def get(self, excerpts):
        self.count += sum(e.length for e in excerpts)
        return super().get(excerpts)


@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_cache_gives_what_its_source_gives(data, tmp_path_factory):
    plain = Arrays(ARRAYS, RATE)
    room = data.draw(st.sampled_from([10**6, 4 * 64 * 100]))
    cache = Cache(plain, tmp_path_factory.mktemp("cache"), max_bytes=room, block=64)
    for _ in range(12):
        key = data.draw(st.sampled_from("abc"))
        asked = [Excerpt(key, *a_slice(data, plain.length(key), 5000)), Excerpt("a", 29990, 40)]
        assert torch.equal(cache.get(asked), plain.get(asked))
    assert cache.num_blocks <= room // 256


def test_a_cache_is_shared_kept_and_bounded(tmp_path):
    source = Counting(ARRAYS, RATE)
    asked = [Excerpt("a", 1000, 5000), Excerpt("b", 0, 700)]
    first = Cache(source, tmp_path / "c", max_bytes=10**6, block=100)
    expected = first.get(asked)
    made = source.count
    assert torch.equal(first.get(asked), expected)
    again = Cache(source, tmp_path / "c", max_bytes=10**6, block=100)
    assert torch.equal(again.get(asked), expected)
    assert source.count <= made + 1  # one position tells shape and dtype
    assert (tmp_path / "c" / "data.npy").stat().st_size < 10**6 + 200
    with pytest.raises(InputError, match="is the cache of another source or size; give another folder"):
        Cache(Arrays({"a": ARRAYS["a"]}, RATE), tmp_path / "c", max_bytes=10**6, block=100)
    with pytest.raises(InputError, match="max_bytes is 100, one block takes 400; raise it, or lower block"):
        Cache(source, tmp_path / "d", max_bytes=100, block=100)


def _fill(folder, seed, queue):
    source = Arrays(ARRAYS, RATE)
    cache = Cache(source, folder, max_bytes=10**6, block=128)
    rng = np.random.default_rng(seed)
    asked = [[Excerpt("a", int(start), 700)] for start in rng.integers(0, 29000, 60)]
    queue.put(all(torch.equal(cache.get(some), source.get(some)) for some in asked))


def test_processes_fill_a_cache_together(tmp_path):
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    processes = [context.Process(target=_fill, args=(tmp_path / "c", seed, queue)) for seed in range(4)]
    for process in processes:
        process.start()
    assert all(queue.get(timeout=60) for _ in processes)
    for process in processes:
        process.join()


def test_only_one_process_at_a_time_adds_to_a_cache(tmp_path):
    cache = Cache(Arrays(ARRAYS, RATE), tmp_path, max_bytes=10**6, block=128)
    thread = threading.Thread(target=cache.get, args=([Excerpt("a", 0, 700)],))
    with (tmp_path / "lock").open("w") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert cache.num_blocks == 0
    thread.join()
    assert cache.num_blocks == 6


def test_the_chain_works_in_spawned_workers(tmp_path):
    padded = Pad(AudioFiles(DATA, sample_rate=RATE), "zero", "0.5")
    loader = RandomExcerpts(
        {"x": Gain(padded, "gain"), "mel": Cache(Mel(padded), tmp_path, max_bytes=10**7)},
        "0.5",
        batch_size=4,
        seed=0,
        rngs={"gain": Uniform(-6, 6)},
    )  # fmt: skip
    spawned = loader.loader(num_batches=3, num_workers=1, start_method="spawn", rank=1, world_size=2)
    for n, batch in enumerate(spawned):
        assert torch.equal(batch["x"], loader[2 * n + 1]["x"])
        assert batch["gain"].tolist() == loader[2 * n + 1]["gain"].tolist()
        torch.testing.assert_close(batch["mel"], loader[2 * n + 1]["mel"])


# --- errors


def test_errors():
    arrays = Arrays(ARRAYS, RATE)
    frames = Arrays({"a": np.zeros((80, 50), np.float32)}, "22050/512")
    strings = Strings({"a": "x"})
    segments = Segments([("a", 0, 1, "x")], "sequence", rate=10)
    for make, message in (
        (lambda: Gain(arrays), r"no named value is given; write Gain\(source, 'gain_db'\)"),
        (lambda: Pad(arrays, "mirror", 1), "mode is 'mirror'; it must be 'zero' or 'reflect'"),
        (lambda: Pad(arrays, "zero", "1/3"), r"padding of 1/3 s is 5333.33 positions at 16000 .*take 5333/16000 s"),
        (lambda: Pad(arrays, "zero", -1), "must be a whole number ≥ 0: take 0 s"),
        (lambda: Pad(strings, "zero", 1), "Strings has no time to pad"),
        (lambda: Pad(segments, "reflect", 1), "labels can't be mirrored; pad them with mode='zero'"),
        (lambda: Resample(frames, 8000), "Resample needs a wave at whole Hz; the source has 11025/256 positions"),
        (lambda: Mel(Arrays(ARRAYS, 8000)), "the source has 8000 Hz, the mel settings 16000 Hz; give AudioFiles that"),
        (lambda: Mel(arrays, "whisper"), "normalise over the whole item, which an excerpt doesn't have"),
        (lambda: TimeStretch(arrays), r"no named value is given; write TimeStretch\(source, 'stretch'\)"),
        (lambda: TimeStretch(strings, "s"), "Strings has no time to stretch"),
        (lambda: PitchShift(arrays), r"write PitchShift\(source, 'semitones'\)"),
        (lambda: LabelPitchShift(arrays, "p", unit="cents"), r"unit='cents', names=\('p',\); write LabelPitchShift"),
        (lambda: TimeStretch(arrays, "s").get([Request("a", 0, 9, {"s": 0.0})]), "TimeStretch: s is 0; it must be"),
        (lambda: next(TimeStretch(arrays, "s").stream("a", 9)), "TimeStretch can't stream: its pieces wouldn't join"),
        (lambda: Mixup(segments, "m").get([Request("a", 0, 9, {"m": 0.0})]), "needs floating targets, not torch.int64"),
        (lambda: LabelPitchShift(segments, "p", unit="hz").get([Request("a", 0, 9, {"p": 0.0})]), "needs floating"),
        (lambda: Gain(strings, "p").get([Request("a", 0, 1, {"p": 0.0})]), "Gain works on tensors, Strings gives list"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            make()


def test_tokens_say_that_they_are_no_tensors(tmp_path, lookahead_codec):
    from codec.tokens import TokenWriter

    with TokenWriter(tmp_path / "t.ctok", lookahead_codec.spec) as writer:
        writer.add("a", np.zeros((4, 40), np.int64), num_samples=40 * 320)
    tokens = Tokens(tmp_path / "t.ctok")
    with pytest.raises(InputError, match=r"Gain works on tensors, Tokens gives TokenBatch.*after decoding the batch"):
        Gain(tokens, "p").get([Request("a", 0, 1, {"p": 0.0})])
    loader = RandomExcerpts({"x": tokens}, 1, batch_size=1, seed=0, short="repeat")
    with pytest.raises(
        InputError, match="short='repeat' needs tensors, source 'x' gives TokenBatch; use 'pad' or 'skip'"
    ):
        loader[0]


def test_settings_are_shared_by_name():
    assert Mel(Arrays(ARRAYS, RATE), MelSettings(**MelSpectrogram("codec").settings.to_dict())).rate() == 100
