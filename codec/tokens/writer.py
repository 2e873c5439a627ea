"""Codes → a token file that survives its writer: checksummed records, then an index, then its final name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt

from codec.errors import InputError, TokenFileError
from codec.frames import num_frames
from codec.spec import CodecSpec
from codec.tokens.blocks import IntCodes, pack_blocks
from codec.tokens.files import UNFINISHED, LocalFile, StorePath, claim, is_remote, local_path
from codec.tokens.index import IndexBuilder
from codec.tokens.layout import (
    BLOCK_FRAMES,
    Header,
    are_frame_divisors,
    bad_blocks,
    codec_differences,
    encode_header,
    header_bytes,
    parse_header,
)
from codec.tokens.records import (
    RecordHead,
    check_num_samples,
    make_head,
    parse_meta,
    whole_records,
)
from codec.tokens.store import TokenStore

_FRAMES_AT_ONCE = 64 * BLOCK_FRAMES  # packed and written at once: bounds the temporaries of a long item


class TokenWriter:
    """Writes one shard. As a context it finishes the shard or, on an exception, leaves it for `resume=True`.

    Items lie in `PATH.unfinished` until `close`, which adds the index and renames it to `PATH`. When `add`
    returns, the item is with the operating system: a process that is killed loses at most the item it was
    writing. One process writes a shard at a time; concurrent writers take a shard each.

    Args:
        path: The shard, local, by custom `NAME.ctok` (a folder of those is a store).
        spec: The codec that makes the codes.
        n_quantizers: Codebooks to store, from the first; None stores all of the codec's.
        frame_divisors: For codebooks at different rates (SNAC's are 4, 2, 1): of each, the number of frames
            that share one code, a power of two up to 256. Codes come at the full rate, each repeated in all
            of its frames (`np.repeat`), and are stored once. None means 1 for all.
        resume: Go on with what a writer of the same codec left, finished or not: whole items are kept
            (`key in writer`), what follows them is cut off. Where there is nothing, start.
        force: Replace what is there.

    Raises:
        InputError: `path` exists and neither `resume` nor `force` is given; `n_quantizers` or
            `frame_divisors` are out of range.
        TokenFileError: Another writer holds the shard; what is to be resumed isn't of this codec.
    """

    def __init__(
        self,
        path: StorePath,
        spec: CodecSpec,
        *,
        n_quantizers: int | None = None,
        frame_divisors: Sequence[int] | None = None,
        resume: bool = False,
        force: bool = False,
    ) -> None:
        spec = spec.token_spec
        quantizers = spec.n_quantizers if n_quantizers is None else n_quantizers
        if not 1 <= quantizers <= spec.n_quantizers:
            limit = f"{spec.name} has {spec.n_quantizers}"
            raise InputError(f"n_quantizers is {quantizers}; {limit}; give 1 to {spec.n_quantizers}")
        if is_remote(path):
            raise InputError(f"{path}: can't write to a URL; write a local shard and copy it there")
        if resume and force:
            raise InputError("resume=True keeps what is there and force=True replaces it; give one of them")
        self.path = local_path(path)
        self.spec = spec
        self.n_quantizers = quantizers
        self._temporary = self.path + UNFINISHED
        divisors = (1,) * quantizers if frame_divisors is None else tuple(frame_divisors)
        if not are_frame_divisors(divisors, quantizers):
            limit = f"they must be {quantizers} powers of two from 1 to {BLOCK_FRAMES}, one per codebook"
            raise InputError(f"frame_divisors are {frame_divisors!r}; {limit}")
        start = encode_header(spec, quantizers, divisors)
        self._header, self._header_text = Header(spec, quantizers, divisors, len(start)), start
        self._layout = self._header.layout
        self._fd: int | None = None
        self._closed = False
        self._open_item: _OpenItem | None = None
        self._clear()
        if resume and os.path.exists(self.path) and not os.path.exists(self._temporary):
            self._adopt_finished()
        else:
            self._open(resume, force)

    def _clear(self) -> None:
        self._index = IndexBuilder()
        self._keys: dict[str, None] = {}
        self._end = 0  # of the last whole record

    # --- items

    def keys(self) -> Sequence[str]:
        """Keys of the items written so far, those that `resume` found included."""
        return list(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def add(
        self,
        key: str,
        codes: Any,
        *,
        num_samples: int,
        gain: float | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Write one item.

        Args:
            key: The item's name, unique in the store.
            codes: Integers [K, T], numpy or torch, each in [0, codebook_size).
            num_samples: Samples of the wave; `ceil(num_samples / hop_length)` must be T.
            gain: Factor by which the codec's input was scaled (kept as float32).
            meta: JSON metadata of the item: speaker, text, labels.

        Raises:
            InputError: An argument is out of its range, or the key is taken. Nothing is written.
            TokenFileError: The disk is full, say. What was written before is safe.
        """
        array = self._check_codes(key, codes)
        self._check_repeats(key, array)
        frames = array.shape[1]
        check_num_samples(key, num_samples)
        self._check_length(key, num_samples, frames)
        head = self._start(key, num_samples, gain, meta)
        key_crc, pending = crc32(head.key), head.encode()
        first_block, position = self._end + len(pending), self._end
        with self._undone_on_error():
            for first in range(0, frames, _FRAMES_AT_ONCE):
                part = array[:, first : first + _FRAMES_AT_ONCE]
                pending += pack_blocks(self._layout, part, key_crc, first // BLOCK_FRAMES)
                position = self._write(pending, position)
                pending = b""
        self._commit(head, first_block, position)

    def begin(self, key: str, *, gain: float | None = None, meta: dict[str, Any] | None = None) -> None:
        """Start an item whose codes come in pieces: `append` them, then `end` it (or `cancel` it).

        Raises:
            InputError: As of `add`.
            TokenFileError: As of `add`.
        """
        head = self._start(key, 1, gain, meta)
        with self._undone_on_error():
            # Zeros, which fail the record's CRC, until the item is whole.
            first_block = self._write(bytes(len(head.encode())), self._end)
        none = np.empty((self.n_quantizers, 0), np.int64)
        self._open_item = _OpenItem(head, crc32(head.key), first_block, first_block, none)

    def append(self, codes: Any) -> None:
        """Write the next frames of the item that was begun.

        Args:
            codes: Integers [K, t], t ≥ 0.

        Raises:
            InputError: No item was begun, or the codes are out of range.
            TokenFileError: The disk is full, say. The item is cancelled, those before it are safe.
        """
        item = self._begun("append")
        array = self._check_codes(item.key, codes, at_least=0)
        rest = np.concatenate([item.rest, array], axis=1, dtype=np.int64)
        self._check_repeats(item.key, rest, item.frames)
        item.rest = rest
        self._write_blocks(item, item.rest.shape[1] // BLOCK_FRAMES * BLOCK_FRAMES)

    def end(self, num_samples: int) -> None:
        """Finish the item that was begun.

        Raises:
            InputError: No item was begun, or `num_samples` doesn't fit the frames appended.
            TokenFileError: The disk is full, say. The item is cancelled, those before it are safe.
        """
        item = self._begun("end")
        check_num_samples(item.key, num_samples)
        self._check_length(item.key, num_samples, item.frames + item.rest.shape[1])
        self._write_blocks(item, item.rest.shape[1])
        head = replace(item.head, num_samples=int(num_samples))
        with self._undone_on_error():
            self._write(head.encode(), self._end)
        self._open_item = None
        self._commit(head, item.first_block, item.position)

    def cancel(self) -> None:
        """Drop the item that was begun, as if it had never been."""
        self._begun("cancel")
        self._undo()

    def copy(self, store: TokenStore, key: str) -> None:
        """Write an item of another store of the same codec, byte for byte.

        Raises:
            InputError: The key is taken, or the store has no such item.
            TokenFileError: The item is damaged, or of another codec; the disk is full, say.
        """
        shard, item = store._item(key)
        differences = codec_differences(shard.header, self._header)
        if differences:
            raise TokenFileError(f"{shard.path}: differs from {self.path} in {differences}; decode and encode it")
        head = shard.head(item)
        self._start(key, head.num_samples, head.gain, parse_meta(shard.path, 0, head.meta))
        first, end = shard.span(item)
        start = shard.head_span(item)[0]
        stride, key_crc = self._layout.block_stride, crc32(head.key)
        position = self._end + first - start
        with self._undone_on_error():
            self._write(shard.file.read(start, first), self._end)
            chunk = _FRAMES_AT_ONCE // BLOCK_FRAMES * stride
            for a in range(first, end, chunk):
                data = shard.file.read(a, min(a + chunk, end))
                bad = bad_blocks(data, stride, key_crc, (a - first) // stride)
                if bad:
                    raise shard.block_error(item, bad[0])
                position = self._write(data, position)
        self._commit(head, self._end + first - start, position)

    # --- checks

    def _check_codes(self, key: str, codes: Any, at_least: int = 1) -> IntCodes:
        if hasattr(codes, "detach"):
            codes = codes.detach().cpu().numpy()
        array: IntCodes = np.asarray(codes)
        if array.dtype.kind not in "iu":
            raise InputError(f"{key!r}: codes are {array.dtype}; they must be integers; round or cast them")
        if array.ndim != 2 or array.shape[0] != self.n_quantizers or array.shape[1] < at_least:
            raise InputError(
                f"{key!r}: codes have shape {list(array.shape)}; this shard takes [{self.n_quantizers}, T], "
                f"T ≥ {at_least}; select the codebooks, or open the writer with another n_quantizers"
            )
        if array.size:
            low, high = int(array.min()), int(array.max())
            if low < 0 or high >= self.spec.codebook_size:
                raise InputError(
                    f"{key!r}: code {low if low < 0 else high}; {self.spec.name} has codes 0 to "
                    f"{self.spec.codebook_size - 1}; check that these are this codec's codes"
                )
        return array

    def _check_repeats(self, key: str, codes: IntCodes, start_frame: int = 0) -> None:
        """Codes [K, t] whose first frame starts a block: the frames that share a code must have the same."""
        for first, stop, divisor in self._layout.groups:
            if divisor > 1:
                rows = codes[first:stop]
                wrong = rows != np.repeat(rows[:, ::divisor], divisor, axis=1)[:, : rows.shape[1]]
                if wrong.any():
                    level, frame = (int(n[0]) for n in np.nonzero(wrong))
                    raise InputError(
                        f"{key!r}: the code of codebook {first + level} changes at frame {start_frame + frame}; "
                        f"it has one per {divisor} frames; give codes at the full rate, each repeated {divisor} times"
                    )

    def _check_length(self, key: str, num_samples: int, frames: int) -> None:
        hop = self.spec.hop_length
        if frames < 1 or num_frames(num_samples, hop) != frames:
            fit = f"{(frames - 1) * hop + 1} to {frames * hop} samples" if frames else "no item"
            raise InputError(
                f"{key!r}: num_samples is {num_samples}; {frames} frames of {hop} samples fit {fit}; "
                "give the length of the wave that was encoded, and all of its frames"
            )

    def _start(self, key: str, num_samples: int, gain: float | None, meta: dict[str, Any] | None) -> RecordHead:
        """Check what comes before an item's codes, and make sure that there is a file for it."""
        self._check_no_open_item()
        head = make_head(key, num_samples, gain, meta)
        if self._closed:
            remedy = "open another with resume=True to add to the shard"
            raise InputError(f"{self.path}: this writer is closed; {remedy}")
        if self._fd is None and key not in self._keys:
            self._reopen_finished()
        if key in self._keys:
            raise InputError(f"{key!r}: this key is in {self.path} already; keys are unique; give another")
        return head

    def _check_no_open_item(self) -> None:
        if self._open_item is not None:
            remedy = "end() or cancel() it first"
            raise InputError(f"{self.path}: item {self._open_item.key!r} is still open; {remedy}")

    def _begun(self, what: str) -> _OpenItem:
        if self._open_item is None:
            raise InputError(f"{what}() without an item; begin() one first")
        return self._open_item

    # --- bytes

    def _write_blocks(self, item: _OpenItem, count: int) -> None:
        """Write the first `count` of an open item's waiting frames."""
        with self._undone_on_error():
            for first in range(0, count, _FRAMES_AT_ONCE):
                part = item.rest[:, first : min(first + _FRAMES_AT_ONCE, count)]
                blocks = pack_blocks(self._layout, part, item.key_crc, item.frames // BLOCK_FRAMES)
                item.position = self._write(blocks, item.position)
                item.frames += part.shape[1]
        item.rest = item.rest[:, count:].copy()

    def _commit(self, head: RecordHead, first_block: int, end: int) -> None:
        fields = parse_meta(self._temporary, self._end, head.meta)
        self._index.add(first_block, head.num_samples, head.key, head.gain, fields)
        self._keys[head.key.decode()] = None
        self._end = end

    def _write(self, data: bytes | memoryview, position: int) -> int:
        """Write all of `data` at `position`; return where it ends."""
        assert self._fd is not None
        view = memoryview(data)
        try:
            while view:
                written = os.pwrite(self._fd, view, position)
                position += written
                view = view[written:]
        except OSError as error:
            raise TokenFileError(
                f"{self._temporary}: at byte {position}: can't write {len(view)} bytes ({error.strerror}); "
                f"its {len(self)} whole items are safe; make room and go on with resume=True"
            ) from error
        return position

    @contextlib.contextmanager
    def _undone_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._undo()
            raise

    def _undo(self) -> None:
        """Cut off what follows the last whole record."""
        self._open_item = None
        if self._fd is not None:
            os.ftruncate(self._fd, self._end)

    # --- the file

    def _open(self, resume: bool, force: bool) -> None:
        self._check_free(resume, force)
        self._fd, new = claim(self._temporary, self._make_empty, replace=force)
        try:
            if new:
                self._check_free(resume, force)  # another writer may have finished meanwhile
                self._end = len(self._header_text)
            elif resume:
                self._recover()
            else:
                remedy = "complete it with resume=True or replace it with force=True"
                raise InputError(f"{self._temporary}: an unfinished shard is here; {remedy}")
        except BaseException:
            if new:
                os.unlink(self._temporary)
            self._release()
            raise

    def _check_free(self, resume: bool, force: bool) -> None:
        if os.path.exists(self.path) and not resume and not force:
            remedy = "give another path, or resume=True to add to it, or force=True to replace it"
            raise InputError(f"{self.path}: exists; {remedy}")

    def _make_empty(self, path: str) -> None:
        with open(path, "xb") as file:
            file.write(self._header_text)

    def _check_codec(self, path: str, header: Header) -> None:
        differences = codec_differences(header, self._header)
        if differences:
            remedy = "resume with the codec that wrote it, or write to another path"
            raise TokenFileError(f"{path}: differs from the writer's codec in {differences}; {remedy}")

    def _recover(self) -> None:
        """Index the whole records of what another writer left, and cut off what follows them."""
        file = LocalFile(self._temporary)
        try:
            size = header_bytes(file.path, file.read(0, min(file.size, len(self._header_text))), file.size)
            header = parse_header(file.path, file.read(0, size))
            self._check_codec(file.path, header)
            self._end = header.data_start
            for head, first_block, end in whole_records(file, header):
                if head.key.decode() in self._keys:
                    break
                self._commit(head, first_block, end)
        finally:
            file.close()
        self._undo()

    def _adopt_finished(self) -> None:
        """Take the keys of a finished shard; only an item to add makes it unfinished again."""
        with TokenStore(self.path) as store:
            self._check_codec(self.path, store._header)
            self._keys = dict.fromkeys(store.keys())

    def _reopen_finished(self) -> None:
        """Go on with a finished shard in a copy, which replaces it at close: its readers keep their file."""
        self._clear()
        self._fd, _ = claim(self._temporary, lambda path: shutil.copyfile(self.path, path))
        try:
            self._recover()
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        """Add the index, make the bytes durable, and give the file its name. A second call does nothing.

        Raises:
            InputError: An item is still open.
            TokenFileError: The disk is full, say; `resume=True` goes on with all the items.
        """
        self._check_no_open_item()
        if self._fd is None:  # closed already, or a finished shard to which nothing was added
            self._closed = True
            return
        try:
            with self._undone_on_error():
                position = self._end
                for piece in self._index.encode(self._end):
                    position = self._write(piece, position)
                os.fsync(self._fd)
            os.rename(self._temporary, self.path)
            _sync_folder(os.path.dirname(self.path) or ".")
        finally:
            self._release()

    def abandon(self) -> None:
        """Stop without finishing: whole items stay in the unfinished file, for `resume=True`."""
        self._undo()
        self._release()

    def _release(self) -> None:
        self._closed = True
        if self._fd is not None:
            os.close(self._fd)  # and with it the lock
            self._fd = None

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            self._release()


@dataclass
class _OpenItem:
    """An item whose codes are still coming.

    Attributes:
        head: Its record head, but for `num_samples`.
        key_crc: CRC-32 of its key.
        first_block: Where its first block starts.
        position: Where its next block goes.
        rest: Codes [K, t] that wait for the rest of their block.
        frames: Frames in the blocks written.
    """

    head: RecordHead
    key_crc: int
    first_block: int
    position: int
    rest: npt.NDArray[np.int64]
    frames: int = 0

    @property
    def key(self) -> str:
        return self.head.key.decode()


def _sync_folder(path: str) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
