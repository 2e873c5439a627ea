"""What an evaluation found, as records; written to and read from its folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from codec.errors import InputError
from codec.evaluate.metrics import METRICS
from codec.evaluate.statistics import Statistic, summarise

FORMAT_VERSION = 1
REPORT_FILE, ROWS_FILE, SUMMARY_FILE = "report.json", "rows.csv", "summary.csv"

RATES = ("bitrate_bps", "encode_speed", "decode_speed", "level_db")
"""Columns beside the metrics that are summarised too."""


@dataclass
class Evaluation:
    """What was measured.

    Attributes:
        rows: One record per clip and condition: key, condition, codec, n_quantizers, seconds, channels,
            stored_bytes, bitrate_bps, file_bitrate_bps, encode_speed and decode_speed (× real time; of one core on
            a CPU), level_db, every metric (None where undefined) and `undefined`, which says why.
            `pandas.DataFrame(evaluation.rows)` is a table.
        conditions: One record per condition: label, codec, n_quantizers, counted (what stored_bytes counts),
            file_bitrate_bps (of whole files; of tokens, of a store of all these clips), delay_samples, delay_ms,
            delay_method.
        usage: One record per codec and codebook: codec, codebook, entries_used, codebook_size, entropy_bits,
            num_codes.
        training: One record per condition: see `training.Accuracy`. Empty where there are no classes.
        failures: One record per clip that couldn't be measured: key, condition (or codec), error.
        settings: How it was measured: sample_rate, metrics, max_seconds, level, clips, versions, …
        folder: Where it is kept.
    """

    rows: list[dict[str, Any]]
    conditions: list[dict[str, Any]]
    usage: list[dict[str, Any]]
    training: list[dict[str, Any]]
    failures: list[dict[str, str]]
    settings: dict[str, Any]
    folder: Path = field(default_factory=Path)

    @property
    def metrics(self) -> list[str]:
        """The metrics that were asked for, in the order of `METRICS`."""
        return [name for name in METRICS if name in self.settings["metrics"]]

    def statistic(self, condition: str, column: str) -> Statistic:
        """A metric, or another column of numbers, over the clips of a condition."""
        values = [row.get(column) for row in self.rows if row["condition"] == condition]
        higher = METRICS[column].higher_is_better if column in METRICS else True
        return summarise(values, higher_is_better=higher)

    def summary(self) -> list[dict[str, Any]]:
        """One flat record per condition: the rates; of each metric NAME_mean, _low, _high, _median, _worst and _count.

        `_low` and `_high` bound the mean's bootstrap interval of 95 %; `_worst` is the mean of the worst 5 % of clips.
        """
        table = []
        for condition in self.conditions:
            record = {k: v for k, v in condition.items() if k != "label"}
            record = {"condition": condition["label"], **record}
            for column in RATES:
                record[column] = self.statistic(condition["label"], column).mean
            for name in self.metrics:
                found = asdict(self.statistic(condition["label"], name))
                record |= {f"{name}_{part}": value for part, value in found.items()}
            table.append(record)
        # Bits over seconds of all clips: a mean over clips would weigh short ones like long ones.
        for record in table:
            rows = [r for r in self.rows if r["condition"] == record["condition"] and r["stored_bytes"] is not None]
            seconds = sum(row["seconds"] for row in rows)
            record["bitrate_bps"] = sum(row["stored_bytes"] for row in rows) * 8 / seconds if seconds else None
        return table

    def ranked_clips(self) -> list[tuple[str, float]]:
        """(key, score) from the best to the worst clip: the mean over conditions of the first metric that has values.

        A lower-is-better metric's score is its negative. Clips with any value missing are left out.
        """
        for name in self.metrics:
            metric = METRICS[name]
            if not metric.needs_original or metric.higher_is_better is None:
                continue
            scores: dict[str, list[float]] = {}
            for row in self.rows:
                if row.get(name) is not None:
                    scores.setdefault(row["key"], []).append(row[name] * (1 if metric.higher_is_better else -1))
            most = max(map(len, scores.values()), default=0)
            if most:
                means = [(key, sum(s) / len(s)) for key, s in scores.items() if len(s) == most]
                return sorted(means, key=lambda pair: (-pair[1], pair[0]))
        return [(key, 0.0) for key in dict.fromkeys(row["key"] for row in self.rows)]

    def to_dict(self) -> dict[str, Any]:
        """Everything but the folder, as JSON types."""
        found = {k: v for k, v in self.__dict__.items() if k != "folder"}
        return {"format_version": FORMAT_VERSION, **found, "summary": self.summary()}

    def write(self, folder: Path) -> list[Path]:
        """Writes report.json, rows.csv, summary.csv and, with pyarrow, rows.parquet; returns the paths."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        text = json.dumps(self.to_dict(), ensure_ascii=False, indent=1, allow_nan=False)
        (folder / REPORT_FILE).write_text(text, encoding="utf-8")
        written = [folder / REPORT_FILE, folder / ROWS_FILE, folder / SUMMARY_FILE]
        _write_csv(folder / ROWS_FILE, self.rows)
        _write_csv(folder / SUMMARY_FILE, self.summary())
        try:
            import pyarrow as pa
            import pyarrow.parquet as pq
        except ImportError:
            return written
        columns = {name: [row.get(name) for row in self.rows] for name in (self.rows[0] if self.rows else ())}
        numeric = {*self.metrics, *RATES, "file_bitrate_bps"}
        table = {n: pa.array(v, pa.float64()) if n in numeric else pa.array(v) for n, v in columns.items()}
        pq.write_table(pa.table(table), folder / "rows.parquet")
        return [*written, folder / "rows.parquet"]

    @classmethod
    def read(cls, folder: Path) -> Evaluation:
        """What `write` wrote.

        Raises:
            InputError: There is no report, or one of another version.
        """
        path = Path(folder) / REPORT_FILE
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"{folder}: holds no {REPORT_FILE}; give the folder that codec evaluate wrote") from None
        except ValueError as error:
            raise InputError(f"{path}: isn't JSON ({error}); run codec evaluate again") from error
        version = found.get("format_version") if isinstance(found, dict) else None
        if version != FORMAT_VERSION:
            raise InputError(f"{path}: has version {version}, this program reads {FORMAT_VERSION}; evaluate again")
        names = ("rows", "conditions", "usage", "training", "failures", "settings")
        if missing := [name for name in names if name not in found]:
            raise InputError(f"{path}: lacks {', '.join(missing)}; run codec evaluate again")
        return cls(**{name: found[name] for name in names}, folder=Path(folder))


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["key"])
        writer.writeheader()
        writer.writerows(rows)
