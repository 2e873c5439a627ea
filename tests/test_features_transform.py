"""The CPU's Fourier transform: NumPy's numbers from either implementation, and plans that live long enough."""

import gc
import weakref

import numpy as np
import pytest
import torch

from codec.features import MelSpectrogram, transform
from codec.features import cpu as cpu_module
from codec.features.transform import real_transform


def buffers(num_frames, n_fft, seed=0):
    frames = np.random.default_rng(seed).standard_normal((num_frames, n_fft), np.float32)
    return frames, np.empty((num_frames, n_fft // 2 + 1), np.complex64)


@pytest.fixture
def without_mkl(monkeypatch):
    monkeypatch.setattr(transform, "_mkl", lambda: None)
    monkeypatch.setattr(cpu_module, "_memory", cpu_module._Memory())


@pytest.mark.parametrize("num_frames", [1, 3, 8, 9, 100])
@pytest.mark.parametrize("n_fft", [1, 2, 3, 25, 400, 401, 512, 800, 997, 2048])
def test_equals_the_exact_transform(num_frames, n_fft):
    frames, spectrum = buffers(num_frames, n_fft)
    compute = real_transform(frames, spectrum)
    for seed in (1, 2):
        frames[:] = buffers(num_frames, n_fft, seed)[0]
        compute()
        exact = np.fft.rfft(frames.astype(np.float64))
        assert np.abs(spectrum - exact).max() <= 1e-6 * np.abs(exact).max()


def test_mkl_is_taken_where_torch_has_it():
    if transform.sys.platform != "linux" or transform.platform.machine() != "x86_64":
        pytest.skip("MKL comes with PyTorch for Linux on x86 only")
    if not torch.backends.mkl.is_available():
        pytest.skip("this build of PyTorch has no MKL")
    assert transform._mkl() is not None


@pytest.mark.usefixtures("without_mkl")
@pytest.mark.parametrize("num_samples", [1, 528, 16000, 200_000])
def test_numpys_transform_gives_the_same_features(num_samples):
    module = MelSpectrogram("realtime")
    wave = torch.randn(num_samples, generator=torch.Generator().manual_seed(0))
    exact = module.double()(wave.double())
    assert (module.float()(wave) - exact).abs().max() <= 2e-6 * exact.max()
    scratch = next(iter(cpu_module._memory._blocks.values()))
    assert scratch.transform.func is transform._numpys


@pytest.mark.parametrize("refusing", ["DftiCreateDescriptor_s_1d", "DftiSetValue", "DftiCommitDescriptor"])
def test_a_refused_plan_falls_back(monkeypatch, refusing):
    class Library:
        def __getattr__(self, name):
            return lambda *arguments: int(name == refusing)

    monkeypatch.setattr(transform, "_mkl", lambda: (Library(), Library()))
    frames, spectrum = buffers(3, 16)
    real_transform(frames, spectrum)()
    np.testing.assert_allclose(spectrum, np.fft.rfft(frames), rtol=1e-5, atol=1e-5)


def test_a_plan_keeps_its_memory_and_is_freed_with_it():
    frames, spectrum = buffers(3, 800)
    alive = weakref.ref(frames)
    compute = real_transform(frames, spectrum)
    expected = np.fft.rfft(frames)
    del frames
    gc.collect()
    assert alive() is not None
    compute()
    np.testing.assert_allclose(spectrum, expected, rtol=1e-4, atol=1e-4)
    del compute
    gc.collect()
    assert alive() is None


def test_a_transform_that_fails_is_an_error(monkeypatch):
    monkeypatch.setattr(cpu_module, "real_transform", lambda frames, spectrum: lambda: 1)
    monkeypatch.setattr(cpu_module, "_memory", cpu_module._Memory())
    with pytest.raises(MemoryError, match=r"Fourier transform of \(1, 3, 800\) \(MKL's status 1\)"):
        MelSpectrogram("realtime")(torch.zeros(528))
