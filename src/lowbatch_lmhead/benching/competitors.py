"""What is measured: a table of the ways to the logits, each with why it cannot run, or how it is made ready.

Nothing is left out of it silently: a way that is for other logits, is not installed or takes too long by default stays in
the table with its reason, and one that raises while it is made ready with its error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import api, dispatch
from .. import plan as plans
from ..backends import mm_bf16
from ..log import said
from ..plan import Plan, PlanKey
from ..tuning.timing import Call

LINEAR = "F.linear"
MM = "torch.mm(out_dtype=float32)"
UPCAST = "F.linear in float32"
TRITON = "Triton GEMM"
TUNED = "project, tuned"
UNTUNED = "project, untuned"


@dataclass(frozen=True)
class Case:
    """One thing to measure. ``max_rows`` is the largest row count of the run, up to which ``project`` is tuned."""

    model: str
    vocab: int
    hidden: int
    rows: int
    out_dtype: torch.dtype
    device: torch.device
    max_rows: int


@dataclass(frozen=True)
class Prepared:
    """A way that is ready: ``call(weight, x, None, out)`` writes the logits into ``out`` or returns them; without ``out``
    it returns them.

    ``host`` is the call whose host time counts, where that is not ``call`` without ``out``; ``around`` is entered once for
    many of these. ``note`` says what was chosen.
    """

    call: Call
    note: str = ""
    host: Callable[[], object] | None = None
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Competitor:
    """``available`` says why it cannot run, or None; ``make(case, weight, x)`` may still raise.

    ``asked`` is False for one that would be measured if the command were called in another way.
    """

    name: str
    available: Callable[[Case], str | None]
    make: Callable[[Case, Tensor, Tensor], Prepared]
    asked: bool = True


def table(device: torch.device, compile_: bool) -> list[Competitor]:
    """The competitors for ``device``, each name once; ``compile_``: torch.compile, which takes minutes, is measured too."""
    found = [
        Competitor(TUNED, _always, _tuned),
        Competitor(UNTUNED, _always, _untuned),
        Competitor(LINEAR, _bfloat16_only, _made(lambda weight, x, bias, out: F.linear(x, weight))),
        Competitor(MM, _mm_available, _made(_mm)),
        Competitor(UPCAST, _float32_only, _made(lambda weight, x, bias, out: F.linear(x.float(), weight.float()))),
        *_flashinfer(device),
        Competitor("QuACK gemm", _quack_available, _quack),
        Competitor("torch.compile", _always if compile_ else _compile_unasked, _compiled, compile_),
        Competitor(TRITON, _triton_elsewhere, _made(_mm), False),
    ]
    by_name = {one.name: one for one in [*found, *added]}
    return list(by_name.values())


# What a program adds before it runs the command; one with the name of another takes its place.
added: list[Competitor] = []


def yardstick(case: Case) -> str:
    """The name of the default GEMM, which the others are compared with."""
    if case.out_dtype is torch.bfloat16:
        return LINEAR
    return MM if case.device.type == "cuda" else UPCAST


def _always(case: Case) -> None:
    return None


def _bfloat16_only(case: Case) -> str | None:
    return None if case.out_dtype is torch.bfloat16 else "its logits are rounded to bfloat16"


def _float32_only(case: Case) -> str | None:
    return None if case.out_dtype is torch.float32 else "it gives float32 logits: --out-dtype float32"


def _gpu_only(case: Case) -> str | None:
    return None if case.device.type == "cuda" else "it takes a CUDA GPU"


def _made(call: Call) -> Callable[[Case, Tensor, Tensor], Prepared]:
    """For a call that needs no preparation."""
    return lambda case, weight, x: Prepared(call)


# --- ours ---


def _plan_key(case: Case, weight: Tensor) -> PlanKey:
    return PlanKey(weight.device, case.vocab, case.hidden, weight.dtype, case.out_dtype, False)


@contextlib.contextmanager
def _serving(plan: Plan) -> Iterator[None]:
    """Let ``plan`` serve heads of its shape meanwhile: a process has one plan for a shape, and two are to be compared."""
    before = plans._plans.get(plan.key)
    plans._plans[plan.key] = plan
    try:
        yield
    finally:
        if before is None:
            plans._plans.pop(plan.key, None)
        else:
            plans._plans[plan.key] = before


def _asked(case: Case, weight: Tensor) -> torch.dtype | None:
    return None if case.out_dtype is weight.dtype else case.out_dtype


def _tuned(case: Case, weight: Tensor, x: Tensor) -> Prepared:
    report = api.autotune(weight, max_rows=case.max_rows, out_dtype=_asked(case, weight))
    notes = list(report.heads[0].notes)
    return _project(case, weight, x, plans.plan_for(weight, None, case.out_dtype), notes)


def _untuned(case: Case, weight: Tensor, x: Tensor) -> Prepared:
    plan = Plan(_plan_key(case, weight))
    with _serving(plan):
        api.warmup(weight, max_rows=case.rows, out_dtype=_asked(case, weight), progress=False)
    return _project(case, weight, x, plan, [])


def _project(case: Case, weight: Tensor, x: Tensor, plan: Plan, notes: list[str]) -> Prepared:
    asked = _asked(case, weight)
    run = dispatch.Dispatcher(weight, asked).run
    with _serving(plan):
        decision = api.explain(weight, x, out_dtype=asked)

    def call(weight: Tensor, x: Tensor, bias: None, out: Tensor | None) -> Tensor:
        with _serving(plan):
            return run(weight, x, out)

    bound = api.bind(weight, out_dtype=asked)
    return Prepared(call, "; ".join([decision.name, *notes]), lambda: bound(x), lambda: _serving(plan))


# --- PyTorch ---


def _mm_available(case: Case) -> str | None:
    return _float32_only(case) or _gpu_only(case)


def _mm(weight: Tensor, x: Tensor, bias: None, out: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)


def _compile_unasked(case: Case) -> str:
    return "it takes minutes: --compile measures it"


def _compiled(case: Case, weight: Tensor, x: Tensor) -> Prepared:
    """Without CUDA graphs of its own: the timer captures it in one, as everything else."""

    def linear(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight)

    def wide(x: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else F.linear(x.float(), weight.float())

    mode = "max-autotune-no-cudagraphs"
    torch.compiler.reset()  # else its limit of recompilations counts those of earlier cases
    function = linear if case.out_dtype is weight.dtype else wide
    compiled = torch.compile(function, mode=mode, dynamic=False, fullgraph=True)
    compiled(x, weight)
    return Prepared(lambda weight, x, bias, out: compiled(x, weight), mode)


# --- others ---


def _flashinfer(device: torch.device) -> list[Competitor]:
    """FlashInfer's public mm_bf16 with each backend that its signature names."""
    name = "flashinfer mm_bf16"
    if device.type != "cuda":
        return [Competitor(name, _gpu_only, _made(_mm))]
    try:
        found = mm_bf16_backends()
    except Exception as error:  # whatever an installation raises
        reason = f"it cannot be imported: {said(error)}"
        return [Competitor(name, lambda case: reason, _made(_mm))]
    return [Competitor(f"{name} ({one})", _gpu_only, functools.partial(_mm_bf16, one)) for one in found]


def mm_bf16_backends() -> tuple[str, ...]:
    """The names that the installed FlashInfer's mm_bf16 takes as ``backend``."""
    from flashinfer import mm_bf16 as function

    annotation = inspect.signature(function, eval_str=True).parameters["backend"].annotation
    found = tuple(str(one) for one in typing.get_args(annotation))
    if not found:
        raise TypeError("mm_bf16 does not name its backends")
    return found


def _mm_bf16(backend: str, case: Case, weight: Tensor, x: Tensor) -> Prepared:
    from flashinfer import autotune
    from flashinfer import mm_bf16 as function

    def call(weight: Tensor, x: Tensor, bias: None, out: Tensor | None) -> Any:
        return function(x, weight.t(), out=out, out_dtype=case.out_dtype, backend=backend)

    call(weight, x, None, None)  # raises what it does not admit
    if not mm_bf16._nvcc():
        return Prepared(call, "not tuned: FlashInfer's tuner needs nvcc, which is not here")
    try:
        with autotune(True):
            call(weight, x, None, None)
    except Exception as error:  # it runs untuned all the same
        return Prepared(call, f"not tuned: {said(error)}")
    return Prepared(call, "tuned by flashinfer.autotune")


def _quack_available(case: Case) -> str | None:
    installed = importlib.util.find_spec("quack") is not None
    return _gpu_only(case) or (None if installed else "quack is not installed (the package quack-kernels)")


def _quack(case: Case, weight: Tensor, x: Tensor) -> Prepared:
    """With its defaults, that is, after its own tuning."""
    from quack.gemm_interface import gemm  # type: ignore[import-not-found]

    def call(weight: Tensor, x: Tensor, bias: None, out: Tensor | None) -> Any:
        return gemm(x, weight.t(), out=out, out_dtype=case.out_dtype)

    call(weight, x, None, None)
    return Prepared(call, "tuned by QuACK")


def _triton_elsewhere(case: Case) -> str:
    return "it is in the repository: python -m benchmarks measures it"
