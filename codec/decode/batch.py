"""`BatchDecoder`: batches of packed tokens in, waves or mels out, on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from codec.decode.checks import Checks, flags_of
from codec.decode.cutting import cut, filled
from codec.decode.iterating import DecodedBatches, batches_over
from codec.decode.mels import WaveFeatures
from codec.decode.shapes import Packing, Shape, StaticRuns
from codec.decode.transfer import Rows, Staged, checked_quantizers, receive, stage, unpack, unpack_on_host
from codec.errors import DecodeError, InputError
from codec.features import Spectrogram
from codec.model import Codec
from codec.sources import Excerpt, TokenBatch, Tokens
from codec.tokens import TokenStore

Output = Literal["wave", "mel", "latents", "codes"]
Layout = Literal["padded", "jagged", "list"]
OUTPUTS = ("wave", "mel", "latents", "codes")
LAYOUTS = ("padded", "jagged", "list")


@dataclass(frozen=True)
class DecodedBatch:
    """A batch on the device.

    Attributes:
        data: By output, wave `[B, C, N]`, log-mel or features `[B, M, F]`, latents `[B, D, T]`, all float32, or codes
            int64 `[B, K, T]`. By layout, "padded": such a tensor; beyond each row's length a wave, latents and codes
            are 0, a mel is the logarithm's floor. "jagged": a nested tensor of torch's jagged layout. "list": B
            tensors `[C, n]`.
        lengths: int64 `[B]`, on the device: valid samples, mel frames or frames of each row.
    """

    data: Any
    lengths: Tensor


Hook = Callable[[DecodedBatch, Mapping[str, Any]], Any]
"""A decoded batch, and the batch that it came in (empty for a bare `TokenBatch`) → what is handed over."""


class BatchDecoder:
    """Decodes token excerpts exactly: each row is what that span of the whole decoded item is.

    Exact means: provided that the tokens were read with `context` frames around each excerpt, as `Tokens` does by
    default for a codec's own output. For `features` read them by `Tokens(store, context=decoder.context)`. A codec
    with unbounded decode context (an LSTM) is approximate: `context` is then its warm-up, after which little is left of
    the difference to the whole.

    On a CUDA device packed bytes cross in one copy from page-locked memory, on a stream of their own when wrapped
    around a loader; batches are padded to a handful of shapes, each recorded as a CUDA graph; and nothing waits for
    the device, so that what is wrong with a batch may be raised up to eight batches later (`check` waits for it).

    Args:
        codec: Decodes.
        output: "wave"; "mel": log-mel by the codec's mel head, straight from tokens, or with `features` of the
            decoded wave; "latents": the sum of codebook entries; or "codes".
        device: Where to decode; where the codec is if None. The codec is copied if it isn't there.
        dtype: float32, bfloat16 or float16 of the decoder's weights and arithmetic; as the codec is if None. Lookup,
            inverse STFT, features and results are float32 in any case.
        features: A `MelSpectrogram` or other module of `codec.features`, computed on the device of the decoded wave.
            Where its hop divides the codec's and its frames don't depend on the whole item, they are that slice of
            the item's features; otherwise the features of the excerpt's wave.
        n_quantizers: Codebooks to use, the first ones; all that come if None.
        layout: "padded", "jagged" or "list"; see `DecodedBatch`.
        source: Where excerpts come from when they are given as such: a store, or a `Tokens`.
        hook: Called with each decoded batch, on the device, before it is handed over: the place for augmentation.
        prefetch: Batches taken from the loader and copied to a CUDA device ahead of the one that is decoded.
        graphs: Pad batches to a handful of shapes, and on a CUDA device record and replay graphs. By default on
            CUDA devices, for codecs that can be recorded.
        split: Decode a batch in parts if the device lacks the memory for it at once.
        check_finite: Make NaN or infinity in the result an error.

    Raises:
        InputError: Options that don't fit each other or the codec.

    Example:
        >>> codec = load_codec("speech_16k", device="cuda")
        >>> draws = RandomExcerpts({"x": Tokens("corpus.ctok")}, 1, batch_size=32, seed=0)
        >>> decoder = BatchDecoder(codec, output="mel")
        >>> for batch in decoder(draws.loader(num_batches=1000)):
        ...     batch["x"].data  # [32, 80, 100] on the GPU
    """

    def __init__(
        self,
        codec: Codec,
        output: Output = "wave",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        features: Spectrogram | None = None,
        n_quantizers: int | None = None,
        layout: Layout = "padded",
        source: Tokens | TokenStore | None = None,
        hook: Hook | None = None,
        prefetch: int = 2,
        graphs: bool | None = None,
        split: bool = False,
        check_finite: bool = True,
    ) -> None:
        if output not in OUTPUTS:
            raise InputError(f"output is {output!r}; it must be one of {', '.join(OUTPUTS)}")
        if layout not in LAYOUTS:
            raise InputError(f"layout is {layout!r}; it must be one of {', '.join(LAYOUTS)}")
        if dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise InputError(f"dtype is {dtype}; it must be torch.float32, torch.bfloat16 or torch.float16")
        if features is not None and output != "mel":
            raise InputError(f"features are given with output={output!r}; they go with output='mel'")
        limit = codec.spec.n_quantizers
        if n_quantizers is not None and not 1 <= n_quantizers <= limit:
            raise InputError(f"n_quantizers is {n_quantizers}; {codec.spec.name} has 1 to {limit}")
        if prefetch < 0:
            raise InputError(f"prefetch is {prefetch}; it must be at least 0 batches")
        self.codec, self._autocast = _placed(codec, device, dtype)
        self.device = self.codec.device
        self.output: Output = output
        self.layout: Layout = layout
        self.fetches_ahead = prefetch if self.device.type == "cuda" else 0
        """Batches taken from a loader before one is handed over."""
        self.hook = hook
        self._dtype = dtype or torch.float32
        self._n_quantizers = n_quantizers
        self._features = None if features is None else WaveFeatures(features, codec.spec, self.device)
        self._split = split
        self._limit: int | None = None
        """Padded frames that are decoded at once, after memory has run out."""
        self._check_finite = check_finite
        self._checks = Checks(output, self._dtype)
        self._copy_stream: torch.cuda.Stream | None = None
        if graphs is None:
            graphs = self.device.type == "cuda" and self.codec.records_graphs
        elif graphs and not self.codec.records_graphs:
            raise InputError(f"graphs=True, but {codec.spec.name} can't be recorded; leave graphs out")
        self._static = StaticRuns(self._run_static) if graphs else None
        spec = codec.spec
        step = {"wave": 1, "mel": codec.mel_hop_length}.get(output, spec.hop_length)
        self._step = step
        self._per_frame = spec.hop_length // step
        self._fill = codec.mel_floor if output == "mel" else 0.0
        if self._features is not None:
            self._fill = self._features.fill
        self._tokens = self._read_from(source)

    @property
    def context(self) -> tuple[int, int]:
        """(left, right) frames to read around each excerpt, for `Tokens(store, context=...)`."""
        if self.output in ("codes", "latents"):
            return 0, 0
        warm_up = self.codec.decode_warmup_frames
        left, right = self.codec.spec.decode_context or (warm_up, warm_up)
        margin = 0 if self._features is None else self._features.margin
        return left + margin, right + margin

    @property
    def shapes(self) -> list[Shape]:
        """The shapes that batches have been padded to."""
        return [] if self._static is None else self._static.shapes

    def _read_from(self, source: Tokens | TokenStore | None) -> Tokens | None:
        if isinstance(source, Tokens) or source is None:
            return source
        return Tokens(source, context=self.context, n_quantizers=self._n_quantizers)

    # --- calling

    @overload
    def __call__(self, batches: TokenBatch | list[Excerpt]) -> DecodedBatch: ...
    @overload
    def __call__(self, batches: Mapping[str, Any]) -> Any: ...
    @overload
    def __call__(self, batches: Iterable[Any]) -> DecodedBatches: ...
    def __call__(self, batches: Any) -> Any:
        """Decodes what it is given.

        Args:
            batches: A `TokenBatch`, or excerpts (with a `source`): gives a `DecodedBatch`. A batch of a loader: gives
                the same with every `TokenBatch` in it decoded and the rest untouched. An iterable of batches, such as
                a loader: gives an iterable of decoded ones, with the loader's length and `state_dict`.
        """
        if isinstance(batches, TokenBatch):
            return self.decode(batches)
        if isinstance(batches, Mapping):
            return self.finish(self.begin(batches))
        if isinstance(batches, list | tuple) and all(isinstance(item, Excerpt) for item in batches):
            return self.decode(batches)
        return batches_over(self, batches)

    def decode(self, batch: TokenBatch | Sequence[Excerpt], *, out: Tensor | None = None) -> DecodedBatch:
        """One packed batch, or excerpts of the `source`, → decoded batch on the device.

        Args:
            batch: What to decode.
            out: In the layout "padded": float32 (codes: int64) `[B, ..., N]` on the device, filled and returned as
                the batch's data. N may be larger than needed.

        Raises:
            TokenFileError: The tokens are of another codec, or hold a code outside the codebook.
            InputError: An empty batch, an excerpt outside its item, more quantizers than are there, tokens read with
                too little context for `features`, an `out` that doesn't fit.
            DecodeError: Out of memory, or the result isn't finite. On a CUDA device the latter is found out later.
        """
        if not isinstance(batch, TokenBatch):
            batch = self._read(batch)
        decoded: DecodedBatch = self._decode(self._stage(batch), out, {})
        return decoded

    def check(self) -> None:
        """Waits for the device and raises what is wrong with the batches so far.

        Raises:
            TokenFileError: As `decode`.
            DecodeError: As `decode`.
        """
        self._checks.look(wait=True)

    def _read(self, excerpts: Sequence[Excerpt]) -> TokenBatch:
        if self._tokens is None:
            raise InputError("excerpts are given, but no source to read them from; make the decoder with source=store")
        for key, start, length in excerpts:
            total = self._tokens.length(key)
            if start < 0 or length < 1 or start + length > total:
                raise InputError(
                    f"{key!r}: frames [{start}, {start + length}) asked for; the item has frames [0, {total}); "
                    "ask for at least one frame, within them"
                )
        return self._tokens.get(excerpts)

    # --- batches of a loader, in two steps

    def begin(self, batch: Any) -> Any:
        """First step: the batch with its packed bytes on their way to the device."""
        if isinstance(batch, TokenBatch):
            return self._stage(batch, ahead=True)
        staged = {name: self._stage(part, ahead=True) for name, part in batch.items() if isinstance(part, TokenBatch)}
        return batch, staged

    def finish(self, staged: Any) -> Any:
        """Second step: the batch decoded."""
        if isinstance(staged, Staged):
            return self._decode(staged, None, {})
        batch, parts = staged
        decoded = {name: self._decode(part, None, batch) for name, part in parts.items()}
        return batch.replace(**decoded) if hasattr(batch, "replace") else {**batch, **decoded}

    def _stage(self, batch: TokenBatch, *, ahead: bool = False) -> Staged:
        self.codec.spec.check_tokens(batch.spec)
        if len(batch.packed) == 0:
            raise InputError("the batch is empty; decode at least one excerpt")
        checked_quantizers(batch.packed, self._n_quantizers)
        # Unless told otherwise, tokens are read with the context of the codec that wrote them: another may need more.
        needs = "these features need" if self._features is not None else None
        if self.codec.spec.weights_hash != batch.spec.weights_hash:
            needs = needs or f"{self.codec.spec.name}, which shares the codes of {batch.spec.name}, needs"
        if needs and any(a < b for a, b in zip(batch.context, self.context, strict=True)):
            raise InputError(
                f"the tokens were read with {batch.context} frames of context, {needs} {self.context}; "
                "read them with Tokens(store, context=decoder.context)"
            )
        if ahead and self.device.type == "cuda" and self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return stage(batch, self.device, self._copy_stream if ahead else None)

    # --- decoding

    @torch.inference_mode(False)  # of a caller's: buffers made there couldn't be used again outside
    @torch.no_grad()
    def _decode(self, staged: Staged, out: Tensor | None, entries: Mapping[str, Any]) -> Any:
        self._checks.look()
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                data, lengths = self._in_memory(receive(staged))
        else:
            data, lengths = self._in_memory(staged)
        decoded = DecodedBatch(self._laid_out(data, staged, out), lengths)
        return decoded if self.hook is None else self.hook(decoded, entries)

    def _in_memory(self, staged: Staged) -> tuple[Tensor, Tensor]:
        """Data and lengths, in as many parts as memory needs."""
        num_rows, longest = staged.table.shape[1], int(staged.host[3].max())
        if self._limit is None or num_rows == 1 or num_rows * longest <= self._limit:
            try:
                return self._whole(staged)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not _is_out_of_memory(error):
                    raise
                if not self._split or num_rows == 1:
                    spec = self.codec.spec
                    seconds = num_rows * longest * spec.hop_length / spec.sample_rate
                    raise DecodeError(
                        f"out of memory on {self.device}: {num_rows} excerpts of up to {longest} frames, context "
                        f"included, are {seconds:.1f} s of audio to decode to {self.output}; lower batch_size or the "
                        "excerpts' length, or make the decoder with split=True"
                    ) from error
            # Here, so that what the exception holds is free.
            self._limit = num_rows * longest // 2
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        half = num_rows // 2
        parts = [self._in_memory(staged.part(*span)) for span in ((0, half), (half, num_rows))]
        size = max(data.shape[-1] for data, _ in parts)
        return (
            torch.cat([F.pad(data, (0, size - data.shape[-1]), value=self._fill) for data, _ in parts]),
            torch.cat([lengths for _, lengths in parts]),
        )

    def _whole(self, staged: Staged) -> tuple[Tensor, Tensor]:
        packed, num_rows = staged.batch.packed, staged.table.shape[1]
        packing = Packing.of(packed, checked_quantizers(packed, self._n_quantizers))
        result = None if self._static is None else self._static(staged, packing)
        if result is not None:
            data, lengths, flags = result
            size = int(self._host_lengths(staged).max())
            # The next replay overwrites what this one gave.
            data, lengths = data[..., :size].clone(), lengths.clone()
        else:
            data, lengths, flags = self._run_as_it_is(staged, packing)
        if self._check_finite or packing.codebook_size != 1 << packing.bits:
            self._checks.add(flags, codebook_size=packing.codebook_size, num_rows=num_rows)
        return data, lengths

    def _run_static(self, data: Tensor, table: Tensor, packing: Packing, shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
        """Looks at no value: what a graph records."""
        rows = Rows(*table)
        codes = self._unpacked(data, rows, packing, shape.num_read)
        values, lengths = self._values(codes.clamp(max=packing.codebook_size - 1), rows, rows.skip, shape, rows.read)
        values = filled(values, lengths, self._fill if values.is_floating_point() else 0)
        return values, lengths, self._flags(codes, values)

    def _run_as_it_is(self, staged: Staged, packing: Packing) -> tuple[Tensor, Tensor, Tensor]:
        """As `_run_static`, with the sizes of this batch, and shortcuts that its numbers on the host allow."""
        host, rows = staged.host, staged.rows
        shape = Shape(host.shape[1], int(host[3].max()), int(host[5].max()))
        is_part = host.shape[1] != len(staged.batch.packed)
        if self.device.type == "cpu" and not is_part:
            codes = unpack_on_host(staged.batch.packed, packing.n_quantizers)
        else:
            codes = self._unpacked(staged.data, rows, packing, shape.num_read)
        skip: Tensor | int = int(host[4, 0]) if (host[4] == host[4, 0]).all() else rows.skip
        read = rows.read if (host[3] < shape.num_read).any() else None
        values, lengths = self._values(codes.clamp(max=packing.codebook_size - 1), rows, skip, shape, read)
        own = self._host_lengths(staged)
        values = values[..., : int(own.max())]
        if (own < values.shape[-1]).any():
            values = filled(values, lengths, self._fill if values.is_floating_point() else 0)
        return values.contiguous(), lengths, self._flags(codes, values)

    def _unpacked(self, data: Tensor, rows: Rows, packing: Packing, num_frames: int) -> Tensor:
        return unpack(
            data,
            rows.offsets,
            rows.first_frame,
            rows.last_run_bytes,
            rows.read,
            num_frames=num_frames,
            n_quantizers=packing.n_quantizers,
            bits=packing.bits,
            block_stride=packing.block_stride,
        )

    def _values(
        self, codes: Tensor, rows: Rows, skip: Tensor | int, shape: Shape, read: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Codes `[B, K, T]` → the excerpts' data, any beyond each row's length, and lengths."""
        with self._autocast or nullcontext():
            if self._features is not None:
                wave = self.codec.decode_static(codes, read)
                return self._features(wave, rows, skip, shape.num_frames)
            if self.output == "codes":
                decoded = codes
            else:
                decoded = self.codec.decode_static(codes, read, output=self.output)
        return cut(decoded, skip, shape.num_frames, self._per_frame, self._fill), self._lengths(rows.num_samples)

    def _lengths(self, num_samples: Any) -> Any:
        return (num_samples + (self._step - 1)) // self._step

    def _host_lengths(self, staged: Staged) -> NDArray[np.int64]:
        """`lengths`, known without the device."""
        rows = Rows(*staged.host)  # type: ignore[arg-type]
        if self._features is not None:
            return self._features.host_lengths(rows)
        lengths: NDArray[np.int64] = self._lengths(rows.num_samples)
        return lengths

    def _flags(self, codes: Tensor, values: Tensor) -> Tensor:
        return flags_of(codes, values if self._check_finite else codes)

    # --- handing over

    def _laid_out(self, data: Tensor, staged: Staged, out: Tensor | None) -> Any:
        if out is not None:
            return self._into(data, out)
        if self.layout == "padded":
            return data
        rows = [row[..., :n] for row, n in zip(data, self._host_lengths(staged).tolist(), strict=True)]
        if self.layout == "list":
            return rows
        offsets = torch.zeros(len(rows) + 1, dtype=torch.int64)
        torch.cumsum(torch.from_numpy(self._host_lengths(staged)), 0, out=offsets[1:])
        ragged = data.ndim - 1
        return torch.nested.nested_tensor_from_jagged(
            torch.cat(rows, -1), offsets.to(data.device, non_blocking=True), jagged_dim=ragged
        )

    def _into(self, data: Tensor, out: Tensor) -> Tensor:
        if self.layout != "padded":
            raise InputError(f"out is given with layout {self.layout!r}; it holds the layout 'padded' only")
        fits = out.ndim == data.ndim and out.shape[:-1] == data.shape[:-1] and out.shape[-1] >= data.shape[-1]
        if not fits or out.dtype != data.dtype or out.device != data.device:
            raise InputError(
                f"out is {list(out.shape)} of {out.dtype} on {out.device}; the batch needs {list(data.shape)} or a "
                f"larger last axis, of {data.dtype} on {data.device}"
            )
        out[..., : data.shape[-1]] = data
        out[..., data.shape[-1] :] = self._fill if data.is_floating_point() else 0
        return out


def _placed(
    codec: Codec, device: torch.device | str | None, dtype: torch.dtype | None
) -> tuple[Codec, AbstractContextManager[Any] | None]:
    """The codec, copied if it must be moved or cast; and autocast, for codecs whose parts can't just be cast."""
    where = codec.device if device is None else torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    network = getattr(codec, "decoder", None) if codec.records_graphs else None
    casts = dtype is not None and (network is None or any(p.dtype != dtype for p in network.parameters()))
    if where == codec.device and not casts:
        return codec, None
    if not isinstance(codec, nn.Module):
        raise InputError(f"{type(codec).__name__} is no torch module, so it stays on {codec.device} as it is")
    _ = codec.spec  # hashed from the weights as they are
    placed = copy.deepcopy(codec) if where != codec.device or network is not None else codec
    if where != codec.device:
        placed = placed.to(where)
    if not casts:
        return placed, None
    if network is None:
        autocast = torch.autocast(where.type, dtype, enabled=dtype != torch.float32, cache_enabled=False)
        return placed, autocast
    for parameter in placed.decoder.parameters():  # type: ignore[operator, union-attr]
        parameter.data = parameter.data.to(dtype)
    return placed, None


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
