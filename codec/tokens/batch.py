"""A batch of excerpts as packed bytes, and its unpacking with numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from codec.errors import TokenFileError
from codec.tokens.layout import BLOCK_FRAMES

SPARE_BYTES = 8  # after the last code, so that loads wider than a code stay inside the array

Codes = npt.NDArray[np.int64]


@dataclass(frozen=True, repr=False)
class PackedBatch:
    """Excerpts as they lie in the file, ready to cross to a device: plain numpy, so that it pickles.

    Each excerpt comes as the whole blocks that it touches, `block_stride` bytes apart, of each block at least
    the runs of the first `n_quantizers` codebooks. Code (k, t) of excerpt i, for `0 <= t < lengths[i]`, is:

        u     = first_frame[i] + t                               frame, counted from the first block
        n     = u >> 8                                           block
        bit   = (u & 255) * bits                                 bit in the run
        last  = (first_frame[i] + lengths[i] - 1) >> 8           the only block that can be short
        run   = last_run_bytes[i] if n == last else 32 * bits    bytes of a run in this block
        p     = offsets[i] + n * block_stride + k * run + (bit >> 3)
        word  = data[p] | data[p + 1] << 8 | data[p + 2] << 16   never beyond `data`
        code  = (word >> (bit & 7)) & ((1 << bits) - 1)

    A code that isn't below `codebook_size` (a forged file can hold one where that isn't a power of two) must
    not be used as an index; `unpack` raises.

    Attributes:
        data: uint8, the blocks of all excerpts and 8 spare bytes.
        offsets: int64 [B], where each excerpt's first block starts in `data`.
        first_frame: int64 [B], frames of the first block before the excerpt, 0 to 255.
        lengths: int64 [B], frames of each excerpt, at least 1.
        last_run_bytes: int64 [B], bytes of one run in the last block that the excerpt touches.
        block_stride: Bytes from one block to the next.
        n_quantizers: Codebooks, K.
        bits: Bits per code.
        codebook_size: Entries per codebook.
    """

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    first_frame: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    last_run_bytes: npt.NDArray[np.int64]
    block_stride: int
    n_quantizers: int
    bits: int
    codebook_size: int

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        longest = int(self.lengths.max()) if len(self) else 0
        return (
            f"PackedBatch({len(self)} excerpts of up to {longest} frames, "
            f"{self.n_quantizers} x {self.bits} bits, {self.data.nbytes} bytes)"
        )

    def unpack(self) -> tuple[Codes, npt.NDArray[np.int64]]:
        """The codes, zero where a row is shorter than the longest.

        Returns:
            codes int64 [B, K, T] with T the longest excerpt; lengths int64 [B].

        Raises:
            TokenFileError: A code isn't below `codebook_size`.
        """
        longest = int(self.lengths.max()) if len(self) else 0
        rows, bits = len(self), self.bits
        # Four codes at a time: wherever they start, they end in the next 64-bit word. Groups of four never
        # straddle blocks; those after a row's end are its last one again.
        end = self.first_frame + self.lengths - 1
        groups = (longest + 6) >> 2
        frame = (self.first_frame & ~3)[:, None] + (np.arange(groups) << 2)  # [B, G]
        np.minimum(frame, (end & ~3)[:, None], out=frame)
        block = frame >> 8
        run = np.where(block == (end >> 8)[:, None], self.last_run_bytes[:, None], BLOCK_FRAMES // 8 * bits)
        start = ((self.offsets[:, None] + block * self.block_stride) << 3) + (frame & (BLOCK_FRAMES - 1)) * bits
        position = start[:, None, :] + np.arange(0, 8 * self.n_quantizers, 8)[:, None] * run[:, None, :]  # [B, K, G]
        words = self.data[: len(self.data) & ~7].view("<u8")
        shift = (position & 63).astype(np.uint64)
        position >>= 6
        four = words.take(position, mode="clip") >> shift
        position += 1
        four |= words.take(position, mode="clip") << (np.uint64(64) - shift)  # numpy shifts by 64 to zero
        split = np.empty((*four.shape, 4), np.uint64)
        for i in range(4):
            np.right_shift(four, np.uint64(i * bits), out=split[..., i])
        split &= np.uint64((1 << bits) - 1)
        # Rows start 0 to 3 codes into their first group.
        row, level, _, one = split.strides
        windows: Codes = np.ndarray((rows, 4, self.n_quantizers, longest), np.int64, split, 0, (row, one, level, one))
        codes = windows[np.arange(rows), self.first_frame & 3]
        if (self.lengths < longest).any():
            codes *= (np.arange(longest) < self.lengths[:, None])[:, None, :]
        size = self.codebook_size
        if size != 1 << bits and codes.size and int(codes.max()) >= size:
            remedy = "verify() names the damaged items"
            raise TokenFileError(f"code {int(codes.max())} in a batch; codebooks have {size} entries; {remedy}")
        return codes, self.lengths
