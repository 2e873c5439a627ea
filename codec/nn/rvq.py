"""Residual vector quantization with EMA codebooks (SoundStream, Zeghidour et al. 2021, section III-C)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


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


class ResidualVectorQuantizer(nn.Module):
    """K codebooks, each quantizing what the ones before it left over.

    Codebooks follow their residuals by exponential moving averages; entries used under `restart_share` of an
    even share are moved onto random residuals of the batch. Distances are one GEMM per level, always float32.

    Args:
        dim: Latent size, D.
        n_quantizers: Levels, K.
        codebook_size: Entries per level, V.
        decay: EMA decay per training step.
        restart_share: An entry whose moving count falls below this part of an even share is restarted.
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
    ) -> None:
        super().__init__()
        self.decay = decay
        self.restart_share = restart_share
        self.register_buffer("codebooks", torch.randn(n_quantizers, codebook_size, dim) * dim**-0.5)
        # Training state: rebuilt from the data, so a published checkpoint does without it.
        self.register_buffer("counts", torch.zeros(n_quantizers, codebook_size))
        self.register_buffer("sums", torch.zeros(n_quantizers, codebook_size, dim))

    @property
    def n_quantizers(self) -> int:
        """Levels, K."""
        return self.codebooks.shape[0]

    @property
    def codebook_size(self) -> int:
        """Entries per level, V."""
        return self.codebooks.shape[1]

    @torch.no_grad()
    def encode(self, latents: Tensor, n_quantizers: int | None = None) -> Tensor:
        """Greedy nearest entries: latents `[B, T, D]` → codes int64 `[B, K, T]`."""
        with torch.autocast(latents.device.type, enabled=False):
            residual = latents.float()
            codes = []
            for codebook in self.codebooks[:n_quantizers].float():
                indices = _nearest(residual, codebook)
                residual = residual - codebook[indices]
                codes.append(indices)
            return torch.stack(codes, 1)

    def decode(self, codes: Tensor) -> Tensor:
        """Sum of entries, one lookup for all levels: codes `[B, K, T]` (any K up to the model's) → `[B, T, D]`."""
        size = self.codebook_size
        offsets = torch.arange(codes.shape[1], device=codes.device) * size
        rows = (codes + offsets[:, None]).transpose(1, 2)
        return F.embedding(rows, self.codebooks.flatten(0, 1)).sum(2)

    def forward(self, latents: Tensor, n_quantizers: Tensor) -> QuantizerOutput:
        """A training step: quantizes, and in training mode moves the codebooks.

        Args:
            latents: `[B, T, D]`.
            n_quantizers: int64 `[B]`: levels that each example uses (quantizer dropout).
        """
        with torch.autocast(latents.device.type, enabled=False):
            latents = latents.float()
            residual = latents.detach()
            quantized = torch.zeros_like(residual)
            commitment = latents.new_zeros(())
            codes = []
            for level, codebook in enumerate(self.codebooks):
                used = n_quantizers > level
                indices = _nearest(residual, codebook)
                entries = codebook[indices]
                if self.training and bool(used.any()):
                    self._move(level, residual[used].flatten(0, 1), indices[used].flatten())
                # Each level's own residual, with gradient: latents minus what the earlier levels took.
                error = (latents - quantized - entries).square().mean((1, 2))
                commitment = commitment + (error * used).sum() / used.sum().clamp(min=1)
                step = entries * used[:, None, None]
                quantized = quantized + step
                residual = residual - step
                codes.append(indices)
            straight_through = latents + (quantized - latents).detach()
            return QuantizerOutput(straight_through, torch.stack(codes, 1), commitment / self.n_quantizers)

    @torch.no_grad()
    def _move(self, level: int, vectors: Tensor, indices: Tensor) -> None:
        counts = torch.bincount(indices, minlength=self.codebook_size).to(vectors.dtype)
        sums = torch.zeros_like(self.sums[level]).index_add_(0, indices, vectors)
        self.counts[level].lerp_(counts, 1 - self.decay)
        self.sums[level].lerp_(sums, 1 - self.decay)
        share = self.counts[level].sum() / self.codebook_size
        dead = self.counts[level] < self.restart_share * share
        if bool(dead.any()):
            fresh = vectors[torch.randint(len(vectors), (int(dead.sum()),), device=vectors.device)]
            self.sums[level, dead] = fresh * share
            self.counts[level, dead] = share
        self.codebooks[level] = self.sums[level] / self.counts[level].clamp(min=1e-6)[:, None]

    @torch.no_grad()
    def initialise(self, latents: Tensor, *, iterations: int = 10) -> None:
        """k-means for each level in turn on latents `[M, D]`, M at least `codebook_size`.

        Starts each level from random rows; entries left empty are re-seeded the same way.
        """
        residual = latents.detach().float()
        assert len(residual) >= self.codebook_size
        for level in range(self.n_quantizers):
            picks = torch.randperm(len(residual), device=residual.device)[: self.codebook_size]
            centres = residual[picks]
            for _ in range(iterations):
                indices = _nearest(residual, centres)
                counts = torch.bincount(indices, minlength=self.codebook_size)
                sums = torch.zeros_like(centres).index_add_(0, indices, residual)
                picks = torch.randint(len(residual), (self.codebook_size,), device=residual.device)
                means = sums / counts.clamp(min=1)[:, None]
                centres = torch.where(counts[:, None] > 0, means, residual[picks])
            self.codebooks[level] = centres
            share = counts.float().mean()
            self.counts[level] = share
            self.sums[level] = centres * share
            residual = residual - centres[_nearest(residual, centres)]


def _nearest(vectors: Tensor, codebook: Tensor) -> Tensor:
    """Index of the entry nearest to each vector: `[..., D]`, `[V, D]` → int64 `[...]`; the lower index on a tie."""
    # |x - c|² without |x|², which is the same for all entries.
    flat = vectors.reshape(-1, vectors.shape[-1])
    scores = torch.addmm(codebook.square().sum(1), flat, codebook.T, alpha=-2.0)
    return scores.argmin(-1).view(vectors.shape[:-1])
