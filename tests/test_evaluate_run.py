import csv
import json
import shutil
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from conftest import DATA
from evaluate_crashes import Crashing
from typer.testing import CliRunner

from codec import TokenStore, TokenWriter, load_codec, read_audio, write_audio
from codec.cli import app
from codec.errors import InputError
from codec.evaluate import Evaluation, QualityCallback, compare_store, evaluate
from codec.evaluate.callback import averaged_codec
from codec.evaluate.coders import CodecCoder, Coded, StoreCoder
from codec.evaluate.run import _make_labels_unique, spread
from codec.evaluate.tasks import Delay, Settings, Source, Workers, pack_codes, run_task, unpack_codes
from codec.evaluate.training import classes_of, pooled_features, training_notices

FAST = ("si_sdr", "mel_distance", "loudness_lu")
needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="needs ffmpeg: apt-get install ffmpeg")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Two speakers' folders, a silent clip, a very short one, one that isn't audio, one in stereo."""
    folder = tmp_path_factory.mktemp("corpus")
    for name, file in (
        ("it", "speech_it_male_first-in-queue_16k.wav"),
        ("ru", "speech_ru_female_first-in-queue_16k.flac"),
    ):
        (folder / name).mkdir()
        wave, rate = read_audio(DATA / file, sample_rate=16000)
        write_audio(folder / name / "a.wav", wave[:, :24000], rate)
    write_audio(folder / "silent.wav", torch.zeros(1, 16000), 16000)
    write_audio(folder / "short.wav", wave[:, 8000:8100], 16000)
    write_audio(folder / "stereo.wav", torch.cat([wave, wave * 0.5])[:, :16000], 16000)
    (folder / "broken.wav").write_bytes(b"RIFF is not enough")
    return folder


@pytest.fixture(scope="module")
def evaluation(lookahead_codec, corpus, tmp_path_factory) -> Evaluation:
    return evaluate([lookahead_codec], [corpus], tmp_path_factory.mktemp("report"), metrics=FAST)


def test_one_row_for_each_clip_and_condition(evaluation):
    assert [c["label"] for c in evaluation.conditions] == ["original", "small@1", "small@2", "small@4"]
    keys = ["it/a.wav", "ru/a.wav", "short.wav", "silent.wav", "stereo.wav"]
    assert [(r["condition"], r["key"]) for r in evaluation.rows] == [
        (c["label"], key) for c in evaluation.conditions for key in keys
    ]
    for row in evaluation.rows:
        if row["condition"] == "original":
            assert [row[name] for name in FAST] == [None] * 3
            continue
        # Each metric has a value or a reason, never both.
        assert [row[n] is None for n in FAST] == [f"{n}: " in row["undefined"] for n in FAST]
    silent = [row for row in evaluation.rows if row["key"] == "silent.wav"]
    assert all(row["mel_distance"] is None for row in silent)
    assert "the original is silent" in silent[1]["undefined"]
    stereo = next(row for row in evaluation.rows if row["key"] == "stereo.wav" and row["condition"] == "small@4")
    assert stereo["channels"] == 1  # the codec is mono: so is the comparison


def test_a_broken_file_is_reported_and_not_fatal(evaluation):
    assert {f["key"] for f in evaluation.failures} == {"broken.wav"}
    assert {f["codec"] for f in evaluation.failures} == {"original", "small"}
    assert "broken.wav" in evaluation.failures[0]["error"]


def test_bitrates_are_of_what_is_stored(evaluation, lookahead_codec):
    for record in evaluation.summary():
        k = record["n_quantizers"]
        if k is None:
            continue
        nominal = k * 5 * 50
        assert nominal < record["bitrate_bps"] < 1.3 * nominal + 40  # checksums, and frames that are part full
        assert record["file_bitrate_bps"] > record["bitrate_bps"]
        assert record["encode_speed"] > 0 and record["decode_speed"] > 0


def test_values_are_those_of_the_codec_itself(evaluation, lookahead_codec, corpus):
    from codec.evaluate.metrics import mel_distance

    wave, _ = read_audio(corpus / "it" / "a.wav")
    copy = lookahead_codec.decode(lookahead_codec.encode(wave, n_quantizers=2))[0]
    row = next(r for r in evaluation.rows if r["key"] == "it/a.wav" and r["condition"] == "small@2")
    shift = next(c for c in evaluation.conditions if c["label"] == "small@2")["delay_samples"]
    if shift == 0:
        assert row["mel_distance"] == pytest.approx(mel_distance(wave, copy, 16000), abs=1e-4)


def test_codebooks_are_counted(evaluation, lookahead_codec, corpus):
    codes = []
    for key in ("it/a.wav", "ru/a.wav", "short.wav", "silent.wav", "stereo.wav"):
        wave = read_audio(corpus / key, mono=True)[0]
        codes.append(lookahead_codec.encode(wave).codes[0])
    codes = torch.cat(codes, 1)
    for level, record in enumerate(evaluation.usage):
        share = torch.bincount(codes[level]).double() / codes.shape[1]
        assert record["num_codes"] == codes.shape[1]
        assert record["entries_used"] == int((share > 0).sum())
        assert record["entropy_bits"] == pytest.approx(float(torch.special.entr(share).sum() / np.log(2)), abs=0.05)


def test_files_hold_the_same(evaluation):
    again = Evaluation.read(evaluation.folder)
    assert again.to_dict() == json.loads(json.dumps(evaluation.to_dict()))
    with (evaluation.folder / "rows.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == [row["key"] for row in evaluation.rows]
    assert rows[-1]["mel_distance"] == str(evaluation.rows[-1]["mel_distance"])
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pip install pyarrow")
    assert parquet.read_table(evaluation.folder / "rows.parquet").to_pylist() == evaluation.rows


def test_an_interrupted_run_goes_on(lookahead_codec, corpus, tmp_path, evaluation, monkeypatch):
    class Stop(Exception):
        pass

    def stop(done, total, seconds):
        if done == 7:
            raise Stop

    with pytest.raises(Stop):
        evaluate([lookahead_codec], [corpus], tmp_path, metrics=FAST, on_progress=stop)
    log = tmp_path / "progress.jsonl"
    log.write_text(log.read_text()[:-20])  # killed while it wrote a line
    seen = []
    again = evaluate([lookahead_codec], [corpus], tmp_path, metrics=FAST, on_progress=lambda *p: seen.append(p))
    assert seen[0][:2] == (6, 12)
    strip = lambda rows: [{k: v for k, v in r.items() if not k.endswith("_speed")} for r in rows]  # noqa: E731
    assert strip(again.rows) == strip(evaluation.rows)
    assert again.usage == evaluation.usage
    with pytest.raises(InputError, match="begun with other codecs, settings"):
        evaluate([lookahead_codec], [corpus], tmp_path, metrics=FAST, level="matched")
    matched = evaluate([lookahead_codec], [corpus], tmp_path, metrics=FAST, level="matched", force=True)
    row = next(r for r in matched.rows if r["key"] == "it/a.wav" and r["condition"] == "small@4")
    assert row["level_db"] is not None
    assert abs(row["loudness_lu"]) < abs(
        next(r for r in evaluation.rows if r["key"] == "it/a.wav" and r["condition"] == "small@4")["loudness_lu"]
    )


def test_a_changed_file_is_measured_again(lookahead_codec, tmp_path):
    wave = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav")[0]
    path = tmp_path / "a.wav"
    write_audio(path, wave[:, :16000], 16000)
    first = evaluate([lookahead_codec], [path], tmp_path / "report", metrics=FAST)
    write_audio(path, wave[:, 8000:20000], 16000, force=True)
    second = evaluate([lookahead_codec], [path], tmp_path / "report", metrics=FAST)
    assert (first.rows[0]["seconds"], second.rows[0]["seconds"]) == (1.0, 0.75)


def test_bad_arguments(lookahead_codec, corpus, tmp_path):
    with pytest.raises(InputError, match="nothing to evaluate"):
        evaluate([], [corpus], tmp_path)
    with pytest.raises(InputError, match="workers is 2, but a loaded codec"):
        evaluate([lookahead_codec], [corpus], tmp_path, workers=2)
    with pytest.raises(InputError, match="max_seconds 0"):
        evaluate([lookahead_codec], [corpus], tmp_path, max_seconds=0)
    with pytest.raises(InputError, match="speech_16k@8 is given twice"):
        evaluate(["speech_16k@8", "speech_16k@8"], [corpus], tmp_path)
    with pytest.raises(InputError, match="none of 1 clips could be measured"):
        evaluate([lookahead_codec], [corpus / "broken.wav"], tmp_path)
    with pytest.raises(InputError, match=r"holds no report\.json"):
        Evaluation.read(corpus)
    (tmp_path / "report.json").write_text('{"format_version": 99}')
    with pytest.raises(InputError, match="version 99"):
        Evaluation.read(tmp_path)


def test_checkpoints_of_one_name_are_told_apart(lookahead_codec, causal_codec):
    coders = [CodecCoder(lookahead_codec, (4,)), CodecCoder(causal_codec, (4,)), CodecCoder(lookahead_codec, (2,))]
    _make_labels_unique(coders)
    first, second, third = (coder.label for coder in coders)
    assert first == third == f"small ({lookahead_codec.spec.weights_hash[:6]})"
    assert second == f"small ({causal_codec.spec.weights_hash[:6]})"
    same = [CodecCoder(lookahead_codec, (4,)), CodecCoder(lookahead_codec, (2,))]
    _make_labels_unique(same)
    assert [coder.conditions[0].label for coder in same] == ["small@4", "small@2"]


def test_clips_are_spread():
    assert spread(range(100), 3) == [0, 50, 99]
    assert spread(range(100), 1) == [0]
    assert spread(range(2), 9) == [0, 1]
    with pytest.raises(InputError):
        spread([1], 0)


def test_codes_survive_packing():
    codes = np.random.default_rng(0).integers(0, 1024, (8, 33))
    assert np.array_equal(unpack_codes(pack_codes(codes)), codes)


# --- crashes


def test_a_process_that_dies_takes_only_its_clip_with_it(corpus):
    path = str(corpus / "it" / "a.wav")
    sources = [Source(key, path) for key in ("kills", "a", "b")]
    settings = Settings(16000, ("mel_distance",), 1.0, "kept")
    with Workers([Crashing()], settings, 1) as pool:
        found = {s.key: m for _, s, m in pool.measure([(0, s) for s in sources], {0: Delay(0, "none", 0)})}
    assert {key for key, m in found.items() if m.failure is None} == {"a", "b"}
    assert "died" in found["kills"].failure
    failed = run_task(Crashing(), Source("raises", path), settings, Delay(0, "none", 0))
    assert failed.failure == "ZeroDivisionError: not this one"


def test_what_isn_t_finite_is_a_failure(corpus):
    class Broken(Crashing):
        def code(self, wave, sample_rate, key):
            yield Coded(self.conditions[0], wave * float("nan"))

    settings = Settings(16000, ("mel_distance",), 1.0, "kept")
    found = run_task(Broken(), Source("a", str(corpus / "it" / "a.wav")), settings, Delay(0, "none", 0))
    assert "decodes to NaN" in found.failure


# --- does training notice


def test_training_notices_what_copies_lose():
    generator = np.random.default_rng(0)
    keys = [f"{name}/{n}" for name in "ab" for n in range(10)]
    classes = classes_of(keys)
    assert classes["a/0"] == "a"
    good = {key: (generator.normal(size=(3, 8)) + 4 * (classes[key] == "a")).astype(np.float32) for key in keys}
    lost = {key: generator.normal(size=(3, 8)).astype(np.float32) for key in keys}
    first, second = training_notices({"original": good, "same": good, "lost": lost}, classes, "original")
    assert (first.condition, first.of_originals, first.on_copies, first.on_originals) == ("same", 1, 1, 1)
    assert second.of_originals == 1
    assert second.on_copies < 0.75
    assert (second.chance, second.num_excerpts) == (0.5, 60)


def test_classes_are_folders_of_enough_clips():
    assert classes_of(["a.wav", "b.wav"]) == {}
    assert classes_of([f"a/{n}" for n in range(9)]) == {}
    assert classes_of([*(f"a/{n}" for n in range(4)), *(f"b/{n}" for n in range(3))]) == {}
    assert len(classes_of([*(f"a/{n}" for n in range(4)), *(f"b/{n}" for n in range(5)), "c/1"])) == 9


@pytest.mark.parametrize("length", [1, 100, 15999, 16000, 40000])
def test_features_of_any_length(length):
    features = pooled_features(torch.randn(2, length) * 0.1, 16000)
    assert features.shape == (max(1, length // 16000), 80)
    assert np.isfinite(features).all()


# --- stores


@pytest.fixture(scope="module")
def store(lookahead_codec, corpus, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    lookahead_codec.save(folder / "checkpoint")
    codec = load_codec(folder / "checkpoint")
    with TokenWriter(folder / "x.ctok", codec.spec, n_quantizers=2) as writer:
        for key in ("it/a.wav", "ru/a.wav"):
            wave = read_audio(corpus / key)[0]
            gain = 0.5 if key.startswith("ru") else None
            codes = codec.encode(wave * (gain or 1), n_quantizers=2)
            writer.add(key, codes.codes[0].numpy(), num_samples=wave.shape[1], gain=gain)
        writer.add("gone.wav", codes.codes[0].numpy(), num_samples=wave.shape[1])
        writer.add("stereo.wav", codes.codes[0].numpy(), num_samples=wave.shape[1])  # 1.5 s; the file has 1
    return folder


def test_a_store_is_compared_with_its_originals(store, corpus, tmp_path):
    found = compare_store(
        store / "x.ctok", [corpus], tmp_path, codec=str(store / "checkpoint"), metrics=FAST, workers=0
    )
    assert [c["label"] for c in found.conditions] == ["original", "small@1", "small@2"]
    assert found.settings["store_items_without_file"] == 1
    assert [f["key"] for f in found.failures] == ["stereo.wav"]
    assert "the store holds 1.50 s, the original has 1.00 s" in found.failures[0]["error"]
    # One item was encoded at half its level: that is undone.
    tokens = TokenStore(store / "x.ctok")
    codec = load_codec(store / "checkpoint")
    coder = StoreCoder(str(store / "x.ctok"), CodecCoder(codec, (2,)))
    wave = read_audio(corpus / "ru" / "a.wav")[0]
    (copy,) = coder.code(wave, 16000, "ru/a.wav")
    expected = codec.decode(torch.from_numpy(tokens.read("ru/a.wav")))[0] / 0.5
    assert torch.allclose(copy.wave, expected[:, : wave.shape[1]], atol=1e-5)
    assert copy.stored_bytes < tokens.num_bytes


def test_a_store_of_other_files_is_an_error(store, corpus, tmp_path):
    checkpoint = str(store / "checkpoint")
    with pytest.raises(InputError, match=r"none of the 4 keys .* give the folder that was encoded"):
        compare_store(store / "x.ctok", [corpus / "it"], tmp_path, codec=checkpoint)
    with pytest.raises(InputError, match=r"4 codebooks are asked for; .* holds 2"):
        compare_store(store / "x.ctok", [corpus], tmp_path, codec=f"{checkpoint}@4")
    with pytest.raises(InputError, match=r"longer than 0.5 s; raise max_seconds"):
        compare_store(store / "x.ctok", [corpus], tmp_path, codec=checkpoint, max_seconds=0.5)


# --- while training


class Training(L.LightningModule):
    def __init__(self, codec):
        super().__init__()
        self.average = codec
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, _):
        return self.weight.sum()

    def validation_step(self, batch, _):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.1)


def test_the_callback_logs_means(lookahead_codec, corpus, tmp_path):
    callback = QualityCallback([corpus / "it", corpus / "ru"], metrics=FAST, n_quantizers=[1, 4], max_seconds=1)
    loader = torch.utils.data.DataLoader(torch.zeros(1, 1))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
        default_root_dir=tmp_path,
    )
    trainer.fit(Training(lookahead_codec), loader, loader)
    logged = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("quality/")}
    assert set(logged) == {f"quality/{name}@{k}" for name in FAST for k in (1, 4)}
    expected = callback.measure(lookahead_codec)
    assert logged["quality/mel_distance@4"] == pytest.approx(expected["mel_distance@4"], rel=1e-5)


def test_the_callback_needs_a_codec():
    with pytest.raises(InputError, match="pass codec_of"):
        averaged_codec(L.LightningModule())
    with pytest.raises(InputError, match="every is 0"):
        QualityCallback([DATA], every=0)


# --- the command line


@needs_ffmpeg
def test_the_command_line(corpus, store, tmp_path):
    run = CliRunner()
    folder = tmp_path / "report"
    arguments = ["evaluate", str(corpus), "-o", str(folder), "--codec", f"{store / 'checkpoint'}@1,4"]
    arguments += ["--against", "opus:12", "--metrics", "si_sdr,mel_distance", "--workers", "0"]
    found = run.invoke(app, [*arguments, "--no-page"], catch_exceptions=False)
    assert found.exit_code == 3  # broken.wav
    assert "small@4" in found.output and "opus 12 kbps" in found.output and "broken.wav" in found.output
    assert not (folder / "report.html").exists()
    found = run.invoke(app, ["report", str(folder)], catch_exceptions=False)
    assert found.exit_code == 0
    assert "<audio" in (folder / "report.html").read_text()
    found = run.invoke(app, [*arguments, "--no-page", "--json"], catch_exceptions=False)
    summary = json.loads(found.stdout)["summary"]
    assert [s["condition"] for s in summary] == ["original", "small@1", "small@4", "opus 12 kbps"]
    compared = ["compare", str(store / "x.ctok"), str(corpus), "-o", str(tmp_path / "compared"), "--workers", "0"]
    compared += ["--codec", str(store / "checkpoint"), "--metrics", "si_sdr", "--json"]
    found = run.invoke(app, compared, catch_exceptions=False)
    assert [s["condition"] for s in json.loads(found.stdout)["summary"]] == ["original", "small@1", "small@2"]
    assert "x.ctok: 4 items" in (tmp_path / "compared" / "report.html").read_text()


def test_texts_need_tabs(corpus, tmp_path):
    path = tmp_path / "texts.tsv"
    path.write_text("a.wav one two\n")
    arguments = ["evaluate", str(corpus), "-o", str(tmp_path), "--codec", "speech_16k", "--texts", str(path)]
    with pytest.raises(InputError, match=r"line 1: has no tab"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)
