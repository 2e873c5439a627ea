import multiprocessing
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from codec.model import SoundStream, SoundStreamConfig

DATA = Path(__file__).parent / "data"
torch.set_num_threads(1)

SMALL = {
    "encoder_dims": (24, 32),
    "encoder_blocks": (1, 2),
    "decoder_dims": (32, 24),
    "decoder_blocks": (2, 1),
    "latent_dim": 8,
    "n_quantizers": 4,
    "codebook_size": 32,
    "mel_hidden": 24,
    "seanet_channels": (4, 3),
}


def copied(names, folder: Path) -> Path:
    """A new folder with these clips of `DATA`."""
    folder.mkdir()
    for name in names:
        shutil.copy(DATA / name, folder)
    return folder


def small_codec(**changes) -> SoundStream:
    """An untrained codec with real geometry and codebooks as wide as its latents: its codes vary."""
    torch.manual_seed(0)
    codec = SoundStream(SoundStreamConfig(name="small", **{**SMALL, **changes})).requires_grad_(False).eval()
    latents = codec.latents(torch.randn(1, codec.config.channels, 64 * codec.config.hop_length) * 0.3)
    codec.quantizer.initialise(latents.flatten(0, 1), iterations=2)
    return codec


def num_ties(codec: SoundStream, latents: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """Frames whose codes differ, each of which must be a tie: two entries equally near within float32 rounding.

    latents `[T, D]`, codes `[K, T]`. After a tie the later levels quantize another residual and may differ freely.
    """
    frames = (ours != theirs).any(0).nonzero().flatten().tolist()
    for frame in frames:
        residual = latents[frame].double()
        for level, codebook in enumerate(codec.quantizer.codebooks.double()):
            a, b = codebook[ours[level, frame]], codebook[theirs[level, frame]]
            if not torch.equal(a, b):
                gap = (residual - a).square().sum() - (residual - b).square().sum()
                assert gap.abs() < 1e-5 * residual.square().sum(), f"frame {frame}, level {level} isn't a tie"
                break
            residual = residual - a
    return len(frames)


def encode_until_killed(num_items: int, codec: SoundStream, corpus: Path, store: Path, **options) -> None:
    """`encode_corpus` in a process that kills itself (SIGKILL) once so many items are done."""
    from codec.encode import encode_corpus

    def die(done, total, seconds):
        if done >= num_items:
            os.kill(os.getpid(), signal.SIGKILL)

    # A fork: it begins at once, and rounds as this process does.
    process = multiprocessing.get_context("fork").Process(
        target=encode_corpus, args=(codec, [corpus], store), kwargs={**options, "on_progress": die}
    )
    process.start()
    process.join(120)
    code = process.exitcode
    process.kill()
    assert code == -signal.SIGKILL


@pytest.fixture(scope="session")
def lookahead_codec() -> SoundStream:
    return small_codec()


@pytest.fixture(scope="session")
def causal_codec() -> SoundStream:
    return small_codec(lookahead=False, kernel_size=4)


@pytest.fixture(scope="session")
def seanet_codec() -> SoundStream:
    return small_codec(body="seanet", strides=(4, 2, 5, 8))


@pytest.fixture(scope="session")
def causal_seanet_codec() -> SoundStream:
    return small_codec(body="seanet", lookahead=False, seanet_kernel_size=3, seanet_depthwise=True)


@pytest.fixture(scope="session", params=["lookahead", "causal"])
def codec(request, lookahead_codec, causal_codec) -> SoundStream:
    return lookahead_codec if request.param == "lookahead" else causal_codec


@pytest.fixture
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        if os.environ.get("CODEC_REQUIRE_CUDA") == "1":
            pytest.fail("CODEC_REQUIRE_CUDA=1, but torch sees no CUDA device")
        pytest.skip("needs a CUDA device; none here")
    return torch.device("cuda")
