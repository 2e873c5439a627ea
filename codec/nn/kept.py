"""Tensors derived from weights, kept while the weights stay what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class Kept:
    """A tensor derived from others, made again only when one of them has changed in place, moved or changed dtype."""

    def __init__(self) -> None:
        self._key: tuple[object, ...] | None = None
        self._value: Tensor | None = None

    def get(self, sources: Sequence[Tensor], make: Callable[[], Tensor]) -> Tensor:
        """`make()`, without gradient, or what it gave before if `sources` are the same as then."""
        key = tuple(
            fact
            for t in sources
            for fact in (t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype, t.device, t.shape)
        )
        if self._value is None or self._key != key:
            # An ordinary tensor even inside inference mode: it may later take part in somebody's gradient.
            with torch.inference_mode(False), torch.no_grad():
                self._key, self._value = key, make()
        return self._value

    def __getstate__(self) -> dict[str, None]:
        return {"_key": None, "_value": None}  # addresses mean nothing in a copy or another process
