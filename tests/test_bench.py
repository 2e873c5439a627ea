import json

import pytest
import torch
from conftest import DATA, small_codec
from typer.testing import CliRunner

from codec.bench import _quality, bench_codecs
from codec.cli import app
from codec.errors import InputError

FILES = [DATA / "speech_it_male_thanks_22k.ogg", DATA / "music_guitar-chord_stereo_44k.flac"]


def test_a_row_for_each_codec(lookahead_codec):
    seen = []
    rows = bench_codecs(
        [(lookahead_codec, None), (lookahead_codec, 2)], FILES, max_seconds=1, on_progress=lambda *p: seen.append(p)
    )
    full, half = rows
    assert (full.name, half.name) == ("small", "small@2")
    assert full.bitrate_bps == pytest.approx(4 * 5 * 50, rel=0.03)  # the last frame of a file may be part full
    assert half.bitrate_bps == pytest.approx(full.bitrate_bps / 2)
    assert full.num_files == 2
    assert full.audio_seconds == pytest.approx(2, abs=0.1)
    assert min(full.encode_speed, full.decode_speed) > 0
    assert full.parameters == sum(p.numel() for p in lookahead_codec.parameters())
    assert seen == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_quality_measures_know_a_copy_from_noise():
    generator = torch.Generator().manual_seed(0)
    wave = torch.randn(1, 48000, generator=generator) * torch.linspace(0.01, 0.3, 48000)
    distance, ratio, *_ = _quality(wave, wave, 24000)
    assert distance < 1e-6
    assert ratio > 90
    noisy = wave + torch.randn(1, 48000, generator=generator) * wave.std() * 0.1
    other, ratio, *_ = _quality(wave, 0.5 * noisy, 24000)
    assert other > 0.1
    assert 19 < ratio < 23  # at -20 dB; its level doesn't count


def test_stereo_codecs_take_mono_files():
    codec = small_codec(channels=2)
    (row,) = bench_codecs([(codec, None)], FILES[:1], max_seconds=0.5)
    assert row.num_files == 1


def test_what_cant_be_measured(lookahead_codec, tmp_path):
    with pytest.raises(InputError, match="max_files 0"):
        bench_codecs([(lookahead_codec, None)], FILES, max_files=0)
    (tmp_path / "bad.wav").write_bytes(b"no audio")
    with pytest.raises(InputError, match=r"none of 1 files can be read and has 0.25 s"):
        bench_codecs([(lookahead_codec, None)], [tmp_path])


def test_the_verb_prints_one_table(tmp_path):
    small_codec().save(tmp_path / "tiny")
    arguments = ["bench", str(FILES[0]), "--codec", str(tmp_path / "tiny"), "--codec", f"{tmp_path / 'tiny'}@1"]
    arguments += ["--seconds", "0.5", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["codec", "Hz", "kbps"]
    assert [line.split()[0] for line in lines[1:3]] == ["small", "small@1"]
    assert lines[3].startswith("1 files, ")
    rows = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).stdout)["codecs"]
    assert [row["name"] for row in rows] == ["small", "small@1"]
    wrong = CliRunner().invoke(app, ["bench", str(FILES[0]), "--codec", "speech_16k@all"])
    assert "after @ comes the number of codebooks" in str(wrong.exception)
