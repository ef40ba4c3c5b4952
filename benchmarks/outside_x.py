"""What it costs hopper stream that a tile has room for more tokens than x has: copies that reach outside of x, and copies
that end where x does (``hopper_stream.box_tokens``).

    python benchmarks/outside_x.py compile --out DIR        (needs no GPU)
    python benchmarks/outside_x.py run [--objects DIR] --out benchmarks/results/h200/outside_x.json

Both of each case are replayed in turn, and F.linear with them. bfloat16 logits.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, hopper_stream
from lowbatch_lmhead.backends.compiling import object_key

SHAPES = ((18992, 4096), (50257, 768), (51866, 1280), (151936, 1024), (128256, 4096), (163840, 7168))
ROWS = (9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 40, 48, 49, 56, 64)
WAYS = {"pairs": (64, 128, 1, 2, True, 2), "a CTA per tile": (64, 128, 1, 3, False, 1)}
ENDING_WITH_X = hopper_stream.box_tokens


class Stream(hopper_stream.HopperStream):
    """hopper stream with copies of ``box`` tokens of a tile's, under a name of its own."""

    def __init__(self, name: str, box: Callable[[int], int]) -> None:
        self.name, self._box = name, box

    def kernel(self, problem: Problem, tactic: Any) -> Any:
        hopper_stream.box_tokens = self._box
        return super().kernel(problem, tactic)


BACKENDS = (Stream("outside", lambda tile: tile), Stream("inside", ENDING_WITH_X))


def cases(shape: tuple[int, int]) -> list[tuple[int, str, Problem, Any]]:
    """(rows, way, problem, tactic); the kernels of one tile are the same."""
    found = []
    for rows in ROWS:
        problem = Problem(*shape, rows, torch.bfloat16, torch.bfloat16, False, "sm_90a")
        for name, choice in WAYS.items():
            tactic = hopper_stream.deepest_ring(problem, *choice)
            if tactic is not None:
                found.append((rows, name, problem, tactic))
    return found


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for shape in SHAPES:
        for _, _, problem, tactic in cases(shape):
            for backend in BACKENDS:
                stem = objects.stem(object_key(backend.name, problem, tactic))
                if not (arguments.out / f"{stem}.json").exists():
                    objects.write(arguments.out, *backend.build(problem, tactic))


def measure(shape: tuple[int, int]) -> list[dict[str, Any]]:
    import timing
    from tuned import default

    weights, found = timing.weight_copies(*shape), []
    for rows, way, problem, tactic in cases(shape):
        x = torch.randn(rows, problem.hidden, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, problem.vocab, device="cuda", dtype=torch.bfloat16)
        launches = {backend.name: backend.compile(problem, tactic).call for backend in BACKENDS}
        errors = {}
        for name, launch in launches.items():
            out.fill_(float("nan"))
            launch(weights[0], x, None, out)
            errors[name] = timing.relative_error(out, x, weights[0])[0]
        if not all(error < 2.5e-3 for error in errors.values()):
            raise SystemExit(f"wrong: {shape}, {rows} rows: {errors}")
        calls = [
            lambda weight, call=call, x=x, out=out: call(weight, x, None, out)
            for call in (default(torch.bfloat16), *launches.values())
        ]
        linear_us, outside_us, inside_us = timing.gpu_us(calls, weights, rounds=7)
        found.append(
            {
                "vocab": problem.vocab,
                "hidden": problem.hidden,
                "rows": rows,
                "way": way,
                "tactic": str(tactic),
                "outside_us": round(outside_us, 2),
                "inside_us": round(inside_us, 2),
                "linear_us": round(linear_us, 2),
                "worst_rel_err": max(errors.values()),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    return found


def run(arguments: argparse.Namespace) -> None:
    import machine
    from tuned import write

    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    with torch.inference_mode():
        rows = [row for shape in SHAPES for row in measure(shape)]
    write(arguments.out, {"machine": machine.describe()}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("compile", compile_all), ("run", run)):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(function=function)
    command.add_argument("--objects", type=Path)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
