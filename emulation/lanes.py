"""Independent pieces of work on a few threads, each computing with one of torch's threads.

torch's own threads share every single operation, which costs more than it gains on pieces that fit in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Event, Lock
from typing import Generic, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_MOST_LANES = 8
_busy = Lock()


class Once(Generic[Result]):
    """A value computed by whichever thread asks first.

    >>> once = Once(lambda: [])
    >>> once() is once()
    True
    """

    def __init__(self, compute: Callable[[], Result]) -> None:
        """Keep ``compute`` until it is asked for."""
        self._compute = compute
        self._lock = Lock()
        self._result: list[Result] = []

    def __call__(self) -> Result:
        """Return the value."""
        with self._lock:
            if not self._result:
                self._result.append(self._compute())
            return self._result[0]


def for_each(work: Callable[[Item], None], items: Iterator[Item], device: torch.device) -> None:
    """Call ``work`` on every item, on as many threads as ``torch.get_num_threads()`` says (at most 8) for a CPU.

    Items are taken one after the other; ``work`` must not depend on the order. After an exception, an interruption from
    the keyboard included, no thread takes another item; it is raised here, once every thread has stopped. Meanwhile
    torch's number of threads is 1 in the whole process, and a second call on another thread does its work there.

    >>> seen = []
    >>> for_each(seen.append, iter(range(3)), torch.device("cpu"))
    >>> sorted(seen)
    [0, 1, 2]
    """
    first = next(items, None)
    if first is None:
        return
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    second = next(items, None) if threads > 1 else None
    if second is None or not _busy.acquire(blocking=False):
        for item in chain((item for item in (first, second) if item is not None), items):
            work(item)
        return
    try:
        # A process-wide setting, MKL's most of all, which each lane would use in full.
        torch.set_num_threads(1)
        _run_lanes(work, chain((first, second), items), min(threads, _MOST_LANES))
    finally:
        torch.set_num_threads(threads)
        _busy.release()


def _run_lanes(work: Callable[[Item], None], items: Iterator[Item], lanes: int) -> None:
    lock = Lock()
    stopped = Event()
    inference = torch.is_inference_mode_enabled()

    def take() -> Item | None:
        with lock:
            return None if stopped.is_set() else next(items, None)

    def lane() -> None:
        # These belong to a thread, not to the process.
        torch.set_num_threads(1)
        try:
            with torch.inference_mode(inference), torch.no_grad():
                while (item := take()) is not None:
                    work(item)
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(lanes, "fp8ref") as pool:
        try:
            for future in [pool.submit(lane) for _ in range(lanes)]:
                future.result()
        finally:
            stopped.set()  # or the pool, on its way out, would wait for all of the work
