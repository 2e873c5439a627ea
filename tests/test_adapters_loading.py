import functools
import json
import shutil
import tempfile
from pathlib import Path

import lookalikes
import pytest
import torch
from safetensors.torch import save_file

from codec import load_codec
from codec.errors import CheckpointError

pytest.importorskip("transformers", reason="pretrained codecs of others need the extra codec[hub]")


@functools.cache
def checkpoint(family):
    return lookalikes.save(family, Path(tempfile.mkdtemp()) / family)


def same(codec, other):
    wave = torch.randn(1, codec.spec.channels, 5 * codec.spec.hop_length + 3) * 0.2
    codes = codec.encode(wave)
    assert torch.equal(other.encode(wave).codes, codes.codes)
    torch.testing.assert_close(other.decode(codes), codec.decode(codes), atol=1e-6, rtol=1e-6)


# The original projects' names, from those of transformers: the inverse of what the loader does, written apart.


def original_encodec(model):
    tensors = {}
    for key, tensor in model.state_dict().items():
        parts = key.replace("parametrizations.weight.original0", "weight_g")
        parts = parts.replace("parametrizations.weight.original1", "weight_v").split(".")
        if parts[0] in ("encoder", "decoder"):
            layer = model.get_submodule(key.split(".conv.")[0].split(".norm.")[0].split(".lstm.")[0])
            kind = "convtr" if type(layer).__name__ == "EncodecConvTranspose1d" else "conv"
            if "conv" in parts:
                at = parts.index("conv")
                parts[at : at + 1] = [kind, kind]
            elif "norm" in parts:
                at = parts.index("norm")
                parts[at : at + 1] = [kind, "norm"]
            parts[1] = "model"
        else:
            parts = ["quantizer", "vq", "layers", parts[2], "_codebook", parts[4]]
        tensors[".".join(parts)] = tensor
    return tensors


def original_dac(model):
    tensors = {}
    blocks = len(model.config.downsampling_ratios)
    for key, tensor in model.state_dict().items():
        parts = key.split(".")
        if parts[0] in ("encoder", "decoder"):
            body = {"encoder": "encoder.block", "decoder": "decoder.model"}[parts[0]]
            ends = {"conv1": 0, "snake1": blocks + 1, "conv2": blocks + 2}
            if parts[1] in ends:
                name = f"{body}.{ends[parts[1]]}.{parts[2]}"
            else:
                block = f"{body}.{int(parts[2]) + 1}.block"
                first = 0 if parts[0] == "encoder" else 2
                if parts[3].startswith("res_unit"):
                    unit = first + int(parts[3][-1]) - 1
                    inner = ("snake1", "conv1", "snake2", "conv2").index(parts[4])
                    name = f"{block}.{unit}.block.{inner}.{parts[5]}"
                else:
                    places = {"encoder": {"snake1": 3, "conv1": 4}, "decoder": {"snake1": 0, "conv_t1": 1}}
                    name = f"{block}.{places[parts[0]][parts[3]]}.{parts[4]}"
        else:
            name = key
        if name.endswith("weight") and "codebook" not in name:  # any norm and direction that multiply to it
            length = tensor.flatten(1).norm(dim=1).view(-1, *[1] * (tensor.ndim - 1))
            tensors[name + "_g"], tensors[name + "_v"] = length, tensor * 3
        else:
            tensors[name] = tensor
    return tensors


def original_mimi(model):
    flat = model.state_dict()
    tensors = {}
    for key, tensor in flat.items():
        name = key
        for new, old in (
            ("encoder.encoder_seanet.layers", "encoder.model"),
            ("decoder.decoder_seanet.layers", "decoder.model"),
            ("encoder.encoder_transformer", "encoder_transformer.transformer"),
            ("decoder.decoder_transformer", "decoder_transformer.transformer"),
            ("encoder.downsample.conv", "downsample.conv.conv.conv"),
            ("decoder.upsample.conv", "upsample.convtr.convtr.convtr"),
            ("quantizer.semantic_residual_vector_quantizer.layers", "quantizer.rvq_first.vq.layers"),
            ("quantizer.acoustic_residual_vector_quantizer.layers", "quantizer.rvq_rest.vq.layers"),
            ("quantizer.semantic_residual_vector_quantizer", "quantizer.rvq_first"),
            ("quantizer.acoustic_residual_vector_quantizer", "quantizer.rvq_rest"),
            (".codebook.embed_sum", "._codebook.embedding_sum"),
            (".codebook.initialized", "._codebook._initialized"),
            (".codebook.", "._codebook."),
            ("input_layernorm", "norm1"),
            ("post_attention_layernorm", "norm2"),
            ("self_attn_layer_scale", "layer_scale_1"),
            ("mlp_layer_scale", "layer_scale_2"),
            ("mlp.fc1", "gating.linear1"),
            ("mlp.fc2", "linear2"),
            ("self_attn.o_proj", "self_attn.out_projs.0"),
        ):
            name = name.replace(new, old)
        if ".model." in name and ".conv." in name:
            module = type(model.get_submodule(key.rsplit(".conv.", 1)[0])).__name__
            kind = "convtr" if module == "MimiConvTranspose1d" else "conv"
            name = name.replace(".conv.", f".{kind}.{kind}.")
        if ".k_proj." in key or ".v_proj." in key:
            continue
        if ".q_proj." in key:
            query, keys, values = (flat[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj"))
            joined = [t.view(8, 2, -1, t.shape[1]).transpose(1, 2).reshape(t.shape) for t in (query, keys)]
            name, tensor = name.replace("q_proj.weight", "in_proj_weight"), torch.cat([*joined, values])
        tensors[name] = tensor.contiguous()
    return tensors


def test_original_encodec(tmp_path):
    model = lookalikes.encodec_24()
    torch.save(original_encodec(model), tmp_path / "encodec.th")
    codec, other = load_codec(tmp_path / "encodec.th"), load_codec(checkpoint("encodec_24"))
    assert codec.spec.name == "encodec"
    assert codec.spec.weights_hash == other.spec.weights_hash
    same(other, codec)


def test_original_encodec_48(tmp_path):
    network = {"norm_type": "time_group_norm", "use_causal_conv": False, "normalize": True, "audio_channels": 2}
    chunks = {"chunk_length_s": 1.0, "overlap": 0.01, "sampling_rate": 48000, "target_bandwidths": [3.0, 6.0]}
    model = lookalikes.encodec_24(**network, **chunks, codebook_size=1024)
    torch.save({"best_state": original_encodec(model)}, tmp_path / "encodec_48.th")
    model.save_pretrained(tmp_path / "same")
    codec, other = load_codec(tmp_path / "encodec_48.th"), load_codec(tmp_path / "same")
    assert (codec.spec.sample_rate, codec.spec.hop_length, codec.spec.n_quantizers) == (48000, 1584, 3 + 5 * 4)
    assert (codec.spec.encode_context, codec.spec.decode_context) == ((29, 30), (30, 29))
    assert codec.spec.weights_hash == other.spec.weights_hash
    same(other, codec)


@pytest.mark.parametrize("has_metadata", [True, False])
def test_original_dac(tmp_path, has_metadata):
    document = {"state_dict": original_dac(lookalikes.TRANSFORMERS["dac_16"]())}
    if has_metadata:
        document["metadata"] = {"kwargs": {"sample_rate": 16000, "encoder_dim": 4}}
    torch.save(document, tmp_path / "weights_16khz.pth")
    codec, other = load_codec(tmp_path / "weights_16khz.pth"), load_codec(checkpoint("dac_16"))
    assert (codec.spec.sample_rate, codec.spec.hop_length, codec.spec.n_quantizers) == (16000, 320, 5)
    same(other, codec)


def test_original_mimi(tmp_path):
    # The file doesn't say how far attention reaches, so that only items within it can be the same as the small model's.
    save_file(original_mimi(lookalikes.mimi()), tmp_path / "mimi.safetensors")
    codec, other = load_codec(tmp_path / "mimi.safetensors"), load_codec(checkpoint("mimi"))
    assert codec.spec.decode_context[0] > other.spec.decode_context[0]
    wave = torch.randn(1, 1, 5 * 1920) * 0.2
    codes = codec.encode(wave)
    assert torch.equal(other.encode(wave).codes, codes.codes)
    torch.testing.assert_close(other.decode(codes), codec.decode(codes), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("spelling", ["weight_g", "folded", "pytorch_model.bin"])
def test_snac_in_any_spelling(tmp_path, spelling):
    shutil.copytree(checkpoint("snac_24"), tmp_path / "s")
    from safetensors.torch import load_file

    from codec.adapters.original import folded

    weights = tmp_path / "s" / "model.safetensors"
    tensors = load_file(weights)
    if spelling == "folded":
        save_file(folded(tensors), weights)
    elif spelling == "weight_g":
        for number, short in (("0", "g"), ("1", "v")):
            long = f"parametrizations.weight.original{number}"
            tensors = {k.replace(long, f"weight_{short}"): v for k, v in tensors.items()}
        save_file(tensors, weights)
    else:
        torch.save(tensors, weights.with_name("pytorch_model.bin"))
        weights.unlink()
    same(load_codec(checkpoint("snac_24")), load_codec(tmp_path / "s"))


# The hub, without one: a cache as huggingface_hub lays it out.


def cached(repository, family, cache, revision="main", commit="a" * 40):
    home = cache / ("models--" + repository.replace("/", "--"))
    shutil.copytree(checkpoint(family), home / "snapshots" / commit)
    (home / "refs").mkdir(parents=True)
    (home / "refs" / revision).write_text(commit)
    return commit


@pytest.mark.parametrize("family", ["encodec_24", "snac_24"])
def test_hub_names_load_from_the_cache(tmp_path, family):
    commit = cached("someone/some_codec", family, tmp_path)
    if family == "snac_24":
        folder = tmp_path / "models--someone--some_codec" / "snapshots" / commit
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    codec = load_codec("hf:someone/some_codec", cache_dir=tmp_path, local_files_only=True)
    assert codec.spec.name == "some_codec"
    same(load_codec(checkpoint(family)), codec)
    again = load_codec("hf:someone/some_codec", revision="main", cache_dir=tmp_path, local_files_only=True)
    assert again.spec == codec.spec
    with pytest.raises(CheckpointError, match=r"hf:someone/some_codec: no config.json \("):
        load_codec("hf:someone/some_codec", revision="v2", cache_dir=tmp_path, local_files_only=True)


def test_not_in_the_cache(tmp_path):
    with pytest.raises(CheckpointError, match=r"hf:facebook/encodec_24khz: no config.json .*give a local folder"):
        load_codec("hf:facebook/encodec_24khz", cache_dir=tmp_path, local_files_only=True)


def test_without_the_extra(tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"encodec needs transformers; pip install 'codec\[hub\]'"):
        load_codec(checkpoint("encodec_24"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match=r"needs huggingface_hub; pip install 'codec\[hub\]'"):
        load_codec("hf:kyutai/mimi")


def test_unknown_model_type(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(CheckpointError, match="model_type is 'bert'; this release reads encodec, dac, mimi, SNAC"):
        load_codec(tmp_path)


def test_weights_of_another_configuration(tmp_path):
    shutil.copytree(checkpoint("dac_16"), tmp_path / "d")
    settings = json.loads((tmp_path / "d" / "config.json").read_text())
    (tmp_path / "d" / "config.json").write_text(json.dumps({**settings, "n_codebooks": 7}))
    with pytest.raises(CheckpointError, match="tensors are missing or of another shape, first 'quantizer"):
        load_codec(tmp_path / "d")
    shutil.copytree(checkpoint("snac_24"), tmp_path / "s")
    settings = json.loads((tmp_path / "s" / "config.json").read_text())
    (tmp_path / "s" / "config.json").write_text(json.dumps({**settings, "vq_strides": [8, 4, 2, 1]}))
    with pytest.raises(CheckpointError, match=r"no tensor 'quantizer.quantizers.3"):
        load_codec(tmp_path / "s")
    (tmp_path / "s" / "config.json").write_text(json.dumps({**settings, "rotary": True}))
    with pytest.raises(CheckpointError, match=r"SNAC settings \['rotary'\] are unknown"):
        load_codec(tmp_path / "s")


def test_a_damaged_or_foreign_checkpoint_file(tmp_path):
    (tmp_path / "bytes.th").write_bytes(b"not a checkpoint at all" * 10)
    with pytest.raises(CheckpointError, match=r"bytes.th: holds more than tensors .* or is damaged"):
        load_codec(tmp_path / "bytes.th")
    torch.save({"a": torch.zeros(3)}, tmp_path / "other.th")
    with pytest.raises(CheckpointError, match=r"none has a name of EnCodec, DAC or Mimi \(the first is 'a'\)"):
        load_codec(tmp_path / "other.th")
    torch.save([1, 2], tmp_path / "list.th")
    with pytest.raises(CheckpointError, match="no state_dict"):
        load_codec(tmp_path / "list.th")
    tensors = original_encodec(lookalikes.encodec_24())
    del tensors["encoder.model.1.shortcut.conv.conv.bias"]
    torch.save(tensors, tmp_path / "part.th")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing .*'encoder.layers.1.shortcut.conv.bias'"):
        load_codec(tmp_path / "part.th")


class Trap:
    def __reduce__(self):
        return print, ("this must never be printed",)


def test_a_checkpoint_that_would_execute_code_is_refused(tmp_path, capsys):
    torch.save({"state_dict": {"a": torch.zeros(1)}, "trap": Trap()}, tmp_path / "trap.pth")
    with pytest.raises(CheckpointError, match="could execute code and isn't read"):
        load_codec(tmp_path / "trap.pth")
    assert "never" not in capsys.readouterr().out


# The original packages, where somebody has them.


def test_against_the_encodec_package(tmp_path):
    pytest.importorskip("encodec", reason="a check against EnCodec's own package, where it is installed")
    from encodec.model import EncodecModel

    model = EncodecModel._get_model(
        [6.0], 24000, 1, causal=True, model_norm="weight_norm", audio_normalize=False, segment=None, name="x"
    ).eval()
    for name, tensor in model.named_buffers():
        if name.endswith("embed"):
            tensor.normal_(0, 0.1)
    model.set_target_bandwidth(6.0)
    torch.save(model.state_dict(), tmp_path / "e.th")
    codec = load_codec(tmp_path / "e.th")
    wave = torch.randn(1, 1, 4001) * 0.2
    with torch.no_grad():
        frames = model.encode(wave)
        decoded = model.decode(frames)[..., :4001]
    assert torch.equal(codec.encode(wave).codes, frames[0][0])
    torch.testing.assert_close(codec.decode(codec.encode(wave)), decoded, atol=1e-5, rtol=1e-5)


def test_against_the_snac_package(monkeypatch):
    snac = pytest.importorskip("snac", reason="a check against SNAC's own package, where it is installed")
    import types

    import snac.layers as layers

    from codec.adapters.snac import code_seeds, normal_noise

    codec = load_codec(checkpoint("snac_44"))
    settings = json.loads((checkpoint("snac_44") / "config.json").read_text())
    from safetensors.torch import load_file

    model = snac.SNAC(**settings).eval()
    model.load_state_dict(load_file(checkpoint("snac_44") / "model.safetensors"))
    wave = torch.randn(1, 1, 9001) * 0.2
    codes = codec.encode(wave)
    with torch.no_grad():
        original = model.encode(wave)
        assert torch.equal(codec.flatten(original), codes.codes)
        seeds, calls = code_seeds(codes.codes), iter(range(100))

        def ours(shape, **_):
            return normal_noise(seeds + next(calls), shape[2] // seeds.shape[1])[:, None]

        monkeypatch.setattr(layers, "torch", types.SimpleNamespace(**{**torch.__dict__, "randn": ours}))
        decoded = model.decode(original)[..., :9001]
    torch.testing.assert_close(codec.decode(codes), decoded, atol=1e-5, rtol=1e-5)
