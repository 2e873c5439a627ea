"""Writes the golden token files: `python tests/golden/make_tokens.py [FOLDER]`. A test compares them.

A difference means that the format changed: raise its version or undo the change; don't just commit new files.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from codec.spec import CodecSpec
from codec.tokens import TokenWriter


def codes_of(
    item: int, n_quantizers: int, num_frames: int, codebook_size: int, divisors: tuple[int, ...] | None = None
) -> np.ndarray:
    """Codes that any language can compute: no random generator."""
    k, t = np.mgrid[:n_quantizers, :num_frames]
    t = t // np.array(divisors or (1,))[:, None]
    return (item * 7919 + k * 104729 + t * t * 31 + t * 17) % codebook_size


# file -> frames that share a code, per codebook, where that isn't 1 everywhere
FRAME_DIVISORS = {"tokens_multiscale.ctok": (4, 2, 1, 1, 256)}

# file -> (n_quantizers of the codec, stored, codebook_size, hop, [(key, num_samples, gain, meta)])
FILES: dict[str, tuple[int, int, int, int, list[tuple[str, int, float | None, dict[str, Any] | None]]]] = {
    "tokens_8x1024.ctok": (
        8,
        8,
        1024,
        320,
        [
            ("speaker_a/one sample", 1, None, None),
            ("speaker_a/255 frames", 255 * 320, 0.5, {"speaker": "a", "text": "vor der Tür"}),
            ("speaker_b/256 frames", 256 * 320 - 319, None, {"speaker": "b", "tags": [1, 2.5, None, True]}),
            ("speaker_b/ключ", 257 * 320, 1.25, {"speaker": "b"}),
        ],
    ),
    "tokens_1x2.ctok": (1, 1, 2, 7, [("bits", 7 * 513 - 6, None, None)]),
    "tokens_2of3x1000.ctok": (
        3,
        2,
        1000,
        160,
        [("prefix", 160 * 9, None, None), ("second", 160 * 8, None, None)],
    ),
    "tokens_64x65536.ctok": (64, 64, 65536, 1, [("wide", 5, None, None)]),
    "tokens_empty.ctok": (4, 4, 512, 320, []),
    "tokens_multiscale.ctok": (
        5,
        5,
        4096,
        512,
        [("one", 1, None, None), ("ragged", 512 * 301, 0.5, {"speaker": "a"}), ("whole", 512 * 256, None, None)],
    ),
}


def make(folder: Path) -> None:
    for name, (n_quantizers, stored, codebook_size, hop, items) in FILES.items():
        spec = CodecSpec(
            name="golden",
            weights_hash="0123456789abcdef",
            sample_rate=16000,
            hop_length=hop,
            channels=1,
            n_quantizers=n_quantizers,
            codebook_size=codebook_size,
            encode_context=(2, 1),
            decode_context=None,
        )
        divisors = FRAME_DIVISORS.get(name)
        with TokenWriter(folder / name, spec, n_quantizers=stored, frame_divisors=divisors, force=True) as writer:
            for i, (key, num_samples, gain, meta) in enumerate(items):
                codes = codes_of(i, stored, spec.num_frames(num_samples), codebook_size, divisors)
                writer.add(key, codes, num_samples=num_samples, gain=gain, meta=meta)


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
