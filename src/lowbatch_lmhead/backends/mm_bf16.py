"""FlashInfer's public ``mm_bf16(backend="cute-dsl")``: the way back on SM100 and SM103.

It runs the kernels of the other backends through FlashInfer's own launcher, which costs 60 to 200 us of host time a
call (FlashInfer 0.7.4), so it serves only where they could not be launched directly.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

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

    def autotune_tactics(self, problem: Problem) -> list[str]:
        return self.tactics(problem)

    def handicap(self, tactic: str) -> float:
        return 0.0

    def smem_bytes(self, tactic: str) -> None:
        return None

    def tune(self, problem: Problem, weight: Tensor, bias: Tensor | None) -> str | None:
        """Let FlashInfer's tuner choose for ``problem.rows`` rows of ``weight``; why it could not, or None."""
        if not _nvcc():
            # It would skip every tactic, and say so at level INFO only.
            return "FlashInfer's own tuner needs nvcc, which is not here: it runs with a tactic that was not measured"
        from flashinfer import autotune, mm_bf16

        generator = torch.Generator("cpu").manual_seed(1)
        x = torch.randn(problem.rows, problem.hidden, generator=generator, dtype=torch.float32, device="cpu")
        x = x.to(weight.device, weight.dtype)
        out = torch.empty(problem.rows, problem.vocab, dtype=problem.out_dtype, device=weight.device)
        with autotune(True):
            mm_bf16(x, weight.t(), bias=bias, out=out, backend="cute-dsl")
        return None

    def compile(self, problem: Problem, tactic: str) -> Launch:
        from flashinfer import mm_bf16

        def call(weight: Tensor, x: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
            dense = out if out.is_contiguous() else torch.empty_like(out, memory_format=torch.contiguous_format)
            mm_bf16(x.contiguous(), weight.t(), bias=bias, out=dense, backend="cute-dsl")
            return dense if dense is out else out.copy_(dense)

        return Launch(call, self.name, tactic)


def _nvcc() -> bool:
    """Whether FlashInfer would find nvcc: under CUDA_HOME or CUDA_PATH, on the PATH, or where CUDA is installed."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home:
        return Path(home, "bin", "nvcc").is_file()
    return shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").is_file()
