import functools
import itertools

import lookalikes
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec import load_codec
from codec.adapters import base, layers
from codec.errors import InputError
from codec.model import Codes

pytest.importorskip("transformers", reason="pretrained codecs of others need the extra codec[hub]")

ATOL = 2e-5


@functools.cache
def checkpoint(family):
    import tempfile
    from pathlib import Path

    return lookalikes.save(family, Path(tempfile.mkdtemp()) / family)


@functools.cache
def loaded(family):
    return load_codec(checkpoint(family))


@pytest.fixture(params=lookalikes.FAMILIES)
def family(request):
    if request.param == "lyra" and not lookalikes.LYRA.is_dir():
        pytest.skip(lookalikes.NO_LYRA)
    return request.param


@pytest.fixture
def codec(family):
    return loaded(family)


@pytest.fixture
def no_grouping(monkeypatch):
    """All rows of a batch go through together, however much padding that is."""
    monkeypatch.setattr(base, "PADDING", 1e9)


def noise(codec, num_samples, seed=0):
    generator = torch.Generator().manual_seed(seed + num_samples)
    return torch.randn(codec.spec.channels, num_samples, generator=generator) * 0.2


def ragged(waves, filler=0.7):
    lengths = torch.tensor([wave.shape[-1] for wave in waves])
    batch = torch.full((len(waves), waves[0].shape[0], int(lengths.max())), filler)
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[-1]] = wave
    return batch, lengths


def lengths_of(codec, count=6):
    """1 sample, around one frame, and what reaches beyond the contexts."""
    hop = codec.spec.hop_length
    return [1, hop - 1, hop, hop + 1, 5 * hop + 7, 13 * hop + hop // 2, 31 * hop][: count + 1]


def test_exact_length(codec):
    for num_samples in lengths_of(codec):
        codes = codec.encode(noise(codec, num_samples))
        assert codes.codes.shape == (1, codec.spec.n_quantizers, -(-num_samples // codec.spec.hop_length))
        assert codec.decode(codes).shape == (1, codec.spec.channels, num_samples)


def test_codes_vary(codec):
    """The look-alikes aren't so random that all the tests below would compare constants."""
    codes = codec.encode(noise(codec, 40 * codec.spec.hop_length)).codes
    assert len(codes[0, -1].unique()) > 2
    wave = codec.decode(codes)
    assert wave.std() > 3e-3


@pytest.mark.usefixtures("no_grouping")
def test_a_ragged_batch_gives_what_each_row_gives_alone(codec):
    waves = [noise(codec, n, seed=i) for i, n in enumerate(lengths_of(codec))]
    together = codec.encode(*ragged(waves))
    wave = codec.decode(together)
    for row, single in enumerate(waves):
        alone = codec.encode(single)
        frames = alone.codes.shape[-1]
        assert torch.equal(together.codes[row, :, :frames], alone.codes[0])
        assert together.codes[row, :, frames:].abs().sum() == 0
        assert together.lengths[row] == frames
        decoded = codec.decode(alone)[0]
        torch.testing.assert_close(wave[row, :, : single.shape[-1]], decoded, atol=ATOL, rtol=1e-5)
        assert wave[row, :, single.shape[-1] :].abs().sum() == 0


@pytest.mark.parametrize("family", ["encodec_24", "encodec_48", "dac_16", "snac_24", "mimi"])
def test_weights_kept_in_onednns_layout_give_the_same(family):
    codec = loaded(family)
    wave, codes = noise(codec, 30 * codec.spec.hop_length)[None], codec.encode(noise(codec, 3000)[None]).codes
    with torch.no_grad():
        assert layers.packs(wave) or not layers._HAS_PACKED
        packed = codec.encoder.run(wave, None)[0], codec.decode(codes)
        with torch.backends.mkldnn.flags(enabled=False):
            assert not layers.packs(wave)
            plain = codec.encoder.run(wave, None)[0], codec.decode(codes)
    for ours, theirs in zip(packed, plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=0)


def test_kept_weights_follow_the_weights():
    own = torch.nn.Conv1d(8, 8, 3)
    layer, x = layers.Conv(own, 1, 1), torch.randn(1, 8, 20)
    with torch.no_grad():
        before = layer(x, layers.FULL)[0]
        own.weight.mul_(2)
        own.bias.mul_(2)
        torch.testing.assert_close(layer(x, layers.FULL)[0], 2 * before)


@settings(deadline=None, max_examples=8, derandomize=True)
@given(data=st.data())
@pytest.mark.parametrize("family", ["encodec_24", "dac_16", "snac_24", "mimi"])
def test_any_lengths_in_a_batch(family, data):
    codec = loaded(family)
    lengths = data.draw(st.lists(st.integers(1, 9 * codec.spec.hop_length), min_size=2, max_size=4))
    waves = [noise(codec, n, seed=i) for i, n in enumerate(lengths)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "PADDING", 1e9)
        together = codec.encode(*ragged(waves))
        decoded = codec.decode(together)
    for row, single in enumerate(waves):
        alone = codec.encode(single).codes[0]
        ours = together.codes[row, :, : alone.shape[-1]]
        # Random entries may tie within rounding: then one frame differs, from that level on.
        assert (ours != alone).any(0).sum() <= 1
        same = Codes(ours[None], together.lengths[row : row + 1], together.num_samples[row : row + 1])
        torch.testing.assert_close(decoded[row, :, : single.shape[-1]], codec.decode(same)[0], atol=1e-4, rtol=1e-5)


def test_rows_are_grouped_by_length_and_put_back(codec):
    waves = [noise(codec, n, seed=i) for i, n in enumerate([9, 3000, 10, 2990, 700, 3001])]
    groups = codec._groups([wave.shape[1] for wave in waves], 1)
    assert sorted(row for group in groups for row in group.tolist()) == list(range(6))
    assert len(groups) > 1
    together = codec.encode(*ragged(waves))
    for row, single in enumerate(waves):
        alone = codec.encode(single).codes[0]
        assert torch.equal(together.codes[row, :, : alone.shape[-1]], alone)


def test_prefix(codec, family):
    full = codec.encode(noise(codec, 9 * codec.spec.hop_length)).codes
    counts = {
        "encodec_48": [3 + 5, 3 + 10, codec.spec.n_quantizers],
        "snac_24": [1, 3, 7],
        "snac_44": [1, 3, 7, 15],
        "lyra": [1, 16, 30, 46],
    }.get(family, [1, 2, codec.spec.n_quantizers])
    for count in counts:
        part = codec.encode(noise(codec, 9 * codec.spec.hop_length), n_quantizers=count).codes
        assert torch.equal(part, full[:, :count])
        assert torch.isfinite(codec.decode(part)).all()


@pytest.mark.parametrize(("family", "count"), [("encodec_48", 4), ("snac_24", 2), ("dac_16", 6), ("mimi", 0)])
def test_a_number_of_codebooks_that_there_is_not(family, count):
    codec = loaded(family)
    with pytest.raises(InputError, match=f"n_quantizers is {count}; "):
        codec.encode(noise(codec, 100), n_quantizers=count)


@pytest.mark.parametrize("cuts", [[1], [0.3, 0.31, 0.9], [0.02, 0.04, 0.06, 0.5]])
def test_a_stream_gives_what_one_call_gives(codec, cuts):
    hop = codec.spec.hop_length
    num_samples = 40 * hop + 11
    wave = torch.stack([noise(codec, num_samples, seed=n) for n in range(2)])
    whole = codec.encode(wave)
    encoder, decoder = codec.stream_encoder(), codec.stream_decoder()
    for _ in range(2):  # a flushed stream starts afresh
        at = [0, *(round(cut * num_samples) for cut in cuts), num_samples]
        parts = [encoder.push(wave[..., a:b]) for a, b in itertools.pairwise(at)]
        codes = torch.cat([*parts, encoder.flush()], -1)
        assert torch.equal(codes, whole.codes)
        decoded = codec.decode(codes)
        at = [0, *(round(cut * codes.shape[-1]) for cut in cuts), codes.shape[-1]]
        parts = [decoder.push(codes[..., a:b]) for a, b in itertools.pairwise(at)]
        torch.testing.assert_close(torch.cat([*parts, decoder.flush()], -1), decoded, atol=ATOL, rtol=1e-5)


def test_streams_keep_bounded_buffers(codec):
    """What a stream holds doesn't grow with what has gone through."""
    hop = codec.spec.hop_length
    encoder = codec.stream_encoder()
    sizes = []
    for n in range(30):
        encoder.push(noise(codec, 4 * hop, seed=n)[None])
        held = [v for v in vars(encoder).values() if isinstance(v, torch.Tensor)]
        stages = getattr(encoder, "_stages", None)
        held += [] if stages is None else [stages.before.buffer, stages.after.buffer]
        sizes.append(sum(tensor.numel() for tensor in held if tensor is not None))
    assert max(sizes[20:]) <= max(sizes[10:20])


def test_flush_of_nothing(codec):
    for stream in (codec.stream_encoder(), codec.stream_decoder()):
        with pytest.raises(InputError, match="flush before any"):
            stream.flush()


def test_a_decoded_excerpt_is_the_slice_of_the_whole(codec, family):
    spec = codec.spec
    if spec.decode_context is None:
        assert family == "encodec_24"  # its LSTM remembers everything
        assert codec.decode_warmup_frames > 0
        return
    hop, (left, right) = spec.hop_length, spec.decode_context
    total = left + right + 12
    codes = codec.encode(noise(codec, total * hop)).codes
    whole = codec.decode(codes)
    for start, stop in [(0, 3), (left + 2, left + 3), (left + 5, left + 9), (total - 2, total)]:
        first, last = max(0, start - left), min(total, stop + right)
        part = codec.decode(codes[..., first:last])[..., (start - first) * hop : (stop - first) * hop]
        torch.testing.assert_close(part, whole[..., start * hop : stop * hop], atol=ATOL, rtol=1e-5)


def test_outside_the_declared_context_nothing_counts(codec, family):
    spec = codec.spec
    if spec.decode_context is None:
        return
    hop, (left, right) = spec.hop_length, spec.decode_context
    at = left + 2
    total = at + right + 3
    wave = noise(codec, total * hop)
    codes = codec.encode(wave).codes
    if family == "encodec_48":
        at = left  # the first frame of a chunk: all of the chunk before reaches it
        assert codes[0, 0, at] // 6 == 0
    before = codec.decode(codes)[..., at * hop : (at + 1) * hop]

    def differs(frames):
        changed = codes.clone()
        row = slice(3, None) if family == "encodec_48" else slice(None)
        changed[:, row, frames] = (changed[:, row, frames] + 1) % min(64, spec.codebook_size)
        return not torch.allclose(codec.decode(changed)[..., at * hop : (at + 1) * hop], before, atol=1e-7, rtol=0)

    assert not differs(slice(0, at - left))
    assert not differs(slice(at + right + 1, None))
    assert differs(slice(at, at + 1))

    left, right = spec.encode_context
    at = left + 2 if family != "encodec_48" else (left + 1) * 2  # the start of a chunk
    total = at + right + 3
    wave = noise(codec, total * hop)
    expected = codec.encode(wave).codes[..., at]
    changed = wave.clone()
    changed[:, : (at - left) * hop] = 0.5
    changed[:, (at + right + 1) * hop :] = -0.5
    assert torch.equal(codec.encode(changed).codes[..., at], expected)


@pytest.mark.parametrize("family", ["dac_16", "dac_44"])
def test_contexts_are_no_wider_than_what_the_gradient_sees(family, tmp_path):
    codec = load_codec(checkpoint(family)).double()
    hop = codec.spec.hop_length
    left, right = codec.spec.decode_context
    latents = torch.randn(1, codec.decoder.layers[0].conv.in_channels, 40, dtype=torch.float64, requires_grad=True)
    wave, _ = codec.decoder(latents)
    (gradient,) = torch.autograd.grad(wave[0, 0, 20 * hop : 21 * hop].sum(), latents)
    seen = gradient[0].abs().sum(0).nonzero().flatten()
    assert (20 - int(seen.min()), int(seen.max()) - 20) == (left, right)
    left, right = codec.spec.encode_context
    wave = torch.randn(1, 1, 40 * hop, dtype=torch.float64, requires_grad=True)
    latents, _ = codec.encoder(wave)
    (gradient,) = torch.autograd.grad(latents[0, :, 20].sum(), wave)
    seen = gradient[0, 0].view(40, hop).abs().sum(1).nonzero().flatten()
    assert (20 - int(seen.min()), int(seen.max()) - 20) == (left, right)


def test_no_mel_head_but_a_word_about_it(codec):
    codes = codec.encode(noise(codec, 1000))
    with pytest.raises(InputError, match="has no mel head; decode to a wave and apply MelSpectrogram"):
        codec.decode_mel(codes)


def test_half_precision(codec, family):
    wave = noise(codec, 12 * codec.spec.hop_length)
    half = load_codec(checkpoint(family), dtype=torch.bfloat16)
    assert half.spec == codec.spec
    codes = codec.encode(wave)
    decoded, expected = half.decode(codes), codec.decode(codes)
    assert decoded.dtype == torch.float32
    assert torch.corrcoef(torch.stack([decoded.flatten(), expected.flatten()]))[0, 1] > 0.9
    assert half.encode(wave).codes.shape == codes.codes.shape


def test_the_hash_is_of_the_weights_not_of_their_names(family, tmp_path):
    if family not in lookalikes.TRANSFORMERS:
        return
    torch.manual_seed(0)
    spec = loaded(family).spec
    other = load_codec(lookalikes.save(family, tmp_path / "another name")).spec
    assert other.weights_hash == spec.weights_hash
    assert (other.name, spec.name) == ("another name", family)
    model = lookalikes.TRANSFORMERS[family]()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1e-3
    model.save_pretrained(tmp_path / "changed")
    assert load_codec(tmp_path / "changed").spec.weights_hash != spec.weights_hash


@pytest.mark.parametrize("family", ["encodec_24", "dac_16", "dac_44", "mimi"])
def test_single_items_equal_transformers(family):
    codec, model = loaded(family), lookalikes.TRANSFORMERS[family]()
    hop = codec.spec.hop_length
    for num_samples in lengths_of(codec):
        wave = noise(codec, num_samples)[None]
        with torch.no_grad():
            if family == "encodec_24":
                codes = model.encode(wave, bandwidth=3.6).audio_codes[0]
                decoded = model.decode(codes[None], [None])[0]
            elif family == "mimi":
                codes = model.encode(wave).audio_codes
                decoded = model.decode(codes)[0]
            else:
                codes = model.encode(torch.nn.functional.pad(wave, (0, -num_samples % hop))).audio_codes
                decoded = model.decode(audio_codes=codes)[0][:, None]
        ours = codec.encode(wave)
        assert torch.equal(ours.codes, codes)
        ours = codec.decode(ours)
        decoded = decoded[..., :num_samples]
        full_scale = max(1.0, float(decoded.abs().max()))
        torch.testing.assert_close(ours[..., : decoded.shape[-1]], decoded, atol=1e-5 * full_scale, rtol=1e-6)
        assert ours[..., decoded.shape[-1] :].abs().sum() == 0  # the 8 samples that DAC at 16 kHz leaves out


def test_chunks_equal_transformers():
    codec, model = loaded("encodec_48"), lookalikes.encodec_48()
    # Between one stride and one chunk transformers fades over the short first chunk instead of a whole one.
    for num_samples in [1, 31, 32, 70, 96, 97, 700, 912, 960, 961, 1824, 1900, 13001]:
        wave = noise(codec, num_samples)[None]
        with torch.no_grad():
            encoded = model.encode(wave, bandwidth=1.2)
            decoded = model.decode(
                encoded.audio_codes, encoded.audio_scales, last_frame_pad_length=encoded.last_frame_pad_length
            )[0][..., :num_samples]
        ours = codec.encode(wave)
        for chunk, (codes, scale) in enumerate(zip(encoded.audio_codes, encoded.audio_scales, strict=True)):
            frames = ours.codes[..., chunk * codec.period : (chunk + 1) * codec.period]
            steps, count, level = codec.unpack(frames)
            assert count == -(-min(960, num_samples - chunk * 912) // 32)
            assert torch.equal(steps[..., : int(count)], codes[..., : int(count)])
            torch.testing.assert_close(level, scale[0], rtol=2e-4, atol=0)  # 20 bits of it are kept
        torch.testing.assert_close(codec.decode(ours), decoded, atol=2e-4 * float(decoded.abs().max()), rtol=0)


def test_hostile_chunk_rows_decode_to_something_finite():
    codec = loaded("encodec_48")
    codes = torch.randint(1024, (3, codec.spec.n_quantizers, 40), generator=torch.Generator().manual_seed(0))
    codes[1, 1:3] = 1023  # a level that isn't finite
    decoded = codec.decode(codes)
    assert decoded.shape == (3, 2, 40 * codec.spec.hop_length)
    assert torch.isfinite(decoded[1]).all()


def test_snacs_noise_is_white_and_belongs_to_the_codes():
    from codec.adapters.snac import code_seeds, normal_noise

    noise = normal_noise(torch.arange(2000)[None], 100)
    assert noise.shape == (1, 200_000)
    assert abs(noise.mean()) < 0.01
    assert abs(noise.std() - 1) < 0.01
    for lag in (1, 2, 50, 100):
        assert abs((noise[0, lag:] * noise[0, :-lag]).mean()) < 0.01
    codes = torch.randint(4096, (2, 7, 9), generator=torch.Generator().manual_seed(0))
    seeds = code_seeds(codes)
    assert len(seeds.unique()) == 18
    assert torch.equal(seeds[1:, 3:5], code_seeds(codes[1:, :, 3:5]))
    codec = loaded("snac_24")
    codes = codec.encode(codec_noise := noise[:, :20000] * 0.2).codes
    assert codec_noise.shape == (1, 20000)
    assert torch.equal(codec.decode(codes), codec.decode(codes))


@pytest.mark.cuda
def test_the_same_on_the_gpu(family, cuda):
    codec = loaded(family)
    there = load_codec(checkpoint(family), device=cuda)
    waves = [noise(codec, n, seed=i) for i, n in enumerate(lengths_of(codec))]
    here, other = codec.encode(*ragged(waves)), there.encode(*ragged(waves))
    same = (here.codes == other.codes.cpu()).float().mean()
    assert same > 0.98  # rounding differs, and decides between entries that are equally near
    codes = Codes(here.codes.to(cuda), here.lengths.to(cuda), here.num_samples.to(cuda))
    torch.testing.assert_close(there.decode(codes).cpu(), codec.decode(here), atol=1e-3, rtol=1e-3)
