"""Checkpoint files of the original projects (EnCodec, DAC, Mimi, SNAC) → names and settings of `transformers`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from codec.errors import CheckpointError

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Translated:
    """A checkpoint as `transformers` would have it.

    Attributes:
        family: "encodec", "dac", "mimi" or "snac"; SNAC's settings and names are its own.
        settings: Arguments of the configuration class.
        tensors: Weights by the names of the `transformers` layout.
    """

    family: str
    settings: dict[str, Any]
    tensors: Tensors


def read_original(path: Path) -> Translated:
    """Reads a checkpoint file of one of the projects; which one shows in the names of its tensors.

    Raises:
        CheckpointError: Unreadable, or of no project known here.
    """
    tensors, metadata = _tensors(path)
    names = " ".join(tensors)
    try:
        if "quantizer.vq.layers.0._codebook" in names:
            return _encodec(tensors)
        if "quantizer.rvq_first" in names:
            return _mimi(tensors)
        if "quantizer.quantizers.0.codebook.weight" in names and "encoder.block.0" in names:
            return _dac(tensors, metadata)
    except (KeyError, IndexError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: an incomplete or unusual checkpoint ({error!r})") from error
    raise CheckpointError(
        f"{path}: of {len(tensors)} tensors none has a name of EnCodec, DAC or Mimi (the first is "
        f"{next(iter(tensors), '')!r}); SNAC is loaded from its folder with config.json"
    )


def load_tensors(path: Path) -> Any:
    """A `.safetensors` or torch file, of the latter only tensors and plain values: nothing in it is executed.

    Raises:
        CheckpointError: Unreadable, or it holds anything else.
    """
    try:
        if path.suffix == ".safetensors":
            return load_safetensors(path.read_bytes())
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: can't be read ({error})") from error
    except Exception as error:  # torch has no one class for damaged, foreign and dangerous files
        raise CheckpointError(
            f"{path}: holds more than tensors and plain values, or is damaged ({str(error).splitlines()[0]}); such a "
            "file could execute code and isn't read: save its state_dict alone"
        ) from error


def _tensors(path: Path) -> tuple[Tensors, dict[str, Any]]:
    document = load_tensors(path)
    metadata: dict[str, Any] = {}
    if isinstance(document, Mapping):
        for key in ("best_state", "state_dict", "model"):
            if isinstance(document.get(key), Mapping):
                metadata = document.get("metadata") or {}
                document = document[key]
    if not isinstance(document, Mapping) or not all(isinstance(t, Tensor) for t in document.values()):
        raise CheckpointError(f"{path}: no state_dict: a checkpoint maps names to tensors")
    return dict(document), dict(metadata.get("kwargs") or {})


def folded(tensors: Tensors) -> Tensors:
    """Weights in place of their norms and directions, in either of torch's spellings."""
    out = dict(tensors)
    for norm, direction in (
        (".weight_g", ".weight_v"),
        (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
    ):
        for key in [k for k in out if k.endswith(norm)]:
            prefix = key.removesuffix(norm)
            out[f"{prefix}.weight"] = torch._weight_norm(out.pop(prefix + direction), out.pop(key), 0)
    return out


_ENCODEC = (
    (r"^(encoder|decoder)\.model\.", r"\1.layers."),
    (r"\.(conv|convtr)\.\1\.", ".conv."),
    (r"\.(conv|convtr)\.norm\.", ".norm."),
    (r"^quantizer\.vq\.layers\.(\d+)\._codebook\.", r"quantizer.layers.\1.codebook."),
)


def _renamed(tensors: Tensors, rules: tuple[tuple[str, str], ...]) -> Tensors:
    out = {}
    for key, tensor in tensors.items():
        for pattern, replacement in rules:
            key = re.sub(pattern, replacement, key)
        out[key] = tensor
    return out


def _count(tensors: Tensors, pattern: str) -> int:
    return len({m.group(1) for m in (re.match(pattern, key) for key in tensors) if m})


def _ratios(tensors: Tensors) -> list[int]:
    """Strides of a SEANet decoder: its transposed layers have an even kernel, twice their stride."""
    taps = {}
    for key, weight in tensors.items():
        match = re.fullmatch(r"decoder\.layers\.(\d+)\.conv\.weight", key)
        if match and weight.shape[2] % 2 == 0:
            taps[int(match[1])] = int(weight.shape[2])
    return [taps[n] // 2 for n in sorted(taps)]


def _encodec(tensors: Tensors) -> Translated:
    names = _renamed(tensors, _ENCODEC)
    plain = folded(names)
    ratios = _ratios(plain)
    first = plain["encoder.layers.0.conv.weight"]
    chunked = "encoder.layers.0.norm.weight" in names
    levels = _count(names, r"quantizer\.layers\.(\d+)\.")
    size, dim = plain["quantizer.layers.0.codebook.embed"].shape
    rate = 48000 if chunked else 24000
    bits = math.log2(size)
    settings: dict[str, Any] = {
        "sampling_rate": rate,
        "audio_channels": int(first.shape[1]),
        "num_filters": int(first.shape[0]),
        "kernel_size": int(first.shape[2]),
        "hidden_size": int(dim),
        "upsampling_ratios": ratios,
        "codebook_size": int(size),
        "target_bandwidths": [levels * bits * math.ceil(rate / math.prod(ratios)) / 1000],
    }
    if chunked:
        settings |= {"norm_type": "time_group_norm", "use_causal_conv": False, "normalize": True}
        settings |= {"chunk_length_s": 1.0, "overlap": 0.01}
    return Translated("encodec", settings, names)


_MIMI = (
    (r"^(encoder|decoder)\.model\.", r"\1.layers."),
    (r"^downsample\.conv\.conv\.conv\.", "downsample.conv."),
    (r"^upsample\.convtr\.convtr\.convtr\.", "upsample.conv."),
    (r"\.(conv|convtr)\.\1\.", ".conv."),
    (r"^(encoder|decoder)_transformer\.transformer\.", r"\1_transformer."),
    (r"\.norm1\.", ".input_layernorm."),
    (r"\.norm2\.", ".post_attention_layernorm."),
    (r"\.layer_scale_1\.", ".self_attn_layer_scale."),
    (r"\.layer_scale_2\.", ".mlp_layer_scale."),
    (r"\.(?:gating\.)?linear1\.", ".mlp.fc1."),
    (r"\.(?:gating\.)?linear2\.", ".mlp.fc2."),
    (r"\.self_attn\.out_proj(?:s\.0)?\.", ".self_attn.o_proj."),
    (r"\.self_attn\.in_proj(?:s\.0\.weight|_weight)$", ".self_attn.in_proj"),
    (r"^quantizer\.rvq_first\.", "quantizer.semantic_residual_vector_quantizer."),
    (r"^quantizer\.rvq_rest\.", "quantizer.acoustic_residual_vector_quantizer."),
    (r"\.vq\.layers\.(\d+)\._codebook\.", r".layers.\1.codebook."),
    (r"\.codebook\.embedding_sum$", ".codebook.embed_sum"),
    (r"\.codebook\._initialized$", ".codebook.initialized"),
)


def _mimi(tensors: Tensors) -> Translated:
    names = _renamed(tensors, _MIMI)
    heads = 8
    for key in [k for k in names if k.endswith(".self_attn.in_proj")]:
        prefix = key.removesuffix("in_proj")
        query, value_key, value = names.pop(key).chunk(3)
        names[f"{prefix}q_proj.weight"] = _halves(query, heads)
        names[f"{prefix}k_proj.weight"] = _halves(value_key, heads)
        names[f"{prefix}v_proj.weight"] = value
    plain = folded(names)
    first = plain["encoder.layers.0.conv.weight"]
    size, dim = plain["quantizer.semantic_residual_vector_quantizer.layers.0.codebook.embed_sum"].shape
    settings = {
        "audio_channels": int(first.shape[1]),
        "num_filters": int(first.shape[0]),
        "hidden_size": int(plain["downsample.conv.weight"].shape[0]),
        "upsampling_ratios": _ratios(plain),
        "num_hidden_layers": _count(plain, r"encoder_transformer\.layers\.(\d+)\."),
        "intermediate_size": int(plain["encoder_transformer.layers.0.mlp.fc1.weight"].shape[0]),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "codebook_size": int(size),
        "codebook_dim": int(dim),
        "vector_quantization_hidden_dimension": int(dim),
        "num_quantizers": 1 + _count(plain, r"quantizer\.acoustic_residual_vector_quantizer\.layers\.(\d+)\."),
        "upsample_groups": int(plain["upsample.conv.weight"].shape[0]),
    }
    return Translated("mimi", settings, plain)


def _halves(weight: Tensor, heads: int) -> Tensor:
    """Rotary pairs side by side → first and second half of each head."""
    out, num_in = weight.shape
    return weight.view(heads, out // heads // 2, 2, num_in).transpose(1, 2).reshape(out, num_in)


def _dac(tensors: Tensors, metadata: dict[str, Any]) -> Translated:
    plain = folded(tensors)
    blocks = _count(plain, r"encoder\.block\.(\d+)\.block\.")
    out = {k: t for k, t in plain.items() if k.startswith("quantizer.")}
    for side, body in (("encoder", "encoder.block"), ("decoder", "decoder.model")):
        units = range(3) if side == "encoder" else range(2, 5)
        snake, strided = (3, 4) if side == "encoder" else (0, 1)
        for key, tensor in plain.items():
            if not key.startswith(body + "."):
                continue
            at, _, rest = key.removeprefix(body + ".").partition(".")
            number = int(at)
            if number == 0:
                out[f"{side}.conv1.{rest}"] = tensor
            elif number == blocks + 1:
                out[f"{side}.snake1.{rest}"] = tensor
            elif number == blocks + 2:
                out[f"{side}.conv2.{rest}"] = tensor
            else:
                inner, _, last = rest.removeprefix("block.").partition(".")
                block = f"{side}.block.{number - 1}"
                if int(inner) == snake:
                    out[f"{block}.snake1.{last}"] = tensor
                elif int(inner) == strided:
                    out[f"{block}.{'conv1' if side == 'encoder' else 'conv_t1'}.{last}"] = tensor
                else:
                    part, _, leaf = last.removeprefix("block.").partition(".")
                    name = ("snake1", "conv1", "snake2", "conv2")[int(part)]
                    out[f"{block}.res_unit{units.index(int(inner)) + 1}.{name}.{leaf}"] = tensor
    ratios = [int(out[f"encoder.block.{n}.conv1.weight"].shape[2]) // 2 for n in range(blocks)]
    levels = _count(out, r"quantizer\.quantizers\.(\d+)\.")
    size, dim = out["quantizer.quantizers.0.codebook.weight"].shape
    rate = metadata.get("sample_rate")
    if rate is None:  # files without metadata: the published models differ in hop and number of codebooks
        rate = 44100 if math.prod(ratios) == 512 else 16000 if levels <= 12 else 24000
    settings = {
        "sampling_rate": int(rate),
        "downsampling_ratios": ratios,
        "encoder_hidden_size": int(out["encoder.conv1.weight"].shape[0]),
        "decoder_hidden_size": int(out["decoder.conv1.weight"].shape[0]),
        "n_codebooks": levels,
        "codebook_size": int(size),
        "codebook_dim": int(dim),
    }
    return Translated("dac", settings, out)
