"""`load_codec`: any codec by name or folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from codec.errors import CheckpointError
from codec.model import Codec, load_checkpoint


def checkpoint_folders() -> Iterator[Path]:
    """Where named checkpoints are looked for: inside an installed wheel, then beside a source checkout."""
    package = Path(__file__).parent
    yield package / "checkpoints"
    yield package.parent / "checkpoints"


def load_codec(
    name_or_path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
) -> Codec:
    """Loads a codec, ready to encode and decode.

    Args:
        name_or_path: The name of a shipped checkpoint (`speech_16k`), or a folder with `config.json` and
            `model.safetensors`.
        device: Where to put it.
        dtype: Of the network's weights (float32 if None). The quantizer, the inverse STFT and the outputs stay
            float32.

    Raises:
        CheckpointError: Not found, damaged, of another architecture or a newer version.

    Example:
        >>> codec = load_codec("speech_16k")
        >>> codec.spec.frame_rate
        Fraction(50, 1)
    """
    return load_checkpoint(_find_checkpoint(name_or_path), device=device, dtype=dtype)


def _find_checkpoint(name_or_path: str | os.PathLike[str]) -> Path:
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    shipped = []
    for folder in checkpoint_folders():
        if (folder / name_or_path / "config.json").is_file():
            return folder / name_or_path
        if folder.is_dir():
            shipped += sorted(p.name for p in folder.iterdir() if (p / "config.json").is_file())
    names = ", ".join(shipped) or "none shipped"
    raise CheckpointError(f"no codec {str(name_or_path)!r}: neither a folder nor a shipped checkpoint ({names})")
