"""Files ↔ waves: what an audio file is, exact excerpts of it, writing, resampling, and finding files.

What decodes is imported at first use: decoding tokens needs no audio library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from codec.audio.finding import AUDIO_SUFFIXES, find_audio

if TYPE_CHECKING:
    from codec.audio.opening import AudioSource
    from codec.audio.reading import AudioInfo, audio_info, read_audio
    from codec.audio.resampling import resample
    from codec.audio.writing import WriteReport, write_audio

_MODULE_OF = {
    "AudioInfo": "reading",
    "AudioSource": "opening",
    "WriteReport": "writing",
    "audio_info": "reading",
    "read_audio": "reading",
    "resample": "resampling",
    "write_audio": "writing",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'codec.audio' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"codec.audio.{_MODULE_OF[name]}"), name)
