import pytest
import torch
from conftest import DATA
from torch.nn import functional as F

from codec.audio import read_audio
from codec.nn.discriminators import DISCRIMINATORS, Discriminators
from codec.nn.losses import (
    LossBalancer,
    SpectralLosses,
    adversarial_hinge,
    discriminator_hinge,
    feature_matching,
    waveform_l1,
)


@pytest.fixture(scope="module")
def speech():
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav", num_samples=16000)
    return torch.stack([wave[:, :8000], wave[:, 8000:]])


def judged(logits, features=()):
    return [(torch.as_tensor(logits), [torch.as_tensor(f) for f in features])]


def test_hinge_losses_by_hand():
    real, fake = judged([2.0, 0.5]), judged([-3.0, 0.0])
    assert discriminator_hinge(real, fake).item() == pytest.approx(0.25 + 0.5)
    assert adversarial_hinge(fake).item() == pytest.approx((4 + 1) / 2)
    both = discriminator_hinge(real + judged([1.0]), fake + judged([-1.0]))
    assert both.item() == pytest.approx(0.375)  # scales count alike


def test_feature_matching_doesnt_depend_on_a_layers_range():
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    one = feature_matching(judged(0.0, [a]), judged(0.0, [b]))
    assert one.item() == pytest.approx(((a - b).abs().mean() / a.abs().mean()).item(), rel=1e-5)
    two = feature_matching(judged(0.0, [a, 100 * a]), judged(0.0, [b, 100 * b]))
    torch.testing.assert_close(one, two)
    assert feature_matching(judged(0.0, [a]), judged(0.0, [a])) == 0


def test_feature_matching_trains_the_codec_and_not_the_discriminators_view_of_the_original():
    a, b = torch.ones(2, 3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)
    feature_matching([(a, [a])], [(b, [b])]).backward()
    assert a.grad is None and b.grad.abs().sum() > 0


def test_reconstruction_losses_are_zero_for_the_original_and_grow_with_distance(speech):
    losses = SpectralLosses(16000)
    noise = torch.randn(speech.shape, generator=torch.Generator().manual_seed(0)) * 0.01
    values = [[waveform_l1(x, speech), *losses(x, speech)] for x in (speech, speech + noise, speech + 4 * noise)]
    for zero, near, far in zip(*values, strict=True):
        assert zero < 1e-6 < near < far


@pytest.mark.parametrize("kind", sorted(DISCRIMINATORS))
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("num_samples", [4800, 5003])
def test_discriminators_judge_each_example_alone(kind, channels, num_samples):
    torch.manual_seed(0)
    discriminator = Discriminators([kind], channels=channels, width=4)
    waves = torch.randn(3, channels, num_samples) * 0.1
    for (ours, features), (alone, theirs) in zip(discriminator(waves), discriminator(waves[1:2]), strict=True):
        assert ours.shape[0] == 3 and len(features) >= 5
        torch.testing.assert_close(ours[1:2], alone, atol=1e-5, rtol=1e-3)
        for a, b in zip(features, theirs, strict=True):
            torch.testing.assert_close(a[1:2], b, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", sorted(DISCRIMINATORS))
def test_discriminators_learn_to_tell_a_wave_from_a_coarse_copy(kind, speech):
    torch.manual_seed(0)
    speech = speech[..., 2000:6000]
    coarse = (speech * 32).round() / 32
    discriminator = Discriminators([kind], channels=1, width=4)
    optimizer = torch.optim.AdamW(discriminator.parameters(), lr=3e-3, betas=(0.5, 0.9))
    first = None
    for _ in range(12):
        loss = discriminator_hinge(discriminator(speech), discriminator(coarse))
        first = first or loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.95 * first


@pytest.mark.parametrize("kind", sorted(DISCRIMINATORS))
def test_every_layer_of_a_discriminator_matters(kind, speech):
    discriminator = Discriminators([kind], channels=1, width=4)
    torch.stack([logits.square().mean() for logits, _ in discriminator(speech[..., :4000])]).sum().backward()
    without = [name for name, p in discriminator.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert without == []


def test_a_spectrum_is_laid_out_so_that_convolutions_are_fast(speech):
    spectrum = Discriminators(["stft"], channels=1, width=4).parts[0].spectrum(speech)
    assert spectrum.shape == (2, 2, 32, 512) and spectrum.is_contiguous()
    # A gain of ten for white noise, whatever n_fft is.
    noise = torch.randn(8, 1, 16000)
    power = Discriminators(["stft"], channels=1, width=4).parts[0].spectrum(noise).square().sum(1).mean()
    assert power.item() == pytest.approx(100.0, rel=0.1)


def test_balanced_gradients_have_the_shares_of_their_weights():
    torch.manual_seed(0)
    balancer = LossBalancer(("a", "b", "c"))
    target = torch.randn(4, 1, 100)
    for _ in range(5):
        wave = torch.randn(4, 1, 100, requires_grad=True)
        terms = {"a": F.mse_loss(wave, target) * 1000, "b": (wave * target).mean() * 1e-3}
        gradient = balancer(terms, {"a": 3.0, "b": 1.0}, wave)
        unit = {name: torch.autograd.grad(term, wave)[0] for name, term in terms.items()}
    norms = {name: g.flatten(1).norm(dim=1).sum() for name, g in unit.items()}
    expected = 0.75 * unit["a"] / norms["a"] + 0.25 * unit["b"] / norms["b"]
    # The averages have seen five steps; the last is one of them.
    assert F.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.999
    assert gradient.flatten(1).norm(dim=1).sum().item() == pytest.approx(
        expected.flatten(1).norm(dim=1).sum().item(), rel=0.15
    )
    assert balancer.steps.tolist() == [5, 5, 0]


def test_a_balancers_average_forgets_at_its_decay():
    balancer = LossBalancer(("a",), decay=0.5)
    wave = torch.ones(1, 1, 1, requires_grad=True)
    for factor in (1.0, 4.0, 4.0):
        balancer({"a": wave.sum() * factor}, {"a": 1.0}, wave)
    assert balancer.norms.item() == pytest.approx((0.25 * 1 + 0.5 * 4 + 4) / (0.25 + 0.5 + 1))
