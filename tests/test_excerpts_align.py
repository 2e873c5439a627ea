"""One time for audio, tokens and labels: the grid, and the same number of everything each time."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_excerpts import Ramp

from codec.errors import InputError
from codec.excerpts import RandomExcerpts
from codec.sources import Arrays, Segments, Tokens
from codec.tokens import TokenStore, TokenWriter


@settings(deadline=None, max_examples=40)
@given(
    factors=st.lists(st.integers(1, 50), min_size=1, max_size=3),
    rate=st.fractions(Fraction(1, 3), 400, max_denominator=512),
    steps=st.integers(1, 30),
    seed=st.integers(0, 99),
)
def test_excerpts_begin_and_end_at_whole_steps_of_every_source(factors, rate, steps, seed):
    """Rates are multiples of the asked one; a finer common grid isn't used."""
    sources = {
        str(i): Ramp({"a": 5000 * factor + 3, "b": 77 * factor}, rate * factor) for i, factor in enumerate(factors)
    }
    loader = RandomExcerpts(sources, steps / rate, batch_size=5, seed=seed, align=rate, short="pad")
    assert loader.rate == rate
    assert loader.timeline.num_steps.tolist() == [5000 + 3 // max(factors), 77]
    batch = loader[0]
    for i, factor in enumerate(factors):
        first = batch[str(i)][:, 0] % 10**6
        assert (first == batch["start"] * factor).all()
        assert batch[str(i)].shape == (5, steps * factor)


def test_a_grid_is_that_of_the_rates_unless_it_is_asked_for():
    audio, frames = Ramp({"a": 48000 * 9}, 48000), Ramp({"a": 900}, 100)
    assert RandomExcerpts({"x": audio}, 1, batch_size=1, seed=0).rate == 48000
    assert RandomExcerpts({"x": audio, "y": frames}, 1, batch_size=1, seed=0).rate == 100
    assert RandomExcerpts({"x": audio}, 1, batch_size=1, seed=0, align=50).rate == 50
    assert RandomExcerpts({"x": audio, "y": frames}, 2, batch_size=1, seed=0, align="12.5").rate == Fraction(25, 2)
    with pytest.raises(InputError, match=r"1 s is 12\.5 steps of 2/25 s"):
        RandomExcerpts({"x": audio}, 1, batch_size=1, seed=0, align="12.5")


def test_rates_that_cannot_be_aligned_are_both_named():
    sources = {"x": Ramp({"a": 48000 * 9}, 48000), "y": Ramp({"a": 1000}, Fraction(22050, 512))}
    for align, message in (
        (75, r"align is 75 steps per second, source 'y' has 11025/256 positions per second: a step would be 0.574219 "
             r"of them; align to 75/256 or a divisor of it, or resample 'y' to a multiple of 75 per second"),
        (0, "align is 0; it must be above 0 steps per second, such as the codec's frame rate"),
        ("x", "'x' is not a finite duration"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            RandomExcerpts(sources, 1, batch_size=1, seed=0, align=align)
    with pytest.raises(InputError, match=r"11/20 s is 27.5 steps of 1/50 s, the grid that align=50 asks for;.*14/25 s"):
        RandomExcerpts({"x": sources["x"]}, "0.55", batch_size=1, seed=0, align=50)
    with pytest.raises(InputError, match=r"the sources' rates \['48000', '11025/256'\] share; .* take 256/75 s"):
        RandomExcerpts(sources, 3, batch_size=1, seed=0)


@pytest.fixture
def store(tmp_path, lookahead_codec):
    rng = np.random.default_rng(0)
    with TokenWriter(tmp_path / "store.ctok", lookahead_codec.spec) as writer:
        for key, num_samples in (("a", 16000), ("b", 31999), ("c", 48000), ("d", 100), ("e", 16001), ("f", 15999)):
            writer.add(key, rng.integers(0, 32, (4, -(-num_samples // 320))), num_samples=num_samples)
    return TokenStore(tmp_path / "store.ctok")


def recordings(store) -> Arrays:
    return Arrays({key: np.zeros((1, store.info(key).num_samples), np.float32) for key in store.keys()}, 16000)


@pytest.mark.parametrize("items", ["duration", "uniform", "shuffle"])
@pytest.mark.parametrize("positions", ["uniform", "grid"])
@pytest.mark.parametrize("short", ["skip", "pad"])
def test_a_store_and_its_recordings_are_drawn_alike(store, items, positions, short):
    """Swapping one for the other in a loop changes no draw."""
    options = {"batch_size": 4, "seed": 5, "items": items, "positions": positions, "short": short}
    tokens = RandomExcerpts({"x": Tokens(store)}, "0.5", **options)
    audio = RandomExcerpts({"x": recordings(store)}, "0.5", align=50, **options)
    assert tokens.rate == audio.rate == 50
    for a, b in zip(tokens.draw_range(0, 2000), audio.draw_range(0, 2000), strict=True):
        assert np.array_equal(a, b)


def test_every_excerpt_has_the_same_number_of_samples_frames_and_labels(store):
    """The last frame of most items is partly filled, so it isn't drawn."""
    rows = [(key, 0, Fraction(store.info(key).num_samples, 16000), "x") for key in store.keys()]
    sources = {
        "tokens": Tokens(store),
        "wave": recordings(store),
        "labels": Segments(rows, "sequence", rate=100),
    }
    for chosen in (sources, {"tokens": sources["tokens"]}):
        loader = RandomExcerpts(chosen, "0.5", batch_size=8, seed=0, items="uniform")
        for n in range(40):
            batch = loader[n]
            assert set(batch["tokens"].num_samples.tolist()) == {8000}
            assert set(batch["tokens"].lengths.tolist()) == set(batch["length"].tolist()) == {25}
            if len(chosen) > 1:
                assert batch["wave"].shape == (8, 1, 8000)
                assert (batch["labels"] == 0).all() and batch["labels"].shape == (8, 50)
    ends = dict.fromkeys(store.keys(), 0)
    loader = RandomExcerpts({"x": Tokens(store)}, "0.5", batch_size=8, seed=0, items="uniform")
    numbers, starts, _ = loader.draw_range(0, 20_000)
    for number, start in zip(numbers.tolist(), starts.tolist(), strict=True):
        ends[loader.keys[number]] = max(ends[loader.keys[number]], start + 25)
    assert ends == {"a": 50, "b": 99, "c": 150, "d": 0, "e": 50, "f": 49}


def test_an_item_of_less_than_a_frame_is_padded(store):
    loader = RandomExcerpts({"x": recordings(store)}, 1, batch_size=8, seed=0, items="shuffle", short="pad", align=50)
    batch = next(b for n in range(9) if "d" in (b := loader[n])["key"])
    row = batch["key"].index("d")
    assert (int(batch["start"][row]), int(batch["length"][row])) == (0, 1)
    with pytest.raises(InputError, match="'d' is shorter than one step of 1/50 s"):
        RandomExcerpts({"x": recordings(store)}, 1, batch_size=8, seed=0, short="repeat", align=50)
