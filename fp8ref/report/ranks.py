"""The processes that compute a report: one, or as many as ``torchrun`` starts, on any number of machines.

Each holds the whole model, takes the next piece from a shared counter, and in the end gets the results of all. The
processes see each other alive through the store of ``torch.distributed``; only what is computed goes through gloo.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch.distributed as dist

from fp8ref.emulation.checks import first_line
from fp8ref.report.errors import ReportError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Result = TypeVar("Result")

PATIENCE = 30.0
"""Seconds without a sign of life after which a process counts as lost."""

_BEAT = 0.5
_HEARING = 2.0
_JOIN = timedelta(minutes=5)


class Ranks(Protocol):
    """Processes that share work; every one of them makes the same calls in the same order."""

    number: int
    """Which of them this is; 0 speaks to the user."""
    count: int

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Raise ReportError unless all have the same facts."""

    def share(
        self, pieces: int, work: Callable[[int, Callable[[int], None]], Result], advance: Callable[[int], None]
    ) -> list[Result]:
        """Return ``[work(0, ...), work(1, ...), ...]`` to all; on rank 0 ``advance`` hears of everyone's products."""


class Alone:
    """One process.

    >>> Alone().share(3, lambda piece, advance: piece * piece, print)
    [0, 1, 4]
    """

    number = 0
    count = 1

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Nothing to compare with."""

    def share(
        self, pieces: int, work: Callable[[int, Callable[[int], None]], Result], advance: Callable[[int], None]
    ) -> list[Result]:
        """Do all of it here."""
        return [work(piece, advance) for piece in range(pieces)]


class Together:
    """One of several processes."""

    def __init__(self, store: Store, number: int, count: int, patience: float = PATIENCE) -> None:
        """Start to show signs of life; :meth:`leave` ends that.

        Args:
            store: what all processes see.
            number: which of them this is.
            count: how many there are.
            patience: seconds without a sign of life after which another counts as lost.
        """
        self.number = number
        self.count = count
        self._store = store
        self._patience = patience
        self._products = 0
        self._shown = 0
        self._stages = 0
        self._seen = {other: ("", time.monotonic()) for other in range(count) if other != number}
        self._checked = 0.0
        self._left = Event()
        self._show_life(0)
        self._heart = Thread(target=self._beat, name="fp8ref signs of life", daemon=True)
        self._heart.start()

    def leave(self) -> None:
        """Show no more signs of life."""
        self._left.set()
        self._heart.join()

    def fail(self, message: str) -> None:
        """Let the others know why this one stops; the first to fail waits a moment for them to hear it."""
        mine = f"{self.number} {message}"
        try:
            if self._store.compare_set("failed", "", mine).decode() != mine:
                self._store.add("heard", 1)
                return
            end = time.monotonic() + _HEARING
            while self._store.add("heard", 0) < self.count - 1 and time.monotonic() < end:
                time.sleep(_BEAT / 10)
        except dist.DistError:
            return  # nobody is left to hear it

    def check_same(self, facts: Mapping[str, str]) -> None:
        """Compare with the others.

        Raises:
            ReportError: they differ, or a process is lost; all processes raise.
        """
        everyone = self._gather(dict(facts))
        for other, theirs in enumerate(everyone):
            for name, value in theirs.items():
                if value != everyone[0][name]:
                    raise ReportError(
                        f"ranks 0 and {other} would not measure the same: {name} is {everyone[0][name]} and "
                        f"{value}; give all machines the same files and versions"
                    )

    def share(
        self, pieces: int, work: Callable[[int, Callable[[int], None]], Result], advance: Callable[[int], None]
    ) -> list[Result]:
        """Take pieces until none is left, then collect the results of all.

        Raises:
            ReportError: work failed, here or elsewhere, or a process is lost.
        """

        def count(products: int) -> None:
            self._products += products
            self._look_around(advance)

        counter = f"next piece of {self._stages}"
        done: dict[int, Result] = {}
        while (piece := self._store.add(counter, 1) - 1) < pieces:
            done[piece] = work(piece, count)
        results: dict[int, Result] = {}
        for theirs in self._gather(done, advance):
            results.update(theirs)
        return [results[piece] for piece in range(pieces)]

    def _gather(self, value: Any, advance: Callable[[int], None] | None = None) -> list[Any]:
        """Everyone's value, once all are here; waiting in the open, where the loss of a process is seen."""
        self._stages += 1
        arrived = f"arrived at {self._stages}"
        self._store.add(arrived, 1)
        while self._store.add(arrived, 0) < self.count:
            time.sleep(_BEAT / 10)
            self._look_around(advance)
        values: list[Any] = [None] * self.count
        try:
            dist.all_gather_object(values, value)
        except RuntimeError as error:  # gloo's errors have no class of their own
            raise ReportError(f"a rank is lost: {first_line(error)}; start the report again") from error
        return values

    def _look_around(self, advance: Callable[[int], None] | None) -> None:
        """See how far the others are and that none is lost; now and then, since each look costs messages."""
        now = time.monotonic()
        if now - self._checked < _BEAT:
            return
        self._checked = now
        if self._store.check(["failed"]):
            failed, _, message = self._store.get("failed").decode().partition(" ")
            raise ReportError(f"rank {failed} of {self.count} failed: {message}")
        products = self._products
        for other, (seen, when) in self._seen.items():
            sign = self._store.get(_life(other)).decode() if self._store.check([_life(other)]) else seen
            if sign != seen:
                self._seen[other] = (sign, now)
            elif now - when > self._patience:
                raise ReportError(
                    f"rank {other} of {self.count} is lost: no sign of life for {self._patience:.0f} s; "
                    "start the report again"
                )
            products += int(sign.partition(" ")[0] or 0)
        if self.number == 0 and advance is not None:
            advance(products - self._shown)
            self._shown = products

    def _show_life(self, beat: int) -> None:
        self._store.set(_life(self.number), f"{self._products} {beat}")

    def _beat(self) -> None:
        beat = 0
        while not self._left.wait(_BEAT):
            beat += 1
            try:
                self._show_life(beat)
            except dist.DistError:  # the store is gone: the main thread finds out by itself
                return


def _life(number: int) -> str:
    return f"life of {number}"


def is_shared() -> bool:
    """Whether ``torchrun``, or a launcher that sets its variables, started this process beside others."""
    return "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


@contextmanager
def joined(patience: float = PATIENCE) -> Iterator[Ranks]:
    """The processes that this one belongs to, for as long as the block runs.

    An error that leaves the block is told to the others, which then stop with it.

    Raises:
        ReportError: the others did not come, or one was lost.
    """
    if not is_shared():
        yield Alone()
        return
    if not dist.is_available():
        raise ReportError("RANK is set, but this PyTorch has no torch.distributed; unset RANK and WORLD_SIZE")
    with _stopped_clearly():
        ranks = _join(patience)
        try:
            yield ranks
            ranks.check_same({})  # nobody takes the store away while another needs it
        except ReportError as error:
            ranks.fail(str(error))
            raise
        except dist.DistError as error:  # the store went with its process
            raise ReportError(f"a rank or its machine is lost: {first_line(error)}; start the report again") from error
        except BaseException as error:
            ranks.fail(f"{type(error).__name__}: {first_line(error)}")
            raise
        finally:
            ranks.leave()
            dist.destroy_process_group()


def _join(patience: float) -> Together:
    """Find the others through the variables that ``torchrun`` sets."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    try:
        store, number, count = next(rendezvous("env://", timeout=_JOIN))
        dist.init_process_group("gloo", store=PrefixStore("gloo", store), rank=number, world_size=count, timeout=_JOIN)
    except (RuntimeError, ValueError) as error:
        raise ReportError(f"the ranks did not find each other: {first_line(error)}") from error
    return Together(PrefixStore("report", store), number, count, patience)


@contextmanager
def _stopped_clearly() -> Iterator[None]:
    """``torchrun`` ends the other processes with SIGTERM when one is lost: say so instead of falling silent."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise ReportError("stopped by SIGTERM: another rank has ended early, or torchrun was stopped")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
