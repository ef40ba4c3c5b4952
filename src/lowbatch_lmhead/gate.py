"""The gate: whether a head and an input are taken, and if not, every reason why.

It is read on the first call and wherever the quick checks of ``dispatch`` do not hold; ``applies`` and ``explain``
share it. A reason names what a person could change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import backends, devices
from .backends.base import dtype_name
from .head import Head, is_plain
from .plan import Plan, plan_for

MEASURED_ROWS = 32  # what autotune measures unless it is told otherwise
MOST_MEASURED_ROWS = 128  # and at most: beyond, the product is bound by arithmetic, not by reading the weight

# Said where batch_invariant=True is left to the default GEMM.
ROW_BY_ROW = "with batch_invariant=True it computes one row at a time, and reads the weight once for each"

functorch_level = torch._C._functorch.maybe_current_level
dispatch_modes = torch._C._len_torch_dispatch_stack
tracing = torch._C._get_tracing_state


@dataclass(frozen=True)
class Decision:
    """What serves one projection, and why. True when a low-batch kernel does.

    ``backend`` is "default GEMM" when none does; ``tactic`` the compiled variant; ``reasons`` why it is not a kernel, or
    why the kernels before it were passed over; ``prepared`` whether it is compiled and checked already.
    """

    taken: bool
    backend: str
    tactic: str | None
    reasons: tuple[str, ...]
    rows: int
    prepared: bool = False

    def __bool__(self) -> bool:
        return self.taken

    @property
    def name(self) -> str:
        """The backend, and its tactic in brackets."""
        return f"{self.backend} ({self.tactic})" if self.tactic else self.backend

    def __str__(self) -> str:
        name = self.name
        if self.taken and not self.prepared:
            name += ", not compiled yet"
        lines = [f"{self.rows} row{'' if self.rows == 1 else 's'}: {name}"]
        lines += [f"  {'not ' if self.taken else 'because '}{reason}" for reason in self.reasons]
        return "\n".join(lines)


def refused(reasons: Iterable[str], rows: int) -> Decision:
    return Decision(False, backends.DEFAULT_GEMM, None, tuple(reasons), rows)


def row_count(x: Tensor) -> int:
    """The rows of ``x`` (..., hidden)."""
    return x.shape[:-1].numel()


def reasons_against(head: Head, x: Tensor) -> list[str]:
    """Every reason why no backend may be asked: what the head is, what ``x`` is, and what is going on around them."""
    reasons = list(head.reasons)
    if not is_plain(x):
        reasons.append(f"x is a {type(x).__name__}")
    if x.layout is not torch.strided:
        reasons.append(f"x is not a dense tensor: {x.layout}")
    if functorch_level() is not None:
        reasons.append("a functorch transform (vmap, grad, jvp) is active")
    if tracing() is not None:
        reasons.append("torch.jit.trace is recording")
    if forward_ad._current_level >= 0:
        reasons.append("forward-mode differentiation is active")
    if dispatch_modes():
        reasons.append("a TorchDispatchMode is active")
    reasons += _device_reasons(x.device)
    weight, bias = head.weight, head.bias
    if weight is not None and not reasons:
        reasons += _tensor_reasons(weight, bias, x)
    if row_count(x) == 0:
        reasons.append("there are 0 rows")
    if requires_grad(x, weight, bias):
        reasons.append("gradients are needed: call under torch.no_grad() or torch.inference_mode()")
    return reasons


def autocast_is_on(device: torch.device) -> bool:
    """Whether autocast is on for ``device``; PyTorch refuses the question for devices that have none."""
    return device.type in ("cuda", "cpu") and torch.is_autocast_enabled(device.type)


def requires_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd wants to see what is done with any of ``tensors``."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _device_reasons(device: torch.device) -> list[str]:
    arch = devices.architecture(device)
    if any(arch in backend.architectures for backend in backends.kernels()):
        return []
    if device.type != "cuda":
        return [f"the head is on {device}, not on a CUDA GPU"]
    capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
    known = ", ".join(sorted(devices.ARCHITECTURES))
    return [f"{torch.cuda.get_device_name(device)} (compute capability {capability}) is none of {known}"]


def _tensor_reasons(weight: Tensor, bias: Tensor | None, x: Tensor) -> list[str]:
    reasons = []
    if bias is not None and bias.device != weight.device:
        reasons.append(f"the bias is on {bias.device}, the weight on {weight.device}")
    if autocast_is_on(x.device):
        reasons.append("autocast is on")
    if x.dtype != weight.dtype or (bias is not None and bias.dtype != weight.dtype):
        of_bias = f", the bias {dtype_name(bias.dtype)}" if bias is not None else ""
        reasons.append(f"x is {dtype_name(x.dtype)}, the weight {dtype_name(weight.dtype)}{of_bias}")
    if not weight.is_contiguous():
        reasons.append(f"the weight is not contiguous: strides {weight.stride()} for shape {tuple(weight.shape)}")
    elif not weight.data_ptr():
        reasons.append("the weight has no memory (its storage was freed)")
    elif weight.data_ptr() % 16:
        reasons.append("the weight does not start at a multiple of 16 bytes")
    if x.is_neg():
        reasons.append("x is a lazily negated view")
    if bias is not None and not bias.is_contiguous():
        reasons.append(f"the bias is not contiguous: stride {bias.stride()}")
    return reasons


def decide(
    head: Head, x: Tensor, out_dtype: torch.dtype, batch_invariant: bool = False
) -> tuple[Decision, Plan | None]:
    """What serves this input, without preparing anything; and the plan, when no reason stands against asking it."""
    rows = row_count(x)
    reasons = reasons_against(head, x)
    if reasons:
        decision, plan = refused(reasons, rows), None
    else:
        assert head.weight is not None
        plan = plan_for(head.weight, head.bias, out_dtype, batch_invariant)
        decision = decide_rows(plan, rows)
    if batch_invariant and not decision.taken:
        decision = dataclasses.replace(decision, reasons=(*decision.reasons, ROW_BY_ROW))
    return decision, plan


def decide_rows(plan: Plan, rows: int) -> Decision:
    """What ``plan`` has, or would prepare, for ``rows``."""
    if rows > plan.max_rows and plan.key.batch_invariant:
        return dataclasses.replace(decide_rows(plan, plan.max_rows), rows=rows)  # in pieces
    if rows > plan.max_rows:
        reason = f"kernels serve up to {plan.max_rows} rows on {plan.arch}"
        if plan.tuned is None and rows <= MOST_MEASURED_ROWS and backends.tunable(plan.problem(rows))[0]:
            how = "autotune" if rows <= MEASURED_ROWS else f"autotune with max_rows={rows}"
            reason += f", and more where {how} finds them quicker"
        return refused([reason], rows)
    entry = plan.entries[rows]
    if entry is None:
        backend, tactic, reasons = plan.first_choice(rows)
        if backend is None:
            return refused(reasons, rows)
        return Decision(True, backend, tactic, reasons, rows)
    if entry.launch is None:
        return Decision(False, backends.DEFAULT_GEMM, None, entry.reasons, rows, prepared=True)
    return Decision(True, entry.launch.backend, entry.launch.tactic, entry.reasons, rows, prepared=True)
