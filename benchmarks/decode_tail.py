"""The tail of a decode step, rms_norm, head and argmax, with ours, F.linear and FlashInfer's mm_bf16 as the head.

    python benchmarks/decode_tail.py --out benchmarks/results/h200/decode_tail.json [--models ...] [--batch 1 4 16]
    python benchmarks/decode_tail.py --device cpu      (a small head, to try it out; the times mean nothing)

Eager: wall-clock time of many steps, host and GPU, the synchronisation outside, so the longer of the two counts. In a CUDA
graph: replays of a graph of several steps, by CUDA events. All ways in turn, median of the rounds; small weights are rotated
over copies, so they come from memory. Ours is bind(head) with out=, after autotune. mm_bf16 is FlashInfer's cute-dsl
backend, on SM90 with skip_check, which leaves out the admission (its kernels run there, on vocabularies that are a multiple
of 16); where it cannot run or raises, the row has the reason under "not_measured".

Every way has to choose the same tokens, up to ties: the logits, in float64, of two choices may differ by no more than the
rounding to bfloat16. Rows: model, vocab, hidden, batch, mode (eager or graph), backend that serves ours, us of a step for
each way, ratio (ours over F.linear), not_measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from compile_all import HEADS, shard
from torch import Tensor
from tuned import write

import lowbatch_lmhead
from lowbatch_lmhead.backends import MmBf16, Problem
from lowbatch_lmhead.benching import results
from lowbatch_lmhead.log import said

BATCHES = (1, 4, 16)
BY_NAME = {head["model"]: head for head in HEADS}
SHARD, ODD = shard(BY_NAME["deepseek-v3"]), BY_NAME["granite-3.1-2b"]
CHOSEN = (BY_NAME["llama-3.1-8b"], SHARD, ODD)
SMALL = {"model": "small", "vocab_size": 517, "hidden_size": 256}

OURS, LINEAR, MM_BF16 = "ours", "F.linear", "mm_bf16"
EPS = 1e-6
ROUNDS = 15
EAGER_STEPS, GRAPH_US = 200, 2500.0
ROUNDED = 2.0**-7  # two logits that differ by less, relatively, may change places when they are rounded to bfloat16
# The largest ratio to F.linear, eager, that is aimed at; and of all rows.
TARGETS = {SHARD["model"]: 0.92, ODD["model"]: 0.5}
LARGEST = 1.01

Step = Callable[[int], Tensor]  # the number of a step to its tokens


class Tail:
    """One head on a device, at one batch size, with the ways to do a step."""

    def __init__(self, weights: list[Tensor], batch: int) -> None:
        self.weights = weights
        weight = weights[0]
        vocab, hidden = weight.shape
        self.hidden = torch.randn(batch, hidden, dtype=weight.dtype, device=weight.device)
        self.norm = torch.rand(hidden, dtype=weight.dtype, device=weight.device) + 0.5
        self.logits = torch.empty(batch, vocab, dtype=weight.dtype, device=weight.device)
        self.heads = [lowbatch_lmhead.bind(one) for one in weights]

    def normed(self) -> Tensor:
        return F.rms_norm(self.hidden, (self.hidden.shape[1],), self.norm, EPS)

    def ours(self, index: int) -> Tensor:
        return self.heads[index % len(self.heads)](self.normed(), out=self.logits).argmax(-1)

    def linear(self, index: int) -> Tensor:
        return F.linear(self.normed(), self.weights[index % len(self.weights)]).argmax(-1)

    def mm_bf16(self) -> Step:
        """It raises where FlashInfer is missing, or does not take this head."""
        options: dict[str, Any] = {"backend": "cute-dsl"}
        if torch.cuda.get_device_capability(self.hidden.device)[0] == 9:
            options["skip_check"] = True  # so the head is checked here: an access out of bounds would end the process
            (vocab, hidden), dtype = self.weights[0].shape, self.hidden.dtype
            reason = MmBf16().supports(Problem(vocab, hidden, len(self.hidden), dtype, dtype, False, "sm_90a"))
            if reason:
                raise ValueError(reason)
        from flashinfer import mm_bf16

        def step(index: int) -> Tensor:
            weight = self.weights[index % len(self.weights)]
            return mm_bf16(self.normed(), weight.t(), out=self.logits, **options).argmax(-1)

        return step

    def steps(self) -> tuple[dict[str, Step], dict[str, str]]:
        """The ways that run, and why the others do not."""
        ways: dict[str, Step] = {LINEAR: self.linear, OURS: self.ours}
        if not self.hidden.is_cuda:
            return ways, {MM_BF16: "it takes a CUDA GPU"}
        try:
            ways[MM_BF16] = self.mm_bf16()
            ways[MM_BF16](0)
            self.synchronize()
        except Exception as error:  # whatever another library raises
            ways.pop(MM_BF16, None)
            return ways, {MM_BF16: said(error)}
        return ways, {}

    def differing(self, step: Step) -> str | None:
        """Where the tokens of ``step`` are none of the best, by more than rounding; None where they all are."""
        self.logits.fill_(float("nan"))
        tokens = step(0)
        x = self.normed().double()
        exact = torch.cat([x @ part.double().t() for part in self.weights[0].split(8192)], 1)
        best = exact.max(-1).values
        chosen = exact.gather(1, tokens[:, None])[:, 0]
        wrong = (best - chosen > ROUNDED * best.abs()).nonzero().flatten().tolist()
        return f"token {tokens[wrong[0]]} of row {wrong[0]} is not the best" if wrong else None

    def synchronize(self) -> None:
        if self.hidden.is_cuda:
            torch.cuda.synchronize()


def copies(head: dict[str, Any], device: torch.device) -> list[Tensor]:
    """Random weights, together larger than four L2 caches."""
    vocab, hidden = head["vocab_size"], head["hidden_size"]
    generator = torch.Generator(device).manual_seed(1)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.bfloat16, device=device).mul_(hidden**-0.5)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    return [weight] + [weight.clone() for _ in range(max(0, -(-4 * l2 // weight.nbytes) - 1))]


# --- timing ---


def eager_us(tail: Tail, ways: dict[str, Step], count: int, rounds: int) -> dict[str, float]:
    """Wall-clock microseconds of one step of each way, in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(rounds):
        for name in list(ways)[:: -1 if done % 2 else 1]:
            step = ways[name]
            for index in range(4):
                step(index)
            tail.synchronize()
            begin = time.perf_counter()
            for index in range(count):
                step(index)
            tail.synchronize()
            times[name].append((time.perf_counter() - begin) * 1e6 / count)
    return {name: statistics.median(values) for name, values in times.items()}


def capture(step: Step, count: int) -> torch.cuda.CUDAGraph:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(count):
            step(index)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def graph_us(tail: Tail, ways: dict[str, Step], rounds: int) -> tuple[dict[str, float], dict[str, str]]:
    """GPU microseconds of one step of each way, in turn; and why a way could not be captured."""
    estimate = tail.weights[0].nbytes / 4e6  # microseconds at 4 TB/s
    count = len(tail.weights) * max(1, round(GRAPH_US / estimate / len(tail.weights)))
    graphs, failed = {}, {}
    for name, step in ways.items():
        for index in range(len(tail.weights)):  # each copy's first call happens outside
            step(index)
        try:
            graphs[name] = capture(step, count)
        except Exception as error:  # whatever another library raises
            failed[name] = f"not captured: {said(error)}"
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for done in range(rounds):
        for name in list(graphs)[:: -1 if done % 2 else 1]:
            start.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end) * 1e3 / count)
    return {name: statistics.median(values) for name, values in times.items()}, failed


# --- rows ---


def measure(head: dict[str, Any], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    device = torch.device(arguments.device)
    weights = copies(head, device)
    lowbatch_lmhead.autotune(weights[0], max_rows=max(arguments.batch))
    found = []
    for batch in arguments.batch:
        tail = Tail(weights, batch)
        ways, missing = tail.steps()
        for name, step in list(ways.items()):
            problem = tail.differing(step)
            if problem and name == MM_BF16:
                missing[name] = f"wrong: {problem}"
                del ways[name]
            assert problem is None or name == MM_BF16, f"{head['model']}, batch {batch}, {name}: {problem}"
        us = eager_us(tail, ways, arguments.steps, arguments.rounds)
        backend = tail.heads[0].explain(tail.hidden).backend
        found.append(row(head, batch, "eager", backend, us, missing))
        if device.type == "cuda":
            us, failed = graph_us(tail, ways, arguments.rounds)
            found.append(row(head, batch, "graph", backend, us, missing | failed))
        for one in found[-2 if device.type == "cuda" else -1 :]:
            print(json.dumps(one), flush=True)
    return found


def row(
    head: dict[str, Any], batch: int, mode: str, backend: str, us: dict[str, float], missing: dict[str, str]
) -> dict[str, Any]:
    return {
        "model": head["model"],
        "vocab": head["vocab_size"],
        "hidden": head["hidden_size"],
        "batch": batch,
        "mode": mode,
        "backend": backend,
        "us": {name: round(value, 2) for name, value in us.items()},
        "ratio": round(us[OURS] / us[LINEAR], 4) if OURS in us and LINEAR in us else None,
        "not_measured": missing,
    }


def named(one: dict[str, Any]) -> str:
    return f"{one['model']}, batch {one['batch']}, {one['mode']}: {one['ratio']:.3f}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The largest ratio, and each target with what misses it."""
    known = [one for one in rows if one["ratio"] is not None]
    worst = max(known, key=lambda one: one["ratio"], default=None)
    bounds = [(f"{model}, eager, at most {bound} of F.linear", bound, model) for model, bound in TARGETS.items()]
    targets = {
        name: verdict([one for one in known if one["model"] == model and one["mode"] == "eager"], bound)
        for name, bound, model in bounds
    }
    return {
        "rows": len(rows),
        "rows without a ratio": len(rows) - len(known),
        "largest ratio": named(worst) if worst else None,
        "targets": targets | {f"every row, at most {LARGEST} of F.linear": verdict(known, LARGEST)},
    }


def verdict(rows: list[dict[str, Any]], bound: float) -> dict[str, Any]:
    above = [named(one) for one in rows if one["ratio"] > bound]
    return {"rows": len(rows), "met": not above if rows else None, "above": above}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--models", nargs="*", help=f"of {', '.join(head['model'] for head in CHOSEN)}")
    parser.add_argument("--batch", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=EAGER_STEPS, help="eager steps of one round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("it measures on a CUDA GPU, and there is none here; --device cpu tries it out on a small head")
    heads = CHOSEN if arguments.device == "cuda" else (SMALL,)
    rows: list[dict[str, Any]] = []
    torch.manual_seed(0)
    with torch.inference_mode():
        for head in heads:
            if not arguments.models or head["model"] in arguments.models:
                rows += measure(head, arguments)
    figures = summary(rows)
    print(json.dumps(figures, indent=1))
    if arguments.out:
        around = results.environment(torch.device(arguments.device)) | {"date": datetime.date.today().isoformat()}
        write(arguments.out, {"machine": around, "summary": figures}, rows)


if __name__ == "__main__":
    main()
