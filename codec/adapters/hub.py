"""Pretrained codecs from a hub, a folder in its layout, or a file of the original project."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from codec.adapters.base import Adapter
from codec.adapters.original import load_tensors, read_original
from codec.errors import CheckpointError, CodecError

FAMILIES = ("encodec", "dac", "mimi")
SNAC_WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def load_hub(
    repository: str, *, revision: str | None = None, cache_dir: str | None = None, local_files_only: bool = False
) -> Adapter:
    """A repository `owner/name` of the Hugging Face hub, from its cache where it is there.

    Raises:
        CheckpointError: Not found, not reachable, of a codec not known here; or `transformers` is missing.
    """
    options: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only}
    try:
        from huggingface_hub import hf_hub_download
    except ImportError as error:
        raise CheckpointError(f"hf:{repository}: needs huggingface_hub; pip install 'codec[hub]'") from error

    def fetch(name: str) -> Path:
        try:
            return Path(str(hf_hub_download(repository, name, **options)))
        except Exception as error:  # the hub's, the network's and the file system's own
            reason = str(error).splitlines()[0]
            raise CheckpointError(
                f"hf:{repository}: no {name} ({reason}); check the name and the connection, or give a local folder"
            ) from error

    settings = _settings(fetch("config.json"))
    name = repository.rpartition("/")[2]
    if "vq_strides" in settings:
        return _snac(settings, fetch("pytorch_model.bin"), name)
    return _transformers(f"hf:{repository}", settings, name, repository, options)


def load_folder(folder: Path, settings: dict[str, Any]) -> Adapter:
    """A folder with `config.json` (already read) and weights, in the layout of `transformers` or of SNAC.

    Raises:
        CheckpointError: Damaged, or of a codec not known here.
    """
    if "vq_strides" in settings:
        weights = next((folder / name for name in SNAC_WEIGHTS if (folder / name).is_file()), None)
        if weights is None:
            raise CheckpointError(f"{folder}: neither {SNAC_WEIGHTS[0]} nor {SNAC_WEIGHTS[1]} beside config.json")
        return _snac(settings, weights, folder.resolve().name)
    return _transformers(str(folder), settings, folder.resolve().name, str(folder), {"local_files_only": True})


def load_file(path: Path) -> Adapter:
    """A checkpoint file of EnCodec, DAC or Mimi as the original project saves it.

    Raises:
        CheckpointError: Unreadable, or of no project known here.
    """
    found = read_original(path)
    name = path.stem
    model_class, config_class = _classes(found.family, str(path))
    try:
        config = config_class(**found.settings)
        with _quiet():
            model, report = model_class.from_pretrained(
                None, config=config, state_dict=found.tensors, output_loading_info=True
            )
    except Exception as error:  # transformers raises whatever its parts raise
        raise CheckpointError(f"{path}: not a whole {found.family} ({str(error).splitlines()[0]})") from error
    return _adapted(str(path), found.family, model, report, name)


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path}: a {type(settings).__name__}; a configuration is an object")
    return settings


def _snac(settings: dict[str, Any], weights: Path, name: str) -> Adapter:
    from codec.adapters.snac import Snac, SnacConfig

    tensors = load_tensors(weights)
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{weights}: a {type(tensors).__name__}; a checkpoint maps names to tensors")
    config = SnacConfig.from_dict(settings, name)
    try:
        codec = Snac(config, tensors, name)
    except CodecError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{weights}: doesn't fit its config.json ({error})") from error
    return _ready(codec)


def _classes(family: str, where: str) -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise CheckpointError(f"{where}: {family} needs transformers; pip install 'codec[hub]'") from error
    names = {"encodec": "Encodec", "dac": "Dac", "mimi": "Mimi"}
    prefix = names[family]
    return getattr(transformers, f"{prefix}Model"), getattr(transformers, f"{prefix}Config")


def _transformers(where: str, settings: dict[str, Any], name: str, source: str, options: dict[str, Any]) -> Adapter:
    family = settings.get("model_type")
    if family not in FAMILIES:
        raise CheckpointError(
            f"{where}: model_type is {family!r}; this release reads {', '.join(FAMILIES)}, SNAC, Lyra and its own"
        )
    model_class, _ = _classes(family, where)
    options = {k: v for k, v in options.items() if v is not None}
    try:
        with _quiet():
            model, report = model_class.from_pretrained(source, output_loading_info=True, **options)
    except Exception as error:  # transformers raises whatever its parts raise
        raise CheckpointError(f"{where}: transformers can't load it ({str(error).splitlines()[0]})") from error
    return _adapted(where, family, model, report, name)


def _adapted(where: str, family: str, model: Any, report: dict[str, Any], name: str) -> Adapter:
    # Statistics of training and positions that are computed are in some files and not in others.
    optional = ("inited", "initialized", "cluster_size", "embed_avg", "inv_freq")
    wrong = [k for k in report.get("missing_keys", ()) if not str(k).endswith(optional)]
    wrong += [k[0] if isinstance(k, tuple) else k for k in report.get("mismatched_keys", ())]
    if wrong:
        raise CheckpointError(
            f"{where}: {len(wrong)} tensors are missing or of another shape, first {sorted(map(str, wrong))[0]!r}; the "
            "weights and the configuration are of different models"
        )
    model.eval().requires_grad_(False)
    if family == "encodec":
        from codec.adapters.encodec import encodec

        return _ready(encodec(model.float(), name))
    if family == "dac":
        from codec.adapters.dac import dac

        return _ready(dac(model.float(), name))
    from codec.adapters.mimi import mimi

    return _ready(mimi(model.float(), name))


def _ready(codec: Adapter) -> Adapter:
    codec.requires_grad_(False).eval()
    return codec


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and notes on stderr."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
