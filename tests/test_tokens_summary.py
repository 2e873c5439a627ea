import math

import numpy as np
import pytest

from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter, summarise

SPEC = CodecSpec("x", "ab" * 32, 16000, 320, 1, 4, 64, (8, 8), (10, 10))


def test_summary_counts_what_was_written(tmp_path):
    rng = np.random.default_rng(0)
    frames = [10, 40, 45, 300, 4000]
    with TokenWriter(tmp_path / "a.ctok", SPEC, n_quantizers=3) as writer:
        for i, count in enumerate(frames):
            codes = np.stack([rng.integers(0, 64, count), rng.integers(0, 8, count), np.full(count, 5)])
            writer.add(f"item{i}", codes, num_samples=count * 320 - i)
    summary = summarise(TokenStore(tmp_path / "a.ctok"))
    total = sum(frames) * 320 - 10
    assert (summary.num_items, summary.num_shards) == (5, 1)
    assert (summary.num_quantizers_stored, summary.num_quantizers_codec) == (3, 4)
    assert summary.hours == pytest.approx(total / 16000 / 3600)
    size = (tmp_path / "a.ctok").stat().st_size
    assert summary.num_bytes == size
    assert summary.bits_per_second == pytest.approx(size * 8 / (total / 16000))
    assert summary.times_smaller_than_pcm16 == pytest.approx(total * 2 / size)
    assert summary.lengths == [(0.0, 1), (0.5, 2), (5.0, 1), (60.0, 1)]
    assert [usage.used_entries for usage in summary.usage] == [64, 8, 1]
    assert summary.usage[0].entropy_bits == pytest.approx(math.log2(64), abs=0.1)
    assert summary.usage[1].entropy_bits == pytest.approx(3, abs=0.02)
    assert summary.usage[2].entropy_bits == 0


def test_summary_of_an_empty_store(tmp_path):
    TokenWriter(tmp_path / "a.ctok", SPEC).close()
    summary = summarise(TokenStore(tmp_path / "a.ctok"))
    assert (summary.num_items, summary.hours, summary.lengths, summary.usage) == (0, 0, [], [])
