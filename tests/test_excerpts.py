import multiprocessing
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch

from codec.errors import InputError
from codec.excerpts import Choice, RandomExcerpts, Uniform
from codec.sources import Source


class Ramp(Source):
    """A source whose samples say where they are: item number * 10**6 + position."""

    def __init__(self, lengths: dict[str, int], rate: Fraction | int) -> None:
        self._lengths = lengths
        self._rate = Fraction(rate)

    def keys(self):
        return list(self._lengths)

    def rate(self):
        return self._rate

    def lengths(self):
        return np.array(list(self._lengths.values()), dtype=np.int64)

    def get(self, excerpts):
        items = self.keys()
        return torch.stack([items.index(e.key) * 10**6 + e.start + torch.arange(e.length) for e in excerpts])


LENGTHS = {"a": 1000, "b": 160, "c": 4000}


def draws(**changes) -> RandomExcerpts:
    settings = {"batch_size": 4, "seed": 7, **changes}
    return RandomExcerpts({"x": Ramp(LENGTHS, 100)}, 1, **settings)


def drawn(loader: RandomExcerpts, count: int) -> Counter:
    items, starts, _ = loader.draw_range(0, count)
    return Counter(zip([loader.keys[item] for item in items], starts.tolist(), strict=True))


def test_batch_n_depends_on_nothing_but_seed_and_n():
    first, again = draws(), draws()
    _ = [again[n] for n in (5, 0, 5)]
    assert torch.equal(first[3]["x"], again[3]["x"])
    assert not torch.equal(first[3]["x"], first[4]["x"])
    assert not torch.equal(first[3]["x"], draws(seed=8)[3]["x"])


def test_seeds_never_alias():
    """Seed 1's draws aren't seed 0's shifted by one (as they are with seed + n)."""
    zero = [draws(seed=0).draw(n) for n in range(200)]
    one = [draws(seed=1).draw(n) for n in range(200)]
    for shift in range(-3, 4):
        equal = sum(zero[n] == one[n + shift] for n in range(5, 190))
        assert equal < 5


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_workers_change_nothing(num_workers):
    expected = [draws()[n]["x"] for n in range(2, 7)]
    loaded = [batch["x"] for batch in draws().loader(start_batch=2, num_batches=5, num_workers=num_workers)]
    assert len(loaded) == 5
    assert all(torch.equal(a, b) for a, b in zip(expected, loaded, strict=True))


def test_an_endless_loader_goes_on_and_resumes():
    loader = iter(draws().loader())
    seen = [next(loader)["start"] for _ in range(20)]
    resumed = next(iter(draws().loader(start_batch=19)))
    assert torch.equal(seen[19], resumed["start"])
    with pytest.raises(TypeError, match="endless"):
        len(draws().loader())


def _first_start(queue) -> None:
    queue.put(draws(rngs={"gain": Uniform(-1, 1)})[0]["gain"].tolist())


def test_other_processes_draw_the_same():
    """`hash()` differs between processes; names of random values must not go through it."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_first_start, args=(queue,))
    process.start()
    assert queue.get(timeout=60) == draws(rngs={"gain": Uniform(-1, 1)})[0]["gain"].tolist()
    process.join()


def test_every_excerpt_is_equally_likely_by_duration():
    loader = draws()
    counts = drawn(loader, 60_000)
    possible = [(key, start) for key, length in LENGTHS.items() for start in range(length - 99)]
    assert set(counts) <= set(possible)
    observed = np.array([counts[excerpt] for excerpt in possible])
    expected = 60_000 / len(possible)
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = len(possible) - 1
    assert abs(chi_square - degrees) < 5 * np.sqrt(2 * degrees)


def test_every_item_is_equally_likely_when_uniform():
    loader = draws(items="uniform")
    counts = drawn(loader, 30_000)
    per_item = Counter()
    for (key, _), count in counts.items():
        per_item[key] += count
    assert all(abs(per_item[key] - 10_000) < 5 * np.sqrt(10_000) for key in LENGTHS)
    starts = {start for key, start in counts if key == "b"}
    assert starts == set(range(61))


def test_weights_multiply_the_odds():
    loader = draws(items=lambda key: {"a": 3, "b": 0}.get(key, 1))
    counts = drawn(loader, 40_000)
    per_item = Counter()
    for (key, _), count in counts.items():
        per_item[key] += count
    expected = 3 * 901 / (3 * 901 + 3901)
    assert set(per_item) == {"a", "c"}
    assert abs(per_item["a"] / 40_000 - expected) < 5 * np.sqrt(expected * (1 - expected) / 40_000)
    assert {start for key, start in counts if key == "a"} == set(range(901))
    with pytest.raises(InputError, match="weights from 0 to 0"):
        draws(items=lambda key: 0)


def test_excerpts_are_what_they_say():
    batch = draws()[11]
    for row, key, start in zip(batch["x"], batch["key"], batch["start"].tolist(), strict=True):
        item = list(LENGTHS).index(key)
        assert row.tolist() == list(range(item * 10**6 + start, item * 10**6 + start + 100))
    assert batch["length"].tolist() == [100] * 4


def test_sources_of_different_rates_give_the_same_time():
    samples, frames = (
        Ramp({"a": 44100 * 9, "b": 44100 * 9}, 44100),
        Ramp({"b": 700, "a": 700}, Fraction(147, 2)),
    )
    loader = RandomExcerpts({"x": samples, "y": frames}, "2/3", batch_size=8, seed=0)
    assert loader.rate == Fraction(147, 2)
    batch = loader[0]
    assert batch["x"].shape == (8, 29400)
    assert batch["y"].shape == (8, 49)
    sample_starts, frame_starts = batch["x"][:, 0] % 10**6, batch["y"][:, 0] % 10**6
    assert torch.equal(sample_starts, frame_starts * 600)
    assert torch.equal(frame_starts, batch["start"])


def test_only_common_keys_are_drawn_and_the_rest_is_reported():
    sources = {"x": Ramp({"a": 500, "b": 500}, 100), "y": Ramp({"b": 500, "c": 500}, 100)}
    with pytest.warns(UserWarning, match="2 keys are not in every source"):
        loader = RandomExcerpts(sources, 1, batch_size=2, seed=0)
    assert {key for n in range(20) for key in loader[n]["key"]} == {"b"}


def test_short_items_are_skipped_or_padded():
    source = Ramp({"short": 50, "long": 300}, 100)
    skipping = RandomExcerpts({"x": source}, 1, batch_size=4, seed=0)
    assert skipping.num_items == 1
    padding = RandomExcerpts({"x": source}, 1, batch_size=4, seed=0, items="uniform", short="pad")
    assert {padding.draw(n) for n in range(100) if padding.draw(n)[0] == "short"} == {("short", 0)}


def test_named_values_have_their_own_streams():
    one = draws(rngs={"gain": Uniform(-6, 6)})
    two = draws(rngs={"pitch": Uniform(0, 1), "gain": Uniform(-6, 6), "on": Choice((0, 1), (3, 1))})
    assert torch.equal(one[2]["gain"], two[2]["gain"])
    assert torch.equal(one[2]["x"], two[2]["x"])
    assert not torch.allclose(two[2]["gain"] / 12 + 0.5, two[2]["pitch"], atol=1e-3)
    values = torch.cat([two[n]["gain"] for n in range(500)])
    assert values.min() >= -6
    assert values.max() < 6
    assert abs(values.mean()) < 0.4
    share = torch.cat([two[n]["on"] for n in range(500)]).mean()
    assert 0.2 < share < 0.3


@pytest.mark.parametrize(
    ("sources", "length", "changes", "message"),
    [
        ({}, 1, {}, "sources is empty"),
        ({"x": Ramp(LENGTHS, 100)}, "1/3", {}, r"length 1/3 s is 33.3333 steps of 1/100 s.*take 33/100 s"),
        ({"x": Ramp(LENGTHS, 100)}, 0, {}, "whole number ≥ 1: take 1/100 s"),
        ({"x": Ramp(LENGTHS, 100)}, 60, {}, "no item is as long as 60 s .the longest has 40 s"),
        ({"x": Ramp(LENGTHS, 100)}, 1, {"batch_size": 0}, "batch_size is 0"),
        ({"x": Ramp(LENGTHS, 100)}, 1, {"seed": -1}, "seed is -1"),
        ({"x": Ramp(LENGTHS, 100)}, 1, {"items": "all"}, "items='all'"),
        ({"x": Ramp(LENGTHS, 100)}, 1, {"rngs": {"key": Uniform(0, 1)}}, r"rngs \['key'\] would overwrite"),
        ({"x": Ramp({"a": 500}, 100), "y": Ramp({"b": 500}, 100)}, 1, {}, "no common key"),
        ({"x": Ramp(LENGTHS, 100)}, float("nan"), {}, "not a finite duration"),
    ],
)
def test_errors(sources, length, changes, message):
    with pytest.raises(InputError, match=message):
        RandomExcerpts(sources, length, **{"batch_size": 2, "seed": 0, **changes})
