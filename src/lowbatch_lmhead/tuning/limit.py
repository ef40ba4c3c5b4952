"""The read limit: how long a kernel takes that reads the weight and does nothing else."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..log import logger, said
from .timing import Call, Timer

# (int32 words of one load, loads of one program, warps): the best of them is the limit, within 2 %.
CONFIGURATIONS = ((4096, 4, 8), (8192, 4, 8), (4096, 8, 4), (2048, 4, 4))
ROUNDS = 5


def read_us(timer: Timer, weight: Tensor) -> float | None:
    """Microseconds of reading ``weight``; None without a GPU or Triton, which comes with PyTorch's CUDA builds."""
    if not weight.is_cuda:
        return None
    try:
        calls = readers(weight)
        with timer.contest(1, calls) as contest:
            rounds = [contest.round(range(len(calls))) for _ in range(ROUNDS)]
    except Exception as error:  # no Triton, no C compiler for it: the report does without the limit
        logger.info("the read limit is not measured: %s", said(error))
        return None
    medians: list[float] = [statistics.median(times) for times in zip(*rounds)]
    return min(medians)


def limit_us(
    read_us: float | None, rows: int, vocab: int, hidden: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> float | None:
    """Microseconds of reading the weight and x and writing the logits, at the bandwidth of ``read_us``."""
    weight = vocab * hidden * dtype.itemsize
    moved = weight + rows * (hidden * dtype.itemsize + vocab * out_dtype.itemsize)
    return read_us * moved / weight if read_us else None


def readers(weight: Tensor) -> list[Call]:
    """Calls that read a weight like this one and do nothing else. ImportError without Triton."""
    import triton

    kernel = _kernel()
    sink = torch.zeros(1, dtype=torch.int32, device=weight.device)

    def reader(block: int, loops: int, warps: int) -> Callable[..., Any]:
        def call(weight: Tensor, *_: Any) -> None:
            words = weight.view(-1).view(torch.int32)
            grid = (triton.cdiv(words.numel(), block * loops),)
            kernel[grid](words, sink, words.numel(), BLOCK=block, LOOPS=loops, num_warps=warps)

        return call

    return [reader(*configuration) for configuration in CONFIGURATIONS]


@functools.cache
def _kernel() -> Any:
    """The Triton kernel, defined once Triton is needed."""
    import triton
    import triton.language as tl

    @triton.jit  # type: ignore
    def read(source, sink, count, BLOCK: tl.constexpr, LOOPS: tl.constexpr):  # type: ignore
        total = tl.zeros((BLOCK,), tl.int32)
        base = tl.program_id(0).to(tl.int64) * BLOCK * LOOPS
        for loop in range(LOOPS):
            at = base + loop * BLOCK + tl.arange(0, BLOCK)
            total ^= tl.load(source + at, mask=at < count, other=0, eviction_policy="evict_first")
        # Next to never true, and harmless then; but the compiler has to keep the loads.
        if tl.sum(total ^ 0x5A5A5A5A) == 0x7FFFFFFF:
            tl.store(sink, 1)

    return read
