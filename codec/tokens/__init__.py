"""Codes ↔ bytes: compact, checksummed shards, read by excerpt (FORMAT.md). Never imports torch."""

from codec.tokens.batch import PackedBatch
from codec.tokens.reshard import merge, split
from codec.tokens.store import ItemInfo, TokenStore
from codec.tokens.summary import CodebookUsage, StoreSummary, summarise
from codec.tokens.verify import Problem
from codec.tokens.writer import TokenWriter

__all__ = [
    "CodebookUsage",
    "ItemInfo",
    "PackedBatch",
    "Problem",
    "StoreSummary",
    "TokenStore",
    "TokenWriter",
    "merge",
    "split",
    "summarise",
]
