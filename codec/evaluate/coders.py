"""What is compared, behind one interface: a clip goes in, one copy per condition comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio.resampling import resample
from codec.errors import InputError
from codec.evaluate.files import COUNTED, check_available, code_by_ffmpeg
from codec.loading import load_codec
from codec.model import Codec, Codes
from codec.tokens import TokenStore
from codec.tokens.layout import BlockLayout

Result = TypeVar("Result")
ORIGINAL = "original"


@dataclass(frozen=True)
class Condition:
    """One column of a comparison: a codec at a rate.

    Attributes:
        label: Its name, unique: "speech_16k@4", "opus 12 kbps".
        codec: The codec's name, the same for all its rates.
        n_quantizers: Codebooks; None of conventional codecs.
        counted: What `stored_bytes` counts.
    """

    label: str
    codec: str
    n_quantizers: int | None
    counted: str

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


@dataclass(frozen=True)
class Coded:
    """A copy of a clip.

    Attributes:
        condition: Whose.
        wave: `[C, M]` at the rate that was asked for, float32, not aligned yet.
        stored_bytes: Bytes of the coded audio; see `Condition.counted`. None of the original.
        file_bytes: Bytes of a file with just this clip; None of tokens, whose store holds many.
        encode_seconds: None where it isn't known.
        decode_seconds: None where it isn't known.
        codes: `[K, T]` of a codec's copy with all of its codebooks.
    """

    condition: Condition
    wave: Tensor
    stored_bytes: int | None = None
    file_bytes: int | None = None
    encode_seconds: float | None = None
    decode_seconds: float | None = None
    codes: NDArray[np.int64] | None = None


class Coder(Protocol):
    """What makes copies. It travels to worker processes."""

    @property
    def conditions(self) -> list[Condition]:
        """The copies of each clip, the best one last."""

    def code(self, wave: Tensor, sample_rate: int, key: str) -> Iterator[Coded]:
        """Copies of a clip `[C, N]`, one per condition."""


@dataclass(frozen=True)
class Original:
    """The original as its own copy: what measures without a reference say of it."""

    @property
    def conditions(self) -> list[Condition]:
        """See `Coder`."""
        return [Condition(ORIGINAL, ORIGINAL, None, "nothing")]

    def code(self, wave: Tensor, sample_rate: int, key: str) -> Iterator[Coded]:
        """See `Coder`."""
        yield Coded(self.conditions[0], wave)


@dataclass(frozen=True)
class FileCoder:
    """A conventional codec at one rate.

    Attributes:
        kind: "opus", "mp3" or "codec2".
        bps: Bits per second that are asked for.
    """

    kind: str
    bps: int

    def __post_init__(self) -> None:
        check_available(self.kind)

    @property
    def conditions(self) -> list[Condition]:
        """See `Coder`."""
        rate = f"{self.bps} bps" if self.kind == "codec2" else f"{self.bps / 1000:g} kbps"
        return [Condition(f"{self.kind} {rate}", self.kind, None, COUNTED[self.kind])]

    def code(self, wave: Tensor, sample_rate: int, key: str) -> Iterator[Coded]:
        """See `Coder`."""
        copy, payload, size = code_by_ffmpeg(wave, sample_rate, self.kind, self.bps)
        yield Coded(self.conditions[0], copy, payload, size)


@dataclass
class CodecCoder:
    """A codec with several numbers of codebooks.

    Attributes:
        codec: The codec, or what `load_codec` takes: each process then loads its own.
        n_quantizers: Numbers of codebooks; by default powers of two and all of them.
        device: Where to load it.
        label: In front of "@" in the conditions' labels; the codec's name if empty.
    """

    codec: Codec | str
    n_quantizers: Sequence[int] = ()
    device: str = "cpu"
    label: str = ""

    def __post_init__(self) -> None:
        spec = self.loaded.spec
        self.spec = spec
        self.label = self.label or spec.name
        self.n_quantizers = checked_quantizers(self.n_quantizers, spec.n_quantizers, spec.name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "loaded"}

    @cached_property
    def loaded(self) -> Codec:
        """The codec."""
        if isinstance(self.codec, str):
            return load_codec(self.codec, device=self.device)
        return self.codec

    @property
    def conditions(self) -> list[Condition]:
        """See `Coder`."""
        return [
            Condition(f"{self.label}@{k}", self.label, k, "blocks of the token store, with their checksums")
            for k in self.n_quantizers
        ]

    def code(self, wave: Tensor, sample_rate: int, key: str) -> Iterator[Coded]:
        """See `Coder`. Fewer codebooks are the first ones of an encoding with the most that are asked for."""
        codec = self.loaded
        given = resample(wave, sample_rate, self.spec.sample_rate)
        if given.shape[0] != self.spec.channels:
            given = given.mean(0, keepdim=True).expand(self.spec.channels, -1)
        given = given[None].contiguous().to(codec.device)
        codes, encode_seconds = timed(codec, lambda: codec.encode(given, n_quantizers=self.n_quantizers[-1]))
        yield from self.decoded(codes, wave.shape[0], sample_rate, encode_seconds)

    def decoded(
        self, codes: Codes, channels: int, sample_rate: int, encode_seconds: float | None, gain: float = 1.0
    ) -> Iterator[Coded]:
        """Copies from the codes of one clip, divided by the gain that they were encoded with."""
        codec = self.loaded
        for condition, k in zip(self.conditions, self.n_quantizers, strict=True):
            prefix = Codes(codes.codes[:, :k], codes.lengths, codes.num_samples)
            copy, seconds = timed(codec, lambda prefix=prefix: codec.decode(prefix)[0])  # type: ignore[misc]
            if channels != copy.shape[0]:
                copy = copy.mean(0, keepdim=True)
            layout = BlockLayout(k, self.spec.bits_per_code, (1,) * k)
            yield Coded(
                condition,
                resample(copy.float().cpu() / gain, self.spec.sample_rate, sample_rate),
                stored_bytes=int(layout.item_bytes(codes.codes.shape[2])),
                encode_seconds=encode_seconds,
                decode_seconds=seconds,
                codes=codes.codes[0].cpu().numpy() if k == self.n_quantizers[-1] else None,
            )


@dataclass
class StoreCoder:
    """What a token store holds of a clip: encoded some time ago, decoded now.

    Attributes:
        store: Path of the store.
        codec: What decodes it, with the numbers of codebooks.
    """

    store: str
    codec: CodecCoder
    _opened: TokenStore | None = field(default=None, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return {"store": self.store, "codec": self.codec, "_opened": None}

    @property
    def conditions(self) -> list[Condition]:
        """See `Coder`."""
        return self.codec.conditions

    def code(self, wave: Tensor, sample_rate: int, key: str) -> Iterator[Coded]:
        """See `Coder`.

        Raises:
            InputError: The stored item isn't of this wave's length.
        """
        if self._opened is None:
            self._opened = TokenStore(self.store)
        info = self._opened.info(key)
        expected = wave.shape[1] / sample_rate
        if abs(float(info.seconds) - expected) > 0.1 + 0.001 * expected:
            raise InputError(
                f"{key}: the store holds {float(info.seconds):.2f} s, the original has {expected:.2f} s: they aren't "
                "of the same file; give the originals that the store was made of"
            )
        if info.gain == 0:
            raise InputError(f"{key}: was encoded with a gain of 0; its level is lost, encode it again")
        k = self.codec.n_quantizers[-1]
        tensor = torch.from_numpy(self._opened.read(key, n_quantizers=k))[None].to(self.codec.loaded.device)
        lengths, samples = torch.tensor([tensor.shape[2]]), torch.tensor([info.num_samples])
        codes = Codes(tensor, lengths.to(tensor.device), samples.to(tensor.device))
        yield from self.codec.decoded(codes, wave.shape[0], sample_rate, None, info.gain or 1.0)


def checked_quantizers(wanted: Sequence[int], limit: int, name: str) -> tuple[int, ...]:
    """Numbers of codebooks in order; by default powers of two and all."""
    if not wanted:
        return tuple(sorted({*(1 << n for n in range(limit.bit_length()) if 1 << n <= limit), limit}))
    for k in wanted:
        if not 1 <= k <= limit:
            raise InputError(f"{k} codebooks are asked for; {name} has {limit}: give 1 to {limit}")
    return tuple(sorted(set(wanted)))


def timed(codec: Codec, run: Callable[[], Result]) -> tuple[Result, float]:
    """A result and how long it took: CPU time of this thread, on a GPU wall time."""
    if codec.device.type != "cuda":
        started = time.thread_time()
        with torch.inference_mode():
            result = run()
        return result, time.thread_time() - started
    torch.cuda.synchronize(codec.device)
    started = time.perf_counter()
    with torch.inference_mode():
        result = run()
    torch.cuda.synchronize(codec.device)
    return result, time.perf_counter() - started


def parse_codec(text: str) -> tuple[str, tuple[int, ...]]:
    """`NAME` or `NAME@4,8` → the name, the numbers of codebooks (none: the default ones)."""
    name, at, counts = text.rpartition("@")
    if not at:
        return text, ()
    if not all(count.isdigit() for count in counts.split(",")):
        raise InputError(f"{text}: after @ come numbers of codebooks, such as {name}@4,8")
    return name, tuple(int(count) for count in counts.split(","))
