"""The default GEMM: what PyTorch computes. It takes everything, and every other launch is checked against it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def logits(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """``x @ weight.T + bias`` for ``x`` (..., hidden), as (..., vocab) in ``out_dtype``.

    ``out_dtype`` is the weight's dtype, or float32: then nothing is rounded to the weight's dtype on the way. cuBLAS
    returns its float32 accumulators; elsewhere, and where gradients are needed, the operands are cast up.
    """
    if out_dtype == weight.dtype:
        return F.linear(x, weight, bias)
    if out_dtype is not torch.float32:
        return F.linear(x, weight, bias).to(out_dtype)
    if not mm_writes_float32(x, weight) or (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    out = torch.mm(x.reshape(-1, x.shape[-1]), weight.t(), out_dtype=torch.float32)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], weight.shape[0])


def write_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    """``logits`` of ``x`` (rows, hidden) into ``out`` (rows, vocab), contiguous; on a GPU without memory of its own."""
    if out.dtype == weight.dtype:
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)
    if mm_writes_float32(x, weight):
        torch.mm(x, weight.t(), out_dtype=torch.float32, out=out)
        return out if bias is None else out.add_(bias)
    return out.copy_(logits(x, weight, bias, out.dtype))


def mm_writes_float32(x: Tensor, weight: Tensor) -> bool:
    """Whether ``torch.mm(..., out_dtype=torch.float32)`` exists for these operands (CUDA only)."""
    return x.is_cuda and x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16) and x.numel() > 0
