"""Graphs of the features: torch.export, and CUDA graphs where there is a device."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch._dynamo.testing

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


@pytest.mark.parametrize("name", ["realtime", "encodec"])
def test_compiled_without_a_break_and_once_for_all_lengths(name):
    module = MelSpectrogram(name)
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=counter, fullgraph=True, dynamic=True)
    for num_samples in (3000, 4001, 9001, 16000):
        wave, lengths = noise(2, 1, num_samples), torch.tensor([num_samples, 700])
        result, frames = compiled(wave, lengths)
        expected, expected_frames = module(wave, lengths)
        assert frames.tolist() == expected_frames.tolist()
        assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert counter.frame_count == 1


def test_a_module_that_moved_is_recorded_anew():
    """The bookkeeping of recordings, with recordings that only note what they were made for."""
    module = MelSpectrogram("realtime")
    graphed, made = GraphedFeatures(module, bucket=1000, max_graphs=2), []

    def record(num_rows, num_samples):
        made.append((num_rows, num_samples))
        return SimpleNamespace(constants=tuple(module.buffers()))

    graphed._record = record
    for shape in [(1, 1000), (1, 2000), (1, 1000), (1, 3000), (1, 1000), (1, 2000)]:
        graphed._recording(*shape)
    assert made == [(1, 1000), (1, 2000), (1, 3000), (1, 2000)]
    module.to("cpu")
    graphed._recording(1, 1000)
    assert len(made) == 4
    module.double()
    graphed._recording(1, 1000)
    assert made[4:] == [(1, 1000)]
    assert len(graphed._recordings) == 1


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
    # Recorded in inference mode, used outside it and the other way round; moved and cast in between.
    module = MelSpectrogram("realtime").to(cuda)
    graphed, wave = module.graphed(), noise(2, 1, 5000).to(cuda)
    with torch.inference_mode():
        graphed(wave)
    torch.testing.assert_close(graphed(wave), module(wave), rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        torch.testing.assert_close(graphed(wave.half()), module(wave.half()), rtol=1e-4, atol=1e-4)
    module.double()
    torch.testing.assert_close(graphed(wave.double()), module(wave.double()))
    module.cpu()
    assert graphed(wave.cpu()).device.type == "cpu"
    module.to(cuda)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.testing.assert_close(graphed(wave), module(wave))
    # Whatever is recorded keeps the samples of a caller's pinned buffer apart.
    pinned = noise(2, 1, 5000).double().pin_memory()
    expected = module(pinned.to(cuda))
    result = graphed(pinned)
    pinned.zero_()
    torch.testing.assert_close(result, expected)


@pytest.mark.cuda
def test_streams_on_the_device_equal_one_call(cuda):
    wave = noise(2, 1, 9001)
    for name in ("realtime", "kaldi", "hifigan", "encodec"):
        module = MelSpectrogram(name)
        expected = module(wave)
        stream = module.to(cuda).stream()
        parts = [stream.push(chunk) for chunk in wave.to(cuda).split(528, -1)] + [stream.flush()]
        assert parts[0].device.type == "cuda"
        torch.testing.assert_close(torch.cat(parts, -1).cpu(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.cuda
def test_changes_in_the_filterbank_on_the_device(cuda):
    module, wave = MelSpectrogram("hifigan"), noise(2, 1, 9000)
    expected, lengths = module.transformed(wave, pitch=[0.9, 1.1], speed=1.2, sample_rate=[22050, 44100])
    mel, device_lengths = module.to(cuda).transformed(
        wave.to(cuda), pitch=[0.9, 1.1], speed=1.2, sample_rate=[22050, 44100]
    )
    assert device_lengths.tolist() == lengths.tolist()
    torch.testing.assert_close(mel.cpu(), expected, rtol=1e-4, atol=1e-3)


def test_onnx_with_lengths_of_any_batch(tmp_path):
    pytest.importorskip("onnxscript", reason="needs onnxscript, which torch.onnx exports with")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime to run what was exported")
    module = MelSpectrogram("codec").eval()
    example = (noise(2, 1, 16000), torch.tensor([16000, 300]))
    shapes = ({0: DYNAMIC, 2: DYNAMIC}, {0: DYNAMIC})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, example, tmp_path / "mel.onnx", dynamic_shapes=shapes, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "mel.onnx")
    for lengths in ([16000, 300], [9001, 1, 5000], [500]):
        wave = noise(len(lengths), 1, max(lengths))
        inputs = (wave.numpy(), np.array(lengths))
        result, frames = session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs, strict=True)))
        expected, expected_frames = module(wave, torch.tensor(lengths))
        assert frames.tolist() == expected_frames.tolist()
        np.testing.assert_allclose(result, expected.numpy(), atol=1e-4)
