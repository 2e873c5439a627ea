"""A whole file piece by piece, decoded once."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from codec.audio.opening import AudioSource, Source
from codec.audio.reading import _check_finite, _open, _put, _report_short
from codec.audio.resampling import native_span, resample
from codec.errors import InputError
from codec.frames import resampled_length


def wave_blocks(
    path: AudioSource, size: int, *, sample_rate: int | None = None, mono: bool = False
) -> Iterator[Tensor]:
    """A file from beginning to end in waves `[C, size]`, float32, the last one shorter.

    Each is that span of `read_audio`, but the file is opened and decoded once: formats that can only be decoded from
    their beginning would cost the square of their length otherwise. Memory is that of a few blocks.

    Args:
        path: As in `read_audio`.
        size: Samples per block, at least 1.
        sample_rate: Hz of the result; the file's own if None.
        mono: Average the channels.

    Raises:
        AudioFileError: The file is missing, empty, cut, damaged, no audio, or holds NaN or infinite samples.
        InputError: A size below 1.
    """
    if size < 1:
        raise InputError(f"size is {size}; it must be at least 1 sample")
    with Source(path) as source:
        reader = _open(source, False)
        rate, total = reader.info.sample_rate, reader.info.num_samples
        to_rate = sample_rate or rate
        decoded = reader.blocks(0, total)
        kept, base = torch.empty(reader.info.channels, 0), 0
        for start in range(0, length := resampled_length(total, rate, to_rate), size):
            stop = min(start + size, length)
            first, last, skip = (start, stop, 0) if to_rate == rate else native_span(start, stop, rate, to_rate)
            last = min(last, total)
            parts, have = [kept[:, first - base :]], base + kept.shape[1]
            while have < last:
                block = next(decoded, None)
                if block is None:
                    _report_short(source, have, last, False)
                    return
                part = torch.empty(block.shape[1], len(block))
                _put(block, part.numpy())
                if reader.info.codec in ("float", "double"):
                    _check_finite(source, part, have)
                parts.append(part)
                have += len(block)
            kept, base = torch.cat(parts, 1), first
            wave = kept[:, : last - first]
            if mono and wave.shape[0] > 1:
                wave = wave.mean(dim=0, keepdim=True)
            yield resample(wave, rate, to_rate)[:, skip : skip + stop - start]
