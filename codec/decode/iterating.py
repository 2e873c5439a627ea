"""A loader's batches, decoded as they are asked for, the next ones on their way to the device."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from codec.decode.batch import BatchDecoder


class DecodedBatches:
    """Decoded batches, again at each iteration; as long as what it is wrapped around."""

    def __init__(self, decoder: BatchDecoder, batches: Iterable[Any]) -> None:
        self._decoder = decoder
        self._batches = batches

    def __len__(self) -> int:
        """Batches of one iteration.

        Raises:
            TypeError: They have no known number.
        """
        return len(self._batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """The batches, decoded."""
        decoder = self._decoder
        ahead: deque[tuple[Any, Any]] = deque()
        for batch in self._batches:
            ahead.append((decoder.begin(batch), self._state()))
            if len(ahead) > decoder.fetches_ahead:
                yield self._hand_over(*ahead.popleft())
        while ahead:
            yield self._hand_over(*ahead.popleft())
        decoder.check()

    def _hand_over(self, staged: Any, state: Any) -> Any:
        return self._decoder.finish(staged)

    def _state(self) -> Any:
        return None


class ResumableBatches(DecodedBatches):
    """With the loader's `state_dict`, as of the batch handed over last: what was fetched ahead doesn't count."""

    def __init__(self, decoder: BatchDecoder, batches: Any) -> None:
        super().__init__(decoder, batches)
        self._loader = batches
        self._handed: Any = None

    def state_dict(self) -> Any:
        """Where the loader is; see there."""
        return self._loader.state_dict() if self._handed is None else self._handed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; see the loader."""
        self._handed = None
        self._loader.load_state_dict(state)

    def _hand_over(self, staged: Any, state: Any) -> Any:
        self._handed = state
        return super()._hand_over(staged, state)

    def _state(self) -> Any:
        return self._loader.state_dict()


def batches_over(decoder: BatchDecoder, batches: Iterable[Any]) -> DecodedBatches:
    """Decoded batches around an iterable, with a state if it has one."""
    resumes = hasattr(batches, "state_dict") and hasattr(batches, "load_state_dict")
    return ResumableBatches(decoder, batches) if resumes else DecodedBatches(decoder, batches)
