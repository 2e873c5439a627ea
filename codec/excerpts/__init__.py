"""Which excerpts: random draws that are a pure function of (seed, n), and ordered ones.

Draw n — the item, the position, every augmentation value — follows from counter-based random numbers
(Philox 4x32, Salmon et al. 2011) keyed by the seed and counted by n. Workers, ranks, restarts and batch order change
nothing, and a loader resumes from one integer.
"""

from codec.excerpts.distributions import Choice, Distribution, Uniform
from codec.excerpts.drawing import RandomExcerpts
from codec.excerpts.loading import FixedLoader, ResumableLoader
from codec.excerpts.ordered import Excerpts, OrderedLoader
from codec.excerpts.timeline import Batch

__all__ = [
    "Batch",
    "Choice",
    "Distribution",
    "Excerpts",
    "FixedLoader",
    "OrderedLoader",
    "RandomExcerpts",
    "ResumableLoader",
    "Uniform",
]
