"""FlashInfer's cluster split-K kernel for Blackwell: tensor-memory MMA, the hidden dimension split over a cluster.

It needs tcgen05 (SM100, SM103) and could not be run here; it is compiled for those targets in the tests, and checked
against the default GEMM before it serves, as every launch is.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import torch

from .. import devices
from . import flashinfer
from .base import Problem, dtype_name
from .compiling import CompiledBackend

MAX_ROWS = 32
K_TILE = 128
MAX_STAGES = 18
SPLITS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Tactic:
    """The fields of FlashInfer's SplitKTactic: mma_m tiles the vocabulary, mma_n the rows."""

    mma_m: int
    mma_n: int
    split_k: int
    ab_stages: int

    def __str__(self) -> str:
        return f"{self.mma_m}x{self.mma_n}, split {self.split_k}, {self.ab_stages} stages"


def smem_bytes(tactic: Tactic) -> int:
    """Shared memory of one CTA, in bytes: the ring of weight and x tiles, the barriers, the partial sums of the peers."""
    ring = math.ceil(tactic.mma_m * K_TILE * 2 * tactic.ab_stages / 1024) * 1024
    ring += tactic.mma_n * K_TILE * 2 * tactic.ab_stages
    mailbox = (tactic.split_k - 1) * tactic.mma_m * tactic.mma_n * 4
    return ring + 16 * tactic.ab_stages + mailbox + 256


def default_tactic(problem: Problem) -> Tactic:
    """FlashInfer's choice for vocabularies of 8192 and more (no split: the grid fills the GPU), its 4 to 2 below."""
    k_tiles = problem.hidden // K_TILE
    wanted = 1 if problem.vocab >= 8192 or k_tiles <= 4 else 2 if problem.vocab > 3072 else 4
    return _deepest_ring(problem, next(split for split in range(wanted, 0, -1) if k_tiles % split == 0))


def autotune_tactics(problem: Problem) -> list[Tactic]:
    """The default, then the other splits of the hidden dimension, each with the deepest ring that fits."""
    splits = [split for split in SPLITS if problem.hidden // K_TILE % split == 0]
    return list(dict.fromkeys([default_tactic(problem), *(_deepest_ring(problem, split) for split in splits)]))


def _deepest_ring(problem: Problem, split_k: int) -> Tactic:
    mma_n = 8 if problem.rows <= 8 else 16 if problem.rows <= 16 else 32
    limit = devices.ARCHITECTURES[problem.arch].smem_per_block
    most = 6 if problem.hidden // K_TILE <= 4 else MAX_STAGES
    stages = next(s for s in range(most, 0, -1) if smem_bytes(Tactic(64, mma_n, split_k, s)) <= limit)
    return Tactic(64, mma_n, split_k, stages)


class ClusterSplitK(CompiledBackend):
    name = "flashinfer cluster split-K"
    architectures = frozenset({"sm_100a", "sm_103a"})

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype is not torch.bfloat16:
            return f"x is {dtype_name(problem.dtype)}; it takes bfloat16"
        if problem.out_dtype not in (torch.bfloat16, torch.float32):
            return f"the output is {dtype_name(problem.out_dtype)}; it writes bfloat16 or float32"
        if problem.has_bias:
            return "the head has a bias; only the warp split-K kernel adds one here"
        if problem.rows > MAX_ROWS:
            return f"it takes up to {MAX_ROWS} rows"
        if problem.hidden % K_TILE:
            return f"hidden {problem.hidden} is not a multiple of {K_TILE}"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[Tactic]:
        return [default_tactic(problem)]

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        return autotune_tactics(problem)

    def smem_bytes(self, tactic: Tactic) -> int:
        # It asks for all that a block can have, whatever it uses of it.
        return devices.ARCHITECTURES["sm_100a"].smem_per_block

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        from cutlass import cute

        module = flashinfer.kernel_module("dense_bf16_gemm_sm100_splitk")
        arguments: dict[str, Any] = {
            "tactic": module.SplitKTactic(tactic.mma_m, tactic.mma_n, tactic.split_k, tactic.ab_stages),
            "use_pdl": False,
            "has_bias": False,
        }
        if "arch" in inspect.signature(module.SplitKDenseGemmKernel).parameters:  # FlashInfer 0.7.3 and newer
            arguments["arch"] = "sm_100"
        kernel = module.SplitKDenseGemmKernel(**arguments)
        vocab, hidden = problem.vocab, problem.hidden

        class OnWholeWeight:
            @cute.experimental.jit
            def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
                # The kernel's coordinates: (vocab, hidden, batch), (rows, hidden, batch), (vocab, rows, batch).
                rows = x.shape[0]
                weight = cute.make_tensor(weight.iterator, cute.make_layout((vocab, hidden, 1), stride=(hidden, 1, 0)))
                x = cute.make_tensor(x.iterator, cute.make_layout((rows, hidden, 1), stride=(x.stride[0], 1, 0)))
                out = cute.make_tensor(out.iterator, cute.make_layout((vocab, rows, 1), stride=(1, out.stride[0], 0)))
                kernel(weight, x, out, out, stream)

        return OnWholeWeight()
