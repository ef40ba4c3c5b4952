"""What serves untuned: the choices of hopper stream beside each other, on the 1/8 shards of heads.json and whole heads.

    python benchmarks/hopper_default.py compile --out DIR [--part 0 --parts 2]       (needs no GPU)
    python benchmarks/hopper_default.py run [--objects DIR] --out benchmarks/results/h200/hopper_default.json

``rounds`` is how many tiles of 64 vocabulary rows a CTA takes where two live on each of 132 multiprocessors. All of one row
count are replayed in turn, and F.linear with them. bfloat16 logits.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from compile_all import HEADS, shard

from lowbatch_lmhead import objects
from lowbatch_lmhead.backends import Problem, hopper_stream
from lowbatch_lmhead.backends.compiling import object_key
from lowbatch_lmhead.backends.warp_splitk import WarpSplitK

SHARDS = (
    "llama-2-7b", "llama-2-7b+pad-token", "mistral-large", "smollm2-135m", "gpt2", "smollm2-1.7b", "granite-3.1-8b",
    "phi-4", "llama-3.1-8b", "deepseek-v3", "qwen3-0.6b", "qwen3-8b", "qwen2.5-72b", "kimi-k2", "gpt-oss-20b", "gemma-2-9b",
    "gemma-3-27b",
)  # fmt: skip
WHOLE = (
    "gpt2", "whisper-large-v3", "llama-2-7b", "mistral-large", "llama-3.2-1b", "llama-3.1-8b", "deepseek-v3", "qwen3-0.6b",
    "gpt-oss-20b", "gemma-2-2b", "gemma-3-1b", "phi-4",
)  # fmt: skip
ROWS = (4, 8, 16, 24, 32, 48, 64)
# As deepest_ring takes them: vocab_tile, k_tile, groups, CTAs on one multiprocessor, persistent, CTAs of a cluster.
WAYS = {
    "pairs": (64, 128, 1, 2, True, 2),
    "fours": (64, 128, 1, 2, True, 4),
    "persistent": (64, 128, 1, 2, True, 1),
    "a CTA per tile": (64, 128, 1, 3, False, 1),
    "a CTA per tile, pairs": (64, 128, 1, 3, False, 2),
    "three persistent": (64, 128, 1, 3, True, 1),
    "three persistent, pairs": (64, 128, 1, 3, True, 2),
    "one persistent": (64, 128, 1, 1, True, 1),
    "one persistent, pairs": (64, 128, 1, 1, True, 2),
    "pairs, k 64": (64, 64, 1, 2, True, 2),
    "fours, k 64": (64, 64, 1, 2, True, 4),
    "pairs of 128": (128, 128, 2, 2, True, 2),
    "pairs of 128, k 64": (128, 64, 2, 2, True, 2),
}
FLASHINFER_ROWS = 16
BACKEND, FLASHINFER = hopper_stream.HopperStream(), WarpSplitK()


def shapes() -> list[tuple[int, int]]:
    """The shards, then the whole heads, smallest first."""
    shards = sorted((one["vocab_size"], one["hidden_size"]) for one in map(shard, chosen(SHARDS)))
    whole = sorted((one["vocab_size"], one["hidden_size"]) for one in chosen(WHOLE))
    return list(dict.fromkeys(shards + whole))


def chosen(models: tuple[str, ...]) -> list[dict[str, Any]]:
    return [one for one in HEADS if one["model"] in models]


def tactics(problem: Problem) -> dict[str, tuple[Any, Any]]:
    """(backend, tactic) of each way that there is."""
    found = {name: (BACKEND, hopper_stream.deepest_ring(problem, *choice)) for name, choice in WAYS.items()}
    if problem.rows <= FLASHINFER_ROWS and FLASHINFER.supports(problem) is None:
        found["FlashInfer's warp split-K"] = (FLASHINFER, FLASHINFER.tactics(problem)[0])
    return {name: (backend, tactic) for name, (backend, tactic) in found.items() if tactic is not None}


def problems(shape: tuple[int, int]) -> list[Problem]:
    return [Problem(*shape, rows, torch.bfloat16, torch.bfloat16, False, "sm_90a") for rows in ROWS]


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    for problem in [problem for shape in shapes() for problem in problems(shape)][arguments.part :: arguments.parts]:
        for backend, tactic in tactics(problem).values():
            stem = objects.stem(object_key(backend.name, problem, tactic))
            if not (arguments.out / f"{stem}.json").exists():
                objects.write(arguments.out, *backend.build(problem, tactic))


def measure(shape: tuple[int, int]) -> list[dict[str, Any]]:
    import timing
    from tuned import default

    weights, found = timing.weight_copies(*shape), []
    for problem in problems(shape):
        x = torch.randn(problem.rows, problem.hidden, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(problem.rows, problem.vocab, device="cuda", dtype=torch.bfloat16)
        ways = {name: backend.compile(problem, tactic).call for name, (backend, tactic) in tactics(problem).items()}
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
        linear_us, *times = timing.gpu_us(calls, weights, rounds=7)
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
        rows = [row for shape in shapes() for row in measure(shape)]
    write(arguments.out, {"machine": machine.describe(), "choices": WAYS}, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, function in (("compile", compile_all), ("run", run)):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True)
        command.set_defaults(function=function)
        if name == "compile":
            command.add_argument("--part", type=int, default=0)
            command.add_argument("--parts", type=int, default=1)
    command.add_argument("--objects", type=Path)
    arguments = parser.parse_args()
    arguments.function(arguments)


if __name__ == "__main__":
    main()
