"""What ``warmup`` found and did, for people and for programs."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from . import objects
from .gate import Decision
from .head import Head, sizes_of

Step = Callable[[int, int], None]


@dataclass(frozen=True)
class HeadReport:
    """One head: ``decisions`` for 1, 2, ... rows and the first row count beyond, or one with 0 rows for all."""

    name: str
    vocab: int | None
    hidden: int | None
    decisions: tuple[Decision, ...]

    def ranges(self) -> list[tuple[int, int, Decision]]:
        """``(first, last, decision)`` for each run of row counts that the same launch serves."""
        runs: list[tuple[int, int, Decision]] = []
        for decision in self.decisions:
            if runs and _same(runs[-1][2], decision):
                runs[-1] = (runs[-1][0], decision.rows, runs[-1][2])
            else:
                runs.append((decision.rows, decision.rows, decision))
        return runs

    def to_dict(self) -> dict[str, Any]:
        rows = [{**vars(decision), "reasons": list(decision.reasons)} for decision in self.decisions]
        return {"name": self.name, "vocab": self.vocab, "hidden": self.hidden, "rows": rows}

    def lines(self) -> Iterator[str]:
        size = f" {self.vocab}x{self.hidden}" if self.vocab else ""
        yield f"{self.name}{size}"
        for first, last, decision in self.ranges():
            one = f"{first} row" if first == 1 else f"{first} rows"
            rows = "all rows" if last == 0 else one if first == last else f"{first}-{last} rows"
            if decision is self.decisions[-1] and not decision.taken and first == last and last > 1:
                rows = f"{first}+ rows"
            unprepared = ", not compiled yet" if decision.taken and not decision.prepared else ""
            yield f"  {rows:<12}{decision.name}{unprepared}"
            for reason in decision.reasons:
                yield f"  {'':<12}{'not ' if decision.taken else 'because '}{reason}"


def _same(a: Decision, b: Decision) -> bool:
    return (a.backend, a.tactic, a.prepared) == (b.backend, b.tactic, b.prepared) and (
        a.taken or a.reasons == b.reasons
    )


class OfHead(Protocol):
    """A head's part of a report."""

    def lines(self) -> Iterator[str]: ...

    def to_dict(self) -> dict[str, Any]: ...


H = TypeVar("H", bound=OfHead)


@dataclass(frozen=True)
class Report(Generic[H]):
    """Heads in the order in which they were found; seconds of wall time; kernels compiled, and loaded from disk."""

    heads: tuple[H, ...]
    seconds: float
    compiled: int
    loaded: int

    def __str__(self) -> str:
        lines = [line for head in self.heads for line in head.lines()]
        lines.append(f"{self.seconds:.2f} s, {self.compiled} kernels compiled, {self.loaded} loaded")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return {**vars(self), "heads": [head.to_dict() for head in self.heads]}


class WarmupReport(Report[HeadReport]):
    """What ``warmup`` did."""

    @classmethod
    def collect(
        cls,
        heads: list[tuple[str, Head]],
        warm: Callable[[Head, Step], list[Decision]],
        progress: bool | None,
    ) -> WarmupReport:
        """Warm each head, a weight that was met before only in the report, and time it all."""
        start, compiled, loaded = time.perf_counter(), objects.counts.compiled, objects.counts.loaded
        reports: list[HeadReport] = []
        done: dict[tuple[Any, ...], list[Decision]] = {}
        for name, read in heads:
            weight = read.weight
            same = (id(weight), id(read.bias), read.reasons) if weight is not None else (id(read),)
            if same not in done:
                with Bar(f"warming up {name}", progress) as step:
                    done[same] = warm(read, step)
            vocab, hidden = sizes_of(weight) or (None, None)
            reports.append(HeadReport(name, vocab, hidden, tuple(done[same])))
        return cls(
            tuple(reports),
            time.perf_counter() - start,
            objects.counts.compiled - compiled,
            objects.counts.loaded - loaded,
        )


_NO_STDERR = (OSError, ValueError, AttributeError)  # it is a pipe that nobody reads, or closed, or a daemon's None


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # a daemon has no stderr, or has closed it
        return False


def check_progress(progress: bool | None) -> None:
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be True, False or None, got {progress!r}")


class Bar:
    """A progress bar on stderr, or nothing; ``wanted`` None: one where stderr is a terminal. Entering it gives its step."""

    def __init__(self, title: str, wanted: bool | None) -> None:
        self._title = title
        self._wanted = _is_terminal() if wanted is None else wanted
        self._tqdm: Any = None

    def __enter__(self) -> Step:
        return self._step

    def _step(self, done: int, of: int) -> None:
        if not self._wanted:
            return
        try:
            if self._tqdm is None:
                from tqdm import tqdm

                self._tqdm = tqdm(total=of, desc=self._title, unit="row count", leave=False)
            self._tqdm.update(done - self._tqdm.n)
        except _NO_STDERR:
            self._wanted = False

    def __exit__(self, *error: object) -> None:
        if self._tqdm is not None:
            with contextlib.suppress(*_NO_STDERR):
                self._tqdm.close()
