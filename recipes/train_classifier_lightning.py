"""`train_classifier.py` with Lightning: batches are decoded before Lightning sees them.

python recipes/train_classifier_lightning.py tokens-mel | tokens-wave | files
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn
from train_classifier import CLIPS, KINDS, Classifier, draws, in_order, mels

from codec import TokenStore, load_codec


class LitClassifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Classifier()

    def training_step(self, batch: dict[str, Any], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        hits = self.model(batch["x"]).argmax(1) == batch["y"]
        self.log("accuracy", hits.float().mean(), batch_size=len(hits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--store", default="clips.ctok")
    parser.add_argument("--files", type=Path, default=CLIPS)
    parser.add_argument("--num-batches", type=int, default=60, help="of the one epoch")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*keys are not in every source")
    warnings.filterwarnings("ignore", module="lightning")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    codec, store = load_codec("speech_16k", device=device), TokenStore(arguments.store)
    keys = list(store.keys())

    lightning.seed_everything(arguments.seed, verbose=False)
    model = LitClassifier()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(max_epochs=1, accelerator=device, devices=1, **quiet)
    draw = draws(keys, num_batches=arguments.num_batches, seed=arguments.seed, num_workers=0)
    trainer.fit(model, mels(arguments.kind, draw, codec, store, arguments.files))
    test = mels(arguments.kind, in_order(keys), codec, store, arguments.files)
    (result,) = trainer.validate(model, test, verbose=False)
    print(f"{arguments.kind}: accuracy {result['accuracy']:.3f} on clips that it hasn't seen")


if __name__ == "__main__":
    main()
