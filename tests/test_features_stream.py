import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.errors import InputError
from codec.features import MFCC, PRESETS, FeatureStream, MelSettings, MelSpectrogram, Spectrogram

pytestmark = pytest.mark.filterwarnings("ignore:mel bins")
SMALL = MelSettings(
    sample_rate=8000, n_fft=128, win_length=100, hop_length=40, n_mels=10, f_min=0, f_max=4000, preemphasis=0.9
)


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def num_bytes(held):
    """Memory behind a tensor or an array."""
    if isinstance(held, torch.Tensor):
        return held.untyped_storage().nbytes()
    return (held if held.base is None else held.base).nbytes


def streamed(module, wave, chunks):
    """The stream's output for `wave` cut into chunks of the given sizes, the rest in one."""
    stream, parts, start = module.stream(), [], 0
    for size in [*chunks, wave.shape[-1]]:
        parts.append(stream.push(wave[..., start : start + size]))
        start += size
    parts.append(stream.flush())
    return torch.cat(parts, -1)


@pytest.mark.parametrize("pad_mode", ["constant", "reflect", "reflect_zero"])
@pytest.mark.parametrize("framing", ["center", "hop", "valid", "snip"])
@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 700),
    chunks=st.lists(st.integers(0, 150), max_size=8),
    hop=st.sampled_from([1, 40, 100, 110, 128]),
    whole_hops=st.booleans(),
)
def test_any_chunks_equal_one_call(framing, pad_mode, num_samples, chunks, hop, whole_hops):
    s = replace(
        SMALL,
        framing=framing,
        pad_mode=pad_mode,
        hop_length=hop,
        whole_hops=whole_hops and framing in ("center", "hop"),
    )
    module, wave = MelSpectrogram(s), noise(2, num_samples, seed=num_samples)
    expected = module(wave)
    result = streamed(module, wave, chunks)
    assert result.shape == expected.shape
    assert (result - expected).abs().max() < 1e-4 if expected.numel() else True
    exact = module.double()
    torch.testing.assert_close(streamed(exact, wave.double(), chunks), exact(wave.double()), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_framewise_preset_streams(name):
    s = replace(PRESETS[name], log_range=None, normalize=None)
    wave = noise(9001)
    for module in (MelSpectrogram(s), Spectrogram(s)):
        expected = module(wave)
        result = streamed(module, wave, [528] * 12)
        assert (result - expected).abs().max() <= 1e-4 * expected.abs().max()
    if s.log is not None:
        torch.testing.assert_close(streamed(MFCC(s), wave, [1, 999]), MFCC(s)(wave), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", [(700,), (2, 700), (3, 1, 700), (3, 2, 700)])
def test_shapes_are_those_of_one_call(shape):
    module, wave = MelSpectrogram(SMALL), noise(*shape)
    torch.testing.assert_close(streamed(module, wave, [200]), module(wave), rtol=1e-4, atol=1e-4)
    stream = module.stream()
    assert stream.push(wave[..., :1]).shape == (*module(wave).shape[:-1], 0)


def test_a_frame_comes_as_soon_as_its_window_is_there():
    stream = MelSpectrogram(replace(SMALL, framing="valid", n_fft=100)).stream()
    assert stream.latency == 100
    counts = [stream.push(noise(1)).shape[1] for _ in range(180)]
    assert [i + 1 for i, count in enumerate(counts) if count] == [100, 140, 180]


def test_reflected_start_comes_with_its_first_whole_window():
    stream = MelSpectrogram(replace(SMALL, framing="center", pad_mode="reflect")).stream()
    counts = [stream.push(noise(1)).shape[1] for _ in range(91)]
    # Windows reach from 50 samples before j * 40 to 50 after; frame 0 mirrors samples 1 … 50.
    assert [i + 1 for i, count in enumerate(counts) if count] == [51, 90]


@pytest.mark.parametrize("pad_mode", ["constant", "reflect"])
def test_state_is_constant(pad_mode):
    stream = MelSpectrogram(replace(SMALL, framing="center", pad_mode=pad_mode)).stream()
    sizes = []
    for _ in range(60):
        stream.push(noise(1, 1, 170))
        held = stream._held
        assert num_bytes(held) <= 4 * (held.shape[-1] + 170 + 141)
        sizes.append(held.shape[-1])
    assert max(sizes) < 100 + 40 + 1
    assert len(set(sizes[10:30]) ^ set(sizes[40:])) <= 1


def test_a_long_chunk_is_let_go():
    stream = MelSpectrogram(SMALL).stream()
    stream.push(noise(100_000))
    assert num_bytes(stream._held) < 4 * 300
    stream = MelSpectrogram(SMALL).double().stream()
    stream.push(noise(100_000))
    assert num_bytes(stream._held) < 8 * 300


def test_flush_starts_afresh():
    module = MelSpectrogram(SMALL)
    stream, wave = module.stream(), noise(300)
    for _ in range(2):
        parts = [stream.push(wave), stream.flush()]
        torch.testing.assert_close(torch.cat(parts, 1), module(wave), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("preemphasis", [0.0, 0.9])
@pytest.mark.parametrize("double", [False, True])
def test_a_chunks_memory_may_be_used_again(preemphasis, double):
    module, wave = MelSpectrogram(replace(SMALL, preemphasis=preemphasis)), noise(600)
    if double:
        module, wave = module.double(), wave.double()
    buffer, stream, parts = torch.empty_like(wave[:60]), module.stream(), []
    for chunk in wave.split(60):
        parts.append(stream.push(buffer.copy_(chunk)))
        buffer.fill_(9)
    parts.append(stream.flush())
    torch.testing.assert_close(torch.cat(parts, -1), module(wave), rtol=1e-4, atol=1e-4)


def test_gradients_may_come_in_later_chunks_only():
    module, wave = MelSpectrogram(SMALL), noise(600)
    stream = module.stream()
    parts = [stream.push(wave[:200])]
    tail = wave[200:].clone().requires_grad_()
    parts += [stream.push(tail[:300])]
    with torch.no_grad():
        parts += [stream.push(tail[300:].detach())]
    parts.append(stream.flush())
    result = torch.cat(parts, -1)
    torch.testing.assert_close(result.detach(), module(wave), rtol=1e-4, atol=1e-4)
    result.sum().backward()
    assert tail.grad[:300].abs().sum() > 0
    # After the flush a stream is as fast as a new one.
    stream.push(wave)
    assert isinstance(stream._held, np.ndarray)


def test_gradients_flow_through_a_stream():
    wave = noise(300).double().requires_grad_()
    module = MelSpectrogram(SMALL).double()
    assert torch.autograd.gradcheck(lambda w: streamed(module, w, [70, 1, 130]), (wave,), fast_mode=True)


@pytest.mark.parametrize("name", ["whisper", "nemo"])
def test_what_needs_the_whole_wave_is_refused(name):
    with pytest.raises(InputError, match=r"need the whole wave.*use replace\(settings, log_range=None, normalize=None"):
        MelSpectrogram(name).stream()
    assert isinstance(Spectrogram(name).stream(), FeatureStream)


def test_bad_chunks():
    stream = MelSpectrogram(SMALL).stream()
    with pytest.raises(InputError, match="flush before any sample"):
        stream.flush()
    with pytest.raises(InputError, match=r"chunk has dtype torch.int16 and shape \[9\]; it must be floating"):
        stream.push(torch.zeros(9, dtype=torch.int16))
    stream.push(torch.zeros(2, 9))
    with pytest.raises(InputError, match=r"shape \[9\] after chunks of shape \[2, 'n'\]; flush the stream"):
        stream.push(torch.zeros(9))
    with pytest.raises(InputError, match=r"NaN or infinity, first at sample \d+ of row 0"):
        stream.push(torch.full((2, 200), math.nan))


def test_empty_chunks_give_no_frames():
    stream = MelSpectrogram(SMALL).stream()
    assert stream.push(torch.zeros(0)).shape == (10, 0)
    assert stream.push(torch.zeros(60)).shape[1] + stream.flush().shape[1] == 2
    np.testing.assert_equal(stream._total, 0)
