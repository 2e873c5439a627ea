"""Specs, reading into given memory, and what is left to the consumer."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import DATA
from test_excerpts import Ramp

from codec.audio import read_audio
from codec.decode import BatchDecoder
from codec.errors import InputError
from codec.excerpts import Excerpts, RandomExcerpts, Uniform
from codec.features import MelSpectrogram
from codec.sources import (
    Arrays,
    AudioFiles,
    Batched,
    Excerpt,
    Gain,
    ItemSpec,
    LabelTimeStretch,
    Map,
    Mel,
    Pad,
    Request,
    Segments,
    Strings,
    Tokens,
)
from codec.tokens import TokenStore, TokenWriter

RATE = 16000
STEREO = "music_piano_stereo_48k.ogg"
FILES = AudioFiles(DATA, sample_rate=RATE)
KEYS = FILES.keys()


@pytest.fixture
def store(tmp_path, lookahead_codec):
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "store.ctok", lookahead_codec.spec) as writer:
        for key, frames, cut in (("a", 90, 0), ("b", 300, 319), ("c", 60, 100)):
            writer.add(key, rng.integers(0, 32, (4, frames)), num_samples=frames * 320 - cut)
    return TokenStore(tmp_path / "store.ctok")


# --- spec


def sources(store):
    rows = [("a", 0, 1, "x"), ("a", 1, 2, "y")]
    arrays = Arrays({"a": np.zeros((3, 7, 50), np.float16), "b": np.zeros(1, np.int16)}, 100)
    return [
        (FILES, STEREO, (1, None), torch.float32),
        (AudioFiles(DATA, sample_rate=RATE, mono=False), STEREO, (2, None), torch.float32),
        (arrays, "a", (3, 7, None), torch.float16),
        (arrays, "b", (None,), torch.int16),
        (Segments(rows, "sequence", rate=10), "a", (None,), torch.int64),
        (Segments(rows, "mask", rate=10), "a", (2, None), torch.float32),
        (Segments(rows, "center", rate=10), "a", (), torch.int64),
        (Segments(rows[:1], "global"), "a", (), torch.int64),
        (Strings({"a": "x"}), "a", (), None),
        (Tokens(store), "b", (4, None), None),
        (Tokens(store, n_quantizers=2), "b", (2, None), None),
        (Mel(FILES, stretch="s", shift="p"), STEREO, (MelSpectrogram("codec").settings.n_mels, None), torch.float32),
        (Gain(Pad(FILES, "zero", 1), "g"), STEREO, (1, None), torch.float32),
        (LabelTimeStretch(Segments(rows, "sequence", rate=10), "s"), "a", (None,), torch.int64),
        (Map(FILES, torch.Tensor.double), STEREO, (1, None), torch.float64),
    ]


def test_a_spec_says_what_get_gives(store):
    values = {"s": 1.5, "p": 2.0, "g": -3.0}
    for source, key, shape, dtype in sources(store):
        spec = source.spec(key)
        assert spec == ItemSpec(shape, dtype, source.rate()), type(source)
        data = source.get([Request(key, 0, 5, values), Request(key, 0, 3, values)])
        if dtype is not None:
            assert data.dtype == dtype
            assert list(data.shape) == [2, *(5 if n is None else n for n in shape)]
    assert ItemSpec((8, None), None, Fraction(50)).channels == 8
    assert ItemSpec((None,), torch.int64, Fraction(50)).channels is None
    for source in (FILES, Tokens(store), Segments([("a", 0, 1, "x")], "center", rate=1), Strings({"a": "b"})):
        with pytest.raises(InputError, match="no item 'nobody'"):
            source.spec("nobody")


# --- into given memory


@pytest.mark.parametrize("mono", [True, False])
def test_batches_are_read_into_given_memory(mono):
    keys = [key for key in KEYS if mono or not ("stereo" in key or "left" in key)]
    files = AudioFiles({key: DATA / key for key in keys}, sample_rate=RATE, mono=mono)
    mel = Mel(AudioFiles({key: DATA / key for key in keys}, sample_rate=RATE))
    loader = RandomExcerpts({"x": files, "mel": mel}, "0.5", batch_size=6, seed=0, short="pad", items="uniform")
    out = {
        name: torch.full([6, *(n or int(Fraction("0.5") * source.rate()) for n in source.spec(keys[0]).shape)], 7.0)
        for name, source in loader.sources.items()
    }
    for n in range(4):
        expected, found = loader[n], loader.finish(loader.fetch(n, out=out))
        for name in out:
            assert found[name] is out[name]
            assert torch.equal(found[name], expected[name])
        assert found["key"] == expected["key"]


def test_quick_rows_go_into_given_memory_as_well():
    name = "speech_it_male_first-in-queue_16k.wav"
    files = AudioFiles({name: DATA / name})
    total = files.length(name)
    asked = [Excerpt(name, total - 50, 100), Excerpt(name, 7, 100)]
    for width in (100, 130):
        out = torch.full((2, 1, width), 7.0)
        files.get_into(asked, out)
        assert torch.equal(out[..., :100], files.get(asked))
        assert not out[..., 100:].any()
    full = torch.full((2, 1, 90), 7.0)
    files.get_into([Excerpt(name, 5, 90), Excerpt(name, 9, 90)], full)
    assert torch.equal(full, files.get([Excerpt(name, 5, 90), Excerpt(name, 9, 90)]))
    for bad in (torch.zeros(2, 1, 99), torch.zeros(1, 1, 100), torch.zeros(2, 1, 100, dtype=torch.int16)):
        with pytest.raises(InputError, match=r"out is \[.*the batch needs \[2, 1, 100\] of torch.float32: see spec"):
            files.get_into(asked, bad)
    with pytest.raises(InputError, match="has 1 channels, the batch 2; give mono=True"):
        files.get_into(asked, torch.zeros(2, 2, 100))
    with pytest.raises(InputError, match="Strings gives list, which doesn't go into a tensor"):
        Strings({"a": "b"}).get_into([Excerpt("a", 0, 1)], torch.zeros(1))


# --- in the consumer


def shift(wave, level):
    return wave + level.view(-1, 1, 1)


@pytest.mark.parametrize("start_method", [None, "fork", "spawn"])
def test_mels_of_whole_batches_are_made_where_batches_are_consumed(start_method):
    """The module can't be pickled, as one that lives on a device shouldn't be."""
    mel = MelSpectrogram("codec")
    mel.unpicklable = lambda: None
    files = AudioFiles(DATA, sample_rate=RATE)
    batched = Batched(Batched(files, shift, "level", device="cpu"), mel)
    loader = RandomExcerpts({"x": batched}, "0.5", batch_size=4, seed=3, rngs={"level": Uniform(-1, 1)})
    workers = {} if start_method is None else {"num_workers": 1, "start_method": start_method}
    batches = list(loader.loader(num_batches=3, **workers))
    assert len(batches) == 3
    for n, batch in enumerate(batches):
        raw = RandomExcerpts({"x": files}, "0.5", batch_size=4, seed=3)[n]
        assert torch.equal(loader.fetch(n)["x"], raw["x"])
        expected = mel(shift(raw["x"], batch["level"]))
        assert torch.equal(batch["x"], expected)
        assert torch.equal(loader[n]["x"], expected)
        x, key = batch.as_tuple("x", "key")
        assert x is batch["x"] and key == raw["key"]


def test_a_batched_mel_is_that_of_the_worker_but_for_the_edges():
    """What the batch lacks is the item's samples around each excerpt."""
    here = Batched(FILES, MelSpectrogram("codec"))
    batch = RandomExcerpts({"x": here, "y": Mel(FILES)}, 1, batch_size=4, seed=0)[0]
    frames = batch["y"].shape[-1]
    torch.testing.assert_close(batch["x"][..., 3 : frames - 3], batch["y"][..., 3:-3], atol=1e-3, rtol=1e-3)


def test_tokens_are_decoded_where_batches_are_consumed(store, lookahead_codec):
    decoder = BatchDecoder(lookahead_codec)
    loader = RandomExcerpts({"x": Batched(Tokens(store), decoder)}, 1, batch_size=3, seed=0)
    plain = RandomExcerpts({"x": Tokens(store)}, 1, batch_size=3, seed=0)
    for n, batch in enumerate(loader.loader(num_batches=3, num_workers=1)):
        assert batch["x"].data.shape == (3, 1, RATE)
        assert torch.equal(batch["x"].data, decoder.decode(plain[n]["x"]).data)
        assert batch["key"] == plain[n]["key"]
    whole = {}
    for batch in Excerpts({"x": Batched(Tokens(store), decoder)}, None, batch_size=1).loader():
        whole[batch["key"][0]] = batch["x"].data
    assert {key: wave.shape[-1] for key, wave in whole.items()} == {key: store.info(key).num_samples for key in "abc"}


@pytest.mark.cuda
def test_batches_are_finished_on_the_device(cuda):
    """With workers that know nothing of it."""
    mels = Batched(FILES, MelSpectrogram("codec").to(cuda), device=cuda)
    here = Batched(FILES, MelSpectrogram("codec"))
    loader = RandomExcerpts({"x": mels, "y": here}, 1, batch_size=4, seed=0)
    for batch in loader.loader(num_batches=3, num_workers=2, pin_memory=True):
        assert batch["x"].device.type == "cuda"
        torch.testing.assert_close(batch["x"].cpu(), batch["y"], atol=1e-3, rtol=1e-3)


def test_batches_are_replaced_not_changed():
    batch = RandomExcerpts({"x": Ramp({"a": 500}, 100)}, 1, batch_size=2, seed=0)[0]
    other = batch.replace(x=1, more=2)
    assert type(other) is type(batch)
    assert other.as_tuple("x", "more") == (1, 2)
    assert batch["x"] is not other["x"] and "more" not in batch
    assert other["start"] is batch["start"]


def test_batched_errors():
    batched = Batched(FILES, shift, "level")
    with pytest.raises(InputError, match="Gain over Batched: that is where workers hand out; put Gain below it"):
        Gain(batched, "gain")
    with pytest.raises(InputError, match=r"the batch has no value 'level'; give the loader rngs=\{'level'"):
        RandomExcerpts({"x": batched}, 1, batch_size=2, seed=0)[0]
    wave = batched.get([Request(KEYS[0], 0, 9, {"level": 0.5})])
    expected, _ = read_audio(DATA / KEYS[0], num_samples=9, sample_rate=RATE, mono=True)
    assert torch.equal(wave, expected[None] + 0.5)
