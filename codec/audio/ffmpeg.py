"""What only FFmpeg decodes, through torchcodec."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from codec.audio.info import SALVAGE, AudioInfo, Reader
from codec.audio.opening import Source
from codec.audio.sndfile import reason_of
from codec.errors import AudioFileError

# Headers of FFmpeg's containers round durations, and count the encoder's padding or not.
_DURATION_SLACK_SECONDS = 0.25


# What torchcodec raises for files that FFmpeg can't decode.
ERRORS = (RuntimeError, ValueError, TypeError, IndexError)


class FFmpegReader:
    """torchcodec. Decodes the whole: its excerpts are exact in some formats and not in others."""

    def __init__(self, source: Source, container: str, allow_truncated: bool) -> None:
        decoder_type, reason = torchcodec_decoder()
        if decoder_type is None:
            raise AudioFileError(
                f"{source.name}: {container} files are decoded by FFmpeg, which torchcodec did not find "
                f"({reason}); install FFmpeg 4 to 8 (`apt-get install ffmpeg`), or convert the file to wav, "
                "flac, ogg or mp3"
            )
        try:
            decoder = decoder_type(address(source.path or source.read_at(0, source.size)))
            self._wave: Tensor = decoder.get_all_samples().data
        except ERRORS as error:
            raise AudioFileError(
                f"{source.name}: FFmpeg cannot decode this {container} file ({reason_of(error).splitlines()[0]})"
            ) from error
        metadata, self._container = decoder.metadata, container
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
                f"{self.info.seconds:.3f} s are there; {SALVAGE}"
            )

    def wave(self, start: int, num_samples: int) -> Tensor | None:
        """As `Reader.wave`."""
        wave = self._wave[:, start : start + num_samples]
        # An excerpt that is kept must not keep the whole.
        return wave if wave.shape == self._wave.shape else wave.clone()

    def blocks(self, start: int, num_samples: int, *, integers: bool = False) -> Iterator[NDArray[Any]]:
        """As `Reader.blocks`."""
        yield self._wave[:, start : start + num_samples].numpy().T

    def splits(self) -> bool:
        """As `Reader.splits`."""
        return False

    def check(self) -> None:
        """As `Reader.check`."""

    def again(self) -> Callable[[Source], Reader]:
        """As `Reader.again`."""
        return functools.partial(FFmpegReader, container=self._container, allow_truncated=False)


def address(audio: str | bytes) -> str | bytes:
    """What torchcodec opens. A path is made absolute: FFmpeg takes what precedes a colon for a protocol."""
    return os.path.abspath(audio) if isinstance(audio, str) else audio


@functools.lru_cache(maxsize=1)
def torchcodec_decoder() -> tuple[Any, str]:
    """The decoder class of torchcodec, or None and why not."""
    try:
        from torchcodec.decoders import AudioDecoder  # type: ignore[attr-defined]
    except (ImportError, OSError, RuntimeError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return None, lines[0] if lines else type(error).__name__
    return AudioDecoder, ""
