"""Batches of token excerpts → codes, waves or mels on the device: the consumer end of a data loader."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from codec import audio
from codec.errors import InputError, TokenFileError
from codec.model import Codec
from codec.nn.spectral import frame_mask
from codec.sources import Excerpt, TokenBatch, Tokens, output_names, write_array
from codec.tokens import PackedBatch, TokenStore

Output = Literal["wave", "mel", "codes"]


@dataclass(frozen=True)
class DecodedBatch:
    """A padded batch on the device.

    Attributes:
        data: Wave `[B, C, N]` or log-mel `[B, M, F]`, float32, or codes int64 `[B, K, T]`.
        lengths: int64 `[B]`: valid samples, mel frames or frames of each row. Beyond them a wave is 0, a mel is
            the floor of its logarithm, codes are 0.
    """

    data: Tensor
    lengths: Tensor


def unpack_codes(packed: PackedBatch, device: torch.device | str = "cpu") -> Tensor:
    """Bits → codes on the device, so that packed bytes are what crosses the bus.

    The arithmetic is that of `PackedBatch`; the result equals `packed.unpack()`.

    Returns:
        int64 `[B, K, T]`, zeros beyond each row's length.

    Raises:
        TokenFileError: A code isn't below the codebook size.
    """
    device = torch.device(device)

    def move(array: Any) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    bits, full_run = packed.bits, 32 * packed.bits
    longest = int(packed.lengths.max())
    data, lengths, first_frame = move(packed.data), move(packed.lengths), move(packed.first_frame)
    steps = torch.arange(longest, device=device)
    # Beyond a row's end its last code is read again, then zeroed: no load leaves the data.
    frame = first_frame[:, None] + torch.minimum(steps, lengths[:, None] - 1)
    block = frame >> 8
    bit = (frame & 255) * bits
    last = (first_frame + lengths - 1)[:, None] >> 8
    run = torch.where(block == last, move(packed.last_run_bytes)[:, None], full_run)
    start = move(packed.offsets)[:, None] + block * packed.block_stride + (bit >> 3)
    levels = torch.arange(packed.n_quantizers, device=device)[:, None]
    position = start[:, None] + levels * run[:, None]
    word = data[position].int() | data[position + 1].int() << 8 | data[position + 2].int() << 16
    codes = ((word >> (bit & 7)[:, None]) & ((1 << bits) - 1)).long()
    codes = codes * (steps < lengths[:, None])[:, None]
    if packed.codebook_size != 1 << bits and int(codes.max()) >= packed.codebook_size:
        raise TokenFileError(
            f"code {int(codes.max())} in a batch; the codebooks have {packed.codebook_size} entries: "
            "run `codec verify` on the store"
        )
    return codes


class BatchDecoder:
    """Decodes token excerpts exactly: each row is what that span of the whole decoded item is.

    Args:
        codec: Decodes, on the device it is on.
        output: "wave"; "mel": log-mel by the codec's mel head, straight from tokens; or "codes".

    Example:
        >>> codec = load_codec("speech_16k", device="cuda")
        >>> draws = RandomExcerpts({"x": Tokens("corpus.ctok")}, 1, batch_size=32, seed=0)
        >>> decoder = BatchDecoder(codec, output="mel")
        >>> for batch in decoder(draws.loader(num_batches=1000)):
        ...     batch["x"].data  # [32, 80, 100] on the GPU
    """

    def __init__(self, codec: Codec, output: Output = "wave") -> None:
        if output not in ("wave", "mel", "codes"):
            raise InputError(f"output is {output!r}; it must be 'wave', 'mel' or 'codes'")
        self.codec = codec
        self.output = output
        self._step = {"wave": 1, "mel": codec.mel_hop_length, "codes": codec.spec.hop_length}[output]
        """Samples per position of the output."""

    def __call__(self, batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Decodes the `TokenBatch` entries of batches as they come; everything else passes untouched."""
        for batch in batches:
            yield {name: self.decode(part) if isinstance(part, TokenBatch) else part for name, part in batch.items()}

    @torch.no_grad()
    def decode(self, batch: TokenBatch) -> DecodedBatch:
        """One packed batch → padded batch on the codec's device.

        Raises:
            TokenFileError: The tokens are of another codec, or hold a code outside the codebook.
        """
        self.codec.spec.check_tokens(batch.spec)
        device = self.codec.device
        codes = unpack_codes(batch.packed, device)
        skip, frames = batch.skip.to(device), batch.lengths.to(device)
        lengths = -(-batch.num_samples.to(device) // self._step)
        read = torch.from_numpy(batch.packed.lengths).to(device)
        per_frame = self.codec.spec.hop_length // self._step
        fill: float = 0
        if self.output == "codes":
            decoded = codes
        elif self.output == "wave":
            decoded = self.codec.decode(codes, read)
        else:
            decoded, fill = self.codec.decode_mel(codes, read), self.codec.mel_floor
        data = _window(decoded, skip, frames, per_frame, fill)[..., : int(lengths.max())]
        valid = frame_mask(lengths, data.shape[-1]).transpose(1, 2)
        return DecodedBatch(torch.where(valid, data, fill), lengths)


def _window(data: Tensor, skip: Tensor, frames: Tensor, per_frame: int, fill: float) -> Tensor:
    """Cuts `[skip, skip + frames)` out of each row, in one gather.

    data `[B, X, T * per_frame]`, skip and frames int64 `[B]` → `[B, X, max(frames) * per_frame]`.
    """
    longest = int(frames.max())
    if bool((skip == skip[0]).all()):
        first = int(skip[0]) * per_frame
        cut = data[..., first : first + longest * per_frame]
        return F.pad(cut, (0, longest * per_frame - cut.shape[-1]), value=fill)
    num_frames = data.shape[-1] // per_frame
    index = (skip[:, None] + torch.arange(longest, device=data.device)).clamp(max=num_frames - 1)
    pieces = data.view(*data.shape[:-1], num_frames, per_frame)
    picked = pieces.gather(2, index[:, None, :, None].expand(-1, data.shape[1], -1, per_frame))
    return picked.flatten(2)


@dataclass
class DecodeReport:
    """What a `decode_store` run did.

    Attributes:
        num_items: Items written.
        audio_seconds: Audio they stand for.
        elapsed_seconds: Wall time.
        failures: key and error of each item that couldn't be decoded.
    """

    num_items: int = 0
    audio_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    failures: list[dict[str, str]] = field(default_factory=list)


def decode_store(
    codec: Codec,
    store: TokenStore,
    folder: str | os.PathLike[str],
    output: Literal["wave", "mel"] = "wave",
    *,
    n_quantizers: int | None = None,
    batch_frames: int = 6400,
    force: bool = False,
    on_progress: Callable[[int, int, float], None] | None = None,
) -> DecodeReport:
    """Decodes every item of a store into files: 16-bit WAV, or log-mel float32 `.npy` `[M, F]`.

    Items are cut into excerpts and decoded in batches across items. A damaged item is reported and left out.

    Args:
        codec: The codec that wrote the store.
        store: What to decode.
        folder: Where to; made if missing. An item's file is named by its key.
        output: "wave" or "mel" (by the codec's mel head).
        n_quantizers: Use the first codebooks only; all that are stored if None.
        batch_frames: Frames decoded at once.
        force: Replace files that are there.
        on_progress: Called with (items done, items in all, audio seconds so far).

    Raises:
        InputError: A file is there already, or a key can't be a file name.
        TokenFileError: The store is of another codec.
    """
    started = time.monotonic()
    decoder = BatchDecoder(codec, output)
    codec.spec.check_tokens(store.spec)
    keys = list(store.keys())
    root = Path(folder)
    targets = [root / name for name in output_names(keys, ".wav" if output == "wave" else ".npy")]
    taken = [target for target in targets if target.exists()]
    if taken and not force:
        raise InputError(
            f"{taken[0]} exists ({len(taken)} files in all); give another folder, or --force to replace them"
        )
    report = DecodeReport()
    tokens = Tokens(store, n_quantizers=n_quantizers)
    pieces: list[Tensor] = []
    for excerpts in _cut(keys, store.num_frames.tolist(), batch_frames):
        try:
            batch = decoder.decode(tokens.get([excerpt for _, excerpt, _ in excerpts]))
            rows: list[Tensor | TokenFileError] = [
                row[:, :length].cpu() for row, length in zip(batch.data, batch.lengths.tolist(), strict=True)
            ]
        except TokenFileError:
            rows = [_decode_alone(decoder, tokens, excerpt) for _, excerpt, _ in excerpts]
        for (item, excerpt, is_last), row in zip(excerpts, rows, strict=True):
            if isinstance(row, TokenFileError):
                pieces = []
                if not report.failures or report.failures[-1]["key"] != excerpt.key:
                    report.failures.append({"key": excerpt.key, "error": str(row)})
                continue
            pieces.append(row)
            if not is_last:
                continue
            if not report.failures or report.failures[-1]["key"] != excerpt.key:
                _write(targets[item], torch.cat(pieces, -1), codec.spec.sample_rate, output, force=force)
                report.num_items += 1
                report.audio_seconds += store.info(excerpt.key).num_samples / codec.spec.sample_rate
            pieces = []
        if on_progress is not None:
            on_progress(report.num_items + len(report.failures), len(keys), report.audio_seconds)
    report.elapsed_seconds = time.monotonic() - started
    return report


def _cut(keys: list[str], num_frames: list[int], batch_frames: int) -> Iterator[list[tuple[int, Excerpt, bool]]]:
    """Batches of (item, excerpt, is the item's last) that together cover every item in order."""
    size = max(1, batch_frames // 4)
    batch: list[tuple[int, Excerpt, bool]] = []
    longest = 0
    for item, (key, total) in enumerate(zip(keys, num_frames, strict=True)):
        for start in range(0, total, size):
            length = min(size, total - start)
            if batch and max(longest, length) * (len(batch) + 1) > batch_frames:
                yield batch
                batch, longest = [], 0
            longest = max(longest, length)
            batch.append((item, Excerpt(key, start, length), start + length == total))
    if batch:
        yield batch


def _decode_alone(decoder: BatchDecoder, tokens: Tokens, excerpt: Excerpt) -> Tensor | TokenFileError:
    try:
        return decoder.decode(tokens.get([excerpt])).data[0].cpu()
    except TokenFileError as error:
        return error


def _write(path: Path, data: Tensor, sample_rate: int, output: str, *, force: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if output == "wave":
        audio.write_audio(path, data, sample_rate, force=force)
    else:
        write_array(path, data)
