"""The main job on the shipped clips: encode, compare sizes, decode to waves and mels, draw, make a listening page.

make demo        (or: python recipes/demo.py -o demo)
"""

from __future__ import annotations

import argparse
import html
import shutil
import time
from pathlib import Path

import matplotlib
import numpy as np
import torch

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from codec import TokenStore, load_codec, read_audio, write_audio
from codec.audio import find_audio
from codec.decode import decode_store
from codec.encode import encode_corpus
from codec.features import MelSettings, MelSpectrogram
from codec.sources import output_names

CLIPS = Path(__file__).resolve().parents[1] / "tests" / "data"
DRAWN = "speech_ru_female_first-in-queue_16k.flac"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("demo"))
    parser.add_argument("--codec", default="speech_16k")
    arguments = parser.parse_args()
    folder: Path = arguments.output
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    codec = load_codec(arguments.codec)
    spec = codec.spec
    print(
        f"codec {spec.name}: {spec.sample_rate} Hz, {float(spec.frame_rate):g} frames/s, "
        f"{float(spec.bitrate_bps):g} bit/s"
    )

    store_path = folder / "clips.ctok"
    encoded = encode_corpus(codec, [CLIPS], store_path)
    print(
        f"\nencoded {encoded.num_items} clips, {encoded.audio_seconds:.1f} s, at {speed(encoded):.0f} × real time "
        f"-> {store_path}"
    )
    store = TokenStore(store_path)
    flac_bytes = originals(store, folder / "original", spec.sample_rate)
    print_sizes(store, flac_bytes, encoded.store_bytes)

    waves = decode_store(codec, store, folder / "decoded")
    print(f"\ndecoded to waves at {speed(waves):.0f} × real time -> {folder / 'decoded'}")
    mels = decode_store(codec, store, folder / "mel", "mel")
    print(f"decoded straight to mels at {speed(mels):.0f} × real time -> {folder / 'mel'}")

    mel = MelSpectrogram(MelSettings.from_dict(codec.config.mel))
    draw(DRAWN, folder, mel)
    listening_page(store, folder)
    print(f"\nlook at    {folder / 'spectrograms.png'}\nlisten at  {folder / 'index.html'}")


def speed(report) -> float:
    return report.audio_seconds / report.elapsed_seconds


def originals(store: TokenStore, folder: Path, sample_rate: int) -> dict[str, int]:
    """What the codec was given (mono, its rate) as FLAC; key -> bytes."""
    folder.mkdir()
    paths = dict(find_audio([CLIPS]))
    sizes = {}
    for key, name in zip(store.keys(), output_names(list(store.keys()), ".flac"), strict=True):
        wave, _ = read_audio(paths[key], sample_rate=sample_rate, mono=True)
        write_audio(folder / name, wave, sample_rate)
        sizes[key] = (folder / name).stat().st_size
    return sizes


def print_sizes(store: TokenStore, flac_bytes: dict[str, int], store_bytes: int) -> None:
    paths = dict(find_audio([CLIPS]))
    file_bytes = {key: paths[key].stat().st_size for key in store.keys()}
    width = max(map(len, store.keys()))
    print(f"\n{'bytes':<{width}}  {'seconds':>7}  {'original':>9}  {'16k flac':>9}  {'tokens':>6}")
    for key in store.keys():
        seconds = float(store.info(key).seconds)
        token_bytes = store.read(key).size * store.spec.bits_per_code // 8
        print(f"{key:<{width}}  {seconds:>7.2f}  {file_bytes[key]:>9,}  {flac_bytes[key]:>9,}  {token_bytes:>6,}")
    total, total_flac = sum(file_bytes.values()), sum(flac_bytes.values())
    print(f"{'all; with index and checksums':<{width}}  {'':>7}  {total:>9,}  {total_flac:>9,}  {store_bytes:>6,}")
    print(
        f"tokens are {total / store_bytes:.0f} × smaller than the files, {total_flac / store_bytes:.0f} × than the flac"
    )


def draw(key: str, folder: Path, mel: MelSpectrogram) -> None:
    (name,) = output_names([key], "")
    original, _ = read_audio(folder / "original" / f"{name}.flac")
    decoded, _ = read_audio(folder / "decoded" / f"{name}.wav")
    head = np.load(folder / "mel" / f"{name}.npy")
    panels = {
        "original, spectrogram": spectrogram(original),
        "decoded from tokens, spectrogram": spectrogram(decoded),
        "original, log-mel": mel(original)[0].numpy(),
        "straight from tokens, log-mel by the mel head": head,
    }
    figure, axes = plt.subplots(2, 2, figsize=(14, 7), layout="constrained")
    for axis, (title, image) in zip(axes.flat, panels.items(), strict=True):
        is_mel = "log-mel" in title
        top = 80 if is_mel else 8
        low, high = np.percentile(panels["original, log-mel" if is_mel else "original, spectrogram"], [5, 99.8])
        axis.imshow(
            image, origin="lower", aspect="auto", vmin=low, vmax=high, cmap="magma",
            extent=(0, original.shape[1] / 16000, 0, top),
        )  # fmt: skip
        axis.set(title=title, xlabel="s", ylabel="mel bin" if is_mel else "kHz")
    distance = {
        "mel of the decoded wave": mel(decoded)[0].numpy(),
        "mel head": head,
    }
    target = panels["original, log-mel"]
    text = ", ".join(f"{what} {np.abs(value - target).mean():.3f}" for what, value in distance.items())
    figure.suptitle(f"{key}: mean |Δ ln mel| to the original: {text}")
    figure.savefig(folder / "spectrograms.png", dpi=90)
    print(f"\n{key}: mean |Δ ln mel| to the original's mel: {text}")


def spectrogram(wave: torch.Tensor) -> np.ndarray:
    window = torch.hann_window(512)
    magnitude = torch.stft(wave[0], 512, 128, window=window, return_complex=True, pad_mode="constant").abs()
    return (20 * (magnitude + 1e-4).log10()).numpy()


def listening_page(store: TokenStore, folder: Path) -> None:
    rows = []
    for key, name in zip(store.keys(), output_names(list(store.keys()), ""), strict=True):
        players = "".join(
            f'<td><audio controls preload="none" src="{html.escape(source)}"></audio></td>'
            for source in (f"original/{name}.flac", f"decoded/{name}.wav")
        )
        rows.append(f"<tr><td>{html.escape(key)}</td>{players}</tr>")
    (folder / "index.html").write_text(
        "<!doctype html><meta charset=utf-8><title>codec demo</title>"
        "<style>body{font:16px sans-serif;margin:2em}td{padding:.3em 1em}img{max-width:100%}</style>"
        f"<h1>{store.spec.name}, {float(store.spec.bitrate_bps) / 1000:g} kbps</h1>"
        "<table><tr><th>clip<th>original (16 kHz mono)<th>decoded from tokens</tr>"
        + "\n".join(rows)
        + '</table><img src="spectrograms.png" alt="original and decoded spectrograms and mels">\n'
    )


if __name__ == "__main__":
    started = time.monotonic()
    main()
    print(f"done in {time.monotonic() - started:.0f} s")
