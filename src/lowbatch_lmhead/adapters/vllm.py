"""vLLM projects through this library as soon as both are installed: the entry point ``vllm.general_plugins`` calls
``register``, which puts a subclass of vLLM's LogitsProcessor in the place of the original.

**Turned off** by ``LOWBATCH_LMHEAD_DISABLE=1``, or by a ``VLLM_PLUGINS`` that does not name ``lowbatch_lmhead``.

**Heads**: ParallelLMHead and tied VocabParallelEmbedding whose weight is not quantized, with any shard of the vocabulary,
padding, bias, soft cap and scale. ``head_dtype=float32`` gets the unrounded float32 accumulators. Quantized heads, heads
wrapped for LoRA, ``VLLM_BATCH_INVARIANT=1``, what torch.compile traces, and each row count for which no kernel was chosen
are computed by vLLM's own code. Under LoRA the product of the base model's head is projected here; what an adapter adds to
it is vLLM's. Models with a LogitsProcessor class of their own keep it.

**Preparation**: a head is prepared when it first projects outside of a CUDA graph capture, which is in vLLM's profiling
run, or in its warm-up for a drafter's head; that call still returns vLLM's own logits. ``autotune`` prepares it, on all
ranks of the tensor-parallel group alike; ``warmup`` does where vLLM's own switch for kernel autotuning is off
(``--no-enable-flashinfer-autotune``, ``-O0``). Nothing is compiled or tuned while requests are served: a head that is
first met then, or whose weight said nothing until then (zeros: not loaded yet), is vLLM's for good, with one warning. As
long as vLLM is still warming up, a weight that was not loaded is tried again at each projection, by ``warmup``, since the
other ranks may have nothing left to tune. Weights may be reloaded, offloaded (sleep mode) and replaced afterwards; one of
another shape, dtype or device is vLLM's, because it would take another kernel.

vLLM has a low-batch LM head itself, for one model on SM100 and SM103. Its names, and those to use instead on any head:

| vLLM                             | here                                                                       |
| -------------------------------- | -------------------------------------------------------------------------- |
| ``low_batch_lm_head_applies``    | ``applies(lm_head, x)``, and ``explain(lm_head, x)`` for the reason        |
| ``low_batch_lm_head``            | ``project(lm_head, x)``, or ``bind(lm_head)`` for a decode loop            |
| ``autotune_low_batch_lm_head``   | ``autotune(model)``; the plugin does it in the profiling run               |
| ``warmup_low_batch_lm_head``     | ``warmup(model)``; its ``LM_HEAD_MAX_ROWS`` is 16, here 64 on SM90          |

``register`` teaches the library vLLM's head types, so these take a vLLM head, or a model, as it is.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from .. import gate
from ..api import autotune, warmup
from ..devices import is_capturing
from ..dispatch import Dispatcher
from ..head import register_head
from ..log import logger, said, warn_once
from . import disabled

KNOWN_VERSIONS = ("0.26.0", "0.33.0")  # those that the tests run

_NAME = "LogitsProcessor"
_MARK = "projects_through_lowbatch_lmhead"
_PROJECTS = ("self", "lm_head", "hidden_states", "embedding_bias")  # the parameters of the method that is overridden

# Where a projection comes from, by the functions of vLLM's workers and runners that are on the stack.
_PREPARING = frozenset({"determine_available_memory", "profile_run", "compile_or_warm_up_model"})
_SERVING = frozenset({"execute_model", "sample_tokens", "execute_dummy_batch"})

_is_compiling = torch.compiler.is_compiling


class Engine(NamedTuple):
    """What of vLLM is used."""

    version: str
    processor: Any  # LogitsProcessor
    registry: dict[str, Any]  # of out-of-tree classes, by the name of the class that they replace
    embedding: Any  # VocabParallelEmbedding
    head: Any  # ParallelLMHead, a subclass of it
    plain_methods: tuple[Any, ...]  # quantization methods that multiply by the weight as it is
    envs: Any
    current_config: Any  # a function
    tensor_parallel: Any  # a function that gives the tensor-parallel group


def register() -> None:
    """Let vLLM's LogitsProcessor project through this library. vLLM calls it in each process, and may do so repeatedly.

    It never raises: what goes wrong is one warning, and vLLM stays as it is.
    """
    if disabled("vLLM"):
        return
    try:
        _register()
    except Exception as error:
        warn_once(f"the vLLM plugin could not be registered, vLLM projects by itself: {said(error)}")


def _register() -> None:
    try:
        engine = _engine()
        difference = _difference(engine)
    except (ImportError, AttributeError) as error:
        difference = str(error)
    if difference:
        warn_once(
            f"vLLM {_version()} is not as this plugin knows it ({difference}): it projects by itself. "
            f"Versions that are known: {', '.join(KNOWN_VERSIONS)}"
        )
        return
    other = engine.registry.get(_NAME)
    if other is None:
        engine.processor.register_oot(make_processor(engine))
        logger.debug("vLLM %s projects through lowbatch_lmhead", engine.version)
    elif not getattr(other, _MARK, False):
        name = f"{other.__module__}.{other.__qualname__}"
        warn_once(f"{name} is registered for vLLM's {_NAME} already and is left alone: lowbatch_lmhead serves nothing")
        return
    register_head(engine.embedding, lambda head: _read_own(head, engine))
    register_head(engine.head, lambda head: _read_own(head, engine))


def _version() -> str:
    try:
        import vllm

        return str(vllm.__version__)
    except (ImportError, AttributeError):
        return "of an unknown version"


def _engine() -> Engine:
    """ImportError or AttributeError where a name is missing."""
    from vllm import envs
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    return Engine(
        _version(),
        LogitsProcessor,
        op_registry_oot,
        VocabParallelEmbedding,
        ParallelLMHead,
        (UnquantizedEmbeddingMethod, UnquantizedLinearMethod),
        envs,
        get_current_vllm_config_or_none,
        get_tp_group,
    )


def _difference(engine: Engine) -> str | None:
    """What of the interface that is overridden differs from the known one."""
    if not callable(engine.processor.register_oot):
        return f"{_NAME} has no register_oot"
    parameters = tuple(inspect.signature(engine.processor._apply_head).parameters)
    if parameters != _PROJECTS:
        return f"{_NAME}._apply_head takes {', '.join(parameters)}"
    return None


class Settings(NamedTuple):
    """What the engine's configuration says of preparing heads."""

    tune: bool
    max_rows: int

    @classmethod
    def read(cls, config: Any) -> Settings:
        """From a VllmConfig, or the defaults for None."""
        kernels = getattr(config, "kernel_config", None)
        scheduler = getattr(config, "scheduler_config", None)
        speculation = getattr(config, "speculative_config", None)
        # A sequence has one row in a step, and one for each token that is speculated.
        rows = getattr(scheduler, "max_num_seqs", None) or gate.MEASURED_ROWS
        rows *= 1 + (getattr(speculation, "num_speculative_tokens", None) or 0)
        return cls(
            getattr(kernels, "enable_flashinfer_autotune", None) is not False, max(1, min(rows, gate.MEASURED_ROWS))
        )


def _weight(module: Any) -> Tensor | None:
    """The weight of a vLLM head as a plain tensor: vLLM's own parameter classes only add how it is loaded."""
    weight: Tensor | None = module._parameters.get("weight")
    if type(weight) is not Parameter and isinstance(weight, Parameter):
        return weight.detach()
    return weight


def _read_own(module: Any, engine: Engine) -> tuple[Tensor, Tensor | None] | None:
    """The reader of vLLM's head types, for whoever calls the library on them."""
    weight = _weight(module)
    if weight is None or type(module.quant_method) not in engine.plain_methods:
        return None
    return weight, module._parameters.get("bias")


class ServedHead:
    """A head as one kind of LogitsProcessor projects through it: with or without a bias, to one dtype.

    The head is referred to weakly, and no tensor is kept: weight and bias come with each call. ``project`` is called with
    (weight, bias), x and None. ``rows`` are the row counts that kernels serve, of a weight of this ``shape``, ``dtype`` and
    ``device`` index. ``settled`` says that nothing is going to be prepared any more.
    """

    __slots__ = ("_tuned", "device", "dtype", "method", "module", "out_dtype", "project", "rows", "settled", "shape")

    def __init__(self, module: weakref.ref[Any], method: Any, out_dtype: torch.dtype | None) -> None:
        self.module = module
        self.method = method
        self.out_dtype = out_dtype
        self.project: Callable[[tuple[Tensor, Tensor | None], Tensor, None], Tensor] | None = None
        self.shape: torch.Size | None = None
        self.dtype: torch.dtype | None = None
        self.device = -1
        self.rows: frozenset[int] = frozenset()
        self.settled = False
        self._tuned = False

    def takes(self, weight: Tensor) -> bool:
        """Whether ``weight`` is as the one that was prepared: for another one a kernel would be compiled."""
        return weight.shape == self.shape and weight.dtype is self.dtype and weight.get_device() == self.device

    def prepare(self, head: tuple[Tensor, Tensor | None], settings: Settings, group: Any) -> None:
        """Tune, or compile; never raises. A weight that says nothing yet leaves the head unsettled.

        Tuning is what ranks do together, so it is done once, when all of them come here first.
        """
        try:
            if settings.tune and not self._tuned:
                self._tuned = True
                self._tune(head, settings, group)
            # Also fills the rows that were not tuned: what is left open would be compiled when it is met.
            report = warmup(head, out_dtype=self.out_dtype, progress=False)
            logger.info("prepared a vLLM head:\n%s", report)
            self.project = Dispatcher(head, self.out_dtype).run
            weight, _ = head
            self.shape, self.dtype, self.device = weight.shape, weight.dtype, weight.get_device()
            decisions = report.heads[0].decisions
            self.rows = frozenset(one.rows for one in decisions if one.taken and one.prepared)
            self.settled = all(one.prepared or not one.taken for one in decisions)
        except Exception as error:
            self.leave(f"it could not be prepared: {said(error)}")

    def _tune(self, head: tuple[Tensor, Tensor | None], settings: Settings, group: Any) -> None:
        try:
            report = autotune(
                head, max_rows=settings.max_rows, out_dtype=self.out_dtype, process_group=group, progress=False
            )
            logger.info("tuned a vLLM head:\n%s", report)
        except Exception as error:
            warn_once(f"a vLLM head is prepared without tuning: {said(error)}")

    def leave(self, reason: str) -> None:
        """Leave what is not prepared yet to vLLM for good."""
        self.settled = True
        warn_once(f"vLLM projects through its {type(self.module()).__name__} by itself: {reason}")


_heads: dict[tuple[int, torch.dtype | None, bool], ServedHead] = {}


def make_processor(engine: Engine) -> type:
    """The subclass of vLLM's LogitsProcessor."""
    heads = _heads

    class LowBatchLogitsProcessor(engine.processor):  # type: ignore[misc, name-defined]
        """vLLM's LogitsProcessor; its projection is this library's where a kernel serves."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._settings = Settings.read(engine.current_config())

        def _apply_head(self, lm_head: Any, hidden_states: Tensor, embedding_bias: Tensor | None) -> Tensor:
            """(rows, hidden) -> (rows, vocabulary rows of this shard, padding included), in head_dtype."""
            if _is_compiling():
                return super()._apply_head(lm_head, hidden_states, embedding_bias)  # type: ignore[no-any-return]
            method = lm_head.quant_method
            head = heads.get((id(lm_head), self.head_dtype, embedding_bias is None))
            if head is None or head.module() is not lm_head or head.method is not method:
                head = _meet(engine, lm_head, self.head_dtype, hidden_states, embedding_bias)
            shape = hidden_states.shape
            if len(shape) == 2 and shape[0] in head.rows:
                try:
                    weight = _weight(lm_head)
                    if weight is not None and head.takes(weight):
                        return head.project((weight, embedding_bias), hidden_states, None)  # type: ignore[misc]
                except Exception as error:  # vLLM's own code serves what it can, or says what is wrong
                    warn_once(f"a vLLM head refused its input: {error}")
            logits: Tensor = super()._apply_head(lm_head, hidden_states, embedding_bias)
            if not head.settled:
                _settle(engine, head, self._settings, hidden_states, embedding_bias, logits)
            return logits

    setattr(LowBatchLogitsProcessor, _MARK, True)
    return LowBatchLogitsProcessor


def _meet(engine: Engine, module: Any, head_dtype: torch.dtype | None, x: Tensor, bias: Tensor | None) -> ServedHead:
    """What is kept of a head that is met for the first time, or whose quantization method was replaced."""
    key = (id(module), head_dtype, bias is None)
    out_dtype = None if head_dtype in (None, x.dtype) else head_dtype
    method = module.quant_method
    head = ServedHead(weakref.ref(module, lambda _: _heads.pop(key, None)), method, out_dtype)
    if engine.envs.VLLM_BATCH_INVARIANT:
        head.leave("VLLM_BATCH_INVARIANT is set")
    elif out_dtype not in (None, torch.float32):
        head.leave(f"head_dtype is {out_dtype}")
    elif not isinstance(module, engine.embedding) or type(method) not in engine.plain_methods:
        head.settled = True  # quantized or wrapped, which is nothing to warn of
        logger.info("vLLM projects through %s with %s by itself", type(module).__name__, type(method).__name__)
    _heads[key] = head
    return head


def _settle(
    engine: Engine, head: ServedHead, settings: Settings, x: Tensor, bias: Tensor | None, logits: Tensor
) -> None:
    """Prepare ``head`` if this is the time; ``logits`` are what vLLM itself has just computed from ``x``."""
    if is_capturing(x.device):
        warn_once(
            "a vLLM head met a CUDA graph capture before it was prepared; the graph holds vLLM's own projection. "
            "Project once outside of a capture before"
        )
        return
    if _while_serving():
        head.leave("requests were served before it was prepared, and nothing is compiled while they are")
        return
    weight = _weight(head.module())
    dtype = head.out_dtype or x.dtype
    if weight is None or logits.dtype != dtype or logits.shape != (*x.shape[:-1], weight.shape[0]):
        head.leave(f"it gave logits {tuple(logits.shape)}, {logits.dtype} for {tuple(x.shape)}, {x.dtype}")
        return
    head.prepare((weight, bias), settings, _group(engine) if settings.tune else None)


def _while_serving() -> bool:
    """Whether a worker runs a step for requests, and not one of its warm-up. Asked of a head that is not prepared."""
    frame, serving = sys._getframe(1), False
    while frame is not None:
        name = frame.f_code.co_name
        if name in _PREPARING:
            return False
        serving = serving or name in _SERVING
        frame = frame.f_back  # type: ignore[assignment]
    return serving


def _group(engine: Engine) -> Any:
    """The tensor-parallel ranks as a process group, or None for one rank alone."""
    try:
        group = engine.tensor_parallel()
        return group.cpu_group if group.world_size > 1 else None
    except (AssertionError, AttributeError):  # there is none: somebody else's process, not an engine's
        return None
