"""Long files → waves in pieces: decoded once from front to back, in memory that doesn't depend on their length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from codec.audio.opening import AudioSource, Source
from codec.audio.reading import _check_finite, _open, _put, _report_short, check_arguments
from codec.audio.resampling import native_span, resample
from codec.errors import AudioFileError, InputError
from codec.frames import resampled_length


def stream_audio(
    path: AudioSource,
    *,
    start_sample: int = 0,
    num_samples: int | None = None,
    piece_samples: int = 1 << 20,
) -> Iterator[Tensor]:
    """Reads an audio file, or an excerpt of one, piece by piece, at its own rate.

    Joined, the pieces are `read_audio(path, start_sample=…, num_samples=…)`, bit by bit. The file is decoded once:
    formats that can only be decoded from their beginning take no longer than others. (What only FFmpeg reads is
    decoded whole, and takes that memory.)

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object.
        start_sample: First sample.
        num_samples: Samples to read; all from `start_sample` on if None.
        piece_samples: Samples per piece; the last one may be shorter.

    Yields:
        float32 `[C, n]`.

    Raises:
        AudioFileError: The file is missing, empty, cut, damaged, no audio, or holds NaN or infinite samples.
        InputError: A bad argument, or a range beyond the file's end.
    """
    check_arguments(start_sample, num_samples, None, torch.float32)
    check_arguments(0, piece_samples, None, torch.float32)
    with Source(path) as source:
        reader = _open(source, False)
        length = reader.info.num_samples
        if length == 0:
            raise AudioFileError(f"{source.name}: holds no samples; remove it")
        stop = length if num_samples is None else start_sample + num_samples
        if start_sample >= length or stop > length:
            raise InputError(
                f"{source.name}: samples {start_sample} … {stop} were asked for, it has {length}; ask for less"
            )
        if stop - start_sample == length:
            reader.check()
        is_float = reader.info.codec in ("float", "double")
        position = start_sample
        piece, filled = _piece(reader.info.channels, stop - position, piece_samples), 0
        for block in reader.blocks(start_sample, stop - start_sample):
            taken = 0
            while taken < len(block):
                part = block[taken : taken + piece.shape[1] - filled]
                _put(part, piece.numpy()[:, filled : filled + len(part)])
                taken += len(part)
                filled += len(part)
                if filled == piece.shape[1]:
                    if is_float:
                        _check_finite(source, piece, position)
                    yield piece
                    position += filled
                    piece, filled = _piece(reader.info.channels, stop - position, piece_samples), 0
        if position + filled < stop:
            _report_short(source, position + filled, stop, False)


def _piece(channels: int, left: int, piece_samples: int) -> Tensor:
    return torch.empty(channels, min(left, piece_samples))


class StreamResampler:
    """Resamples a wave that arrives in pieces; what comes out equals resampling the whole, to float rounding.

    Args:
        from_rate: Hz of what is pushed.
        to_rate: Hz of what comes out.
    """

    def __init__(self, from_rate: int, to_rate: int) -> None:
        self._from, self._to = from_rate, to_rate
        divisor = math.gcd(from_rate, to_rate)
        self._step_in, self._step_out = from_rate // divisor, to_rate // divisor
        self._context = native_span(0, 1, from_rate, to_rate)[1] // self._step_in - 1  # periods beyond the span's own
        self._kept: Tensor | None = None
        self._first = 0  # sample at which `_kept` begins
        self._done = 0  # samples that have come out

    def push(self, wave: Tensor, *, last: bool = False) -> Tensor:
        """Takes `[..., n]`, gives `[..., m]`, m ≥ 0; with `last`, all that is left."""
        if self._from == self._to:
            return wave
        kept = wave if self._kept is None else torch.cat([self._kept, wave], -1)
        total = self._first + kept.shape[-1]
        stop = resampled_length(total, self._from, self._to)
        if not last:  # as far as the filter reaches no sample that hasn't come yet
            stop = max(self._done, min(stop, (total // self._step_in - self._context) * self._step_out))
        first, end, skip = native_span(self._done, max(stop, self._done + 1), self._from, self._to)
        self._kept, begin = kept, self._first
        if stop == self._done:
            return wave[..., :0]
        out = resample(kept[..., first - begin : max(first, end) - begin], self._from, self._to)
        out = out[..., skip : skip + stop - self._done]
        self._done = stop
        keep_from = max(begin, native_span(stop, stop + 1, self._from, self._to)[0])
        self._kept, self._first = kept[..., keep_from - begin :].clone(), keep_from
        return out
