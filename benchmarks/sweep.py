"""Which tactic of the warp split-K kernel should serve untuned: every candidate on a few heads, beside F.linear.

    python benchmarks/sweep.py compile --out DIR          (needs no GPU; --part 0 --parts 2 to share the work)
    python benchmarks/sweep.py run --objects DIR --out benchmarks/results/h200/sweep.json

A candidate is the deepest ring that lets 2, 3, 4 or 5 CTAs live on one multiprocessor, for each output tile and k_tile.
``default_tactic`` in backends/warp_splitk.py was fitted to the result.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch

from lowbatch_lmhead import devices, objects
from lowbatch_lmhead.backends import Problem
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.backends.warp_splitk import Tactic, WarpSplitK, deepest_ring, tiles_fit

HEADS = json.loads(Path(__file__).with_name("heads.json").read_text())
MODELS = {
    *("gpt2", "qwen2.5-0.5b", "qwen3-0.6b", "gemma-3-1b", "smollm2-1.7b", "llama-3.2-1b", "gemma-2-2b", "qwen3-4b"),
    *("llama-3.2-3b", "llama-2-7b", "llama-3.1-8b", "gemma-3-27b", "deepseek-v3", "llama-3.1-70b", "mistral-large"),
    "llama-3.1-405b",
}
ROWS = {8: (1, 8), 16: (16,)}  # measured for each token tile
RESIDENTS = (2, 3, 4, 5)


def candidates(hidden: int, token_tile: int, arch: str = "sm_90a") -> list[Tactic]:
    found = (
        deepest_ring(output_tile, token_tile, k_tile, residents, hidden, devices.ARCHITECTURES[arch])
        for output_tile in (16, 32)
        for k_tile in (128, 256)
        if tiles_fit(hidden, k_tile)
        for residents in RESIDENTS
    )
    return list(dict.fromkeys(tactic for tactic in found if tactic))


def jobs() -> list[tuple[dict, Problem, Tactic]]:
    return [
        (head, Problem(head["vocab_size"], head["hidden_size"], 1, torch.bfloat16, out_dtype, False, "sm_90a"), tactic)
        for head in HEADS
        if head["model"] in MODELS
        for out_dtype in (torch.bfloat16, torch.float32)
        for token_tile in ROWS
        for tactic in candidates(head["hidden_size"], token_tile)
    ]


def compile_all(arguments: argparse.Namespace) -> None:
    arguments.out.mkdir(mode=0o700, parents=True, exist_ok=True)
    mine, begin = jobs()[arguments.part :: arguments.parts], time.time()
    for index, (_, problem, tactic) in enumerate(mine):
        objects.write(arguments.out, *WarpSplitK().build(problem, tactic))
        if index % 20 == 0:
            print(f"{index} of {len(mine)} [{time.time() - begin:.0f} s]", flush=True)


def run(arguments: argparse.Namespace) -> None:
    import machine
    import timing
    import torch.nn.functional as F
    from tuned import write

    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    rows_out, begin, everything = [], time.time(), jobs()
    with torch.inference_mode():
        for head in [head for head in HEADS if head["model"] in MODELS]:
            vocab, hidden = head["vocab_size"], head["hidden_size"]
            weights = timing.weight_copies(vocab, hidden)
            for token_tile, row_counts in ROWS.items():
                mine = [(p, t) for h, p, t in everything if h is head and t.token_tile == token_tile]
                launches = [WarpSplitK().compile(problem, tactic).call for problem, tactic in mine]
                for rows in row_counts:
                    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
                    outs = {dtype: torch.empty(rows, vocab, device="cuda", dtype=dtype) for dtype in
                            (torch.bfloat16, torch.float32)}  # fmt: skip
                    calls = [lambda w, x=x: F.linear(x, w)] + [
                        lambda w, x=x, launch=launch, out=outs[problem.out_dtype]: launch(w, x, None, out)
                        for launch, (problem, _) in zip(launches, mine)
                    ]
                    linear_us, *times = timing.gpu_us(calls, weights)
                    new = [
                        {
                            "model": head["model"],
                            "vocab": vocab,
                            "hidden": hidden,
                            "rows": rows,
                            "out_dtype": dtype_name(problem.out_dtype),
                            "tactic": str(tactic),
                            "us": round(us, 2),
                            "linear_us": round(linear_us, 2),
                        }
                        for us, (problem, tactic) in zip(times, mine)
                    ]
                    rows_out += new
                    for dtype in ("bfloat16", "float32"):
                        best = sorted((row for row in new if row["out_dtype"] == dtype), key=lambda row: row["us"])[:3]
                        text = " | ".join(f"{row['us'] / linear_us:.3f} {row['tactic']}" for row in best)
                        print(
                            f"{head['model']:<16} {rows:>2} {dtype:<8} {text} [{time.time() - begin:.0f} s]", flush=True
                        )
            torch.cuda.empty_cache()
    write(arguments.out, {"machine": machine.describe()}, rows_out)


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
    running.set_defaults(command=run)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
