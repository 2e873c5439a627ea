import json
import shutil

import pytest
import torch
from conftest import DATA, encode_until_killed, num_ties

from codec.audio import read_audio, write_audio
from codec.encode import encode_corpus, write_failures
from codec.errors import InputError
from codec.tokens import TokenStore

FILES = [
    "speech_it_male_first-in-queue_16k.wav",
    "speech_ru_female_number-switched-off_16k.mp3",
    "speech_ru_female_please-hold_44k.flac",
    "speech_ru_female_thanks_48k.opus",
    "music_piano_stereo_48k.ogg",
]


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "deep").mkdir(parents=True)
    for name in FILES:
        shutil.copy(DATA / name, folder / ("deep" if "music" in name else ".") / name)
    return folder


def test_every_file_gives_the_codes_it_gives_alone(tmp_path, corpus, lookahead_codec):
    path = tmp_path / "out.ctok"
    seen = []
    report = encode_corpus(
        lookahead_codec, [corpus], path, batch_seconds=9, on_progress=lambda *args: seen.append(args)
    )
    store = TokenStore(path)
    assert sorted(store.keys()) == sorted(["deep/" + name if "music" in name else name for name in FILES])
    for key in store.keys():
        wave, _ = read_audio(corpus / key, sample_rate=16000, mono=True)
        assert store.info(key).num_samples == wave.shape[1]
        alone = lookahead_codec.encode(wave).codes[0]
        assert (
            num_ties(lookahead_codec, lookahead_codec.latents(wave[None])[0], torch.from_numpy(store.read(key)), alone)
            <= 1
        )
    assert report.num_items == 5
    assert report.failures == []
    assert report.store_bytes == path.stat().st_size
    assert report.source_bytes == sum(p.stat().st_size for p in corpus.rglob("*.*") if p.is_file())
    assert seen[-1][:2] == (5, 5)
    assert seen[-1][2] == pytest.approx(report.audio_seconds)


def test_long_items_in_pieces_equal_the_whole(tmp_path, corpus, codec, monkeypatch):
    whole, pieces = tmp_path / "whole.ctok", tmp_path / "pieces.ctok"
    encode_corpus(codec, [corpus], whole, n_quantizers=3)
    monkeypatch.setattr("codec.encode.corpus.LONG_SECONDS", 1)
    encode_corpus(codec, [corpus], pieces, n_quantizers=3)
    a, b = TokenStore(whole), TokenStore(pieces)
    assert list(a.keys()) == list(b.keys())
    for key in a.keys():
        assert a.info(key) == b.info(key)
        wave, _ = read_audio(corpus / key, sample_rate=16000, mono=True)
        ours, theirs = (torch.from_numpy(store.read(key)) for store in (a, b))
        assert num_ties(codec, codec.latents(wave[None])[0], ours, theirs) <= 1
        assert a.read(key).shape[0] == 3


def test_a_bad_file_is_named_and_the_rest_goes_on(tmp_path, corpus, lookahead_codec):
    (corpus / "torn.flac").write_bytes((DATA / "speech_ru_female_please-hold_44k.flac").read_bytes()[:9000])
    (corpus / "notes.wav").write_text("not audio at all")
    (corpus / "empty.mp3").write_bytes(b"")
    path = tmp_path / "out.ctok"
    report = encode_corpus(lookahead_codec, [corpus], path)
    assert sorted(failure["key"] for failure in report.failures) == ["empty.mp3", "notes.wav", "torn.flac"]
    assert all(failure["path"] in failure["error"] for failure in report.failures)
    assert len(TokenStore(path)) == 5
    listing = tmp_path / "errors.jsonl"
    write_failures(report.failures, listing)
    assert [json.loads(line)["key"] for line in listing.read_text().splitlines()] == [f["key"] for f in report.failures]
    write_failures([], listing)
    assert not listing.exists()


def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, corpus, lookahead_codec, monkeypatch):
    whole, resumed = tmp_path / "whole.ctok", tmp_path / "resumed.ctok"
    encode_corpus(lookahead_codec, [corpus], whole, batch_seconds=6)

    def die(done, total, seconds):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_corpus(lookahead_codec, [corpus], resumed, batch_seconds=6, on_progress=die)
    assert not resumed.exists()
    report = encode_corpus(lookahead_codec, [corpus], resumed, batch_seconds=6)
    assert report.num_skipped >= 2
    assert report.num_skipped + report.num_items == 5
    assert resumed.read_bytes() == whole.read_bytes()


def test_kill_9_resume_and_the_store_is_the_same(tmp_path, corpus, lookahead_codec):
    whole, killed = tmp_path / "whole.ctok", tmp_path / "killed.ctok"
    encode_corpus(lookahead_codec, [corpus], whole, batch_seconds=5)
    for after in (1, 2, 3):
        encode_until_killed(after, lookahead_codec, corpus, killed, batch_seconds=5)
        # Later deaths may come after the end: the writer doesn't wait for those who are told of the progress.
        assert after > 1 or not killed.exists()
    report = encode_corpus(lookahead_codec, [corpus], killed, batch_seconds=5)
    assert report.num_skipped >= 1
    assert killed.read_bytes() == whole.read_bytes()


def test_a_finished_store_is_kept_grown_or_replaced(tmp_path, corpus, lookahead_codec, causal_codec):
    path = tmp_path / "out.ctok"
    encode_corpus(lookahead_codec, [corpus / FILES[0]], path)
    before = path.read_bytes()
    assert encode_corpus(lookahead_codec, [corpus / FILES[0]], path).num_skipped == 1
    assert path.read_bytes() == before
    encode_corpus(lookahead_codec, [corpus / FILES[0], corpus / FILES[1]], path)
    assert len(TokenStore(path)) == 2
    with pytest.raises(InputError, match="exists"):
        encode_corpus(lookahead_codec, [corpus / FILES[0]], path, resume=False)
    encode_corpus(lookahead_codec, [corpus / FILES[1]], path, force=True)
    assert list(TokenStore(path).keys()) == [FILES[1]]


def test_nothing_to_encode(tmp_path, lookahead_codec):
    with pytest.raises(InputError, match="no audio files"):
        encode_corpus(lookahead_codec, [tmp_path], tmp_path / "out.ctok")
    (tmp_path / "bad.wav").write_text("x")
    with pytest.raises(InputError, match="none of the 1 files could be encoded"):
        encode_corpus(lookahead_codec, [tmp_path], tmp_path / "out.ctok")
    assert not (tmp_path / "out.ctok").exists()


def test_a_one_sample_file(tmp_path, lookahead_codec):
    write_audio(tmp_path / "one.wav", torch.tensor([[0.5]]), 16000)
    encode_corpus(lookahead_codec, [tmp_path / "one.wav"], tmp_path / "out.ctok")
    assert TokenStore(tmp_path / "out.ctok").info("one.wav").num_samples == 1
