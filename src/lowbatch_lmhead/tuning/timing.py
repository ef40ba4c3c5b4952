"""Timing launches so that the difference of one per cent between two of them can be believed.

- A time is that of a CUDA graph of many launches, by CUDA events: no host time in it, nothing compiled for it.
- Everything that is compared is replayed in turn, round after round, so that a drifting clock hits all alike; which goes
  first alternates.
- The weight comes from memory: what is smaller than four L2 caches is rotated over copies. x lies at many addresses in
  turn, because the caches treat some worse than others (8 % for the worst of 24, benchmarks/results/h200/writes.json).
- The GPU is given work until its clock is up before the first time counts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

# A launch: call(weight, x, bias or None, out), as Launch.call.
Call = Callable[..., Any]

GRAPH_US = 1500.0  # of work in one graph: the events' resolution of 0.5 us is less than 0.05 % of it
WARM_UP_US = 100_000.0
ADDRESSES = 16  # of x
X_BYTES = 16 << 20  # at most, for x at all addresses
MOST_COPIES = 512  # of a weight; one of less than half a megabyte is not read from memory, here as in serving
LEAST_ROUNDS = 3
ENOUGH_ROUNDS = 5  # where all that is left differs clearly from the yardstick
MOST_ROUNDS = 9
OUT_OF_THE_RUNNING = 0.03  # behind the best after the least rounds: not measured on


class Contest(Protocol):
    """Calls that are ready to be timed beside each other."""

    def round(self, which: Sequence[int]) -> list[float]:
        """Microseconds of one launch of each of the calls ``which`` (positions), timed one after the other."""


class Timer(Protocol):
    """Times calls on one head's weight."""

    def contest(self, rows: int, calls: Sequence[Call]) -> AbstractContextManager[Contest]:
        """Prepare ``calls`` for timing with ``rows`` rows."""

    def close(self) -> None:
        """Give the memory back."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call, the median of its rounds, and how many there were."""

    us: float
    rounds: int


def compare(contest: Contest, count: int, margin: float = 0.01, keep_last: bool = False) -> list[Timing]:
    """Time ``count`` calls, the first of them the yardstick, for as many rounds as the result needs.

    A call that is clearly behind the best is left out after a few rounds, but not the yardstick, nor with ``keep_last`` the
    last call; its time is then that beside the yardstick. It ends early when what is left differs from the yardstick by
    more than ``margin`` and three times the spread of the rounds.
    """
    times: list[list[float]] = [[] for _ in range(count)]
    active, kept = list(range(count)), (0, count - 1) if keep_last else (0,)
    for done in range(1, MOST_ROUNDS + 1):
        turn = active if done % 2 else active[::-1]
        for index, us in zip(turn, contest.round(turn)):
            if not 0 < us < math.inf:
                raise RuntimeError(f"the timer measured {us} us")
            times[index].append(us)
        if done < LEAST_ROUNDS:
            continue
        medians = [statistics.median(values) for values in times]
        best = min(medians[index] for index in active)
        active = [i for i in active if i in kept or medians[i] <= best * (1 + OUT_OF_THE_RUNNING)]
        left = [index for index in active if index not in kept]
        clear = all(_is_clear(times[0], times[index], margin) for index in left)
        if clear and (len(left) <= 1 or done >= ENOUGH_ROUNDS):
            break
    return [Timing(_beside(times[0], values), len(values)) for values in times]


def _beside(yardstick: list[float], values: list[float]) -> float:
    """The median of ``values``. Of a call that was left out early, what it would have been over all rounds of the yardstick:
    the clock may have changed since.
    """
    if len(values) == len(yardstick):
        return statistics.median(values)
    return statistics.median(yardstick) * statistics.median(b / a for a, b in zip(yardstick, values))


def _is_clear(yardstick: list[float], other: list[float], margin: float) -> bool:
    ratios = [b / a for a, b in zip(yardstick, other)]
    middle = statistics.median(ratios)
    spread = statistics.median(abs(ratio - middle) for ratio in ratios)
    return abs(middle - 1) > margin + 3 * spread


def warm_us(measure: Callable[[], float]) -> float:
    """What ``measure`` gives when the GPU is warm: the least of ``WARM_UP_US`` of calls.

    The call before that does not count: the first of a process loads cuBLAS, which may take longer than the warm-up.
    Graphs held four launches then, and what begins and ends a graph was a part of every time.
    """
    measure()
    found, begin = math.inf, time.perf_counter()
    while (time.perf_counter() - begin) * 1e6 < WARM_UP_US:
        found = min(found, measure())
    return found


class GraphTimer:
    """CUDA graph replays, as described above.

    Memory on the GPU: copies of a weight smaller than four L2 caches, up to that size; at most 16 MB of x; one output of
    ``max_rows`` rows; and once in a process what cuBLAS works in on another stream (32 MB on SM90).
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, max_rows: int, out_dtype: torch.dtype) -> None:
        self._bias = bias
        vocab = weight.shape[0]
        device, self._stream = weight.device, _stream(weight.device)
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        copies = max(1, min(MOST_COPIES, -(-4 * l2 // weight.nbytes)))
        # What the default stream's pool gets back serves again; what another stream's does lies idle.
        default = torch.cuda.default_stream(device)
        default.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(default):
            self._weights = [weight] + [weight.clone() for _ in range(copies - 1)]
            self._xs = _inputs(max_rows, weight)
            self._out = torch.empty(max_rows, vocab, dtype=out_dtype, device=device)
        self._stream.wait_stream(default)

    def contest(self, rows: int, calls: Sequence[Call]) -> AbstractContextManager[Contest]:
        return self._contest(rows, calls)

    @contextlib.contextmanager
    def _contest(self, rows: int, calls: Sequence[Call]) -> Iterator[Contest]:
        with torch.cuda.stream(self._stream):
            launches = self._launches
            graphs = [self._capture(call, rows, launches) for call in calls]
            for graph in graphs:
                graph.replay()
            yield _Graphs(graphs, launches)
            self._stream.synchronize()

    @functools.cached_property
    def _launches(self) -> int:
        """How many launches one graph holds. Measuring that warms the GPU up."""
        start, end = _events()
        x, count = self._xs[0][:1], 2 * len(self._weights)

        def pass_us() -> float:
            start.record()
            for index in range(count):
                torch.mm(x, self._weights[index % len(self._weights)].t(), out=out)
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) * 1e3 / count

        with torch.cuda.stream(self._stream):
            out = x.new_empty((1, self._weights[0].shape[0]))
            us = warm_us(pass_us)
        turns = max(1.0, 4 / len(self._weights), GRAPH_US / us / len(self._weights))
        return len(self._weights) * round(turns)

    def _capture(self, call: Call, rows: int, launches: int) -> torch.cuda.CUDAGraph:
        weights, bias, out = self._weights, self._bias, self._out[:rows]
        xs = [x[:rows] for x in self._xs]
        call(weights[0], xs[0], bias, out)  # loads what is loaded at the first launch
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating meanwhile.
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for index in range(launches):
                call(weights[index % len(weights)], xs[index % len(xs)], bias, out)
        finally:
            graph.capture_end()
        return graph

    def close(self) -> None:
        self._stream.synchronize()
        self._weights, self._xs = self._weights[:1], []
        del self._out


class _Graphs:
    def __init__(self, graphs: Sequence[torch.cuda.CUDAGraph], launches: int) -> None:
        self._graphs = graphs
        self._launches = launches
        self._events = [_events() for _ in graphs]

    def round(self, which: Sequence[int]) -> list[float]:
        # One wait at the end: a GPU that idles between two graphs lets its clock go.
        for index in which:
            start, end = self._events[index]
            start.record()
            self._graphs[index].replay()
            end.record()
        torch.cuda.current_stream().synchronize()
        return [self._events[i][0].elapsed_time(self._events[i][1]) * 1e3 / self._launches for i in which]


def _events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    event: Any = torch.cuda.Event
    return event(enable_timing=True), event(enable_timing=True)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all tuning: PyTorch keeps a cuBLAS workspace for every stream that a GEMM ever ran on."""
    stream: Any = torch.cuda.Stream
    return cast("torch.cuda.Stream", stream(device))


@contextlib.contextmanager
def tuning_stream(device: torch.device) -> Iterator[None]:
    """Run on the tuning stream what is inside, after what the current stream has been given. Nothing on the CPU."""
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        try:
            yield
        finally:
            stream.synchronize()


def _inputs(max_rows: int, weight: Tensor) -> list[Tensor]:
    """Random x (max_rows, hidden) at up to ``ADDRESSES`` addresses, unevenly far apart, over several pages of 2 MB."""
    hidden, itemsize = weight.shape[1], weight.itemsize
    size = -(-max_rows * hidden * itemsize // 512) * 512  # allocations start at multiples of 512 bytes
    count = max(2, min(ADDRESSES, X_BYTES // size))
    step = max(size, X_BYTES // ADDRESSES)
    starts = [index * step + 512 * (index * index % ADDRESSES if step > size else 0) for index in range(count)]
    generator = torch.Generator(weight.device).manual_seed(1)
    memory = torch.randn((starts[-1] + size) // itemsize, generator=generator, dtype=weight.dtype, device=weight.device)
    return [memory[s // itemsize : s // itemsize + max_rows * hidden].view(max_rows, hidden) for s in starts]


class WallTimer:
    """Wall-clock time, for what runs on the CPU (the reference backend of ``lowbatch_lmhead.testing``)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, max_rows: int, out_dtype: torch.dtype) -> None:
        self._weight, self._bias = weight, bias
        self._x = torch.randn(max_rows, weight.shape[1], dtype=torch.float32, device="cpu").to(weight.dtype)
        self._out = torch.empty(max_rows, weight.shape[0], dtype=out_dtype, device="cpu")

    @contextlib.contextmanager
    def _contest(self, rows: int, calls: Sequence[Call]) -> Iterator[Contest]:
        yield _Walls(
            [functools.partial(call, self._weight, self._x[:rows], self._bias, self._out[:rows]) for call in calls]
        )

    def contest(self, rows: int, calls: Sequence[Call]) -> AbstractContextManager[Contest]:
        return self._contest(rows, calls)

    def close(self) -> None:
        pass


class _Walls:
    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self._calls = calls

    def round(self, which: Sequence[int]) -> list[float]:
        return [self._time(self._calls[index]) for index in which]

    def _time(self, call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e6


def timer_for(weight: Tensor, bias: Tensor | None, max_rows: int, out_dtype: torch.dtype) -> Timer:
    """The timer for the device that the weight is on."""
    kind = GraphTimer if weight.is_cuda else WallTimer
    return kind(weight, bias, max_rows, out_dtype)
