"""Files ↔ waves: what an audio file is, exact excerpts of it, writing, resampling, and finding files."""

from codec.audio.finding import AUDIO_SUFFIXES, find_audio
from codec.audio.opening import AudioSource
from codec.audio.reading import AudioInfo, audio_info, read_audio
from codec.audio.resampling import resample
from codec.audio.writing import WriteReport, write_audio

__all__ = [
    "AUDIO_SUFFIXES",
    "AudioInfo",
    "AudioSource",
    "WriteReport",
    "audio_info",
    "find_audio",
    "read_audio",
    "resample",
    "write_audio",
]
