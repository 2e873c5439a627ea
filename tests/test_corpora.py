"""The corpus script, on tiny package trees: no network, no Debian, no ffmpeg."""

import gzip
import importlib.util
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest
import soundfile

SCRIPT = Path(__file__).resolve().parents[1] / "recipes" / "corpora" / "debian_speech.py"
RATE = 16000
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2001 Somebody
License: GPL-2+

Files: toy-anna*
Copyright: 2002 Anna
           2003 Anna's friend
License: CC0
 Do what you like.
"""


def load_script():
    spec = importlib.util.spec_from_file_location("debian_speech", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["debian_speech"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


corpus = load_script()
TOY = corpus.Package(
    name="toy-voices",
    root="usr/share/toy",
    suffixes=(".wav", ".ogg"),
    voice_of=lambda path: corpus.Voice(path.parts[0], "xx", corpus.slug(path.relative_to(path.parts[0]))),
    source_prefix="toy-",
    skip=(("*/beep.*", "tone"),),
)


def tone(seconds, *, sample_rate=RATE, level=0.3, frequency=220.0, channels=1):
    time = np.arange(round(seconds * sample_rate)) / sample_rate
    return np.repeat(level * np.sin(2 * np.pi * frequency * time)[:, None], channels, axis=1)


def add(tree, path, wave, sample_rate=RATE, **options):
    file = tree / TOY.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(file, wave, sample_rate, **options)
    return file


@pytest.fixture
def tree(tmp_path):
    """An unpacked package: a held-out voice and one for training."""
    root = tmp_path / "tree"
    doc = root / "usr/share/doc/toy-voices"
    doc.mkdir(parents=True)
    (doc / "copyright").write_text(COPYRIGHT)
    add(root, "carlo-flora/hello.wav", tone(0.5))
    add(root, "anna/words/good day.wav", tone(0.6, frequency=300))
    return root


def build(tree, folder, package=TOY, **options):
    options = {"mono": True, **options}
    return corpus.build([package], folder, lambda name: tree, **options)


def reasons(dropped):
    return {PurePosixPath(item.package_path).name: item.reason for item in dropped}


# The split


def test_every_speaker_is_on_one_side_and_the_manifest_says_where(tree, tmp_path):
    entries, _ = build(tree, tmp_path / "out")
    lines = (tmp_path / "out/manifest.jsonl").read_text().splitlines()
    assert [json.loads(line)["path"] for line in lines] == [entry.path for entry in entries]
    assert sorted(entry.path for entry in entries) == [
        "test/carlo-flora/hello.wav",
        "train/anna/words_good_day.wav",
    ]
    first = next(json.loads(line) for line in lines if "carlo" in line)
    assert first == {
        "path": "test/carlo-flora/hello.wav",
        "key": "carlo-flora/hello",
        "split": "test",
        "speaker": "carlo-flora",
        "language": "xx",
        "package": "toy-voices",
        "package_path": "usr/share/toy/carlo-flora/hello.wav",
        "licence": "GPL-2+",
        "copyright": "2001 Somebody",
        "sample_rate": RATE,
        "channels": 1,
        "num_samples": 8000,
        "text": None,
    }
    assert soundfile.info(tmp_path / "out" / first["path"]).subtype == "PCM_16"


def test_the_test_voices_are_never_trained_on():
    speakers = {
        package.name: package.voice_of(PurePosixPath("digits/1.g722")).speaker
        for package in corpus.SPEECH
        if package.name.startswith("asterisk")
    }
    splits = {name: corpus.split_of(speaker) for name, speaker in speakers.items()}
    assert {name for name, split in splits.items() if split == "test"} == {
        "asterisk-core-sounds-it-g722",
        "asterisk-core-sounds-ru-g722",
    }
    # English and Spanish are one woman.
    assert speakers["asterisk-core-sounds-en-g722"] == speakers["asterisk-core-sounds-es-g722"]
    held_out = {speaker for speaker, split in corpus.HELD_OUT.items() if split == "test"}
    others = {speaker for name, speaker in speakers.items() if splits[name] != "test"}
    assert not held_out & others


def test_a_language_of_both_games_is_on_one_side():
    languages = {speaker.split("-", 1)[1] for speaker in corpus.HELD_OUT if speaker.startswith("klettres-")}
    assert languages
    for language in languages:
        splits = {corpus.split_of(f"{game}-{language}") for game in ("klettres", "ktuberling")}
        assert splits == {"valid"}


def test_a_speaker_in_two_splits_is_refused(tree):
    recordings = list(corpus.scan(TOY, tree))
    wrong = replace(recordings[0], split="valid")
    with pytest.raises(corpus.CorpusError, match="speaker anna is in train and valid"):
        corpus.check_recordings([*recordings, wrong])


def test_two_sources_for_one_file_are_refused(tree):
    add(tree, "anna/words/good-day.ogg", tone(0.7))
    add(tree, "anna/words/good-day.wav", tone(0.7))
    with pytest.raises(corpus.CorpusError, match=r"words_good-day\.wav would be written from 2 sources"):
        corpus.check_recordings(list(corpus.scan(TOY, tree)))


@pytest.mark.parametrize(
    ("path", "speaker", "name"),
    [
        ("city/cs/vit-m-hlava.ogg", "fillets-small", "city_vit-m-hlava"),
        ("city/cs/vit-v-proc.ogg", "fillets-big", "city_vit-v-proc"),
        ("hole/cs/m-nedame1.ogg", "fillets-small", "hole_m-nedame1"),
        ("city/cs/vit-hs-klid1.ogg", "fillets-others", "city_vit-hs-klid1"),
        ("share/border/cs/sp-shout_big_00.ogg", "fillets-big", "border_sp-shout_big_00"),
        ("start/cs/help1.ogg", "fillets-others", "start_help1"),
        ("linux/cs/1-x-m.ogg", "fillets-others", "linux_1-x-m"),
    ],
)
def test_fillets_roles_come_from_the_names(path, speaker, name):
    assert corpus.fillets_voice(PurePosixPath(path)) == corpus.Voice(speaker, "cs", name)


def test_music_goes_by_artist_and_an_unknown_one_is_an_error():
    hyperrogue = next(package for package in corpus.MUSIC if package.name == "hyperrogue-music")
    assert hyperrogue.voice_of(PurePosixPath("hr3-caves.ogg")).speaker == "shawn-parrotte"
    with pytest.raises(corpus.CorpusError, match="no artist is known"):
        hyperrogue.voice_of(PurePosixPath("new-song.ogg"))


# What is dropped


def test_useless_files_are_dropped_with_the_reason(tree, tmp_path):
    add(tree, "anna/just-long-enough.wav", tone(0.3, frequency=500))
    add(tree, "anna/too-short.wav", tone(0.3)[:-1])
    add(tree, "anna/silent.wav", tone(1, level=0.0009))
    add(tree, "anna/quiet.wav", tone(1, level=0.003))
    add(tree, "anna/telephone.wav", tone(1, sample_rate=8000), 8000)
    add(tree, "anna/zagain.wav", tone(0.6, frequency=300))
    add(tree, "anna/beep.wav", tone(1, frequency=1000))
    entries, dropped = build(tree, tmp_path / "out")
    assert reasons(dropped) == {
        "too-short.wav": "shorter than 0.3 s",
        "silent.wav": "silent (RMS under -60 dBFS)",
        "telephone.wav": "sample rate under 16000 Hz",
        "zagain.wav": "same samples as another file",
        "beep.wav": "tone",
    }
    written = {path.stem for path in (tmp_path / "out").rglob("*.wav")}
    assert written == {"hello", "words_good_day", "just-long-enough", "quiet"}
    assert len(entries) == 4
    assert "1        toy-voices  silent (RMS under -60 dBFS)" in corpus.drop_summary(dropped)


def test_a_damaged_source_is_reported_and_stops_nothing(tree, tmp_path, capsys):
    (tree / TOY.root / "anna/broken.ogg").write_bytes(b"OggS nothing")
    entries, dropped = build(tree, tmp_path / "out")
    assert reasons(dropped) == {"broken.ogg": "unreadable"}
    assert len(entries) == 2
    assert "anna/broken.ogg" in capsys.readouterr().err


def test_peaks_over_full_scale_clip(tree):
    path = add(tree, "anna/loud.wav", tone(0.5, level=1.5), subtype="FLOAT")
    pcm, sample_rate = corpus.decode(path, mono=True)
    assert (pcm.min(), pcm.max(), sample_rate) == (-32768, 32767, RATE)
    assert np.abs(np.diff(pcm[:, 0].astype(int))).max() < 6000  # a wrap would jump by 65535


def test_16_bit_sources_keep_every_bit(tree):
    wave = np.arange(-32768, 32768, 3, dtype=np.int16)
    path = add(tree, "anna/ramp.wav", wave)
    np.testing.assert_array_equal(corpus.decode(path, mono=True)[0][:, 0], wave)


def test_speech_is_mono_and_music_keeps_its_channels(tree):
    path = add(tree, "anna/stereo.wav", tone(0.5, channels=2) * [1.0, 0.0])
    mono, _ = corpus.decode(path, mono=True)
    stereo, _ = corpus.decode(path, mono=False)
    assert mono.shape == (8000, 1)
    assert stereo.shape == (8000, 2)
    np.testing.assert_allclose(mono[:, 0], stereo[:, 0] / 2, atol=1)


def test_ogg_files_one_after_another_are_read_whole(tmp_path, monkeypatch):
    """soundfile stops after the first link; the script must notice and ask ffmpeg for the rest."""
    tone = 0.3 * np.sin(np.arange(22050) * 0.1)
    soundfile.write(tmp_path / "one.ogg", tone, 22050)
    one = (tmp_path / "one.ogg").read_bytes()
    (tmp_path / "two.ogg").write_bytes(one + one)
    assert corpus.decode(tmp_path / "one.ogg", mono=True)[0].shape == (22050, 1)
    asked = []

    def ffmpeg(command):
        asked.append(command)
        return np.zeros(44100, "<f4").tobytes()

    monkeypatch.setattr(corpus, "run", ffmpeg)
    assert corpus.decode(tmp_path / "two.ogg", mono=True)[0].shape == (44100, 1)
    assert asked[0][asked[0].index("-ar") + 1] == "22050"


@pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="G.722 needs ffmpeg")
def test_g722_is_decoded_at_16_khz(tmp_path):
    wave = tmp_path / "tone.wav"
    soundfile.write(wave, tone(1.0), RATE)
    prompt = tmp_path / "tone.g722"
    corpus.run(["ffmpeg", "-v", "error", "-i", wave, "-c:a", "g722", "-f", "g722", prompt])
    pcm, sample_rate = corpus.decode(prompt, mono=True)
    assert sample_rate == RATE
    assert abs(len(pcm) - RATE) <= 40
    spectrum = np.abs(np.fft.rfft(pcm[:, 0]))
    assert np.argmax(spectrum) * RATE / len(pcm) == pytest.approx(220, abs=1)


# Texts and licences


def test_festvox_transcripts_lose_the_stress_marks(tmp_path):
    folder = tmp_path / "usr/share/festival/voices/russian/voice/etc"
    folder.mkdir(parents=True)
    (folder / "txt.done.data").write_text('( ru_0001 "прядь вол+ос" )\n( ru_0002 "он сказал "да"." )\n')
    assert corpus.festvox_texts(tmp_path) == {"ru_0001": "прядь волос", "ru_0002": 'он сказал "да".'}


def test_prompt_transcripts_skip_comments_and_sounds(tmp_path):
    folder = tmp_path / "usr/share/doc/asterisk-core-sounds-it"
    folder.mkdir(parents=True)
    text = (
        "\ufeff; a comment: no prompt\n\ndigits/1: uno\nbeep: [tono]\nsilence/1: (silenzio)\n"
        "later: alle 8:30\nletters/!: [!] punto\nempty:\n"
    )
    (folder / "core-sounds-it.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert corpus.prompt_texts(tmp_path) == {
        "digits/1": "uno",
        "later": "alle 8:30",
        "letters/!": "[!] punto",
    }


def test_texts_reach_the_manifest(tree, tmp_path):
    package = replace(TOY, texts_of=lambda tree: {"anna/words/good day": "Good day."})
    entries, _ = build(tree, tmp_path / "out", package)
    assert {entry.key: entry.text for entry in entries} == {
        "anna/words_good_day": "Good day.",
        "carlo-flora/hello": None,
    }


def test_the_last_matching_stanza_is_the_licence():
    licence_of = corpus.licence_reader(TOY, COPYRIGHT)
    assert licence_of(PurePosixPath("x/anna1.wav")) == corpus.Licence("CC0", "2002 Anna; 2003 Anna's friend")
    assert licence_of(PurePosixPath("x/other.wav")) == corpus.Licence("GPL-2+", "2001 Somebody")


def test_a_file_without_a_licence_is_an_error():
    licence_of = corpus.licence_reader(TOY, COPYRIGHT.replace("Files: *", "Files: debian/*"))
    with pytest.raises(corpus.CorpusError, match=r"names no licence for toy-other\.wav"):
        licence_of(PurePosixPath("x/other.wav"))


def test_a_declared_licence_is_checked_against_the_package():
    package = replace(TOY, declared=("CC-BY-3.0", "Creative Commons Attribution 3.0", "Anna"))
    licence_of = corpus.licence_reader(package, "Under the Creative\n  Commons Attribution 3.0 licence.")
    assert licence_of(PurePosixPath("x.wav")) == corpus.Licence("CC-BY-3.0", "Anna")
    with pytest.raises(corpus.CorpusError, match=r"CC-BY-3\.0 can't be confirmed"):
        corpus.licence_reader(package, "All rights reserved.")


def test_licences_are_written_out(tree, tmp_path):
    build(tree, tmp_path / "out")
    page = (tmp_path / "out/LICENSES.md").read_text()
    assert "- GPL-2+ (2 files), copyright: 2001 Somebody" in page
    assert "channels averaged to mono" in page
    assert (tmp_path / "out/licenses/toy-voices.txt").read_text() == COPYRIGHT


def test_summary_has_hours_voices_and_licences(tree, tmp_path):
    entries, _ = build(tree, tmp_path / "out")
    longer = [replace(entry, num_samples=RATE * 1800) for entry in entries]
    rows = [line.split() for line in corpus.summary(longer).splitlines()]
    assert ["train", "toy-voices", "0.500", "1", "1", "GPL-2+"] in rows
    assert ["all", "all", "1.000", "2", "2", "GPL-2+"] in rows


# Interruptions


def test_a_second_run_keeps_what_is_there(tree, tmp_path, monkeypatch):
    out = tmp_path / "out"
    build(tree, out)
    manifest = (out / "manifest.jsonl").read_bytes()
    lost, damaged = out / "test/carlo-flora/hello.wav", out / "train/anna/words_good_day.wav"
    whole = damaged.read_bytes()
    lost.unlink()
    decoded = []
    decode = corpus.decode
    monkeypatch.setattr(corpus, "decode", lambda path, **options: decoded.append(path.name) or decode(path, **options))
    build(tree, out)
    assert decoded == ["hello.wav"]
    damaged.write_bytes(b"RIFF")
    build(tree, out)
    assert decoded == ["hello.wav", "good day.wav"]
    assert damaged.read_bytes() == whole
    assert (out / "manifest.jsonl").read_bytes() == manifest
    build(tree, out, force=True)
    assert len(decoded) == 4


def test_an_interrupted_write_leaves_no_wav(tree, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def stop(path, *arguments, **options):
        Path(path).write_bytes(b"half a f")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(corpus.soundfile, "write", stop)
        with pytest.raises(KeyboardInterrupt):
            build(tree, out)
    assert not list(out.rglob("*.wav"))
    assert not (out / "manifest.jsonl").exists()
    assert list(out.rglob("*.partial"))
    (out / "train/.of-an-older-version.wav.partial").touch()
    build(tree, out)
    assert len(list(out.rglob("*.wav"))) == 2
    assert not list(out.rglob("*.partial"))


def test_a_wav_of_another_split_is_never_left_unnoticed(tree, tmp_path):
    out = tmp_path / "out"
    build(tree, out)
    stray = out / "train/carlo-flora/hello.wav"
    stray.parent.mkdir()
    shutil.copy(out / "test/carlo-flora/hello.wav", stray)
    with pytest.raises(corpus.CorpusError, match=r"1 WAV files that don't belong .*--force"):
        build(tree, out)
    assert stray.exists()
    build(tree, out, force=True)
    assert not stray.exists()
    assert len(list(out.rglob("*.wav"))) == 2


# Tools


def test_a_missing_ffmpeg_is_said_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert corpus.main(["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 1
    error = capsys.readouterr().err
    assert "ffmpeg was not found" in error
    assert "install the package 'ffmpeg'" in error
    assert not (tmp_path / "out").exists()


def test_no_apt_get_means_no_debian(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(corpus.CorpusError, match=r"apt-get was not found.*Debian or Ubuntu"):
        corpus.fetch_deb("toy-voices", tmp_path)
    (tmp_path / "toy-voices_1.0_all.deb").touch()
    assert corpus.fetch_deb("toy-voices", tmp_path).name == "toy-voices_1.0_all.deb"
    with pytest.raises(corpus.CorpusError, match="dpkg was not found"):
        corpus.unpack("toy-voices", tmp_path)


@pytest.fixture
def without_tools(tree, monkeypatch):
    """The whole script, on the toy package."""
    monkeypatch.setattr(corpus, "require_tool", lambda name, package: None)
    monkeypatch.setattr(corpus, "unpack", lambda name, cache: tree)
    monkeypatch.setattr(corpus, "SPEECH", (TOY,))
    monkeypatch.setattr(corpus, "MUSIC", (TOY,))


def test_music_lies_apart_from_the_speech(without_tools, tree, tmp_path, capsys):
    add(tree, "anna/stereo.wav", tone(1, channels=2))
    out = tmp_path / "out"
    assert corpus.main(["-o", str(out), "--cache", str(tmp_path / "cache"), "--music"]) == 0
    printed = capsys.readouterr().out
    assert f"speech: {out}\n" in printed
    assert f"music: {out}/music\n" in printed
    assert soundfile.info(out / "train/anna/stereo.wav").channels == 1
    assert soundfile.info(out / "music/train/anna/stereo.wav").channels == 2
    assert "music" not in (out / "manifest.jsonl").read_text()
    # Run once more without --music: the speech isn't disturbed by what lies beside it.
    assert corpus.main(["-o", str(out), "--cache", str(tmp_path / "cache")]) == 0


def test_unreadable_files_make_the_exit_code(without_tools, tree, tmp_path, capsys):
    (tree / TOY.root / "anna/broken.wav").write_bytes(b"RIFF nothing")
    assert corpus.main(["-o", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]) == 1
    assert "error: 1 files could not be decoded" in capsys.readouterr().err
    assert (tmp_path / "out/manifest.jsonl").exists()


def put_program(folder, name, lines):
    path = folder / name
    path.write_text("#!/bin/sh\n" + lines)
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A folder of our own programs, first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def test_a_failed_download_says_what_to_do_and_leaves_nothing(tmp_path, programs):
    put_program(programs, "apt-get", "echo half > toy-voices_1.0_all.deb; echo 'no such host' >&2; exit 100\n")
    cache = tmp_path / "cache"
    cache.mkdir()
    with pytest.raises(corpus.CorpusError, match=r"exit code 100: no such host(.|\n)*apt-get update"):
        corpus.fetch_deb("toy-voices", cache)
    assert not list(cache.iterdir())


def test_a_package_is_downloaded_and_unpacked_once(tmp_path, programs):
    cache = tmp_path / "cache"
    cache.mkdir()
    put_program(programs, "apt-get", 'echo "$@" >> ../calls; touch "$2_1.0_all.deb"\n')
    put_program(programs, "dpkg", f'echo dpkg "$1" >> {cache}/calls; mkdir -p "$3/usr"\n')
    for _ in range(2):
        assert (corpus.unpack("toy-voices", cache) / "usr").is_dir()
    assert (cache / "calls").read_text() == "download toy-voices\ndpkg -x\n"


def test_half_an_unpacked_tree_is_never_used(tmp_path, programs):
    (tmp_path / "toy-voices_1.0_all.deb").touch()
    put_program(programs, "dpkg", 'mkdir -p "$3/usr"; echo "disk full" >&2; exit 2\n')
    with pytest.raises(corpus.CorpusError, match="disk full"):
        corpus.unpack("toy-voices", tmp_path)
    assert not list((tmp_path / "unpacked").iterdir())


def test_a_package_without_recordings_is_an_error(tree):
    package = replace(TOY, suffixes=(".flac",))
    with pytest.raises(corpus.CorpusError, match=r"no \.flac files below .*delete"):
        list(corpus.scan(package, tree))


# Files of training voices that are kept out


def test_a_tenth_of_the_wordings_of_a_training_voice_is_kept_out_and_wordings_never_straddle():
    words = [f"sentence number {n}, please" for n in range(4000)]
    splits = [corpus.split_of("anna", text) for text in words]
    assert set(splits) == {"train", "seen"}
    assert 0.08 < splits.count("seen") / len(splits) < 0.12
    # Case, punctuation and spaces don't make another wording, and other voices say it on the same side.
    assert splits == [corpus.split_of("bert", f"  {text.upper()}! ") for text in words]


def test_held_out_voices_and_foreign_sources_are_whole():
    words = [str(n) for n in range(200)]
    assert {corpus.split_of("ivrvoice-ru", text) for text in words} == {"test"}
    assert {corpus.split_of("hedgewars-pirate", text) for text in words} == {"foreign"}
    assert {corpus.split_of("max-mccracken", text) for text in words} == {"train"}


@pytest.mark.parametrize(
    ("voice_of", "path", "voice"),
    [
        ("tuxpaint_voice", "animals/birds/tux_desc_fr.ogg", ("tuxpaint-fr", "fr", "animals_birds_tux")),
        ("tuxpaint_voice", "animals/tux_desc.ogg", ("tuxpaint-en", "en", "animals_tux")),
        ("tuxpaint_voice", "town/bus_desc_pt_BR.wav", ("tuxpaint-pt-BR", "pt-BR", "town_bus")),
        ("gcin_voice", "ㄊㄢ3/5.ogg", ("gcin-5", "zh", "310a-3122-3")),
        ("hedgewars_voice", "Default_uk/Amazing.ogg", ("hedgewars-default_uk", "uk", "Amazing")),
        ("hedgewars_voice", "Russian/Amazing.ogg", ("hedgewars-russian", "ru", "Amazing")),
    ],
)
def test_voices_of_the_games_come_from_the_paths(voice_of, path, voice):
    assert getattr(corpus, voice_of)(PurePosixPath(path)) == corpus.Voice(*voice)


def test_stamp_descriptions_are_found_by_language(tmp_path):
    folder = tmp_path / "usr/share/tuxpaint/stamps/animals"
    folder.mkdir(parents=True)
    (folder / "tux.txt").write_text("A penguin.\nfr.utf8=Un manchot.\nru.utf8=Пингвин.\n", encoding="utf-8")
    assert corpus.tuxpaint_texts(tmp_path) == {
        "animals/tux_desc": "A penguin.",
        "animals/tux_desc_fr": "Un manchot.",
        "animals/tux_desc_ru": "Пингвин.",
    }
