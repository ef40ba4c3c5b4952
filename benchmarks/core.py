"""Every head of heads.json at 1, 2, 4, 8 and 16 rows, bfloat16 and float32 logits, beside F.linear: time and error.

    python benchmarks/core.py --out benchmarks/results/h200/core.json [--models gpt2 llama-3.1-8b] [--rows 1 8]

Writes one row for each model, row count and output type: model, vocab, hidden, rows, out_dtype, backend, us, linear_us
(F.linear; for float32 logits torch.mm with out_dtype), upcast_us (float32 by upcasting the weight, one row count per
head), read_us (the limit), rel_err, last_rows_err.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from pathlib import Path

import machine
import timing
import torch
import torch.nn.functional as F
from tuned import write

import lowbatch_lmhead

HEADS = json.loads(Path(__file__).with_name("heads.json").read_text())
UPCAST_ROWS = 4


def measure(model: str, vocab: int, hidden: int, row_counts: list[int]) -> list[dict]:
    weights = timing.weight_copies(vocab, hidden)
    read = timing.read_us(weights)
    measured = []
    for rows in row_counts:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        taken = {}
        for out_dtype in (torch.bfloat16, torch.float32):
            asked = None if out_dtype is torch.bfloat16 else out_dtype
            out = torch.full((rows, vocab), float("nan"), device="cuda", dtype=out_dtype)
            lowbatch_lmhead.project(weights[0], x, out=out, out_dtype=asked)
            error, last = timing.relative_error(out, x, weights[0])
            decision = lowbatch_lmhead.explain(weights[0], x, out_dtype=asked)
            taken[out_dtype] = (decision, error, last, out)
        fast, wide = taken[torch.bfloat16], taken[torch.float32]

        def ours(out: torch.Tensor, asked: torch.dtype | None, x: torch.Tensor = x):
            return lambda w: lowbatch_lmhead.project(w, x, out=out, out_dtype=asked)

        calls = [
            ours(fast[3], None),
            lambda weight, x=x: F.linear(x, weight),
            ours(wide[3], torch.float32),
            lambda weight, x=x: torch.mm(x, weight.t(), out_dtype=torch.float32),
        ]
        for weight in weights:  # every copy's first call happens outside the graphs
            calls[0](weight), calls[2](weight)
        us, linear_us, wide_us, mm_us = timing.gpu_us(calls, weights)
        upcast_us = None
        if rows == UPCAST_ROWS:
            (upcast_us,) = timing.gpu_us([lambda weight, x=x: F.linear(x.float(), weight.float())], weights, rounds=3)
        common = {"model": model, "vocab": vocab, "hidden": hidden, "rows": rows}
        for out_dtype, time_us, other_us, (decision, error, last, _) in (
            ("bfloat16", us, linear_us, fast),
            ("float32", wide_us, mm_us, wide),
        ):
            measured.append(
                common
                | {
                    "out_dtype": out_dtype,
                    "backend": decision.backend,
                    "tactic": decision.tactic,
                    "us": round(time_us, 2),
                    "linear_us": round(other_us, 2),
                    "upcast_us": round(upcast_us, 1) if upcast_us and out_dtype == "float32" else None,
                    "read_us": round(read, 2),
                    "rel_err": error,
                    "last_rows_err": last,
                }
            )
    return measured


def geometric_mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def summary(rows: list[dict]) -> dict:
    """The figures that are asked of this table."""
    taken = [row for row in rows if row["backend"] != "default GEMM"]
    fast = [row for row in taken if row["out_dtype"] == "bfloat16"]
    few = [row for row in fast if row["rows"] <= 8]
    even = [row["us"] / row["linear_us"] for row in few if row["vocab"] % 16 == 0]
    odd = {}
    for row in few:
        if row["vocab"] % 16:
            odd.setdefault(row["model"], []).append(row)
    bf16_us = {(row["model"], row["rows"]): row["us"] for row in fast}
    wide = [row for row in taken if row["out_dtype"] == "float32"]
    to_bf16 = [row["us"] / bf16_us[row["model"], row["rows"]] for row in wide if (row["model"], row["rows"]) in bf16_us]
    return {
        "heads": len({row["model"] for row in rows}),
        "heads taken at every row count": len({row["model"] for row in fast})
        - len({row["model"] for row in rows if row["backend"] == "default GEMM"} & {row["model"] for row in fast}),
        "rel_err bfloat16, largest": max(row["rel_err"] for row in fast),
        "rel_err float32, largest": max(row["rel_err"] for row in wide),
        "last rows, bfloat16, largest": max(row["last_rows_err"] for row in fast),
        "last rows, float32, largest": max(row["last_rows_err"] for row in wide),
        "us / linear_us, rows <= 8, largest": max(row["us"] / row["linear_us"] for row in few),
        "us / linear_us, rows <= 8, vocab % 16 == 0, geometric mean": geometric_mean(even),
        "us / linear_us, rows 16, largest": max(
            (row["us"] / row["linear_us"] for row in fast if row["rows"] == 16), default=None
        ),
        "other vocabularies, us / linear_us by row count": {
            model: {row["rows"]: round(row["us"] / row["linear_us"], 3) for row in group}
            for model, group in odd.items()
        },
        "other vocabularies, read_us / linear_us by row count (the limit, within 2 %)": {
            model: {row["rows"]: round(row["read_us"] / row["linear_us"], 3) for row in group}
            for model, group in odd.items()
        },
        "other vocabularies, geometric mean": geometric_mean(
            [row["us"] / row["linear_us"] for group in odd.values() for row in group]
        ),
        "float32 us / bfloat16 us, largest": max(to_bf16),
        "float32 us / bfloat16 us, geometric mean": geometric_mean(to_bf16),
        "float32 us / upcast_us, largest": max(row["us"] / row["upcast_us"] for row in wide if row["upcast_us"]),
        "read_us / us, rows <= 8, geometric mean": geometric_mean([row["read_us"] / row["us"] for row in few]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8, 16])
    arguments = parser.parse_args()
    machine.require_kernels()
    rows, begin = [], time.time()
    torch.manual_seed(0)
    with torch.inference_mode():
        for head in HEADS:
            if arguments.models and head["model"] not in arguments.models:
                continue
            new = measure(head["model"], head["vocab_size"], head["hidden_size"], arguments.rows)
            rows += new
            ratios = " ".join(f"{row['us'] / row['linear_us']:.3f}" for row in new if row["out_dtype"] == "bfloat16")
            wides = " ".join(f"{row['us'] / row['linear_us']:.3f}" for row in new if row["out_dtype"] == "float32")
            print(
                f"{head['model']:<20} {head['vocab_size']:>6}x{head['hidden_size']:<5} {new[0]['backend']:<24} "
                f"{ratios} | fp32 {wides} | err {max(row['rel_err'] for row in new):.1e} [{time.time() - begin:.0f} s]",
                flush=True,
            )
            torch.cuda.empty_cache()
    result = {"machine": machine.describe(), "summary": summary(rows)}
    print(json.dumps(result["summary"], indent=1))
    if arguments.out:
        write(arguments.out, result, rows)


if __name__ == "__main__":
    main()
