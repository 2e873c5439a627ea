"""What is wrong with a decoded batch, found without waiting for the device."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from codec.decode.transfer import beyond_codebook
from codec.errors import DecodeError

MAX_PENDING = 8
"""Batches that may be unchecked at once."""


def flags_of(codes: Tensor, data: Tensor) -> Tensor:
    """int64 `[2]`: the greatest code, and the first row of `[B, ...]` that isn't finite or -1."""
    if not data.is_floating_point():
        return torch.stack([codes.max(), codes.new_full((), -1)])
    bad = ~torch.isfinite(data).flatten(1).all(1)
    return torch.stack([codes.max(), torch.where(bad.any(), bad.int().argmax(), -1)])


def raise_for(flags: list[int], *, codebook_size: int, num_rows: int, output: str, dtype: torch.dtype) -> None:
    """Raises what the flags say.

    Raises:
        TokenFileError: A code isn't below the codebook size.
        DecodeError: A row holds NaN or infinity.
    """
    code, row = flags
    if code >= codebook_size:
        raise beyond_codebook(code, codebook_size)
    if row >= 0:
        remedy = "the weights may be damaged: load the checkpoint again"
        if dtype != torch.float32:
            remedy = "decode it with dtype=torch.float32; if that doesn't help, load the checkpoint again"
        raise DecodeError(f"row {row} of {num_rows} holds NaN or infinity ({output}, in {dtype}); {remedy}")


class Checks:
    """Flags on their way from the device: looked at when they have come, at the latest eight batches later."""

    def __init__(self, output: str, dtype: torch.dtype) -> None:
        self._output, self._dtype = output, dtype
        self._pending: deque[tuple[torch.cuda.Event, Tensor, int, int]] = deque()

    def add(self, flags: Tensor, *, codebook_size: int, num_rows: int) -> None:
        """Takes a batch's flags; on the CPU it looks at them at once."""
        if flags.device.type != "cuda":
            self._raise(flags, codebook_size, num_rows)
            return
        host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending.append((event, host, codebook_size, num_rows))

    def look(self, *, wait: bool = False) -> None:
        """Raises what is known to be wrong; with `wait`, of all batches so far."""
        while self._pending:
            event, host, codebook_size, num_rows = self._pending[0]
            if not wait and len(self._pending) <= MAX_PENDING and not event.query():  # type: ignore[no-untyped-call]
                return
            event.synchronize()
            self._pending.popleft()
            self._raise(host, codebook_size, num_rows)

    def _raise(self, flags: Tensor, codebook_size: int, num_rows: int) -> None:
        raise_for(
            flags.tolist(), codebook_size=codebook_size, num_rows=num_rows, output=self._output, dtype=self._dtype
        )
