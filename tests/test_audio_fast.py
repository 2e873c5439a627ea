"""Flac by dr_flac and vorbis by FFmpeg: the same samples as by the careful way, and never less."""

import io
import random
import struct

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_audio_exact import encoded

from codec.audio import audio_info, drflac, ffmpeg, flac, ogg, read_audio, readers, vorbis
from codec.audio.opening import Source
from codec.errors import AudioFileError

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
needs_drflac = pytest.mark.skipif(drflac.library() is None, reason="miniaudio is not installed: pip install miniaudio")
needs_ffmpeg = pytest.mark.skipif(
    ffmpeg.torchcodec_decoder()[0] is None, reason="FFmpeg is not installed: apt-get install ffmpeg"
)
FLAC = {
    "mono16": (16000, 1, "PCM_16"),
    "stereo16": (44100, 2, "PCM_16"),
    "stereo24": (48000, 2, "PCM_24"),
    "mono8": (8000, 1, "PCM_S8"),
    "five": (16000, 5, "PCM_16"),
}


def reader_of(data):
    with Source(data) as source:
        return type(readers.open_reader(source, False)).__name__


@pytest.fixture(scope="module")
def flacs():
    return {name: encoded(100003, rate, channels, "FLAC", bits) for name, (rate, channels, bits) in FLAC.items()}


@pytest.fixture
def no_fallback(monkeypatch):
    """A file that is well must not need libsndfile."""

    def fail(*_):
        raise AssertionError("libsndfile was asked")

    monkeypatch.setattr(drflac, "SoundFileReader", fail)


@needs_drflac
@pytest.mark.parametrize("name", FLAC)
@pytest.mark.parametrize("at_once", [4096, 30000, 1 << 19])
def test_flac_excerpts_are_libsndfiles_slices(flacs, name, at_once, no_fallback, monkeypatch):
    monkeypatch.setattr(drflac, "_VALUES_AT_ONCE", at_once)
    data = flacs[name]
    assert reader_of(data) == "DrFlacReader"
    theirs = torch.from_numpy(soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0].T.copy())
    assert torch.equal(read_audio(data)[0], theirs)
    draws = random.Random(0)
    for _ in range(25):
        start = draws.randrange(theirs.shape[1])
        length = min(theirs.shape[1] - start, draws.choice([1, 4095, 4096, 4097, 20000]))
        excerpt = read_audio(data, start_sample=start, num_samples=length)[0]
        assert torch.equal(excerpt, theirs[:, start : start + length])


@needs_drflac
@pytest.mark.parametrize("name", FLAC)
def test_flac_says_the_same_either_way(flacs, name, monkeypatch):
    data = flacs[name]
    info, integers = audio_info(data), read_audio(data, dtype=torch.int16)[0]
    monkeypatch.setattr(drflac, "library", lambda: None)
    assert reader_of(data) == "SoundFileReader"
    assert audio_info(data) == info
    assert torch.equal(read_audio(data, dtype=torch.int16)[0], integers)


@needs_drflac
def test_each_flac_frame_is_found(flacs):
    for data in (flacs["mono16"], flacs["stereo24"]):
        source = Source(data)
        stream = flac.whole_stream(source)
        known = [stream.first]
        for number in range(1, -(-stream.num_samples // stream.block_size)):
            known.append(flac.find_frame(source, stream, number, number - 1, known[-1]))
        assert known == sorted(set(known))
        for number, offset in enumerate(known):
            assert data[offset : offset + 2] == b"\xff\xf8"
            assert flac.find_frame(source, stream, number, 0, stream.first) == offset
        assert flac.find_frame(source, stream, len(known), 0, stream.first) == len(data)


def test_flac_frames_are_found_in_few_looks():
    """Also where a file's parts are of different density, and a guess is wrong."""
    loud = np.random.default_rng(0).standard_normal((200000, 1)).astype(np.float32) * 0.2
    file = io.BytesIO()
    soundfile.write(file, np.concatenate([loud, loud * 1e-3, loud, loud * 1e-2]), 16000, "PCM_16", format="FLAC")
    source = Source(file.getvalue())
    stream = flac.whole_stream(source)
    looks, read_at = [], source.read_at
    source.read_at = lambda offset, length: looks.append(offset) or read_at(offset, length)
    num_frames = stream.num_samples // stream.block_size
    known = [stream.first]
    for number in range(1, num_frames):
        known.append(flac.find_frame(source, stream, number, number - 1, known[-1]))
    draws = random.Random(0)
    counts = []
    for _ in range(300):
        start = draws.randrange(num_frames - 21)
        for before, number in ((0, start), (start, start + 20)):
            looks.clear()
            assert flac.find_frame(source, stream, number, before, known[before]) == known[number]
            counts.append(len(looks))
    assert max(counts) < 9


@needs_drflac
def test_a_damaged_flac_frame_is_never_left_out(flacs):
    """dr_flac alone steps over it, and gives the following samples in its place."""
    data = flacs["stereo16"]
    source = Source(data)
    stream = flac.whole_stream(source)
    whole = read_audio(data)[0]
    offsets = [flac.find_frame(source, stream, number, 0, stream.first) for number in range(20)]
    for number in (0, 7, 18):
        damaged = bytearray(data)
        damaged[(offsets[number] + offsets[number + 1]) // 2] ^= 0x10
        damaged = bytes(damaged)
        lib, ffi = drflac.library().lib, drflac.library().ffi
        decoder = lib.ma_dr_flac_open_memory(ffi.from_buffer(damaged), len(damaged), ffi.NULL)
        alone = np.empty((40000, 2), np.int16)
        assert lib.ma_dr_flac_read_pcm_frames_s16(decoder, len(alone), ffi.from_buffer("short[]", alone)) == len(alone)
        lib.ma_dr_flac_close(decoder)
        with pytest.raises(AudioFileError, match="damaged"):
            read_audio(damaged)
        begin, end = number * 4096, number * 4096 + 4096
        for start, length in ((begin + 10, 100), (max(0, begin - 5000), 12000), (end - 1, 2)):
            with pytest.raises(AudioFileError, match="damaged"):
                read_audio(damaged, start_sample=start, num_samples=length)
        for start, length in ((end, 5000), (max(0, begin - 4096), min(4096, begin))):
            if length:
                part = read_audio(damaged, start_sample=start, num_samples=length)[0]
                assert torch.equal(part, whole[:, start : start + length])


@needs_drflac
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flac_files_of_any_damage(flacs, data):
    """What comes back is what libsndfile gives of the undamaged file, or an error."""
    name = data.draw(st.sampled_from(["mono16", "stereo24"]))
    stream = bytearray(flacs[name])
    whole = read_audio(flacs[name])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(42, len(stream) - 1))] = data.draw(st.integers(0, 255))
    start = data.draw(st.integers(0, 100000))
    length = data.draw(st.integers(1, 100003 - start))
    try:
        excerpt = read_audio(bytes(stream), start_sample=start, num_samples=length)[0]
    except AudioFileError:
        return
    assert torch.equal(excerpt, whole[:, start : start + length])


@needs_drflac
def test_flac_headers_that_need_a_second_look(flacs):
    data = flacs["mono16"]
    assert flac.whole_stream(Source(data)).block_size == 4096
    varying, unnamed = bytearray(data), bytearray(data)
    struct.pack_into(">H", varying, 8, 16)
    unnamed[18:21] = bytes(3)
    for other in (varying, unnamed):
        assert flac.whole_stream(Source(bytes(other))) is None
    assert flac.whole_stream(Source(data[:-10])) is None
    tagged = data[:4] + b"\x04\x00\x10\x00" + bytes(4096) + data[4:]
    assert flac.whole_stream(Source(b"fLaC" + b"\x04" + bytes(3))) is None
    assert flac.whole_stream(Source(tagged)) is None
    picture = data[:4] + data[4:42] + b"\x06\x00\x20\x00" + bytes(8192) + data[42:]
    picture = picture[:4] + bytes([picture[4] & 127]) + picture[5:]
    stream = flac.whole_stream(Source(picture))
    assert stream is not None
    assert stream.first == flac.whole_stream(Source(data)).first + 8196
    assert torch.equal(read_audio(picture)[0], read_audio(data)[0])


VORBIS = {"mono16": (16000, 1), "stereo44": (44100, 2)}


@pytest.fixture(autouse=True)
def ffmpeg_takes_speech_too(monkeypatch):
    monkeypatch.setattr(vorbis, "_MIN_VALUES_PER_SECOND", 0)


@pytest.fixture(scope="module")
def vorbises():
    return {name: encoded(rate * 12 + 77, rate, channels, "OGG", "VORBIS") for name, (rate, channels) in VORBIS.items()}


def repaged(data, alone):
    """The same packets; each page's first one begins on the page before, or on a page where no packet ends."""
    source = Source(data)
    stream = vorbis._examined(source)
    pages = []
    for page in ogg.pages_from(source, stream.num_header_bytes):
        body = data[page.offset : page.offset + page.num_bytes]
        at = 27 + body[26]
        lacing, flags = list(body[27:at]), body[5]
        if pages and lacing[0] == 255:
            if alone:
                pages.append([0, -1, [255], body[at : at + 255]])
            elif len(pages[-1][2]) < 255:
                pages[-1][2].append(255)
                pages[-1][3] += body[at : at + 255]
            lacing, flags, at = lacing[1:], flags | 1, at + 255
        pages.append([flags, page.granule, lacing, body[at:]])
    out = data[: stream.num_header_bytes]
    number = next(ogg.pages_from(source, stream.num_header_bytes)).number
    for flags, granule, lacing, body in pages:
        head = struct.pack("<4sBBqIIIB", b"OggS", 0, flags, granule, stream.serial, number, 0, len(lacing))
        page = bytearray(head + bytes(lacing) + body)
        struct.pack_into("<I", page, 22, ogg.checksum(bytes(page)))
        out, number = out + bytes(page), number + 1
    return out


@needs_ffmpeg
@pytest.mark.parametrize("name", VORBIS)
def test_vorbis_excerpts_are_slices(vorbises, name, tmp_path, monkeypatch):
    path = tmp_path / "x.ogg"
    path.write_bytes(vorbises[name])
    assert reader_of(str(path)) == "VorbisReader"
    whole, rate = read_audio(path)
    theirs, _ = soundfile.read(path, dtype="float32", always_2d=True)
    torch.testing.assert_close(whole, torch.from_numpy(theirs.T.copy()), rtol=0, atol=1e-6)
    monkeypatch.setattr(
        vorbis, "_decoded", lambda audio, real=vorbis._decoded: None if audio == str(path) else real(audio)
    )
    draws = random.Random(0)
    lengths = [1, 100, 8192, rate * 2]
    for index in range(60):
        length = draws.choice(lengths)
        last = whole.shape[1] - length
        start = (0, last, last - 1, 8192, 8191)[index] if index < 5 else draws.randint(0, last)
        excerpt = read_audio(path, start_sample=start, num_samples=length)[0]
        assert torch.equal(excerpt, whole[:, start : start + length])


@needs_ffmpeg
@pytest.mark.parametrize("alone", [False, True])
def test_vorbis_packets_that_go_on_from_page_to_page(vorbises, alone):
    data = repaged(vorbises["stereo44"], alone)
    assert any(data[page.offset + 5] & 1 for page in ogg.all_pages(Source(data)))
    whole = read_audio(data)[0]
    assert torch.equal(whole, read_audio(vorbises["stereo44"])[0])
    assert reader_of(data) == "VorbisReader"
    with Source(data) as source:
        reader = vorbis.vorbis_reader(source)
        assert reader.splits()
        for start in range(1000, 500000, 31007):
            assert torch.equal(reader._part(start, start + 20000), whole[:, start : start + 20000])


@needs_ffmpeg
def test_vorbis_in_parts_is_vorbis_at_once(vorbises, tmp_path, monkeypatch):
    path = tmp_path / "x.ogg"
    path.write_bytes(vorbises["stereo44"])
    whole = read_audio(path)[0]
    monkeypatch.setattr(vorbis, "_SAMPLES_AT_ONCE", 50000)
    assert torch.equal(read_audio(path)[0], whole)
    assert torch.equal(read_audio(path, num_threads=2)[0], whole)
    assert torch.equal(read_audio(path, dtype=torch.int16)[0], (whole * 32768).round().clamp(-32768, 32767).short())


@needs_ffmpeg
def test_a_vorbis_excerpt_over_damage_raises_or_is_whole(vorbises):
    data = vorbises["stereo44"]
    whole = read_audio(data)[0]
    pages = list(ogg.all_pages(Source(data)))
    middle = pages[len(pages) // 2]
    flipped = bytearray(data)
    flipped[middle.offset + middle.num_bytes // 2] ^= 1
    gone = data[: middle.offset] + data[middle.offset + middle.num_bytes :]
    position = pages[len(pages) // 2 - 1].granule
    for damaged in (bytes(flipped), gone):
        with pytest.raises(AudioFileError, match="damaged"):
            read_audio(damaged)
        for start in (position - 20000, position + 100):
            with pytest.raises(AudioFileError, match=r"wrong checksum|pages are missing"):
                read_audio(damaged, start_sample=start, num_samples=40000)
        before = read_audio(damaged, start_sample=20000, num_samples=30000)[0]
        torch.testing.assert_close(before, whole[:, 20000:50000], rtol=0, atol=1e-6)


@needs_ffmpeg
def test_pages_are_found_from_any_place(vorbises):
    for data in vorbises.values():
        source = Source(data)
        stream = vorbis._examined(source)
        pages = [page for page in ogg.all_pages(source) if page.offset >= stream.num_header_bytes]
        for position in range(-5, stream.info.num_samples, 7919):
            found = ogg.find_page(source, stream.serial, position, stream.num_header_bytes, stream.info.num_samples)
            page = next(page for page in pages if page.offset == found)
            assert page.granule <= position or page == pages[0]


def test_vorbis_of_three_channels_keeps_their_order():
    data = encoded(30000, 16000, 3, "OGG", "VORBIS")
    assert reader_of(data) == "SoundFileReader"
    theirs, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert np.array_equal(read_audio(data)[0].numpy(), theirs.T)


def test_vorbis_of_speech_is_libsndfiles(vorbises, monkeypatch):
    monkeypatch.undo()
    assert reader_of(vorbises["mono16"]) == "SoundFileReader"


def test_without_ffmpeg_vorbis_is_libsndfiles(vorbises, monkeypatch):
    monkeypatch.setattr(ffmpeg, "torchcodec_decoder", lambda: (None, "not here"))
    data = vorbises["mono16"]
    assert reader_of(data) == "SoundFileReader"
    theirs, _ = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert np.array_equal(read_audio(data)[0].numpy(), theirs.T)


@needs_ffmpeg
def test_vorbis_that_ffmpeg_gives_short_is_read_by_libsndfile(vorbises, monkeypatch):
    data = vorbises["mono16"]
    whole = read_audio(data)[0]
    monkeypatch.setattr(vorbis, "_decoded", lambda audio: None)
    for start, length in ((0, whole.shape[1]), (5000, 50000)):
        excerpt = read_audio(data, start_sample=start, num_samples=length)[0]
        torch.testing.assert_close(excerpt, whole[:, start : start + length], rtol=0, atol=1e-6)
