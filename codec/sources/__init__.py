"""What can be excerpted. A source is deterministic: it gives the span it is asked for, and draws nothing itself.

Sources are files, stores, arrays, labels and strings, and wrappers over them that change the request on its way back
or the data on its way forward. All randomness comes from the loader, as named values in the request.
"""

from codec.sources.base import Excerpt, ItemSpec, Request, Source
from codec.sources.cache import Cache
from codec.sources.files import AudioFiles, TokenBatch, Tokens, output_names, write_array
from codec.sources.tables import Arrays, Segments, Strings
from codec.sources.warps import LabelPitchShift, LabelTimeStretch, PitchShift, TimeStretch
from codec.sources.wrappers import Batched, Gain, Map, Mel, Mixup, Pad, Resample, Wrap

__all__ = [
    "Arrays",
    "AudioFiles",
    "Batched",
    "Cache",
    "Excerpt",
    "Gain",
    "ItemSpec",
    "LabelPitchShift",
    "LabelTimeStretch",
    "Map",
    "Mel",
    "Mixup",
    "Pad",
    "PitchShift",
    "Request",
    "Resample",
    "Segments",
    "Source",
    "Strings",
    "TimeStretch",
    "TokenBatch",
    "Tokens",
    "Wrap",
    "output_names",
    "write_array",
]
