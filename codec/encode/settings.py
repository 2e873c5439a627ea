"""How a corpus is encoded: what every process of a run must agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from codec.errors import InputError
from codec.spec import CodecSpec

LONG_SECONDS = 60
"""Items longer than this are read and encoded in pieces of this length."""


@dataclass(frozen=True)
class EncodeSettings:
    """How items become codes.

    Attributes:
        n_quantizers: Codebooks to store; all if None.
        batch_seconds: Most audio per batch, padding included.
        num_threads: Threads that decode files.
        channels: "mix", or "split": one item per channel.
        loudness_lufs: Bring items to this loudness before encoding; the gain is stored. None leaves them alone.
        check: Share of the items that are decoded again and compared, 0 … 1.
        compare: What tells that a file has changed: "size+mtime", or "content" (which reads it).
        shard_bytes: Size from which on a shard is closed and another begun; 0 for one shard.
        strict: Stop at the first item that fails.
        long_seconds: Items longer than this are encoded in pieces of this length.
    """

    n_quantizers: int | None = None
    batch_seconds: float = 64.0
    num_threads: int = 2
    channels: Literal["mix", "split"] = "mix"
    loudness_lufs: float | None = None
    check: float = 0.0
    compare: Literal["size+mtime", "content"] = "size+mtime"
    shard_bytes: int = 0
    strict: bool = False
    long_seconds: float = LONG_SECONDS

    def checked(self, spec: CodecSpec) -> EncodeSettings:
        """These settings, if they can be; raises `InputError` otherwise."""
        for name, choices in (("channels", ("mix", "split")), ("compare", ("size+mtime", "content"))):
            if getattr(self, name) not in choices:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(choices)}")
        limits: dict[str, tuple[float, float]] = {
            "batch_seconds": (1e-3, 1e6),
            "num_threads": (1, 1024),
            "check": (0, 1),
            "long_seconds": (0.5, 86400),
            "shard_bytes": (0, 2**62),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)!r}; it must be from {low:g} to {high:g}")
        if self.n_quantizers is not None and not 1 <= self.n_quantizers <= spec.n_quantizers:
            raise InputError(f"n_quantizers is {self.n_quantizers}; {spec.name} has 1 to {spec.n_quantizers}")
        if self.loudness_lufs is not None and not -70 <= self.loudness_lufs <= 0:
            raise InputError(f"loudness_lufs is {self.loudness_lufs}; it must be from -70 to 0, such as -23")
        if self.channels == "split" and spec.channels != 1:
            raise InputError(
                f"channels is 'split' and {spec.name} has {spec.channels} channels; use a mono codec, or mix"
            )
        return self

    def lasting(self) -> dict[str, Any]:
        """What must be the same whenever a store grows, as JSON types."""
        return {name: getattr(self, name) for name in ("channels", "loudness_lufs")}
