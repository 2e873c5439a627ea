import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codec.audio import (
    batch,
    default_threads,
    read_audio,
    read_audio_batch,
    recommended_threads,
    submit_audio_batch,
    threads,
    write_audio,
)
from codec.errors import AudioFileError, InputError

NAMES = ["a.wav", "b.flac", "c.ogg", "d.mp3", "e.opus", "long.wav"]


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batch")
    random = torch.Generator().manual_seed(0)
    for index, name in enumerate(NAMES):
        num_samples = 60000 if name == "long.wav" else 9000 + 777 * index
        write_audio(folder / name, torch.rand(2, num_samples, generator=random) - 0.5, 16000)
    (folder / "bad.wav").write_bytes(b"nothing at all")
    return folder


@pytest.mark.parametrize("layout", ["padded", "jagged", "list"])
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rows_are_what_read_audio_gives(files, layout, data):
    options = {
        "sample_rate": data.draw(st.sampled_from([None, 16000, 8000])),
        "mono": data.draw(st.booleans()),
        "dtype": data.draw(st.sampled_from([torch.float32, torch.int16, torch.bfloat16])),
    }
    excerpts = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([files / name for name in NAMES]),
                st.integers(0, 3000),
                st.integers(1, 1400) | st.none(),
            ),
            min_size=1,
            max_size=7,
        )
    )
    result = read_audio_batch(excerpts, num_threads=data.draw(st.integers(1, 3)), layout=layout, **options)
    expected = [read_audio(p, start_sample=s, num_samples=n, **options)[0] for p, s, n in excerpts]
    assert result.lengths.tolist() == [wave.shape[1] for wave in expected]
    assert result.sample_rates.tolist() == [options["sample_rate"] or 16000] * len(excerpts)
    assert result.errors == {}
    if layout == "padded":
        assert result.wave.shape == (len(excerpts), expected[0].shape[0], max(result.lengths))
        for row, length in zip(result.wave, result.lengths, strict=True):
            assert not row[:, length:].any()
        rows = [row[:, :length] for row, length in zip(result.wave, result.lengths, strict=True)]
    else:
        rows = result.wave.unbind() if layout == "jagged" else result.wave
        assert layout == "list" or result.wave.layout == torch.jagged
    assert all(torch.equal(row, wave) for row, wave in zip(rows, expected, strict=True))


def test_out_is_filled_in_place(files):
    out = torch.full((3, 2, 2000), 9.0)
    excerpts = [(files / "a.wav", 0, 2000), (files / "b.flac", 5, 100), (files / "d.mp3", 7, None)]
    with pytest.raises(InputError, match=r"row 2 .*d.mp3\) has 11324 samples, out ends at 2000; make it larger"):
        read_audio_batch(excerpts, out=out)
    excerpts[2] = (files / "bad.wav", 0, 5)
    result = read_audio_batch(excerpts, out=out, errors="return")
    assert result.wave is out
    assert torch.equal(out[1, :, :100], read_audio(files / "b.flac", start_sample=5, num_samples=100)[0])
    assert not out[1, :, 100:].any()
    assert not out[2].any()


def test_errors_are_raised_or_returned(files):
    excerpts = [(files / "a.wav", 0, 10), (files / "bad.wav", 0, 10), (files / "b.flac", 10**6, 10), ("gone", 0, 1)]
    with pytest.raises(AudioFileError, match=r"bad.wav: is no audio file"):
        read_audio_batch(excerpts, num_threads=1)
    for layout in ("padded", "jagged", "list"):
        result = read_audio_batch(excerpts, errors="return", layout=layout)
        assert list(result.errors) == [1, 2, 3]
        assert isinstance(result.errors[2], InputError)
        assert result.lengths.tolist() == [10, 0, 0, 0]
        assert result.sample_rates.tolist() == [16000, 0, 0, 0]
        first = result.wave[0] if layout != "jagged" else result.wave.unbind()[0]
        assert torch.equal(first, read_audio(files / "a.wav", num_samples=10)[0])
    alone = read_audio_batch(excerpts[3:], errors="return")
    assert (alone.lengths.tolist(), list(alone.errors)) == ([0], [0])


def test_an_unexpected_error_reaches_the_caller(files, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("no room")

    monkeypatch.setattr(batch, "read_audio", fail)
    with pytest.raises(MemoryError, match="no room"):
        read_audio_batch([(files / "a.wav", 0, 10)] * 5, errors="return")


def test_channels_that_differ(files, tmp_path):
    write_audio(tmp_path / "mono.wav", torch.zeros(100), 16000)
    excerpts = [(files / "a.wav", 0, 10), (tmp_path / "mono.wav", 0, 10)]
    for layout in ("padded", "jagged"):
        with pytest.raises(InputError, match=r"row 1 .*mono.wav\) has 1 channels, the batch 2; .*mono=True"):
            read_audio_batch(excerpts, layout=layout)
    assert [len(wave) for wave in read_audio_batch(excerpts, layout="list").wave] == [2, 1]
    assert read_audio_batch(excerpts, mono=True).wave.shape == (2, 1, 10)


@pytest.mark.parametrize(
    ("excerpts", "options", "message"),
    [
        ([], {}, "list of excerpts is empty"),
        ([("x", 1)], {}, r"excerpt \('x', 1\) must be \(path, start_sample, num_samples\)"),
        ([("x", -1, 5)], {}, "start_sample is -1"),
        ([("x", 0, 0)], {}, "num_samples is 0"),
        ([("x", 0, 5)], {"layout": "wide"}, "layout is 'wide'; it must be one of padded, jagged, list"),
        ([("x", 0, 5)], {"errors": "ignore"}, "errors is 'ignore'; it must be raise or return"),
        ([("x", 0, 5)], {"num_threads": -1}, "num_threads is -1; it must be an integer of 1"),
        ([("x", 0, 5)], {"dtype": torch.int32}, "dtype is torch.int32"),
        ([("x", 0, 5)], {"out": torch.zeros(2, 1, 5)}, r"out is \[2, 1, 5\] on cpu; it must be \[1, C, N\]"),
        ([("x", 0, 5)], {"out": torch.zeros(1, 1, 5).half()}, "out has dtype torch.float16, asked for is"),
        ([("x", 0, 5)], {"out": torch.zeros(1, 1, 5), "layout": "list"}, "out is given with layout 'list'"),
    ],
)
def test_bad_arguments(excerpts, options, message):
    with pytest.raises(InputError, match=message):
        read_audio_batch(excerpts, **options)
    with pytest.raises(InputError, match=message):
        submit_audio_batch(excerpts, **options)


def test_unknown_options_of_submit():
    with pytest.raises(InputError, match="unknown options threads; there are num_threads"):
        submit_audio_batch([("x", 0, 5)], threads=3)


def test_the_background_gives_the_same(files):
    excerpts = [(files / name, 100, 500) for name in NAMES]
    futures = [submit_audio_batch(excerpts, num_threads=2) for _ in range(20)]
    expected = read_audio_batch(excerpts).wave
    assert all(torch.equal(future.result(30).wave, expected) for future in futures)
    with pytest.raises(AudioFileError, match=r"bad\.wav"):
        submit_audio_batch([(files / "bad.wav", 0, 5)]).result(30)


def test_a_callback_may_read_more(files):
    excerpts = [(files / "b.flac", 5, 100)]
    more, done = [], threading.Event()

    def read_more(_):
        more.append(read_audio_batch(excerpts, num_threads=1))
        more.extend(submit_audio_batch(excerpts, num_threads=1) for _ in range(20))
        done.set()

    submit_audio_batch(excerpts, num_threads=1).add_done_callback(read_more)
    assert done.wait(30)
    expected = read_audio(files / "b.flac", start_sample=5, num_samples=100)[0]
    assert torch.equal(more[0].wave[0], expected)
    assert all(torch.equal(future.result(30).wave[0], expected) for future in more[1:])


@pytest.fixture
def gate(monkeypatch):
    """Reading waits until the gate is open; counts the reads that are under way."""
    opened, running = threading.Event(), []

    def read(*_, **__):
        running.append(threading.get_ident())
        assert opened.wait(30)
        return torch.zeros(1, 5), 16000

    monkeypatch.setattr(batch, "read_audio", read)
    yield opened, running
    opened.set()


def test_the_background_is_bounded(gate):
    opened, running = gate
    futures = []

    def submit_many():
        futures.extend(submit_audio_batch([("x", 0, 5)], num_threads=2) for _ in range(12))

    thread = threading.Thread(target=submit_many)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    assert len(running) == 2
    opened.set()
    thread.join(30)
    assert len([future.result(30) for future in futures]) == 12


def test_a_batch_that_has_not_begun_can_be_cancelled(gate):
    opened, running = gate
    first = submit_audio_batch([("x", 0, 5)], num_threads=1)
    second = submit_audio_batch([("x", 0, 5)], num_threads=1)
    assert second.cancel()
    opened.set()
    assert first.result(30).lengths.tolist() == [5]
    with pytest.raises(CancelledError):
        second.result(30)
    assert len(running) == 1


def test_the_first_error_stops_the_rest(files, monkeypatch):
    seen = []

    def read(source, **_):
        seen.append(source)
        raise AudioFileError(f"{source}: broken")

    monkeypatch.setattr(batch, "read_audio", read)
    with pytest.raises(AudioFileError, match="0: broken"):
        read_audio_batch([(str(index), 0, 5) for index in range(100)], num_threads=1)
    assert seen == ["0"]


def test_pool_threads_leave_torch_alone():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert threads.submit("fresh", 1, torch.get_num_threads).result(30) == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


class SlowFile:
    """A remote file whose every read takes a while."""

    def __init__(self, file):
        self.file = file

    def read(self, size=-1):
        time.sleep(0.02)
        return self.file.read(size)

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_waiting_for_the_network_does_not_hold_a_decoding_thread(files, monkeypatch):
    from codec.audio import opening

    waits, most = [], []

    class Counted(SlowFile):
        def read(self, size=-1):
            waits.append(1)
            most.append(len(waits))
            try:
                return super().read(size)
            finally:
                waits.pop()

    for index in range(12):
        with fsspec.open(f"memory://slow{index}.flac", "wb") as file:
            file.write((files / "b.flac").read_bytes())
    real = opening.open_url
    monkeypatch.setattr(opening, "open_url", lambda url: Counted(real(url)))
    excerpts = [(f"memory://slow{index}.flac", 10, 1000) for index in range(12)]
    result = read_audio_batch(excerpts, num_threads=1, io_threads=6)
    assert max(most) > 3
    expected = read_audio(files / "b.flac", start_sample=10, num_samples=1000)[0]
    assert all(torch.equal(row, expected) for row in result.wave)
    most.clear()
    read_audio_batch(excerpts, num_threads=1, io_threads=1)
    assert max(most) == 1


def test_default_threads_are_shared_with_workers_and_ranks(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert default_threads() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_threads() == 4
    monkeypatch.setattr(threads, "get_worker_info", lambda: type("Info", (), {"num_workers": 3}))
    assert default_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert default_threads() == 5


def test_usable_cores_respect_affinity_and_quota(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(threads, "_CGROUP_LIMIT", tmp_path / "cpu.max")
    assert threads.usable_cores() == 8
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    assert threads.usable_cores() == 3
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert threads.usable_cores() == 8


def test_recommended_threads(monkeypatch):
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    text = recommended_threads(num_workers=3, ranks=2)
    assert "16 cores here, 2 ranks with 3 DataLoader workers each" in text
    assert "num_threads=2) in each of the 6 processes" in text
    assert "OMP_NUM_THREADS=5 torchrun --nproc-per-node=2" in text
    assert "7 workers each, or fewer" in recommended_threads(num_workers=12, ranks=2)
    with pytest.raises(InputError, match="ranks is 0"):
        recommended_threads(ranks=0)


LOADER = """
import sys, torch
from torch.utils.data import DataLoader
from codec.audio import read_audio_batch, threads

path = sys.argv[1]

class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        batch = read_audio_batch([(path, 100 * index, 50), (path, 7, 50)])
        return batch.wave, threads.default_threads(), len(threads._pools)

threads.usable_cores = lambda: 8
read_audio_batch([(path, 0, 5)])
for wave, default, pools in DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context="fork"):
    print(float(wave.sum()), default, pools)
"""


def test_in_the_workers_of_a_loader(files):
    path = str(files / "a.wav")
    result = subprocess.run(
        [sys.executable, "-c", LOADER, path], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1]
    )
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [line[1:] for line in lines] == [["4", "1"]] * 4
    for index, line in enumerate(lines):
        expected = sum(float(read_audio(path, start_sample=s, num_samples=50)[0].sum()) for s in (100 * index, 7))
        assert np.isclose(float(line[0]), expected, atol=1e-4)
