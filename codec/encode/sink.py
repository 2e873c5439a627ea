"""Where a part's codes go: its shards, and beside each the list of the files that they were made of."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from codec.encode.items import Item
from codec.encode.place import SOURCES_SUFFIX, Place
from codec.encode.reading import Entry, item_meta
from codec.encode.settings import EncodeSettings
from codec.errors import TokenFileError
from codec.spec import CodecSpec
from codec.tokens import TokenWriter
from codec.tokens.files import UNFINISHED


class Sink:
    """Writes a part's items, in order, to a shard; to another one when it has become large enough.

    A source's line is written before its items: an item that is there has a line.

    Args:
        place: Where the store is.
        shard_name: The name of the n-th shard of the part; where that is always the same, it has one.
        spec: The codec.
        settings: How items become codes.
    """

    def __init__(
        self, place: Place, shard_name: Callable[[int], str], spec: CodecSpec, settings: EncodeSettings
    ) -> None:
        self._place, self._name_of, self._number = place, shard_name, 0
        self._spec, self._settings = spec, settings
        while shard_name(self._number + 1) != shard_name(self._number) and place.exists(shard_name(self._number + 1)):
            self._number += 1
        self._writer: TokenWriter | None = None
        self._lines: int | None = None

    @property
    def path(self) -> Path:
        """The shard that is being written."""
        return self._place.path(self._name_of(self._number))

    def begin_unit(self, *, begun: bool) -> None:
        """A new unit of items begins; a shard that is large enough is closed, unless it holds some of them."""
        limit = self._settings.shard_bytes
        if begun or not limit:
            return
        present = [path for path in (self.path, Path(f"{self.path}{UNFINISHED}")) if path.exists()]
        if present and max(path.stat().st_size for path in present) >= limit:
            self.close()
            self._number += 1

    def hold(self) -> None:
        """Takes the shard now, so that nobody else writes it meanwhile; otherwise that is done with the first item."""
        self._open()

    def _open(self) -> TokenWriter:
        if self._writer is None:
            path = self.path
            path.parent.mkdir(parents=True, exist_ok=True)
            self._place.fetch(path.name)
            self._writer = TokenWriter(path, self._spec, n_quantizers=self._settings.n_quantizers, resume=True)
            lines = Path(f"{path}{SOURCES_SUFFIX}")
            new = not lines.exists() or lines.stat().st_size == 0
            self._lines = _open_lines(lines)
            if new:
                self._write_lines([self._settings.lasting()])
        return self._writer

    def _write_lines(self, lines: Iterable[Any]) -> None:
        assert self._lines is not None
        _write_lines(self._lines, f"{self.path}{SOURCES_SUFFIX}", lines)

    def _state(self, entry: Entry) -> list[Any]:
        return source_line(entry.item, entry.num_rows, entry.digest)

    def announce(self, entries: Iterable[Entry]) -> None:
        """Writes the sources' lines of items that are about to be added."""
        writer = self._open()
        self._write_lines(self._state(entry) for entry in entries if not all(key in writer for key in entry.keys))

    def add(self, entry: Entry) -> int:
        """Writes an item that was announced and whose codes are there; the rows that weren't in the shard."""
        writer = self._open()
        written = 0
        for row, (key, codes, gain) in enumerate(zip(entry.keys, entry.codes, entry.gains, strict=True)):
            if key not in writer:
                meta = item_meta(entry, row, self._spec)
                writer.add(key, codes, num_samples=entry.num_samples, gain=gain, meta=meta)
                written += 1
        return written

    def begin(self, entry: Entry, row: int, gain: float | None) -> None:
        """Starts a row whose codes come in pieces."""
        writer = self._open()
        if row == 0:
            self._write_lines([self._state(entry)])
        writer.begin(entry.keys[row], gain=gain, meta=item_meta(entry, row, self._spec))

    def has(self, key: str) -> bool:
        """Whether the shard holds the key."""
        return key in self._open()

    def append(self, codes: Any) -> None:
        """The next frames of the row that was begun."""
        self._open().append(codes)

    def end(self, num_samples: int) -> None:
        """Ends the row that was begun."""
        self._open().end(num_samples)

    def cancel(self) -> None:
        """Drops the row that was begun."""
        self._open().cancel()

    def close(self) -> None:
        """Finishes the shard, if anything is in it."""
        path = self.path
        if self._writer is None and Path(f"{path}{UNFINISHED}").exists():
            self._open()
        writer, self._writer = self._writer, None
        if self._lines is not None:
            os.close(self._lines)
            self._lines = None
        if writer is None:
            return
        if len(writer):
            writer.close()
            self._place.publish(path.name)
        else:
            writer.abandon()
            for leftover in (f"{path}{UNFINISHED}", f"{path}{SOURCES_SUFFIX}"):
                Path(leftover).unlink(missing_ok=True)

    def abandon(self) -> None:
        """Stops without finishing: what is written is gone on with later."""
        if self._writer is not None:
            self._writer.abandon()
            self._writer = None
        if self._lines is not None:
            os.close(self._lines)
            self._lines = None


def append_lines(path: Path, lines: Iterable[Any]) -> None:
    """Adds lines to a list of sources."""
    descriptor = _open_lines(path)
    try:
        _write_lines(descriptor, str(path), lines)
    finally:
        os.close(descriptor)


def _open_lines(path: Path) -> int:
    """A list of sources, to be added to; ends the last line if its writer died within it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            os.write(descriptor, b"\n")
    except OSError as error:
        raise TokenFileError(f"{path}: can't be written ({error.strerror}); check the folder") from error
    return descriptor


def _write_lines(descriptor: int, path: str, lines: Iterable[Any]) -> None:
    text = "".join(json.dumps(line, separators=(",", ":"), ensure_ascii=False) + "\n" for line in lines)
    try:
        os.write(descriptor, text.encode())
    except OSError as error:
        raise TokenFileError(f"{path}: can't be written ({error.strerror}); make room") from error


def source_line(item: Item, num_rows: int, digest: str | None) -> list[Any]:
    """What is kept of an item's source, without what is unknown at its end."""
    line = [item.key, item.num_bytes, item.mtime_ns, num_rows, item.span, digest, meta_digest(item.meta)]
    while line[-1] is None:
        line.pop()
    return line


def meta_digest(meta: dict[str, Any] | None) -> str | None:
    """A hash of an item's own metadata; None if it has none."""
    if not meta:
        return None
    text = json.dumps(meta, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).hexdigest()
