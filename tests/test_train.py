import shutil

import pytest
import torch
import yaml
from conftest import DATA, SMALL

from codec import load_codec
from codec.audio import read_audio, write_audio
from codec.errors import AudioFileError, ConfigError, TrainingError
from codec.train import (
    AugmentConfig,
    CodecTraining,
    OptimConfig,
    TrainConfig,
    _levels,
    augment,
    augmentations,
    change_speed,
    load_config,
    train,
)

RECIPE = DATA.parents[1] / "recipes" / "speech_16k.yaml"


@pytest.fixture
def recipe(tmp_path):
    speech = tmp_path / "speech"
    speech.mkdir()
    for path in DATA.glob("speech_ru*"):
        shutil.copy(path, speech)
    settings = {
        "model": {"name": "tiny", **{k: list(v) if isinstance(v, tuple) else v for k, v in SMALL.items()}},
        "data": {
            "train": [str(speech)],
            "valid": [str(DATA / "speech_it_male_first-in-queue_16k.wav")],
            "batch_size": 2,
        },
        "optim": {"max_steps": 12, "quantize_from": 4, "warmup_steps": 2},
        "run": {
            "output": str(tmp_path / "run"),
            "valid_every": 6,
            "log_every": 2,
            "precision": "32-true",
            "accelerator": "cpu",
        },
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_a_run_trains_resumes_and_exports(recipe, tmp_path):
    folder = train(load_config(recipe), progress=False)
    assert folder == tmp_path / "run" / "checkpoint"
    codec = load_codec(folder)
    assert codec.spec.name == "tiny"
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav")
    codes = codec.encode(wave)
    assert codes.codes.unique().numel() > 4
    assert torch.isfinite(codec.decode(codes)).all()
    log = tmp_path / "run" / "logs" / "from_step_0" / "metrics.csv"
    assert "valid/full_mel" in log.read_text()

    train(load_config(recipe, {"optim.max_steps": "14"}), progress=False)
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=False)
    assert state["global_step"] == 14
    assert log.exists()
    assert load_codec(folder).spec.weights_hash != codec.spec.weights_hash
    assert not torch.equal(load_codec(folder).quantizer.codebooks, codec.quantizer.codebooks)
    with pytest.raises(ConfigError, match=r"last\.ckpt exists; resume it"):
        train(load_config(recipe), resume=False, progress=False)


def test_resuming_is_the_undisturbed_run(recipe, tmp_path, monkeypatch):
    """Same data, optimiser, schedule, average, codebooks and random restarts, also across the stop."""
    whole = train(load_config(recipe, {"run.output": str(tmp_path / "whole")}), progress=False)
    training_step = CodecTraining.training_step

    def dies_at_8(self, batch, batch_idx):
        if self.global_step == 8:
            raise RuntimeError("killed")
        return training_step(self, batch, batch_idx)

    again = {"run.output": str(tmp_path / "again"), "run.checkpoint_minutes": "0.000001"}
    with monkeypatch.context() as patch:
        patch.setattr(CodecTraining, "training_step", dies_at_8)
        with pytest.raises(RuntimeError, match="killed"):
            train(load_config(recipe, again), progress=False)
    resumed = train(load_config(recipe, again), progress=False)
    assert (tmp_path / "again" / "logs" / "from_step_8").is_dir()
    a, b = load_codec(whole).state_dict(), load_codec(resumed).state_dict()
    assert {name for name in a if not torch.equal(a[name], b[name])} == set()


def test_training_lowers_the_loss(recipe, tmp_path):
    overrides = {"optim.max_steps": "60", "optim.quantize_from": "10", "run.valid_every": "20"}
    train(load_config(recipe, overrides), progress=False)
    lines = (tmp_path / "run" / "logs" / "from_step_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/mel")
    values = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    assert sum(values[-5:]) / 5 < 0.7 * values[0]


def test_the_shipped_recipe_is_valid_and_its_defaults_exist():
    config = load_config(RECIPE)
    assert config.model.name == "speech_16k"
    assert config.optim.learning_rate == 1e-3
    assert CodecTraining(config).model.spec.bitrate_bps == 4000


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.max_step": "1"}, "unknown key optim.max_step; known: max_steps"),
        ({"optimizer.lr": "1"}, r"unknown sections \['optimizer'\]"),
        ({"optim.max_steps": "many"}, "optim.max_steps is 'many'; it must be int"),
        ({"optim.max_steps": "true"}, "optim.max_steps is True; it must be int"),
        ({"augment.gain_db": "[1, 2, 3]"}, r"augment.gain_db is \[1, 2, 3\]"),
        ({"model.hop_length": "321"}, "hop_length 321 is not a multiple"),
    ],
)
def test_config_errors(recipe, overrides, message):
    with pytest.raises(ConfigError, match=message):
        load_config(recipe, overrides)


def test_yaml_errors(tmp_path):
    (tmp_path / "a.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "a.yaml")
    (tmp_path / "b.yaml").write_text("- 1")
    with pytest.raises(ConfigError, match="must be a mapping of sections, not list"):
        load_config(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match="can't be read"):
        load_config(tmp_path / "c.yaml")


def test_numbers_that_yaml_reads_as_text(recipe):
    assert load_config(recipe, {"optim.learning_rate": "2e-4"}).optim.learning_rate == 2e-4


def test_bad_data_is_found_before_the_first_step(recipe, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.train and data\.valid are empty"):
        train(load_config(recipe, {"data.train": "[]"}), progress=False)
    with pytest.raises(AudioFileError, match="no such file or folder"):
        train(load_config(recipe, {"data.train": "[nowhere]"}), progress=False)


def test_a_loss_that_isnt_finite_stops_the_run_and_names_the_excerpts(recipe, tmp_path):
    write_audio(tmp_path / "speech" / "loud.wav", torch.full((1, 16000), 0.5), 16000)
    with pytest.raises(TrainingError, match=r"loss is nan at step \d+ .*on excerpts .*lower optim.learning_rate"):
        train(load_config(recipe, {"optim.waveform_weight": ".nan"}), progress=False)


def test_kmeans_needs_enough_frames(recipe):
    with pytest.raises(TrainingError, match=r"frames for k-means of 4096 entries; raise optim.quantize_from"):
        train(load_config(recipe, {"model.codebook_size": "4096"}), progress=False)


def test_quantizer_dropout_shares():
    config = TrainConfig(optim=OptimConfig(full_share=0.5, half_share=0.2))
    levels = _levels(torch.linspace(0, 0.99999, 100_000), config)
    counts = torch.bincount(levels, minlength=9) / 100_000
    expected = torch.full((9,), 0.3 / 8)
    expected[0] = 0
    expected[8] += 0.5
    expected[4] += 0.2
    torch.testing.assert_close(counts, expected, atol=1e-3, rtol=0)


def test_speed_one_changes_nothing_and_others_move_a_tone():
    tone = torch.sin(torch.arange(20000) * 2 * torch.pi * 1000 / 16000)[None, None]
    same = change_speed(tone, torch.tensor([1.0]), 16000)
    torch.testing.assert_close(same[..., 100:], tone[..., 100:16000], atol=1e-4, rtol=0)
    for speed in (0.9, 1.1):
        moved = change_speed(tone, torch.tensor([speed]), 16000)[0, 0]
        spectrum = torch.fft.rfft(moved * torch.hann_window(16000)).abs()
        assert abs(spectrum.argmax().item() - 1000 * speed) <= 1
        expected = torch.sin(torch.arange(16000) * 2 * torch.pi * 1000 * speed / 16000)
        assert (moved - expected)[100:-100].abs().max() < 0.01


def test_speed_above_one_removes_what_would_alias():
    tone = torch.sin(torch.arange(24000) * 2 * torch.pi * 7700 / 16000)[None, None]
    assert change_speed(tone, torch.tensor([1.15]), 16000).square().mean() < 0.1 * tone.square().mean()


def _batch(**values):
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav", num_samples=20000)
    batch = {"x": wave[None]}
    for name in augmentations(AugmentConfig()):
        batch[name] = torch.zeros(1)
    return {
        **batch,
        "sign": torch.ones(1),
        "speed": torch.ones(1),
        **{k: torch.tensor([v]) for k, v in values.items()},
    }


def test_augmentations_do_what_their_names_say():
    plain = augment(_batch(), 16000)
    torch.testing.assert_close(plain, _batch()["x"][..., :16000], atol=1e-5, rtol=0)
    torch.testing.assert_close(
        augment(_batch(sign=-1.0, gain_db=-6.0), 16000), -plain * 10 ** (-6 / 20), atol=1e-5, rtol=0
    )
    assert augment(_batch(gain_db=60.0), 16000).abs().max() <= 1.0 + 1e-6
    power = torch.fft.rfft(augment(_batch(band_limit_on=1.0, band_limit=0.5), 16000)[0, 0]).abs().square()
    assert power[4500:].sum() < 1e-4 * torch.fft.rfft(plain[0, 0]).abs().square()[4500:].sum()
    quiet = augment(_batch(gain_db=-20.0), 16000)
    boosted = augment(_batch(gain_db=-20.0, eq_on=1.0, **{f"eq_{i}": 10.0 for i in range(6)}), 16000)
    torch.testing.assert_close(boosted, quiet * 10**0.5, atol=1e-5, rtol=0)
    low_cut = augment(_batch(gain_db=-20.0, eq_on=1.0, eq_0=-10.0), 16000)
    spectra = [torch.fft.rfft(w[0, 0]).abs() for w in (quiet, low_cut)]
    assert spectra[1][3000:].norm().item() == pytest.approx(spectra[0][3000:].norm().item(), rel=1e-3)
    assert spectra[1][50:100].norm() < 0.6 * spectra[0][50:100].norm()
