import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import copied

from codec import extract
from codec.errors import InputError, TokenFileError
from codec.extract import SUMMARY, extract_features, token_store
from codec.features import PRESETS, MelSettings, MelSpectrogram
from codec.sources import AudioFiles
from codec.tokens import TokenStore, TokenWriter

MESSAGE = "decoder's own trouble"
DATA = Path(__file__).parent / "data"
CLIPS = ["speech_it_male_first-in-queue_16k.wav", "speech_ru_female_first-in-queue_16k.flac"]


@pytest.fixture
def corpus(tmp_path):
    return copied(CLIPS, tmp_path / "corpus")


@pytest.fixture
def store(tmp_path, lookahead_codec):
    """Six items of random codes, from one frame to some seconds."""
    path = tmp_path / "store.ctok"
    generator = torch.Generator().manual_seed(0)
    hop = lookahead_codec.spec.hop_length
    with TokenWriter(path, lookahead_codec.spec) as writer:
        for i, frames in enumerate([1, 40, 333, 7, 60, 41]):
            codes = torch.randint(0, 32, (4, frames), generator=generator)
            writer.add(f"part{i % 2}/item{i}.wav", codes.numpy(), num_samples=frames * hop - 5 * i)
    return path


def test_audio_files_become_arrays_that_can_be_mapped(tmp_path, corpus):
    report = extract_features([corpus], tmp_path / "mel", "whisper")
    assert (report.num_items, report.failures) == (2, [])
    array = np.load(tmp_path / "mel" / CLIPS[0].replace(".wav", ".npy"), mmap_mode="r")
    summary = json.loads((tmp_path / "mel" / SUMMARY).read_text())
    assert MelSettings.from_dict(summary["settings"]) == PRESETS["whisper"]
    item = summary["items"][CLIPS[0]]
    assert item["num_frames"] == array.shape[1] == item["num_samples"] // 160
    assert array.dtype == np.float32


@pytest.mark.parametrize("batch_frames", [1, 100, 6400])
def test_tokens_are_decoded_and_equal_their_waves_features(tmp_path, store, lookahead_codec, batch_frames):
    done = []
    report = extract_features(
        [store],
        tmp_path / "mel",
        codec=lookahead_codec,
        batch_frames=batch_frames,
        on_progress=lambda *a: done.append(a),
    )
    assert report.num_items == 6
    assert done[-1][:2] == (6, 6)
    tokens, mel = TokenStore(store), MelSpectrogram("codec")
    for i, key in enumerate(tokens.keys()):
        num_samples = tokens.info(key).num_samples
        wave = lookahead_codec.decode(torch.from_numpy(tokens.read(key)[None]).long())[0, :, :num_samples]
        result = np.load(tmp_path / "mel" / f"part{i % 2}" / f"item{i}.npy")
        np.testing.assert_allclose(result, mel(wave)[0].numpy(), atol=2e-3)


def test_npz_holds_the_same_arrays(tmp_path, store, lookahead_codec):
    extract_features([store], tmp_path / "mel", codec=lookahead_codec)
    extract_features([store], tmp_path / "all.npz", output_format="npz", codec=lookahead_codec)
    with np.load(tmp_path / "all.npz") as archive:
        summary = json.loads(archive[SUMMARY])
        assert len(archive.files) == 7
        for key in TokenStore(store).keys():
            expected = np.load(tmp_path / "mel" / key.replace(".wav", ".npy"))
            np.testing.assert_array_equal(archive[key], expected)
            assert summary["items"][key]["num_frames"] == expected.shape[1]
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_is_overwritten_unasked(tmp_path, corpus):
    for output, output_format in ((tmp_path / "mel", "npy"), (tmp_path / "mel.npz", "npz")):
        extract_features([corpus], output, output_format=output_format)
        with pytest.raises(InputError, match=r"exists \(\d files in all\); give another output, or --force"):
            extract_features([corpus], output, output_format=output_format)
        assert extract_features([corpus], output, output_format=output_format, force=True).num_items == 2


def test_a_bad_item_is_reported_and_the_others_are_written(tmp_path, corpus, store, lookahead_codec):
    (corpus / "broken.flac").write_bytes(b"fLaC" + bytes(100))
    report = extract_features([corpus], tmp_path / "audio")
    assert (report.num_items, [failure["key"] for failure in report.failures]) == (2, ["broken.flac"])
    data = bytearray(store.read_bytes())
    data[len(data) // 4] ^= 0xFF
    store.write_bytes(data)
    report = extract_features([store], tmp_path / "tokens", codec=lookahead_codec)
    assert report.num_items + len(report.failures) == 6
    assert len(report.failures) == 1
    assert "item" in report.failures[0]["key"]


def test_whatever_a_decoder_raises_is_that_files_failure(tmp_path, corpus, monkeypatch):
    get = AudioFiles.get

    def failing(self, requests):
        if "_it_" in requests[0].key:
            raise RuntimeError(MESSAGE)
        return get(self, requests)

    monkeypatch.setattr(AudioFiles, "get", failing)
    report = extract_features([corpus], tmp_path / "mel")
    assert report.num_items == 1
    assert report.failures == [
        {"key": CLIPS[0], "path": str(corpus / CLIPS[0]), "error": f"{corpus / CLIPS[0]}: {RuntimeError(MESSAGE)!r}"}
    ]


def test_files_of_nan_and_of_nothing_are_named(tmp_path, corpus):
    wave = np.zeros(16000, np.float32)
    wave[500] = np.nan
    soundfile.write(corpus / "nan.wav", wave, 16000, subtype="FLOAT")
    soundfile.write(corpus / "nothing.wav", wave[:0], 16000)
    done = []
    report = extract_features([corpus], tmp_path / "mel", on_progress=lambda *a: done.append(a))
    assert report.num_items == 2
    assert {failure["key"] for failure in report.failures} == {"nan.wav", "nothing.wav"}
    assert all(failure["path"] in failure["error"] for failure in report.failures)
    assert done[-1] == (4, 4, report.audio_seconds)
    assert set(json.loads((tmp_path / "mel" / SUMMARY).read_text())["items"]) == set(CLIPS)


@pytest.mark.parametrize("preset", ["codec", "kaldi", "encodec", "whisper"])
@pytest.mark.parametrize("output_format", ["npy", "npz"])
def test_long_files_go_through_in_pieces(tmp_path, corpus, monkeypatch, preset, output_format):
    settings = replace(PRESETS[preset], sample_rate=16000, f_max=8000.0)
    arrays, longest = [], []
    get = AudioFiles.get
    for seconds in (60, 1):
        monkeypatch.setattr(extract, "LONG_SECONDS", seconds)
        monkeypatch.setattr(
            AudioFiles, "get", lambda self, requests: longest.append(requests[0].length) or get(self, requests)
        )
        output, heard = tmp_path / str(seconds), []
        extract_features(
            [corpus], output, settings, output_format=output_format, on_progress=lambda *a, h=heard: h.append(a)
        )
        if output_format == "npz":
            with np.load(output) as archive:
                arrays.append([archive[key] for key in CLIPS])
        else:
            arrays.append([np.load(output / Path(key).with_suffix(".npy")) for key in CLIPS])
            assert not list(output.glob("*.part"))
    assert max(longest[2:]) == 16000
    for whole, pieces in zip(*arrays, strict=True):
        assert whole.shape == pieces.shape
        np.testing.assert_allclose(pieces, whole, atol=2e-3)
    seconds_heard = [seconds for _, _, seconds in heard]
    assert seconds_heard == sorted(seconds_heard)
    assert len(heard) == 2 if preset == "whisper" else len(heard) > 6


def test_long_items_of_a_store_are_decoded_in_pieces(tmp_path, store, lookahead_codec, monkeypatch):
    """What the decoder sees at once is bounded."""
    decode, widest = lookahead_codec.decode, []

    def watched(codes, *arguments):
        widest.append(codes.numel() // codes.shape[-2])
        return decode(codes, *arguments)

    monkeypatch.setattr(lookahead_codec, "decode", watched)
    for batch_frames in (6400, 50):
        widest.clear()
        extract_features([store], tmp_path / str(batch_frames), codec=lookahead_codec, batch_frames=batch_frames)
    left, right = lookahead_codec.spec.decode_context
    assert max(widest) <= 50 + left + right + 50
    for path in (tmp_path / "6400").rglob("*.npy"):
        pieces = np.load(tmp_path / "50" / path.relative_to(tmp_path / "6400"))
        np.testing.assert_allclose(pieces, np.load(path), atol=2e-3)


def test_a_failure_inside_a_long_file_leaves_nothing_behind(tmp_path, corpus, monkeypatch):
    monkeypatch.setattr(extract, "LONG_SECONDS", 1)
    wave = np.zeros(80000, np.float32)
    wave[50000] = np.nan
    soundfile.write(corpus / "nan.wav", wave, 16000, subtype="FLOAT")
    for output_format in ("npy", "npz"):
        report = extract_features([corpus], tmp_path / "out" / output_format, output_format=output_format)
        assert [failure["key"] for failure in report.failures] == ["nan.wav"]
    assert not [
        path for path in (tmp_path / "out").rglob("*") if "nan" in path.name or path.suffix in (".part", ".tmp")
    ]


def test_an_interrupted_archive_is_removed(tmp_path, corpus):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        extract_features([corpus], tmp_path / "mel.npz", output_format="npz", on_progress=stop)
    assert not list(tmp_path.glob("mel*"))


def test_what_is_a_token_store(tmp_path, corpus, store):
    assert token_store([corpus]) is None
    assert len(token_store([store])) == len(token_store([tmp_path])) == 6
    with pytest.raises(
        InputError, match="corpus is no token store, but other inputs are; give stores and audio in two"
    ):
        token_store([store, corpus])


def test_wrong_codecs_and_settings(tmp_path, store, lookahead_codec, causal_codec):
    with pytest.raises(InputError, match="token store of small; give the codec that wrote it"):
        extract_features([store], tmp_path / "mel")
    with pytest.raises(TokenFileError, match=r"the tokens are of small .* load the codec that wrote them"):
        extract_features([store], tmp_path / "mel", codec=causal_codec)
    with pytest.raises(
        InputError, match="settings are for 22050 Hz and small decodes to 16000 Hz; choose settings with"
    ):
        extract_features([store], tmp_path / "mel", "hifigan", codec=lookahead_codec)
    with pytest.raises(InputError, match="output_format is 'csv'; it must be 'npy' or 'npz'"):
        extract_features([store], tmp_path / "mel", output_format="csv")
    assert not (tmp_path / "mel").exists()
