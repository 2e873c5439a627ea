"""Arrays, strings and labels; labels against brute force in exact fractions."""

import os
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_excerpts import Ramp

from codec.errors import InputError
from codec.excerpts import Excerpts, RandomExcerpts
from codec.sources import Arrays, Excerpt, Pad, Segments, Strings

RATES = [
    Fraction(rate, hop) for rate in (11025, 22050, 44100, 48000) for hop in (1, 320, 512)
] + [Fraction(70, 51), Fraction(16000)]  # fmt: skip


def label_at(rows, key, time):
    """The label at an exact time, -1 if there is none."""
    found = [label for k, start, stop, label in rows if k == key and Fraction(start) <= time < Fraction(stop)]
    return found[0] if found else None


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_labels_are_those_of_brute_force(data):
    rate = data.draw(st.sampled_from(RATES))
    # Edges on whole and half positions, where rounding would show, and anywhere else.
    edge = st.one_of(
        st.builds(lambda n: Fraction(n, 2) / rate, st.integers(0, 80)),
        st.builds(lambda ms: Fraction(ms, 1000), st.integers(0, int(40000 / rate) + 2)),
    )
    rows = []
    for key in "ab":
        edges = sorted(data.draw(st.lists(edge, min_size=2, max_size=8, unique=True)))
        kept = data.draw(st.lists(st.booleans(), min_size=len(edges), max_size=len(edges)))
        spans = [span for span, keep in zip(pairwise(edges), kept, strict=False) if keep]
        rows += [(key, *span, data.draw(st.sampled_from("uvw"))) for span in spans or [(edges[0], edges[1])]]
    rows = data.draw(st.permutations(rows))
    start, length = data.draw(st.integers(-5, 60)), data.draw(st.integers(1, 40))
    asked = [Excerpt("a", start, length), Excerpt("b", start + 3, length)]
    classes = ["u", "v", "w"]
    sequence = Segments(rows, "sequence", rate=rate, classes=classes).get(asked)
    mask = Segments(rows, "mask", rate=rate, classes=classes).get(asked)
    center = Segments(rows, "center", rate=rate, classes=classes).get(asked)
    for row, (key, first, _) in enumerate(asked):
        labels = [label_at(rows, key, Fraction(2 * (first + i) + 1, 2) / rate) for i in range(length)]
        assert [classes[i] if i >= 0 else None for i in sequence[row].tolist()] == labels
        for index, name in enumerate(classes):
            assert mask[row, index].tolist() == [float(label == name) for label in labels]
        middle = label_at(rows, key, (first + Fraction(length, 2)) / rate)
        assert (classes[center[row]] if center[row] >= 0 else None) == middle


@pytest.mark.parametrize("sample_rate", [11025, 22050, 44100, 48000])
@pytest.mark.parametrize("hop", [320, 512])
def test_labels_line_up_with_samples_and_frames(sample_rate, hop):
    """Random excerpts of samples, frames and labels of 3 hours: each label is the one at its own samples' middle."""
    frames = 3 * 3600 * sample_rate // hop
    frame_rate = Fraction(sample_rate, hop)
    rng = np.random.default_rng(0)
    edges = np.sort(rng.choice(3 * 3600 * 1000, 20001, replace=False))
    rows = [("a", Decimal(int(b)) / 1000, Decimal(int(e)) / 1000, f"{i % 7}") for i, (b, e) in enumerate(
        pairwise(edges))]  # fmt: skip
    loader = RandomExcerpts(
        {
            "x": Ramp({"a": frames * hop}, sample_rate),
            "y": Ramp({"a": frames}, frame_rate),
            "label": Segments(rows, "sequence", rate=frame_rate),
        },
        Fraction(hop * 40, sample_rate),
        batch_size=8,
        seed=5,
    )
    for n in range(3):
        batch = loader[n]
        assert torch.equal(batch["x"][:, ::hop], batch["y"] * hop)
        for row, frame in zip(batch["label"], batch["y"], strict=True):
            times = (2 * frame.numpy() + 1) * hop * 1000  # in 1/(2 * sample_rate) ms
            index = np.searchsorted(edges * 2 * sample_rate, times, side="right") - 1
            inside = (index >= 0) & (index < 20000)
            assert row.tolist() == np.where(inside, index % 7, -1).tolist()


def test_an_excerpt_of_51_seventieths():
    sources = {"x": Ramp({"a": 44100 * 9}, 44100), "y": Segments([("a", 1, "2.5", "s")], "sequence", rate=70)}
    batch = RandomExcerpts(sources, "51/70", batch_size=6, seed=0)[0]
    assert batch["x"].shape == (6, 32130)
    assert batch["y"].shape == (6, 51)
    assert torch.equal(batch["x"][:, 0], batch["start"] * 630)
    with pytest.raises(InputError, match=r"length 51/70 s is 36.4286 steps of 1/50 s"):
        RandomExcerpts({"x": Ramp({"a": 900}, 50)}, "51/70", batch_size=1, seed=0)


def test_tables_of_every_kind(tmp_path):
    rows = [("a", "0", "0.5", "x"), ("b", "0.1", "0.2", "y")]
    text = "key,start,stop,label\na,0,0.5,x\nb,0.1,0.2,y\n"
    (tmp_path / "t.csv").write_text(text)
    (tmp_path / "t.tsv").write_text("\ufeff" + text.replace(",", "\t"))

    class Frame:
        def to_dict(self, orient):
            assert orient == "records"
            records = [dict(zip(("key", "start", "stop", "label"), row, strict=True)) for row in rows]
            return [{**r, "start": np.float64(r["start"]), "stop": np.float32(r["stop"])} for r in records]

    class Polars:
        def to_dicts(self):
            return Frame().to_dict("records")

    asked = [Excerpt("a", 0, 10), Excerpt("b", 0, 10)]
    for table in (rows, tmp_path / "t.csv", str(tmp_path / "t.tsv"), Frame(), Polars()):
        source = Segments(table, "sequence", rate=10)
        assert list(source.keys()) == ["a", "b"]
        assert source.classes == ["x", "y"]
        assert source.get(asked).tolist() == [[0] * 5 + [-1] * 5, [-1, 1] + [-1] * 8]
    renamed = [{"file": "a", "on": 0, "off": 1, "what": "x"}]
    columns = ("file", "on", "off", "what")
    assert Segments(renamed, "center", rate=10, columns=columns).get([Excerpt("a", 0, 4)]).tolist() == [0]


def test_global_labels_have_no_time():
    source = Segments([{"key": "a", "label": "rock"}, {"key": "b", "label": "jazz"}], "global")
    batch = RandomExcerpts({"x": Ramp({"a": 500, "b": 500}, 100), "y": source}, 1, batch_size=16, seed=0)[0]
    assert [source.classes[i] for i in batch["y"]] == [{"a": "rock", "b": "jazz"}[key] for key in batch["key"]]


def test_strings_and_sources_without_labels():
    audio = Ramp({"a": 500, "b": 500}, 100)
    names = Strings({"b": "Bea", "a": "Al"})
    batch = RandomExcerpts({"x": audio, "name": names}, 1, batch_size=8, seed=0)[0]
    assert batch["name"] == [{"a": "Al", "b": "Bea"}[key] for key in batch["key"]]
    without = RandomExcerpts({"x": audio}, 1, batch_size=8, seed=0)[0]  # inference: left out, nothing else changes
    assert torch.equal(without["x"], batch["x"])
    with pytest.raises(InputError, match=r"sources \['name'\] have no time; give at least one that has"):
        RandomExcerpts({"name": names}, 1, batch_size=1, seed=0)


def test_labels_beyond_the_end_are_an_error_and_before_it_none():
    audio = Ramp({"a": 500, "b": 500}, 100)
    late = Segments([("a", 0, 1, "x"), ("b", 4, "5.01", "x")], "sequence", rate=100)
    with pytest.raises(InputError, match=r"'y': the labels of 'b' end at 5.01 s, the item at 5 s \(1 such items\)"):
        RandomExcerpts({"x": audio, "y": late}, 1, batch_size=1, seed=0)
    early = Segments([("a", 0, 1, "x"), ("b", 4, "5.004", "x")], "sequence", rate=100)  # within the last position
    loader = RandomExcerpts({"x": audio, "y": early}, 1, batch_size=1, seed=0, items="uniform")
    assert max(loader.draw(n)[1] for n in range(3000)) == 400
    padded = {"x": Ramp({"a": 600, "b": 600}, 100), "y": Pad(early, "zero", "0.5")}
    batch = next(b for b in Excerpts(padded, None).loader() if b["key"] == ["b"])
    assert np.flatnonzero(batch["y"][0] >= 0).tolist() == list(range(450, 550))


@pytest.mark.parametrize(
    ("rows", "mode", "options", "message"),
    [
        ([("a", 0, 2, "x"), ("a", 1, 3, "y")], "sequence", {}, r"'a': 'x' \[0, 2\) s and 'y' \[1, 3\) s overlap"),
        ([("a", 2, 1, "x")], "mask", {}, r"row 0 of the segments: 'a' \[2, 1\) s; give 0 ≤ start < stop"),
        ([("a", -1, 1, "x")], "mask", {}, r"'a' \[-1, 1\) s"),
        ([("a", "soon", 1, "x")], "mask", {}, "row 0 of the segments: 'a' has time 'soon'; give seconds"),
        ([("a", 0, 1, "x")], "mask", {"classes": ["y"]}, r"'a': label 'x' \[0, 1\) s isn't in classes \['y'\]"),
        ([{"key": "a", "start": 0}], "mask", {}, r"row 0 of the segments lacks \['stop', 'label'\]"),
        ([("a", 0, 1, "x")], "mask", {"rate": None}, "mode 'mask' with rate=None; give a rate"),
        ([("a", 0, 1, "x")], "mask", {"rate": 0}, "rate is 0; it must be above 0"),
        ([("a", 0, 1, "x")], "global", {}, "mode 'global' with rate=10"),
        ([("a", 0, 1, "x"), ("a", 1, 2, "y")], "global", {"rate": None}, r"'a' has the labels \['x', 'y'\]"),
        ([("a", 0, 1, "x")], "frames", {}, "mode is 'frames'; it must be"),
        ([], "mask", {}, "no segments; leave the source out"),
    ],
)  # fmt: skip
def test_label_errors(rows, mode, options, message):
    with pytest.raises(InputError, match=message):
        Segments(rows, mode, **{"rate": 10, **options})


def test_arrays_in_memory_and_mapped(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {f"k{i}": rng.normal(size=(3, 20 + i)).astype(np.float32) for i in range(100)}
    for key, array in arrays.items():
        np.save(tmp_path / f"{key}.npy", array)
    mapped = Arrays({key: tmp_path / f"{key}.npy" for key in arrays}, "22050/512")
    memory = Arrays({key: torch.from_numpy(array) for key, array in arrays.items()}, "22050/512")
    assert mapped.rate() == Fraction(22050, 512)
    assert mapped.lengths().tolist() == list(range(20, 120))
    for number, key in enumerate(arrays):
        asked = [Excerpt(key, 5, 10), Excerpt(key, 18 + number, 6)]
        batch = mapped.get(asked)
        assert batch.shape == (2, 3, 10)
        assert torch.equal(batch, memory.get(asked))
        assert torch.equal(batch[0], torch.from_numpy(arrays[key][:, 5:15]))
        assert not batch[1, :, 2:].any()
    assert len(os.listdir("/proc/self/fd")) < 300
    assert len(mapped._open) <= 64
    with pytest.raises(InputError, match=r"Arrays has no item 'x'; keys\(\) lists its 100 items: 'k0', 'k1', 'k2' …"):
        mapped.get([Excerpt("x", 0, 1)])


def test_array_errors(tmp_path):
    (tmp_path / "a.npy").write_text("no array")
    for arrays, message in (
        ({}, "arrays is empty"),
        ({"a": tmp_path / "a.npy"}, r"a\.npy: can't be read as an array"),
        ({"a": tmp_path / "b.npy"}, r"b\.npy: can't be read as an array"),
        ({"a": np.zeros((3, 0))}, r"array 'a' has shape \[3, 0\]; its last axis is time"),
    ):
        with pytest.raises(InputError, match=message):
            Arrays(arrays, 10)
    with pytest.raises(InputError, match=r"rows of one batch have shapes \[\(2,\), \(3,\)\]"):
        Arrays({"a": np.zeros((3, 5)), "b": np.zeros((2, 5))}, 10).get([Excerpt("a", 0, 2), Excerpt("b", 0, 2)])
