"""A neural audio codec toolkit: token corpora, batched decode to waveforms or mels, exact excerpts.

The public names are imported lazily: `import codec` loads neither torch nor numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from codec.audio import audio_info as audio_info
    from codec.audio import read_audio as read_audio
    from codec.audio import read_audio_batch as read_audio_batch
    from codec.audio import write_audio as write_audio
    from codec.decode import BatchDecoder as BatchDecoder
    from codec.encode import encode_corpus as encode_corpus
    from codec.errors import AudioFileError as AudioFileError
    from codec.errors import CheckpointError as CheckpointError
    from codec.errors import CodecError as CodecError
    from codec.errors import ConfigError as ConfigError
    from codec.errors import InputError as InputError
    from codec.errors import TokenFileError as TokenFileError
    from codec.errors import TrainingError as TrainingError
    from codec.excerpts import Choice as Choice
    from codec.excerpts import Excerpts as Excerpts
    from codec.excerpts import RandomExcerpts as RandomExcerpts
    from codec.excerpts import Uniform as Uniform
    from codec.features import MelSpectrogram as MelSpectrogram
    from codec.loading import load_codec as load_codec
    from codec.model import Codec as Codec
    from codec.model import Codes as Codes
    from codec.model import SoundStream as SoundStream
    from codec.sources import Arrays as Arrays
    from codec.sources import AudioFiles as AudioFiles
    from codec.sources import Excerpt as Excerpt
    from codec.sources import Segments as Segments
    from codec.sources import Strings as Strings
    from codec.sources import Tokens as Tokens
    from codec.spec import CodecSpec as CodecSpec
    from codec.tokens import TokenStore as TokenStore
    from codec.tokens import TokenWriter as TokenWriter

_MODULE_OF = {
    "Arrays": "sources",
    "AudioFileError": "errors",
    "AudioFiles": "sources",
    "BatchDecoder": "decode",
    "CheckpointError": "errors",
    "Choice": "excerpts",
    "Codec": "model",
    "CodecError": "errors",
    "CodecSpec": "spec",
    "Codes": "model",
    "ConfigError": "errors",
    "Excerpt": "sources",
    "Excerpts": "excerpts",
    "InputError": "errors",
    "MelSpectrogram": "features",
    "RandomExcerpts": "excerpts",
    "Segments": "sources",
    "SoundStream": "model",
    "Strings": "sources",
    "TokenFileError": "errors",
    "TokenStore": "tokens",
    "TokenWriter": "tokens",
    "Tokens": "sources",
    "TrainingError": "errors",
    "Uniform": "excerpts",
    "audio_info": "audio",
    "encode_corpus": "encode",
    "load_codec": "loading",
    "read_audio": "audio",
    "read_audio_batch": "audio",
    "write_audio": "audio",
}

__all__ = ["__version__", *_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'codec' has no attribute {name!r}; public names: {', '.join(sorted(_MODULE_OF))}")
    return getattr(importlib.import_module(f"codec.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
