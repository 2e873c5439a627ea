from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from codec.nn.blocks import BlockStack, DepthwiseConv
from codec.nn.losses import SpectralLosses, waveform_l1
from codec.nn.spectral import SpectralDecoder, SpectralEncoder, frame_mask


@pytest.mark.parametrize(
    ("kernel_size", "lookahead", "padding"), [(3, True, (1, 1)), (5, True, (2, 2)), (4, False, (3, 0))]
)
def test_depthwise_conv_equals_conv1d(kernel_size, lookahead, padding):
    conv = DepthwiseConv(6, kernel_size, lookahead=lookahead)
    torch.nn.init.normal_(conv.bias)
    x = torch.randn(2, 9, 6)
    expected = F.conv1d(F.pad(x.mT, padding), conv.weight.T[:, None], conv.bias, groups=6).mT
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize("lookahead", [True, False])
def test_block_stack_sees_its_declared_context_and_no_more(lookahead):
    stack = BlockStack(4, 3, kernel_size=3, expansion=2, lookahead=lookahead).double()
    x = torch.randn(1, 41, 4, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(stack(x, None)[0, 20].sum(), x)
    seen = gradient[0].abs().sum(-1).nonzero().flatten().tolist()
    left, right = stack.context
    assert seen == list(range(20 - left, 20 + right + 1))


def test_frame_mask():
    assert frame_mask(torch.tensor([0, 2]), 3)[..., 0].tolist() == [[False] * 3, [True, True, False]]


def _decoder(lookahead: bool) -> SpectralDecoder:
    return SpectralDecoder(
        channels=1, hop_length=320, subframes=2, n_fft=480, dims=(8, 8), num_blocks=(1, 1), kernel_size=3,
        expansion=2, lookahead=lookahead, latent_dim=4, n_mels=10, mel_hidden=8,
    )  # fmt: skip


@pytest.mark.parametrize("lookahead", [True, False])
def test_inverse_stft_puts_every_piece_where_it_was_cut(lookahead):
    """Windowed pieces of a noise wave, overlap-added and divided by the envelope, are that wave again."""
    decoder = _decoder(lookahead)
    num_subframes, hop = 12, 160
    wave = torch.randn(1, 1, num_subframes * hop)
    padded = F.pad(wave, (decoder.parts_before * hop, (2 - decoder.parts_before) * hop))
    pieces = padded.unfold(-1, 480, hop) * decoder.window
    with mock.patch.object(decoder, "_pieces", return_value=pieces.transpose(1, 2)):
        summed, envelope = decoder.overlapped(torch.zeros(1, num_subframes, 8))
    rebuilt = summed / decoder.weight(envelope)
    rebuilt = rebuilt[0, :, decoder.parts_before * hop :]
    end = num_subframes * hop - (0 if lookahead else hop)  # a causal item's last subframe fades
    torch.testing.assert_close(rebuilt[:, :end], wave[0, :, :end], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lookahead", [True, False])
def test_wave_head_turns_a_spectrum_into_its_tone(lookahead):
    """A head that puts all energy in one bin gives a tone of that bin's frequency."""
    decoder = _decoder(lookahead).requires_grad_(False)
    bins = 241
    decoder.spectrum.weight.zero_()
    decoder.spectrum.bias.fill_(-20.0)
    decoder.spectrum.bias[15] = 0.0  # log-magnitude of bin 15
    wave = decoder.wave_head(torch.zeros(1, 40, 8))[0, 0, 1600:4800]
    spectrum = torch.fft.rfft(wave * torch.hann_window(3200)).abs()
    assert spectrum.argmax().item() == 15 * 3200 // 480
    assert decoder.spectrum.bias.shape == (3 * bins,)


def test_features_have_no_hole_and_silence_is_finite():
    encoder = SpectralEncoder(
        channels=1, hop_length=320, subframes=2, n_fft=512, dims=(8, 8), num_blocks=(1, 1), kernel_size=3,
        expansion=2, lookahead=True, latent_dim=4,
    )  # fmt: skip
    features = encoder.features(torch.zeros(1, 1, 3200))
    assert features.shape == (1, 20, 3 * 257)
    assert torch.isfinite(features).all()
    # One impulse in each subframe's middle must reach that subframe's features.
    for subframe in (0, 7, 19):
        wave = torch.zeros(1, 1, 3200)
        wave[..., subframe * 160 + 80] = 1.0
        changed = (encoder.features(wave) - features).abs().sum(-1)[0]
        assert changed.argmax().item() == subframe


def test_losses_are_zero_for_equals_and_grow_with_the_error():
    losses = SpectralLosses(16000)
    target = torch.randn(2, 1, 8000) * 0.1
    assert all(term.item() < 1e-6 for term in losses(target, target))
    assert waveform_l1(target, target) == 0
    assert waveform_l1(torch.zeros_like(target), target).item() == pytest.approx(1.0)
    small, large = (losses(target + size * torch.randn_like(target), target) for size in (0.001, 0.05))
    assert all(a < b for a, b in zip(small, large, strict=True))


def test_losses_have_finite_gradients_on_silence():
    losses = SpectralLosses(16000)
    decoded = torch.zeros(1, 1, 4000, requires_grad=True)
    sum(losses(decoded, torch.zeros(1, 1, 4000))).backward()
    assert torch.isfinite(decoded.grad).all()
