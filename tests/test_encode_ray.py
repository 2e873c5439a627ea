"""Encoding on a Ray cluster of two nodes, one of which dies half-way."""

import shutil
import threading
import time

import pytest
from conftest import DATA, small_codec

from codec.encode import encode_corpus
from codec.errors import InputError
from codec.tokens import TokenStore
from codec.tokens.files import UNFINISHED

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'codec[ray]'")

CLIPS = sorted(path.name for path in DATA.glob("*_*.*"))
OPTIONS = {"shard_bytes": 4000, "batch_seconds": 5}


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for copy in range(4):
        for name in CLIPS:
            shutil.copy(DATA / name, folder / f"{copy}_{name}")
    (folder / "bad.wav").write_text("no audio")
    return folder


def test_a_node_dies_and_the_store_is_that_of_one_process(tmp_path, corpus):
    from ray.cluster_utils import Cluster

    codec = small_codec()
    one = encode_corpus(codec, [corpus], tmp_path / "one", **OPTIONS)
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 10**8}
    )
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=10**8)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        killed = threading.Event()

        def kill() -> None:
            while not killed.is_set():
                # Both nodes write by now.
                if len(list((tmp_path / "many").glob("*.ctok"))) >= 3:
                    cluster.remove_node(node, allow_graceful=False)
                    killed.set()
                time.sleep(0.01)

        killer = threading.Thread(target=kill)
        killer.start()
        seen = []
        try:
            many = encode_corpus(
                codec, [corpus], tmp_path / "many", engine="ray", on_progress=lambda *a: seen.append(a), **OPTIONS
            )
        finally:
            was_killed = killed.is_set()
            killed.set()
            killer.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert was_killed
    assert not list((tmp_path / "many").glob("*" + UNFINISHED))
    assert [failure["key"] for failure in many.failures] == ["bad.wav"] == [f["key"] for f in one.failures]
    assert seen[-1][:2] == (len(CLIPS) * 4 + 1, len(CLIPS) * 4 + 1)
    names = [path.name for path in sorted((tmp_path / "one").glob("*.ctok"))]
    assert names == [path.name for path in sorted((tmp_path / "many").glob("*.ctok"))]
    assert len(names) > 6
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    assert len(TokenStore(tmp_path / "many")) == len(CLIPS) * 4


def test_no_cluster_is_said(tmp_path, corpus):
    with pytest.raises(InputError, match=r"no Ray cluster at '127.0.0.1:1'"):
        encode_corpus(small_codec(), [corpus], tmp_path / "s", engine="ray", address="127.0.0.1:1")
    with pytest.raises(InputError, match=r"a name without \.ctok"):
        encode_corpus(small_codec(), [corpus], tmp_path / "s.ctok", engine="ray")
