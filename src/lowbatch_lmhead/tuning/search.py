"""Which launch serves which row count of one head: measured, within a budget of time, and alike on all ranks.

1. Buckets: at 1, 2, 4, 8, 16, 24, 32, 48, ... rows every tactic of every backend is timed beside the default GEMM. What
   wins there, and what comes close, goes on.
2. Row counts: what went on from either end of its bucket is timed beside the default GEMM at every row count on its own.
   Only where nothing won at either end of a bucket, nothing is timed inside. At the first row count of a large bucket all
   that was timed at its end is timed again, and what wins there goes on as well. A row count that the default GEMM wins
   between two that it loses is timed once more.
3. A launch serves where it is quicker than the default GEMM by more than the noise, which is how far the default GEMM
   differs from itself in the same rounds. Among launches that are alike the one listed first serves, so that the choice
   is the same the next time.

Every decision is made on times that all ranks have exchanged, of each the slowest rank's, so all ranks decide alike.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .. import backends, devices, verify
from ..backends import Backend, Launch, Problem, default_gemm
from ..log import logger, said
from ..plan import Compile, Entry, Plan
from ..report import Step
from .timing import Timer, compare

LEAST_GAIN = 0.01  # what a launch has to be quicker by, even where the noise is less
MOST_NOISE = 0.02  # more is a disturbance: measured once more
TIE = 0.004  # launches that differ by less are alike
FINALISTS = 2  # of one end of a bucket
LARGE_BUCKET = 8  # row counts from which on both ends have finalists: what wins at one may be 4 % behind at the other
CLOSE = 0.015  # what a finalist may be behind the winner

Name = str  # "backend (tactic)"


class Exchange(Protocol):
    """What the search needs of the ranks: ``Ranks.exchange``."""

    def __call__(self, value: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Option:
    """One tactic of a backend, which may serve some row counts."""

    backend: Backend
    tactic: Any

    @property
    def name(self) -> Name:
        return f"{self.backend.name} ({self.tactic})"

    def weigh(self, us: float) -> float:
        """``us`` as it counts beside other launches."""
        return us * (1 + self.backend.handicap(self.tactic))


@dataclass(frozen=True)
class Measured:
    """Microseconds at one row count: of the default GEMM, and of each launch by name; the slowest rank's."""

    default_us: float
    us: dict[Name, float]
    noise: float | None = None  # where the default GEMM was timed against itself: at the end of a bucket


@dataclass
class Result:
    """What the search found: the option for each row count (None: the default GEMM), and the times behind it."""

    chosen: dict[int, Option | None] = field(default_factory=dict)
    measured: dict[int, Measured] = field(default_factory=dict)
    noise: float = 0.0
    dropped: list[str] = field(default_factory=list)  # "backend (tactic): why", in the order met
    out_of_time: bool = False


def options(problem: Problem) -> tuple[list[Option], list[str]]:
    """Everything that may serve ``problem``, in the order in which ties are decided; and why the others may not."""
    found, reasons = backends.tunable(problem)
    return [Option(backend, tactic) for backend, tactic in found], reasons


def tune_inside(option: Option, problem: Problem, weight: Tensor, bias: Tensor | None) -> str | None:
    """Let a backend that makes choices of its own make them for ``problem``; "backend: why it could not", or None.

    To be called before the launch is checked: what was chosen is what is checked, timed and serves.
    """
    tune = getattr(option.backend, "tune", None)
    try:
        note = tune(problem, weight, bias) if tune else None
    except Exception as error:  # it serves with what it would choose unmeasured
        note = f"its own tuner failed: {said(error)}"
    return f"{option.backend.name}: {note}" if note else None


def buckets(max_rows: int) -> list[int]:
    """1, 2, 4, ..., from 16 on also half-way to the next, where tiles of tokens end; and ``max_rows``."""
    powers = [1 << power for power in range(max_rows.bit_length())]
    halves = [power + power // 2 for power in powers if power >= 16]
    return sorted(end for end in {*powers, *halves, max_rows} if end <= max_rows)


def named(name: Name, plan: Plan, rows: int, max_rows: int) -> Option:
    """The option that the search for 1 to ``max_rows`` rows has chosen for ``rows``: one that is listed for them, or for the
    end of their bucket. KeyError where there is none of the name."""
    problem, end = plan.problem(rows), next(end for end in buckets(max_rows) if end >= rows)
    for count in dict.fromkeys((rows, end)):
        for option in options(plan.problem(count))[0]:
            if option.name == name and option.backend.supports(problem) is None:
                return option
    raise KeyError(name)


def wanted(plan: Plan, max_rows: int) -> list[tuple[Backend, Problem, Any]]:
    """Every launch that the search of ``plan`` may time, in the order of need."""
    found: dict[Name, tuple[Backend, Problem, Any]] = {}
    for rows in buckets(max_rows):
        problem = plan.problem(rows)
        for option in options(problem)[0]:
            found.setdefault(option.name, (option.backend, problem, option.tactic))
    return list(found.values())


def unmeasured(plan: Plan, max_rows: int) -> dict[int, tuple[Backend, Problem, Any]]:
    """For each row count beyond ``max_rows`` that ``plan`` serves: the launch that is tried first."""
    found = {}
    for rows in range(max_rows + 1, plan.max_rows + 1):
        problem = plan.problem(rows)
        in_line, _ = backends.untuned(problem)
        if in_line:
            backend, tactic = in_line[0]
            found[rows] = (backend, problem, tactic)
    return found


class Search:
    """The search for one head."""

    def __init__(
        self,
        plan: Plan,
        weight: Tensor,
        bias: Tensor | None,
        references: list[verify.Reference],
        timer: Timer,
        compile_: Compile,
        exchange: Exchange,
        budget_s: float,
        step: Step,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._weight, self._bias, self._references = plan, weight, bias, references
        self._timer, self._compile, self._exchange, self._step = timer, compile_, exchange, step
        self._clock, self._end = clock, clock() + budget_s
        self._launches: dict[Name, Launch] = {}
        self._wrong: set[Name] = set()
        self._tuned_inside: set[tuple[Name, int]] = set()
        self._result = Result()

    def run(self, max_rows: int) -> Result:
        """Choose for 1 to ``max_rows`` rows; the best so far when the budget ends. Nothing is entered in the plan."""
        found, ends = self._result, buckets(max_rows)
        finalists: dict[int, list[Option]] = {}
        for done, rows in enumerate(ends):
            if self._out_of_time():
                break
            finalists[rows] = self._bucket(rows)
            self._step(done + 1, len(ends) + max_rows)
        for below, above in reversed(list(itertools.pairwise(finalists))):  # from above: each takes those of one end
            finalists[above] += self._also(above, finalists[below], finalists[above])
        found.noise = max((measured.noise or 0.0 for measured in found.measured.values()), default=0.0)
        self._between(ends, finalists, max_rows)
        self._look_again(ends, finalists)
        self._choose_what_is_right(ends, finalists, max_rows)
        return found

    def _out_of_time(self) -> bool:
        """Whether the budget has ended on any rank."""
        found = self._result
        found.out_of_time = found.out_of_time or any(self._exchange(self._clock() >= self._end))
        return found.out_of_time

    # --- measuring ---

    def _bucket(self, rows: int) -> list[Option]:
        """Time everything at ``rows``; the winner and what comes close to it."""
        able = options(self._plan.problem(rows))[0]
        ready = [option for option in able if self._ready(option, rows)]
        measured = self._measure(rows, ready, twice=True)
        if (measured.noise or 0.0) > MOST_NOISE:
            measured = self._measure(rows, ready, twice=True)
        self._result.measured[rows] = measured
        return self._finalists(rows, ready)

    def _finalists(self, rows: int, timed: list[Option]) -> list[Option]:
        """The winner of ``timed`` at ``rows`` and what comes close to it."""
        measured = self._result.measured[rows]
        ready = [option for option in timed if option.name in measured.us]
        if not ready:
            return []
        us = {option.name: option.weigh(measured.us[option.name]) for option in ready}
        best = min(us.values())
        close = [option for option in ready if us[option.name] <= best * (1 + CLOSE)]
        # In the listed order what is as good as the best, so that inside the bucket it is chosen as at its end.
        return sorted(close, key=lambda option: max(us[option.name], best * (1 + TIE)))[:FINALISTS]

    def _ready(self, option: Option, rows: int) -> bool:
        """Whether ``option`` can be timed at ``rows``.

        What was right at the row count that it was met at first is checked again only where it is chosen, unless its
        backend chooses anew for each row count.
        """
        known = option.name in self._launches and not hasattr(option.backend, "tune")
        return known or self._prepare(option, rows)

    def _prepare(self, option: Option, rows: int) -> bool:
        """Whether the launch of ``option`` is compiled and right at ``rows``."""
        plan = self._plan
        self._tune_inside(option, rows)
        tried = plan.checked(
            rows,
            option.backend,
            option.tactic,
            self._weight,
            self._bias,
            self._references,
            self._compile,
        )
        if isinstance(tried, Launch):
            self._launches[option.name] = tried
            return True
        if tried not in self._result.dropped:
            self._result.dropped.append(tried)
        return False

    def _tune_inside(self, option: Option, rows: int) -> None:
        """``tune_inside``, once for each row count; what it could not is noted."""
        if (option.name, rows) in self._tuned_inside:
            return
        self._tuned_inside.add((option.name, rows))
        note = tune_inside(option, self._plan.problem(rows), self._weight, self._bias)
        if note and note not in self._result.dropped:
            self._result.dropped.append(note)

    def _measure(self, rows: int, ready: list[Option], twice: bool = False) -> Measured:
        """The times of ``ready`` and the default GEMM; ``twice`` times the latter against itself for the noise."""
        calls = [_default, *(self._launches[option.name].call for option in ready)]
        calls += [_default] if twice else []
        with self._timer.contest(rows, calls) as contest:
            times = [timing.us for timing in compare(contest, len(calls), LEAST_GAIN, keep_last=twice)]
        own = Measured(
            times[0],
            {option.name: us for option, us in zip(ready, times[1:])},
            abs(times[-1] / times[0] - 1) if twice else None,
        )
        return _slowest([Measured(**one) for one in self._exchange(vars(own))])

    def _time(self, rows: int, able: list[Option]) -> list[Option]:
        """Time those of ``able`` that are ready at ``rows``, and keep their times; returns them."""
        ready = [option for option in able if self._ready(option, rows)]
        self._result.measured[rows] = self._measure(rows, ready)
        return ready

    def _between(self, ends: list[int], finalists: dict[int, list[Option]], max_rows: int) -> None:
        """Time the row counts inside the buckets, as long as there is time."""
        for rows in range(1, max_rows + 1):
            self._step(len(ends) + rows, len(ends) + max_rows)
            above = next(end for end in ends if end >= rows)
            if rows in self._result.measured or above not in finalists:
                continue
            ready = self._worth_timing(rows, above, ends, finalists)
            if not ready:
                continue
            if self._out_of_time():
                return
            is_first = rows - 1 in ends and above - rows + 1 >= LARGE_BUCKET
            if is_first:
                ready = self._timed_at(above, rows)
            ready = self._time(rows, ready)
            if is_first:
                finalists[above] += self._also(above, self._finalists(rows, ready), finalists[above])

    def _look_again(self, ends: list[int], finalists: dict[int, list[Option]]) -> None:
        """Time once more where the default GEMM wins between two row counts that it loses: the clock may have dropped."""
        measured = self._result.measured
        above = {rows: next(end for end in ends if end >= rows) for rows in measured}
        kernels = {rows for rows, end in above.items() if self._winner(rows, finalists[end])}
        for rows, end in sorted(above.items()):
            if rows in ends or rows in kernels or not {rows - 1, rows + 1} <= kernels:
                continue
            ready = [option for option in self._timed_at(end, rows) if option.name in measured[rows].us]
            if ready and not self._out_of_time():
                self._time(rows, ready)

    def _also(self, end: int, more: list[Option], known: list[Option]) -> list[Option]:
        """Those of ``more`` that were timed at ``end`` and are not among ``known``."""
        return [option for option in more if option.name in self._result.measured[end].us and option not in known]

    def _timed_at(self, end: int, rows: int) -> list[Option]:
        """What was timed at ``end`` and can serve ``rows``."""
        problem, us = self._plan.problem(rows), self._result.measured[end].us
        able, _ = options(self._plan.problem(end))
        return [option for option in able if option.name in us and option.backend.supports(problem) is None]

    def _worth_timing(self, rows: int, above: int, ends: list[int], finalists: dict[int, list[Option]]) -> list[Option]:
        """The finalists of the bucket that can serve ``rows``; none where they lose at both of its ends."""
        measured, ready = self._result.measured, finalists[above]
        first = max((end for end in ends if end < above), default=0) + 1  # of the bucket
        if rows != first and first in measured and not (self._winner(first, ready) or self._winner(above, ready)):
            return []
        problem = self._plan.problem(rows)
        return [option for option in ready if option.backend.supports(problem) is None]

    # --- deciding ---

    def _winner(self, rows: int, among: list[Option] | None = None) -> Option | None:
        """The best of what is quicker than the default GEMM at ``rows``; None for the default GEMM."""
        return self._best(rows, self._quicker(rows, among))

    def _best(self, rows: int, quicker: list[Option]) -> Option | None:
        times = [option.weigh(self._result.measured[rows].us[option.name]) for option in quicker]
        return next((option for option, us in zip(quicker, times) if us <= min(times) * (1 + TIE)), None)

    def _quicker(self, rows: int, among: list[Option] | None = None) -> list[Option]:
        """What is quicker than the default GEMM at ``rows`` by more than the noise, and not wrong anywhere."""
        measured = self._result.measured[rows]
        ends = (self._result.measured[end].noise for end in sorted(self._result.measured) if end >= rows)
        noise = next((noise for noise in ends if noise is not None), 0.0)
        limit = measured.default_us * (1 - max(LEAST_GAIN, noise))
        able = [option for option in options(self._plan.problem(rows))[0] if option.name in measured.us]
        able += [option for option in among or [] if option.name in measured.us and option not in able]
        return [option for option in able if measured.us[option.name] < limit and option.name not in self._wrong]

    def _choose(self, rows: int, ends: list[int], finalists: dict[int, list[Option]]) -> Option | None:
        above, measured = next(end for end in ends if end >= rows), self._result.measured.get(rows)
        if measured and not (measured.us and self._wrong.issuperset(measured.us)):
            return self._winner(rows, finalists.get(above, []))
        # Not timed, or only with what turned out wrong: where something wins at both ends of the bucket, what wins at the
        # upper one, and does not lose at the lower, is taken to win inside.
        below = max((end for end in ends if end < rows), default=rows)
        if above in self._result.measured and below in self._result.measured:
            lower = self._quicker(below)
            if not lower:
                return None
            lost = self._result.measured[below].us.keys() - {option.name for option in lower}
            inside = [option for option in self._quicker(above) if option.name not in lost]
            problem = self._plan.problem(rows)
            return self._best(above, [option for option in inside if option.backend.supports(problem) is None])
        return self._untuned(rows) if rows <= devices.untuned_rows(self._plan.arch) else None

    def _untuned(self, rows: int) -> Option | None:
        found, _ = backends.untuned(self._plan.problem(rows))
        able = (Option(backend, tactic) for backend, tactic in found)
        return next((option for option in able if option.name not in self._wrong), None)

    def _choose_what_is_right(self, ends: list[int], finalists: dict[int, list[Option]], max_rows: int) -> None:
        """Choose for every row count. What turns out wrong where it was chosen, on any rank, serves nowhere."""
        found = self._result
        while True:
            found.chosen = {rows: self._choose(rows, ends, finalists) for rows in range(1, max_rows + 1)}
            wrong = {option.name for rows, option in found.chosen.items() if option and not self._prepare(option, rows)}
            everywhere = wrong.union(*self._exchange(sorted(wrong)))
            if not everywhere:
                return
            if everywhere - wrong:  # the plan has logged what is wrong here
                logger.warning("%s serves nowhere: wrong on another rank", ", ".join(sorted(everywhere - wrong)))
            self._wrong |= everywhere
            self._time_others(ends, finalists)

    def _time_others(self, ends: list[int], finalists: dict[int, list[Option]]) -> None:
        """Where all that was timed inside a bucket turned out wrong, time what else was timed at its end."""
        for rows, measured in sorted(self._result.measured.items()):
            if rows in ends or not measured.us or not self._wrong.issuperset(measured.us):
                continue
            above = next(end for end in ends if end >= rows)
            others = [option for option in self._timed_at(above, rows) if option.name not in self._wrong]
            if others and not self._out_of_time():
                finalists[above] += self._also(above, self._time(rows, others), finalists[above])

    def entries(self) -> Iterator[tuple[int, Entry]]:
        """The plan's entries for what was found."""
        for rows, option in self._result.chosen.items():
            launch = self._launches[option.name] if option else None
            yield rows, Entry(launch, tuple(self._reasons(rows, option)))

    def _reasons(self, rows: int, option: Option | None) -> Iterator[str]:
        yield from options(self._plan.problem(rows))[1]
        yield from self._result.dropped
        measured = self._result.measured.get(rows)
        if option is None and measured and measured.us:
            name = min(measured.us, key=lambda name: measured.us[name])
            yield f"{name}: measured {measured.us[name]:.1f} us, the default GEMM {measured.default_us:.1f} us"
        elif option is None and measured is None:
            yield "not measured at this row count; the default GEMM won around it, or the budget had ended"


def _default(weight: Tensor, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    return default_gemm.write_logits(x, weight, bias, out)


def _slowest(ranks: list[Measured]) -> Measured:
    """Of each time the slowest rank's; only launches that every rank has."""
    names = [name for name in ranks[0].us if all(name in rank.us for rank in ranks)]
    return Measured(
        max(rank.default_us for rank in ranks),
        {name: max(rank.us[name] for rank in ranks) for name in names},
        max((rank.noise for rank in ranks if rank.noise is not None), default=None),
    )
