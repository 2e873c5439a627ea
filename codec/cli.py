"""The `codec` command: arguments only, one verb per arrow."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from codec.errors import CheckpointError, CodecError, ConfigError, InputError

app = typer.Typer(
    help="A neural audio codec toolkit: audio files to compact token files, and back to waveforms or mels.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)
out = Console(highlight=False, soft_wrap=True)

FAILED = 1
USAGE = 2
SOME_FAILED = 3
"""Exit code of a run that finished but left some files out."""


class Output(StrEnum):
    """What `codec decode` writes."""

    wave = "wave"
    mel = "mel"


Store = Annotated[Path, typer.Argument(help="A .ctok file, or a folder of them.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")]


@app.command()
def encode(
    inputs: Annotated[list[Path], typer.Argument(help="Audio files and folders.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .ctok file to write.", show_default=False)],
    codec: Annotated[str, typer.Option(help="A shipped checkpoint's name, or a folder.")] = "speech_16k",
    quantizers: Annotated[int | None, typer.Option(help="Codebooks to store; fewer are smaller and coarser.")] = None,
    device: Device = "auto",
    batch_seconds: Annotated[float, typer.Option(help="Audio per batch; lower it if memory runs out.")] = 64.0,
    threads: Annotated[int, typer.Option(help="Threads that read and decode files.")] = 2,
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = True,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Encode audio files into a token file.

    Files of any rate and channel count are resampled and mixed to the codec's. Files that can't be read are listed in
    OUTPUT.errors.jsonl and left out; the exit code is then 3.
    """
    from codec.encode import encode_corpus, write_failures

    model = _load(codec, device)
    failures = output.with_name(output.name + ".errors.jsonl")
    with _progress("encoding", "files", hidden=as_json) as update:
        report = encode_corpus(
            model,
            inputs,
            output,
            n_quantizers=quantizers,
            batch_seconds=batch_seconds,
            num_threads=threads,
            resume=resume,
            force=force,
            on_progress=update,
        )
    write_failures(report.failures, failures)
    if as_json:
        print(json.dumps({**report.to_dict(), "store": str(output)}))
    else:
        _print_encoded(report, output, failures)
    if report.failures:
        raise typer.Exit(SOME_FAILED)


def _print_encoded(report: Any, output: Path, failures: Path) -> None:
    seconds = report.audio_seconds
    skipped = f" ({report.num_skipped} were there already)" if report.num_skipped else ""
    out.print(f"{output}: {report.num_items} files encoded{skipped}, {_duration(seconds)} of audio")
    _print_speed(report)
    if not report.num_skipped and report.num_items:
        pcm = report.audio_seconds * 32000
        out.print(
            f"  {_size(report.store_bytes)} from {_size(report.source_bytes)} of files: "
            f"{report.source_bytes / report.store_bytes:.1f} × smaller "
            f"({pcm / report.store_bytes:.0f} × smaller than 16-bit PCM at 16 kHz mono)"
        )
    if report.failures:
        errors.print(f"files that failed: {len(report.failures)}, see {failures}; the first:")
        errors.print(f"  {report.failures[0]['error']}", markup=False)


@app.command()
def decode(
    store: Store,
    output: Annotated[Path, typer.Option("-o", "--output-folder", help="Folder to write.", show_default=False)],
    kind: Annotated[Output, typer.Option("--output", help="wave: WAV files; mel: log-mel .npy [M, F].")] = Output.wave,
    codec: Annotated[
        str | None, typer.Option(help="A checkpoint's name or folder; by default the one the store names.")
    ] = None,
    quantizers: Annotated[int | None, typer.Option(help="Use only the first codebooks.")] = None,
    device: Device = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Decode a token file into WAV files, or straight into log-mel arrays."""
    from codec.decode import decode_store
    from codec.tokens import TokenStore

    tokens = TokenStore(store)
    try:
        model = _load(codec or tokens.spec.name, device)
    except CheckpointError as error:
        if codec is not None:
            raise
        raise CheckpointError(f"{store} is of codec {tokens.spec.name!r}; pass --codec FOLDER ({error})") from error
    with _progress("decoding", "items", hidden=as_json) as update:
        report = decode_store(
            model, tokens, output, kind.value, n_quantizers=quantizers, force=force, on_progress=update
        )
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(output)}))
    else:
        out.print(f"{output}: {report.num_items} items, {_duration(report.audio_seconds)} of audio as {kind.value}")
        _print_speed(report)
        for failure in report.failures:
            errors.print(f"  {failure['key']}: {failure['error']}")
    if report.failures:
        raise typer.Exit(SOME_FAILED)


@app.command()
def info(
    path: Annotated[str, typer.Argument(help="A token store, an audio file, or a codec's name or folder.")],
    as_json: AsJson = False,
) -> None:
    """Say what a token store, an audio file or a checkpoint holds."""
    target = Path(path)
    if target.suffix == ".ctok" or (target.is_dir() and any(target.glob("*.ctok"))):
        from codec.tokens import TokenStore, summarise

        summary = summarise(TokenStore(path))
        facts = summary.to_dict()
        if not as_json:
            _print_summary(summary)
            return
    elif target.is_file():
        from codec.audio import audio_info

        facts = asdict(audio_info(target))
    else:
        from codec.model import load_codec

        spec = load_codec(path).spec
        facts = {**spec.to_dict(), "bitrate_bps": float(spec.bitrate_bps), "frame_rate": float(spec.frame_rate)}
    if as_json:
        print(json.dumps(facts))
    else:
        _print_facts(facts)


def _print_facts(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        out.print(f"{name:<{width}}  {shown}", markup=False)


def _print_summary(summary: Any) -> None:
    s = summary
    _print_facts(
        {
            "codec": f"{s.codec} ({s.weights_hash[:12]}), {s.sample_rate:,} Hz, {s.hop_length} samples per frame",
            "codebooks": f"{s.num_quantizers_stored} of {s.num_quantizers_codec}, {s.codebook_size:,} entries each",
            "items": f"{s.num_items:,} in {s.num_shards} shards, {_duration(s.hours * 3600)}",
            "size": f"{_size(s.num_bytes)}, {s.bits_per_second:,.0f} bits per second, "
            f"{s.times_smaller_than_pcm16:.1f} × smaller than 16-bit PCM",
        }
    )
    most = max((count for _, count in s.lengths), default=0)
    out.print("lengths")
    for low, count in s.lengths:
        out.print(f"  from {low:>6g} s  {count:>11,}  {'█' * max(1, 40 * count // most)}", markup=False)
    out.print(f"codebook usage, from {s.num_items_sampled:,} items")
    for level, usage in enumerate(s.usage):
        out.print(f"  {level:>2}  {usage.used_entries:>6,} entries used, {usage.entropy_bits:.2f} bits", markup=False)


@app.command()
def verify(store: Store, as_json: AsJson = False) -> None:
    """Check every checksum of a token store; exit code 1 and the places if anything is damaged."""
    from codec.tokens import TokenStore

    tokens = TokenStore(store)
    columns = [TextColumn("verifying"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()]
    with _bar(*columns, hidden=as_json) as bar:
        task = bar.add_task("", total=tokens.num_bytes)
        problems = [asdict(problem) for problem in tokens.verify(lambda size: bar.advance(task, size))]
    if as_json:
        print(json.dumps(problems))
    elif not problems:
        out.print(f"{store}: every checksum of {len(tokens):,} items is right")
    for problem in [] if as_json else problems:
        errors.print(problem["message"], markup=False)
    if problems:
        raise typer.Exit(FAILED)


@app.command()
def merge(
    stores: Annotated[list[Path], typer.Argument(help="Token files and folders of them.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .ctok file to write.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = False,
    force: Force = False,
) -> None:
    """Join token files into one, without touching the codes."""
    from codec.tokens import TokenStore, merge

    paths = [path for store in stores for path in TokenStore(store).paths]
    with _progress("merging", "items") as update:
        merge(paths, output, resume=resume, force=force, progress=_counted(update, len(TokenStore(paths))))
    out.print(f"{output}: {len(TokenStore(output)):,} items of {len(paths)} shards, {_size(output.stat().st_size)}")


@app.command()
def split(
    store: Store,
    output: Annotated[Path, typer.Option("-o", "--output-folder", help="Folder to write.", show_default=False)],
    shards: Annotated[int, typer.Option(help="How many.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on where an interrupted run stopped.")] = False,
    force: Force = False,
) -> None:
    """Cut a token store into shards of about equal duration, without touching the codes."""
    from codec.tokens import TokenStore, split

    with _progress("splitting", "items") as update:
        progress = _counted(update, len(TokenStore(store)))
        paths = split(store, output, shards, resume=resume, force=force, progress=progress)
    out.print(f"{output}: {len(TokenStore(output)):,} items in {len(paths)} shards")


@app.command()
def export(
    store: Store,
    key: Annotated[str, typer.Option(help="The item.", show_default=False)],
    output: Annotated[Path, typer.Option("-o", "--output", help="The .npz file to write.", show_default=False)],
    start_frame: Annotated[int, typer.Option(help="First frame.")] = 0,
    num_frames: Annotated[int | None, typer.Option(help="Frames; to the end if not given.")] = None,
    force: Force = False,
) -> None:
    """Write one item's codes as a NumPy .npz: codes [K, T], num_samples, gain, meta (JSON) and the codec (JSON)."""
    import numpy as np

    from codec.tokens import TokenStore

    if output.exists() and not force:
        raise InputError(f"{output} exists; give another path, or --force to replace it")
    tokens = TokenStore(store)
    facts = tokens.info(key)
    codes = tokens.read(key, start_frame, num_frames)
    with output.open("wb") as file:
        np.savez(
            file,
            codes=codes,
            start_frame=start_frame,
            num_samples=facts.num_samples,
            gain=np.nan if facts.gain is None else facts.gain,
            meta=json.dumps(facts.meta),
            codec=json.dumps(tokens.spec.to_dict()),
        )
    out.print(f"{output}: codes [{codes.shape[0]}, {codes.shape[1]}] of {key}", markup=False)


@app.command()
def features(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Audio files and folders; or token files and folders of them.", show_default=False),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write, or with --npz the file.", show_default=False)
    ],
    preset: Annotated[
        str, typer.Option(help="codec, librosa, whisper, kaldi, nemo, hifigan, vocos, realtime …")
    ] = "codec",
    npz: Annotated[bool, typer.Option("--npz", help="One .npz file instead of a folder of .npy files.")] = False,
    codec: Annotated[
        str | None, typer.Option(help="For tokens: a checkpoint's name or folder; by default the one the store names.")
    ] = None,
    device: Device = "auto",
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Compute mel spectrograms of audio files or of a token store: one float32 array [M, F] per item."""
    import torch

    from codec.extract import extract_features, token_store

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    store = token_store(inputs)
    kind = "files" if store is None else "items"
    with _progress("features", kind, hidden=as_json) as update:
        report = extract_features(
            inputs,
            output,
            preset,
            output_format="npz" if npz else "npy",
            codec=None if store is None else _load(codec or store.spec.name, device),
            device=device,
            force=force,
            on_progress=update,
        )
    if as_json:
        print(json.dumps({**asdict(report), "folder": str(output)}))
    else:
        out.print(f"{output}: {report.num_items} {kind}, {_duration(report.audio_seconds)} of audio, preset {preset}")
        _print_speed(report)
        for failure in report.failures:
            errors.print(f"  {failure['error']}", markup=False)
    if report.failures:
        raise typer.Exit(SOME_FAILED)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A recipe, such as recipes/speech_16k.yaml.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on from the run's last.ckpt if there is one.")] = True,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Train a codec by a recipe. Any setting can be overridden: --optim.max_steps 100 --run.output runs/try."""
    from codec.train import load_config, train

    settings = load_config(config, _overrides(context.args))
    folder = train(settings, resume=resume, progress=progress)
    out.print(f"{folder}: the trained codec; try  codec encode FILES -o tokens.ctok --codec {folder}")


def _overrides(arguments: list[str]) -> dict[str, str]:
    """`--section.key VALUE` and `--section.key=VALUE` as a mapping."""
    overrides, waiting = {}, list(arguments)
    while waiting:
        name, equals, value = waiting.pop(0).partition("=")
        if not name.startswith("--") or "." not in name:
            raise ConfigError(f"{name!r} is no setting; write --section.key VALUE, such as --optim.max_steps 100")
        if not equals:
            if not waiting:
                raise ConfigError(f"{name} has no value; write {name} VALUE")
            value = waiting.pop(0)
        overrides[name.removeprefix("--")] = value
    return overrides


def _load(name: str, device: str) -> Any:
    import torch

    from codec.model import load_codec

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return load_codec(name, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own word for a device that isn't there
        raise InputError(f"device {device!r} can't be used ({error}); pass --device cpu") from error


def _bar(*columns: ProgressColumn, hidden: bool) -> Progress:
    return Progress(*columns, console=errors, disable=hidden or not errors.is_terminal, transient=True)


@contextmanager
def _progress(title: str, unit: str, *, hidden: bool = False) -> Iterator[Any]:
    """A bar with files, × real time and an estimate; yields `update(done, total, audio_seconds)`."""
    started = time.monotonic()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "  {task.fields[rate]}"),
        TimeRemainingColumn(),
    ]
    with _bar(*columns, hidden=hidden) as bar:
        task = bar.add_task(title, total=None, rate="")

        def update(done: int, total: int, audio_seconds: float | None = None) -> None:
            elapsed = max(time.monotonic() - started, 1e-9)
            rate = (
                f"{done / elapsed:.0f} per s" if audio_seconds is None else f"{audio_seconds / elapsed:.0f} × real time"
            )
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def _print_speed(report: Any) -> None:
    if report.audio_seconds:
        rate = report.audio_seconds / max(report.elapsed_seconds, 1e-9)
        out.print(f"  {report.elapsed_seconds:.1f} s, {rate:.0f} × real time")


def _counted(update: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A callback that hears of items done since its last call."""
    done = itertools.count(1)

    def progress(count: int) -> None:
        for _ in range(count):
            update(next(done), total)

    return progress


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def _size(num_bytes: int) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes = num_bytes / 1000  # type: ignore[assignment]
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"


def main() -> None:
    """Entry point: errors of ours as one line on stderr, exit code 1 (2 for wrong arguments)."""
    try:
        app()
    except CodecError as error:
        errors.print(f"error: {error}", markup=False)
        sys.exit(USAGE if isinstance(error, InputError | ConfigError) else FAILED)
    except KeyboardInterrupt:
        errors.print("interrupted; the same command goes on where this one stopped")
        sys.exit(130)
