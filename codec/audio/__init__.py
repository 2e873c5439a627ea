"""Files ↔ waves: what an audio file is, exact excerpts of it, writing, resampling, and finding files.

What decodes is imported at first use: decoding tokens needs no audio library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from codec.audio.finding import AUDIO_SUFFIXES, find_audio

if TYPE_CHECKING:
    from codec.audio.batch import AudioBatch, read_audio_batch, submit_audio_batch
    from codec.audio.info import AudioInfo
    from codec.audio.opening import AudioSource
    from codec.audio.reading import audio_info, read_audio
    from codec.audio.resampling import resample
    from codec.audio.streaming import StreamResampler, stream_audio
    from codec.audio.threads import default_threads, recommended_threads
    from codec.audio.writing import WriteReport, write_audio

_MODULE_OF = {
    "AudioBatch": "batch",
    "AudioInfo": "info",
    "AudioSource": "opening",
    "StreamResampler": "streaming",
    "WriteReport": "writing",
    "audio_info": "reading",
    "default_threads": "threads",
    "read_audio": "reading",
    "read_audio_batch": "batch",
    "recommended_threads": "threads",
    "resample": "resampling",
    "stream_audio": "streaming",
    "submit_audio_batch": "batch",
    "write_audio": "writing",
}

__all__ = [
    "AUDIO_SUFFIXES",
    "AudioBatch",
    "AudioInfo",
    "AudioSource",
    "StreamResampler",
    "WriteReport",
    "audio_info",
    "default_threads",
    "find_audio",
    "read_audio",
    "read_audio_batch",
    "recommended_threads",
    "resample",
    "stream_audio",
    "submit_audio_batch",
    "write_audio",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'codec.audio' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"codec.audio.{_MODULE_OF[name]}"), name)
