"""Long files and many excerpts of one: a single decode gives what each reading alone gives."""

import io
import os
import random
import threading
import time
from functools import partial

import fsspec
import numpy as np
import pytest
import soundfile
import torch
from conftest import DATA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_audio_exact import encoded

from codec.audio import (
    drflac,
    ffmpeg,
    mpeg,
    ogg,
    opening,
    read_audio,
    read_audio_batch,
    readers,
    reading,
    sndfile,
    stream_audio,
    streaming,
    submit_audio_batch,
)
from codec.audio.facts import Facts
from codec.audio.opening import Source
from codec.audio.reading import read_excerpts
from codec.errors import AudioFileError, CodecError, InputError

RATE, LENGTH = 16000, 60007
FILES = {
    "pcm.wav": ("WAV", "PCM_16"),
    "float.wav": ("WAV", "FLOAT"),
    "adpcm.wav": ("WAV", "IMA_ADPCM"),
    "a.flac": ("FLAC", "PCM_16"),
    "a.ogg": ("OGG", "VORBIS"),
    "a.mp3": ("MP3", "MPEG_LAYER_III"),
    "a.opus": ("OGG", "OPUS"),
    "a.aiff": ("AIFF", "PCM_24"),
}
QUICK = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
needs_ffmpeg = pytest.mark.skipif(
    ffmpeg.torchcodec_decoder()[0] is None, reason="FFmpeg is not installed: apt-get install ffmpeg"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("passes")
    for name, (format, subtype) in FILES.items():
        (folder / name).write_bytes(encoded(LENGTH, RATE, 2, format, subtype))
    return folder


@pytest.fixture
def decoded(monkeypatch):
    """Samples that libsndfile has decoded, one number a call."""
    counts = []
    real = sndfile.ForwardFile.read

    def read(self, *arguments, **options):
        samples = real(self, *arguments, **options)
        counts.append(len(samples))
        return samples

    monkeypatch.setattr(sndfile.ForwardFile, "read", read)
    return counts


@pytest.fixture(scope="module")
def m4a(tmp_path_factory):
    from torchcodec.encoders import AudioEncoder

    path = tmp_path_factory.mktemp("m4a") / "a.m4a"
    wave, rate = read_audio(DATA / "music_guitar-chord_stereo_44k.flac")
    AudioEncoder(wave[:1], sample_rate=rate).to_file(path)
    return path


def damaged_opus():
    """Opus without one page in the middle, and a sample that lies before it."""
    data = encoded(RATE * 12, RATE, 1, "OGG", "OPUS")
    pages = list(ogg.all_pages(Source(data)))
    gone = pages[len(pages) // 2]
    before = ogg.opus_samples(Source(data), pages[len(pages) // 2 - 1].granule, RATE)
    return data[: gone.offset] + data[gone.offset + gone.num_bytes :], before


# --- streams


@pytest.mark.parametrize("name", FILES)
@QUICK
@given(data=st.data())
def test_a_stream_is_the_whole_in_pieces(folder, name, data):
    options = {"mono": data.draw(st.booleans()), "sample_rate": data.draw(st.sampled_from([None, 24000, 11025]))}
    length = read_audio(folder / name, **options)[0].shape[1]
    start = data.draw(st.integers(0, length - 1))
    num = data.draw(st.none() | st.integers(1, length - start))
    size = data.draw(st.integers(500, 90000))
    at_once = streaming._RESAMPLED_AT_ONCE
    streaming._RESAMPLED_AT_ONCE = data.draw(st.sampled_from([997, 20000, at_once]))
    try:
        pieces = list(stream_audio(folder / name, start_sample=start, num_samples=num, piece_samples=size, **options))
        others = list(
            stream_audio(folder / name, start_sample=start, num_samples=num, piece_samples=size // 3, **options)
        )
    finally:
        streaming._RESAMPLED_AT_ONCE = at_once
    wave = torch.cat(pieces, 1)
    expected = read_audio(folder / name, start_sample=start, num_samples=num, **options)[0]
    assert {piece.shape[1] for piece in pieces[:-1]} <= {size}
    assert torch.equal(wave, torch.cat(others, 1))
    if options["sample_rate"] is None:
        assert torch.equal(wave, expected)
    else:
        torch.testing.assert_close(wave, expected, rtol=0, atol=1e-5)


def test_a_stream_opens_its_file_once(folder, monkeypatch):
    opened, real = [], opening.os.open
    monkeypatch.setattr(opening.os, "open", lambda path, *a, **k: opened.append(path) or real(path, *a, **k))
    pieces = list(stream_audio(folder / "pcm.wav", piece_samples=1000, sample_rate=8000, mono=True))
    assert len(pieces) == 31
    assert opened == [str(folder / "pcm.wav")]


def test_a_stream_of_damage(folder, tmp_path, monkeypatch):
    data, _ = damaged_opus()
    path = tmp_path / "gap.opus"
    path.write_bytes(data)
    for options in ({}, {"sample_rate": 8000}):
        with pytest.raises(AudioFileError, match=r"gap.opus: is damaged: pages are missing .* at sample 79\d+;"):
            next(stream_audio(path, piece_samples=1000, **options))
    flipped = bytearray((folder / "a.ogg").read_bytes())
    page = list(ogg.all_pages(Source(bytes(flipped))))[-2]
    flipped[page.offset + 100] ^= 1
    path.write_bytes(flipped)
    # Where only an excerpt is asked for, what lies outside doesn't matter.
    with pytest.raises(AudioFileError, match="has a wrong checksum"):
        next(stream_audio(path, piece_samples=10))
    assert torch.equal(
        torch.cat(list(stream_audio(path, num_samples=100, piece_samples=10)), 1),
        read_audio(folder / "a.ogg", num_samples=100)[0],
    )
    # Damage that only decoding finds: the pieces before come first.
    flac = bytearray((folder / "a.flac").read_bytes())
    flac[len(flac) * 3 // 4 : len(flac) * 3 // 4 + 300] = bytes(300)
    path.write_bytes(flac)
    pieces = []
    monkeypatch.setattr(sndfile, "_VALUES_AT_ONCE", 4000)
    monkeypatch.setattr(drflac, "_VALUES_AT_ONCE", 4000)
    with pytest.raises(AudioFileError, match="is cut or damaged"):
        pieces.extend(stream_audio(path, piece_samples=1000))
    assert len(pieces) > 10
    assert torch.equal(torch.cat(pieces, 1), read_audio(folder / "a.flac", num_samples=1000 * len(pieces))[0])


def test_bad_arguments_of_a_stream(folder):
    for size in (0, -5, True, 2.0):
        with pytest.raises(InputError, match=f"piece_samples is {size}; it must be an integer of at least 1"):
            next(stream_audio(folder / "pcm.wav", piece_samples=size))
    with pytest.raises(InputError, match="it has 30004 at 8000 Hz; ask for less"):
        next(stream_audio(folder / "pcm.wav", start_sample=30004, sample_rate=8000))


def test_a_stream_of_samples_that_are_none(tmp_path):
    wave = np.zeros((5000, 1), np.float32)
    wave[3210] = np.nan
    soundfile.write(tmp_path / "x.wav", wave, RATE, subtype="FLOAT")
    stream = stream_audio(tmp_path / "x.wav", piece_samples=1000)
    assert [next(stream).shape[1] for _ in range(3)] == [1000] * 3
    with pytest.raises(AudioFileError, match="1 of 1000 samples are NaN or infinite, the first at 3210"):
        next(stream)


# --- excerpts of one file


def alone(path, excerpts, **options):
    """What each excerpt's own reading gives."""
    results = []
    for start, num in excerpts:
        try:
            results.append(read_audio(path, start_sample=start, num_samples=num, **options))
        except CodecError as error:
            results.append((error, 0))
    return results


def together(path, excerpts, **options):
    results = [None] * len(excerpts)
    for number, wave, rate in read_excerpts(path, excerpts, **options):
        assert results[number] is None
        results[number] = (wave, rate)
    return results


def assert_same(ours, theirs):
    assert len(ours) == len(theirs)
    for (wave, rate), (expected, expected_rate) in zip(ours, theirs, strict=True):
        assert rate == expected_rate
        if isinstance(expected, CodecError):
            assert (type(wave), str(wave)) == (type(expected), str(expected))
        else:
            assert wave.dtype == expected.dtype
            assert torch.equal(wave, expected)
            assert wave.is_contiguous()


@pytest.mark.parametrize("name", FILES)
@QUICK
@given(data=st.data())
def test_excerpts_in_one_pass_are_each_alone(folder, name, data):
    options = {
        "sample_rate": data.draw(st.sampled_from([None, RATE, 11025])),
        "mono": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.int16, torch.bfloat16])),
    }
    # Some lie beyond the end.
    spans = st.tuples(st.integers(0, 42000), st.none() | st.integers(1, 25000))
    excerpts = data.draw(st.lists(spans, min_size=data.draw(st.sampled_from([0, 2, 4])), max_size=6))
    at_once = sndfile._VALUES_AT_ONCE
    sndfile._VALUES_AT_ONCE = data.draw(st.sampled_from([3000, at_once]))
    try:
        ours = together(folder / name, excerpts, **options)
    finally:
        sndfile._VALUES_AT_ONCE = at_once
    assert_same(ours, alone(folder / name, excerpts, **options))


@needs_ffmpeg
def test_excerpts_of_m4a_take_one_decode(m4a, monkeypatch):
    length = read_audio(m4a)[0].shape[1]
    draws = random.Random(0)
    excerpts = [(draws.randint(0, length - 9000), 9000) for _ in range(12)] + [(length, 1), (0, None)]
    expected = alone(m4a, excerpts[:-2])
    decodes, real = [], ffmpeg.FFmpegReader.__init__
    monkeypatch.setattr(ffmpeg.FFmpegReader, "__init__", lambda self, *a, **k: decodes.append(a) or real(self, *a, **k))
    assert_same(together(m4a, excerpts[:-2]), expected)
    assert len(decodes) == 1
    batch = read_audio_batch([(m4a, *excerpt) for excerpt in excerpts[:-2]], num_threads=2)
    assert len(decodes) == 2
    assert torch.equal(batch.wave, torch.stack([wave for wave, _ in expected]))
    # An excerpt doesn't keep the whole decode in memory.
    assert read_audio(m4a, num_samples=10)[0].untyped_storage().nbytes() < 1000
    assert_same(together(m4a, excerpts), alone(m4a, excerpts))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_batch_decodes_an_opus_file_once(folder, decoded, num_threads, monkeypatch):
    monkeypatch.setattr(sndfile, "_VALUES_AT_ONCE", 5000)
    draws = random.Random(1)
    excerpts = [(folder / "a.opus", draws.randint(0, LENGTH - 3000), 3000) for _ in range(20)]
    excerpts[3:3] = [(folder / "pcm.wav", 5, 3000), (folder / "a.flac", 99, 3000), (folder / "pcm.wav", 0, 3000)]
    expected = [read_audio(path, start_sample=start, num_samples=num)[0] for path, start, num in excerpts]
    decoded.clear()
    batch = read_audio_batch(excerpts, num_threads=num_threads)
    assert sum(decoded) <= LENGTH
    assert torch.equal(batch.wave, torch.stack(expected))
    # Salvage is each row's own.
    salvaged = read_audio_batch(excerpts[:2], num_threads=num_threads, allow_truncated=True)
    assert torch.equal(salvaged.wave, batch.wave[:2])


@QUICK
@given(data=st.data())
def test_a_batch_of_anything_is_each_row_alone(folder, data):
    names = data.draw(
        st.lists(st.sampled_from(["a.opus", "adpcm.wav", "pcm.wav", "gone.opus"]), min_size=1, max_size=8)
    )
    spans = st.tuples(st.integers(0, 61000), st.none() | st.integers(1, 30000))
    excerpts = [(folder / name, *data.draw(spans)) for name in names]
    num_threads = data.draw(st.integers(1, 3))
    batch = read_audio_batch(excerpts, num_threads=num_threads, layout="list", errors="return")
    ours = [
        (batch.errors.get(row, wave), int(rate))
        for row, (wave, rate) in enumerate(zip(batch.wave, batch.sample_rates, strict=True))
    ]
    assert_same(ours, [alone(path, [(start, num)])[0] for path, start, num in excerpts])


def test_excerpts_around_damage(tmp_path):
    data, before = damaged_opus()
    path = tmp_path / "gap.opus"
    path.write_bytes(data)
    excerpts = [(170000, 20000), (before - 5000, 5000), (0, None), (0, 100), (before - 5000, 5001)]
    expected = alone(path, excerpts)
    assert [isinstance(wave, AudioFileError) for wave, _ in expected] == [True, False, True, False, True]
    assert_same(together(path, excerpts), expected)
    batch = read_audio_batch([(path, *excerpt) for excerpt in excerpts], errors="return", num_threads=2, layout="list")
    assert sorted(batch.errors) == [0, 2, 4]
    assert torch.equal(batch.wave[1], expected[1][0])
    with pytest.raises(AudioFileError, match=r"gap.opus: is damaged: pages are missing"):
        read_audio_batch([(path, *excerpt) for excerpt in excerpts], num_threads=2)


def test_vorbis_excerpts_around_a_missing_page(tmp_path):
    """libsndfile, which decodes speech, steps over the gap: what touches it raises, what doesn't is right."""
    data = encoded(16000 * 20, 16000, 1, "OGG", "VORBIS")
    pages = list(ogg.all_pages(Source(data)))
    middle = len(pages) // 2
    gone = pages[middle]
    path, intact = tmp_path / "gap.ogg", tmp_path / "intact.ogg"
    intact.write_bytes(data)
    path.write_bytes(data[: gone.offset] + data[gone.offset + gone.num_bytes :])
    before, after = pages[middle - 1].granule, gone.granule
    assert middle > 2
    for start, num in ((before - 2000, 8000), (before + 10, 100), (0, after), (after - 50, 3000)):
        with pytest.raises(AudioFileError, match=r"gap.ogg: is damaged: pages are missing between .* at sample \d+;"):
            read_audio(path, start_sample=start, num_samples=num)
    for start, num in ((0, 4000), (after + 40000, 4000)):
        ours, _ = read_audio(path, start_sample=start, num_samples=num)
        assert torch.equal(ours, read_audio(intact, start_sample=start, num_samples=num)[0])


def test_excerpts_of_samples_that_are_none(tmp_path):
    wave = np.zeros((5000, 1), np.float32)
    wave[3210] = np.inf
    soundfile.write(tmp_path / "x.wav", wave, RATE, subtype="FLOAT")
    excerpts = [(0, 3210), (3000, 300), (3211, None)]
    expected = alone(tmp_path / "x.wav", excerpts)
    assert "the first at 3210" in str(expected[1][0])
    assert_same(together(tmp_path / "x.wav", excerpts), expected)


def test_the_first_error_of_a_pass_stops_it(folder, monkeypatch):
    read, real = [], reading.read_audio
    monkeypatch.setattr(reading, "read_audio", lambda *a, **k: read.append(k) or real(*a, **k))
    excerpts = [(folder / "a.opus", 10**6 + index, 5) for index in range(30)]
    with pytest.raises(InputError, match="samples 1000000 … 1000005 were asked for"):
        read_audio_batch(excerpts, num_threads=1)
    assert len(read) == 1


def test_a_pass_over_the_network_waits_for_nobody(folder, monkeypatch):
    """One permit to decode, several threads that want the same remote file."""
    real = opening.open_url
    monkeypatch.setattr(opening, "open_url", lambda url: time.sleep(0.02) or real(url))
    with fsspec.open("memory://passes/a.opus", "wb") as file:
        file.write((folder / "a.opus").read_bytes())
    with fsspec.open("memory://passes/a.flac", "wb") as file:
        file.write((folder / "a.flac").read_bytes())
    excerpts = [(f"memory://passes/a.{('opus', 'flac')[index % 3 == 2]}", 1000 * index, 2000) for index in range(24)]
    expected = [
        read_audio(folder / url.rpartition("/")[2], start_sample=start, num_samples=num)[0]
        for url, start, num in excerpts
    ]
    for _ in range(2):
        batch = submit_audio_batch(excerpts, num_threads=1, io_threads=4).result(20)
        assert torch.equal(batch.wave, torch.stack(expected))


# --- what is remembered of files


def test_a_file_that_is_replaced_is_examined_anew(tmp_path, monkeypatch):
    path = tmp_path / "x"
    examined, real = [], readers._examined
    monkeypatch.setattr(readers, "_examined", lambda *a: examined.append(a[0].name) or real(*a))
    for round, (format, subtype) in enumerate(FILES.values()):
        data = encoded(5000 + round, RATE, 1, format, subtype)
        path.write_bytes(data)
        os.utime(path, ns=(round, round))
        for _ in range(3):
            wave = read_audio(path)[0]
        assert torch.equal(wave, read_audio(data)[0])
        assert torch.equal(read_audio(path, start_sample=999, num_samples=99)[0], wave[:, 999:1098])
        # That of the path once, that of the bytes.
        assert len(examined) == 2 * (round + 1)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(AudioFileError):
        read_audio(path)


def noted(lengths, pread, file, length, offset):
    lengths.append(length)
    return pread(file, length, offset)


def test_an_mp3_without_a_header_is_scanned_once(tmp_path, monkeypatch):
    data = encoded(RATE * 60, RATE, 1, "MP3", "MPEG_LAYER_III")
    data = data[mpeg.frame_header(data, 0).num_bytes :]
    assert mpeg.xing_claim(data, 0, mpeg.frame_header(data, 0)) is None
    for name, changed in (("plain", data), ("tagged", b"ID3\x04\0\0\0\0\x01\x00" + bytes(128) + data)):
        path = tmp_path / f"{name}.mp3"
        path.write_bytes(changed)
        whole = read_audio(path)[0]
        excerpt = read_audio(path, start_sample=700000, num_samples=16000)[0]
        read = []
        with monkeypatch.context() as patched:
            patched.setattr(mpeg, "scan", lambda _: pytest.fail("scanned again"))
            patched.setattr(opening.os, "pread", partial(noted, read, opening.os.pread))
            for start in (700000, 0, 90000, 900000):
                excerpt = read_audio(path, start_sample=start, num_samples=16000)[0]
                assert torch.equal(excerpt, whole[:, start : start + 16000])
            assert torch.equal(read_audio(path)[0], whole)
        # Three excerpts of a second with their preroll, and two readings from the beginning.
        assert sum(sorted(read)[:-2]) < len(data) // 8


def test_an_mp3_excerpt_near_the_beginning_uses_an_index_that_is_there(tmp_path, decoded):
    path = tmp_path / "x.mp3"
    path.write_bytes(encoded(RATE * 8, RATE, 1, "MP3", "MPEG_LAYER_III"))
    whole = read_audio(path)[0]
    decoded.clear()
    first = read_audio(path, start_sample=30000, num_samples=500)[0]
    assert sum(decoded) == 30500
    read_audio(path, start_sample=60000, num_samples=500)
    decoded.clear()
    assert torch.equal(read_audio(path, start_sample=30000, num_samples=500)[0], first)
    assert sum(decoded) < 15000
    assert torch.equal(first, whole[:, 30000:30500])


def test_without_memory_files_libsndfile_reads_bytes(tmp_path, monkeypatch):
    path = tmp_path / "x.mp3"
    path.write_bytes(encoded(RATE * 8, RATE, 1, "MP3", "MPEG_LAYER_III"))
    expected = read_audio(path, start_sample=90000, num_samples=500)[0]
    descriptor = sndfile._in_memory(b"abc")
    assert isinstance(descriptor, int)
    assert os.read(descriptor, 9) == b"abc"
    os.close(descriptor)

    def fail(*_):
        raise OSError("too many open files")

    for change in ({"value": fail}, {}):
        with monkeypatch.context() as patched:
            patched.setattr(os, "memfd_create", fail) if change else patched.delattr(os, "memfd_create")
            assert isinstance(sndfile._in_memory(b"abc"), io.BytesIO)
            assert torch.equal(read_audio(path, start_sample=90000, num_samples=500)[0], expected)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_audio(path, start_sample=90000, num_samples=500)
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_facts_are_kept_up_to_their_weight(tmp_path):
    facts = Facts(100, weigh=lambda fact: fact)
    sources = []
    for index in range(5):
        (tmp_path / str(index)).write_bytes(b"x")
        sources.append(Source(str(tmp_path / str(index))))
    for source in sources[:4]:
        facts.keep(source, 30)
    assert [facts.known(source) for source in sources] == [None, 30, 30, 30, None]
    # Used again, then kept longer; a heavier one takes the place of two.
    assert facts.get(sources[1], lambda: 1) == 30
    assert facts.get(sources[4], lambda: 60) == 60
    assert [facts.known(source) for source in sources] == [None, 30, None, None, 60]
    facts.keep(sources[4], 10)
    facts.keep(sources[0], 60)
    assert [facts.known(source) for source in sources] == [60, 30, None, None, 10]
    facts.keep(sources[2], 101)
    assert [facts.known(source) for source in sources] == [None] * 5
    facts.keep(sources[2], 100)
    assert facts.known(sources[2]) == 100
    for source in sources:
        source.close()


def test_many_threads_read_one_file(folder):
    """What one has found out, the others use."""
    draws = random.Random(3)
    names = [draws.choice(list(FILES)) for _ in range(40)]
    starts = [draws.randint(0, LENGTH - 2000) for _ in names]
    expected = [
        read_audio(folder / name, start_sample=start, num_samples=2000)[0]
        for name, start in zip(names, starts, strict=True)
    ]
    readers._known._facts.clear()
    readers._known._weight = 0
    wrong = []

    def work(offset):
        for index in range(offset, len(names), 2):
            wave = read_audio(folder / names[index], start_sample=starts[index], num_samples=2000)[0]
            if not torch.equal(wave, expected[index]):
                wrong.append(names[index])

    workers = [threading.Thread(target=work, args=(index % 2,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert wrong == []
