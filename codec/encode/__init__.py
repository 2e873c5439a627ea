"""Audio corpus → token store.

`items` lists what there is, `plan` cuts it into parts, `state` says what of it is done, `pipeline` encodes a part;
`corpus` is the run as a whole, in one process, several, or on a cluster.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codec.encode.corpus import EncodeReport, encode_corpus, name_of_errors, write_failures
    from codec.encode.items import Item, find_items
    from codec.encode.scanning import ScanReport, scan
    from codec.encode.settings import EncodeSettings

_MODULE_OF = {
    "EncodeReport": "corpus",
    "EncodeSettings": "settings",
    "Item": "items",
    "ScanReport": "scanning",
    "encode_corpus": "corpus",
    "find_items": "items",
    "name_of_errors": "corpus",
    "scan": "scanning",
    "write_failures": "corpus",
}

__all__ = [
    "EncodeReport",
    "EncodeSettings",
    "Item",
    "ScanReport",
    "encode_corpus",
    "find_items",
    "name_of_errors",
    "scan",
    "write_failures",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'codec.encode' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"codec.encode.{_MODULE_OF[name]}"), name)
