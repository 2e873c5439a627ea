# ruff: noqa: I001
"""The `codec` command: arguments only, one verb per arrow, one module per verb or family of verbs."""

from __future__ import annotations

import sys

# Imported in the order in which --help lists the verbs.
from codec.cli import encode  # noqa: F401
from codec.cli import decode  # noqa: F401
from codec.cli import info  # noqa: F401
from codec.cli import tokens  # noqa: F401
from codec.cli import features  # noqa: F401
from codec.cli import convert  # noqa: F401
from codec.cli import bench  # noqa: F401
from codec.cli import evaluate  # noqa: F401
from codec.cli import train  # noqa: F401
from codec.cli.common import FAILED, USAGE, app, errors
from codec.errors import CodecError, ConfigError, InputError


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
