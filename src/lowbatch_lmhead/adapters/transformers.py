"""Models of Hugging Face transformers, 4.57 to 5: their head projects through the library.

    from lowbatch_lmhead.adapters import transformers as adapter

    adapter.patch(model)          # generate(), pipelines and model(...) are served by it from now on
    adapter.unpatch(model)        # exactly as before
    with adapter.patch(model):    # or for a while
        model.generate(...)

A patched head stays the object that it is, with its weight, hooks and attributes. Only its class changes, to one made
from its own with another ``forward``. So the state dict, moves, tied weights and ``isinstance`` see no difference, a
copy has a head of its own, and a model that torch.compile has compiled is compiled anew, because it looks at the class.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from .. import api, backends, devices, dispatch, gate
from ..head import GLOBAL_HOOKS, LINEAR_FORWARD, find_heads, read_head, register_head
from ..log import logger
from ..report import HeadReport
from ..tuning import TunedHead

_is_compiling = torch.compiler.is_compiling
_grad = torch.is_grad_enabled
_requires_grad = gate.requires_grad
_tracing = gate.tracing


class Projecting(nn.Linear):
    """The first base of a patched head's class; the second is the class that the head had."""

    _own: ClassVar[type[nn.Linear]] = nn.Linear  # the class that the head had
    _out_dtype: ClassVar[torch.dtype | None] = None

    def forward(self, input: Tensor) -> Tensor:
        """The logits (..., vocab) of ``input`` (..., hidden): a kernel's where one is taken, else the head's own."""
        if not isinstance(self, Projecting):  # unpatched since, and someone kept the bound method
            return LINEAR_FORWARD(self, input)
        return _traced(self, input) if _is_compiling() else _eager(self, input)

    def __deepcopy__(self, memo: dict[int, Any]) -> Projecting:
        made: Projecting = object.__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__dict__, memo))  # type: ignore[no-untyped-call]
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A pickle holds the head as it was before: reading it must not take this library, or a class made at run time.
        state: Any = super().__reduce_ex__(2)[2]
        state = state | {name: _own_forward(state[name], self) for name in _FORWARDS if name in state}
        return object.__new__, (self._own,), state

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, projected by lowbatch_lmhead"


def _eager(head: Projecting, x: Tensor) -> Tensor:
    out_dtype = head._out_dtype
    try:
        parameters = head._parameters
        weight, bias = parameters["weight"], parameters["bias"]
        # The dispatcher would come to the same, but slower: on a device without kernels, in training, and in
        # torch.jit.trace, which records it twice, once without gradients, and compares.
        if out_dtype is not None or (
            _has_kernels(x.device) and not (_grad() and _requires_grad(x, weight, bias)) and _tracing() is None
        ):
            given: Any = weight if bias is None else (weight, bias)
            return dispatch.dispatcher(given, out_dtype).run(given, x, None)
    except (ValueError, LookupError, AttributeError):
        pass  # a weight that is computed (pruned, parametrized), or an input that is wrong: the head says what it thinks
    return _by_itself(head, x)


def _by_itself(head: Projecting, x: Tensor) -> Tensor:
    logits = head._own.forward(head, x)
    return logits if head._out_dtype is None else logits.to(head._out_dtype)


def _traced(head: Projecting, x: Tensor) -> Tensor:
    """``forward`` as torch.compile traces it. An exported program is to run without this library."""
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if weight is None or torch.compiler.is_exporting() or not _traces_kernels(x.device, head._out_dtype):
        return _by_itself(head, x)
    return api.project((weight, bias), x, out_dtype=head._out_dtype)


def _has_kernels(device: torch.device) -> bool:
    arch = devices.architecture(device)
    for backend in backends._KERNELS:  # noqa: SIM110 (on every token: any() takes twice as long)
        if arch in backend.architectures:
            return True
    return False


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traces_kernels(device: torch.device, out_dtype: torch.dtype | None) -> bool:
    return out_dtype is not None or _has_kernels(device)


_classes: dict[tuple[type[nn.Linear], torch.dtype | None], type[Projecting]] = {}


def _class_for(own: type[nn.Linear], out_dtype: torch.dtype | None) -> type[Projecting]:
    """The class of a patched head that was of class ``own``: always the same, so that torch.compile knows it again."""
    known = _classes.get((own, out_dtype))
    if known is None:
        fields = {"_own": own, "_out_dtype": out_dtype, "__doc__": own.__doc__, "__module__": __name__}
        known = _classes.setdefault((own, out_dtype), type(own.__name__, (Projecting, own), fields))
    return known


class _Beneath:
    """Stands for the bound ``forward`` (``own``) that a hook of accelerate's calls: it moves inputs, this projects."""

    __slots__ = ("own",)

    def __init__(self, own: Any) -> None:
        self.own = own

    def __call__(self, input: Tensor) -> Tensor:
        return Projecting.forward(self.own.__self__, input)


# Where accelerate keeps a module's forward: under its hook, and in the place of the class's once the hook is removed.
_FORWARDS = ("_old_forward", "forward")


def _is_bound_forward(value: Any, head: nn.Module) -> bool:
    return isinstance(value, types.MethodType) and value.__self__ is head and value.__func__ is LINEAR_FORWARD


def _own_forward(value: Any, head: nn.Linear) -> Any:
    """What ``value``, which accelerate keeps as a forward of ``head``, is without the patch."""
    if isinstance(value, _Beneath):
        return value.own
    if isinstance(value, types.MethodType) and value.__func__ is Projecting.forward:  # hooked since
        return types.MethodType(LINEAR_FORWARD, head)
    return value


def _read(head: Projecting) -> tuple[Tensor, Tensor | None] | None:
    """What ``project(model.lm_head, x)`` and the like read of a patched head; None for one that has to be called."""
    hooked = head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks
    weight = head._parameters.get("weight")
    if weight is None or hooked or any(GLOBAL_HOOKS) or "forward" in vars(head):
        return None
    return weight, head._parameters.get("bias")


# --- which heads ---


@dataclass(frozen=True)
class PatchedHead:
    """One head of a model: ``patched``, or left as it is for ``reasons``; and what preparing it gave."""

    name: str
    module: Any
    patched: bool
    reasons: tuple[str, ...] = ()
    prepared: TunedHead | HeadReport | None = None

    def lines(self) -> Iterator[str]:
        yield f"{self.name}: {'patched' if self.patched else 'left as it is'}"
        yield from (f"  because {reason}" for reason in self.reasons)
        if self.prepared:
            yield from (f"  {line}" for line in self.prepared.lines())


def _heads(model: Any) -> list[tuple[str, Any]]:
    """The heads of ``model`` with their names in it."""
    try:
        return find_heads(model)
    except ValueError as error:
        head = getattr(model, "lm_head", None)
        if isinstance(head, nn.Module):
            return [("lm_head", head)]
        try:
            version = f"transformers {importlib.metadata.version('transformers')}"
        except importlib.metadata.PackageNotFoundError:
            version = "no transformers"
        raise ValueError(
            "patch takes a model with get_output_embeddings(), as transformers 4.57 to 5 have it, or with lm_head; "
            f"found {version}, and {error}"
        ) from None


# What a class may not have of its own: a patched head would not do it, or could not be told from its class.
_METHODS = ("__call__", "__getattr__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__setstate__")


def _why_not(head: Any, out_dtype: torch.dtype | None) -> list[str]:
    """Why ``head`` is to be left as it is. What passes (no memory yet, gradients) is no reason.

    Raises:
        ValueError: ``out_dtype`` is not one that this head's logits can have.
    """
    kind = type(head)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if not isinstance(head, nn.Linear):
        if hasattr(head, "base_layer") or hasattr(head, "original_module"):
            return [f"it is a {name}, which adds to the logits of the head beneath it, or replaces them"]
        return [f"it is a {name}, not an nn.Linear"]
    weight, bias = head._parameters.get("weight"), head._parameters.get("bias")
    if weight is None:
        return ["its weight is computed from other parameters: parametrized or pruned"]
    if kind.forward is not LINEAR_FORWARD:
        return [f"{name} has a forward of its own"]
    changed = [method for method in _METHODS if getattr(kind, method, None) is not getattr(nn.Linear, method, None)]
    if changed:
        return [f"{name} has a {changed[0]} of its own"]
    forwards = [vars(head)[name] for name in _FORWARDS if name in vars(head)]
    if forwards and not any(_is_bound_forward(forward, head) for forward in forwards):
        return ["its forward was replaced on the instance"]
    dispatch.check_out_dtype(out_dtype, weight.dtype)
    if weight.device.type == "meta":  # offloaded, or not loaded yet
        return []
    return list(read_head((weight, bias)).reasons)


# --- to and fro ---


class Patch:
    """What ``patch`` did. It prints well, and as a context manager it undoes that at the end."""

    def __init__(self, heads: tuple[PatchedHead, ...], undo: list[Callable[[], None]]) -> None:
        self.heads = heads
        self._undo = undo

    def undo(self) -> None:
        """Put back what this ``patch`` changed, and nothing that was patched before it. Again is harmless.

        Raises:
            ValueError: as for ``unpatch``.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def __str__(self) -> str:
        return "\n".join(line for head in self.heads for line in head.lines())

    def __repr__(self) -> str:
        return f"Patch({', '.join(f'{head.name}: {head.patched}' for head in self.heads)})"


def patch(
    model: Any,
    *,
    prepare: Literal["autotune", "warmup"] | None = "autotune",
    max_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> Patch:
    """Let the head of ``model`` project through this library, and prepare it.

    Where no kernel is taken (many rows, gradients, another device) the head's own forward computes, as before. A head
    that computes in its own way (quantized, LoRA) is left as it is, with the reason in what is returned and in the log.

    Args:
        model: a model with ``get_output_embeddings()`` or ``lm_head``, or a head. Patch it on the device on which it is
            to serve: what is prepared is prepared for that device.
        prepare: "autotune" measures what serves each row count fastest and keeps it for the next process; "warmup"
            compiles the default kernels; None leaves that to the first call. Neither does anything on a device that
            has no kernel.
        max_rows: how many rows to prepare, as for ``autotune`` and ``warmup``: batch size times beams, and for assisted
            decoding times the tokens that are checked at once.
        out_dtype: torch.float32 for float32 logits that were never rounded, in training too; None for the head's dtype.

    Returns:
        Which heads were patched, what serves them, and why not. Use it with ``with`` to unpatch at the end. Heads that
        were patched already, in the same way, stay so.

    Raises:
        ValueError: no head was found, an argument is wrong, or a CUDA graph is being captured. Nothing was changed.
    """
    if prepare not in ("autotune", "warmup", None):
        raise ValueError(f'prepare must be "autotune", "warmup" or None, got {prepare!r}')
    found = [(name, head, _why_not_again(head, out_dtype)) for name, head in _heads(model)]
    register_head(Projecting, _read)
    done: list[PatchedHead] = []
    changes = Patch((), [])
    try:
        for name, head, reasons in found:
            if not reasons:
                changes._undo += _swap(head, _class_for(_own_class(head), out_dtype))
                done.append(PatchedHead(name, head, True, (), _prepared(name, head, prepare, max_rows, out_dtype)))
            else:
                logger.warning("%s is left as it is: %s", name, "; ".join(reasons))
                done.append(PatchedHead(name, head, False, tuple(reasons)))
    except BaseException:
        changes.undo()
        raise
    changes.heads = tuple(done)
    return changes


def unpatch(model: Any) -> None:
    """Put the heads of ``model`` back as they were before ``patch``, wherever in it they are now.

    A model that is not patched is left as it is.

    Args:
        model: the model, one that holds it, or a head.

    Raises:
        ValueError: the class of a head was derived from since (torch.nn.utils.parametrize, fully_shard), and would be lost.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    for head in [module for module in modules if isinstance(module, Projecting)]:
        _restore(head, head._own)


def _own_class(head: Any) -> type[nn.Linear]:
    own: type[nn.Linear] = head._own if isinstance(head, Projecting) else type(head)
    return own


def _why_not_again(head: Any, out_dtype: torch.dtype | None) -> list[str]:
    if not isinstance(head, Projecting):
        return _why_not(head, out_dtype)
    _check_class(head)
    weight = head._parameters.get("weight")
    if weight is not None:
        dispatch.check_out_dtype(out_dtype, weight.dtype)
    return []


def _check_class(head: Projecting) -> None:
    if type(head) is not _class_for(head._own, head._out_dtype):
        raise ValueError(
            f"a patched head is a {type(head).__name__} now, derived from the class that patch gave it; undo that first "
            "(torch.nn.utils.parametrize.remove_parametrizations, for one), or patch after it"
        )


def _set_class(head: Any, kind: type[nn.Linear]) -> None:
    head.__class__ = kind


def _swap(head: nn.Linear, kind: type[nn.Linear]) -> list[Callable[[], None]]:
    """Give ``head`` the class ``kind``; how to undo that, if it changed anything."""
    before = type(head)
    if before is kind:
        return []
    _set_class(head, kind)
    for name in _FORWARDS:
        value = vars(head).get(name)
        if _is_bound_forward(value, head):
            vars(head)[name] = _Beneath(value)
    return [lambda: _restore(head, before)]


def _restore(head: nn.Linear, kind: type[nn.Linear]) -> None:
    """Give ``head`` the class ``kind`` that it had before; harmless for one that is not patched any more."""
    if not isinstance(head, Projecting):
        return
    _check_class(head)
    _set_class(head, kind)
    if issubclass(kind, Projecting):
        return
    vars(head).update({name: _own_forward(vars(head)[name], head) for name in _FORWARDS if name in vars(head)})


def _prepared(
    name: str, head: nn.Linear, prepare: str | None, max_rows: int | None, out_dtype: torch.dtype | None
) -> TunedHead | HeadReport | None:
    given = (head.weight, head.bias)  # not the head: one with hooks cannot be prepared as a whole
    if prepare == "autotune":
        rows = gate.MEASURED_ROWS if max_rows is None else max_rows
        return dataclasses.replace(api.autotune(given, max_rows=rows, out_dtype=out_dtype).heads[0], name=name)
    if prepare == "warmup":
        return dataclasses.replace(api.warmup(given, max_rows=max_rows, out_dtype=out_dtype).heads[0], name=name)
    return None
