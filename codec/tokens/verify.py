"""Every check a shard carries, and the names of what fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from zlib import crc32

import numpy as np
import numpy.typing as npt

from codec.errors import TokenFileError
from codec.tokens.blocks import unpack_blocks
from codec.tokens.index import Shard
from codec.tokens.layout import BLOCK_FRAMES, bad_blocks, damaged
from codec.tokens.records import parse_head, parse_meta

_READ_BYTES = 4 << 20  # read at once; also how often `progress` hears
_ITEMS_AT_ONCE = 4096  # looked up in the index at once


@dataclass(frozen=True)
class Problem:
    """One damaged place that `verify` found.

    Attributes:
        path: The file.
        key: The item; None where the damage isn't in one.
        block: The block's number; None where it isn't in one.
        message: What is wrong, where, and what to do.
    """

    path: str
    key: str | None
    block: int | None
    message: str


def verify_shard(shard: Shard, progress: Callable[[int], None] | None = None) -> Iterator[Problem]:
    """Check an open shard's records, blocks and meta columns (opening it has checked the rest).

    Args:
        shard: The shard.
        progress: Called now and then with the bytes checked since the last call.
    """
    begin, item = shard.header.data_start, 0
    reported = 0
    key_crcs = np.empty(len(shard), np.uint32)
    while item < len(shard):
        part = slice(item, item + _ITEMS_AT_ONCE)
        samples = shard.num_samples[part].astype(np.int64)
        starts = shard.offset[part].astype(np.int64)
        ends = starts + shard.layout.item_bytes(shard.num_frames_of(samples))
        # As many items as one read should fetch, and at least one.
        count = max(1, int(np.searchsorted(ends, begin + _READ_BYTES, side="right")))
        data = shard.file.read(begin, int(ends[count - 1]))
        at = 0
        for start, end in zip((starts[:count] - begin).tolist(), (ends[:count] - begin).tolist(), strict=True):
            key = shard.key_bytes(item)
            key_crcs[item] = key_crc = crc32(key)
            name = bytes(key).decode(errors="replace")
            for error in _head_errors(shard, item, data[at:start], begin + at):
                yield Problem(shard.path, name, None, str(error))
            blocks = data[start:end]
            for block in bad_blocks(blocks, shard.layout.block_stride, key_crc, 0):
                yield Problem(shard.path, name, block, str(shard.block_error(item, block)))
            if shard.header.spec.codebook_size != 1 << shard.layout.bits:
                for block, error in _code_errors(shard, item, blocks):
                    yield Problem(shard.path, name, block, str(error))
            item, at = item + 1, end
        begin += at
        if progress is not None:
            progress(begin - reported)
            reported = begin
    for error in _index_errors(shard, key_crcs):
        yield Problem(shard.path, None, None, str(error))
    if progress is not None:
        progress(shard.file.size - reported)


def _head_errors(shard: Shard, item: int, head: memoryview, offset: int) -> Iterator[TokenFileError]:
    """Damage in the record head of an item, or differences between it and the index."""
    key, num_samples = shard.key_bytes(item), int(shard.num_samples[item])
    gain = None if shard.gain is None or np.isnan(shard.gain[item]) else float(shard.gain[item])
    try:
        found = parse_head(shard.path, offset, head)
        if found.key != key or found.num_samples != num_samples or found.gain != gain:
            expected = f"the index has {bytes(key)!r}, {num_samples} samples, gain {gain}"
            yield damaged(shard.path, offset, f"the record is {found}", expected)
        parse_meta(shard.path, offset, found.meta)
        found.key.decode()
    except TokenFileError as error:
        yield error
    except UnicodeDecodeError as error:
        yield damaged(shard.path, offset, f"the key isn't UTF-8 ({error})", "keys are")


def _code_errors(shard: Shard, item: int, blocks: memoryview) -> Iterator[tuple[int, TokenFileError]]:
    """Codes that a codebook doesn't have: possible where its size isn't a power of two."""
    layout, size, num_frames = shard.layout, shard.header.spec.codebook_size, shard.frames(item)
    for block, a in enumerate(range(0, len(blocks), layout.block_stride)):
        frames = min(BLOCK_FRAMES, num_frames - block * BLOCK_FRAMES)
        codes = np.empty((layout.n_quantizers, frames), np.int64)
        unpack_blocks(layout, blocks[a:], frames, codes)
        largest = int(codes.max())
        if largest >= size:
            found = f"block {block} holds code {largest}"
            offset = int(shard.offset[item]) + a
            yield block, damaged(shard.path, offset, found, f"codebooks have {size} entries")


def _index_errors(shard: Shard, key_crcs: npt.NDArray[np.uint32]) -> Iterator[TokenFileError]:
    order = shard.order.astype(np.int64)
    wrong = int(np.count_nonzero(key_crcs[order] != shard.hash))
    if wrong or (np.bincount(order, minlength=len(shard)) != 1).any():
        at = shard.footer.directory_offset
        yield damaged(shard.path, at, f"{wrong} hashes aren't those of their keys", "each item has one entry")
    for field in shard.meta_fields:
        try:
            shard.meta_column(field)
        except TokenFileError as error:
            yield error
