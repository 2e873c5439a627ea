"""Packed bytes → device → codes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.errors import InputError, TokenFileError
from codec.sources import TokenBatch
from codec.tokens import PackedBatch

ROW_BYTES = 64
"""Of the numbers of one row: eight int64."""


class Rows(NamedTuple):
    """Numbers of each row, int64 `[B]`, on one device; on the host as numpy.

    Attributes:
        offsets: See `PackedBatch`, as the next two.
        first_frame: Frames of the first block before what was read.
        last_run_bytes: Bytes of a run in the last block.
        read: Frames read, context included.
        skip: Context frames before the excerpt.
        frames: Frames of the excerpt.
        num_samples: Samples of the excerpt.
        read_samples: Samples of the frames read.
    """

    offsets: Tensor
    first_frame: Tensor
    last_run_bytes: Tensor
    read: Tensor
    skip: Tensor
    frames: Tensor
    num_samples: Tensor
    read_samples: Tensor


@dataclass(frozen=True)
class Staged:
    """A batch on the device: `data` uint8 `[n]`, `table` int64 `[8, B]`; its numbers on the host too.

    `event` is set where another stream than the caller's copies it.
    """

    batch: TokenBatch
    host: NDArray[np.int64]
    data: Tensor
    table: Tensor
    event: torch.cuda.Event | None = None

    @property
    def rows(self) -> Rows:
        """The table by name."""
        return Rows(*self.table)

    def part(self, first: int, stop: int) -> Staged:
        """Rows [first, stop) of the same bytes."""
        return replace(self, host=self.host[:, first:stop], table=self.table[:, first:stop])


def host_table(batch: TokenBatch) -> NDArray[np.int64]:
    """The numbers of `Rows`, int64 `[8, B]`."""
    packed = batch.packed
    own = [tensor.cpu().numpy() for tensor in (batch.skip, batch.lengths, batch.num_samples, batch.read_samples)]
    return np.stack([packed.offsets, packed.first_frame, packed.last_run_bytes, packed.lengths, *own])


def stage(batch: TokenBatch, device: torch.device, stream: torch.cuda.Stream | None = None) -> Staged:
    """Takes a batch to the device, in one copy.

    On a CUDA device the copy comes out of page-locked memory and doesn't wait; on `stream` if one is given, and then
    whoever reads it must `receive` it.
    """
    host = host_table(batch)
    packed = batch.packed
    if device.type != "cuda":
        return Staged(batch, host, torch.from_numpy(packed.data).to(device), torch.from_numpy(host).to(device))
    table_bytes = host.nbytes
    # torch keeps page-locked blocks, and gives one out again only after the copies from it have ended.
    pinned = torch.empty(table_bytes + len(packed.data), dtype=torch.uint8, pin_memory=True)
    view = pinned.numpy()
    view[:table_bytes] = host.reshape(-1).view(np.uint8)
    view[table_bytes:] = packed.data
    with torch.cuda.stream(stream):  # type: ignore[arg-type]
        there = pinned.to(device, non_blocking=True)
        event = None
        if stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
    table = there[:table_bytes].view(torch.int64).view(8, -1)
    return Staged(batch, host, there[table_bytes:], table, event)


def receive(staged: Staged) -> Staged:
    """Makes the current stream wait for the copy, and the memory last until the current stream is done with it."""
    if staged.event is not None:
        current = torch.cuda.current_stream(staged.data.device)
        current.wait_event(staged.event)
        staged.data.record_stream(current)
        staged.table.record_stream(current)
    return staged


def unpack_codes(packed: PackedBatch, device: torch.device | str = "cpu", *, n_quantizers: int | None = None) -> Tensor:
    """Bits → codes on the device, so that packed bytes are what crosses the bus.

    The arithmetic is that of `PackedBatch`; the result equals `packed.unpack()`.

    Args:
        packed: The batch.
        device: Where to.
        n_quantizers: Codebooks to unpack, the first ones; all that the batch has if None.

    Returns:
        int64 `[B, K, T]`, zeros beyond each row's length.

    Raises:
        InputError: More codebooks than the batch has.
        TokenFileError: A code isn't below the codebook size.
    """
    k = checked_quantizers(packed, n_quantizers)

    def move(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    data = torch.from_numpy(packed.data).to(device, non_blocking=True)
    lengths = move(packed.lengths)
    codes = unpack(
        data,
        move(packed.offsets),
        move(packed.first_frame),
        move(packed.last_run_bytes),
        lengths,
        num_frames=int(packed.lengths.max()),
        n_quantizers=k,
        bits=packed.bits,
        block_stride=packed.block_stride,
    )
    if packed.codebook_size != 1 << packed.bits and int(codes.max()) >= packed.codebook_size:
        raise beyond_codebook(int(codes.max()), packed.codebook_size)
    return codes


def unpack_on_host(packed: PackedBatch, n_quantizers: int | None) -> Tensor:
    """As `unpack_codes` on the CPU, by numpy, which is several times faster there."""
    k = checked_quantizers(packed, n_quantizers)
    if k != packed.n_quantizers:
        packed = replace(packed, n_quantizers=k)
    return torch.from_numpy(packed.unpack()[0])


def unpack(
    data: Tensor,
    offsets: Tensor,
    first_frame: Tensor,
    last_run_bytes: Tensor,
    lengths: Tensor,
    *,
    num_frames: int,
    n_quantizers: int,
    bits: int,
    block_stride: int,
) -> Tensor:
    """See `unpack_codes`: tensors in, codes `[B, K, num_frames]` out, no value looked at, so codes are unchecked."""
    steps = torch.arange(num_frames, device=data.device)
    # Beyond a row's end its last code is read again, then zeroed: no load leaves the data.
    frame = first_frame[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    block = frame >> 8
    bit = (frame & 255) * bits
    last = (first_frame + lengths - 1)[:, None] >> 8
    run = torch.where(block == last, last_run_bytes[:, None], 32 * bits)
    start = offsets[:, None] + block * block_stride + (bit >> 3)
    levels = torch.arange(n_quantizers, device=data.device)[:, None]
    position = start[:, None] + levels * run[:, None]
    word = data[position].int() | data[position + 1].int() << 8
    if bits > 9:  # otherwise a code ends in its second byte
        word = word | data[position + 2].int() << 16
    codes = ((word >> (bit & 7)[:, None]) & ((1 << bits) - 1)).long()
    return codes * (steps < lengths[:, None])[:, None]


def checked_quantizers(packed: PackedBatch, n_quantizers: int | None) -> int:
    """The codebooks to take of a batch."""
    if n_quantizers is None:
        return packed.n_quantizers
    if not 1 <= n_quantizers <= packed.n_quantizers:
        raise InputError(
            f"n_quantizers is {n_quantizers}; the batch holds the first {packed.n_quantizers} codebooks: "
            f"ask for 1 to {packed.n_quantizers}, or read more from the store"
        )
    return n_quantizers


def beyond_codebook(code: int, size: int) -> TokenFileError:
    """The error for a forged code."""
    return TokenFileError(f"code {code} in a batch; the codebooks have {size} entries: run `codec verify` on the store")
