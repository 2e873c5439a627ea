import shutil

import pytest
import torch
import yaml
from conftest import DATA, SMALL
from typer.testing import CliRunner

from codec import load_codec
from codec.audio import write_audio
from codec.cli import app
from codec.errors import ConfigError
from codec.train import CodecTraining, check, load_config, profile, train
from codec.train.logs import read_logs

RECIPES = DATA.parents[1] / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.yaml"))
SHRUNKEN = {
    "model.codebook_size": "16",
    "data.weights": "{}",
    "data.batch_size": "2",
    "data.num_workers": "0",
    "data.max_valid_files": "1",
    "optim.max_steps": "3",
    "optim.quantize_from": "1",
    "run.valid_every": "3",
    "run.log_every": "1",
    "trainer.accelerator": "cpu",
}


def shrunken(name, tmp_path, **overrides):
    """A recipe as it is shipped, on two shipped clips, for three steps: one before, two after the codebooks come in."""
    music = name == "music_44k_stereo"
    files = {
        "data.train": f"[{DATA}/music_guitar-chord_stereo_44k.flac, {DATA}/music_percussion-swash_stereo_44k.wav]"
        if music
        else f"[{DATA}/speech_ru_female_please-hold_44k.flac, {DATA}/speech_ru_female_thanks_48k.opus]",
        "data.valid": f"[{DATA}/music_guitar-chord_stereo_44k.flac]"
        if music
        else f"[{DATA}/speech_it_male_thanks_22k.ogg]",
    }
    settings = {**SHRUNKEN, **files, "run.output": str(tmp_path / "run"), **overrides}
    document = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    if document.get("adversarial"):
        settings |= {"adversarial.channels": "4", "adversarial.start_step": "1", "adversarial.lead_steps": "1"}
    if "init_from" in document["run"]:
        settings |= {"model.codebook_size": "1024", "run.init_from": str(RECIPES.parent / "checkpoints" / "speech_16k")}
    return load_config(RECIPES / f"{name}.yaml", settings)


def test_the_recipes_that_are_shipped():
    assert {
        "audio_24k",
        "music_44k_stereo",
        "overfit_clip",
        "speech_16k",
        "speech_16k_adversarial",
        "speech_16k_denoise",
        "speech_16k_live",
        "speech_16k_mel",
        "speech_16k_seanet",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_is_valid_and_trains(name, tmp_path):
    config = load_config(RECIPES / f"{name}.yaml")
    assert config.model.name == name.removesuffix("_mel").removesuffix("_adversarial")
    assert config.run.output == f"runs/{name}"
    small = shrunken(name, tmp_path)
    codec = load_codec(train(small, progress=False))
    # Where the codes stay as they are, the checkpoint says whose they are.
    origin = load_codec("speech_16k").spec if small.optim.parts != "all" else None
    assert (codec.config.codes_of or {}).get("weights_hash") == (origin and origin.weights_hash)
    assert {**codec.config.to_dict(), "codes_of": None} == {**small.model.to_dict(), "codes_of": None}
    lines = read_logs(tmp_path / "run")
    losses = [line for line in lines if "train/mel_head" in line]
    assert len(losses) == 3 and "train/perplexity_first" in losses[-1]
    assert ("train/adversarial" in losses[-1]) == bool(config.adversarial.kinds)
    assert ("valid/denoised_mel" in lines[-1]) == config.model.denoise
    wave = torch.zeros(1, config.model.channels, 1000)
    assert codec.decode(codec.encode(wave)).shape == wave.shape


def test_what_the_speech_recipes_promise():
    speech, live = (load_config(RECIPES / f"{name}.yaml").model for name in ("speech_16k", "speech_16k_live"))
    assert load_codec("speech_16k").config.to_dict() == speech.to_dict()
    spec = CodecTraining(load_config(RECIPES / "speech_16k_live.yaml")).model.spec
    assert spec.bitrate_bps == 4000 and spec.encode_context[1] == 0
    assert not live.lookahead and load_config(RECIPES / "speech_16k_seanet.yaml").model.body == "seanet"


def test_a_clip_is_learnt_by_heart(tmp_path):
    """overfit_clip.yaml, cut to a few seconds: an untrained codec has 1.5 and more here, one that learns under 0.8."""
    config = load_config(
        RECIPES / "overfit_clip.yaml",
        {
            "data.train": f"[{DATA}/speech_it_male_first-in-queue_16k.wav]",
            "data.valid": f"[{DATA}/speech_it_male_first-in-queue_16k.wav]",
            "optim.max_steps": "60",
            "optim.quantize_from": "20",
            "optim.average_decay": "0.9",
            "run.valid_every": "60",
            "run.output": str(tmp_path / "run"),
        },
    )
    train(config, progress=False)
    assert read_logs(tmp_path / "run")[-1]["valid/full_mel"] < 0.8


@pytest.fixture
def recipe(tmp_path):
    settings = {
        "model": {"name": "tiny", **{k: list(v) if isinstance(v, tuple) else v for k, v in SMALL.items()}},
        "data": {
            "train": [str(DATA / "speech_ru_female_first-in-queue_16k.flac")],
            "valid": [str(DATA / "speech_it_male_first-in-queue_16k.wav")],
            "batch_size": 2,
        },
        "trainer": {"precision": "32-true", "accelerator": "cpu"},
        "run": {"output": str(tmp_path / "run")},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_check_says_what_there_is_and_leaves_nothing(recipe, tmp_path):
    folder = tmp_path / "speech"
    folder.mkdir()
    for name in ("speech_it_male_enter-your-number_8k.wav", "speech_ru_female_please-hold_44k.flac"):
        shutil.copy(DATA / name, folder)
    write_audio(folder / "short.wav", torch.full((1, 4000), 0.1), 16000)
    write_audio(folder / "silent.wav", torch.zeros(1, 160000), 16000)
    settings = {"data.train": f"[{folder}]", "adversarial.kinds": "[stft]", "adversarial.channels": "4"}
    before = sorted(tmp_path.rglob("*"))
    facts, remarks = check(load_config(recipe, settings))
    assert sorted(tmp_path.rglob("*")) == before
    assert facts["training files"] == 4 and facts["recorded at, Hz"] == "8000, 16000, 44100"
    assert float(facts["loss"]) > 0 and float(facts["memory, GB"]) > 0.1
    assert "discriminators, M parameters" in facts
    text = "\n".join(remarks)
    assert "1 of 4 training files are shorter than the segment: padded with zeros" in text
    assert "1 of 4 training files looked at are recorded at less than 16000 Hz" in text
    assert "of the training excerpts are silent" in text


def test_check_and_profile_on_the_command_line(recipe):
    runner = CliRunner()
    done = runner.invoke(app, ["train", str(recipe), "--check"])
    assert done.exit_code == 0 and "ready to train" in done.output and "encoder, M parameters" in done.output
    done = runner.invoke(app, ["train", str(recipe), "--check", "--optim.max_step", "3"])
    assert isinstance(done.exception, ConfigError) and "unknown key optim.max_step" in str(done.exception)
    done = runner.invoke(app, ["train", str(recipe), "--check", "--profile"])
    assert isinstance(done.exception, ConfigError)


def test_profile_accounts_for_a_whole_step(recipe):
    parts = dict(profile(load_config(recipe, {"adversarial.kinds": "[stft]", "adversarial.channels": "4"}), steps=3))
    named = ["data", "augment", "forward", "discriminators", "losses", "backward", "optimiser", "rest"]
    assert list(parts) == named
    assert all(parts[name] > 0 for name in named[1:-1])
    assert parts["rest"] < 0.5 * sum(parts.values())
