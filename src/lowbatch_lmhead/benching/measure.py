"""Measuring one case: every competitor is checked against float64, then all that are right are timed in turn.

- GPU time: CUDA graphs replayed in turn, weights from memory (``lowbatch_lmhead.tuning.timing``), median of the rounds. The
  default GEMM is in there twice, which shows the noise; so is a kernel that reads the weight alone, the limit.
- Host time: many eager calls, each making its own logits, the synchronisation outside; median of the rounds.
- Memory: what one such call takes at its peak, with its logits.
- Errors: ``norm(y - exact) / norm(exact)`` on an output full of NaN before, over all logits and over the last 32 of the
  vocabulary.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..backends.base import dtype_name
from ..log import said
from ..tuning import limit
from ..tuning.timing import Call, Timer
from .competitors import Case, Competitor, Prepared, yardstick

ROUNDS = 9
HOST_ROUNDS, HOST_CALLS, HOST_WARM_UP = 9, 50, 5
# A larger error is a wrong result. Others' accumulators may be less exact than ours.
BOUND = {torch.bfloat16: 5e-3, torch.float32: 1e-4}
GUARD = 64  # elements beside the output
LAST = 32  # rows of the vocabulary, where a kernel's last tile is

Result = dict[str, Any]  # one line of the table


@dataclass(frozen=True)
class Entrant:
    """A competitor that is ready and right, with what is known of it so far."""

    prepared: Prepared
    result: Result


def measure(
    case: Case, competitors: Sequence[Competitor], weight: Tensor, timer: Timer, step: Callable[[str], None]
) -> dict[str, Any]:
    """The results of all ``competitors``, in their order, with the read limit. ``step(name)`` is called before each."""
    generator = torch.Generator(weight.device).manual_seed(2)
    x = torch.randn(case.rows, case.hidden, generator=generator, dtype=weight.dtype, device=weight.device)
    exact = torch.cat([x.double() @ part.double().t() for part in torch.split(weight, 8192)], 1)
    results: list[Result] = []
    entrants: list[Entrant] = []
    for competitor in competitors:
        step(competitor.name)
        entered = _enter(case, competitor, weight, x, exact, timer)
        if isinstance(entered, Entrant):
            entrants.append(entered)
            results.append(entered.result)
            if competitor.name == yardstick(case):
                again = Entrant(entered.prepared, entered.result | {"name": f"{competitor.name}, again"})
                entrants.append(again)
                results.append(again.result)
        else:
            results.append(entered)
    step("in turn")
    try:
        read = _time_all(case, entrants, weight, timer)
        _time_host(entrants, weight, x)
    except Exception as error:  # a GPU that gave up before, say: what raised then is all that is known
        tried = [f"{one['name']}: {one['reason']}" for one in results if one["reason"] and one["prepare_s"] is not None]
        raise RuntimeError("; before that, ".join([said(error), *tried])) from error
    linear_us = next((one["us"] for one in results if one["name"] == yardstick(case)), None)
    again_us = next((one["us"] for one in results if one["name"] == f"{yardstick(case)}, again"), None)
    limit_us = limit.limit_us(read["read_us"], case.rows, case.vocab, case.hidden, weight.dtype, case.out_dtype)
    for one in results:
        us = one["us"]
        one["ratio"] = us / linear_us if us and linear_us else None
        one["limit_fraction"] = limit_us / us if us and limit_us else None
    return {
        **read,
        "limit_us": limit_us,
        "yardstick": yardstick(case),
        "noise": abs(again_us / linear_us - 1) if again_us and linear_us else None,
        "results": results,
    }


def _result(name: str, **known: Any) -> Result:
    nothing = dict.fromkeys(
        ("us", "ratio", "limit_fraction", "host_us", "rel_err", "last_rows_err", "memory_bytes", "prepare_s", "reason")
    )
    return {"name": name, **nothing, "note": "", **known}


def _enter(
    case: Case, competitor: Competitor, weight: Tensor, x: Tensor, exact: Tensor, timer: Timer
) -> Entrant | Result:
    """The competitor, ready and right; or its line of the table with the reason why it is not timed."""
    begin = time.perf_counter()
    name = competitor.name
    try:
        reason = competitor.available(case)
        if reason is not None:
            return _result(name, reason=reason)
        prepared = competitor.make(case, weight, x)
        first, last = check(prepared.call, weight, x, exact, case.out_dtype)
    except Exception as error:  # whatever another library raises, the others get their turn
        return _result(name, reason=said(error), prepare_s=time.perf_counter() - begin)
    bound = BOUND[case.out_dtype]
    known = {"note": prepared.note, "prepare_s": time.perf_counter() - begin}
    known |= {"rel_err": _finite(first), "last_rows_err": _finite(last)}
    if not max(first, last) <= bound:
        wrong = f"wrong: relative error {max(first, last):.2g} against float64, over {bound:g}"
        return _result(name, **known, reason=wrong)
    try:
        known["memory_bytes"] = _memory(prepared, weight, x)
        with timer.contest(case.rows, [prepared.call]):  # what cannot be timed must not stop the others
            pass
    except Exception as error:
        return _result(name, **known, reason=f"it cannot be timed: {said(error)}")
    return Entrant(prepared, _result(name, **known))


def check(call: Call, weight: Tensor, x: Tensor, exact: Tensor, out_dtype: torch.dtype) -> tuple[float, float]:
    """The ``errors`` of a call whose output was full of NaN; infinite where it writes beside its output."""
    # Aligned as a tensor of its own is.
    around = torch.full((exact.numel() + 2 * GUARD,), math.nan, dtype=out_dtype, device=exact.device)
    out = around[GUARD:-GUARD].view(exact.shape)
    returned = call(weight, x, None, out)
    logits = returned if isinstance(returned, Tensor) else out
    if logits.shape != exact.shape or logits.dtype is not out_dtype:
        got = f"{tuple(logits.shape)} {dtype_name(logits.dtype)}"
        raise TypeError(f"it gave {got}, not {tuple(exact.shape)} {dtype_name(out_dtype)}")
    if not (around[:GUARD].isnan().all() and around[-GUARD:].isnan().all()):
        return math.inf, math.inf
    return errors(logits, exact)


def errors(logits: Tensor, exact: Tensor) -> tuple[float, float]:
    """norm(y - exact) / norm(exact), over all logits and over the last of the vocabulary; infinite where one is NaN."""
    difference = logits.double() - exact
    parts = ((difference, exact), (difference[:, -LAST:], exact[:, -LAST:]))
    first, last = ((d.norm() / e.norm()).item() for d, e in parts)
    return (first if first == first else math.inf), (last if last == last else math.inf)


def _memory(prepared: Prepared, weight: Tensor, x: Tensor) -> int | None:
    """Bytes that a call takes at its peak; None on the CPU, where nothing counts them."""
    if not weight.is_cuda:
        return None
    torch.cuda.synchronize(weight.device)
    before = torch.cuda.memory_allocated(weight.device)
    torch.cuda.reset_peak_memory_stats(weight.device)
    with prepared.around():
        logits = _host_call(prepared, weight, x)()
    torch.cuda.synchronize(weight.device)
    del logits
    return torch.cuda.max_memory_allocated(weight.device) - before


def _time_all(case: Case, entrants: list[Entrant], weight: Tensor, timer: Timer) -> dict[str, Any]:
    """Enter each entrant's ``us``; return the time of reading the weight alone, or why it is not known."""
    readers, why = _readers(case, weight, timer)
    calls = [*readers, *(one.prepared.call for one in entrants)]
    rounds: list[dict[int, float]] = []
    if not calls:
        return {"read_us": None, "read_reason": why}
    with timer.contest(case.rows, calls) as contest:
        for done in range(ROUNDS):
            turn = list(range(len(calls)))[:: -1 if done % 2 else 1]
            rounds.append(dict(zip(turn, contest.round(turn))))
    medians = [statistics.median(one[index] for one in rounds) for index in range(len(calls))]
    for one, us in zip(entrants, medians[len(readers) :]):
        one.result["us"] = us
    return {"read_us": min(medians[: len(readers)], default=None), "read_reason": why}


def _readers(case: Case, weight: Tensor, timer: Timer) -> tuple[list[Call], str | None]:
    """Kernels that read the weight alone, or why there are none."""
    if not weight.is_cuda:
        return [], "it takes a CUDA GPU"
    try:
        calls = limit.readers(weight)
        with timer.contest(case.rows, calls):
            pass
    except Exception as error:  # no Triton, no C compiler for it
        return [], said(error)
    return calls, None


def _time_host(entrants: list[Entrant], weight: Tensor, x: Tensor) -> None:
    """Enter each entrant's ``host_us``."""
    synchronize = functools.partial(torch.cuda.synchronize, weight.device) if weight.is_cuda else contextlib.nullcontext
    times: list[list[float]] = [[] for _ in entrants]
    calls = HOST_CALLS if weight.is_cuda else 2  # on the CPU a call is the whole product
    for _ in range(HOST_ROUNDS if weight.is_cuda else 2):
        for one, mine in zip(entrants, times):
            way = _host_call(one.prepared, weight, x)
            with one.prepared.around():
                for _ in range(HOST_WARM_UP if weight.is_cuda else 0):
                    way()
                begin = time.perf_counter()
                for _ in range(calls):
                    way()
                mine.append((time.perf_counter() - begin) * 1e6 / calls)
            synchronize()
    for one, mine in zip(entrants, times):
        one.result["host_us"] = statistics.median(mine)


def _host_call(prepared: Prepared, weight: Tensor, x: Tensor) -> Callable[[], object]:
    return prepared.host or functools.partial(prepared.call, weight, x, None, None)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
