"""``autotune`` for the heads of a model: from an earlier call, from the cache, or measured; on all ranks alike.

Whatever goes wrong on the way leaves the heads as ``warmup`` would prepare them, on all ranks, with one log line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import backends, devices, gate, objects, verify
from .. import plan as plans
from ..backends import Launch, compiling
from ..backends.base import dtype_name
from ..head import Head, sizes_of
from ..log import said, warn_once
from ..plan import Entry, Plan
from ..report import Bar, Step, check_progress
from ..warming import warm_head
from . import cache as kept
from . import limit, timing
from .ranks import RankFailure, Ranks
from .report import TunedHead, TunedRow, TuningReport
from .search import Option, Search, named, options, tune_inside, unmeasured, wanted
from .workers import Compiles

FORM = 1  # of what is kept in the cache
MOST_ROWS = gate.MOST_MEASURED_ROWS
LONG_S = 1e9  # no budget


@dataclass(frozen=True)
class Wishes:
    """The arguments of ``autotune``, checked."""

    max_rows: int
    out_dtype: torch.dtype | None
    folder: Path | None  # of the cache
    refresh: bool
    budget_s: float
    progress: bool | None


@dataclass(frozen=True)
class Found:
    """A head by its name in the model."""

    name: str
    head: Head


def autotune(read: Callable[[], list[tuple[str, Head]]], *, process_group: Any, **arguments: Any) -> TuningReport:
    """``lowbatch_lmhead.autotune``, which documents the arguments; ``read`` finds the heads."""
    begin, compiled, loaded = time.perf_counter(), objects.counts.compiled, objects.counts.loaded
    ranks = Ranks(process_group)
    wrong: Exception | None = None  # a ValueError, or what a registered reader raised
    try:
        wishes = _wishes(**arguments)
        heads = [Found(name, head) for name, head in read()]
        if any(found.head.weight is not None and devices.is_capturing(found.head.weight.device) for found in heads):
            raise ValueError("autotune cannot measure inside a CUDA graph capture; call it before")
    except Exception as error:
        wrong = error  # the other ranks are told before it is raised
    disagreement: Exception | None = None
    why: str | None = None
    done: list[TunedHead] = []
    try:
        with ranks:
            disagreement = _disagreement(ranks, wrong, [] if wrong else [_arguments(wishes), *map(_describe, heads)])
            if not disagreement:
                for found in heads:
                    done.append(_tune_head(found, wishes, ranks))
    except Exception as error:
        if wrong:
            raise wrong from None
        why = str(error) if isinstance(error, RankFailure) else said(error)
    if disagreement:
        raise disagreement
    if why is not None:  # here, where the error no longer holds on to memory
        left = heads[len(done) :]
        names = ", ".join(found.name for found in left)
        what = f"{names} not tuned but prepared as warmup does" if left else "tuned here, but not on every rank"
        warn_once(f"{what}: {why}" if done else f"nothing was tuned, the heads are prepared as warmup does: {why}")
        done += [_prepare_untuned(found, wishes, why) for found in left]
    for found in heads:  # the rows beyond max_rows that kernels serve unmeasured
        warm_head(found.head, None, wishes.out_dtype, lambda done, of: None)
    return TuningReport(
        tuple(done),
        time.perf_counter() - begin,
        objects.counts.compiled - compiled,
        objects.counts.loaded - loaded,
    )


def _disagreement(ranks: Ranks, wrong: Exception | None, said: list[Any]) -> Exception | None:
    """What is wrong with the arguments, here or on another rank, or differs between ranks."""
    for rank, (wrong_there, said_there) in enumerate(ranks.exchange([str(wrong) if wrong else None, said])):
        if wrong:
            return wrong
        if wrong_there is not None:
            return ValueError(f"rank {rank} cannot tune: {wrong_there}")
        if said_there != said:
            return ValueError(
                "all ranks must tune heads of the same shape with the same arguments; "
                f"rank {ranks.rank} has {said}, rank {rank} has {said_there}"
            )
    return None


def _arguments(wishes: Wishes) -> dict[str, Any]:
    """The arguments that have to be the same on all ranks."""
    out_dtype = dtype_name(wishes.out_dtype) if wishes.out_dtype else None
    return {"max_rows": wishes.max_rows, "out_dtype": out_dtype, "refresh": wishes.refresh}


def _describe(found: Found) -> dict[str, Any]:
    """What of a head has to be the same on all ranks."""
    weight = found.head.weight
    return {
        "name": found.name,
        "shape": list(sizes_of(weight) or ()),
        "dtype": dtype_name(weight.dtype) if weight is not None else None,
        "bias": found.head.bias is not None,
    }


def _wishes(max_rows: Any, out_dtype: Any, cache: Any, refresh: bool, budget_s: Any, progress: bool | None) -> Wishes:
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or not 1 <= max_rows <= MOST_ROWS:
        raise ValueError(f"max_rows must be a whole number from 1 to {MOST_ROWS}, got {max_rows!r}")
    if isinstance(budget_s, bool) or not isinstance(budget_s, (int, float)) or not budget_s >= 0:
        raise ValueError(f"budget_s must be a number of seconds of at least 0, got {budget_s!r}")
    if not isinstance(refresh, bool):
        raise ValueError(f"refresh must be True or False, got {refresh!r}")
    check_progress(progress)
    seconds = float(budget_s) if budget_s < LONG_S else math.inf
    return Wishes(max_rows, out_dtype, kept.folder(cache), refresh, seconds, progress)


def _prepare_untuned(found: Found, wishes: Wishes, why: str) -> TunedHead:
    begin = time.perf_counter()
    decisions = warm_head(found.head, wishes.max_rows, wishes.out_dtype, lambda done, of: None)
    rows = tuple(
        TunedRow(one.rows, one.backend, one.tactic, None, None, None, one.reasons)
        for one in decisions
        if 0 < one.rows <= wishes.max_rows
    )
    notes = (why, *(reason for one in decisions if not one.rows for reason in one.reasons))
    return _report(found, wishes, "not tuned", rows, begin, notes=notes)


def _tune_head(found: Found, wishes: Wishes, ranks: Ranks) -> TunedHead:
    begin = time.perf_counter()
    plan, reasons = _plan(found.head, wishes)
    # Whether a head is taken may differ between ranks (another GPU, gradients): then none tunes it.
    everywhere = ranks.exchange(list(reasons))
    if any(everywhere):
        notes = [reason for rank in everywhere for reason in rank]
        return _report(found, wishes, "not tuned", (), begin, notes=tuple(dict.fromkeys(notes)))
    assert plan is not None
    # Two threads that measure on one GPU would disturb each other; ranks are in lock-step, and may not wait for a thread.
    with _turn(plan.key.device) if ranks.size == 1 else contextlib.nullcontext():
        return _tune_plan(found, plan, wishes, ranks, begin)


@functools.cache
def _turn(device: torch.device) -> threading.Lock:
    return threading.Lock()


@dataclass(frozen=True)
class Earlier:
    """What calls in this process have found for one plan."""

    last: TunedHead
    rows: dict[int, TunedRow]  # what serves, by any call
    budgets_s: dict[int, float]  # by row count: that the search may have been cut short by; infinite where it was not
    content: dict[str, Any] | None  # what a cache keeps of the last call; None where it was cut short
    folder: Path | None  # of the cache in which that is


def _tune_plan(found: Found, plan: Plan, wishes: Wishes, ranks: Ranks, begin: float) -> TunedHead:
    earlier: Earlier | None = plan.tuned
    known = _still_serving(plan, earlier)
    wanted_rows = range(1, wishes.max_rows + 1)
    enough = earlier is not None and all(
        rows in known and wishes.budget_s <= earlier.budgets_s[rows] for rows in wanted_rows
    )
    serves = [[row.rows, row.backend, row.tactic] for row in known.values()]
    everywhere = ranks.exchange([enough and not wishes.refresh, serves])
    alike = all(other == everywhere[0][1] for _, other in everywhere)
    if earlier and alike and all(enough_there for enough_there, _ in everywhere):
        content, folder = earlier.content, wishes.folder
        if content and folder and folder != earlier.folder and len(content["rows"]) >= wishes.max_rows:
            if _read(kept.load(folder, cache_key(plan)), plan, len(content["rows"])) is None:
                kept.save(folder, cache_key(plan), content)
            plan.tuned = dataclasses.replace(earlier, folder=folder)
        # What the last call could not reach in its time is nothing to these rows where all of them had theirs.
        whole = content is None and all(earlier.budgets_s[rows] == math.inf for rows in wanted_rows)
        return dataclasses.replace(
            earlier.last,
            name=found.name,
            rows=tuple(known[rows] for rows in wanted_rows),
            notes=() if whole else earlier.last.notes,
            source="earlier call",
        )
    with Bar(f"tuning {found.name}", wishes.progress) as step, torch.no_grad(), plans.on_device(plan.key.device):
        found = dataclasses.replace(found, head=_held(found.head))
        from_cache = _from_cache(found, plan, wishes, ranks, begin)
        tuned, content = from_cache or _measure(found, plan, wishes, ranks, step, begin, earlier if alike else None)
    if content and not from_cache:
        kept.save(wishes.folder, cache_key(plan), content)
    rows_of, budgets_s = _still_serving(plan, earlier), dict(earlier.budgets_s) if earlier else {}
    for row in tuned.rows:
        if row is not rows_of.get(row.rows):  # or the budget ended before it was measured again
            rows_of[row.rows], budgets_s[row.rows] = row, math.inf if content else wishes.budget_s
    plan.tuned = Earlier(tuned, dict(sorted(rows_of.items())), budgets_s, content, wishes.folder)
    return tuned


def _still_serving(plan: Plan, earlier: Earlier | None) -> dict[int, TunedRow]:
    """What earlier calls have found and still serves: a launch that has turned out wrong since does not."""

    def serves(row: TunedRow) -> bool:
        entry = plan.entries[row.rows]
        launch = entry and entry.launch
        tactic = (launch.backend, launch.tactic) if launch else (backends.DEFAULT_GEMM, None)
        return entry is not None and tactic == (row.backend, row.tactic)

    return {rows: row for rows, row in earlier.rows.items() if serves(row)} if earlier else {}


def _held(head: Head) -> Head:
    """``head`` with tensors that keep their memory while it is measured, whatever ``.data`` becomes meanwhile."""
    weight, bias = (None if tensor is None else tensor.detach() for tensor in (head.weight, head.bias))
    return dataclasses.replace(head, weight=weight, bias=bias)


def _plan(head: Head, wishes: Wishes) -> tuple[Plan | None, tuple[str, ...]]:
    """The plan of ``head``, or why it is left to its own computation."""
    if head.weight is None or head.own is not None or head.reasons:
        return None, head.reasons or ("it computes its logits itself",)
    with torch.no_grad():
        probe = head.weight.new_empty((1, head.weight.shape[1]))
        decision, plan = gate.decide(head, probe, wishes.out_dtype or head.weight.dtype)
    if plan is None:
        return None, decision.reasons
    plan.look_again()
    reasons = options(plan.problem(1))[1]
    return plan, () if wanted(plan, wishes.max_rows) else tuple(reasons)


# --- the cache ---


def cache_key(plan: Plan) -> kept.Key:
    """All that a measured choice depends on."""
    key, device = plan.key, plan.key.device
    cuda = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "form": FORM,
        "gpu": cuda.name if cuda else device.type,
        "multiprocessors": cuda.multi_processor_count if cuda else 0,
        "arch": plan.arch,
        "vocab": key.vocab,
        "hidden": key.hidden,
        "dtype": dtype_name(key.dtype),
        "out_dtype": dtype_name(key.out_dtype),
        "bias": key.has_bias,
        "call": compiling.CALL_VERSION,
        "pdl": compiling.launches_early(plan.arch or ""),
        **kept.versions(),
    }


def _from_cache(
    found: Found, plan: Plan, wishes: Wishes, ranks: Ranks, begin: float
) -> tuple[TunedHead, dict[str, Any]] | None:
    """The choice that was kept, where every rank has the same and each launch in it is right.

    The process that kept it has checked each launch at every row count that it serves, on such a GPU and with these
    versions. So here it is checked at the fewest and the most of them, unless its backend chooses anew for each.
    """
    content = None if wishes.refresh else kept.load(wishes.folder, cache_key(plan))
    rows = _read(content, plan, wishes.max_rows)
    everywhere = ranks.exchange([row[:3] for row in _plain(rows)] if rows else None)
    if rows is None or content is None or any(other != everywhere[0] for other in everywhere):
        return None
    assert found.head.weight is not None
    serving = {count: option for count, option, *_ in rows if option} | _read_unmeasured(content, plan, wishes.max_rows)
    served: dict[str, list[int]] = {}
    for count, option in serving.items():
        served.setdefault(option.name, []).append(count)
    notes: dict[str, None] = {}
    references: list[verify.Reference] = []
    launches: dict[str, Launch | str] = {}
    for count, option in serving.items():
        note = tune_inside(option, plan.problem(count), found.head.weight, found.head.bias)
        notes |= {note: None} if note else {}
        counts = served[option.name]
        if count in (counts[0], counts[-1]) or hasattr(option.backend, "tune"):
            if not references:
                references.append(plan.reference(found.head.weight, found.head.bias, max(serving)))
            launches[option.name] = plan.checked(
                count, option.backend, option.tactic, found.head.weight, found.head.bias, references
            )
    entries = {
        count: Entry(None, ("measured: the default GEMM is quicker",)) for count, option, *_ in rows if not option
    }
    for count, option in serving.items():
        launch = launches[option.name]
        if isinstance(launch, Launch):
            entries[count] = Entry(launch, ())
    if not all(ranks.exchange(all(count in entries for count, *_ in rows))):
        return None
    plan.adopt(entries)
    read_us, noise = _number(content.get("read_us")), _number(content.get("noise"))
    reported = tuple(_row(plan, count, option, us, default, read_us) for count, option, us, default in rows)
    tuned = _report(found, wishes, "cache", reported, begin, read_us=read_us, noise=noise, notes=tuple(notes))
    return tuned, content


Choice = tuple[int, Option | None, float | None, float | None]  # rows, option, us, default_us


def _read(content: dict[str, Any] | None, plan: Plan, max_rows: int) -> list[Choice] | None:
    """The choices for 1 to ``max_rows`` rows in ``content``; None where it does not hold them all."""
    try:
        given = {row["rows"]: row for row in content["rows"]} if content else {}
        return [_choice(given[rows], plan, rows, max(given)) for rows in range(1, max_rows + 1)] if given else None
    except (KeyError, TypeError, ValueError, AttributeError):  # another form, or a tactic that there is no longer
        return None


def _read_unmeasured(content: dict[str, Any], plan: Plan, max_rows: int) -> dict[int, Option]:
    """What serves the row counts beyond ``max_rows`` where it would be tried first, and ``content`` has it as checked."""
    if len(content["rows"]) != max_rows:  # beyond fewer rows than were kept, other launches serve
        return {}
    try:
        given = {row["rows"]: (row["backend"], row["tactic"]) for row in content.get("unmeasured", [])}
    except (KeyError, TypeError, AttributeError):
        return {}
    first = unmeasured(plan, max_rows) if given else {}
    return {
        rows: Option(backend, tactic)
        for rows, (backend, _, tactic) in first.items()
        if given.get(rows) == (backend.name, str(tactic))
    }


def _choice(row: dict[str, Any], plan: Plan, rows: int, last: int) -> Choice:
    """What ``row`` says of ``rows``, as the search up to ``last`` rows has left it."""
    us, default_us = _number(row["us"]), _number(row["default_us"])
    if row["backend"] == backends.DEFAULT_GEMM:
        return rows, None, us, default_us
    name = f"{row['backend']} ({row['tactic']})"
    return rows, named(name, plan, rows, last), us, default_us


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and 0 <= value < math.inf else None


def _plain(choices: Sequence[Choice]) -> list[list[Any]]:
    return [[rows, option.backend.name if option else backends.DEFAULT_GEMM, str(option.tactic) if option else None, us,
             default_us] for rows, option, us, default_us in choices]  # fmt: skip


# --- measuring ---


def _measure(
    found: Found,
    plan: Plan,
    wishes: Wishes,
    ranks: Ranks,
    step: Step,
    begin: float,
    earlier: Earlier | None,
) -> tuple[TunedHead, dict[str, Any] | None]:
    """What was found, and what a cache keeps of it: nothing where the budget ended first. What was not timed is left to
    what ``earlier`` calls have found, as far as it still serves."""
    weight, bias = found.head.weight, found.head.bias
    assert weight is not None
    with (
        timing.tuning_stream(weight.device),
        verify.plainly(weight),
        Compiles([*wanted(plan, wishes.max_rows), *unmeasured(plan, wishes.max_rows).values()]) as compiles,
    ):
        references = [plan.reference(weight, bias, max(wishes.max_rows, plan.max_rows))]
        timer = timing.timer_for(weight, bias, wishes.max_rows, plan.key.out_dtype)
        try:
            search = Search(
                plan, weight, bias, references, timer, compiles.launch, ranks.exchange, wishes.budget_s, step
            )
            result = search.run(wishes.max_rows)
            read_us = limit.read_us(timer, weight) if result.measured else None
        finally:
            timer.close()
        for launch in {tuple(known) for there in ranks.exchange(plan.dropped()) for known in there}:
            plan.drop(launch, f"{launch[0]} ({launch[1]}): it does not compile or is wrong on another rank")
        if not result.out_of_time:  # what serves beyond, as ``warmup`` prepares it
            for rows in range(wishes.max_rows + 1, plan.max_rows + 1):
                plan.prepare(rows, weight, bias, references, compiles.launch)
    before = _still_serving(plan, earlier)
    left = before.keys() - result.measured.keys() if result.out_of_time else set()
    entries = {rows: entry for rows, entry in search.entries() if rows not in left}
    ranks.exchange("done")  # whoever failed until here has told the others
    if entries:
        plan.adopt(entries)
    choices: list[Choice] = []
    for rows, option in result.chosen.items():
        measured = result.measured.get(rows)
        default_us = measured.default_us if measured else None
        us = default_us if option is None else measured.us.get(option.name) if measured else None
        choices.append((rows, option, us, default_us))
    notes, content = tuple(result.dropped), None
    if result.out_of_time:
        notes += (f"the budget of {wishes.budget_s:g} s ended first: the best so far serves, and is not kept",)
    else:
        content = {
            "rows": [dict(zip(("rows", "backend", "tactic", "us", "default_us"), row)) for row in _plain(choices)],
            "unmeasured": [
                {"rows": rows, "backend": entry.launch.backend, "tactic": entry.launch.tactic}
                for rows, entry in enumerate(plan.entries)
                if rows > wishes.max_rows and entry and entry.launch
            ],
            "read_us": read_us,
            "noise": result.noise,
            "seconds": time.perf_counter() - begin,
        }
    reported = tuple(
        dataclasses.replace(_row(plan, rows, option, us, default, read_us), reasons=entries[rows].reasons)
        if rows in entries
        else before[rows]
        for rows, option, us, default in choices
    )
    source = "measured" if result.measured else "not tuned"
    tuned = _report(found, wishes, source, reported, begin, read_us=read_us, noise=result.noise, notes=notes)
    return tuned, content


# --- the report ---


def _row(
    plan: Plan, rows: int, option: Option | None, us: float | None, default_us: float | None, read_us: float | None
) -> TunedRow:
    key = plan.key
    limit_us = limit.limit_us(read_us, rows, key.vocab, key.hidden, key.dtype, key.out_dtype)
    if option is None:
        return TunedRow(rows, backends.DEFAULT_GEMM, None, us, default_us, limit_us)
    return TunedRow(rows, option.backend.name, str(option.tactic), us, default_us, limit_us)


def _report(
    found: Found,
    wishes: Wishes,
    source: Any,
    rows: tuple[TunedRow, ...],
    begin: float,
    *,
    read_us: float | None = None,
    noise: float | None = None,
    notes: tuple[str, ...] = (),
) -> TunedHead:
    weight = found.head.weight
    vocab, hidden = sizes_of(weight) or (None, None)
    dtype = dtype_name(weight.dtype) if weight is not None else None
    out_dtype = dtype_name(wishes.out_dtype) if wishes.out_dtype else dtype
    seconds = time.perf_counter() - begin
    return TunedHead(found.name, vocab, hidden, dtype, out_dtype, source, rows, read_us, noise, notes, seconds)
