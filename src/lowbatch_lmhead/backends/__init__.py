"""The registry of backends. A new kernel is a new file here and a line in ``_KERNELS``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .base import Backend, Launch, Problem
from .cluster_splitk import ClusterSplitK
from .direct import Direct
from .hopper_stream import HopperStream
from .mm_bf16 import MmBf16
from .stream import Stream
from .warp_splitk import WarpSplitK

DEFAULT_GEMM = "default GEMM"

# In the order in which they are tried while nothing has been measured, except for those that ask to be ``first``.
# FlashInfer's own order for split-K is warp before cluster; direct never beat either by more than 1 % on an H200 above vocab
# 1024, and rereads the weight for every row; mm_bf16 costs 60 to 200 us of host time a call. The stream kernels take what
# FlashInfer's leave out.
_KERNELS: list[Backend] = [WarpSplitK(), ClusterSplitK(), HopperStream(), Stream(), Direct(), MmBf16()]


def kernels() -> tuple[Backend, ...]:
    """The registered backends besides the default GEMM, first choice first."""
    return tuple(_KERNELS)


def candidates(problem: Problem) -> tuple[list[Backend], list[str]]:
    """The backends that can compute ``problem``, first choice first, and for the others why not, each as "name: reason"."""
    able, reasons = [], []
    for backend in _KERNELS:
        if problem.arch not in backend.architectures:
            continue
        try:
            reason = backend.supports(problem)
        except Exception as error:  # a backend that cannot even be asked serves nothing, and harms nothing
            reason = f"{type(error).__name__}: {error}"
        if reason is None:
            able.append(backend)
        else:
            reasons.append(f"{backend.name}: {reason}")
    able.sort(key=lambda backend: not _asks_to_be_first(backend, problem))
    return able, reasons


def _asks_to_be_first(backend: Backend, problem: Problem) -> bool:
    try:
        return hasattr(backend, "first") and bool(backend.first(problem))
    except Exception:  # as in ``candidates``
        return False


def in_line(
    problem: Problem,
    tactics: Callable[[Backend], Iterable[Any]],
    why_none: Callable[[Backend], str | None] | None = None,
) -> tuple[list[tuple[Backend, Any]], list[str]]:
    """(backend, tactic) for what ``tactics`` gets of each backend that can compute ``problem``; and why not the others.

    ``why_none`` gives the reason, if any, of a backend that ``tactics`` gets nothing of.
    """
    able, reasons = candidates(problem)
    found: list[tuple[Backend, Any]] = []
    for backend in able:
        try:
            offered = [(backend, tactic) for tactic in tactics(backend)]
            found += offered
            reason = why_none(backend) if why_none and not offered else None
            if reason:
                reasons.append(f"{backend.name}: {reason}")
        except Exception as error:  # as in ``candidates``
            reasons.append(f"{backend.name}: {type(error).__name__}: {error}")
    return found, reasons


def untuned(problem: Problem) -> tuple[list[tuple[Backend, Any]], list[str]]:
    """(backend, tactic) of what may serve ``problem`` unmeasured, first choice first; and why other backends may not."""

    def _why_not(backend: Backend) -> str | None:
        if not list(backend.autotune_tactics(problem)):
            return None
        return "it serves this row count only where autotune with such a max_rows finds it quicker"

    return in_line(problem, lambda backend: backend.tactics(problem), _why_not)


def tunable(problem: Problem) -> tuple[list[tuple[Backend, Any]], list[str]]:
    """(backend, tactic) of what ``autotune`` measures for ``problem``; and why other backends are not measured."""
    return in_line(problem, lambda backend: backend.autotune_tactics(problem))


__all__ = ["DEFAULT_GEMM", "Backend", "Launch", "Problem", "candidates", "in_line", "kernels", "tunable", "untuned"]
