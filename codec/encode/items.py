"""What is to be encoded: one `Item` per key, found in files, folders, globs, URLs, archives, tables and manifests."""

from __future__ import annotations

import fnmatch
import glob as globbing
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any
from zlib import crc32

from codec.audio import AUDIO_SUFFIXES
from codec.errors import AudioFileError, InputError

PathLike = str | os.PathLike[str]

MANIFEST_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".tsv", ".scp")
TABLE_SUFFIXES = (".parquet", ".arrow")
TAR_SUFFIX = ".tar"

# Bytes per second, roughly: what a file's size says of its length before it is opened.
_RATES = {".wav": 48000, ".wave": 48000, ".aif": 88200, ".aiff": 88200, ".flac": 40000}
_OTHER_RATE = 12000


@dataclass(slots=True)
class Item:
    """One item to encode, and where its audio is.

    Attributes:
        key: Its key in the store.
        path: A local path or fsspec URL: of the audio file, or of the archive or table that holds it.
        member: None for an audio file; in a tar archive (offset, bytes) of the member; in a table the row.
        start: Where the item starts in the audio, in seconds; None at its beginning.
        stop: Where it stops, in seconds; None at its end.
        channel: The one channel that is the item; None for all.
        meta: What travels into the store.
        num_bytes: Size of the file or member; -1 if unknown.
        mtime_ns: When it changed last; -1 if unknown.
        error: Why it can't be read, where that is known from the listing.
    """

    key: str
    path: str
    member: tuple[int, int] | int | None = None
    start: Fraction | None = None
    stop: Fraction | None = None
    channel: int | None = None
    meta: dict[str, Any] | None = None
    num_bytes: int = -1
    mtime_ns: int = -1
    error: str | None = None

    @property
    def where(self) -> str:
        """What errors call it."""
        return self.path if self.member is None else f"{self.path}: {self.key.rsplit('/', 1)[-1]}"

    @property
    def is_plain(self) -> bool:
        """Whether it is all of its audio, without metadata."""
        return self.start is None and self.stop is None and self.channel is None and self.meta is None

    @property
    def span(self) -> str | None:
        """Start, stop and channel as text; None for a whole file."""
        if self.start is None and self.stop is None and self.channel is None:
            return None
        return f"{self.start}:{self.stop}:{self.channel}"


def guessed_seconds(item: Item) -> float:
    """A rough guess at an item's length from its size and its name."""
    if item.start is not None and item.stop is not None:
        return float(item.stop - item.start)
    name = item.path if item.member is None else item.key
    return max(0.1, item.num_bytes / _RATES.get(_suffix(name), _OTHER_RATE))


def _suffix(name: str) -> str:
    """From the last "." on, in small letters: what of a file with a suffix is its suffix."""
    return name[name.rfind(".") :].lower()


def find_items(
    inputs: Sequence[PathLike],
    *,
    manifests: Sequence[PathLike] = (),
    recursive: bool = True,
    glob: str | None = None,
    meta: Sequence[str] | None = None,
) -> list[Item]:
    """Lists what there is to encode, sorted by key.

    A folder's audio files are keyed by their path inside it, with "/" and with the suffix; members of a tar archive
    by the archive's path and theirs; rows of Parquet and Arrow files by the file's path and the row's number; rows
    of manifests by their key. If two keys of files were equal, all get the name of their input's folder in front.

    Args:
        inputs: Audio files, folders, globs, fsspec URLs of these, tar archives, Parquet and Arrow files (or folders
            of them, as `datasets` saves), manifests (told by their suffix), Kaldi folders (with a `wav.scp`).
        manifests: Manifests, whatever their suffix.
        recursive: Also look into the folders' subfolders.
        glob: Take only those of a folder's files whose path inside it fits ("*" matches "/" too).
        meta: The manifest columns that become metadata; all that aren't used otherwise if None.

    Raises:
        AudioFileError: An input doesn't exist or can't be listed.
        InputError: Nothing found, or keys that stay equal.
    """
    from codec.encode import archives
    from codec.encode import manifests as readers

    groups: list[tuple[str, list[Item]]] = []
    for given in manifests:
        groups.append(("", readers.read_manifest(os.fspath(given), meta)))
    for given in inputs:
        text = os.fspath(given).removeprefix("file://")
        if "://" in text:
            groups.append(_remote(text, recursive, glob, meta))
        elif os.path.isdir(text):
            if os.path.isfile(os.path.join(text, "wav.scp")):
                groups.append(("", readers.read_manifest(os.path.join(text, "wav.scp"), meta)))
            else:
                groups.append((Path(text).resolve().name, _folder(text, recursive, glob, meta)))
        elif os.path.isfile(text):
            folder = Path(text).resolve().parent.name
            if text.lower().endswith(MANIFEST_SUFFIXES):
                groups.append(("", readers.read_manifest(text, meta)))
            elif archives.is_archive(text):
                groups.append((folder, archives.list_archive(os.path.basename(text), text, meta)))
            else:
                groups.append((folder, [_file(os.path.basename(text), text, os.stat(text))]))
        elif globbing.has_magic(text):
            groups.append(_local_glob(text, meta))
        else:
            raise AudioFileError(f"{text}: no such file or folder (from folder {os.getcwd()})")
    items = groups[0][1] if len(groups) == 1 else _without_repeats(item for _, group in groups for item in group)
    if not items:
        names = ", ".join(os.fspath(given) for given in [*inputs, *manifests]) or "an empty list"
        raise InputError(
            f"no audio files in {names}; looked for {' '.join(sorted(AUDIO_SUFFIXES))}, tar archives, Parquet and "
            f"Arrow files{'' if recursive else ', not in subfolders'}{f', fitting {glob!r}' if glob else ''}"
        )
    _make_unique(items, groups)
    items.sort(key=lambda item: item.key)
    return items


def _without_repeats(items: Iterator[Item]) -> list[Item]:
    """A file that is reached twice by the same path counts once."""
    seen: set[tuple[str, object, str | None, str]] = set()
    kept = []
    for item in items:
        place = item.path if "://" in item.path else os.path.abspath(item.path)
        plain = item.meta is None and item.span is None and item.error is None
        identity = (place, item.member, item.span, "" if plain else item.key)
        if identity not in seen:
            seen.add(identity)
            kept.append(item)
    return kept


def _make_unique(items: list[Item], groups: list[tuple[str, list[Item]]]) -> None:
    if len({item.key for item in items}) == len(items):
        return
    for prefix, group in groups:
        for item in group:
            item.key = f"{prefix}/{item.key}" if prefix else item.key
    key, count = Counter(item.key for item in items).most_common(1)[0]
    if count > 1:
        first, second = [item.where for item in items if item.key == key][:2]
        raise InputError(
            f"{first} and {second} would both have the key {key!r}; rename one of their folders, "
            "give a common parent folder, or run them apart"
        )


def _file(key: str, path: str, status: os.stat_result) -> Item:
    item = Item(key, path, num_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
    if not key.isascii() and any("\ud800" <= character <= "\udfff" for character in key):
        item.key = key.encode(errors="surrogateescape").decode(errors="replace")
        item.error = f"{item.key}: its name isn't UTF-8, so it can't be a key; rename it"
    return item


def _folder(top: str, recursive: bool, glob: str | None, meta: Sequence[str] | None) -> list[Item]:
    from codec.encode import archives

    items: list[Item] = []
    for key, path, status in _walk(top, recursive):
        if glob is not None and not fnmatch.fnmatch(key, glob):
            continue
        if _suffix(key) in AUDIO_SUFFIXES:
            items.append(_file(key, path, status))
        elif archives.is_archive(key):
            items += archives.list_archive(key, path, meta)
    return items


def _walk(top: str, recursive: bool) -> Iterator[tuple[str, str, os.stat_result]]:
    """A folder's files that aren't hidden, with "/"-paths inside it; each real folder once, links followed."""
    seen = set()
    folders = [("", top)]
    while folders:
        inside, folder = folders.pop()
        try:
            status = os.stat(folder)
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir():
                        if recursive:
                            folders.append((inside + entry.name + "/", entry.path))
                    elif entry.is_file():
                        yield inside + entry.name, entry.path, entry.stat()
        except OSError as error:
            raise AudioFileError(f"{error.filename}: the folder cannot be read ({error.strerror})") from error


def _local_glob(pattern: str, meta: Sequence[str] | None) -> tuple[str, list[Item]]:
    from codec.encode import archives

    fixed = pattern[: next(at for at, character in enumerate(pattern) if character in "*?[")]
    folder = os.path.dirname(fixed)
    items: list[Item] = []
    for path in sorted(globbing.glob(pattern, recursive=True)):
        if os.path.isfile(path):
            key = os.path.relpath(path, folder or ".").replace(os.sep, "/")
            if archives.is_archive(path):
                items += archives.list_archive(key, path, meta)
            else:
                items.append(_file(key, path, os.stat(path)))
    if not items:
        raise AudioFileError(f"{pattern}: fits no file (from folder {os.getcwd()})")
    return Path(folder or ".").resolve().name, items


def _remote(url: str, recursive: bool, glob: str | None, meta: Sequence[str] | None) -> tuple[str, list[Item]]:
    from codec.encode import archives
    from codec.encode import manifests as readers

    if url.lower().endswith(MANIFEST_SUFFIXES):
        return "", readers.read_manifest(url, meta)
    system, name = remote_system(url)
    try:
        if globbing.has_magic(name):
            found = system.glob(name, detail=True)
            folder = os.path.dirname(name[: next(at for at, c in enumerate(name) if c in "*?[")])
        else:
            found = system.find(name, maxdepth=None if recursive else 1, detail=True)
            folder = name.rstrip("/")
    except Exception as error:  # each of fsspec's file systems has its own
        raise AudioFileError(f"{url}: can't be listed ({error!r}); check the URL and the access to it") from error
    if not found:
        raise AudioFileError(f"{url}: no such file or folder; check the URL")
    items: list[Item] = []
    for path, facts in sorted(found.items()):
        if facts.get("type", "file") != "file":
            continue
        inside = path[len(folder) :].strip("/")
        key = inside or path.rsplit("/", 1)[-1]
        if inside and ((glob is not None and not fnmatch.fnmatch(inside, glob)) or _hidden(inside)):
            continue
        full = system.unstrip_protocol(path)
        if archives.is_archive(key):
            items += archives.list_archive(key, full, meta)
        elif _suffix(key) in AUDIO_SUFFIXES or not inside:
            items.append(Item(key, full, num_bytes=int(facts.get("size") or -1), mtime_ns=_changed(facts)))
    return folder.rsplit("/", 1)[-1], items


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _changed(facts: dict[str, Any]) -> int:
    """When a remote file changed: its time, or what its ETag hashes to; -1 if the file system says neither."""
    for name in ("mtime", "LastModified", "last_modified", "updated", "created"):
        value = facts.get(name)
        if isinstance(value, int | float):
            return int(value * 10**9)
        if isinstance(value, datetime):
            return int(value.timestamp() * 10**9)
        if isinstance(value, str) and value:
            return text_number(value)
    tag = facts.get("ETag") or facts.get("etag")
    return text_number(str(tag)) if tag else -1


def text_number(text: str) -> int:
    """A number that stands for a text."""
    return crc32(text.encode())


def remote_system(url: str) -> tuple[Any, str]:
    """The file system of an fsspec URL, and the path in it.

    Raises:
        AudioFileError: No driver for the protocol.
    """
    import fsspec

    try:
        system, name = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise AudioFileError(f"{url}: {error}; install the fsspec driver of this protocol") from error
    return system, name
