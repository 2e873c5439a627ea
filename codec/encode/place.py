"""Where a store is: a file, a folder, or an fsspec URL of a folder, whose shards are written here and then uploaded."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from codec.encode.items import remote_system
from codec.errors import InputError, TokenFileError
from codec.tokens.files import SUFFIX, UNFINISHED

SOURCES_SUFFIX = ".sources.jsonl"
"""`SHARD.sources.jsonl`: JSON lines, of each item [key, bytes, mtime_ns, rows, span, digest, digest of its metadata]
without the nulls at its end."""

LOCK_SECONDS = 600


class Place:
    """A store's place, as encoding sees it. It can be pickled; each process has its own staging folder.

    Args:
        store: `NAME.ctok` for a store of one shard, any other name for a folder of shards, or a URL of a folder.

    Attributes:
        name: The file name of a store that is one file; None for a folder.
        folder: The folder that shards are written in: a temporary one for a URL.
        url: The URL, or None.
    """

    def __init__(self, store: str | os.PathLike[str]) -> None:
        text = os.fspath(store).removeprefix("file://")
        self.url: str | None = None
        self.name: str | None = None
        self._staging: str | None = None
        if "://" in text:
            if text.endswith(SUFFIX):
                raise InputError(f"{text}: a store at a URL is a folder of shards; give a name without {SUFFIX}")
            self.url = text.rstrip("/")
            self._owner = -1
            return
        path = Path(text)
        if path.suffix == SUFFIX:
            self.name, self._folder = path.name, path.parent
            if path.is_dir():
                raise InputError(f"{text}: is a folder; give a store that is a folder a name without {SUFFIX}")
        else:
            self._folder = path
            if path.suffix and not path.is_dir() and not text.endswith("/"):
                raise InputError(
                    f"{text}: a token file's name ends in {SUFFIX}; write to {path.with_suffix(SUFFIX)}, or to a "
                    f"folder of shards: {path.with_suffix('')}/"
                )
            if path.is_file():
                raise InputError(f"{text}: is a file; give a name ending in {SUFFIX}, or that of a folder")

    @property
    def folder(self) -> Path:
        """The folder that shards are written in."""
        if self.url is None:
            return self._folder
        if self._staging is None or self._owner != os.getpid():
            self._staging, self._owner = tempfile.mkdtemp(prefix="codec-encode-"), os.getpid()
        return Path(self._staging)

    def path(self, shard: str) -> Path:
        """Where a shard is written."""
        return self.folder / shard

    def where(self, shard: str) -> str:
        """Where a finished shard is read: a path or URL."""
        return str(self.path(shard)) if self.url is None else f"{self.url}/{shard}"

    def shards(self) -> list[tuple[str, bool]]:
        """The store's shards, by name, and whether each is finished."""
        if self.url is not None:
            return [(name, True) for name in self._remote_names() if name.endswith(SUFFIX)]
        if self.name is not None:
            present = [n for n in (self.name, self.name + UNFINISHED) if self.path(n).exists()]
        else:
            present = os.listdir(self._folder) if self._folder.is_dir() else []
        names = {n.removesuffix(UNFINISHED) for n in present if n.endswith((SUFFIX, SUFFIX + UNFINISHED))}
        return [(n, not self.path(n + UNFINISHED).exists()) for n in sorted(names)]

    def _remote_names(self) -> list[str]:
        assert self.url is not None
        system, root = remote_system(self.url)
        try:
            system.invalidate_cache()
            return sorted(path.rsplit("/", 1)[-1] for path in system.ls(root, detail=False))
        except FileNotFoundError:
            return []
        except Exception as error:  # each of fsspec's file systems has its own
            raise TokenFileError(
                f"{self.url}: can't be listed ({error!r}); check the URL and the access to it"
            ) from error

    def sources(self, shard: str) -> str:
        """The text of a shard's list of sources; empty if it has none."""
        try:
            if self.url is not None:
                system, name = remote_system(f"{self.url}/{shard}{SOURCES_SUFFIX}")
                return str(system.cat_file(name), "utf-8", errors="replace")
            return self.path(shard + SOURCES_SUFFIX).read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def exists(self, shard: str) -> bool:
        """Whether the shard is there, finished or not."""
        here = any(self.path(shard + end).exists() for end in ("", UNFINISHED))
        return here or (self.url is not None and shard in self._remote_names())

    def fetch(self, shard: str) -> None:
        """Makes a finished shard that is at a URL ready to be gone on with here."""
        if self.url is None or self.path(shard).exists() or self.path(shard + UNFINISHED).exists():
            return
        for name in [name for name in self._remote_names() if name in (shard, shard + SOURCES_SUFFIX)]:
            system, remote = remote_system(f"{self.url}/{name}")
            system.get_file(remote, str(self.path(name)))

    def publish(self, shard: str) -> None:
        """Uploads a finished shard, its sources first, and removes it here."""
        if self.url is None:
            return
        for name in (shard + SOURCES_SUFFIX, shard):
            local = self.path(name)
            if not local.exists():
                continue
            system, remote = remote_system(f"{self.url}/{name}")
            try:
                system.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
                system.put_file(str(local), remote)
            except Exception as error:  # each of fsspec's file systems has its own
                raise TokenFileError(
                    f"{self.url}/{name}: can't be written ({error!r}); check the access to it"
                ) from error
            local.unlink()

    def remove(self, shard: str) -> None:
        """Removes a shard and what lies beside it."""
        for end in ("", UNFINISHED, SOURCES_SUFFIX):
            self.path(shard + end).unlink(missing_ok=True)
            if self.url is not None and shard + end in self._remote_names():
                system, remote = remote_system(f"{self.url}/{shard}{end}")
                system.rm_file(remote)
        shutil.rmtree(self.rewritten(shard).parent, ignore_errors=True)

    def rewritten(self, shard: str) -> Path:
        """Where a shard is written anew."""
        return self.folder / f".{shard}.rewritten" / shard

    def num_bytes(self) -> int:
        """Size of the finished shards."""
        if self.url is None:
            return sum(self.path(shard).stat().st_size for shard, finished in self.shards() if finished)
        system, root = remote_system(self.url)
        return sum(int(system.size(f"{root}/{shard}") or 0) for shard, _ in self.shards())

    def write_text(self, name: str, text: str) -> None:
        """Writes a small file beside the shards, or removes it where there is no text."""
        if self.url is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            if text:
                (self._folder / name).write_text(text, encoding="utf-8")
            else:
                (self._folder / name).unlink(missing_ok=True)
            return
        system, remote = remote_system(f"{self.url}/{name}")
        if text:
            system.makedirs(remote.rsplit("/", 1)[0], exist_ok=True)
            system.pipe_file(remote, text.encode())
        elif name in self._remote_names():
            system.rm_file(remote)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the store while it is looked at and put in order: several processes may begin at once."""
        if self.url is not None:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f".{self.name or 'store'}.lock"
        started = time.monotonic()
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                    break
            except FileNotFoundError:
                pass  # whoever held it has removed it
            except BlockingIOError as error:
                if time.monotonic() - started > LOCK_SECONDS:
                    os.close(descriptor)
                    limit = f"another process has held this store for {LOCK_SECONDS} s"
                    raise TokenFileError(f"{path}: {limit}; end it, and try again") from error
                time.sleep(0.05)
            except OSError:
                break  # no locks on this file system: let one process begin at a time
            os.close(descriptor)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)

    def clean_up(self) -> None:
        """Removes this process's staging folder."""
        if self._staging is not None and self._owner == os.getpid():
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging = None
