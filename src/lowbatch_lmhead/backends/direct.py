"""FlashInfer's direct kernel: each CTA computes one or more logits from the whole hidden dimension in registers.

It takes every vocabulary, and reads the weight again for each group of rows. On an H200 it equals the warp split-K
kernel at one row. It serves one to three rows where ``autotune`` chose it, or where the kernels before it failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .. import devices
from . import flashinfer
from .base import Problem, dtype_name
from .compiling import CompiledBackend

MAX_ROWS = 3  # FlashInfer's own bound for trying it on any vocabulary
VECTOR = 8  # bfloat16 values of one 16-byte load
BLOCKS = (256, 192, 128, 96, 64, 32)
MAX_VECTORS = 128  # prefetched per thread, FlashInfer's bound


@dataclass(frozen=True)
class Tactic:
    """The fields of FlashInfer's DirectTactic."""

    block_size: int
    outputs_per_block: int
    rows_per_block: int

    def __str__(self) -> str:
        return f"{self.block_size} threads, {self.outputs_per_block} outputs, {self.rows_per_block} rows"


def _block(hidden: int) -> int | None:
    """The largest block that divides ``hidden`` into two vectors a thread or more (one where that is all there is)."""
    fits = [block for block in BLOCKS if hidden % (block * VECTOR) == 0]
    return next((block for block in fits if hidden // (block * VECTOR) >= 2), fits[-1] if fits else None)


class Direct(CompiledBackend):
    name = "flashinfer direct"
    architectures = frozenset(devices.ARCHITECTURES)
    options = "--ptxas-options -maxrregcount=64"

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype is not torch.bfloat16 or problem.out_dtype is not torch.bfloat16:
            return f"{dtype_name(problem.dtype)} to {dtype_name(problem.out_dtype)}; it takes and writes bfloat16"
        if problem.has_bias:
            return "the head has a bias; it adds none"
        if problem.rows > MAX_ROWS:
            return f"it takes up to {MAX_ROWS} rows, and would reread the weight for more"
        block = _block(problem.hidden)
        if block is None:
            return f"hidden {problem.hidden} is not a multiple of 256"
        if problem.hidden // (block * VECTOR) > MAX_VECTORS:
            return f"hidden {problem.hidden} is more than a block of {block} threads can hold"
        if problem.vocab * problem.hidden >= 2**31:
            return f"vocab * hidden is {problem.vocab * problem.hidden}; its 32-bit offsets end at 2**31"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[Tactic]:
        block = _block(problem.hidden)
        assert block is not None
        outputs = 2 if problem.vocab % 2 == 0 and problem.vocab * problem.hidden >= 2**21 else 1
        return [Tactic(block, outputs, problem.rows)]

    def autotune_tactics(self, problem: Problem) -> list[Tactic]:
        # Each row count is a compile of its own; beyond one row it only lost to warp split-K, where that can serve.
        return self.tactics(problem) if problem.rows == 1 or problem.vocab < 16 else []

    def smem_bytes(self, tactic: Tactic) -> int:
        return tactic.rows_per_block * tactic.outputs_per_block * tactic.block_size // 32 * 4

    def kernel(self, problem: Problem, tactic: Tactic) -> Any:
        import cutlass
        from cutlass import cute

        module = flashinfer.kernel_module("dense_bf16_gemm_direct")
        kernel = module.DirectDenseGemmKernel(
            element_type=cutlass.BFloat16,
            k_extent=problem.hidden,
            tactic=module.DirectTactic(tactic.block_size, tactic.outputs_per_block, tactic.rows_per_block),
            use_pdl=False,
        )

        class OnWholeWeight:
            @cute.jit
            def __call__(self, weight, x, bias, out, stream):  # type: ignore[no-untyped-def]
                kernel(x, weight, out, stream)

        return OnWholeWeight()
