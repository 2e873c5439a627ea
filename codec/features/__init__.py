"""Wave → features: the reference implementations' numbers, from one module, on any device.

A frame is windowed, Fourier transformed, reduced to `|X| ** power`, projected on triangular mel filters, and
optionally put on a logarithmic scale. `MelSettings` names every choice on that way; `PRESETS` holds the published
combinations, each checked in the tests against an independent computation.
"""

from codec.features.filters import mel_filters
from codec.features.graphs import GraphedFeatures
from codec.features.mel import MFCC, Fbank, MelSpectrogram, Spectrogram
from codec.features.settings import PRESETS, MelSettings
from codec.features.stream import FeatureStream

__all__ = [
    "MFCC",
    "PRESETS",
    "Fbank",
    "FeatureStream",
    "GraphedFeatures",
    "MelSettings",
    "MelSpectrogram",
    "Spectrogram",
    "mel_filters",
]
