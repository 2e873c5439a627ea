"""Sources over a source: the request goes back through them, the data forward. One modality each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from multiprocessing.context import get_spawning_popen
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec import audio
from codec.errors import InputError
from codec.frames import Seconds, exact_seconds, resampled_length
from codec.sources.base import Excerpt, Source, moved, padded, values_of

if TYPE_CHECKING:
    from codec.features import MelSettings


class Wrap(Source):
    """A source over another; by itself it changes nothing. Subclasses change `get`, and what they must besides.

    Args:
        source: What is wrapped.
    """

    def __init__(self, source: Source) -> None:
        if isinstance(source, Batched) and not isinstance(self, Batched):
            raise InputError(
                f"{type(self).__name__} over Batched: that is where workers hand out; put {type(self).__name__} "
                "below it, or wrap a function in Batched again"
            )
        self.source = source
        self.annotates = source.annotates

    def keys(self) -> Sequence[str]:
        """Those of the source."""
        return self.source.keys()

    def rate(self) -> Fraction | None:
        """Positions per second of what comes out."""
        return self.source.rate()

    def lengths(self) -> NDArray[np.int64]:
        """int64 `[items]`, in positions of what comes out."""
        return self._resized(np.asarray(self.source.lengths()))

    def filled(self) -> NDArray[np.int64]:
        """See `Source.filled`."""
        return self._resized(np.asarray(self.source.filled()))

    def length(self, key: str) -> int:
        """Positions of one item."""
        return int(self._resized(np.array([self.source.length(key)]))[0])

    def reach(self, length: int, values: Mapping[str, float]) -> int:
        """See `Source.reach`."""
        return self.source.reach(length, values)

    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """The source's, unchanged."""
        return self.source.get(excerpts)

    def _resized(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Lengths of the source's items → lengths of what comes out."""
        return lengths

    def _tensor(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """What the source gives, which must be a tensor with time."""
        data = self.source.get(excerpts)
        if not isinstance(data, Tensor):
            raise InputError(
                f"{type(self).__name__} works on tensors, {type(self.source).__name__} gives {type(data).__name__}; "
                "wrap another source, or do this after decoding the batch"
            )
        return data

    def _sample_rate(self) -> int:
        rate = self.source.rate()
        if rate is None or rate.denominator != 1:
            raise InputError(
                f"{type(self).__name__} needs a wave at whole Hz; the source has {rate} positions per second"
            )
        return int(rate)


class Map(Wrap):
    """Applies a function to each batch of a source, time unchanged: the place for whatever has no wrapper here.

    Args:
        source: What is wrapped.
        function: Gets what the source gives for the batch, then a float32 tensor `[B]` for each of `names`. For
            loader workers that are spawned it must be picklable, so no lambda.
        names: Named values.

    Example:
        >>> quiet = Map(AudioFiles("music"), torch.Tensor.mul, "level")  # with rngs={"level": Uniform(0, 1)}
    """

    def __init__(self, source: Source, function: Callable[..., Any], *names: str) -> None:
        super().__init__(source)
        self._function = function
        self._names = names

    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """What the function returns."""
        values = torch.from_numpy(values_of(excerpts, self._names).astype(np.float32))
        return self._function(self.source.get(excerpts), *values.unbind(1))


class Batched(Wrap):
    """Marks where workers hand out whole batches: the function is applied by whoever consumes them.

    That is the place for what belongs on a device: decoding tokens, mels of a whole batch. A loader applies it in its
    own process as batches leave it. More of it may follow, by Batched again. What belongs in the workers is `Map`.

    Args:
        source: What the workers do. Requests and positions are this source's.
        function: Gets what the source gives for the batch, then a float32 tensor `[B]` for each of `names`. It is not
            sent to workers, so it may hold a model on a device.
        names: Named values.
        device: Where to move tensors before.

    Example:
        >>> mels = Batched(AudioFiles("tests/data", sample_rate=16000), MelSpectrogram("codec"), device="cpu")
        >>> x = RandomExcerpts({"x": mels}, 1, batch_size=4, seed=0)[0]["x"]
    """

    def __init__(
        self, source: Source, function: Callable[..., Any], *names: str, device: str | torch.device | None = None
    ) -> None:
        super().__init__(source)
        self._function: Callable[..., Any] | None = function
        self._names = names
        self._device = device

    def get(self, excerpts: Sequence[Excerpt]) -> Any:
        """What the function returns."""
        values = torch.from_numpy(values_of(excerpts, self._names).astype(np.float32))
        return self._applied(self.source.get(excerpts), values.unbind(1))

    @property
    def in_worker(self) -> Source:
        """The source below."""
        return self.source.in_worker if isinstance(self.source, Batched) else self.source

    def finish(self, data: Any, values: Mapping[str, Any]) -> Any:
        """What `in_worker` gave, and the batch's values by name → what the function returns."""
        if isinstance(self.source, Batched):
            data = self.source.finish(data, values)
        if missing := [name for name in self._names if name not in values]:
            raise InputError(f"the batch has no value {missing[0]!r}; give the loader rngs={{{missing[0]!r}: …}}")
        return self._applied(data, [values[name] for name in self._names])

    def _applied(self, data: Any, values: Sequence[Tensor]) -> Any:
        if self._function is None:
            raise InputError("Batched is applied in the consumer, not in spawned workers; for those there is Map")
        if self._device is not None:
            if isinstance(data, Tensor):
                data = data.to(self._device, non_blocking=True)
            values = [value.to(self._device, non_blocking=True) for value in values]
        return self._function(data, *values)

    def __getstate__(self) -> dict[str, Any]:
        # A spawned worker has no use for the function, which may not be picklable.
        return self.__dict__ if get_spawning_popen() is None else {**self.__dict__, "_function": None}


class Gain(Wrap):
    """Changes the level of waves by named decibels.

    Args:
        source: Gives waves `[B, C, N]`.
        names: Values in dB, added up where there are several.
    """

    def __init__(self, source: Source, *names: str) -> None:
        super().__init__(source)
        self._names = _checked(names, "Gain(source, 'gain_db')")

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`."""
        data = self._tensor(excerpts)
        factor = 10 ** (values_of(excerpts, self._names).sum(axis=1) / 20)
        return data * torch.from_numpy(factor).to(data.dtype).view(-1, *[1] * (data.ndim - 1))


class Mixup(Wrap):
    """Mixes each row with the next one of the batch, the last with the first: `(1 - m) * x + m * next`.

    Put it on the waves, before features, and on their targets with the same name: partners are the same.

    Args:
        source: Gives floating tensors `[B, ...]`.
        name: The share m of the next row.
    """

    def __init__(self, source: Source, name: str) -> None:
        super().__init__(source)
        self._name = name

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """The source's shape."""
        data = self._tensor(excerpts)
        if not data.is_floating_point():
            raise InputError(f"Mixup needs floating targets, not {data.dtype}; use Segments(…, mode='mask')")
        share = torch.from_numpy(values_of(excerpts, [self._name])[:, 0]).to(data.dtype)
        return torch.lerp(data, data.roll(-1, 0), share.view(-1, *[1] * (data.ndim - 1)))


class Pad(Wrap):
    """Makes items longer, so that excerpts may begin before them and end after them.

    Pad the labels as well: position 0 is the padding's first one.

    Args:
        source: Gives tensors with time last, or labels, which stay unlabelled there.
        mode: "zero", or "reflect", which mirrors the item at its edges as often as needed.
        before: Seconds, an exact number; a whole number of positions.
        after: The same; as `before` if None.

    Raises:
        InputError: An unknown mode, a padding that is negative or not whole.

    Example:
        >>> Pad(AudioFiles("music", sample_rate=16000), "reflect", "1/2").length("a.wav")  # of 16000 samples
        32000
    """

    def __init__(
        self, source: Source, mode: Literal["zero", "reflect"], before: Seconds, after: Seconds | None = None
    ) -> None:
        super().__init__(source)
        rate = source.rate()
        if mode not in ("zero", "reflect"):
            raise InputError(f"mode is {mode!r}; it must be 'zero' or 'reflect'")
        if rate is None:
            raise InputError(f"{type(source).__name__} has no time to pad; pad the sources that have")
        if mode == "reflect" and source.annotates:
            raise InputError("labels can't be mirrored; pad them with mode='zero'")
        self._mode = mode
        self._before, self._after = (_positions(s, rate) for s in (before, before if after is None else after))

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """The source's shape."""
        if self.source.annotates:
            shifted: Tensor = self.source.get([moved(e, e.start - self._before, e.length) for e in excerpts])
            return shifted
        spans = [self._span(excerpt) for excerpt in excerpts]
        data = self._tensor([moved(e, low, high - low) for e, (low, high) in zip(excerpts, spans, strict=True)])
        rows = []
        for excerpt, row, (low, high) in zip(excerpts, data, spans, strict=True):
            at = torch.arange(excerpt.start, excerpt.start + excerpt.length) - self._before
            total = self.source.length(excerpt.key)
            if self._mode == "reflect":
                # Beyond the padding's end there is nothing to mirror.
                inside = at < total + self._after
                at = _mirrored(at, total)
            else:
                inside = (at >= 0) & (at < total)
            picked = row[..., (at - low).clamp(0, high - low - 1)]
            rows.append(torch.where(inside, picked, torch.zeros((), dtype=row.dtype)))
        return padded(rows, max(excerpt.length for excerpt in excerpts))

    def _span(self, excerpt: Excerpt) -> tuple[int, int]:
        """What of the item an excerpt reads: half-open, at least one position."""
        total = self.source.length(excerpt.key)
        first, last = excerpt.start - self._before, excerpt.start + excerpt.length - 1 - self._before
        if self._mode == "reflect" and (first < 0 or last >= total):
            if last - first >= total or first < -total or last >= 2 * total:
                return 0, total
            places = [int(p) for p in _mirrored(torch.tensor([first, last]), total)]
            low = 0 if first < 0 <= last else min(places)
            high = total - 1 if first < total <= last else max(places)
            return low, high + 1
        low = min(max(first, 0), total - 1)
        return low, max(low, min(last, total - 1)) + 1

    def _resized(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + self._before + (0 if self.source.annotates else self._after)


class Resample(Wrap):
    """Waves at another sample rate; an excerpt equals that slice of the whole item, resampled.

    Args:
        source: Gives waves `[B, C, N]` at a whole number of Hz.
        sample_rate: Hz.
    """

    def __init__(self, source: Source, sample_rate: int) -> None:
        super().__init__(source)
        self._from = self._sample_rate()
        self._to = sample_rate

    def rate(self) -> Fraction:
        """Samples per second."""
        return Fraction(self._to)

    def reach(self, length: int, values: Mapping[str, float]) -> int:
        """See `Source.reach`."""
        return -(-self.source.reach(-(-length * self._from // self._to), values) * self._to // self._from)

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Waves `[B, C, N]`."""
        from codec.audio.resampling import native_span

        spans = []
        for key, start, length in excerpts:
            total = self.source.length(key)
            stop = min(start + length, resampled_length(total, self._from, self._to))
            first, last, skip = native_span(start, stop, self._from, self._to)
            spans.append((first, min(last, total), skip, stop - start))
        data = self._tensor([moved(e, s[0], s[1] - s[0]) for e, s in zip(excerpts, spans, strict=True)])
        rows = [
            audio.resample(row[..., : last - first], self._from, self._to)[..., skip : skip + length]
            for row, (first, last, skip, length) in zip(data, spans, strict=True)
        ]
        return padded(rows, max(excerpt.length for excerpt in excerpts))

    def _resized(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return -(-lengths * self._to // self._from)


class Mel(Wrap):
    """Log-mels of waves; an excerpt equals that slice of the whole item's mel.

    Time stretch and pitch shift cost next to nothing here: another hop, another frequency axis of the filters.

    Args:
        source: Gives mono waves `[B, 1, N]` at the settings' sample rate.
        settings: Mel settings or a preset's name.
        stretch: Named values, multiplied where there are several: 1.5 plays one and a half times as fast, at the
            same pitch. See `TimeStretch`.
        shift: Named values in semitones, added up where there are several.

    Raises:
        InputError: Another sample rate, or settings whose frames depend on the whole item (normalised ones, a range
            below the maximum).
    """

    def __init__(
        self,
        source: Source,
        settings: MelSettings | str = "codec",
        *,
        stretch: str | Sequence[str] = (),
        shift: str | Sequence[str] = (),
    ) -> None:
        from codec.features import MelSpectrogram

        super().__init__(source)
        self._mel = MelSpectrogram(settings)
        self._settings = self._mel.settings
        self._stretch, self._shift = _tuple(stretch), _tuple(shift)
        if not self._settings.is_framewise:
            raise InputError(
                "these mel settings normalise over the whole item, which an excerpt doesn't have; "
                "normalise in the training step, or take settings without log_range and normalize"
            )
        if self._sample_rate() != self._settings.sample_rate:
            raise InputError(
                f"the source has {self._sample_rate()} Hz, the mel settings {self._settings.sample_rate} Hz; "
                "give AudioFiles that sample_rate, or wrap the source in Resample"
            )

    def rate(self) -> Fraction:
        """Frames per second."""
        return Fraction(self._settings.sample_rate, self._settings.hop_length)

    def reach(self, length: int, values: Mapping[str, float]) -> int:
        """See `Source.reach`."""
        hop = self._settings.hop_length
        return -(-self.source.reach(stretched(length * hop, values, self._stretch), values) // hop)

    def get(self, excerpts: Sequence[Excerpt]) -> Tensor:
        """Mels `[B, M, F]`, F the longest span; the settings' floor where a span passes its item's end."""
        s = self._settings
        hop, context = s.hop_length, -(-s.n_fft // s.hop_length)
        speeds = values_of(excerpts, self._stretch).prod(axis=1).tolist()
        spans, skips, frames = [], [], []
        for (key, start, length), speed in zip(excerpts, speeds, strict=True):
            total = self.source.length(key)
            skip = min(context, int(start / speed))
            first = round((start - skip * speed) * hop)
            last = round((start + (length + context) * speed) * hop)
            left = max(1, s.num_frames(total) - start)  # at the item's own speed
            spans.append((first, max(1, min(last, total) - first)))
            skips.append(skip)
            frames.append(min(length, max(1, int(left / speed))))
        data = self._tensor([moved(e, *span) for e, span in zip(excerpts, spans, strict=True)])
        lengths = torch.tensor([length for _, length in spans])
        if self._stretch or self._shift:
            pitches = (2 ** (values_of(excerpts, self._shift).sum(axis=1) / 12)).tolist()
            mel, _ = self._mel.transformed(data, lengths, pitch=pitches, speed=speeds)
        else:
            mel, _ = self._mel(data, lengths)
        rows = [row[..., skip : skip + n] for row, skip, n in zip(mel, skips, frames, strict=True)]
        return padded(rows, max(excerpt.length for excerpt in excerpts), self._mel.padding_value)

    def _resized(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([self._settings.num_frames(n) for n in lengths.tolist()], dtype=np.int64)


def stretched(length: int, values: Mapping[str, float], names: Sequence[str]) -> int:
    """Positions that an excerpt reads of a source that its values stretch."""
    factor = 1.0
    for name in names:
        factor *= values.get(name, 1.0)
    return -int(-length * factor // 1)


def _tuple(names: str | Sequence[str]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _checked(names: tuple[str, ...], example: str) -> tuple[str, ...]:
    if not names:
        raise InputError(f"no named value is given; write {example}")
    return names


def _positions(seconds: Seconds, rate: Fraction) -> int:
    positions = exact_seconds(seconds) * rate
    if positions.denominator != 1 or positions < 0:
        near = max(0, round(positions)) / rate
        raise InputError(
            f"padding of {exact_seconds(seconds)} s is {float(positions):g} positions at {rate} per second; "
            f"it must be a whole number ≥ 0: take {near} s"
        )
    return int(positions)


def _mirrored(at: Tensor, total: int) -> Tensor:
    """Positions mirrored into `[0, total)`, the edges not repeated."""
    period = max(1, 2 * (total - 1))
    at = at.remainder(period)
    return torch.where(at < total, at, period - at)
