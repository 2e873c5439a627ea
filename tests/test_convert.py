import functools
import io
import json
import pickle
import struct
import tempfile
from pathlib import Path

import lookalikes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from codec import TokenStore, load_codec
from codec.adapters.containers import read_codes, read_dac, read_ecdc
from codec.cli import app
from codec.convert import import_codes
from codec.errors import InputError, TokenFileError

pytest.importorskip("transformers", reason="pretrained codecs of others need the extra codec[hub]")


@functools.cache
def checkpoint(family):
    return lookalikes.save(family, Path(tempfile.mkdtemp()) / family)


@functools.cache
def loaded(family):
    return load_codec(checkpoint(family))


@functools.cache
def encodec_24khz():
    """The published model's geometry (10-bit codes), small."""
    folder = Path(tempfile.mkdtemp()) / "encodec_24khz"
    lookalikes.encodec_24(codebook_size=1024, target_bandwidths=[1.5, 6.0]).save_pretrained(folder)
    return load_codec(folder)


@functools.cache
def encodec_48khz():
    network = {"norm_type": "time_group_norm", "use_causal_conv": False, "normalize": True, "audio_channels": 2}
    chunks = {"chunk_length_s": 1.0, "overlap": 0.01, "sampling_rate": 48000, "target_bandwidths": [3.0, 6.0]}
    folder = Path(tempfile.mkdtemp()) / "encodec_48khz"
    lookalikes.encodec_24(**network, **chunks, codebook_size=1024).save_pretrained(folder)
    return load_codec(folder)


# Writers of the foreign formats, from their descriptions.


def ecdc(path, model, num_samples, chunks, scales=(), has_lm=False):
    head = json.dumps({"m": model, "al": num_samples, "nc": len(chunks[0]), "lm": has_lm}).encode()
    data = struct.pack("!4sBI", b"ECDC", 0, len(head)) + head
    for n, codes in enumerate(chunks):
        if len(scales):
            data += struct.pack("!f", scales[n])
        value, bits = 0, 0
        for code in np.asarray(codes).astype(int).T.ravel().tolist():
            value |= code << bits
            bits += 10
        data += value.to_bytes(-(-bits // 8), "little")
    path.write_bytes(data)
    return path


def dac(path, codes, num_samples, **changes):
    meta = {
        "input_db": np.array([-21.5], np.float32),
        "original_length": num_samples,
        "sample_rate": 16000,
        "chunk_length": codes.shape[-1],
        "channels": len(codes),
        "padding": True,
        "dac_version": "1.0.0",
        **changes,
    }
    with path.open("wb") as file:
        np.save(file, {"codes": codes.astype(np.uint16), "metadata": meta})
    return path


def noise(codec, num_samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(codec.spec.channels, num_samples, generator=generator) * 0.2


def test_ecdc_of_the_24_khz_model(tmp_path):
    codec = encodec_24khz()
    encoded = codec.encode(noise(codec, 7001))
    ecdc(tmp_path / "a.ecdc", "encodec_24khz", 7001, [encoded.codes[0]])
    report = import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    assert (report.num_items, report.failures) == (1, [])
    store = TokenStore(tmp_path / "s.ctok")
    assert list(store.keys()) == ["a.ecdc"]
    assert np.array_equal(store.read("a.ecdc"), encoded.codes[0])
    assert store.info("a.ecdc").num_samples == 7001
    assert store.spec == codec.spec


def test_ecdc_of_the_48_khz_model(tmp_path):
    """Chunks and their levels become what the codec itself would have encoded."""
    codec = encodec_48khz()
    num_samples = 2 * 47520 + 5000
    encoded = codec.encode(noise(codec, num_samples))
    chunks, scales = [], []
    for n in range(3):
        steps, count, scale = codec.unpack(encoded.codes[..., n * 30 : (n + 1) * 30])
        chunks.append(steps[0, :, : int(count)])
        scales.append(float(scale))
    ecdc(tmp_path / "a.ecdc", "encodec_48khz", num_samples, chunks, scales)
    import_codes(codec, [tmp_path / "a.ecdc"], tmp_path / "s.ctok")
    assert np.array_equal(TokenStore(tmp_path / "s.ctok").read("a.ecdc"), encoded.codes[0])


def test_dac_with_channels(tmp_path):
    codec = loaded("dac_16")
    waves = torch.stack([noise(codec, 5000, seed=n) for n in range(2)])
    codes = codec.encode(waves).codes
    dac(tmp_path / "stereo.dac", codes.numpy(), 5000)
    dac(tmp_path / "rate.dac", codes[:1].numpy(), 13782, sample_rate=44100, input_db=None)
    report = import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    assert report.failures == []
    store = TokenStore(tmp_path / "s.ctok")
    assert sorted(store.keys()) == ["rate.dac", "stereo.dac#0", "stereo.dac#1"]
    assert np.array_equal(store.read("stereo.dac#1"), codes[1])
    assert store.info("stereo.dac#0").num_samples == 5000
    assert store.info("stereo.dac#0").meta == {"input_lufs": -21.5}
    assert store.info("rate.dac").num_samples == 5001  # 13782 at 44.1 kHz, in 16 kHz
    assert store.info("rate.dac").meta == {}


def test_dac_in_chunks_is_encoded_again(tmp_path):
    """Such chunks lie on no grid of frames; their wave is the interior of what padded chunks decode to."""
    codec = loaded("dac_16")
    codes = torch.randint(64, (1, 5, 80), generator=torch.Generator().manual_seed(0))
    parts = [codec.decode_unpadded(chunk) for chunk in codes.split(40, 2)]
    padded = codec.decode(codes[..., :40])
    at = (padded.shape[-1] - 8 - parts[0].shape[-1]) // 2
    inside = padded[..., at : at + parts[0].shape[-1]]
    torch.testing.assert_close(parts[0][..., 3000:-3000], inside[..., 3000:-3000], atol=2e-6, rtol=1e-5)
    num_samples = 2 * parts[0].shape[-1] - 11
    dac(tmp_path / "long.dac", codes.numpy(), num_samples, chunk_length=40, padding=False)
    report = import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    assert (report.num_items, report.num_encoded_again) == (1, 1)
    store = TokenStore(tmp_path / "s.ctok")
    assert store.info("long.dac").num_samples == num_samples
    assert store.info("long.dac").meta["encoded_again"] is True
    expected = codec.encode(torch.cat(parts, -1)[..., :num_samples]).codes[0]
    assert np.array_equal(store.read("long.dac"), expected)


def test_arrays(tmp_path):
    codec = loaded("mimi")
    codes = codec.encode(noise(codec, 9 * 1920)).codes
    np.save(tmp_path / "plain.npy", codes[0].numpy().astype(np.uint16))
    torch.save(codes, tmp_path / "batch_of_one.pt")
    torch.save({"audio_codes": codes[None], "text": "hello"}, tmp_path / "named.pth")
    report = import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    assert report.failures == []
    store = TokenStore(tmp_path / "s.ctok")
    for key in ("plain.npy", "batch_of_one.pt", "named.pth"):
        assert np.array_equal(store.read(key), codes[0])
        assert store.info(key).num_samples == 9 * 1920


def test_snacs_lists(tmp_path):
    codec = loaded("snac_24")
    codes = codec.encode(noise(codec, 9 * codec.spec.hop_length)).codes
    levels = codec.split(codes)
    assert [level.shape[1] for level in levels] == [9, 18, 36]
    torch.save(levels, tmp_path / "a.pt")
    torch.save([levels[0], levels[1][:, :-1], levels[2]], tmp_path / "b.pt")
    report = import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    assert np.array_equal(TokenStore(tmp_path / "s.ctok").read("a.pt"), codes[0])
    assert "codebooks of [9, 17, 36] codes; 9 frames of snac_24 have [9, 18, 36]" in report.failures[0]["error"]


def test_one_bad_file_stops_nothing_and_is_named(tmp_path):
    codec = loaded("mimi")
    codes = codec.encode(noise(codec, 20 * 1920)).codes[0].numpy()
    (tmp_path / "in").mkdir()
    np.save(tmp_path / "in" / "a.npy", codes)
    np.save(tmp_path / "in" / "b_transposed.npy", codes.T)
    np.save(tmp_path / "in" / "c_large.npy", codes + 60)
    np.save(tmp_path / "in" / "d_float.npy", codes * 0.5)
    np.save(tmp_path / "in" / "e_few.npy", codes[:3])
    np.save(tmp_path / "in" / "f_batch.npy", np.stack([codes, codes]))
    (tmp_path / "in" / "g.npy").write_bytes(b"nothing")
    torch.save({"weights": torch.zeros(3)}, tmp_path / "in" / "h.pt")
    store = tmp_path / "s.ctok"
    arguments = ["convert", "codes", str(tmp_path / "in"), "-o", str(store), "--codec", str(checkpoint("mimi"))]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json"])
    assert result.exit_code == 3, result.output
    report = json.loads(result.stdout)
    assert report["num_items"] == 1
    errors = {failure["key"]: failure["error"] for failure in report["failures"]}
    assert "20 codebooks (the other axis has 6: transpose it?); mimi has 6" in errors["b_transposed.npy"]
    assert "mimi has 0 to 63" in errors["c_large.npy"]
    assert "must be integers" in errors["d_float.npy"]
    assert "3 codebooks; this store takes 6" in errors["e_few.npy"]
    assert "codes of shape [2, 6, 20]; one item is [K, T]" in errors["f_batch.npy"]
    assert "can't be read as an array" in errors["g.npy"]
    assert "codes lie under 'codes'" in errors["h.pt"]
    listed = [json.loads(line)["key"] for line in (tmp_path / "s.ctok.errors.jsonl").read_text().splitlines()]
    assert listed == sorted(errors)
    again = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json"])
    assert json.loads(again.stdout)["num_skipped"] == 1


def test_the_wrong_codec(tmp_path):
    codes = np.zeros((1, 5, 4), np.int64)
    ecdc(tmp_path / "a.ecdc", "encodec_48khz", 1280, codes, [1.0])
    with pytest.raises(InputError, match=r"written by encodec_48khz, the codec given is encodec_24khz"):
        import_codes(encodec_24khz(), [tmp_path / "a.ecdc"], tmp_path / "s.ctok")
    dac(tmp_path / "a.dac", codes, 1280)
    with pytest.raises(InputError, match="written by DAC, the codec given is mimi"):
        import_codes(loaded("mimi"), [tmp_path / "a.dac"], tmp_path / "t.ctok")


def test_nothing_to_import(tmp_path):
    codec = loaded("mimi")
    with pytest.raises(InputError, match="no files of codes in"):
        import_codes(codec, [tmp_path], tmp_path / "s.ctok")
    with pytest.raises(InputError, match="no such file or folder"):
        import_codes(codec, [tmp_path / "none"], tmp_path / "s.ctok")
    (tmp_path / "a.wav").write_bytes(b"")
    with pytest.raises(InputError, match=r"files of codes end in \.ecdc, \.dac"):
        import_codes(codec, [tmp_path / "a.wav"], tmp_path / "s.ctok")
    with pytest.raises(InputError, match=r"name ends in \.ctok"):
        import_codes(codec, [tmp_path], tmp_path / "s.npz")


# Hostile and damaged files


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_damage_to_an_ecdc_file_is_an_error_or_other_codes(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("e") / "a.ecdc"
    good = ecdc(path, "encodec_48khz", 50000, [np.ones((2, 150)), np.ones((2, 8))], [0.5, 0.25]).read_bytes()
    kind = data.draw(st.sampled_from(["cut", "longer", "flip"]))
    if kind == "cut":
        broken = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "longer":
        broken = good + b"x"
    else:
        at = data.draw(st.integers(0, len(good) - 1))
        broken = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    path.write_bytes(broken)
    try:
        found = read_ecdc(path)
    except TokenFileError as error:
        said = str(error)
    else:
        said = str(path)
        assert kind == "flip"
        assert all(chunk.max() < 1024 for chunk in found.chunks)
    assert str(path) in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"has_lm": True}, "entropy-coded by EnCodec's language model"),
        ({"model": "soundstream"}, "model 'soundstream'"),
        ({"num_samples": 10**15}, "1000000000000000 samples"),
        ({"num_samples": 2**39}, "chunks in|cut off or damaged"),
        ({"num_samples": -5}, "-5 samples"),
    ],
)
def test_ecdc_headers_that_promise_too_much(tmp_path, changes, message):
    settings = {"model": "encodec_48khz", "num_samples": 640, "chunks": [np.ones((2, 2))], "scales": [1.0], **changes}
    with pytest.raises(TokenFileError, match=message):
        read_ecdc(ecdc(tmp_path / "a.ecdc", **settings))


class Trap:
    def __reduce__(self):
        return print, ("this must never be printed",)


class Exhaust:
    def __reduce__(self):
        return np.ndarray, ((1 << 40,), np.dtype("f8"))


class Evaluate:
    def __reduce__(self):
        return eval, ("print('this must never be printed')",)


@pytest.mark.parametrize("trap", [Trap, Evaluate, Exhaust])
@pytest.mark.parametrize("place", ["object", "codes", "metadata", "inside an array", "raw"])
def test_pickles_that_would_execute_or_allocate(tmp_path, capsys, trap, place):
    good = {"codes": np.ones((1, 5, 4), np.uint16), "metadata": {"chunk_length": 4}}
    document = {
        "object": trap(),
        "codes": {**good, "codes": trap()},
        "metadata": {**good, "metadata": {"input_db": trap()}},
        "inside an array": {**good, "codes": np.array([trap()], dtype=object)},
        "raw": trap(),
    }[place]
    path = tmp_path / "a.dac"
    stream = io.BytesIO()
    np.save(stream, document, allow_pickle=True)
    if place == "raw":
        stream = io.BytesIO(pickle.dumps(document))
    path.write_bytes(stream.getvalue())
    with pytest.raises(TokenFileError, match=r"no \.dac file that can be read safely"):
        read_dac(path)
    torch.save({"codes": trap()}, tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.array([trap()], dtype=object), allow_pickle=True)
    for name in ("a.pt", "a.npy"):
        with pytest.raises(TokenFileError, match=name):
            read_codes(tmp_path / name)
    assert "never" not in capsys.readouterr().out


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_damage_to_a_dac_file_is_an_error_or_other_numbers(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("d") / "a.dac"
    good = dac(path, np.ones((1, 5, 4)), 1280).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    broken = bytearray(good)
    broken[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(broken if data.draw(st.booleans()) else good[:at])
    try:
        found = read_dac(path)
    except TokenFileError as error:
        said = str(error)
    else:
        said = str(path)
        assert found.codes.dtype == np.int64
    assert str(path) in said
