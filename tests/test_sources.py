import os

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

import codec.audio.streaming
from codec.audio import read_audio
from codec.errors import AudioFileError, InputError
from codec.excerpts import RandomExcerpts
from codec.sources import Arrays, AudioFiles, Excerpt, Tokens, output_names
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


def test_a_manifest_spares_opening_the_files(tmp_path, monkeypatch):
    source = AudioFiles(DATA, sample_rate=16000)
    source.save_manifest(tmp_path / "files.tsv")
    with monkeypatch.context() as patched:
        patched.setattr("codec.audio.audio_info", lambda path: pytest.fail(f"{path} was opened"), raising=False)
        again = AudioFiles(tmp_path / "files.tsv", sample_rate=16000)
    assert list(again.keys()) == list(source.keys())
    assert again.lengths().tolist() == source.lengths().tolist()
    asked = [Excerpt(key, 100, 900) for key in again.keys()]
    assert torch.equal(again.get(asked), source.get(asked))
    header = "key\tpath\tsample_rate\tnum_samples\n"
    for text, message in (
        (
            "key\tfile\n",
            r"files\.tsv: the columns are \['key', 'file'\]; \['path', 'sample_rate', 'num_samples'\] missing",
        ),
        (header + "a\tb\tfast\t9\n", "line 2: sample_rate is 'fast'; it must be a whole number"),
        (header + "a\tb\t8000\t9\na\tc\t8000\t9\n", "line 3: key 'a' comes twice; make the keys differ"),
        (header + "a\tb\t8000\t0\n", "line 2: num_samples is '0'; it must be a whole number ≥ 1"),
        (header, "no audio files in"),
    ):
        (tmp_path / "files.tsv").write_text(text)
        with pytest.raises(InputError, match=message):
            AudioFiles(tmp_path / "files.tsv")


def test_a_manifest_has_no_room_for_tabs(tmp_path):
    with pytest.raises(InputError, match="holds a tab or a line break; rename it for a manifest"):
        AudioFiles({"a\tb": PROMPT}).save_manifest(tmp_path / "files.tsv")


def test_a_batch_equals_its_rows_whether_read_by_threads_or_not():
    source = AudioFiles(DATA, sample_rate=16000)
    for keys in (source.keys(), [key for key in source.keys() if "_16k.wav" in key] * 3):
        asked = [Excerpt(key, 50 * row, 3000 + row) for row, key in enumerate(keys)]
        batch = source.get(asked)
        for row, excerpt in zip(batch, asked, strict=True):
            assert torch.equal(row[:, : excerpt.length], source.get([excerpt])[0])
            assert not row[:, excerpt.length :].any()


def test_channels_must_agree_unless_mixed():
    source = AudioFiles(DATA, sample_rate=16000, mono=False)
    keys = ["music_piano_stereo_48k.ogg", "speech_it_male_first-in-queue_16k.wav"]
    assert source.get([Excerpt(keys[0], 0, 100)]).shape == (1, 2, 100)
    with pytest.raises(InputError, match="channels"):
        source.get([Excerpt(key, 0, 100) for key in keys])


def test_unknown_keys_are_named():
    source = AudioFiles(PROMPT)
    with pytest.raises(InputError, match=r"AudioFiles has no item 'x'; keys\(\) lists its 1 items: 'speech_ru"):
        source.get([Excerpt("x", 0, 1)])


def test_open_files_are_few_after_many_draws():
    loader = RandomExcerpts({"x": AudioFiles(DATA, sample_rate=16000)}, "0.1", batch_size=16, seed=0, short="pad")
    loader[0]
    before = len(os.listdir("/proc/self/fd"))
    for n in range(1, 12):
        loader[n]
    assert len(os.listdir("/proc/self/fd")) <= before + 2


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


def test_a_store_and_its_files_are_interchangeable(store):
    """The same seed draws the same time of the same items, up to the frame."""
    lengths = dict(zip(store.keys(), (store.num_frames * 320).tolist(), strict=True))
    waves = Arrays({key: np.zeros((1, length), np.float32) for key, length in lengths.items()}, 16000)
    tokens = RandomExcerpts({"x": Tokens(store)}, "0.4", batch_size=8, seed=3, items="shuffle", short="pad")
    both = RandomExcerpts(
        {"x": Tokens(store), "wave": waves}, "0.4", batch_size=8, seed=3, items="shuffle", short="pad"
    )
    for n in range(3):
        assert tokens[n]["key"] == both[n]["key"]
        assert torch.equal(tokens[n]["start"], both[n]["start"])
        assert both[n]["wave"].shape == (8, 1, 6400)
        assert both[n]["x"].lengths.tolist() == both[n]["length"].tolist()
    pieces = list(Tokens(store, context=(0, 0)).stream("b", 299))
    codes = np.concatenate([piece.packed.unpack()[0][0] for piece in pieces], axis=1)
    assert np.array_equal(codes, store.read("b"))


@pytest.mark.parametrize("rate", [None, 16000])
def test_streams_decode_a_file_of_any_format_once(monkeypatch, rate):
    monkeypatch.setattr("codec.audio.streaming._RESAMPLED_AT_ONCE", 20_011)
    opened = []
    source_of = codec.audio.streaming.Source
    monkeypatch.setattr("codec.audio.streaming.Source", lambda path: opened.append(path) or source_of(path))
    for path in sorted(DATA.iterdir()):
        if path.suffix not in codec.audio.AUDIO_SUFFIXES:
            continue
        files = AudioFiles(path, sample_rate=rate, mono=False)
        whole = files.get([Excerpt(path.name, 0, files.length(path.name))])
        opened.clear()
        with monkeypatch.context() as patched:
            patched.setattr("codec.audio.read_audio", lambda *_, **__: pytest.fail("was read by excerpts"))
            pieces = list(files.stream(path.name, 7001))
            assert torch.equal(torch.cat(pieces, -1), torch.cat(list(files.stream(path.name, 50_000)), -1))
        assert len(opened) == 2
        assert {piece.shape[-1] for piece in pieces[:-1]} <= {7001}
        if rate is None:
            assert torch.equal(torch.cat(pieces, -1), whole)
        else:
            torch.testing.assert_close(torch.cat(pieces, -1), whole, atol=1e-5, rtol=0)


def test_a_stream_of_a_cut_file_is_an_error_not_a_shorter_wave(tmp_path):
    data = PROMPT.read_bytes()
    (tmp_path / "cut.flac").write_bytes(data)
    files = AudioFiles(tmp_path / "cut.flac")
    (tmp_path / "cut.flac").write_bytes(data[: len(data) // 2])
    with pytest.raises(AudioFileError, match=r"cut\.flac"):
        list(files.stream("cut.flac", 1000))
    with pytest.raises(InputError, match="size is 0; it must be at least 1"):
        next(files.stream("cut.flac", 0))


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
