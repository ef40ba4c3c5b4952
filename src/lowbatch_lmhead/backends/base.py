"""What a backend is: one way to compute a projection, behind a few methods.

A backend's file holds, in this order: its tactic, which tactics fit, the default, the compilation. It imports the
package that it needs inside its functions, because that package may be missing, broken or slow to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class Problem:
    """The sizes and types of one projection ``(rows, hidden) x (vocab, hidden) -> (rows, vocab)``."""

    vocab: int
    hidden: int
    rows: int
    dtype: torch.dtype  # of x and the weight (and the bias)
    out_dtype: torch.dtype
    has_bias: bool
    arch: str  # a name in devices.ARCHITECTURES, or devices.CPU


@dataclass(frozen=True)
class Launch:
    """A compiled tactic, ready to call: ``call(weight, x, bias, out)`` with the bias or None.

    ``weight`` (vocab, hidden) contiguous, ``x`` (rows, hidden) with rows a multiple of 16 bytes apart and ``out``
    (rows, vocab), both with unit last stride. The call checks shapes, strides, dtypes, devices and alignment itself and
    raises ValueError or TypeError before it writes anything.
    """

    call: Callable[..., Any]
    backend: str
    tactic: str


class Backend(Protocol):
    name: str
    architectures: frozenset[str]

    def supports(self, problem: Problem) -> str | None:
        """None when the backend can compute ``problem``, else why not."""

    def tactics(self, problem: Problem) -> Sequence[Any]:
        """The tactics that serve ``problem`` unmeasured: the first that is right, the default first."""

    def autotune_tactics(self, problem: Problem) -> Sequence[Any]:
        """The tactics that ``autotune`` measures for ``problem``, the default first."""

    def handicap(self, tactic: Any) -> float:
        """What the measured gain over other tactics has to be for ``tactic`` to be preferred (0.02: 2 %).

        For what a measurement does not show: a time that depends on where the operands of a call happen to lie.
        """

    def smem_bytes(self, tactic: Any) -> int | None:
        """Shared memory of one CTA, in bytes, where it is known."""

    def compile(self, problem: Problem, tactic: Any) -> Launch:
        """A launch of ``tactic`` for every row count that the tactic can serve; loaded from disk where it can be."""

    # Optional: before the others, whatever the order of registration.
    #
    # def first(self, problem: Problem) -> bool:
    #     """Whether the backend is the first choice for ``problem`` while nothing has been measured."""
    #
    # Optional, for backends that choose by themselves in the launch; called before it is checked and timed:
    #
    # def tune(self, problem: Problem, weight: Tensor, bias: Tensor | None) -> str | None:
    #     """Choose for ``problem``; None, or why that could not be done."""
    #
    # Optional, for backends that can serve ``batch_invariant=True``:
    #
    # def invariant_tactic(self, problem: Problem) -> Any:
    #     """The tactic for ``problem``'s rows whose order of additions is that of every other row count's, 1 to 64."""


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")
