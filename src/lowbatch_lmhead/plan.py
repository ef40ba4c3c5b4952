"""The plan: for one head shape, data types and device, which launch serves which row count.

A plan holds no tensor: the weight of each call is the caller's. Serving reads ``table``; everything else is preparation.
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import backends, devices, verify
from .backends import Launch, Problem
from .log import logger, one_line, said, warn_once

# What serving looks up: the launch's function, or False for the default GEMM.
Serves: TypeAlias = Callable[..., Any] | Literal[False]

# Stands for ``backend.compile`` in tuning, where other processes compile too: (backend, problem, tactic) -> launch.
Compile: TypeAlias = Callable[[backends.Backend, Problem, Any], Launch]


class Passing(Exception):
    """An error that is not the kernel's: the disk is full, or the default GEMM that it is compared with failed."""


# Errors that say nothing of the kernel: another call can go well.
PASSING = (verify.NotYet, torch.OutOfMemoryError, MemoryError, Passing)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE}


# Rows of one launch of a batch-invariant plan; more are computed in pieces.
INVARIANT_ROWS = 64


class PlanKey(NamedTuple):
    device: torch.device
    vocab: int
    hidden: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    batch_invariant: bool = False


@dataclass(frozen=True)
class Entry:
    """What serves one row count. ``launch`` None is the default GEMM; ``reasons`` says why each backend does not."""

    launch: Launch | None
    reasons: tuple[str, ...]


class Plan:
    """Row count -> launch, filled as row counts are prepared."""

    def __init__(self, key: PlanKey, arch: str | None = None, max_rows: int | None = None) -> None:
        self.key = key
        self.arch = arch or devices.architecture(key.device)
        self.max_rows = max_rows or devices.untuned_rows(self.arch)
        self.entries: list[Entry | None] = [None] * (self.max_rows + 1)
        self.table: list[Serves | None] = [None] * (self.max_rows + 1)  # None while not prepared
        self.tuned: Any = None  # what autotune found, for its next call
        self._lock = threading.RLock()
        self._unready: tuple[int, int] | None = None  # a weight that could not be checked with
        self._tried: dict[tuple[str, str], Launch | str] = {}  # a launch, or why it was dropped

    def problem(self, rows: int) -> Problem:
        key = self.key
        assert self.arch is not None
        return Problem(key.vocab, key.hidden, rows, key.dtype, key.out_dtype, key.has_bias, self.arch)

    def first_choice(self, rows: int) -> tuple[str | None, str | None, tuple[str, ...]]:
        """(backend, tactic, reasons) that preparing ``rows`` would try first; backend None for the default GEMM."""
        in_line, reasons = self._in_line(rows)
        for backend, tactic in in_line:
            dropped = self._tried.get((backend.name, str(tactic)))
            if not isinstance(dropped, str):
                return backend.name, str(tactic), tuple(reasons)
            reasons.append(dropped)
        return None, None, tuple(reasons)

    def _in_line(self, rows: int) -> tuple[list[tuple[backends.Backend, Any]], list[str]]:
        """(backend, tactic) of what may serve ``rows``, first choice first; and why other backends may not."""
        return backends.untuned(self.problem(rows))

    def prepare(
        self,
        rows: int,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference] | None = None,
        compile_: Compile | None = None,
    ) -> Entry:
        """Compile, check and enter the first launch that is right for ``rows``; at once where that was done before.

        ``references``, empty at first, lets a caller that prepares many row counts of one weight share its reference.
        What could not be decided for want of memory, disk or a loaded weight is not entered: the next call tries again.
        """
        with self._lock:
            entry = self.entries[rows]
            if entry is None:
                entry = self._prepare(rows, weight, bias, [] if references is None else references, compile_)
            return entry

    def _prepare(
        self,
        rows: int,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None,
    ) -> Entry:
        entry, settled = self._choose(rows, weight, bias, references, compile_)
        if settled:
            serves = _served(entry)
            self.entries[rows], self.table[rows] = entry, serves  # in one: an interruption comes before or after
        return entry

    def _choose(
        self,
        rows: int,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None,
    ) -> tuple[Entry, bool]:
        """The entry, and whether it holds for good."""
        in_line, reasons = self._in_line(rows)
        for backend, tactic in in_line:
            try:
                tried = self.checked(rows, backend, tactic, weight, bias, references, compile_)
            except PASSING as error:
                return _for_now(reasons, backend, tactic, error), False
            if isinstance(tried, Launch):
                return Entry(tried, tuple(reasons)), True
            reasons.append(tried)
        return Entry(None, tuple(reasons)), True

    def checked(
        self,
        rows: int,
        backend: backends.Backend,
        tactic: Any,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None = None,
    ) -> Launch | str:
        """The launch of ``tactic`` once it is right for ``rows``, or why it is dropped; nothing is entered.

        ``PASSING`` errors are raised.
        """
        known = (backend.name, str(tactic))
        with self._lock, on_device(self.key.device):
            tried = self._tried.get(known)
            if not isinstance(tried, str):
                tried = self._try(tried, backend, tactic, self.problem(rows), weight, bias, references, compile_)
                if isinstance(tried, str):
                    self.drop(known, tried)
            return tried

    def dropped(self) -> list[tuple[str, str]]:
        """The launches, (backend, tactic), that did not compile or were wrong."""
        with self._lock:
            return [known for known, tried in self._tried.items() if isinstance(tried, str)]

    def drop(self, known: tuple[str, str], reason: str) -> None:
        """Let a launch (backend, tactic) serve no more, for ``reason``; the row counts that it served are prepared anew."""
        with self._lock:
            launch = self._tried.get(known)
            if isinstance(launch, str):
                return
            self._tried[known] = reason
            if launch is not None:
                kept = [None if entry and entry.launch is launch else entry for entry in self.entries]
                self.entries[:], self.table[:] = kept, [_served(entry) if entry else None for entry in kept]

    def adopt(self, entries: Mapping[int, Entry]) -> None:
        """Let ``entries``, by row count from 1 on, serve from now on: launches that were checked."""
        with self._lock:
            last = max(self.max_rows, *entries)
            more = [None] * (last - self.max_rows)
            adopted, table = [*self.entries, *more], [*self.table, *more]
            for rows, entry in entries.items():
                adopted[rows], table[rows] = entry, _served(entry)
            # In place, because dispatchers hold the list; in one, so that an interruption comes before or after.
            self.entries[:], self.table[:], self.max_rows = adopted, table, last

    def reference(self, weight: Tensor, bias: Tensor | None, rows: int | None = None) -> verify.Reference:
        """The reference for up to ``rows``, or for all row counts of the plan.

        ``NotYet`` for a weight that says too little; at once for one that did so before and is unchanged.
        """
        version = 0 if weight.is_inference() else weight._version
        state = (weight.data_ptr(), version)
        if state == self._unready:
            raise verify.NotYet(verify.NOTHING)
        try:
            with on_device(self.key.device):
                return verify.Reference(weight, bias, self.max_rows if rows is None else rows)
        except verify.NotYet:
            self._unready = None if weight.is_inference() else state
            raise
        except PASSING:
            raise
        except Exception as error:
            raise Passing(f"the default GEMM, to compare with: {said(error)}") from error

    def look_again(self) -> None:
        """Let a weight that could not be checked with be looked at again: an engine may have loaded it unseen."""
        self._unready = None

    def _try(
        self,
        launch: Launch | None,
        backend: backends.Backend,
        tactic: Any,
        problem: Problem,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None,
    ) -> Launch | str:
        """A launch that is right, or why there is none; ``PASSING`` errors are raised."""
        try:
            fresh = not references
            if fresh:
                references.append(self.reference(weight, bias))
            if launch is None:
                launch = compile_(backend, problem, tactic) if compile_ else backend.compile(problem, tactic)
                self._tried[backend.name, str(tactic)] = launch
            wrong = references[0].mistake(launch, weight, bias, problem.rows, problem.out_dtype)
            if wrong is not None and not fresh:  # or the weight has changed since
                references[0] = self.reference(weight, bias, len(references[0].x))
                wrong = references[0].mistake(launch, weight, bias, problem.rows, problem.out_dtype)
            if wrong is None:
                return launch
        except PASSING:
            raise
        except Exception as error:  # whatever a kernel's packages raise, the next in line serves
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                raise Passing(said(error)) from error
            wrong = said(error)
        reason = f"{backend.name} ({tactic}): {wrong}"
        logger.warning("%dx%d, rows %d: dropped %s", problem.vocab, problem.hidden, problem.rows, reason)
        return reason


class InvariantPlan(Plan):
    """A plan in which one order of additions serves every row count: one backend all of them, or none any.

    Where none does, the caller computes row by row.
    """

    def __init__(self, key: PlanKey, arch: str | None = None) -> None:
        super().__init__(key, arch, INVARIANT_ROWS)
        self._tactics, self._against = self._invariant_tactics()

    def _invariant_tactics(self) -> tuple[list[tuple[backends.Backend, dict[int, Any]]], list[str]]:
        """The backends that serve every row count in one order of additions, with their tactics; and why not others."""
        found: dict[str, tuple[backends.Backend, dict[int, Any]]] = {}
        reasons: dict[str, None] = {}

        def tactics(backend: backends.Backend) -> list[Any]:
            if hasattr(backend, "invariant_tactic"):
                return [backend.invariant_tactic(problem)]
            reasons[f"{backend.name}: its order of additions may differ between row counts"] = None
            return []

        for rows in range(1, self.max_rows + 1):
            problem = self.problem(rows)
            in_line, against = backends.in_line(problem, tactics)
            for backend, tactic in in_line:
                found.setdefault(backend.name, (backend, {}))[1][rows] = tactic
            reasons |= dict.fromkeys(against)
        return [one for one in found.values() if len(one[1]) == self.max_rows], list(reasons)

    def _in_line(self, rows: int) -> tuple[list[tuple[backends.Backend, Any]], list[str]]:
        return [(backend, tactics[rows]) for backend, tactics in self._tactics], list(self._against)

    def _prepare(
        self,
        rows: int,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None,
    ) -> Entry:
        """Prepare every row count."""
        reasons = list(self._against)
        for backend, tactics in self._tactics:
            try:
                launches = self._launches(backend, tactics, weight, bias, references, compile_)
            except PASSING as error:
                return _for_now(reasons, backend, "every row count", error)
            if isinstance(launches, dict):
                self.adopt({r: Entry(launch, tuple(reasons)) for r, launch in launches.items()})
                break
            reasons.append(launches)
        else:
            self.adopt(dict.fromkeys(range(1, self.max_rows + 1), Entry(None, tuple(reasons))))
        entry = self.entries[rows]
        assert entry is not None
        return entry

    def _launches(
        self,
        backend: backends.Backend,
        tactics: dict[int, Any],
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        compile_: Compile | None,
    ) -> dict[int, Launch] | str:
        """The launch of each row count, or why ``backend`` serves none."""
        found: dict[int, Launch] = {}
        for rows, tactic in tactics.items():
            launch = self.checked(rows, backend, tactic, weight, bias, references, compile_)
            if isinstance(launch, str):
                return launch
            found[rows] = launch
        return found


def _for_now(reasons: list[str], backend: backends.Backend, tactic: Any, error: BaseException) -> Entry:
    """What serves until another call tries again."""
    why = one_line(error) if isinstance(error, (verify.NotYet, Passing)) else said(error)
    warn_once(f"the default GEMM serves for now: {why}")
    return Entry(None, (*reasons, f"{backend.name} ({tactic}): {one_line(error)}"))


def _served(entry: Entry) -> Serves:
    return entry.launch.call if entry.launch else False


def on_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


_plans: dict[PlanKey, Plan] = {}
_plans_lock = threading.Lock()


def plan_for(weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, batch_invariant: bool = False) -> Plan:
    """The plan that heads of this shape share."""
    vocab, hidden = weight.shape
    key = PlanKey(weight.device, vocab, hidden, weight.dtype, out_dtype, bias is not None, batch_invariant)
    plan = _plans.get(key)
    if plan is None:
        with _plans_lock:
            plan = _plans.setdefault(key, (InvariantPlan if batch_invariant else Plan)(key))
    return plan


def clear() -> None:
    """Forget every plan (tests)."""
    _plans.clear()
