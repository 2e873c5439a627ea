"""Features of decoded waves: each excerpt's are that slice of its item's, wherever that can be."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from codec.decode.cutting import cut
from codec.decode.transfer import Rows
from codec.errors import InputError
from codec.features import Spectrogram
from codec.spec import CodecSpec


class WaveFeatures:
    """A feature module behind the decoder.

    Attributes:
        margin: Frames of exact wave that it needs on both sides of an excerpt: what windows and mirrored ends see.
        fill: What stands beyond a row's end.

    Raises:
        InputError: The features are of another sample rate.
    """

    def __init__(self, module: Spectrogram, spec: CodecSpec, device: torch.device) -> None:
        s = module.settings
        if s.sample_rate != spec.sample_rate:
            raise InputError(
                f"the features are of {s.sample_rate} Hz, {spec.name} decodes to {spec.sample_rate} Hz; "
                f"take settings of that rate, such as dataclasses.replace(settings, sample_rate={spec.sample_rate})"
            )
        self._module = module if module.window.device == device else copy.deepcopy(module).to(device)
        self._hop = spec.hop_length
        self.fill = float(module.padding_value)
        is_slice = spec.hop_length % s.hop_length == 0 and (s.is_framewise or not module.uses_log)
        self._per_frame = spec.hop_length // s.hop_length if is_slice else 0
        reach = max(-s.window_start, s.window_start + s.win_length) + 1
        self.margin = -(-reach // spec.hop_length) if is_slice else 0

    def __call__(self, wave: Tensor, rows: Rows, skip: Tensor | int, num_frames: int) -> tuple[Tensor, Tensor]:
        """Waves `[B, C, T * hop_length]` of all that was read → features `[B, ..., F]` and lengths.

        Args:
            wave: What was decoded.
            rows: The batch's numbers.
            skip: Context frames before each excerpt.
            num_frames: Frames of the longest excerpt.
        """
        before = min(skip, self.margin) if isinstance(skip, int) else skip.clamp(max=self.margin)
        region = cut(wave, skip - before, num_frames + 2 * self.margin, self._hop)
        num_samples = self._region_samples(rows, torch.minimum)
        features, lengths = self._features(region, num_samples)
        if not self._per_frame:
            return features, lengths
        start = before * self._per_frame
        own = torch.minimum(rows.frames * self._per_frame, lengths - start).clamp(min=0)
        return cut(features, start, num_frames * self._per_frame, 1, self.fill), own

    def host_lengths(self, rows: Any) -> NDArray[np.int64]:
        """The lengths, from the batch's numbers in numpy."""
        num_samples = self._region_samples(rows, np.minimum)
        counts = {n: self._module.num_frames(n) for n in set(num_samples.tolist())}
        lengths = np.array([counts[n] for n in num_samples.tolist()], np.int64)
        if not self._per_frame:
            return lengths
        start = np.minimum(rows.skip, self.margin) * self._per_frame
        own: NDArray[np.int64] = np.minimum(rows.frames * self._per_frame, lengths - start).clip(min=0)
        return own

    def _region_samples(self, rows: Any, minimum: Any) -> Any:
        """Samples of each row's excerpt with its margins, as far as the item goes."""
        if not self.margin:
            return rows.num_samples
        before = rows.skip.clip(max=self.margin)
        left = rows.skip - before
        return minimum(rows.read_samples - left * self._hop, (before + rows.frames + self.margin) * self._hop)

    def _features(self, wave: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        module = self._module
        if wave.device.type == "cpu":
            size = int(lengths.max())
            features, own = module(wave[..., :size], lengths)
            return features, own
        # The module itself would look at the lengths, and so wait for the device.
        features, row_frames = module._features(*module._rows(wave, lengths))
        assert row_frames is not None
        channels = wave.shape[1]
        if channels > 1:
            features = features.view(len(wave), channels, *features.shape[1:])
        return features, row_frames[::channels]
