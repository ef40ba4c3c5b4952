"""Reading a head: the weight and bias that its module would multiply by, and whether a kernel may stand for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

# What project() and bind() take: nn.Linear, nn.Embedding, a registered type, a weight, or (weight, bias).
HeadLike: TypeAlias = nn.Module | Tensor | tuple[Tensor, Tensor | None]
Reader: TypeAlias = Callable[[Any], tuple[Tensor, Tensor | None] | None]

_readers: dict[type, Reader] = {}


@dataclass(frozen=True)
class Head:
    """A head as it is at this moment.

    ``weight`` (vocab, hidden), ``bias`` (vocab,) or None. ``own`` computes the logits as the head's module would, where
    that is more than ``F.linear(x, weight, bias)``; then ``reasons`` says what that is.
    """

    weight: Tensor | None
    bias: Tensor | None
    own: Callable[[Tensor], Tensor] | None
    reasons: tuple[str, ...]


# Called after a type was registered: what remembers how it read a head.
FORGETTING: list[Callable[[], None]] = []


def register_head(type_: type, reader: Reader) -> None:
    """Teach the library another head type, such as an engine's vocabulary-parallel head.

    Args:
        type_: the class; its subclasses are covered until they are registered themselves.
        reader: called with a head on every projection. It returns ``(weight, bias)``, the tensors of shape
            (vocab, hidden) and (vocab,) (or None) that the head multiplies by, or None when this head computes in another
            way (quantized, say): then it is called itself.

    Raises:
        ValueError: ``type_`` is no class, or ``reader`` cannot be called.
    """
    if not isinstance(type_, type):
        raise ValueError(f"register_head takes a class, got {type_!r}")
    if not callable(reader):
        raise ValueError(f"the reader of {type_.__name__} must be callable, got {reader!r}")
    _readers[type_] = reader
    for forget in FORGETTING:
        forget()


def reader_of(head: object) -> Reader | None:
    """The reader registered for the type of ``head`` or its nearest base class."""
    if not _readers:
        return None
    return _readers.get(type(head)) or next((_readers[base] for base in type(head).__mro__ if base in _readers), None)


def is_plain(weight: object) -> bool:
    """True for a tensor that is what it looks like: no subclass that holds its data elsewhere."""
    return type(weight) in (Tensor, nn.Parameter)


def read_head(head: HeadLike) -> Head:
    """The ``Head`` of ``head``. ValueError when it is none."""
    if isinstance(head, Tensor):
        return _with_tensor_reasons(head, None, None, [])
    if isinstance(head, tuple):
        if len(head) != 2 or not _are_tensors(*head):
            raise ValueError(f"a head given as a tuple is (weight, bias or None), got {_describe(head)}")
        return _with_tensor_reasons(head[0], head[1], None, [])
    reader = reader_of(head)
    if reader is not None:
        return _read_registered(head, reader)
    if isinstance(head, nn.Embedding):
        # A tied head multiplies by the embedding's weight; hooks and forward belong to the look-up.
        return _with_tensor_reasons(head.weight, None, None, _parametrized(head))
    if isinstance(head, nn.Linear):
        if not isinstance(head.weight, Tensor):
            raise ValueError(f"this {type(head).__name__} has no weight: {head.weight!r}")
        reasons = _own_forward(head)
        return _with_tensor_reasons(head.weight, head.bias, head if reasons else None, reasons)
    if isinstance(head, nn.Module) and _looks_like_head(head):
        weight = getattr(head, "weight", None)
        reason = f"{type(head).__name__} is no type that the library knows; register_head can teach it"
        return Head(weight if isinstance(weight, Tensor) else None, None, head, (reason,))
    raise ValueError(
        f"no head: {_describe(head)}. A head is an nn.Linear, an nn.Embedding, a weight of shape (vocab, hidden), "
        "(weight, bias), or an instance of a type given to register_head"
    )


def _read_registered(head: Any, reader: Reader) -> Head:
    name = type(head).__name__
    read = reader(head)
    if read is None:
        if not callable(head):
            raise ValueError(
                f"the reader of {name} returned None, so the head computes by itself, but {name} cannot be called: give it "
                "a __call__, or let the reader return (weight, bias)"
            )
        return Head(None, None, head, (f"the reader of {name} left this head to itself",))
    if not (isinstance(read, tuple) and len(read) == 2 and _are_tensors(*read)):
        raise ValueError(f"the reader of {name} must return (weight, bias or None) or None, got {_describe(read)}")
    return _with_tensor_reasons(read[0], read[1], None, [])


def _are_tensors(weight: object, bias: object) -> bool:
    return isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))


def _own_forward(module: nn.Module) -> list[str]:
    """Why calling ``module`` is more than what ``nn.Linear`` does."""
    kind, reasons = type(module), _parametrized(module)
    if kind.forward is not LINEAR_FORWARD or kind.__call__ is not nn.Module.__call__:
        reasons.append(f"{kind.__name__} has a forward of its own")
    if "forward" in vars(module):
        reasons.append("its forward was replaced on the instance")
    if any(getattr(module, hooks) for hooks in _HOOKS) or any(GLOBAL_HOOKS):
        reasons.append("it has hooks")
    return reasons


LINEAR_FORWARD = nn.Linear.forward  # as it was when this was imported: a class can be patched too
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)


def _parametrized(module: nn.Module) -> list[str]:
    return ["its weight is parametrized"] if "parametrizations" in module._modules else []


def multiplies(tensor: Tensor) -> bool:
    """Whether ``tensor`` is of a type that a GEMM of PyTorch's multiplies as it is."""
    return tensor.is_floating_point() and tensor.element_size() > 1 and not tensor.is_quantized


def _with_tensor_reasons(
    weight: Tensor, bias: Tensor | None, own: Callable[[Tensor], Tensor] | None, reasons: list[str]
) -> Head:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            reasons.append(f"its {name} is not initialized")
        elif not is_plain(tensor):
            reasons.append(f"its {name} is a {type(tensor).__name__}: quantized, distributed or otherwise wrapped")
        elif tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_nested:
            reasons.append(f"its {name} is quantized, sparse or nested")
        elif tensor.device.type == "meta":
            reasons.append(f"its {name} is on the meta device")
        elif not multiplies(tensor):
            reasons.append(
                f"its {name} is {str(tensor.dtype).removeprefix('torch.')}: no floating-point type with 16 bits or more"
            )
    if not reasons and (weight.dim() != 2 or 0 in weight.shape):
        if own is None:
            raise ValueError(
                f"a head's weight has the shape (vocab, hidden), neither of them 0, got {tuple(weight.shape)}"
            )
        reasons.append(f"its weight has the shape {tuple(weight.shape)}, not (vocab, hidden)")
    if not reasons and bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"a head's bias has the shape (vocab,) = {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    return Head(weight, bias, own, tuple(reasons))


def _looks_like_head(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    sizes = isinstance(weight, Tensor) and sizes_of(weight) is not None
    return sizes or (hasattr(module, "in_features") and hasattr(module, "out_features"))


def sizes_of(weight: Tensor | None) -> tuple[int, int] | None:
    """(vocab, hidden) of a weight; None for one that has no two dimensions, or none yet."""
    if weight is None or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return None
    vocab, hidden = weight.shape
    return vocab, hidden


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple):
        return f"a tuple of {[type(item).__name__ for item in value]}"
    return f"{type(value).__module__}.{type(value).__qualname__}"


def find_heads(model_or_head: Any) -> list[tuple[str, Any]]:
    """The heads of a model, with their names in it; a head itself is called "head".

    Raises:
        ValueError: no head was found.
    """
    if isinstance(model_or_head, (Tensor, tuple, nn.Linear, nn.Embedding)) or reader_of(model_or_head):
        read_head(model_or_head)
        return [("head", model_or_head)]
    found: list[tuple[str, Any]] = []
    if isinstance(model_or_head, nn.Module):
        names = {id(module): name for name, module in model_or_head.named_modules()}
        heads = _output_embeddings(model_or_head)
        found += [(names.get(id(head), "output embeddings"), head) for head in heads]
        seen = {id(head) for head in heads}
        found += [
            (name, module)
            for name, module in model_or_head.named_modules()
            if reader_of(module) and id(module) not in seen
        ]
        if not found and _looks_like_head(model_or_head):
            return [("head", model_or_head)]
    if not found:
        raise ValueError(
            f"{_describe(model_or_head)} has no head that can be found: it has no get_output_embeddings() that returns "
            "one, and no module of a type given to register_head. Pass the head itself, for example model.lm_head"
        )
    return found


def _output_embeddings(model: nn.Module) -> list[Any]:
    get = getattr(model, "get_output_embeddings", None)
    try:
        heads = get() if get else None
    except (NotImplementedError, AttributeError):  # transformers' way to say that a model has none
        return []
    if isinstance(heads, (nn.ModuleList, list, tuple)):  # a model with several, one for each codebook, say
        return list(heads)
    return [] if heads is None else [heads]
