"""Which audio files there are: files and folders → stable keys and paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from codec.errors import AudioFileError, InputError

PathLike = str | os.PathLike[str]

AUDIO_SUFFIXES = frozenset({
    ".aac", ".aif", ".aifc", ".aiff", ".au", ".caf", ".flac", ".m4a", ".m4b", ".mka", ".mp2", ".mp3", ".mp4",
    ".oga", ".ogg", ".opus", ".snd", ".w64", ".wav", ".wave", ".webm", ".wma",
})  # fmt: skip


def find_audio(paths: PathLike | Iterable[PathLike], *, recursive: bool = True) -> list[tuple[str, Path]]:
    """Lists the audio files among files and folders, each with a key that names it, sorted by key.

    A folder's files are those with one of `AUDIO_SUFFIXES`; their keys are their paths inside the folder,
    with "/" and with the suffix. A file given by itself is taken whatever its suffix; its key is its name. If
    two keys were equal, all keys get the name of the folder that was given (or of the file's folder) in
    front. A file that is reached twice by the same path is listed once. Hidden files and folders are skipped,
    links are followed.

    Args:
        paths: Files and folders.
        recursive: Also look into the folders' subfolders.

    Returns:
        (key, path) pairs.

    Raises:
        AudioFileError: A path doesn't exist, a folder can't be read.
        InputError: Nothing found, keys that stay equal, a name that isn't UTF-8.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    for path in given:
        if "://" in os.fspath(path):
            raise InputError(f"{path} is a URL; find_audio lists local folders (read_audio takes URLs)")
    tops = [Path(path) for path in given]
    found: dict[str, tuple[str, str, Path]] = {}
    num_others = 0
    for top in tops:
        for path in _files(top, recursive):
            if path != top and path.suffix.lower() not in AUDIO_SUFFIXES:
                num_others += 1
                continue
            folder = top if path != top else top.parent
            item = (path.relative_to(folder).as_posix(), folder.resolve().name, path)
            found.setdefault(os.path.abspath(path), item)
    if not found:
        raise InputError(
            f"no audio files in {', '.join(map(str, tops)) or 'an empty list'} ({num_others} others there); "
            f"looked for {' '.join(sorted(AUDIO_SUFFIXES))}{'' if recursive else ', not in subfolders'}"
        )
    items = [(key, path) for key, _, path in found.values()]
    if len({key for key, _ in items}) < len(items):
        items = [(f"{prefix}/{key}", path) for key, prefix, path in found.values()]
    items.sort()
    key, count = Counter(key for key, _ in items).most_common(1)[0]
    if count > 1:
        first, second = [path for other, path in items if other == key][:2]
        raise InputError(
            f"{first} and {second} would both have the key {key!r}; rename one of their folders, "
            "give a common parent folder, or run them apart"
        )
    for key, path in items:
        if any("\ud800" <= character <= "\udfff" for character in key):
            raise InputError(f"{path!r} has a name that is not UTF-8, so no key; rename it")
    return items


def _files(top: Path, recursive: bool) -> Iterator[Path]:
    """The file itself, or the folder's files that aren't hidden; each real folder once."""
    if top.is_file():
        yield top
        return
    if not top.exists():
        raise AudioFileError(f"{top}: no such file or folder (from folder {os.getcwd()})")

    def fail(error: OSError) -> None:
        raise AudioFileError(f"{error.filename}: the folder cannot be read ({error.strerror})") from error

    seen = set()
    for folder, subfolders, names in os.walk(top, onerror=fail, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            subfolders.clear()
            continue
        seen.add(real)
        subfolders[:] = sorted(name for name in subfolders if recursive and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
