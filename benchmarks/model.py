"""Encoding and decoding beside EnCodec, DAC, SNAC, Vocos and Mimi, streams, and rounding; writes model.md.

    python benchmarks/model.py [--peers FOLDER]              # one thread: the page, 5 minutes of one core
    python benchmarks/model.py [--peers FOLDER] --threads 2  # two threads: renews that section of the page

FOLDER is where `pip install --target FOLDER --no-deps encodec descript-audio-codec snac vocos` put the peers that the
environment itself lacks; those that can't be imported are left out. All have random weights, which cost the same, and
their published configurations. All codecs run in interleaved rounds; the median of three counts: of the CPU time on one
thread, of the elapsed time on two. What takes over 2 s is run once. --quick: one round.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import sys
import time
import types
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from codec import load_codec
from codec.audio import find_audio, read_audio
from codec.model import Codes, SoundStream, SoundStreamConfig, StreamDecoder, StreamEncoder
from codec.nn import linear

DATA = Path(__file__).parents[1] / "tests" / "data"
SECONDS = 2
FLAGSHIP = "spectral, bfloat16"
TWO_THREADS = "## Two threads"
LONG_CALL_SECONDS = 2.0
LOAD = os.getloadavg()[0]
Call = Callable[[], Any]


class Contender:
    """One codec at its rate: `encode(batch)` and `decode(batch)` give calls on `batch` × 2 s."""

    def __init__(self, module: Any, sample_rate: int, encode: Any, decode: Any, batches: tuple[int, ...]) -> None:
        self.module, self.sample_rate, self.batches = module, sample_rate, batches
        self._encode, self._decode = encode, decode

    def wave(self, batch: int, seconds: int = SECONDS) -> Tensor:
        shape = batch, 1, seconds * self.sample_rate
        return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.1

    def encode(self, batch: int) -> Call | None:
        wave = self.wave(batch)
        return None if self._encode is None else lambda: self._encode(wave)

    def decode(self, batch: int, seconds: int = SECONDS) -> Call:
        codes = self._decode[0](batch, seconds)
        return lambda: self._decode[1](codes)


def random_codes(n_quantizers: int, codebook_size: int, frame_rate: float) -> Any:
    def make(batch: int, seconds: int) -> Tensor:
        return torch.randint(codebook_size, (batch, n_quantizers, round(seconds * frame_rate)))

    return make


def ours(dtype: torch.dtype | None = None, **config: Any) -> Contender:
    codec = SoundStream(SoundStreamConfig(**config)).eval().requires_grad_(False)
    if dtype is not None:
        codec.encoder.to(dtype)
        codec.decoder.to(dtype)
    return Contender(codec, 16000, codec.encode, (random_codes(8, 1024, 50), codec.decode), (1, 32))


def encodec_package() -> Contender:
    from encodec import EncodecModel

    model = EncodecModel.encodec_model_24khz(pretrained=False).eval()
    model.set_target_bandwidth(6.0)
    decode = random_codes(8, 1024, 75), lambda codes: model.decode([(codes, None)])
    return Contender(model, 24000, model.encode, decode, (1, 4))


class ToFloat(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def vocos_package(dtype: torch.dtype = torch.float32) -> Contender:
    from vocos.heads import ISTFTHead
    from vocos.models import VocosBackbone

    backbone = VocosBackbone(128, 384, 1152, 8, adanorm_num_embeddings=4)
    head = ISTFTHead(384, 1280, 320, padding="same")
    head.out = torch.nn.Sequential(head.out, ToFloat())  # the inverse transform is float32 in any case
    backbone, head.out[0] = backbone.to(dtype), head.out[0].to(dtype)
    books, bandwidth = torch.randn(8, 1024, 128).to(dtype), torch.tensor([2])

    def decode(codes: Tensor) -> Tensor:
        features = sum(book[codes[:, k]] for k, book in enumerate(books))
        wave: Tensor = head(backbone(features.transpose(1, 2), bandwidth_id=bandwidth))
        return wave

    module = torch.nn.ModuleList([backbone, head]).eval()
    return Contender(module, 24000, None, (random_codes(8, 1024, 75), decode), (1, 4))


def dac_package(folder: str | None) -> Contender:
    # Its own __init__ wants a package for audio files and training, which the model itself doesn't use.
    tools, ml = types.ModuleType("audiotools"), types.ModuleType("audiotools.ml")
    ml.BaseModel = torch.nn.Module
    tools.ml, tools.AudioSignal, tools.STFTParams = ml, object, object
    package = types.ModuleType("dac")
    package.__path__ = [str(Path(p) / "dac") for p in [*sys.path, folder] if p]
    sys.modules |= {"audiotools": tools, "audiotools.ml": ml, "dac": package}
    from dac.model.dac import DAC

    model = DAC(64, [2, 4, 5, 8], None, 1536, [8, 5, 4, 2], 12, 1024, 8, False, 16000).eval()
    decode = random_codes(12, 1024, 50), lambda codes: model.decode(model.quantizer.from_codes(codes)[0])
    return Contender(model, 16000, model.encode, decode, (1,))


def snac_package() -> Contender:
    from snac import SNAC

    model = SNAC(24000, 48, [2, 4, 8, 8], None, 1024, [8, 8, 4, 2], None, 4096, 8, [4, 2, 1]).eval()

    def make(batch: int, seconds: int) -> list[Tensor]:
        frames = -(-seconds * 24000 // 2048)
        return [torch.randint(4096, (batch, frames * n)) for n in (1, 2, 4)]

    return Contender(model, 24000, model.encode, (make, model.decode), (1,))


def encodec_transformers() -> Contender:
    from transformers import EncodecConfig, EncodecModel

    model = EncodecModel(EncodecConfig()).eval()
    decode = random_codes(8, 1024, 75), lambda codes: model.decode(codes[None], [None])
    return Contender(model, 24000, lambda wave: model.encode(wave, bandwidth=6.0), decode, (1, 4))


def dac_transformers() -> Contender:
    from transformers import DacConfig, DacModel

    config = DacConfig(
        encoder_hidden_size=64, downsampling_ratios=[2, 4, 5, 8], decoder_hidden_size=1536,
        upsampling_ratios=[8, 5, 4, 2], n_codebooks=12, sampling_rate=16000,
    )  # fmt: skip
    model = DacModel(config).eval()
    decode = random_codes(12, 1024, 50), lambda codes: model.decode(audio_codes=codes)
    return Contender(model, 16000, model.encode, decode, (1,))


def mimi_transformers() -> Contender:
    from transformers import MimiConfig, MimiModel

    model = MimiModel(MimiConfig()).eval()
    decode = random_codes(8, 2048, 12.5), lambda codes: model.decode(codes)
    return Contender(model, 24000, lambda wave: model.encode(wave, num_quantizers=8), decode, (1, 4))


def halved(contender: Contender) -> Contender:
    """Decoding with bfloat16 weights throughout."""
    return Contender(
        contender.module.to(torch.bfloat16), contender.sample_rate, None, contender._decode, contender.batches
    )


def contenders(folder: str | None) -> dict[str, Contender]:
    seanet = {"body": "seanet"}
    makers: dict[str, Callable[[], Contender]] = {
        "spectral, float32": ours,
        FLAGSHIP: lambda: ours(torch.bfloat16),
        "SEANet 16, float32": lambda: ours(**seanet),
        "SEANet 16, bfloat16": lambda: ours(torch.bfloat16, **seanet),
        "SEANet 32 depthwise, float32": lambda: ours(**seanet, seanet_channels=(32, 32), seanet_depthwise=True),
        "encodec: EnCodec 24k, 6 kbps": encodec_package,
        "transformers: EnCodec 24k, 6 kbps": encodec_transformers,
        "vocos: Vocos on EnCodec tokens": vocos_package,
        "descript-audio-codec: DAC 16k": lambda: dac_package(folder),
        "transformers: DAC 16k": dac_transformers,
        "snac: SNAC 24k": snac_package,
        "transformers: Mimi, 8 codebooks": mimi_transformers,
        "encodec: EnCodec 24k, bfloat16": lambda: halved(encodec_package()),
        "vocos: Vocos, bfloat16": lambda: vocos_package(torch.bfloat16),
        "descript-audio-codec: DAC 16k, bfloat16": lambda: halved(dac_package(folder)),
        "snac: SNAC 24k, bfloat16": lambda: halved(snac_package()),
        "transformers: Mimi, bfloat16": lambda: halved(mimi_transformers()),
    }
    found = {}
    for name, make in makers.items():
        try:
            torch.manual_seed(0)
            found[name] = make()
        except (ImportError, AttributeError) as error:
            print(f"{name} left out: {error}", file=sys.stderr)
    return found


# --- measuring


def median_times(calls: dict[str, Call], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median seconds of each call, in interleaved rounds after one to warm up, which is a long call's only one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    long: set[str] = set()
    for round_ in range(rounds + 1):
        for name, call in calls.items():
            if name in long:
                continue
            start = clock()
            call()
            seconds = clock() - start
            if round_ == 0 and seconds > LONG_CALL_SECONDS:
                long.add(name)
            if round_ or name in long:
                times[name].append(seconds)
    return {name: statistics.median(values) for name, values in times.items()}


def speeds(found: dict[str, Contender], rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """× real time under `name/batch/direction`."""
    calls: dict[str, Call] = {}
    for name, contender in found.items():
        for batch in contender.batches:
            if encode := contender.encode(batch):
                calls[f"{name}/{batch}/encode"] = encode
            calls[f"{name}/{batch}/decode"] = contender.decode(batch)
    medians = median_times(calls, rounds, clock)
    return {key: SECONDS * int(key.split("/")[1]) / seconds for key, seconds in medians.items()}


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in what a codec returns, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Codes):
        return [value.codes]
    values = value.values() if hasattr(value, "values") else value if isinstance(value, list | tuple) else []
    return [tensor for part in values for tensor in tensors_of(part)]


def apart(contender: Contender) -> tuple[float | None, float]:
    """How a row of two comes out otherwise than alone.

    Returns:
        The share of its codes, None without an encoder; and its wave's largest difference over its largest sample, NaN
        where decoding adds noise.
    """
    differing = None
    if contender.encode(1) is not None:
        wave = contender.wave(2)
        both, alone = (
            [t for t in tensors_of(contender._encode(x)) if not t.is_floating_point() and t.ndim > 1]
            for x in (wave, wave[1:])
        )
        # Each has its batch axis elsewhere: the only one that differs.
        pairs = [(a.select(axis_of(a, b), 1), b.select(axis_of(a, b), 0)) for a, b in zip(both, alone, strict=True)]
        differing = sum(int((a != b).sum()) for a, b in pairs) / sum(a.numel() for a, _ in pairs)
    make, decode = contender._decode
    codes = make(2, SECONDS)
    single = [c[1:] for c in codes] if isinstance(codes, list) else codes[1:]
    a, b, again = (max(tensors_of(decode(c)), key=lambda t: t.numel()).float() for c in (codes, single, single))
    deviation = float((a[1] - b[0]).abs().max() / b.abs().max())
    return differing, deviation if torch.equal(b, again) else math.nan


def axis_of(a: Tensor, b: Tensor) -> int:
    """The axis on which two shapes differ."""
    return next(i for i, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n)


def sizes(contender: Contender) -> tuple[float, float | None, float]:
    """Millions of parameters, and 10⁶ multiply-adds per second of audio encoding and decoding."""
    num = sum(t.numel() for t in contender.module.parameters()) / 1e6
    encode, decode = contender.encode(1), contender.decode(1)
    counts: list[float | None] = []
    fused, linear._HAS_FUSED = linear._HAS_FUSED, False
    with torch.backends.mkldnn.flags(enabled=False):
        for call in (encode, decode):
            if call is None:
                counts.append(None)
                continue
            with FlopCounterMode(display=False) as counter:
                call()
            counts.append(counter.get_total_flops() / 2 / SECONDS / 1e6)
    linear._HAS_FUSED = fused
    assert counts[1] is not None
    return num, counts[0], counts[1]


def kernels(rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """× real time of the spectral body, batch 32, with torch's own kernels and with the fused ones."""
    calls: dict[str, Call] = {}
    for dtype in (torch.float32, torch.bfloat16):
        contender = ours(dtype)
        for direction in ("encode", "decode"):
            call = getattr(contender, direction)(32)
            for fused in (False, True):

                def run(call: Call = call, fused: bool = fused) -> None:
                    linear._HAS_FUSED = fused
                    call()
                    linear._HAS_FUSED = True

                calls[f"{str(dtype)[6:]}/{direction}/{'fused' if fused else 'plain'}"] = run
    return {key: SECONDS * 32 / value for key, value in median_times(calls, rounds, clock).items()}


def streams(rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Milliseconds per chunk, stateful and with the context computed again."""
    found = {}
    causal = ours(lookahead=False).module
    for body, codec in (
        ("spectral", load_codec("speech_16k")),
        ("spectral, causal", causal),
        ("SEANet", ours(body="seanet").module),
    ):
        for frames in (1, 5, 50):
            wave = torch.randn(1, 1, frames * 320) * 0.1
            codes = torch.randint(1024, (1, 8, frames))
            pairs = {
                "encode/stateful": (codec.stream_encoder(), wave),
                "encode/again": (StreamEncoder(codec), wave),
                "decode/stateful": (codec.stream_decoder(), codes),
                "decode/again": (StreamDecoder(codec), codes),
            }
            calls = {}
            for name, (stream, piece) in pairs.items():
                for _ in range(-(-60 // frames)):  # past the beginning, where less is computed
                    stream.push(piece)
                calls[name] = lambda stream=stream, piece=piece: stream.push(piece)
            medians = median_times(calls, rounds, clock)
            found |= {f"{body}/{frames}/{name}": seconds * 1000 for name, seconds in medians.items()}
    return found


# --- rounding


def rounding() -> dict[str, Any]:
    """Codes that change with the way of computing, of the shipped checkpoint on the test clips."""
    codec, half = load_codec("speech_16k"), load_codec("speech_16k", dtype=torch.bfloat16)
    waves = [read_audio(path, sample_rate=16000, mono=True)[0] for _, path in find_audio([DATA])]
    lengths = torch.tensor([wave.shape[1] for wave in waves])
    batch = torch.zeros(len(waves), 1, int(lengths.max()))
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[1]] = wave

    def together(codec: Any) -> list[Tensor]:
        out = codec.encode(batch, lengths)
        return [codes[:, :n] for codes, n in zip(out.codes, out.lengths.tolist(), strict=True)]

    def streamed(wave: Tensor) -> Tensor:
        stream = codec.stream_encoder()
        return torch.cat([*(stream.push(part) for part in wave[None].split(1600, 2)), stream.flush()], -1)[0]

    torch.set_num_threads(1)
    single = [codec.encode(wave).codes[0] for wave in waves]
    ways = {"in one batch, 1 thread": together(codec), "in a stream of 100 ms chunks": [streamed(w) for w in waves]}
    torch.set_num_threads(2)
    ways["alone, 2 threads"] = [codec.encode(wave).codes[0] for wave in waves]
    ways["in one batch, 2 threads"] = together(codec)
    linear._HAS_FUSED = False
    ways["alone, without the fused kernels"] = [codec.encode(wave).codes[0] for wave in waves]
    linear._HAS_FUSED = True
    ways["alone, bfloat16 encoder"] = [half.encode(wave).codes[0] for wave in waves]
    ways["in one batch, bfloat16 encoder"] = together(half)
    flips = {}
    for name, codes in ways.items():
        different = [a != b for a, b in zip(single, codes, strict=True)]
        flips[name] = [sum(int(d.sum()) for d in different), sum(int(d[0].sum()) for d in different)]
    exact = [codec.decode(codes) for codes in single]
    rounded = [half.decode(codes) for codes in single]
    error = sum(float((a - b).square().sum()) for a, b in zip(exact, rounded, strict=True))
    power = sum(float(a.square().sum()) for a in exact)
    peak = max(float((a - b).abs().max()) for a, b in zip(exact, rounded, strict=True))
    torch.set_num_threads(1)
    return {
        "flips": flips,
        "clips": len(waves),
        "codes": sum(c.numel() for c in single),
        "frames": sum(c.shape[1] for c in single),
        "snr_db": 10 * torch.log10(torch.tensor(power / error)).item(),
        "peak": peak,
    }


def measured(threads: int, folder: str | None, quick: bool) -> dict[str, Any]:
    """All that the page has of one thread, or of two."""
    torch.set_num_threads(threads)
    clock = time.process_time if threads == 1 else time.perf_counter
    with torch.no_grad():
        found = contenders(folder)
        rounds = 1 if quick else 3
        stages: dict[str, Callable[[], Any]] = {"speeds": lambda: speeds(found, rounds, clock)}
        if threads == 1:
            stages |= {
                "apart": lambda: {n: apart(c) for n, c in found.items()},
                "sizes": lambda: {n: sizes(c) for n, c in found.items() if not n.endswith("bfloat16")},
                "kernels": lambda: kernels(rounds, clock),
                "streams": lambda: streams(5 if quick else 20, clock),
                "rounding": rounding,
            }
        result: dict[str, Any] = {}
        for name, measure in stages.items():
            start, cpu = time.perf_counter(), time.process_time()
            result[name] = measure()
            spent = time.process_time() - cpu
            print(f"{name}: {time.perf_counter() - start:.0f} s, {spent:.0f} s of CPU", file=sys.stderr, flush=True)
    return result


# --- the page


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def speed_rows(measured: dict[str, float], apart: dict[str, Any] | None = None) -> list[list[str]]:
    rows = []
    for name in dict.fromkeys(key.split("/")[0] for key in measured):
        row = [name]
        largest = max(int(key.split("/")[1]) for key in measured if key.startswith(f"{name}/"))
        for batch in (1, largest):
            for direction in ("encode", "decode"):
                row.append(number(measured.get(f"{name}/{batch}/{direction}")))
        if largest == 1:
            row[3:] = ["–", "–"]
        if apart is not None:
            codes, wave = apart[name]
            row += [
                "–" if codes is None else f"{100 * codes:.3g} %",
                "adds noise" if math.isnan(wave) else f"{wave:.0e}",
            ]
        rows.append(row)
    return rows


SPEED_HEADER = ["× real time", "1 × 2 s, encode", "1 × 2 s, decode", "batch, encode", "batch, decode"]


def two_threads_section(measured: dict[str, float]) -> str:
    return f"""{TWO_THREADS}

{where()}; elapsed time, otherwise as above.

{table(SPEED_HEADER, speed_rows(measured))}
"""


def page(one: dict[str, Any], two_threads: str, quick: bool) -> str:
    names = list(dict.fromkeys(key.split("/")[0] for key in one["speeds"]))
    best = {name: max(v for k, v in one["speeds"].items() if k.split("/")[::2] == [name, "decode"]) for name in names}
    ratio_rows = []
    for peer, wanted in (("EnCodec", 15), ("Vocos", 4), ("DAC", 150), ("SNAC", None), ("Mimi", None)):
        theirs = {
            half: [v for k, v in best.items() if f": {peer}" in k and k.endswith("bfloat16") == half] for half in (0, 1)
        }
        if theirs[0]:
            full, half = max(theirs[0]), max(theirs[1], default=None)
            ratios = [best[name] / full for name in names[:3]]
            row = [peer, number(full), number(half), *map(number, ratios)]
            row += [number(best[FLAGSHIP] / half if half else None), f"≥ {wanted}" if wanted else "–"]
            ratio_rows.append(row)
    ratio_header = ["peer", "float32", "bfloat16"]
    ratio_header += [f"{name}: × its float32" for name in names[:3]] + [f"{FLAGSHIP}: × its bfloat16", "goal"]
    size_rows = [[n, f"{p:.1f}", number(e), number(d)] for n, (p, e, d) in one["sizes"].items()]
    kernel_rows = [
        [f"{dtype} {direction}"]
        + [number(one["kernels"][f"{dtype}/{direction}/{kind}"]) for kind in ("plain", "fused")]
        for dtype in ("float32", "bfloat16")
        for direction in ("encode", "decode")
    ]
    stream_rows = []
    for body in dict.fromkeys(key.split("/")[0] for key in one["streams"]):
        for frames in (1, 5, 50):
            ways = ("encode/stateful", "encode/again", "decode/stateful", "decode/again")
            values = [f"{one['streams'][f'{body}/{frames}/{way}']:.2f}" for way in ways]
            stream_rows.append([f"{body}, {20 * frames} ms", *values])
    r = one["rounding"]
    flip_rows = [[name, f"{n} ({100 * n / r['codes']:.2f} %)", str(first)] for name, (n, first) in r["flips"].items()]
    return f"""# Encoding and decoding

{where()}; `python benchmarks/model.py{" --quick" * quick}`.
× real time: seconds of audio per second of CPU time on one thread; higher is faster. Batches are 32 × 2 s, of EnCodec,
Vocos and Mimi 4 × 2 s. All at their own sample rates and published configurations with random weights. *Apart*: how a
row comes out in a batch of two and alone: the share of its codes that differ, and the largest difference of its wave
over its largest sample. (Rows of different lengths are the tests' matter; the peers take only equal ones.)

{table([*SPEED_HEADER, "apart, codes", "apart, wave"], speed_rows(one["speeds"], one["apart"]))}

Decoding beside peers, one thread, each at its best batch and in its faster implementation: × real time of the peer,
then how many times as fast ours is. The goal is of the flagship against a peer's float32, which is how peers come; the
last ratio has peers converted to bfloat16 as well.

{table(ratio_header, ratio_rows)}

Parameters in millions, and 10⁶ multiply-adds of convolutions and matrices per second of audio:

{table(["", "parameters", "encode", "decode"], size_rows)}

What fused kernels bring (spectral body, 32 × 2 s, one thread): weights in oneDNN's own layout, GELU and residual sum
inside the matrix product, depthwise convolution in one pass.

{table(["× real time", "torch's kernels", "fused"], kernel_rows)}

## Streams

Milliseconds of CPU per chunk, one stream, one thread. *Stateful* keeps each layer's last steps; *again* computes the
declared context anew with each chunk.

{table(["chunk", "encode, stateful", "encode, again", "decode, stateful", "decode, again"], stream_rows)}

## Rounding

`speech_16k` on the {r["clips"]} test clips: {r["frames"]} frames, {r["codes"]} codes. Codes that differ from those of
each clip alone on one thread in float32, and how many of them are of the first codebook (another entry there changes
what is left for all codebooks after it):

{table(["encoded", "different codes", "first codebook"], flip_rows)}

Decoded by bfloat16 weights the clips differ from float32 by a noise {r["snr_db"]:.1f} dB below the signal,
{r["peak"]:.4f} of full scale at most. Corpora are encoded in float32 (the default); bfloat16 is for decoding.

{two_threads}"""


def where() -> str:
    return f"{date.today()}, {cpu_name()}, load {LOAD:.1f} at the start, torch {torch.__version__}"


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()} ({os.cpu_count()} cores)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="folder with peers installed by pip --target")
    parser.add_argument("--threads", type=int, choices=(1, 2), default=1)
    parser.add_argument("--quick", action="store_true", help="one round only")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    if arguments.peers:
        sys.path.append(arguments.peers)
    target = Path(__file__).with_suffix(".md")
    before = target.read_text() if target.exists() else ""
    result = measured(arguments.threads, arguments.peers, arguments.quick)
    if arguments.threads == 1:
        kept = before[before.index(TWO_THREADS) :] if TWO_THREADS in before else ""
        text = page(result, kept, arguments.quick)
    else:
        text = before.split(TWO_THREADS)[0].rstrip() + "\n\n" + two_threads_section(result["speeds"])
    target.write_text(text.rstrip() + "\n")
    print(text)


if __name__ == "__main__":
    main()
