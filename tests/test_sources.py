import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.audio import read_audio
from codec.errors import AudioFileError, InputError
from codec.sources import AudioFiles, Excerpt, Tokens, output_names
from codec.tokens import TokenStore, TokenWriter

PROMPT = DATA / "speech_ru_female_please-hold_44k.flac"


def test_a_folder_becomes_keys_lengths_and_waves():
    source = AudioFiles(DATA, sample_rate=16000)
    lengths = dict(zip(source.keys(), source.lengths().tolist(), strict=True))
    assert len(lengths) == 15
    for key in ("speech_it_male_first-in-queue_16k.wav", "music_piano_stereo_48k.ogg"):
        wave = source.get([Excerpt(key, 0, lengths[key])])
        assert wave.shape == (1, 1, lengths[key])
        assert wave.abs().max() > 0.05


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_a_resampled_excerpt_is_the_slice_of_the_whole(data):
    source = AudioFiles(PROMPT, sample_rate=16000)
    total = int(source.lengths()[0])
    whole, _ = read_audio(PROMPT, sample_rate=16000, mono=True)
    start = data.draw(st.integers(0, total - 1))
    length = data.draw(st.integers(1, min(3000, total - start)))
    excerpt = source.get([Excerpt(PROMPT.name, start, length)])[0]
    torch.testing.assert_close(excerpt, whole[:, start : start + length], atol=2e-6, rtol=0)


def test_rows_of_different_lengths_are_padded_with_zeros():
    source = AudioFiles(PROMPT)
    batch = source.get([Excerpt(PROMPT.name, 0, 100), Excerpt(PROMPT.name, 30000, 300)])
    assert batch.shape == (2, 1, 300)
    assert batch[0, :, 100:].abs().sum() == 0


def test_a_span_beyond_the_items_end_is_filled_with_zeros():
    source = AudioFiles(PROMPT, sample_rate=16000)
    total = int(source.lengths()[0])
    batch = source.get([Excerpt(PROMPT.name, total - 50, 200)])
    assert batch.shape == (1, 1, 200)
    assert batch[..., 50:].abs().sum() == 0
    torch.testing.assert_close(batch[..., :50], source.get([Excerpt(PROMPT.name, total - 50, 50)]))


def test_audio_errors(tmp_path):
    with pytest.raises(InputError, match=r"sample rates .*8000, 16000.* give sample_rate"):
        AudioFiles(DATA)
    (tmp_path / "bad.wav").write_bytes(b"RIFF but no more")
    with pytest.raises(AudioFileError, match=r"bad\.wav"):
        AudioFiles(tmp_path)


@pytest.fixture
def store(tmp_path, lookahead_codec):
    path = tmp_path / "store.ctok"
    rng = np.random.default_rng(0)
    with TokenWriter(path, lookahead_codec.spec) as writer:
        for key, frames, cut in (("a", 40, 0), ("b", 700, 319), ("c", 1, 319)):
            writer.add(key, rng.integers(0, 32, (4, frames)), num_samples=frames * 320 - cut)
    return TokenStore(path)


def test_tokens_bring_the_decoders_context_where_the_item_has_it(store):
    source = Tokens(store)
    assert source.context == store.spec.decode_context
    left, right = source.context
    batch = source.get([Excerpt("b", 100, 50), Excerpt("a", 0, 40), Excerpt("c", 0, 5), Excerpt("b", 690, 50)])
    codes, read = batch.packed.unpack()
    assert batch.skip.tolist() == [left, 0, 0, left]
    assert batch.lengths.tolist() == [50, 40, 1, 10]
    assert batch.num_samples.tolist() == [50 * 320, 40 * 320, 1, 10 * 320 - 319]
    assert read.tolist() == [50 + left + right, 40, 1, 10 + left]
    assert np.array_equal(codes[0, :, : read[0]], store.read("b", 100 - left, int(read[0])))


def test_bare_codes_and_prefix(store):
    batch = Tokens(store, context=(0, 0), n_quantizers=2).get([Excerpt("b", 250, 20)])
    codes, _ = batch.packed.unpack()
    assert np.array_equal(codes[0], store.read("b", 250, 20, 2))


def test_output_names():
    keys = ["a/b.flac", "a/c.wav", "a/c.mp3", "v1.5 final", "d.tar"]
    assert output_names(keys, ".wav") == [
        "a/b.wav",
        "a/c.wav.wav",
        "a/c.mp3.wav",
        "v1.5 final.wav",
        "d.tar.wav",
    ]
    for key in ("../x.wav", "/etc/passwd", "a/../../b", "..", "a\0b", "a\\..\\b", ""):
        with pytest.raises(InputError, match="can't be a file name"):
            output_names([key], ".wav")
