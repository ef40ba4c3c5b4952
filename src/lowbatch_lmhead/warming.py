"""Preparing the plan of one head, row count by row count."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import gate, verify
from .gate import Decision
from .head import Head


def warm_head(
    head: Head,
    max_rows: int | None,
    out_dtype: torch.dtype | None,
    step: Callable[[int, int], None],
    batch_invariant: bool = False,
) -> list[Decision]:
    """Prepare ``head`` for 1 to ``max_rows`` rows; the decision for each, or one for all where the head is not taken.

    ``step(done, of)`` is called as it goes on.
    """
    if head.weight is None or head.own is not None or head.reasons:
        return [gate.refused(head.reasons, 0)]
    # A stand-in for the input: the head's reasons alone matter here, and gradients are a property of the call.
    with torch.no_grad():
        probe = head.weight.new_empty((1, head.weight.shape[1]))
        first, plan = gate.decide(head, probe, out_dtype or head.weight.dtype, batch_invariant)
        if plan is None:
            return [gate.refused(first.reasons, 0)]
        plan.look_again()
        last = min(max_rows or plan.max_rows, plan.max_rows)
        references: list[verify.Reference] = []
        # In a batch-invariant plan one row count prepares all, or would fail as all do.
        left, settled = [last] if batch_invariant else list(range(1, last + 1)), set[int]()
        while left:
            for rows in left:
                entry = plan.prepare(rows, head.weight, head.bias, references)
                (settled.add if entry is plan.entries[rows] else settled.discard)(rows)
                step(rows, last)
            # What served them has turned out wrong at another row count.
            left = sorted(rows for rows in settled if plan.entries[rows] is None)
        beyond = 0 if batch_invariant else 1  # what serves more rows than were prepared
        return [gate.decide_rows(plan, rows) for rows in range(1, last + 1 + beyond)]
