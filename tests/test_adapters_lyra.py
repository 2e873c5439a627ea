import contextlib
import functools
import json
import shutil
import tempfile
from pathlib import Path

import lookalikes
import numpy as np
import pytest
import torch
from conftest import DATA
from typer.testing import CliRunner

from codec import load_codec, read_audio
from codec.adapters import tflite
from codec.cli import app
from codec.errors import CheckpointError

needs_lyra = pytest.mark.skipif(not lookalikes.LYRA.is_dir(), reason=lookalikes.NO_LYRA)
SPEECH = DATA / "speech_it_male_first-in-queue_16k.wav"


@functools.cache
def lyra():
    return load_codec(lookalikes.save("lyra", Path(tempfile.mkdtemp()) / "lyra"))


def speech():
    wave, _ = read_audio(SPEECH, sample_rate=16000)
    return wave.mean(0, keepdim=True)


@needs_lyra
def test_the_verb_makes_a_checkpoint(tmp_path):
    arguments = ["convert", "lyra", str(lookalikes.LYRA), "-o", str(tmp_path / "l")]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    codec = json.loads(result.stdout)["codec"]
    assert (codec["sample_rate"], codec["hop_length"], codec["n_quantizers"], codec["codebook_size"]) == (
        16000,
        320,
        46,
        16,
    )
    assert load_codec(tmp_path / "l").spec.to_dict() == codec
    assert "give another folder" in str(CliRunner().invoke(app, arguments).exception)
    assert CliRunner().invoke(app, [*arguments, "--force"]).exit_code == 0


@needs_lyra
def test_speech_sounds_like_itself():
    """Known weights, known quality: loud errors in any layer would show."""
    pystoi = pytest.importorskip("pystoi", reason="STOI needs the extra codec[eval]")
    wave = speech()
    scores = []
    for count in (16, 30, 46):
        decoded = lyra().decode(lyra().encode(wave, n_quantizers=count))[0]
        scores.append(pystoi.stoi(wave[0].numpy(), decoded[0].numpy(), 16000))
    assert scores[0] > 0.91
    assert scores[1] > 0.94
    assert scores[2] > 0.95


@needs_lyra
def test_rounding_is_where_the_graph_has_it():
    codec = lyra()
    settings = json.loads((Path(lookalikes.save("lyra", Path(tempfile.mkdtemp()))) / "config.json").read_text())[
        "model"
    ]
    assert settings["slope"] == pytest.approx(0.3)
    assert [entry is None for entry in settings["rounding"]] == [True] * 43 + [False] * 20
    latents = codec.latents(speech()[None])
    scale, zero = settings["rounding"][-1]
    steps = latents / scale
    torch.testing.assert_close(steps, steps.round(), atol=1e-3, rtol=0)
    assert steps.min() >= -128 - zero
    assert steps.max() <= 127 - zero


@needs_lyra
def test_codes_are_the_nearest_entries_one_level_after_the_other():
    codec = lyra()
    latents = codec.latents(speech()[None])
    codes = codec.quantize(latents, 46)[0]
    residual = latents[0].T.double()
    for level, codebook in enumerate(codec.codebooks.double()):
        nearest = (residual[:, None] - codebook).square().sum(-1).argmin(1)
        assert torch.equal(codes[level], nearest)
        residual = residual - codebook[nearest]


@needs_lyra
def test_against_the_tflite_runtime():
    interpreter = pytest.importorskip("ai_edge_litert.interpreter", reason="a check against TFLite where installed")
    codec = lyra()
    wave = speech()[:, : 320 * 100]

    def run(file, inputs):
        model = interpreter.Interpreter(model_path=str(lookalikes.LYRA / file), num_threads=1)
        model.allocate_tensors()
        place, result = model.get_input_details()[0]["index"], model.get_output_details()[0]["index"]
        outputs = []
        for x in inputs:
            model.set_tensor(place, x)
            model.invoke()
            outputs.append(model.get_tensor(result).reshape(-1).copy())
        return np.stack(outputs)

    theirs = run("soundstream_encoder.tflite", wave.numpy().reshape(-1, 1, 320))
    ours = codec.latents(wave[None])[0].T.numpy()
    assert np.corrcoef(theirs.ravel(), ours.ravel())[0, 1] > 0.995
    codes = codec.quantize(torch.from_numpy(theirs.T)[None].float(), 46)
    agreement = (codec.encode(wave).codes == codes).float().mean(2)[0]
    assert agreement[0] > 0.95
    assert agreement[:16].mean() > 0.75  # TFLite's own two sets of kernels agree no better
    summed = sum(codec.codebooks[level][codes[0, level]] for level in range(46))
    decoded = run("lyragan.tflite", summed.numpy()[:, None, None, :]).reshape(-1)
    assert np.corrcoef(decoded, codec.decode(codes)[0, 0].numpy())[0, 1] > 0.995


@needs_lyra
def test_files_that_are_missing_damaged_or_swapped(tmp_path):
    from codec.adapters.lyra import FILES, import_lyra

    with pytest.raises(CheckpointError, match="can't be read"):
        import_lyra(tmp_path, tmp_path / "out")
    for name in FILES:
        shutil.copy(lookalikes.LYRA / name, tmp_path / name)
    good = (tmp_path / FILES[0]).read_bytes()
    rng = np.random.default_rng(0)
    for size in (0, 7, 100, len(good) // 2):
        (tmp_path / FILES[0]).write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            import_lyra(tmp_path, tmp_path / "out")
    head = bytearray(good)
    for _ in range(30):
        broken = bytearray(head)
        broken[int(rng.integers(4))] = int(rng.integers(256))  # where the root table lies
        (tmp_path / FILES[0]).write_bytes(broken)
        try:
            import_lyra(tmp_path, tmp_path / "out")
        except CheckpointError:
            continue
        assert bytes(broken[:4]) == good[:4]
    shutil.copy(lookalikes.LYRA / FILES[1], tmp_path / FILES[0])
    shutil.copy(lookalikes.LYRA / FILES[0], tmp_path / FILES[1])
    with pytest.raises(CheckpointError, match="not the network of Lyra V2"):
        import_lyra(tmp_path, tmp_path / "out")


@needs_lyra
def test_a_damaged_checkpoint_is_named(tmp_path):
    folder = lookalikes.save("lyra", tmp_path / "l")
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "format_version": 9}))
    with pytest.raises(CheckpointError, match="format version 9"):
        load_codec(folder)
    document["model"]["slope"] = 0.2
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="the weights hash to"):
        load_codec(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="not Lyra's weights"):
        load_codec(folder)


def test_random_bytes_are_no_tflite_file(tmp_path):
    rng = np.random.default_rng(1)
    path = tmp_path / "x.tflite"
    path.write_bytes(b"RIFF" + bytes(100))
    with pytest.raises(CheckpointError, match="no TFLite file: its identifier is"):
        tflite.read_tflite(path)
    for size in (8, 9, 40, 400, 4000):
        for _ in range(40):
            data = bytearray(rng.integers(0, 64, size, dtype=np.uint8).tobytes())
            data[:8] = b"\x10\0\0\0TFL3"
            path.write_bytes(data)
            with contextlib.suppress(CheckpointError):  # and nothing else
                assert isinstance(tflite.read_tflite(path), list)
