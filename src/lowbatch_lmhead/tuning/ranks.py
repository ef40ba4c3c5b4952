"""Ranks that tune together, in lock-step.

What they tell each other goes through the key-value store of their process group, whatever its backend is: no collective
runs, no device is touched, no further group is made, and nothing is unpickled. A gloo group of our own would not do: one
made with ``use_local_synchronization`` takes the name, and so the stale addresses, of a destroyed one of the same ranks;
it outlasts its timeout when a member is missing; and while an operation is pending, it can neither be interrupted nor
dropped.

Rules:
- a rank that fails says so in the store, and the others find it there while they wait;
- a rank whose process ended is noticed at once by the ranks of the same machine (by its process descriptor) and, if it
  kept the store (rank 0 does, without torchrun), by all; by the others when the time for an answer is up;
- success and failure exclude each other: one key of the store holds which of the two was first;
- no operation on the store may outlast its time: each runs on a thread that is left behind if it does;
- entries pair by count, as collectives do: the n-th of one rank with the n-th of the others. A rank that comes to an entry
  that the others have given up waiting for is late; where that happens twice in a row it has missed an entry, and goes on
  to the next that nobody has given up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT_S = 60.0  # how long a rank waits for the slowest one in one exchange
GRACE_S = 1.0  # how long a rank that failed stays, for the others to read why before the store goes with its process
PAUSE_S = (0.001, 0.05)  # between two looks at the store: the first, and the longest

_OUTCOME, _AGREED, _FAILED = "outcome", "agreed", "failed"


class RankFailure(RuntimeError):
    """Not all ranks came through. The message names each rank that is known to have failed, and why."""


def _failure(reasons: dict[int, str]) -> RankFailure:
    return RankFailure("; ".join(f"rank {rank}: {reason}" for rank, reason in sorted(reasons.items())))


class Ranks:
    """The ranks of a process group, as a context manager that all of them enter and leave together.

    Every rank has to make the same calls of ``exchange``. What leaves the block on one rank (KeyboardInterrupt included)
    ends the others' next or present ``exchange``, or their leaving, with ``RankFailure``; so does a rank that ends, that
    does not come in time, or that leaves while others exchange. A block that is left without an exception is left by all
    ranks or by none: leaving waits for them, and raises ``RankFailure`` unless all came to its end.

    Entering raises ``RankFailure`` as an exchange does. The process group is used for nothing but its store, so it is as
    it was afterwards, and after a failure as well.
    """

    def __init__(self, process_group: ProcessGroup | None, timeout_s: float | None = None) -> None:
        """``timeout_s`` seconds for each exchange, entering and leaving; None for ``TIMEOUT_S``. ValueError for what is no
        process group of this rank. None is one rank alone, without torch.distributed.
        """
        self.rank, self.size, self._store = _membership(process_group)
        self._timeout_s = timeout_s
        self._session: _Session | None = None

    def exchange(self, value: Any) -> list[Any]:
        """The values of all ranks, in the order of their ranks in the group.

        A value is what JSON holds and comes back as JSON gives it: lists for tuples, strings for the keys of a dict.
        TypeError or ValueError for another one.
        """
        text = json.dumps(value)
        if self._store is None:
            return [json.loads(text)]
        if self._session is None:
            raise RuntimeError("ranks exchange values inside of the with block only")
        return self._session.exchange("an exchange", text)

    def __enter__(self) -> Ranks:
        if self._store is not None:
            session = _Session(self._store, self.rank, self.size, self._timeout_s)
            try:
                session.enter()
                self._session = session
            except BaseException as error:
                session.leave(error)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        try:
            if error is None:
                session.agree()
        except BaseException as late:
            error = late
            raise
        finally:
            session.leave(error)


def _membership(process_group: Any) -> tuple[int, int, Store | None]:
    """This rank in the group, the group's size, and its store where there are other ranks."""
    if process_group is None:
        return 0, 1, None
    import torch.distributed as dist

    wanted = "a torch.distributed process group of this rank, such as torch.distributed.group.WORLD, or None for one"
    available = dist.is_available()
    if not available or not isinstance(process_group, dist.ProcessGroup):
        what = f"{process_group!r}"
        if available and isinstance(process_group, int) and process_group == dist.GroupMember.NON_GROUP_MEMBER:
            what += ", which new_group gives to ranks outside of the group"
        raise ValueError(f"process_group has to be {wanted}; it is {what}")
    rank, size = process_group.rank(), process_group.size()
    if not 0 <= rank < size:
        raise ValueError(f"process_group has to be {wanted}; this rank is no member of the one given")
    store = process_group.get_group_store() if size > 1 else None
    if store is None and size > 1:
        raise ValueError(f"process_group has to be {wanted}; the one given ({process_group.name()}) has no store")
    return rank, size, store


class _Session:
    """One entry of one rank. Its keys in the store begin with the number of the entry."""

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float | None) -> None:
        self._rank, self._size, self._timeout_s = rank, size, timeout_s
        self._store = _Store(store)
        self._processes = _Processes()
        self._step = 0
        self._over: str | None = None  # the outcome, once this rank knows it

    def enter(self) -> None:
        """Wait for all ranks to enter, and watch their processes from then on. ``RankFailure`` as in ``exchange``."""
        self._start()
        with self._lost_store_is_a_failure():
            self._store.open(self._rank)
        self._processes.watch(self.exchange("entering", json.dumps(_process())))

    def exchange(self, at: str, text: str) -> list[Any]:
        """The JSON of all ranks, decoded. ``at`` says what this rank is doing: all have to do the same."""
        self._start()
        with self._lost_store_is_a_failure():
            self._step += 1
            keys = [f"{self._step}/{rank}" for rank in range(self._size)]
            self._store.set(keys[self._rank], json.dumps([at, text]))
            self._await(keys)
            said = [json.loads(self._store.get(key)) for key in keys]
            # All ranks are at this step, so all have read the one before.
            self._store.delete(f"{self._step - 1}/{self._rank}")
            places = {rank: place for rank, (place, _) in enumerate(said) if place != at}
            if places:
                own = f"when rank {self._rank} was at {at}"
                self._fail({rank: f"was at {place} {own}" for rank, place in places.items()})
        return [json.loads(text) for _, text in said]

    def agree(self) -> None:
        """Wait for all ranks to come here. ``RankFailure`` unless they do."""
        self.exchange("leaving", "null")
        try:
            outcome = self._decide(_AGREED)
        except _StoreLost:
            self._over = _AGREED  # all have come here, and who kept the store has left since
            return
        if outcome == _FAILED:
            with self._lost_store_is_a_failure():
                self._fail({})

    def leave(self, error: BaseException | None) -> None:
        """Tell the others of ``error`` unless they know of a failure, and let them read before the store may go."""
        try:
            self._start(GRACE_S)
            if error is not None and self._over is None:
                self._decide(_FAILED, {self._rank: "".join(traceback.format_exception_only(error)).strip()})
            self._start(None if error is None else GRACE_S)
            self._store.set(f"read/{self._rank}", "")
            self._wait_until(lambda: all(map(self._has_read, range(self._size))))
        except _StoreLost:
            pass  # then there is nobody to tell it, and nothing to keep it for
        finally:
            self._processes.close()

    def _has_read(self, rank: int) -> bool:
        return rank in self._processes.ended() or self._store.has([f"read/{rank}"])

    def _start(self, seconds: float | None = None) -> None:
        """The time for what follows runs from now."""
        own = TIMEOUT_S if self._timeout_s is None else self._timeout_s
        self._seconds = own if seconds is None else seconds
        self._deadline = time.monotonic() + self._seconds
        self._store.deadline = self._deadline + GRACE_S  # so that there is time left to tell of a timeout

    def _wait_until(self, condition: Callable[[], bool]) -> bool:
        """Look until ``condition`` holds; False when the time is up."""
        pause, longest = PAUSE_S
        while not condition():
            left = self._deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, longest)
        return True

    def _await(self, keys: list[str]) -> None:
        """Wait for ``keys``, which the ranks set. ``RankFailure`` if a rank failed, ended or is late."""
        ended: list[int] = []

        def settled() -> bool:
            if self._store.has(keys) or self._store.has([_OUTCOME]):
                return True
            ended.extend(self._processes.ended())
            return bool(ended)

        in_time = self._wait_until(settled)
        # The outcome first: a late rank finds all values of a step that the others have given up.
        if self._store.has([_OUTCOME]):
            if self._store.get(_OUTCOME) == _FAILED:
                self._fail({})
        elif not self._store.has(keys):  # an ended one may have set its key before
            late = [] if in_time else [rank for rank, key in enumerate(keys) if not self._store.has([key])]
            reasons = dict.fromkeys(late, f"no answer within {self._seconds:g} s")
            self._fail(reasons | dict.fromkeys(ended, "its process ended"))

    def _fail(self, reasons: dict[int, str]) -> None:
        """``RankFailure`` with the reasons of all ranks, unless the ranks have agreed before."""
        if self._decide(_FAILED, reasons) == _FAILED:
            keys = {rank: f"failed/{rank}" for rank in range(self._size)}
            raise _failure(
                {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.has([key])}
            )

    def _decide(self, outcome: str, reasons: dict[int, str] | None = None) -> str:
        """The outcome, which is ``outcome`` unless there was one before. The first reason of a rank counts."""
        for rank, reason in (reasons or {}).items():
            self._store.first(f"failed/{rank}", json.dumps(reason))
        self._over = self._store.first(_OUTCOME, outcome)
        return self._over

    @contextlib.contextmanager
    def _lost_store_is_a_failure(self) -> Iterator[None]:
        try:
            yield
        except _StoreLost as error:
            self._over = _FAILED
            self._start(GRACE_S)
            # A process closes its connections a little before it has ended.
            self._wait_until(lambda: bool(self._processes.ended()))
            reasons = dict.fromkeys(self._processes.ended(), "its process ended")
            raise _failure(reasons or {self._rank: f"lost the store of the process group: {error}"}) from error


class _StoreLost(Exception):
    """The store does not answer, or not in time."""


class _Store:
    """A store of torch.distributed with keys of one entry, none of whose operations outlasts ``deadline``."""

    def __init__(self, store: Store) -> None:
        self.deadline = 0.0  # of time.monotonic()
        self._store = store
        self._entry = ""
        self._lost: _StoreLost | None = None

    def open(self, rank: int) -> None:
        """Count this entry of ``rank``, whose keys are those of the entry from then on.

        The connection is the group's: another one takes a lookup of the host's name, so seconds where that is broken.
        """
        entries, late = self._name(f"entries/{rank}"), self._name(f"late/{rank}")

        def given_up() -> bool:
            self._entry = f"{self._run(lambda: self._store.add(entries, 1))}/"
            return self.has([f"failed/{rank}"])

        if not given_up():
            self._run(lambda: self._store.set(late, "0"))
        elif self._run(lambda: self._store.add(late, 1)) > 1:
            while given_up():
                pass

    def set(self, key: str, value: str) -> None:
        name = self._name(key)
        self._run(lambda: self._store.set(name, value))

    def get(self, key: str) -> str:
        """The value of ``key``, which is there."""
        name = self._name(key)
        value: bytes = self._run(lambda: self._store.get(name))
        return value.decode()

    def has(self, keys: list[str]) -> bool:
        names = [self._name(key) for key in keys]
        found: bool = self._run(lambda: self._store.check(names))
        return found

    def first(self, key: str, value: str) -> str:
        """Set ``key`` unless it is set; its value."""
        name = self._name(key)
        now: bytes = self._run(lambda: self._store.compare_set(name, "", value))
        return now.decode()

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._run(lambda: self._store.delete_key(name))

    def _name(self, key: str) -> str:
        return f"lowbatch_lmhead/ranks/{self._entry}{key}"

    def _run(self, operation: Callable[[], T]) -> T:
        """What ``operation`` returns. ``_StoreLost`` from the first one that fails on."""
        if self._lost is not None:
            raise self._lost
        try:
            return _within(self.deadline - time.monotonic(), operation)
        except Exception as error:
            lines = f"{error}".splitlines() or [type(error).__name__]  # more lines are a C++ stack
            self._lost = _StoreLost(lines[0])
            raise self._lost from error


def _within(seconds: float, operation: Callable[[], T]) -> T:
    """What ``operation`` returns, or TimeoutError after ``seconds``, and the thread that it runs on is left behind.

    An operation of a store waits in C++, where neither its timeout ends all waits nor a signal is seen.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(operation())
        except BaseException as error:
            future.set_exception(error)

    thread = Thread(target=run, name="lowbatch-lmhead store", daemon=True)
    thread.start()
    thread.join(max(seconds, 0))
    if not future.done():
        raise TimeoutError("it does not answer in time")
    return future.result()


def _process() -> tuple[str, int] | None:
    """This process: the machine and process namespace that its number is one of, and the number."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    except OSError:
        return None


class _Processes:
    """The processes of the other ranks that run on this machine."""

    def __init__(self) -> None:
        self._ranks: dict[int, int] = {}  # by descriptor
        self._ended: set[int] = set()
        self._poll = select.poll()

    def watch(self, processes: list[Any]) -> None:
        """Watch what ``_process`` gave on each rank, where it is a process of this machine and not this one."""
        own = _process()
        for rank, process in enumerate(processes):
            if process and own and process[0] == own[0] and process[1] != own[1]:
                try:
                    descriptor = os.pidfd_open(process[1])
                except ProcessLookupError:
                    self._ended.add(rank)
                except (OSError, AttributeError):  # forbidden in this container, or unknown to this kernel or Python
                    continue
                else:
                    self._ranks[descriptor] = rank
                    self._poll.register(descriptor, select.POLLIN)

    def ended(self) -> list[int]:
        """The ranks whose process is known to have ended."""
        self._ended.update(self._ranks[descriptor] for descriptor, _ in self._poll.poll(0))
        return sorted(self._ended)

    def close(self) -> None:
        while self._ranks:
            descriptor, _ = self._ranks.popitem()
            self._poll.unregister(descriptor)
            os.close(descriptor)
