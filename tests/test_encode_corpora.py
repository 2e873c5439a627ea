"""Encoding corpora: pieces, splits, deaths, changed inputs, odd files."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
from conftest import DATA, encode_until_killed, num_ties, small_codec

from codec.audio import StreamResampler, read_audio, resample, stream_audio, write_audio
from codec.encode import EncodeSettings, encode_corpus, find_items, pipeline, scan, state, write_failures
from codec.encode.measures import Levels, LoudnessMeter
from codec.encode.pipeline import compose, compose_all
from codec.encode.plan import _unit_cuts
from codec.encode.reading import Entry
from codec.errors import AudioFileError, InputError, TokenFileError
from codec.loading import load_codec
from codec.model import Codes
from codec.tokens import TokenStore
from codec.tokens.files import UNFINISHED

SPEECH = sorted(path.name for path in DATA.glob("speech_*"))
CLIPS = sorted(path.name for path in DATA.glob("*_*.*"))


def copied(folder, names, copies=1):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(copies):
        for name in names:
            shutil.copy(DATA / name, folder / (f"{number}_{name}" if copies > 1 else name))
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return copied(tmp_path_factory.mktemp("corpora") / "corpus", CLIPS)


def contents(store):
    """Every item of a store: codes and all that is known of it."""
    opened = TokenStore(store)
    return {key: (opened.read(key).tobytes(), opened.info(key)) for key in opened.keys()}


def shards(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.ctok"))}


# --- equal, whatever the split


SHARD = 2000  # bytes: several parts, and parts of several shards


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("one") / "store"
    report = encode_corpus(small_codec(), [corpus], folder, shard_bytes=SHARD, batch_seconds=5)
    assert report.failures == []
    assert report.num_items == len(CLIPS) == len(TokenStore(folder))
    assert len(shards(folder)) > 3
    return folder


def test_three_ranks_make_the_same_shards_as_one_process(tmp_path, corpus, one_process, lookahead_codec):
    counts = [
        encode_corpus(
            lookahead_codec, [corpus], tmp_path / "s", shard_bytes=SHARD, batch_seconds=5, rank=rank, world_size=3
        ).num_items
        for rank in (1, 0, 2)
    ]
    assert sum(counts) == len(CLIPS)
    assert max(counts) < len(CLIPS)
    assert shards(tmp_path / "s") == shards(one_process)


def test_worker_processes_make_the_same_shards(tmp_path, corpus, one_process, lookahead_codec, monkeypatch):
    seen = []
    monkeypatch.setattr("codec.encode.processes.usable_cores", lambda: 2)  # one thread each: it rounds as here
    report = encode_corpus(
        lookahead_codec,
        [corpus],
        tmp_path / "s",
        shard_bytes=SHARD,
        batch_seconds=5,
        workers=2,
        on_progress=lambda *args: seen.append(args),
    )
    assert (report.num_items, report.failures) == (len(CLIPS), [])
    assert shards(tmp_path / "s") == shards(one_process)
    assert seen[-1][1] == len(CLIPS)


def test_a_folder_killed_again_and_again_ends_as_if_it_had_lived(tmp_path, corpus, one_process, lookahead_codec):
    options = {"shard_bytes": SHARD, "batch_seconds": 5}
    for after in (1, 3, 9):
        encode_until_killed(after, lookahead_codec, corpus, tmp_path / "s", **options)
    assert len(shards(tmp_path / "s")) < len(shards(one_process)) or list((tmp_path / "s").glob("*" + UNFINISHED))
    # Another number of processes finishes what the dead ones left.
    for rank in (0, 1):
        encode_corpus(lookahead_codec, [corpus], tmp_path / "s", rank=rank, world_size=2, **options)
    assert shards(tmp_path / "s") == shards(one_process)
    report = encode_corpus(lookahead_codec, [corpus], tmp_path / "s", **options)
    assert (report.num_items, report.num_skipped) == (0, len(CLIPS))


def test_a_part_that_is_begun_again_sees_what_was_written_since(tmp_path, corpus, one_process, lookahead_codec):
    """As a cluster does after the loss of a node: the plan is older than what the lost one wrote."""
    from codec.encode import corpus as run
    from codec.encode.place import Place
    from codec.encode.plan import corpus_hash, make_plan
    from codec.encode.ray import _look_again
    from codec.encode.state import examine

    items = find_items([corpus])
    settings = EncodeSettings(shard_bytes=SHARD, batch_seconds=5).checked(lookahead_codec.spec)
    place = Place(tmp_path / "s")
    examined = examine(place, items, lookahead_codec.spec, settings, corpus_hash(item.key for item in items))
    for part in make_plan(items, examined, None, lookahead_codec.spec, settings):
        for stop in (2, 4):  # two that die, one that lives

            def die(number, done, seconds, stop=stop):
                if done >= stop:
                    raise KeyboardInterrupt

            _look_again(part, place, lookahead_codec.spec, settings)
            with pytest.raises(KeyboardInterrupt):
                run.encode_part(lookahead_codec, part, place, settings, die)
        _look_again(part, place, lookahead_codec.spec, settings)
        run.encode_part(lookahead_codec, part, place, settings, lambda *args: None)
    assert shards(tmp_path / "s") == shards(one_process)


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_a_list_of_sources_with_a_cut_line_loses_that_line_alone(at_once, monkeypatch):
    monkeypatch.setattr(state, "_LINES_AT_ONCE", at_once)
    lines = ['{"channels":"mix"}', '["a",1,2,1]', '["b",1,', '["c",3,4,1]', '["d",5,6,1]']
    assert list(state._rows(lines)) == [{"channels": "mix"}, ["a", 1, 2, 1], ["c", 3, 4, 1], ["d", 5, 6, 1]]


def test_a_batch_that_was_cut_by_death_is_encoded_whole_again(tmp_path, corpus, lookahead_codec, monkeypatch):
    """What a batch consists of doesn't depend on what of it was written: no row's rounding changes."""
    shapes = []
    encode = type(lookahead_codec).encode

    def spy(self, wave, lengths=None, **options):
        shapes.append(tuple(lengths.tolist()))
        return encode(self, wave, lengths, **options)

    monkeypatch.setattr(type(lookahead_codec), "encode", spy)
    encode_corpus(lookahead_codec, [corpus], tmp_path / "a.ctok", batch_seconds=30)
    whole = list(shapes)
    assert max(map(len, whole)) > 3
    shapes.clear()
    add, count = pipeline.Sink.add, iter(range(100))

    def die(self, entry):
        if next(count) == 4:
            raise TokenFileError("the disk is full")
        return add(self, entry)

    monkeypatch.setattr(pipeline.Sink, "add", die)
    with pytest.raises(TokenFileError, match="disk is full"):
        encode_corpus(lookahead_codec, [corpus], tmp_path / "b.ctok", batch_seconds=30)
    monkeypatch.setattr(pipeline.Sink, "add", add)
    shapes.clear()
    assert encode_corpus(lookahead_codec, [corpus], tmp_path / "b.ctok", batch_seconds=30).num_skipped == 4
    assert set(shapes) <= set(whole)
    assert (tmp_path / "a.ctok").read_bytes() == (tmp_path / "b.ctok").read_bytes()


def test_batches_are_of_like_length_and_leave_nobody_waiting():
    def entry(number, num_samples):
        return Entry(None, number, keys=["k"], num_samples=num_samples)

    pool = [entry(0, 50), entry(1, 10), entry(2, 49), entry(3, 48), entry(4, 100)]
    together = [[e.number for e in batch] for batch in compose_all(list(pool), 160)]
    assert together == [[1, 3, 2], [0], [4]]
    assert [e.number for e in compose(pool, 160)] == [3, 2, 0]
    assert [e.number for e in compose(pool, 160)] == [1]  # the one that waits longest, though it is the shortest
    assert [e.number for e in compose(pool, 160)] == [4]
    assert pool == []


def test_batches_of_a_corpus_have_little_padding(tmp_path, lookahead_codec, monkeypatch):
    """Of 300 files of very different lengths: on a CPU the encoder gets 15 % more than there is, at most."""
    generator = torch.Generator().manual_seed(0)
    folder, total, padded = tmp_path / "c", 0, []
    folder.mkdir()
    for number in range(300):
        length = int(torch.randint(800, 6400, (1,), generator=generator))
        total += length
        write_audio(folder / f"{number:03d}.wav", torch.randn(1, length, generator=generator) * 0.1, 16000)

    def spy(self, wave, lengths=None, **options):
        padded.append(wave.shape[0] * wave.shape[2])
        frames = -(-lengths // self.spec.hop_length)
        codes = torch.zeros(len(lengths), self.spec.n_quantizers, int(frames.max()), dtype=torch.int64)
        return Codes(codes, frames, lengths)

    monkeypatch.setattr(type(lookahead_codec), "encode", spy)
    monkeypatch.setattr("codec.encode.pipeline.CPU_BATCH_SECONDS", 2.0)  # as the files are, an eighth of real ones
    assert encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok").num_items == 300
    assert max(padded) <= 2 * 16000
    assert total < sum(padded) < 1.15 * total


def test_units_end_where_enough_audio_or_many_items_are():
    assert _unit_cuts([4.0] * 5, 10) == ([0, 2, 4], [8.0, 8.0, 4.0])
    assert _unit_cuts([100.0, 1.0, 1.0], 10) == ([0, 1], [100.0, 2.0])
    assert _unit_cuts([0.1] * 600, 1000)[0] == [0, 256, 512]


def test_no_more_is_read_ahead_than_a_bounded_amount(tmp_path, lookahead_codec, monkeypatch):
    folder = copied(tmp_path / "c", SPEECH[:1], copies=60)
    read, most, done = pipeline.ItemReader.read, [], []

    def spy(self, item, number, source=None):
        most.append(number - len(done))
        return read(self, item, number, source)

    add = pipeline.Sink.add
    monkeypatch.setattr(pipeline.ItemReader, "read", spy)
    monkeypatch.setattr(pipeline.Sink, "add", lambda self, entry: (done.append(entry), add(self, entry))[1])
    monkeypatch.setattr(pipeline, "READ_AHEAD_SECONDS", 1)
    monkeypatch.setattr("codec.encode.plan.UNIT_ITEMS", 5)
    assert encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok", batch_seconds=5).num_items == 60
    # Those ahead, a unit in the pool, two batches in the queue and one being encoded or written.
    assert max(most) <= pipeline.READ_AHEAD + 5 * 5


# --- changed inputs


def test_new_changed_and_removed_files(tmp_path, lookahead_codec):
    folder, store = copied(tmp_path / "c", SPEECH[:5]), tmp_path / "s"
    encode_corpus(lookahead_codec, [folder], store)
    before = contents(store)
    os.remove(folder / SPEECH[0])
    shutil.copy(DATA / SPEECH[6], folder / SPEECH[1])  # other content under the same name
    shutil.copy(DATA / SPEECH[5], folder)
    report = encode_corpus(lookahead_codec, [folder], store)
    assert (report.num_items, report.num_skipped, report.num_changed) == (2, 3, 1)
    assert (report.num_removed, report.removed) == (1, [SPEECH[0]])
    after = contents(store)
    assert set(after) == {*SPEECH[:6]}
    assert {key for key in before if after[key] != before[key]} == {SPEECH[1]}
    encode_corpus(lookahead_codec, [folder], tmp_path / "fresh")
    fresh = contents(tmp_path / "fresh")
    assert {key: after[key] for key in fresh} == fresh
    assert list(TokenStore(store).verify()) == []
    report = encode_corpus(lookahead_codec, [folder], store)
    assert (report.num_items, report.num_skipped, report.num_changed) == (0, 5, 0)


@pytest.mark.parametrize("name", ["s.ctok", "s"])
def test_metadata_that_changes_alone_is_renewed_without_encoding(tmp_path, lookahead_codec, monkeypatch, name):
    stereo = "speech_it-left_ru-right_first-in-queue_22k.flac"
    rows = [{"path": str(DATA / file), "key": file, "text": "uno"} for file in [stereo, *SPEECH[1:4]]]
    del rows[3]["text"]
    manifest, store = tmp_path / "m.jsonl", tmp_path / name
    options = {"channels": "split", "loudness_lufs": -23.0}

    def encoded(target):
        manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return encode_corpus(lookahead_codec, [manifest], target, **options)

    encoded(store)
    rows[0]["text"], rows[3]["text"], rows[2]["speaker"] = "due", "tre", {"name": "è"}
    del rows[2]["text"]
    encode = type(lookahead_codec).encode
    monkeypatch.setattr(type(lookahead_codec), "encode", None)
    report = encoded(store)
    assert (report.num_items, report.num_skipped, report.num_changed, report.num_updated) == (0, 4, 0, 3)
    assert encoded(store).num_updated == 0
    assert TokenStore(store).info(f"{stereo}#1").meta == {
        "text": "due", "sample_rate": 22050, "channel": 1, "channels": 2,
    }  # fmt: skip
    monkeypatch.setattr(type(lookahead_codec), "encode", encode)
    encoded(tmp_path / f"fresh_{name}")
    assert contents(store) == contents(tmp_path / f"fresh_{name}")
    # Both at once: a file that is another is encoded again.
    shutil.copy(DATA / SPEECH[6], tmp_path / "other")
    rows[1] |= {"path": str(tmp_path / "other"), "text": "quattro"}
    report = encoded(store)
    assert (report.num_items, report.num_changed, report.num_updated) == (1, 1, 0)
    assert TokenStore(store).info(rows[1]["key"]).meta["text"] == "quattro"


@pytest.mark.parametrize("name", ["s.ctok", "s"])
def test_a_file_that_changes_while_its_shard_is_unfinished(tmp_path, lookahead_codec, name):
    folder, store = copied(tmp_path / "c", SPEECH[:4]), tmp_path / name

    def die(done, total, seconds):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        encode_corpus(lookahead_codec, [folder], store, batch_seconds=1, on_progress=die)
    shutil.copy(DATA / SPEECH[6], folder / SPEECH[0])
    report = encode_corpus(lookahead_codec, [folder], store)
    assert report.num_changed == 1
    encode_corpus(lookahead_codec, [folder], tmp_path / "fresh")
    assert contents(store) == contents(tmp_path / "fresh")
    left = [path.name for path in tmp_path.rglob("*") if "rewritten" in path.name or path.name.endswith(".lock")]
    assert left == []


def test_content_tells_what_times_do_not(tmp_path, lookahead_codec):
    folder, store = copied(tmp_path / "c", SPEECH[:3]), tmp_path / "s.ctok"
    encode_corpus(lookahead_codec, [folder], store, compare="content")
    os.utime(folder / SPEECH[0], (1, 1))  # touched, not changed
    assert encode_corpus(lookahead_codec, [folder], store, compare="content").num_changed == 0
    data = bytearray((folder / SPEECH[1]).read_bytes())
    status = os.stat(folder / SPEECH[1])
    data[-100:] = bytes(100)
    (folder / SPEECH[1]).write_bytes(data)
    os.utime(folder / SPEECH[1], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert encode_corpus(lookahead_codec, [folder], store).num_changed == 1  # by the time of the first
    os.utime(folder / SPEECH[0], (2, 2))


def test_other_settings_and_other_codecs_are_refused(tmp_path, lookahead_codec, causal_codec):
    folder, store = copied(tmp_path / "c", SPEECH[:2]), tmp_path / "s"
    encode_corpus(lookahead_codec, [folder], store)
    with pytest.raises(InputError, match="encoded with channels='mix', now it is 'split'"):
        encode_corpus(lookahead_codec, [folder], store, channels="split")
    with pytest.raises(TokenFileError, match="differs from this codec"):
        encode_corpus(causal_codec, [folder], store)
    with pytest.raises(TokenFileError, match="n_quantizers"):
        encode_corpus(lookahead_codec, [folder], store, n_quantizers=2)
    with pytest.raises(InputError, match=r"a name without \.ctok"):
        encode_corpus(lookahead_codec, [folder], tmp_path / "x.ctok", workers=2)
    with pytest.raises(InputError, match="ranks count from 0"):
        encode_corpus(lookahead_codec, [folder], store, rank=3, world_size=3)
    with pytest.raises(InputError, match="exists"):
        encode_corpus(lookahead_codec, [folder], store, resume=False)
    assert (
        encode_corpus(lookahead_codec, [folder], store, force=True, channels="split").num_items == 3
    )  # one has two channels


def test_a_shard_that_another_process_writes_is_left_to_it(tmp_path, lookahead_codec):
    folder, store = copied(tmp_path / "c", SPEECH[:2]), tmp_path / "s"
    encode_corpus(lookahead_codec, [folder], store)
    (shard,) = store.glob("*.ctok")
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl, shutil, sys, time\n"
            f"shutil.copy({str(shard)!r}, {str(shard) + UNFINISHED!r})\n"
            f"file = open({str(shard) + UNFINISHED!r}, 'rb+'); fcntl.flock(file, fcntl.LOCK_EX)\n"
            "print('held', flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        shutil.copy(DATA / SPEECH[6], folder / SPEECH[0])
        report = encode_corpus(lookahead_codec, [folder], store)
        assert (report.held, report.num_items) == ([SPEECH[0]], 0)
    finally:
        holder.kill()
        holder.wait()
    assert encode_corpus(lookahead_codec, [folder], store).num_changed == 1


# --- long items


def test_streamed_pieces_are_the_whole(corpus):
    for name in CLIPS:
        wave, rate = read_audio(corpus / name)
        for size in (1 << 20, 7777):
            pieces = [piece.clone() for piece in stream_audio(corpus / name, piece_samples=size)]
            assert torch.equal(torch.cat(pieces, 1), wave)
            assert {piece.shape[1] for piece in pieces[:-1]} <= {size}
        resampler = StreamResampler(rate, 24000)
        parts = [resampler.push(piece) for piece in wave.split(5001, 1)]
        parts.append(resampler.push(wave[:, :0], last=True))
        torch.testing.assert_close(torch.cat(parts, 1), resample(wave, rate, 24000), rtol=0, atol=1e-5)
    part = torch.cat(list(stream_audio(corpus / CLIPS[0], start_sample=500, num_samples=9000, piece_samples=4000)), 1)
    assert torch.equal(part, read_audio(corpus / CLIPS[0], start_sample=500, num_samples=9000)[0])
    with pytest.raises(InputError, match="ask for less"):
        next(stream_audio(corpus / CLIPS[0], start_sample=10**9))


def test_long_items_of_all_kinds_equal_the_whole(tmp_path, corpus, lookahead_codec, monkeypatch):
    options = {"channels": "split", "loudness_lufs": -23.0, "n_quantizers": 2}
    encode_corpus(lookahead_codec, [corpus], tmp_path / "whole.ctok", **options)
    monkeypatch.setattr("codec.encode.corpus.LONG_SECONDS", 0.7)
    report = encode_corpus(lookahead_codec, [corpus], tmp_path / "pieces.ctok", **options)
    assert report.failures == []
    whole, pieces = TokenStore(tmp_path / "whole.ctok"), TokenStore(tmp_path / "pieces.ctok")
    assert list(whole.keys()) == list(pieces.keys())
    differing = 0
    for key in whole.keys():
        a, b = whole.info(key), pieces.info(key)
        assert (a.num_samples, a.meta) == (b.num_samples, b.meta)
        assert a.gain == pytest.approx(b.gain, rel=1e-5)
        differing += int((whole.read(key) != pieces.read(key)).any(0).sum())
    # A gain that is rounded otherwise moves a code now and then.
    assert differing <= 0.002 * whole.num_frames.sum()


def num_ties_of_encodec(codec, wave, ours, theirs):
    """As `num_ties`: the codebooks are random, and entries lie close together."""
    latents = codec.encoder.run(wave[None], None)[0][0].double()
    frames = (ours != theirs).any(0).nonzero().flatten().tolist()
    for frame in frames:
        residual = latents[:, frame]
        for level, layer in enumerate(codec.quantizer.layers):
            a, b = (layer.decode(codes[level, frame].view(1, 1))[0, :, 0].double() for codes in (ours, theirs))
            if not torch.equal(a, b):
                gap = (residual - a).square().sum() - (residual - b).square().sum()
                # Latents are float32: rounded by some 1e-7 of their size, which moves the gap by the entries' distance.
                allowed = 2e-6 * latents[:, frame].norm() * (a - b).norm()
                assert gap.abs() < allowed, f"frame {frame}, level {level} isn't a tie"
                break
            residual = residual - a
    return len(frames)


def test_a_codec_with_unbounded_context_that_streams_takes_long_items_in_pieces(tmp_path, monkeypatch):
    lookalikes = pytest.importorskip("lookalikes", reason="needs transformers: pip install 'codec[hub]'")
    codec = load_codec(lookalikes.save("encodec_24", tmp_path / "encodec"))
    assert codec.spec.encode_context is None
    folder = copied(tmp_path / "c", SPEECH[:2])
    encode_corpus(codec, [folder], tmp_path / "whole.ctok")
    monkeypatch.setattr("codec.encode.corpus.LONG_SECONDS", 1)
    longest = []
    encode = type(codec).encode

    def spy(self, wave, lengths=None, **options):
        longest.append(wave.shape[-1])
        return encode(self, wave, lengths, **options)

    monkeypatch.setattr(type(codec), "encode", spy)
    encode_corpus(codec, [folder], tmp_path / "pieces.ctok")
    assert longest == []  # all of them by the stream
    whole, pieces = TokenStore(tmp_path / "whole.ctok"), TokenStore(tmp_path / "pieces.ctok")
    assert len(whole) == len(pieces) == 2
    for key in whole.keys():
        assert whole.info(key) == pieces.info(key)
        wave, _ = read_audio(folder / key, sample_rate=codec.spec.sample_rate, mono=True)
        ours, theirs = (torch.from_numpy(store.read(key)) for store in (whole, pieces))
        assert num_ties_of_encodec(codec, wave, ours, theirs) < 0.02 * ours.shape[1]
    # One that can't stream is encoded whole.
    monkeypatch.setattr(type(codec), "streams_encoding", False)
    encode_corpus(codec, [folder], tmp_path / "again.ctok")
    assert max(longest) > 3 * codec.spec.sample_rate


def test_a_long_file_that_is_cut_fails_alone(tmp_path, lookahead_codec, monkeypatch):
    monkeypatch.setattr("codec.encode.corpus.LONG_SECONDS", 1)
    folder = copied(tmp_path / "c", ["music_piano_stereo_48k.ogg", SPEECH[0]])
    data = bytearray((DATA / "speech_ru_female_please-hold_44k.flac").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 2000] = os.urandom(2000)
    (folder / "damaged.flac").write_bytes(data)
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    assert [failure["key"] for failure in report.failures] == ["damaged.flac"]
    assert len(TokenStore(tmp_path / "s.ctok")) == 2
    assert list(TokenStore(tmp_path / "s.ctok").verify()) == []


def test_a_device_without_memory_gets_smaller_batches(tmp_path, lookahead_codec, monkeypatch, corpus):
    encode = type(lookahead_codec).encode

    def scarce(self, wave, lengths=None, **options):
        if wave.shape[0] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return encode(self, wave, lengths, **options)

    encode_corpus(lookahead_codec, [corpus], tmp_path / "a")
    monkeypatch.setattr(type(lookahead_codec), "encode", scarce)
    assert encode_corpus(lookahead_codec, [corpus], tmp_path / "b").failures == []
    assert contents(tmp_path / "a").keys() == contents(tmp_path / "b").keys()
    monkeypatch.setattr(type(lookahead_codec), "encode", lambda *a, **k: scarce(a[0], torch.zeros(3, 1)))
    with pytest.raises(InputError, match="lower --batch-seconds"):
        encode_corpus(lookahead_codec, [corpus], tmp_path / "c")


# --- channels, gain, what is told


def test_channels_are_mixed_or_split(tmp_path, lookahead_codec):
    folder = copied(tmp_path / "c", ["speech_it-left_ru-right_first-in-queue_22k.flac", SPEECH[1]])
    name = "speech_it-left_ru-right_first-in-queue_22k.flac"
    wave, rate = read_audio(DATA / name)
    encode_corpus(lookahead_codec, [folder], tmp_path / "mix.ctok")
    mixed = TokenStore(tmp_path / "mix.ctok")
    assert mixed.info(name).meta == {"sample_rate": rate, "channels": 2}
    encode_corpus(lookahead_codec, [folder], tmp_path / "split.ctok", channels="split")
    split = TokenStore(tmp_path / "split.ctok")
    assert sorted(split.keys()) == sorted([f"{name}#0", f"{name}#1", SPEECH[1]])
    for channel in (0, 1):
        key = f"{name}#{channel}"
        assert split.info(key).meta == {"sample_rate": rate, "channel": channel, "channels": 2}
        alone = resample(wave[channel : channel + 1], rate, 16000)
        theirs = lookahead_codec.encode(alone).codes[0]
        latents = lookahead_codec.latents(alone[None])[0]
        assert num_ties(lookahead_codec, latents, torch.from_numpy(split.read(key)), theirs) <= 1
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "split.ctok", channels="split")
    assert (report.num_items, report.num_skipped, report.num_removed) == (0, 2, 0)


def test_a_stereo_codec_takes_stereo_and_mono_files(tmp_path):
    codec = small_codec(channels=2)
    folder = copied(tmp_path / "c", ["music_piano_stereo_48k.ogg", "speech_it_male_first-in-queue_16k.wav"])
    assert encode_corpus(codec, [folder], tmp_path / "s.ctok").failures == []
    store = TokenStore(tmp_path / "s.ctok")
    wave, _ = read_audio(folder / "speech_it_male_first-in-queue_16k.wav")
    theirs = codec.encode(wave.expand(2, -1)).codes[0].numpy()
    assert np.array_equal(store.read("speech_it_male_first-in-queue_16k.wav"), theirs)
    assert store.info("music_piano_stereo_48k.ogg").meta == {"sample_rate": 48000}
    with pytest.raises(InputError, match="use a mono codec, or mix"):
        encode_corpus(codec, [folder], tmp_path / "t.ctok", channels="split")


def test_loudness_is_brought_to_the_target_and_recorded_as_gain(tmp_path, lookahead_codec):
    name = "speech_it_male_first-in-queue_16k.wav"
    wave, rate = read_audio(DATA / name)
    folder = tmp_path / "c"
    folder.mkdir()
    write_audio(folder / "quiet.wav", wave * 0.05, rate)
    write_audio(folder / "silent.wav", torch.zeros(1, 16000), rate)
    encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok", loudness_lufs=-30)
    store = TokenStore(tmp_path / "s.ctok")
    assert store.info("silent.wav").gain is None
    gain = store.info("quiet.wav").gain
    quiet, _ = read_audio(folder / "quiet.wav")
    meter = LoudnessMeter(rate)
    meter.push(quiet[0] * gain)
    assert meter.loudness() == pytest.approx(-30, abs=0.05)
    theirs = lookahead_codec.encode(quiet * gain).codes[0].numpy()
    assert np.array_equal(store.read("quiet.wav"), theirs)
    # Never into clipping.
    encode_corpus(lookahead_codec, [folder / "quiet.wav"], tmp_path / "loud.ctok", loudness_lufs=0)
    assert TokenStore(tmp_path / "loud.ctok").info("quiet.wav").gain == pytest.approx(1 / float(quiet.abs().max()))


def test_the_loudness_meter_is_bs_1770():
    functional = pytest.importorskip("torchaudio.functional")
    for name in CLIPS:
        wave, rate = read_audio(DATA / name, mono=True)
        if wave.shape[1] < rate:
            continue
        expected = float(functional.loudness(wave.double(), rate))
        for size in (wave.shape[1], 5003):
            meter = LoudnessMeter(rate)
            for piece in wave[0].split(size):
                meter.push(piece)
            assert meter.loudness() == pytest.approx(expected, abs=0.05)
    sine = 10 ** (-23 / 20) * torch.sin(torch.arange(96000) * 2 * torch.pi * 997 / 48000)
    meter = LoudnessMeter(48000)
    meter.push(sine)
    assert meter.loudness() == pytest.approx(-26.01, abs=0.1)  # EBU's tone: mono is 3 dB below stereo


def test_clipping_dc_and_silence_are_told(tmp_path, lookahead_codec):
    folder = tmp_path / "c"
    folder.mkdir()
    noise = torch.randn(1, 16000, generator=torch.Generator().manual_seed(0)) * 0.1
    write_audio(folder / "fine.wav", noise, 16000)
    write_audio(folder / "clipped.wav", (noise * 30).clamp(-1, 1), 16000)
    write_audio(folder / "dc.wav", noise + 0.2, 16000)
    write_audio(folder / "silent.wav", torch.zeros(1, 16000), 16000)
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    told = {warning["key"]: warning["warning"] for warning in report.warnings}
    assert set(told) == {"clipped.wav", "dc.wav", "silent.wav"}
    assert told["clipped.wav"].startswith("clipped: ")
    assert told["dc.wav"].startswith("DC offset: its mean is 0.")
    assert told["silent.wav"] == "silence: its peak is zero"
    assert report.num_items == 4


def test_levels_count_runs_at_full_scale():
    levels = Levels()
    wave = torch.zeros(1, 20)
    wave[0, 2:5] = 1  # a run of 3
    wave[0, 8:10] = -1  # 2 are too few
    wave[0, 12:17] = -1  # a run of 5
    levels.add(wave)
    assert levels.num_clipped == 8


# --- the quality guard


def test_the_guard_names_the_odd_ones(tmp_path):
    codec = load_codec("speech_16k")
    folder = copied(tmp_path / "c", SPEECH)
    wave, _ = read_audio(DATA / "speech_it_male_first-in-queue_16k.wav")
    write_audio(folder / "a_noise.wav", torch.rand(1, 32000) * 2 - 1, 16000)
    write_audio(folder / "a_slow.wav", resample(resample(wave, 16000, 8000), 8000, 16000), 16000)
    write_audio(folder / "a_silent.wav", torch.zeros(1, 32000), 16000)
    report = encode_corpus(codec, [folder], tmp_path / "s.ctok", check=1.0)
    check = report.check
    reasons = {outlier["key"]: " ".join(outlier["reasons"]) for outlier in check["outliers"]}
    assert check["num_items"] == len(SPEECH) + 3
    assert "silence" in reasons["a_silent.wav"]
    assert "nothing above" in reasons["a_slow.wav"]
    assert "below the codec's" in reasons["speech_it_male_enter-your-number_8k.wav"]
    assert "speech_it_male_first-in-queue_16k.wav" not in reasons
    plain = encode_corpus(codec, [folder], tmp_path / "t.ctok")
    assert plain.check == {}
    assert (tmp_path / "s.ctok").read_bytes() == (tmp_path / "t.ctok").read_bytes()
    few = encode_corpus(codec, [folder], tmp_path / "u.ctok", check=0.01)
    assert 1 <= few.check["num_items"] <= 3  # one at least, so that something is seen at once


# --- failures


def test_strict_stops_at_once_and_keeps_what_is_done(tmp_path, lookahead_codec):
    folder = copied(tmp_path / "c", SPEECH[:4])
    (folder / f"{SPEECH[2]}_.wav").write_text("no audio")
    with pytest.raises(AudioFileError, match=r"_\.wav"):
        encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok", strict=True)
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    assert report.num_skipped == 3
    (failure,) = report.failures
    assert failure["key"] == f"{SPEECH[2]}_.wav"
    assert failure["remedy"]
    write_failures(report.failures, tmp_path / "deep" / "errors.jsonl")
    assert json.loads((tmp_path / "deep" / "errors.jsonl").read_text()) == failure


def test_whatever_a_decoder_raises_is_that_files_failure(tmp_path, lookahead_codec, monkeypatch):
    from codec import audio

    folder = copied(tmp_path / "c", SPEECH[:3])
    info = audio.audio_info

    def moody(source, **options):
        if SPEECH[1] in str(source):
            raise MemoryError("no memory for the table")
        return info(source, **options)

    monkeypatch.setattr(audio, "audio_info", moody)
    report = encode_corpus(lookahead_codec, [folder], tmp_path / "s")
    assert [failure["key"] for failure in report.failures] == [SPEECH[1]]
    assert "no memory for the table" in report.failures[0]["error"]
    assert str(folder / SPEECH[1]) in report.failures[0]["error"]


def test_a_row_that_the_codec_refuses_fails_alone(tmp_path, lookahead_codec, monkeypatch, corpus):
    encode = type(lookahead_codec).encode
    bad = int(resample(read_audio(corpus / CLIPS[3], mono=True)[0], read_audio(corpus / CLIPS[3])[1], 16000).shape[1])

    def picky(self, wave, lengths=None, **options):
        if lengths is not None and bad in lengths.tolist():
            raise InputError("wave holds NaN")
        return encode(self, wave, lengths, **options)

    monkeypatch.setattr(type(lookahead_codec), "encode", picky)
    report = encode_corpus(lookahead_codec, [corpus], tmp_path / "s")
    assert [failure["key"] for failure in report.failures] == [CLIPS[3]]
    assert report.num_items == len(CLIPS) - 1


def test_a_full_disk_stops_the_run_and_loses_nothing(tmp_path, lookahead_codec, monkeypatch):
    folder = copied(tmp_path / "c", SPEECH[:4])
    write, count = os.pwrite, iter(range(1000))

    def full(descriptor, data, position):
        if next(count) == 3:
            raise OSError(28, "No space left on device")
        return write(descriptor, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(TokenFileError, match="No space left"):
        encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok")
    monkeypatch.setattr(os, "pwrite", write)
    assert encode_corpus(lookahead_codec, [folder], tmp_path / "s.ctok").num_skipped >= 1
    encode_corpus(lookahead_codec, [folder], tmp_path / "t.ctok")
    assert (tmp_path / "s.ctok").read_bytes() == (tmp_path / "t.ctok").read_bytes()


class DieOnce:
    """A hook that kills the first process to come to its second batch."""

    def __init__(self, marker):
        self.marker = marker
        self.calls = 0

    def __call__(self, module, inputs):
        self.calls += 1
        if self.calls == 2:
            with suppress(FileExistsError):
                self.marker.touch(exist_ok=False)
                os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_an_error_that_can_be_gone_on_from(
    tmp_path, corpus, one_process, lookahead_codec, monkeypatch
):
    monkeypatch.setattr("codec.encode.processes.usable_cores", lambda: 2)
    mortal = copy.deepcopy(lookahead_codec)
    mortal.encoder.register_forward_pre_hook(DieOnce(tmp_path / "died"))
    options = {"shard_bytes": SHARD, "batch_seconds": 5}
    with pytest.raises(TokenFileError, match="the same command goes on"):
        encode_corpus(mortal, [corpus], tmp_path / "s", workers=2, **options)
    assert len(list((tmp_path / "s").glob("*.ctok"))) < len(shards(one_process))
    encode_corpus(lookahead_codec, [corpus], tmp_path / "s", **options)
    assert shards(tmp_path / "s") == shards(one_process)


# --- looking without encoding


def test_a_dry_run_counts_and_estimates(tmp_path, corpus, lookahead_codec):
    (tmp_path / "bad.wav").write_text("x")
    items = find_items([corpus, tmp_path / "bad.wav"])
    report = scan(lookahead_codec, items, EncodeSettings())
    done = encode_corpus(lookahead_codec, [corpus], tmp_path / "s.ctok")
    assert report.audio_seconds == pytest.approx(done.audio_seconds)
    assert report.num_items == len(CLIPS) + 1
    assert [failure["key"] for failure in report.failures] == ["bad.wav"]
    assert report.store_bytes == pytest.approx(done.store_bytes, rel=0.15)
    assert report.encode_seconds > 0
    assert sum(report.kinds.values()) == len(CLIPS)
    assert any("16000 Hz, 1 channel" in kind for kind in report.kinds)


def test_the_bottleneck_is_named():
    from codec.encode.corpus import bottleneck

    seconds = {
        "waiting for audio": 5.0, "encoding": 1.0, "waiting for the disk": 0.0,
        "decode threads": 10.0, "decode threads' cpu": 9.0,
    }  # fmt: skip
    assert bottleneck(seconds) == "decoding"
    assert bottleneck({**seconds, "decode threads' cpu": 1.0}) == "reading"
    assert bottleneck({**seconds, "encoding": 6.0}) == "encoding"
    assert bottleneck({**seconds, "waiting for the disk": 6.0}) == "writing"
    assert bottleneck(dict.fromkeys(seconds, 0.0)) == ""
