"""Archives and tables of audio: tar files (WebDataset), Parquet and Arrow files (datasets): members listed and read."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from codec.audio import AUDIO_SUFFIXES
from codec.encode.items import TABLE_SUFFIXES, TAR_SUFFIX, Item, remote_system
from codec.errors import AudioFileError, InputError

MAX_NOTE_BYTES = 1 << 20
"""Size up to which a member of a tar archive that isn't audio is taken for metadata."""

FETCHED_WHOLE = 1 << 25
"""Size up to which a member is read at once; a larger one is read in ranges."""

_ROWS_AT_ONCE = 16


def is_archive(path: str) -> bool:
    """Whether the name is that of a tar archive or a table of audio."""
    name = os.path.basename(path).lower()
    return name.endswith((TAR_SUFFIX, *TABLE_SUFFIXES)) and not name.startswith("cache-")


def list_archive(key: str, path: str, meta: Sequence[str] | None) -> list[Item]:
    """The audio in an archive or table; one item with an error if it can't be read.

    Args:
        key: What precedes the members' names in their keys.
        path: A local path or URL.
        meta: The fields that become metadata; all if None.
    """
    try:
        items = _list_tar(key, path) if path.lower().endswith(TAR_SUFFIX) else _list_table(key, path)
    except (OSError, tarfile.TarError, EOFError, AudioFileError, ValueError) as error:
        text = str(error) if isinstance(error, AudioFileError) else f"{path}: can't be listed ({error}); fetch it again"
        return [Item(key, path, error=text)]
    if meta is not None:
        for item in items:
            item.meta = {name: value for name, value in (item.meta or {}).items() if name in meta} or None
    return items


def open_file(path: str) -> BinaryIO:
    """A local or remote file, seekable."""
    if "://" not in path:
        return open(path, "rb")
    system, name = remote_system(path)
    file: BinaryIO = system.open(name, "rb")
    return file


# --- tar


def _list_tar(prefix: str, path: str) -> list[Item]:
    """Members with an audio suffix; those that share their name up to its first dot are metadata (WebDataset)."""
    audio: list[tuple[str, Item]] = []
    notes: dict[str, dict[str, Any]] = {}
    with open_file(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        with tarfile.open(fileobj=file, mode="r:") as archive:
            try:
                for member in archive:
                    if member.isfile():
                        _take_member(prefix, path, size, archive, member, audio, notes)
            except tarfile.TarError as error:
                if not audio:
                    raise
                text = f"{path}: ends early, members may be missing ({error}); fetch the archive again"
                audio.append(("", Item(prefix, path, error=text)))
    for group, item in audio:
        item.meta = notes.get(group)
    return [item for _, item in audio]


def _take_member(
    prefix: str,
    path: str,
    size: int,
    archive: tarfile.TarFile,
    member: tarfile.TarInfo,
    audio: list[tuple[str, Item]],
    notes: dict[str, dict[str, Any]],
) -> None:
    folder, _, name = member.name.rpartition("/")
    group = f"{folder}/{name.split('.', 1)[0]}"
    suffix = os.path.splitext(name)[1].lower()
    if suffix in AUDIO_SUFFIXES:
        item = Item(f"{prefix}/{member.name.removeprefix('./')}", path, (member.offset_data, member.size))
        item.num_bytes, item.mtime_ns = member.size, int(member.mtime * 10**9)
        if member.offset_data + member.size > size:
            item.error = f"{path}: {member.name} goes beyond the archive's end; fetch the archive again"
        audio.append((group, item))
    elif suffix in (".json", ".txt", ".cls") and member.size <= MAX_NOTE_BYTES:
        data = archive.extractfile(member)
        notes.setdefault(group, {}).update(_note(name, data.read() if data else b""))


def _note(name: str, data: bytes) -> dict[str, Any]:
    field = name.split(".", 1)[1].rsplit(".", 1)[-1]
    text = data.decode(errors="replace").strip()
    if field == "json":
        try:
            value = json.loads(text)
        except ValueError:
            return {"json": text}
        return value if isinstance(value, dict) else {"json": value}
    return {"text" if field == "txt" else field: text}


class Span(io.RawIOBase):
    """A range of a file as a file of its own."""

    def __init__(self, path: str, start: int, size: int, name: str) -> None:
        self.name = name
        self._file, self._start, self._size, self._at = open_file(path), start, size, 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position in the range."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves within the range."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Reads up to the range's end."""
        length = max(0, min(len(buffer), self._size - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(length)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()
        super().close()


class NamedBytes(io.BytesIO):
    """Bytes in memory that errors can name."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(data)
        self.name = name


def open_member(item: Item) -> BinaryIO:
    """The audio of an item that lies in an archive or a table.

    Raises:
        AudioFileError: It isn't there any more.
    """
    if isinstance(item.member, tuple):
        start, size = item.member
        if size > FETCHED_WHOLE:
            return io.BufferedReader(Span(item.path, start, size, item.where), 1 << 16)
        if "://" in item.path:
            system, name = remote_system(item.path)
            data = system.cat_file(name, start=start, end=start + size)
        else:
            with open(item.path, "rb") as file:
                file.seek(start)
                data = file.read(size)
        return NamedBytes(data, item.where)
    assert isinstance(item.member, int)
    with _tables_lock:
        table = _tables.pop(item.path, None) or _Table(item.path)
        _tables[item.path] = table
        while len(_tables) > _MAX_TABLES:
            _tables.popitem(last=False)
    return NamedBytes(table.bytes_of(item.member), item.where)


# --- Parquet and Arrow


def _arrow(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        remedy = "pip install 'codec[arrow]'"
        raise InputError(f"{path}: reading Parquet and Arrow files needs pyarrow ({error}); {remedy}") from error
    return pyarrow


def _batches(path: str, columns: Sequence[str] | None, rows: int) -> Iterator[Any]:
    """Record batches of some columns, from the first row on."""
    pyarrow = _arrow(path)
    try:
        if path.lower().endswith(".parquet"):
            source = path if "://" not in path else open_file(path)
            yield from pyarrow.parquet.ParquetFile(source).iter_batches(batch_size=rows, columns=columns)
            return
        source = pyarrow.memory_map(path) if "://" not in path else open_file(path)
        try:
            reader = pyarrow.ipc.open_stream(source)  # as datasets saves them
            batches: Iterator[Any] = iter(reader)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
        for batch in batches:
            yield batch if columns is None else batch.select(columns)
    except Exception as error:
        if not isinstance(error, pyarrow.ArrowException):
            raise
        raise AudioFileError(f"{path}: isn't readable as a table ({error}); fetch it again") from error


def _schema(path: str) -> Any:
    pyarrow = _arrow(path)
    try:
        if path.lower().endswith(".parquet"):
            with open_file(path) as file:
                return pyarrow.parquet.read_schema(file)
        with open_file(path) as file:
            try:
                return pyarrow.ipc.open_stream(file).schema
            except pyarrow.ArrowInvalid:
                file.seek(0)
                return pyarrow.ipc.open_file(file).schema
    except pyarrow.ArrowException as error:
        raise AudioFileError(f"{path}: isn't readable as a table ({error}); fetch it again") from error


def _audio_column(path: str) -> str:
    """The column that holds encoded audio: a struct with `bytes`, as datasets has it, or bytes of that name."""
    pyarrow = _arrow(path)
    schema = _schema(path)
    types = pyarrow.types
    for column in schema:
        if types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
            return str(column.name)
    for column in schema:
        if (types.is_binary(column.type) or types.is_large_binary(column.type)) and column.name in (
            "audio",
            "bytes",
            "wav",
        ):
            return str(column.name)
    raise AudioFileError(
        f"{path}: has the columns {schema.names}, none with audio bytes; it needs a struct with `bytes`, as `datasets` "
        "makes it, or a binary column `audio`"
    )


def _list_table(prefix: str, path: str) -> list[Item]:
    audio = _audio_column(path)
    schema = _schema(path)
    others = [name for name in schema.names if name != audio]
    size, mtime = -1, -1
    if "://" not in path:
        status = os.stat(path)
        size, mtime = status.st_size, status.st_mtime_ns
    items: list[Item] = []
    # Of the audio, its path alone: Parquet reads a struct's fields apart.
    has_path = (
        _arrow(path).types.is_struct(schema.field(audio).type) and schema.field(audio).type.get_field_index("path") >= 0
    )
    wanted = others + ([f"{audio}.path"] if has_path and path.lower().endswith(".parquet") else [])
    for batch in _batches(path, wanted if path.lower().endswith(".parquet") else None, 4096):
        names = batch.column(batch.schema.get_field_index(audio)).field("path").to_pylist() if has_path else []
        for row, fields in enumerate(batch.select(others).to_pylist() if others else [{}] * batch.num_rows):
            meta = {name: _plain(value) for name, value in fields.items() if _is_plain(value)}
            if names and names[row]:
                meta["path"] = names[row]
            item = Item(f"{prefix}/{len(items):08d}", path, len(items), meta=meta or None)
            item.num_bytes, item.mtime_ns = size, mtime
            items.append(item)
    for item in items:
        item.num_bytes = size // len(items) if size > 0 else -1
    return items


def _is_plain(value: Any) -> bool:
    if isinstance(value, bytes | bytearray) or value is None:
        return False
    return not (isinstance(value, float) and not math.isfinite(value))


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        return str(value)
    return value


class _Table:
    """The audio of a table's rows, asked for more or less in order."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._column = _audio_column(path)
        self._lock = threading.Lock()
        self._restart()

    def _restart(self) -> None:
        self._batches = _batches(self._path, [self._column], _ROWS_AT_ONCE)
        self._kept: OrderedDict[int, Any] = OrderedDict()  # first row → batch
        self._next = 0

    def bytes_of(self, row: int) -> bytes:
        """The encoded audio of a row."""
        with self._lock:
            if row < next(iter(self._kept), self._next):
                self._restart()
            while row >= self._next:
                batch = next(self._batches, None)
                if batch is None:
                    raise AudioFileError(f"{self._path}: has {self._next} rows, row {row} was there; list it again")
                self._kept[self._next] = batch
                self._next += batch.num_rows
                while len(self._kept) > 4:
                    self._kept.popitem(last=False)
            first = max(start for start in self._kept if start <= row)
            value = self._kept[first].column(0)[row - first].as_py()
        if isinstance(value, dict):
            data, path = value.get("bytes"), value.get("path")
            if data is None and path:
                place = path if os.path.isabs(path) else os.path.join(os.path.dirname(self._path), path)
                with open_file(place) as file:
                    data = file.read()
            value = data
        if not value:
            raise AudioFileError(f"{self._path}: row {row} holds no audio; remove the row")
        return bytes(value)


_MAX_TABLES = 4
_tables: OrderedDict[str, _Table] = OrderedDict()
_tables_lock = threading.Lock()
