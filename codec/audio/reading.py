"""Audio file → wave: any format, any excerpt, exactly.

libsndfile decodes all it can, so that a corpus gives the same samples with and without FFmpeg; torchcodec
decodes what only FFmpeg reads. An excerpt is bit-equal to that slice of the whole decode. Where a decoder's
seeking breaks that, it isn't used:

- mp3, opus and the block codecs inside wav and au are decoded from their beginning (a sought mp3 differs in
  the last bits, or by half of full scale where its bit reservoir was cut; opus never quite converges);
- vorbis is sought, but never into the last page, where libsndfile misplaces samples, and only in files where
  a trial shows that positions and samples agree (in an edited stream they may not);
- what FFmpeg reads is decoded whole.
"""

from __future__ import annotations

import functools
import io
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.audio import mpeg
from codec.audio.containers import (
    FFMPEG_CONTAINERS,
    first_ogg_pages,
    identify,
    last_ogg_pages,
    missing_end,
    ogg_damaged,
    ogg_joined,
    opus_samples,
)
from codec.audio.opening import AudioSource, Source
from codec.audio.resampling import native_span, resample
from codec.errors import AudioFileError, InputError
from codec.frames import resampled_length

_log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int16)
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
# Values decoded at once: memory grows with what a file holds, not with what its header claims.
_VALUES_AT_ONCE = 1 << 22
# The longest vorbis block: what a page needs of the one before.
_VORBIS_BLOCK = 8192
_VORBIS_TRIAL_SECONDS = 3
# What the trial of seeking found for each vorbis file: threads may repeat a trial, but not disagree.
_vorbis_limits: dict[tuple[str, int, int], int] = {}
_MAX_VORBIS_LIMITS = 100_000
_SKIPPED_AT_ONCE = 1 << 16
# Bytes of tags behind an mp3's last frame that don't make its header suspect.
_MP3_TAGS = 4096
# Headers of FFmpeg's containers round durations, and count the encoder's padding or not.
_DURATION_SLACK_SECONDS = 0.25
# libsndfile's number of frames where the header has none.
_UNKNOWN = 1 << 62
_SALVAGE = "fetch it again, or read what is there with allow_truncated=True"


@dataclass(frozen=True)
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


class _Reader(Protocol):
    info: AudioInfo

    def read(self, start: int, num_samples: int) -> Tensor:
        """`[C, n]`, float32 or int16; n is smaller only where the file ends early."""


def audio_info(path: AudioSource, *, allow_truncated: bool = False) -> AudioInfo:
    """What an audio file is, and its exact length.

    Reads headers where they can be trusted. An mp3 file without a Xing header is scanned; what only FFmpeg
    reads is decoded to count its samples.

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object.
        allow_truncated: Don't raise for a file that ends early, but decode it to count what is there.

    Raises:
        AudioFileError: The file is missing, empty, cut, or no audio.
    """
    with Source(path) as source:
        info = _open(source, allow_truncated).info
        if not allow_truncated:
            return info
    with Source(path) as source:
        num_samples = _open(source, True).read(0, info.num_samples).shape[1]
    return AudioInfo(**{**vars(info), "num_samples": num_samples, "scanned": True})


def read_audio(
    path: AudioSource,
    *,
    start_sample: int = 0,
    num_samples: int | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
    dtype: torch.dtype = torch.float32,
    allow_truncated: bool = False,
) -> tuple[Tensor, int]:
    """Reads an audio file, or an excerpt of one.

    The excerpt is that slice of reading the whole with the same options: bit-equal, and after resampling
        equal to
    float rounding. Positions therefore count samples of the result, at `sample_rate` if it is given.

    Args:
        path: A path, an fsspec URL, the file's bytes or a seekable binary file object. One object
            can't be read from two threads at once; everything else can.
        start_sample: First sample.
        num_samples: Samples to read; all from `start_sample` on if None.
        sample_rate: Hz of the result; the file's own if None.
        mono: Average the channels.
        dtype: float32, float16, bfloat16 or int16. Integer files come out scaled by their full scale to −1 …
            1, or at int16 in their own values.
        allow_truncated: Return what is there, in the range asked, of a file that ends early.

    Returns:
        The wave `[C, N]` and its sample rate in Hz.

    Raises:
        AudioFileError: The file is missing, empty, cut, damaged, no audio, or holds NaN or infinite samples.
        InputError: A bad argument, or a range beyond the file's end.
    """
    _check_arguments(start_sample, num_samples, sample_rate, dtype)
    with Source(path) as source:
        reader = _open(source, allow_truncated)
        rate = reader.info.sample_rate
        to_rate = sample_rate or rate
        length = resampled_length(reader.info.num_samples, rate, to_rate)
        stop = length if num_samples is None else start_sample + num_samples
        if length == 0:
            raise AudioFileError(f"{source.name}: holds no samples; remove it")
        if start_sample >= length or stop > length:
            raise InputError(
                f"{source.name}: samples {start_sample} … {stop} were asked for, it has {length} at "
                f"{to_rate} Hz; ask for less"
            )
        first, last, skip = start_sample, stop, 0
        if to_rate != rate:
            first, last, skip = native_span(start_sample, stop, rate, to_rate)
            last = min(last, reader.info.num_samples)
        wave = reader.read(first, last - first)
        if wave.shape[1] < last - first:
            _report_short(source, first + wave.shape[1], last, allow_truncated)
    if mono and wave.shape[0] > 1:
        wave = _to_float(wave).mean(dim=0, keepdim=True)
    if to_rate != rate:
        wave = resample(_to_float(wave), rate, to_rate)[:, skip : skip + stop - start_sample]
    if wave.shape[1] == 0:
        raise AudioFileError(f"{source.name}: ends before sample {start_sample}; fetch it again")
    return _to_dtype(wave, dtype), to_rate


def _check_arguments(start_sample: int, num_samples: int | None, sample_rate: int | None, dtype: torch.dtype) -> None:
    lowest = {"start_sample": 0, "num_samples": 1, "sample_rate": 1}
    values = {"start_sample": start_sample, "num_samples": num_samples, "sample_rate": sample_rate}
    for name, value in values.items():
        if value is None and name != "start_sample":
            continue
        if isinstance(value, bool) or not hasattr(value, "__index__") or int(value) < lowest[name]:  # type: ignore[arg-type]
            raise InputError(f"{name} is {value!r}; it must be an integer of at least {lowest[name]}")
    if dtype not in _DTYPES:
        raise InputError(f"dtype is {dtype}; it must be one of {', '.join(map(str, _DTYPES))}")


def _report_short(source: Source, found: int, expected: int, allow_truncated: bool) -> None:
    text = f"{source.name}: its audio ends at sample {found}, {expected} were expected"
    if not allow_truncated:
        raise AudioFileError(f"{text}; it is cut or damaged: {_SALVAGE}")
    _log.warning(text)


def _to_float(wave: Tensor) -> Tensor:
    return wave.to(torch.float32).mul_(1 / 32768) if wave.dtype == torch.int16 else wave


def _to_dtype(wave: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int16:
        if wave.dtype != torch.int16:
            wave = (wave * 32768).round_().clamp_(-32768, 32767).to(torch.int16)
        return wave.contiguous()
    return _to_float(wave).to(dtype).contiguous()


def _open(source: Source, allow_truncated: bool) -> _Reader:
    """The reader of the source's format. Raises if the file's own headers say that its end is missing."""
    container = identify(source)
    if container is not None and not allow_truncated and (missing := missing_end(source, container)):
        raise AudioFileError(f"{source.name}: is cut: {missing}; {_SALVAGE}")
    if container in FFMPEG_CONTAINERS:
        return _FFmpegReader(source, container, allow_truncated)
    return _SoundFileReader(source, container, allow_truncated)


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A sound file that isn't sought behind one's back.

    soundfile seeks after each read, which leaves mp3 decoders in another state, and hangs on some cut files.
    """

    def seekable(self) -> bool:
        return False


class _SoundFileReader:
    """libsndfile."""

    def __init__(self, source: Source, container: str | None, allow_truncated: bool) -> None:
        self._source = source
        self._container = container
        self._allow_truncated = allow_truncated
        self._stream: bytes | None = None
        self._seek_limit: int | None = None
        scanned = False
        if container == "mp3":
            self._stream, scanned = _checked_mp3(source, allow_truncated)
        with self._file() as file:
            subtype: str = file.subtype
            if container == "ogg":
                self._prepare_ogg(subtype, file.samplerate, file.frames)
            elif container != "flac" and subtype not in _SEEKABLE:
                self._seek_limit = 0
            self._subtype = subtype
            num_samples = file.frames
            if num_samples >= _UNKNOWN:
                num_samples, scanned = sum(map(len, self._blocks(file, _UNKNOWN, "int16"))), True
            lossless = container in ("flac", "ogg") and subtype.startswith("PCM")
            codec = "flac" if lossless else _CODECS.get(subtype, subtype.lower())
            self.info = AudioInfo(
                sample_rate=file.samplerate,
                num_samples=num_samples,
                channels=file.channels,
                container=container or file.format.lower(),
                codec=codec,
                bit_depth=_BIT_DEPTHS.get(subtype),
                scanned=scanned,
            )
        if self.info.channels < 1 or self.info.sample_rate < 1:
            raise AudioFileError(
                f"{source.name}: its header claims {self.info.channels} channels at "
                f"{self.info.sample_rate} Hz; fetch it again"
            )

    def _prepare_ogg(self, subtype: str, sample_rate: int, num_samples: int) -> None:
        if ogg_joined(self._source):
            raise AudioFileError(
                f"{self._source.name}: holds several Ogg streams, of which only the first would be decoded; "
                "make it one with `ffmpeg -i IN OUT.flac`"
            )
        self._check_ogg(subtype, sample_rate, num_samples)
        self._seek_limit = 0
        if subtype == "VORBIS":
            key = self._source.identity()
            limit = _vorbis_limits.get(key) if key else None
            self._seek_limit = self._vorbis_limit(sample_rate) if limit is None else limit
            if key:
                if len(_vorbis_limits) >= _MAX_VORBIS_LIMITS:
                    _vorbis_limits.clear()
                _vorbis_limits[key] = self._seek_limit

    def _check_ogg(self, subtype: str, sample_rate: int, num_samples: int) -> None:
        """Finds what libsndfile passes over: pages with wrong checksums at the beginning and at the end."""
        last = last_ogg_pages(self._source)[-1:]
        if self._allow_truncated or not last:
            return
        expected = last[0].granule
        if subtype == "OPUS":
            expected = opus_samples(self._source, expected, sample_rate) - 1
        for page in (*first_ogg_pages(self._source), *last) if expected > num_samples else ():
            if ogg_damaged(self._source, page):
                raise AudioFileError(
                    f"{self._source.name}: is damaged: its page at byte {page.offset} has a wrong checksum; {_SALVAGE}"
                )

    def _vorbis_limit(self, sample_rate: int) -> int:
        """Samples up to which seeking gives what decoding from the beginning gives; 0 if it doesn't."""
        first = [page.granule for page in first_ogg_pages(self._source) if page.granule != -1]
        last = [page.granule for page in last_ogg_pages(self._source) if page.granule != -1]
        if len(last) < 2 or first != sorted(first) or min(first, default=-1) < 0:
            return 0
        limit = last[-2] - _VORBIS_BLOCK
        # Beyond the 2 s that libsndfile decodes instead of seeking, and where it isn't silent.
        position = _VORBIS_TRIAL_SECONDS * sample_rate
        with self._file() as file:
            for _ in self._blocks(file, position, "float32", _SKIPPED_AT_ONCE):
                pass
            while position < limit:
                samples = next(self._blocks(file, _VORBIS_BLOCK, "float32"))
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

    def _file(self) -> _ForwardFile:
        try:
            if self._stream is not None:
                return _ForwardFile(io.BytesIO(self._stream))
            return _ForwardFile(self._source.decodable(by_name=self._container is not None))
        except (soundfile.SoundFileError, RuntimeError, TypeError, OSError, ValueError) as error:
            head = self._source.read_at(0, 16)
            raise AudioFileError(
                f"{self._source.name}: is no audio file that can be read here ({_reason(error)}); it begins "
                f"with {head!r}; expected wav, flac, ogg, opus, mp3, aiff, caf, au, or (with FFmpeg) "
                "m4a, aac, webm"
            ) from error

    def read(self, start: int, num_samples: int) -> Tensor:
        # A decoder that fails leaves what it had: only float buffers show how much that is.
        dtype = "int16" if self._subtype in _SIXTEEN_BITS and not self._allow_truncated else "float32"
        with self._file() as file:
            origin = start if self._seek_limit is None else min(start, self._seek_limit)
            try:
                if origin:
                    file.seek(origin)
            except soundfile.SoundFileError as error:
                raise self._damaged(error) from error
            for _ in self._blocks(file, start - origin, dtype, _SKIPPED_AT_ONCE):
                pass
            blocks = list(self._blocks(file, num_samples, dtype))
        samples = np.concatenate(blocks) if len(blocks) != 1 else blocks[0]
        if self._subtype in ("FLOAT", "DOUBLE") and not np.isfinite(samples).all():
            bad = np.flatnonzero(~np.isfinite(samples).all(axis=1))
            raise AudioFileError(
                f"{self._source.name}: {len(bad)} of {len(samples)} samples are NaN or infinite, the first "
                f"at {start + int(bad[0])}; rewrite it without them (torch.nan_to_num)"
            )
        return torch.from_numpy(samples).T

    def _damaged(self, error: Exception) -> AudioFileError:
        return AudioFileError(f"{self._source.name}: is cut or damaged ({_reason(error)}): {_SALVAGE}")

    def _blocks(
        self, file: _ForwardFile, num_samples: int, dtype: str, values: int = _VALUES_AT_ONCE
    ) -> Iterator[NDArray[Any]]:
        """`[n, C]` pieces of the next samples, at least one, until there are no more."""
        at_once = max(1, values // file.channels)
        while True:
            wanted = min(num_samples, at_once)
            buffer = np.empty((wanted, file.channels), dtype)
            if self._allow_truncated:
                buffer.fill(np.nan if dtype == "float32" else 0)
            try:
                block = file.read(out=buffer) if wanted else buffer
            except soundfile.SoundFileError as error:
                if not self._allow_truncated:
                    raise self._damaged(error) from error
                missing = np.isnan(buffer[:, 0])
                block = buffer[: int(missing.argmax())] if missing.any() else buffer
            yield block
            num_samples -= wanted
            if len(block) < wanted or num_samples == 0:
                return


def _reason(error: Exception) -> str:
    return str(getattr(error, "error_string", "") or error).strip().rstrip(".") or type(error).__name__


def _checked_mp3(source: Source, allow_truncated: bool) -> tuple[bytes | None, bool]:
    """(what to decode instead of the file, whether the file was scanned).

    The Xing header in the first frame is trusted if the bytes it counts are the bytes there are. Without one,
    the frames are counted and put behind a new Xing header.
    """
    tag = mpeg.id3_length(source.read_at(0, 10))
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
    if (cut or scan.missing_bytes) and not allow_truncated:
        found_text = f"{scan.num_frames} whole frames of {claimed_frames}" if cut else f"{scan.num_frames} frames"
        raise AudioFileError(
            f"{source.name}: is cut: it holds {found_text}, and the last one lacks "
            f"{scan.missing_bytes} bytes; {_SALVAGE}"
        )
    if claimed_frames and offset == 0 and scan.num_frames <= claimed_frames:
        return None, True
    return scan.stream, True


class _FFmpegReader:
    """torchcodec. Decodes the whole: its excerpts are exact in some formats and not in others."""

    def __init__(self, source: Source, container: str, allow_truncated: bool) -> None:
        decoder_type, reason = _torchcodec_decoder()
        if decoder_type is None:
            raise AudioFileError(
                f"{source.name}: {container} files are decoded by FFmpeg, which torchcodec did not find "
                f"({reason}); install FFmpeg 4 to 8 (`apt-get install ffmpeg`), or convert the file to wav, "
                "flac, ogg or mp3"
            )
        try:
            # Absolute: FFmpeg takes what precedes a colon for a protocol.
            path = os.path.abspath(source.path) if source.path else source.read_at(0, source.size)
            decoder = decoder_type(path)
            self._wave: Tensor = decoder.get_all_samples().data
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise AudioFileError(
                f"{source.name}: FFmpeg cannot decode this {container} file ({_reason(error).splitlines()[0]})"
            ) from error
        metadata = decoder.metadata
        self.info = AudioInfo(
            sample_rate=metadata.sample_rate,
            num_samples=self._wave.shape[1],
            channels=self._wave.shape[0],
            container=container,
            codec=metadata.codec,
            bit_depth=None,
            scanned=True,
        )
        expected = metadata.duration_seconds_from_header
        if expected and expected - self.info.seconds > _DURATION_SLACK_SECONDS and not allow_truncated:
            raise AudioFileError(
                f"{source.name}: is cut or damaged: its header promises {expected:.3f} s, "
                f"{self.info.seconds:.3f} s are there; {_SALVAGE}"
            )

    def read(self, start: int, num_samples: int) -> Tensor:
        return self._wave[:, start : start + num_samples]


@functools.lru_cache(maxsize=1)
def _torchcodec_decoder() -> tuple[Any, str]:
    """The decoder class of torchcodec, or None and why not."""
    try:
        from torchcodec.decoders import AudioDecoder  # type: ignore[attr-defined]
    except (ImportError, OSError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return None, lines[0] if lines else type(error).__name__
    return AudioDecoder, ""
