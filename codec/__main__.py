"""`python -m codec` is the `codec` command."""

from codec.cli import main

main()
