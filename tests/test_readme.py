import os
import re
import subprocess
import sys

from conftest import DATA

from codec import load_codec
from codec.encode import encode_corpus

ROOT = DATA.parents[1]
README = (ROOT / "README.md").read_text()


def test_the_training_loop_runs_and_learns(tmp_path):
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "loss.backward()" in code]
    assert len([line for line in example.splitlines() if line.strip() and not line.startswith("#")]) <= 25
    encode_corpus(load_codec("speech_16k"), [DATA], tmp_path / "corpus.ctok")
    (tmp_path / "example.py").write_text(
        "import torch\ntorch.manual_seed(0)\ntorch.set_num_threads(1)\nif __name__ == '__main__':\n"
        + "".join(f"    {line}\n" for line in example.splitlines())
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    ((first, last),) = re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)
    assert float(last) < 0.75 * float(first)


def test_what_the_readme_names_exists():
    for path in re.findall(r"`((?:codec|recipes|benchmarks|checkpoints)/[\w./]+)`", README):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / target).exists(), target
    for name in re.findall(r"(test_\w+\.py)", README):
        assert (ROOT / "tests" / name).exists(), name
    for name in re.findall(r"test_model\.py::(test_\w+)`", README):
        assert f"def {name}(" in (ROOT / "tests" / "test_model.py").read_text()
