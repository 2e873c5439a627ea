"""Which excerpts: distributions, coverage, permutations, lengths, short items, damaged files."""

import doctest
import itertools
import math
import resource
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_excerpts import Ramp

from codec.errors import AudioFileError, InputError
from codec.excerpts import Excerpts, RandomExcerpts, Uniform
from codec.excerpts.counters import below, permuted, philox
from codec.sources import AudioFiles, Excerpt, Segments

ITEMS = {"a": 1000, "b": 160, "c": 4000, "d": 330, "e": 100, "f": 555, "g": 250}


def excerpts(lengths=ITEMS, length=1, **changes) -> RandomExcerpts:
    return RandomExcerpts({"x": Ramp(lengths, 100)}, length, **{"batch_size": 4, "seed": 7, **changes})


def deviations(observed, expected) -> float:
    """Chi-square, in standard deviations from what chance gives."""
    observed, expected = np.asarray(observed, float), np.asarray(expected, float)
    degrees = len(observed) - 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def test_philox_gives_the_published_numbers():
    """Random123's known answers of philox4x32-10."""
    ones = 2**64 - 1
    for seed, stream, counter, low, high in (
        (0, 0, 0, 0xE169C58D6627E8D5, 0x9B00DBD8BC57AC4C),
        (ones, ones, ones, 0x41C83B0E408F276D, 0x6D5451FDA20BC7C6),
        (0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88, 0x94FDCCEBD16CFE09, 0x24126EA15001E420),
    ):
        words = philox(seed, stream, np.array([counter], np.uint64))
        assert [int(w[0]) for w in words] == [low, high]


def test_streams_and_seeds_share_no_block():
    blocks = [philox(seed, stream, np.arange(5000))[0] for seed in (0, 1, 2**32, 2**63) for stream in (0, 2, 3, 2**40)]
    assert len(np.unique(np.concatenate(blocks))) == 16 * 5000


@settings(deadline=None, max_examples=60)
@given(size=st.one_of(st.integers(1, 300), st.integers(4000, 5000)), key=st.integers(0, 2**64 - 1))
def test_permutations_are_permutations(size, key):
    assert np.array_equal(np.sort(permuted(np.arange(size), size, np.full(size, key, np.uint64))), np.arange(size))


def test_huge_permutations_need_no_memory():
    size, keys = 2**61 + 5, np.full(1000, 12345, np.uint64)
    places = permuted(np.arange(1000) + size - 1000, size, keys)
    assert len(set(places.tolist())) == 1000
    assert places.min() >= 0 and places.max() < size
    assert places.mean() / size == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_every_permutation_is_equally_likely(size):
    count = 200 * math.factorial(size)
    keys = philox(1, 0, np.arange(count))[0]
    columns = [permuted(np.full(count, i), size, keys) for i in range(size)]
    found = Counter(zip(*(column.tolist() for column in columns), strict=True))
    assert set(found) <= set(itertools.permutations(range(size)))
    assert deviations([found[p] for p in itertools.permutations(range(size))], np.full(math.factorial(size), 200)) < 5


MODES = [
    (items, positions, unique)
    for items in ("duration", "uniform", "shuffle")
    for positions in ("uniform", "grid")
    for unique in (False, True)
    if (items, positions, unique) != ("duration", "grid", True)
]


@pytest.mark.parametrize(("items", "positions", "unique"), MODES)
def test_items_and_positions_are_uniform_in_every_mode(items, positions, unique):
    loader = excerpts(items=items, positions=positions, unique_items_per_batch=unique, batch_size=2)
    count = 120_000
    numbers, starts, lengths = loader.draw_range(0, count)
    assert (lengths == 100).all()
    keys = list(ITEMS)
    room = np.array([length - 99 for length in ITEMS.values()])
    per_item = np.bincount(numbers, minlength=len(keys))
    if items == "duration" and positions == "grid":
        weights = np.maximum(1, room // 100)
    elif items == "duration":
        weights = room
    else:
        weights = np.ones(len(keys))
    # A pass of the grid leaves one of the 7 items out of all its 64 rounds.
    lump = 64 if (items, positions, unique) == ("uniform", "grid", True) else 1
    if (items, unique) != ("duration", True):  # redrawing twins evens the odds a little
        assert deviations(per_item / lump, count / lump * weights / weights.sum()) < 5
    for item in range(len(keys)):
        mine = starts[numbers == item]
        assert mine.min() >= 0
        assert mine.max() < room[item]
        bins = min(int(room[item]), 40)
        edges = np.arange(bins + 1) * room[item] / bins
        sizes = np.diff(np.ceil(edges))
        observed = np.bincount(mine * bins // room[item], minlength=bins)
        if bins > 1:
            assert deviations(observed, len(mine) * sizes / sizes.sum()) < 5


def test_successive_draws_are_independent():
    loader = excerpts({"a": 1099}, seed=3)
    _, starts, _ = loader.draw_range(0, 100_000)
    pairs = np.bincount(starts[:-1] // 100 * 10 + starts[1:] // 100, minlength=100)
    assert deviations(pairs, np.full(100, 99_999 / 100)) < 5


@pytest.mark.parametrize("positions", ["uniform", "grid"])
def test_a_shuffle_gives_every_item_once_each_time(positions):
    loader = excerpts(items="shuffle", positions=positions)
    numbers, _, _ = loader.draw_range(0, 7 * 500)
    orders = numbers.reshape(500, 7)
    assert (np.sort(orders, axis=1) == np.arange(7)).all()
    assert len({tuple(order) for order in orders.tolist()}) > 450


def test_a_grid_gives_every_slot_once_and_never_overlaps():
    loader = excerpts(positions="grid")
    slots = {key: max(1, (length - 99) // 100) for key, length in ITEMS.items()}
    total = sum(slots.values())
    shifts = set()
    for turn in range(5):
        numbers, starts, _ = loader.draw_range(turn * total, total)
        for item, key in enumerate(ITEMS):
            mine = np.sort(starts[numbers == item])
            assert len(mine) == slots[key]
            assert (np.diff(mine) >= 100).all()
            shifts.add((key, int(mine[0])))
    assert len(shifts) > 20


def test_shuffled_items_visit_each_slot_once():
    loader = excerpts(items="shuffle", positions="grid")
    numbers, starts, _ = loader.draw_range(0, 7 * 39)
    long = np.sort(starts[numbers == list(ITEMS).index("c")])  # 39 slots, 39 visits
    assert len(long) == 39
    assert (np.diff(long) >= 100).all()


def test_uniform_items_on_the_grid_come_64_times_per_round():
    loader = excerpts(items="uniform", positions="grid")
    numbers, starts, _ = loader.draw_range(0, 7 * 64)
    assert (np.bincount(numbers) == 64).all()
    in_seven = [len(set(some.tolist())) for some in numbers.reshape(-1, 7)]
    assert np.mean(in_seven) < 5.5  # a shuffle has 7; independent draws have 4.6
    first_39 = np.sort(starts[numbers == 2])
    assert len(first_39) == 64


def test_weights_on_the_grid_repeat_slots():
    loader = excerpts({"a": 1000, "b": 1000}, positions="grid", items=lambda key: {"a": 3, "b": 1}[key])
    numbers, starts, _ = loader.draw_range(0, 9 * 4)
    assert np.bincount(numbers).tolist() == [27, 9]
    assert len(np.unique(starts[numbers == 0])) == 27


@pytest.mark.parametrize(("items", "positions"), [(i, p) for i, p, unique in MODES if unique])
def test_unique_items_per_batch(items, positions):
    loader = excerpts(items=items, positions=positions, unique_items_per_batch=True, batch_size=3)
    numbers, _, _ = loader.draw_range(0, 3 * 2000)
    assert (np.diff(np.sort(numbers.reshape(2000, 3), axis=1), axis=1) > 0).all()
    assert set(numbers.tolist()) == set(range(7))
    if items == "shuffle":  # two batches of 3 per pass, one of 7 items left out
        passes = np.sort(numbers.reshape(1000, 6), axis=1)
        assert (np.diff(passes, axis=1) > 0).all()
    again, _, _ = loader.draw_range(3 * 700 + 1, 4)
    assert again.tolist() == numbers[3 * 700 + 1 : 3 * 700 + 5].tolist()


def test_a_whole_batch_of_all_items():
    loader = excerpts(unique_items_per_batch=True, batch_size=7)
    for n in range(20):
        assert sorted(loader[n]["key"]) == list("abcdefg")


def test_numbers_and_batches_agree_and_far_ones_work():
    for items, positions, unique in MODES:
        loader = excerpts(items=items, positions=positions, unique_items_per_batch=unique)
        for n in (0, 3, 10**12):
            batch = loader[n]
            drawn = [loader.draw(4 * n + row) for row in range(4)]
            assert list(zip(batch["key"], batch["start"].tolist(), strict=True)) == drawn


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(1, 9)), min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    length=st.sampled_from([1, (1, 2)]),
)
def test_draws_made_ahead_are_the_same(monkeypatch, asked, mode, length):
    """Whatever was asked for before: far or near, one after the other or by strides, forwards or back."""
    items, positions, unique = mode
    changes = {"items": items, "positions": positions, "unique_items_per_batch": unique}
    changes["length"] = 1 if positions == "grid" else length
    monkeypatch.setattr("codec.excerpts.drawing._BLOCK", 16)
    used = excerpts(rngs={"gain": Uniform(0, 1)}, **changes)
    for first, stride, count in asked:
        for n in range(first, first + stride * count, stride):
            fresh = excerpts(rngs={"gain": Uniform(0, 1)}, **changes)
            batch, expected = used[n], fresh[n]
            assert batch["key"] == expected["key"]
            for name in ("start", "length", "gain"):
                assert torch.equal(batch[name], expected[name])
            for one, other in zip(used.draw_range(n, stride), fresh.draw_range(n, stride), strict=True):
                assert one.tolist() == other.tolist()


def test_who_asks_in_steps_gets_draws_made_ahead(monkeypatch):
    """A worker of many asks for every so many-th batch; a draw of one batch costs as much as of thirty."""
    for stride in (1, 3, 1000):
        loader = excerpts(batch_size=32)
        calls = []

        def counted(numbers, draw=loader._draw, calls=calls):
            calls.append(1)
            return draw(numbers)

        monkeypatch.setattr(loader, "_draw", counted)
        for n in range(64):
            loader.fetch(n * stride)
        assert len(calls) <= 5


def test_lengths_of_a_range_honour_the_items():
    loader = excerpts(length=("0.5", 3))
    batches = [loader[n] for n in range(400)]
    lengths = [int(batch["length"][0]) for batch in batches]
    assert min(lengths) < 60
    assert max(lengths) > 290
    for batch, length in zip(batches, lengths, strict=True):
        assert batch["x"].shape == (4, length)
        assert batch["length"].tolist() == [length] * 4
        assert all(ITEMS[k] >= s + length for k, s in zip(batch["key"], batch["start"].tolist(), strict=True))
    assert {k for batch in batches for k in batch["key"]} >= {"a", "b", "c", "e"}


@pytest.mark.parametrize("items", ["duration", "uniform"])
def test_a_range_has_the_odds_of_its_lengths(items):
    loader = excerpts(length=("1", "1.02"), items=items)
    numbers, starts, lengths = loader.draw_range(0, 200_000)
    for length in (100, 101, 102):
        chosen = lengths == length
        assert abs(chosen.mean() - 1 / 3) < 5 * math.sqrt(4 / (9 * 2) / 50_000)
        room = np.maximum([n - length + 1 for n in ITEMS.values()], 0)
        weights = room if items == "duration" else room > 0
        found = np.bincount(numbers[chosen], minlength=7)
        keep = room > 0
        assert not found[~keep].any()
        assert deviations(found[keep], chosen.sum() * weights[keep] / weights.sum()) < 5
        assert starts[chosen & (numbers == 1)].max() <= room[1] - 1


def test_a_shuffle_of_a_range_is_as_long_as_its_shortest_item():
    loader = excerpts(length=("0.9", 30), items="shuffle", batch_size=2)
    for n in range(50):
        batch = loader[n]
        length = int(batch["length"][0])
        assert 90 <= length <= min(ITEMS[key] for key in batch["key"])


def test_short_items_are_padded_repeated_or_an_error():
    lengths = {"one": 1, "short": 30, "long": 300}
    padded = excerpts(lengths, items="shuffle", short="pad", batch_size=3)[0]
    repeated = excerpts(lengths, items="shuffle", short="repeat", batch_size=3)[0]
    assert padded["key"] == repeated["key"]
    for batch in (padded, repeated):
        assert batch["x"].shape == (3, 100)
    rows = dict(zip(repeated["key"], repeated["x"], strict=True))
    assert rows["one"].tolist() == [0] * 100
    assert rows["short"].tolist() == [10**6 + i % 30 for i in range(100)]
    assert dict(zip(padded["key"], padded["length"].tolist(), strict=True)) == {"one": 1, "short": 30, "long": 100}
    with pytest.raises(InputError, match=r"'one' has 0.01 s, less than length 1 s \(2 such items\); lower length"):
        excerpts(lengths, short="error")


def test_the_far_end_of_a_long_item_doesnt_drift():
    """3 hours at 44.1 kHz and at 44100/512 frames per second: the last excerpt ends exactly with the item."""
    frames = 3 * 3600 * 44100 // 512
    sources = {"x": Ramp({"a": frames * 512}, 44100), "y": Ramp({"a": frames}, Fraction(44100, 512))}
    loader = RandomExcerpts(sources, Fraction(512 * 100, 44100), batch_size=64, seed=0)
    _, starts, _ = loader.draw_range(0, 4_000_000)
    assert starts.max() == frames - 100
    assert starts.min() == 0
    n = int(np.flatnonzero(starts == frames - 100)[0])
    row = n % 64
    batch = loader[n // 64]
    assert batch["x"][row, -1] == frames * 512 - 1
    assert batch["y"][row, -1] == frames - 1


def test_items_of_one_sample():
    loader = RandomExcerpts({"x": Ramp({"a": 1, "b": 1}, 48000)}, "1/48000", batch_size=8, seed=0)
    assert {loader.draw(n) for n in range(50)} == {("a", 0), ("b", 0)}
    assert loader[0]["x"].shape == (8, 1)


def test_stretched_excerpts_stay_inside_their_item():
    class Double(Ramp):
        def reach(self, length, values):
            return int(length * values["speed"])

    loader = RandomExcerpts(
        {"x": Double(ITEMS, 100)}, 1, batch_size=64, seed=0, rngs={"speed": Uniform(1, 2)}, items="uniform"
    )
    late = 0
    for n in range(50):
        batch = loader[n]
        for key, start, speed in zip(batch["key"], batch["start"].tolist(), batch["speed"].tolist(), strict=True):
            if int(100 * speed) <= ITEMS[key]:
                assert start + int(100 * speed) <= ITEMS[key]
            else:
                assert start == 0
            late += start > ITEMS[key] - 250
    assert late > 50


class Damaged(Ramp):
    def get(self, excerpts):
        for excerpt in excerpts:
            if excerpt.key == "b":
                raise AudioFileError("b: damaged")
        return super().get(excerpts)


def test_an_unreadable_file_is_an_error_or_another_draw():
    sources = {"x": Damaged(ITEMS, 100)}
    raising = RandomExcerpts(sources, 1, batch_size=8, seed=1, items="shuffle")
    with pytest.raises(AudioFileError, match="b: damaged"):
        raising[0]
    replacing = RandomExcerpts(sources, 1, batch_size=8, seed=1, items="shuffle", unreadable="replace")
    batches = [replacing[n] for n in range(20)]
    assert sum(int(batch["replaced"]) for batch in batches) == 20 * 8 // 7 + 1
    for n, batch in enumerate(batches):
        assert "b" not in batch["key"]
        assert torch.equal(replacing[n]["x"], batch["x"])
        kept = [key for key, _ in (raising.draw(8 * n + row) for row in range(8))]
        assert sum(a != b for a, b in zip(kept, batch["key"], strict=True)) == int(batch["replaced"])
    with pytest.raises(AudioFileError, match="b: damaged"):
        RandomExcerpts({"x": Damaged({"b": 500}, 100)}, 1, batch_size=2, seed=1, unreadable="replace")[0]


def test_batches_as_tuples():
    batch = excerpts(rngs={"gain": Uniform(0, 1)})[0]
    x, gain = batch.as_tuple("x", "gain")
    assert x is batch["x"]
    assert gain is batch["gain"]
    with pytest.raises(InputError, match="no entry 'y'; it has x, key, start, length, gain"):
        batch.as_tuple("x", "y")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": "files"}, r"items='files'; it must be one of \('duration'"),
        ({"positions": "jitter"}, "positions='jitter'; it must be one of"),
        ({"short": "cut"}, "short='cut'; it must be one of"),
        ({"unreadable": "skip"}, "unreadable='skip'; it must be one of"),
        ({"unique_items_per_batch": True, "batch_size": 8}, "7 items for batches of 8 different ones; lower"),
        ({"unique_items_per_batch": True, "positions": "grid"}, "positions='grid' needs items='shuffle' or 'uniform'"),
        ({"length": (1, 2), "positions": "grid"}, "positions='grid' needs one length"),
        ({"length": (2, 1)}, r"length \(2, 1\) s is no range"),
        ({"lengths": {"a": 10**15}, "items": lambda key: 10**6}, r"weights up to 1000000 .* pass 2\*\*62"),
    ],
)
def test_errors(changes, message):
    with pytest.raises(InputError, match=message):
        excerpts(**changes)


def test_errors_of_batches():
    with pytest.raises(InputError, match="batch -1; batches are numbered from 0"):
        excerpts()[-1]


MILLION = """
import time
import numpy as np
from fractions import Fraction
from codec.excerpts import RandomExcerpts
from codec.sources import Source

class Many(Source):
    def __init__(self):
        self._keys = [f"speaker{i % 1000}/{i}.flac" for i in range(10**6)]
        self._lengths = np.random.default_rng(0).integers(10, 3 * 3600, 10**6) * 48000
    def keys(self): return self._keys
    def rate(self): return Fraction(48000)
    def lengths(self): return self._lengths
    def get(self, excerpts): return [e.start for e in excerpts]

source = Many()
def used():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
for options in ({}, {"items": "shuffle"}, {"items": "uniform", "positions": "grid"}, {"positions": "grid"}):
    open("/proc/self/clear_refs", "w").write("5")  # the peak is now what is in use
    before, started = used(), time.process_time()
    loader = RandomExcerpts({"x": source}, 2, batch_size=32, seed=0, **options)
    loader[10**9]
    print(time.process_time() - started, used() - before)
"""


def test_a_million_items_start_in_a_moment():
    done = subprocess.run([sys.executable, "-c", MILLION], capture_output=True, text=True, check=True)
    lines = [[float(number) for number in line.split()] for line in done.stdout.splitlines()]
    assert 5 < lines[0][1] < 150  # more than nothing, or it was not measured
    assert all(memory < 150 for _, memory in lines)
    assert all(seconds < 1 for seconds, _ in lines)


def test_below_is_exact_for_large_limits():
    words = np.array([2**64 - 1, 0, 5], np.uint64)
    assert below(words, 2**40 + 7).tolist() == [(2**64 - 1) % (2**40 + 7), 0, 5]


def resident_megabytes() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def test_memory_is_flat_over_many_draws():
    loader = excerpts(batch_size=64)
    for n in range(50):
        loader[n]
    before = resident_megabytes()
    for n in range(1600):
        loader[n]
    assert resident_megabytes() - before < 8


@pytest.mark.parametrize("example", [RandomExcerpts, AudioFiles, Segments, Excerpts])
def test_examples_run(example, monkeypatch):
    monkeypatch.chdir(DATA.parents[1])
    names = {"RandomExcerpts": RandomExcerpts, "AudioFiles": AudioFiles, "Segments": Segments, "Excerpt": Excerpt}
    names |= {"Excerpts": Excerpts, "model": torch.nn.Identity()}
    (test,) = doctest.DocTestFinder(recurse=False).find(example, example.__name__, globs=names)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
