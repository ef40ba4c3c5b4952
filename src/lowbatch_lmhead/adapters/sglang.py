"""SGLang projects its LM heads through this library, without a line changed: the entry point is ``register``.

SGLang calls it in each of its processes, before a model is loaded. It asks SGLang's hook registry for two hooks:

- ``LogitsProcessor._compute_lm_head`` projects. A call is served here where a launch was prepared for its head and its
  row count, and goes to SGLang's method in every other case: quantized, GGUF, LoRA and AMX heads, heads with a bias,
  ``--rl-on-policy-target``, input of another dtype, inside torch.compile, more rows than kernels favour.
- ``ModelRunner.init_cuda_graphs``, which SGLang calls once for each model on all ranks, graphs or no graphs: after the
  weights, the KV cache and the attention backends are there, before the first capture. The heads of the model are
  prepared when it begins. One that was not found by its name is prepared when a warm-up run in it, which SGLang lets
  precede each capture, projects through it. Nothing is compiled or tuned after it, nor while a graph is captured.

``--disable-flashinfer-autotune`` switches tuning off: the default kernels are compiled and checked, not measured.
``--enable-deterministic-inference`` leaves all to SGLang: the launch, and so the order of sums, depends on the row count.

``enable_fp32_lm_head`` and the model's ``enable_lm_head_fp32`` and ``enable_lm_head_output_fp32`` give the float32
accumulators, unrounded. That is what SGLang computes on a GPU where x and the weight have one 16-bit dtype; upcasting
both gives the same sums of the same products. Where they differ SGLang computes.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..api import autotune, project, warmup
from ..devices import is_capturing
from ..head import is_plain
from ..log import logger, said, warn_once
from . import disabled

KNOWN_VERSIONS = "0.5.22 and 0.5.23"
PROJECTION = "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head"
PREPARATION = "sglang.srt.model_executor.model_runner.ModelRunner.init_cuda_graphs"

# What the projection takes, and what of its LogitsProcessor it depends on. A version that has more has a way to
# project that is not known here.
_PARAMETERS = ("self", "hidden_states", "lm_head", "embedding_bias", "out")
_SWITCHES = {"use_fp32_lm_head", "use_fp32_lm_head_output", "rl_on_policy_target"}
# The quant methods of heads that SGLang multiplies by their weight itself.
_UNQUANTIZED = ("NoneType", "UnquantizedEmbeddingMethod", "UnquantizedLinearMethod")
# The attributes under which SGLang's models keep what they project through; the later ones where heads are tied.
_HEAD_NAMES = ("lm_head", "embed_tokens", "word_embeddings")

_is_compiling = torch.compiler.is_compiling


class _Prepared:
    """What was prepared for one head: its weight's shape (vocab, hidden) and dtype, its quant method, and for each
    out_dtype whether a kernel serves the row count that indexes ``rows``.
    """

    __slots__ = ("dtype", "method", "rows", "shape")

    def __init__(self, lm_head: Any) -> None:
        weight = getattr(lm_head, "weight", None)
        self.shape = getattr(weight, "shape", None)
        self.dtype = getattr(weight, "dtype", None)
        self.method = vars(lm_head).get("quant_method")
        self.rows: dict[torch.dtype | None, tuple[bool, ...]] = {}


_heads: weakref.WeakKeyDictionary[nn.Module, _Prepared] = weakref.WeakKeyDictionary()
_registered = False
_preparing = False  # whether heads that are met may be prepared


def register() -> None:
    """Hook SGLang's projection and its preparation. Called by SGLang's plugin loader; harmless when called again.

    ``LOWBATCH_LMHEAD_DISABLE=1`` turns it off, as does ``SGLANG_PLUGINS`` without ``lowbatch_lmhead``. Nothing is
    raised: what goes wrong is said in one warning, and SGLang is as it was.
    """
    global _registered
    if _registered:
        return
    if disabled("SGLang"):
        return
    try:
        unknown = _unknown_interface()
        if unknown:
            logger.warning("%s; known are SGLang %s: SGLang projects by itself", unknown, KNOWN_VERSIONS)
            return
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        # Alone, the first does nothing: no head is prepared.
        HookRegistry.register(PROJECTION, _project, HookType.AROUND)
        HookRegistry.register(PREPARATION, _prepare_before, HookType.AROUND)
        _registered = True
    except Exception as error:  # whatever another version raises, the engine starts
        logger.warning("SGLang projects by itself, hooking it failed: %s", said(error))


def _unknown_interface() -> str | None:
    """How the installed SGLang differs from those known; None where it does not."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.version import __version__ as version

    method = getattr(LogitsProcessor, "_compute_lm_head", None)
    if method is None:
        return f"SGLang {version} has no LogitsProcessor._compute_lm_head"
    if not callable(getattr(ModelRunner, "init_cuda_graphs", None)):
        return f"SGLang {version} has no ModelRunner.init_cuda_graphs"
    parameters = tuple(inspect.signature(method).parameters)
    if parameters not in (_PARAMETERS, _PARAMETERS[:-1]):
        return f"LogitsProcessor._compute_lm_head of SGLang {version} takes {', '.join(parameters)}"
    more = _attributes_of_self(method) - _SWITCHES
    if more:
        return f"LogitsProcessor._compute_lm_head of SGLang {version} depends on {', '.join(sorted(more))}"
    return None


def _attributes_of_self(method: Callable[..., Any]) -> set[str]:
    """The names that ``method`` reads from ``self``. OSError where its source is not there."""
    nodes = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(method))))
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    }


# --- serving ---


def _project(
    original: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """Around ``LogitsProcessor._compute_lm_head``: hidden_states (rows, hidden) to logits (rows, vocab shard)."""
    if embedding_bias is None and not _is_compiling():
        try:
            logits = _logits(processor, hidden_states, lm_head, **more)
        except Exception as error:  # SGLang serves what it can, or says what is wrong
            warn_once(f"SGLang projects by itself, this was refused: {said(error)}")
        else:
            if logits is not None:
                return logits
    return original(processor, hidden_states, lm_head, embedding_bias, **more)


def _logits(processor: Any, x: Tensor, lm_head: Any, out: Tensor | None = None) -> Tensor | None:
    """The logits where a launch that was prepared serves; None leaves the call to SGLang.

    ``x`` (rows, hidden). ``out`` (rows, vocab), float32, is SGLang's buffer: it takes float32 logits, and is not used
    for others, which SGLang rounds before it copies them there, nor where its shape is another.
    """
    out_dtype = _out_dtype(processor)
    prepared = _heads.get(lm_head)
    if prepared is None or out_dtype not in prepared.rows:
        if not _preparing or is_capturing(x.device):
            return None
        prepared = _prepare(processor, lm_head, out_dtype)
    served = prepared.rows[out_dtype]
    if x.dim() != 2:
        return None
    rows = x.shape[0]
    if rows >= len(served) or not served[rows]:
        return None
    weight = lm_head.weight
    # What could have changed since: another shape or dtype would be compiled for in the middle of serving.
    if (
        weight.shape != prepared.shape
        or weight.dtype is not prepared.dtype
        or x.dtype is not prepared.dtype
        or vars(lm_head).get("quant_method") is not prepared.method
        or getattr(processor, "rl_on_policy_target", None) is not None
    ):
        return None
    if out_dtype is None or (out is not None and out.shape != (rows, weight.shape[0])):
        out = None
    return project(weight, x, out=out, out_dtype=out_dtype)


def _out_dtype(processor: Any) -> torch.dtype | None:
    """torch.float32 where the LogitsProcessor asks for unrounded logits, else None."""
    if getattr(processor, "use_fp32_lm_head", False) or getattr(processor, "use_fp32_lm_head_output", False):
        return torch.float32
    return None


# --- preparing ---


def _prepare_before(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ``ModelRunner.init_cuda_graphs``: the heads of ``runner.model`` are prepared before and during it."""
    with _window(_may_prepare()):
        if _preparing:
            _prepare_model(runner)
        return original(runner, *args, **kwargs)


@contextlib.contextmanager
def _window(open_: bool) -> Iterator[None]:
    global _preparing
    before, _preparing = _preparing, open_
    try:
        yield
    finally:
        _preparing = before


def _may_prepare() -> bool:
    try:
        from sglang.srt.runtime_context import get_exec

        if get_exec().deterministic.enable_deterministic_inference:
            warn_once("SGLang's inference is to be deterministic, and so is left to SGLang's own projection")
            return False
        return True
    except Exception as error:  # the engine has to start
        warn_once(f"no head is prepared, SGLang projects by itself: {said(error)}")
        return False


def _prepare_model(runner: Any) -> None:
    """Prepare the heads of a ModelRunner's model that go by a known name, in the order of its modules."""
    try:
        from sglang.srt.layers.logits_processor import LogitsProcessor

        if not getattr(runner, "is_generation", True):
            return  # an embedding model pools, it does not project
        modules = list(runner.model.modules())
        heads = _find_heads(modules)
        # A class that projects in its own way comes here for the heads that it leaves to the original, if at all.
        own = LogitsProcessor._compute_lm_head
        processors = (module for module in modules if isinstance(module, LogitsProcessor))
        for processor in (one for one in processors if type(one)._compute_lm_head is own):
            out_dtype = _out_dtype(processor)
            for lm_head in heads:
                known = _heads.get(lm_head)
                if known is None or out_dtype not in known.rows:
                    _prepare(processor, lm_head, out_dtype)
    except Exception as error:  # the engine has to start
        warn_once(f"SGLang projects by itself, finding heads failed: {said(error)}")


def _find_heads(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """What hangs in ``modules`` under the first of the known names that occurs and has a weight."""
    modules = list(modules)
    for name in _HEAD_NAMES:
        named = (module._modules.get(name) for module in modules)
        heads = [head for head in named if head is not None and getattr(head, "weight", None) is not None]
        if heads:
            return list(dict.fromkeys(heads))
    return []


def _prepare(processor: Any, lm_head: Any, out_dtype: torch.dtype | None) -> _Prepared:
    """Prepare ``lm_head`` for ``out_dtype``, on all ranks of its group. What fails leaves the head to SGLang."""
    prepared = _heads.get(lm_head)
    if prepared is None:
        prepared = _heads[lm_head] = _Prepared(lm_head)
    prepared.rows[out_dtype] = ()
    try:
        reason = _reason_against(processor, lm_head)
        if reason:
            logger.info("%s is left to SGLang: %s", type(lm_head).__name__, reason)
            return prepared
        prepared.rows[out_dtype] = _served_rows(lm_head.weight, out_dtype)
    except Exception as error:  # the engine has to start
        warn_once(f"a head is left to SGLang, preparing it failed: {said(error)}")
    return prepared


def _reason_against(processor: Any, lm_head: Any) -> str | None:
    """Why a head is SGLang's: it computes more, or in another way, than the product with its weight."""
    method = type(getattr(lm_head, "quant_method", None)).__name__
    if hasattr(lm_head, "set_lora") and hasattr(lm_head, "apply_lora"):
        return "it is wrapped for LoRA"
    if method not in _UNQUANTIZED:
        return f"its quant_method is {method}"
    if not is_plain(getattr(lm_head, "weight", None)):
        return "it has no plain weight"
    if getattr(lm_head, "bias", None) is not None:
        return "it has a bias"
    if getattr(lm_head, "use_intel_amx_backend", False):
        return "its weight is packed for AMX"
    if getattr(processor, "rl_on_policy_target", None) is not None:
        return "rl_on_policy_target is set"
    return None


def _served_rows(weight: Tensor, out_dtype: torch.dtype | None) -> tuple[bool, ...]:
    """Tune unless tuning is off, and compile, for a ``weight`` (vocab, hidden); by row count, whether a kernel serves."""
    from sglang.srt.runtime_context import get_exec

    if not get_exec().kernel.disable_flashinfer_autotune:
        logger.info("%s", autotune(weight, out_dtype=out_dtype, process_group=_process_group(), progress=False))
    # Says also what serves the rows that were not tuned.
    warmed = warmup(weight, out_dtype=out_dtype, progress=False)
    logger.info("%s", warmed)
    taken = {one.rows for one in warmed.heads[0].decisions if one.taken and one.prepared}
    return tuple(rows in taken for rows in range(max(taken, default=-1) + 1))


def _process_group() -> Any:
    """The ranks that hold shards of one head: the CPU group of tensor parallelism; None for one rank."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_size == 1:
        return None
    group = parallel.tp_group
    return group.cpu_group if group.world_size > 1 else None
