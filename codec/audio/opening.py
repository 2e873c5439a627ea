"""Where audio comes from: a path, bytes, a file object or a URL, read alike and named in errors."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO, Self, cast

from codec.errors import AudioFileError, InputError

AudioSource = str | os.PathLike[str] | bytes | bytearray | memoryview | BinaryIO


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

    def __init__(self, source: AudioSource) -> None:
        self.path: str | None = None
        self._close = True
        if isinstance(source, bytes | bytearray | memoryview):
            self.name = f"<{len(source)} bytes>"
            self._file: BinaryIO = io.BytesIO(source)
        elif isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            if not isinstance(self.name, str):
                raise InputError(f"{self.name!r} is a path of bytes; decode it with os.fsdecode first")
            if "://" in self.name:
                self._file = _open_url(self.name)
            else:
                self.path = self.name
                self._file = _open_path(self.name)
        elif all(hasattr(source, name) for name in ("read", "seek", "tell")):
            self.name = str(getattr(source, "name", f"<{type(source).__name__}>"))
            self._file = source
            self._close = False
        else:
            raise InputError(
                f"{type(source).__name__} is no audio source; give a path, URL, bytes or binary file object"
            )
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
        try:
            self._file.seek(offset)
            return self._file.read(length)
        except OSError as error:
            raise AudioFileError(f"{self.name}: cannot be read at byte {offset} ({error})") from error

    def decodable(self, *, by_name: bool) -> str | int | BinaryIO:
        """What libsndfile opens: the path, a file descriptor to be closed, or a file at its beginning.

        By name, libsndfile takes what it doesn't know for headerless samples if the suffix (au, vox …)
        allows, and soundfile whatever is called raw.
        """
        if self.path is None:
            self._file.seek(0)
            return self._file
        if by_name and not self.path.lower().endswith(".raw"):
            return self.path
        return os.open(self.path, os.O_RDONLY)

    def identity(self) -> tuple[str, int, int] | None:
        """Path, size and time of the last change (ns): what tells a file's state. None for other sources."""
        return None if self.path is None else (self.path, self.size, os.stat(self._file.fileno()).st_mtime_ns)

    def close(self) -> None:
        """Closes what was opened here."""
        if self._close:
            with suppress(OSError):
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _open_path(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except FileNotFoundError as error:
        raise AudioFileError(f"{path}: no such file (from folder {os.getcwd()})") from error
    except IsADirectoryError as error:
        raise AudioFileError(f"{path}: is a folder; find_audio() lists the audio files in it") from error
    except (OSError, ValueError) as error:
        raise AudioFileError(f"{path}: cannot be opened ({error})") from error


def _open_url(url: str) -> BinaryIO:
    import fsspec

    try:
        return cast(BinaryIO, fsspec.open(url, "rb").open())
    except FileNotFoundError as error:
        raise AudioFileError(f"{url}: no such file") from error
    except ImportError as error:
        raise AudioFileError(f"{url}: {error}; install the fsspec driver of this protocol") from error
    except Exception as error:  # Drivers raise whatever their client library does.
        raise AudioFileError(f"{url}: cannot be opened ({type(error).__name__}: {error})") from error
