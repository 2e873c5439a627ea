"""The committed clips: all documented, readable, small."""

import re
from pathlib import Path

import numpy as np
import pytest
import soundfile

DATA = Path(__file__).resolve().parent / "data"
CLIPS = sorted(path for path in DATA.iterdir() if path.suffix in {".wav", ".flac", ".ogg", ".opus", ".mp3"})
SOURCES = (DATA / "SOURCES.md").read_text(encoding="utf-8")
# Section by section: file name -> text.
SECTIONS = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", SOURCES, re.MULTILINE | re.DOTALL))
MAX_BYTES = 2_000_000


def test_sources_lists_exactly_the_clips():
    assert sorted(SECTIONS) == [path.name for path in CLIPS]
    known = {"SOURCES.md", "make.py"}
    others = {path.name for path in DATA.iterdir() if path.is_file()} - known
    assert others == set(SECTIONS)


def test_all_clips_together_are_small():
    size = sum(path.stat().st_size for path in CLIPS)
    assert 1_000_000 < size <= MAX_BYTES


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
def test_clip_is_what_sources_says(path):
    section = SECTIONS[path.name]
    stated = re.search(r"- (.+), (\d+) Hz, (mono|stereo), ([\d.]+) s, (\d+) bytes", section)
    assert stated
    wave, sample_rate = soundfile.read(path, dtype="float32", always_2d=True)
    assert sample_rate == int(stated[2])
    assert wave.shape[1] == {"mono": 1, "stereo": 2}[stated[3]]
    assert len(wave) / sample_rate == pytest.approx(float(stated[4]), abs=0.001)
    assert path.stat().st_size == int(stated[5])
    assert np.sqrt(np.mean(wave**2)) > 0.01  # about -40 dBFS: there is something to hear
    assert np.abs(wave).max() <= 1.0


@pytest.mark.parametrize("path", CLIPS, ids=lambda path: path.name)
def test_clip_names_author_licence_and_changes(path):
    section = SECTIONS[path.name]
    assert re.search(r"- from Debian package \S+: `usr/share/\S+`", section)
    licences = re.findall(r"- copyright .+; (\S+)$", section, re.MULTILINE)
    assert set(licences) == ({"CC0"} if path.name.startswith("music_") else {"CC-BY-3.0"})
    assert "- changes: " in section
    if path.name.startswith("speech_"):
        assert "- says: “" in section


def test_licence_texts_are_beside_the_clips():
    spoken = (DATA / "licenses/asterisk-core-sounds.txt").read_text(encoding="utf-8")
    assert "Carlo Flora" in spoken
    assert "http://www.ivrvoice.ru" in spoken
    assert "Attribution 3.0 Unported" in spoken
    assert "8. Miscellaneous" in spoken  # the end of the text is there too
    music = (DATA / "licenses/sonic-pi-samples.txt").read_text(encoding="utf-8")
    assert "creativecommons.org/publicdomain/zero/1.0" in music
    for author in re.findall(r"- copyright \d+ (.+?);? CC0", SOURCES):
        assert author.rstrip(";") in music


def test_clips_cover_the_formats_rates_and_channels():
    infos = [soundfile.info(path) for path in CLIPS]
    assert {info.samplerate for info in infos} >= {8000, 16000, 22050, 44100, 48000}
    assert {info.subtype for info in infos} >= {"PCM_16", "PCM_24", "VORBIS", "OPUS", "MPEG_LAYER_III"}
    assert {path.suffix for path in CLIPS} >= {".wav", ".flac", ".ogg", ".opus", ".mp3"}
    assert {info.channels for info in infos} == {1, 2}
    spoken = [path.name for path in CLIPS if path.name.startswith("speech_")]
    assert sum("_it_male_" in name for name in spoken) >= 3
    assert sum("_ru_female_" in name for name in spoken) >= 3
