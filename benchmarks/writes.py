"""Two effects that a tactic's choice turns on, and what float32 logits cost.

    python benchmarks/writes.py --out benchmarks/results/h200/writes.json

logits: the same launch with its logits written in full, and with all rows written to one place (so that next to nothing
is written): the difference is what writing costs. x: the same launch with x at different addresses, for output tiles of 16
and of 32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import machine
import timing
import torch

from lowbatch_lmhead.backends import Problem
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.backends.warp_splitk import Tactic, WarpSplitK

HEADS = {"qwen2.5-0.5b": (151936, 896), "qwen3-0.6b": (151936, 1024), "llama-3.2-1b": (128256, 2048)}
TACTICS = {16: Tactic(16, 8, 128, 7, 2), 32: Tactic(32, 8, 128, 5, 2)}  # output tile: as many CTAs as fit


def writing() -> list[dict]:
    found = []
    for model, (vocab, hidden) in HEADS.items():
        weights = timing.weight_copies(vocab, hidden)
        for rows in (8, 16):
            x, calls, names = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16), [], []
            for dtype in (torch.bfloat16, torch.float32):
                problem = Problem(vocab, hidden, rows, torch.bfloat16, dtype, False, "sm_90a")
                launch = WarpSplitK().compile(problem, WarpSplitK().tactics(problem)[0]).call
                outs = {
                    "us": torch.empty(rows, vocab, device="cuda", dtype=dtype),
                    "one_place_us": torch.empty(1, vocab, device="cuda", dtype=dtype).expand(rows, vocab),
                }
                for name, out in outs.items():
                    names.append((dtype_name(dtype), name))
                    calls.append(lambda w, launch=launch, x=x, out=out: launch(w, x, None, out))
                out = torch.empty(rows, vocab, device="cuda", dtype=dtype)
                names.append((dtype_name(dtype), "default_us"))
                if dtype is torch.bfloat16:
                    calls.append(lambda w, x=x, out=out: torch.mm(x, w.t(), out=out))
                else:
                    calls.append(lambda w, x=x: torch.mm(x, w.t(), out_dtype=torch.float32))
            times = dict(zip(names, timing.gpu_us(calls, weights, rounds=15)))
            found += [
                {"model": model, "vocab": vocab, "hidden": hidden, "rows": rows, "out_dtype": dtype}
                | {name: round(times[dtype, name], 2) for name in ("us", "one_place_us", "default_us")}
                for dtype in ("bfloat16", "float32")
            ]
    return found


def placing(addresses: int = 24) -> list[dict]:
    vocab, hidden = HEADS["qwen2.5-0.5b"]
    weights = timing.weight_copies(vocab, hidden)
    problem = Problem(vocab, hidden, 8, torch.bfloat16, torch.bfloat16, False, "sm_90a")
    launches = [WarpSplitK().compile(problem, tactic).call for tactic in TACTICS.values()]
    out = torch.empty(8, vocab, device="cuda", dtype=torch.bfloat16)
    found, kept = [], []
    for index in range(addresses):
        kept.append(torch.empty(997 * 1024 * (index + 1), device="cuda", dtype=torch.uint8))
        x = torch.randn(8, hidden, device="cuda", dtype=torch.bfloat16)
        kept.append(x)
        calls = [lambda w, launch=launch, x=x: launch(w, x, None, out) for launch in launches]
        times = timing.gpu_us(calls, weights, rounds=5)
        found.append({f"tile_{tile}_us": round(us, 2) for tile, us in zip(TACTICS, times)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    machine.require_kernels()
    with torch.inference_mode():
        result = {"machine": machine.describe(), "logits": writing(), "x": placing()}
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
