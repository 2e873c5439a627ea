"""Ogg/vorbis through FFmpeg, made exact.

FFmpeg's own seeking misplaces vorbis by 128 samples in some places. So nothing is sought: FFmpeg gets the stream's
headers and the pages from a little before the excerpt, as a file of their own. A packet's samples depend on the packet
before it and on no other, and a page says at which sample its last whole packet ends: what is decoded is counted from
its end.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import ffmpeg, ogg
from codec.audio.facts import Facts
from codec.audio.info import SALVAGE, AudioInfo, Reader
from codec.audio.opening import Source
from codec.audio.sndfile import SoundFileReader, check_pages
from codec.errors import AudioFileError

# Headers longer than this (pictures) would be decoded again with each excerpt.
_MAX_HEADERS = 1 << 16
# FFmpeg gives three channels and more in another order.
_MAX_CHANNELS = 2
# Values a second below which opening FFmpeg costs more than its decoder saves.
_MIN_VALUES_PER_SECOND = 64000
# Samples decoded at once of what is longer than it.
_SAMPLES_AT_ONCE = 1 << 21
# Pages of the trial at a file's beginning.
_TRIAL_PAGES = 4


@dataclass(frozen=True, slots=True)
class Stream:
    """A vorbis stream that fills its file, from sample 0 on.

    Attributes:
        num_header_bytes: Bytes before the first page of audio.
        serial: The stream's number.
        block: Samples of its longest block. What comes out of a span's first page begins no later than this behind the
            page before.
        info: What the reader says of it.
    """

    num_header_bytes: int
    serial: int
    block: int
    info: AudioInfo


_trials: Facts[bool] = Facts(100_000)


def vorbis_reader(source: Source) -> VorbisReader | None:
    """The reader; None for what isn't plain vorbis from sample 0 on, for speech, and without FFmpeg."""
    head = source.read_at(0, 44)
    if len(head) < 44 or head[28:35] != b"\x01vorbis":
        return None
    if (
        head[39] * int.from_bytes(head[40:44], "little") < _MIN_VALUES_PER_SECOND
        or ffmpeg.torchcodec_decoder()[0] is None
    ):
        return None
    stream = _examined(source)
    return None if stream is None else VorbisReader(source, stream)


def _examined(source: Source) -> Stream | None:
    """The stream, where libsndfile agrees that its last page's position is its length."""
    reader = SoundFileReader(source, "ogg", False)
    last = ogg.last_pages(source)[-1:]
    if (
        reader.info.channels > _MAX_CHANNELS
        or not last
        or last[0].granule != reader.info.num_samples
        or not reader.info.num_samples
    ):
        return None
    block = 1 << (source.read_at(56, 1)[0] >> 4)
    packets = 0
    for page in ogg.pages_from(source, 0):
        if page.serial != last[0].serial:
            return None
        packets += page.num_packets
        if packets >= 3:
            end = page.offset + page.num_bytes
            # Audio begins with a page of its own.
            whole = packets == 3 and end < source.size and end <= _MAX_HEADERS
            return Stream(end, page.serial, block, reader.info) if whole else None
    return None


class VorbisReader:
    """Decodes pages of a vorbis stream."""

    def __init__(self, source: Source, stream: Stream) -> None:
        self._source, self._stream = source, stream
        self.info = stream.info
        self._splits: bool | None = None

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`."""
        if num_samples > _SAMPLES_AT_ONCE and self.splits():
            return None
        return self._wave(start, num_samples)

    def _wave(self, start: int, num_samples: int) -> Tensor | None:
        if (start or num_samples < self.info.num_samples) and self.splits():
            part = self._part(start, start + num_samples)
            if part is not None:
                return part
        wave = _decoded(self._source.path or self._source.read_at(0, self._source.size))
        if wave is None or wave.shape[1] != self.info.num_samples:
            return None
        return wave[:, start : start + num_samples]

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        stop = min(start + num_samples, self.info.num_samples)
        while start < stop:
            end = min(stop, start + _SAMPLES_AT_ONCE) if self.splits() else stop
            wave = self._wave(start, end - start)
            if wave is None:
                break
            yield wave.numpy().T
            start = end
        if start < stop:
            # FFmpeg and libsndfile step over damage.
            self.check()
            numbers = [page.number for page in ogg.all_pages(self._source)]
            if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
                raise AudioFileError(f"{self._source.name}: is damaged: pages are missing between its pages; {SALVAGE}")
            yield from SoundFileReader(self._source, "ogg", False).blocks(start, stop - start)

    def splits(self) -> bool:
        """As `Reader.splits`."""
        if self._splits is None:
            self._splits = _trials.get(self._source, self._trial)
        return self._splits

    def check(self) -> None:
        """As `Reader.check`."""
        check_pages(self._source)

    def again(self) -> Callable[[Source], Reader]:
        """As `Reader.again`."""
        return functools.partial(VorbisReader, stream=self._stream)

    def _trial(self) -> bool:
        """Whether the first pages end where they say, and give the same without the very first one."""
        pages = []
        for page in ogg.pages_from(self._source, self._stream.num_header_bytes):
            pages.append(page)
            if len(pages) >= _TRIAL_PAGES and page.granule >= 0:
                break
        if not pages or min(pages[0].granule, pages[-1].granule) < 0:
            return False
        whole, part = self._pages(pages), self._pages(pages[1:])
        if whole is None or part is None or whole.shape[1] != pages[-1].granule:
            return False
        behind = pages[-1].granule - pages[0].granule - self._stream.block
        return 0 < behind <= part.shape[1] and torch.equal(whole[:, -part.shape[1] :], part)

    def _part(self, start: int, stop: int) -> Tensor | None:
        """`[C, stop - start]`; None if its pages aren't what they say."""
        begin = self._stream.num_header_bytes
        offset = ogg.find_page(
            self._source, self._stream.serial, start - self._stream.block, begin, self.info.num_samples
        )
        pages: list[ogg.OggPage] = []
        for page in ogg.pages_from(self._source, offset):
            if 0 <= page.granule <= start - self._stream.block:
                pages.clear()
            pages.append(page)
            if page.granule >= stop:
                break
        wave = self._pages(pages)
        if wave is None or pages[-1].granule < stop:
            return None
        first = pages[-1].granule - wave.shape[1]
        return wave[:, start - first : stop - first] if 0 <= first <= start else None

    def _pages(self, pages: list[ogg.OggPage]) -> Tensor | None:
        """What these pages, which follow one another, decode to; None if one is damaged or missing."""
        if not pages:
            return None
        begin, end = pages[0].offset, pages[-1].offset + pages[-1].num_bytes
        data = self._source.read_at(begin, end - begin)
        for index, page in enumerate(pages):
            bytes_of_page = data[page.offset - begin : page.offset - begin + page.num_bytes]
            if page.serial != self._stream.serial or page.number != pages[0].number + index:
                return None
            if len(bytes_of_page) < page.num_bytes or ogg.is_damaged(bytes_of_page):
                return None
        return _decoded(self._source.read_at(0, self._stream.num_header_bytes) + data)


def _decoded(audio: str | bytes) -> Tensor | None:
    decoder, _ = ffmpeg.torchcodec_decoder()
    try:
        wave: Tensor = decoder(ffmpeg.address(audio)).get_all_samples().data
    except ffmpeg.ERRORS:
        return None
    return wave
