"""Why hopper stream is further from the read limit with more rows: variants that leave something out, clocks, and ncu.

    python benchmarks/kernel_why.py --out kernel_why.json [--objects DIR] [--ncu]

The head of llama-3.1-8b, the default tactic at 1 to 64 rows. ``one_row_us`` writes all rows of logits to the place of one
(the same instructions, a fraction of the addresses); ``zeros_us`` multiplies rows of zeros (the same work, hardly a bit of
what the tensor cores take in changing); ``float32_us`` writes float32 logits. All of a row count are replayed in turn, as in
the other benchmarks. ``clocks`` are what nvidia-smi says in the middle of a second of replays. ``--ncu`` runs each row count
once more under ncu (``--clock-control none``) and keeps its figures.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hopper
import machine
import timing
import torch
import torch.nn.functional as F

VOCAB, HIDDEN = hopper.HEADS["llama-3.1-8b"]
ROWS = (1, 8, 16, 32, 64)
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_bytes.sum",
    "lts__t_sectors_op_read.sum",
    "lts__t_sectors_op_write.sum",
    "lts__t_sector_hit_rate.pct",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.sum",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "sm__cycles_active.avg",
    "sm__cycles_elapsed.avg.per_second",
    "launch__registers_per_thread",
    "launch__occupancy_limit_shared_mem",
    "launch__occupancy_limit_registers",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",
)


def launch(rows: int, out_dtype: torch.dtype) -> tuple[str, Any]:
    return hopper.launch(VOCAB, HIDDEN, rows, out_dtype)


def clocks(call: Any, weight: torch.Tensor) -> dict[str, float]:
    """What nvidia-smi says while the GPU does nothing else."""
    graph = timing.capture(call, [weight], 20)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        graph.replay()
        torch.cuda.synchronize()
    for _ in range(200):  # a second and more in the queue
        graph.replay()
    said = machine.nvidia_smi("clocks.sm", "clocks.mem", "power.draw")
    torch.cuda.synchronize()
    return said


def measure() -> list[dict[str, Any]]:
    weight = timing.weight_copies(VOCAB, HIDDEN)[0]
    read_us = timing.read_us([weight])
    found = []
    for rows in ROWS:
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        zeros = torch.zeros_like(x)
        out = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
        one_row = out[:1].expand(rows, VOCAB)
        out32 = torch.empty(rows, VOCAB, device="cuda", dtype=torch.float32)
        tactic, call = launch(rows, torch.bfloat16)
        _, call32 = launch(rows, torch.float32)
        ways = {
            "us": lambda w, x=x, out=out, call=call: call(w, x, None, out),
            "one_row_us": lambda w, x=x, out=one_row, call=call: call(w, x, None, out),
            "zeros_us": lambda w, x=zeros, out=out, call=call: call(w, x, None, out),
            "float32_us": lambda w, x=x, out=out32, call=call32: call(w, x, None, out),
            "linear_us": lambda w, x=x: F.linear(x, w),
            "linear_zeros_us": lambda w, x=zeros: F.linear(x, w),
        }
        times = timing.gpu_us(list(ways.values()), [weight])
        row = {"rows": rows, "tactic": tactic, "read_us": round(read_us, 2)}
        row |= {name: round(us, 2) for name, us in zip(ways, times)}
        found.append(row | {"clocks": clocks(ways["us"], weight), "linear_clocks": clocks(ways["linear_us"], weight)})
        print(json.dumps(found[-1]), flush=True)
    return found


def under_ncu(rows: int) -> dict[str, float]:
    command = ["ncu", "--clock-control", "none", "--csv", "--page", "raw", "--metrics", ",".join(METRICS)]
    command += ["--kernel-name", "regex:StreamKernel", "--launch-skip", "5", "--launch-count", "1"]
    done = subprocess.run(
        [*command, sys.executable, __file__, "launch", str(rows)], capture_output=True, text=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        return {"failed": (done.stdout + done.stderr)[-500:]}  # type: ignore[dict-item]
    names, units, values = list(csv.reader(lines))[:3]
    found = {}
    for name, unit, value in zip(names, units, values):
        if name in METRICS:
            found[f"{name} [{unit}]" if unit else name] = float(value.replace(",", ""))
    return found


def main() -> None:
    if sys.argv[1:2] == ["launch"]:  # under ncu
        rows = int(sys.argv[2])
        weight = timing.weight_copies(VOCAB, HIDDEN)[0]
        x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, VOCAB, device="cuda", dtype=torch.bfloat16)
        _, call = launch(rows, torch.bfloat16)
        for _ in range(8):
            call(weight, x, None, out)
        torch.cuda.synchronize()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--objects", type=Path)
    parser.add_argument("--ncu", action="store_true")
    arguments = parser.parse_args()
    machine.require_kernels()
    if arguments.objects:
        os.environ["LOWBATCH_LMHEAD_OBJECTS"] = str(arguments.objects)
    with torch.inference_mode():
        rows = measure()
    torch.cuda.empty_cache()
    if arguments.ncu:
        for row in rows:
            row["ncu"] = under_ncu(row["rows"])
    head = f"{VOCAB}x{HIDDEN}, bfloat16"
    arguments.out.write_text(json.dumps({"machine": machine.describe(), "head": head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
