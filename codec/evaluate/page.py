"""An evaluation as one HTML page that needs nothing else: plots, tables to sort, clips to hear and see."""

from __future__ import annotations

import base64
import html
import io
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from torch import Tensor

from codec.errors import CodecError
from codec.evaluate.align import align, match_channels, match_level
from codec.evaluate.coders import ORIGINAL, Coder
from codec.evaluate.figures import Point, difference, levels, rate_plot, spectrogram
from codec.evaluate.metrics import METRICS
from codec.evaluate.results import Evaluation
from codec.evaluate.run import restored_coders
from codec.evaluate.tasks import Settings, Source, read_clip

PAGE_FILE = "report.html"
_NAMES = ("best", "median", "worst")
_CAPTION_METRICS = 4


def write_page(
    evaluation: Evaluation,
    path: str | os.PathLike[str] | None = None,
    *,
    coders: Sequence[Coder] | None = None,
    title: str = "Codec evaluation",
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Writes the page: everything is inside it, sound as FLAC and pictures as PNG; it opens from disk, offline.

    The best, the median and the worst clip (by the mean over conditions of the first metric that has values) are
    coded again to be heard.

    Args:
        evaluation: What was measured.
        path: The file; by default report.html in the evaluation's folder.
        coders: What makes the copies; by default made again from the evaluation's settings.
        title: Of the page.
        on_progress: Called with (copies made, in all).

    Returns:
        The path.

    Raises:
        InputError: A codec that was evaluated has other weights now, or was given as an object.
        AudioFileError: A clip that is to be heard is gone.
    """
    path = evaluation.folder / PAGE_FILE if path is None else Path(path)
    coders = restored_coders(evaluation.settings["coders"]) if coders is None else coders
    listening = "".join(_clips(evaluation, coders, on_progress))
    assets = files("codec.evaluate")
    body = "".join(
        [
            _head(evaluation, title),
            '<h2 id="rates">Quality over bitrate</h2>',
            _plots(evaluation),
            '<h2 id="summary-title">Summary</h2>',
            _summary(evaluation),
            '<h2 id="listen">Listen and look</h2>',
            listening,
            _training(evaluation),
            _usage(evaluation),
            _details(evaluation),
        ]
    )
    page = (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,">'
        f"<style>{(assets / 'page.css').read_text(encoding='utf-8')}</style></head><body>{body}"
        f"<script>{(assets / 'page.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(page, encoding="utf-8")
    os.replace(temporary, path)
    return path


def _text(value: object) -> str:
    return html.escape(str(value))


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _head(evaluation: Evaluation, title: str) -> str:
    settings = evaluation.settings
    clips = {row["key"]: row["seconds"] for row in evaluation.rows}
    level = "as they are" if settings["level"] == "kept" else "matched to the original"
    facts = (
        f"{len(clips)} clips, {sum(clips.values()) / 60:.1f} min, compared at {settings['sample_rate']} Hz, "
        f"levels {level}; {settings['date']}; {settings['machine']}."
    )
    parts = [
        f'<header><h1>{_text(title)}</h1><p class="soft">{_text(facts)}</p><nav aria-label="Sections">',
        '<a href="#rates">Rates</a><a href="#summary-title">Summary</a><a href="#listen">Listen</a>',
        '<a href="#details">Details</a></nav></header>',
    ]
    if "store" in settings:
        left_out = settings["store_items_without_file"] + settings["store_items_too_long"]
        kbps = f"{settings['store_bitrate_bps'] / 1000:.2f} kbps on disk"
        text = f"{settings['store']}: {settings['store_items']} items, {kbps}"
        text += f"; {left_out} couldn't be in the sample: no original, or too long" if left_out else ""
        parts.append(f'<p class="soft">{_text(text)}.</p>')
    if settings["metrics_missing"]:
        names = ", ".join(settings["metrics_missing"])
        parts.append(
            f'<p class="soft">Not measured, for want of a package: {_text(names)} (pip install codec[eval]).</p>'
        )
    return "".join(parts)


def _order(evaluation: Evaluation) -> list[str]:
    """Codecs in order of appearance: a codec has the same colour everywhere."""
    return list(dict.fromkeys(c["codec"] for c in evaluation.conditions if c["codec"] != ORIGINAL))


def _plots(evaluation: Evaluation) -> str:
    summary = evaluation.summary()
    codecs = _order(evaluation)
    legend = "".join(f'<li class="s{i % 8}">{_text(name)}</li>' for i, name in enumerate(codecs))
    parts = [f'<ul class="legend">{legend}</ul><div class="plots">']
    for name in evaluation.metrics:
        metric = METRICS[name]
        series: dict[str, list[Point]] = {}
        for codec in codecs:
            series[codec] = [
                Point(r["condition"], r["bitrate_bps"] / 1000, r[f"{name}_mean"], r[f"{name}_low"], r[f"{name}_high"])
                for r in summary
                if r["codec"] == codec and r[f"{name}_mean"] is not None and r["bitrate_bps"]
            ]
        if any(series.values()):
            note = {True: "higher is better", False: "lower is better", None: "near 0 is better"}[
                metric.higher_is_better
            ]
            parts.append(rate_plot(metric.title, note, series, metric.digits))
    parts.append("</div><p class='soft'>Points are means, bars their bootstrap intervals of 95 %.</p>")
    return "".join(parts)


def _table(name: str, caption: str, headings: Iterable[str], rows: Iterable[str]) -> str:
    heads = "".join(
        f'<th scope="col" data-sort><button type="button">{_text(heading)}</button></th>' for heading in headings
    )
    label = f'<caption class="soft">{_text(caption)}</caption>' if caption else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(name)}"><table id="{name}">{label}'
        f"<thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _cell(value: float | None, digits: int) -> str:
    return f'<td data-value="{"" if value is None else repr(value)}">{_number(value, digits)}</td>'


def _summary(evaluation: Evaluation) -> str:
    rows = []
    for record in evaluation.summary():
        if not any(record[f"{name}_count"] for name in evaluation.metrics):
            continue
        rates = [None if record[k] is None else record[k] / 1000 for k in ("bitrate_bps", "file_bitrate_bps")]
        cells = [f"<td class='text'>{_text(record['condition'])}</td>", *(_cell(rate, 2) for rate in rates)]
        for name in evaluation.metrics:
            digits = METRICS[name].digits
            values = {part: record[f"{name}_{part}"] for part in ("mean", "median", "worst")}
            low, high = record[f"{name}_low"], record[f"{name}_high"]
            interval = "" if low is None else f"[{low:.{digits}f}, {high:.{digits}f}]"
            data = " ".join(f'data-{part}="{"" if v is None else repr(v)}"' for part, v in values.items())
            mean = values["mean"]
            shown = f'<span class="ci"> {interval}</span>' if interval else ""
            cells.append(
                f'<td data-value="{"" if mean is None else repr(mean)}" {data} data-digits="{digits}" '
                f'data-interval="{interval}">{_number(mean, digits)}{shown}</td>'
            )
        cells += [_cell(record["encode_speed"], 1), _cell(record["decode_speed"], 1), _cell(record["delay_ms"], 2)]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    headings = ["condition", "kbps", "kbps in files", *(METRICS[n].title for n in evaluation.metrics)]
    headings += ["encode, × real time", "decode, × real time", "delay removed, ms"]
    counted = {c["counted"] for c in evaluation.conditions if c["codec"] != ORIGINAL}
    note = (
        "kbps counts what the audio itself takes: "
        + "; ".join(sorted(counted))
        + ". “In files” counts whole files with their headers; of tokens, one store of all clips. "
        "Speeds are of one CPU core, or of the GPU."
    )
    choice = (
        '<label>Show <select id="statistic"><option value="mean">mean and its 95 % interval</option>'
        '<option value="median">median</option><option value="worst">mean of the worst 5 % of clips</option></select>'
        "</label>"
    )
    return f'{choice}{_table("summary", "", headings, rows)}<p class="soft">{_text(note)}</p>'


def _clips(
    evaluation: Evaluation, coders: Sequence[Coder], on_progress: Callable[[int, int], None] | None
) -> Iterable[str]:
    ranked = evaluation.ranked_clips()
    chosen: dict[str, str] = {}
    for name, index in zip(_NAMES, (0, len(ranked) // 2, len(ranked) - 1), strict=True):
        chosen.setdefault(ranked[index][0], name)
    yield (
        '<label><input type="checkbox" id="same-place" checked> Starting another copy of a playing clip goes on at the '
        "same place</label><p class='soft'>Below each player: the spectrogram (70 dB), and its difference from the "
        "original: red is louder, blue is quieter, by up to 30 dB.</p>"
    )
    settings = evaluation.settings
    how = Settings(settings["sample_rate"], tuple(settings["metrics"]), settings["max_seconds"], settings["level"])
    clips = {clip["key"]: clip for clip in settings["clips"]}
    delays = {c["label"]: c["delay_samples"] for c in evaluation.conditions}
    colours = {name: f"s{i % 8}" for i, name in enumerate(_order(evaluation))}
    total, done = len(chosen) * sum(len(coder.conditions) for coder in coders), 0
    for key, name in sorted(chosen.items(), key=lambda pair: _NAMES.index(pair[1])):
        clip = clips[key]
        wave = read_clip(Source(key, clip["path"], clip["text"]), how)
        reference = levels(wave, how.sample_rate)
        top = float(reference.max())
        rows = {row["condition"]: row for row in evaluation.rows if row["key"] == key}
        text = f" <span class='soft'>“{_text(clip['text'])}”</span>" if clip["text"] else ""
        yield f"<section><h3>The {name} clip: {_text(key)}{text}</h3><div class='clips'>"
        for coder in coders:
            try:
                for coded in coder.code(wave, how.sample_rate, key):
                    label = coded.condition.label
                    yield _figure(
                        coded,
                        wave,
                        delays[label],
                        how,
                        reference,
                        top,
                        rows.get(label),
                        evaluation.metrics,
                        colours,
                        name,
                    )
                    done += 1
                    if on_progress is not None:
                        on_progress(done, total)
            except CodecError as error:
                name_of = _text(coder.conditions[0].codec)
                yield f"<figure><h4>{name_of}</h4><figcaption>{_text(error)}</figcaption></figure>"
        yield "</div></section>"


def _figure(
    coded: Any,
    wave: Tensor,
    delay: int,
    how: Settings,
    reference: Any,
    top: float,
    row: dict[str, Any] | None,
    metrics: Sequence[str],
    colours: dict[str, str],
    clip: str,
) -> str:
    original, copy = match_channels(wave, coded.wave)
    copy = align(original, copy, delay)
    if how.level == "matched":
        copy, _ = match_level(original, copy)
    values = levels(copy, how.sample_rate)
    label = coded.condition.label
    is_original = label == ORIGINAL
    facts = []
    if row is not None:
        if row["bitrate_bps"]:
            facts.append(f"{row['bitrate_bps'] / 1000:.2f} kbps")
        known = [name for name in metrics if row.get(name) is not None][:_CAPTION_METRICS]
        facts += [f"{METRICS[name].title} {row[name]:.{METRICS[name].digits}f}" for name in known]
    pictures = [(spectrogram(values, top), f"Spectrogram of {label}")]
    if not is_original:
        pictures.append((difference(reference, values, top), f"Difference of {label} from the original"))
    images = "".join(
        f'<img alt="{_text(alt)}" src="data:image/png;base64,{base64.b64encode(data).decode()}">'
        for data, alt in pictures
    )
    sound = base64.b64encode(_flac(copy, how.sample_rate)).decode()
    return (
        f'<figure><h4 class="{colours.get(coded.condition.codec, "")}">{_text(label)}</h4>'
        f'<audio controls preload="metadata" data-clip="{clip}" aria-label="{_text(label)}, the {clip} clip" '
        f'src="data:audio/flac;base64,{sound}"></audio>{images}'
        f"<figcaption>{_text(' · '.join(facts))}</figcaption></figure>"
    )


def _flac(wave: Tensor, sample_rate: int) -> bytes:
    buffer = io.BytesIO()
    samples = (wave.clamp(-1, 1).T.contiguous().numpy() * 32767).round().astype(np.int16)
    soundfile.write(buffer, samples, sample_rate, format="FLAC", subtype="PCM_16")
    return buffer.getvalue()


def _training(evaluation: Evaluation) -> str:
    if not evaluation.training:
        return ""
    first = evaluation.training[0]
    rows = [
        f"<tr><td class='text'>{_text(entry['condition'])}</td>"
        + "".join(_cell(100 * entry[k], 1) for k in ("of_originals", "on_copies", "on_originals"))
        + "</tr>"
        for entry in evaluation.training
    ]
    note = (
        f"A linear classifier of the clips' folders, on log-mels of {first['num_excerpts']} seconds of audio, tested "
        f"on clips that it wasn't trained on. Guessing the largest class: {100 * first['chance']:.1f} %."
    )
    headings = [
        "condition",
        "originals only, %",
        "trained and tested on copies, %",
        "trained on copies, tested on originals, %",
    ]
    return f'<h2>Does training notice?</h2><p class="soft">{_text(note)}</p>{_table("training", "", headings, rows)}'


def _usage(evaluation: Evaluation) -> str:
    if not evaluation.usage:
        return ""
    rows = [
        f"<tr><td class='text'>{_text(r['codec'])}</td>{_cell(r['codebook'] + 1, 0)}{_cell(r['entropy_bits'], 2)}"
        f"{_cell(r['entries_used'], 0)}{_cell(r['codebook_size'], 0)}{_cell(r['num_codes'], 0)}</tr>"
        for r in evaluation.usage
    ]
    headings = ["codec", "codebook", "entropy, bits", "entries used", "of", "codes seen"]
    note = "Entropies of few codes come out low: a codebook of 1024 entries needs some ten thousand codes."
    return f'<h2>Codebooks</h2><p class="soft">{note}</p>{_table("usage", "", headings, rows)}'


def _details(evaluation: Evaluation) -> str:
    parts = ['<details id="details"><summary>Every clip</summary>']
    rows = []
    for row in evaluation.rows:
        cells = [f"<td class='text'>{_text(row['key'])}</td><td class='text'>{_text(row['condition'])}</td>"]
        cells.append(_cell(row["seconds"], 2))
        cells.append(_cell(None if row["bitrate_bps"] is None else row["bitrate_bps"] / 1000, 2))
        cells += [_cell(row.get(name), METRICS[name].digits) for name in evaluation.metrics]
        rows.append(f"<tr>{''.join(cells)}<td class='text'>{_text(row['undefined'])}</td></tr>")
    headings = [
        "clip",
        "condition",
        "seconds",
        "kbps",
        *(METRICS[n].title for n in evaluation.metrics),
        "undefined, and why",
    ]
    parts.append(_table("clips", "", headings, rows))
    parts.append("</details>")
    if evaluation.failures:
        items = "".join(
            f"<li>{_text(f['key'])}, {_text(f['codec'])}: {_text(f['error'])}</li>" for f in evaluation.failures
        )
        parts.append(f"<h2>Clips that failed</h2><ul>{items}</ul>")
    how = [
        f"<li>{_text(c['label'])}: {c['delay_samples']} samples ({c['delay_ms']:.2f} ms) of delay removed, found in "
        f"the {_text(c['delay_method'])}.</li>"
        for c in evaluation.conditions
        if c["codec"] != ORIGINAL and c["delay_samples"]
    ]
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.settings["versions"].items())
    parts.append(f"<h2>How it was measured</h2><ul>{''.join(how)}</ul>")
    if versions:
        parts.append(f'<p class="soft">Packages: {_text(versions)}.</p>')
    return "".join(parts)
