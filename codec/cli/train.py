"""`codec train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codec.cli.common import app, out, print_facts
from codec.errors import ConfigError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="A recipe, such as recipes/speech_16k.yaml.", show_default=False)],
    resume: Annotated[bool, typer.Option(help="Go on from the run's last.ckpt if there is one.")] = True,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    check: Annotated[bool, typer.Option("--check", help="Try recipe, data and one step; write nothing.")] = False,
    profile: Annotated[bool, typer.Option("--profile", help="Run a few steps; show where their time goes.")] = False,
) -> None:
    """Train a codec by a recipe. Any setting can be overridden: --optim.max_steps 100 --run.output runs/try."""
    from codec import train as training

    settings = training.load_config(config, _overrides(context.args))
    training.keep_freed_memory()  # here, for a library leaves its caller's memory alone
    if check and profile:
        raise ConfigError("--check and --profile are two things; give one")
    if check:
        facts, remarks = training.check(settings)
        print_facts(facts)
        for remark in remarks:
            out.print(f"note: {remark}", markup=False)
        out.print(f"{config}: ready to train")
    elif profile:
        parts = training.profile(settings)
        whole = sum(milliseconds for _, milliseconds in parts)
        for name, milliseconds in [*parts, ("step", whole)]:
            out.print(f"{name:<15}{milliseconds:9.1f} ms {milliseconds / whole:6.1%}", markup=False)
        seconds = settings.data.batch_size * settings.data.segment_seconds
        out.print(f"{seconds / whole * 1e3:.1f} s of audio per second; medians, with all losses switched on")
    else:
        folder = training.train(settings, resume=resume, progress=progress)
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
