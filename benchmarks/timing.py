"""How the benchmarks measure.

GPU time: CUDA graphs of many launches, replayed in turn (competitor and ours in every round, so that a drifting clock hits
both), timed by CUDA events, median. Weights smaller than four L2 caches are rotated over copies, so they come from memory.
Host time: many eager calls, the synchronisation outside the timed part, median of several rounds.
Random data; float64 references on the same inputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lowbatch_lmhead.tuning import limit

GRAPH_US = 2500.0  # of work in one graph
ROUNDS = 9


def weight_copies(vocab: int, hidden: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Random weights of one shape, together larger than four L2 caches."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    size = vocab * hidden * dtype.itemsize
    return [
        torch.randn(vocab, hidden, device="cuda", dtype=dtype) * hidden**-0.5 for _ in range(max(1, -(-4 * l2 // size)))
    ]


def capture(call: Callable[[Tensor], object], weights: Sequence[Tensor], launches: int) -> torch.cuda.CUDAGraph:
    for weight in weights[:1]:
        call(weight)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(launches):
            call(weights[index % len(weights)])
    return graph


def launches(weights: Sequence[Tensor]) -> int:
    """How many launches one graph holds."""
    estimate = weights[0].numel() * weights[0].element_size() / 4e6  # microseconds at 4 TB/s
    return max(len(weights), 4, round(GRAPH_US / estimate))


def gpu_us(calls: Sequence[Callable[[Tensor], object]], weights: Sequence[Tensor], rounds: int = ROUNDS) -> list[float]:
    """Median microseconds of one ``call(weight)``, for each of ``calls``, measured in turn."""
    count = launches(weights)
    graphs = [capture(call, weights, count) for call in calls]
    times: list[list[float]] = [[] for _ in graphs]
    for graph in graphs:
        graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(rounds):
        for index, graph in enumerate(graphs):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[index].append(start.elapsed_time(end) * 1e3 / count)
    return [statistics.median(values) for values in times]


def host_us(ways: dict[str, Callable[[], object]], calls: int = 200, rounds: int = 25) -> dict[str, float]:
    """Median microseconds of host time of one call of each of ``ways``, measured in turn."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            for _ in range(20):
                way()
            begin = time.perf_counter()
            for _ in range(calls):
                way()
            times[name].append((time.perf_counter() - begin) * 1e6 / calls)
            torch.cuda.synchronize()
    return {name: round(statistics.median(values), 2) for name, values in times.items()}


def read_us(weights: Sequence[Tensor]) -> float:
    """The limit: a kernel that reads the weight and does nothing else, in its best configuration."""
    return min(gpu_us(limit.readers(weights[0]), weights, rounds=5))


def relative_error(logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[float, float]:
    """``norm(y - ref) / norm(ref)`` against float64: over all logits, and over those of the last 32 vocabulary rows."""
    difference = reference = 0.0
    x64 = x.double()
    for start in range(0, weight.shape[0], 16384):
        expected = x64 @ weight[start : start + 16384].double().t()
        if bias is not None:
            expected += bias[start : start + 16384].double()
        got = logits[:, start : start + 16384].double()
        difference += (got - expected).square().sum().item()
        reference += expected.square().sum().item()
    tail = x64 @ weight[-32:].double().t()
    if bias is not None:
        tail += bias[-32:].double()
    last = ((logits[:, -32:].double() - tail).norm() / tail.norm()).item()
    return (difference / reference) ** 0.5, last
