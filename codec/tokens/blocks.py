"""An item's codes ↔ its blocks: runs of packed codes, codebook after codebook, and a CRC (FORMAT.md)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from codec.tokens.layout import BLOCK_FRAMES, CRC_BYTES, BlockLayout, block_crc
from codec.tokens.packing import pack, unpack

IntCodes = npt.NDArray[np.integer]


def pack_blocks(layout: BlockLayout, codes: IntCodes, key_crc: int = 0, block: int = 0) -> bytes:
    """The blocks of `codes` [K, t], the first of which is number `block` of its item.

    Of a codebook with a divisor d, every d-th code is stored.
    """
    full, rest = divmod(codes.shape[1], BLOCK_FRAMES)
    parts = []  # of each group of codebooks: uint8 [blocks, codebooks, bytes of a full run]
    for first, stop, divisor in layout.groups:
        some = codes[first:stop, ::divisor]
        size, short = BLOCK_FRAMES // divisor, -(-rest // divisor)
        padded = np.zeros((full + (rest > 0), stop - first, size), np.uint64)
        if full:
            whole = some[:, : full * size].reshape(stop - first, full, size)
            padded[:full] = whole.transpose(1, 0, 2)
        if rest:
            padded[full, :, :short] = some[:, full * size :]
        parts.append((pack(padded, layout.bits), layout.run_bytes(rest, divisor)))
    pieces = []
    for n in range(full + (rest > 0)):
        data = b"".join([(runs[n] if n < full else runs[n, :, :short]).tobytes() for runs, short in parts])
        pieces += [data, block_crc(data, key_crc, block + n).to_bytes(CRC_BYTES, "little")]
    return b"".join(pieces)


def unpack_blocks(layout: BlockLayout, data: memoryview, num_frames: int, out: npt.NDArray[np.int64]) -> None:
    """Unpack blocks, `num_frames` frames in all, into `out` [k, at least num_frames], whose k may be below K.

    Of a codebook with a divisor d, every code fills d frames.
    """
    stride = layout.block_stride
    full, rest = divmod(num_frames, BLOCK_FRAMES)
    blocks = np.frombuffer(data, np.uint8, full * stride).reshape(full, stride)
    at, tail = 0, full * stride
    for first, stop, divisor in layout.groups:
        rows = out[first:stop]
        count, size = len(rows), BLOCK_FRAMES // divisor
        if full and count:
            run = layout.run_bytes(BLOCK_FRAMES, divisor)
            codes = unpack(blocks[:, at : at + count * run].reshape(full, count, run), layout.bits, size)
            target = rows[:, : full << 8].reshape(count, full, size, divisor)
            target[...] = codes.transpose(1, 0, 2)[..., None]
            at += count * run
        if rest and count:
            run = layout.run_bytes(rest, divisor)
            runs = np.frombuffer(data, np.uint8, count * run, tail).reshape(count, run)
            codes = unpack(runs, layout.bits, -(-rest // divisor))
            rows[:, full << 8 : num_frames] = np.repeat(codes, divisor, axis=1)[:, :rest]
            tail += count * run
