"""Ordered excerpts against a plain loop, and predictions put together again."""

from collections import Counter
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_excerpts import Ramp

from codec.errors import AudioFileError, InputError
from codec.excerpts import Excerpts
from codec.sources import Source


class Filled(Ramp):
    """As sources are: what lies beyond an item's end is zero."""

    def get(self, excerpts):
        data = super().get([e._replace(length=max(e.length for e in excerpts)) for e in excerpts])
        for row, excerpt in zip(data, excerpts, strict=True):
            row[min(excerpt.length, max(self.length(excerpt.key) - excerpt.start, 0)) :] = 0
        return data


def spans(lengths, length, overlap, last):
    """(key, start, length) of each excerpt, by a loop."""
    found = []
    for key, total in lengths.items():
        start = 0
        while True:
            if start + length >= total:
                if last == "shift":
                    start = max(0, total - length)
                if start + length <= total or last != "drop":
                    found.append((key, start, min(length, total - start)))
                break
            found.append((key, start, length))
            start += length - overlap
    return found


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_excerpts_are_those_of_a_loop(data):
    totals = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    lengths = {f"k{i}": total for i, total in enumerate(totals)}
    length = data.draw(st.integers(1, 25))
    overlap = data.draw(st.integers(0, length - 1))
    last = data.draw(st.sampled_from(["short", "pad", "drop", "shift"]))
    batch_size = data.draw(st.integers(1, 5))
    expected = spans(lengths, length, overlap, last)
    arguments = {"overlap": Fraction(overlap, 100), "last": last, "batch_size": batch_size}
    if not expected:
        with pytest.raises(InputError, match="no excerpts of"):
            Excerpts({"x": Filled(lengths, 100)}, Fraction(length, 100), **arguments)
        return
    excerpts = Excerpts({"x": Filled(lengths, 100)}, Fraction(length, 100), **arguments)
    assert excerpts.num_excerpts == len(expected)
    found = []
    for batch in excerpts.loader():
        found += zip(batch["key"], batch["start"].tolist(), batch["length"].tolist(), strict=True)
        assert batch["x"].shape[-1] == (length if last == "pad" else batch["length"].max())
        for row, key, start, size in zip(
            batch["x"], *(list(batch[k]) for k in ("key", "start", "length")), strict=True
        ):
            first = list(lengths).index(key) * 10**6 + int(start)
            assert row[: int(size)].tolist() == list(range(first, first + int(size)))
            assert not row[int(size) :].any()
    assert found == expected
    assert len(excerpts) == -(-len(expected) // batch_size)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_overlap_add_gives_back_exactly_the_items(data):
    totals = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=4))
    lengths = {f"k{i}": total for i, total in enumerate(totals)}
    length = data.draw(st.integers(1, 30))
    overlap = data.draw(st.integers(0, length - 1))
    last = data.draw(st.sampled_from(["short", "pad", "shift"]))
    excerpts = Excerpts(
        {"x": Filled(lengths, 100)}, Fraction(length, 100), overlap=Fraction(overlap, 100), last=last, batch_size=3
    )
    parts = ((batch, batch["x"].double()[:, None].expand(-1, 2, -1)) for batch in excerpts.loader())
    whole = dict(excerpts.overlap_add(parts))
    assert list(whole) == list(lengths)
    for number, (key, total) in enumerate(lengths.items()):
        assert whole[key].shape == (2, total)
        torch.testing.assert_close(whole[key][1], number * 10**6 + torch.arange(total, dtype=torch.float64))


def test_overlaps_fade_linearly():
    excerpts = Excerpts({"x": Filled({"a": 30}, 10)}, 2, overlap=1)
    values = iter([0.0, 1.0])
    parts = ((batch, torch.full((1, 20), next(values))) for batch in excerpts.loader())
    ((_, whole),) = excerpts.overlap_add(parts)
    assert whole[:10].tolist() == [0] * 10
    assert whole[20:].tolist() == [1] * 10
    torch.testing.assert_close(whole[10:20], torch.arange(1, 11) / 11)


def test_overlap_add_at_another_rate_and_a_partly_filled_last_frame():
    """x has 3.125 frames of 320 samples: the item's end is that of x, to the sample."""
    sources = {"x": Filled({"a": 1000}, 16000), "y": Filled({"a": 4}, 50)}
    excerpts = Excerpts(sources, "0.04", batch_size=2)
    batches = list(excerpts.loader())
    assert [batch["start"].tolist() for batch in batches] == [[0, 2]]
    ((_, wave),) = excerpts.overlap_add([(batches[0], batches[0]["x"].float())], rate=16000)
    assert wave.tolist() == list(range(1000))
    ((_, frames),) = excerpts.overlap_add([(batches[0], batches[0]["y"].float())], rate=50)
    assert frames.tolist() == [0, 1, 2, 3]


def test_whole_items():
    lengths = {"a": 70, "b": 3, "c": 150}
    excerpts = Excerpts({"x": Filled(lengths, 100)}, None, batch_size=2)
    batches = list(excerpts.loader())
    assert [batch["key"] for batch in batches] == [["a", "b"], ["c"]]
    assert [batch["length"].tolist() for batch in batches] == [[70, 3], [150]]
    assert [tuple(batch["x"].shape) for batch in batches] == [(2, 70), (1, 150)]


def test_limits_per_item():
    lengths = {"a": 90, "b": 30, "c": 500}
    excerpts = Excerpts({"x": Filled(lengths, 100)}, "0.3", min_per_item=2, max_per_item=4)
    found = [(batch["key"][0], int(batch["start"])) for batch in excerpts.loader()]
    assert found == [("a", 0), ("a", 30), ("a", 60), ("c", 0), ("c", 30), ("c", 60), ("c", 90)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_have_equally_many_batches_and_together_all(num_workers):
    excerpts = Excerpts({"x": Filled({"a": 700}, 100)}, "0.5", batch_size=2)
    assert len(excerpts) == 7
    shares = []
    for rank in range(3):
        loader = excerpts.loader(rank=rank, world_size=3, num_workers=num_workers)
        assert len(loader) == 3
        shares.append([batch["start"][0].item() // 100 for batch in loader])
    assert shares == [[0, 3, 6], [1, 4, 0], [2, 5, 1]]
    assert [batch["start"][0].item() // 100 for batch in excerpts.loader(num_workers=num_workers)] == list(range(7))


class Damaged(Filled):
    """Some spans can't be read."""

    bad = frozenset({("a", 25), ("b", 0), ("c", 0), ("c", 25), ("d", 75)})

    def get(self, excerpts):
        for excerpt in excerpts:
            if (excerpt.key, excerpt.start) in self.bad:
                raise AudioFileError(f"{excerpt.key}: damaged")
        return super().get(excerpts)


DAMAGED = {"a": 100, "b": 30, "c": 50, "d": 100, "e": 60, "f": 25}


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_unreadable_excerpts_are_an_error_or_left_out_and_counted(batch_size, num_workers):
    damaged = {"x": Damaged(DAMAGED, 100)}
    whole = Excerpts({"x": Filled(DAMAGED, 100)}, "0.25", batch_size=batch_size)
    with pytest.raises(AudioFileError, match="a: damaged"):
        list(Excerpts(damaged, "0.25", batch_size=batch_size).loader())
    excerpts = Excerpts(damaged, "0.25", batch_size=batch_size, unreadable="skip")
    loader = excerpts.loader(num_workers=num_workers)

    def rows(batches):
        return [
            (key, start, x[:length].tolist())
            for batch in batches
            for key, start, length, x in zip(
                batch["key"], batch["start"].tolist(), batch["length"].tolist(), batch["x"], strict=True
            )
        ]

    expected = [row for row in rows(whole.loader()) if row[:2] not in Damaged.bad]
    for _ in range(2):
        assert rows(loader) == expected
        assert loader.skipped == {"a": 1, "b": 1, "c": 2, "d": 1}
    assert [batch["skipped"] for batch in map(excerpts.fetch, range(len(excerpts)))] == [
        [key for key, start in zip(batch["key"], batch["start"].tolist(), strict=True) if (key, start) in Damaged.bad]
        for batch in whole.loader()
    ]
    predictions = ((batch, batch["x"].float()) for batch in excerpts.loader())
    assert {key: len(wave) for key, wave in excerpts.overlap_add(predictions)} == {"e": 60, "f": 25}


def test_ranks_stay_even_where_whole_batches_are_skipped():
    excerpts = Excerpts({"x": Damaged(DAMAGED, 100)}, "0.25", unreadable="skip")
    skipped = Counter()
    for rank in range(2):
        loader = excerpts.loader(rank=rank, world_size=2)
        assert len(list(loader)) == len(loader) == -(-len(excerpts) // 2)
        skipped += loader.skipped
    assert skipped == {"a": 1, "b": 1, "c": 2, "d": 1}
    with pytest.raises(AudioFileError, match="damaged"):
        list(Excerpts({"x": Damaged({"b": 30}, 100)}, "0.25").loader())
    assert list(Excerpts({"x": Damaged({"b": 20}, 100)}, "0.25", unreadable="skip").loader(rank=0, world_size=2)) == []


def test_errors():
    source: Source = Filled({"a": 100, "b": 50}, 100)
    for arguments, message in (
        ({"length": "0.005"}, "length 1/200 s is 0.5 steps"),
        (
            {"length": 1, "overlap": "1/3"},
            r"overlap 1/3 s is 33.3333 steps of 1/100 s.* ≥ 0: take 33/100 s",
        ),
        ({"length": 1, "overlap": 1}, "overlap is 1 s of 1 s; it must be less than length"),
        ({"length": None, "overlap": 1}, "overlap is 1 s of whole items"),
        ({"length": 1, "last": "cut"}, "last='cut'; it must be"),
        ({"length": 1, "batch_size": 0}, "batch_size is 0"),
        ({"length": 1, "unreadable": "replace"}, "unreadable='replace'; it must be 'raise' or 'skip'"),
        ({"length": 1, "min_per_item": 3, "max_per_item": 2}, "give 1 ≤ min ≤ max"),
        ({"length": 2, "last": "drop"}, r"no excerpts of 2 s in 2 items \(the longest has 1 s\)"),
    ):
        with pytest.raises(InputError, match=message):
            Excerpts({"x": source}, **arguments)
    excerpts = Excerpts({"x": source}, "0.25", overlap="0.05")
    batches = list(excerpts.loader())
    with pytest.raises(InputError, match="'a' is put together up to step 25, then comes step 40 of 'a'"):
        list(excerpts.overlap_add((batch, batch["x"].float()) for batch in (batches[0], batches[2])))
    with pytest.raises(InputError, match="'a' is put together up to step 25, then comes the end"):
        list(excerpts.overlap_add([(batches[0], batches[0]["x"].float())]))
    with pytest.raises(InputError, match="prediction for 'a' has 20 positions, its excerpt 25 at 100 per second"):
        list(excerpts.overlap_add([(batches[0], torch.zeros(1, 20))]))
    with pytest.raises(InputError, match="rate 150 isn't a multiple of the grid's 100 per second"):
        list(excerpts.overlap_add([], rate=150))
    with pytest.raises(IndexError):
        excerpts[len(excerpts)]
