"""FlashInfer's public ``mm_bf16(backend="cute-dsl")``: the way back on SM100 and SM103.

It runs the kernels of the other backends through FlashInfer's own launcher, which costs 60 to 200 us of host time a
call (FlashInfer 0.7.4), so it serves only where they could not be launched directly.
"""

from __future__ import annotations

import torch

from . import flashinfer
from .base import Launch, Problem, dtype_name

MAX_ROWS = 32


class MmBf16:
    name = "flashinfer mm_bf16"
    architectures = frozenset({"sm_100a", "sm_103a"})

    def supports(self, problem: Problem) -> str | None:
        if problem.dtype is not torch.bfloat16 or problem.out_dtype is not torch.bfloat16:
            return f"{dtype_name(problem.dtype)} to {dtype_name(problem.out_dtype)}; it takes and writes bfloat16"
        if problem.rows > MAX_ROWS:
            return f"it takes up to {MAX_ROWS} rows"
        if problem.hidden % 128 or problem.vocab % 16:
            return f"{problem.vocab}x{problem.hidden}; it takes vocab % 16 == 0 and hidden % 128 == 0"
        if problem.vocab * problem.hidden >= 2**31:
            return f"vocab * hidden is {problem.vocab * problem.hidden}; its 32-bit offsets end at 2**31"
        return flashinfer.unusable()

    def tactics(self, problem: Problem) -> list[str]:
        return ["its own choice"]

    def smem_bytes(self, tactic: str) -> None:
        return None

    def compile(self, problem: Problem, tactic: str) -> Launch:
        from flashinfer import mm_bf16

        def call(weight: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
            dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
            mm_bf16(x.contiguous(), weight.t(), bias=bias, out=dense, backend="cute-dsl")
            return dense if dense is out else out.copy_(dense)

        return Launch(call, self.name, tactic)
