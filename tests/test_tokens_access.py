"""Where stores are read from: other processes, memory, HTTP."""

import http.server
import multiprocessing
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from test_tokens import make_spec, random_codes

from codec.errors import InputError, TokenFileError
from codec.tokens import TokenStore, TokenWriter

SPEC = make_spec(4, 512)
ITEMS = {f"item {n}": random_codes(SPEC, n, n) for n in (3, 256, 700, 20, 3000)}
EXCERPTS = [("item 700", 250, 300), ("item 3", 0, 3), ("item 3000", 1030, 400), ("item 3000", 2999, 1)]


def write(path: Path, keys: list[str]) -> None:
    with TokenWriter(path, SPEC) as writer:
        for key in keys:
            writer.add(key, ITEMS[key], num_samples=ITEMS[key].shape[1] * 320, gain=2, meta={"key": key})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("access")
    write(path / "a.ctok", list(ITEMS)[:3])
    write(path / "b.ctok", list(ITEMS)[3:])
    return path


def check(store: TokenStore) -> None:
    assert list(store.keys()) == list(ITEMS)
    assert store.meta_column("key").tolist() == list(ITEMS)
    for key, codes in ITEMS.items():
        np.testing.assert_array_equal(store.read(key), codes)
        assert store.info(key).meta == {"key": key}
    for n_quantizers in (None, 2):
        rows, _ = store.read_batch(EXCERPTS, n_quantizers).unpack()
        for row, (key, start, length) in zip(rows, EXCERPTS, strict=True):
            np.testing.assert_array_equal(row[:, :length], ITEMS[key][:n_quantizers, start : start + length])
    assert not list(store.verify())


# --- processes


def test_pickled_and_closed_stores_open_again(folder: Path) -> None:
    store = TokenStore(folder)
    copy = pickle.loads(pickle.dumps(store))
    assert len(pickle.dumps(store)) < 1000
    check(copy)
    store.close()
    check(store)
    check(pickle.loads(pickle.dumps(copy)))


def test_pickled_store_of_a_changed_file(tmp_path: Path) -> None:
    write(tmp_path / "a.ctok", list(ITEMS))
    data = pickle.dumps(TokenStore(tmp_path))
    with TokenWriter(tmp_path / "a.ctok", SPEC, force=True) as writer:
        writer.add("item 3", ITEMS["item 3"][:, ::-1], num_samples=960)
    with pytest.raises(TokenFileError, match=r"a\.ctok: has changed since this store was opened"):
        len(pickle.loads(data))


def _check_in_child(store: TokenStore, answers: "multiprocessing.Queue[str]") -> None:
    try:
        check(store)
        answers.put("ok")
    except BaseException as error:
        answers.put(repr(error))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_other_processes(folder: Path, method: str) -> None:
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_check_in_child, args=(TokenStore(folder), answers))
    child.start()
    assert answers.get(timeout=60) == "ok"
    child.join()


def test_reading_does_not_grow_the_process(tmp_path: Path) -> None:
    """Private memory stays flat while a worker reads 20,000 excerpts (the mapped file is shared)."""
    codes = random_codes(SPEC, 300)
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        for i in range(5000):
            writer.add(str(i), codes, num_samples=300 * 320)
    code = """
import sys
from codec.tokens import TokenStore
private = lambda: int(open("/proc/self/status").read().split("RssAnon:")[1].split()[0])
store = TokenStore(sys.argv[1])
for round in range(4):
    for i in range(0, 5000, 50):
        store.read_batch([(str(j), 7, 250) for j in range(i, i + 50)]).unpack()
    if round == 0:
        before = private()
print(private() - before)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1024, f"grew by {done.stdout} kB"


def test_opening_makes_no_object_per_item(tmp_path: Path) -> None:
    codes = random_codes(SPEC, 1)
    with TokenWriter(tmp_path / "a.ctok", SPEC) as writer:
        for i in range(20_000):
            writer.add(f"speaker/{i}", codes, num_samples=1)
    code = """
import sys, tracemalloc
from codec.tokens import TokenStore
tracemalloc.start()
store = TokenStore(sys.argv[1])
print(tracemalloc.get_traced_memory()[0])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200_000


CUT_WHILE_OPEN = """
import os, sys
from codec.errors import TokenFileError
from codec.tokens import TokenStore

folder, size = sys.argv[1], int(sys.argv[2])
calls = {
    "read": lambda store: store.read("item 700"),
    "read_batch": lambda store: store.read_batch([("item 700", 250, 300)]),
    "in": lambda store: "item 700" in store,
    "info": lambda store: store.info("item 700"),
    "keys": lambda store: list(store.keys()),
    "key": lambda store: store.keys()[2],
    "num_samples": lambda store: store.num_samples,
    "meta_column": lambda store: store.meta_column("key"),
    "verify": lambda store: list(store.verify()),
}
stores = {name: TokenStore(folder) for name in calls}
os.truncate(os.path.join(folder, "a.ctok"), size)
for name, call in calls.items():
    try:
        print("nothing noticed by", name, call(stores[name]))
    except TokenFileError as error:
        assert "a.ctok: has " + str(size) + " bytes, " in str(error), error
        assert "rename it, and open it again" in str(error), error
print("alive")
"""


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("size", [0, 100])
def test_file_cut_while_it_is_open(tmp_path: Path, shards: int, size: int) -> None:
    """To touch a mapped page that the file lost would kill the process (SIGBUS)."""
    if shards == 1:
        write(tmp_path / "a.ctok", list(ITEMS))
    else:
        write(tmp_path / "a.ctok", list(ITEMS)[:4])
        write(tmp_path / "b.ctok", list(ITEMS)[4:])
    command = [sys.executable, "-c", CUT_WHILE_OPEN, str(tmp_path), str(size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


# --- remote


@pytest.fixture
def memory(folder: Path) -> Iterator[str]:
    system = fsspec.filesystem("memory")
    for path in folder.iterdir():
        system.pipe_file(f"/corpus/{path.name}", path.read_bytes())
    yield "memory://corpus"
    system.rm("/corpus", recursive=True)


def test_memory_store(memory: str, tmp_path: Path) -> None:
    check(TokenStore(memory))
    check(TokenStore([f"{memory}/a.ctok", f"{memory}/b.ctok"]))
    check(pickle.loads(pickle.dumps(TokenStore(memory))))
    with pytest.raises(TokenFileError, match=r"memory://nowhere/a\.ctok: can't be opened .*; check the URL"):
        TokenStore("memory://nowhere/a.ctok")
    fsspec.filesystem("memory").pipe_file("/corpus/c.ctok", b"")
    with pytest.raises(TokenFileError, match="the file has 0 bytes"):
        TokenStore(memory)


def test_file_url(folder: Path) -> None:
    check(TokenStore(f"file://{folder}"))


class RangeHandler(http.server.BaseHTTPRequestHandler):
    """A folder with byte ranges, which counts its GETs."""

    protocol_version = "HTTP/1.1"
    folder: Path
    requests: list[tuple[str, str | None]]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers.get("Range")))
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        file = self.folder / self.path.strip("/")
        if not file.is_file():
            self.send_error(404)
            return
        data = file.read_bytes()
        size = len(data)
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        self.send_response(206 if span else 200)
        if span:
            data = data[int(span[1]) : int(span[2]) + 1]
            self.send_header("Content-Range", f"bytes {span[1]}-{span[2]}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    pytest.importorskip("aiohttp")
    handler = type("Handler", (RangeHandler,), {"folder": folder, "requests": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", handler.requests
        running.shutdown()


def test_http_store_costs_one_range_per_excerpt(server: tuple[str, list[tuple[str, str | None]]]) -> None:
    url, requests = server
    store = TokenStore([f"{url}/a.ctok", f"{url}/b.ctok"])
    assert len(requests) == 2 * 2  # header and tail
    assert all(span for _, span in requests)
    requests.clear()
    np.testing.assert_array_equal(store.read("item 3000", 1030, 100), ITEMS["item 3000"][:, 1030:1130])
    assert len(requests) == 1
    requests.clear()
    store.read_batch(EXCERPTS)
    assert len(requests) == len(EXCERPTS)
    stride = store._layout.block_stride
    sizes = sorted(
        int(b) - int(a) + 1 for a, b in (span.removeprefix("bytes=").split("-") for _, span in requests if span)
    )
    assert sizes[-1] == 2 * stride + store._layout.block_bytes(700 - 512)
    requests.clear()
    store.keys()[0:5]
    assert not requests
    check(store)
    with pytest.raises(TokenFileError, match=r"c\.ctok: can't be opened"):
        TokenStore(f"{url}/c.ctok")


def test_large_remote_index_comes_in_one_request(
    server: tuple[str, list[tuple[str, str | None]]], folder: Path
) -> None:
    url, requests = server
    with TokenWriter(folder / "many.bin", SPEC) as writer:
        for i in range(3000):
            writer.add(f"a rather long key {i}", ITEMS["item 3"], num_samples=960)
    store = TokenStore([f"{url}/many.bin"])
    assert len(requests) == 3  # header, tail, index
    requests.clear()
    np.testing.assert_array_equal(store.read("a rather long key 2999"), ITEMS["item 3"])
    assert len(requests) == 1


def test_http_store_after_fork(server: tuple[str, list[tuple[str, str | None]]]) -> None:
    url, _ = server
    store = TokenStore(f"{url}/a.ctok")
    pid = os.fork()
    if not pid:
        status = 1
        try:
            np.testing.assert_array_equal(store.read("item 700"), ITEMS["item 700"])
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


def test_remote_file_that_shrinks(memory: str) -> None:
    store = TokenStore(f"{memory}/b.ctok")
    fsspec.filesystem("memory").pipe_file("/corpus/b.ctok", b"x" * 100)
    with pytest.raises(TokenFileError, match=r"at byte \d+: got 0 bytes of \d+; the file must not change"):
        store.read("item 3000", 2000, 100)
    with pytest.raises(InputError, match="no item 'item 4'"):
        store.read("item 4")


# --- S3: a real server (moto's) on loopback


@pytest.fixture
def bucket(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """The store in an S3 bucket, and the GETs that were made: (path, range)."""
    s3fs = pytest.importorskip("s3fs", reason="S3 needs s3fs: pip install 'codec[dev]'")
    application = pytest.importorskip("moto.moto_server.werkzeug_app", reason="needs moto: pip install 'codec[dev]'")
    from werkzeug.serving import make_server

    requests: list[tuple[str, str | None]] = []
    answer = application.DomainDispatcherApplication(application.create_backend_app)

    def counted(environ: dict[str, str], start_response: object) -> object:
        if environ["REQUEST_METHOD"] == "GET":
            requests.append((environ["PATH_INFO"], environ.get("HTTP_RANGE")))
        return answer(environ, start_response)

    running = make_server("127.0.0.1", 0, counted, threaded=True, request_handler=application.MotoRequestHandler)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    # What a user would set; the store takes a URL and nothing else.
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{running.server_port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    system = fsspec.filesystem("s3")
    system.mkdir("bucket")
    for path in folder.glob("*.ctok"):
        system.put(str(path), f"bucket/corpus/{path.name}")
    requests.clear()
    yield "s3://bucket/corpus", requests
    running.shutdown()
    running.server_close()
    s3fs.S3FileSystem.clear_instance_cache()


def test_s3_store_costs_one_range_per_excerpt(bucket: tuple[str, list[tuple[str, str | None]]]) -> None:
    url, requests = bucket
    store = TokenStore(url)
    ranged = [span for _, span in requests if span]
    assert len(ranged) == 2 * 2  # header and tail of each shard; the rest lists the folder
    requests.clear()
    assert store.info("item 3000").num_frames == 3000
    assert store.meta_column("key").tolist() == list(ITEMS)
    requests.clear()
    two_seconds = 100  # frames, at 50 Hz
    np.testing.assert_array_equal(store.read("item 3000", 1030, two_seconds), ITEMS["item 3000"][:, 1030:1130])
    start, stop = store._shards[1].span(1)
    stride = store._layout.block_stride
    assert requests == [("/bucket/corpus/b.ctok", f"bytes={start + 4 * stride}-{start + 5 * stride - 1}")]
    assert start + 5 * stride < stop
    requests.clear()
    store.read_batch(EXCERPTS)
    shards = [path for path, span in requests if span]
    assert sorted(shards) == ["/bucket/corpus/a.ctok"] * 2 + ["/bucket/corpus/b.ctok"] * 2
    assert len(requests) == len(EXCERPTS)
    check(store)
    check(pickle.loads(pickle.dumps(store)))
    with pytest.raises(TokenFileError, match=r"s3://bucket/corpus/c\.ctok: can't be opened .*; check the URL"):
        TokenStore(f"{url}/c.ctok")
    with pytest.raises(TokenFileError, match=r"s3://bucket/nothing/a\.ctok: can't be opened"):
        TokenStore("s3://bucket/nothing/a.ctok")
