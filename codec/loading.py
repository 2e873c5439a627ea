"""`load_codec`: any codec by name, folder or file, ours or another project's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from codec.errors import CheckpointError
from codec.model import Codec, load_checkpoint

HUB = "hf:"


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
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Codec:
    """Loads a codec, ready to encode and decode.

    Args:
        name_or_path: One of

            - the name of a shipped checkpoint: `speech_16k`;
            - a folder with `config.json` and weights: what `save` or `codec convert lyra` wrote, a model of
              `transformers` (EnCodec, DAC, Mimi), or SNAC's;
            - `hf:owner/name`: the same from the Hugging Face hub, such as `hf:facebook/encodec_24khz`,
              `hf:descript/dac_44khz`, `hf:kyutai/mimi`, `hf:hubertsiuzdak/snac_24khz` (extra `codec[hub]`);
            - a checkpoint file of the original EnCodec, DAC or Mimi.
        device: Where to put it.
        dtype: Of the network's weights (float32 if None). The quantizer, the inverse STFT and the outputs stay
            float32.
        revision: Branch, tag or commit of a hub repository.
        cache_dir: Where files of the hub are kept; its own default if None.
        local_files_only: Take the hub's files from the cache, without a connection.

    Raises:
        CheckpointError: Not found, damaged, of another architecture or a newer version; a package is missing.

    Example:
        >>> codec = load_codec("speech_16k")
        >>> codec.spec.frame_rate
        Fraction(50, 1)
    """
    name = os.fspath(name_or_path)
    if name.startswith(HUB):
        from codec.adapters.hub import load_hub

        cache = None if cache_dir is None else os.fspath(cache_dir)
        repository = name.removeprefix(HUB)
        codec: Codec = load_hub(repository, revision=revision, cache_dir=cache, local_files_only=local_files_only)
        return _placed(codec, device, dtype)
    if Path(name).is_file():
        from codec.adapters.hub import load_file

        return _placed(load_file(Path(name)), device, dtype)
    folder = _find_checkpoint(name)
    settings = _foreign_settings(folder)
    if settings is None:
        return load_checkpoint(folder, device=device, dtype=dtype)
    if settings.get("architecture") == "Lyra":
        from codec.adapters.lyra import load_lyra

        return _placed(load_lyra(folder, settings), device, dtype)
    from codec.adapters.hub import load_folder

    return _placed(load_folder(folder, settings), device, dtype)


def _placed(codec: Codec, device: str | torch.device, dtype: torch.dtype | None) -> Codec:
    from codec.adapters import Adapter

    assert isinstance(codec, Adapter)
    codec.requires_grad_(False).eval()
    if dtype is not None:
        codec.set_dtype(dtype)
    return codec.to(device)


def _foreign_settings(folder: Path) -> dict[str, object] | None:
    """A folder's `config.json` if it is of another project or of Lyra; None if it is ours, or can't be read."""
    try:
        settings = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return None  # whose message says what is wrong with it
    if not isinstance(settings, dict):
        return None
    foreign = "model_type" in settings or "vq_strides" in settings or settings.get("architecture") == "Lyra"
    return settings if foreign else None


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
    raise CheckpointError(
        f"no codec {str(name_or_path)!r}: neither a folder nor a file nor a shipped checkpoint ({names}); "
        "one of the Hugging Face hub is written hf:owner/name"
    )
