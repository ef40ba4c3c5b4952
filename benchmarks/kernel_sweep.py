"""Which tactic of the stream kernels is quickest: every plausible one on a few heads, beside F.linear and warp split-K.

    python benchmarks/kernel_sweep.py compile --out DIR [--part 0 --parts 2]        (needs no GPU)
    python benchmarks/kernel_sweep.py run --objects DIR --out kernel_sweep.json

Every launch is checked first, at each row count, against float64 with its output full of NaN before: one that is wrong is
reported and not timed. ``of_limit`` is the time that a kernel would take that only reads as many bytes as the weight, x and
the logits have, over the launch's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from compile_all import is_in

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, hopper_stream, stream
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK
from lowbatch_lmhead.benching.measure import check

HEADS = {
    "llama-3.1-8b": (128256, 4096),
    "qwen3-0.6b": (151936, 1024),
    "deepseek-v3 1/8": (16160, 7168),
    "granite-3.1-2b": (49155, 2048),
    "gpt-oss-20b 1/8": (25136, 2880),
    "smollm2-135m": (49152, 576),
}
ROWS = (1, 8, 16, 32, 64)


SWEPT = ((128256, 4096), (151936, 1024))  # with every plausible tactic; the others with those of autotune


def problems(shape: tuple[int, int], rows: int) -> list[Problem]:
    out_dtypes = (torch.bfloat16, torch.float32) if rows in (8, 64) else (torch.bfloat16,)
    return [Problem(*shape, rows, torch.bfloat16, out_dtype, False, "sm_90a") for out_dtype in out_dtypes]


def candidates(problem: Problem) -> list[tuple[Any, Any]]:
    found = []
    for module, backend in ((hopper_stream, hopper_stream.HopperStream()), (stream, stream.Stream())):
        wide = problem.out_dtype is torch.bfloat16 and (problem.vocab, problem.hidden) in SWEPT
        tactics = (module.sweep_tactics if wide else module.autotune_tactics)(problem)
        found += [(backend, tactic) for tactic in tactics]
    if problem.rows <= 32 and WarpSplitK().supports(problem) is None:
        found.append((WarpSplitK(), WarpSplitK().tactics(problem)[0]))
    return found


def jobs() -> list[tuple[Any, Problem, Any]]:
    found = {}
    for shape in HEADS.values():
        for rows in ROWS:
            for problem in problems(shape, rows):
                for backend, tactic in candidates(problem):
                    found[shape, problem.out_dtype, backend.name, str(tactic)] = backend, problem, tactic
    return list(found.values())


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine, begin = jobs()[arguments.part :: arguments.parts], time.time()
    for index, (backend, problem, tactic) in enumerate(mine):
        if not is_in(arguments.out, backend, problem, tactic):
            objects.write(arguments.out, *backend.build(problem, tactic))
        if index % 50 == 0:
            print(f"{index} of {len(mine)} [{time.time() - begin:.0f} s]", flush=True)


def measure(name: str, shape: tuple[int, int]) -> list[dict[str, Any]]:
    import timing
    from tuned import default

    vocab, hidden = shape
    weights = timing.weight_copies(vocab, hidden)
    weight = weights[0]
    read_us = timing.read_us(weights)
    found = []
    for rows in ROWS:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        exact = torch.cat([x.double() @ part.double().t() for part in weight.split(32768)], 1)
        for problem in problems(shape, rows):
            out = torch.empty(rows, vocab, device="cuda", dtype=problem.out_dtype)
            good, new = [], []
            for backend, tactic in candidates(problem):
                row = {
                    "model": name,
                    "vocab": vocab,
                    "hidden": hidden,
                    "rows": rows,
                    "out_dtype": dtype_name(problem.out_dtype),
                    "backend": backend.name,
                    "tactic": str(tactic),
                }
                try:
                    call = backend.compile(problem, tactic).call
                    row["rel_err"], row["last_rows_err"] = check(call, weight, x, exact, problem.out_dtype)
                except Exception as error:
                    row["error"] = str(error)[:300]
                new.append(row)
                if row.get("rel_err", 1.0) < (2.5e-3 if problem.out_dtype is torch.bfloat16 else 1e-5):
                    good.append((row, call))
                else:
                    print("WRONG", json.dumps(row), flush=True)
            found += new
            ways = [default(problem.out_dtype), *(call for _, call in good)]
            calls = [lambda w, x=x, call=call, out=out: call(w, x, None, out) for call in ways]
            linear_us, *times = timing.gpu_us(calls, weights, rounds=3)
            limit_us = read_us * (1 + (x.nbytes + out.nbytes) / weight.nbytes)
            for (row, _), us in zip(good, times):
                row |= {"us": round(us, 2), "linear_us": round(linear_us, 2), "of_limit": round(limit_us / us, 4)}
            print(f"{name} {rows} {dtype_name(problem.out_dtype)} linear {limit_us / linear_us:.3f}", flush=True)
            for backend in dict.fromkeys(row["backend"] for row, _ in good):
                mine = [row for row, _ in good if row["backend"] == backend]
                best = sorted(mine, key=lambda row: row["us"])[:4]
                text = " | ".join(f"{row['of_limit']:.3f} {row['tactic']}" for row in best)
                error = max(row["rel_err"] for row in mine)
                print(f"   {backend}: default {mine[0]['of_limit']:.3f}, error {error:.2e}, {text}", flush=True)
    return found


def run(arguments: argparse.Namespace) -> None:
    import machine
    from tuned import write

    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        for name, shape in HEADS.items():
            if not arguments.models or name in arguments.models:
                rows += measure(name, shape)
            torch.cuda.empty_cache()
            write(arguments.out, {"machine": machine.describe()}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    compiling = commands.add_parser("compile")
    compiling.add_argument("--out", type=Path, required=True)
    compiling.add_argument("--part", type=int, default=0)
    compiling.add_argument("--parts", type=int, default=1)
    compiling.set_defaults(command=compile_all)
    running = commands.add_parser("run")
    running.add_argument("--objects", type=Path)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--models", nargs="*")
    running.set_defaults(command=run)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
