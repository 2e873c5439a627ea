"""Features on a GPU without launch overhead: recorded once per shape, then replayed."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from codec.errors import InputError

if TYPE_CHECKING:
    from codec.features.mel import Spectrogram


@dataclass
class _Recording:
    graph: torch.cuda.CUDAGraph
    wave: Tensor
    lengths: Tensor
    features: Tensor
    constants: tuple[Tensor, ...]
    """The module's buffers, whose memory the graph reads."""


class GraphedFeatures:
    """Replays CUDA graphs of a feature module, one per shape of rows and bucket of lengths.

    A wave is copied into a buffer of the next multiple of `bucket` samples and computed as the ragged batch that it
    then is, so the result is that of the module. Only the wave crosses to the device, and lengths that vary inside a
    bucket record nothing new. Elsewhere than on a CUDA device, and under autograd, the module itself is called.
    For one thread and one CUDA stream at a time; and a graph reads the tables of cuFFT's plans, so don't clear
    `torch.backends.cuda.cufft_plan_cache` meanwhile.

    Args:
        module: Computes the features. Moved or cast later, it is recorded anew.
        bucket: Samples that lengths are rounded up to a multiple of.
        max_graphs: Recordings kept; the one not used for longest goes first.

    Raises:
        InputError: `bucket` or `max_graphs` below 1.

    >>> from codec.features import MelSpectrogram
    >>> MelSpectrogram("realtime").graphed()(torch.zeros(16000)).shape
    torch.Size([80, 81])
    """

    def __init__(self, module: Spectrogram, *, bucket: int = 4096, max_graphs: int = 16) -> None:
        for name, value in (("bucket", bucket), ("max_graphs", max_graphs)):
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        self._module = module
        self._bucket = bucket
        self._max_graphs = max_graphs
        self._recordings: OrderedDict[tuple[int, int], _Recording] = OrderedDict()

    def __call__(self, wave: Tensor) -> Tensor:
        """Features of a wave `[N]`, `[C, N]` or `[B, C, N]`, as the module's, in memory of their own.

        Raises:
            InputError: What the module refuses.
        """
        module = self._module
        if module.window.device.type != "cuda" or (wave.requires_grad and torch.is_grad_enabled()):
            features = module(wave)
            assert isinstance(features, Tensor)
            return features
        module._check(wave, None)
        rows = wave.reshape(-1, wave.shape[-1])
        # A capture takes the current device's stream, and a replay its own.
        with torch.cuda.device(module.window.device):
            recording = self._recording(rows.shape[0], -(-rows.shape[1] // self._bucket) * self._bucket)
            # Not `non_blocking`: a caller may refill a pinned buffer as soon as this returns.
            recording.wave[:, : rows.shape[1]].copy_(rows)
            recording.lengths.fill_(rows.shape[1])
            recording.graph.replay()
            features = recording.features[:, :, : module.num_frames(rows.shape[1])].clone()
        features = features.reshape(*wave.shape[:-1], *features.shape[1:])
        return features.squeeze(1) if wave.ndim == 3 and wave.shape[1] == 1 else features

    def _recording(self, num_rows: int, num_samples: int) -> _Recording:
        key = (num_rows, num_samples)
        found = self._recordings.get(key)
        if found is not None and found.constants[0] is not self._module.window:
            self._recordings.clear()
            found = None
        if found is None:
            found = self._record(num_rows, num_samples)
            if len(self._recordings) >= self._max_graphs:
                self._recordings.popitem(last=False)
            self._recordings[key] = found
        self._recordings.move_to_end(key)
        return found

    # Tensors made in inference mode couldn't be written to outside it.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _record(self, num_rows: int, num_samples: int) -> _Recording:
        module = self._module
        wave = torch.zeros(num_rows, num_samples, dtype=module.window.dtype, device=module.window.device)
        lengths = torch.full((num_rows,), num_samples, device=wave.device)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            # The first runs plan transforms and allocate, which a recording can't.
            for _ in range(3):
                padded_features(module, wave, lengths)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # On the stream that is warm; and other threads, such as one that pins memory, may go on meanwhile.
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
            features = padded_features(module, wave, lengths)
        return _Recording(graph, wave, lengths, features, tuple(module.buffers()))


def padded_features(module: Spectrogram, wave: Tensor, lengths: Tensor) -> Tensor:
    """`[R, N]` with stale samples beyond the lengths → `[R, K, F]`, without a look at the values."""
    features, _ = module._features(*module._rows(wave, lengths))
    return features
