"""From a head and ``x`` to logits: the quick way for a prepared launch, and the thorough way for everything else.

The quick way checks only what a launch cannot see for itself; shapes, strides, dtypes, devices and alignment it leaves
to the launch, which raises ValueError before it writes. Whatever fails goes the thorough way, which says what is wrong,
prepares what is missing, or computes what the head would have computed.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from . import devices, gate
from .backends import default_gemm
from .backends.base import dtype_name
from .head import (
    FORGETTING,
    GLOBAL_HOOKS,
    LINEAR_FORWARD,
    Head,
    HeadLike,
    is_plain,
    multiplies,
    read_head,
    reader_of,
    sizes_of,
)
from .log import warn_once
from .plan import Plan

_functorch_level = gate.functorch_level
_dispatch_modes = gate.dispatch_modes
_autocast = torch._C._is_any_autocast_enabled  # for any device
_grad = torch.is_grad_enabled
_requires_grad = gate.requires_grad
_tracing = gate.tracing
_PLAIN = (Tensor, nn.Parameter)
_current_device = torch.cuda.current_device
_exchange_device, _maybe_exchange_device = torch.cuda._exchange_device, torch.cuda._maybe_exchange_device
_global_hooks, _global_pre_hooks = GLOBAL_HOOKS


_made: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


class Dispatcher:
    """One head's quick way. It keeps neither the head nor its tensors alive: they come with every call."""

    __slots__ = (
        "__weakref__",
        "_bias_bytes",
        "_dtype",
        "_guard",
        "_hidden",
        "_index",
        "_kind",
        "_read",
        "_table",
        "_vocab",
        "_weight",
        "_weight_bytes",
        "batch_invariant",
        "out_dtype",
    )

    def __init__(self, head: HeadLike, out_dtype: torch.dtype | None, batch_invariant: bool = False) -> None:
        check_flag(batch_invariant)
        self.out_dtype = out_dtype
        self.batch_invariant = batch_invariant
        self._read = _quick_reader(head)
        self._kind = type(head)
        self._table: list[Callable[..., Any] | Literal[False] | None] = []
        self._weight: type = type(None)
        self._index = -2  # no device's: nothing is quick yet
        _made.add(self)

    def _remember(self, head: HeadLike, plan: Plan, weight: Tensor) -> None:
        """Let the next call go the quick way. Other threads may be on it: what opens it is set last."""
        index = weight.get_device()
        if (
            self._index == index
            and self._table is plan.table
            and self._weight is type(weight)
            and self._kind is type(head)
            and self._read is not _read_never
        ):
            return
        key = plan.key
        self._index = -2
        if self._read is _read_never or self._kind is not type(head):
            self._read, self._kind = _quick_reader(head), type(head)
        self._vocab, self._hidden, self._dtype = key.vocab, key.hidden, key.dtype
        self._weight, self._weight_bytes = type(weight), weight.nbytes
        self._bias_bytes = key.vocab * weight.itemsize
        # A launch runs on the current device's context.
        self._guard = weight.is_cuda and torch.cuda.device_count() > 1
        self._table = plan.table
        self._index = index

    def forget(self) -> None:
        """Read the head thoroughly at the next call."""
        self._index = -2
        self._read = _read_never

    def run(self, head: HeadLike, x: Tensor, out: Tensor | None) -> Tensor:
        """The logits of ``x``. Each condition is one that a launch cannot see, and costs on every token."""
        if (
            type(x) is Tensor
            and x.get_device() == self._index
            and type(head) is self._kind
            and _functorch_level() is None
            and not _dispatch_modes()
            and not _autocast()
            and _tracing() is None
            and forward_ad._current_level < 0
        ):
            try:
                read = self._read(head)
                if read is not None:
                    weight, bias = read
                    if type(weight) is self._weight and not (_grad() and _requires_grad(x, weight, bias, out)):
                        shape = x.shape
                        table = self._table
                        launch = table[shape[0]] if len(shape) == 2 and shape[0] < len(table) else False
                        if launch:
                            if self._guard and _current_device() != self._index:
                                return self._elsewhere(head, x, out)
                            if bias is not None and type(bias) not in _PLAIN:
                                return self._thorough(head, x, out)
                            if out is None and weight.data_ptr():
                                logits = self._empty(x, shape[0])
                                launch(weight, x, bias, logits)
                                return logits
                            if (
                                out is not None
                                and type(out) is Tensor
                                and out.is_contiguous()
                                and self._beside(x, weight, bias, out)
                            ):
                                launch(weight, x, bias, out)
                                return out
                        elif out is None and len(shape) and shape[-1] == self._hidden:
                            other = self._other(weight, bias, x)
                            if other is not None:
                                return other
            except (ValueError, TypeError, LookupError, AttributeError):
                pass
            except RuntimeError:
                if x.layout is torch.strided:
                    raise
        return self._thorough(head, x, out)

    def _elsewhere(self, head: HeadLike, x: Tensor, out: Tensor | None) -> Tensor:
        """``run`` with the tensors' device as the current one."""
        before = _exchange_device(self._index)
        try:
            return self.run(head, x, out)
        finally:
            _maybe_exchange_device(before)

    def _beside(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> bool:
        """Whether nothing that is read lies where the logits go. False may also mean that it takes a longer look."""
        start = out.data_ptr()
        end = start + out.nbytes
        begin = x.data_ptr()
        if begin < end and not (x.is_contiguous() and begin + x.nbytes <= start):
            return False
        begin = weight.data_ptr()
        if not begin or (begin < end and begin + self._weight_bytes > start):
            return False
        if bias is not None:
            begin = bias.data_ptr()
            return begin >= end or begin + self._bias_bytes <= start
        return True

    def _other(self, weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor | None:
        """Other than two dimensions, or rows for which the default GEMM was chosen; None for what is neither."""
        flat = x if x.dim() == 2 else x.reshape(-1, self._hidden)
        rows = flat.shape[0]
        table = self._table
        launch = table[rows] if rows < len(table) else False
        if launch and not (self._guard and _current_device() != self._index):
            if not weight.data_ptr() or (bias is not None and type(bias) not in _PLAIN):
                return None
            out = self._empty(flat, rows)
            launch(weight, flat, bias, out)
            return out.view(*x.shape[:-1], out.shape[1])
        if launch is False and self.out_dtype is None and not self.batch_invariant and self._alike(x, weight, bias):
            return F.linear(x, weight, bias)
        return None

    def _alike(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether F.linear takes these three, and the plan is of their type."""
        dtype, device = x.dtype, x.device
        return (
            weight.dtype is dtype is self._dtype
            and weight.device == device
            and weight.shape == (self._vocab, self._hidden)
            and (bias is None or (bias.dtype is dtype and bias.device == device and bias.shape == (self._vocab,)))
        )

    def _empty(self, x: Tensor, rows: int) -> Tensor:
        if self.out_dtype is None:
            return x.new_empty((rows, self._vocab))
        return x.new_empty((rows, self._vocab), dtype=self.out_dtype)

    def _thorough(self, head: HeadLike, x: Tensor, out: Tensor | None) -> Tensor:
        read = read_head(head)
        out_dtype = check_arguments(read, x, out, self.out_dtype, self.batch_invariant)
        rows = gate.row_count(x)
        decision, plan = gate.decide(read, x, out_dtype, self.batch_invariant)
        default = _row_by_row if self.batch_invariant else _default
        if plan is None:
            return default(read, x, out, out_dtype, self.out_dtype)
        assert read.weight is not None
        self._remember(head, plan, read.weight)
        asked = min(rows, plan.max_rows) if self.batch_invariant else rows  # more are computed in pieces
        if asked <= plan.max_rows and plan.table[asked] is None:
            if not devices.is_capturing(x.device):
                plan.prepare(asked, read.weight, read.bias)
            elif decision.taken:
                warn_once(
                    f"a {plan.key.vocab}x{plan.key.hidden} head met {rows} rows inside a CUDA graph capture before it was "
                    "prepared; the graph holds the default GEMM. Call warmup(head) before capturing"
                )
        if asked <= plan.max_rows and plan.table[asked]:
            try:
                return _run(plan.table, read, x, out, out_dtype)
            except (ValueError, TypeError) as error:
                if self.batch_invariant:  # other row counts are served in another order
                    raise ValueError(f"a launch refused what the gate let pass: {error}") from error
                warn_once(f"a launch refused what the gate let pass, the default GEMM serves: {error}")
        return default(read, x, out, out_dtype, self.out_dtype)


def _quick_reader(head: HeadLike) -> Callable[[Any], tuple[Tensor, Tensor | None] | None]:
    """A function that returns a head's (weight, bias), or None when it has to be read thoroughly again."""
    if isinstance(head, Tensor):
        return _read_tensor
    if isinstance(head, tuple):
        return _read_tuple
    if reader_of(head) is not None:
        return _read_registered
    if isinstance(head, nn.Embedding):
        return _read_embedding
    if isinstance(head, nn.Linear) and not read_head(head).reasons:
        return _read_linear
    return _read_never


def _read_tensor(head: Tensor) -> tuple[Tensor, None]:
    return head, None


def _read_tuple(head: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return head


def _read_embedding(head: nn.Embedding) -> tuple[Tensor, None]:
    return head._parameters["weight"], None  # type: ignore[return-value]


def _read_linear(head: nn.Linear) -> tuple[Tensor, Tensor | None] | None:
    # Nothing may have been hung on the module or replaced in it since it was read.
    if (
        head._forward_hooks
        or head._forward_pre_hooks
        or _global_hooks
        or _global_pre_hooks
        or "forward" in head.__dict__
        or type(head).forward is not LINEAR_FORWARD
    ):
        return None
    parameters = head._parameters
    return parameters["weight"], parameters["bias"]  # type: ignore[return-value]


def _read_registered(head: Any) -> tuple[Tensor, Tensor | None] | None:
    reader = reader_of(head)  # looked up anew: a type can be registered again
    return None if reader is None else reader(head)


def _read_never(head: Any) -> None:
    return None


def _span(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory that two tensors lie in has bytes in common (the gaps of a strided one counted in)."""
    distance = b.data_ptr() - a.data_ptr()
    return distance < _span(a) and -distance < _span(b) and a.device == b.device and a.numel() > 0 and b.numel() > 0


def _shares_memory_with_itself(out: Tensor) -> bool:
    """Whether two elements of ``out`` may lie at one place: a dimension that steps over less than the smaller ones span."""
    span = 1
    for stride, size in sorted(zip(out.stride(), out.shape)):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False


def _have_addresses(*tensors: Tensor) -> bool:
    return gate.functorch_level() is None and all(
        is_plain(tensor) and tensor.layout is torch.strided and tensor.device.type != "meta" for tensor in tensors
    )


def check_arguments(
    head: Head, x: Tensor, out: Tensor | None, out_dtype: torch.dtype | None, batch_invariant: bool = False
) -> torch.dtype:
    """The dtype of the logits; ValueError for arguments that no path could serve. Nothing is written."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x must be a tensor of shape (..., hidden), got {type(x).__name__}")
    check_invariant(head, batch_invariant)
    if batch_invariant:
        if x.layout is not torch.strided:
            raise ValueError(f"batch_invariant=True takes a dense x, got {x.layout}")
        if gate.functorch_level() is not None or gate.tracing() is not None:
            # Either would make one product of many rows, or of as many as there happen to be now.
            raise ValueError(
                "batch_invariant=True takes no functorch transform (vmap, grad, jvp) and no torch.jit.trace"
            )
    weight = head.weight
    if x.is_nested:
        raise ValueError("x is a nested tensor; give its values as one dense tensor")
    if x.dim() == 0:
        raise ValueError(f"x must have the shape {_input_shape(weight)}, got a tensor without dimensions")
    if not x.is_floating_point():
        raise ValueError(f"x must hold floating-point values, got {dtype_name(x.dtype)}")
    autocast = gate.autocast_is_on(x.device)
    # A head that computes by itself gives what it gives, in x's dtype as a rule.
    own_dtype = x.dtype if head.own is not None or weight is None else weight.dtype
    if autocast:
        own_dtype = torch.get_autocast_dtype(x.device.type)
    if head.own is None:
        assert weight is not None
        if weight.dim() == 2 and x.shape[-1] != weight.shape[1]:
            raise ValueError(
                f"x has the shape {tuple(x.shape)}; the head's weight {tuple(weight.shape)} takes (..., {weight.shape[1]})"
            )
        if x.device != weight.device:
            raise ValueError(f"x is on {x.device}, the head's weight on {weight.device}; they must be on one device")
        if is_plain(weight) and not multiplies(weight):
            raise ValueError(
                f"the head's weight is {dtype_name(weight.dtype)}; one of a floating-point type with 16 bits or more is "
                "multiplied here. Dequantize it, or give the module that computes with it"
            )
        if x.dtype != weight.dtype and not autocast and is_plain(weight):
            raise ValueError(
                f"x is {dtype_name(x.dtype)}, the head's weight {dtype_name(weight.dtype)}; "
                f"convert one, for example x.to({weight.dtype})"
            )
        bias = head.bias
        if bias is not None and (bias.device != weight.device or (bias.dtype != weight.dtype and not autocast)):
            raise ValueError(
                f"the head's bias is {dtype_name(bias.dtype)} on {bias.device}, its weight {dtype_name(weight.dtype)} on "
                f"{weight.device}; they must be alike"
            )
    check_out_dtype(out_dtype, own_dtype)
    dtype = own_dtype if out_dtype is None else out_dtype
    if out is not None:
        _check_out(head, x, out, dtype)
    return dtype


def _input_shape(weight: Tensor | None) -> str:
    sizes = sizes_of(weight)
    return f"(..., {sizes[1]})" if sizes else "(..., hidden)"


def check_flag(batch_invariant: bool) -> None:
    if not isinstance(batch_invariant, bool):
        raise ValueError(f"batch_invariant must be True or False, got {batch_invariant!r}")


def check_invariant(head: Head, batch_invariant: bool) -> None:
    """ValueError where ``head`` cannot have this ``batch_invariant``."""
    check_flag(batch_invariant)
    if batch_invariant and head.own is not None:
        why = "; ".join(head.reasons)
        raise ValueError(
            f"batch_invariant=True takes a head that is its weight and bias; this one computes by itself: {why}"
        )


def check_out_dtype(out_dtype: torch.dtype | None, own_dtype: torch.dtype | None) -> None:
    """ValueError for an ``out_dtype`` that no logits have; ``own_dtype`` None where that depends on x."""
    if own_dtype is None:
        wrong = out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point)
    else:
        wrong = out_dtype not in (None, own_dtype, torch.float32)
    if wrong:
        got = dtype_name(out_dtype) if isinstance(out_dtype, torch.dtype) else repr(out_dtype)
        own = "x's dtype" if own_dtype is None else str(own_dtype)
        *most, last = dict.fromkeys(("None", "torch.float32", own))
        raise ValueError(f"out_dtype must be {', '.join(most)} or {last}, got {got}")


def _check_out(head: Head, x: Tensor, out: Tensor, dtype: torch.dtype) -> None:
    if not isinstance(out, Tensor):
        raise ValueError(f"out must be a tensor, got {type(out).__name__}")
    if out.layout is not torch.strided:
        raise ValueError(f"out must be a dense tensor, got {out.layout}")
    weight = head.weight
    if head.own is None and weight is not None:
        check_like(out, (*x.shape[:-1], weight.shape[0]), dtype)
    if out.device != x.device:
        raise ValueError(f"out is on {out.device}, x on {x.device}; they must be on one device")
    if gate.requires_grad(x, weight, head.bias, out):
        raise ValueError("out= takes no part in autograd: call under torch.no_grad(), or omit out=")
    for name, tensor in (("x", x), ("the head's weight", weight), ("the head's bias", head.bias)):
        if tensor is not None and _have_addresses(tensor, out) and overlap(tensor, out):
            raise ValueError(f"out overlaps {name} in memory (out at {out.data_ptr():#x}); give it memory of its own")
    if _shares_memory_with_itself(out):
        raise ValueError(f"out has elements that share memory: shape {tuple(out.shape)}, strides {out.stride()}")


def check_like(out: Tensor, shape: Sequence[int], dtype: torch.dtype) -> None:
    """ValueError where ``out`` is not of the logits' dtype and shape."""
    if out.dtype != dtype:
        hint = "; float32 logits are asked for with out_dtype=torch.float32" if out.dtype is torch.float32 else ""
        raise ValueError(f"out is {dtype_name(out.dtype)}; the logits are {dtype_name(dtype)}{hint}")
    if out.shape != shape:
        raise ValueError(f"out has the shape {tuple(out.shape)}; the logits have {tuple(shape)}")


def _run(table: list[Any], head: Head, x: Tensor, out: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Call the launch, with copies of what it cannot read or write in place (x is small); more rows than ``table`` has in
    pieces.
    """
    weight = head.weight
    assert weight is not None
    vocab, hidden = weight.shape
    with torch.no_grad():
        flat = x.reshape(-1, hidden)
        rows = flat.shape[0]
        if flat.stride(1) != 1 or flat.stride(0) * flat.element_size() % 16 or flat.data_ptr() % 16:
            flat = flat.clone(memory_format=torch.contiguous_format)
        direct = out is not None and out.dim() == 2 and out.stride(1) == 1
        target = out if direct else flat.new_empty((rows, vocab), dtype=out_dtype)
        assert target is not None
        with torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext():
            most = len(table) - 1
            for start in range(0, rows, most):
                part = flat[start : start + most]
                table[part.shape[0]](weight, part, head.bias, target[start : start + most])
        if out is None:
            return target.view(*x.shape[:-1], vocab)
        return out if direct else out.copy_(target.view(out.shape))


def _row_by_row(head: Head, x: Tensor, out: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Tensor:
    """The default GEMM on one row at a time, so that it cannot choose an algorithm by what else is computed.

    Each row is copied to memory of its own: the algorithm may depend on where an operand begins and how it is strided.
    """
    assert head.weight is not None
    flat = x.reshape(-1, x.shape[-1])
    rows = [flat[row : row + 1].clone(memory_format=torch.contiguous_format) for row in range(flat.shape[0])]
    logits = [_default(head, row, None, dtype, out_dtype) for row in rows]
    shape = (*x.shape[:-1], head.weight.shape[0])
    result = torch.cat(logits).view(shape) if logits else _default(head, x, None, dtype, out_dtype)
    return result if out is None else out.copy_(result)


def _default(head: Head, x: Tensor, out: Tensor | None, dtype: torch.dtype, out_dtype: torch.dtype | None) -> Tensor:
    """What the head computes without this library, in ``out_dtype`` where one was asked for."""
    if head.own is not None:
        result = head.own(x)
        if not isinstance(result, Tensor):
            raise ValueError(f"the head returned a {type(result).__name__} instead of its logits")
        if out_dtype is not None:
            result = result.to(out_dtype)
        if out is not None and (out.shape != result.shape or out.dtype != result.dtype):
            raise ValueError(
                f"out is {dtype_name(out.dtype)} of shape {tuple(out.shape)}; the head's logits are "
                f"{dtype_name(result.dtype)} of shape {tuple(result.shape)}"
            )
    else:
        assert head.weight is not None
        weight, bias = head.weight, head.bias
        plain = is_plain(weight) and x.layout is torch.strided and not gate.autocast_is_on(x.device)
        written = dtype == weight.dtype or default_gemm.mm_writes_float32(x, weight)
        if out is not None and plain and written and x.dim() == 2 and out.is_contiguous() and x.shape[0]:
            return default_gemm.write_logits(x, weight, bias, out)
        if x.dtype == weight.dtype and out_dtype is not None and is_plain(weight):
            with torch.autocast(x.device.type, enabled=False) if not plain else contextlib.nullcontext():
                result = default_gemm.logits(x, weight, bias, out_dtype)
        else:
            result = F.linear(x, weight, bias)
            result = result if out_dtype is None else result.to(out_dtype)
    return result if out is None else out.copy_(result)


_dispatchers: dict[tuple[int, torch.dtype | None, bool], tuple[Callable[[], Any], Dispatcher]] = {}


def _read_again() -> None:
    """Let every head be read thoroughly the next time."""
    for known in list(_made):
        known.forget()


FORGETTING.append(_read_again)


def dispatcher(head: HeadLike, out_dtype: torch.dtype | None, batch_invariant: bool = False) -> Dispatcher:
    """The dispatcher that calls with this head share; it goes when the head goes."""
    if batch_invariant is not True and batch_invariant is not False:  # 1 would be found under True's key
        check_flag(batch_invariant)
    key = (id(head), out_dtype, batch_invariant)
    try:
        known = _dispatchers.get(key)
    except TypeError:  # not hashable, so no dtype
        raise ValueError(f"out_dtype must be None or a torch.dtype, got {out_dtype!r}") from None
    if known is not None and known[0]() is head:
        return known[1]
    if isinstance(head, tuple) and len(head) == 2:
        # A tuple is made anew for every call as likely as not, and cannot be referred to weakly: its weight can.
        return _for_weight(head, out_dtype, batch_invariant)
    read_head(head)
    made = Dispatcher(head, out_dtype, batch_invariant)
    with contextlib.suppress(TypeError):  # a type with __slots__ and no __weakref__ is met anew on every call
        _dispatchers[key] = (weakref.ref(head, lambda _: _dispatchers.pop(key, None)), made)
    return made


def _for_weight(head: tuple[Tensor, Tensor | None], out_dtype: torch.dtype | None, batch_invariant: bool) -> Dispatcher:
    weight = head[0]
    key = (-id(weight), out_dtype, batch_invariant)
    known = _dispatchers.get(key)
    if known is None or known[0]() is not weight:
        read_head(head)
        made = Dispatcher(head, out_dtype, batch_invariant)
        known = _dispatchers[key] = (weakref.ref(weight, lambda _: _dispatchers.pop(key, None)), made)
    return known[1]
