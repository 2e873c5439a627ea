"""Quality of codecs beside Opus, MP3 and Codec2 on the same clips, written as Markdown.

    python benchmarks/quality.py --codec speech_16k@1,2,4,8 --lyra lyra/model_coeffs \
        --speech corpora/speech/test/voice-a --speech corpora/speech/test/voice-b --music corpora/music \
        -o benchmarks/quality.md --reports reports

Each folder gives 24 clips of 2 to 8 s (music: the first 6 s of files of 10 s and more), evenly spread over its files in
order of name. All is measured by `codec.evaluate`, at 16 kHz. Needs `pip install 'codec[eval]'` and ffmpeg; takes some
ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import datetime
import tempfile
from pathlib import Path

from codec.adapters.lyra import import_lyra
from codec.audio import audio_info, find_audio
from codec.errors import AudioFileError
from codec.evaluate import METRICS, Evaluation, evaluate, summarise, write_page

RATE = 16000
SPEECH = ["pesq_wb", "stoi", "estoi", "visqol_speech", "si_sdr", "mel_distance", "pitch_cents", "speaker_similarity"]
MUSIC = ["visqol_audio", "si_sdr", "mel_distance", "stft_distance"]
AGAINST = ["opus:6,8,12,24", "codec2:3200", "mp3:16,32"]
LYRA_CODEBOOKS = "16,30,46"  # 3.2, 6 and 9.2 kbps


def chosen(folder: Path, count: int, low: float, high: float) -> list[Path]:
    """`count` files of `low` to `high` seconds, evenly spread over the folder's in order of name."""
    fitting = []
    for _, path in find_audio([folder]):
        try:
            info = audio_info(path)
        except AudioFileError:
            continue
        if low <= info.seconds <= high:
            fitting.append(path)
    if len(fitting) < count:
        raise SystemExit(f"{folder}: {len(fitting)} files of {low} to {high} s; {count} wanted: lower --clips")
    return [fitting[round(i * (len(fitting) - 1) / max(1, count - 1))] for i in range(count)]


def linked(sets: dict[str, list[Path]], top: Path) -> Path:
    """A folder with one folder of links per set: the sets are the clips' classes."""
    for name, paths in sets.items():
        (top / name).mkdir(parents=True)
        for number, path in enumerate(paths):
            (top / name / f"{number:02d}_{path.name}").symlink_to(path.resolve())
    return top


def table(evaluation: Evaluation, prefix: str) -> list[str]:
    """Means and intervals of one set's clips, as Markdown."""
    names = evaluation.metrics
    rows = [row for row in evaluation.rows if row["key"].startswith(prefix)]
    lines = [
        f"| codec | kbps | {' | '.join(METRICS[name].title for name in names)} |",
        "|---" * (len(names) + 2) + "|",
    ]
    for condition in evaluation.conditions:
        own = [row for row in rows if row["condition"] == condition["label"]]
        if condition["label"] == "original" or not own:
            continue
        kbps = sum(r["stored_bytes"] for r in own) * 8 / sum(r["seconds"] for r in own) / 1000
        cells = [condition["label"], f"{kbps:.2f}"]
        for name in names:
            metric = METRICS[name]
            found = summarise([row[name] for row in own], higher_is_better=metric.higher_is_better)
            if found.mean is None:
                cells.append("–")
                continue
            missing = len(own) - found.count
            half = "" if found.low is None else f" ± {(found.high - found.low) / 2:.{metric.digits}f}"
            note = f" ({missing} undefined)" if missing else ""
            cells.append(f"{found.mean:.{metric.digits}f}{half}{note}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speeds(evaluation: Evaluation) -> list[str]:
    """Delays, sizes and speeds: the same for all sets."""
    lines = [
        "| codec | kbps, audio | kbps, in files | delay removed, ms | encode, × real time | decode, × real time |",
        "|---|---|---|---|---|---|",
    ]
    for record in evaluation.summary():
        if record["bitrate_bps"] is not None:
            kbps = [f"{record[name] / 1000:.2f}" for name in ("bitrate_bps", "file_bitrate_bps")]
            fast = [
                "–" if record[f"{k}_speed"] is None else f"{record[f'{k}_speed']:.0f}" for k in ("encode", "decode")
            ]
            delay = f"{record['delay_ms']:.2f}"
            lines.append(f"| {' | '.join([record['condition'], *kbps, delay, *fast])} |")
    return lines


def training(evaluation: Evaluation) -> list[str]:
    """Accuracies of a classifier of the sets."""
    first = evaluation.training[0]
    lines = [
        f"Which folder is this second of speech from? A linear classifier on log-mels, {first['num_excerpts']} seconds "
        f"in all, tested on clips it wasn't trained on. On originals {100 * first['of_originals']:.1f} %; the largest "
        f"class {100 * first['chance']:.1f} %.",
        "",
        "| codec | trained and tested on copies, % | trained on copies, tested on originals, % |",
        "|---|---|---|",
    ]
    for entry in evaluation.training:
        lines.append(f"| {entry['condition']} | {100 * entry['on_copies']:.1f} | {100 * entry['on_originals']:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", action="append", help="as of codec evaluate; repeat (speech_16k@1,2,4,8)")
    parser.add_argument("--lyra", type=Path, help="Lyra V2's published model files")
    parser.add_argument("--speech", type=Path, action="append", default=[], help="a folder of clips; repeat")
    parser.add_argument("--music", type=Path, action="append", default=[], help="a folder of clips; repeat")
    parser.add_argument("--clips", type=int, default=24, help="per folder")
    parser.add_argument("--workers", type=int)
    parser.add_argument("--reports", type=Path, help="keep the records and pages in this folder")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    if not arguments.speech and not arguments.music:
        parser.error("give --speech or --music")
    lines = []
    with tempfile.TemporaryDirectory() as temporary:
        top = Path(temporary)
        reports = arguments.reports or top / "reports"
        codecs = arguments.codec or ["speech_16k@1,2,4,8"]
        if arguments.lyra:
            checkpoint = reports / "lyra_v2"
            if not (checkpoint / "config.json").exists():
                import_lyra(arguments.lyra, checkpoint)
            codecs.append(f"{checkpoint}@{LYRA_CODEBOOKS}")
        kinds = {"speech": (arguments.speech, SPEECH, 2.0, 8.0), "music": (arguments.music, MUSIC, 10.0, float("inf"))}
        for kind, (folders, metrics, low, high) in kinds.items():
            if not folders:
                continue
            sets = {folder.name: chosen(folder, arguments.clips, low, high) for folder in folders}
            evaluation = evaluate(
                codecs,
                [linked(sets, top / kind)],
                reports / kind,
                against=AGAINST,
                metrics=[name for name in metrics if METRICS[name].is_installed],
                sample_rate=RATE,
                max_seconds=8.0 if kind == "speech" else 6.0,
                workers=arguments.workers,
                on_progress=lambda done, total, _, kind=kind: print(f"\r{kind}: {done}/{total}", end="", flush=True),
            )
            print()
            if arguments.reports:
                print(write_page(evaluation, title=f"Codecs on {kind}"))
            for name in sets:
                lines += ["", f"## {kind.capitalize()}: {name}", "", *table(evaluation, f"{name}/")]
            if kind == "speech" and evaluation.training:
                lines += ["", "## Does training notice?", "", *training(evaluation)]
            if kind == "speech" or not arguments.speech:
                lines += ["", "## Sizes, delays, speeds", "", *speeds(evaluation)]
            for failure in evaluation.failures:
                lines += ["", f"Failed: {failure['key']}, {failure['codec']}: {failure['error']}"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(evaluation.settings["versions"].items()))
    head = [
        "# Quality beside conventional codecs",
        "",
        f"{datetime.date.today()}, {evaluation.settings['machine']}; {versions}. {arguments.clips} clips per folder, 2 "
        "to 8 s (music: the first 6 s), evenly spread over its files, compared at 16 kHz, levels kept, each codec's "
        "constant delay removed. Means ± half of their bootstrap interval of 95 %.",
        "",
        "kbps is what the audio itself takes: Opus packets without Ogg's pages, MP3 and Codec2 frames, a token store's "
        "blocks with their checksums; “in files” counts whole files, and for tokens one store of all clips. NAME@K is "
        "a codec with its first K codebooks. Opus, MP3 and Codec2 are FFmpeg's libopus (variable bitrate), libmp3lame "
        "and libcodec2. Codec2 keeps no waveform, which PESQ, STOI and SI-SDR judge harshly. Speeds are × "
        "real time of one core, in CPU time.",
    ]
    text = "\n".join([*head, *lines]) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
