"""Codecs that share an encoder and codebooks share their token files, and only they do."""

import json
import shutil
import sys

import pytest
import torch
import yaml
from conftest import DATA, SMALL, copied, small_codec
from safetensors.torch import load_file, save_file

from codec import BatchDecoder, load_codec
from codec.audio import read_audio
from codec.cli import main
from codec.decode import decode_store
from codec.encode import encode_corpus
from codec.errors import CheckpointError, ConfigError, InputError, TokenFileError
from codec.model import SoundStream, SoundStreamConfig
from codec.model.soundstream import content_hash
from codec.sources import Excerpt, Tokens
from codec.spec import CodecSpec
from codec.tokens import TokenStore, TokenWriter
from codec.train import CodecTraining, load_config, train

FILES = ["speech_it_male_first-in-queue_16k.wav", "speech_ru_female_number-switched-off_16k.mp3"]


def sibling(origin: SoundStream, name: str, **changes) -> SoundStream:
    """A codec with the encoder and codebooks of `origin` and another decoder."""
    torch.manual_seed(1)
    codec = SoundStream(SoundStreamConfig(name=name, **{**SMALL, **changes})).requires_grad_(False).eval()
    shared = {k: v for k, v in origin.state_dict().items() if not k.startswith("decoder.")}
    codec.load_state_dict(shared, strict=False)
    codec.share_codes(origin)
    return codec


@pytest.fixture(scope="module")
def deeper(lookahead_codec):
    """Its decoder sees more frames than that of `lookahead_codec`."""
    return sibling(lookahead_codec, "deeper", decoder_blocks=(5, 1), decoder_dims=(16, 24))


@pytest.fixture(scope="module")
def shallower(lookahead_codec, deeper):
    """Made from `deeper`; its decoder sees fewer frames than either."""
    return sibling(deeper, "shallower", decoder_blocks=(1, 1))


@pytest.fixture
def corpus(tmp_path):
    return copied(FILES, tmp_path / "corpus")


def test_identity(lookahead_codec, deeper, shallower, tmp_path):
    origin = lookahead_codec.spec
    specs = [origin, deeper.spec, shallower.spec]
    assert len({spec.weights_hash for spec in specs}) == 3
    assert [spec.token_spec for spec in specs] == [origin] * 3  # chains go back to the first
    assert origin.codes_of is None and deeper.spec.codes_of == origin
    assert deeper.spec.decode_context == (6, 6) and origin.decode_context == (3, 3)
    wave = read_audio(DATA / FILES[0])[0]
    assert torch.equal(deeper.encode(wave).codes, lookahead_codec.encode(wave).codes)
    assert not torch.equal(deeper.decode(deeper.encode(wave)), lookahead_codec.decode(deeper.encode(wave)))

    saved = deeper.save(tmp_path / "deeper")
    loaded = load_codec(tmp_path / "deeper")
    assert saved == loaded.spec == deeper.spec
    assert "codes_of" not in saved.to_dict()  # token files are as they always were
    assert CodecSpec.from_dict(saved.token_spec.to_dict()) == origin
    for own, theirs in ((origin, deeper.spec), (deeper.spec, origin), (deeper.spec, deeper.spec)):
        own.check_tokens(theirs.token_spec)


def test_what_isnt_shared_is_refused(lookahead_codec, causal_codec, deeper, tmp_path):
    with pytest.raises(InputError, match="small has another encoder or other codebooks than small; its codes are its"):
        causal_codec.share_codes(lookahead_codec)
    with pytest.raises(
        TokenFileError, match=r"of small \(\w{12}…\), this codec is deeper \(\w{12}…, with the codes of "
    ):
        deeper.spec.check_tokens(causal_codec.spec)
    with pytest.raises(TokenFileError, match=r"the tokens are of deeper .*, this codec is small \(\w{12}…\); load the"):
        causal_codec.spec.check_tokens(deeper.spec)

    changed = sibling(lookahead_codec, "changed")
    changed.quantizer.codebooks[0, 0, 0] += 1
    with pytest.raises(CheckpointError, match=r"aren't those of small \(\w{12}…\), though codes_of says so"):
        changed.save(tmp_path / "changed")
    assert not (tmp_path / "changed" / "config.json").exists()
    with pytest.raises(CheckpointError, match="their stored dtype have changed has codes of its own"):
        deeper.save(tmp_path / "rounded", dtype=torch.float16)

    for bad in ({}, {"name": "x"}, {**deeper.config.codes_of, "decode_context": [1]}):
        with pytest.raises(ConfigError, match=r"codes_of is .* as SoundStream\.share_codes writes them"):
            SoundStreamConfig(codes_of=bad)


def test_a_checkpoint_whose_encoder_was_changed_later_is_refused(deeper, causal_codec, tmp_path):
    """Even with the content hash made to fit. Only one who makes up `codes_hash` as well isn't found out."""
    deeper.save(tmp_path)
    document, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    tensors["quantizer.codebooks"] += 1
    config = SoundStreamConfig.from_dict(document["model"])
    document["weights_hash"] = content_hash(config, tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"encoder and codebooks aren't those of small"):
        load_codec(tmp_path)

    # Forged throughout: indistinguishable without the checkpoint that it names, as `share_codes` says.
    forged = sibling(causal_codec, "forged", lookahead=False, kernel_size=4)
    claims = {**forged.config.codes_of, "weights_hash": deeper.spec.token_spec.weights_hash}
    forged.config = SoundStreamConfig.from_dict({**forged.config.to_dict(), "codes_of": claims})
    forged._spec = None
    forged.save(tmp_path / "forged")
    load_codec(tmp_path / "forged").spec.check_tokens(deeper.spec.token_spec)


@pytest.mark.parametrize("target", ["store.ctok", "store"])
def test_stores_are_the_same_and_go_on_with_either(lookahead_codec, deeper, shallower, corpus, tmp_path, target):
    stores = {}
    for codec in (lookahead_codec, deeper):
        stores[codec.spec.name] = tmp_path / codec.spec.name / target
        stores[codec.spec.name].parent.mkdir()
        encode_corpus(codec, [corpus], stores[codec.spec.name])

    def shards(store):
        return [path.read_bytes() for path in ([store] if store.is_file() else sorted(store.glob("*.ctok")))]

    assert shards(stores["small"]) == shards(stores["deeper"])
    shutil.copy(DATA / "speech_ru_female_please-hold_44k.flac", corpus)
    for codec, store in ((shallower, stores["small"]), (lookahead_codec, stores["deeper"])):
        report = encode_corpus(codec, [corpus], store)
        assert (report.num_items, report.failures) == (1, [])
    assert shards(stores["small"]) == shards(stores["deeper"])
    assert TokenStore(stores["small"]).spec == lookahead_codec.spec
    with pytest.raises(TokenFileError, match=r"differs from (this|the writer's) codec in weights_hash"):
        encode_corpus(small_codec(latent_dim=4), [corpus], stores["small"])


def test_a_writer_of_either_goes_on(lookahead_codec, deeper, tmp_path):
    codes = torch.zeros(4, 3, dtype=torch.int64)
    with TokenWriter(tmp_path / "a.ctok", lookahead_codec.spec) as writer:
        writer.add("a", codes, num_samples=900)
    with TokenWriter(tmp_path / "a.ctok", deeper.spec, resume=True) as writer:
        writer.add("b", codes, num_samples=900)
    assert list(TokenStore(tmp_path / "a.ctok").keys()) == ["a", "b"]


def test_excerpts_are_slices_with_any_decoder(lookahead_codec, deeper, shallower, corpus, tmp_path):
    encode_corpus(lookahead_codec, [corpus], tmp_path / "a.ctok")
    store = TokenStore(tmp_path / "a.ctok")
    excerpts = [Excerpt(FILES[0], 20, 10), Excerpt(FILES[1], 0, 25)]
    for codec in (lookahead_codec, deeper, shallower):
        decoder = BatchDecoder(codec)
        read = Tokens(store, context=decoder.context).get(excerpts)
        got = decoder(read)
        for row, (key, start, length) in zip(got.data, excerpts, strict=True):
            whole = codec.decode(torch.from_numpy(store.read(key)).long())[0]
            expected = whole[:, start * 320 : (start + length) * 320]
            torch.testing.assert_close(row[:, : length * 320], expected, atol=1e-4, rtol=0)
    # The store's own context is enough for the shallower one, and is refused where it isn't enough.
    read = Tokens(store).get(excerpts)
    assert torch.equal(BatchDecoder(shallower)(read).lengths, BatchDecoder(lookahead_codec)(read).lengths)
    message = (
        r"with \(3, 3\) frames of context, deeper, which shares the codes of small, needs \(6, 6\); read them with"
    )
    with pytest.raises(InputError, match=message):
        BatchDecoder(deeper)(read)
    bare = Tokens(store, context=(0, 0)).get(excerpts)
    assert BatchDecoder(lookahead_codec)(bare).data.shape[0] == 2  # whose own choice it is
    assert BatchDecoder(deeper, "codes")(bare).data.shape[0] == 2


def test_a_folder_isnt_decoded_half_by_one_and_half_by_another(lookahead_codec, deeper, corpus, tmp_path):
    encode_corpus(lookahead_codec, [corpus], tmp_path / "a.ctok")
    store, folder = TokenStore(tmp_path / "a.ctok"), tmp_path / "waves"
    decode_store(deeper, store, folder)
    assert decode_store(deeper, store, folder).num_skipped == 2
    with pytest.raises(InputError, match=r"holds another run: its codec is 'deeper \(\w{12}\)', this one's 'small'"):
        decode_store(lookahead_codec, store, folder)


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["codec", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return exit_info.value.code or 0, captured.out, " ".join(captured.err.split())

    return call


def test_command_line(run, lookahead_codec, causal_codec, deeper, corpus, tmp_path):
    for name, codec in {"small": lookahead_codec, "other": causal_codec, "deeper": deeper}.items():
        codec.save(tmp_path / name)
    store = tmp_path / "a.ctok"
    assert run("encode", corpus, "-o", store, "--codec", tmp_path / "deeper")[0] == 0
    for name in ("small", "deeper"):
        assert run("decode", store, "-o", tmp_path / "waves" / name, "--codec", tmp_path / name)[0] == 0
        assert run("features", store, "-o", tmp_path / "mels" / name, "--codec", tmp_path / name)[0] == 0
    for verb in ("decode", "features"):
        code, _, err = run(verb, store, "-o", tmp_path / "no", "--codec", tmp_path / "other")
        assert code == 1
        assert f"the tokens are of small ({lookahead_codec.spec.weights_hash[:12]}…), this codec is small " in err
        assert "load the codec that wrote them" in err
    facts = json.loads(run("info", tmp_path / "deeper", "--json")[1])
    assert facts["codes_of"] == f"small ({lookahead_codec.spec.weights_hash[:12]})"
    assert "codes_of" not in json.loads(run("info", tmp_path / "small", "--json")[1])


@pytest.fixture
def recipe(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "small")
    speech = str(DATA / "speech_ru_female_please-hold_44k.flac")
    model = {k: list(v) if isinstance(v, tuple) else v for k, v in SMALL.items()}
    settings = {
        "model": {"name": "tiny", **model},
        "data": {"train": [speech], "valid": [speech], "batch_size": 2, "segment_seconds": 0.5},
        "optim": {"max_steps": 4, "quantize_from": 4, "warmup_steps": 2, "average_decay": 0.5},
        "run": {"output": str(tmp_path / "run"), "valid_every": 4, "init_from": str(tmp_path / "small")},
        "trainer": {"precision": "32-true", "accelerator": "cpu"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings))
    return path


def test_training_a_part_keeps_the_codes(recipe, tmp_path, lookahead_codec):
    """Mel head, then from that checkpoint another decoder, then all: whose codes are its own."""
    origin, wave = lookahead_codec.spec, read_audio(DATA / FILES[0], num_samples=16000)[0]
    folder = train(load_config(recipe, {"optim.parts": "mel_head"}), progress=False)
    head = load_codec(folder)
    assert head.spec.token_spec == origin != head.spec
    assert load_codec(folder.parent / "checkpoint_last").spec.codes_of == origin

    start = {"run.init_from": str(folder), "run.output": str(tmp_path / "decoder"), "optim.parts": "decoder"}
    other = {**start, "model.decoder_dims": "[16, 24]", "model.decoder_blocks": "[3, 1]", "optim.max_steps": "3"}
    train(load_config(recipe, other), progress=False)
    folder = train(load_config(recipe, {**other, "optim.max_steps": "6"}), progress=False)  # resumed
    decoder = load_codec(folder)
    assert decoder.spec.token_spec == origin
    assert decoder.spec.decode_context == (4, 4)
    codes = lookahead_codec.encode(wave)
    assert torch.equal(decoder.encode(wave).codes, codes.codes)
    assert torch.isfinite(decoder.decode(codes)).all()

    start = {"run.init_from": str(folder), "run.output": str(tmp_path / "all")}
    start |= {"model.decoder_dims": "[16, 24]", "model.decoder_blocks": "[3, 1]"}
    everything = load_codec(train(load_config(recipe, start), progress=False))
    assert everything.spec.codes_of is None
    assert not torch.equal(everything.quantizer.codebooks, decoder.quantizer.codebooks)


def test_another_decoder_is_trained_anew(recipe):
    same = CodecTraining(load_config(recipe, {"optim.parts": "decoder"}))
    other = CodecTraining(load_config(recipe, {"optim.parts": "decoder", "model.mel_hidden": "20"}))
    assert (same._starts_anew, other._starts_anew) == (False, True)  # whose average forgets its random start at once
    message = r"has other settings \(lookahead: recipe False, checkpoint True\)|another architecture \(lookahead"
    with pytest.raises(ConfigError, match=message):
        CodecTraining(load_config(recipe, {"optim.parts": "decoder", "model.lookahead": "false"}))
    with pytest.raises(ConfigError, match=r"another architecture \(mel_hidden: recipe 20, checkpoint 24\)"):
        CodecTraining(load_config(recipe, {"optim.parts": "mel_head", "model.mel_hidden": "20"}))
    # Settings at their defaults in the recipe differ from others in the checkpoint, too.
    small_codec(codebook_dim=4, normalise_codes=True).save(recipe.parent / "small")
    with pytest.raises(ConfigError, match=r"normalise_codes: recipe None, checkpoint True"):
        CodecTraining(load_config(recipe, {"model.codebook_dim": "4"}))


def test_a_recipe_doesnt_choose_whose_codes(recipe, deeper):
    with pytest.raises(ConfigError, match=r"model.codes_of is filled in by the training, where optim.parts leaves"):
        CodecTraining(load_config(recipe, {"model.codes_of": json.dumps(deeper.config.codes_of)}))
