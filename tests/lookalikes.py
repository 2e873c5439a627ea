"""Small pretrained-codec look-alikes with random weights, saved in their projects' own layouts."""

import json
import os
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

LYRA = Path(os.environ.get("CODEC_LYRA_DIR") or Path(__file__).parents[2] / "shared" / "lyra")
NO_LYRA = f"Lyra's weights aren't part of the project; none in {LYRA} (set CODEC_LYRA_DIR to lyra/model_coeffs)"


def stirred(model):
    """Snakes that bend, and codebooks among the latents: the classes start with one code for all."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("alpha"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif name.endswith("layer_scale.scale"):
                tensor.fill_(1.0)  # Mimi's transformers would hardly count otherwise
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Conv1d | torch.nn.ConvTranspose1d) and model.config.model_type == "dac":
                # Its own first values let next to nothing through.
                inputs = module.in_channels * (module.kernel_size[0] if isinstance(module, torch.nn.Conv1d) else 2)
                gain = 0.3 if "res_unit" in name and name.endswith("conv2") else 1.0
                gain = 0.02 if name == "decoder.conv2" else gain  # not all of it at the tanh's ends
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * gain * inputs**-0.5)
        channels = getattr(model.config, "audio_channels", 1)
        seconds = torch.randn(1, channels, 64 * model.config.sampling_rate // 50, generator=generator)
        wave = seconds * torch.linspace(0.02, 0.5, seconds.shape[-1])
        model.eval()
        latents = model.encoder(wave)
        latents = getattr(latents, "latents", latents)
        quantizer = model.quantizer
        if hasattr(quantizer, "quantizers"):
            _fill_factorised(quantizer.quantizers, latents, generator)
        elif hasattr(quantizer, "layers"):
            _fill(quantizer.layers, latents, generator)
        else:
            for part in (quantizer.semantic_residual_vector_quantizer, quantizer.acoustic_residual_vector_quantizer):
                _fill(part.layers, part.input_proj(latents), generator)
    return model


def _picked(vectors, count, generator):
    picks = vectors[torch.randint(len(vectors), (count,), generator=generator)]
    return picks + torch.randn(picks.shape, generator=generator) * vectors.std(0) * 0.3


def _fill(layers, latents, generator):
    residual = latents[0].T
    for layer in layers:
        book = layer.codebook
        entries = book.embed if "embed" in dict(book.named_buffers()) else book.embed_sum
        entries.copy_(_picked(residual, len(entries), generator))
        residual = residual - layer.decode(layer.encode(residual.T[None]))[0].T


def _fill_factorised(quantizers, latents, generator):
    residual = latents
    for quantizer in quantizers:
        projected = quantizer.in_proj(residual)[0].T
        # Angles decide: without its mean a latent could point anywhere.
        quantizer.in_proj.bias.sub_(projected.mean(0))
        projected = quantizer.in_proj(residual)[0].T
        quantizer.codebook.weight.copy_(_picked(projected, len(quantizer.codebook.weight), generator))
        residual = residual - quantizer(residual)[0]


def encodec_24(**changes):
    from transformers import EncodecConfig, EncodecModel

    torch.manual_seed(0)
    settings = {"num_filters": 4, "hidden_size": 16, "codebook_size": 64, "target_bandwidths": [1.8, 3.6]}
    return stirred(EncodecModel(EncodecConfig(**{**settings, **changes})))


def encodec_48():
    """The 48 kHz model's proportions at a fiftieth of its rate: chunks of 28.5 steps, a frame of 5."""
    chunked = {"sampling_rate": 960, "audio_channels": 2, "normalize": True, "chunk_length_s": 1.0, "overlap": 0.05}
    network = {"norm_type": "time_group_norm", "use_causal_conv": False, "upsampling_ratios": [4, 4, 2]}
    return encodec_24(**chunked, **network, codebook_size=1024, target_bandwidths=[0.6, 1.2])


def dac(ratios, rate):
    from transformers import DacConfig, DacModel

    torch.manual_seed(0)
    return stirred(
        DacModel(
            DacConfig(
                encoder_hidden_size=4,
                decoder_hidden_size=32,
                downsampling_ratios=ratios,
                n_codebooks=5,
                codebook_size=64,
                sampling_rate=rate,
            )
        )
    )


def mimi():
    from transformers import MimiConfig, MimiModel

    torch.manual_seed(0)
    config = MimiConfig(
        hidden_size=32,
        num_filters=4,
        num_hidden_layers=2,
        sliding_window=10,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=4,
        intermediate_size=32,
        codebook_size=64,
        codebook_dim=8,
        vector_quantization_hidden_dimension=8,
        num_quantizers=6,
        upsample_groups=32,
    )
    return stirred(MimiModel(config))


SNAC = {
    "snac_24": {
        "sampling_rate": 24000,
        "encoder_rates": [2, 2, 4, 4],
        "decoder_rates": [4, 4, 2, 2],
        "attn_window_size": None,
        "vq_strides": [4, 2, 1],
    },
    "snac_44": {
        "sampling_rate": 44100,
        "encoder_rates": [3, 3, 7],
        "decoder_rates": [7, 3, 3],
        "attn_window_size": 8,
        "vq_strides": [8, 4, 2, 1],
    },
}
SNAC_SIZES = {"encoder_dim": 8, "decoder_dim": 64, "codebook_size": 64, "codebook_dim": 4}


def snac_tensors(settings):
    """A state dict in SNAC's names and torch's newer spelling of weight norm."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}

    def conv(prefix, shape, bias=None):
        direction = torch.randn(shape, generator=generator)
        spread = direction.flatten(1).norm(dim=1)
        tensors[f"{prefix}.parametrizations.weight.original0"] = (
            (torch.rand(shape[0], generator=generator) + 0.5) * (spread / (shape[1] * shape[2]) ** 0.5)
        )[:, None, None]
        tensors[f"{prefix}.parametrizations.weight.original1"] = direction
        if bias:
            tensors[f"{prefix}.bias"] = torch.randn(bias, generator=generator) * 0.1

    def snake(prefix, width):
        tensors[f"{prefix}.alpha"] = torch.rand(1, width, 1, generator=generator) + 0.5

    def unit(prefix, width):
        snake(f"{prefix}.block.0", width)
        conv(f"{prefix}.block.1", (width, 1, 7), width)
        snake(f"{prefix}.block.2", width)
        conv(f"{prefix}.block.3", (width, width, 1), width)
        tensors[f"{prefix}.block.3.parametrizations.weight.original0"] *= 0.3  # a sum of many such units stays tame

    def attention(prefix, width):
        tensors[f"{prefix}.norm.weight"] = torch.ones(width)
        tensors[f"{prefix}.norm.bias"] = torch.zeros(width)
        tensors[f"{prefix}.to_qkv.weight"] = torch.randn(3 * width, width, generator=generator) * width**-0.5
        tensors[f"{prefix}.to_out.weight"] = torch.randn(width, width, generator=generator) * width**-0.5
        tensors[f"{prefix}.rel_pos.inv_freq"] = 1.0 / 10000 ** (torch.arange(0, 64, 2).float() / 64)

    width, at = settings["encoder_dim"], 1
    conv("encoder.block.0", (width, 1, 7), width)
    for stride in settings["encoder_rates"]:
        for n in range(3):
            unit(f"encoder.block.{at}.block.{n}", width)
        snake(f"encoder.block.{at}.block.3", width)
        conv(f"encoder.block.{at}.block.4", (2 * width, width, 2 * stride), 2 * width)
        width, at = 2 * width, at + 1
    if settings["attn_window_size"]:
        attention(f"encoder.block.{at}", width)
        at += 1
    conv(f"encoder.block.{at}", (width, 1, 7), width)
    latent = width
    for n in range(len(settings["vq_strides"])):
        prefix = f"quantizer.quantizers.{n}"
        conv(f"{prefix}.in_proj", (settings["codebook_dim"], latent, 1), settings["codebook_dim"])
        tensors[f"{prefix}.in_proj.bias"].zero_()  # angles decide: they shall be any
        conv(f"{prefix}.out_proj", (latent, settings["codebook_dim"], 1), latent)
        shape = settings["codebook_size"], settings["codebook_dim"]
        tensors[f"{prefix}.codebook.weight"] = torch.randn(shape, generator=generator)
    width, at = settings["decoder_dim"], 2
    conv("decoder.model.0", (latent, 1, 7), latent)
    conv("decoder.model.1", (width, latent, 1), width)
    if settings["attn_window_size"]:
        attention(f"decoder.model.{at}", width)
        at += 1
    for stride in settings["decoder_rates"]:
        half = width // 2
        block = f"decoder.model.{at}.block"
        snake(f"{block}.0", width)
        conv(f"{block}.1", (width, half, 2 * stride), half)
        conv(f"{block}.2.linear", (half, half, 1))
        for n in range(3):
            unit(f"{block}.{3 + n}", half)
        width, at = half, at + 1
    snake(f"decoder.model.{at}", width)
    conv(f"decoder.model.{at + 1}", (1, width, 7), 1)
    tensors[f"decoder.model.{at + 1}.parametrizations.weight.original0"] *= 0.1  # not all of it at the tanh's ends
    return tensors


FAMILIES = ("encodec_24", "encodec_48", "dac_16", "dac_44", "mimi", "snac_24", "snac_44", "lyra")
TRANSFORMERS = {
    "encodec_24": encodec_24,
    "encodec_48": encodec_48,
    "dac_16": lambda: dac([2, 4, 5, 8], 16000),
    "dac_44": lambda: dac([2, 4, 8, 8], 44100),
    "mimi": mimi,
}


def save(family, folder):
    """Writes a checkpoint in its project's layout."""
    folder.mkdir(parents=True, exist_ok=True)
    if family in TRANSFORMERS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TRANSFORMERS[family]().save_pretrained(folder)
    elif family == "lyra":
        from codec.adapters.lyra import import_lyra

        import_lyra(LYRA, folder)
    else:
        settings = {**SNAC_SIZES, **SNAC[family], "latent_dim": None, "noise": True, "depthwise": True}
        (folder / "config.json").write_text(json.dumps(settings))
        save_file(snac_tensors(settings), folder / "model.safetensors")
    return folder
