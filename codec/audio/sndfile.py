"""What libsndfile decodes, made exact.

Where seeking differs from decoding, it isn't used (BACKENDS.md has the measurements):

- opus and the block codecs inside wav and au are decoded from their beginning;
- mp3 is decoded from enough frames before the excerpt, and from one at which the decoder's buffers lie as they
  would; or from the beginning, where the frames don't follow one another as the header claims;
- vorbis is sought, but never into the last page, where libsndfile misplaces samples, and only in files where
  a trial shows that positions and samples agree (in an edited stream they may not).
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import flac, mpeg, ogg
from codec.audio.facts import Facts
from codec.audio.info import SALVAGE, AudioInfo, Reader
from codec.audio.opening import Source
from codec.errors import AudioFileError

# libsndfile's subtypes with exact seeking, and those that 16 bits hold.
_SEEKABLE = {
    "PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "VORBIS",
    "ALAC_16", "ALAC_20", "ALAC_24", "ALAC_32",
}  # fmt: skip
_SIXTEEN_BITS = {"PCM_S8", "PCM_U8", "PCM_16"}
_BIT_DEPTHS = {
    "PCM_S8": 8, "PCM_U8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32, "FLOAT": 32, "DOUBLE": 64,
    "ULAW": 8, "ALAW": 8, "ALAC_16": 16, "ALAC_20": 20, "ALAC_24": 24, "ALAC_32": 32,
}  # fmt: skip
_CODECS = {"MPEG_LAYER_I": "mp1", "MPEG_LAYER_II": "mp2", "MPEG_LAYER_III": "mp3"}
# Values decoded at once: they stay in the core's cache until they are converted.
_VALUES_AT_ONCE = 1 << 18
# Values for which memory is taken at a header's word.
_VALUES_ON_TRUST = 1 << 22
# The longest vorbis block: what a page needs of the one before.
_VORBIS_BLOCK = 8192
_VORBIS_TRIAL_SECONDS = 3
# An mp3 excerpt that begins earlier is decoded from the beginning, unless there is an index, which would cost more.
_MP3_INDEX_FRAMES = 30
_MP3_TRIAL_FRAMES = 12
# Bytes of tags behind an mp3's last frame that don't make its header suspect.
_MP3_TAGS = 4096
# Ranges of an mp3 file with junk between its frames that are kept.
_MAX_PIECES = 100
# Bytes of mp3 indices that are kept, and what one takes beside its 8 bytes a frame: an hour has 1.1 MB.
_INDEX_BYTES = 1 << 26
_INDEX_OVERHEAD = 500
# libsndfile's number of frames where the header has none.
_UNKNOWN = 1 << 62


def _index_bytes(index: mpeg.FrameIndex | None) -> int:
    return _INDEX_OVERHEAD + (index.offsets.nbytes if index is not None else 0)


_vorbis_limits: Facts[int] = Facts(100_000)
_mp3_indices: Facts[mpeg.FrameIndex | None] = Facts(_INDEX_BYTES, _index_bytes)
_ogg_pages: Facts[ogg.OggPage | None] = Facts(100_000)
_opus_gaps: Facts[int | None] = Facts(100_000)


@dataclass(frozen=True, slots=True)
class _Learnt:
    """What opening and examining a file told.

    Attributes:
        info: What the reader says of it.
        subtype: libsndfile's name of the codec.
        scan: Of an mp3 file: the frames that are decoded instead of the file, because its header can't be trusted.
    """

    info: AudioInfo
    subtype: str
    scan: mpeg.Scan | None


class ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A sound file that isn't sought behind one's back.

    soundfile seeks after each read, which leaves mp3 decoders in another state, and hangs on some cut files.
    """

    def seekable(self) -> bool:
        """Never, as far as soundfile's `read` is concerned; `seek` works where libsndfile's does."""
        return False


class SoundFileReader:
    """libsndfile."""

    def __init__(
        self, source: Source, container: str | None, allow_truncated: bool, learnt: _Learnt | None = None
    ) -> None:
        self._source = source
        self._container = container
        self._allow_truncated = allow_truncated
        self._stream: bytes | None = None
        self._scan: mpeg.Scan | None = None
        # Kept for the first read: opening a file costs as much as decoding a second of it.
        self._opened: ForwardFile | None = None
        learnt = learnt or self._examined()
        self._learnt, self.info, self._subtype, self._scan = learnt, learnt.info, learnt.subtype, learnt.scan
        # Samples up to which seeking is exact; None for all.
        self._seek_limit = None if container == "flac" or (self._subtype in _SEEKABLE and container != "ogg") else 0
        # Found out when something is to be sought: it takes a trial.
        self._needs_trial = container == "ogg" and self._subtype == "VORBIS"

    def _examined(self) -> _Learnt:
        source, container, scanned = self._source, self._container, False
        if container == "mp3":
            self._scan, scanned = self._checked_mp3()
        elif container == "flac" and not self._allow_truncated and (missing := flac.missing_end(source)):
            raise AudioFileError(f"{source.name}: is cut or damaged: {missing}; {SALVAGE}")
        file = self._file()
        subtype, num_samples = file.subtype, file.frames
        if container == "ogg" and not self._allow_truncated:
            page = self._damaged_end(subtype, file.samplerate, num_samples)
            if page is not None:
                raise _damaged_page(source, page)
        if num_samples >= _UNKNOWN:
            num_samples, scanned = sum(map(len, self._pieces(file, _UNKNOWN, "int16"))), True
        elif source.path is not None:
            self._opened = file
        lossless = container in ("flac", "ogg") and subtype.startswith("PCM")
        info = AudioInfo(
            sample_rate=file.samplerate,
            num_samples=num_samples,
            channels=file.channels,
            container=container or file.format.lower(),
            codec="flac" if lossless else _CODECS.get(subtype, subtype.lower()),
            bit_depth=_BIT_DEPTHS.get(subtype),
            scanned=scanned,
        )
        if info.channels < 1 or info.sample_rate < 1:
            raise AudioFileError(
                f"{source.name}: its header claims {info.channels} channels at {info.sample_rate} Hz; fetch it again"
            )
        return _Learnt(info, subtype, self._scan)

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        # A decoder that fails leaves what it had: only float buffers show how much that is.
        integers = integers and self._subtype in _SIXTEEN_BITS and not self._allow_truncated
        yield from self._blocks(start, num_samples, "int16" if integers else "float32", None)

    def _blocks(
        self, start: int, num_samples: int, dtype: str, out: NDArray[np.float32] | None
    ) -> Iterator[NDArray[Any]]:
        if self._subtype == "OPUS" and not self._allow_truncated:
            self._check_gap(start + num_samples)
        vorbis = self._container == "ogg" and self._subtype == "VORBIS"
        if vorbis and num_samples < self.info.num_samples and not self._allow_truncated:  # `check` sees whole files
            self._check_touched(start, start + num_samples)
        part = self._mp3_part(start, num_samples) if self._container == "mp3" else None
        if part is not None:
            stream, skip = part
            with self._file(stream) as file:
                for _ in self._pieces(file, skip, dtype):
                    pass
                yield from self._pieces(file, num_samples, dtype, out)
            return
        # First, because a trial reads the same bytes.
        limit = self._limit() if start else None
        file, self._opened = self._opened or self._file(), None
        with file:
            origin = start if limit is None else min(start, limit)
            try:
                if origin:
                    file.seek(origin)
            except soundfile.SoundFileError as error:
                raise self._damaged(error) from error
            for _ in self._pieces(file, start - origin, dtype):
                pass
            yield from self._pieces(file, num_samples, dtype, out)

    def _pieces(
        self, file: ForwardFile, num_samples: int, dtype: str, out: NDArray[np.float32] | None = None
    ) -> Iterator[NDArray[Any]]:
        """`[n, C]` pieces of the next samples until there are no more, each in the place of the one before.

        Or one piece, in `out` `[num_samples, C]`.
        """
        at_once = max(1, _VALUES_AT_ONCE // file.channels) if out is None else num_samples
        buffer = np.empty((min(num_samples, at_once), file.channels), dtype) if out is None else out
        while num_samples > 0:
            wanted = min(num_samples, at_once)
            if self._allow_truncated:
                buffer.fill(np.nan if dtype == "float32" else 0)
            try:
                block = file.read(out=buffer[:wanted])
            except soundfile.SoundFileError as error:
                if not self._allow_truncated:
                    raise self._damaged(error) from error
                missing = np.isnan(buffer[:wanted, 0])
                block = buffer[: int(missing.argmax())] if missing.any() else buffer[:wanted]
            if len(block):
                yield block
            num_samples -= wanted
            if len(block) < wanted:
                return

    def _file(self, stream: bytes | None = None) -> ForwardFile:
        stream = self._whole_stream() if stream is None and self._scan is not None else stream
        try:
            if stream is not None:
                return ForwardFile(_in_memory(stream))
            return ForwardFile(self._source.decodable(by_name=self._container is not None))
        except (soundfile.SoundFileError, RuntimeError, TypeError, OSError, ValueError) as error:
            head = self._source.read_at(0, 16)
            raise AudioFileError(
                f"{self._source.name}: is no audio file that can be read here ({reason_of(error)}); it begins "
                f"with {head!r}; expected wav, flac, ogg, opus, mp3, aiff, caf, au, or (with FFmpeg) "
                "m4a, aac, webm"
            ) from error

    def _whole_stream(self) -> bytes:
        """The frames that are decoded instead of the file."""
        assert self._scan is not None
        if self._stream is None:
            self._stream = self._scan.stream(self._source)
        return self._stream

    def _damaged(self, error: Exception) -> AudioFileError:
        return AudioFileError(f"{self._source.name}: is cut or damaged ({reason_of(error)}): {SALVAGE}")

    def _limit(self) -> int | None:
        """Samples up to which seeking is exact; None for all."""
        if self._needs_trial:
            self._needs_trial = False
            self._seek_limit = _vorbis_limits.get(self._source, self._vorbis_limit)
        return self._seek_limit

    def _damaged_end(self, subtype: str, sample_rate: int, num_samples: int) -> ogg.OggPage | None:
        """What libsndfile passes over: pages with wrong checksums at the beginning and at the end."""
        last = ogg.last_pages(self._source)[-1:]
        if not last:
            return None
        expected = last[0].granule
        if subtype == "OPUS":
            expected = ogg.opus_samples(self._source, expected, sample_rate) - 1
        if expected <= num_samples:
            return None
        pages = (*ogg.first_pages(self._source), *last)
        return next((page for page in pages if ogg.damaged(self._source, page)), None)

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`: where there is one channel, so that both orders are the same."""
        if self.info.channels > 1 or self._allow_truncated or num_samples > _VALUES_ON_TRUST:
            return None
        out = np.empty((num_samples, 1), np.float32)
        found = sum(map(len, self._blocks(start, num_samples, "float32", out)))
        return torch.from_numpy(out[:found].reshape(1, -1))

    def splits(self) -> bool:
        """As `Reader.splits`."""
        if self._container == "mp3":
            return self._subtype == "MPEG_LAYER_III" and self._indexed() is not None
        limit = self._limit()
        return limit is None or limit > 0

    def check(self) -> None:
        """As `Reader.check`."""
        if self._container == "ogg":
            check_pages(self._source)

    def again(self) -> Callable[[Source], Reader] | None:
        """As `Reader.again`."""
        if self._scan is not None and len(self._scan.pieces) > _MAX_PIECES:
            return None
        return functools.partial(SoundFileReader, container=self._container, allow_truncated=False, learnt=self._learnt)

    def _check_gap(self, stop: int) -> None:
        """Raises where a page is missing before `stop`: libsndfile gives what follows in its place."""
        granule = _opus_gaps.get(self._source, lambda: ogg.end_before_gap(self._source))
        if granule is None:
            return
        sound = ogg.opus_samples(self._source, granule, self.info.sample_rate)
        if stop > sound:
            raise self._pages_missing(sound)

    def _check_touched(self, start: int, stop: int) -> None:
        """Raises where a page is missing among those of an excerpt: libsndfile gives silence or what follows."""
        serial = int.from_bytes(self._source.read_at(14, 4), "little")
        begin = ogg.find_page(self._source, serial, start - _VORBIS_BLOCK, 0, self.info.num_samples)
        before: ogg.OggPage | None = None
        for page in ogg.pages_from(self._source, begin):
            if page.serial != serial:
                continue
            touched = not 0 <= page.granule <= start - _VORBIS_BLOCK
            if touched and before is not None and page.number != before.number + 1:
                raise self._pages_missing(before.granule)
            before = page
            if page.granule >= stop:
                break

    def _pages_missing(self, sample: int) -> AudioFileError:
        return AudioFileError(
            f"{self._source.name}: is damaged: pages are missing between its pages at sample {sample}; {SALVAGE}"
        )

    def _vorbis_limit(self) -> int:
        """Samples up to which seeking gives what decoding from the beginning gives; 0 if it doesn't."""
        first = [page.granule for page in ogg.first_pages(self._source) if page.granule != -1]
        last = [page.granule for page in ogg.last_pages(self._source) if page.granule != -1]
        if len(last) < 2 or first != sorted(first) or min(first, default=-1) < 0:
            return 0
        limit = last[-2] - _VORBIS_BLOCK
        # Beyond the 2 s that libsndfile decodes instead of seeking, and where it isn't silent.
        position = _VORBIS_TRIAL_SECONDS * self.info.sample_rate
        if position >= limit:
            return 0
        with self._file() as file:
            for _ in self._pieces(file, position, "float32"):
                pass
            while position < limit:
                samples = file.read(_VORBIS_BLOCK, dtype="float32", always_2d=True)
                if not len(samples):
                    return 0
                if samples.any():
                    break
                position += _VORBIS_BLOCK
            else:
                return 0
        try:
            with self._file() as file:
                file.seek(position)
                sought = file.read(_VORBIS_BLOCK, dtype="float32", always_2d=True)
        except soundfile.SoundFileError:
            return 0
        return limit if np.array_equal(samples, sought) else 0

    def _checked_mp3(self) -> tuple[mpeg.Scan | None, bool]:
        """(the frames to decode instead of the file, whether the file was scanned).

        The Xing header in the first frame is trusted if the bytes it counts are the bytes there are. Without one,
        the frames are counted and put behind a new Xing header.
        """
        source = self._source
        tag = mpeg.id3_length(source.read_at(0, 10))
        head = source.read_at(tag, 1 << 12)
        found = mpeg.find_frame(head, 0)
        if found is None:
            head = source.read_at(tag, 1 << 16)
            found = mpeg.find_frame(head, 0)
        claimed_frames = claimed_bytes = 0
        offset = 0
        if found is not None:
            offset, header = found
            claimed_frames, claimed_bytes = mpeg.xing_claim(head, offset, header) or (0, 0)
        available = source.size - tag - offset
        if claimed_frames and offset == 0 and 0 < claimed_bytes <= available <= claimed_bytes + _MP3_TAGS:
            return None, False
        scan = mpeg.scan(source.read_at(0, source.size))
        if scan is None:
            raise AudioFileError(f"{source.name}: looks like mp3, but holds no two frames in a row; fetch it again")
        # Some encoders count the header's own frame.
        cut = scan.num_frames < claimed_frames - (available >= claimed_bytes)
        if (cut or scan.missing_bytes) and not self._allow_truncated:
            found_text = f"{scan.num_frames} whole frames of {claimed_frames}" if cut else f"{scan.num_frames} frames"
            raise AudioFileError(
                f"{source.name}: is cut: it holds {found_text}, and the last one lacks "
                f"{scan.missing_bytes} bytes; {SALVAGE}"
            )
        if claimed_frames and offset == 0 and scan.num_frames <= claimed_frames:
            return None, True
        return scan, True

    def _mp3_part(self, start: int, num_samples: int) -> tuple[bytes, int] | None:
        """(frames that decode to these samples, samples to skip); None to decode from the beginning."""
        if self._subtype != "MPEG_LAYER_III" or self._allow_truncated:
            return None
        index = _mp3_indices.known(self._source)
        if index is None and start >= _MP3_INDEX_FRAMES * 1152:
            index = self._indexed()
        if index is None:
            return None
        first, needed, last, skip = index.span(start, num_samples)
        if first == 0:
            return None
        frames = self._mp3_bytes(int(index.offsets[first]), int(index.offsets[last]))
        return index.stream(frames, first, needed, last), skip

    def _mp3_bytes(self, begin: int, end: int) -> bytes:
        """Bytes of what is decoded: the file, or its frames behind a Xing header."""
        if self._scan is None:
            return self._source.read_at(begin, end - begin)
        if self._stream is None and len(self._scan.pieces) == 1:
            moved = self._scan.pieces[0][0] - len(mpeg.xing_frame(self._scan.header, 0))
            return self._source.read_at(begin + moved, end - begin)
        return self._whole_stream()[begin:end]

    def _indexed(self) -> mpeg.FrameIndex | None:
        return _mp3_indices.get(self._source, self._mp3_index)

    def _mp3_index(self) -> mpeg.FrameIndex | None:
        """Where the frames lie, if the whole decode is these frames' decode with its beginning cut off."""
        data = self._source.read_at(0, self._source.size) if self._scan is None else self._whole_stream()
        index = mpeg.frame_index(data)
        if index is None or len(index.offsets) - 1 <= _MP3_TRIAL_FRAMES:
            return None
        if index.num_samples() != self.info.num_samples:
            return None
        begin, end = index.offsets[[0, _MP3_TRIAL_FRAMES]]
        trial = mpeg.xing_frame(index.header, _MP3_TRIAL_FRAMES) + data[begin:end]
        length = _MP3_TRIAL_FRAMES // 2 * index.header.num_samples
        with self._file(trial) as file:
            file.read(index.span(0, 1)[3], dtype="float32")
            decoded = file.read(length, dtype="float32", always_2d=True)
        with self._file() as file:
            same = np.array_equal(file.read(length, dtype="float32", always_2d=True), decoded)
        return index if same else None


def _in_memory(data: bytes) -> int | io.BytesIO:
    """What libsndfile opens: where there is such a thing, a descriptor of memory.

    It is read without calls back into Python, for each of which a thread would wait for its turn.
    """
    if hasattr(os, "memfd_create"):
        with suppress(OSError):
            descriptor = os.memfd_create("codec", os.MFD_CLOEXEC)
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(descriptor, data[done:] if done else data, done)
            except OSError:
                os.close(descriptor)
                raise
            return descriptor
    return io.BytesIO(data)


def check_pages(source: Source) -> None:
    """Raises for a damaged page of an Ogg file, which decoders pass over."""
    page = _ogg_pages.get(source, lambda: ogg.first_damaged(source))
    if page is not None:
        raise _damaged_page(source, page)


def _damaged_page(source: Source, page: ogg.OggPage) -> AudioFileError:
    return AudioFileError(f"{source.name}: is damaged: its page at byte {page.offset} has a wrong checksum; {SALVAGE}")


def reason_of(error: Exception) -> str:
    """What a decoder's error says, without its full stop."""
    return str(getattr(error, "error_string", "") or error).strip().rstrip(".") or type(error).__name__
