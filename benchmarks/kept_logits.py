"""How many of the logits should stay in L2, while the weight streams through it: hopper stream, stored in several ways.

    python benchmarks/kept_logits.py compile --objects DIR            (needs no GPU)
    python benchmarks/kept_logits.py run --objects DIR --out benchmarks/results/h200/kept_logits.json

``kept_mb`` is the kernel's KEPT_LOGITS in MiB: as many bytes of logits are stored as usual, the rest to be evicted first;
null: all as usual. ``weight`` is the policy of the weight's copies: evict first, as the kernel has it, or evict normal.
All ways of one case in turn, beside F.linear (for float32 logits torch.mm with out_dtype); limit_us as in kernel.json.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import machine
import timing
import torch
from compile_all import HEADS
from tuned import default, write

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, hopper_stream
from lowbatch_lmhead.backends.compiling import object_key
from lowbatch_lmhead.benching.measure import check

BF16, FP32 = torch.bfloat16, torch.float32
CASES = {
    "llama-3.1-70b": ((64, BF16), (64, FP32)),
    "qwen3-0.6b": ((64, BF16), (64, FP32)),
    "llama-3.1-8b": ((8, BF16), (16, BF16), (32, FP32), (48, FP32), (64, BF16), (64, FP32)),
    "gemma-3-1b": ((32, BF16), (32, FP32), (48, BF16), (64, BF16), (64, FP32)),
    "deepseek-v3": ((48, FP32), (64, FP32)),
    "granite-3.1-2b": ((64, FP32),),
    "command-r-plus": ((32, FP32), (64, BF16)),
}
KEPT_MB = (None, 0, 8, 12, 16, 20, 24)
WAYS = [("evict first", kept) for kept in KEPT_MB] + [("evict normal", None)]
LARGE_TILE = (128, 128, 1, 1, True, 1)  # one CTA on a multiprocessor, as deepest_ring takes it


class Way(hopper_stream.HopperStream):
    """The kernel with other L2 policies, kept under another name."""

    def __init__(self, weight: str, kept_mb: int | None) -> None:
        self.weight, self.kept_mb = weight, kept_mb
        self.name = f"hopper stream, {weight}, {'all' if kept_mb is None else kept_mb} kept"

    def build(self, problem: Problem, tactic: Any) -> tuple[dict[str, Any], bytes]:
        before = hopper_stream.KEPT_LOGITS, hopper_stream.EVICT_FIRST
        hopper_stream.KEPT_LOGITS = 1 << 62 if self.kept_mb is None else self.kept_mb << 20
        if self.weight == "evict normal":
            hopper_stream.EVICT_FIRST = hopper_stream.EVICT_NORMAL
        try:
            return super().build(problem, tactic)
        finally:
            hopper_stream.KEPT_LOGITS, hopper_stream.EVICT_FIRST = before


def tactics(problem: Problem) -> list[hopper_stream.Tactic]:
    large = hopper_stream.deepest_ring(problem, *LARGE_TILE)
    assert large is not None
    return [hopper_stream.default_tactic(problem), *([large] if problem.rows > 32 else [])]


def cases() -> Iterator[tuple[str, list[Problem]]]:
    shapes = {head["model"]: (head["vocab_size"], head["hidden_size"]) for head in HEADS}
    for model, asked in CASES.items():
        yield model, [Problem(*shapes[model], rows, BF16, out_dtype, False, "sm_90a") for rows, out_dtype in asked]


def compile_(arguments: argparse.Namespace) -> None:
    arguments.objects.mkdir(mode=0o700, exist_ok=True)
    todo = {}
    for _, problems in cases():
        for problem in problems:
            for tactic in tactics(problem):
                for way in (Way(*one) for one in WAYS):
                    todo[objects.stem(object_key(way.name, problem, tactic))] = way, problem, tactic
    for way, problem, tactic in list(todo.values())[arguments.part :: arguments.parts]:
        objects.write(arguments.objects, *way.build(problem, tactic))


def measure(model: str, problems: list[Problem]) -> list[dict[str, Any]]:
    weights = timing.weight_copies(problems[0].vocab, problems[0].hidden)
    read_us, found = timing.read_us(weights), []
    for problem in problems:
        x = torch.randn(problem.rows, problem.hidden, device="cuda", dtype=BF16)
        exact = torch.cat([x.double() @ part.double().t() for part in weights[0].split(32768)], 1)
        out = torch.empty(problem.rows, problem.vocab, device="cuda", dtype=problem.out_dtype)
        rows = []
        for tactic in tactics(problem):
            for way in (Way(*one) for one in WAYS):
                launch = way.compile(problem, tactic).call
                error = max(check(launch, weights[0], x, exact, problem.out_dtype))
                assert error < (2.5e-3 if problem.out_dtype is BF16 else 1e-5), (tactic, way.name, error)
                rows.append((str(tactic), way, launch))
        del exact
        linear = default(problem.out_dtype)
        calls = [lambda w, x=x, linear=linear: linear(w, x, None, None)]
        calls += [lambda w, x=x, out=out, launch=launch: launch(w, x, None, out) for *_, launch in rows]
        linear_us, *times = timing.gpu_us(calls, weights)
        limit_us = read_us * (1 + (x.nbytes + out.nbytes) / weights[0].nbytes)
        for (tactic, way, _), us in zip(rows, times):
            found.append(
                {
                    "model": model,
                    "vocab": problem.vocab,
                    "hidden": problem.hidden,
                    "rows": problem.rows,
                    "out_dtype": str(problem.out_dtype).removeprefix("torch."),
                    "logits_mb": round(out.nbytes / 2**20, 1),
                    "tactic": tactic,
                    "weight": way.weight,
                    "kept_mb": way.kept_mb,
                    "us": round(us, 2),
                    "linear_us": round(linear_us, 2),
                    "limit_us": round(limit_us, 2),
                }
            )
        shares = [f"{name}/{kept}:{limit_us / us:.3f}" for (name, kept), us in zip(WAYS * 2, times)]
        print(model, problem.rows, str(problem.out_dtype)[6:], f"{out.nbytes / 2**20:.1f} MiB", *shares, flush=True)
    return found


def run(arguments: argparse.Namespace) -> None:
    machine.require_kernels()
    os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    rows = []
    with torch.inference_mode():
        for model, problems in cases():
            rows += measure(model, problems)
            torch.cuda.empty_cache()
            write(arguments.out, {"machine": machine.describe()}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    compiling = commands.add_parser("compile")
    compiling.set_defaults(function=compile_)
    compiling.add_argument("--part", type=int, default=0)
    compiling.add_argument("--parts", type=int, default=1)
    running = commands.add_parser("run")
    running.set_defaults(function=run)
    running.add_argument("--out", type=Path, required=True)
    for command in (compiling, running):
        command.add_argument("--objects", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
