"""A coder that breaks; in a module of its own, because worker processes import it."""

import os
from dataclasses import dataclass

from codec.evaluate.coders import Coded, Condition


@dataclass
class Crashing:
    """Kills its process on one clip, raises on another."""

    conditions = [Condition("crashing", "crashing", None, "nothing")]  # noqa: RUF012

    def code(self, wave, sample_rate, key):
        if key == "kills":
            os._exit(1)
        if key == "raises":
            raise ZeroDivisionError("not this one")
        yield Coded(self.conditions[0], wave * 0.9)
