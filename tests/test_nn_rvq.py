import socket

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp

from codec.nn.kept import Kept
from codec.nn.rvq import ResidualVectorQuantizer, codebook_usage


def _quantizer(**changes) -> ResidualVectorQuantizer:
    torch.manual_seed(0)
    return ResidualVectorQuantizer(4, **{"n_quantizers": 3, "codebook_size": 16, **changes})


def test_encode_is_the_greedy_nearest_entry_of_a_brute_force_search():
    quantizer = _quantizer()
    latents = torch.randn(2, 9, 4)
    codes = quantizer.encode(latents)
    residual = latents.double()
    for level, codebook in enumerate(quantizer.codebooks.double()):
        expected = torch.cdist(residual, codebook).argmin(-1)
        assert torch.equal(codes[:, level], expected)
        residual = residual - codebook[expected]
    torch.testing.assert_close(quantizer.decode(codes).double(), latents - residual)


def test_fewer_quantizers_are_a_prefix():
    quantizer = _quantizer()
    latents = torch.randn(2, 9, 4)
    assert torch.equal(quantizer.encode(latents, 2), quantizer.encode(latents)[:, :2])
    assert torch.allclose(
        quantizer.decode(quantizer.encode(latents, 2)),
        quantizer.codebooks[0][quantizer.encode(latents)[:, 0]]
        + quantizer.codebooks[1][quantizer.encode(latents)[:, 1]],
    )


def test_straight_through_passes_the_gradient_unchanged():
    quantizer = _quantizer().eval()
    latents = torch.randn(1, 5, 4, requires_grad=True)
    weight = torch.randn(1, 5, 4)
    (quantizer(latents, torch.tensor([3])).quantized * weight).sum().backward()
    assert torch.equal(latents.grad, weight)


def test_commitment_pulls_latents_to_their_entries():
    quantizer = _quantizer(n_quantizers=1).eval()
    latents = torch.randn(1, 5, 4, requires_grad=True)
    out = quantizer(latents, torch.tensor([1]))
    out.commitment.backward()
    assert ((latents - out.quantized).detach() * latents.grad).sum() > 0
    assert out.commitment.item() == pytest.approx((latents - out.quantized.detach()).square().mean().item(), rel=1e-5)


def test_every_residual_level_has_a_commitment_gradient():
    quantizer = _quantizer().eval()
    latents = torch.randn(1, 5, 4, requires_grad=True)
    (all_levels,) = torch.autograd.grad(quantizer(latents, torch.tensor([3])).commitment, latents)
    (first_level,) = torch.autograd.grad(quantizer(latents, torch.tensor([1])).commitment, latents)
    assert not torch.allclose(all_levels, first_level, atol=1e-4)


def test_examples_use_only_their_own_levels():
    quantizer = _quantizer().eval()
    latents = torch.randn(3, 5, 4)
    quantized = quantizer(latents, torch.tensor([1, 2, 3])).quantized
    for row, levels in enumerate((1, 2, 3)):
        alone = quantizer.decode(quantizer.encode(latents[row : row + 1], levels))
        torch.testing.assert_close(quantized[row : row + 1], alone)


def test_kmeans_finds_well_separated_clusters():
    torch.manual_seed(0)
    centres = torch.randn(16, 4) * 10
    latents = centres.repeat_interleave(50, 0) + torch.randn(800, 4) * 0.01
    quantizer = _quantizer(n_quantizers=2)
    quantizer.initialise(latents, iterations=30)
    error = (quantizer.decode(quantizer.encode(latents[None]))[0] - latents).square().mean()
    before = latents.square().mean()
    assert error < 0.02 * before


def test_codebooks_follow_their_vectors_and_dead_entries_come_back():
    torch.manual_seed(0)
    quantizer = _quantizer(n_quantizers=1, decay=0.8).train()
    quantizer.initialise(torch.randn(64, 4) * 0.01)  # bunched at the origin
    quantizer.sums[0, 8:] += 1000 * quantizer.counts[0, 8:, None]  # and half of them out of reach
    quantizer.codebooks[0, 8:] += 1000
    latents = torch.randn(4, 50, 4) * 5
    first = (quantizer(latents, torch.full((4,), 1)).quantized - latents).square().mean()
    for _ in range(60):
        out = quantizer(latents, torch.full((4,), 1))
    used = out.codes.unique().numel()
    assert (out.quantized - latents).square().mean() < 0.5 * first
    assert used >= 14
    before = quantizer.codebooks.clone()
    quantizer.eval()(latents + 1, torch.full((4,), 1))
    assert torch.equal(quantizer.codebooks, before)


FACTORISED = {"codebook_dim": 2, "n_quantizers": 3}


@pytest.mark.parametrize("normalise_codes", [False, True])
def test_factorised_codes_are_nearest_in_their_own_space(normalise_codes):
    quantizer = _quantizer(**FACTORISED, normalise_codes=normalise_codes)
    quantizer.codebooks *= torch.rand(3, 16, 1) + 0.5  # entries of any length, as in codecs of others
    latents = torch.randn(2, 9, 4)
    codes = quantizer.encode(latents)
    residual = latents
    for level in range(3):
        compared = residual @ quantizer.down[level] + quantizer.down_bias[level]
        if normalise_codes:
            scores = torch.cosine_similarity(compared[..., None, :], quantizer.codebooks[level], dim=-1)
            expected = scores.argmax(-1)
        else:
            expected = torch.cdist(compared, quantizer.codebooks[level]).argmin(-1)
        assert torch.equal(codes[:, level], expected)
        residual = residual - (quantizer.codebooks[level][expected] @ quantizer.up[level] + quantizer.up_bias[level])
    torch.testing.assert_close(quantizer.decode(codes), latents - residual)
    torch.testing.assert_close(quantizer.decode(codes[:, :1]), quantizer.table()[0][codes[:, 0]])


@pytest.mark.parametrize("normalise_codes", [False, True])
def test_factorised_training_equals_deployment_and_learns(normalise_codes):
    """What training passes on is what codes decode to, and gradients fit the projections to a 2-d manifold."""
    torch.manual_seed(0)
    plane = torch.randn(2, 4)
    quantizer = _quantizer(**FACTORISED, normalise_codes=normalise_codes, decay=0.9)
    draw = torch.Generator().manual_seed(1)
    quantizer.initialise(torch.randn(256, 2, generator=draw) @ plane)
    optimiser = torch.optim.Adam(quantizer.parameters(), 3e-2)
    errors = []
    for _ in range(80):
        latents = torch.randn(4, 64, 2, generator=draw) @ plane
        out = quantizer(latents, torch.tensor([1, 2, 3, 3]))
        error = (out.quantized - latents).square().mean()
        optimiser.zero_grad()
        (error + out.commitment).backward()
        optimiser.step()
        errors.append(error.item() / latents.square().mean().item())
    assert sum(errors[-10:]) < 0.5 * sum(errors[:10])
    if normalise_codes:
        torch.testing.assert_close(quantizer.codebooks.norm(dim=-1), torch.ones(3, 16))
    quantizer.eval()
    trained = quantizer(latents, torch.full((4,), 3))
    torch.testing.assert_close(trained.quantized, quantizer.decode(quantizer.encode(latents)), atol=1e-5, rtol=1e-5)


def test_factorised_gradient_reaches_the_latents_once():
    """Levels share the gradient: together they pass on what their projections span, not a multiple of it."""
    quantizer = _quantizer(**{**FACTORISED, "codebook_dim": 4}).eval()
    latents = torch.randn(1, 5, 4, requires_grad=True)
    weight = torch.randn(1, 5, 4)
    (quantizer(latents, torch.tensor([3])).quantized * weight).sum().backward()
    torch.testing.assert_close(latents.grad, weight)


def test_usage():
    codes = torch.tensor([[[0, 1, 2, 3], [5, 5, 5, 5]], [[0, 1, 2, 3], [5, 5, 5, 5]]])
    usage = codebook_usage(codes, 8)
    torch.testing.assert_close(usage.perplexity, torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(usage.used_share, torch.tensor([0.5, 0.125]))


def test_what_is_kept_follows_its_source():
    kept, source = Kept(), torch.ones(2)
    with torch.inference_mode():
        first = kept.get((source,), lambda: source * 2)
    assert kept.get((source,), lambda: source * 3) is first and not first.is_inference()
    source += 1
    assert torch.equal(kept.get((source,), lambda: source * 2), torch.full((2,), 4.0))


def _train_codebooks(latents: torch.Tensor, **options) -> tuple[ResidualVectorQuantizer, object]:
    """k-means and steps with more levels for some examples than others, and entries out of reach to restart."""
    torch.manual_seed(0)
    quantizer = ResidualVectorQuantizer(4, n_quantizers=3, codebook_size=16, decay=0.8, **options).train()
    if dist.is_initialized() and dist.get_rank():
        torch.manual_seed(1)  # ranks need not agree on their randomness
    quantizer.initialise(latents.flatten(0, 1), iterations=3)
    quantizer.sums[:, 8:] += 100 * quantizer.counts[:, 8:, None]
    quantizer.codebooks[:, 8:] += 100
    levels = torch.tensor([1, 3, 3, 2])
    if dist.is_initialized():
        levels = levels.chunk(dist.get_world_size())[dist.get_rank()]
    for _ in range(12):
        out = quantizer(latents, levels)
    return quantizer, codebook_usage(out.codes, 16)


def _rank(rank: int, port: int, latents: torch.Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for name, options in OPTIONS.items():
        quantizer, usage = _train_codebooks(latents.chunk(2)[rank], **options)
        torch.save((quantizer.state_dict(), tuple(usage)), f"{folder}/{name}_{rank}.pt")
    dist.destroy_process_group()


OPTIONS = {"plain": {}, "factorised": {"codebook_dim": 2, "normalise_codes": True}}


def test_two_ranks_train_the_codebooks_of_their_joined_batch(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    latents = torch.randn(4, 40, 4, generator=torch.Generator().manual_seed(0))
    mp.spawn(_rank, (port, latents, str(tmp_path)), nprocs=2)
    for name, options in OPTIONS.items():
        (ours, usage), (theirs, _) = (torch.load(tmp_path / f"{name}_{rank}.pt") for rank in (0, 1))
        single, expected = _train_codebooks(latents, **options)
        for key, value in single.state_dict().items():
            assert torch.equal(ours[key], theirs[key]), key
            torch.testing.assert_close(
                ours[key], value, atol=1e-4, rtol=1e-4, msg=lambda text, key=key: f"{key}: {text}"
            )
        torch.testing.assert_close(usage, tuple(expected))
