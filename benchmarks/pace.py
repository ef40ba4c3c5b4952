"""What the GPU did just before a launch, and what that does to its time.

    python benchmarks/pace.py --out benchmarks/results/h200/pace.json [--objects DIR]

Each launch (hopper stream's default, and a plain read of the weight) is timed as a graph of about 2.5 ms in three ways:
``itself``: replay after replay, as a benchmark does; ``reading``: after 20 ms of plain reads, as memory-bound work precedes
the head in a decode step; ``idle``: after 30 ms of nothing. ``us`` is the median; ``clock_mhz`` and ``power_w`` are what
nvidia-smi says in the middle of it (not for ``idle``, when nothing would run). ``limit_us``: the bytes of weight, x and
logits at the speed of the plain read in the same way.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import hopper
import machine
import timing
import torch

from lowbatch_lmhead.backends.base import dtype_name
from lowbatch_lmhead.tuning import limit

CASES = ((1, torch.bfloat16), (16, torch.bfloat16), (64, torch.bfloat16))
WAYS = ("itself", "reading", "idle")
REPLAYS = 20
READING_S, IDLE_S = 0.02, 0.03
QUEUED = {"itself": 300, "reading": 40}
WARM_S = 0.4  # of the same work, before the first time is taken


class Paced:
    """A graph of one launch, replayed after something else."""

    def __init__(self, call: Callable[[torch.Tensor], object], weights: list[torch.Tensor], before: Any) -> None:
        self.launches = timing.launches(weights)
        self.graph = timing.capture(call, weights, self.launches)
        self.before = before
        self.start, self.end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def one(self, way: str) -> float:
        if way == "reading":
            self.before()
        elif way == "idle":
            torch.cuda.synchronize()
            time.sleep(IDLE_S)
        self.start.record()
        self.graph.replay()
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end) * 1e3 / self.launches

    def measure(self, way: str) -> dict[str, float]:
        warm = time.monotonic() + WARM_S
        while time.monotonic() < warm:
            self.one(way)
        us = statistics.median(self.one(way) for _ in range(REPLAYS))
        found = {"us": round(us, 2)}
        if way != "idle":
            for _ in range(QUEUED[way]):  # work for as long as nvidia-smi takes, and longer
                if way == "reading":
                    self.before()
                self.graph.replay()
            said = machine.nvidia_smi("clocks.sm", "power.draw")
            found |= {"clock_mhz": said["clocks.sm"], "power_w": said["power.draw"]}
            torch.cuda.synchronize()
        return found


def measure(model: str, vocab: int, hidden: int) -> list[dict[str, Any]]:
    weights = timing.weight_copies(vocab, hidden)
    readers = limit.readers(weights[0])
    times = timing.gpu_us(readers, weights, rounds=5)
    reader = readers[times.index(min(times))]
    before = timing.capture(reader, weights, round(READING_S * 1e6 / min(times))).replay
    read = {way: Paced(reader, weights, before).measure(way) for way in WAYS}
    found = []
    for rows, out_dtype in CASES:
        x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(rows, vocab, device="cuda", dtype=out_dtype)
        tactic, launch = hopper.launch(vocab, hidden, rows, out_dtype)
        extra = (x.nbytes + out.nbytes) / weights[0].nbytes
        row = {
            "model": model,
            "vocab": vocab,
            "hidden": hidden,
            "rows": rows,
            "out_dtype": dtype_name(out_dtype),
            "tactic": tactic,
            "limit_us": {way: round(one["us"] * (1 + extra), 2) for way, one in read.items()},
            "read": read,
        }
        paced = Paced(lambda w, launch=launch, x=x, out=out: launch(w, x, None, out), weights, before)
        row["hopper stream"] = {way: paced.measure(way) for way in WAYS}
        found.append(row)
        share = {way: round(row["limit_us"][way] / row["hopper stream"][way]["us"], 3) for way in read}
        print(model, rows, row["out_dtype"], "of the limit:", share, json.dumps(row["hopper stream"]), flush=True)
    return found


if __name__ == "__main__":
    hopper.main(__doc__, measure)
