"""`decode.json`: what a folder was decoded from and how, so that a run goes on only where the same one stopped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from codec.errors import InputError
from codec.tokens import TokenStore

RECORD = "decode.json"

_KEYS_AT_ONCE = 4096


def store_fingerprint(store: TokenStore) -> str:
    """A hash over codec, keys and lengths: the same for the same items, wherever they lie and however sharded."""
    digest = hashlib.sha256(f"{store.spec.weights_hash} {store.n_quantizers}".encode())
    keys, lengths = store.keys(), store.num_samples
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        digest.update("\0".join(keys[first : first + _KEYS_AT_ONCE]).encode())
        digest.update(lengths[first : first + _KEYS_AT_ONCE].tobytes())
    return digest.hexdigest()


@contextmanager
def recorded(folder: Path, facts: dict[str, Any], targets: list[Path], *, force: bool) -> Iterator[None]:
    """Holds the folder for one run.

    Args:
        folder: Made if missing.
        facts: What the run is, as JSON types.
        targets: The files it will write.
        force: Begin anew: remove the targets that are there.

    Raises:
        InputError: The folder is of another run, holds files of no run, or another process works on it.
    """
    path = folder / RECORD
    found = _read(path)
    taken = [target for target in targets if target.exists()] if found is None else []
    if not force:
        if found is not None and found != facts:
            name = next(name for name in {**facts, **found} if facts.get(name) != found.get(name))
            raise InputError(
                f"{folder} holds another run: its {name} is {found.get(name)!r}, this one's {facts.get(name)!r}; give "
                "another folder, or --force to replace what is there"
            )
        if taken:
            raise InputError(
                f"{taken[0]} exists ({len(taken)} files in all) and {folder} has no {RECORD}; give another folder, "
                "or --force to replace them"
            )
    folder.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InputError(f"{folder}: another process decodes into it; wait, or give another folder") from error
        if force:
            for target in targets:
                target.unlink(missing_ok=True)
        if force or found is None:
            file.truncate(0)
            file.write(json.dumps(facts, indent=2).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        yield


def _read(path: Path) -> dict[str, Any] | None:
    """What is recorded; None where nothing is."""
    text = path.read_text() if path.is_file() else ""
    if not text:
        return None
    try:
        found = json.loads(text)
        if isinstance(found, dict):
            return found
    except ValueError:
        pass
    raise InputError(f"{path} isn't the record of a run; move it away, or give another folder")
