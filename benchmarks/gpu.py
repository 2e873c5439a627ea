"""Batched decoding on one device, written as Markdown.

    bash benchmarks/gpu.sh                      # on a machine with a GPU
    python benchmarks/gpu.py --device cpu       # the same, small, to try the script

Needs torch, numpy, einops and safetensors only. Every speed has the largest deviation from the float32 CPU result on
the same tokens beside it; a speed without it means nothing.
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
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from codec import BatchDecoder, Excerpt, MelSpectrogram, RandomExcerpts, Tokens, TokenStore, TokenWriter, load_codec
from codec.decode import unpack_codes

SECONDS = 2
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STARTED = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def drain(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(call: Callable[[], object], device: torch.device, seconds: float = 1.0) -> float:
    """Median seconds of a call, the device drained before and after."""
    for _ in range(3):
        call()
    drain(device)
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 50):
        drain(device)
        started = time.perf_counter()
        call()
        drain(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def sustained(call: Callable[[], object], device: torch.device, seconds: float = 1.0) -> float:
    """Seconds per call of many in a row, drained now and then: launches are hidden where they can be."""
    call()
    drain(device)
    started = time.perf_counter()
    count = 0
    while count < 3 or time.perf_counter() - started < seconds:
        call()
        count += 1
        if count % 16 == 0:
            drain(device)
    drain(device)
    return (time.perf_counter() - started) / count


def make_store(path: Path, codec: Any) -> TokenStore:
    """64 items of a minute, random codes."""
    rng = np.random.default_rng(0)
    with TokenWriter(path, codec.spec) as writer:
        for item in range(64):
            codes = rng.integers(0, codec.spec.codebook_size, (codec.spec.n_quantizers, 3000))
            writer.add(f"item{item}", codes, num_samples=3000 * codec.spec.hop_length)
    return TokenStore(path)


def excerpts(count: int) -> list[Excerpt]:
    frames = SECONDS * 50
    return [Excerpt(f"item{i % 64}", 137 * i % (3000 - frames), frames) for i in range(count)]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def decoding(codec: Any, store: TokenStore, device: torch.device, batches: list[int], budget: float) -> list[str]:
    mel = MelSpectrogram("codec")
    jobs: dict[str, dict[str, Any]] = {
        "wave": {"output": "wave"},
        "mel (head)": {"output": "mel"},
        "wave → mel": {"output": "mel", "features": mel},
    }
    rows = []
    for name, options in jobs.items():
        reference = BatchDecoder(codec, **options)
        tokens = Tokens(store, context=reference.context)
        some = tokens.get(excerpts(4))
        expected = reference.decode(some).data
        for dtype_name, dtype in DTYPES.items():
            for graphs in (False, True):
                decoder = BatchDecoder(codec, device=device, dtype=dtype, graphs=graphs, **options)
                worst = (decoder.decode(some).data.cpu() - expected).abs().max().item()
                for count in batches:
                    batch = tokens.get(excerpts(count))
                    alone = timed(lambda d=decoder, b=batch: d.decode(b), device, budget)
                    row = sustained(lambda d=decoder, b=batch: d.decode(b), device, budget)
                    decoder.check()
                    speeds = [f"{count * SECONDS / t:,.0f}" for t in (alone, row)]
                    graph = "on" if graphs else "off"
                    rows.append([name, dtype_name, graph, str(count), f"{alone * 1e3:.3f}", *speeds, f"{worst:.1e}"])
                    say(" ".join(rows[-1]))
                del decoder
                if device.type == "cuda":
                    torch.cuda.empty_cache()
    head = ["job", "dtype", "graphs", "batch", "ms alone", "× real time alone", "in a row", "max deviation"]
    return table(head, rows)


def floor(codec: Any, device: torch.device) -> list[str]:
    codec = BatchDecoder(codec, device=device).codec
    codes = torch.zeros(1, codec.spec.n_quantizers, 500, dtype=torch.int64, device=device)
    rows = []
    for output in ("wave", "mel"):
        with FlopCounterMode(display=False) as counter:
            codec.decode_static(codes, output=output)
        flops = counter.get_total_flops() / 10
        rows.append([output, f"{flops / 1e9:.3f}", f"{1e15 / flops:,.0f}"])
    head = ["output", "GFLOP of matrix products per second of audio", "× real time at 10^15 FLOP/s"]
    return table(head, rows)


def unpacking(store: TokenStore, device: torch.device, batches: list[int], budget: float) -> list[str]:
    rows = []
    for count in batches:
        packed = Tokens(store).get(excerpts(count)).packed
        wrong = int((unpack_codes(packed, device).cpu().numpy() != packed.unpack()[0]).sum())
        seconds = timed(lambda p=packed: unpack_codes(p, device), device, budget)
        speed = f"{count * SECONDS / seconds:,.0f}"
        rows.append([str(count), f"{packed.data.nbytes}", f"{seconds * 1e3:.3f}", speed, str(wrong)])
    return table(["batch", "bytes", "ms, copies included", "× real time", "codes unlike numpy's"], rows)


def latency(device: torch.device, budget: float) -> list[str]:
    rows = []
    mel = MelSpectrogram("realtime").to(device)
    wave = torch.randn(mel.settings.sample_rate, generator=torch.Generator().manual_seed(0)) * 0.1
    expected = MelSpectrogram("realtime")(wave)
    there = wave.to(device)
    graphed = mel.graphed()
    for name, call in (
        ("module", lambda: mel(there)),
        ("graphed", lambda: graphed(there)),
        ("graphed, wave on the host", lambda: graphed(wave) if device.type == "cuda" else graphed(there)),
    ):
        worst = (call().cpu() - expected).abs().max().item()
        rows.append([name, f"{timed(call, device, budget) * 1e6:,.0f}", f"{worst:.1e}"])
    return table(["mel of 1 s (realtime preset)", "µs, device drained", "max deviation"], rows)


def pipeline(codec: Any, path: Path, device: torch.device, *, size: int, workers: int, seconds: float) -> list[str]:
    rows = []
    for output in ("mel", "wave"):
        decoder = BatchDecoder(codec, output, device=device, dtype=torch.bfloat16)
        draws = RandomExcerpts({"x": Tokens(path)}, SECONDS, batch_size=size, seed=0)
        loader = draws.loader(num_batches=100_000, num_workers=workers)
        count, started = 0, 0.0
        batch: dict[str, Any] = {}
        for batch in decoder(loader):  # noqa: B007
            count += 1
            if count == 10:
                drain(device)
                started = time.perf_counter()
            if count > 10 and count % 8 == 0 and time.perf_counter() - started > seconds:
                break
        drain(device)
        elapsed = time.perf_counter() - started
        decoder.check()
        shape = "×".join(map(str, batch["x"].data.shape))
        speed = (count - 10) * size * SECONDS / elapsed
        rows.append([output, str(workers), shape, f"{speed:,.0f}", str(len(decoder.shapes))])
        say(" ".join(rows[-1]))
    return table(["output, bf16", "workers", "batch", "× real time, sustained", "shapes"], rows)


class Student(nn.Module):
    """A transformer on mels, as one trains on audio: 12 layers of 512."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Linear(160, 512)
        layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True, dropout=0)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(512, 100)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        pairs = mel.transpose(1, 2).reshape(len(mel), -1, 160)
        return self.head(self.body(self.embed(pairs)).mean(1))


def training(codec: Any, store: TokenStore, device: torch.device, size: int, budget: float) -> list[str]:
    model = Student(12 if device.type == "cuda" else 1).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    target = torch.zeros(size, dtype=torch.int64, device=device)
    batch = Tokens(store).get(excerpts(size))
    rows = []

    def step(mel: torch.Tensor) -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(mel), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    decoder = BatchDecoder(codec, "mel", device=device, dtype=torch.bfloat16)
    mel = decoder.decode(batch).data
    ready = sustained(lambda: step(mel), device, budget)
    decoded = sustained(lambda: step(decoder.decode(batch).data), device, budget)
    rows.append([str(size), f"{ready * 1e3:.2f}", f"{decoded * 1e3:.2f}", f"{1 - ready / decoded:.1%}"])
    return table(["batch", "ms per step, mels ready", "with decoding (mel head, bf16)", "share of decoding"], rows)


def compiled(codec: Any, device: torch.device, size: int, budget: float) -> list[str]:
    """Whether torch.compile pays on top of graphs: the network alone, bf16."""
    rows = []
    decoder = BatchDecoder(codec, device=device, dtype=torch.bfloat16, graphs=False)
    codes = torch.randint(0, codec.spec.codebook_size, (size, codec.spec.n_quantizers, 120), device=device)
    lengths = torch.full((size,), 120, device=device)
    plain = decoder.codec.decode_static
    for name, call in (
        ("eager", plain),
        ("compiled", torch.compile(plain, dynamic=False)),
        ("compiled, max-autotune", torch.compile(plain, dynamic=False, mode="max-autotune-no-cudagraphs")),
    ):
        try:
            with torch.no_grad():
                started = time.perf_counter()
                expected = plain(codes, lengths)
                worst = (call(codes, lengths) - expected).abs().max().item()
                first = time.perf_counter() - started
                seconds = timed(lambda c=call: c(codes, lengths), device, budget)
            speed = f"{size * 2.4 / seconds:,.0f}"
            rows.append([name, f"{seconds * 1e3:.3f}", speed, f"{first:.0f}", f"{worst:.1e}"])
        except Exception as error:  # a missing compiler is a finding, not a failure
            rows.append([name, "–", "–", "–", type(error).__name__])
        say(" ".join(rows[-1]))
    head = [f"network alone, {size} × 2.4 s", "ms", "× real time", "first call, s", "deviation from eager"]
    return table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--codec", default="speech_16k")
    parser.add_argument("--seconds", type=float, default=360, help="after which remaining parts are left out")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    large = device.type == "cuda"
    batches, budget = ([32, 256, 2048], 0.25) if large else ([2], 0.01)
    name = torch.cuda.get_device_name(device) if large else platform.processor() or platform.machine()
    lines = [
        "# Decoding on one device",
        "",
        f"{datetime.date.today()}, {name}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{arguments.codec}, excerpts of {SECONDS} s with their context, packed bytes on the host to result on the "
        "device. Deviations are the largest, from float32 on the CPU: waves in full scale, mels in natural logarithms.",
        "",
    ]
    codec = load_codec(arguments.codec)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.ctok"
        store = make_store(path, codec)
        size = 256 if large else 4
        parts: list[tuple[str, Callable[[], list[str]]]] = [
            ("Packed bytes to waves and mels", lambda: decoding(codec, store, device, batches, budget)),
            ("Loader to device", lambda: pipeline(
                codec, path, device, size=size, workers=8 if large else 1, seconds=8 if large else 1)),
            ("Unpacking alone", lambda: unpacking(store, device, batches, budget)),
            ("Latency of features", lambda: latency(device, budget)),
            ("A training step", lambda: training(codec, store, device, size, budget * 4)),
            ("What the network must compute", lambda: floor(codec, device)),
            ("torch.compile", lambda: compiled(codec, device, size, budget) if large else []),
        ]  # fmt: skip
        for title, part in parts:
            if time.monotonic() - STARTED > arguments.seconds:
                lines += [f"## {title}", "", f"Left out: {arguments.seconds:g} s were over.", ""]
                continue
            say(title)
            try:
                lines += [f"## {title}", "", *part()]
            except Exception as error:  # the other parts are worth having
                lines += [f"failed: {error!r}", ""]
                say(lines[-2])
    text = "\n".join(lines)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    if "\nfailed: " in text:
        raise SystemExit("some parts failed")


if __name__ == "__main__":
    main()
