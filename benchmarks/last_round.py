"""Persistent CTAs of hopper stream where the last round of tiles is full, and where it is nearly empty.

    python benchmarks/last_round.py compile --out DIR        (needs no GPU)
    python benchmarks/last_round.py run [--objects DIR] --out benchmarks/results/h200/last_round.json

``rounds`` is how many tiles of 64 vocabulary rows a CTA of ``pairs`` takes: tiles over two CTAs for each of 132
multiprocessors. All of one row count are replayed in turn, and F.linear with them. bfloat16 logits.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, hopper_stream
from lowbatch_lmhead.backends.compiling import object_key

SHAPES = (
    (6288, 768), (12544, 5120), (16032, 4096), (16160, 7168), (18992, 4096), (20480, 7168), (25136, 2880),
    (32000, 4096), (32768, 1152), (51866, 1280),
)  # fmt: skip
ROWS = (16, 24, 32, 64)
WAYS = {
    "pairs": (64, 128, 1, 2, True, 2),
    "persistent": (64, 128, 1, 2, True, 1),
    "a CTA per tile": (64, 128, 1, 3, False, 1),
}
BACKEND = hopper_stream.HopperStream()


def tactics(problem: Problem) -> dict[str, Any]:
    found = {name: hopper_stream.deepest_ring(problem, *choice) for name, choice in WAYS.items()}
    return {name: tactic for name, tactic in found.items() if tactic is not None}


def problems(shape: tuple[int, int]) -> list[Problem]:
    return [Problem(*shape, rows, torch.bfloat16, torch.bfloat16, False, "sm_90a") for rows in ROWS]


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for problem in (problem for shape in SHAPES for problem in problems(shape)):
        for tactic in tactics(problem).values():
            stem = objects.stem(object_key(BACKEND.name, problem, tactic))
            if not (arguments.out / f"{stem}.json").exists():
                objects.write(arguments.out, *BACKEND.build(problem, tactic))


def measure(shape: tuple[int, int]) -> list[dict[str, Any]]:
    import timing
    from tuned import default

    weights, found = timing.weight_copies(*shape), []
    for problem in problems(shape):
        x = torch.randn(problem.rows, problem.hidden, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(problem.rows, problem.vocab, device="cuda", dtype=torch.bfloat16)
        ways = {name: BACKEND.compile(problem, tactic).call for name, tactic in tactics(problem).items()}
        errors = {}
        for name, call in ways.items():
            out.fill_(float("nan"))
            call(weights[0], x, None, out)
            errors[name] = timing.relative_error(out, x, weights[0])[0]
        if not all(error < 2.5e-3 for error in errors.values()):
            raise SystemExit(f"wrong: {shape}, {problem.rows} rows: {errors}")
        calls = [
            lambda weight, call=call, x=x, out=out: call(weight, x, None, out)
            for call in (default(torch.bfloat16), *ways.values())
        ]
        linear_us, *times = timing.gpu_us(calls, weights)
        found.append(
            {
                "vocab": problem.vocab,
                "hidden": problem.hidden,
                "rows": problem.rows,
                "rounds": round(problem.vocab / 64 / (2 * hopper_stream.MULTIPROCESSORS), 2),
                "us": {name: round(us, 2) for name, us in zip(ways, times)},
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
