"""Manifests → items: JSONL, CSV and TSV with a column of paths; NeMo and lhotse; Kaldi's wav.scp and segments."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from codec.encode.items import Item, remote_system
from codec.errors import AudioFileError, CodecError, InputError
from codec.frames import exact_seconds

PATH_COLUMNS = ("path", "audio_filepath", "audio_path", "audio_file", "audio", "file", "filename", "wav")
KEY_COLUMNS = ("key", "id", "utt_id", "uttid", "utterance_id")
START_COLUMNS = ("start", "offset", "start_seconds", "begin")
STOP_COLUMNS = ("stop", "end", "stop_seconds", "end_seconds")
# Of the file, not of the item: what is true of it is found in the file.
_FILE_COLUMNS = ("sample_rate", "sampling_rate", "num_samples", "num_frames")


def read_manifest(path: str, meta: Sequence[str] | None) -> list[Item]:
    """The items of a manifest. A row that can't be understood becomes an item with an error.

    Paths are taken relative to the manifest's folder, or as they are if there is no such file. `start`, `stop` and
    `duration` are seconds. `.json` may hold one object per line (NeMo) or a list.

    Args:
        path: A local path or URL; `.csv`, `.tsv`, `.scp` (with `segments`, `text`, `utt2spk` beside it), or JSON
            lines, any of them also with `.gz`.
        meta: The columns that become metadata; all that aren't used otherwise if None.

    Raises:
        AudioFileError: The manifest can't be read.
        InputError: No path column, or no row has a column of `meta`.
    """
    name = path.lower().removesuffix(".gz")
    if name.endswith(".scp"):
        items = _kaldi(path)
    else:
        rows = _table(path, "\t" if name.endswith(".tsv") else ",") if name.endswith((".csv", ".tsv")) else _json(path)
        items = [_item(path, number, row) for number, row in rows]
    seen: dict[str, int] = {}
    for number, item in enumerate(items):
        if item.key in seen:
            item.error = f"{path}: key {item.key!r} comes twice; give the rows different keys"
            item.key = f"{item.key} (row {number + 1})"
        seen[item.key] = number
    if meta is not None:
        _select(path, items, meta)
    return items


def _select(path: str, items: list[Item], names: Sequence[str]) -> None:
    found = {name for item in items for name in item.meta or ()}
    missing = [name for name in names if name not in found]
    if missing and items:
        raise InputError(f"{path}: no row has a column {missing[0]!r}; there are {sorted(found)}")
    for item in items:
        item.meta = {name: value for name, value in (item.meta or {}).items() if name in names} or None


def _text(path: str) -> str:
    try:
        if "://" in path:
            system, name = remote_system(path)
            data = system.cat_file(name)
        else:
            with open(path, "rb") as file:
                data = file.read()
        if path.lower().endswith(".gz"):
            data = gzip.decompress(data)
        return str(data, "utf-8-sig")
    except CodecError:
        raise
    except Exception as error:  # each of fsspec's file systems has its own
        raise AudioFileError(f"{path}: the manifest can't be read ({error}); give a UTF-8 text file") from error


def _json(path: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    text = _text(path)
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise InputError(f"{path}: isn't JSON ({error}); give a list of objects, or one per line") from error
        yield from enumerate(rows, 1)
        return
    for number, line in enumerate(io.StringIO(text), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                yield number, f"isn't JSON ({error}); repair the line"


def _table(path: str, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), delimiter=delimiter)
    if not set(PATH_COLUMNS) & set(reader.fieldnames or ()):
        raise InputError(f"{path}: its columns are {reader.fieldnames}; one must be one of {', '.join(PATH_COLUMNS)}")
    try:
        for row in reader:
            if None in row or None in row.values():
                yield reader.line_num, f"has not the {len(reader.fieldnames or ())} columns of the header; repair it"
            else:
                yield reader.line_num, {name: value for name, value in row.items() if value != ""}
    except csv.Error as error:
        raise InputError(f"{path}: line {reader.line_num} can't be read ({error}); repair it") from error


def _item(manifest: str, number: int, row: Any) -> Item:
    """One row; an item with an error if it can't be understood."""
    problem = row if isinstance(row, str) else ""
    if not problem:
        try:
            if not isinstance(row, dict):
                raise InputError(f"is {row!r}; it must be a JSON object")
            return _lhotse(manifest, row) if _is_lhotse(row) else _plain(manifest, row)
        except (InputError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            problem = str(error) if isinstance(error, InputError) else f"can't be understood ({error!r}); repair it"
    key = str(row["id"]) if isinstance(row, dict) and isinstance(row.get("id"), str) else ""
    return Item(key or f"{os.path.basename(manifest)}:{number}", manifest, error=f"{manifest}: line {number} {problem}")


def _plain(manifest: str, row: dict[str, Any]) -> Item:
    fields = dict(row)

    def take(names: Sequence[str]) -> Any:
        for name in names:
            if fields.get(name) is not None:
                return fields.pop(name)
        return None

    path = take(PATH_COLUMNS)
    if not isinstance(path, str):
        raise InputError(f"has the columns {sorted(row)}; one must be one of {', '.join(PATH_COLUMNS)}")
    key = take(KEY_COLUMNS)
    start, stop = take(START_COLUMNS), take(STOP_COLUMNS)
    first = None if start is None else exact_seconds(start)
    last = None if stop is None else exact_seconds(stop)
    if first is not None and last is None and fields.get("duration") is not None:
        last = first + exact_seconds(fields.pop("duration"))
    channel = take(("channel",))
    if key is None:
        key = _key_of(manifest, path)
        if start is not None or stop is not None:
            key += f"@{start if start is not None else 0}-{float(last) if last is not None else ''}"
        if channel is not None:
            key += f"#{channel}"
    kept = {name: value for name, value in fields.items() if name not in _FILE_COLUMNS and value is not None}
    return _checked(manifest, str(key), path, first, last, channel, kept)


def _checked(
    manifest: str,
    key: str,
    path: str,
    start: Fraction | None,
    stop: Fraction | None,
    channel: Any,
    meta: dict[str, Any],
) -> Item:
    if (start or 0) < 0 or (stop is not None and stop <= (start or 0)):
        raise InputError(
            f"goes from {float(start or 0)} s to {float(stop or 0)} s; it must start at 0 or later and end after"
        )
    place = locate(manifest, path)
    item = Item(key, place, start=start or None, stop=stop, meta=meta or None)
    item.channel = None if channel is None else int(channel)
    if "://" not in place:
        try:
            status = os.stat(place)
            item.num_bytes, item.mtime_ns = status.st_size, status.st_mtime_ns
        except OSError:
            pass  # reading it will say what is wrong
    return item


def locate(manifest: str, path: str) -> str:
    """A path of a manifest: relative to its folder, or as it is if there is no such file."""
    path = path.removeprefix("file://")
    if "://" in path or os.path.isabs(path):
        return path
    if "://" in manifest:
        return manifest.rsplit("/", 1)[0] + "/" + path
    beside = os.path.join(os.path.dirname(manifest), path)
    return path if os.path.exists(path) and not os.path.exists(beside) else beside


def _key_of(manifest: str, path: str) -> str:
    """A key from a path: relative to the manifest's folder if it is inside, without the root otherwise."""
    folder = os.path.abspath(os.path.dirname(manifest)) if "://" not in manifest else manifest.rsplit("/", 1)[0]
    path = path.removeprefix("file://")
    if path.startswith(folder + "/"):
        path = path[len(folder) + 1 :]
    path = path.split("://", 1)[-1]
    parts = [part for part in path.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts)


# --- lhotse


def _is_lhotse(row: dict[str, Any]) -> bool:
    return isinstance(row.get("sources"), list) or isinstance(row.get("recording"), dict) or "tracks" in row


def _lhotse(manifest: str, row: dict[str, Any]) -> Item:
    """A recording, or a cut with its recording inside."""
    if "tracks" in row:
        raise InputError("is a mix of several cuts; save it as audio with lhotse first")
    recording = row.get("recording") or row
    sources = recording["sources"]
    if len(sources) != 1:
        raise InputError(f"has {len(sources)} audio sources; one file per recording can be read")
    kind, path = sources[0]["type"], sources[0]["source"]
    if kind not in ("file", "url"):
        raise InputError(f"has a source of type {kind!r}; save it as a file first")
    meta: dict[str, Any] = {}
    start = stop = channel = None
    if recording is not row:
        start = exact_seconds(row.get("start", 0))
        stop = start + exact_seconds(row["duration"])
        if start == 0 and stop == exact_seconds(recording.get("duration", 0)):
            start = stop = None
        selected = row.get("channel", 0)
        several = len(recording.get("channel_ids") or sources[0].get("channels") or [0]) > 1
        channel = selected if several and isinstance(selected, int) else None
        for part in row.get("supervisions") or ():
            for name in ("text", "speaker", "gender", "language"):
                if part.get(name) is not None:
                    meta[name] = f"{meta[name]} {part[name]}" if name == "text" and name in meta else part[name]
        meta.update(row.get("custom") or {})
    return _checked(manifest, str(row["id"]), path, start, stop, channel, meta)


# --- Kaldi


def _kaldi(path: str) -> list[Item]:
    """wav.scp, and what lies beside it: segments, text, utt2spk, utt2gender."""
    recordings: dict[str, Item] = {}
    for number, (key, rest) in _pairs(path):
        try:
            if not rest:
                raise InputError("has no path; it must be: id path")
            if rest.endswith("|"):
                raise InputError("is a command, which isn't run; write its output to a file and name that")
            recordings[key] = _checked(path, key, rest, None, None, None, {})
        except InputError as error:
            recordings[key] = Item(key, path, error=f"{path}: line {number} {error}")
    folder = path[: len(path) - len(os.path.basename(path))]
    segments = folder + "segments"
    items = list(recordings.values())
    if "://" not in path and os.path.exists(segments):
        items = [_segment(segments, number, key, rest, recordings) for number, (key, rest) in _pairs(segments)]
    by_key = {item.key: item for item in items}
    for name, field in (("text", "text"), ("utt2spk", "speaker"), ("utt2gender", "gender")):
        if "://" not in path and os.path.exists(folder + name):
            for _, (key, rest) in _pairs(folder + name):
                if key in by_key:
                    by_key[key].meta = {**(by_key[key].meta or {}), field: rest}
    return items


def _segment(path: str, number: int, key: str, rest: str, recordings: dict[str, Item]) -> Item:
    try:
        name, start, stop = rest.split()[:3]
        source = recordings[name]
        if source.error:
            return Item(key, source.path, error=source.error)
        first, last = exact_seconds(start), exact_seconds(stop)
        # Kaldi writes -1 for "to the end".
        meta = {"recording": name}
        return _checked(path, key, source.path, first, None if last == -1 else last, None, meta)
    except (ValueError, KeyError, InputError) as error:
        problem = f"can't be used ({error}); it must be: utterance recording start end"
        return Item(key, path, error=f"{path}: line {number} {problem}")


def _pairs(path: str) -> Iterator[tuple[int, tuple[str, str]]]:
    for number, line in enumerate(_text(path).splitlines(), 1):
        if line.strip():
            key, _, rest = line.strip().partition(" ") if " " in line.strip() else line.strip().partition("\t")
            yield number, (key, rest.strip())
