import io
import math
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import fsspec
import numpy as np
import pytest
import soundfile
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codec import audio
from codec.audio import (
    AUDIO_SUFFIXES,
    audio_info,
    ffmpeg,
    find_audio,
    mpeg,
    ogg,
    pcm,
    read_audio,
    resample,
    sndfile,
    write_audio,
)
from codec.errors import AudioFileError, InputError
from codec.frames import resampled_length

DATA = Path(__file__).parent / "data"
SHIPPED = sorted(path for path in DATA.glob("*") if path.suffix in AUDIO_SUFFIXES)
# name: (sample rate, channels, libsndfile's format, subtype)
MADE = {
    "u8.wav": (8000, 1, "WAV", "PCM_U8"),
    "s16.wav": (44100, 2, "WAV", "PCM_16"),
    "s24.wav": (48000, 1, "WAVEX", "PCM_24"),
    "f32.wav": (16000, 2, "WAV", "FLOAT"),
    "f64.rf64": (16000, 1, "RF64", "DOUBLE"),
    "ulaw.au": (8000, 1, "AU", "ULAW"),
    "adpcm.wav": (22050, 2, "WAV", "IMA_ADPCM"),
    "gsm.wav": (8000, 1, "WAV", "GSM610"),
    "s16.aiff": (32000, 2, "AIFF", "PCM_16"),
    "alac.caf": (44100, 2, "CAF", "ALAC_16"),
    "s16.w64": (44100, 1, "W64", "PCM_16"),
    "mono.flac": (16000, 1, "FLAC", "PCM_16"),
    "stereo.flac": (96000, 2, "FLAC", "PCM_24"),
    "mono.ogg": (16000, 1, "OGG", "VORBIS"),
    "stereo.ogg": (44100, 2, "OGG", "VORBIS"),
    "mono.opus": (16000, 1, "OGG", "OPUS"),
    "stereo.opus": (48000, 2, "OGG", "OPUS"),
    "mono16.mp3": (16000, 1, "MP3", "MPEG_LAYER_III"),
    "mono44.mp3": (44100, 1, "MP3", "MPEG_LAYER_III"),
    "stereo.mp3": (44100, 2, "MP3", "MPEG_LAYER_III"),
}
LOSSLESS = [name for name, row in MADE.items() if row[3] in ("PCM_16", "PCM_24", "FLOAT", "DOUBLE", "ALAC_16")]


def num_made(name):
    """Samples of a file of MADE: longer where a decoder decodes instead of seeking up to 2 s."""
    return int((6.1 if name.endswith(".ogg") else 2.7) * MADE[name][0]) + 13


def voice(num_samples, sample_rate, channels=1):
    """Something like speech: gliding harmonics that come and go, and a little noise. `[N, C]`."""
    t = np.arange(num_samples) / sample_rate
    phase = 2 * np.pi * np.cumsum(120 + 30 * np.sin(2 * np.pi * 0.7 * t)) / sample_rate
    wave = sum(np.sin(k * phase) / k for k in range(1, 20)) * (np.sin(2 * np.pi * 2.3 * t) > -0.2) * 0.2
    noise = np.random.default_rng(num_samples).standard_normal((num_samples, channels)) * 0.01
    return (wave[:, None] * np.linspace(1, 0.5, channels) + noise).astype(np.float32)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    for name, (sample_rate, channels, format, subtype) in MADE.items():
        wave = voice(num_made(name), sample_rate, channels)
        with soundfile.SoundFile(folder / name, "w", sample_rate, channels, subtype, format=format) as file:
            for start in range(0, len(wave), 10000):
                file.write(wave[start : start + 10000])
    return folder


@pytest.fixture(scope="session")
def whole(made):
    cache = {}

    def read(path):
        if path not in cache:
            cache[path] = read_audio(made / path)[0]
        return cache[path]

    return read


@pytest.fixture(scope="session")
def without_xing(made):
    """The frames of an mp3 file as a recorder writes them: no header with their number."""
    data = (made / "mono16.mp3").read_bytes()
    offset, header = mpeg.find_frame(data, 0)
    assert mpeg.xing_claim(data, offset, header)
    return data[offset + header.num_bytes :]


ALL = [*MADE, *SHIPPED]
IDS = [getattr(path, "name", path) for path in ALL]


@pytest.mark.parametrize("name", ALL, ids=IDS)
def test_info_tells_what_reading_gives(made, whole, name):
    info = audio_info(made / name)
    wave, sample_rate = read_audio(made / name)
    assert (info.channels, info.num_samples, info.sample_rate) == (*wave.shape, sample_rate)
    assert wave.dtype == torch.float32
    assert wave.is_contiguous()
    assert wave.abs().max() > 0.01
    assert not info.scanned


@pytest.mark.parametrize("name", MADE)
def test_info_of_each_format(made, name):
    sample_rate, channels, format, subtype = MADE[name]
    info = audio_info(made / name)
    assert (info.sample_rate, info.channels) == (sample_rate, channels)
    container = {"WAVEX": "wav", "RF64": "wav"}.get(format, format.lower())
    assert info.container == container
    codec = {"MPEG_LAYER_III": "mp3"}.get(subtype, subtype.lower())
    assert info.codec == ("flac" if format == "FLAC" else codec)
    bits = {
        "VORBIS": None,
        "OPUS": None,
        "MPEG_LAYER_III": None,
        "IMA_ADPCM": None,
        "GSM610": None,
        "FLOAT": 32,
    }
    bits |= {"DOUBLE": 64, "ULAW": 8}
    assert info.bit_depth == (bits[subtype] if subtype in bits else int(subtype[-2:].strip("U_")))
    if name in LOSSLESS:
        assert info.num_samples == num_made(name)


@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_formats_hold_the_samples(whole, name):
    sample_rate, channels, _, subtype = MADE[name]
    original = voice(num_made(name), sample_rate, channels).T
    step = {"FLOAT": 0, "DOUBLE": 0, "PCM_24": 2**-23}.get(subtype, 2**-15)
    assert np.abs(whole(name).numpy() - original).max() <= 1.5 * step


@pytest.mark.parametrize("name", ALL, ids=IDS)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_an_excerpt_is_that_slice_of_the_whole(made, whole, name, data):
    wave = whole(name)
    num_samples = wave.shape[1]
    # Half of the draws near the end, where seeking goes wrong.
    low = data.draw(st.sampled_from([0, max(0, num_samples - 3000)]))
    start = data.draw(st.integers(low, num_samples - 1))
    length = data.draw(st.integers(1, num_samples - start))
    excerpt, _ = read_audio(made / name, start_sample=start, num_samples=length)
    assert torch.equal(excerpt, wave[:, start : start + length])


@pytest.mark.parametrize("name", ["mono16.mp3", "mono44.mp3", "mono.ogg", "stereo.ogg", "mono.opus"])
def test_excerpts_at_every_place_of_the_decoders_that_seek_badly(made, whole, name):
    wave = whole(name)
    for start in [
        *range(100, wave.shape[1], wave.shape[1] // 20),
        *range(wave.shape[1] - 6000, wave.shape[1], 797),
    ]:
        excerpt, _ = read_audio(made / name, start_sample=start, num_samples=min(5000, wave.shape[1] - start))
        assert torch.equal(excerpt, wave[:, start : start + 5000])


@pytest.mark.parametrize("name", ["s16.wav", "mono.flac", "stereo.ogg", "mono16.mp3", "mono.opus"])
@pytest.mark.parametrize("sample_rate", [8000, 24000, 44100])
def test_a_resampled_excerpt_is_that_slice_of_the_resampled_whole(made, name, sample_rate):
    whole, rate = read_audio(made / name, sample_rate=sample_rate, mono=True)
    assert rate == sample_rate
    info = audio_info(made / name)
    assert whole.shape == (1, resampled_length(info.num_samples, info.sample_rate, sample_rate))
    for start, length in [(0, 1), (1, 777), (4321, 9999), (whole.shape[1] - 5, 5), (whole.shape[1] // 2, 1)]:
        excerpt, _ = read_audio(made / name, start_sample=start, num_samples=length, sample_rate=sample_rate, mono=True)
        assert excerpt.shape == (1, length)
        assert (excerpt - whole[:, start : start + length]).abs().max() < 2e-6


@pytest.mark.parametrize("name", ["s16.wav", "mono.flac", "stereo.ogg", "mono16.mp3", "mono.opus", "alac.caf"])
def test_sources_are_read_alike(made, whole, name):
    path, data = made / name, (made / name).read_bytes()
    with fsspec.open(f"memory://{name}", "wb") as file:
        file.write(data)
    with open(path, "rb") as file:
        file.seek(17)
        for source in (
            str(path),
            data,
            bytearray(data),
            memoryview(data),
            io.BytesIO(data),
            file,
            f"memory://{name}",
        ):
            assert torch.equal(read_audio(source, start_sample=4000)[0], whole(name)[:, 4000:])
            assert audio_info(source) == audio_info(path)
        assert not file.closed


@pytest.mark.parametrize("name", ["s16.wav", "mono.flac", "stereo.ogg", "mono16.mp3", "mono.opus", "s16.aiff"])
@pytest.mark.parametrize("wrong", ["x.mp3", "x.wav", "x.raw", "x.txt", "x"])
def test_the_content_decides_not_the_suffix(made, whole, name, wrong, tmp_path):
    (tmp_path / wrong).write_bytes((made / name).read_bytes())
    assert torch.equal(read_audio(tmp_path / wrong)[0], whole(name))


def test_dtypes(made, whole):
    wave = whole("s16.wav")
    half, _ = read_audio(made / "s16.wav", dtype=torch.float16)
    assert torch.equal(half, wave.half())
    assert read_audio(made / "mono.ogg", dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    integers, _ = read_audio(made / "s16.wav", dtype=torch.int16)
    stored, _ = soundfile.read(made / "s16.wav", dtype="int16")
    assert np.array_equal(integers.numpy(), stored.T)
    rounded, _ = read_audio(made / "stereo.ogg", dtype=torch.int16)
    assert (rounded / 32768 - whole("stereo.ogg")).abs().max() <= 0.5001 / 32768
    mono, _ = read_audio(made / "s16.wav", mono=True)
    assert torch.allclose(mono, wave.mean(0, keepdim=True))


def test_loud_waves_are_clipped_at_int16_not_wrapped(tmp_path):
    soundfile.write(tmp_path / "loud.wav", np.array([2.0, -2.0, 0.5]), 8000, subtype="FLOAT")
    assert read_audio(tmp_path / "loud.wav", dtype=torch.int16)[0].tolist() == [[32767, -32768, 16384]]
    assert read_audio(tmp_path / "loud.wav")[0].tolist() == [[2.0, -2.0, 0.5]]


def test_threads_do_not_disturb_each_other(made, whole):
    names = ["s16.wav", "mono.flac", "stereo.ogg", "mono16.mp3", "mono.opus"] * 6
    expected = {name: whole(name) for name in names}
    barrier = threading.Barrier(6)

    def check(index):
        if index < 6:
            barrier.wait(10)
        start = 997 * index % 20000
        return torch.equal(
            read_audio(made / names[index], start_sample=start, num_samples=3000)[0],
            expected[names[index]][:, start : start + 3000],
        )

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(check, range(len(names))))


def test_long_reads_go_in_pieces(made, whole, monkeypatch):
    monkeypatch.setattr(sndfile, "_VALUES_AT_ONCE", 700)
    monkeypatch.setattr(pcm, "_BYTES_AT_ONCE", 700)
    for name in ("s16.wav", "stereo.ogg", "mono16.mp3"):
        assert torch.equal(read_audio(made / name, start_sample=20001)[0], whole(name)[:, 20001:])


def test_an_mp3_without_xing_header_comes_back_whole(without_xing, whole):
    info = audio_info(without_xing)
    assert info.scanned
    wave, _ = read_audio(without_xing)
    original = whole("mono16.mp3")
    assert wave.shape[1] == info.num_samples >= original.shape[1]
    # Without the header's delay, the encoder's padding comes first.
    delay = next(d for d in range(2000) if torch.allclose(wave[:, d : d + 5000], original[:, :5000], atol=1e-5))
    assert delay < 1152
    assert torch.allclose(wave[:, delay : delay + original.shape[1]], original, atol=1e-5)
    for start in (0, 1, 20000, info.num_samples - 100):
        excerpt, _ = read_audio(without_xing, start_sample=start, num_samples=100)
        assert torch.equal(excerpt, wave[:, start : start + 100])


def test_mp3_tags_and_joined_files(made, without_xing, whole):
    data = (made / "mono16.mp3").read_bytes()
    assert mpeg.scan(data).num_frames == mpeg.xing_claim(data, *mpeg.find_frame(data, 0))[0]
    cover = b"ID3\x04\x00\x00" + bytes([0, 18, 0, 0]) + b"\xff\xfb\x90\x00" * (18 << 12)
    tagged = cover + data + b"TAG" + bytes(125)
    assert torch.equal(read_audio(tagged)[0], whole("mono16.mp3"))
    joined = audio_info(data + data)
    assert joined.scanned
    assert joined.num_samples > 1.99 * audio_info(data).num_samples
    assert read_audio(without_xing + data)[0].shape[1] > 1.99 * audio_info(data).num_samples


def test_a_flac_of_unknown_length_is_counted(made, whole):
    data = bytearray((made / "mono.flac").read_bytes())
    data[21] &= 0xF0
    data[22:26] = bytes(4)
    info = audio_info(bytes(data))
    assert (info.num_samples, info.scanned) == (whole("mono.flac").shape[1], True)
    assert torch.equal(read_audio(bytes(data))[0], whole("mono.flac"))


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF, 0xFFFFFFFF - 36])
def test_a_wav_from_a_pipe_has_no_length(made, whole, size):
    data = bytearray((made / "s16.wav").read_bytes())
    struct.pack_into("<I", data, data.find(b"data") + 4, size)
    assert torch.equal(read_audio(bytes(data))[0], whole("s16.wav"))


CUT = [
    "s16.wav",
    "s24.wav",
    "f64.rf64",
    "s16.aiff",
    "ulaw.au",
    "mono.flac",
    "mono.ogg",
    "mono.opus",
    "mono16.mp3",
]


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("part", [0.05, 0.5, 0.99])
def test_a_cut_file_raises_and_is_read_only_on_demand(made, whole, name, part):
    data = (made / name).read_bytes()
    data = data[: int(len(data) * part)]
    with pytest.raises(AudioFileError, match=r"<\d+ bytes>: .*(cut|damaged|ends).*allow_truncated=True"):
        read_audio(data)
    try:
        wave, _ = read_audio(data, allow_truncated=True)
    except AudioFileError:
        if part == 0.05:
            return
        raise
    info = audio_info(data, allow_truncated=True)
    assert info.scanned
    assert info.num_samples == wave.shape[1]
    assert 0 < wave.shape[1] < whole(name).shape[1]
    assert wave.shape[1] > (part - 0.4) * whole(name).shape[1]
    # A cut vorbis or mp3 block may differ where its end is missing.
    same = wave.shape[1] - 4096
    expected = whole(name)[:, : max(0, same)]
    # Vorbis is decoded by FFmpeg where it is whole, by libsndfile where it is cut: the last bit differs.
    exact = not name.endswith(".ogg")
    torch.testing.assert_close(wave[:, : max(0, same)], expected, rtol=0, atol=0 if exact else 1e-6)


def test_a_cut_mp3_without_xing_header(without_xing):
    with pytest.raises(AudioFileError, match=r"is cut: it holds 7. frames, and the last one lacks .* bytes"):
        read_audio(without_xing[:-50])
    assert read_audio(without_xing[:-50], allow_truncated=True)[0].shape[1] > 40000


def with_moved_positions(stream, samples):
    """The Ogg stream with the positions of its audio pages but the first moved, as by a careless editor."""
    data = bytearray(stream)
    starts = [at for at in range(len(data)) if data.startswith(b"OggS", at)]
    for start, stop in zip(starts[3:], [*starts[4:], len(data)], strict=True):
        struct.pack_into("<q", data, start + 6, struct.unpack_from("<q", data, start + 6)[0] + samples)
        struct.pack_into("<I", data, start + 22, 0)
        struct.pack_into("<I", data, start + 22, ogg.checksum(bytes(data[start:stop])))
    return bytes(data)


@pytest.mark.parametrize("name", ["mono.ogg", "stereo.ogg", "mono.opus", "stereo.opus"])
def test_a_flipped_byte_anywhere_in_an_ogg_file_is_noticed(made, name):
    data = (made / name).read_bytes()
    for at in (len(data) // 3, len(data) - 100, len(data) - 1):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(AudioFileError, match="damaged"):
            read_audio(bytes(damaged))


def test_a_vorbis_file_with_wrong_positions_is_not_sought(made, whole, tmp_path):
    (tmp_path / "moved.ogg").write_bytes(with_moved_positions((made / "stereo.ogg").read_bytes(), -3000))
    wave, _ = read_audio(tmp_path / "moved.ogg")
    torch.testing.assert_close(wave, whole("stereo.ogg")[:, :-3000], rtol=0, atol=1e-6)
    for start in range(0, wave.shape[1], 9973):
        excerpt, _ = read_audio(tmp_path / "moved.ogg", start_sample=start)
        assert torch.equal(excerpt, wave[:, start:])


def test_an_ogg_file_that_promises_forever_does_not_take_it(tmp_path):
    soundfile.write(tmp_path / "x.ogg", voice(120000, 44100, 2), 44100)
    data = with_moved_positions((tmp_path / "x.ogg").read_bytes(), 2**60)
    with pytest.raises(AudioFileError, match=r"its audio ends at sample \d+, \d+ were expected"):
        read_audio(data)


def test_a_hole_in_an_ogg_file_is_noticed(made):
    data = bytearray((made / "mono.ogg").read_bytes())
    data[len(data) // 2 : len(data) // 2 + 60] = bytes(60)
    with pytest.raises(AudioFileError, match=r"is damaged: its page at byte \d+ has a wrong checksum"):
        read_audio(bytes(data))


def test_joined_ogg_files(made):
    data = (made / "mono.ogg").read_bytes() + (made / "stereo.ogg").read_bytes()
    with pytest.raises(AudioFileError, match=r"several Ogg streams.*ffmpeg -i"):
        read_audio(data)


def test_a_wav_whose_header_was_never_finished(made):
    data = bytearray((made / "s16.wav").read_bytes())
    struct.pack_into("<I", data, data.find(b"data") + 4, 0)
    with pytest.raises(AudioFileError, match="never finished: it promises 0 bytes of audio, 476332 follow"):
        read_audio(bytes(data))


def test_a_wav_of_no_samples(made):
    data = bytearray((made / "s16.wav").read_bytes()[:44])
    struct.pack_into("<I", data, 40, 0)
    assert audio_info(bytes(data)).num_samples == 0
    with pytest.raises(AudioFileError, match="holds no samples"):
        read_audio(bytes(data))


def test_a_flac_that_claims_the_moon_costs_nothing(made):
    data = bytearray((made / "mono.flac").read_bytes())
    data[21] |= 0x0F
    data[22:26] = b"\xff" * 4
    with pytest.raises(AudioFileError, match=r"cut or damaged|ends at sample"):
        read_audio(bytes(data))


def test_a_chunk_of_negative_length(made):
    data = bytearray((made / "alac.caf").read_bytes())
    struct.pack_into(">q", data, 12, -(2**62))
    with pytest.raises(AudioFileError, match=r"is cut: its chunk at byte 8 claims -4611686018427387904 bytes"):
        read_audio(bytes(data))


def test_nan_samples(tmp_path):
    wave = np.zeros((100, 2), np.float32)
    wave[40] = np.nan
    wave[70, 1] = np.inf
    soundfile.write(tmp_path / "nan.wav", wave, 8000, subtype="FLOAT")
    with pytest.raises(
        AudioFileError, match=r"nan.wav: 2 of 90 samples are NaN or infinite, the first at 40;.*nan_to_num"
    ):
        read_audio(tmp_path / "nan.wav", start_sample=10)
    assert read_audio(tmp_path / "nan.wav", num_samples=40)[0].abs().max() == 0


@pytest.mark.parametrize(
    "content", [b"just some text\n" * 40, b"\0" * 5000, b"\xff" * 5000, bytes(range(256)) * 9, b"R"]
)
@pytest.mark.parametrize("name", ["x.wav", "x.mp3", "x.ogg", "x.vox", "x.au", "x.raw"])
def test_no_audio_at_all(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(AudioFileError, match=f"{name}: is no audio file.*it begins with b.*expected wav, flac"):
        read_audio(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["s16.wav", "mono.flac", "mono.ogg", "mono.opus", "mono16.mp3", "s16.aiff", "alac.caf"]
)
def test_damaged_files_raise_nothing_else(made, name):
    data = (made / name).read_bytes()
    random = np.random.default_rng(0)
    for _ in range(15):
        damaged = bytearray(data[: random.integers(1, 3000)])
        for at in random.integers(0, len(damaged), 3):
            damaged[at] = random.integers(256)
        for allow_truncated in (False, True):
            with suppress(AudioFileError):
                read_audio(bytes(damaged), allow_truncated=allow_truncated)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(AudioFileError, match=r"no/where.wav: no such file"):
        read_audio("no/where.wav")
    with pytest.raises(AudioFileError, match="is a folder; find_audio"):
        audio_info(tmp_path)
    (tmp_path / "empty.wav").touch()
    with pytest.raises(AudioFileError, match=r"empty.wav: is empty \(0 bytes\)"):
        audio_info(tmp_path / "empty.wav")
    with pytest.raises(AudioFileError, match="memory://nowhere: no such file"):
        audio_info("memory://nowhere")
    with pytest.raises(AudioFileError, match="nosuch://x: "):
        audio_info("nosuch://x")
    with pytest.raises(InputError, match="int is no audio source"):
        audio_info(7)
    with pytest.raises(AudioFileError, match="cannot be opened"):
        audio_info("a\0b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_sample": 119083}, "samples 119083 … 119083 were asked for, it has 119083 at 44100 Hz"),
        ({"start_sample": 119000, "num_samples": 84}, "samples 119000 … 119084 were asked for"),
        ({"num_samples": 43209, "sample_rate": 16000}, "it has 43205 at 16000 Hz"),
        ({"start_sample": -1}, "start_sample is -1; it must be an integer of at least 0"),
        ({"num_samples": 0}, "num_samples is 0; it must be an integer of at least 1"),
        ({"start_sample": 1.5}, "start_sample is 1.5"),
        ({"start_sample": None}, "start_sample is None"),
        ({"sample_rate": 0}, "sample_rate is 0"),
        ({"dtype": torch.int32}, "dtype is torch.int32; it must be one of torch.float32"),
    ],
)
def test_bad_arguments(made, options, message):
    with pytest.raises(InputError, match=message):
        read_audio(made / "s16.wav", **options)


def test_numpy_integers_are_positions(made, whole):
    wave, _ = read_audio(made / "s16.wav", start_sample=np.int64(5), num_samples=np.int32(7))
    assert torch.equal(wave, whole("s16.wav")[:, 5:12])


def mp4(boxes):
    return b"".join(struct.pack(">I", len(body) + 8) + name + body for name, body in boxes)


def test_formats_of_ffmpeg_without_ffmpeg(tmp_path, monkeypatch):
    path = tmp_path / "song.m4a"
    path.write_bytes(mp4([(b"ftyp", b"M4A \0\0\0\0"), (b"moov", bytes(40))]))
    monkeypatch.setattr(ffmpeg, "torchcodec_decoder", lambda: (None, "no libavutil"))
    with pytest.raises(AudioFileError, match=r"song.m4a: mp4 files .*\(no libavutil\); install FFmpeg.*or convert"):
        read_audio(path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(AudioFileError, match="is cut: its header promises 48 bytes of 'moov' from byte 16 on"):
        read_audio(path)


@pytest.mark.parametrize("suffix", ["m4a", "webm", "aac"])
def test_formats_of_ffmpeg(made, tmp_path, suffix):
    decoder, reason = ffmpeg.torchcodec_decoder()
    if decoder is None:
        pytest.skip(reason)
    from torchcodec.encoders import AudioEncoder

    samples = torch.from_numpy(voice(60000, 48000, 2).T.copy())
    path = tmp_path / f"x.{suffix}"
    try:
        AudioEncoder(samples, sample_rate=48000).to_file(path)
    except RuntimeError as error:
        pytest.skip(f"this FFmpeg cannot write {suffix}: {error}")
    info = audio_info(path)
    wave, sample_rate = read_audio(path)
    assert sample_rate == 48000
    assert wave.shape == (2, info.num_samples)
    assert abs(info.num_samples - 60000) < 4096
    for start in (0, 1, 1024, 30001):
        assert torch.equal(read_audio(path, start_sample=start, num_samples=777)[0], wave[:, start : start + 777])
    assert torch.equal(read_audio(path.read_bytes())[0], wave)
    path.write_bytes(b"\0\0\0\x10ftypM4A \0\0\0\0" + bytes(range(1, 200)))
    with pytest.raises(AudioFileError):
        read_audio(path)


@pytest.mark.parametrize("name", ["x.wav", "x.flac"])
def test_what_is_written_comes_back(tmp_path, name):
    integers = torch.randint(-32768, 32768, (2, 5000), dtype=torch.int16)
    report = write_audio(tmp_path / name, integers / 32768, 22050)
    assert (report.num_samples, report.num_clipped) == (5000, 0)
    assert torch.equal(read_audio(tmp_path / name, dtype=torch.int16)[0], integers)
    write_audio(tmp_path / name, integers, 22050, force=True)
    assert torch.equal(read_audio(tmp_path / name)[0], integers / 32768)
    wave = torch.rand(1, 5000, dtype=torch.float64) * 2 - 1
    write_audio(tmp_path / name, wave, 22050, subtype="PCM_24", force=True)
    assert (read_audio(tmp_path / name)[0] - wave).abs().max() <= 1.01 * 2**-24


def test_float_wav_keeps_what_it_gets(tmp_path):
    wave = torch.randn(3, 100) * 3
    report = write_audio(tmp_path / "x.wav", wave, 8000, subtype="FLOAT")
    assert report.num_clipped == 0
    assert torch.equal(read_audio(tmp_path / "x.wav")[0], wave)


@pytest.mark.parametrize("name", ["x.ogg", "x.opus", "x.mp3"])
def test_lossy_files_sound_alike(tmp_path, name):
    wave = torch.from_numpy(voice(80000, 16000, 2).T.copy())
    report = write_audio(tmp_path / name, wave, 16000)
    assert report.path == tmp_path / name
    decoded, sample_rate = read_audio(tmp_path / name)
    assert (decoded.shape, sample_rate) == (wave.shape, 16000)
    assert torch.nn.functional.cosine_similarity(decoded, wave).min() > 0.9


@pytest.mark.parametrize("name", ["x.wav", "x.flac", "x.ogg"])
def test_clipping_is_reported(tmp_path, name):
    wave = torch.tensor([[0.5, 1.0, -1.0, 1.25, -3.0]]).repeat(1, 200)
    report = write_audio(tmp_path / name, wave, 16000)
    assert (report.num_samples, report.num_clipped, report.peak) == (1000, 400, 3.0)
    if name != "x.ogg":
        expected = [16384, 32767, -32768, 32767, -32768]
        assert read_audio(tmp_path / name, num_samples=5, dtype=torch.int16)[0].tolist() == [expected]


def test_writing_replaces_only_on_demand_and_leaves_nothing_half(tmp_path, monkeypatch):
    path = tmp_path / "x.wav"
    write_audio(path, torch.zeros(10), 8000)
    with pytest.raises(AudioFileError, match=r"x.wav: exists; give another name, or force=True"):
        write_audio(path, torch.ones(10), 8000)
    before = path.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(soundfile.SoundFile, "write", fail)
    with pytest.raises(AudioFileError, match=r"cannot be written as WAV/PCM_16.*disk full"):
        write_audio(path, torch.ones(10), 8000, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["x.wav"]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("name", "wave", "rate", "options", "error", "message"),
    [
        ("x.xyz", torch.zeros(9), 8000, {}, InputError, r"no format has the suffix '.xyz'; use .wav"),
        (
            "x.wav",
            torch.zeros(9),
            8000,
            {"format": "aac"},
            InputError,
            "format is 'aac'; it must be one of wav",
        ),
        (
            "x.wav",
            torch.zeros(9),
            8000,
            {"subtype": "VORBIS"},
            InputError,
            "wav has no subtype 'VORBIS'.*PCM_16",
        ),
        ("x.wav", torch.zeros(1, 2, 3), 8000, {}, InputError, r"wave is \[1, 2, 3\]"),
        ("x.wav", torch.zeros(0), 8000, {}, InputError, r"wave is \[0\]"),
        (
            "x.wav",
            torch.zeros(9, dtype=torch.int32),
            8000,
            {},
            InputError,
            "dtype torch.int32; it must be floating",
        ),
        ("x.wav", torch.tensor([0, math.nan]), 8000, {}, InputError, "1 of 2 values of the wave are NaN"),
        ("x.wav", torch.zeros(9), 8000.5, {}, InputError, "sample_rate is 8000.5"),
        (
            "x.opus",
            torch.zeros(9),
            44100,
            {},
            InputError,
            "opus has no sample rate 44100; resample to one of",
        ),
        ("x.mp3", torch.zeros(9), 96000, {}, InputError, "mp3 has no sample rate 96000"),
        ("x.mp3", torch.zeros(3, 9), 48000, {}, InputError, "wave has 3 channels.*mp3 holds 2"),
        ("no/x.wav", torch.zeros(9), 8000, {}, AudioFileError, "there is no folder .*no; make it first"),
        ("", torch.zeros(9), 8000, {"format": "wav"}, AudioFileError, "is a folder; give a file name"),
    ],
)
def test_bad_writes(tmp_path, name, wave, rate, options, error, message):
    with pytest.raises(error, match=message):
        write_audio(tmp_path / name, wave, rate, **options)


def tone(hz, sample_rate, num_samples):
    return torch.sin(2 * math.pi * hz * torch.arange(num_samples, dtype=torch.float64) / sample_rate)


@pytest.mark.parametrize(("from_rate", "to_rate"), [(44100, 16000), (48000, 16000), (16000, 44100), (8000, 48000)])
def test_resampling_keeps_a_tone_and_kills_one_above_nyquist(from_rate, to_rate):
    low = min(from_rate, to_rate) / 2
    wave = resample(tone(0.6 * low, from_rate, from_rate).float(), from_rate, to_rate)
    expected = tone(0.6 * low, to_rate, to_rate)
    inner = slice(to_rate // 10, -to_rate // 10)
    assert (wave - expected)[inner].abs().max() < 1e-4
    if to_rate < from_rate:
        gone = resample(tone(1.05 * low, from_rate, from_rate).float(), from_rate, to_rate)
        assert gone[inner].abs().max() < 1e-5
    constant = resample(torch.ones(from_rate), from_rate, to_rate)
    assert (constant[inner] - 1).abs().max() < 1e-4


@settings(deadline=None, max_examples=40)
@given(
    num_samples=st.integers(1, 3000),
    rates=st.lists(st.sampled_from([8000, 11025, 16000, 22050, 24000, 44100, 48000, 7]), min_size=2, max_size=2),
)
def test_resampled_lengths(num_samples, rates):
    wave = resample(torch.randn(2, num_samples), *rates)
    assert wave.shape == (2, resampled_length(num_samples, *rates))
    assert wave.isfinite().all()


def test_resampled_lengths_do_not_round():
    num_samples = next(n for n in range(10**6, 2 * 10**6) if n * 160 % 441 == 1)
    assert resample(torch.zeros(num_samples), 44100, 16000).shape == (num_samples * 160 // 441 + 1,)


def test_resampling_in_chunks(monkeypatch):
    wave = torch.randn(1, 30000)
    whole = resample(wave, 44100, 16000)
    monkeypatch.setattr(audio.resampling, "_CHUNK", 2000)
    assert (resample(wave, 44100, 16000) - whole).abs().max() < 2e-6


def test_resampling_types_and_errors():
    assert resample(torch.randn(3, 100).bfloat16(), 2, 1).dtype == torch.bfloat16
    wave = torch.randn(1, 1, 64, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: resample(w, 3, 2), (wave,), fast_mode=True)
    same = torch.randn(5)
    assert resample(same, 16000, 16000) is same
    with pytest.raises(InputError, match="to_rate is 0; it must be a positive integer, in Hz"):
        resample(same, 16000, 0)
    with pytest.raises(InputError, match="44101 and 16000 Hz have the greatest common divisor 1, which needs"):
        resample(same, 44101, 16000)
    with pytest.raises(InputError, match=r"dtype torch.int16"):
        resample(same.to(torch.int16), 2, 1)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def test_find_audio_in_folders(tmp_path):
    touch(tmp_path, "b.WAV", "a/x.flac", "a/y.txt", "a/.hidden.wav", ".git/z.wav", "a/deep/x.mp3")
    items = find_audio([tmp_path])
    assert items == [(key, tmp_path / key) for key in ("a/deep/x.mp3", "a/x.flac", "b.WAV")]
    assert [key for key, _ in find_audio(tmp_path, recursive=False)] == ["b.WAV"]
    assert [key for key, _ in find_audio([tmp_path / "a", tmp_path / "b.WAV"])] == [
        "b.WAV",
        "deep/x.mp3",
        "x.flac",
    ]
    assert find_audio(tmp_path / "a" / "y.txt") == [("y.txt", tmp_path / "a" / "y.txt")]
    assert find_audio([tmp_path, tmp_path / "b.WAV", tmp_path]) == items


def test_find_audio_with_equal_keys(tmp_path):
    touch(tmp_path, "one/x.wav", "two/x.wav", "two/y.wav", "three/one/x.wav")
    keys = [key for key, _ in find_audio([tmp_path / "one", tmp_path / "two"])]
    assert keys == ["one/x.wav", "two/x.wav", "two/y.wav"]
    keys = [key for key, _ in find_audio([tmp_path / "one" / "x.wav", tmp_path / "two" / "x.wav"])]
    assert keys == ["one/x.wav", "two/x.wav"]
    with pytest.raises(
        InputError, match=r"one/x.wav and .*three/one/x.wav would both have the key 'one/x.wav'; rename"
    ):
        find_audio([tmp_path / "one", tmp_path / "three" / "one"])


def test_find_audio_survives_links_in_circles(tmp_path):
    touch(tmp_path, "a/x.wav")
    (tmp_path / "a" / "again").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "a" / "gone.wav").symlink_to(tmp_path / "nowhere")
    assert [key for key, _ in find_audio(tmp_path)] == ["a/x.wav"]


def test_find_audio_finds_nothing(tmp_path):
    touch(tmp_path, "notes.txt")
    with pytest.raises(InputError, match=r"no audio files in .* \(1 others there\); looked for .aac"):
        find_audio(tmp_path)
    with pytest.raises(InputError, match="no audio files in an empty list"):
        find_audio([])
    with pytest.raises(AudioFileError, match="nowhere: no such file or folder"):
        find_audio(tmp_path / "nowhere")
    with pytest.raises(InputError, match="s3://bucket is a URL"):
        find_audio("s3://bucket")


def test_importing_is_light():
    code = "import sys, codec.audio; print({'torchaudio', 'torchcodec', 'fsspec'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"
