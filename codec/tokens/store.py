"""Token files → codes: one shard or many, local or remote, by key and span of frames."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import index
from types import TracebackType
from typing import Any, overload
from zlib import crc32

import numpy as np
import numpy.typing as npt

from codec.errors import InputError, TokenFileError
from codec.spec import CodecSpec
from codec.tokens.batch import SPARE_BYTES, PackedBatch
from codec.tokens.blocks import pack_blocks, unpack_blocks
from codec.tokens.files import StorePath, open_file, shard_paths
from codec.tokens.index import Shard
from codec.tokens.layout import (
    BLOCK_FRAMES,
    CRC_BYTES,
    BlockLayout,
    bad_blocks,
    codec_differences,
    damaged,
    first_bad_block,
)
from codec.tokens.verify import Problem, verify_shard

_KEYS_AT_ONCE = 1024  # decoded at once when all are iterated
_BLOCKS_AT_ONCE = 64  # blocks unpacked at once: bounds the temporaries of a long read

Codes = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ItemInfo:
    """What a store knows of one item.

    Attributes:
        key: The item's key.
        num_frames: Frames, T.
        num_samples: Samples of the wave that was encoded, exact.
        sample_rate: Hz.
        gain: Factor by which the codec's input was scaled; None if it wasn't.
        meta: The item's JSON metadata; empty if it has none.
    """

    key: str
    num_frames: int
    num_samples: int
    sample_rate: int
    gain: float | None
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> Fraction:
        """The duration, exact."""
        return Fraction(self.num_samples, self.sample_rate)


class TokenStore:
    """A corpus of tokens.

    Opening maps and checks the index; it makes no object per item. A store that is pickled opens its files
    again where it arrives; one that is forked shares them. Either way the pages are shared, and reading
    doesn't grow the process.

    A shard must not change in place while it is open (a new one that is renamed over it is fine). A change of
    size is noticed at the next call, other changes by the blocks' checks.

    Args:
        path: A `.ctok` file, a folder of them, a list of files, or an fsspec URL of a file or folder.
        verify_blocks: Whether reads check the CRC of every block they touch (about a microsecond each, and half
            of that where the package `isal` is installed).

    Raises:
        TokenFileError: No such store; a damaged, foreign or unfinished shard; shards of different codecs; one
            key twice.
    """

    def __init__(self, path: StorePath | Sequence[StorePath], *, verify_blocks: bool = True) -> None:
        self._paths = shard_paths(path)
        self._verify_blocks = verify_blocks
        self._fingerprints: list[bytes] | None = None
        self._open()

    def _open(self) -> None:
        shards = [Shard(open_file(path)) for path in self._paths]
        prints = [shard.fingerprint for shard in shards]
        for path, before, now in zip(self._paths, self._fingerprints or prints, prints, strict=True):
            if before != now:
                raise TokenFileError(f"{path}: has changed since this store was opened; open the store again")
        first = shards[0]
        for shard in shards[1:]:
            differences = codec_differences(shard.header, first.header)
            if differences:
                remedy = "a store holds the tokens of one codec; open them as separate stores"
                raise TokenFileError(f"{shard.path}: differs from {first.path} in {differences}; {remedy}")
        self._fingerprints = prints
        self._shards = shards
        self._header, self._layout = first.header, first.layout
        self._starts = np.concatenate([[0], np.cumsum([len(shard) for shard in shards], dtype=np.int64)])
        self._hash, self._order = first.hash, first.order
        if len(shards) > 1:
            hashes = np.concatenate([shard.hash for shard in shards])
            orders = [s.order.astype(np.int64) + start for s, start in zip(shards, self._starts, strict=False)]
            by_hash = np.argsort(hashes, kind="stable")
            self._hash, self._order = hashes[by_hash], np.concatenate(orders)[by_hash]
        self._check_duplicates()

    def _check_duplicates(self) -> None:
        """Only keys of equal hash can be equal, and those are few."""
        seen: dict[bytes, int] = {}
        before = -2
        for i in np.flatnonzero(self._hash[1:] == self._hash[:-1]).tolist():
            if i != before + 1:
                number = int(self._order[i])
                seen = {bytes(self._key_bytes(number)): number}
            before = i
            number = int(self._order[i + 1])
            key = bytes(self._key_bytes(number))
            if key in seen:
                paths = [self._shard_of(n)[0].path for n in sorted((seen[key], number))]
                name = key.decode(errors="replace")
                remedy = "keys are unique in a store; drop one of the items"
                raise TokenFileError(f"{paths[1]}: key {name!r} is in {paths[0]} already; {remedy}")
            seen[key] = number

    # --- what the store holds

    @property
    def spec(self) -> CodecSpec:
        """The codec that made the tokens."""
        return self._ready()._header.spec

    @property
    def n_quantizers(self) -> int:
        """Codebooks stored, at most the codec's."""
        return self._ready()._header.n_quantizers

    @property
    def frame_divisors(self) -> tuple[int, ...]:
        """Of each codebook stored, the frames that share one of its codes; all 1 but for multi-scale codecs."""
        return self._ready()._header.frame_divisors

    @property
    def paths(self) -> list[str]:
        """The shards, in order."""
        return list(self._paths)

    @property
    def num_bytes(self) -> int:
        """Size of all shards."""
        return sum(shard.file.size for shard in self._ready()._shards)

    @property
    def num_samples(self) -> Numbers:
        """int64 [len(store)]: samples of every item, in order of `keys()`; a new array each time."""
        return np.concatenate([shard.num_samples.astype(np.int64) for shard in self._checked_shards()])

    @property
    def num_frames(self) -> Numbers:
        """int64 [len(store)]: frames of every item, in order of `keys()`; a new array each time."""
        return (self.num_samples - 1) // self.spec.hop_length + 1

    def keys(self) -> Sequence[str]:
        """All keys, shard after shard in the order of writing. A view: it holds no list."""
        return _Keys(self._ready())

    def __len__(self) -> int:
        return int(self._ready()._starts[-1])

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._ready()._find(key) >= 0

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __repr__(self) -> str:
        where = self._paths[0] if len(self._paths) == 1 else f"{len(self._paths)} shards"
        codebooks = f"{self.n_quantizers} x {self.spec.codebook_size}"
        return f"TokenStore({where}: {len(self)} items, {self.spec.name}, {codebooks})"

    def info(self, key: str) -> ItemInfo:
        """What the store knows of one item.

        Raises:
            InputError: No such key.
            TokenFileError: The item's record head is damaged.
        """
        shard, item = self._item(key)
        gain = None
        if shard.gain is not None and not np.isnan(shard.gain[item]):
            gain = float(shard.gain[item])
        return ItemInfo(
            key=key,
            num_frames=shard.frames(item),
            num_samples=int(shard.num_samples[item]),
            sample_rate=self.spec.sample_rate,
            gain=gain,
            meta=shard.meta(item) if shard.meta_fields or not shard.meta_complete else {},
        )

    def meta_column(self, name: str) -> npt.NDArray[np.object_]:
        """One top-level meta field of every item, in order of `keys()`; None where an item lacks it.

        Equal values are one object: don't change them.

        Raises:
            InputError: No item has the field.
        """
        shards = list(self._checked_shards())
        columns = []
        found = False
        for shard in shards:
            column = shard.meta_column(name)
            if column is not None:
                codes, values = column
                found = True
            elif shard.meta_complete:
                codes, values = np.zeros(len(shard), np.uint8), []
            else:
                metas = [shard.meta(item) for item in range(len(shard))]
                codes, values = np.arange(1, len(shard) + 1), [meta.get(name) for meta in metas]
                found |= any(name in meta for meta in metas)
            table = np.empty(len(values) + 1, object)
            table[1:] = np.fromiter(values, object, len(values))  # lists stay lists
            columns.append(table[codes])
        if not found:
            fields = sorted({field for shard in shards for field in shard.meta_fields})
            raise InputError(f"no item has the meta field {name!r}; there are {fields}; ask for one of them")
        return np.concatenate(columns)

    # --- reading

    def read(
        self,
        key: str,
        start_frame: int = 0,
        num_frames: int | None = None,
        n_quantizers: int | None = None,
    ) -> Codes:
        """Frames [start_frame, start_frame + num_frames) of an item.

        Args:
            key: The item.
            start_frame: First frame.
            num_frames: How many, at least 1; None reads to the end.
            n_quantizers: Codebooks to read, from the first; None reads all that are stored.

        Returns:
            int64 [n_quantizers, num_frames]. A code that several frames share is repeated in each.

        Raises:
            InputError: No such key, a span outside the item, more quantizers than are stored.
            TokenFileError: A block that is read is damaged.
        """
        shard, item = self._item(key)
        total = shard.frames(item)
        quantizers = self._quantizers(n_quantizers)
        start_frame = index(start_frame)
        num_frames = total - start_frame if num_frames is None else index(num_frames)
        _check_span(key, start_frame, num_frames, total)
        first, stop = start_frame >> 8, (start_frame + num_frames + 255) >> 8
        origin, end = shard.span(item)
        stride, key_crc = self._layout.block_stride, crc32(key.encode())
        codes = np.empty((quantizers, (stop - first) << 8), np.int64)
        for block in range(first, stop, _BLOCKS_AT_ONCE):
            block_stop = min(block + _BLOCKS_AT_ONCE, stop)
            data = shard.file.read(origin + block * stride, min(origin + block_stop * stride, end))
            if self._verify_blocks:
                bad = bad_blocks(data, stride, key_crc, block)
                if bad:
                    raise shard.block_error(item, bad[0])
            frames = min(total - (block << 8), (block_stop - block) << 8)
            unpack_blocks(self._layout, data, frames, codes[:, (block - first) << 8 :])
        skip = start_frame - (first << 8)
        codes = np.ascontiguousarray(codes[:, skip : skip + num_frames])
        size = self._header.spec.codebook_size
        if size != 1 << self._layout.bits and int(codes.max()) >= size:
            limit = f"codebooks have {size} entries"
            raise damaged(shard.path, origin, f"item {key!r} holds code {int(codes.max())}", limit)
        return codes

    def read_batch(self, excerpts: Iterable[tuple[str, int, int]], n_quantizers: int | None = None) -> PackedBatch:
        """Several excerpts as packed bytes: one range each, read at once.

        Args:
            excerpts: (key, start_frame, num_frames) of each.
            n_quantizers: Codebooks to read, from the first; None reads all that are stored.

        Raises:
            InputError: As of `read`.
            TokenFileError: As of `read`.
        """
        excerpts = list(excerpts)
        quantizers = self._quantizers(n_quantizers)
        if not self._layout.one_rate:
            return self._packed_again([self.read(*excerpt, quantizers) for excerpt in excerpts], quantizers)
        starts = np.array([index(start) for _, start, _ in excerpts], np.int64)
        lengths = np.array([index(length) for _, _, length in excerpts], np.int64)
        keys = [key for key, _, _ in excerpts]
        numbers, crcs = self._ready()._find_all(keys)
        layout = self._layout
        origins, samples = np.empty_like(numbers), np.empty_like(numbers)
        for shard, rows, items in self._by_shard(numbers):
            origins[rows] = shard.offset.take(items)
            samples[rows] = shard.num_samples.take(items)
        totals = (samples - 1) // self._header.spec.hop_length + 1
        bad = (starts < 0) | (lengths < 1) | (starts > totals - lengths)
        if bad.any():
            i = int(bad.argmax())
            _check_span(keys[i], int(starts[i]), int(lengths[i]), int(totals[i]))
        first, last = starts >> 8, (starts + lengths - 1) >> 8
        # The last block that is touched is short only if it is the item's last.
        last_frames = np.minimum(totals - (last << 8), BLOCK_FRAMES)
        last_runs = (last_frames * layout.bits + 7) >> 3
        stride = layout.block_stride
        begins = origins + first * stride
        ends = origins + last * stride + layout.n_quantizers * last_runs + CRC_BYTES
        views = self._read_spans(numbers, list(zip(begins.tolist(), ends.tolist(), strict=True)))
        sizes = ends - begins
        if self._verify_blocks:
            found = first_bad_block(views, stride, crcs, first.tolist())
            if found is not None:
                shard, item = self._shard_of(int(numbers[found[0]]))
                raise shard.block_error(item, found[1])
        if quantizers < layout.n_quantizers:
            stored, stride = stride, quantizers * layout.full_run_bytes
            tails = (quantizers * last_runs).tolist()
            views = [_prefix(view, stored, stride, tail) for view, tail in zip(views, tails, strict=True)]
            sizes = np.array([len(view) for view in views], np.int64)
        return PackedBatch(
            data=np.frombuffer(bytearray().join([*views, bytes(SPARE_BYTES)]), np.uint8),
            offsets=np.cumsum(sizes) - sizes,
            first_frame=starts & (BLOCK_FRAMES - 1),
            lengths=lengths,
            last_run_bytes=last_runs,
            block_stride=stride,
            n_quantizers=quantizers,
            bits=layout.bits,
            codebook_size=self._header.spec.codebook_size,
        )

    def _packed_again(self, codes: list[Codes], n_quantizers: int) -> PackedBatch:
        """A batch in which codebooks of lower rates are at the full one, as `PackedBatch` has them."""
        layout = BlockLayout(n_quantizers, self._layout.bits, (1,) * n_quantizers)
        packed = [pack_blocks(layout, rows) for rows in codes]
        sizes = np.array([len(data) for data in packed], np.int64)
        lengths = np.array([rows.shape[1] for rows in codes], np.int64)
        return PackedBatch(
            data=np.frombuffer(bytearray().join([*packed, bytes(SPARE_BYTES)]), np.uint8),
            offsets=np.cumsum(sizes) - sizes,
            first_frame=np.zeros_like(lengths),
            lengths=lengths,
            last_run_bytes=layout.run_bytes(((lengths - 1) & (BLOCK_FRAMES - 1)) + 1),
            block_stride=layout.block_stride,
            n_quantizers=n_quantizers,
            bits=layout.bits,
            codebook_size=self._header.spec.codebook_size,
        )

    def _read_spans(self, numbers: Numbers, spans: list[tuple[int, int]]) -> list[memoryview]:
        """The bytes of each span, which lies in the shard of the item of that number."""
        if len(self._shards) == 1:
            return self._shards[0].file.read_many(spans)
        views = [memoryview(b"")] * len(spans)
        for shard, rows, _ in self._by_shard(numbers):
            members = rows.tolist()
            for i, view in zip(members, shard.file.read_many([spans[i] for i in members]), strict=True):
                views[i] = view
        return views

    def verify(self, progress: Callable[[int], None] | None = None) -> Iterator[Problem]:
        """Check every record, block and meta column; yield what is damaged.

        Args:
            progress: Called now and then with the bytes checked since the last call, in all `num_bytes`.
        """
        for shard in self._checked_shards():
            yield from verify_shard(shard, progress)

    # --- finding

    def _quantizers(self, n_quantizers: int | None) -> int:
        stored = self.n_quantizers
        if n_quantizers is None:
            return stored
        if not 1 <= n_quantizers <= stored:
            raise InputError(f"n_quantizers is {n_quantizers}; the store holds {stored}; ask for 1 to {stored}")
        return index(n_quantizers)

    def _shard_of(self, number: int) -> tuple[Shard, int]:
        """The shard of the store's item `number`, and the item's number there."""
        if len(self._shards) == 1:
            return self._shards[0], number
        which = int(np.searchsorted(self._starts, number, side="right")) - 1
        self._shards[which].file.check()
        return self._shards[which], number - int(self._starts[which])

    def _key_bytes(self, number: int) -> memoryview:
        shard, item = self._shard_of(number)
        return shard.key_bytes(item)

    def _key(self, number: int) -> str:
        try:
            return str(self._key_bytes(number), "utf-8")
        except UnicodeDecodeError as error:
            shard, item = self._shard_of(number)
            at = shard.head_span(item)[0]
            raise damaged(shard.path, at, f"the key of item {item} isn't UTF-8 ({error})", "keys are") from error

    def _by_shard(self, numbers: Numbers) -> Iterator[tuple[Shard, Numbers, Numbers]]:
        """For each shard that has some of these item numbers: the positions in `numbers`, and the items there."""
        if len(self._shards) == 1:
            yield self._shards[0], np.arange(len(numbers)), numbers
            return
        which = np.searchsorted(self._starts, numbers, side="right") - 1
        for n in np.unique(which).tolist():
            rows = np.flatnonzero(which == n)
            self._shards[n].file.check()
            yield self._shards[n], rows, numbers[rows] - self._starts[n]

    def _find(self, key: str) -> int:
        """A key's item number, -1 if there is none."""
        encoded = _encoded(key)
        return self._find_from(encoded, int(np.searchsorted(self._hash, np.uint32(crc32(encoded)))))

    def _find_from(self, key: bytes, position: int) -> int:
        """The number of the item with this key, among those whose hash is the one at `position`."""
        crc = crc32(key)
        while position < len(self._hash) and self._hash[position] == crc:
            number = int(self._order[position])
            if self._key_bytes(number) == key:
                return number
            position += 1
        return -1

    def _find_all(self, keys: Sequence[str]) -> tuple[Numbers, list[int]]:
        """Each key's item number and its CRC-32: `_find`, vectorised."""
        encoded = [_encoded(key) for key in keys]
        crcs = [crc32(key) for key in encoded]
        positions = np.searchsorted(self._hash, np.array(crcs, np.uint32))
        numbers = self._order.take(positions, mode="clip").astype(np.int64) if len(self) else np.full(len(keys), -1)
        for row in np.flatnonzero(~self._have_keys(numbers, encoded)).tolist():
            numbers[row] = self._find_from(encoded[row], int(positions[row]))
            if numbers[row] < 0:
                raise self._no_item(keys[row])
        return numbers, crcs

    def _have_keys(self, numbers: Numbers, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Whether the items of these numbers have these keys."""
        same = np.zeros(len(keys), bool)
        for shard, rows, items in self._by_shard(numbers) if len(self) else ():
            starts, ends = shard.key_spans(items)
            stored = shard.keys
            same[rows] = [stored[a:b] == keys[i] for i, a, b in zip(rows.tolist(), starts, ends, strict=True)]
        return same

    def _no_item(self, key: str) -> InputError:
        return InputError(f"no item {key!r} in {self!r}; keys() lists what there is")

    def _item(self, key: str) -> tuple[Shard, int]:
        number = self._ready()._find(key)
        if number < 0:
            raise self._no_item(key)
        return self._shard_of(number)

    # --- life

    def _ready(self) -> TokenStore:
        """This store, opened again if it was closed or has just been unpickled; its only shard, if so, checked."""
        if not self._shards:
            self._open()
        if len(self._shards) == 1:  # of many, those are checked that are looked into
            self._shards[0].file.check()
        return self

    def _checked_shards(self) -> Iterator[Shard]:
        for shard in self._ready()._shards:
            shard.file.check()
            yield shard

    def close(self) -> None:
        """Let go of the files. A later call opens them again."""
        for shard in self._shards:
            shard.close()
        self._shards = []

    def __enter__(self) -> TokenStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_paths", "_verify_blocks", "_fingerprints")
        return {**{name: self.__dict__[name] for name in kept}, "_shards": []}


class _Keys(Sequence[str]):
    """The keys of a store, decoded as they are asked for."""

    def __init__(self, store: TokenStore) -> None:
        self._store = store

    def __len__(self) -> int:
        return len(self._store)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self._store._key(i) for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of a store of {len(self)}")
        return self._store._key(int(index) % len(self))

    def __contains__(self, key: object) -> bool:
        return key in self._store

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), _KEYS_AT_ONCE):
            yield from self[first : first + _KEYS_AT_ONCE]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return f"<{len(self)} keys: {', '.join(map(repr, self[:3]))}{', ...' if len(self) > 3 else ''}>"


def _encoded(key: str) -> bytes:
    try:
        return key.encode()
    except (UnicodeEncodeError, AttributeError) as error:
        raise InputError(f"key {key!r} can't be looked up ({error}); give a string of valid Unicode") from error


def _prefix(view: memoryview, stored: int, stride: int, last_bytes: int) -> memoryview:
    """Of blocks `stored` bytes apart, the first `stride` bytes each (`last_bytes` of the last), joined."""
    last = (len(view) - 1) // stored * stored
    parts = [view[start : start + stride] for start in range(0, last, stored)]
    return memoryview(b"".join([*parts, view[last : last + last_bytes]]))


def _check_span(key: str, start_frame: int, num_frames: int, total: int) -> None:
    if start_frame < 0 or num_frames < 1 or start_frame + num_frames > total:
        stop = start_frame + num_frames
        raise InputError(
            f"{key!r}: frames [{start_frame}, {stop}) asked for; the item has frames [0, {total}); "
            "ask for at least one frame, within them"
        )
