"""Launches of one problem timed beside each other and beside F.linear: what the scripts that compare choices share."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from compile_all import is_in

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem

Job = tuple[Any, Problem, Any]  # backend, problem, tactic
ROUNDS = 7
BOUND = 2.5e-3  # norm(y - exact) / norm(exact) of bfloat16 logits


def sm90(shape: tuple[int, int], rows: int) -> Problem:
    """bfloat16 logits of a head of ``shape``, without a bias."""
    return Problem(*shape, rows, torch.bfloat16, torch.bfloat16, False, "sm_90a")


def measure(problem: Problem, weights: Sequence[torch.Tensor], ways: dict[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Microseconds of F.linear and of each (backend, tactic) of ``ways``, replayed in turn; all of them right before."""
    import timing
    from tuned import default

    x = torch.randn(problem.rows, problem.hidden, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(problem.rows, problem.vocab, device="cuda", dtype=torch.bfloat16)
    launches = {name: backend.compile(problem, tactic).call for name, (backend, tactic) in ways.items()}
    errors = {}
    for name, launch in launches.items():
        out.fill_(float("nan"))
        launch(weights[0], x, None, out)
        errors[name] = timing.relative_error(out, x, weights[0])[0]
    if not all(error < BOUND for error in errors.values()):
        raise SystemExit(f"wrong: {problem}: {errors}")
    calls = [
        lambda weight, call=call: call(weight, x, None, out) for call in (default(torch.bfloat16), *launches.values())
    ]
    linear_us, *times = timing.gpu_us(calls, weights, rounds=ROUNDS)
    return {
        "us": {name: round(us, 2) for name, us in zip(launches, times)},
        "linear_us": round(linear_us, 2),
        "worst_rel_err": max(errors.values()),
    }


def main(
    doc: str | None,
    shapes: Sequence[tuple[int, int]],
    jobs: Callable[[tuple[int, int]], Iterator[Job]],
    rows: Callable[[tuple[int, int], Sequence[torch.Tensor]], Iterator[dict[str, Any]]],
    **top: Any,
) -> None:
    """``compile`` the ``jobs`` of each shape, or ``run``: write the ``rows`` of each shape, with ``top`` above them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    compiling, running = commands.add_parser("compile"), commands.add_parser("run")
    for command in (compiling, running):
        command.add_argument("--out", type=Path, required=True)
    compiling.add_argument("--part", type=int, default=0)
    compiling.add_argument("--parts", type=int, default=1)
    running.add_argument("--objects", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compile":
        arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
        todo = [job for shape in shapes for job in jobs(shape)]
        for backend, problem, tactic in todo[arguments.part :: arguments.parts]:
            if not is_in(arguments.out, backend, problem, tactic):
                objects.write(arguments.out, *backend.build(problem, tactic))
        return
    import machine
    import timing
    from tuned import write

    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    found = []
    with torch.inference_mode():
        for shape in shapes:
            for row in rows(shape, timing.weight_copies(*shape)):
                found.append(row)
                print(json.dumps(row), flush=True)
    write(arguments.out, {"machine": machine.describe(), **top}, found)
