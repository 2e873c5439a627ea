"""What a corpus is and what encoding it will take, from the files' headers alone: `codec encode --dry-run`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch

from codec import audio
from codec.encode.items import Item
from codec.encode.reading import failure as failure_of
from codec.encode.reading import fetch, named
from codec.encode.settings import EncodeSettings
from codec.errors import AudioFileError
from codec.frames import resampled_length
from codec.model import Codec

HEAD_BYTES = 36  # of a record, without its key
_PROBE_SECONDS = 16
_AT_ONCE = 256


@dataclass
class ScanReport:
    """What a corpus is.

    Attributes:
        num_items: Items, those that fail included.
        audio_seconds: Their duration, channels counted apart if they are split.
        source_bytes: Size of the files.
        store_bytes: Size that the store will have, estimated.
        encode_seconds: Time that encoding will take on this device, estimated from a short run; reading not counted.
        kinds: How many of each "codec rate channels".
        longest_seconds: The longest item.
        failures: Items whose header can't be read: key, path, error, remedy.
        elapsed_seconds: Time that the scan took.
    """

    num_items: int = 0
    audio_seconds: float = 0.0
    source_bytes: int = 0
    store_bytes: int = 0
    encode_seconds: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)
    longest_seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON types."""
        return asdict(self)


def scan(
    codec: Codec,
    items: Sequence[Item],
    settings: EncodeSettings,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> ScanReport:
    """Reads the headers of all items.

    Args:
        codec: What they would be encoded with; it encodes a few seconds of noise to be timed.
        items: The corpus.
        settings: How they would be encoded.
        on_progress: Called now and then with (items done, items in all, audio seconds so far).
    """
    started = time.monotonic()
    spec, report, kinds = codec.spec, ScanReport(num_items=len(items)), Counter[str]()
    quantizers = settings.n_quantizers or spec.n_quantizers

    def look(item: Item) -> tuple[Item, audio.AudioInfo | None, dict[str, str]]:
        try:
            if item.error is not None:
                raise AudioFileError(item.error)
            return item, audio.audio_info(fetch(item)), {}
        except Exception as error:  # whatever a decoder makes of someone's file
            return item, None, failure_of(item, named(error, item))

    with ThreadPoolExecutor(max(settings.num_threads, 4)) as pool:
        remaining = iter(items)
        done = 0
        while batch := list(islice(remaining, _AT_ONCE)):
            for item, info, failure in pool.map(look, batch):
                report.source_bytes += max(0, item.num_bytes)
                if info is None:
                    report.failures.append(failure)
                    continue
                rows = info.channels if settings.channels == "split" and item.channel is None else 1
                samples = resampled_length(info.num_samples, info.sample_rate, spec.sample_rate)
                if item.start is not None or item.stop is not None:
                    total = samples / spec.sample_rate
                    samples = round((float(item.stop or total) - float(item.start or 0)) * spec.sample_rate)
                frames = spec.num_frames(max(1, samples))
                blocks = -(-frames // 256)
                bits = frames * quantizers * spec.bits_per_code
                report.store_bytes += rows * (bits // 8 + 4 * blocks + HEAD_BYTES + 2 * len(item.key.encode()) + 20)
                report.audio_seconds += rows * samples / spec.sample_rate
                report.longest_seconds = max(report.longest_seconds, samples / spec.sample_rate)
                kinds[f"{info.codec} {info.sample_rate} Hz, {info.channels} channel{'s' * (info.channels > 1)}"] += 1
            done += len(batch)
            if on_progress is not None:
                on_progress(done, len(items), report.audio_seconds)
    report.kinds = dict(kinds.most_common())
    report.encode_seconds = report.audio_seconds / times_real_time(codec, settings)
    report.elapsed_seconds = time.monotonic() - started
    return report


def times_real_time(codec: Codec, settings: EncodeSettings) -> float:
    """How much faster than real time the codec encodes on its device: the better of two short runs."""
    spec = codec.spec
    seconds = min(_PROBE_SECONDS, settings.batch_seconds)
    rows = max(1, int(settings.batch_seconds / seconds)) if codec.device.type != "cpu" else 1
    noise = torch.randn(rows, spec.channels, int(seconds * spec.sample_rate), device=codec.device) * 0.1
    best = 0.0
    for _ in range(2):
        started = time.perf_counter()
        codec.encode(noise, n_quantizers=settings.n_quantizers).codes.cpu()
        best = max(best, rows * seconds / (time.perf_counter() - started))
    return best
