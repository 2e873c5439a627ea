"""wave → spectrogram, mel spectrogram, filterbank energies and cepstra."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from codec.errors import InputError
from codec.features.cpu import CpuKernel, NotFiniteError
from codec.features.edges import at_least, mirror
from codec.features.filters import cosine_transform, mel_filters, window_values
from codec.features.graphs import GraphedFeatures
from codec.features.rows import beyond_end, normalized, not_finite, shaped
from codec.features.settings import MelSettings, resolve
from codec.features.stream import FeatureStream
from codec.features.warp import PerRow, row_values, transformed_length, transformed_mel

# Frames transformed at once outside the fast path. On a CPU, 256 keep the intermediates in the cache.
_CPU_BLOCK = 256
_DEVICE_BLOCK = 65536
_NUMPY_TYPES = {torch.float32: np.float32, torch.float64: np.float64}


class Spectrogram(nn.Module):
    """`|X| ** power` of waves, single or in padded batches; the front half of every feature here.

    Computes in float32, or in float64 after `.double()`: half-precision input, a `.half()` module and autocast change
    nothing, and the result has the computing type. (Only TF32 products, where a caller allows them, reach the filters.)
    Differentiable, also on silence. Float32 on a CPU without gradients takes a low-latency path, which for small inputs
    never wakes a thread pool. torch.export, ONNX and torch.compile take modules with any batch and length.

    Args:
        settings: Framing, window and power, or a preset's name; the mel filters, the logarithm and the normalisation
            aren't used.

    Attributes:
        settings: The resolved `MelSettings`.
        padding_value: What frames beyond a row's length hold.

    Raises:
        InputError: Unknown preset.

    Shape:
        - wave: floating `[N]`, `[C, N]` or `[B, C, N]` with N ≥ 1.
        - lengths: integer `[B]` (or one per row of a 2-D wave): valid samples, 1 … N.
        - output: `[K, F]`, `[C, K, F]` or `[B, K, F]` for mono batches, `[B, C, K, F]` for C > 1; K is
          `n_fft // 2 + 1` for a spectrogram, `n_mels` for a mel, `n_mfcc` for cepstra.

    >>> Spectrogram("codec")(torch.zeros(2, 1, 16000)).shape
    torch.Size([2, 257, 100])
    """

    window: Tensor
    uses_log = False
    """Whether the settings' logarithm and normalisation apply."""

    def __init__(self, settings: MelSettings | str = "codec") -> None:
        super().__init__()
        self.settings = s = resolve(settings)
        self._exact = {"window": window_values(s.window, s.win_length)}
        self._add_matrices()
        for name in self._exact:
            self.register_buffer(name, torch.empty(0), persistent=False)
        self._kernel: CpuKernel | None = None
        # Whether `_finish` has nothing to do on whole rows after the logarithm.
        self._is_plain = "transform" not in self._exact and not (self.uses_log and s.normalize)
        self._fill_buffers(torch.device("cpu"), torch.float32)
        self.padding_value = self._silence()

    def _add_matrices(self) -> None:
        """Adds a subclass's constants to `_exact`."""

    def _silence(self) -> float:
        return 0.0

    @property
    def num_bins(self) -> int:
        """Rows of the output: K."""
        return self.settings.n_fft // 2 + 1

    @property
    def _num_linear(self) -> int:
        """Rows before the logarithm."""
        filters = self._exact.get("filters")
        return self.settings.n_fft // 2 + 1 if filters is None else len(filters)

    def _fill_buffers(self, device: torch.device, dtype: torch.dtype) -> None:
        for name, values in self._exact.items():
            setattr(self, name, torch.from_numpy(values.astype(_NUMPY_TYPES[dtype])).to(device))
        self._kernel = None
        if device.type == "cpu" and dtype == torch.float32:
            filters = self._exact.get("filters")
            self._kernel = CpuKernel(
                self.settings,
                self._exact["window"].astype(np.float32),
                None if filters is None else filters.astype(np.float32),
            )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and casts the buffers, from their float64 definition and never below float32."""
        before = self.window
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.window.dtype != before.dtype or self.window.device != before.device:
            wide = torch.float64 if self.window.dtype == torch.float64 else torch.float32
            self._fill_buffers(self.window.device, wide)
        return self

    def extra_repr(self) -> str:
        """The settings, for `print(module)`."""
        return repr(self.settings)

    def num_frames(self, num_samples: int) -> int:
        """Frames that a wave of `num_samples` samples gives."""
        return self.settings.num_frames(num_samples)

    def stream(self) -> FeatureStream:
        """A stateful extractor: chunks of any size in, the frames that are complete out; equals one call.

        Raises:
            InputError: The settings need the whole wave (log_range, normalize).
        """
        return FeatureStream(self)

    def graphed(self, *, bucket: int = 4096, max_graphs: int = 16) -> GraphedFeatures:
        """The features by CUDA graphs, one per bucket of lengths: for many short calls on a GPU; see there."""
        return GraphedFeatures(self, bucket=bucket, max_graphs=max_graphs)

    def forward(self, wave: Tensor, lengths: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Computes the features.

        Args:
            wave: Floating `[N]`, `[C, N]` or `[B, C, N]`, on the module's device.
            lengths: Valid samples of each row. Whatever lies beyond them, NaN too, is ignored.

        Returns:
            The features; with `lengths`, also their lengths (int64, on the wave's device). Each row is what it is
            alone; frames beyond its length hold `padding_value`.

        Raises:
            InputError: Integer or empty wave, wrong rank, lengths outside 1 … N, and on a CPU NaN or infinity among
                the samples. (On other devices that check would stall the queue: there NaN gives NaN.)
        """
        if lengths is None and self._is_fast(wave):
            shape = wave.shape
            if not 1 <= len(shape) <= 3 or 0 in shape:
                self._check(wave, None)
            rows = self._samples(wave)
            if self.settings.preemphasis:
                rows = np.concatenate(
                    [rows[:, :1], rows[:, 1:] - np.float32(self.settings.preemphasis) * rows[:, :-1]], 1
                )
            return self._fast(rows, None, None, shape[:-1])
        self._check(wave, lengths)
        features, row_frames = self._features(*self._rows(wave, lengths))
        features = shaped(features, wave.shape[:-1])
        if row_frames is None:
            return features
        return features, row_frames[:: wave.shape[1]] if wave.ndim == 3 else row_frames

    def _check(self, wave: Tensor, lengths: Tensor | None) -> None:
        if not wave.is_floating_point():
            raise InputError(f"wave has dtype {wave.dtype}; it must be floating, −1 … 1 (divide int16 by 32768)")
        if not 1 <= wave.ndim <= 3 or wave.numel() == 0:
            raise InputError(f"wave has shape {list(wave.shape)}; it must be [N], [C, N] or [B, C, N], not empty")
        if lengths is None:
            return
        if wave.ndim == 1 or lengths.shape != wave.shape[:1] or lengths.is_floating_point():
            raise InputError(
                f"lengths has dtype {lengths.dtype} and shape {list(lengths.shape)} for a wave of shape "
                f"{list(wave.shape)}; it must be integer, one per row of a [B, C, N] or [C, N] wave"
            )
        if torch.compiler.is_compiling():
            return  # A graph has no place for an error that depends on values.
        low, high = int(lengths.min()), int(lengths.max())
        if low < 1 or high > wave.shape[-1]:
            raise InputError(f"lengths are {low} … {high}; they must be 1 … {wave.shape[-1]}, the wave's samples")

    def _rows(self, wave: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """One row per channel, in the computing type, pre-emphasised, zero beyond each row's length."""
        rows = wave.reshape(-1, wave.shape[-1])
        if rows.dtype != self.window.dtype:
            rows = rows.to(self.window.dtype)
        if self.settings.preemphasis:
            rows = torch.cat([rows[:, :1], rows[:, 1:] - self.settings.preemphasis * rows[:, :-1]], 1)
        if lengths is None:
            return rows, None
        lengths = lengths.to(wave.device, torch.int64)
        if wave.ndim == 3:
            lengths = lengths.repeat_interleave(wave.shape[1])
        beyond = torch.arange(wave.shape[-1], device=wave.device) >= lengths[:, None]
        return rows.masked_fill(beyond, 0), lengths

    def _features(self, rows: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`[R, N]` → features `[R, K, F]` and each row's frames."""
        num_frames = self.num_frames(rows.shape[1])
        row_frames = None if lengths is None else self._num_frames_of(lengths)
        with _full_precision(rows.device.type):
            if self._is_fast(rows):
                return self._fast(rows.detach().numpy(), lengths, row_frames, None), row_frames
            if rows.device.type == "cpu" and not torch.compiler.is_compiling() and not bool(rows.isfinite().all()):
                raise not_finite(rows)
            return self._finish(self._linear(rows, lengths, num_frames), row_frames), row_frames

    def _of_padded(self, padded: Tensor, num_frames: int, leading: Sequence[int]) -> Tensor:
        """Framewise features of rows that hold exactly what F frames see; for streams."""
        if num_frames == 0:
            return shaped(padded.new_zeros(len(padded), self.num_bins, 0), leading)
        with _full_precision(padded.device.type):
            frames = padded.unfold(1, self.settings.win_length, self.settings.hop_length)
            return shaped(self._finish(self._project(frames), None), leading)

    def _is_fast(self, rows: Tensor) -> bool:
        return (
            self._kernel is not None
            and not torch.compiler.is_compiling()
            and rows.is_cpu
            and not (rows.requires_grad and torch.is_grad_enabled())
            and type(rows) in (Tensor, nn.Parameter)
            and not rows.is_neg()
        )

    def _samples(self, wave: Tensor) -> NDArray[np.float32]:
        """A wave's memory, where it is float32: one row per channel."""
        if wave.dtype is not torch.float32:
            self._check(wave, None)
            wave = wave.float()
        samples: NDArray[np.float32] = (wave.detach() if wave.requires_grad else wave).numpy()
        if samples.ndim == 1:
            return samples[None]
        return samples if samples.ndim == 2 else samples.reshape(-1, samples.shape[-1])

    def _fast(
        self,
        rows: NDArray[np.float32],
        lengths: Tensor | None,
        row_frames: Tensor | None,
        leading: Sequence[int] | None,
    ) -> Tensor:
        """`[R, N]` → `[R, K, F]`, or in the shape of a wave's features if its leading shape is given."""
        num_frames = self.settings.num_frames(rows.shape[1])
        if num_frames == 0:
            features = self._finish(torch.zeros(len(rows), self._num_linear, 0), row_frames)
            return features if leading is None else shaped(features, leading)
        assert self._kernel is not None
        try:
            values = self._kernel(rows, None if lengths is None else lengths.tolist(), num_frames)
        except NotFiniteError:
            raise not_finite(torch.from_numpy(rows)) from None
        return self._finish_fast(values, row_frames, leading)

    def _part(
        self, rows: NDArray[np.float32], offset: int, start: int, num_frames: int, leading: Sequence[int]
    ) -> Tensor:
        """Framewise features of samples that begin at `offset`, from sample `start` on; for streams."""
        if num_frames == 0:
            return shaped(torch.zeros(len(rows), self.num_bins, 0), leading)
        assert self._kernel is not None
        try:
            values = self._kernel.part(rows, offset, start, num_frames)
        except NotFiniteError:
            raise not_finite(torch.from_numpy(rows)) from None
        return self._finish_fast(values, None, leading)

    def _finish_fast(
        self, values: NDArray[np.float32], row_frames: Tensor | None, leading: Sequence[int] | None
    ) -> Tensor:
        if self.uses_log and self.settings.log is not None:
            assert self._kernel is not None
            self._kernel.logarithm(values, None if row_frames is None else row_frames.tolist())
        if row_frames is None and leading is not None and self._is_plain:
            # A view costs NumPy a fifth of what it costs torch.
            return torch.from_numpy(shaped(values, leading))
        features = self._finish(torch.from_numpy(values), row_frames, scaled=True)
        return features if leading is None else shaped(features, leading)

    def _num_frames_of(self, lengths: Tensor) -> Tensor:
        s = self.settings
        if s.whole_hops:
            return lengths // s.hop_length
        if s.framing == "hop":
            return (lengths + s.hop_length - 1) // s.hop_length
        seen = s.win_length if s.framing == "snip" else s.n_fft
        return (1 + (lengths + (2 * s.left_padding - seen)).div(s.hop_length, rounding_mode="floor")).clamp_min(0)

    def _linear(self, rows: Tensor, lengths: Tensor | None, num_frames: int) -> Tensor:
        """`[R, N]` → `[R, K, F]` before the logarithm, on any device and under autograd."""
        s = self.settings
        if isinstance(num_frames, int) and num_frames == 0:
            return rows.new_zeros(len(rows), self._num_linear, 0)
        frames = self._pad(rows, lengths, num_frames).unfold(1, s.win_length, s.hop_length)
        block = _CPU_BLOCK if rows.device.type == "cpu" else _DEVICE_BLOCK
        if torch.compiler.is_compiling() or len(rows) * num_frames <= block:
            return self._project(frames)
        # A block is a part of one row, or several whole short rows.
        some_rows = torch.split(frames, max(1, block // num_frames))
        return torch.cat(
            [torch.cat([self._project(part) for part in torch.split(rows, block, 1)], 2) for rows in some_rows]
        )

    def _project(self, frames: Tensor) -> Tensor:
        """`[r, f, win_length]` → `[r, K, f]`."""
        return self._power(frames).mT

    def _power(self, frames: Tensor, window: Tensor | None = None, n_fft: int | None = None) -> Tensor:
        """`[r, f, width]` → `|X| ** power` `[r, f, n_fft // 2 + 1]`."""
        s = self.settings
        if s.remove_dc:
            frames = frames - frames.mean(-1, keepdim=True)
        if s.frame_preemphasis:
            frames = frames - s.frame_preemphasis * torch.cat([frames[..., :1], frames[..., :-1]], -1)
        spectrum = torch.fft.rfft(frames * (self.window if window is None else window), n=n_fft or s.n_fft)
        # Several times faster than `spectrum.abs()` on a CPU.
        value: Tensor = spectrum.real.square().add_(spectrum.imag.square())
        if s.magnitude_eps:
            value = value.add_(s.magnitude_eps)
        if s.power != 2:
            if value.requires_grad:
                # The root's slope at zero is infinite.
                value = value.clamp_min(1e-30)
            value = value.sqrt_() if s.power == 1 else value.pow_(s.power / 2)
        return value

    def _pad(self, rows: Tensor, lengths: Tensor | None, num_frames: int) -> Tensor:
        """Each row's samples from where frame 0's window starts, `[R, (F - 1) * hop_length + win_length]`."""
        s = self.settings
        start, n, device = s.window_start, rows.shape[1], rows.device
        width = (num_frames - 1) * s.hop_length + s.win_length
        left, skip = max(0, -start), max(0, start)
        right = start + width - n
        if not s.mirrors:
            if start <= 0:
                return F.pad(rows, [left, right])
            return F.pad(rows, [0, at_least(right, 0)]).narrow(1, skip, width)
        if lengths is None and torch.compiler.is_compiling():
            # The branch below would tie the graph to this number of samples.
            lengths = torch.full((rows.shape[0],), n, device=device)
        before = torch.arange(-left, 0, device=device)
        if lengths is None:
            after = torch.arange(at_least(right, 0), device=device)
            tail = rows[:, mirror(after + n, n)]
            if s.pad_mode == "reflect_zero":
                tail = tail * (after < s.left_padding)
            padded = torch.cat([rows[:, mirror(before, n)], rows, tail], dim=1)
        else:
            # A row's last frame reaches at most this far beyond its end.
            reach = s.win_length + start
            after = torch.arange(reach, device=device)
            ends = after + lengths[:, None]
            head = rows.gather(1, mirror(before.expand(rows.shape[0], -1), lengths[:, None]))
            tail = rows.gather(1, mirror(ends, lengths[:, None]))
            if s.pad_mode == "reflect_zero":
                tail = tail * (after < s.left_padding)
            # One sample too many: a graph is tied to this length where the cut below is none.
            spare = at_least(right, reach) + 1
            padded = torch.cat([head, F.pad(rows, [0, spare])], dim=1).scatter(1, ends + left, tail)
        return padded.narrow(1, skip, width)

    def _finish(self, values: Tensor, row_frames: Tensor | None, *, scaled: bool = False) -> Tensor:
        """Linear, or scaled, values → the features, with `padding_value` beyond each row's frames."""
        beyond = beyond_end(values, row_frames)
        return values if beyond is None else values.masked_fill(beyond, self.padding_value)


class MelSpectrogram(Spectrogram):
    """Mel spectrogram of waves, single or in padded batches. Everything that holds for `Spectrogram` holds here.

    Args:
        settings: The settings, or the name of a preset in `PRESETS`.

    Attributes:
        padding_value: What frames beyond a row's length hold: silence (0, or the floor on the log scale), or 0 after
            normalisation.

    Warns:
        UserWarning: Some filters fall between two Fourier bins and are all zero.

    >>> mel = MelSpectrogram("codec")(torch.zeros(2, 1, 16000))
    >>> mel.shape
    torch.Size([2, 80, 100])
    """

    filters: Tensor
    uses_log = True

    def transformed(
        self,
        wave: Tensor,
        lengths: Tensor | None = None,
        *,
        pitch: PerRow | None = None,
        speed: PerRow | None = None,
        sample_rate: PerRow | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The features of a wave whose pitch, tempo or sample rate were changed, without making that wave.

        Each is one number, or one per row. A tempo change takes windows `speed` times as far apart, rounded to whole
        samples; a pitch change puts the filters on frequencies multiplied by `pitch` (an octave up: 2), formants
        included, as a tape played faster, and leaves the timing; a wave at another rate is transformed with
        windows of the same duration. Tones keep their level, and so does noise with `power=2`; with `power=1` noise
        comes out `sqrt(pitch)` too low. What lies above the wave's Nyquist frequency is silence.

        Args:
            wave: As for `forward`.
            lengths: As for `forward`, in samples of the wave as it is.
            pitch: Ratio to the wave's pitch.
            speed: Ratio to the wave's tempo.
            sample_rate: Hz of the wave; the settings' by default.

        Returns:
            The features of the changed wave, `ceil(n / speed * settings.sample_rate / sample_rate)` samples long, and
            their lengths (int64 `[B]`, `[C]`, or `[1]` for a 1-D wave).

        Raises:
            InputError: What `forward` refuses, numbers that aren't above 0, or another rate with pre-emphasis, which
                is defined from sample to sample.
        """
        self._check(wave, lengths)
        s, num_items = self.settings, 1 if wave.ndim == 1 else len(wave)
        rates = row_values("sample_rate", sample_rate, s.sample_rate, num_items)
        if (s.preemphasis or s.frame_preemphasis) and any(rate != s.sample_rate for rate in rates):
            raise InputError(
                f"sample_rate {rates} with pre-emphasis at {s.sample_rate} Hz, which is defined from sample to sample; "
                "resample the wave"
            )
        rows, row_lengths = self._rows(wave, lengths)
        if rows.device.type == "cpu" and not bool(rows.isfinite().all()):
            raise not_finite(rows)
        channels = len(rows) // num_items
        speeds = row_values("speed", speed, 1, num_items)
        numbers = [rates, speeds, row_values("pitch", pitch, 1, num_items)]
        rates, speeds, pitches = ([value for value in values for _ in range(channels)] for values in numbers)
        valid = [rows.shape[1]] * len(rows) if row_lengths is None else row_lengths.tolist()
        frames = [
            s.num_frames(transformed_length(n, speed * rate / s.sample_rate))
            for n, speed, rate in zip(valid, speeds, rates, strict=True)
        ]
        with _full_precision(rows.device.type):
            values = transformed_mel(self, rows, valid, frames, rates, speeds, pitches)
            features = self._finish(values, torch.tensor(frames, device=rows.device))
        features = features.reshape(*wave.shape[:-1], *features.shape[1:])
        if wave.ndim == 3 and channels == 1:
            features = features.squeeze(1)
        return features, torch.tensor(frames[::channels], device=rows.device)

    def _add_matrices(self) -> None:
        self._exact["filters"] = mel_filters(self.settings)

    def _silence(self) -> float:
        if self.settings.normalize is not None:
            return 0.0
        return float(self._log(torch.zeros(1, 1, 1, dtype=torch.float64), None))

    @property
    def num_bins(self) -> int:
        """Rows of the output: M."""
        return self.settings.n_mels

    def _project(self, frames: Tensor) -> Tensor:
        return torch.matmul(self.filters, self._power(frames).mT)

    def _finish(self, values: Tensor, row_frames: Tensor | None, *, scaled: bool = False) -> Tensor:
        beyond = beyond_end(values, row_frames)
        mel = values if scaled else self._log(values, beyond)
        if self.settings.normalize is not None:
            mel = normalized(mel, beyond)
        return mel if beyond is None else mel.masked_fill(beyond, self.padding_value)

    def _log(self, mel: Tensor, beyond: Tensor | None) -> Tensor:
        s = self.settings
        if s.log is None:
            return mel
        mel = mel + s.floor if s.add_floor else mel.clamp_min(s.floor)
        mel = mel.log() if s.log == "natural" else mel.log10()
        if s.log == "db":
            mel = mel * (20 / s.power)
        if s.log_range is not None and mel.shape[2]:
            valid = mel if beyond is None else mel.masked_fill(beyond, -math.inf)
            mel = torch.maximum(mel, valid.amax(dim=(1, 2), keepdim=True) - s.log_range)
        if s.log_offset or s.log_scale != 1:
            mel = (mel + s.log_offset) * s.log_scale
        return mel


class Fbank(MelSpectrogram):
    """Log filterbank energies as Kaldi's compute-fbank-feats gives them without dither: 25 ms windows every 10 ms.

    `[M, F]`, where Kaldi's matrices are `[F, M]`. Kaldi reads 16-bit integers: multiply a wave of −1 … 1 by 32768 for
    its very numbers. Any other settings: `MelSpectrogram(replace(PRESETS["kaldi"], …))`.

    Args:
        n_mels: Bins. (Kaldi's own default is 23.)
        sample_rate: Hz.

    >>> Fbank(40, sample_rate=8000)(torch.zeros(8000)).shape
    torch.Size([40, 98])
    """

    def __init__(self, n_mels: int = 80, *, sample_rate: int = 16000) -> None:
        win = sample_rate * 25 // 1000
        super().__init__(
            replace(
                resolve("kaldi"),
                sample_rate=sample_rate,
                win_length=win,
                n_fft=1 << (win - 1).bit_length(),
                hop_length=sample_rate // 100,
                n_mels=n_mels,
                f_max=sample_rate / 2,
            )
        )


class MFCC(MelSpectrogram):
    """Mel-frequency cepstral coefficients: the cosine transform (orthonormal DCT-II) of a log-mel.

    With the defaults those of Kaldi's compute-mfcc-feats for `use_energy=false`, except that Kaldi's default is 23
    mel bins: `MFCC(replace(PRESETS["kaldi"], n_mels=23))`. librosa's: `MFCC(replace(PRESETS["librosa"], log="db",
    floor=1e-10, log_range=80), n_mfcc=20, lifter=0)`. Frames beyond a row's length hold 0.

    Args:
        settings: Of the log-mel, or a preset's name.
        n_mfcc: Coefficients, at most `n_mels`.
        lifter: L of the factor `1 + L / 2 * sin(pi * i / L)` on coefficient i (HTK, Kaldi); 0 for none.

    Raises:
        InputError: Unknown preset, settings without a logarithm, `n_mfcc` outside 1 … n_mels, a negative lifter.

    >>> MFCC()(torch.zeros(16000)).shape
    torch.Size([13, 98])
    """

    transform: Tensor

    def __init__(self, settings: MelSettings | str = "kaldi", *, n_mfcc: int = 13, lifter: float = 22) -> None:
        settings = resolve(settings)
        if settings.log is None:
            raise InputError("MFCC needs log-mel values and the settings have log None; set log, such as 'natural'")
        if not 1 <= n_mfcc <= settings.n_mels:
            raise InputError(f"n_mfcc is {n_mfcc}; it must be 1 … {settings.n_mels}, the settings' n_mels")
        if lifter < 0:
            raise InputError(f"lifter is {lifter:g}; it must be at least 0 (0: none; Kaldi has 22)")
        self._n_mfcc, self._lifter = n_mfcc, lifter
        super().__init__(settings)

    def _add_matrices(self) -> None:
        super()._add_matrices()
        transform = cosine_transform(self._n_mfcc, self.settings.n_mels)
        if self._lifter:
            i = np.arange(self._n_mfcc)[:, None]
            transform = transform * (1 + self._lifter / 2 * np.sin(np.pi * i / self._lifter))
        self._exact["transform"] = transform

    def _silence(self) -> float:
        return 0.0

    @property
    def num_bins(self) -> int:
        """Rows of the output."""
        return self._n_mfcc

    def _finish(self, values: Tensor, row_frames: Tensor | None, *, scaled: bool = False) -> Tensor:
        mel = super()._finish(values, row_frames, scaled=scaled)
        if scaled:
            # MKL's matrix product would wake its thread pool even for this.
            cepstra = torch.from_numpy(np.matmul(self.transform.numpy(), mel.numpy()))
        else:
            cepstra = torch.matmul(self.transform, mel)
        beyond = beyond_end(cepstra, row_frames)
        return cepstra if beyond is None else cepstra.masked_fill(beyond, self.padding_value)


def _full_precision(device_type: str) -> AbstractContextManager[None]:
    # Entering autocast costs as much as two small operations: only where there is one to leave.
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()
