import os
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from conftest import DATA, SMALL

from codec import load_codec
from codec.audio import read_audio, write_audio
from codec.errors import AudioFileError, CheckpointError, ConfigError, InputError, TrainingError
from codec.nn.rvq import ResidualVectorQuantizer
from codec.train import CodecTraining, OptimConfig, TrainConfig, load_config, train
from codec.train.data import TrainingData
from codec.train.logs import read_logs
from codec.train.module import _levels

ADVERSARIAL = {
    "adversarial.kinds": "[multi_stft]",
    "adversarial.channels": "4",
    "adversarial.start_step": "5",
    "adversarial.lead_steps": "1",
    "adversarial.every": "2",
}


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
            "segment_seconds": 0.5,
        },
        "optim": {"max_steps": 12, "quantize_from": 4, "warmup_steps": 2},
        "run": {
            "output": str(tmp_path / "run"),
            "valid_every": 6,
            "log_every": 2,
        },
        "trainer": {"precision": "32-true", "accelerator": "cpu"},
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


def states_of(folder):
    state = torch.load(folder / "last.ckpt", weights_only=False)
    optimizers = {
        f"optimizer {i} {key} {name}": value
        for i, optimizer in enumerate(state["optimizer_states"])
        for key, values in optimizer["state"].items()
        for name, value in values.items()
    }
    return {**state["state_dict"], **optimizers}


def differences(ours, theirs):
    assert ours.keys() == theirs.keys()
    return {name for name in ours if not torch.equal(ours[name], theirs[name])}


def test_resuming_is_the_undisturbed_run(recipe, tmp_path, monkeypatch):
    """Data, optimisers, schedule, average, codebooks, restarted entries, discriminators, balancer: to the bit."""
    monkeypatch.setitem(ResidualVectorQuantizer.__init__.__kwdefaults__, "restart_share", 0.995)
    overrides = {**ADVERSARIAL, "optim.balance": "true", "optim.max_steps": "11", "run.valid_every": "11"}
    train(load_config(recipe, {**overrides, "run.output": str(tmp_path / "whole")}), progress=False)
    whole = states_of(tmp_path / "whole")
    assert {"balancer.norms", "quantizing", "average.quantizer.codebooks"} <= set(whole)
    assert any(name.startswith("discriminators.") for name in whole)
    training_step = CodecTraining.training_step

    def resumed(name, stop_at):
        def dies(self, batch, batch_idx):
            if self.global_step == stop_at:
                raise RuntimeError("killed")
            return training_step(self, batch, batch_idx)

        settings = {**overrides, "run.output": str(tmp_path / name), "run.checkpoint_minutes": "0.000001"}
        with monkeypatch.context() as patch:
            patch.setattr(CodecTraining, "training_step", dies)
            with pytest.raises(RuntimeError, match="killed"):
                train(load_config(recipe, settings), progress=False)
        shutil.copytree(tmp_path / name, tmp_path / f"{name}, killed")
        train(load_config(recipe, settings), progress=False)
        assert (tmp_path / name / "logs" / f"from_step_{stop_at}").is_dir()
        return states_of(tmp_path / name)

    assert differences(whole, resumed("in the warm-up", 3)) == set()
    assert differences(whole, resumed("adversarial", 8)) == set()

    # This comparison can fail: entries restarted by other random numbers than the step's are noticed.
    monkeypatch.setattr(torch, "manual_seed", lambda seed: None)
    settings = {**overrides, "run.output": str(tmp_path / "adversarial, killed")}
    train(load_config(recipe, settings), progress=False)
    assert "model.quantizer.codebooks" in differences(whole, states_of(tmp_path / "adversarial, killed"))


DDP_SCRIPT = """
import sys
import torch
from codec.train import CodecTraining, load_config, train

seen, training_step = [], CodecTraining.training_step

def spy(self, batch, batch_idx):
    seen.append(list(zip(batch["key"], batch["start"].tolist())))
    return training_step(self, batch, batch_idx)

def at_end(self):
    torch.save({"seen": seen, "state": self.state_dict()}, f"{self.config.run.output}/rank{self.global_rank}.pt")

CodecTraining.training_step, CodecTraining.on_train_end = spy, at_end
overrides = dict(pair.split("=", 1) for pair in sys.argv[2:])
train(load_config(sys.argv[1], overrides), progress=False)
"""


def test_two_processes_see_different_excerpts_and_keep_the_same_weights(recipe, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(DDP_SCRIPT)
    overrides = {**ADVERSARIAL, "trainer.devices": "2", "optim.max_steps": "8", "run.valid_every": "8"}
    command = [sys.executable, str(script), str(recipe), *(f"{k}={v}" for k, v in overrides.items())]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    ours, theirs = (torch.load(tmp_path / "run" / f"rank{rank}.pt") for rank in (0, 1))
    assert differences(ours["state"], theirs["state"]) == set()
    assert all(torch.isfinite(value).all() for value in ours["state"].values())
    pairs = list(zip(ours["seen"], theirs["seen"], strict=True))
    assert len(pairs) == 8 and all(a != b for a, b in pairs)
    # Rank r of two has batches r, r + 2, …: what one process would see, dealt out.
    draws = TrainingData(load_config(recipe)).excerpts
    expected = [list(zip(draws[n]["key"], draws[n]["start"].tolist(), strict=True)) for n in range(4)]
    assert [batch for pair in pairs[:2] for batch in pair] == expected
    codec = load_codec(tmp_path / "run" / "checkpoint")
    assert codec.decode(codec.encode(torch.zeros(1, 1, 1000))).shape == (1, 1, 1000)


def test_training_lowers_the_loss(recipe, tmp_path):
    overrides = {"optim.max_steps": "60", "optim.quantize_from": "10", "run.valid_every": "20"}
    train(load_config(recipe, overrides), progress=False)
    lines = (tmp_path / "run" / "logs" / "from_step_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("train/mel")
    values = [float(line.split(",")[column]) for line in lines[1:] if line.split(",")[column]]
    assert sum(values[-5:]) / 5 < 0.7 * values[0]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optim.max_step": "1"}, "unknown key optim.max_step; known: max_steps"),
        ({"optimizer.lr": "1"}, r"unknown sections \['optimizer'\]"),
        ({"optim.max_steps": "many"}, "optim.max_steps is 'many'; it must be int"),
        ({"optim.max_steps": "true"}, "optim.max_steps is True; it must be int"),
        ({"augment.gain_db": "[1, 2, 3]"}, r"augment.gain_db is \[1, 2, 3\]"),
        ({"model.hop_length": "321"}, "hop_length 321 is not a multiple"),
        ({"model": "3"}, "unknown|must be a mapping"),
        ({"optim.max_steps": "[1"}, r"--optim.max_steps '\[1' is not valid YAML"),
        ({"optim.parts": "head"}, "optim.parts is 'head'; it must be one of 'all', 'decoder', 'mel_head'"),
        ({"optim.parts": "mel_head"}, "trains a part of a trained codec; name that in run.init_from"),
        ({"optim.learning_rate": "0"}, r"optim.learning_rate is 0\.0; it must be above 0"),
        ({"optim.full_share": "0.9"}, r"optim.half_share is 0.2; it must be from 0 to 0.1"),
        ({"augment.mix_share": "1.5"}, "augment.mix_share is 1.5; it must be from 0 to 1"),
        ({"augment.gain_db": "[3, -3]"}, r"augment.gain_db is \[3.0, -3.0\]; it must be \[low, high\]"),
        ({"augment.mix_share": "0.5", "data.batch_size": "1"}, "set data.batch_size to at least 2"),
        ({"data.segment_seconds": "0.511"}, r"is 25.55 frames of 320 samples; .* 0.52 is 26"),
        ({"adversarial.kinds": "[gan]"}, r"adversarial.kinds has \['gan'\]; there are stft, wave, multi_stft"),
        ({"adversarial.channels": "6"}, "adversarial.channels is 6; it must be a multiple of 4"),
        ({"trainer.precision": "8"}, "trainer.precision is 8; it must be one of 'bf16-mixed', '32-true'"),
        ({"model.mel": "{n_mels: 80, sample_rate: 8000}"}, "model.mel.sample_rate is 8000"),
        ({"model.codebook_size": "4096"}, r"100|frames for k-means of 4096 entries; raise optim.quantize_from"),
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


def test_quantizer_dropout_shares():
    config = TrainConfig(optim=OptimConfig(full_share=0.5, half_share=0.2))
    levels = _levels(torch.linspace(0, 0.99999, 100_000), config)
    counts = torch.bincount(levels, minlength=9) / 100_000
    expected = torch.full((9,), 0.3 / 8)
    expected[0] = 0
    expected[8] += 0.5
    expected[4] += 0.2
    torch.testing.assert_close(counts, expected, atol=1e-3, rtol=0)


def test_an_empty_silent_or_mismatched_corpus_is_found_before_the_first_step(recipe, tmp_path):
    def fails(error, message, files, **overrides):
        folder = tmp_path / "odd"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        for name, (wave, rate) in files.items():
            write_audio(folder / name, wave, rate)
        with pytest.raises(error, match=message):
            train(load_config(recipe, {"data.train": f"[{folder}]", **overrides}), progress=False)
        assert not (tmp_path / "run").exists()

    tone = torch.sin(torch.arange(16000) * 0.1)[None] * 0.5
    fails(InputError, "no audio files in", {})
    fails(
        TrainingError, r"64 random excerpts .* are all silent .*are these the right files", {"a.wav": (tone * 0, 16000)}
    )
    fails(
        TrainingError,
        r"all 2 files of data.train are shorter than data.segment_seconds 0.5 \(the longest has 0.25 s\)",
        {"a.wav": (tone[:, :4000], 16000), "b.wav": (tone[:, :3000], 16000)},
    )
    fails(
        ConfigError,
        r"model.sample_rate is 16000 Hz, but the 1 files of data.train looked at have 8000 Hz at most",
        {"a.wav": (tone, 8000)},
    )


def test_a_checkpoint_of_another_architecture_is_refused(recipe, tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "small")
    start = {"run.init_from": str(tmp_path / "small")}
    assert torch.equal(
        CodecTraining(load_config(recipe, start)).model.quantizer.codebooks, lookahead_codec.quantizer.codebooks
    )
    with pytest.raises(ConfigError, match=r"another architecture \(latent_dim: recipe 16, checkpoint 8\)"):
        CodecTraining(load_config(recipe, {**start, "model.latent_dim": "16"}))
    mel = "{sample_rate: 16000, n_fft: 512, win_length: 512, hop_length: 160, n_mels: 80, f_min: 0, f_max: 7000}"
    with pytest.raises(ConfigError, match=r"has other settings \(mel: recipe .*'f_max': 7000"):
        CodecTraining(load_config(recipe, {**start, "model.mel": mel}))
    with pytest.raises(CheckpointError, match="no codec 'nowhere'"):
        CodecTraining(load_config(recipe, {"run.init_from": "nowhere"}))
    # A run's own last.ckpt, too.
    train(load_config(recipe, {"optim.max_steps": "5"}), progress=False)
    for key, value in (("model.latent_dim", "16"), ("adversarial.kinds", "[stft]"), ("optim.balance", "true")):
        with pytest.raises(ConfigError, match=rf"last.ckpt is of another run: {key} is .*give another run.output"):
            train(load_config(recipe, {key: value}), progress=False)
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=False)
    del state["config"]["optim"]["matrix_learning_rate"]  # as before there was a second optimiser
    torch.save(state, tmp_path / "run" / "last.ckpt")
    with pytest.raises(ConfigError, match=r"written by another version of this program.*--run.init_from"):
        train(load_config(recipe), progress=False)
    (tmp_path / "run" / "last.ckpt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"last.ckpt can't be read"):
        train(load_config(recipe), progress=False)


def test_a_run_starts_from_a_checkpoint_and_trains_the_parts_it_is_told_to(recipe, tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "small")
    before = lookahead_codec.state_dict()
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav", num_samples=8000)
    for parts in ("mel_head", "decoder"):
        settings = {"run.init_from": str(tmp_path / "small"), "optim.parts": parts, "optim.max_steps": "4"}
        settings |= {"run.output": str(tmp_path / parts), "optim.average_decay": "0.5"}
        codec = load_codec(train(load_config(recipe, settings), progress=False))
        changed = differences(before, codec.state_dict()) - {"quantizer.counts", "quantizer.sums"}
        assert changed and all(name.startswith("decoder.") for name in changed)
        assert torch.equal(codec.encode(wave).codes, lookahead_codec.encode(wave).codes)
        if parts == "mel_head":
            assert all(name.startswith("decoder.mel") for name in changed)
            codes = codec.encode(wave)
            assert torch.equal(codec.decode(codes), lookahead_codec.decode(codes))
    line = read_logs(tmp_path / "decoder")[0]
    assert line["train/perplexity_first"] > 1  # quantizes from the first step


@pytest.mark.parametrize("parts", ["all", "decoder", "mel_head"])
def test_each_parameter_has_one_optimiser_and_matrices_have_muon(recipe, tmp_path, lookahead_codec, parts):
    lookahead_codec.save(tmp_path / "small")
    settings = {**ADVERSARIAL, "optim.parts": parts, "run.init_from": str(tmp_path / "small")}
    if parts == "mel_head":
        settings["adversarial.kinds"] = "[]"
    module = CodecTraining(load_config(recipe, settings))
    optimizers, schedules = module.configure_optimizers()
    owned = [{id(p) for group in o.param_groups for p in group["params"]} for o in optimizers]
    trained = [id(p) for p in module.model.parameters() if p.requires_grad]
    judges = [] if module.discriminators is None else [id(p) for p in module.discriminators.parameters()]
    assert sorted(i for ids in owned for i in ids) == sorted(trained + judges)
    names = {id(p): name for name, p in module.model.named_parameters()}
    by_muon = {
        names[i] for o, ids in zip(optimizers, owned, strict=True) if isinstance(o, torch.optim.Muon) for i in ids
    }
    if parts == "mel_head":
        assert not by_muon and len(schedules) == 1
    else:
        assert {"decoder.embed.weight", "decoder.coarse.blocks.0.expand.weight"} <= by_muon
        assert ("encoder.stack.weight" in by_muon) == (parts == "all")
        assert not any("mel" in name or "conv" in name for name in by_muon)
        assert len(schedules) == 2


def test_both_learning_rates_rise_and_fall(recipe, tmp_path):
    train(load_config(recipe, {"optim.decay_share": "0.5", "optim.matrix_learning_rate": "4e-3"}), progress=False)
    state = torch.load(tmp_path / "run" / "last.ckpt", weights_only=False)
    adam, muon = (optimizer["param_groups"][0] for optimizer in state["optimizer_states"])
    assert (adam["initial_lr"], muon["initial_lr"]) == (1e-3, 4e-3)
    assert adam["lr"] / 1e-3 == pytest.approx(muon["lr"] / 4e-3) == pytest.approx(0.02)
    assert state["global_step"] == 12


FREED_MEMORY = """
import resource, sys
from codec.train import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
import torch
def faults(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        torch.ones(16_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(3)
print(faults(10))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux's C library")
def test_freed_memory_is_kept():
    def faults(how):
        command = [sys.executable, "-c", FREED_MEMORY, how]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)

    assert faults("kept") < 100  # 64 MB are 15,600 pages
    assert faults("given back") > 10_000


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_compiled_losses_are_the_losses(recipe):
    torch.manual_seed(0)
    waves = torch.randn(2, 1, 4000) * 0.1, torch.randn(2, 1, 4000) * 0.1
    plain, compiled = (CodecTraining(load_config(recipe, {"run.compile": flag})) for flag in ("false", "true"))
    assert compiled.spectral._compiled_call_impl is not None and plain.spectral._compiled_call_impl is None
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    torch.testing.assert_close(compiled.spectral(*waves), plain.spectral(*waves), rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU no C++ compiler is needed")
def test_a_missing_compiler_is_told_at_once(recipe, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"run\.compile needs a C\+\+ compiler \(no-such-compiler\); install one"):
        CodecTraining(load_config(recipe, {"run.compile": "true"}))


def test_the_average_gets_all_that_k_means_sets(recipe, monkeypatch):
    """With normalised codes also the projections back, which are scaled to the latents' lengths."""
    start, seen = CodecTraining._start_quantizing, []

    def started(self):
        before = self.average.quantizer.up.clone()
        start(self)
        ours, theirs = self.model.quantizer, self.average.quantizer
        assert not torch.equal(ours.up, before)
        latents = torch.randn(1, 50, ours.up.shape[2])
        codes = theirs.encode(latents)
        assert torch.equal(codes, ours.encode(latents))
        torch.testing.assert_close(theirs.decode(codes), ours.decode(codes))
        seen.append(differences(ours.state_dict(), theirs.state_dict()))

    monkeypatch.setattr(CodecTraining, "_start_quantizing", started)
    settings = {"model.codebook_dim": "4", "model.normalise_codes": "true", "run.valid_every": "5"}
    train(load_config(recipe, {**settings, "optim.max_steps": "5"}), progress=False)
    assert seen == [set()]


def test_the_best_weights_are_exported_beside_the_latest(recipe, tmp_path, monkeypatch):
    """Validation falls, then rises: checkpoint/ is of the fall's end, checkpoint_last/ of the run's."""
    scores, saved = iter([0.5, 0.4, 0.3, 0.6, 0.7]), []
    log_dict = CodecTraining.log_dict

    def scored(self, values, **options):
        if "valid/full_mel" in values:
            values = {**values, "valid/full_mel": torch.tensor(next(scores))}
            saved.append(self.average.quantizer.codebooks.clone())
        return log_dict(self, values, **options)

    monkeypatch.setattr(CodecTraining, "log_dict", scored)
    train(load_config(recipe, {"optim.max_steps": "10", "run.valid_every": "2"}), progress=False)
    best, last = (load_codec(tmp_path / "run" / name) for name in ("checkpoint", "checkpoint_last"))
    assert torch.equal(best.quantizer.codebooks, saved[2])
    assert torch.equal(last.quantizer.codebooks, saved[4])


def test_logs_have_sound_pictures_and_curves(recipe, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(load_config(recipe, {"optim.max_steps": "6", "run.valid_every": "3"}), progress=False)
    train(load_config(recipe, {"optim.max_steps": "8", "run.valid_every": "3"}), progress=False)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"audio": 0, "images": 0})
    tags = board.Reload().Tags()
    name = "speech_it_male_first-in-queue_16k.wav"
    assert {f"{name} original", f"{name} decoded"} <= {tag.removesuffix("/audio") for tag in tags["audio"]}
    assert any("mel head" in tag for tag in tags["images"]) and any("usage" in tag for tag in tags["images"])
    assert {"codebooks/perplexity_0", "codebooks/used_share_3", "valid/full_mel"} <= set(tags["scalars"])
    assert (tmp_path / "run" / "curves.png").stat().st_size > 5000
    lines = read_logs(tmp_path / "run")
    assert [line["step"] for line in lines if "valid/full_mel" in line] == [3, 6, 8]
    assert [line["step"] for line in lines if "train/mel" in line] == [2, 4, 6, 8]


def test_without_tensorboard_and_matplotlib_there_is_the_csv(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("codec.train.logs.has", lambda module: False)
    train(load_config(recipe, {"optim.max_steps": "5"}), progress=False)
    assert not (tmp_path / "run" / "tensorboard").exists() and not (tmp_path / "run" / "curves.png").exists()
    assert read_logs(tmp_path / "run")
