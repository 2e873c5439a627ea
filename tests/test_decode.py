import numpy as np
import pytest
import torch
from conftest import small_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.audio import read_audio
from codec.decode import BatchDecoder, decode_store, unpack_codes
from codec.errors import InputError, TokenFileError
from codec.excerpts import RandomExcerpts
from codec.sources import Excerpt, Tokens
from codec.tokens import TokenStore, TokenWriter

ITEMS = {"a.wav": (40, 0), "b.flac": (700, 319), "c": (1, 319), "deep/d.mp3": (256, 7), "e": (530, 100)}


def make_store(path, codec, *, codebook_size=32) -> TokenStore:
    rng = np.random.default_rng(0)
    with TokenWriter(path, codec.spec) as writer:
        for key, (frames, cut) in ITEMS.items():
            codes = rng.integers(0, codebook_size, (codec.spec.n_quantizers, frames))
            writer.add(key, codes, num_samples=frames * 320 - cut)
    return TokenStore(path)


@pytest.fixture(scope="module")
def stores(tmp_path_factory, lookahead_codec, causal_codec):
    folder = tmp_path_factory.mktemp("stores")
    return {
        codec.spec.weights_hash: make_store(folder / f"{i}.ctok", codec)
        for i, codec in enumerate((lookahead_codec, causal_codec))
    }


@st.composite
def excerpts(draw) -> list[Excerpt]:
    chosen = []
    for _ in range(draw(st.integers(1, 5))):
        key = draw(st.sampled_from(list(ITEMS)))
        start = draw(st.integers(0, ITEMS[key][0] - 1))
        chosen.append(Excerpt(key, start, draw(st.integers(1, min(300, ITEMS[key][0] - start)))))
    return chosen


@settings(deadline=None, max_examples=40)
@given(batch=excerpts(), k=st.integers(1, 4))
def test_unpacking_on_the_device_equals_numpy(stores, lookahead_codec, batch, k):
    store = stores[lookahead_codec.spec.weights_hash]
    packed = Tokens(store, n_quantizers=k).get(batch).packed
    expected, lengths = packed.unpack()
    codes = unpack_codes(packed)
    assert codes.dtype == torch.int64
    assert np.array_equal(codes.numpy(), expected)
    for row, (length, excerpt) in enumerate(zip(lengths, batch, strict=True)):
        assert length >= excerpt.length
        assert not codes[row, :, length:].any()


@settings(deadline=None, max_examples=30)
@given(batch=excerpts())
def test_each_row_is_that_slice_of_the_whole_decoded_item(stores, codec, batch):
    store = stores[codec.spec.weights_hash]
    tokens = Tokens(store)
    waves = BatchDecoder(codec, "wave").decode(tokens.get(batch))
    mels = BatchDecoder(codec, "mel").decode(tokens.get(batch))
    codes = BatchDecoder(codec, "codes").decode(tokens.get(batch))
    for row, (key, start, length) in enumerate(batch):
        item = torch.from_numpy(store.read(key))
        num_samples = min((start + length) * 320, store.info(key).num_samples) - start * 320
        assert waves.lengths[row] == num_samples
        whole = codec.decode(item)[0, :, start * 320 :][:, :num_samples]
        torch.testing.assert_close(waves.data[row, :, :num_samples], whole, atol=1e-5, rtol=0)
        assert not waves.data[row, :, num_samples:].any()

        num_mels = -(-num_samples // 160)
        assert mels.lengths[row] == num_mels
        whole = codec.decode_mel(item)[0, :, start * 2 :][:, :num_mels]
        torch.testing.assert_close(mels.data[row, :, :num_mels], whole, atol=1e-5, rtol=0)
        assert (mels.data[row, :, num_mels:] == codec.mel_floor).all()

        assert codes.lengths[row] == length
        assert torch.equal(codes.data[row, :, :length], item[:, start : start + length])
        assert not codes.data[row, :, length:].any()


def test_without_the_context_the_edges_would_be_wrong(stores, codec):
    """The check above can fail: the same excerpt read without context differs."""
    store = stores[codec.spec.weights_hash]
    excerpt = [Excerpt("b.flac", 300, 50)]
    decoder = BatchDecoder(codec, "wave")
    exact = decoder.decode(Tokens(store).get(excerpt)).data
    naive = decoder.decode(Tokens(store, context=(0, 0)).get(excerpt)).data
    assert (exact - naive).abs().max() > 1e-3


def test_batches_of_a_loader_are_decoded_and_the_rest_passes(stores, lookahead_codec):
    store = stores[lookahead_codec.spec.weights_hash]
    loader = RandomExcerpts({"x": Tokens(store)}, 1, batch_size=3, seed=0)
    batches = list(BatchDecoder(lookahead_codec, "mel")(loader.loader(num_batches=2, num_workers=1)))
    assert len(batches) == 2
    assert batches[0]["x"].data.shape == (3, 80, 100)
    assert batches[1]["key"] == loader[1]["key"]


def test_foreign_tokens_are_an_error_not_noise(stores, lookahead_codec, causal_codec):
    store = stores[lookahead_codec.spec.weights_hash]
    with pytest.raises(
        TokenFileError, match=r"tokens are of small .* this codec is small .*load the codec that wrote them"
    ):
        BatchDecoder(causal_codec).decode(Tokens(store).get([Excerpt("a.wav", 0, 3)]))
    with pytest.raises(InputError, match="output is 'latents'"):
        BatchDecoder(causal_codec, "latents")


def test_codes_outside_an_odd_sized_codebook_are_found(tmp_path):
    codec = small_codec(codebook_size=20)
    store = make_store(tmp_path / "x.ctok", codec, codebook_size=20)
    packed = Tokens(store).get([Excerpt("a.wav", 3, 8)]).packed
    assert int(unpack_codes(packed).max()) < 20
    forged = packed.data.copy()
    forged[:40] = 0xFF
    with pytest.raises(TokenFileError, match="code 31 in a batch; the codebooks have 20 entries"):
        unpack_codes(type(packed)(**{**vars(packed), "data": forged}))


@pytest.mark.parametrize("output", ["wave", "mel"])
def test_a_whole_store_becomes_files(tmp_path, stores, lookahead_codec, output):
    store = stores[lookahead_codec.spec.weights_hash]
    seen = []
    report = decode_store(
        lookahead_codec,
        store,
        tmp_path,
        output,
        batch_frames=300,
        on_progress=lambda *args: seen.append(args),
    )
    assert report.num_items == len(ITEMS)
    assert seen[-1][:2] == (5, 5)
    for key, name in zip(ITEMS, ("a", "b", "c", "deep/d", "e"), strict=True):
        codes = torch.from_numpy(store.read(key))
        num_samples = store.info(key).num_samples
        if output == "wave":
            wave, rate = read_audio(tmp_path / f"{name}.wav")
            whole = lookahead_codec.decode(codes)[0, :, :num_samples].clamp(-1, 1)
            assert rate == 16000
            torch.testing.assert_close(wave, whole, atol=1 / 32768, rtol=0)
        else:
            mel = np.load(tmp_path / f"{name}.npy")
            whole = lookahead_codec.decode_mel(codes)[0, :, : -(-num_samples // 160)]
            np.testing.assert_allclose(mel, whole, atol=1e-5)
    with pytest.raises(InputError, match=r"exists \(5 files in all\); give another folder, or --force"):
        decode_store(lookahead_codec, store, tmp_path, output)
    decode_store(lookahead_codec, store, tmp_path, output, force=True)


def test_a_damaged_item_is_reported_and_the_others_are_decoded(tmp_path, lookahead_codec):
    path = tmp_path / "x.ctok"
    make_store(path, lookahead_codec).close()
    data = bytearray(path.read_bytes())
    data[data.index(b"deep/d.mp3") + 40] ^= 0x10
    path.write_bytes(data)
    report = decode_store(lookahead_codec, TokenStore(path), tmp_path / "out", batch_frames=500)
    assert [failure["key"] for failure in report.failures] == ["deep/d.mp3"]
    assert "deep/d.mp3" in report.failures[0]["error"]
    assert sorted(p.name for p in (tmp_path / "out").rglob("*.wav")) == ["a.wav", "b.wav", "c.wav", "e.wav"]


def test_a_damaged_end_leaves_nothing_in_the_next_item(tmp_path, lookahead_codec):
    path = tmp_path / "x.ctok"
    store = make_store(path, lookahead_codec)
    expected = {name: store.info(key).num_samples for name, key in (("a", "a.wav"), ("c", "c"), ("e", "e"))}
    store.close()
    data = bytearray(path.read_bytes())
    data[data.index(b"b.flac") + 2 * (4 * 5 * 32 + 4) + 40] ^= 0x10  # its third block: the last chunk only
    path.write_bytes(data)
    report = decode_store(lookahead_codec, TokenStore(path), tmp_path / "out", batch_frames=2000)
    assert [failure["key"] for failure in report.failures] == ["b.flac"]
    assert not (tmp_path / "out" / "b.wav").exists()
    for name, num_samples in expected.items():
        assert read_audio(tmp_path / "out" / f"{name}.wav")[0].shape[1] == num_samples


@pytest.mark.cuda
def test_cuda_unpacks_and_decodes_what_the_cpu_does(tmp_path, stores, lookahead_codec, cuda):
    from codec import load_codec

    lookahead_codec.save(tmp_path)
    device_codec = load_codec(tmp_path, device=cuda)
    batch = Tokens(stores[lookahead_codec.spec.weights_hash]).get([Excerpt("b.flac", 250, 60), Excerpt("e", 3, 20)])
    assert torch.equal(unpack_codes(batch.packed, cuda).cpu(), unpack_codes(batch.packed))
    here, there = BatchDecoder(lookahead_codec).decode(batch), BatchDecoder(device_codec).decode(batch)
    torch.testing.assert_close(there.data.cpu(), here.data, atol=1e-3, rtol=0)
