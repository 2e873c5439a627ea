"""The shipped checkpoint on the shipped clips, whose voices it was never trained on."""

import numpy as np
import pytest
import torch
from conftest import DATA
from pystoi import stoi

from codec import load_codec
from codec.audio import read_audio
from codec.features import MelSettings, MelSpectrogram

SPEECH = ["speech_it_male_first-in-queue_16k.wav", "speech_ru_female_first-in-queue_16k.flac"]


@pytest.fixture(scope="module")
def shipped():
    return load_codec("speech_16k")


def clip(name: str) -> torch.Tensor:
    return read_audio(DATA / name, sample_rate=16000, mono=True)[0]


def test_geometry(shipped):
    spec = shipped.spec
    assert (spec.sample_rate, spec.hop_length, spec.n_quantizers, spec.codebook_size) == (16000, 320, 8, 1024)
    assert spec.bitrate_bps == 4000
    assert sum(spec.decode_context) <= 32


@pytest.mark.parametrize("name", SPEECH)
def test_words_stay_intelligible(shipped, name):
    """STOI of unseen voices, and fewer codebooks are worse but not broken."""
    wave = clip(name)
    scores = {}
    for k in (8, 4, 1):
        decoded = shipped.decode(shipped.encode(wave, n_quantizers=k))[0, 0].numpy()
        scores[k] = stoi(wave[0].numpy(), decoded, 16000)
    assert scores[8] > 0.91
    assert scores[4] > 0.88
    assert scores[8] > scores[4] > scores[1] > 0.7


@pytest.mark.parametrize("name", SPEECH)
def test_mel_head_is_nearly_the_mel_of_the_decoded_wave(shipped, name):
    wave = clip(name)
    mel = MelSpectrogram(MelSettings.from_dict(shipped.config.mel))
    codes = shipped.encode(wave)
    target = mel(wave[None])
    by_head = (shipped.decode_mel(codes) - target).abs().mean()
    by_wave = (mel(shipped.decode(codes)) - target).abs().mean()
    assert by_wave < 0.5
    assert by_head < 1.15 * by_wave


def test_batch_equals_single_with_real_weights(shipped):
    """Real speech in one ragged batch: codes equal but for ties within rounding, waves within 1e-4."""
    waves = [clip(path.name) for path in sorted(DATA.glob("speech_*"))]
    lengths = torch.tensor([wave.shape[1] for wave in waves])
    batch = torch.zeros(len(waves), 1, int(lengths.max()))
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[1]] = wave
    together = shipped.encode(batch, lengths)
    decoded = shipped.decode(together)
    flips = total = 0
    for row, wave in enumerate(waves):
        alone = shipped.encode(wave)
        num_frames = alone.codes.shape[-1]
        flips += int((alone.codes[0] != together.codes[row, :, :num_frames]).sum())
        total += alone.codes.numel()
        single = shipped.decode(together.codes[row : row + 1, :, :num_frames])[0, :, : wave.shape[1]]
        torch.testing.assert_close(decoded[row, :, : wave.shape[1]], single, atol=1e-4, rtol=0)
    assert flips == 0, f"{flips} of {total} codes differ"


def test_silence_stays_quiet_and_loud_stays_bounded(shipped):
    silence = shipped.decode(shipped.encode(torch.zeros(1, 1, 16000)))
    assert silence.abs().max() < 0.01
    rng = np.random.default_rng(0)
    square = torch.from_numpy(np.sign(rng.standard_normal((1, 1, 16000)))).float()
    assert shipped.decode(shipped.encode(square)).abs().max() < 10
