"""Bytes by range: a local file through mmap, a remote one through fsspec; and which files make a store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from codec.errors import TokenFileError

SUFFIX = ".ctok"
UNFINISHED = ".unfinished"

StorePath = str | os.PathLike[str]


class ByteFile(Protocol):
    """An immutable file read by ranges, which the caller has checked against `size`."""

    path: str
    size: int

    def check(self) -> None:
        """Raise if the file's size has changed: before looking into what was read of it, if that is a view."""
        ...

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop)."""
        ...

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges at once."""
        ...

    def close(self) -> None:
        """Let go of the file; later reads fail."""
        ...


class LocalFile:
    """A memory-mapped file. Reads are views without a copy; processes share the pages.

    To touch a page that the file has lost kills the process (SIGBUS). So `check` asks for its size, which takes
    half a microsecond (to read instead of to map would make a batch a fifth slower). Between that and the use of the
    view the file still must not be cut, and a disk that fails under a mapped file kills the process too.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        except OSError as error:
            reason = error.strerror or error
            raise TokenFileError(f"{path}: can't be read ({reason}); give a token file or a folder") from error
        self._view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def check(self) -> None:
        """Raise if the file was cut or has grown since it was opened."""
        if self._map is not None and self._map.size() != self.size:
            raise TokenFileError(
                f"{self.path}: has {self._map.size()} bytes, {self.size} when it was opened; a shard must not change "
                "in place while it is open; write it under another name, rename it, and open it again"
            )

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop)."""
        self.check()
        return self._view[start:stop]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges at once."""
        self.check()
        view = self._view
        return [view[start:stop] for start, stop in ranges]

    def close(self) -> None:
        """Unmap the file."""
        self._view.release()
        if self._map is not None:
            with contextlib.suppress(BufferError):  # an array still looks into the map, which goes with it
                self._map.close()
            self._map = None


class RemoteFile:
    """A file behind an fsspec URL. Each range is one request."""

    def __init__(self, url: str) -> None:
        self.path = url
        try:
            self._connect()
            self.size = int(self._system.size(self._name))
        except Exception as error:  # each of fsspec's file systems has its own
            remedy = "check the URL and the access to it"
            raise TokenFileError(f"{url}: can't be opened ({error!r}); {remedy}") from error

    def _connect(self) -> None:
        import fsspec

        self._pid = os.getpid()
        self._system, self._name = fsspec.core.url_to_fs(self.path)

    def check(self) -> None:
        """Nothing to do: what was read is in memory, and reading checks what it gets."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop)."""
        return self.read_many([(start, stop)])[0]

    def read_many(self, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges at once: concurrent requests where the file system can."""
        if not ranges:
            return []
        starts, stops = [r[0] for r in ranges], [r[1] for r in ranges]
        try:
            if self._pid != os.getpid():
                self._connect()  # a fork doesn't inherit the event loop's thread
            names = [self._name] * len(ranges)
            parts: list[Any] = self._system.cat_ranges(names, starts, stops, on_error="raise")
        except Exception as error:  # each of fsspec's file systems has its own
            spans = f"bytes {starts[0]} to {stops[0]}" + f" and {len(ranges) - 1} more" * (len(ranges) > 1)
            remedy = "check the access to it and try again"
            raise TokenFileError(f"{self.path}: {spans} can't be read ({error!r}); {remedy}") from error
        for start, stop, part in zip(starts, stops, parts, strict=True):
            if len(part) != stop - start:
                raise TokenFileError(
                    f"{self.path}: at byte {start}: got {len(part)} bytes of {stop - start}; "
                    "the file must not change while it is open; open it again"
                )
        return [memoryview(part) for part in parts]

    def close(self) -> None:
        """Nothing to let go of."""


def is_remote(path: StorePath) -> bool:
    """Whether `path` is a URL for fsspec rather than a local path."""
    text = os.fspath(path)
    return "://" in text and not text.startswith("file://")


def local_path(path: StorePath) -> str:
    """A local path as a string, without a `file://` in front."""
    return os.fspath(path).removeprefix("file://")


def open_file(path: StorePath) -> ByteFile:
    """Open a local path or an fsspec URL."""
    return RemoteFile(os.fspath(path)) if is_remote(path) else LocalFile(local_path(path))


def shard_paths(path: StorePath | Sequence[StorePath]) -> list[str]:
    """The shards of a store, in order: a file itself, a folder's `.ctok` files by name, a list as it is."""
    if not isinstance(path, str | os.PathLike):
        if not path:
            raise TokenFileError("an empty list of token files; give at least one")
        return [os.fspath(part) for part in path]
    if is_remote(path):
        return _remote_shards(os.fspath(path))
    text = local_path(path)
    if not os.path.exists(text):
        remedy = "check the path"
        if os.path.exists(text + UNFINISHED):
            remedy = "its writer didn't finish: complete it with TokenWriter(resume=True)"
        raise TokenFileError(f"{text}: no such token file or folder; {remedy}")
    if not os.path.isdir(text):
        return [text]
    files = sorted(Path(text).iterdir())
    shards = [str(file) for file in files if file.name.endswith(SUFFIX)]
    if not shards:
        unfinished = [file.name for file in files if file.name.endswith(UNFINISHED)]
        remedy = "give a token store"
        if unfinished:
            remedy = f"complete {', '.join(unfinished)} with TokenWriter(resume=True)"
        raise TokenFileError(f"{text}: this folder holds no {SUFFIX} file; {remedy}")
    return shards


def _remote_shards(url: str) -> list[str]:
    if url.endswith(SUFFIX):
        return [url]
    import fsspec

    try:
        system, name = fsspec.core.url_to_fs(url)
        if not system.isdir(name):
            return [url]
        names = sorted(part for part in system.ls(name, detail=False) if part.endswith(SUFFIX))
    except Exception as error:  # each of fsspec's file systems has its own
        remedy = "check the URL and the access to it"
        raise TokenFileError(f"{url}: can't be listed ({error!r}); {remedy}") from error
    if not names:
        raise TokenFileError(f"{url}: this folder holds no {SUFFIX} file; give a token store")
    return [str(system.unstrip_protocol(part)) for part in names]


def claim(path: str, make: Callable[[str], object], *, replace: bool = False) -> tuple[int, bool]:
    """Open a file for writing that this process holds alone, made if need be.

    A new file appears under its name whole and locked, so that no other process sees it half made.

    Args:
        path: The file.
        make: Writes a new file to the path that it is given.
        replace: Whether a new file takes the place of one that is there.

    Returns:
        The descriptor, and whether the file is new.

    Raises:
        TokenFileError: Another writer holds it, or it can't be written.
    """
    while True:
        held = _open_locked(path)
        if held is not None and not replace:
            return held, False
        whole = f"{path}.{uuid.uuid4().hex[:12]}"
        fd = None
        try:
            make(whole)
            fd = _open_locked(whole)
            assert fd is not None
            os.fsync(fd)
            if held is None:
                os.link(whole, path)  # unlike rename, fails if another process was faster
                os.unlink(whole)
            else:
                os.rename(whole, path)
            return fd, True
        except BaseException as error:
            for descriptor in (fd, held):
                if descriptor is not None:
                    os.close(descriptor)
            held = None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(whole)
            if isinstance(error, FileExistsError):
                continue
            if isinstance(error, OSError):
                remedy = "check the folder and its disk"
                raise TokenFileError(f"{path}: can't be written ({error.strerror}); {remedy}") from error
            raise
        finally:
            if held is not None:
                os.close(held)


def _open_locked(path: str) -> int | None:
    """Open an existing file for writing and hold it alone; None if it doesn't exist."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise TokenFileError(f"{path}: can't be written ({error.strerror}); check the folder") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            remedy = "give each concurrent writer a shard of its own"
            raise TokenFileError(f"{path}: another writer holds this shard; {remedy}") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                os.close(fd)
                raise TokenFileError(f"{path}: can't be locked ({error.strerror}); check the disk") from error
            warnings.warn(f"{path}: no locks on this file system; let only one process write it", stacklevel=5)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # another writer finished it between open and lock: look again
