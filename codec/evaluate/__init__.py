"""Is this codec good enough for my data? Measures, side by side, by numbers and by ear.

`evaluate` measures codecs on audio files beside conventional codecs, `compare_store` an existing token store; both
return an `Evaluation`: plain records, for tables. `write_page` makes one self-contained HTML page of it.
`QualityCallback` logs the core measures while a codec is trained.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codec.evaluate.align import find_delay
    from codec.evaluate.callback import QualityCallback
    from codec.evaluate.metrics import METRICS, Clip, Metric, measure
    from codec.evaluate.page import write_page
    from codec.evaluate.results import Evaluation
    from codec.evaluate.run import compare_store, evaluate
    from codec.evaluate.statistics import Statistic, summarise

_MODULE_OF = {
    "Clip": "metrics",
    "Evaluation": "results",
    "METRICS": "metrics",
    "Metric": "metrics",
    "QualityCallback": "callback",
    "Statistic": "statistics",
    "compare_store": "run",
    "evaluate": "run",
    "find_delay": "align",
    "measure": "metrics",
    "summarise": "statistics",
    "write_page": "page",
}

__all__ = [
    "METRICS",
    "Clip",
    "Evaluation",
    "Metric",
    "QualityCallback",
    "Statistic",
    "compare_store",
    "evaluate",
    "find_delay",
    "measure",
    "summarise",
    "write_page",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'codec.evaluate' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"codec.evaluate.{_MODULE_OF[name]}"), name)
