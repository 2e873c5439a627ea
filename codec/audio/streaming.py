"""Long files → waves in pieces: decoded once from front to back, in memory that doesn't depend on their length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from codec.audio.info import Reader
from codec.audio.opening import AudioSource, Source
from codec.audio.readers import open_reader
from codec.audio.reading import Span, check_arguments, check_finite, put, report_short, span_of
from codec.audio.resampling import native_span, resample
from codec.errors import InputError
from codec.frames import resampled_length

# Samples of the file that are resampled at once: always these, so that the result is the same, to the bit, in pieces of
# any size.
_RESAMPLED_AT_ONCE = 1 << 18


def stream_audio(
    path: AudioSource,
    *,
    start_sample: int = 0,
    num_samples: int | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
    piece_samples: int = 1 << 20,
) -> Iterator[Tensor]:
    """Reads an audio file, or an excerpt of one, piece by piece.

    Joined, the pieces are `read_audio` with the same options: bit by bit, and after resampling to float rounding. The
    file is opened and decoded once: formats that can only be decoded from their beginning take no longer than others.
    Memory is that of a few pieces. (What only FFmpeg reads is decoded whole, and takes that memory.)

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object.
        start_sample: First sample, at `sample_rate` if it is given.
        num_samples: Samples to read; all from `start_sample` on if None.
        sample_rate: Hz of the result; the file's own if None.
        mono: Average the channels.
        piece_samples: Samples per piece; the last one may be shorter.

    Yields:
        float32 `[C, n]`. Those before the place where a file is cut or damaged come before the error, unless the whole
        file was asked for and its headers or checksums tell.

    Raises:
        AudioFileError: The file is missing, empty, cut, damaged, no audio, or holds NaN or infinite samples.
        InputError: A bad argument, or a range beyond the file's end.
    """
    check_arguments(start_sample, num_samples, sample_rate, torch.float32)
    if isinstance(piece_samples, bool) or not isinstance(piece_samples, int) or piece_samples < 1:
        raise InputError(f"piece_samples is {piece_samples!r}; it must be an integer of at least 1")
    with Source(path) as source:
        reader = open_reader(source, False)
        span = span_of(source.name, reader.info, start_sample, num_samples, sample_rate)
        if span.whole:
            reader.check()
        if span.sample_rate == reader.info.sample_rate:
            yield from _decoded(source.name, reader, span, mono, piece_samples)
        else:
            yield from _cut(_resampled(source.name, reader, span, mono), piece_samples)


def _decoded(name: str, reader: Reader, span: Span, mono: bool, size: int) -> Iterator[Tensor]:
    """The file's samples `[first, last)` in waves `[C, size]`, the last one shorter."""
    is_float = reader.info.codec in ("float", "double")
    position, channels = span.first, reader.info.channels
    piece, filled = torch.empty(channels, min(span.last - position, size)), 0
    for block in reader.blocks(span.first, span.last - span.first):
        taken = 0
        while taken < len(block):
            part = block[taken : taken + piece.shape[1] - filled]
            put(part, piece.numpy()[:, filled : filled + len(part)])
            taken += len(part)
            filled += len(part)
            if filled == piece.shape[1]:
                if is_float:
                    check_finite(name, piece, position)
                yield piece.mean(dim=0, keepdim=True) if mono and channels > 1 else piece
                position += filled
                piece, filled = torch.empty(channels, min(span.last - position, size)), 0
    if position + filled < span.last:
        report_short(name, position + filled, span.last, False)


def _resampled(name: str, reader: Reader, span: Span, mono: bool) -> Iterator[Tensor]:
    """The result in waves of any lengths."""
    resampler = StreamResampler(reader.info.sample_rate, span.sample_rate)
    skip, left, position = span.skip, span.stop - span.start, span.first
    for piece in _decoded(name, reader, span, mono, _RESAMPLED_AT_ONCE):
        position += piece.shape[1]
        wave = resampler.push(piece, last=position == span.last)
        wave, skip = wave[:, skip:], max(0, skip - wave.shape[1])
        wave = wave[:, :left]
        left -= wave.shape[1]
        yield wave


def _cut(waves: Iterator[Tensor], size: int) -> Iterator[Tensor]:
    """The same samples in waves `[C, size]`, the last one shorter."""
    parts: list[Tensor] = []
    have = 0
    for wave in waves:
        parts.append(wave)
        have += wave.shape[1]
        if have >= size:
            joined = torch.cat(parts, 1)
            whole = have // size * size
            yield from torch.split(joined[:, :whole], size, dim=1)
            parts, have = [joined[:, whole:]], have - whole
    if have:
        yield torch.cat(parts, 1)


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
