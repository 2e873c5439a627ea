"""Which decoder reads a file.

Our own reader takes uncompressed wav, dr_flac flac, FFmpeg (through torchcodec) vorbis of high rates and what only it
reads, libsndfile all else, and everything but the last where the others aren't there. An excerpt is bit-equal to that
slice of the whole decode; BACKENDS.md has the proof, and which backends break it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from codec.audio import ffmpeg, ogg, pcm
from codec.audio.containers import FFMPEG_CONTAINERS, identify, missing_end
from codec.audio.drflac import drflac_reader
from codec.audio.facts import Facts
from codec.audio.info import SALVAGE, Reader
from codec.audio.opening import Source
from codec.audio.sndfile import SoundFileReader
from codec.audio.vorbis import vorbis_reader
from codec.errors import AudioFileError

# How to open files that were found whole.
_known: Facts[Callable[[Source], Reader]] = Facts(100_000)


def open_reader(source: Source, allow_truncated: bool) -> Reader:
    """The reader of the source's format. Raises if the file's own headers say that its end is missing."""
    if allow_truncated:
        return _examined(source, allow_truncated)
    if (again := _known.known(source)) is not None:
        return again(source)
    reader = _examined(source, allow_truncated)
    if (again := reader.again()) is not None:
        _known.keep(source, again)
    return reader


def _examined(source: Source, allow_truncated: bool) -> Reader:
    container = identify(source)
    missing = None if container is None or allow_truncated else missing_end(source, container)
    if missing:
        raise AudioFileError(f"{source.name}: is cut: {missing}; {SALVAGE}")
    if container in FFMPEG_CONTAINERS:
        return ffmpeg.FFmpegReader(source, container, allow_truncated)
    if container == "wav" and (layout := pcm.layout(source)) is not None:
        return pcm.PcmReader(source, layout)
    if container == "ogg" and len(links := ogg.links(source)) > 1:
        return _ChainedReader(source, links, allow_truncated)
    if container == "flac" and not allow_truncated and (reader := drflac_reader(source)) is not None:
        return reader
    if container == "ogg" and not allow_truncated and (vorbis := vorbis_reader(source)) is not None:
        return vorbis
    return SoundFileReader(source, container, allow_truncated)


class _ChainedReader:
    """Ogg streams one after the other in one file: their waves one after the other.

    Mono streams between others are given on all channels, as they would be played.
    """

    def __init__(self, source: Source, links: list[tuple[int, int]], allow_truncated: bool) -> None:
        self._links = links
        self._readers: list[Reader] = []
        for start, stop in links:
            link = Source(source.read_at(start, stop - start), name=f"{source.name}, from byte {start} on")
            vorbis = None if allow_truncated else vorbis_reader(link)
            self._readers.append(vorbis or SoundFileReader(link, "ogg", allow_truncated))
        infos = [reader.info for reader in self._readers]
        self._channels = max(info.channels for info in infos)
        kinds = sorted({(info.sample_rate, info.channels) for info in infos})
        if len({rate for rate, _ in kinds}) > 1 or not {channels for _, channels in kinds} <= {1, self._channels}:
            raise AudioFileError(
                f"{source.name}: holds several Ogg streams of different (rate, channels): {kinds}; "
                "make them one with `ffmpeg -i IN OUT.flac`"
            )
        num_samples = sum(info.num_samples for info in infos)
        self.info = replace(infos[0], num_samples=num_samples, channels=self._channels)

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        for reader in self._readers:
            length = min(reader.info.num_samples - start, num_samples)
            if length > 0:
                for block in reader.blocks(start, length, integers=integers):
                    yield block.repeat(self._channels, 1) if block.shape[1] < self._channels else block
                num_samples -= length
            start = max(0, start - reader.info.num_samples)

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`."""
        return None

    def splits(self) -> bool:
        """As `Reader.splits`."""
        return False

    def check(self) -> None:
        """As `Reader.check`."""
        for reader in self._readers:
            reader.check()

    def again(self) -> Callable[[Source], Reader]:
        """As `Reader.again`."""
        return partial(_ChainedReader, links=self._links, allow_truncated=False)
