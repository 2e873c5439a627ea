import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = """
import codec, torch
print(codec.__file__)
model = codec.load_codec("speech_16k")
print(model.spec.name, model.spec.n_quantizers, model.decode(model.encode(torch.zeros(1, 1, 500))).shape[-1])
"""


def run_script(folder: Path, cwd: Path) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_the_checkpoint_is_found_from_a_source_checkout(tmp_path):
    where, what = run_script(ROOT, tmp_path)
    assert Path(where) == ROOT / "codec" / "__init__.py"
    assert what == "speech_16k 8 500"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(ROOT),
    ]
    subprocess.run(command, check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_the_checkpoint_is_found_from_an_installed_wheel(tmp_path, wheel):
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run(command, check=True)
    where, what = run_script(site, tmp_path)
    assert Path(where) == site / "codec" / "__init__.py"
    assert what == "speech_16k 8 500"


def test_the_wheel_holds_what_it_should(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {"codec/py.typed", "codec/tokens/FORMAT.md", "codec/checkpoints/speech_16k/CARD.md"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "recipes/"))]
    assert wheel.stat().st_size < 20_000_000
