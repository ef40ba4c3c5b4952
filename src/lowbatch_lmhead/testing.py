"""For tests of this library and of what is built on it: a backend that computes on the CPU what a kernel computes.

with lowbatch_lmhead.testing.reference_backend():
    assert lowbatch_lmhead.applies(head, x)      # x on the CPU
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import backends, devices, dispatch, plan
from .backends.base import Backend, Launch, Problem


class Reference:
    """Split-K in float32 on the CPU: the same call, the same refusals."""

    name = "reference"
    architectures = frozenset({devices.CPU})
    splits = 4

    def supports(self, problem: Problem) -> str | None:
        if not problem.dtype.is_floating_point:
            return f"x is {problem.dtype}"
        return None

    def tactics(self, problem: Problem) -> list[str]:
        return [f"{self.splits} splits"]

    def autotune_tactics(self, problem: Problem) -> list[str]:
        return self.tactics(problem)

    def handicap(self, tactic: Any) -> float:
        return 0.0

    def smem_bytes(self, tactic: Any) -> None:
        return None

    def compile(self, problem: Problem, tactic: Any) -> Launch:
        weight_shape = (problem.vocab, problem.hidden)

        def call(weight: Tensor, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
            if weight.shape != weight_shape or weight.dtype != problem.dtype or not weight.is_contiguous():
                raise ValueError(f"mismatched weight: {tuple(weight.shape)} {weight.dtype}, expected {weight_shape}")
            if x.dim() != 2 or x.shape[1] != problem.hidden or x.dtype != problem.dtype or x.stride(1) != 1:
                raise ValueError(f"mismatched x: {tuple(x.shape)} {x.dtype}")
            if x.stride(0) * x.element_size() % 16 or x.data_ptr() % 16:
                raise ValueError("x is not aligned to 16 bytes")
            if out.shape != (x.shape[0], problem.vocab) or out.dtype != problem.out_dtype or out.stride(1) != 1:
                raise ValueError(f"mismatched out: {tuple(out.shape)} {out.dtype}")
            if (bias is not None) != problem.has_bias or len({t.device for t in (weight, x, out)}) > 1:
                raise ValueError("mismatched bias or devices")
            if bias is not None and (bias.shape != (problem.vocab,) or bias.dtype != problem.dtype):
                raise ValueError(f"mismatched bias: {tuple(bias.shape)} {bias.dtype}")
            total = torch.zeros(x.shape[0], problem.vocab, dtype=torch.float32, device=x.device)
            for x_part, weight_part in zip(x.chunk(self.splits, 1), weight.chunk(self.splits, 1)):
                total += x_part.float() @ weight_part.float().t()
            if bias is not None:
                total += bias.float()
            out.copy_(total)

        return Launch(call, self.name, str(tactic))


@contextlib.contextmanager
def reference_backend(backend: Backend | None = None) -> Iterator[Backend]:
    """Serve CPU heads by ``backend`` (``Reference`` unless given) within the ``with`` block."""
    backend = backend or Reference()
    backends._KERNELS.append(backend)
    forget()
    try:
        yield backend
    finally:
        backends._KERNELS.remove(backend)
        forget()


def forget() -> None:
    """Forget every plan and every head met: what is prepared after this is prepared anew."""
    plan.clear()
    dispatch._dispatchers.clear()
    dispatch._read_again()  # bound projections hold a plan's table
