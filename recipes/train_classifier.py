"""Train on tokens or on the files themselves, in plain PyTorch: whose voice is this second of audio?

    codec encode tests/data -o clips.ctok
    python recipes/train_classifier.py tokens-mel      # mel head: straight from tokens
    python recipes/train_classifier.py tokens-wave     # tokens -> wave -> mel, on the device
    python recipes/train_classifier.py files           # the original files

Only `mels` knows where the data comes from; the loop is one and the same.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from codec import (
    BatchDecoder,
    Codec,
    Excerpts,
    MelSpectrogram,
    RandomExcerpts,
    Segments,
    Tokens,
    TokenStore,
    load_codec,
)
from codec.decode import DecodedBatch
from codec.sources import AudioFiles, Mel, Source

CLIPS = Path(__file__).resolve().parents[1] / "tests" / "data"
CLASSES = ("speech_it_", "speech_ru_")
HELD_OUT = "thanks"  # clips with this word are for testing
KINDS = ("tokens-mel", "tokens-wave", "files")
MEL = "codec"  # the preset that the mel head predicts

Batches = Iterable[dict[str, Any]]
Draw = Callable[[Source], Any]


def just_the_data(decoded: DecodedBatch, batch: Any) -> Tensor:
    """The decoder's hook, here to hand over a plain tensor; augmentation would go here too."""
    return decoded.data


def mels(kind: str, draw: Draw, codec: Codec, store: TokenStore, folder: Path) -> Batches:
    """Batches whose "x" is a log-mel [B, 80, F] on the codec's device: one line for each kind of data."""
    if kind == "tokens-mel":
        return BatchDecoder(codec, "mel", hook=just_the_data)(draw(Tokens(store)))
    if kind == "tokens-wave":
        decoder = BatchDecoder(codec, "mel", features=MelSpectrogram(MEL), hook=just_the_data)
        return decoder(draw(Tokens(store, context=decoder.context)))
    return draw(Mel(AudioFiles(folder, sample_rate=codec.spec.sample_rate), MEL))


def labels(keys: Iterable[str], *, held_out: bool) -> Segments:
    """The class of each item, of the clips for training or of those for testing."""
    rows = [
        (key, None, None, name)
        for key in keys
        for name in CLASSES
        if key.startswith(name) and (HELD_OUT in key) == held_out
    ]
    return Segments(rows, "global", classes=CLASSES)


def draws(keys: Iterable[str], *, num_batches: int, seed: int, num_workers: int) -> Draw:
    """Random seconds of the clips for training."""
    y = labels(keys, held_out=False)

    def draw(x: Source) -> Any:
        excerpts = RandomExcerpts({"x": x, "y": y}, 1, batch_size=16, seed=seed, short="pad")
        return excerpts.loader(num_batches=num_batches, num_workers=num_workers)

    return draw


def in_order(keys: Iterable[str]) -> Draw:
    """Every second of the clips for testing, ten times a second."""
    y = labels(keys, held_out=True)
    return lambda x: Excerpts({"x": x, "y": y}, 1, overlap="0.9", batch_size=16).loader()


class Classifier(nn.Module):
    """A small convolutional classifier of log-mels [B, 80, F]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(80, 48, 5), nn.ReLU(), nn.Conv1d(48, 48, 5), nn.ReLU())
        self.head = nn.Linear(96, len(CLASSES))

    def forward(self, mel: Tensor) -> Tensor:
        x = self.body(mel / 3 + 2)
        return self.head(torch.cat([x.mean(2), x.amax(2)], 1))


def train(model: nn.Module, batches: Batches) -> None:
    device = next(model.parameters()).device
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for batch in batches:
        loss = nn.functional.cross_entropy(model(batch["x"].to(device)), batch["y"].to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    device = next(model.parameters()).device
    hits = [model(batch["x"].to(device)).argmax(1) == batch["y"].to(device) for batch in batches]
    return torch.cat(hits).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--store", default="clips.ctok")
    parser.add_argument("--files", type=Path, default=CLIPS)
    parser.add_argument("--num-batches", type=int, default=60, help="of the one epoch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*keys are not in every source")  # that is how clips are held out
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codec, store = load_codec("speech_16k", device=device), TokenStore(arguments.store)
    keys = list(store.keys())

    torch.manual_seed(arguments.seed)
    model = Classifier().to(device)
    draw = draws(keys, num_batches=arguments.num_batches, seed=arguments.seed, num_workers=arguments.workers)
    train(model, mels(arguments.kind, draw, codec, store, arguments.files))
    test = mels(arguments.kind, in_order(keys), codec, store, arguments.files)
    print(f"{arguments.kind}: accuracy {accuracy(model, test):.3f} on clips that it hasn't seen")


if __name__ == "__main__":
    main()
