"""What it costs hopper stream that a tile has room for more tokens than x has: copies that reach outside of x, and copies
that end where x does (``hopper_stream.box_tokens``).

    python benchmarks/outside_x.py compile --out DIR        (needs no GPU)
    python benchmarks/outside_x.py run [--objects DIR] --out benchmarks/results/h200/outside_x.json

Both of each case are replayed in turn, and F.linear with them. bfloat16 logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import beside
import torch
from hopper_default import WAYS

from lowbatch_lmhead.backends import Problem, hopper_stream

SHAPES = ((18992, 4096), (50257, 768), (51866, 1280), (151936, 1024), (128256, 4096), (163840, 7168))
ROWS = (9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 49, 56, 64)
COMPARED = ("pairs", "a CTA per tile")  # of WAYS


class Stream(hopper_stream.HopperStream):
    """hopper stream with copies of ``box`` tokens of a tile's, under a name of its own."""

    def __init__(self, name: str, box: Callable[[int], int]) -> None:
        self.name, self._box = name, box

    def kernel(self, problem: Problem, tactic: Any) -> Any:
        with mock.patch.object(hopper_stream, "box_tokens", self._box):
            return super().kernel(problem, tactic)


BACKENDS = (Stream("outside", lambda tile: tile), Stream("inside", hopper_stream.box_tokens))


def cases(shape: tuple[int, int]) -> Iterator[tuple[str, Problem, Any]]:
    """(way, problem, tactic)."""
    for count in ROWS:
        problem = beside.sm90(shape, count)
        for way in COMPARED:
            tactic = hopper_stream.deepest_ring(problem, *WAYS[way])
            if tactic is not None:
                yield way, problem, tactic


def jobs(shape: tuple[int, int]) -> Iterator[beside.Job]:
    for _, problem, tactic in cases(shape):
        for backend in BACKENDS:
            yield backend, problem, tactic


def rows(shape: tuple[int, int], weights: Sequence[torch.Tensor]) -> Iterator[dict[str, Any]]:
    for way, problem, tactic in cases(shape):
        found = beside.measure(problem, weights, {backend.name: (backend, tactic) for backend in BACKENDS})
        yield {
            "vocab": problem.vocab,
            "hidden": problem.hidden,
            "rows": problem.rows,
            "way": way,
            "tactic": str(tactic),
            **{f"{name}_us": us for name, us in found.pop("us").items()},
            **found,
        }


if __name__ == "__main__":
    beside.main(__doc__, SHAPES, jobs, rows)
