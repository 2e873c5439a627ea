"""Codes don't depend on how they were computed; fused kernels compute what the plain ones do."""

import pytest
import torch
from conftest import DATA, small_codec

from codec import load_codec
from codec.audio import read_audio
from codec.nn import linear

CLIPS = [
    "speech_it_male_first-in-queue_16k.wav",
    "speech_ru_female_thanks_48k.opus",
    "music_tabla-loop_stereo_48k.opus",
]


@pytest.fixture(scope="module")
def shipped():
    return load_codec("speech_16k")


@pytest.fixture(scope="module")
def waves():
    return [read_audio(DATA / name, sample_rate=16000, mono=True)[0] for name in CLIPS]


@pytest.fixture(scope="module")
def alone(shipped, waves):
    return [shipped.encode(wave).codes[0] for wave in waves]


def num_different(these, those) -> int:
    return sum(int((a != b).sum()) for a, b in zip(these, those, strict=True))


def in_one_batch(codec, waves):
    lengths = torch.tensor([wave.shape[1] for wave in waves])
    batch = torch.full((len(waves), 1, int(lengths.max())), 0.5)
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[1]] = wave
    out = codec.encode(batch, lengths)
    return [codes[:, :n] for codes, n in zip(out.codes, out.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("threads", [1, 2])
def test_real_clips_have_the_same_codes_in_any_company(shipped, waves, alone, threads):
    torch.set_num_threads(threads)
    try:
        assert num_different(alone, in_one_batch(shipped, waves)) == 0
        assert num_different(alone, [shipped.encode(wave).codes[0] for wave in waves]) == 0
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("chunk", [1234, 16000])
def test_real_clips_have_the_same_codes_in_a_stream(shipped, waves, alone, chunk):
    for wave, codes in zip(waves, alone, strict=True):
        stream = shipped.stream_encoder()
        parts = [*(stream.push(part) for part in wave[None].split(chunk, 2)), stream.flush()]
        assert torch.equal(torch.cat(parts, -1)[0], codes)


@pytest.mark.parametrize("body", ["spectral", "seanet"])
def test_fused_kernels_compute_what_the_plain_ones_do(monkeypatch, body):
    codec = small_codec(body=body)
    wave = torch.randn(2, 1, 16000, generator=torch.Generator().manual_seed(0)) * 0.2
    lengths = torch.tensor([16000, 9000])

    def results():
        codes = codec.encode(wave, lengths)
        return codec.latents(wave), codec.decode(codes), codec.decode_mel(codes)

    with torch.no_grad():
        fused = results()
        assert not torch.equal(fused[1], torch.zeros_like(fused[1]))
        monkeypatch.setattr(linear, "_HAS_FUSED", False)
        for ours, theirs in zip(fused, results(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not linear._HAS_FUSED, reason="this build of torch has no fused oneDNN kernels")
def test_what_is_kept_of_the_weights_follows_training(monkeypatch):
    """Every weight that is changed in place changes the result as it does without anything kept."""
    codec = small_codec()
    codes = torch.randint(32, (1, 4, 70), generator=torch.Generator().manual_seed(0))
    for name, parameter in codec.decoder.named_parameters():
        if name.startswith("mel."):
            continue
        before = codec.decode(codes)
        parameter += torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.3
        after = codec.decode(codes)
        assert not torch.equal(before, after), name
        with monkeypatch.context() as patch:
            patch.setattr(linear, "_HAS_FUSED", False)
            torch.testing.assert_close(after, codec.decode(codes), atol=1e-4, rtol=1e-4)
