"""Batched decoding and encoding on one device, written as Markdown.

    bash benchmarks/gpu.sh                      # on a machine with a GPU
    python benchmarks/gpu.py --device cpu       # the same, small, to try the script

Needs torch, numpy, einops and safetensors only. Every row carries the largest deviation from the float32 CPU result
on the same tokens; a speed without it means nothing.
"""

from __future__ import annotations

import argparse
import datetime
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from codec import BatchDecoder, Excerpt, Tokens, TokenStore, TokenWriter, load_codec
from codec.decode import unpack_codes

SECONDS = 2


def timed(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median seconds of a call, the device drained before and after."""

    def drain() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(2):
        call()
    seconds = []
    for _ in range(rounds):
        drain()
        started = time.perf_counter()
        call()
        drain()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def make_store(path: Path, codec) -> TokenStore:
    """64 items of a minute, random codes."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, codec.spec) as writer:
        for item in range(64):
            codes = rng.integers(0, codec.spec.codebook_size, (codec.spec.n_quantizers, 3000))
            writer.add(f"item{item}", codes, num_samples=3000 * codec.spec.hop_length)
    return TokenStore(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=None, help="excerpts per batch")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    batches = arguments.batches or ([32, 256, 2048] if device.type == "cuda" else [8])
    rounds = arguments.rounds if device.type == "cuda" else 3
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    lines = [
        "# Decoding and encoding on one device",
        "",
        f"{datetime.date.today()}, {name}, torch {torch.__version__}; excerpts of {SECONDS} s with "
        f"their context, median of {rounds} rounds, packed bytes on the host to result on the device.",
        "",
        "| job | weights | batch | ms | × real time | max deviation from the CPU in float32 |",
        "|---|---|---|---|---|---|",
    ]
    reference = load_codec("speech_16k")
    frames = int(SECONDS * reference.spec.frame_rate)
    rng = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        store = make_store(Path(folder, "x.ctok"), reference)
        tokens = Tokens(store)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            codec = load_codec("speech_16k", device=device, dtype=dtype)
            for size in batches:
                excerpts = [Excerpt(f"item{rng.integers(64)}", int(rng.integers(2800)), frames) for _ in range(size)]
                batch, some = tokens.get(excerpts), tokens.get(excerpts[:8])
                jobs: dict[str, tuple[Callable[[], object], float]] = {}
                for output in ("wave", "mel"):
                    decoder = BatchDecoder(codec, output)
                    ours = decoder.decode(some).data.cpu()
                    theirs = BatchDecoder(reference, output).decode(some).data
                    deviation = (ours - theirs).abs().max().item()
                    jobs[f"tokens → {output}"] = (lambda decoder=decoder, batch=batch: decoder.decode(batch), deviation)
                if dtype == torch.float32:
                    unequal = (unpack_codes(some.packed, device).cpu() != unpack_codes(some.packed)).sum().item()
                    jobs["unpack bits"] = (lambda batch=batch: unpack_codes(batch.packed, device), float(unequal))
                wave = torch.randn(size, 1, SECONDS * 16000, device=device) * 0.1
                flips = codec.encode(wave[:8]).codes.cpu() != reference.encode(wave[:8].cpu()).codes
                jobs["wave → codes (deviation: share of codes)"] = (
                    lambda wave=wave, codec=codec: codec.encode(wave),
                    flips.float().mean().item(),
                )
                for job, (call, deviation) in jobs.items():
                    seconds = timed(call, device, rounds)
                    speed = size * SECONDS / seconds
                    precision = str(dtype).removeprefix("torch.")
                    lines.append(
                        f"| {job} | {precision} | {size} | {seconds * 1e3:.2f} | {speed:,.0f} | {deviation:.2g} |"
                    )
                    print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
