"""`codec train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from codec.cli.common import app, out
from codec.errors import ConfigError


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
