import importlib
import re
import sys

import pytest
from conftest import DATA

from codec import load_codec
from codec.encode import encode_corpus

RECIPES = DATA.parents[1] / "recipes"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("classifier") / "clips.ctok"
    encode_corpus(load_codec("speech_16k"), [p for p in DATA.iterdir() if p.name.startswith("speech")], path)
    return path


@pytest.fixture
def accuracy(monkeypatch, capsys, store):
    """Runs a recipe in this process: what it prints as its accuracy."""
    monkeypatch.syspath_prepend(RECIPES)

    def run(recipe, *arguments):
        monkeypatch.setattr(sys, "argv", [recipe, *map(str, arguments), "--store", str(store)])
        importlib.import_module(recipe).main()
        ((found),) = re.findall(r"accuracy ([\d.]+) on clips", capsys.readouterr().out)
        return float(found)

    return run


def test_training_from_tokens_is_training_from_files(accuracy):
    """One epoch, the same loop: by the mel head, by wave and mel, and from the original files."""
    found = {
        kind: accuracy("train_classifier", kind, "--num-batches", 30) for kind in ("tokens-mel", "tokens-wave", "files")
    }
    assert min(found.values()) > 0.65, found  # two voices, clips that it hasn't seen
    assert max(found.values()) - min(found.values()) < 0.15, found


def test_lightning_takes_decoded_batches(accuracy):
    for kind in ("tokens-mel", "files"):
        assert accuracy("train_classifier_lightning", kind, "--num-batches", 10) > 0.4
