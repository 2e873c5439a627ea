"""Manifests and the compact table of keys and paths behind audio files."""

import os
import pickle
import subprocess
import sys

import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.audio import audio_info
from codec.errors import InputError
from codec.sources import AudioFiles, Excerpt
from codec.sources.items import Items, read_manifest

WAV = "speech_it_male_first-in-queue_16k.wav"
HEADER = "key\tpath\tsample_rate\tnum_samples\n"


def write(folder, text, name="files.tsv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


@settings(deadline=None, max_examples=30)
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=20), st.text(max_size=20)),
        min_size=1,
        max_size=12,
        unique_by=lambda p: p[0],
    )
)
def test_keys_and_paths_come_back_and_are_found(pairs):
    pairs = [(k.encode(errors="ignore").decode(), p.encode(errors="ignore").decode()) for k, p in pairs]
    pairs = list({k: (k, p) for k, p in pairs}.values())
    items = Items.of([k for k, _ in pairs], [p for _, p in pairs])
    for table in (items, pickle.loads(pickle.dumps(items))):
        assert list(table) == [k for k, _ in pairs] == table[:]
        assert [table.find(k) for k, _ in pairs] == list(range(len(pairs)))
        assert [table.path(n) for n in range(len(pairs))] == [p for _, p in pairs]
        assert table == [k for k, _ in pairs] and table == items
        assert table != [*(k for k, _ in pairs[:-1]), "another key than these, longer than forty characters"]
        assert "another key than these, longer than forty characters" not in table
        assert table[-1] == pairs[-1][0]
        with pytest.raises(IndexError):
            table[len(pairs)]


@settings(deadline=None, max_examples=40)
@given(
    rows=st.lists(
        st.tuples(st.text("abc/ü.é ", min_size=1, max_size=30), st.integers(1, 10**9), st.integers(1, 10**16 - 1)),
        min_size=1,
        max_size=30,
    ),
    chunk=st.integers(60, 400),
    end=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
    delimiter=st.sampled_from([",", "\t"]),
)
def test_a_manifest_is_read_as_by_splitting_its_lines(tmp_path_factory, rows, chunk, end, last, delimiter):
    """Columns in any order, others ignored, chunks of any size."""
    import codec.sources.items as items

    folder = tmp_path_factory.mktemp("m")
    lines = [["num_samples", "x", "path", "sample_rate", "key"]]
    lines += [[str(n), "", f"p{i}", str(rate), f"{i}{key}"] for i, (key, rate, n) in enumerate(rows)]
    text = end.join(delimiter.join(line) for line in lines) + (end if last else "")
    path = write(folder, text, "a.csv" if delimiter == "," else "a.tsv")
    before, items._CHUNK = items._CHUNK, chunk
    try:
        table, rates, lengths = read_manifest(path)
    finally:
        items._CHUNK = before
    assert list(table) == [f"{i}{key}" for i, (key, _, _) in enumerate(rows)]
    assert [table[n] for n in range(len(rows))] == list(table)
    assert rates.tolist() == [rate for _, rate, _ in rows]
    assert lengths.tolist() == [n for _, _, n in rows]
    assert [table.path(n) for n in range(len(rows))] == [str(folder / f"p{n}") for n in range(len(rows))]


def test_paths_are_keys_without_any_and_relative_to_the_manifest(tmp_path):
    info = audio_info(DATA / WAV)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.wav").symlink_to(DATA / WAV)
    columns = "num_samples,path,sample_rate\n"
    for cell in ("in/a b.wav", '"in/a b.wav"'):
        manifest = write(tmp_path, f"{columns}{info.num_samples},{cell},16000\n", "files.csv")
        source = AudioFiles(manifest)
        assert list(source.keys()) == ["in/a b.wav"]
        wave = source.get([Excerpt("in/a b.wav", 100, 900)])
        assert torch.equal(wave, AudioFiles(DATA / WAV).get([Excerpt(WAV, 100, 900)]))
    write(tmp_path, "path\tsample_rate\tnum_samples\ns3://bucket/a.wav\t8000\t9\n")
    assert read_manifest(tmp_path / "files.tsv").items.path(0) == "s3://bucket/a.wav"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the columns are"),
        ("path\tsample_rate\n", r"\['num_samples'\] missing: a manifest has"),
        (HEADER + "a\tb\t8000\t9\t1\n", r"line 2 has 5 columns, the first line 4: 'a.*'; make them agree"),
        (HEADER + "a\tb\t8000\t9\nb\t8000\t9\nc\td\te\t8000\t9\n", "line 3 has 3 columns"),
        (HEADER + "a\tb\t8000\t9\n\n", "line 3 has 1 columns"),
        (HEADER + "a\tb\t8000\t-9\n", "line 2: num_samples is '-9'; it must be a whole number ≥ 1"),
        (HEADER + "a\tb\t8000\t1e9\n", "line 2: num_samples is '1e9'"),
        (HEADER + "a\tb\t8000\t:9\n", "line 2: num_samples is ':9'"),
        (HEADER + "a\tb\t\t9\n", "line 2: sample_rate is ''"),
        (HEADER + "a\tb\t8000\t12345678901234567\n", "num_samples is '12345678901234567'"),
        (HEADER + "a\tb\t8000\t9\n\tb\t8000\t9\n", "line 3 has no key; give one"),
        (HEADER + "a\t\t8000\t9\n", "line 2 has no path; give one"),
        (HEADER + "a\tb\t8000\t9\nc\td\t8000\t9\na\te\t8000\t9\n", "line 4: key 'a' comes twice; make the keys"),
        (HEADER + "a" * 70000 + "\tb\t8000\t9\n", "a line of over 65535 bytes"),
        (b"RIFF" + bytes(100000), "the columns are"),
        (HEADER, "it has no line but the first"),
    ],
)
def test_bad_manifests_are_named_with_their_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        AudioFiles(write(tmp_path, text))


def test_a_quoted_csv_is_checked_as_well(tmp_path):
    text = 'key,path,sample_rate,num_samples\n"a,b",c.wav,8000,9\n"d","e",8000,'
    table = read_manifest(write(tmp_path, text + "7\n", "f.csv"))
    assert (list(table.items), table.num_samples.tolist()) == (["a,b", "d"], [9, 7])
    with pytest.raises(InputError, match=r"line 3 is .*numbers ≥ 1"):
        read_manifest(write(tmp_path, text + "x\n", "f.csv"))


def test_a_manifest_that_changes_under_way_is_noticed(tmp_path):
    path = write(tmp_path, HEADER + "".join(f"{n}\t{n}.wav\t8000\t9\n" for n in range(5)))
    source = AudioFiles(path)
    again = pickle.loads(pickle.dumps(source))
    assert again.keys()[3] == source.keys()[3] == "3"
    os.utime(path, ns=(1, 1))
    for table in (source.keys(), again.keys()):
        with pytest.raises(InputError, match=r"files\.tsv has changed since it was read; make the AudioFiles anew"):
            table[4]


def test_a_replaced_manifest_stays_readable_where_it_is_open(tmp_path):
    path = write(tmp_path, HEADER + "a\tb.wav\t8000\t9\nc\td.wav\t8000\t9\n")
    source = AudioFiles(path)
    assert source.keys()[0] == "a"
    write(tmp_path, HEADER, "new.tsv").replace(path)
    assert source.keys()[1] == "c"


MILLION = """
import sys, time
import numpy as np
from codec.excerpts import RandomExcerpts
from codec.sources import AudioFiles
def used():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
open("/proc/self/clear_refs", "w").write("5")  # the peak is now what is in use
before, started = used(), time.process_time()
draws = RandomExcerpts({"x": AudioFiles(sys.argv[1])}, 2, batch_size=32, seed=0, items="shuffle", positions="grid")
items, starts, _ = draws.draw_range(10**9, 32)
keys = [draws.keys[item] for item in items.tolist()]
print(time.process_time() - started, used() - before, all(draws.sources["x"].length(key) for key in keys))
"""


def test_a_million_files_of_a_manifest_start_in_a_moment(tmp_path):
    with (tmp_path / "million.tsv").open("w") as file:
        file.write(HEADER)
        for first in range(0, 10**6, 10**5):
            rows = range(first, first + 10**5)
            file.write("".join(f"s{i % 1000}/{i}.flac\t/data/s{i % 1000}/{i}.flac\t48000\t{10**6 + i}\n" for i in rows))
    command = [sys.executable, "-c", MILLION, str(tmp_path / "million.tsv")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, megabytes, right = done.stdout.split()
    assert right == "True"
    assert float(seconds) < 2  # half of it on a quiet core
    assert 5 < float(megabytes) < 150
