import subprocess
import sys

from test_decode import make_store

# All that a decoding machine has; what else is installed here is hidden from it.
SCRIPT = """
import sys

for name in sys.argv[3].split():
    sys.modules[name] = None

import torch

torch.set_num_threads(1)
from codec import BatchDecoder, Excerpt, MelSpectrogram, RandomExcerpts, Tokens, TokenStore, load_codec

codec = load_codec(sys.argv[1])
store = TokenStore(sys.argv[2])
for output, features in (("wave", None), ("mel", None), ("mel", MelSpectrogram("codec")), ("codes", None)):
    decoder = BatchDecoder(codec, output, features=features, source=store)
    decoder([Excerpt("a.wav", 3, 20)])
    draws = RandomExcerpts({"x": Tokens(store, context=decoder.context)}, 1, batch_size=2, seed=0, short="pad")
    (batch,) = decoder(draws.loader(num_batches=1, num_workers=1))
    assert batch["x"].data.shape[0] == 2
print("decoded")
"""
HIDDEN = (
    "soundfile torchaudio torchcodec lightning typer rich yaml fsspec transformers huggingface_hub matplotlib pytest "
    "hypothesis scipy librosa pandas isal pesq pystoi ray"
)


def test_decoding_needs_torch_numpy_einops_and_safetensors_only(tmp_path, lookahead_codec):
    lookahead_codec.save(tmp_path / "codec")
    make_store(tmp_path / "x.ctok", lookahead_codec).close()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "codec", tmp_path / "x.ctok", HIDDEN],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "decoded\n", done.stderr
