"""An evaluation as a whole: clips × coders, measured in parallel, resumable; and the records made of it."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from codec.audio import find_audio
from codec.errors import InputError
from codec.evaluate.align import Delay
from codec.evaluate.coders import (
    ORIGINAL,
    CodecCoder,
    Coder,
    FileCoder,
    Original,
    StoreCoder,
    checked_quantizers,
    parse_codec,
)
from codec.evaluate.files import parse_against
from codec.evaluate.metrics import METRICS, chosen_metrics, missing_metrics
from codec.evaluate.results import REPORT_FILE, Evaluation
from codec.evaluate.tasks import (
    Measured,
    Progress,
    Settings,
    Source,
    Workers,
    default_workers,
    unpack_codes,
    unpack_features,
)
from codec.evaluate.training import classes_of, training_notices
from codec.model import Codec
from codec.tokens import TokenStore, TokenWriter

PROGRESS_FILE = "progress.jsonl"
PathLike = str | os.PathLike[str]


def evaluate(
    codecs: Sequence[str | Codec],
    inputs: Sequence[PathLike],
    output: PathLike,
    *,
    against: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    sample_rate: int | None = None,
    max_seconds: float = 10.0,
    max_files: int | None = None,
    level: Literal["kept", "matched"] = "kept",
    texts: Mapping[str, str] | None = None,
    device: str = "cpu",
    workers: int | None = 0,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Measures what codecs make of audio files, beside conventional codecs.

    Each codec's constant delay is found from a few clips and taken off. Copies come back to the rate of comparison;
    where original and copy differ in channels, both are mixed to one. A metric that is undefined for a clip (too short,
    silent, no speech, or its package breaks) is None there, and the row says why. The same call again goes on where an
    interrupted one stopped.

    Args:
        codecs: What `load_codec` takes; "NAME@2,4,8" for these numbers of codebooks (by default powers of two and
            all). A loaded codec is measured in this process only (`workers=0`).
        inputs: Audio files and folders.
        output: Folder for the records: rows.csv, rows.parquet (where pyarrow is installed), summary.csv, report.json.
        against: Conventional codecs: "opus:6,12", "mp3:16,32" (kbps), "codec2:3200" (bps).
        metrics: Names of `METRICS`; by default all that are installed, but for those by recognisers.
        sample_rate: Hz at which originals and copies are compared; by default the highest of the codecs, or 16000.
        max_seconds: Of each file, from its start.
        max_files: At most so many files, evenly spread over those found.
        level: "matched" brings each copy to the RMS of its original first; `level_db` has the gain.
        texts: key → the words that are spoken, for the word error rate; without them the words recognised in the
            original are what counts.
        device: Where the codecs run.
        workers: Processes; None takes one per core, 0 this one. With processes, a crash in a package's native code
            takes only its clip with it; a script that asks for them needs `if __name__ == "__main__":`.
        force: Begin anew.
        on_progress: Called after each clip of each coder with (done, in all, audio seconds so far).

    Raises:
        InputError: Nothing to measure, a metric whose package is missing (and the extra that brings it), a
            conventional codec that FFmpeg lacks, a folder that was begun with other settings.
        CheckpointError: A codec can't be loaded.

    Example:
        >>> evaluation = evaluate(["speech_16k@4,8"], ["tests/data"], "report", against=["opus:6,12"])  # doctest: +SKIP
        >>> evaluation.statistic("speech_16k@8", "pesq_wb").mean  # doctest: +SKIP
        2.41
    """
    coders: list[Coder] = [Original()]
    for given in codecs:
        if isinstance(given, str):
            name, counts = parse_codec(given)
            coders.append(CodecCoder(name, counts, device))
        else:
            if workers not in (None, 0):
                raise InputError(f"workers is {workers}, but a loaded codec stays in this process; pass its name, or 0")
            workers = 0
            coders.append(CodecCoder(given))
    _make_labels_unique([coder for coder in coders if isinstance(coder, CodecCoder)])
    coders += [FileCoder(kind, bps) for text in against for kind, bps in parse_against(text)]
    if len(coders) == 1:
        raise InputError("nothing to evaluate: give at least one codec, or one to compare against")
    found = find_audio(inputs)
    sources = [Source(key, str(Path(path).resolve()), (texts or {}).get(key)) for key, path in spread(found, max_files)]
    rates = [coder.spec.sample_rate for coder in coders if isinstance(coder, CodecCoder)]
    return _run(
        coders,
        sources,
        Path(output),
        Settings(sample_rate or max(rates, default=16000), tuple(chosen_metrics(metrics)), max_seconds, level),
        workers=workers,
        force=force,
        on_progress=on_progress,
    )


def compare_store(
    store: PathLike,
    originals: Sequence[PathLike],
    output: PathLike,
    *,
    codec: str | None = None,
    max_files: int = 50,
    metrics: Sequence[str] | None = None,
    sample_rate: int | None = None,
    max_seconds: float = 10.0,
    level: Literal["kept", "matched"] = "kept",
    device: str = "cpu",
    workers: int | None = 0,
    force: bool = False,
    on_progress: Progress | None = None,
) -> Evaluation:
    """Measures an existing token store against the files it was made of: a sample of its items, evenly spread.

    Args:
        store: A `.ctok` file, or a folder of them.
        originals: The audio files and folders that were encoded; an item's key must be a file's key.
        output: As of `evaluate`.
        codec: What decodes the store, "NAME@2,4,8" for these numbers of codebooks; by default the one it names.
        max_files: Items in the sample.
        metrics: As of `evaluate`, and so the rest.
        sample_rate: As of `evaluate`.
        max_seconds: Items longer than this are left out: a store's item is decoded whole.
        level: As of `evaluate`.
        device: As of `evaluate`.
        workers: As of `evaluate`.
        force: As of `evaluate`.
        on_progress: As of `evaluate`.

    Raises:
        InputError: As of `evaluate`; no item's key is a file's key, or all items are too long.
        TokenFileError: The store is damaged, or of another codec.
    """
    tokens = TokenStore(store)
    name, counts = parse_codec(codec or tokens.spec.name)
    limit = tokens.n_quantizers
    decoder = CodecCoder(name, counts or checked_quantizers((), limit, name), device)
    if decoder.n_quantizers[-1] > limit:
        raise InputError(
            f"{decoder.n_quantizers[-1]} codebooks are asked for; {store} holds {limit}: give 1 to {limit}"
        )
    decoder.spec.check_tokens(tokens.spec)
    paths = dict(find_audio(originals))
    keys = list(tokens.keys())
    known = [key for key in keys if key in paths]
    if not known:
        raise InputError(
            f"none of the {len(keys)} keys of {store} ({keys[0]!r} …) is that of a file in "
            f"{', '.join(map(str, originals))} ({next(iter(paths))!r} …); give the folder that was encoded"
        )
    short = [key for key in known if tokens.info(key).seconds <= max_seconds]
    if not short:
        raise InputError(f"all {len(known)} items are longer than {max_seconds:g} s; raise max_seconds")
    sources = [Source(key, str(paths[key].resolve())) for key in spread(short, max_files)]
    evaluation = _run(
        [Original(), StoreCoder(os.path.abspath(store), decoder)],
        sources,
        Path(output),
        Settings(sample_rate or tokens.spec.sample_rate, tuple(chosen_metrics(metrics)), max_seconds, level),
        workers=workers,
        force=force,
        on_progress=on_progress,
        facts={
            "store": os.path.abspath(store),
            "store_items": len(keys),
            "store_items_without_file": len(keys) - len(known),
            "store_items_too_long": len(known) - len(short),
            "store_bitrate_bps": tokens.num_bytes * 8 * tokens.spec.sample_rate / int(tokens.num_samples.sum()),
        },
    )
    return evaluation


def spread(found: Sequence[Any], most: int | None) -> list[Any]:
    """At most so many, evenly spread, the first and the last included."""
    if most is not None and most < 1:
        raise InputError(f"max_files is {most}; it must be at least 1")
    if most is None or most >= len(found):
        return list(found)
    if most == 1:
        return [found[0]]
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _make_labels_unique(coders: Sequence[CodecCoder]) -> None:
    """Two checkpoints of one name are told apart by their weights."""
    named = [(coder, coder.label, coder.spec.weights_hash) for coder in coders]
    for coder, label, weights in named:
        if any(label == other and weights != others for _, other, others in named):
            coder.label = f"{label} ({weights[:6]})"
    labels = [condition.label for coder in coders for condition in coder.conditions]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise InputError(f"{twice} is given twice; give each codec once, with all its codebooks: NAME@2,4,8")


def _describe(coder: Coder) -> dict[str, Any]:
    """A coder as JSON types, from which `restored_coders` makes it again."""
    if isinstance(coder, FileCoder):
        return {"kind": "file", "format": coder.kind, "bps": coder.bps}
    if isinstance(coder, StoreCoder):
        return {"kind": "store", "store": coder.store, "codec": _describe(coder.codec)}
    if isinstance(coder, CodecCoder):
        name = coder.codec if isinstance(coder.codec, str) else None
        if name is not None and os.path.exists(name):
            name = os.path.abspath(name)
        return {
            "kind": "codec",
            "codec": name,
            "weights_hash": coder.spec.weights_hash,
            "n_quantizers": list(coder.n_quantizers),
            "label": coder.label,
        }
    return {"kind": ORIGINAL}


def restored_coders(descriptions: Sequence[Mapping[str, Any]]) -> list[Coder]:
    """Coders as they were when an evaluation was made.

    Raises:
        InputError: A codec was handed over as an object, or has other weights now.
        CheckpointError: A codec is gone.
    """
    coders: list[Coder] = []
    for found in descriptions:
        if found["kind"] == "file":
            coders.append(FileCoder(found["format"], found["bps"]))
        elif found["kind"] == ORIGINAL:
            coders.append(Original())
        else:
            own = found["codec"] if found["kind"] == "store" else found
            if own["codec"] is None:
                raise InputError(f"{own['label']} was evaluated from memory; pass the coders to write_page")
            coder = CodecCoder(own["codec"], tuple(own["n_quantizers"]), label=own["label"])
            if coder.spec.weights_hash != own["weights_hash"]:
                raise InputError(f"{own['codec']} has other weights than when it was evaluated; evaluate again")
            coders.append(coder if found["kind"] == "codec" else StoreCoder(found["store"], coder))
    return coders


def _run(
    coders: Sequence[Coder],
    sources: Sequence[Source],
    output: Path,
    settings: Settings,
    *,
    workers: int | None,
    force: bool,
    on_progress: Progress | None,
    facts: Mapping[str, Any] | None = None,
) -> Evaluation:
    if settings.max_seconds <= 0 or settings.sample_rate < 8000:
        raise InputError(
            f"max_seconds {settings.max_seconds:g}, sample_rate {settings.sample_rate}: they must be above 0 and at "
            "least 8000"
        )
    if settings.level not in ("kept", "matched"):
        raise InputError(f"level is {settings.level!r}; it must be 'kept' or 'matched'")
    described = [_describe(coder) for coder in coders]
    output.mkdir(parents=True, exist_ok=True)
    versions = _versions(settings.metrics)
    fingerprint = hashlib.sha256(
        json.dumps([described, asdict(settings), versions], sort_keys=True).encode()
    ).hexdigest()
    log = _Log(output, fingerprint, force=force)
    delays = dict(log.delays)
    results: dict[tuple[int, str], Measured] = {}
    tasks = []
    for number in range(len(coders)):
        for source in sources:
            known = log.results.get((number, source.identity))
            if known is None:
                tasks.append((number, source))
            else:
                results[number, source.key] = known
    total, done, seconds = len(coders) * len(sources), len(results), 0.0
    with log, Workers(coders, settings, default_workers() if workers is None else workers) as pool:
        delays.setdefault(0, Delay(0, "none", 0))
        missing = [number for number in range(len(coders)) if number not in delays]
        probing = spread(sources, 3 * 5)
        for number, delay in pool.probes([(number, probing) for number in missing]):
            delays[number] = delay
            log.add_delay(number, delay)
        if on_progress is not None:
            on_progress(done, total, seconds)
        for number, source, measured in pool.measure(tasks, delays):
            log.add(number, source, measured)
            results[number, source.key] = measured
            done += 1
            seconds += measured.rows[0]["seconds"] if measured.rows else 0.0
            if on_progress is not None:
                on_progress(done, total, seconds)
    evaluation = _gathered(coders, sources, settings, results, delays)
    evaluation.settings |= {"coders": described, "versions": versions, **(facts or {})}
    evaluation.write(output)
    return evaluation


def _gathered(
    coders: Sequence[Coder],
    sources: Sequence[Source],
    settings: Settings,
    results: Mapping[tuple[int, str], Measured],
    delays: Mapping[int, Delay],
) -> Evaluation:
    """Results → records, in the order of coders, conditions and clips."""
    rows, conditions, usage, failures = [], [], [], []
    features: dict[str, dict[str, Any]] = {}
    for number, coder in enumerate(coders):
        own = [(source, results[number, source.key]) for source in sources]
        delay = delays[number]
        sizes = _store_sizes(coder, own)
        for condition in coder.conditions:
            mine = [r for _, m in own for r in m.rows if r["condition"] == condition.label]
            seconds = sum(row["seconds"] for row in mine)
            in_files = [row["file_bitrate_bps"] for row in mine if row["file_bitrate_bps"] is not None]
            whole = sum(rate * row["seconds"] for rate, row in zip(in_files, mine, strict=True)) if in_files else 0.0
            if condition.n_quantizers is not None:
                whole = sizes.get(condition.n_quantizers, 0) * 8
            conditions.append(
                {
                    **condition.to_dict(),
                    "file_bitrate_bps": whole / seconds if whole and seconds else None,
                    "delay_samples": delay.samples,
                    "delay_ms": 1000 * delay.samples / settings.sample_rate,
                    "delay_method": delay.method,
                }
            )
            rows += mine
            features[condition.label] = {
                s.key: unpack_features(m.features[condition.label]) for s, m in own if condition.label in m.features
            }
        usage += _usage(coder, [m for _, m in own])
        failures += [
            {"key": s.key, "codec": coder.conditions[-1].codec, "error": m.failure} for s, m in own if m.failure
        ]
    rows_left = sum(row["condition"] != ORIGINAL for row in rows)
    if not rows_left:
        first = failures[0]["error"] if failures else "no rows"
        raise InputError(f"none of {len(sources)} clips could be measured; the first error: {first}")
    classes = classes_of([source.key for source in sources])
    training = training_notices(features, classes, ORIGINAL) if classes else []
    facts = {
        **asdict(settings),
        "metrics": list(settings.metrics),
        "metrics_missing": missing_metrics(),
        "clips": [{"key": s.key, "path": s.path, "text": s.text} for s in sources],
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    }
    return Evaluation(rows, conditions, usage, [entry.to_dict() for entry in training], failures, facts)


def _codec_of(coder: Coder) -> CodecCoder | None:
    if isinstance(coder, StoreCoder):
        return coder.codec
    return coder if isinstance(coder, CodecCoder) else None


def _store_sizes(coder: Coder, own: Sequence[tuple[Source, Measured]]) -> dict[int, int]:
    """Bytes of a token store of all clips, for each number of codebooks: written and looked at."""
    codec = _codec_of(coder)
    coded = [(s.key, m) for s, m in own if m.codes is not None]
    if codec is None or not coded:
        return {}
    sizes = {}
    with tempfile.TemporaryDirectory() as folder:
        for k in codec.n_quantizers:
            path = Path(folder, f"{k}.ctok")
            with TokenWriter(path, codec.spec, n_quantizers=k) as writer:
                for key, measured in coded:
                    codes = unpack_codes(measured.codes or "")[:k]
                    writer.add(key, codes, num_samples=codes.shape[1] * codec.spec.hop_length)
            sizes[k] = path.stat().st_size
    return sizes


def _usage(coder: Coder, own: Sequence[Measured]) -> list[dict[str, Any]]:
    """How each codebook is used by all clips together."""
    codec = _codec_of(coder)
    codes = [unpack_codes(measured.codes) for measured in own if measured.codes is not None]
    if codec is None or not codes:
        return []
    size, records = codec.spec.codebook_size, []
    for level, row in enumerate(np.concatenate(codes, 1)):
        counts = np.bincount(row, minlength=size)
        share = counts[counts > 0] / counts.sum()
        records.append(
            {
                "codec": codec.label,
                "codebook": level,
                "entries_used": int((counts > 0).sum()),
                "codebook_size": size,
                "entropy_bits": float(-(share * np.log2(share)).sum()) + 0.0,
                "num_codes": int(counts.sum()),
            }
        )
    return records


def _versions(metrics: Sequence[str]) -> dict[str, str]:
    """Versions of the packages that measure."""
    found = {}
    for name in metrics:
        for package in (METRICS[name].package or "").split():
            base = package.partition("[")[0]
            with suppress(importlib.metadata.PackageNotFoundError):
                found[base] = importlib.metadata.version(base)
    return found


class _Log:
    """What is done, one JSON line each: an interrupted evaluation goes on from it.

    Raises:
        InputError: The folder was begun with other settings.
    """

    def __init__(self, folder: Path, fingerprint: str, *, force: bool) -> None:
        self._path = folder / PROGRESS_FILE
        self.delays: dict[int, Delay] = {}
        self.results: dict[tuple[int, str], Measured] = {}
        lines = [] if force else list(self._lines())
        if lines and lines[0].get("settings") != fingerprint:
            raise InputError(
                f"{folder} was begun with other codecs, settings or package versions; give another folder, or --force "
                "to begin anew"
            )
        if not lines and not force and (folder / REPORT_FILE).exists():
            raise InputError(f"{folder} holds a finished report; give another folder, or --force to replace it")
        for line in lines[1:]:
            if "delay" in line:
                self.delays[line["coder"]] = Delay(**line["delay"])
            else:
                self.results[line["coder"], line["clip"]] = Measured(**line["measured"])
        with self._path.open("w", encoding="utf-8") as file:  # without a line that was cut
            for line in lines or [{"settings": fingerprint}]:
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    found = json.loads(line)
                except ValueError:
                    return
                yield found

    def __enter__(self) -> _Log:
        self._file = self._path.open("a", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()

    def add_delay(self, number: int, delay: Delay) -> None:
        """Of a coder."""
        self._write({"coder": number, "delay": asdict(delay)})

    def add(self, number: int, source: Source, measured: Measured) -> None:
        """Of a coder and a clip."""
        self._write({"coder": number, "clip": source.identity, "measured": asdict(measured)})
