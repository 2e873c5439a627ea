import copy
import itertools
import json
import math
from fractions import Fraction
from unittest import mock

import pytest
import torch
from conftest import num_ties, small_codec
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from codec import load_codec
from codec.errors import CheckpointError, ConfigError, InputError
from codec.model import Codes, SoundStreamConfig, StreamDecoder, StreamEncoder
from codec.model.config import ADDED_LATER
from codec.model.soundstream import content_hash

HOP = 320
FULL_SCALE_TOLERANCE = 1e-4  # DESIGN's invariant 2


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def ragged(waves: list[torch.Tensor], filler: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different lengths; what lies beyond a row's end is loud rubbish."""
    lengths = torch.tensor([w.shape[-1] for w in waves])
    batch = torch.full((len(waves), waves[0].shape[0], int(lengths.max())), filler)
    for row, wave in zip(batch, waves, strict=True):
        row[:, : wave.shape[-1]] = wave
    return batch, lengths


@pytest.fixture(scope="module", params=["lookahead_codec", "causal_codec", "seanet_codec", "causal_seanet_codec"])
def codec(request):
    """Both bodies, looking ahead and causal."""
    return request.getfixturevalue(request.param)


lengths_of_rows = st.lists(st.integers(1, 4000), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(num_samples=st.integers(1, 5000))
def test_exact_length(codec, num_samples):
    codes = codec.encode(noise(1, 1, num_samples))
    assert codes.codes.shape == (1, 4, -(-num_samples // HOP))
    assert codec.decode(codes).shape == (1, 1, num_samples)
    assert codec.decode_mel(codes).shape == (1, 80, -(-num_samples // 160))


@settings(deadline=None, max_examples=40)
@given(lengths=lengths_of_rows)
def test_batch_equals_single(codec, lengths):
    waves = [noise(1, n, seed=i) for i, n in enumerate(lengths)]
    together = codec.encode(*ragged(waves))
    wave, mel = codec.decode(together), codec.decode_mel(together)
    for row, single in enumerate(waves):
        alone = codec.encode(single)
        num_frames, num_samples, num_mels = (
            alone.codes.shape[-1],
            single.shape[-1],
            -(-single.shape[-1] // 160),
        )
        codes = together.codes[row, :, :num_frames]
        assert num_ties(codec, codec.latents(single[None])[0], codes, alone.codes[0]) <= 1
        alone = Codes(codes[None], alone.lengths, alone.num_samples)
        assert together.codes[row, :, num_frames:].abs().sum() == 0
        assert together.lengths[row] == num_frames
        torch.testing.assert_close(
            wave[row, :, :num_samples], codec.decode(alone)[0], atol=FULL_SCALE_TOLERANCE, rtol=0
        )
        assert wave[row, :, num_samples:].abs().sum() == 0
        torch.testing.assert_close(mel[row, :, :num_mels], codec.decode_mel(alone)[0], atol=1e-4, rtol=0)
        assert (mel[row, :, num_mels:] == codec.mel_floor).all()


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_decoded_excerpt_is_the_slice_of_the_whole(codec, data):
    total = data.draw(st.integers(1, 60))
    start = data.draw(st.integers(0, total - 1))
    stop = data.draw(st.integers(start + 1, total))
    codes = torch.randint(32, (4, total), generator=torch.Generator().manual_seed(total))
    left, right = codec.spec.decode_context
    first, last = max(0, start - left), min(total, stop + right)
    skip = start - first
    whole, part = codec.decode(codes), codec.decode(codes[:, first:last])
    torch.testing.assert_close(
        part[..., skip * HOP : (skip + stop - start) * HOP],
        whole[..., start * HOP : stop * HOP],
        atol=1e-5,
        rtol=0,
    )
    whole, part = codec.decode_mel(codes), codec.decode_mel(codes[:, first:last])
    torch.testing.assert_close(
        part[..., 2 * skip : 2 * (skip + stop - start)], whole[..., 2 * start : 2 * stop], atol=1e-5, rtol=0
    )


def test_declared_contexts_are_what_the_gradient_sees(codec):
    """No sample beyond the declared context counts, and the context isn't declared wider than a frame too much."""
    spec, codec = codec.spec, copy.deepcopy(codec).double()
    wave = noise(1, 1, 60 * HOP).double().requires_grad_()
    with mock.patch.object(Tensor, "float", Tensor.double):
        (gradient,) = torch.autograd.grad(codec.encoder(wave)[0, 30].sum(), wave)
    frames = gradient.view(60, HOP).abs().sum(-1).nonzero().flatten()
    left, right = spec.encode_context
    assert 30 - left <= frames.min() <= 30 - left + 1
    assert 30 + right - 1 <= frames.max() <= 30 + right

    quantized = torch.randn(1, 60, 8, dtype=torch.float64, requires_grad=True)
    trunk = codec.decoder.trunk(quantized)
    wave, mel = codec.decoder.wave_head(trunk), codec.decoder.mel_head(trunk)
    probed = wave[0, 0, 30 * HOP : 31 * HOP].abs().sum() + mel[0, :, 60:62].abs().sum()
    (gradient,) = torch.autograd.grad(probed, quantized)
    frames = gradient[0].abs().sum(-1).nonzero().flatten()
    left, right = spec.decode_context
    assert 30 - left <= frames.min() <= 30 - left + 1
    assert 30 + right - 1 <= frames.max() <= 30 + right


@pytest.mark.parametrize(("body", "decoder_waits"), [("causal_codec", 1), ("causal_seanet_codec", 0)])
def test_causal_codes_dont_wait(request, body, decoder_waits):
    causal_codec = request.getfixturevalue(body)
    assert causal_codec.spec.encode_context[1] == 0
    assert causal_codec.spec.decode_context[1] == decoder_waits  # the inverse STFT's overlap
    wave = noise(1, 1, 20 * HOP)
    changed = wave.clone()
    changed[..., 10 * HOP :] = noise(1, 1, 10 * HOP, seed=1)
    assert torch.equal(causal_codec.encode(wave).codes[..., :10], causal_codec.encode(changed).codes[..., :10])
    assert not torch.equal(causal_codec.encode(wave).codes[..., 10:], causal_codec.encode(changed).codes[..., 10:])


def pushed(stream, whole, cuts) -> Tensor:
    """The whole pushed in pieces between cuts (parts of its length), empty ones among them."""
    edges = [0, *sorted(round(cut * whole.shape[-1]) for cut in cuts), whole.shape[-1]]
    parts = [stream.push(whole[..., first:last]) for first, last in itertools.pairwise(edges)]
    return torch.cat([*parts, stream.flush()], -1)


@pytest.mark.parametrize("stateful", [True, False])
@settings(deadline=None, max_examples=8)
@given(num_samples=st.integers(1, 9000), cuts=st.lists(st.floats(0, 1), max_size=12))
@example(num_samples=6000, cuts=[n / 60 for n in range(60)])
def test_stream_equals_whole(codec, stateful, num_samples, cuts):
    """Streams that carry layers' states, and the general ones that compute their context again; twice each."""
    encoder = codec.stream_encoder() if stateful else StreamEncoder(codec)
    decoder = codec.stream_decoder() if stateful else StreamDecoder(codec)
    for seed in (0, 1):  # a flushed stream starts afresh
        wave = noise(2, 1, num_samples, seed=seed)
        whole = codec.encode(wave).codes
        for row, codes in enumerate(pushed(encoder, wave, cuts)):
            assert num_ties(codec, codec.latents(wave)[row], codes, whole[row]) <= 1
        torch.testing.assert_close(pushed(decoder, whole, cuts), codec.decode(whole), atol=1e-5, rtol=0)


def kept_numbers(thing, seen=None) -> int:
    """Numbers in all tensors that a stream's state holds, the codec's own aside."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, torch.nn.Module):
        return 0
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return thing.untyped_storage().nbytes() // thing.element_size()
    inside = thing if isinstance(thing, list | tuple) else vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(kept_numbers(part, seen) for part in inside)


def test_a_stream_waits_and_remembers_as_long_as_its_context(codec):
    """Memory is constant, and what is complete comes out at once: never later than the declared latency."""
    (_, encode_right), (_, decode_right) = codec.spec.encode_context, codec.spec.decode_context
    assert codec.spec.latency_ms == 20 * (1 + encode_right + decode_right)
    stream, decoder = codec.stream_encoder(n_quantizers=2), codec.stream_decoder()
    kept, num_codes, num_samples = [], 0, 0
    for frame in range(80):
        codes = stream.push(noise(1, 1, HOP, seed=frame))
        num_codes += codes.shape[-1]
        num_samples += decoder.push(codes).shape[-1]
        assert codes.shape[:2] == (1, 2)
        assert num_codes >= frame + 1 - encode_right
        assert num_samples >= (frame + 1 - encode_right - decode_right) * HOP
        kept.append(kept_numbers(stream) + kept_numbers(decoder))
    assert max(kept[50:]) <= max(kept[:50]) < 40000
    general = StreamEncoder(codec)
    for second in range(4):
        general.push(noise(1, 1, 50 * HOP, seed=second))
        assert general._buffer.shape[-1] <= (sum(codec.spec.encode_context) + 1) * HOP


def test_a_denoising_stream():
    codec = small_codec(denoise=True)
    torch.nn.init.normal_(codec.encoder.film.scale)
    wave = noise(1, 1, 7000)
    for denoise in (False, True):
        stream = codec.stream_encoder(n_quantizers=3, denoise=denoise)
        parts = [stream.push(wave[..., :3001]), stream.push(wave[..., 3001:]), stream.flush()]
        assert torch.equal(torch.cat(parts, -1), codec.encode(wave, n_quantizers=3, denoise=denoise).codes)


def test_prefix(codec):
    wave = noise(1, 1, 5000)
    assert torch.equal(codec.encode(wave, n_quantizers=2).codes, codec.encode(wave).codes[:, :2])
    assert codec.decode(codec.encode(wave, n_quantizers=2)).shape == wave.shape


@pytest.mark.parametrize("body", ["spectral", "seanet"])
def test_denoising_is_a_condition_of_each_call_and_each_example(body):
    codec = small_codec(body=body, denoise=True)
    wave = noise(2, 1, 4800)
    assert torch.equal(codec.latents(wave), codec.latents(wave, denoise=True))  # starts as the identity
    torch.manual_seed(1)
    torch.nn.init.normal_(codec.encoder.film.scale)
    torch.nn.init.normal_(codec.encoder.film.shift)
    plain, denoised = codec.encode(wave).codes, codec.encode(wave, denoise=True).codes
    assert not torch.equal(plain, denoised)
    levels = torch.tensor([4, 4])
    mixed = codec(wave, levels, torch.tensor([False, True]))[2].codes
    assert torch.equal(mixed, torch.stack([plain[0], denoised[1]]))
    assert torch.equal(codec(wave, levels)[2].codes, plain)
    together = codec.encode(wave, torch.tensor([4800, 700]), denoise=True).codes
    assert torch.equal(together[1, :, :3], codec.encode(wave[1:, :, :700], denoise=True).codes[0])


def test_denoising_of_a_codec_without_it_is_an_error(lookahead_codec):
    with pytest.raises(InputError, match=r"denoise=True, but small isn't conditioned.*model\.denoise: true"):
        lookahead_codec.encode(noise(1, 1, 400), denoise=True)


@pytest.mark.parametrize("body", ["spectral", "seanet"])
def test_every_weight_is_trained(body):
    """One training pass with all options reaches every parameter, and its result is that of encode and decode."""
    codec = small_codec(body=body, denoise=True, codebook_dim=4, normalise_codes=True).requires_grad_(True)
    wave = noise(2, 1, 6400)
    decoded, mel, quantized, latents = codec(wave, torch.tensor([4, 4]), torch.tensor([False, True]))
    assert decoded.shape == wave.shape and mel.shape == (2, 80, 40) and latents.shape == (2, 20, 8)
    (decoded.square().mean() + mel.square().mean() + quantized.commitment).backward()
    still = [name for name, p in codec.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not still
    torch.testing.assert_close(decoded[:1].detach(), codec.decode(codec.encode(wave[:1])), atol=1e-5, rtol=0)


@pytest.mark.parametrize("body", ["spectral", "seanet"])
@pytest.mark.parametrize(
    ("sample_rate", "channels", "subframes", "strides"),
    [(8000, 1, 1, (4, 40)), (24000, 2, 4, (3, 8, 4, 5)), (44100, 2, 3, (2, 9, 7, 7)), (48000, 1, 2, (2, 3, 4, 5, 8))],
)
def test_stereo_and_other_rates(body, sample_rate, channels, subframes, strides):
    hop = math.prod(strides)
    mel = {"sample_rate": sample_rate, "n_fft": 512, "win_length": 512, "hop_length": hop // subframes, "n_mels": 20}
    codec = small_codec(
        sample_rate=sample_rate,
        channels=channels,
        hop_length=hop,
        subframes=subframes,
        decoder_n_fft=hop // subframes * 3,
        encoder_n_fft=1024,
        mel=mel,
        body=body,
        strides=strides,
        seanet_channels=(2, 2),
    )
    assert codec.spec.frame_rate == Fraction(sample_rate, hop)
    num_samples = 10 * hop + 1
    codes = codec.encode(noise(1, channels, num_samples))
    assert codes.codes.shape == (1, 4, 11)
    assert codec.decode(codes).shape == (1, channels, num_samples)
    assert codec.decode_mel(codes).shape == (1, 20, 10 * subframes + 1)


def test_half_precision_weights_give_float32_near_the_full_ones(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path)
    half = load_codec(tmp_path, dtype=torch.bfloat16)
    codes = lookahead_codec.encode(noise(1, 1, 8000))
    wave, exact = half.decode(codes), lookahead_codec.decode(codes)
    assert wave.dtype == torch.float32
    assert (wave - exact).square().mean() < 0.01 * exact.square().mean()
    assert half.spec == lookahead_codec.spec
    assert half.encode(noise(1, 1, 8000)).codes.shape == codes.codes.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_save_and_load(tmp_path, codec, dtype):
    spec = codec.save(tmp_path / "mine", dtype=dtype)
    loaded = load_codec(tmp_path / "mine")
    assert loaded.spec == spec
    assert (spec == codec.spec) == (dtype == torch.float32)  # rounded weights are another codec
    codes = loaded.encode(noise(1, 1, 4000))
    again = load_codec(tmp_path / "mine")
    assert torch.equal(again.encode(noise(1, 1, 4000)).codes, codes.codes)
    assert torch.equal(again.decode(codes), loaded.decode(codes))
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(name.endswith("counts") for name in load_file(tmp_path / "mine" / "model.safetensors"))


def test_the_shipped_identity_stays():
    """Fields that a later release adds stay out of the configuration and of the hash at their defaults."""
    shipped = load_codec("speech_16k")
    assert shipped.spec.weights_hash == "d32303597d6238359bb81e174b8dfcce187b0a6225363fbb251fd8ea8e7c9171"
    assert content_hash(shipped.config, shipped.state_dict()) == shipped.spec.weights_hash
    assert not set(ADDED_LATER) & set(shipped.config.to_dict())
    other = SoundStreamConfig(body="seanet", strides=(8, 40), denoise=True, codebook_dim=8)
    assert SoundStreamConfig.from_dict(json.loads(json.dumps(other.to_dict()))) == other
    assert {"body", "strides", "denoise", "codebook_dim"} == set(ADDED_LATER) & set(other.to_dict())


def test_load_refuses_what_isnt_whole(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path)
    weights, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    good_weights, good_config = weights.read_bytes(), config.read_text()

    damaged = bytearray(good_weights)
    damaged[-5] ^= 1
    weights.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"weights hash to .* damaged"):
        load_codec(tmp_path)
    weights.write_bytes(good_weights[:-100])
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        load_codec(tmp_path)
    weights.write_bytes(good_weights)

    tensors = load_file(weights)
    save_file({k: v for k, v in tensors.items() if k != "decoder.embed.bias"}, weights)
    with pytest.raises(CheckpointError, match=r"1 tensors don't fit.*decoder\.embed\.bias"):
        load_codec(tmp_path)
    weights.write_bytes(good_weights)

    document = json.loads(good_config)
    config.write_text(json.dumps({**document, "architecture": "Other"}))
    with pytest.raises(CheckpointError, match="architecture 'Other'"):
        load_codec(tmp_path)
    config.write_text(json.dumps({**document, "format_version": 2}))
    with pytest.raises(CheckpointError, match="format version 2"):
        load_codec(tmp_path)
    config.write_text(json.dumps({**document, "model": {**document["model"], "depth": 3}}))
    with pytest.raises(CheckpointError, match=r"config.json: unknown model settings \['depth'\].*upgrade codec"):
        load_codec(tmp_path)
    for changes, message in (
        ({"body": "lstm"}, "model.body is 'lstm'.*can't build that model"),
        ({"body": "seanet"}, r"\d+ tensors don't fit config.json, first 'decoder.*different checkpoints"),
        ({"codebook_size": 10**15}, "codebook_size is 1000000000000000; it must be an integer from 2"),
        ({"latent_dim": 10**12}, r"tensors don't fit.*first 'decoder\.embed\.weight'"),
        ({"codebook_dim": 4}, r"tensors don't fit.*'quantizer\.codebooks'|tensors don't fit.*'quantizer\.down'"),
        ({"latent_dim": "8"}, "latent_dim is '8'"),
        ({"mel": [1]}, "can't build that model"),
    ):
        config.write_text(json.dumps({**document, "model": {**document["model"], **changes}}))
        with pytest.raises(CheckpointError, match=message):
            load_codec(tmp_path)
    config.write_text(json.dumps({**document, "model": [1]}))
    with pytest.raises(CheckpointError, match=r"'model' is \[1\], not settings"):
        load_codec(tmp_path)
    config.write_text("{")
    with pytest.raises(CheckpointError, match="not a codec configuration"):
        load_codec(tmp_path)
    with pytest.raises(CheckpointError, match=r"no codec 'nonesuch'.*speech_16k"):
        load_codec("nonesuch")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hop_length": 321}, "hop_length 321 is not a multiple"),
        ({"decoder_n_fft": 640}, "decoder_n_fft is 640; it must be an odd multiple"),
        ({"kernel_size": 4}, "kernel_size is 4; with lookahead it must be odd"),
        ({"encoder_dims": (8,)}, "encoder_dims is \\(8,\\); it must be two integers"),
        ({"encoder_n_fft": 100}, "encoder_n_fft is 100"),
        ({"mel": {}}, "n_mels among them"),
        ({"mel": {"n_mels": 80, "hop_length": 200}}, "mel.hop_length is 200"),
        ({"sample_rate": 24000}, "mel.sample_rate is 16000; model.sample_rate is 24000"),
        ({"body": "lstm"}, "body is 'lstm'; it must be 'spectral' or 'seanet'"),
        ({"body": "seanet", "strides": (2, 4, 5)}, r"strides \[2, 4, 5\] multiply to 40.*hop_length, 320"),
        ({"body": "seanet", "strides": ()}, r"strides is \(\); it must be integers"),
        ({"body": "seanet", "seanet_kernel_size": 4}, "seanet_kernel_size is 4; with lookahead"),
        ({"channels": 0}, "channels is 0; it must be an integer ≥ 1"),
        ({"normalise_codes": True}, "normalise_codes needs model.codebook_dim"),
        ({"codebook_dim": 65}, "codebook_dim is 65; it must be from 1 to model.latent_dim, 64"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        SoundStreamConfig(**changes)


@pytest.mark.parametrize(
    ("wave", "lengths", "n_quantizers", "message"),
    [
        (torch.zeros(10), None, None, r"wave has shape \[10\]"),
        (torch.zeros(1, 1, 0), None, None, r"wave has shape \[1, 1, 0\]"),
        (torch.zeros(1, 2, 10), None, None, "wave has 2 channels; small has 1"),
        (torch.zeros(1, 1, 10, dtype=torch.int16), None, None, "dtype torch.int16.*divide int16 by 32768"),
        (torch.tensor([[[0.0, float("nan")]]]), None, None, "NaN or infinite"),
        (torch.zeros(2, 1, 10), torch.tensor([10]), None, r"must be integer \[2\]"),
        (torch.zeros(2, 1, 10), torch.tensor([10, 0]), None, "range from 0 to 10 samples"),
        (
            torch.zeros(2, 1, 10),
            torch.tensor([11, 1]),
            None,
            r"range from 1 to 11 samples; they must lie in 1…10",
        ),
        (torch.zeros(1, 1, 10), None, 5, "n_quantizers is 5; this codec has 1 to 4"),
        (torch.zeros(1, 1, 10), None, 0, "n_quantizers is 0"),
    ],
)
def test_encode_errors(lookahead_codec, wave, lengths, n_quantizers, message):
    with pytest.raises(InputError, match=message):
        lookahead_codec.encode(wave, lengths, n_quantizers=n_quantizers)


@pytest.mark.parametrize(
    ("codes", "lengths", "message"),
    [
        (torch.zeros(4), None, r"shape \[4\]"),
        (torch.zeros(1, 5, 3, dtype=torch.int64), None, "K from 1 to 4"),
        (torch.zeros(1, 4, 3), None, "dtype torch.float32; they must be integers"),
        (torch.full((1, 4, 3), 32), None, "range from 32 to 32; the codebook has 0 to 31"),
        (torch.full((1, 4, 3), -1), None, "range from -1 to -1"),
        (torch.zeros(1, 4, 3, dtype=torch.int64), torch.tensor([4]), "4 frames; they must lie in 1…3"),
        (
            Codes(torch.zeros(1, 4, 3, dtype=torch.int64), torch.tensor([3]), torch.tensor([900])),
            torch.tensor([3]),
            "Codes, which carry",
        ),
    ],
)
def test_decode_errors(lookahead_codec, codes, lengths, message):
    with pytest.raises(InputError, match=message):
        lookahead_codec.decode(codes, lengths)


def test_rubbish_beyond_a_row_may_even_be_nan(lookahead_codec):
    wave = noise(2, 1, 2000)
    wave[1, :, 700:] = float("nan")
    codes = lookahead_codec.encode(wave, torch.tensor([2000, 700]))
    assert torch.equal(codes.codes[1, :, :3], lookahead_codec.encode(wave[1:, :, :700]).codes[0])


def test_what_comes_out_can_be_trained_on(lookahead_codec):
    """Outputs are ordinary tensors: a layer on top of them has gradients."""
    codes = lookahead_codec.encode(noise(1, 1, 4000))
    for output in (lookahead_codec.decode(codes), lookahead_codec.decode_mel(codes)):
        layer = torch.nn.Linear(output.shape[-1], 3)
        layer(output).square().sum().backward()
        assert layer.weight.grad.abs().sum() > 0


def test_stream_errors(lookahead_codec):
    stream, decoder = lookahead_codec.stream_encoder(), lookahead_codec.stream_decoder()
    with pytest.raises(InputError, match="wave has 2 channels"):
        stream.push(noise(1, 2, 400))
    stream.push(noise(2, 1, 400))
    with pytest.raises(InputError, match="the chunk has 1 rows, the stream began with 2"):
        stream.push(noise(1, 1, 400))
    with pytest.raises(InputError, match="range from 32 to 32"):
        decoder.push(torch.full((1, 4, 3), 32))
    with pytest.raises(InputError, match="n_quantizers is 5"):
        lookahead_codec.stream_encoder(n_quantizers=5)
    with pytest.raises(InputError, match="denoise=True"):
        lookahead_codec.stream_encoder(denoise=True)


def test_flush_before_push(lookahead_codec):
    with pytest.raises(InputError, match="flush before any sample"):
        lookahead_codec.stream_encoder().flush()
    with pytest.raises(InputError, match="flush before any frame"):
        lookahead_codec.stream_decoder().flush()


@pytest.mark.cuda
def test_cuda_gives_what_the_cpu_gives(tmp_path, codec, cuda):
    codec.save(tmp_path)
    device_codec = load_codec(tmp_path, device=cuda)
    wave, lengths = ragged([noise(1, n, seed=n) for n in (5000, 1, 3333)])
    here, there = codec.encode(wave, lengths), device_codec.encode(wave, lengths)
    assert (here.codes != there.codes.cpu()).float().mean() < 0.01
    decoded = device_codec.decode(here.codes, here.lengths).cpu()
    torch.testing.assert_close(decoded, codec.decode(here.codes, here.lengths), atol=1e-3, rtol=0)
