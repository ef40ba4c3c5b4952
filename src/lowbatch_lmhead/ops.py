"""The torch.library operators that ``torch.compile`` sees: opaque calls with known shapes.

``lowbatch_lmhead::project`` returns logits; ``lowbatch_lmhead::project_out`` writes them into a given tensor. Their
implementation is the eager one, so a compiled model is served by the same plan, and a CUDA graph captures the launch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import dispatch, gate
from .head import Head


@torch.library.custom_op("lowbatch_lmhead::project", mutates_args=())
def project_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, batch_invariant: bool = False
) -> Tensor:
    head = weight if bias is None else (weight, bias)
    return dispatch.dispatcher(head, out_dtype, batch_invariant).run(head, x, None)


@project_op.register_fake
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None, batch_invariant: bool = False
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype or weight.dtype)


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, weight, *_ = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    """The gradients of ``x @ weight.T + bias``, so that the operator is differentiable by itself."""
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
    flat, grad_flat = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]).to(weight.dtype)
    return (
        (grad_flat @ weight).view(x.shape) if of_x else None,
        grad_flat.t() @ flat if of_weight else None,
        grad_flat.sum(0) if of_bias else None,
        None,
        None,
    )


project_op.register_autograd(_backward, setup_context=_save)


@torch.library.custom_op("lowbatch_lmhead::project_out", mutates_args=("out",))
def project_out_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    out_dtype: torch.dtype | None,
    batch_invariant: bool = False,
) -> None:
    head = weight if bias is None else (weight, bias)
    dispatch.dispatcher(head, out_dtype, batch_invariant).run(head, x, out)


@project_out_op.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    out_dtype: torch.dtype | None,
    batch_invariant: bool = False,
) -> None:
    return None


def traced(
    head: Head, x: Tensor, out: Tensor | None, out_dtype: torch.dtype | None, batch_invariant: bool = False
) -> Tensor:
    """``project`` as ``torch.compile`` traces it: the head is read while tracing, the input when the graph runs."""
    dtype = dispatch.check_arguments(head, x, None, out_dtype, batch_invariant)
    bias = head.bias
    weight = x if head.weight is None else head.weight  # x only where the head computes by itself
    if head.own is None and out is not None:
        dispatch.check_like(out, (*x.shape[:-1], weight.shape[0]), dtype)
    if out is not None and gate.requires_grad(x, head.weight, bias, out):
        raise ValueError("out= takes no part in autograd: call under torch.no_grad(), or omit out=")
    # A functorch transform, like autograd, has to see the product itself: the operators have no rule for it.
    seen_through = gate.requires_grad(x, weight, bias) or gate.functorch_level() is not None
    if head.own is None and not seen_through and not gate.autocast_is_on(x.device):
        if out is None:
            logits: Tensor = project_op(x, weight, bias, out_dtype, batch_invariant)
            return logits
        project_out_op(x, weight, bias, out, out_dtype, batch_invariant)
        return out
    if batch_invariant:
        raise ValueError(
            "batch_invariant=True inside torch.compile takes no gradients, functorch transforms or autocast: "
            "call under torch.inference_mode()"
        )
    if head.own is not None:
        result = head.own(x)
    elif out_dtype is not None and out_dtype == torch.float32 and x.dtype == weight.dtype:
        with torch.autocast(x.device.type, enabled=False):
            result = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    else:
        result = F.linear(x, weight, bias)
    result = result if out_dtype is None else result.to(out_dtype)
    if out is None:
        return result
    dispatch.check_like(out, result.shape, result.dtype)
    return out.copy_(result)
