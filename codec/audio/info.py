"""What an audio file is, and what reads one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from codec.audio.opening import Source

SALVAGE = "fetch it again, or read what is there with allow_truncated=True"


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What an audio file is.

    Attributes:
        sample_rate: Hz at which it decodes. Opus: the rate that its header names as the original.
        num_samples: Exact samples per channel.
        channels: Channels, C.
        container: "wav", "flac", "ogg", "mp3", "aiff", "caf", "au", "w64", "mp4", "matroska", "adts", …
        codec: "pcm_16", "float", "ulaw", "flac", "vorbis", "opus", "mp3", "aac", …
        bit_depth: Bits per sample as stored; None for lossy codecs.
        scanned: `num_samples` was counted in the file, because its header has no number that can be trusted.
    """

    sample_rate: int
    num_samples: int
    channels: int
    container: str
    codec: str
    bit_depth: int | None
    scanned: bool

    @property
    def seconds(self) -> float:
        """Duration, for people; positions are samples."""
        return self.num_samples / self.sample_rate


class ByteSource(Protocol):
    """Random access to a file's bytes."""

    size: int

    def read_at(self, offset: int, length: int) -> bytes:
        """Up to `length` bytes from `offset` on."""


class Reader(Protocol):
    """An open audio file."""

    info: AudioInfo

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """Pieces `[n, C]` of the samples from `start` on; each is overwritten by the next.

        They are float32, or int16 where that loses nothing and either `integers` is asked for or costs nothing.
        Together they are fewer than asked for only where the file ends early.
        """

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """`[C, n]` float32, where the decoder gives memory of its own in this order; None asks for blocks."""

    def splits(self) -> bool:
        """An excerpt costs about what it is long, so that several threads can share a long one."""

    def check(self) -> None:
        """Raises for damage that the decoder would pass over; called before the whole file is read."""

    def again(self) -> Callable[[Source], Reader] | None:
        """What opens this file the next time, without finding out again what was found out; None if nothing was."""
