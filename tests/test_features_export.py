"""Graphs of the features: torch.export, and CUDA graphs where there is a device."""

import math

import pytest
import torch

from codec.errors import InputError
from codec.features import MFCC, PRESETS, MelSpectrogram
from codec.features.graphs import GraphedFeatures, padded_features

pytestmark = pytest.mark.filterwarnings("ignore:mel bins")
DYNAMIC = torch.export.Dim.DYNAMIC


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.mark.parametrize("name", ["codec", "torchaudio", "kaldi", "whisper", "encodec", "nemo"])
def test_export_with_any_length(name):
    module = MelSpectrogram(name)
    exported = torch.export.export(module, (noise(2, 1, 16000),), dynamic_shapes=({0: DYNAMIC, 2: DYNAMIC},)).module()
    for num_samples in (16000, 9001):
        wave = noise(3, 1, num_samples)
        expected = module(wave)
        assert (exported(wave) - expected).abs().max() <= max(2e-3, 2e-6 * float(expected.max()))


def test_export_with_lengths():
    module = MFCC()
    example = (noise(2, 1, 16000), torch.tensor([16000, 300]))
    exported = torch.export.export(module, example, dynamic_shapes=({0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC})).module()
    wave, lengths = noise(3, 1, 9001), torch.tensor([9001, 1, 5000])
    expected, frames = module(wave, lengths)
    result, result_frames = exported(wave, lengths)
    assert result_frames.tolist() == frames.tolist()
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=5e-3)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_bucket_gives_what_the_wave_alone_gives(name):
    """What a recorded graph computes, run without one: a longer buffer with stale samples behind the wave."""
    module = MelSpectrogram(name).double()
    wave = noise(2, 3000).double()
    buffer = torch.full((2, 4096), math.nan, dtype=torch.float64)
    buffer[:, :3000] = wave
    features = padded_features(module, buffer, torch.tensor([3000, 3000]))
    expected = module(wave)
    torch.testing.assert_close(features[:, :, : expected.shape[2]], expected, rtol=1e-9, atol=1e-9)


def test_without_a_gpu_the_module_is_called():
    module, wave = MelSpectrogram("realtime"), noise(2, 1, 3000)
    assert torch.equal(module.graphed()(wave), module(wave))
    with pytest.raises(InputError, match="bucket is 0; it must be at least 1"):
        module.graphed(bucket=0)


@pytest.mark.cuda
def test_graphs_give_the_modules_numbers(cuda):
    for name in PRESETS:
        module = MelSpectrogram(name).to(cuda)
        graphed = GraphedFeatures(module, bucket=2048, max_graphs=2)
        kept = []
        for num_samples in (1, 700, 4096, 4097, 9000, 700):
            wave = noise(2, 1, num_samples, seed=num_samples).to(cuda)
            kept.append((graphed(wave), module(wave)))
        for result, expected in kept:
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)
        assert len(graphed._recordings) == 2
    wave = noise(700).to(cuda).requires_grad_()
    MelSpectrogram("codec").to(cuda).graphed()(wave).sum().backward()
    assert wave.grad.isfinite().all()
