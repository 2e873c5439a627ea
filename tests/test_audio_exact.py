"""Excerpts, segments and bad files of the formats that are read in their own ways: wav, mp3, flac, chained ogg."""

import io
import shutil
import struct
import subprocess
from contextlib import suppress

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codec.audio import audio_info, flac, mpeg, ogg, opening, pcm, read_audio, readers, sndfile
from codec.audio.opening import Source
from codec.errors import AudioFileError

QUICK = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def voice(num_samples, sample_rate, channels=1):
    """Gliding harmonics and a little noise. `[N, C]`."""
    t = np.arange(num_samples) / sample_rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * t)) / sample_rate
    wave = sum(np.sin(k * phase) / k for k in range(1, 12)) * (np.sin(2 * np.pi * 2.3 * t) > -0.2) * 0.2
    noise = np.random.default_rng(num_samples).standard_normal((num_samples, channels)) * 0.01
    return (wave[:, None] * np.linspace(1, 0.5, channels) + noise).astype(np.float32)


def encoded(num_samples, sample_rate, channels, format, subtype):
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", sample_rate, channels, subtype, format=format) as sound:
        wave = voice(num_samples, sample_rate, channels)
        for start in range(0, num_samples, 10000):
            sound.write(wave[start : start + 10000])
    return file.getvalue()


PCM = [
    (format, subtype)
    for format in ("WAV", "WAVEX", "RF64")
    for subtype in ("PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
]


@pytest.mark.parametrize(("format", "subtype"), PCM)
@pytest.mark.parametrize("channels", [1, 2, 3])
def test_our_wav_reader_gives_what_libsndfile_gives(tmp_path, monkeypatch, format, subtype, channels):
    path = tmp_path / "x.wav"
    path.write_bytes(encoded(5003, 16000, channels, format, subtype))
    with Source(str(path)) as source:
        assert isinstance(readers.open_reader(source, False), pcm.PcmReader)
    ours, info = read_audio(path)[0], audio_info(path)
    integers = read_audio(path, dtype=torch.int16)[0]
    excerpt = read_audio(path, start_sample=1234, num_samples=777)[0]
    theirs, rate = soundfile.read(path, dtype="float32", always_2d=True)
    assert (rate, info.num_samples, info.channels) == (16000, 5003, channels)
    assert np.array_equal(ours.numpy(), theirs.T)
    assert torch.equal(excerpt, ours[:, 1234:2011])
    monkeypatch.setattr(pcm, "layout", lambda _: None)
    # As bytes: what was found out about the path is remembered.
    data = path.read_bytes()
    with Source(data) as source:
        assert isinstance(readers.open_reader(source, False), sndfile.SoundFileReader)
    assert audio_info(data) == info
    assert torch.equal(read_audio(data)[0], ours)
    assert torch.equal(read_audio(data, dtype=torch.int16)[0], integers)


def test_every_byte_of_the_g711_codes():
    for code in ("ULAW", "ALAW"):
        file = io.BytesIO()
        soundfile.write(file, np.zeros(256, np.int16), 8000, format="WAV", subtype=code)
        data = bytearray(file.getvalue())
        at = data.find(b"data") + 8
        data[at : at + 256] = bytes(range(256))
        expected, _ = soundfile.read(io.BytesIO(bytes(data)), dtype="int16")
        assert np.array_equal(read_audio(bytes(data), dtype=torch.int16)[0][0].numpy(), expected)


def test_a_wav_excerpt_touches_only_its_own_bytes(tmp_path, monkeypatch):
    path = tmp_path / "x.wav"
    soundfile.write(path, voice(400000, 16000, 2), 16000)
    read = []
    pread, preadv = opening.os.pread, opening.os.preadv
    monkeypatch.setattr(opening.os, "pread", lambda f, n, o: read.append((o, n)) or pread(f, n, o))
    monkeypatch.setattr(opening.os, "preadv", lambda f, b, o: read.append((o, len(b[0]))) or preadv(f, b, o))
    read_audio(path, start_sample=300000, num_samples=1000)
    assert read == [(0, 4096), (44 + 300000 * 4, 4000)]


def riff(*chunks):
    body = b"WAVE" + b"".join(
        name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) & 1) for name, data in chunks
    )
    return b"RIFF" + struct.pack("<I", len(body)) + body


FMT = struct.pack("<HHIIHH", 1, 1, 8000, 16000, 2, 16)


def test_chunks_around_the_samples(tmp_path):
    samples = np.arange(-50, 50, dtype="<i2")
    data = riff(
        (b"LIST", b"odd"), (b"fmt ", FMT), (b"junk", bytes(9001)), (b"data", samples.tobytes()), (b"id3 ", bytes(7))
    )
    assert read_audio(data, dtype=torch.int16)[0][0].tolist() == samples.tolist()
    assert pcm.layout(Source(data)).num_bytes == 200
    with pytest.raises(AudioFileError):
        read_audio(riff((b"fmt ", FMT)))
    with pytest.raises(AudioFileError):
        read_audio(riff((b"data", samples.tobytes())))


@pytest.mark.parametrize(
    ("at", "value"),
    [(22, b"\0\0"), (24, bytes(4)), (20, b"\x55\0"), (20, b"\0\0")],
    ids=["no channels", "no rate", "mp3 in wav", "no codec"],
)
def test_a_wav_header_that_describes_nothing(at, value):
    data = bytearray(riff((b"fmt ", FMT), (b"data", bytes(2000))))
    data[at : at + len(value)] = value
    with pytest.raises(AudioFileError):
        read_audio(bytes(data))


def test_a_wav_header_of_nothing_at_all():
    data = riff((b"fmt ", struct.pack("<HHIIHH", 1, 0, 8000, 0, 0, 16)), (b"data", bytes(2000)))
    assert pcm.layout(Source(data)) is None
    with pytest.raises(AudioFileError):
        read_audio(data)


@pytest.mark.parametrize("size", [10**6, 2**31 + 5, 2**32 - 2**20])
def test_a_wav_header_that_promises_more_than_there_is(size):
    data = bytearray(riff((b"fmt ", FMT), (b"data", bytes(2000))))
    struct.pack_into("<I", data, data.find(b"data") + 4, size)
    with pytest.raises(AudioFileError, match=rf"promises {size} bytes of audio from byte 44 on, the file holds 2000"):
        read_audio(bytes(data))
    assert pcm.layout(Source(bytes(data))).num_bytes == 2000
    assert read_audio(bytes(data), allow_truncated=True)[0].shape == (1, 1000)


def test_a_wav_of_more_than_4_gib(tmp_path):
    path = tmp_path / "big.wav"
    num_bytes = 2 * 2**31 + 10**6
    with open(path, "wb") as file:
        file.write(b"RF64\xff\xff\xff\xffWAVEds64" + struct.pack("<IQQQI", 28, num_bytes + 72, num_bytes, 0, 0))
        file.write(b"fmt " + struct.pack("<I", 16) + FMT + b"data\xff\xff\xff\xff")
        start = file.tell()
        file.seek(start + num_bytes - 20)
        file.write(np.arange(10, dtype="<i2").tobytes())
    info = audio_info(path)
    assert info.num_samples == num_bytes // 2
    excerpt, _ = read_audio(path, start_sample=info.num_samples - 12, num_samples=12, dtype=torch.int16)
    assert excerpt[0].tolist() == [0, 0, *range(10)]


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_fuzzed_wav_headers(data):
    chunks = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([b"fmt ", b"data", b"ds64", b"LIST", b"fact"]),
                st.binary(max_size=60) | st.just(FMT) | st.just(struct.pack("<HHIIHH", 3, 2, 48000, 0, 8, 32)),
            ),
            max_size=5,
        )
    )
    raw = bytearray(data.draw(st.sampled_from([b"RIFF", b"RF64"])) + riff(*chunks)[4:])
    for _ in range(data.draw(st.integers(0, 4))):
        raw[data.draw(st.integers(12, len(raw) - 1) if len(raw) > 12 else st.just(4))] = data.draw(st.integers(0, 255))
    for allow_truncated in (False, True):
        with suppress(AudioFileError):
            wave, _ = read_audio(bytes(raw), allow_truncated=allow_truncated)
            assert wave.numel() <= len(raw)


MP3 = {"mono16": (16000, 1), "stereo44": (44100, 2), "mono48": (48000, 1), "stereo24": (24000, 2), "mono8": (8000, 1)}


@pytest.fixture(scope="session")
def mp3s():
    """Files long enough to be indexed, and the frames of one of them without their Xing header."""
    files = {
        name: encoded(9 * rate + 77, rate, channels, "MP3", "MPEG_LAYER_III") for name, (rate, channels) in MP3.items()
    }
    offset, header = mpeg.find_frame(files["mono16"], 0)
    files["without xing"] = files["mono16"][offset + header.num_bytes :]
    return files


@pytest.mark.parametrize("name", [*MP3, "without xing"])
@QUICK
@given(data=st.data())
def test_mp3_excerpts_are_decoded_from_their_own_frames(mp3s, name, data):
    stream = mp3s[name]
    whole = read_audio(stream)[0]
    start = data.draw(st.integers(0, whole.shape[1] - 1))
    length = data.draw(st.integers(1, min(9000, whole.shape[1] - start)))
    before = sndfile._MP3_INDEX_FRAMES
    sndfile._MP3_INDEX_FRAMES = 0
    try:
        with Source(stream) as source:
            reader = readers.open_reader(source, False)
            part = reader._mp3_part(start, length)
            # Some 20 frames before, and nothing behind; near the beginning, all that is before.
            assert start < 60 * 1152 if part is None else part[1] < 60 * 1152
        excerpt = read_audio(stream, start_sample=start, num_samples=length)[0]
    finally:
        sndfile._MP3_INDEX_FRAMES = before
    assert torch.equal(excerpt, whole[:, start : start + length])


def test_silenced_mp3_frames_keep_where_their_bits_begin():
    header = mpeg.frame_header(b"\xff\xfa\x90\x04", 0)
    frame = b"\xff\xfa\x90\x04" + b"\x12\x34" + b"\xab\xff" + bytes(range(30)) + b"x" * (header.num_bytes - 38)
    index = mpeg.FrameIndex(header, np.arange(4) * header.num_bytes, 0, 0)
    stream = index.stream(frame * 3, 0, 2, 3)[-3 * header.num_bytes :]
    # No checksum any more, the first 9 bits of the side information, and nothing else of it.
    silenced = b"\xff\xfb\x90\x04" + b"\xab\x80" + bytes(30) + frame[36:]
    assert stream == silenced * 2 + frame


def test_mp3_excerpts_say_nothing_on_stderr(mp3s, capfd):
    for start in range(60000, 140000, 9000):
        read_audio(mp3s["mono16"], start_sample=start, num_samples=5)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "junk", [b"\0" * 5000, b"TAG" + bytes(125) + b"ID3\x04\0\0\0\0\0\x23" + bytes(35), b"\xff\xfb" * 9]
)
def test_an_mp3_with_junk_between_its_frames(mp3s, junk):
    data = mp3s["without xing"]
    offset, _ = mpeg.find_frame(data, len(data) // 2, mpeg.frame_header(data, 0))
    broken = data[:offset] + junk + data[offset:]
    assert mpeg.frame_index(broken) is None
    assert mpeg.scan(broken).stream(Source(broken)) == mpeg.scan(data).stream(Source(data))
    whole = read_audio(broken)[0]
    assert torch.equal(whole, read_audio(data)[0])
    assert torch.equal(read_audio(broken, start_sample=130000)[0], whole[:, 130000:])


def test_the_index_finds_what_the_scan_counts(mp3s):
    for data in mp3s.values():
        index, scan = mpeg.frame_index(data), mpeg.scan(data)
        assert len(index.offsets) - 1 == scan.num_frames
        assert index.offsets[-1] == len(data)


@pytest.mark.parametrize("name", ["a.wav", "b.flac", "c.ogg", "d.mp3", "e.opus", "f.aiff"])
@pytest.mark.parametrize("num_threads", [2, 3])
def test_segments_are_the_whole(tmp_path, name, num_threads):
    formats = {"wav": "WAV", "flac": "FLAC", "ogg": "OGG", "mp3": "MP3", "opus": "OGG", "aiff": "AIFF"}
    subtypes = {"ogg": "VORBIS", "mp3": "MPEG_LAYER_III", "opus": "OPUS"}
    suffix = name[2:]
    path = tmp_path / name
    path.write_bytes(encoded(16000 * 11 + 5, 16000, 2, formats[suffix], subtypes.get(suffix, "PCM_16")))
    for options in ({}, {"dtype": torch.int16}, {"start_sample": 33333, "num_samples": 99999}, {"mono": True}):
        one = read_audio(path, **options)[0]
        assert torch.equal(read_audio(path, num_threads=num_threads, **options)[0], one)
    with Source(str(path)) as source:
        assert readers.open_reader(source, False).splits() == (suffix != "opus")


def test_segments_of_a_file_that_ends_early(tmp_path):
    path = tmp_path / "x.ogg"
    data = encoded(16000 * 12, 16000, 1, "OGG", "VORBIS")
    pages = list(ogg.all_pages(Source(data)))
    gone = pages[len(pages) // 2]
    path.write_bytes(data[: gone.offset] + data[gone.offset + gone.num_bytes :])
    with pytest.raises(AudioFileError, match=r"its audio ends at sample \d+, 192000 were expected"):
        read_audio(path)
    with pytest.raises(AudioFileError, match="is damaged: pages are missing between its pages at sample"):
        read_audio(path, num_threads=2)


@pytest.mark.parametrize("bits", ["PCM_16", "PCM_24"])
@pytest.mark.parametrize("cut", [1, 2, 100, 3000, 30000])
def test_a_cut_flac_is_found_out_when_it_is_opened(bits, cut):
    data = encoded(100000, 16000, 2, "FLAC", bits)
    assert audio_info(data).num_samples == 100000
    for ask in (audio_info, lambda d: read_audio(d, num_samples=10)):
        with pytest.raises(AudioFileError, match=r"cut or damaged: its .*, read what is there|cut or damaged: its"):
            ask(data[:-cut])
    assert 60000 < read_audio(data[:-cut], allow_truncated=True)[0].shape[1] < 100000


def test_flac_tails_that_are_whole():
    data = encoded(50001, 16000, 1, "FLAC", "PCM_16")
    for tail in (b"TAG" + bytes(125), bytes(5000), b"\xff\xf8" * 300):
        assert flac.missing_end(Source(data + tail)) is None
    assert "its last frame" in flac.missing_end(Source(data[:-3000] + bytes(20000)))
    silent = io.BytesIO()
    soundfile.write(silent, np.zeros(50000, np.int16), 8000, format="FLAC")
    assert flac.missing_end(Source(silent.getvalue())) is None
    for promised in (50000, 50002):
        lying = bytearray(data)
        struct.pack_into(">I", lying, 22, promised)
        with pytest.raises(
            AudioFileError, match=f"its header promises {promised} samples, its last frame ends at 50001"
        ):
            audio_info(bytes(lying))


def test_flac_checksums():
    random = np.random.default_rng(0)
    for length in (0, 1, 2, 255, 256, 257, 3000):
        data = random.bytes(length)
        state = 0
        for byte in data:
            state ^= byte << 8
            for _ in range(8):
                state = (state << 1 ^ (0x8005 if state & 0x8000 else 0)) & 0xFFFF
        assert flac._crc16(data) == state
        assert flac._crc16(data + state.to_bytes(2, "big")) == 0


def test_ogg_checksums():
    data = encoded(20000, 16000, 1, "OGG", "VORBIS")
    pages = list(ogg.all_pages(Source(data)))
    assert pages[-1].offset + pages[-1].num_bytes == len(data)
    for page in pages:
        assert not ogg.damaged(Source(data), page)
        broken = bytearray(data)
        broken[page.offset + page.num_bytes // 2] ^= 4
        assert ogg.damaged(Source(bytes(broken)), page)


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_a_chained_ogg_file_is_read_whole(subtype, monkeypatch):
    parts = [encoded(seconds * 16000 + 7, 16000, 1, "OGG", subtype) for seconds in (1, 5, 1, 2)]
    # The third again, under the same serial number.
    parts.append(parts[2])
    chained = b"".join(parts)
    expected = torch.cat([read_audio(part)[0] for part in parts], 1)
    info = audio_info(chained)
    assert (info.num_samples, info.channels) == (expected.shape[1], 1)
    assert torch.equal(read_audio(chained)[0], expected)
    for start, length in [
        (0, 1),
        (15000, 5000),
        (16006, 3),
        (90000, 100000 - 90000),
        (expected.shape[1] - 20000, 20000),
    ]:
        excerpt = read_audio(chained, start_sample=start, num_samples=length)[0]
        assert torch.equal(excerpt, expected[:, start : start + length])
    monkeypatch.setattr(ogg, "_READ_AT_ONCE", 999)
    assert len(ogg.links(Source(chained))) == 5


def test_mono_between_stereo_in_a_chain_is_on_both_channels():
    parts = [encoded(9000, 16000, channels, "OGG", "VORBIS") for channels in (1, 2, 1)]
    expected = torch.cat([read_audio(part)[0].expand(2, -1) for part in parts], 1)
    for dtype in (torch.float32, torch.int16):
        wave = read_audio(b"".join(parts), dtype=dtype)[0]
        assert torch.equal(wave, expected) or dtype == torch.int16
        assert wave.shape == expected.shape
    assert audio_info(b"".join(parts)).channels == 2
    assert torch.equal(read_audio(b"".join(parts), start_sample=8000, num_samples=2000)[0], expected[:, 8000:10000])
    parts.append(encoded(9000, 16000, 3, "OGG", "VORBIS"))
    with pytest.raises(
        AudioFileError, match=r"different \(rate, channels\): \[\(16000, 1\), \(16000, 2\), \(16000, 3\)\]"
    ):
        read_audio(b"".join(parts))


def test_an_ogg_file_without_its_beginning():
    data = encoded(50000, 16000, 1, "OGG", "VORBIS")
    second = list(ogg.all_pages(Source(data)))[1].offset
    with pytest.raises(AudioFileError, match="is no audio file that can be read here"):
        read_audio(data[second:])


def test_a_damaged_link_of_a_chain_is_named():
    parts = [bytearray(encoded(16000, 16000, 1, "OGG", "VORBIS")) for _ in range(3)]
    parts[1][-200] ^= 1
    with pytest.raises(AudioFileError, match=r", from byte \d+ on: is damaged"):
        read_audio(b"".join(map(bytes, parts)))


@pytest.mark.skipif(not shutil.which("ffmpeg"), reason="compares with the ffmpeg command, which is not here")
@pytest.mark.parametrize("name", ["a.flac", "b.mp3", "c.ogg", "d.wav"])
def test_against_an_independent_decoder(tmp_path, name):
    formats = {
        "flac": ("FLAC", "PCM_16"),
        "mp3": ("MP3", "MPEG_LAYER_III"),
        "ogg": ("OGG", "VORBIS"),
        "wav": ("WAV", "PCM_24"),
    }
    path = tmp_path / name
    path.write_bytes(encoded(16000 * 5, 16000, 2, *formats[name[2:]]))
    command = ["ffmpeg", "-v", "error", "-i", str(path), "-f", "f32le", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    theirs = torch.frombuffer(bytearray(raw), dtype=torch.float32).view(-1, 2).T
    ours = read_audio(path)[0]
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 2e-4 if name == "b.mp3" else (ours - theirs).abs().max() < 2e-6


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "pipe.wav")
    with pytest.raises(AudioFileError, match=r"pipe.wav: is a pipe or device; copy it into a file"):
        read_audio(tmp_path / "pipe.wav")


def with_data_size(data, size):
    data = bytearray(data)
    struct.pack_into("<I", data, data.find(b"data") + 4, size)
    return bytes(data)


BAD = {
    # what others read short, halved, or not at all → what we do: the samples that come back, or the error's words
    "flac cut": (lambda f: f["flac"][:-5000], "cut or damaged"),
    "mp3 cut": (lambda f: f["mp3"][:-5000], "is cut: it holds"),
    "mp3 without Xing header cut": (lambda f: f["bare mp3"][:-50], "is cut: it holds"),
    "vorbis cut": (lambda f: f["ogg"][:-5000], "its last page, at byte .* is cut|its audio ends"),
    "opus cut": (lambda f: f["opus"][:-5000], "its last page, at byte .* is cut|its audio ends"),
    "wav cut": (lambda f: f["wav"][:-5000], "promises 200000 bytes of audio"),
    "aiff cut": (lambda f: f["aiff"][:-5000], "promises 200008 bytes of audio"),
    "mp3 without Xing header": (lambda f: f["bare mp3"], 50000),
    "stereo IMA ADPCM": (lambda f: f["adpcm"], 50000),
    "chained vorbis": (lambda f: f["ogg"] + f["ogg"], 100000),
    "chained opus": (lambda f: f["opus"] + f["opus"], 100000),
    "flac of unknown length": (
        lambda f: f["flac"][:21] + bytes([f["flac"][21] & 0xF0]) + bytes(4) + f["flac"][26:],
        50000,
    ),
    "wav header of size 0": (lambda f: with_data_size(f["wav"], 0), "its header was never finished"),
    "wav header of twice the size": (lambda f: with_data_size(f["wav"], 400000), "promises 400000 bytes"),
    "wav header of half the size": (
        lambda f: with_data_size(f["wav"], 100000),
        "promises 100000 bytes of audio, 100000 more follow",
    ),
    "wav header of size 0xFFFFFFFF": (lambda f: with_data_size(f["wav"], 0xFFFFFFFF), 50000),
    "wav header alone": (lambda f: with_data_size(f["wav"][:44], 0), "holds no samples"),
    "wav header alone, promising": (lambda f: f["wav"][:44], "promises 200000 bytes of audio from byte 44 on"),
    "RF64": (lambda f: f["rf64"], 50000),
    "mp3 with text before it": (lambda f: b"HTTP/1.1 200 OK\r\n\r\n" + f["mp3"], 50000),
    "gzip": (lambda f: b"\x1f\x8b\x08" + bytes(500), "is no audio file"),
    "html": (lambda f: b"<!DOCTYPE html><html>404</html>", "is no audio file"),
}


@pytest.fixture(scope="session")
def good():
    kinds = {
        "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"),
        "wav": ("WAV", "PCM_16"), "aiff": ("AIFF", "PCM_16"), "adpcm": ("WAV", "IMA_ADPCM"), "rf64": ("RF64", "PCM_16"),
    }  # fmt: skip
    files = {name: encoded(50000, 16000, 2, *kind) for name, kind in kinds.items()}
    offset, header = mpeg.find_frame(files["mp3"], 0)
    files["bare mp3"] = files["mp3"][offset + header.num_bytes :]
    return files


@pytest.mark.parametrize("name", BAD)
def test_bad_files_raise_or_come_back_whole(good, tmp_path, name):
    make, expected = BAD[name]
    path = tmp_path / "x.bin"
    path.write_bytes(make(good))
    if isinstance(expected, str):
        with pytest.raises(AudioFileError, match=rf"x.bin: .*({expected})"):
            read_audio(path)
    else:
        wave, _ = read_audio(path)
        # Without its header, an mp3 keeps the encoder's delay and padding; ADPCM fills its last block.
        assert expected <= wave.shape[1] < expected + 2600
        assert wave[:, : expected - 3000].abs().max() > 0.1
        assert wave.shape[0] == 2


def test_a_damaged_mp3_is_never_silently_short(good):
    random = np.random.default_rng(3)
    results = []
    for kind in ("mp3", "bare mp3"):
        num_samples = read_audio(good[kind])[0].shape[1]
        for _ in range(40):
            damaged = bytearray(good[kind])
            at = int(random.integers(2000, len(damaged) - 2000))
            damaged[at : at + 4] = random.bytes(4)
            try:
                found = read_audio(bytes(damaged))[0].shape[1]
            except AudioFileError:
                results.append("raised")
            else:
                results.append("read")
                assert found >= num_samples - (576 * 3 if kind == "bare mp3" else 0)
    assert "read" in results


@pytest.mark.parametrize("kind", ["flac", "mp3", "bare mp3", "ogg", "wav"])
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_our_parsers_survive_anything(good, kind, data):
    """None of them raises, loops for long, or takes memory that the file doesn't justify."""
    stream = bytearray(good[kind][: data.draw(st.integers(1, 6000))])
    for _ in range(data.draw(st.integers(0, 6))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    at = data.draw(st.integers(0, len(stream)))
    stream[at:at] = data.draw(st.binary(max_size=40))
    source = Source(bytes(stream))
    flac.missing_end(source)
    frames = flac.whole_stream(source)
    if frames is not None:
        found = flac.find_frame(source, frames, data.draw(st.integers(0, 40)), 0, frames.first)
        assert found is None or frames.first <= found <= len(stream)
    position = data.draw(st.integers(-10, 60000))
    assert 0 <= ogg.find_page(source, 1, position, 0, 50000) <= len(stream)
    assert len(ogg.links(source)) <= 1 + len(stream) // 27
    ogg.first_damaged(source)
    pcm.layout(source)
    index, scan = mpeg.frame_index(bytes(stream)), mpeg.scan(bytes(stream))
    assert index is None or index.offsets[-1] <= len(stream)
    assert scan is None or len(scan.stream(Source(bytes(stream)))) <= len(stream) + 1441
