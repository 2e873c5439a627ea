"""What was found out about files, so that the next excerpt of one needn't find it out again."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from codec.audio.opening import Source

T = TypeVar("T")


class Facts(Generic[T]):
    """One fact each about many files, by path, size and time of change. The last used ones are kept.

    Args:
        most: Facts kept, or their weight together.
        weigh: What one weighs.
    """

    def __init__(self, most: int, weigh: Callable[[T], int] = lambda _: 1) -> None:
        self._most, self._weigh, self._weight = most, weigh, 0
        self._facts: OrderedDict[tuple[object, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, source: Source) -> T | None:
        """The fact about the source, if it is known."""
        identity = source.identity()
        return None if identity is None else self._facts.get(identity)

    def keep(self, source: Source, fact: T) -> None:
        """Keeps the fact about the source, if it is one that can be known again."""
        identity = source.identity()
        if identity is None:
            return
        with self._lock:
            if identity in self._facts:
                self._weight -= self._weigh(self._facts.pop(identity))
            self._facts[identity] = fact
            self._weight += self._weigh(fact)
            while self._weight > self._most:
                self._weight -= self._weigh(self._facts.popitem(last=False)[1])

    def get(self, source: Source, find: Callable[[], T]) -> T:
        """The fact about the source, found now if it isn't known."""
        identity = source.identity()
        if identity is None:
            return find()
        with self._lock:
            if identity in self._facts:
                self._facts.move_to_end(identity)
                return self._facts[identity]
        # Threads may find the same fact twice, but not different ones.
        fact = find()
        self.keep(source, fact)
        return fact
