import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from conftest import small_codec
from hypothesis import given, settings
from hypothesis import strategies as st

from codec.decode import BatchDecoder, DecodedBatch, unpack_codes
from codec.decode.shapes import MAX_SHAPES, Shape, ShapeBook
from codec.errors import DecodeError, InputError, TokenFileError
from codec.excerpts import RandomExcerpts
from codec.features import PRESETS, MelSpectrogram
from codec.sources import Excerpt, Tokens
from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter

ITEMS = {"a.wav": (40, 0), "b.flac": (700, 319), "c": (1, 319), "deep/d.mp3": (256, 7), "e": (530, 100)}
BODIES = ("lookahead_codec", "causal_codec", "seanet_codec", "causal_seanet_codec")
MELS = {
    "hops": PRESETS["codec"],
    "centred, mirrored": replace(PRESETS["torchaudio"], sample_rate=16000, hop_length=80, n_fft=1024, win_length=1024),
}
FULL_SCALE_TOLERANCE = 1e-4  # DESIGN's invariant 2; untrained codecs are quiet, so the tests ask for less
TOLERANCE = 2e-5


def make_store(path, codec, *, codebook_size=32) -> TokenStore:
    rng = np.random.default_rng(0)
    with TokenWriter(path, codec.spec) as writer:
        for key, (frames, cut) in ITEMS.items():
            codes = rng.integers(0, codebook_size, (codec.spec.n_quantizers, frames))
            writer.add(key, codes, num_samples=frames * 320 - cut)
    return TokenStore(path)


class Body:
    """A codec, its store, and whole items decoded."""

    def __init__(self, codec, store):
        self.codec, self.store = codec, store
        self.whole = cache(self.whole)

    def whole(self, key, output, k=None):
        """`[X, n]`, exactly as long as the item."""
        codes = torch.from_numpy(self.store.read(key, n_quantizers=k))
        num_samples = self.store.info(key).num_samples
        if output == "codes":
            return codes
        if output == "latents":
            return self.codec.quantizer.decode(codes[None])[0].T
        if output == "mel":
            return self.codec.decode_mel(codes)[0, :, : -(-num_samples // 160)]
        wave = self.codec.decode(codes)[0, :, :num_samples]
        return wave if output == "wave" else MelSpectrogram(MELS[output])(wave[None])[0]

    def decoder(self, output, **options):
        if output in MELS:
            return BatchDecoder(self.codec, "mel", features=MelSpectrogram(MELS[output]), **options)
        return BatchDecoder(self.codec, output, **options)


STEP = {"wave": 1, "mel": 160, "hops": 160, "centred, mirrored": 80, "latents": 320, "codes": 320}


@pytest.fixture(scope="module")
def bodies(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores")
    codecs = {name: request.getfixturevalue(name) for name in BODIES}
    return {name: Body(codec, make_store(folder / f"{name}.ctok", codec)) for name, codec in codecs.items()}


@pytest.fixture(scope="module")
def stores(bodies):
    return {body.codec.spec.weights_hash: body.store for body in bodies.values()}


@st.composite
def excerpts(draw) -> list[Excerpt]:
    chosen = []
    for _ in range(draw(st.integers(1, 5))):
        key = draw(st.sampled_from(list(ITEMS)))
        start = draw(st.integers(0, ITEMS[key][0] - 1))
        chosen.append(Excerpt(key, start, draw(st.integers(1, min(300, ITEMS[key][0] - start)))))
    return chosen


def check(body, decoded, batch, output, k=None):
    """Every row is that slice of the whole, and padding beyond it."""
    tolerance = {"codes": 0, "wave": TOLERANCE, "latents": 0}.get(output, 2e-3 if output in MELS else 1e-4)
    fill = {"mel": body.codec.mel_floor}.get(output, 0)
    if output in MELS:
        fill = MelSpectrogram(MELS[output]).padding_value
    for row, (key, start, length) in enumerate(batch):
        step = STEP[output]
        whole = body.whole(key, output, k)[:, start * 320 // step :][:, : length * 320 // step]
        assert decoded.lengths[row] == whole.shape[1]
        data = decoded.data[row]
        torch.testing.assert_close(data[:, : whole.shape[1]], whole, atol=tolerance, rtol=0)
        assert (data[:, whole.shape[1] :] == fill).all()


@settings(deadline=None, max_examples=40)
@given(batch=excerpts(), k=st.integers(1, 4))
def test_unpacking_on_the_device_equals_numpy(bodies, batch, k):
    tokens = Tokens(bodies["lookahead_codec"].store, n_quantizers=k)
    packed = tokens.get(batch).packed
    expected, lengths = packed.unpack()
    codes = unpack_codes(packed)
    assert codes.dtype == torch.int64
    assert np.array_equal(codes.numpy(), expected)
    for row, (length, excerpt) in enumerate(zip(lengths, batch, strict=True)):
        assert length >= excerpt.length
        assert not codes[row, :, length:].any()
    assert torch.equal(unpack_codes(packed, n_quantizers=1), codes[:, :1])


@pytest.mark.parametrize("codebook_size", [2, 20, 512, 513, 1024, 65536])
def test_unpacking_of_every_width(tmp_path, codebook_size):
    spec = CodecSpec("x", "0" * 64, 16000, 320, 1, 3, codebook_size, (0, 0), (0, 0))
    codes = np.random.default_rng(1).integers(0, codebook_size, (3, 700))
    with TokenWriter(tmp_path / "x.ctok", spec) as writer:
        writer.add("x", codes, num_samples=700 * 320)
    packed = Tokens(tmp_path / "x.ctok").get([Excerpt("x", 3, 690), Excerpt("x", 255, 2)]).packed
    unpacked = unpack_codes(packed).numpy()
    assert np.array_equal(unpacked[0], codes[:, 3:693])
    assert np.array_equal(unpacked[1, :, :2], codes[:, 255:257])


@pytest.mark.parametrize("name", BODIES)
@settings(deadline=None, max_examples=10)
@given(batch=excerpts(), k=st.sampled_from([None, 1, 3]), static=st.booleans())
def test_each_row_is_that_slice_of_the_whole_decoded_item(bodies, name, batch, k, static):
    """Invariants 1, 2, 3 and 5: lengths, offsets and company of a row; prefixes; padding to static shapes."""
    body = bodies[name]
    for output in STEP:
        decoder = body.decoder(output, n_quantizers=k, graphs=static)
        tokens = Tokens(body.store, context=decoder.context)
        check(body, decoder.decode(tokens.get(batch)), batch, output, k)


@pytest.mark.parametrize("name", BODIES)
@settings(deadline=None, max_examples=5)
@given(size=st.integers(1, 300), key=st.sampled_from(list(ITEMS)))
def test_pieces_of_any_size_join_to_the_whole(bodies, name, size, key):
    """Invariant 4: an item decoded as it streams."""
    body = bodies[name]
    size = max(size, ITEMS[key][0] // 20)
    for output in ("wave", "mel", "hops", "codes"):
        decoder = body.decoder(output)
        pieces = decoder(Tokens(body.store, context=decoder.context).stream(key, size))
        joined = torch.cat([piece.data[0] for piece in pieces], -1)
        whole = body.whole(key, output)
        assert joined.shape == whole.shape
        torch.testing.assert_close(joined, whole, atol=2e-3 if output == "hops" else 1e-4, rtol=0)


def test_one_decoder_for_many_shapes_pads_to_a_handful(bodies):
    body = bodies["lookahead_codec"]
    decoder = body.decoder("wave", graphs=True)
    tokens, rng = Tokens(body.store), np.random.default_rng(0)
    for _ in range(40):
        batch = [
            Excerpt("b.flac", int(rng.integers(0, 300)), int(rng.integers(1, 400))) for _ in range(rng.integers(1, 4))
        ]
        check(body, decoder.decode(tokens.get(batch)), batch, "wave")
    assert 2 <= len(decoder.shapes) <= MAX_SHAPES


def test_excerpts_of_one_length_take_one_shape_without_waste():
    book = ShapeBook()
    first = book.fit(Shape(32, 120, 100))
    assert first == Shape(32, 120, 104)
    for num_read in (118, 120, 110):
        assert book.fit(Shape(32, num_read, 100)) == first
    assert book.fit(Shape(31, 120, 100)) == first
    assert book.fit(Shape(4, 120, 100)) == Shape(4, 120, 104)  # the last batch of an epoch


def test_shapes_stay_few_whatever_comes():
    book = ShapeBook()
    rng = np.random.default_rng(0)
    for _ in range(1000):
        batch = Shape(int(rng.integers(1, 64)), int(rng.integers(1, 2000)), 1)
        shape = book.fit(batch)
        assert shape is None or (shape.holds(batch) and shape.cost <= max(2 * batch.cost, 8 * batch.num_rows))
    assert len(book.shapes) == MAX_SHAPES


def test_without_the_context_the_edges_would_be_wrong(bodies):
    """The checks above can fail: the same excerpt read without context differs."""
    for body in bodies.values():
        excerpt = [Excerpt("b.flac", 300, 50)]
        exact = body.decoder("wave").decode(Tokens(body.store).get(excerpt)).data
        naive = body.decoder("wave").decode(Tokens(body.store, context=(0, 0)).get(excerpt)).data
        assert (exact - naive).abs().max() > 10 * TOLERANCE


def test_features_whose_hop_does_not_divide_are_those_of_the_excerpt(bodies):
    body = bodies["lookahead_codec"]
    mel = MelSpectrogram(replace(PRESETS["codec"], hop_length=250))
    decoder = BatchDecoder(body.codec, "mel", features=mel)
    assert decoder.context == body.codec.spec.decode_context
    batch = Tokens(body.store).get([Excerpt("b.flac", 690, 10), Excerpt("a.wav", 3, 30), Excerpt("c", 0, 1)])
    decoded, waves = decoder.decode(batch), body.decoder("wave").decode(batch)
    expected, lengths = mel(waves.data, waves.lengths)
    assert torch.equal(decoded.lengths, lengths)
    torch.testing.assert_close(decoded.data, expected, atol=1e-4, rtol=0)


def test_features_ask_for_the_context_that_they_need(bodies):
    body = bodies["lookahead_codec"]
    decoder = body.decoder("hops")
    left, right = body.codec.spec.decode_context
    assert decoder.context == (left + 2, right + 2)
    with pytest.raises(InputError, match=r"read with \(3, 3\) frames of context.*need \(5, 5\).*decoder.context"):
        decoder.decode(Tokens(body.store).get([Excerpt("a.wav", 0, 3)]))
    with pytest.raises(InputError, match=r"features are of 22050 Hz, small decodes to 16000 Hz"):
        BatchDecoder(body.codec, "mel", features=MelSpectrogram("librosa"))


def test_batches_of_a_loader_are_decoded_and_the_rest_passes(bodies):
    body = bodies["lookahead_codec"]
    draws = RandomExcerpts({"x": Tokens(body.store)}, 1, batch_size=3, seed=0)
    decoded = body.decoder("mel")(draws.loader(num_batches=2, num_workers=1))
    assert len(decoded) == 2
    for _ in range(2):  # epochs
        batches = list(decoded)
        assert len(batches) == 2
        assert batches[0]["x"].data.shape == (3, 80, 100)
        assert batches[1]["key"] == draws[1]["key"]
        x, key = batches[1].as_tuple("x", "key")
        assert isinstance(x, DecodedBatch) and key == draws[1]["key"]
    one = body.decoder("mel")(draws[0])
    assert torch.equal(one["x"].data, batches[0]["x"].data)
    assert torch.equal(one["start"], draws[0]["start"])


def test_a_wrapped_loader_resumes_where_it_handed_over(bodies, monkeypatch):
    """Batches fetched ahead don't count. (Forced here: only CUDA devices fetch ahead.)"""
    body = bodies["lookahead_codec"]
    draws = RandomExcerpts({"x": Tokens(body.store)}, 1, batch_size=2, seed=0)
    decoder = body.decoder("codes")
    everything = [batch["x"].data for batch in decoder(draws.loader(num_batches=6))]
    loader = draws.loader(epoch_batches=6)
    decoded = decoder(loader)
    monkeypatch.setattr(decoder, "fetches_ahead", 2)
    iterator = iter(decoded)
    for expected in everything[:3]:
        assert torch.equal(next(iterator)["x"].data, expected)
    state = decoded.state_dict()
    assert loader.state_dict() != state  # which is two batches ahead
    again = decoder(draws.loader())
    again.load_state_dict(state)
    assert torch.equal(next(iter(again))["x"].data, everything[3])


def test_excerpts_are_read_from_the_source(bodies):
    body = bodies["seanet_codec"]
    batch = [Excerpt("b.flac", 100, 50), Excerpt("e", 0, 10)]
    for source in (body.store, Tokens(body.store)):
        check(body, body.decoder("wave", source=source)(batch), batch, "wave")
    check(body, body.decoder("hops", source=body.store)(batch), batch, "hops")
    check(body, body.decoder("mel", source=body.store, n_quantizers=2)(batch), batch, "mel", 2)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([Excerpt("a.wav", 30, 11)], r"'a.wav': frames \[30, 41\) asked for; the item has frames \[0, 40\)"),
        ([Excerpt("a.wav", -1, 3)], r"frames \[-1, 2\)"),
        ([Excerpt("a.wav", 40, 1)], r"frames \[40, 41\)"),
        ([Excerpt("a.wav", 3, 0)], r"frames \[3, 3\)"),
        ([Excerpt("nonesuch", 3, 1)], "no item 'nonesuch'"),
        ([], "batch is empty"),
    ],
)
def test_excerpts_outside_the_item_are_errors(bodies, batch, message):
    body = bodies["lookahead_codec"]
    with pytest.raises(InputError, match=message):
        body.decoder("wave", source=body.store)(batch)


def test_a_span_that_begins_outside_its_item_is_an_error_in_a_loader_too(bodies):
    with pytest.raises(InputError, match=r"frames \[41, 43\) asked for; the item has frames \[0, 40\)"):
        Tokens(bodies["lookahead_codec"].store).get([Excerpt("a.wav", 41, 2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "waves"}, "output is 'waves'; it must be one of wave, mel, latents, codes"),
        ({"layout": "ragged"}, "layout is 'ragged'"),
        ({"dtype": torch.float64}, "dtype is torch.float64"),
        ({"n_quantizers": 5}, "n_quantizers is 5; small has 1 to 4"),
        ({"prefetch": -1}, "prefetch is -1"),
        ({"output": "wave", "features": MelSpectrogram("codec")}, "they go with output='mel'"),
    ],
)
def test_options_that_do_not_fit(lookahead_codec, options, message):
    with pytest.raises(InputError, match=message):
        BatchDecoder(lookahead_codec, **options)


def test_foreign_tokens_are_an_error_not_noise(bodies, causal_codec):
    tokens = Tokens(bodies["lookahead_codec"].store)
    with pytest.raises(
        TokenFileError, match=r"tokens are of small .* this codec is small .*load the codec that wrote them"
    ):
        BatchDecoder(causal_codec).decode(tokens.get([Excerpt("a.wav", 0, 3)]))


def test_more_quantizers_than_the_batch_holds(bodies):
    body = bodies["lookahead_codec"]
    batch = Tokens(body.store, n_quantizers=2).get([Excerpt("a.wav", 0, 3)])
    with pytest.raises(InputError, match="n_quantizers is 3; the batch holds the first 2 codebooks"):
        body.decoder("wave", n_quantizers=3).decode(batch)
    with pytest.raises(InputError, match="make the decoder with source=store"):
        body.decoder("wave")([Excerpt("a.wav", 0, 3)])


def test_codes_outside_an_odd_sized_codebook_are_found(tmp_path):
    codec = small_codec(codebook_size=20)
    store = make_store(tmp_path / "x.ctok", codec, codebook_size=20)
    batch = Tokens(store).get([Excerpt("a.wav", 3, 8)])
    packed = batch.packed
    assert int(unpack_codes(packed).max()) < 20
    forged = packed.data.copy()
    forged[:40] = 0xFF
    forged = replace(packed, data=forged)
    with pytest.raises(TokenFileError, match="code 31 in a batch; the codebooks have 20 entries"):
        unpack_codes(forged)
    for graphs in (False, True):
        with pytest.raises(TokenFileError, match=r"code 31 in a batch; .* have 20 entries"):
            BatchDecoder(codec, graphs=graphs, check_finite=False).decode(replace(batch, packed=forged))


# --- layouts


def test_layouts_hold_the_same(bodies):
    body = bodies["lookahead_codec"]
    batch = Tokens(body.store, context=(12, 12)).get([Excerpt("b.flac", 690, 10), Excerpt("a.wav", 3, 30)])
    for output in STEP:
        padded = body.decoder(output).decode(batch)
        rows = body.decoder(output, layout="list").decode(batch)
        jagged = body.decoder(output, layout="jagged").decode(batch)
        assert jagged.data.layout == torch.jagged and jagged.data.is_nested
        assert list(jagged.data.shape[:2]) == list(padded.data.shape[:2])
        for row, length in enumerate(padded.lengths.tolist()):
            expected = padded.data[row, ..., :length]
            assert torch.equal(rows.data[row], expected)
            assert torch.equal(jagged.data.unbind()[row], expected)


def test_out_is_filled(bodies):
    body = bodies["lookahead_codec"]
    batch = Tokens(body.store).get([Excerpt("b.flac", 690, 10), Excerpt("a.wav", 3, 30)])
    for output in ("wave", "mel", "codes"):
        padded = body.decoder(output).decode(batch).data
        out = torch.full((*padded.shape[:-1], padded.shape[-1] + 7), 9).to(padded.dtype)
        decoded = body.decoder(output).decode(batch, out=out)
        assert decoded.data is out
        assert torch.equal(out[..., :-7], padded)
        assert (out[..., -7:] == (body.codec.mel_floor if output == "mel" else 0)).all()
    with pytest.raises(InputError, match=r"out is \[2, 1, 5\] of torch.float32 on cpu; the batch needs \[2, 1, 9600\]"):
        body.decoder("wave").decode(batch, out=torch.zeros(2, 1, 5))
    with pytest.raises(InputError, match="it holds the layout 'padded' only"):
        body.decoder("wave", layout="list").decode(batch, out=torch.zeros(2, 1, 9600))


def test_the_hook_runs_before_hand_over_with_the_rest_of_the_batch(bodies):
    body = bodies["lookahead_codec"]
    draws = RandomExcerpts({"x": Tokens(body.store)}, 1, batch_size=2, seed=0)
    seen = []

    def louder(decoded: DecodedBatch, batch) -> DecodedBatch:
        seen.append(batch.get("key"))
        return replace(decoded, data=decoded.data * 2)

    plain = next(iter(body.decoder("wave")(draws.loader(num_batches=1))))
    loud = next(iter(body.decoder("wave", hook=louder)(draws.loader(num_batches=1))))
    assert torch.equal(loud["x"].data, 2 * plain["x"].data)
    body.decoder("wave", hook=louder).decode(draws[0]["x"])
    assert seen == [plain["key"], None]


# --- what goes wrong on the device


class Short(Exception):
    pass


def starved(codec, limit):
    """A codec on a device that has memory for so many padded frames."""
    starved = copy.copy(codec)
    sizes = []

    def decode_static(codes, lengths=None, *, output="wave"):
        sizes.append(codes.shape[0] * codes.shape[2])
        if sizes[-1] > limit:
            raise torch.OutOfMemoryError("out of memory")
        return codec.decode_static(codes, lengths, output=output)

    object.__setattr__(starved, "decode_static", decode_static)
    return starved, sizes


def test_out_of_memory_says_what_to_lower_or_splits(bodies):
    body = bodies["lookahead_codec"]
    batch = [Excerpt("b.flac", 17 * i, 100 - i) for i in range(7)]
    packed = Tokens(body.store).get(batch)
    codec, _ = starved(body.codec, 400)
    with pytest.raises(
        DecodeError,
        match=r"out of memory on cpu: 7 excerpts of up to 1\d\d frames, context included, are \d+\.\d s of audio to "
        r"decode to wave; lower batch_size or the excerpts' length, or make the decoder with split=True",
    ):
        BatchDecoder(codec).decode(packed)
    for output in ("wave", "mel", "codes"):
        codec, sizes = starved(body.codec, 400)
        decoder = BatchDecoder(codec, output, split=True)
        check(body, decoder.decode(packed), batch, output)
        sizes.clear()
        check(body, decoder.decode(packed), batch, output)
        assert all(size <= 400 for size in sizes)  # it has learnt
    codec, _ = starved(body.codec, 50)
    with pytest.raises(DecodeError, match="out of memory on cpu: 1 excerpts"):
        BatchDecoder(codec, split=True).decode(packed)


def test_other_errors_of_the_device_pass_as_they_are(bodies):
    codec = copy.copy(bodies["lookahead_codec"].codec)

    def broken(*arguments, **options):
        raise RuntimeError("something else")

    object.__setattr__(codec, "decode_static", broken)
    with pytest.raises(RuntimeError, match="something else"):
        BatchDecoder(codec).decode(Tokens(bodies["lookahead_codec"].store).get([Excerpt("a.wav", 0, 3)]))


@pytest.mark.parametrize("output", ["wave", "mel", "latents"])
def test_results_that_are_not_finite_are_errors(bodies, output):
    body = bodies["lookahead_codec"]
    codec = copy.deepcopy(body.codec)
    codec._spec = body.codec.spec
    entry = int(body.store.read("e")[0, 20])
    codec.quantizer.codebooks[0, entry] = float("nan")
    safe = int(np.flatnonzero(body.store.read("a.wav")[0] != entry)[0])
    batch = Tokens(body.store, context=(0, 0)).get([Excerpt("a.wav", safe, 1), Excerpt("e", 20, 1)])
    with pytest.raises(DecodeError, match=rf"row 1 of 2 holds NaN or infinity \({output}, in torch.float32\)"):
        BatchDecoder(codec, output).decode(batch)
    assert BatchDecoder(codec, output, check_finite=False).decode(batch).data[1].isnan().any()


# --- half precision, threads, autograd


def test_half_precision_is_near_and_leaves_the_codec_alone(bodies):
    for body in bodies.values():
        batch = Tokens(body.store).get([Excerpt("b.flac", 250, 60), Excerpt("e", 3, 20)])
        for output in ("wave", "mel"):
            exact = body.decoder(output).decode(batch).data
            half = body.decoder(output, dtype=torch.bfloat16).decode(batch).data
            assert half.dtype == torch.float32
            assert 0 < (half - exact).std() < 0.05 * exact.std()
            assert torch.equal(body.decoder(output).decode(batch).data, exact)
        assert all(p.dtype == torch.float32 for p in body.codec.decoder.parameters())
        latents = [body.decoder("latents", dtype=dtype).decode(batch).data for dtype in (None, torch.bfloat16)]
        assert torch.equal(*latents)  # the lookup stays float32


def test_no_graph_is_kept(bodies):
    body = bodies["seanet_codec"]
    codec = copy.deepcopy(body.codec).requires_grad_(True)
    codec._spec = body.codec.spec
    decoded = BatchDecoder(codec).decode(Tokens(body.store).get([Excerpt("a.wav", 0, 3)]))
    assert decoded.data.grad_fn is None and not decoded.data.is_inference()
    (decoded.data * torch.nn.Parameter(torch.ones(()))).sum().backward()


def test_a_codec_without_bound_decodes_with_a_warm_up(tmp_path):
    """Context is then the codec's warm-up, on both sides; what comes out is near the whole's."""
    codec = small_codec()
    spec = replace(codec.spec, decode_context=None)
    codec._spec, codec.decode_warmup_frames = spec, 30
    store = make_store(tmp_path / "x.ctok", codec)
    decoder = BatchDecoder(codec, source=store)
    assert decoder.context == (30, 30)
    batch = [Excerpt("b.flac", 200, 40)]
    decoded = decoder(batch)
    whole = codec.decode(torch.from_numpy(store.read("b.flac")))[0, :, 200 * 320 : 240 * 320]
    torch.testing.assert_close(decoded.data[0], whole, atol=TOLERANCE, rtol=0)


def test_codebooks_of_several_rates_begin_with_whole_codes(tmp_path):
    """A span is read from a frame where all codebooks begin a code, and cut to what was asked for."""
    codec = small_codec()
    rng = np.random.default_rng(0)
    divisors = (4, 2, 1, 1)
    codes = np.stack([np.repeat(rng.integers(0, 32, 530 // d + 1), d)[:530] for d in divisors])
    with TokenWriter(tmp_path / "x.ctok", codec.spec, frame_divisors=divisors) as writer:
        writer.add("x", codes, num_samples=530 * 320 - 9)
    store = TokenStore(tmp_path / "x.ctok")
    batch = [Excerpt("x", start, length) for start, length in ((0, 7), (263, 50), (525, 5), (13, 1))]
    tokens = Tokens(store)
    read = tokens.get(batch)
    for (_, start, _), skip, rows in zip(batch, read.skip.tolist(), read.packed.unpack()[0], strict=True):
        assert (start - skip) % 4 == 0
        assert np.array_equal(rows[:, 0], codes[:, start - skip])
    waves, found = BatchDecoder(codec).decode(read), BatchDecoder(codec, "codes").decode(read)
    whole = codec.decode(torch.from_numpy(codes))[0, :, : 530 * 320 - 9]
    for row, (_, start, length) in enumerate(batch):
        part = whole[:, start * 320 :][:, : length * 320]
        assert waves.lengths[row] == part.shape[1]
        torch.testing.assert_close(waves.data[row, :, : part.shape[1]], part, atol=TOLERANCE, rtol=0)
        assert np.array_equal(found.data[row, :, :length], codes[:, start : start + length])


# --- on a GPU


@pytest.mark.cuda
@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("graphs", [False, True])
def test_cuda_decodes_what_the_cpu_does(bodies, cuda, name, graphs):
    body = bodies[name]
    allowed = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        for output in STEP:
            decoder = body.decoder(output, device=cuda, graphs=graphs)
            tokens = Tokens(body.store, context=decoder.context)
            for start in (250, 3, 17):  # the second and third replay what the first recorded
                batch = [Excerpt("b.flac", start, 60), Excerpt("e", start + 20, 60), Excerpt("a.wav", 5, 35)]
                decoded = decoder.decode(tokens.get(batch))
                assert decoded.data.device.type == "cuda"
                here = body.decoder(output).decode(tokens.get(batch))
                assert torch.equal(decoded.lengths.cpu(), here.lengths)
                tolerance = 0 if output == "codes" else 5e-3 if output in MELS else 1e-4
                torch.testing.assert_close(decoded.data.cpu(), here.data, atol=tolerance, rtol=0)
            decoder.check()
    finally:
        torch.backends.cudnn.allow_tf32 = allowed


@pytest.mark.cuda
def test_cuda_batches_are_apart_from_each_other(bodies, cuda):
    """Copies ahead on another stream, replayed buffers, memory that is freed and given out again: no batch changes."""
    body = bodies["lookahead_codec"]
    draws = RandomExcerpts({"x": Tokens(body.store)}, 1, batch_size=16, seed=0)
    expected = [batch["x"].data for batch in body.decoder("wave")(draws.loader(num_batches=30))]
    for graphs in (False, True):
        decoder = body.decoder("wave", device=cuda, graphs=graphs)
        kept = [batch["x"].data for batch in decoder(draws.loader(num_batches=30, num_workers=2))]
        for ours, theirs in zip(kept, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=0)


@pytest.mark.cuda
def test_cuda_on_streams_of_the_callers(bodies, cuda):
    body = bodies["lookahead_codec"]
    decoder = body.decoder("wave", device=cuda)
    tokens = Tokens(body.store)
    batches = [tokens.get([Excerpt("b.flac", 10 * i, 60)]) for i in range(20)]
    expected = [body.decoder("wave").decode(batch).data for batch in batches]
    streams = [torch.cuda.Stream(cuda) for _ in range(3)]
    found = []
    for i, batch in enumerate(batches):
        with torch.cuda.stream(streams[i % 3]):
            found.append(decoder.decode(batch).data)
    torch.cuda.synchronize()
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, atol=1e-3, rtol=0)


@pytest.mark.cuda
def test_cuda_finds_what_is_not_finite_without_waiting(bodies, cuda):
    body = bodies["lookahead_codec"]
    codec = copy.deepcopy(body.codec)
    codec._spec = body.codec.spec
    codec.quantizer.codebooks[0] = float("nan")
    decoder = BatchDecoder(codec, device=cuda)
    batch = Tokens(body.store).get([Excerpt("e", 20, 5)])
    decoder.decode(batch)
    with pytest.raises(DecodeError, match="row 0 of 1 holds NaN"):
        decoder.check()
    with pytest.raises(DecodeError, match="row 0 of 1 holds NaN"):
        list(decoder(iter([batch])))


@pytest.mark.cuda
def test_cuda_does_not_wait_for_the_device(bodies, cuda):
    body = bodies["lookahead_codec"]
    batches = [Tokens(body.store).get([Excerpt("b.flac", 10 * i, 60), Excerpt("e", i, 60)]) for i in range(4)]
    for output in ("wave", "mel", "codes"):
        for graphs in (False, True):
            decoder = body.decoder(output, device=cuda, graphs=graphs)
            decoder.decode(batches[0])
            decoder.check()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for batch in batches[1:]:
                    decoder.decode(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
def test_cuda_runs_out_of_memory_with_a_clear_message(bodies, cuda):
    body = bodies["lookahead_codec"]
    torch.cuda.set_per_process_memory_fraction(0.001, cuda)
    try:
        batch = Tokens(body.store).get([Excerpt("b.flac", i, 600) for i in range(64)])
        with pytest.raises(DecodeError, match="out of memory on cuda:0: 64 excerpts"):
            body.decoder("wave", device=cuda).decode(batch)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
