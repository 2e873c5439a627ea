"""The fast path on the CPU: the same numbers, and no thread pool for small inputs."""

import copy
import math
import os
import pickle
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from codec.errors import InputError
from codec.features import MFCC, PRESETS, MelSpectrogram, Spectrogram
from codec.features import cpu as cpu_module

pytestmark = pytest.mark.filterwarnings("ignore:mel bins")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def both(module, wave, lengths=None):
    """The result of the fast path, and of the path that autograd takes."""
    fast = module(wave, lengths)
    slow = module(wave.clone().requires_grad_(), lengths)
    return (fast, slow.detach()) if lengths is None else (fast[0], slow[0].detach())


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
@pytest.mark.parametrize("magnitude_eps", [0, 1e-3])
def test_every_power_equals_the_other_path(power, magnitude_eps):
    s = replace(PRESETS["realtime"], power=power, magnitude_eps=magnitude_eps)
    for module in (MelSpectrogram(s), Spectrogram(s)):
        fast, slow = both(module, noise(2, 3000))
        assert (fast - slow).abs().max() <= 2e-6 * slow.max()


@pytest.mark.parametrize("log", ["natural", "log10", "db"])
@pytest.mark.parametrize("add_floor", [False, True])
@pytest.mark.parametrize("log_range", [None, 2.0])
def test_every_scale_equals_the_other_path(log, add_floor, log_range):
    module = MelSpectrogram(
        replace(PRESETS["codec"], log=log, add_floor=add_floor, log_range=log_range, log_offset=1, log_scale=0.5)
    )
    for lengths in (None, torch.tensor([3000, 1, 159])):
        fast, slow = both(module, noise(3, 3000), lengths)
        assert (fast - slow).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["codec", "kaldi", "encodec", "hifigan"])
@pytest.mark.parametrize("shape", [(3, 1, 50001), (200, 700), (5, 2, 30000)])
def test_blocks_equal_the_other_path(name, shape):
    wave = noise(*shape)
    lengths = torch.arange(1, len(wave) + 1) * (shape[-1] // len(wave))
    for module in (MelSpectrogram(replace(PRESETS[name], log=None, add_floor=False)), Spectrogram(name)):
        fast, slow = both(module, wave)
        assert (fast - slow).abs().max() <= 2e-6 * slow.max()
        fast, slow = both(module, wave, lengths)
        assert (fast - slow).abs().max() <= 2e-6 * slow.max()


def test_only_gradients_leave_the_fast_path(monkeypatch):
    module, wave = MelSpectrogram("codec"), noise(1600)
    parameter = torch.nn.Parameter(wave)
    monkeypatch.setattr(module, "_linear", None)
    expected = module(wave)
    with torch.no_grad():
        assert torch.equal(module(parameter), expected)
    with torch.inference_mode():
        assert torch.equal(module(wave), expected)
    with pytest.raises(TypeError):
        module(parameter)
    with pytest.raises(TypeError):
        module.double()(wave)


def test_copies_and_pickles():
    module, wave = MFCC(), noise(1600)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(copied(wave), module(wave))


def test_threads_do_not_share_scratch_memory():
    module = MelSpectrogram("realtime")
    waves = [noise(20000, seed=i) for i in range(4)]
    expected = [module(wave) for wave in waves]
    wrong = []

    def work(i):
        for _ in range(30):
            if not torch.equal(module(waves[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("shape", [(1, 200_000), (40, 1, 9000), (3000, 700)])
def test_several_threads_give_the_same(shape):
    module, wave = MelSpectrogram("realtime"), noise(*shape)
    expected = module(wave)
    lengths = torch.full((len(wave),), shape[-1])
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for result in (module(wave), module(wave, lengths)[0]):
            assert (result - expected).abs().max() <= 1e-6 * expected.max()
        wave[-1, ..., -1] = math.nan
        with pytest.raises(InputError, match="NaN or infinity"):
            module(wave)
    finally:
        torch.set_num_threads(num_threads)


def test_results_outlive_the_next_call():
    module = MelSpectrogram("realtime")
    first = module(noise(528))
    kept = first.clone()
    module(noise(528, seed=1))
    assert torch.equal(first, kept)


def test_scratch_memory_is_bounded():
    module = MelSpectrogram("realtime")
    for frames in range(1, 100):
        module(noise(frames * 200))
    blocks = cpu_module._memory._blocks.values()
    assert len(blocks) <= 16
    assert max(block.value.shape[0] for block in blocks) <= 128


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts switches in /proc")
def test_small_inputs_wake_no_thread():
    """Not even one of a pool that is there already: no other thread of the process is scheduled."""
    code = """
import os, time, numpy, torch
torch.set_num_threads(2)
from codec.features import MFCC, MelSpectrogram, Spectrogram

def wakes():
    # Those of other threads; a thread that leaves a core without being told to leaves it to wait for work.
    found = {}
    for thread in os.listdir("/proc/self/task"):
        if int(thread) != os.getpid():
            status = open(f"/proc/self/task/{thread}/status").read()
            found[thread] = status.split("voluntary_ctxt_switches:")[1].split()[0]
    return found

def warm():
    torch.randn(300, 300) @ torch.randn(300, 300)
    torch.fft.rfft(torch.randn(64, 800))
    numpy.ones((300, 300), "f4") @ numpy.ones((300, 300), "f4")
    time.sleep(1)

warm()
before = wakes()
assert len(before) >= 2, before
wave = torch.randn(1, 1, 8000)
for name in ("realtime", "codec", "kaldi", "hifigan", "encodec"):
    mel = MelSpectrogram(name)
    if mel.settings.log:
        MFCC(name)(wave)
    for module in (mel, Spectrogram(name)):
        for n in (1, 528, 800, 1600, 8000):
            module(wave[..., :n], torch.tensor([n]))
            module(wave[0, 0, :n])
    stream = mel.stream()
    for chunk in wave.split(528, -1):
        stream.push(chunk)
    stream.flush()
after = wakes()
assert after == before, (before, after)
warm()
assert wakes() != before, "the count would not notice a pool"
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
def test_a_forked_process_gives_the_same():
    module, wave = MelSpectrogram("realtime"), noise(1, 20000)
    expected = module(wave)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(module(wave), expected) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_settings_of_one_shape_share_memory_and_nothing_else():
    """Zeros that one call leaves as padding aren't there for the next, whose edges lie elsewhere or mirror."""
    modules = [MelSpectrogram(replace(PRESETS["realtime"], pad_mode=mode)) for mode in ("constant", "reflect")]
    waves = [noise(n, seed=n) + 1 for n in (399, 401, 599, 590, 410)]
    for module in modules:
        for wave in waves:
            exact = module.double()(wave.double())
            fast = module.float()(wave)
            assert (fast - exact).abs().max() <= 2e-6 * exact.max()
    for wave in waves * 2:
        for module in modules:
            fast, slow = both(module, wave)
            assert (fast - slow).abs().max() <= 2e-6 * slow.max()


def test_a_callers_numpy_error_state_is_left_alone():
    module, wave = MelSpectrogram("codec"), torch.full((1600,), 1e-30)
    expected = module(wave)
    with np.errstate(all="raise"):
        assert torch.equal(module(wave), expected)
        with pytest.raises(InputError, match="overflows float32"):
            module(torch.full((1600,), 1e38))


def test_lazily_negated_and_strided_waves():
    module, wave = MelSpectrogram("realtime"), noise(2, 3000)
    negated = torch.complex(wave, wave).conj().imag
    assert negated.is_neg()
    torch.testing.assert_close(module(negated), module(-wave), rtol=1e-5, atol=1e-5)
    strided = torch.stack([wave, wave], -1)[..., 0]
    assert torch.equal(module(strided), module(wave))
    assert torch.equal(module(wave.expand(3, 2, 3000)), module(wave).expand(3, 2, 80, 16))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nan_and_infinity_are_located(requires_grad):
    for bad in (math.nan, math.inf, -math.inf):
        wave = noise(2, 1, 3000)
        wave[1, 0, 1234] = bad
        with pytest.raises(InputError, match="NaN or infinity, first at sample 1234 of row 1; repair it"):
            MelSpectrogram("codec")(wave.requires_grad_(requires_grad))
    with pytest.raises(InputError, match=r"peak of 1e\+30 overflows float32; scale it to −1 … 1, or use .double"):
        MelSpectrogram("librosa")(torch.full((3000,), 1e30))


def test_integer_samples_scaled_to_16_bit_are_fine():
    wave = (noise(4000) * 32768).round()
    reference = MelSpectrogram("kaldi").double()(wave.double())
    np.testing.assert_allclose(MelSpectrogram("kaldi")(wave).numpy(), reference.numpy(), atol=2e-4)
