"""What a store holds of a corpus: what is done, what has changed, what is gone; and putting the changed out of it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from codec import audio
from codec.encode.items import Item
from codec.encode.place import LOCK_SECONDS, SOURCES_SUFFIX, Place
from codec.encode.reading import Entry, content_digest, fetch, item_meta, row_keys
from codec.encode.settings import EncodeSettings
from codec.encode.sink import append_lines, meta_digest
from codec.errors import InputError, TokenFileError
from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter
from codec.tokens.files import SUFFIX, UNFINISHED, LocalFile
from codec.tokens.layout import Header, codec_differences, encode_header, header_bytes, parse_header
from codec.tokens.records import whole_records

_LINES_AT_ONCE = 4096
_UNKNOWN, _SAME, _CHANGED, _OTHER_META = 0, 1, 2, 3


@dataclass
class Examined:
    """What a store holds of the items of a corpus.

    Attributes:
        stored: int64 `[items]`: samples of each item that is there, -1 of the others.
        rows: int64 `[items]`: rows of each item that is there (more than one where channels were split); 1 of others.
        elsewhere: bool `[items]`: whether it is in a shard of an earlier plan.
        changed: Items that were there and whose source has changed since: taken out, to be encoded again.
        updated: Items whose metadata alone has changed: written anew, with the codes that they had.
        removed: Keys that are there and no longer among the items.
        held: Keys whose source has changed in a shard that another process is writing.
        plan: The plan's hash.
    """

    stored: NDArray[np.int64]
    rows: NDArray[np.int64]
    elsewhere: NDArray[np.bool_]
    changed: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)
    plan: str = ""


class _Survey:
    """Reads a store's shards and sources' lists against the items."""

    def __init__(self, items: Sequence[Item], settings: EncodeSettings) -> None:
        self.items, self._settings = items, settings
        self.number = {item.key: i for i, item in enumerate(items)}
        count = len(items)
        self.state = np.zeros(count, np.uint8)
        self.rows = np.ones(count, np.int64)
        self.samples = np.full(count, -1, np.int64)
        self.found = np.zeros(count, np.int64)
        self.shard = np.full(count, -1, np.int64)
        self.removed: list[str] = []
        self.lines: dict[int, list[Any]] = {}

    def read_sources(self, shard: int, path: str, text: str) -> None:
        """Takes the list of sources of a shard whose keys were taken; a later line of an item counts."""
        for row in _rows(text.splitlines()):
            if isinstance(row, dict):
                self._check_settings(path, row)
                continue
            number = self.number.get(row[0])
            if number is not None and self.shard[number] == shard:  # else it was taken out of this one
                self.state[number] = self._compare(self.items[number], row)
                self.rows[number] = row[3]
                if self.state[number] == _OTHER_META:
                    self.lines[number] = row

    def _check_settings(self, path: str, then: dict[str, Any]) -> None:
        now = self._settings.lasting()
        for name, value in then.items():
            if name in now and now[name] != value:
                raise InputError(
                    f"{path}: was encoded with {name}={value!r}, now it is {now[name]!r}; go on with the same setting, "
                    "or write to another store"
                )

    def _compare(self, item: Item, row: list[Any]) -> int:
        if len(row) == 4 and row[1] == item.num_bytes != -1 and row[2] == item.mtime_ns != -1 and item.is_plain:
            return _SAME  # as below: most items of most corpora
        _, num_bytes, mtime_ns, _, span, digest, meta = _padded(row)
        if span != item.span:
            return _CHANGED
        same = _SAME if meta == meta_digest(item.meta) else _OTHER_META
        if self._settings.compare == "content" and digest is not None:
            try:
                return same if content_digest(item) == digest else _CHANGED
            except Exception:  # it can't be read now: encoding it will say so
                return _CHANGED
        if -1 in (num_bytes, item.num_bytes):
            return _UNKNOWN if same == _SAME else same
        known = mtime_ns != -1 and item.mtime_ns != -1
        return same if num_bytes == item.num_bytes and (not known or mtime_ns == item.mtime_ns) else _CHANGED

    def take(self, shard: int, keys: Iterable[str], samples: ArrayLike) -> None:
        """Takes a shard's keys and their samples."""
        numbers = np.array([self._number_of(key) for key in keys], np.int64)
        known = numbers >= 0
        numbers = numbers[known]
        self.found += np.bincount(numbers, minlength=len(self.found))
        self.samples[numbers] = np.asarray(samples, np.int64)[known]
        self.shard[numbers] = shard

    def _number_of(self, key: str) -> int:
        """The item that a key belongs to, perhaps as one of its channels; -1 if none."""
        number = self.number.get(key)
        if number is None and "#" in key:
            number = self.number.get(key.rpartition("#")[0])
        if number is None:
            self.removed.append(key)
            return -1
        return number


def _padded(row: list[Any]) -> list[Any]:
    return [*row, *[None] * (7 - len(row))][:7]


def _rows(lines: list[str]) -> Iterator[Any]:
    """The lines' JSON; a line that was cut when its writer died is left out."""
    for first in range(0, len(lines), _LINES_AT_ONCE):
        part = lines[first : first + _LINES_AT_ONCE]
        try:
            yield from json.loads("[" + ",".join(part) + "]")
        except ValueError:
            yield from (row for row in map(_line, part) if row is not None)


def _line(line: str) -> Any:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) or (isinstance(row, list) and len(row) >= 4) else None


def _unfinished_items(path: Path, expected: Header) -> Iterator[tuple[str, int]]:
    """Keys and samples of the whole records of an unfinished shard."""
    file = LocalFile(f"{path}{UNFINISHED}")
    try:
        size = header_bytes(file.path, file.read(0, min(file.size, 1 << 16)), file.size)
        header = parse_header(file.path, file.read(0, size))
        _check_codec(file.path, header, expected)
        for head, _, _ in whole_records(file, header):
            yield head.key.decode(), head.num_samples
    finally:
        file.close()


def _check_codec(path: str, header: Header, expected: Header) -> None:
    differences = codec_differences(header, expected)
    if differences:
        remedy = "resume with the codec that wrote it, or write to another path"
        raise TokenFileError(f"{path}: differs from this codec in {differences}; {remedy}")


def expected_header(spec: CodecSpec, settings: EncodeSettings) -> Header:
    """The header of the shards that these settings make."""
    spec = spec.token_spec
    quantizers = settings.n_quantizers or spec.n_quantizers
    start = encode_header(spec, quantizers, (1,) * quantizers)
    return Header(spec, quantizers, (1,) * quantizers, len(start))


@dataclass
class _Stale:
    """What a store's shards hold that isn't right any more.

    Attributes:
        shards: The shards.
        changed: int64 `[items]`: number of the shard that an item is to be taken out of; -1 of the others.
        updated: int64 `[items]`: number of the shard that an item's metadata is to be renewed in; -1 of the others.
        lines: Of the latter, what the list of sources says of them.
    """

    shards: list[str]
    changed: NDArray[np.int64]
    updated: NDArray[np.int64]
    lines: dict[int, list[Any]]


def _survey(
    place: Place, items: Sequence[Item], spec: CodecSpec, settings: EncodeSettings, plan: str
) -> tuple[Examined, _Stale]:
    """What the store holds, and what of that is to be put right."""
    shards = place.shards()
    seen = _seen(place, shards, items, spec, settings)
    there = seen.found > 0
    whole = seen.found >= seen.rows
    updated = there & whole & (seen.state == _OTHER_META)
    changed = there & ((seen.state == _CHANGED) | ((seen.state == _OTHER_META) & ~whole))
    complete = there & ~changed & whole
    elsewhere = np.zeros(len(items), bool)
    if shards:
        others = np.array([not _of_plan(place, shard, plan) for shard, _ in shards], bool)
        elsewhere = complete & others[seen.shard]
    examined = Examined(
        np.where(complete, seen.samples, -1),
        np.where(complete, np.maximum(seen.rows, seen.found), 1),
        elsewhere,
        removed=seen.removed,
        plan=plan,
    )
    of_changed, of_updated = (np.where(which, seen.shard, -1) for which in (changed, updated))
    return examined, _Stale([shard for shard, _ in shards], of_changed, of_updated, seen.lines)


def stored_since(
    place: Place, shards: Sequence[str], items: Sequence[Item], spec: CodecSpec, settings: EncodeSettings
) -> tuple[list[int], list[int]]:
    """What some shards hold of some items by now: samples of each (-1: not all of it), and rows."""
    present = [(shard, finished) for shard, finished in place.shards() if shard in shards]
    seen = _seen(place, present, items, spec, settings)
    complete = (seen.found > 0) & (seen.found >= seen.rows)
    rows = np.where(complete, np.maximum(seen.rows, seen.found), 1)
    return np.where(complete, seen.samples, -1).tolist(), rows.tolist()


def _seen(
    place: Place,
    shards: Sequence[tuple[str, bool]],
    items: Sequence[Item],
    spec: CodecSpec,
    settings: EncodeSettings,
) -> _Survey:
    expected = expected_header(spec, settings)
    seen = _Survey(items, settings)
    for number, (shard, finished) in enumerate(shards):
        if finished:
            with TokenStore(place.where(shard)) as store:
                _check_codec(place.where(shard), store._header, expected)
                seen.take(number, store.keys(), store.num_samples)
        else:
            pairs = list(_unfinished_items(place.path(shard), expected))
            seen.take(number, [key for key, _ in pairs], [length for _, length in pairs])
        seen.read_sources(number, place.where(shard), place.sources(shard))
    return seen


def _of_plan(place: Place, shard: str, plan: str) -> bool:
    return place.name is not None or shard.endswith(f"-{plan}{SUFFIX}")


def examine(place: Place, items: Sequence[Item], spec: CodecSpec, settings: EncodeSettings, plan: str) -> Examined:
    """Looks at what a store holds, finishes what earlier plans left, and takes out what has changed.

    A shard can't be changed in place: one with stale items is written anew without them, beside the old one, and
    renamed over it. The items are then encoded again like new ones. Where only the metadata is another, the items are
    written anew with the codes that they have.

    Raises:
        InputError: The store was made with other settings.
        TokenFileError: It is of another codec, or damaged.
    """
    with place.lock():
        for shard, finished in place.shards():
            shutil.rmtree(place.rewritten(shard).parent, ignore_errors=True)
            if not finished and not _of_plan(place, shard, plan):
                _finish(place.path(shard))
        examined, stale = _survey(place, items, spec, settings, plan)
        changed: list[str] = []
        updated: list[str] = []
        held: list[int] = []
        for number in sorted({*stale.changed.tolist(), *stale.updated.tolist()} - {-1}):
            members = np.flatnonzero(stale.changed == number).tolist()
            keys = {items[i].key for i in members}
            entries = {}
            for i in np.flatnonzero(stale.updated == number).tolist():
                entry = _with_header(items[i], int(examined.rows[i]))
                if entry is None:  # it can't be read now: encoding it will say so
                    keys.add(items[i].key)
                    continue
                entries[items[i].key] = entry, [*_padded(stale.lines[i])[:6], meta_digest(items[i].meta)]
            try:
                _write_anew(place, stale.shards[number], keys, entries, spec, settings)
            except TokenFileError as error:
                if not is_held(error):
                    raise
                held += members
                continue
            changed += sorted(keys)
            updated += sorted(entries)
        if changed or updated:
            examined, _ = _survey(place, items, spec, settings, plan)
        examined.changed, examined.updated, examined.held = changed, updated, [items[i].key for i in held]
        examined.elsewhere[held] = True  # whoever writes that shard goes on with it
    return examined


def is_held(error: TokenFileError) -> bool:
    """Whether the error is that another process is writing the shard."""
    return "another writer holds" in str(error)


def _finish(path: Path) -> None:
    """Finishes the shard of an earlier plan as it is; waits for a process that is just doing so."""
    started = time.monotonic()
    while Path(f"{path}{UNFINISHED}").exists():
        try:
            header = _header_of(path)
            writer = TokenWriter(
                path,
                header.spec,
                n_quantizers=header.n_quantizers,
                frame_divisors=header.frame_divisors,
                resume=True,
            )
        except TokenFileError as error:
            if not is_held(error) or time.monotonic() - started > LOCK_SECONDS:
                raise
            time.sleep(0.2)
            continue
        if len(writer):
            writer.close()
        else:
            writer.abandon()
            Path(f"{path}{UNFINISHED}").unlink(missing_ok=True)


def _header_of(path: Path) -> Header:
    file = LocalFile(f"{path}{UNFINISHED}")
    try:
        size = header_bytes(file.path, file.read(0, min(file.size, 1 << 16)), file.size)
        return parse_header(file.path, file.read(0, size))
    finally:
        file.close()


def _with_header(item: Item, num_rows: int) -> Entry | None:
    """An item with what its metadata takes from the file; None if that can't be read."""
    if item.error is not None:
        return None
    try:
        info = audio.audio_info(fetch(item))
    except Exception:
        return None
    entry = Entry(item, 0, row_keys(item.key, num_rows))
    entry.source_rate, entry.source_channels = info.sample_rate, info.channels
    return entry


def _write_anew(
    place: Place,
    shard: str,
    stale: set[str],
    updated: dict[str, tuple[Entry, list[Any]]],
    spec: CodecSpec,
    settings: EncodeSettings,
) -> None:
    """Writes a shard anew without some items (and their channels), and with other metadata of others."""
    metas = {key: item_meta(entry, row, spec) for entry, _ in updated.values() for row, key in enumerate(entry.keys)}
    place.fetch(shard)
    path, target = place.path(shard), place.rewritten(shard)
    # Opening it takes the lock of one that is unfinished; closing finishes it.
    TokenWriter(path, spec, n_quantizers=settings.n_quantizers, resume=True).close()
    target.parent.mkdir(parents=True, exist_ok=True)
    with TokenStore(path) as store:
        with TokenWriter(target, spec, n_quantizers=settings.n_quantizers, force=True) as writer:
            for key in store.keys():
                if key in metas:
                    info = store.info(key)
                    writer.add(key, store.read(key), num_samples=info.num_samples, gain=info.gain, meta=metas[key])
                elif key not in stale and key.rpartition("#")[0] not in stale:
                    writer.copy(store, key)
        empty = len(writer) == 0
    if empty:
        place.remove(shard)
    else:
        os.replace(target, path)
        if updated:
            append_lines(Path(f"{path}{SOURCES_SUFFIX}"), [line for _, line in updated.values()])
        place.publish(shard)
    shutil.rmtree(target.parent, ignore_errors=True)
