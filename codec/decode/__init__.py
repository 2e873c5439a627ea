"""Batches of token excerpts → codes, latents, waves or mels on the device: the consumer end of a data loader."""

from codec.decode.batch import BatchDecoder, DecodedBatch, Hook, Layout, Output
from codec.decode.corpus import DecodeReport, decode_store
from codec.decode.iterating import DecodedBatches
from codec.decode.transfer import unpack_codes

__all__ = [
    "BatchDecoder",
    "DecodeReport",
    "DecodedBatch",
    "DecodedBatches",
    "Hook",
    "Layout",
    "Output",
    "decode_store",
    "unpack_codes",
]
