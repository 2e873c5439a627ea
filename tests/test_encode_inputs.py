"""What can be encoded: folders, globs, URLs, archives, tables, manifests of every kind."""

import csv
import gzip
import io
import json
import os
import shutil
import tarfile
from fractions import Fraction

import fsspec
import numpy as np
import pytest
import torch
from conftest import DATA
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.audio import find_audio, read_audio, write_audio
from codec.encode import encode_corpus, find_items
from codec.errors import AudioFileError, InputError
from codec.tokens import TokenStore

A, B, C = (
    "speech_it_male_first-in-queue_16k.wav",
    "speech_it_male_nobody-available_16k.flac",
    "music_piano_stereo_48k.ogg",
)


@pytest.fixture
def folder(tmp_path):
    top = tmp_path / "audio"
    (top / "deep").mkdir(parents=True)
    shutil.copy(DATA / A, top)
    shutil.copy(DATA / B, top / "deep")
    (top / "notes.txt").write_text("no audio")
    (top / ".hidden.wav").write_bytes(b"x")
    return top


def keys(inputs, **options):
    return [item.key for item in find_items(inputs, **options)]


def same_codes(store, key, wave, codec):
    return np.array_equal(TokenStore(store).read(key), codec.encode(wave).codes[0].numpy())


# --- files and folders


def test_folders_files_and_globs(folder, tmp_path, monkeypatch):
    assert keys([folder]) == [f"deep/{B}", A] == [key for key, _ in find_audio([folder])]
    assert keys([folder], recursive=False) == [A]
    assert keys([folder], glob="*.flac") == [f"deep/{B}"]
    assert keys([f"{folder}/*.wav"]) == [A]
    assert keys([f"{folder}/**/*.flac"]) == [f"deep/{B}"]
    monkeypatch.chdir(folder)
    assert keys(["*.wav"]) == [A]
    assert keys([folder / A, folder / A, folder]) == [f"deep/{B}", A]
    item = find_items([folder / A])[0]
    assert (item.num_bytes, item.mtime_ns) == ((folder / A).stat().st_size, (folder / A).stat().st_mtime_ns)
    with pytest.raises(AudioFileError, match="no such file or folder"):
        find_items([folder / "nowhere"])
    with pytest.raises(AudioFileError, match="fits no file"):
        find_items([f"{folder}/*.mp3"])
    with pytest.raises(InputError, match=r"no audio files in .*, fitting 'x'"):
        find_items([folder], glob="x")


def test_equal_keys_get_their_folders_in_front(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    assert keys([folder, other]) == sorted(f"{top}/{key}" for top in ("audio", "other") for key in (A, f"deep/{B}"))
    twin = tmp_path / "x" / "audio"
    shutil.copytree(folder, twin)
    with pytest.raises(InputError, match="would both have the key 'audio/"):
        find_items([folder, twin])


def test_a_name_that_is_no_unicode_fails_alone(folder, tmp_path, lookahead_codec):
    shutil.copy(DATA / A, os.fsencode(folder) + b"/a\xff.wav")
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    assert report.num_items == 2
    assert "isn't UTF-8" in report.failures[0]["error"]


def test_links_that_go_round_end(folder):
    (folder / "deep" / "up").symlink_to(folder)
    assert keys([folder]) == [f"deep/{B}", A]


# --- URLs


@pytest.fixture
def memory(folder):
    system = fsspec.filesystem("memory")
    for path, name in ((folder / A, A), (folder / "deep" / B, f"deep/{B}")):
        system.pipe_file(f"/corpus/{name}", path.read_bytes())
    system.pipe_file("/corpus/notes.txt", b"no audio")
    yield "memory://corpus"
    system.rm("/", recursive=True)


def test_urls_give_what_local_files_give(folder, memory, tmp_path, lookahead_codec):
    assert keys([memory]) == [f"deep/{B}", A]
    assert keys([f"{memory}/{A}"]) == [A]
    assert keys([f"{memory}/**/*.flac"]) == [f"deep/{B}"]
    assert keys([memory], recursive=False) == [A]
    assert keys([memory], glob="deep/*") == [f"deep/{B}"]
    encode_corpus(lookahead_codec, [folder], tmp_path / "local.ctok")
    report = encode_corpus(lookahead_codec, [memory], tmp_path / "remote.ctok")
    assert report.failures == []
    assert (tmp_path / "local.ctok").read_bytes() == (tmp_path / "remote.ctok").read_bytes()
    with pytest.raises(AudioFileError, match="no such file or folder"):
        find_items(["memory://nowhere"])
    with pytest.raises(AudioFileError, match="install the fsspec driver"):
        find_items(["nosuch://x/y.wav"])


def test_a_store_at_a_url_is_resumed_there(folder, memory, tmp_path, lookahead_codec):
    store = "memory://out/store"
    encode_corpus(lookahead_codec, [folder / A], store, shard_bytes=1000)
    report = encode_corpus(lookahead_codec, [folder], store, shard_bytes=1000)
    assert (report.num_items, report.num_skipped) == (1, 1)
    shutil.copy(DATA / C, folder / A)
    report = encode_corpus(lookahead_codec, [folder], store, shard_bytes=1000)
    assert (report.num_items, report.num_skipped, report.num_changed) == (1, 1, 1)
    opened = TokenStore(store)
    assert sorted(opened.keys()) == [f"deep/{B}", A]
    assert list(opened.verify()) == []
    names = sorted(path.rsplit("/", 1)[-1] for path in fsspec.filesystem("memory").ls("/out/store", detail=False))
    assert all(name.endswith((".ctok", ".sources.jsonl")) for name in names)
    with pytest.raises(InputError, match="a store at a URL is a folder"):
        encode_corpus(lookahead_codec, [folder], "memory://out/x.ctok")


def test_urls_that_fail_are_failures(memory, tmp_path, lookahead_codec):
    fsspec.filesystem("memory").pipe_file("/corpus/bad.wav", b"no audio at all")
    report = encode_corpus(lookahead_codec, [memory], tmp_path / "s.ctok")
    assert report.num_items == 2
    assert [failure["path"] for failure in report.failures] == ["memory:///corpus/bad.wav"]


# --- archives


def add(archive, name, data):
    info = tarfile.TarInfo(name)
    info.size, info.mtime = len(data), 1_700_000_000
    archive.addfile(info, io.BytesIO(data))


@pytest.fixture
def tar(tmp_path):
    path = tmp_path / "tars" / "shard-000.tar"
    path.parent.mkdir()
    with tarfile.open(path, "w") as archive:
        add(archive, "a/0001.flac", (DATA / B).read_bytes())
        add(archive, "a/0001.json", json.dumps({"speaker": "x", "n": 3}).encode())
        add(archive, "a/0001.txt", "двадцать".encode())
        add(archive, "a/0002.wav", (DATA / A).read_bytes())
        add(archive, "a/0002.cls", b"7")
        add(archive, "readme.md", b"nothing")
    return path


def test_tar_archives_of_audio_and_their_notes(tar, tmp_path, lookahead_codec):
    assert keys([tar.parent]) == keys([tar]) == ["shard-000.tar/a/0001.flac", "shard-000.tar/a/0002.wav"]
    report = encode_corpus(lookahead_codec, [tar], tmp_path / "s.ctok")
    assert report.failures == []
    store = TokenStore(tmp_path / "s.ctok")
    assert store.info("shard-000.tar/a/0001.flac").meta == {"speaker": "x", "n": 3, "text": "двадцать"}
    assert store.info("shard-000.tar/a/0002.wav").meta == {"cls": "7"}
    wave, _ = read_audio(DATA / A)
    assert same_codes(tmp_path / "s.ctok", "shard-000.tar/a/0002.wav", wave, lookahead_codec)
    (meta,) = [item.meta for item in find_items([tar], meta=["text"]) if item.meta]
    assert meta == {"text": "двадцать"}
    assert encode_corpus(lookahead_codec, [tar], tmp_path / "s.ctok").num_skipped == 2


def test_large_members_are_read_in_ranges(tar, tmp_path, lookahead_codec, monkeypatch):
    encode_corpus(lookahead_codec, [tar], tmp_path / "a.ctok")
    monkeypatch.setattr("codec.encode.archives.FETCHED_WHOLE", 1000)
    monkeypatch.setattr("codec.encode.corpus.LONG_SECONDS", 0.5)
    report = encode_corpus(lookahead_codec, [tar], tmp_path / "b.ctok")
    assert report.failures == []
    a, b = TokenStore(tmp_path / "a.ctok"), TokenStore(tmp_path / "b.ctok")
    for key in a.keys():
        assert (a.read(key) != b.read(key)).any(0).sum() <= 1


def test_damaged_archives_and_members_fail_alone(tar, tmp_path, lookahead_codec):
    data = tar.read_bytes()
    (tar.parent / "cut.tar").write_bytes(data[: len(data) // 3])
    (tar.parent / "noise.tar").write_bytes(os.urandom(5000))
    with tarfile.open(tar.parent / "bad.tar", "w") as archive:
        add(archive, "x.wav", b"no audio")
    report = encode_corpus(lookahead_codec, [tar.parent], tmp_path / "s.ctok")
    assert report.num_items == 2
    failed = {failure["key"]: failure["error"] for failure in report.failures}
    assert set(failed) == {"bad.tar/x.wav", "cut.tar", "cut.tar/a/0001.flac", "noise.tar"}
    assert "beyond the archive's end" in failed["cut.tar/a/0001.flac"]
    assert "x.wav" in failed["bad.tar/x.wav"]


# --- tables


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow", reason="tables need pyarrow: pip install 'codec[arrow]'")


def rows(arrow, count=40):
    clips = [DATA / A, DATA / B]
    return arrow.table(
        {
            "audio": [{"bytes": clips[i % 2].read_bytes(), "path": f"{i}.wav"} for i in range(count)],
            "text": [f"row {i}" for i in range(count)],
            "score": [None if i == 1 else i / 2 for i in range(count)],
        }
    )


@pytest.mark.parametrize("kind", ["parquet", "stream", "file"])
def test_tables_of_audio(arrow, tmp_path, lookahead_codec, kind):
    import pyarrow.parquet

    folder = tmp_path / "dataset" / "train"
    folder.mkdir(parents=True)
    table = rows(arrow)
    path = folder / f"data-00000-of-00001.{'parquet' if kind == 'parquet' else 'arrow'}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=15)
    else:
        new = arrow.ipc.new_stream if kind == "stream" else arrow.ipc.new_file
        with arrow.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=15)
    (folder / "state.json").write_text("{}")
    (folder / "cache-123.arrow").write_bytes(b"not data")
    report = encode_corpus(lookahead_codec, [tmp_path / "dataset"], tmp_path / "s.ctok", num_threads=3)
    assert report.failures == []
    store = TokenStore(tmp_path / "s.ctok")
    assert list(store.keys()) == [f"train/{path.name}/{i:08d}" for i in range(40)]
    assert store.info(f"train/{path.name}/00000001").meta == {"text": "row 1", "path": "1.wav"}
    assert store.info(f"train/{path.name}/00000002").meta == {"text": "row 2", "score": 1.0, "path": "2.wav"}
    for i, name in ((0, A), (1, B), (38, A), (39, B)):
        wave, _ = read_audio(DATA / name)
        assert store.info(f"train/{path.name}/{i:08d}").num_samples == wave.shape[1]
    assert encode_corpus(lookahead_codec, [tmp_path / "dataset"], tmp_path / "s.ctok").num_skipped == 40


def test_tables_without_audio_and_damaged_ones_fail_alone(arrow, tmp_path, lookahead_codec):
    import pyarrow.parquet

    folder = tmp_path / "d"
    folder.mkdir()
    shutil.copy(DATA / A, folder)
    pyarrow.parquet.write_table(arrow.table({"text": ["a"]}), folder / "text.parquet")
    pyarrow.parquet.write_table(
        arrow.table({"audio": [{"bytes": None, "path": None}, {"bytes": b"no audio", "path": "x"}]}),
        folder / "bad.parquet",
    )
    (folder / "noise.parquet").write_bytes(b"PAR1 and nothing else")
    (folder / "noise.arrow").write_bytes(b"no arrow")
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    assert report.num_items == 1
    failed = {failure["key"]: failure["error"] for failure in report.failures}
    assert set(failed) == {
        "text.parquet",
        "bad.parquet/00000000",
        "bad.parquet/00000001",
        "noise.parquet",
        "noise.arrow",
    }
    assert "none with audio bytes" in failed["text.parquet"]
    assert "row 0 holds no audio" in failed["bad.parquet/00000000"]


# --- manifests


def test_jsonl_csv_and_tsv(folder, tmp_path, lookahead_codec):
    table = [
        {"path": A, "text": "uno, due", "speaker": "m1", "key": "one"},
        {"path": f"deep/{B}", "text": "tre", "speaker": "m2", "key": "two"},
        {"path": A, "start": "0.5", "stop": "1.75", "text": "part", "speaker": "m1", "key": "three"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in table)
    (folder / "m.jsonl").write_text(lines)
    (folder / "m.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "list.json").write_text(json.dumps(table))
    for name, delimiter in (("m.csv", ","), ("m.tsv", "\t")):
        with (folder / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["key", "path", "start", "stop", "text", "speaker"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(table)
    stores = []
    for name in ("m.jsonl", "m.jsonl.gz", "list.json", "m.csv", "m.tsv"):
        store = tmp_path / f"{name}.ctok"
        assert encode_corpus(lookahead_codec, [folder / name], store).failures == []
        stores.append(store.read_bytes())
    assert len(set(stores)) == 1
    opened = TokenStore(store)
    assert opened.info("one").meta == {"text": "uno, due", "speaker": "m1"}
    assert opened.info("three").num_samples == 20000
    wave, _ = read_audio(folder / A)
    assert same_codes(store, "three", wave[:, 8000:28000], lookahead_codec)
    chosen = find_items([], manifests=[folder / "m.csv"], meta=["speaker"])
    assert [item.meta for item in chosen] == [{"speaker": "m1"}, {"speaker": "m1"}, {"speaker": "m2"}]
    with pytest.raises(InputError, match="no row has a column 'age'; there are"):
        find_items([folder / "m.csv"], meta=["age"])


def test_keys_without_a_key_column_are_relative_paths(folder):
    rows = [
        {"path": str(folder / "deep" / B)},
        {"path": A, "start": 1, "duration": 0.5},
        {"path": "/elsewhere/x.wav", "channel": 1},
    ]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert keys([folder / "m.jsonl"]) == [f"deep/{B}", "elsewhere/x.wav#1", f"{A}@1-1.5"]


def test_rows_that_cannot_be_used_fail_alone(folder, tmp_path, lookahead_codec):
    lines = [
        json.dumps({"path": A, "id": "good"}),
        "{not json",
        json.dumps({"id": "nopath", "text": "x"}),
        json.dumps({"path": "missing.wav", "id": "missing"}),
        json.dumps({"path": A, "id": "good"}),
        json.dumps({"path": A, "id": "backwards", "start": 2, "stop": 1}),
        json.dumps({"path": A, "id": "beyond", "start": 1, "stop": 500}),
        json.dumps({"path": A, "id": "nan", "start": "nan"}),
        json.dumps({"path": A, "id": "right", "channel": 3}),
        json.dumps([1, 2]),
    ]
    (folder / "m.jsonl").write_text("\n".join(lines))
    report = encode_corpus(lookahead_codec, [folder / "m.jsonl"], tmp_path / "s.ctok")
    assert list(TokenStore(tmp_path / "s.ctok").keys()) == ["good"]
    failed = {failure["key"]: failure["error"] for failure in report.failures}
    assert set(failed) == {
        "m.jsonl:2", "nopath", "missing", "good (row 5)", "backwards", "beyond", "nan", "right", "m.jsonl:10",
    }  # fmt: skip
    assert "line 2 isn't JSON" in failed["m.jsonl:2"]
    assert "comes twice" in failed["good (row 5)"]
    assert "no such file" in failed["missing"]
    assert "correct the manifest" in failed["beyond"]
    assert "has 1, counted from 0" in failed["right"]
    (folder / "m.csv").write_text("a,b\n1,2\n")
    with pytest.raises(InputError, match="one must be one of path"):
        find_items([folder / "m.csv"])
    (folder / "r.csv").write_text(f"path,text\n{A},x\n{A}\n{A},a,b\n")
    assert [item.error is None for item in find_items([folder / "r.csv"])] == [False, False, True]


def test_a_stop_that_was_rounded_up_is_the_end_and_is_told(folder, tmp_path, lookahead_codec):
    wave, rate = read_audio(folder / A)
    stop = round(wave.shape[1] / rate + 0.005, 2)
    (folder / "m.jsonl").write_text(
        json.dumps({"audio_filepath": A, "offset": 0.25, "duration": stop - 0.25, "id": "x"})
    )
    report = encode_corpus(lookahead_codec, [folder / "m.jsonl"], tmp_path / "s.ctok")
    assert TokenStore(tmp_path / "s.ctok").info("x").num_samples == wave.shape[1] - rate // 4
    assert "rounded beyond the end" in report.warnings[0]["warning"]


def test_nemo_manifests(folder, tmp_path, lookahead_codec):
    rows = [
        {"audio_filepath": A, "duration": 4.2, "text": "uno"},
        {"audio_filepath": f"deep/{B}", "offset": 0.5, "duration": 1.0, "text": "due", "lang": "it"},
    ]
    (folder / "nemo.json").write_text("\n".join(map(json.dumps, rows)))
    encode_corpus(lookahead_codec, [folder / "nemo.json"], tmp_path / "s.ctok")
    store = TokenStore(tmp_path / "s.ctok")
    assert store.info(A).num_samples == read_audio(folder / A)[0].shape[1]
    info = store.info(f"deep/{B}@0.5-1.5")
    assert (info.num_samples, info.meta) == (16000, {"text": "due", "lang": "it"})


def test_lhotse_manifests(folder, tmp_path, lookahead_codec):
    def recording(name, channels=1):
        return {
            "id": name, "sampling_rate": 16000, "num_samples": 64000, "duration": 4.0,
            "sources": [{"type": "file", "channels": list(range(channels)), "source": name}],
            "channel_ids": list(range(channels)),
        }  # fmt: skip

    shutil.copy(DATA / "speech_it-left_ru-right_first-in-queue_22k.flac", folder / "two.flac")
    cuts = [
        {"id": "c1", "start": 0.5, "duration": 1.5, "channel": 0, "type": "MonoCut", "recording": recording(A),
         "supervisions": [{"text": "uno", "speaker": "m"}, {"text": "due"}], "custom": {"snr": 20}},
        {"id": "c2", "start": 0, "duration": 4.0, "channel": 1, "recording": recording("two.flac", 2)},
        {"id": "mix", "type": "MixedCut", "tracks": []},
        {"id": "cmd", "start": 0, "duration": 1, "channel": 0, "recording": {
            **recording(A), "sources": [{"type": "command", "channels": [0], "source": "touch /tmp/x"}]}},
    ]  # fmt: skip
    (folder / "cuts.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, cuts)).encode()))
    report = encode_corpus(lookahead_codec, [folder / "cuts.jsonl.gz"], tmp_path / "s.ctok")
    store = TokenStore(tmp_path / "s.ctok")
    assert store.info("c1").meta == {"text": "uno due", "speaker": "m", "snr": 20}
    assert store.info("c1").num_samples == 24000
    assert store.info("c2").meta["channel"] == 1
    failed = {failure["key"]: failure["error"] for failure in report.failures}
    assert set(failed) == {"mix", "cmd"}
    assert "save it as a file first" in failed["cmd"]
    (folder / "recordings.jsonl").write_text(json.dumps(recording(A)))
    assert keys([folder / "recordings.jsonl"]) == [A]


def test_kaldi_folders(folder, tmp_path, lookahead_codec):
    kaldi = tmp_path / "kaldi"
    kaldi.mkdir()
    (kaldi / "wav.scp").write_text(f"rec1 {folder / A}\nrec2 sox {folder / B} -t wav - |\nrec3 {folder / 'deep' / B}\n")
    assert keys([kaldi]) == ["rec1", "rec2", "rec3"]
    (kaldi / "segments").write_text("utt1 rec1 0.50 1.50\nutt2 rec3 0.00 -1\nutt3 rec2 0 1\nutt4 nowhere 0 1\n")
    (kaldi / "text").write_text("utt1 ciao a tutti\nutt2 grazie\n")
    (kaldi / "utt2spk").write_text("utt1 spk1\nutt2 spk2\n")
    report = encode_corpus(lookahead_codec, [kaldi], tmp_path / "s.ctok")
    store = TokenStore(tmp_path / "s.ctok")
    assert sorted(store.keys()) == ["utt1", "utt2"]
    assert store.info("utt1").num_samples == 16000
    assert store.info("utt1").meta == {"recording": "rec1", "text": "ciao a tutti", "speaker": "spk1"}
    assert store.info("utt2").num_samples == read_audio(DATA / B)[0].shape[1]
    failed = {failure["key"]: failure["error"] for failure in report.failures}
    assert "a command, which isn't run" in failed["utt3"]
    assert "it must be: utterance recording start end" in failed["utt4"]


def test_many_excerpts_of_one_file_are_items_of_their_own(folder, tmp_path, lookahead_codec):
    rows = [{"path": A, "start": n / 4, "stop": (n + 1) / 4} for n in range(12)]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert encode_corpus(lookahead_codec, [folder / "m.jsonl"], tmp_path / "s.ctok").num_items == 12
    rows[3]["stop"] = 0.9  # a changed excerpt is a changed item
    rows = [{**row, "key": str(n)} for n, row in enumerate(rows)]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    encode_corpus(lookahead_codec, [folder / "m.jsonl"], tmp_path / "t.ctok")
    rows[5]["stop"] = 1.6
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    report = encode_corpus(lookahead_codec, [folder / "m.jsonl"], tmp_path / "t.ctok")
    assert (report.num_changed, report.num_skipped) == (1, 11)


@settings(max_examples=60, deadline=None)
@given(text=st.binary(max_size=300), suffix=st.sampled_from([".jsonl", ".csv", ".tsv", ".scp", ".json", ".jsonl.gz"]))
def test_hostile_manifests_raise_our_errors_only(tmp_path_factory, text, suffix):
    path = tmp_path_factory.mktemp("m") / f"m{suffix}"
    path.write_bytes(gzip.compress(text) if suffix.endswith(".gz") and text[:1] < b"\x80" else text)
    try:
        items = find_items([path])
    except (InputError, AudioFileError):
        return
    assert all(isinstance(item.key, str) and item.key for item in items)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["id", "sources", "start"]), inner, max_size=2)
    ),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(
    row=st.dictionaries(
        st.sampled_from(
            ["path", "audio", "id", "key", "start", "stop", "duration", "channel", "recording", "sources", "tracks"]
        ),
        _VALUES,
        max_size=5,
    )
)
def test_hostile_rows_become_items_or_errors_of_items(tmp_path_factory, row):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    path.write_text(json.dumps(row))
    (item,) = find_items([path])
    assert isinstance(item.key, str)
    assert item.error is None or "line 1" in item.error
    assert item.start is None or isinstance(item.start, Fraction)


def test_the_longest_way(tmp_path, lookahead_codec):
    """A manifest's excerpt longer than a piece is encoded in pieces, as the whole would be."""
    wave = torch.cat([read_audio(DATA / A)[0]] * 3, 1)
    write_audio(tmp_path / "long.wav", wave, 16000)
    (tmp_path / "m.jsonl").write_text(json.dumps({"path": "long.wav", "id": "x", "start": 0.5, "stop": 9.0}))
    encode_corpus(lookahead_codec, [tmp_path / "m.jsonl"], tmp_path / "a.ctok")
    from codec.encode import corpus

    before, corpus.LONG_SECONDS = corpus.LONG_SECONDS, 1
    try:
        encode_corpus(lookahead_codec, [tmp_path / "m.jsonl"], tmp_path / "b.ctok")
    finally:
        corpus.LONG_SECONDS = before
    a, b = TokenStore(tmp_path / "a.ctok").read("x"), TokenStore(tmp_path / "b.ctok").read("x")
    assert (a != b).any(0).sum() <= 1
