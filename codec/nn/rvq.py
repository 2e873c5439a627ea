"""Residual vector quantization with EMA codebooks (SoundStream, Zeghidour et al. 2021, section III-C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F

from codec.nn.kept import Kept


class QuantizerOutput(NamedTuple):
    """What the quantizer gives in training.

    Attributes:
        quantized: `[B, T, D]`, straight-through: its gradient is the latents'.
        codes: int64 `[B, K, T]`.
        commitment: Scalar, mean squared distance of each residual to its entry, averaged over the levels in use.
    """

    quantized: Tensor
    codes: Tensor
    commitment: Tensor


class CodebookUsage(NamedTuple):
    """How a batch of codes uses the codebooks; see `codebook_usage`.

    Attributes:
        perplexity: `[K]`, from 1 to V: the number of equally frequent entries with the same entropy.
        used_share: `[K]`, part of the entries that occur at all.
    """

    perplexity: Tensor
    used_share: Tensor


class ResidualVectorQuantizer(nn.Module):
    """K codebooks, each quantizing what the ones before it left over.

    Codebooks follow their residuals by exponential moving averages; entries used under `restart_share` of an
    even share are moved onto random residuals of the batch. Distances are one GEMM per level, always float32. Where
    `torch.distributed` is initialised the codebooks follow the joined batch of all ranks and are the same on each.

    Args:
        dim: Latent size, D.
        n_quantizers: Levels, K.
        codebook_size: Entries per level, V.
        decay: EMA decay per training step.
        restart_share: An entry whose moving count falls below this part of an even share is restarted.
        codebook_dim: Factorised codes: entries of this size d, and for each level a learned projection of its residual
            to d and of the entry back to D. None: entries have size D and nothing is projected.
        normalise_codes: Entries and what they are compared to have unit length; needs `codebook_dim`, whose
            projection back restores the length.
    """

    codebooks: Tensor
    counts: Tensor
    sums: Tensor

    def __init__(
        self,
        dim: int,
        *,
        n_quantizers: int,
        codebook_size: int,
        decay: float = 0.99,
        restart_share: float = 0.1,
        codebook_dim: int | None = None,
        normalise_codes: bool = False,
    ) -> None:
        super().__init__()
        assert codebook_dim is not None or not normalise_codes
        self.decay = decay
        self.restart_share = restart_share
        self.normalise_codes = normalise_codes
        size = codebook_dim or dim
        codebooks = torch.randn(n_quantizers, codebook_size, size) * size**-0.5
        self.register_buffer("codebooks", F.normalize(codebooks, dim=-1) if normalise_codes else codebooks)
        # Training state: rebuilt from the data, so a published checkpoint does without it.
        self.register_buffer("counts", torch.zeros(n_quantizers, codebook_size))
        self.register_buffer("sums", torch.zeros(n_quantizers, codebook_size, size))
        self.projected = codebook_dim is not None
        if self.projected:
            # Down and up start as one orthogonal projection: what a level takes away is part of its residual.
            down = torch.stack([nn.init.orthogonal_(torch.empty(dim, size)) for _ in range(n_quantizers)])
            self.down = nn.Parameter(down)
            self.down_bias = nn.Parameter(torch.zeros(n_quantizers, size))
            self.up = nn.Parameter(down.transpose(1, 2).clone())
            self.up_bias = nn.Parameter(torch.zeros(n_quantizers, dim))
        self._table = Kept()

    @property
    def n_quantizers(self) -> int:
        """Levels, K."""
        return self.codebooks.shape[0]

    @property
    def codebook_size(self) -> int:
        """Entries per level, V."""
        return self.codebooks.shape[1]

    @torch.no_grad()
    def table(self) -> Tensor:
        """What each code adds to the quantized latents, `[K, V, D]`."""
        if not self.projected:
            return self.codebooks
        return self._table.get(
            (self.codebooks, self.up, self.up_bias),
            lambda: torch.baddbmm(self.up_bias[:, None], self.codebooks, self.up),
        )

    @torch.no_grad()
    def encode(self, latents: Tensor, n_quantizers: int | None = None) -> Tensor:
        """Greedy nearest entries: latents `[B, T, D]` → codes int64 `[B, K, T]`."""
        with torch.autocast(latents.device.type, enabled=False):
            residual = latents.float()
            codes = []
            for level, entries in enumerate(self.table()[:n_quantizers].float()):
                indices = self._search(level, self._projection(level, residual))
                residual = residual - entries[indices]
                codes.append(indices)
            return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Sum of entries, one lookup for all levels: codes `[B, K, T]` (any K up to the model's) → `[B, T, D]`."""
        size = self.codebook_size
        offsets = torch.arange(codes.shape[1], device=codes.device) * size
        rows = (codes + offsets[:, None]).transpose(1, 2)
        return F.embedding(rows, self.table().flatten(0, 1)).sum(2)

    def forward(self, latents: Tensor, n_quantizers: Tensor) -> QuantizerOutput:
        """A training step: quantizes, and in training mode moves the codebooks.

        Args:
            latents: `[B, T, D]`.
            n_quantizers: int64 `[B]`: levels that each example uses (quantizer dropout).
        """
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float()
            quantized = torch.zeros_like(latents)
            commitment = latents.new_zeros(())
            codes, moved = [], []
            for level in range(self.n_quantizers):
                used = n_quantizers > level
                # Each level's own residual, with gradient: latents minus what the earlier levels took.
                compared = self._projection(level, latents - quantized)
                indices = self._search(level, compared.detach())
                entries = self.codebooks[level][indices]
                if self.training:
                    moved.append((compared.detach()[used].flatten(0, 1), indices[used].flatten()))
                error = (compared - entries).square().mean((1, 2))
                commitment = commitment + (error * used).sum() / used.sum().clamp(min=1)
                if self.projected:
                    entries = compared + (entries - compared).detach()
                    entries = torch.addmm(self.up_bias[level], entries.flatten(0, 1), self.up[level]).view_as(latents)
                quantized = quantized + entries * used[:, None, None]
                codes.append(indices)
            if self.training:
                self._move(moved)
            if not self.projected:
                quantized = latents + (quantized - latents).detach()
            return QuantizerOutput(quantized, torch.stack(codes, 1), commitment / self.n_quantizers)

    def _projection(self, level: int, residual: Tensor) -> Tensor:
        """What the level compares to its entries: `[..., D]` → `[..., d]`."""
        if self.projected:
            flat = torch.addmm(self.down_bias[level], residual.flatten(0, -2), self.down[level])
            residual = flat.view(*residual.shape[:-1], flat.shape[-1])
        return F.normalize(residual, dim=-1) if self.normalise_codes else residual

    def _search(self, level: int, compared: Tensor) -> Tensor:
        codebook = self.codebooks[level].float()
        return _nearest(compared, F.normalize(codebook, dim=-1) if self.normalise_codes else codebook)

    @torch.no_grad()
    def _move(self, moved: list[tuple[Tensor, Tensor]]) -> None:
        """One EMA step of all codebooks: for each level its vectors `[M, d]` and their entries `[M]`."""
        counts = torch.stack([torch.bincount(indices, minlength=self.codebook_size) for _, indices in moved]).float()
        sums = torch.zeros_like(self.sums)
        for level, (vectors, indices) in enumerate(moved):
            sums[level].index_add_(0, indices, vectors)
        if _world_size() > 1:
            joined = torch.cat([counts.flatten(), sums.flatten()])
            dist.all_reduce(joined)
            counts, sums = joined[: counts.numel()].view_as(counts), joined[counts.numel() :].view_as(sums)
        active = counts.sum(1) > 0
        weight = torch.where(active, 1 - self.decay, 0.0)
        self.counts.lerp_(counts, weight[:, None])
        self.sums.lerp_(sums, weight[:, None, None])
        share = self.counts.mean(1)
        dead = (self.counts < self.restart_share * share[:, None]) & active[:, None]
        for level, num_dead in enumerate(dead.sum(1).tolist()):
            if num_dead:
                fresh = _random_rows(moved[level][0], num_dead)
                self.sums[level, dead[level]] = fresh * share[level]
                self.counts[level, dead[level]] = share[level]
        centres = self._entries(self.sums / self.counts.clamp(min=1e-6)[..., None])
        self.codebooks.copy_(torch.where(active[:, None, None], centres, self.codebooks))

    def _entries(self, means: Tensor) -> Tensor:
        return F.normalize(means, dim=-1) if self.normalise_codes else means

    @torch.no_grad()
    def initialise(self, latents: Tensor, *, iterations: int = 10) -> None:
        """k-means for each level in turn on latents `[M, D]`, M (of all ranks together) at least `codebook_size`.

        Starts each level from random rows; entries left empty are re-seeded the same way. Ranks get the same result.
        With `normalise_codes` the projections back are scaled to the residuals' lengths.
        """
        residual = _joined_rows(latents.detach().float())
        assert len(residual) >= self.codebook_size
        for level in range(self.n_quantizers):
            compared = self._projection(level, residual)
            if self.normalise_codes:  # the way back starts at the right length
                flat = torch.addmm(self.down_bias[level], residual, self.down[level])
                self.up[level].mul_(flat.norm(dim=-1).mean())
            picks = torch.randperm(len(compared), device=compared.device)[: self.codebook_size]
            centres = compared[picks]
            for _ in range(iterations):
                indices = _nearest(compared, centres)
                counts = torch.bincount(indices, minlength=self.codebook_size)
                sums = torch.zeros_like(centres).index_add_(0, indices, compared)
                picks = torch.randint(len(compared), (self.codebook_size,), device=compared.device)
                means = self._entries(sums / counts.clamp(min=1)[:, None])
                centres = torch.where(counts[:, None] > 0, means, compared[picks])
            self.codebooks[level] = centres
            share = counts.float().mean()
            self.counts[level] = share
            self.sums[level] = centres * share
            residual = residual - self.table()[level][_nearest(compared, centres)]
        if _world_size() > 1:
            for tensor in (*self.buffers(), *self.parameters()):
                dist.broadcast(tensor.detach(), 0)


@torch.no_grad()
def codebook_usage(codes: Tensor, codebook_size: int) -> CodebookUsage:
    """How evenly codes int64 `[B, K, T]` use their codebooks; of all ranks' codes where there are several."""
    counts = torch.stack([torch.bincount(c, minlength=codebook_size) for c in codes.transpose(0, 1).flatten(1)])
    counts = counts.float()
    if _world_size() > 1:
        dist.all_reduce(counts)
    share = counts / counts.sum(1, keepdim=True)
    perplexity = torch.special.entr(share).sum(1).exp()
    return CodebookUsage(perplexity, (counts > 0).float().mean(1))


def _nearest(vectors: Tensor, codebook: Tensor) -> Tensor:
    """Index of the entry nearest to each vector: `[..., D]`, `[V, D]` → int64 `[...]`; the lower index on a tie."""
    # |x - c|² without |x|², which is the same for all entries.
    flat = vectors.reshape(-1, vectors.shape[-1])
    scores = torch.addmm(codebook.square().sum(1), flat, codebook.T, alpha=-2.0)
    return scores.argmin(-1).view(vectors.shape[:-1])


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _row_counts(rows: Tensor) -> list[int]:
    """How many rows each rank has."""
    counts = torch.zeros(_world_size(), dtype=torch.int64, device=rows.device)
    counts[dist.get_rank()] = len(rows)
    dist.all_reduce(counts)
    numbers: list[int] = counts.tolist()
    return numbers


def _joined_rows(rows: Tensor) -> Tensor:
    """The rows `[M, D]` of all ranks, in their order."""
    if _world_size() == 1:
        return rows
    counts = _row_counts(rows)
    joined = rows.new_zeros(sum(counts), *rows.shape[1:])
    first = sum(counts[: dist.get_rank()])
    joined[first : first + len(rows)] = rows
    dist.all_reduce(joined)
    return joined


def _random_rows(rows: Tensor, number: int) -> Tensor:
    """Random rows of the joined rows of all ranks, the same on each: `[M, D]` → `[number, D]`."""
    if _world_size() == 1:
        return rows[torch.randint(len(rows), (number,), device=rows.device)]
    counts = _row_counts(rows)
    picks = torch.randint(sum(counts), (number,), device=rows.device)
    dist.broadcast(picks, 0)
    picks = picks - sum(counts[: dist.get_rank()])
    ours = (picks >= 0) & (picks < len(rows))
    fresh = rows.new_zeros(number, *rows.shape[1:])
    fresh[ours] = rows[picks[ours]]
    dist.all_reduce(fresh)
    return fresh
