"""Batched decoding on a CPU against other codecs and conventional files; writes decode.md beside this file.

    python benchmarks/decode.py [--peers FOLDER] [--quick]

A batch is 32 excerpts of 2 s. Ours begins with the packed bytes of the store, so unpacking and context count. The
calls of all cases alternate within each round and the median of the rounds counts: CPU seconds for one thread, wall
time for two. Other codecs have random weights at their published configurations and decode ready codes (Vocos: mels);
they are measured on fewer rows where 32 would take too long, and those that are measured are those that can be
imported, from FOLDER too.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS, SECONDS = 32, 2
DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
FORMATS = ("flac", "mp3", "opus")
PEERS = ("encodec", "descript-audio-codec", "snac", "moshi", "vocos")


class Case:
    """A call, the seconds of audio that it gives, and what its correctness column says."""

    def __init__(self, name: str, call: Callable[[], Any], seconds: float, note: str = "–") -> None:
        self.name, self.call, self.seconds, self.note = name, call, seconds, note


def measured(cases: list[Case], rounds: int, clock: Callable[[], float], budget: float) -> dict[str, dict[str, Any]]:
    """× real time of each: the median of alternating rounds. Slow cases get fewer of them."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    started = time.monotonic()
    for case in cases:
        case.call()
    for n in range(rounds):
        if n >= 2 and time.monotonic() - started > budget:
            break
        for case in cases:
            begun = clock()
            case.call()
            times[case.name].append(clock() - begun)
    return {
        case.name: {"speed": case.seconds / statistics.median(times[case.name]), "note": case.note} for case in cases
    }


# --- ours


def a_store(folder: Path, codec: Any) -> Any:
    """What encoding real speech gives: the clips in a loop, 16 items of a minute."""
    from codec import TokenStore, TokenWriter
    from codec.audio import find_audio, read_audio

    clips = [p for _, p in find_audio([DATA]) if p.name.startswith("speech")]
    wave = torch.cat([read_audio(p, sample_rate=16000, mono=True)[0] for p in clips], 1)
    codes = codec.encode(wave[None]).codes[0].numpy()
    looped = np.tile(codes, (1, -(-3600 // codes.shape[1])))
    with TokenWriter(folder / "x.ctok", codec.spec) as writer:
        for i in range(16):
            writer.add(f"i{i}", looped[:, 37 * i : 37 * i + 3000], num_samples=3000 * codec.spec.hop_length)
    return TokenStore(folder / "x.ctok")


def our_cases(folder: Path) -> tuple[list[Case], dict[str, Any]]:
    from codec import BatchDecoder, Excerpt, MelSpectrogram, Tokens, load_codec

    codec, mel = load_codec("speech_16k"), MelSpectrogram("codec")
    store = a_store(folder, codec)
    rng = random.Random(0)
    frames = SECONDS * 50
    excerpts = [Excerpt(f"i{i % 16}", rng.randrange(3000 - frames), frames) for i in range(ROWS)]
    cases, facts = [], {}
    whole = {key: torch.from_numpy(store.read(key)) for key in {e.key for e in excerpts[:4]}}
    for dtype, label in ((torch.float32, ""), (torch.bfloat16, ", bf16")):
        for name, options in (
            ("tokens → wave", {"output": "wave"}),
            ("tokens → mel (head)", {"output": "mel"}),
            ("tokens → wave → mel", {"output": "mel", "features": mel}),
        ):
            decoder = BatchDecoder(codec, dtype=dtype, **options)
            batch = Tokens(store, context=decoder.context).get(excerpts)
            if not label:
                facts[f"frames decoded per frame asked, {name}"] = float(
                    batch.packed.lengths.sum() / batch.lengths.sum()
                )
            decoded = decoder.decode(batch).data
            worst = 0.0
            for row, (key, start, length) in enumerate(excerpts[:4]):
                if "features" in options:
                    expected = mel(codec.decode(whole[key]))[0]
                else:
                    expected = (codec.decode if name.endswith("wave") else codec.decode_mel)(whole[key])[0]
                unit = expected.shape[-1] // 3000
                expected = expected[:, start * unit : (start + length) * unit]
                worst = max(worst, (decoded[row] - expected).abs().max().item())
            cases.append(
                Case(f"codec: {name}{label}", lambda d=decoder, b=batch: d.decode(b), ROWS * SECONDS, f"{worst:.0e}")
            )
    decoder = BatchDecoder(codec, "wave", graphs=True)
    batch = Tokens(store).get(excerpts)
    cases.append(Case("codec: tokens → wave, static shapes", lambda: decoder.decode(batch), ROWS * SECONDS))
    return cases, facts | shares(codec, mel, Tokens(store), excerpts)


def shares(codec: Any, mel: Any, tokens: Any, excerpts: Any) -> dict[str, Any]:
    """Milliseconds of each step of a batch, in CPU time of this thread."""
    from codec.decode.transfer import unpack_codes, unpack_on_host
    from codec.nn.spectral import frame_mask

    batch = tokens.get(excerpts)
    codes = unpack_on_host(batch.packed, None)
    lengths = torch.from_numpy(batch.packed.lengths)
    mask = None if bool((lengths == codes.shape[2]).all()) else frame_mask(lengths, codes.shape[2])
    with torch.no_grad():
        quantized = codec.quantizer.decode(codes)
        trunk = codec.decoder.trunk(quantized, mask)
        wave = codec.decoder.wave_head(trunk, mask)[..., : SECONDS * 16000].contiguous()
        steps = {
            "read the excerpts": lambda: tokens.get(excerpts),
            "unpack (numpy, what the CPU takes)": lambda: unpack_on_host(batch.packed, None),
            "unpack (torch, what a device takes)": lambda: unpack_codes(batch.packed),
            "look up all codebooks": lambda: codec.quantizer.decode(codes),
            "trunk, shared by both heads": lambda: codec.decoder.trunk(quantized, mask),
            "wave head": lambda: codec.decoder.wave_head(trunk, mask),
            "mel head": lambda: codec.decoder.mel_head(trunk, mask),
            "mel of the wave": lambda: mel(wave),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(5):
            for name, call in steps.items():
                started = time.thread_time()
                call()
                times[name].append(time.thread_time() - started)
    return {"ms": {name: statistics.median(some) * 1e3 for name, some in times.items()}}


# --- conventional files


def file_cases(folder: Path) -> list[Case]:
    from codec import AudioFiles, Excerpt, MelSpectrogram, read_audio, write_audio

    mel = MelSpectrogram("codec")
    clip, rate = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav")
    wave = clip.repeat(1, 3)[:, : 10 * rate]
    cases = []
    for suffix in FORMATS:
        write_audio(folder / f"x.{suffix}", wave, rate)
        files = AudioFiles({f"{i}": folder / f"x.{suffix}" for i in range(ROWS)}, sample_rate=rate)
        rng = random.Random(0)
        excerpts = [Excerpt(f"{i}", rng.randrange(8 * rate), SECONDS * rate) for i in range(ROWS)]
        cases.append(Case(f"{suffix} → wave → mel", lambda f=files, e=excerpts: mel(f.get(e)), ROWS * SECONDS))
    return cases


# --- other codecs


def peer_cases() -> list[Case]:
    cases = []

    def add(make: Callable[[], Case]) -> None:
        try:
            with torch.no_grad():
                cases.append(make())
        except Exception as error:  # one that can't be had is one less
            print(f"left out: {error!r}", file=sys.stderr)

    def codes(rows: int, k: int, frames: int, size: int = 1024) -> torch.Tensor:
        return torch.randint(0, size, (rows, k, frames))

    def encodec() -> Case:
        from encodec import EncodecModel

        model = EncodecModel.encodec_model_24khz(pretrained=False).eval()
        tokens = codes(4, 8, 75 * SECONDS)
        return Case("EnCodec 24 kHz, 6 kbps", lambda: model.decode([(tokens, None)]), 4 * SECONDS)

    def dac() -> Case:
        import dac as package

        model = package.DAC(
            encoder_rates=[2, 4, 5, 8], decoder_rates=[8, 5, 4, 2], n_codebooks=12, sample_rate=16000
        ).eval()
        tokens = codes(1, 12, 50 * SECONDS)
        return Case("DAC 16 kHz", lambda: model.decode(model.quantizer.from_codes(tokens)[0]), SECONDS)

    def dac_transformers() -> Case:
        from transformers import DacConfig, DacModel

        config = DacConfig(
            downsampling_ratios=[2, 4, 5, 8], upsampling_ratios=[8, 5, 4, 2], n_codebooks=12, sampling_rate=16000
        )
        model = DacModel(config).eval()
        tokens = codes(1, 12, 50 * SECONDS)
        return Case("DAC 16 kHz", lambda: model.decode(audio_codes=tokens), SECONDS)

    def snac() -> Case:
        from snac import SNAC

        model = SNAC(
            sampling_rate=24000, encoder_dim=48, encoder_rates=[2, 4, 8, 8], decoder_dim=1024,
            decoder_rates=[8, 8, 4, 2], attn_window_size=None, codebook_size=4096, codebook_dim=8,
            vq_strides=[4, 2, 1], noise=True, depthwise=True,
        ).eval()  # fmt: skip
        frames = 96
        tokens = [torch.randint(0, 4096, (4, frames // stride)) for stride in (4, 2, 1)]
        return Case("SNAC 24 kHz", lambda: model.decode(tokens), 4 * frames * 512 / 24000)

    def mimi() -> Case:
        try:
            from moshi.models import loaders

            model = loaders.get_mimi(None, device="cpu")
            model.set_num_codebooks(8)
        except Exception:
            from transformers import MimiConfig, MimiModel

            plain = MimiModel(MimiConfig()).eval()
            tokens = codes(4, 8, 25, 2048)
            return Case("Mimi 24 kHz, 1.1 kbps", lambda: plain.decode(tokens), 4 * 25 / 12.5)
        tokens = codes(4, 8, 25, 2048)
        return Case("Mimi 24 kHz, 1.1 kbps", lambda: model.eval().decode(tokens), 4 * 25 / 12.5)

    def vocos() -> Case:
        from vocos.heads import ISTFTHead
        from vocos.models import VocosBackbone

        backbone = VocosBackbone(input_channels=100, dim=512, intermediate_dim=1536, num_layers=8).eval()
        head = ISTFTHead(dim=512, n_fft=1024, hop_length=256, padding="center").eval()
        mel = torch.randn(8, 100, 188)
        return Case("Vocos 24 kHz, from mel", lambda: head(backbone(mel)), 8 * 188 * 256 / 24000)

    for make in (encodec, dac, snac, mimi, vocos):
        add(make)
    if not any(case.name.startswith("DAC") for case in cases):
        add(dac_transformers)
    return cases


# --- the report


def task(threads: int, quick: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        cases, facts = our_cases(Path(name))
        cases += file_cases(Path(name)) + peer_cases()
        clock = time.process_time if threads == 1 else time.perf_counter
        results = measured(cases, 2 if quick else 7, clock, 30 if quick else 110)
    print(json.dumps({"results": results, "facts": facts}))


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def in_process(threads: int, arguments: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--threads", str(threads), *(["--quick"] if arguments.quick else [])]
    command += ["--peers", arguments.peers] if arguments.peers else []
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    sys.stderr.write("".join(f"{line}\n" for line in done.stderr.splitlines() if line.startswith("left out")))
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with packages of peers")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).with_suffix(".md"))
    arguments = parser.parse_args()
    if arguments.peers:
        # After the environment's own packages, so that codec runs with what it is installed with.
        sys.path.append(arguments.peers)
    if arguments.threads:
        task(arguments.threads, arguments.quick)
        return
    started, load = time.monotonic(), os.getloadavg()[0]
    one, two = (in_process(threads, arguments) for threads in (1, 2))
    wave = one["results"]["codec: tokens → wave"]["speed"]
    rows = []
    for name, first in one["results"].items():
        second = two["results"].get(name)
        speeds = f"{first['speed']:,.1f}", "–" if second is None else f"{second['speed']:,.1f}"
        rows.append([name, *speeds, f"{wave / first['speed']:.2f}", first["note"]])
    goals = verdicts(one["results"])
    facts = one["facts"]
    overhead = [[name.split(", ")[1], f"{value:.3f}"] for name, value in facts.items() if name.startswith("frames")]
    total = sum(facts["ms"][name] for name in ("look up all codebooks", "trunk, shared by both heads", "wave head"))
    steps = [[name, f"{value:.2f}", f"{value / total:.1%}"] for name, value in facts["ms"].items()]
    processor = next(
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    sys.path += [arguments.peers] if arguments.peers else []
    versions = [f"torch {torch.__version__}"]
    for package in PEERS:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} absent")
    arguments.output.write_text(
        "# Batched decoding on a CPU: measured\n\n"
        f"Written by `python benchmarks/decode.py` on {date.today()} in {time.monotonic() - started:.0f} s: "
        f"{processor}, load {load:.1f} at the start, {', '.join(versions)}.\n\n"
        f"Batches of {ROWS} × {SECONDS} s, × real time (seconds of audio per second): CPU time of one thread, wall "
        "time of two. Ours starts from packed bytes and decodes the context too. Other codecs have random weights at "
        "their published configurations. Deviation: of four excerpts from that slice of the whole decoded item in "
        "float32, waves in full scale, mels in natural logarithms (the largest difference of any bin).\n\n"
        + table(["job", "1 thread", "2 threads", "codec's wave / this", "max deviation"], rows)
        + "\n## Goals\n\n"
        + table(["goal", "measured", "reached"], goals)
        + "\n## Context\n\n"
        + table([f"frames decoded per frame asked, excerpts of {SECONDS} s", ""], overhead)
        + "\n## Where the time goes (one batch, one thread)\n\n"
        + table(["step", "ms", "of lookup, trunk and wave head"], steps)
    )
    print(arguments.output.read_text())


def verdicts(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    speed = {name: result["speed"] for name, result in results.items()}
    ours = {name.removeprefix("codec: "): value for name, value in speed.items() if name.startswith("codec: ")}
    rows = []

    def add(goal: str, least: float, top: float, bottom: float | None) -> None:
        if bottom:
            rows.append([f"{goal} ≥ {least:g} ×", f"{top / bottom:.2f} ×", "yes" if top / bottom >= least else "no"])

    for label in ("", ", bf16"):
        add(f"wave{label} / EnCodec 24 kHz", 15, ours[f"tokens → wave{label}"], speed.get("EnCodec 24 kHz, 6 kbps"))
        add(f"wave{label} / Vocos", 4, ours[f"tokens → wave{label}"], speed.get("Vocos 24 kHz, from mel"))
        add(f"mel head{label} / wave → mel{label}", 1.5, ours[f"tokens → mel (head){label}"],
            ours[f"tokens → wave → mel{label}"])  # fmt: skip
        for name in ("mp3", "opus"):
            add(f"mel head{label} / {name} → mel", 1, ours[f"tokens → mel (head){label}"],
                speed.get(f"{name} → wave → mel"))  # fmt: skip
    return rows


if __name__ == "__main__":
    main()
