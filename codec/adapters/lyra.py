"""Lyra V2: its published TFLite files → a checkpoint, and the codec as batched torch modules.

The network is SoundStream's causal SEANet with depthwise dilated units and grouped layers; everything pads with zeros
on the left. Weights that are stored as 8-bit integers are dequantized. The encoder also rounds its activations where
the original does, because the codes depend on it; the decoder doesn't, because only the ear would have to tell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn
from torch.nn import functional as F

from codec.adapters import tflite
from codec.adapters.base import Adapter, weights_hash
from codec.adapters.layers import (
    Conv,
    ConvTranspose,
    Layer,
    Pointwise,
    Residual,
    Stack,
    decode_context,
    encode_context,
)
from codec.adapters.tflite import TfliteGraph, TfliteOp
from codec.errors import CheckpointError
from codec.spec import CodecSpec

ARCHITECTURE = "Lyra"
FORMAT_VERSION = 1
SAMPLE_RATE = 16000
STRIDES = (16, 5, 2, 2)
DILATIONS = (1, 3, 9)
FILES = ("soundstream_encoder.tflite", "lyragan.tflite", "quantizer.tflite")

Rounding = list[tuple[float, int] | None]
"""Of each operation in order: scale and zero point of its 8-bit output, or None where it is float."""


class _Rounded(nn.Module):
    """The values that 8-bit integers with a scale and a zero point can hold."""

    def __init__(self, scale: float, zero_point: int) -> None:
        super().__init__()
        self.scale, self.zero_point = scale, zero_point

    def forward(self, x: Tensor) -> Tensor:
        rounded = torch.round(x / self.scale).clamp_(-128 - self.zero_point, 127 - self.zero_point)
        return rounded * self.scale


class _Builder:
    """Takes weights and roundings in order of the graph and makes layers of them."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, slope: float, rounding: Rounding) -> None:
        self.tensors, self.prefix, self.slope = tensors, prefix, slope
        self.rounding: Iterator[tuple[float, int] | None] = iter(rounding)
        self.number = 0

    def _next(self) -> tuple[Tensor, Tensor]:
        name = f"{self.prefix}.{self.number}"
        self.number += 1
        return self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"]

    def rounded(self) -> list[Layer]:
        entry = next(self.rounding, None)
        return [] if entry is None else [Pointwise(_Rounded(*entry))]

    def relu(self) -> list[Layer]:
        return [Pointwise(nn.LeakyReLU(self.slope)), *self.rounded()]

    def conv(self, num_in: int, *, stride: int = 1, dilation: int = 1) -> list[Layer]:
        weight, bias = self._next()
        num_out, per_group, taps = weight.shape
        own = nn.Conv1d(num_in, num_out, taps, stride, dilation=dilation, groups=num_in // per_group)
        _set(own, weight, bias)
        return [Conv(own, (taps - 1) * dilation + 1 - stride, 0), *self.rounded()]

    def conv_transpose(self, stride: int) -> list[Layer]:
        weight, bias = self._next()
        num_in, per_group, taps = weight.shape
        groups = bias.shape[0] // per_group
        own = nn.ConvTranspose1d(num_in, bias.shape[0], taps, stride, groups=groups)
        _set(own, weight, bias)
        return [ConvTranspose(own, 0, taps - stride)]

    def units(self, width: int) -> list[Layer]:
        layers: list[Layer] = []
        for dilation in DILATIONS:
            body = [*self.relu(), *self.conv(width, dilation=dilation), *self.conv(width)]
            body += [*self.relu(), *self.conv(width)]
            layers += [Residual(Stack(body)), *self.rounded()]
        return layers


def _set(module: nn.Conv1d | nn.ConvTranspose1d, weight: Tensor, bias: Tensor) -> None:
    assert module.weight.shape == weight.shape
    module.weight.data.copy_(weight)
    assert module.bias is not None
    module.bias.data.copy_(bias)


class Lyra(Adapter):
    """Lyra V2: 16 kHz, 50 frames of 46 codes a second, causal; 16, 30 and 46 codebooks are 3.2, 6 and 9.2 kbps.

    Args:
        settings: `name`, `slope` of the leaky ReLUs, `rounding` of the encoder.
        tensors: Weights by name: `encoder.N.weight` …, `codebooks` `[K, V, D]`.
    """

    codebooks: Tensor

    def __init__(self, settings: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        slope = float(settings["slope"])
        rounding: Rounding = [None if entry is None else (entry[0], entry[1]) for entry in settings["rounding"]]
        build = _Builder(tensors, "encoder", slope, rounding)
        width = int(tensors["encoder.0.weight"].shape[0])
        layers = build.conv(1, stride=STRIDES[0])
        for stride in STRIDES[1:]:
            layers += [*build.units(width), *build.relu()]
            layers += build.conv(width, stride=stride)
            width = int(tensors[f"encoder.{build.number - 1}.bias"].shape[0])
        encoder = Stack([*layers, *build.relu(), *build.conv(width)])

        codebooks = tensors["codebooks"]
        build = _Builder(tensors, "decoder", slope, [])
        layers = [*build.conv(codebooks.shape[2]), *build.relu()]
        for stride in STRIDES[:0:-1]:
            layers += build.conv_transpose(stride)
            width = int(tensors[f"decoder.{build.number - 1}.bias"].shape[0])
            layers += [*build.units(width), *build.relu()]
        decoder = Stack([*layers, *build.conv_transpose(STRIDES[0])])

        hop = STRIDES[0] * STRIDES[1] * STRIDES[2] * STRIDES[3]
        facts = {"family": "lyra", "slope": slope, "rounding": settings["rounding"]}
        spec = CodecSpec(
            name=settings["name"],
            weights_hash=weights_hash(facts, tensors.values()),
            sample_rate=SAMPLE_RATE,
            hop_length=hop,
            channels=1,
            n_quantizers=codebooks.shape[0],
            codebook_size=codebooks.shape[1],
            encode_context=encode_context(encoder, hop),
            decode_context=decode_context(decoder, hop),
        )
        super().__init__(spec)
        self.encoder, self.decoder = encoder, decoder
        self.register_buffer("codebooks", codebooks.float())

    def latents(self, wave: Tensor) -> Tensor:
        """Wave `[B, 1, N]` → latents `[B, D, T]` before the quantizer."""
        return self.encoder.run(F.pad(wave, (0, -wave.shape[-1] % self._spec.hop_length)), None)[0]

    def _encode_rows(self, wave: Tensor, lengths: Tensor | None, n_quantizers: int) -> Tensor:
        # Causal, and zero beyond each row's end like the end of a single item: no row sees the padding.
        return self.quantize(self.latents(wave), n_quantizers)

    def quantize(self, latents: Tensor, n_quantizers: int) -> Tensor:
        """Latents `[B, D, T]` → codes `[B, K, T]`."""
        residual, codes = latents.transpose(1, 2).double(), []
        for codebook in self.codebooks[:n_quantizers].double():
            indices = (codebook.square().sum(1) - 2 * residual @ codebook.T).argmin(-1)
            residual = residual - codebook[indices]
            codes.append(indices)
        return torch.stack(codes, 1)

    def _decode_rows(self, codes: Tensor, lengths: Tensor | None) -> Tensor:
        size = self.codebooks.shape[1]
        offsets = torch.arange(codes.shape[1], device=codes.device)[:, None] * size
        summed = F.embedding((codes + offsets).transpose(1, 2), self.codebooks.flatten(0, 1)).sum(2)
        return self.decoder.run(summed.transpose(1, 2), None)[0]


def load_lyra(folder: Path, document: dict[str, Any]) -> Lyra:
    """Loads what `import_lyra` wrote; `document` is its `config.json`.

    Raises:
        CheckpointError: Damaged, or of a newer version.
    """
    if document.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: Lyra checkpoint in format version {document.get('format_version')!r}; this release reads "
            f"{FORMAT_VERSION}: convert Lyra's files again"
        )
    weights = folder / "model.safetensors"
    try:
        codec = Lyra(document["model"], load_safetensors(weights.read_bytes()))
        stated = document["weights_hash"]
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, AssertionError, IndexError) as error:
        raise CheckpointError(f"{weights}: not Lyra's weights ({error!r}); convert Lyra's files again") from error
    if codec.spec.weights_hash != stated:
        raise CheckpointError(
            f"{folder}: the weights hash to {codec.spec.weights_hash[:12]}…, config.json says {str(stated)[:12]}…; "
            "one of the files is damaged or was edited: convert Lyra's files again"
        )
    return codec


def import_lyra(source: Path, folder: Path, *, name: str = "lyra_v2") -> CodecSpec:
    """Reads `model_coeffs` of a checkout of google/lyra and writes a checkpoint.

    Args:
        source: The folder with the three `.tflite` files.
        folder: Where to; `config.json` and `model.safetensors` are written.
        name: The codec's name in token files.

    Raises:
        CheckpointError: A file is missing, damaged, or of another network.
    """
    encoder, decoder = (_largest(tflite.read_tflite(source / file)) for file in FILES[:2])
    tensors: dict[str, Tensor] = {}
    try:
        slope, rounding = _read_network(encoder, "encoder", tensors)
        other, _ = _read_network(decoder, "decoder", tensors)
        tensors["codebooks"] = _codebooks(tflite.read_tflite(source / FILES[2]))
        if slope != other:
            raise CheckpointError(f"leaky ReLUs of slope {slope} in one file and {other} in the other")
        settings = {"name": name, "slope": slope, "rounding": rounding}
        codec = Lyra(settings, tensors)
    except (AssertionError, KeyError, IndexError, ValueError, StopIteration) as error:
        raise CheckpointError(
            f"{source}: not the network of Lyra V2 ({error!r}); give lyra/model_coeffs of google/lyra"
        ) from error
    document = {
        "format_version": FORMAT_VERSION,
        "architecture": ARCHITECTURE,
        "weights_hash": codec.spec.weights_hash,
        "model": settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(save_safetensors(tensors))
    (folder / "config.json").write_text(json.dumps(document, indent=1) + "\n")
    return codec.spec


def _largest(graphs: list[TfliteGraph]) -> TfliteGraph:
    return max(graphs, key=lambda graph: len(graph.ops))


def _read_network(graph: TfliteGraph, prefix: str, tensors: dict[str, Tensor]) -> tuple[float, Rounding]:
    """Takes the weights in order of execution; returns the slope of the ReLUs and the roundings."""
    slopes: set[float] = set()
    rounding: Rounding = []
    number = 0
    waiting: list[tuple[Tensor, Tensor]] = []  # transposed convolutions of one split input
    quantized = {op.inputs[0]: op.outputs[0] for op in graph.ops if op.code == tflite.QUANTIZE}
    transposed = [op for op in graph.ops if op.code == tflite.TRANSPOSE_CONV]
    for op in graph.ops:
        if op.code in (tflite.CONV, tflite.DEPTHWISE_CONV):
            tensors[f"{prefix}.{number}.weight"] = _weight(graph, op)
            tensors[f"{prefix}.{number}.bias"] = _constant(graph, op.inputs[2])
        elif op.code == tflite.TRANSPOSE_CONV:
            weight = _constant(graph, op.inputs[1])[:, :, 0].permute(2, 0, 1).contiguous()
            bias = op.inputs[3] if len(op.inputs) > 3 else None
            waiting.append((weight, torch.zeros(weight.shape[1]) if bias is None else _constant(graph, bias)))
            after = transposed[transposed.index(op) + 1 :]
            if after and _split_of(graph, after[0]) == _split_of(graph, op) is not None:
                continue
            tensors[f"{prefix}.{number}.weight"] = torch.cat([w for w, _ in waiting])
            tensors[f"{prefix}.{number}.bias"] = torch.cat([b for _, b in waiting])
            waiting = []
        elif op.code == tflite.LEAKY_RELU:
            slopes.add(op.option(0, "f"))
        elif op.code != tflite.ADD:
            continue
        number += op.code not in (tflite.LEAKY_RELU, tflite.ADD)
        out = graph.tensors[quantized.get(op.outputs[0], op.outputs[0])]
        rounding.append((float(out.scale[0]), int(out.zero_point[0])) if len(out.scale) else None)
    if len(slopes) != 1:
        raise CheckpointError(f"leaky ReLUs of slopes {sorted(slopes)}; Lyra V2 has one slope")
    return slopes.pop(), rounding


def _split_of(graph: TfliteGraph, op: TfliteOp) -> int | None:
    """The operator with several outputs that made the input of a transposed convolution, if one did."""
    for number, other in enumerate(graph.ops):
        if op.inputs[2] in other.outputs:
            return number if len(other.outputs) > 1 else None
    return None


def _constant(graph: TfliteGraph, number: int) -> Tensor:
    return torch.from_numpy(graph.tensors[number].values().copy())


def _weight(graph: TfliteGraph, op: TfliteOp) -> Tensor:
    weight = _constant(graph, op.inputs[1])[:, :, 0]  # [out, taps, in], or [1, taps, out] of a depthwise one
    order = (2, 0, 1) if op.code == tflite.DEPTHWISE_CONV else (0, 2, 1)
    return weight.permute(order).contiguous()


def _codebooks(graphs: list[TfliteGraph]) -> Tensor:
    """`[K, V, D]`: of the graph that decodes, each lookup's table, at the level that its index is sliced from."""
    for graph in graphs:
        makers = {op.outputs[0]: op for op in graph.ops}
        levels: dict[int, Tensor] = {}
        for op in graph.ops:
            if op.code != tflite.GATHER or graph.tensors[op.inputs[0]].data is None:
                continue
            index = makers.get(op.inputs[1])
            while index is not None and index.code == tflite.RESHAPE:
                index = makers.get(index.inputs[0])
            if index is None or index.code != tflite.STRIDED_SLICE:
                break
            levels[int(_constant(graph, index.inputs[1])[0])] = _constant(graph, op.inputs[0])
        if levels and sorted(levels) == list(range(len(levels))):
            return torch.stack([levels[n] for n in range(len(levels))])
    raise CheckpointError("no graph of the quantizer looks codes up level by level")
