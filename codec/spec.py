"""The identity and the geometry of a codec: what a token file carries and a reader checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

from codec import frames
from codec.errors import InputError, TokenFileError


@dataclass(frozen=True)
class CodecSpec:
    """What one must know of a codec to store, locate and decode its tokens.

    Attributes:
        name: The checkpoint's name, such as `speech_16k`.
        weights_hash: Content hash of configuration and weights (hex); the codec's identity in token files.
        sample_rate: Hz.
        hop_length: Samples per frame.
        channels: Channels of the wave.
        n_quantizers: Codebooks per frame, K.
        codebook_size: Entries per codebook, V.
        encode_context: (left, right) frames of wave around a frame on which its codes depend; None if unbounded.
        decode_context: (left, right) frames of codes around a frame on which its wave depends; None if unbounded.
        codes_of: The codec whose encoder and codebooks this one has, with a decoder of its own; None for most codecs.
    """

    name: str
    weights_hash: str
    sample_rate: int
    hop_length: int
    channels: int
    n_quantizers: int
    codebook_size: int
    encode_context: tuple[int, int] | None
    decode_context: tuple[int, int] | None
    codes_of: CodecSpec | None = None

    def __post_init__(self) -> None:
        limits = {
            "sample_rate": (1, 2**31 - 1),
            "hop_length": (1, 2**31 - 1),
            "channels": (1, 255),
            "n_quantizers": (1, 128),
            "codebook_size": (2, 65536),
        }
        for field, (low, high) in limits.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise InputError(f"CodecSpec.{field} is {value!r}; it must be an integer from {low} to {high}")
        for field in ("encode_context", "decode_context"):
            value = getattr(self, field)
            if value is None:
                continue
            if len(value) != 2 or not all(isinstance(n, int) and 0 <= n < 2**31 for n in value):
                raise InputError(f"CodecSpec.{field} is {value!r}; it must be (left, right) frames ≥ 0, or None")
            object.__setattr__(self, field, (value[0], value[1]))

    @property
    def frame_rate(self) -> Fraction:
        """Frames per second, exact."""
        return Fraction(self.sample_rate, self.hop_length)

    @property
    def latency_ms(self) -> float | None:
        """How long after a sample goes in it comes out of a live stream at the latest, computing time aside.

        Its frame must be complete, and the frames after it on which its codes and then its wave depend. None if
        either context is unbounded.
        """
        if self.encode_context is None or self.decode_context is None:
            return None
        num_frames = 1 + self.encode_context[1] + self.decode_context[1]
        return float(num_frames * 1000 / self.frame_rate)

    @property
    def bits_per_code(self) -> int:
        """Bits that one code takes: `ceil(log2(codebook_size))`."""
        return (self.codebook_size - 1).bit_length()

    @property
    def bitrate_bps(self) -> Fraction:
        """Bits per second of all codebooks: `K * log2(V) * frame_rate` with whole bits per code."""
        return self.n_quantizers * self.bits_per_code * self.frame_rate

    def num_frames(self, num_samples: int) -> int:
        """Frames that cover `num_samples` samples."""
        return frames.num_frames(num_samples, self.hop_length)

    @property
    def token_spec(self) -> CodecSpec:
        """What token files carry: this, or the codec whose codes these are.

        So the files of all codecs that share an encoder and codebooks are the same, and any of them reads them.
        """
        return self.codes_of or self

    def check_tokens(self, tokens: CodecSpec) -> None:
        """Raises `TokenFileError` if `tokens` are not of this codec: decoding them would give noise."""
        if tokens.weights_hash not in (self.weights_hash, self.token_spec.weights_hash):
            origin = f", with the codes of {self.codes_of.weights_hash[:12]}…" if self.codes_of else ""
            raise TokenFileError(
                f"the tokens are of {tokens.name} ({tokens.weights_hash[:12]}…), this codec is {self.name} "
                f"({self.weights_hash[:12]}…{origin}); load the codec that wrote them"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types, as a token file holds them: without `codes_of`."""
        values = {k: v for k, v in asdict(self).items() if k != "codes_of"}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> CodecSpec:
        """The inverse of `to_dict`; unknown or missing fields raise `InputError`."""
        known = set(cls.__dataclass_fields__) - {"codes_of"}
        if set(fields) != known:
            raise InputError(f"codec spec has fields {sorted(fields)}; it must have exactly {sorted(known)}")
        tuples: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**tuples)
