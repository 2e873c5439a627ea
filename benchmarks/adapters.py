"""Other projects' codecs through this project's door: speed beside their own loop, warm-up, agreement.

    python benchmarks/adapters.py [--quick] [--threads 2] [--device cpu] [--write benchmarks/adapters.md]

Weights are random (there is no network here), geometry is the published one; random weights cost what trained ones
cost. "theirs" is what a user of the original writes for a ragged corpus when he wants what single items give: a loop
over the items. Each measurement is the median of interleaved repetitions.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from codec import load_codec

LYRA = Path(os.environ.get("CODEC_LYRA_DIR") or Path(__file__).parents[2] / "shared" / "lyra")


def models():
    from transformers import DacConfig, DacModel, EncodecConfig, EncodecModel, MimiConfig, MimiModel

    chunked = {"sampling_rate": 48000, "audio_channels": 2, "normalize": True, "chunk_length_s": 1.0, "overlap": 0.01}
    group = {"norm_type": "time_group_norm", "use_causal_conv": False, "target_bandwidths": [3.0, 6.0, 12.0, 24.0]}
    return {
        "encodec_24khz": (EncodecModel, EncodecConfig()),
        "encodec_48khz": (EncodecModel, EncodecConfig(**chunked, **group)),
        "dac_16khz": (DacModel, DacConfig(downsampling_ratios=[2, 4, 5, 8], n_codebooks=12, sampling_rate=16000)),
        "dac_44khz": (DacModel, DacConfig(sampling_rate=44100)),
        "mimi": (MimiModel, MimiConfig()),
    }


def built(name, folder):
    """The original and the adapter, of the same random weights."""
    from lookalikes import stirred

    model_class, config = models()[name]
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for key, tensor in model.named_buffers():
            if key.endswith("embed_sum"):
                tensor.normal_()
    if name != "mimi":
        model = stirred(model)
    model.save_pretrained(folder / name)
    return model_class.from_pretrained(folder / name).eval(), load_codec(folder / name)


def their_encode(name, model, wave):
    if name.startswith("dac"):
        hop = model.config.hop_length
        return model.encode(torch.nn.functional.pad(wave, (0, -wave.shape[-1] % hop))).audio_codes
    if name.startswith("encodec"):
        return model.encode(wave, bandwidth=model.config.target_bandwidths[-1])
    return model.encode(wave).audio_codes


def their_decode(name, model, encoded):
    if name.startswith("dac"):
        return model.decode(audio_codes=encoded)[0]
    if name.startswith("encodec"):
        return model.decode(
            encoded.audio_codes, encoded.audio_scales, last_frame_pad_length=encoded.last_frame_pad_length or 0
        )[0]
    return model.decode(encoded)[0]


def settle(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(device, run, *arguments):
    """On a CPU the time that this process computed, which other processes don't lengthen as they do wall time."""
    now = time.perf_counter if device.type == "cuda" else time.process_time
    settle(device)
    started = now()
    result = run(*arguments)
    settle(device)
    return now() - started, result


@torch.no_grad()
def measure(name, folder, device, num_items, longest, repeats):
    model, codec = built(name, folder)
    model, codec = model.to(device), codec.to(device)
    rate = codec.spec.sample_rate
    generator = torch.Generator().manual_seed(1)
    seconds = torch.rand(num_items, generator=generator) * (longest - 0.5) + 0.5
    lengths = (seconds * rate).long()
    waves = [torch.randn(codec.spec.channels, int(n), generator=generator) * 0.1 for n in lengths]
    batch = torch.zeros(num_items, codec.spec.channels, int(lengths.max()))
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[1]] = wave
    batch, lengths = batch.to(device), lengths.to(device)
    waves = [wave.to(device)[None] for wave in waves]
    audio = float(lengths.sum()) / rate
    times = {"theirs encode": [], "ours encode": [], "theirs decode": [], "ours decode": []}
    codec.encode(waves[0])
    their_encode(name, model, waves[0])
    for _ in range(repeats):
        a, theirs = clock(device, lambda: [their_encode(name, model, wave) for wave in waves])
        b, ours = clock(device, codec.encode, batch, lengths)
        c, their_waves = clock(device, lambda many: [their_decode(name, model, one) for one in many], theirs)
        d, our_waves = clock(device, codec.decode, ours)
        for key, value in zip(times, (a, b, c, d), strict=True):
            times[key].append(value)
    same, total, error, scale = 0, 0, 0.0, 0.0
    for n, encoded in enumerate(theirs):
        if name == "encodec_48khz":
            codes = encoded.audio_codes
            frames = int(ours.lengths[n])
            for chunk in range(len(codes)):
                part = ours.codes[n : n + 1, :, chunk * codec.period : min(frames, (chunk + 1) * codec.period)]
                steps, count, _ = codec.unpack(part)
                same += int((steps[..., : int(count)] == codes[chunk][..., : int(count)]).sum())
                total += steps[..., : int(count)].numel()
        else:
            codes = encoded.audio_codes[0] if name.startswith("encodec") else encoded
            same += int((ours.codes[n : n + 1, :, : codes.shape[-1]] == codes).sum())
            total += codes.numel()
        their_wave = their_waves[n].reshape(codec.spec.channels, -1)
        count = min(their_wave.shape[-1], int(lengths[n]))
        error = max(error, float((our_waves[n, :, :count] - their_wave[:, :count]).abs().max()))
        scale = max(scale, float(their_wave.abs().max()))
    middle = {key: audio / statistics.median(values) for key, values in times.items()}
    return {"name": name, "agree": same / total, "error": error / scale, **middle}


@torch.no_grad()
def warm_up(codec, seconds):
    """Frames before an excerpt until its error stays under -60 dB of the signal, decoded from codes of noise."""
    hop = codec.spec.hop_length
    wave = torch.randn(1, codec.spec.channels, int(seconds * codec.spec.sample_rate)) * 0.1
    codes = codec.encode(wave).codes
    whole = codec.decode(codes)
    total = codes.shape[-1]
    for frames in (0, 1, 2, 3, 5, 8, 12, 20, 30, 50, 75, 100, 150, 250):
        worst = -200.0
        for at in range(min(250, total // 2), total - 8, max(1, total // 12)):
            first = max(0, at - frames)
            part = codec.decode(codes[..., first : at + 8])[..., (at - first) * hop :]
            exact = whole[..., at * hop : (at + 8) * hop]
            ratio = 10 * torch.log10((part - exact).square().mean() / exact.square().mean() + 1e-20)
            worst = max(worst, float(ratio))
        if worst < -60:
            return frames, worst
    return None, worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--write", type=Path)
    parser.add_argument(
        "--warm-up", metavar="CODEC", help="measure this codec's warm-up (a name that load_codec takes)"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    if arguments.warm_up:
        print(arguments.warm_up, *warm_up(load_codec(arguments.warm_up, device=device), 20))
        return
    is_gpu = device.type == "cuda"
    num_items, longest = (8, 2.0) if arguments.quick else (32, 10.0 if is_gpu else 1.5)
    repeats = 1 if arguments.quick else 3
    rows, warm = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.only or models():
            rounds = 1 if name.startswith("dac") and not is_gpu else repeats  # minutes each on a CPU
            rows.append(measure(name, Path(folder), device, num_items, longest, rounds))
            print(json.dumps(rows[-1]), flush=True)
        for name in ("encodec_24khz", "mimi"):
            if arguments.only is None or name in arguments.only:
                warm[name] = warm_up(built(name, Path(folder))[1].to(device), 6 if name.startswith("encodec") else 24)
                print(name, "warm-up", warm[name], flush=True)
    lines = [
        f"{num_items} items of 0.5 to {longest:g} s; {device}, {arguments.threads} threads; torch {torch.__version__}; "
        f"{platform.machine()}; {date.today()}",
        "",
        "| codec | encode theirs | ours | × | decode theirs | ours | × | codes agree | wave error |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        a, b, c, d = (row[key] for key in ("theirs encode", "ours encode", "theirs decode", "ours decode"))
        lines.append(
            f"| {row['name']} | {a:.1f} | {b:.1f} | {b / a:.2f} | {c:.1f} | {d:.1f} | {d / c:.2f} | "
            f"{100 * row['agree']:.3f} % | {row['error']:.0e} |"
        )
    text = "\n".join(lines)
    print(text)
    if arguments.write:
        arguments.write.write_text(text + "\n")


if __name__ == "__main__":
    main()
