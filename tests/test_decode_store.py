import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from conftest import small_codec
from test_decode import ITEMS, make_store

from codec.audio import read_audio, resample
from codec.decode import decode_store
from codec.decode.files import ArrayFile, WaveFile, wave_header
from codec.decode.resampled import ResampledStream
from codec.errors import InputError, TokenFileError
from codec.tokens import TokenStore, TokenWriter

NAMES = ("a", "b", "c", "deep/d", "e")


@pytest.fixture(scope="module")
def store(tmp_path_factory, lookahead_codec):
    return make_store(tmp_path_factory.mktemp("store") / "x.ctok", lookahead_codec)


def whole(codec, store, key, output):
    codes, num_samples = torch.from_numpy(store.read(key)), store.info(key).num_samples
    if output == "codes":
        return codes.numpy()
    if output == "mel":
        return codec.decode_mel(codes)[0, :, : -(-num_samples // 160)].numpy()
    return codec.decode(codes)[0, :, :num_samples].clamp(-1, 1).numpy()


def written(folder: Path, suffix: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob(f"*{suffix}") if p.is_file()}


@pytest.mark.parametrize("output", ["wave", "mel", "codes"])
@pytest.mark.parametrize("batch_frames", [40, 300, 6400])
def test_a_whole_store_becomes_files(tmp_path, store, lookahead_codec, output, batch_frames):
    seen = []
    report = decode_store(
        None if output == "codes" else lookahead_codec,
        store,
        tmp_path,
        output,
        batch_frames=batch_frames,
        on_progress=lambda *args: seen.append(args),
    )
    assert (report.num_items, report.num_skipped, report.failures) == (len(ITEMS), 0, [])
    assert seen[-1][:2] == (5, 5)
    assert report.audio_seconds == pytest.approx(seen[-1][2]) == pytest.approx(store.num_samples.sum() / 16000)
    for key, name in zip(ITEMS, NAMES, strict=True):
        expected = whole(lookahead_codec, store, key, output)
        if output == "wave":
            wave, rate = read_audio(tmp_path / f"{name}.wav")
            assert rate == 16000
            assert soundfile.info(tmp_path / f"{name}.wav").subtype == "PCM_16"
            np.testing.assert_allclose(wave, expected, atol=1 / 32768)
        else:
            array = np.load(tmp_path / f"{name}.npy")
            assert array.dtype == (np.float32 if output == "mel" else np.uint16)
            np.testing.assert_allclose(array, expected, atol=1e-5)


def test_an_interrupted_run_goes_on(tmp_path, store, lookahead_codec):
    """Finished files stay as they are, unfinished ones never have a name, the rest is made."""
    decode_store(lookahead_codec, store, tmp_path / "whole", batch_frames=100)

    class Interrupted(Exception):
        pass

    def interrupt(done, total, seconds):
        if done == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        decode_store(lookahead_codec, store, tmp_path / "cut", batch_frames=100, on_progress=interrupt)
    before = written(tmp_path / "cut", ".wav")
    assert len(before) == 2
    assert not list((tmp_path / "cut").rglob("*.unfinished"))
    times = {name: (tmp_path / "cut" / name).stat().st_mtime_ns for name in before}
    report = decode_store(lookahead_codec, store, tmp_path / "cut", batch_frames=100)
    assert (report.num_items, report.num_skipped) == (3, 2)
    assert written(tmp_path / "cut", ".wav") == written(tmp_path / "whole", ".wav")
    assert times == {name: (tmp_path / "cut" / name).stat().st_mtime_ns for name in before}
    report = decode_store(lookahead_codec, store, tmp_path / "cut")
    assert (report.num_items, report.num_skipped, report.audio_seconds) == (0, 5, 0)


KILLED = """
import sys, torch
torch.set_num_threads(1)
from codec import TokenStore, load_codec
from codec.decode import decode_store
decode_store(load_codec(sys.argv[1]), TokenStore(sys.argv[2]), sys.argv[3], batch_frames=40)
"""


def test_a_killed_run_goes_on(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "codec")
    store = make_store(tmp_path / "x.ctok", lookahead_codec)
    folder = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", KILLED, tmp_path / "codec", tmp_path / "x.ctok", folder])
    deadline = time.monotonic() + 60
    # Killed while a file is being written.
    while not list(folder.rglob("*.unfinished")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for path in folder.rglob("*.wav"):
        key = {name: key for key, name in zip(ITEMS, NAMES, strict=True)}[str(path.relative_to(folder))[:-4]]
        assert soundfile.info(path).frames == store.info(key).num_samples
    report = decode_store(lookahead_codec, store, folder)
    assert report.num_items + report.num_skipped == 5
    assert not list(folder.rglob("*.unfinished"))
    decode_store(lookahead_codec, store, tmp_path / "whole")
    for name, data in written(tmp_path / "whole", ".wav").items():
        ours, theirs = ((np.frombuffer(d, "<i2")).astype(int) for d in (data, (folder / name).read_bytes()))
        assert np.abs(ours - theirs).max() <= 1


def test_another_run_is_refused_in_the_same_folder(tmp_path, store, lookahead_codec, causal_codec):
    decode_store(lookahead_codec, store, tmp_path / "out")
    before = written(tmp_path / "out", "")
    other = make_store(tmp_path / "other.ctok", causal_codec)
    for codec, tokens, output, options, name in (
        (causal_codec, other, "wave", {}, "store"),
        (lookahead_codec, store, "mel", {}, "output"),
        (lookahead_codec, store, "wave", {"n_quantizers": 2}, "n_quantizers"),
        (lookahead_codec, store, "wave", {"original_rate": True}, "original_rate"),
    ):
        with pytest.raises(InputError, match=f"holds another run: its {name} is .* or --force to replace"):
            decode_store(codec, tokens, tmp_path / "out", output, **options)
    assert written(tmp_path / "out", "") == before
    report = decode_store(causal_codec, other, tmp_path / "out", force=True)
    assert (report.num_items, report.num_skipped) == (5, 0)
    assert json.loads((tmp_path / "out" / "decode.json").read_text())["codec"] == "small"
    assert decode_store(causal_codec, other, tmp_path / "out").num_skipped == 5


def test_files_of_someone_else_are_left_alone(tmp_path, store, lookahead_codec):
    (tmp_path / "e.wav").write_bytes(b"mine")
    with pytest.raises(InputError, match=r"e.wav exists \(1 files in all\).*no decode.json; give another folder"):
        decode_store(lookahead_codec, store, tmp_path)
    assert (tmp_path / "e.wav").read_bytes() == b"mine"
    (tmp_path / "e.wav").unlink()
    (tmp_path / "decode.json").write_text("{")
    with pytest.raises(InputError, match="isn't the record of a run"):
        decode_store(lookahead_codec, store, tmp_path)


def test_an_interrupted_force_begins_anew(tmp_path, store, lookahead_codec, causal_codec):
    """What an earlier run left under these names isn't taken for this run's."""
    other = make_store(tmp_path / "other.ctok", causal_codec)
    decode_store(causal_codec, other, tmp_path / "out")

    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode_store(lookahead_codec, store, tmp_path / "out", batch_frames=40, force=True, on_progress=interrupt)
    decode_store(lookahead_codec, store, tmp_path / "out", batch_frames=40)
    decode_store(lookahead_codec, store, tmp_path / "whole", batch_frames=40)
    assert written(tmp_path / "out", ".wav") == written(tmp_path / "whole", ".wav")


def test_two_runs_at_once_in_one_folder(tmp_path, store, lookahead_codec):
    def again(*_):
        with pytest.raises(InputError, match="another process decodes into it"):
            decode_store(lookahead_codec, store, tmp_path)

    assert decode_store(lookahead_codec, store, tmp_path, on_progress=again).num_items == 5


@pytest.mark.parametrize("codebook_size", [32, 20])
def test_a_damaged_item_is_reported_and_the_others_are_decoded(tmp_path, codebook_size):
    codec, path = small_codec(codebook_size=codebook_size), tmp_path / "x.ctok"
    make_store(path, codec, codebook_size=codebook_size).close()
    data = bytearray(path.read_bytes())
    data[data.index(b"deep/d.mp3") + 40] ^= 0x10
    path.write_bytes(data)
    for output in ("wave", "codes"):
        out = tmp_path / output
        report = decode_store(codec, TokenStore(path), out, output, batch_frames=500)
        assert [failure["key"] for failure in report.failures] == ["deep/d.mp3"]
        assert "deep/d.mp3" in report.failures[0]["error"]
        suffix = ".wav" if output == "wave" else ".npy"
        assert sorted(p.name for p in out.rglob(f"*{suffix}")) == [f"{name}{suffix}" for name in "abce"]
        assert decode_store(codec, TokenStore(path), out, output).num_skipped == 4  # and tried again
        assert not list(out.rglob("*.unfinished"))


def test_a_damaged_end_leaves_nothing_in_the_next_item(tmp_path, lookahead_codec):
    path = tmp_path / "x.ctok"
    store = make_store(path, lookahead_codec)
    expected = {name: store.info(key).num_samples for name, key in (("a", "a.wav"), ("c", "c"), ("e", "e"))}
    store.close()
    data = bytearray(path.read_bytes())
    data[data.index(b"b.flac") + 2 * (4 * 5 * 32 + 4) + 40] ^= 0x10  # its third block: the last pieces only
    path.write_bytes(data)
    for batch_frames in (40, 2000):
        out = tmp_path / str(batch_frames)
        report = decode_store(lookahead_codec, TokenStore(path), out, batch_frames=batch_frames)
        assert [failure["key"] for failure in report.failures] == ["b.flac"]
        assert not (out / "b.wav").exists() and not list(out.rglob("*.unfinished"))
        for name, num_samples in expected.items():
            assert read_audio(out / f"{name}.wav")[0].shape[1] == num_samples


def item(tmp_path, codec, num_frames=200, **facts) -> TokenStore:
    codes = np.random.default_rng(0).integers(0, 32, (4, num_frames))
    with TokenWriter(tmp_path / "x.ctok", codec.spec) as writer:
        writer.add("x", codes, num_samples=num_frames * 320 - 33, **facts)
    return TokenStore(tmp_path / "x.ctok")


def test_gain_is_undone_and_clipping_counted(tmp_path, lookahead_codec):
    plain = whole(lookahead_codec, item(tmp_path, lookahead_codec), "x", "wave")
    (tmp_path / "gain").mkdir()
    store = item(tmp_path / "gain", lookahead_codec, gain=4.0)
    report = decode_store(lookahead_codec, store, tmp_path / "quiet")
    wave, _ = read_audio(tmp_path / "quiet" / "x.wav")
    np.testing.assert_allclose(wave, plain / 4, atol=1 / 32768)
    assert report.num_clipped == 0
    (tmp_path / "loud").mkdir()
    gain = float(np.float32(np.abs(plain).max() / 2))
    report = decode_store(lookahead_codec, item(tmp_path / "loud", lookahead_codec, gain=gain), tmp_path / "clipped")
    wave, _ = read_audio(tmp_path / "clipped" / "x.wav")
    np.testing.assert_allclose(wave, np.clip(plain / gain, -1, 32767 / 32768), atol=1.1 / 32768)
    assert report.num_clipped == (np.abs(plain / gain) > 1).sum() > 0
    (tmp_path / "none").mkdir()
    report = decode_store(lookahead_codec, item(tmp_path / "none", lookahead_codec, gain=0.0), tmp_path / "zero")
    assert "gain 0, which can't be undone" in report.failures[0]["error"]


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 16000])
def test_waves_at_the_rate_of_the_files_that_were_encoded(tmp_path, lookahead_codec, rate):
    store = item(tmp_path, lookahead_codec, meta={"sample_rate": rate})
    decode_store(lookahead_codec, store, tmp_path / "out", original_rate=True, batch_frames=100)
    wave, found = read_audio(tmp_path / "out" / "x.wav")
    expected = resample(torch.from_numpy(whole(lookahead_codec, store, "x", "wave")), 16000, rate)
    assert found == rate
    torch.testing.assert_close(wave, expected.clamp(-1, 1), atol=1.1 / 32768, rtol=0)


@pytest.mark.parametrize("rate", [0, -1, "48000", 10**9, True, None, 8000.0])
def test_a_recorded_rate_that_cannot_be(tmp_path, lookahead_codec, rate):
    store = item(tmp_path, lookahead_codec, meta={"sample_rate": rate})
    report = decode_store(lookahead_codec, store, tmp_path / "out", original_rate=True)
    assert "in its metadata; it must be 1000 to 768000 Hz" in report.failures[0]["error"]
    assert not list((tmp_path / "out").glob("*.wav"))


@pytest.mark.parametrize(("from_rate", "to_rate"), [(16000, 44100), (44100, 16000), (16000, 8000), (24000, 22050)])
def test_resampling_in_chunks_equals_resampling_whole(from_rate, to_rate):
    wave = torch.randn(2, 30011, generator=torch.Generator().manual_seed(0))
    expected = resample(wave, from_rate, to_rate)
    for sizes in ([30011], [1, 30010], [999] * 30 + [41], [12000, 11, 18000]):
        stream = ResampledStream(30011, from_rate, to_rate)
        parts = [stream.push(part) for part in wave.split(sizes, 1)] + [stream.flush()]
        torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-6, rtol=0)
    short = ResampledStream(3, from_rate, to_rate)
    parts = [short.push(wave[:, :3]), short.flush()]
    torch.testing.assert_close(torch.cat(parts, 1), resample(wave[:, :3], from_rate, to_rate), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "latents"}, "output is 'latents'; it must be one of wave, mel, codes"),
        ({"output": "mel", "original_rate": True}, "it goes with output='wave'"),
        ({"n_quantizers": 5}, "n_quantizers is 5; the store holds 4"),
    ],
)
def test_arguments_that_do_not_fit(tmp_path, store, lookahead_codec, arguments, message):
    with pytest.raises(InputError, match=message):
        decode_store(lookahead_codec, store, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_decoding_needs_the_codec_that_wrote_the_store(tmp_path, store, causal_codec):
    with pytest.raises(InputError, match="needs the codec that wrote the store"):
        decode_store(None, store, tmp_path / "out")
    with pytest.raises(TokenFileError, match="load the codec that wrote them"):
        decode_store(causal_codec, store, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fewer_quantizers(tmp_path, store, lookahead_codec):
    decode_store(lookahead_codec, store, tmp_path, n_quantizers=2)
    expected = lookahead_codec.decode(torch.from_numpy(store.read("e", n_quantizers=2)))[0, :, : 530 * 320 - 100]
    torch.testing.assert_close(read_audio(tmp_path / "e.wav")[0], expected.clamp(-1, 1), atol=1 / 32768, rtol=0)


def test_a_wave_beyond_4_gib_is_rf64(tmp_path):
    """Nothing this large is written here: the file is sparse."""
    num_samples = 2**31 + 5
    header = wave_header(16000, 1, num_samples * 2)
    with (tmp_path / "x.wav").open("wb") as file:
        file.write(header)
        file.truncate(len(header) + num_samples * 2)
    info = soundfile.info(tmp_path / "x.wav")
    assert (info.frames, info.samplerate, info.format, info.subtype) == (num_samples, 16000, "RF64", "PCM_16")
    assert read_audio(tmp_path / "x.wav", start_sample=num_samples - 3, num_samples=3)[0].shape == (1, 3)


def test_the_header_is_that_of_others(tmp_path):
    for channels in (1, 2):
        samples = np.arange(2000, dtype=np.int16).reshape(-1, channels)
        with WaveFile(tmp_path / "ours.wav", sample_rate=22050, channels=channels, num_samples=len(samples)) as file:
            file.write(samples[:7])
            file.write(samples[7:])
        soundfile.write(tmp_path / "theirs.wav", samples, 22050)
        assert (tmp_path / "ours.wav").read_bytes() == (tmp_path / "theirs.wav").read_bytes()


def test_arrays_grow_in_time(tmp_path):
    array = np.random.default_rng(0).random((80, 33), np.float32)
    with ArrayFile(tmp_path / "x.npy", num_rows=80, length=33, dtype=array.dtype) as file:
        file.write(array.T[:5])
        assert not (tmp_path / "x.npy").exists()
        file.write(array.T[5:])
    assert np.array_equal(np.load(tmp_path / "x.npy"), array)
    assert np.array_equal(np.load(tmp_path / "x.npy", mmap_mode="r")[:, 3:9], array[:, 3:9])
    with ArrayFile(tmp_path / "y.npy", num_rows=80, length=33, dtype=array.dtype) as file:
        file.write(array.T[:5])
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


# One long item by repetition; its codec has almost no width and 2 kHz, so that ten hours take seconds.
LONG = """
import sys, threading, time
import numpy as np, torch
torch.set_num_threads(1)
from codec.decode import decode_store
from codec.model import SoundStream, SoundStreamConfig
from codec.tokens import TokenStore, TokenWriter

hours, folder, output = float(sys.argv[1]), sys.argv[2], sys.argv[3]
torch.manual_seed(0)
codec = SoundStream(SoundStreamConfig(
    name="thin", decoder_dims=(8, 8), decoder_blocks=(1, 1), expansion=1, mel_hidden=8, n_quantizers=2, latent_dim=4,
    encoder_dims=(8, 8), encoder_blocks=(1, 1), sample_rate=2000, hop_length=40, decoder_n_fft=60, encoder_n_fft=64,
    mel={"sample_rate": 2000, "hop_length": 20, "n_mels": 8},
)).requires_grad_(False).eval()
codes = np.random.default_rng(0).integers(0, 1024, (2, 3000))
num_frames = int(hours * 180_000)
with TokenWriter(folder + "/x.ctok", codec.spec) as writer:
    writer.begin("x")
    for start in range(0, num_frames, 3000):
        writer.append(codes[:, : num_frames - start])
    writer.end(num_frames * 40)
    writer.add("short", codes, num_samples=3000 * 40)
store = TokenStore(folder + "/x.ctok")


def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


samples = []
finished = threading.Event()


def watch():
    while not finished.wait(0.01):
        samples.append(rss())


thread = threading.Thread(target=watch)
before = rss()
thread.start()
report = decode_store(codec, store, folder + "/out", output)
finished.set()
thread.join()
assert report.num_items == 2 and not report.failures, report
print(max(samples) - before)
"""


def peak(tmp_path, hours, output):
    folder = tmp_path / f"{hours} {output}"
    folder.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_TRIM_THRESHOLD_": "65536"}
    result = subprocess.run(
        [sys.executable, "-c", LONG, str(hours), str(folder), output],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return int(result.stdout), folder


def test_ten_hours_stream_to_disk_in_bounded_memory(tmp_path):
    """Peak memory of ten hours is that of one: the wave alone would be 288 MB."""
    one, _ = peak(tmp_path, 1, "wave")
    ten, folder = peak(tmp_path, 10, "wave")
    assert soundfile.info(folder / "out" / "x.wav").frames == 10 * 3600 * 2000
    assert ten - one < 32e6, f"one hour {one / 1e6:.0f} MB, ten hours {ten / 1e6:.0f} MB"
    # Repetition shows: away from its ends, every minute is the same.
    first, later = (
        read_audio(folder / "out" / "x.wav", start_sample=m * 60 * 2000, num_samples=2000)[0] for m in (1, 555)
    )
    assert first.abs().max() > 0
    torch.testing.assert_close(first, later, atol=1 / 32768, rtol=0)
