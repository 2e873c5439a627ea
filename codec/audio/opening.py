"""Where audio comes from: a path, bytes, a file object or a URL, read alike and named in errors."""

from __future__ import annotations

import io
import os
import stat
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import BinaryIO, Self, cast

from codec.audio import threads
from codec.errors import AudioFileError, InputError

AudioSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO

# Bytes up to which a remote file that libsndfile decodes is fetched at once; beyond, it is read in ranges.
_FETCHED_WHOLE = 1 << 25
# Bytes read at the first look: most headers end there.
_HEAD = 4096


class Source:
    """An open audio source.

    Args:
        source: A local path, an fsspec URL (`scheme://…`), the file's bytes, or a seekable binary file
            object, which holds the audio file from its position 0 on and is left open.

    Attributes:
        name: What errors call it.
        path: The local path, or None.
        size: Bytes.

    Raises:
        AudioFileError: Missing, a folder, unreadable, empty.
        InputError: Not a source.
    """

    def __init__(self, source: AudioSource, *, name: str | None = None) -> None:
        self.path: str | None = None
        self._close = True
        self._descriptor = -1
        self._head = b""
        self._remote = False
        if isinstance(source, bytes | bytearray | memoryview):
            self.name = f"<{len(source)} bytes>"
            self._file: BinaryIO | None = io.BytesIO(source)
        elif isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            if not isinstance(self.name, str):
                raise InputError(f"{self.name!r} is a path of bytes; decode it with os.fsdecode first")
            if "://" in self.name:
                self._remote = True
                with threads.waiting():
                    self._file = open_url(self.name)
            else:
                self.path = self.name
                self._file = None
                self._descriptor, status = _open_path(self.name)
                self.size = status.st_size
                self._state = (status.st_ino, status.st_mtime_ns)
        elif all(hasattr(source, name) for name in ("read", "seek", "tell")):
            self.name = str(getattr(source, "name", f"<{type(source).__name__}>"))
            self._file = source
            self._close = False
        else:
            raise InputError(
                f"{type(source).__name__} is no audio source; give a path, URL, bytes or binary file object"
            )
        if name is not None:
            self.name = name
        if self._file is not None:
            try:
                self.size = self._file.seek(0, os.SEEK_END)
                if not isinstance(self._file.read(0), bytes):
                    raise InputError(f"{self.name} is open in text mode; open it with mode 'rb'")
            except (OSError, ValueError, EOFError) as error:
                self.close()
                raise AudioFileError(f"{self.name}: cannot be read ({error}); it must be a seekable file") from error
        if self.size == 0:
            self.close()
            raise AudioFileError(f"{self.name}: is empty (0 bytes); remove it or fetch it again")

    def read_at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset` on; fewer at the end."""
        if offset >= self.size or length <= 0:
            return b""
        if offset + length <= len(self._head):
            return self._head[offset : offset + length]
        try:
            if offset < _HEAD and length <= _HEAD and not self._head:
                self._head = self._read_at(0, _HEAD)
                return (
                    self.read_at(offset, length)
                    if offset + length <= len(self._head)
                    else self._read_at(offset, length)
                )
            return self._read_at(offset, length)
        except OSError as error:
            raise AudioFileError(f"{self.name}: cannot be read at byte {offset} ({error})") from error

    def _read_at(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        if self._file is None:
            data = os.pread(self._descriptor, length, offset)
            while len(data) < length and (more := os.pread(self._descriptor, length - len(data), offset + len(data))):
                data += more
            return data
        with threads.waiting() if self._remote else nullcontext():
            self._file.seek(offset)
            return self._file.read(length)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills the buffer from `offset` on; the bytes that were there."""
        if self._file is None:
            try:
                return os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise AudioFileError(f"{self.name}: cannot be read at byte {offset} ({error})") from error
        data = self.read_at(offset, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def decodable(self, *, by_name: bool) -> str | int | BinaryIO:
        """What libsndfile opens: the path, a file descriptor to be closed, or a file at its beginning.

        By name, libsndfile takes what it doesn't know for headerless samples if the suffix (au, vox …)
        allows, and soundfile whatever is called raw.
        """
        if self._file is not None:
            if self._remote and self.size <= _FETCHED_WHOLE:
                # Inside libsndfile's callbacks, under soundfile's lock, one mustn't wait for a permit.
                data = self.read_at(0, self.size)
                self._file.close()
                self._file, self._remote = io.BytesIO(data), False
            self._file.seek(0)
            return self._file
        assert self.path is not None
        if by_name and not self.path.lower().endswith(".raw"):
            return self.path
        return os.open(self.path, os.O_RDONLY)

    def identity(self) -> tuple[object, ...] | None:
        """Path, size, inode and time of the last change (ns): what tells a file's state. None for other sources."""
        return None if self.path is None else (self.path, self.size, *self._state)

    def close(self) -> None:
        """Closes what was opened here."""
        if self._file is None:
            with suppress(OSError):
                os.close(self._descriptor)
            self._descriptor = -1
        elif self._close:
            with suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_path(path: str) -> tuple[int, os.stat_result]:
    """A descriptor of a file that can be read at any place, and its status."""
    try:
        # Not blocking: a named pipe is refused below, instead of waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise AudioFileError(f"{path}: no such file (from folder {os.getcwd()})") from error
    except (OSError, ValueError) as error:
        raise AudioFileError(f"{path}: cannot be opened ({error})") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise AudioFileError(f"{path}: is a folder; find_audio() lists the audio files in it")
        raise AudioFileError(f"{path}: is a pipe or device; copy it into a file, or give its bytes")
    return descriptor, status


def open_url(url: str) -> BinaryIO:
    """The URL's file, seekable."""
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(url, "rb").open())
    except FileNotFoundError as error:
        raise AudioFileError(f"{url}: no such file") from error
    except ImportError as error:
        raise AudioFileError(f"{url}: {error}; install the fsspec driver of this protocol") from error
    except Exception as error:  # Drivers raise whatever their client library does.
        raise AudioFileError(f"{url}: cannot be opened ({type(error).__name__}: {error})") from error
