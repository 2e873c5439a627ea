"""Between the stages: an iterator that runs ahead in a thread, and a thread that does jobs in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from codec.errors import CodecError

T = TypeVar("T")


class Prefetched:
    """An iterator run in a thread of its own, a few elements ahead."""

    def __init__(self, iterator: Iterator[Any], depth: int) -> None:
        self._queue: queue.Queue[tuple[Any, BaseException | None]] = queue.Queue(depth)
        self._stop = threading.Event()
        self._iterator = iterator
        self._thread = threading.Thread(target=self._work, name="codec-ahead", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for element in self._iterator:
                if not self._put((element, None)):
                    break
            self._put((None, None))
        except BaseException as error:  # whoever takes must get it
            self._put((None, error))
        finally:
            close = getattr(self._iterator, "close", None)
            if close is not None:
                close()

    def _put(self, element: tuple[Any, BaseException | None]) -> bool:
        while not self._stop.is_set():
            try:
                self._queue.put(element, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def take(self) -> Any:
        """The next element; None at the end."""
        element, error = self._queue.get()
        if error is not None:
            raise error
        return element

    def stop(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=60)


class Writer:
    """Runs what it is given in a thread of its own, in order, a few jobs behind."""

    _DEPTH = 256

    def __init__(self) -> None:
        self._queue: queue.Queue[Callable[[], Any] | None] = queue.Queue(self._DEPTH)
        self._error: BaseException | None = None
        self.waited = 0.0
        self._thread = threading.Thread(target=self._work, name="codec-write", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if self._error is None:
                try:
                    job()
                except BaseException as error:  # whoever puts must get it
                    self._error = error

    def put(self, job: Callable[[], Any]) -> None:
        """Has a job done; raises what an earlier one raised."""
        if self._error is not None:
            raise self._error
        started = time.perf_counter()
        self._queue.put(job)
        self.waited += time.perf_counter() - started

    def ask(self, job: Callable[[], T]) -> T:
        """Has a job done, and waits for what it returns or raises: that isn't the writer's failure."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(job())
            except CodecError as error:
                answer.set_exception(error)
            except BaseException as error:
                answer.set_exception(error)
                raise

        self.put(run)
        while True:
            try:
                return answer.result(timeout=0.2)
            except TimeoutError:
                if self._error is not None:
                    raise self._error from None

    def finish(self, *, quietly: bool = False) -> None:
        """Waits for all jobs; raises what one of them raised."""
        started = time.perf_counter()
        self._queue.put(None)
        self._thread.join()
        self.waited += time.perf_counter() - started
        if self._error is not None and not quietly:
            raise self._error
