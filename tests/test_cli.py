import json
import subprocess
import sys

import numpy as np
import pytest
import soundfile
from conftest import DATA, copied

import codec
from codec.cli import main

PROMPTS = ["speech_it_male_first-in-queue_16k.wav", "speech_ru_female_number-switched-off_16k.mp3"]


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `codec ARGUMENTS` in this process: (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["codec", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, captured.err

    return call


@pytest.fixture
def checkpoint(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "small")
    return tmp_path / "small"


@pytest.fixture
def corpus(tmp_path):
    return copied(PROMPTS, tmp_path / "corpus")


def test_files_to_tokens_to_waves_and_mels(run, tmp_path, checkpoint, corpus):
    store = tmp_path / "store.ctok"
    code, out, err = run("encode", corpus, "-o", store, "--codec", checkpoint)
    assert (code, err) == (0, "")
    assert "2 files encoded, 9.2 s of audio" in out
    assert "× smaller" in out

    code, out, _ = run("info", store, "--json")
    facts = json.loads(out)
    assert (code, facts["num_items"], facts["num_quantizers_stored"], facts["codec"]) == (0, 2, 4, "small")
    assert facts["num_bytes"] == store.stat().st_size
    code, out, _ = run("info", store)
    assert (code, "2 in 1 shards, 9.2 s" in out, "entries used" in out) == (0, True, True)

    code, out, _ = run("verify", store)
    assert (code, "every checksum of 2 items is right" in out) == (0, True)

    code, out, _ = run("decode", store, "-o", tmp_path / "waves", "--codec", checkpoint)
    assert (code, "2 items" in out) == (0, True)
    original, decoded = (soundfile.info(str(path)) for path in (DATA / PROMPTS[0], tmp_path / "waves" / PROMPTS[0]))
    assert (decoded.samplerate, decoded.frames) == (16000, original.frames)

    code, out, _ = run("decode", store, "-o", tmp_path / "mels", "--output", "mel", "--codec", checkpoint, "--json")
    assert (code, json.loads(out)["num_items"]) == (0, 2)
    mel = np.load(tmp_path / "mels" / (PROMPTS[0].removesuffix(".wav") + ".npy"))
    assert mel.shape == (80, -(-original.frames // 160))


def test_stores_are_merged_split_and_exported(run, tmp_path, checkpoint, corpus):
    store = tmp_path / "store.ctok"
    run("encode", corpus, "-o", store, "--codec", checkpoint)
    code, out, _ = run("split", store, "-o", tmp_path / "parts", "--shards", "2")
    assert (code, "2 items in 2 shards" in out) == (0, True)
    code, out, _ = run("merge", tmp_path / "parts", "-o", tmp_path / "again.ctok")
    assert (code, "2 items of 2 shards" in out) == (0, True)
    assert (tmp_path / "again.ctok").read_bytes() == store.read_bytes()
    code, _, err = run("merge", tmp_path / "parts", "-o", tmp_path / "again.ctok")
    assert (code, "exists" in err) == (2, True)

    target = tmp_path / "item.npz"
    code, out, _ = run("export", store, "--key", PROMPTS[0], "-o", target, "--start-frame", "3", "--num-frames", "20")
    assert (code, "codes [4, 20]" in out) == (0, True)
    arrays = np.load(target)
    assert np.array_equal(arrays["codes"], codec.TokenStore(store).read(PROMPTS[0], 3, 20))
    assert json.loads(str(arrays["codec"]))["name"] == "small"
    code, _, err = run("export", store, "--key", "nonesuch", "-o", tmp_path / "x.npz")
    assert (code, "no item 'nonesuch'" in err) == (2, True)
    code, _, err = run("export", store, "--key", PROMPTS[0], "-o", target)
    assert (code, "exists" in err) == (2, True)


def test_encode_keeps_what_is_there(run, tmp_path, checkpoint, corpus):
    store = tmp_path / "store.ctok"
    run("encode", corpus / PROMPTS[0], "-o", store, "--codec", checkpoint)
    before = store.read_bytes()
    code, _, err = run("encode", corpus / PROMPTS[1], "-o", store, "--codec", checkpoint, "--no-resume")
    assert (code, store.read_bytes()) == (2, before)
    assert "exists" in err
    code, out, _ = run("encode", corpus / PROMPTS[0], "-o", store, "--codec", checkpoint)
    assert (code, "1 were there already" in out) == (0, True)
    assert store.read_bytes() == before
    code, out, _ = run("encode", corpus / PROMPTS[1], "-o", store, "--codec", checkpoint, "--force", "--json")
    assert (code, json.loads(out)["num_items"]) == (0, 1)


def test_a_bad_file_gives_exit_code_3_and_a_list(run, tmp_path, checkpoint, corpus):
    (corpus / "broken.flac").write_bytes(b"fLaC and nothing more")
    code, out, err = run("encode", corpus, "-o", tmp_path / "x.ctok", "--codec", checkpoint)
    assert code == 3
    assert "2 files encoded" in out
    assert "files that failed: 1" in err
    assert "broken.flac" in err
    (line,) = (tmp_path / "x.ctok.errors.jsonl").read_text().splitlines()
    assert json.loads(line)["key"] == "broken.flac"


def test_verify_and_decode_name_what_is_damaged(run, tmp_path, checkpoint, corpus):
    store = tmp_path / "store.ctok"
    run("encode", corpus, "-o", store, "--codec", checkpoint)
    data = bytearray(store.read_bytes())
    data[data.index(PROMPTS[0].encode()) + 60] ^= 1
    store.write_bytes(data)
    code, _, err = run("verify", store)
    assert (code, PROMPTS[0] in err) == (1, True)
    code, _, err = run("decode", store, "-o", tmp_path / "waves", "--codec", checkpoint)
    assert (code, PROMPTS[0] in err) == (3, True)
    assert [p.name for p in (tmp_path / "waves").glob("*.wav")] == [PROMPTS[1].replace(".mp3", ".wav")]


def test_decoding_with_other_weights_is_refused(run, tmp_path, checkpoint, corpus, causal_codec):
    run("encode", corpus, "-o", tmp_path / "x.ctok", "--codec", checkpoint)
    causal_codec.save(tmp_path / "other")
    code, _, err = run("decode", tmp_path / "x.ctok", "-o", tmp_path / "waves", "--codec", tmp_path / "other")
    assert (code, "load the codec that wrote them" in err) == (1, True)
    assert not (tmp_path / "waves").exists()


def test_a_store_of_ones_own_codec_says_what_to_pass(run, tmp_path, checkpoint, corpus):
    run("encode", corpus, "-o", tmp_path / "x.ctok", "--codec", checkpoint)
    code, _, err = run("decode", tmp_path / "x.ctok", "-o", tmp_path / "waves")
    assert (code, "is of codec 'small'; pass --codec FOLDER" in err) == (1, True)


def test_features(run, tmp_path, corpus):
    code, out, _ = run("features", corpus, "-o", tmp_path / "mel", "--preset", "whisper")
    assert (code, "2 files" in out) == (0, True)
    assert np.load(tmp_path / "mel" / PROMPTS[1].replace(".mp3", ".npy")).shape[0] == 80
    code, _, err = run("features", corpus, "-o", tmp_path / "mel")
    assert (code, "exists" in err) == (2, True)
    code, _, err = run("features", corpus, "-o", tmp_path / "mel2", "--preset", "mfcc13")
    assert (code, "no mel preset 'mfcc13'" in err) == (2, True)


def test_info_on_audio_and_on_a_checkpoint(run, checkpoint):
    code, out, _ = run("info", DATA / PROMPTS[1])
    assert (code, "mp3" in out, "16,000" in out) == (0, True, True)
    code, out, _ = run("info", checkpoint, "--json")
    assert (code, json.loads(out)["hop_length"]) == (0, 320)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("encode", "nowhere", "-o", "x.ctok", "--codec", "{checkpoint}"), "nowhere: no such file"),
        (("encode", "{corpus}", "-o", "x.ctok", "--codec", "nonesuch"), "no codec 'nonesuch'"),
        (
            ("encode", "{corpus}", "-o", "x.ctok", "--codec", "{checkpoint}", "--quantizers", "9"),
            "n_quantizers is 9",
        ),
        (
            ("encode", "{corpus}", "-o", "x.ctok", "--codec", "{checkpoint}", "--device", "tpu"),
            "pass --device cpu",
        ),
        (("encode", "{corpus}", "-o", "tokens.bin", "--codec", "{checkpoint}"), "write to tokens.ctok"),
        (("info", "nowhere.ctok"), "nowhere.ctok"),
        (("verify", "{corpus}"), "corpus"),
        (("train", "nowhere.yaml"), "nowhere.yaml: can't be read"),
        (("train", "{recipe}", "--optim.steps", "3"), "unknown key optim.steps; known: max_steps"),
        (("train", "{recipe}", "max_steps=3"), "'max_steps' is no setting; write --section.key VALUE"),
        (("train", "{recipe}", "--optim.max_steps"), "--optim.max_steps has no value"),
    ],
)
def test_errors_are_one_line_and_an_exit_code(run, tmp_path, monkeypatch, checkpoint, corpus, arguments, message):
    monkeypatch.chdir(tmp_path)
    recipe = DATA.parents[1] / "recipes" / "speech_16k.yaml"
    filled = [a.format(checkpoint=checkpoint, corpus=corpus, recipe=recipe) for a in arguments]
    code, _, err = run(*filled)
    assert code in (1, 2)
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_names_every_verb(run):
    code, out, _ = run("--help")
    assert code == 0
    for verb in ["encode", "decode", "info", "verify", "merge", "split", "export", "features", "train"]:
        assert verb in out
        assert run(verb, "--help")[0] == 0


def test_import_is_lazy_and_quick():
    """`import codec` loads neither torch nor numpy: that is what keeps it far under 0.3 s."""
    script = "import sys, codec; print(sorted({'torch', 'numpy', 'typer', 'soundfile'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"
    script = "import sys, codec.cli; print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "False\n"
    )


def test_tokens_and_decode_need_no_audio_library():
    """The store reads without torch; decoding on a GPU box needs torch, numpy, einops and safetensors alone."""
    blocked = ["soundfile", "torchaudio", "torchcodec", "lightning", "typer", "rich", "fsspec", "yaml"]
    script = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "import codec\n"
        "codec.TokenStore, codec.BatchDecoder, codec.Tokens, codec.RandomExcerpts, codec.load_codec\n"
        "codec.MelSpectrogram"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_public_surface_is_frozen():
    """A name more or less is a change of the public surface: say it in CHANGELOG.md and here."""
    assert sorted(codec.__all__) == [
        "Arrays", "AudioFileError", "AudioFiles", "BatchDecoder", "CheckpointError", "Choice", "Codec",
        "CodecError", "CodecSpec", "Codes", "ConfigError", "Excerpt", "Excerpts", "InputError",
        "MelSpectrogram", "RandomExcerpts", "Segments", "SoundStream", "Strings", "TokenFileError",
        "TokenStore", "TokenWriter", "Tokens", "TrainingError", "Uniform", "__version__", "audio_info",
        "encode_corpus", "load_codec", "read_audio", "read_audio_batch", "write_audio",
    ]  # fmt: skip
    for name in codec.__all__:
        assert getattr(codec, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nonesuch'; public names"):
        _ = codec.Nonesuch


def test_features_of_tokens(run, tmp_path, checkpoint, corpus):
    store = tmp_path / "store.ctok"
    run("encode", corpus, "-o", store, "--codec", checkpoint)
    code, out, err = run(
        "features", store, "-o", tmp_path / "mel.npz", "--npz", "--codec", checkpoint, "--device", "cpu"
    )
    assert (code, err, "2 items" in out) == (0, "", True)
    with np.load(tmp_path / "mel.npz") as archive:
        assert archive[PROMPTS[0]].shape[0] == 80
