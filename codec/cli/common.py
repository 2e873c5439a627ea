"""What the verbs share: the app, option types, progress bars, how sizes and durations are written."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from codec.errors import InputError

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

Store = Annotated[Path, typer.Argument(help="A .ctok file, or a folder of them.", show_default=False)]
Force = Annotated[bool, typer.Option("--force", help="Replace what is already there.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …; auto takes a GPU if there is one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, without a progress bar.")]


def device_of(name: str) -> str:
    """The device that `--device` names; "auto" is a GPU if there is one."""
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def load(name: str, device: str) -> Any:
    """Loads a codec; a device that can't be used is an `InputError`."""
    from codec.loading import load_codec

    device = device_of(device)
    try:
        return load_codec(name, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's own word for a device that isn't there
        raise InputError(f"device {device!r} can't be used ({error}); pass --device cpu") from error


def bar_of(*columns: ProgressColumn, hidden: bool) -> Progress:
    """A progress bar on stderr, shown on terminals only."""
    return Progress(*columns, console=errors, disable=hidden or not errors.is_terminal, transient=True)


@contextmanager
def progress_bar(title: str, unit: str, *, hidden: bool = False) -> Iterator[Any]:
    """A bar with files, × real time and an estimate; yields `update(done, total, audio_seconds)`."""
    started = time.monotonic()
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit + "  {task.fields[rate]}"),
        TimeRemainingColumn(),
    ]
    with bar_of(*columns, hidden=hidden) as bar:
        task = bar.add_task(title, total=None, rate="")

        def update(done: int, total: int, audio_seconds: float | None = None) -> None:
            elapsed = max(time.monotonic() - started, 1e-9)
            rate = (
                f"{done / elapsed:.0f} per s" if audio_seconds is None else f"{audio_seconds / elapsed:.0f} × real time"
            )
            bar.update(task, completed=done, total=total, rate=rate)

        yield update


def print_speed(report: Any) -> None:
    """Prints a report's elapsed time and × real time."""
    if report.audio_seconds:
        rate = report.audio_seconds / max(report.elapsed_seconds, 1e-9)
        out.print(f"  {report.elapsed_seconds:.1f} s, {rate:.0f} × real time")


def print_facts(facts: dict[str, Any]) -> None:
    """Prints names and values in two columns."""
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        out.print(f"{name:<{width}}  {shown}", markup=False)


def counted(update: Callable[[int, int], None], total: int) -> Callable[[int], None]:
    """A callback that hears of items done since its last call."""
    done = itertools.count(1)

    def progress(count: int) -> None:
        for _ in range(count):
            update(next(done), total)

    return progress


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever reads best."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.2f} h"


def size_text(num_bytes: int) -> str:
    """Bytes with a decimal unit."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000 or unit == "GB":
            break
        num_bytes = num_bytes / 1000  # type: ignore[assignment]
    return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
