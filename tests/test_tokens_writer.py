"""The writer's life: streaming, resuming, kill -9 at any moment, two writers, a full disk."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_tokens import make_spec, random_codes

from codec.errors import InputError, TokenFileError
from codec.tokens import TokenStore, TokenWriter, merge
from codec.tokens.files import claim

SPEC = make_spec(4, 512)
ITEMS = {f"item {n}": random_codes(SPEC, n, n) for n in (3, 256, 700, 20, 300)}


def unfinished(path: Path) -> Path:
    return Path(f"{path}.unfinished")


def write(path: Path, *, stop_after: int | None = None, **options: bool) -> None:
    """All items, or so many and then an exception."""
    with TokenWriter(path, SPEC, **options) as writer:
        for i, (key, codes) in enumerate(ITEMS.items()):
            if i == stop_after:
                raise KeyboardInterrupt
            if key not in writer:
                writer.add(key, codes, num_samples=codes.shape[1] * 320, gain=0.5, meta={"n": i})
        if stop_after == len(ITEMS):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("writer") / "a.ctok"
    write(path)
    return path.read_bytes()


# --- streaming


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 700), max_size=8))
def test_streamed_item_is_the_added_one(
    tmp_path_factory: pytest.TempPathFactory, undisturbed: bytes, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("stream") / "a.ctok"
    with TokenWriter(path, SPEC) as writer:
        for i, (key, codes) in enumerate(ITEMS.items()):
            n = codes.shape[1]
            edges = sorted({0, n, *(cut for cut in cuts if cut < n)})
            writer.begin(key, gain=0.5, meta={"n": i})
            for a, b in pairwise(edges):
                writer.append(codes[:, a:b].astype(np.uint16))
            writer.append(codes[:, :0])
            writer.end(n * 320)
    assert path.read_bytes() == undisturbed


def test_cancelled_item_leaves_no_trace(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    with TokenWriter(path, SPEC) as writer:
        for i, (key, codes) in enumerate(ITEMS.items()):
            writer.begin(f"bad {key}", meta={"bad": True})
            writer.append(ITEMS["item 700"])
            writer.cancel()
            writer.add(key, codes, num_samples=codes.shape[1] * 320, gain=0.5, meta={"n": i})
    assert path.read_bytes() == undisturbed


def test_streaming_misuse(tmp_path: Path) -> None:
    codes = ITEMS["item 300"]
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        for call in (lambda: writer.append(codes), lambda: writer.end(5), writer.cancel):
            with pytest.raises(InputError, match=r"\(\) without an item; begin\(\) one first"):
                call()
        writer.begin("x")
        for call in (
            lambda: writer.begin("y"),
            lambda: writer.add("y", codes, num_samples=300 * 320),
            writer.close,
        ):
            with pytest.raises(InputError, match=r"item 'x' is still open; end\(\) or cancel\(\) it first"):
                call()
        with pytest.raises(InputError, match="num_samples is 1; 0 frames of 320 samples fit no item"):
            writer.end(1)
        writer.append(codes)
        with pytest.raises(InputError, match="code 512"):
            writer.append(np.full((4, 2), 512))
        with pytest.raises(InputError, match="300 frames of 320 samples fit 95681 to 96000 samples"):
            writer.end(96001)
        writer.end(96000)
    np.testing.assert_array_equal(TokenStore(tmp_path / "a.ctok").read("x"), codes)


# --- one writer, one file


def test_existing_paths_are_kept(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    write(path)
    with pytest.raises(InputError, match=r"a\.ctok: exists; give another path, or resume=True"):
        TokenWriter(path, SPEC)
    with pytest.raises(InputError, match="give one of them"):
        TokenWriter(path, SPEC, resume=True, force=True)
    assert path.read_bytes() == undisturbed
    assert not unfinished(path).exists()
    with TokenWriter(path, SPEC, force=True) as writer:
        assert path.read_bytes() == undisturbed  # until the new one is whole
        writer.add("other", ITEMS["item 3"], num_samples=3 * 320)
    assert list(TokenStore(path).keys()) == ["other"]


def test_second_writer_is_refused(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    with TokenWriter(path, SPEC) as writer:
        for options in ({}, {"resume": True}, {"force": True}):
            with pytest.raises(TokenFileError, match="another writer holds this shard; give each"):
                TokenWriter(path, SPEC, **options)
        for i, (key, codes) in enumerate(ITEMS.items()):
            writer.add(key, codes, num_samples=codes.shape[1] * 320, gain=0.5, meta={"n": i})
    assert path.read_bytes() == undisturbed
    assert os.listdir(tmp_path) == ["a.ctok"]


def test_two_writers_that_resume_a_finished_shard(tmp_path: Path) -> None:
    path = tmp_path / "a.ctok"
    write(path)
    first, second = (TokenWriter(path, SPEC, resume=True) for _ in range(2))
    first.add("more", ITEMS["item 3"], num_samples=960)
    with pytest.raises(TokenFileError, match="another writer holds this shard"):
        second.add("more", ITEMS["item 3"], num_samples=960)
    first.close()
    assert list(TokenStore(path).keys()) == [*ITEMS, "more"]


def test_faster_writer_is_not_overwritten(tmp_path: Path) -> None:
    """Another process makes the file while this one prepares its own."""
    path = tmp_path / "a"

    def make(whole: str) -> None:
        path.write_text("another's")
        Path(whole).write_text("mine")

    fd, new = claim(str(path), make)
    os.close(fd)
    assert not new
    assert path.read_text() == "another's"
    assert os.listdir(tmp_path) == ["a"]


def test_closed_writer(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "a.ctok", SPEC)
    writer.close()
    writer.close()
    with pytest.raises(InputError, match="this writer is closed; open another with resume=True"):
        writer.add("x", ITEMS["item 3"], num_samples=960)
    assert len(TokenStore(tmp_path / "a.ctok")) == 0


# --- resuming


@pytest.mark.parametrize("stop_after", range(6))
def test_exception_then_resume(tmp_path: Path, undisturbed: bytes, stop_after: int) -> None:
    path = tmp_path / "a.ctok"
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=stop_after)
    assert not path.exists()
    for opened, text in (
        (path, r"its writer didn't finish: complete it with TokenWriter\(resume=True\)"),
        (tmp_path, r"complete a\.ctok\.unfinished with TokenWriter\(resume=True\)"),
        (unfinished(path), r"TokenWriter\(resume=True\)"),
    ):
        with pytest.raises(TokenFileError, match=text):
            TokenStore(opened)
    with pytest.raises(InputError, match="an unfinished shard is here; complete it with resume=True"):
        TokenWriter(path, SPEC)
    with TokenWriter(path, SPEC, resume=True) as writer:
        assert list(writer.keys()) == list(ITEMS)[:stop_after]
        assert len(writer) == stop_after
        writer.abandon()
    write(path, resume=True)
    assert path.read_bytes() == undisturbed
    assert os.listdir(tmp_path) == ["a.ctok"]


def test_resume_from_every_torn_length(tmp_path: Path, undisturbed: bytes) -> None:
    """A file cut anywhere, followed by junk or not, resumes to the undisturbed bytes."""
    path = tmp_path / "a.ctok"
    header = 24 + int.from_bytes(undisturbed[12:16], "little")
    path.write_bytes(undisturbed)
    with TokenStore(path) as store:
        shard = store._shards[0]
        edges = [edge for item in range(len(store)) for edge in range(*shard.span(item), shard.layout.block_stride)]
        edges += [shard.span(item)[1] for item in range(len(store))]
    for size in [*range(header, len(undisturbed), 61), *edges, len(undisturbed)]:
        path.unlink(missing_ok=True)
        unfinished(path).write_bytes(undisturbed[:size] + b"\x01junk" * (size % 3))
        write(path, resume=True)
        assert path.read_bytes() == undisturbed, size


def test_resume_cuts_at_a_damaged_block(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    damaged = bytearray(undisturbed)
    damaged[len(damaged) // 2] ^= 1
    unfinished(path).write_bytes(damaged)
    with TokenWriter(path, SPEC, resume=True) as writer:
        assert list(writer.keys()) == list(ITEMS)[:2]
        writer.abandon()
    write(path, resume=True)
    assert path.read_bytes() == undisturbed


def test_resume_of_a_finished_shard(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    write(path)
    before = path.stat()
    write(path, resume=True)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    reader = TokenStore(path)
    with TokenWriter(path, SPEC, resume=True) as writer:
        with pytest.raises(InputError, match="'item 3': this key is in"):
            writer.add("item 3", ITEMS["item 3"], num_samples=960)
        assert not unfinished(path).exists()
        writer.add("more", ITEMS["item 3"], num_samples=960)
        np.testing.assert_array_equal(reader.read("item 700"), ITEMS["item 700"])  # still the file that it opened
    np.testing.assert_array_equal(reader.read("item 700"), ITEMS["item 700"])
    assert list(TokenStore(path).keys()) == [*ITEMS, "more"]
    assert not list(TokenStore(path).verify())
    reader.close()
    with pytest.raises(TokenFileError, match="has changed since this store was opened; open the store again"):
        reader.read("item 700")


def test_resume_with_another_codec(tmp_path: Path) -> None:
    path = tmp_path / "a.ctok"
    with pytest.raises(KeyboardInterrupt):
        write(path, stop_after=2)
    before = unfinished(path).read_bytes()
    with pytest.raises(TokenFileError, match=r"differs from the writer's codec in weights_hash \('c0ffee', not 'x'\)"):
        TokenWriter(path, make_spec(4, 512, weights_hash="x"), resume=True)
    with pytest.raises(TokenFileError, match=r"n_quantizers stored \(4, not 2\)"):
        TokenWriter(path, SPEC, n_quantizers=2, resume=True)
    assert unfinished(path).read_bytes() == before
    unfinished(path).write_bytes(b"something else altogether")
    with pytest.raises(TokenFileError, match="magic is"):
        TokenWriter(path, SPEC, resume=True)
    assert unfinished(path).read_bytes() == b"something else altogether"
    write(path, force=True)
    assert len(TokenStore(path)) == 5


# --- copying


def test_copy_refuses_damage_and_other_codecs(tmp_path: Path, undisturbed: bytes) -> None:
    source = tmp_path / "source.ctok"
    damaged = bytearray(undisturbed)
    damaged[len(damaged) // 2] ^= 1
    source.write_bytes(damaged)
    with pytest.raises(TokenFileError, match="block 1 of item 'item 700' isn't what was written"):
        merge(source, tmp_path / "a.ctok")
    text = r"in name \('test_16k', not 'new'\); decode and encode it"
    with (
        TokenStore(source) as store,
        TokenWriter(tmp_path / "b.ctok", make_spec(4, 512, name="new")) as writer,
        pytest.raises(TokenFileError, match=text),
    ):
        writer.copy(store, "item 3")
    source.write_bytes(undisturbed)
    merge(source, tmp_path / "a.ctok", resume=True)
    assert (tmp_path / "a.ctok").read_bytes() == undisturbed


# --- death

DRIVER = """
import os, random, shutil, signal, sys, time
import numpy as np
from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter

folder, mode, count, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
spec = CodecSpec("kill", "0", 16000, 320, 1, 4, 512, (0, 0), (0, 0))
rng = np.random.default_rng(seed)
lengths = rng.integers(1, 900, 6 if mode == "calls" else 60)
lengths[1] = 1  # streamed, and whole after its first block
items = {f"item {i}": rng.integers(0, 512, (4, n)) for i, n in enumerate(lengths)}
path = os.path.join(folder, "a.ctok")

def write():
    with TokenWriter(path, spec, resume=True) as writer:
        for i, (key, codes) in enumerate(items.items()):
            if key in writer:
                continue
            if i % 3 == 1:
                writer.begin(key, meta={"i": i})
                for t in range(0, codes.shape[1], 100):
                    writer.append(codes[:, t : t + 100])
                writer.end(codes.shape[1] * 320)
            else:
                writer.add(key, codes, num_samples=codes.shape[1] * 320, meta={"i": i})

def child(before):
    pid = os.fork()
    if not pid:
        try:
            before()
            write()
        finally:
            os._exit(0)
    return pid

def check():
    write()
    with open(path, "rb") as file:
        assert file.read() == truth, "differs from the undisturbed file"
    shutil.rmtree(folder)
    os.mkdir(folder)

start = time.perf_counter()
write()
seconds = time.perf_counter() - start
truth = open(path, "rb").read()
check()

if mode == "times":
    moments, kills, finished = random.Random(seed), 0, 0
    for _ in range(count):
        deaths = 0
        while not os.path.exists(path):  # killed again and again until one gets through
            pid = child(lambda: None)
            if deaths < 5:
                time.sleep(moments.uniform(0, 1.2 * seconds))
                os.kill(pid, signal.SIGKILL)
                kills += os.waitpid(pid, 0)[1] == signal.SIGKILL
                deaths += 1
            else:
                os.waitpid(pid, 0)
        check()
    print(count, "files,", kills, "kills")
else:
    # Die in the n-th call that changes the disk: before it, half-way through it, or after it.
    def die_in(n, part):
        calls = 0
        def wrap(name):
            real = getattr(os, name)
            def call(*args, **options):
                nonlocal calls
                calls += 1
                if calls < n:
                    return real(*args, **options)
                if part == "half" and name == "pwrite":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2], args[2])
                elif part == "after":
                    real(*args, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            setattr(os, name, call)
        for name in ("pwrite", "ftruncate", "fsync", "rename", "link", "unlink"):
            wrap(name)
    n, kills = 1, 0
    while True:
        survived = False
        for part in ("before", "half", "after"):
            killed = os.waitpid(child(lambda: die_in(n, part)), 0)[1] == signal.SIGKILL
            kills += killed
            survived |= not killed
            check()
        if survived:
            break
        n += 1
    print(n - 1, "calls,", kills, "kills")
"""


def run_driver(folder: Path, mode: str, count: int = 0, seed: int = 0) -> str:
    (folder / "work").mkdir()
    command = [sys.executable, "-c", DRIVER, str(folder / "work"), mode, str(count), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kill_at_random_moments_then_resume(tmp_path: Path) -> None:
    output = run_driver(tmp_path, "times", count=int(os.environ.get("CODEC_KILLS", "20")))
    files, kills = (int(word) for word in output.split() if word.isdigit())
    assert kills >= files / 2, output


def test_kill_in_every_call_that_changes_the_disk(tmp_path: Path) -> None:
    output = run_driver(tmp_path, "calls")
    calls, kills = (int(word) for word in output.split() if word.isdigit())
    assert calls > 20, output
    assert kills == 3 * calls, output


# --- a full disk


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("stream", [False, True])
def test_full_disk(tmp_path: Path, undisturbed: bytes, stream: bool) -> None:
    def add(writer: TokenWriter, key: str, codes: np.ndarray, meta: dict[str, int]) -> None:
        if stream:
            writer.begin(key, gain=0.5, meta=meta)
            writer.append(codes)
            writer.end(codes.shape[1] * 320)
        else:
            writer.add(key, codes, num_samples=codes.shape[1] * 320, gain=0.5, meta=meta)

    path = tmp_path / "a.ctok"
    with TokenWriter(path, SPEC) as writer:
        for i, (key, codes) in enumerate(ITEMS.items()):
            meta = {"n": i}
            if key == "item 700":
                size = unfinished(path).stat().st_size
                text = rf"at byte {size + 1000}: can't write .* \(File too large\); its 2 whole items are safe"
                with file_size_limit(size + 1000), pytest.raises(TokenFileError, match=text):
                    add(writer, key, codes, meta)
                assert unfinished(path).stat().st_size == size
            add(writer, key, codes, meta)  # there is room again
    assert path.read_bytes() == undisturbed


def test_disk_full_at_close_and_at_the_start(tmp_path: Path, undisturbed: bytes) -> None:
    path = tmp_path / "a.ctok"
    with file_size_limit(100), pytest.raises(TokenFileError, match=r"can't be written \(File too large\)"):
        TokenWriter(path, SPEC)
    assert not list(tmp_path.iterdir())
    with (
        file_size_limit(len(undisturbed) - 60),
        pytest.raises(TokenFileError, match="go on with resume=True"),
    ):
        write(path)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ctok.unfinished"]
    with TokenWriter(path, SPEC, resume=True) as writer:
        assert list(writer.keys()) == list(ITEMS)
    assert path.read_bytes() == undisturbed


PAGE = 4096


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 pages."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={64 * PAGE}", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@contextmanager
def pages_left(disk: Path, pages: int) -> Iterator[None]:
    """Fill the disk but for so many pages."""
    ballast = disk / "ballast"
    system = os.statvfs(disk)
    ballast.write_bytes(bytes((system.f_bavail - pages) * system.f_frsize))
    try:
        yield
    finally:
        ballast.unlink()


def test_small_disk(small_disk: Path, undisturbed: bytes) -> None:
    """However much room there is, an error, and nothing of what was written before is lost."""
    path = small_disk / "a.ctok"
    full = -(-len(undisturbed) // PAGE)
    path.write_bytes(undisturbed)
    with TokenStore(path) as store:
        ends = [store._shards[0].span(item)[1] for item in range(len(store))]
    path.unlink()
    for pages in range(full + 1):
        with pages_left(small_disk, pages):
            if pages < full:
                with pytest.raises(TokenFileError, match=r"No space left on device.*(; make room|; check the folder)"):
                    write(path)
            else:
                write(path)
        if pages and pages < full:
            with TokenWriter(path, SPEC, resume=True) as writer:
                kept = list(writer.keys())
                writer.abandon()
            assert kept == list(ITEMS)[: sum(end <= pages * PAGE for end in ends)]
            assert unfinished(path).read_bytes() == undisturbed[: unfinished(path).stat().st_size]
        write(path, resume=True)
        assert path.read_bytes() == undisturbed
        path.unlink()
        assert not list(small_disk.iterdir())


def test_small_disk_when_a_finished_shard_goes_on(small_disk: Path, undisturbed: bytes) -> None:
    path = small_disk / "a.ctok"
    write(path)
    codes = ITEMS["item 3"]
    with TokenWriter(path, SPEC, resume=True) as writer:
        for pages in (0, 1):
            text = r"can't be written \(No space left on device\); check the folder and its disk"
            with pages_left(small_disk, pages), pytest.raises(TokenFileError, match=text):
                writer.add("more", codes, num_samples=960)
            assert [file.name for file in small_disk.iterdir()] == ["a.ctok"]
            assert path.read_bytes() == undisturbed
        writer.add("more", codes, num_samples=960)
    assert list(TokenStore(path).keys()) == [*ITEMS, "more"]
