"""What ``autotune`` chooses, and whether it is right: every head of heads.json and its 1/8 shard, 1 to 32 rows.

    python benchmarks/tuned.py heads --out PART [--part 0 --parts 2] [--models ...]     choice, time and error of each row
    python benchmarks/tuned.py again --out tuned_again.json     the choices of three processes without a cache, compared
    python benchmarks/tuned.py cold --out tuned_cold.json       seconds and memory, cold and from the cache
    python benchmarks/tuned.py join tuned.json PART...          the parts as one file, with the summary

Rows as in core.json: us is ``project`` after ``autotune``, linear_us F.linear (for float32 logits torch.mm with
out_dtype), and linear_again_us a second graph of the same, which shows the noise. x lies at 16 addresses in turn. All three
in one run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import machine
import torch
import torch.nn.functional as F
from compile_all import HEADS, shard

import lowbatch_lmhead
from lowbatch_lmhead import TunedRow, backends, testing
from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.benching.measure import errors as relative_errors
from lowbatch_lmhead.tuning import timing

ROWS = 32
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Tuned three times each: small and large, whole and shards, an odd vocabulary, a hidden size of two tiles only.
REPEATED = (
    "gpt2",
    "qwen3-0.6b",
    "llama-3.1-8b",
    "gemma-3-27b 1/8",
    "deepseek-v3 1/8",
    "llama-3.2-1b 1/8",
    "mistral-large",
)


def all_heads() -> list[dict[str, Any]]:
    return HEADS + [shard(head) for head in HEADS]


def make(head: dict[str, Any]) -> torch.Tensor:
    vocab, hidden = head["vocab_size"], head["hidden_size"]
    generator = torch.Generator("cuda").manual_seed(hash((vocab, hidden)) % 2**31)
    return torch.randn(vocab, hidden, device="cuda", dtype=torch.bfloat16, generator=generator).mul_(hidden**-0.5)


def asked(out_dtype: torch.dtype) -> torch.dtype | None:
    return None if out_dtype is torch.bfloat16 else out_dtype


def default(out_dtype: torch.dtype):
    if out_dtype is torch.bfloat16:
        return lambda weight, x, bias, out: F.linear(x, weight)
    return lambda weight, x, bias, out: torch.mm(x, weight.t(), out_dtype=torch.float32)


def errors(weight: torch.Tensor, out_dtype: torch.dtype) -> dict[int, tuple[float, float]]:
    """norm(y - exact) / norm(exact) at each row count, over all logits and over the last 32 of the vocabulary."""
    x = torch.randn(ROWS, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    parts = [(x.double() @ part.double().t()) for part in weight.split(32768)]
    exact = torch.cat(parts, 1)
    found = {}
    for rows in range(1, ROWS + 1):
        out = torch.full((rows, weight.shape[0]), float("nan"), device="cuda", dtype=out_dtype)
        lowbatch_lmhead.project(weight, x[:rows], out=out, out_dtype=asked(out_dtype))
        found[rows] = relative_errors(out, exact[:rows])
    return found


def measure(head: dict[str, Any], weight: torch.Tensor, tuned: Any, out_dtype: torch.dtype) -> list[dict[str, Any]]:
    """Ours, F.linear and F.linear again, at each row count."""
    error = errors(weight, out_dtype)
    timer = timing.GraphTimer(weight, None, ROWS, out_dtype)
    ours = lambda w, x, bias, out: lowbatch_lmhead.project(w, x, out_dtype=asked(out_dtype))  # noqa: E731
    linear = default(out_dtype)
    for copy in timer._weights:  # each copy's first call happens outside the graphs
        lowbatch_lmhead.project(copy, timer._xs[0], out_dtype=asked(out_dtype))
    found = []
    # A head that no kernel takes is left to the default GEMM.
    untuned = [TunedRow(rows, backends.DEFAULT_GEMM, None, None, None, None) for rows in range(1, ROWS + 1)]
    for row in tuned.rows or untuned:
        with timer.contest(row.rows, [linear, ours, linear]) as contest:
            rounds = []
            while len(rounds) < 5 or (len(rounds) < 15 and _close(rounds)):
                order = [0, 1, 2] if len(rounds) % 2 else [2, 1, 0]
                times = dict(zip(order, contest.round(order)))
                rounds.append([times[index] for index in range(3)])
            linear_us, us, again_us = (statistics.median(one) for one in zip(*rounds))
        found.append(
            {
                "model": head["model"],
                "vocab": head["vocab_size"],
                "hidden": head["hidden_size"],
                "rows": row.rows,
                "out_dtype": dtype_name(out_dtype),
                "backend": row.backend,
                "tactic": row.tactic,
                "us": round(us, 2),
                "linear_us": round(linear_us, 2),
                "linear_again_us": round(again_us, 2),
                "tuned_us": round(row.us, 2) if row.us else None,
                "read_us": round(tuned.read_us, 2) if tuned.read_us else None,
                "limit_us": round(row.limit_us, 2) if row.limit_us else None,
                "rel_err": error[row.rows][0],
                "last_rows_err": error[row.rows][1],
            }
        )
    timer.close()
    return found


def _close(rounds: list[list[float]]) -> bool:
    """Whether ours is as slow as F.linear or slower so far, or the rounds differ: worth another look."""
    linear, us, again = (statistics.median(one) for one in zip(*rounds))
    return us > 0.99 * min(linear, again)


def heads(arguments: argparse.Namespace) -> None:
    machine.require_kernels()
    chosen = [
        (head, [out_dtype for name, out_dtype in DTYPES.items() if is_wanted(head["model"], name, arguments.models)])
        for head in all_heads()
    ]
    rows, tunings, begin = [], [], time.time()
    for head, out_dtypes in [one for one in chosen if one[1]][arguments.part :: arguments.parts]:
        weight = make(head)
        for out_dtype in out_dtypes:
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            report = lowbatch_lmhead.autotune(weight, max_rows=ROWS, out_dtype=asked(out_dtype), cache=False)
            (tuned,) = report.heads
            peak = torch.cuda.max_memory_allocated() - before
            outputs = ROWS * weight.shape[0] * out_dtype.itemsize
            new = measure(head, weight, tuned, out_dtype)
            rows += new
            tunings.append(
                {
                    "model": head["model"],
                    "weight_mb": round(weight.nbytes / 1e6, 1),
                    "out_dtype": dtype_name(out_dtype),
                    "seconds": round(tuned.seconds, 2),
                    "compiled": report.compiled,
                    "loaded": report.loaded,
                    "noise": tuned.noise,
                    "memory_mb_above_outputs": round((peak - outputs) / 2**20, 1),
                    "notes": list(tuned.notes),
                }
            )
            ratios = [row["us"] / row["linear_us"] for row in new]
            served = sum(row["backend"] != "default GEMM" for row in new)
            print(
                f"{head['model']:<22} {dtype_name(out_dtype):<8} {served:>2} rows by kernels, "
                f"1-16 {mean(ratios[:16]):.3f}, 17-32 {mean(ratios[16:]):.3f}, worst {max(ratios):.3f}, "
                f"tuned in {tuned.seconds:.1f} s ({report.compiled} compiled), noise {tuned.noise or 0:.4f}, "
                f"{tunings[-1]['memory_mb_above_outputs']} MB "
                f"[{time.time() - begin:.0f} s]",
                flush=True,
            )
        del weight
        testing.forget()
        torch.cuda.empty_cache()
        write(
            arguments.out, {"machine": machine.describe(), "summary": summary(rows, tunings), "tunings": tunings}, rows
        )


def is_wanted(model: str, out_dtype: str, models: list[str] | None) -> bool:
    return not models or model in models or f"{model}:{out_dtype}" in models


def mean(values: list[float]) -> float:
    return statistics.geometric_mean(values) if values else math.nan


def summary(rows: list[dict[str, Any]], tunings: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures that are asked of this table."""
    noise = [abs(row["linear_again_us"] / row["linear_us"] - 1) for row in rows]
    ratios = [row["us"] / row["linear_us"] for row in rows]
    few = [row for row in rows if row["rows"] <= 16 and row["vocab"] % 16 == 0]
    whole = [row["us"] / row["linear_us"] for row in few if "1/8" not in row["model"]]
    shards = [row["us"] / row["linear_us"] for row in few if "1/8" in row["model"]]
    large = [row for row in rows if row["vocab"] * row["hidden"] * 2 > 200e6 and row["rows"] <= 8 and row["limit_us"]]
    reached = [row["limit_us"] / row["us"] for row in large]
    slower = [
        {key: row[key] for key in ("model", "rows", "out_dtype", "backend", "us", "linear_us", "linear_again_us")}
        for row in rows
        if row["us"] > 1.01 * max(row["linear_us"], row["linear_again_us"])
    ]
    return {
        "rows measured": len(rows),
        "F.linear against itself, largest": max(noise, default=None),
        "F.linear against itself, 99 of 100 below": sorted(noise)[int(0.99 * len(noise))] if noise else None,
        "us / linear_us, largest": max(ratios, default=None),
        "above 1.01 of both F.linear": slower,
        "served by kernels": sum(row["backend"] != "default GEMM" for row in rows),
        "served by kernels at 17 to 32 rows": sum(row["backend"] != "default GEMM" for row in rows if row["rows"] > 16),
        "us / linear_us, rows 1-16, vocab % 16 == 0, whole heads, geometric mean": mean(whole),
        "us / linear_us, rows 1-16, vocab % 16 == 0, 1/8 shards, geometric mean": mean(shards),
        "us / linear_us, rows 17-32, geometric mean": mean([r["us"] / r["linear_us"] for r in rows if r["rows"] > 16]),
        "limit_us / us, rows 1-8, above 200 MB, least": min(reached, default=None),
        "limit_us / us, rows 1-8, above 200 MB, geometric mean": mean(reached),
        "limit_us / us, rows 1-8, above 200 MB, below 0.95": sorted(
            {f"{row['model']} {row['out_dtype']}" for row, part in zip(large, reached) if part < 0.95}
        ),
        "rel_err bfloat16, largest": max((r["rel_err"] for r in rows if r["out_dtype"] == "bfloat16"), default=None),
        "rel_err float32, largest": max((r["rel_err"] for r in rows if r["out_dtype"] == "float32"), default=None),
        "last rows, bfloat16, largest": max(
            (r["last_rows_err"] for r in rows if r["out_dtype"] == "bfloat16"), default=None
        ),
        "last rows, float32, largest": max(
            (r["last_rows_err"] for r in rows if r["out_dtype"] == "float32"), default=None
        ),
        "seconds of one tuning, kernels compiled beforehand, largest": max(
            (t["seconds"] for t in tunings), default=None
        ),
        "MB above the outputs, weights above 4 L2 caches, largest": max(
            (t["memory_mb_above_outputs"] for t in tunings if t["weight_mb"] >= 252), default=None
        ),
        "MB above the outputs, smaller weights, largest": max(
            (t["memory_mb_above_outputs"] for t in tunings if t["weight_mb"] < 252), default=None
        ),
    }


def write(path: Path, top: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    text = json.dumps(top, indent=1)[:-2] + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n"
    path.write_text(text)


def join(arguments: argparse.Namespace) -> None:
    parts = [json.loads(part.read_text()) for part in arguments.parts]
    # A head that was measured again counts as it was measured last.
    last = {(one["model"], one["out_dtype"]): index for index, part in enumerate(parts) for one in part["tunings"]}
    rows, tunings = (
        [one for index, part in enumerate(parts) for one in part[what] if last[one["model"], one["out_dtype"]] == index]
        for what in ("rows", "tunings")
    )
    top = {"machine": parts[0]["machine"], "summary": summary(rows, tunings), "tunings": tunings}
    write(arguments.out, top, rows)
    print(json.dumps(top["summary"], indent=1))


# --- the choice of several processes ---


def choose(arguments: argparse.Namespace) -> None:
    """One process: the choice for the repeated heads."""
    found = []
    for head in all_heads():
        if head["model"] not in REPEATED:
            continue
        weight = make(head)
        for name, out_dtype in DTYPES.items():
            (tuned,) = lowbatch_lmhead.autotune(weight, out_dtype=asked(out_dtype), cache=False).heads
            found += [[head["model"], name, row.rows, row.backend, row.tactic, row.us] for row in tuned.rows]
        testing.forget()
    arguments.out.write_text(json.dumps(found))


def again(arguments: argparse.Namespace) -> None:
    machine.require_kernels()
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{index}.json") for index in range(3)]
        for out in outs:
            subprocess.run([sys.executable, __file__, "choose", "--out", str(out)], check=True)
        runs = [{tuple(row[:3]): tuple(row[3:5]) for row in json.loads(out.read_text())} for out in outs]
    same_backend = [len({run[key][0] for run in runs}) == 1 for key in runs[0]]
    same_tactic = [len({run[key] for run in runs}) == 1 for key in runs[0]]
    differing = {key: {run[key] for run in runs} for key, same in zip(runs[0], same_tactic) if not same}
    worst = beside_each_other(differing)
    result = {
        "machine": machine.describe(),
        "heads": list(REPEATED),
        "rows": len(same_backend),
        "same backend in all three": sum(same_backend) / len(same_backend),
        "same tactic in all three": sum(same_tactic) / len(same_tactic),
        "differing choices, slowest over quickest, largest": max((row["ratio"] for row in worst), default=1.0),
        "differing": worst,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "differing"}, indent=1))


def beside_each_other(differing: dict[tuple[str, str, int], set[tuple[str, str | None]]]) -> list[dict[str, Any]]:
    """Where the processes chose differently: how far the choices are apart, timed together."""
    found = []
    by_name = {head["model"]: head for head in all_heads()}
    for model, name in dict.fromkeys(key[:2] for key in differing):
        weight, out_dtype = make(by_name[model]), DTYPES[name]
        timer = timing.GraphTimer(weight, None, ROWS, out_dtype)
        for key, choices in differing.items():
            if key[:2] != (model, name):
                continue
            ordered = sorted(choices, key=str)
            calls = [launch(weight, key[2], out_dtype, *choice) for choice in ordered]
            with timer.contest(key[2], calls) as contest:
                rounds = [contest.round(range(len(calls))) for _ in range(9)]
            times = [statistics.median(one) for one in zip(*rounds)]
            found.append(
                {
                    "head": model,
                    "out_dtype": name,
                    "rows": key[2],
                    "choices": {f"{b} ({t})" if t else b: round(us, 2) for (b, t), us in zip(ordered, times)},
                    "ratio": max(times) / min(times),
                }
            )
        timer.close()
    return found


def launch(weight: torch.Tensor, rows: int, out_dtype: torch.dtype, backend: str, tactic: str | None):
    if tactic is None:
        return default(out_dtype)
    from lowbatch_lmhead.plan import plan_for
    from lowbatch_lmhead.tuning.search import named

    plan = plan_for(weight, None, out_dtype)
    option = named(f"{backend} ({tactic})", plan, rows, ROWS)
    return option.backend.compile(plan.problem(rows), option.tactic).call


# --- cold, and from the cache ---

ONE = """
import json, sys, time, torch, lowbatch_lmhead
weight = torch.randn(128256, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
torch.cuda.reset_peak_memory_stats()
begin = time.perf_counter()
report = lowbatch_lmhead.autotune(weight, budget_s=60)
seconds = time.perf_counter() - begin
begin = time.perf_counter()
lowbatch_lmhead.autotune(weight)
second_call = time.perf_counter() - begin
outputs = 32 * 128256 * 2
print(report)
print(json.dumps({"seconds": round(seconds, 3), "second_call_seconds": round(second_call, 5),
  "source": report.heads[0].source, "compiled": report.compiled, "loaded": report.loaded,
  "tuned_seconds": report.heads[0].seconds,
  "peak_mb_above_outputs": round((torch.cuda.max_memory_allocated() - before[0] - outputs) / 2**20, 1),
  "mb_left_allocated": round((torch.cuda.memory_allocated() - before[0]) / 2**20, 1),
  "mb_left_reserved": round((torch.cuda.memory_reserved() - before[1]) / 2**20, 1)}))
"""


def cold(arguments: argparse.Namespace) -> None:
    machine.require_kernels()
    results = {"machine": machine.describe(), "head": "llama-3.1-8b, 128256x4096, 1-32 rows, bfloat16 logits"}
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "LOWBATCH_LMHEAD_CACHE": folder}
        environment.pop("LOWBATCH_LMHEAD_OBJECTS", None)
        for name in ("cold", "from the cache"):
            done = subprocess.run(
                [sys.executable, "-c", ONE], env=environment, capture_output=True, text=True, check=False
            )
            print(done.stdout, done.stderr, flush=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")


class Parser(argparse.ArgumentParser):
    """Takes arguments from a file, one in a line: @FILE."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(fromfile_prefix_chars="@", **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, parser_class=Parser)
    for name, function in (("heads", heads), ("again", again), ("choose", choose), ("cold", cold)):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        command.add_argument("--out", type=Path, required=True)
        if name == "heads":
            command.add_argument("--models", nargs="*", help="names as in heads.json, 'NAME 1/8', or NAME:float32")
            command.add_argument("--part", type=int, default=0)
            command.add_argument("--parts", type=int, default=1)
    joining = commands.add_parser("join")
    joining.set_defaults(function=join)
    joining.add_argument("out", type=Path)
    joining.add_argument("parts", nargs="+", type=Path)
    arguments = parser.parse_args()
    with torch.inference_mode():
        arguments.function(arguments)


if __name__ == "__main__":
    main()
