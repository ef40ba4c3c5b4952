"""The front door: ``project`` and ``bind`` to compute, ``applies`` and ``explain`` to ask, ``warmup`` and ``autotune`` to
prepare.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from . import devices, dispatch, gate
from .gate import Decision
from .head import Head, HeadLike, find_heads, read_head
from .report import WarmupReport, check_progress
from .tuning import TuningReport
from .warming import warm_head

_is_compiling = torch.compiler.is_compiling


def project(
    head: HeadLike,
    x: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
) -> Tensor:
    """The logits of ``x`` through ``head``: ``x @ weight.T + bias``.

    A low-batch kernel computes them where one is taken (see ``explain``), otherwise the head's own computation does, so
    the result is always there. The first call for a row count compiles and checks the launch that it needs, about a
    second; ``warmup`` does that beforehand.

    Args:
        head: nn.Linear, nn.Embedding (tied), a weight of shape (vocab, hidden), a tuple (weight, bias or None), or an
            instance of a type given to ``register_head``.
        x: (..., hidden) in the weight's dtype and on its device. A strided or unaligned x is copied where a kernel
            cannot read it in place.
        out: (..., vocab) to write the logits into; it must not overlap x or the head.
        out_dtype: None for the head's dtype; torch.float32 for float32 logits that were never rounded to bfloat16.
            A head that computes in its own way (quantized, hooked) is cast up afterwards instead.
        batch_invariant: True for logits of a row whose bits do not depend on what other rows there are, nor on how many:
            one order of additions serves every row count, more than 64 rows in pieces. Where no kernel can promise that,
            the default GEMM computes one row at a time, which reads the weight once for each. All row counts are prepared
            together: call ``warmup`` before, because a call that comes too early for that (before the weight is loaded,
            inside a graph capture, without memory left) computes row by row, with other bits. So do calls that need
            gradients.

    Returns:
        The logits (..., vocab): ``out`` where it was given.

    Raises:
        ValueError: arguments that no path could serve; ``out`` is untouched.
    """
    if _is_compiling():
        return _traced(head, x, out, out_dtype, batch_invariant)
    return dispatch.dispatcher(head, out_dtype, batch_invariant).run(head, x, out)


def _traced(
    head: HeadLike, x: Tensor, out: Tensor | None, out_dtype: torch.dtype | None, batch_invariant: bool
) -> Tensor:
    from . import ops

    return ops.traced(read_head(head), x, out, out_dtype, batch_invariant)


class Projection:
    """A head bound for repeated calls; what ``bind`` returns."""

    __slots__ = ("_batch_invariant", "_head", "_out_dtype", "_run")

    def __init__(self, head: HeadLike, out_dtype: torch.dtype | None, batch_invariant: bool = False) -> None:
        read = read_head(head)
        dispatch.check_out_dtype(out_dtype, None if read.weight is None else read.weight.dtype)
        dispatch.check_invariant(read, batch_invariant)
        self._head = head
        self._out_dtype = out_dtype
        self._batch_invariant = batch_invariant
        self._run = dispatch.Dispatcher(head, out_dtype, batch_invariant).run

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``project(head, x, out=out)``: the logits (..., vocab) of ``x`` (..., hidden)."""
        if _is_compiling():
            return _traced(self._head, x, out, self._out_dtype, self._batch_invariant)
        return self._run(self._head, x, out)

    def explain(self, x: Tensor) -> Decision:
        """``explain(head, x)`` for the bound head."""
        return explain(self._head, x, out_dtype=self._out_dtype, batch_invariant=self._batch_invariant)

    def __reduce__(self) -> tuple[Any, ...]:
        return Projection, (self._head, self._out_dtype, self._batch_invariant)  # compiled launches do not travel

    def __repr__(self) -> str:
        invariant = ", batch_invariant=True" if self._batch_invariant else ""
        return f"Projection({type(self._head).__name__}, out_dtype={self._out_dtype}{invariant})"


def bind(head: HeadLike, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False) -> Projection:
    """A callable for one head, with what ``project`` looks up on every call looked up once. For decode loops.

    The weight and bias are read from the head on every call, so they may be changed, swapped, replaced or moved.

    Args:
        head: as for ``project``. The Projection keeps it alive.
        out_dtype: as for ``project``.
        batch_invariant: as for ``project``.

    Returns:
        A Projection: ``projection(x, out=None)`` is ``project(head, x, out=out)`` with the arguments given here.

    Raises:
        ValueError: ``head`` is none, or cannot have this ``out_dtype`` or ``batch_invariant``.
    """
    return Projection(head, out_dtype, batch_invariant)


def explain(
    head: HeadLike, x: Tensor, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False
) -> Decision:
    """What ``project`` with the same arguments would use, and why. Nothing is compiled or computed.

    Args:
        head: as for ``project``.
        x: as for ``project``.
        out_dtype: as for ``project``.
        batch_invariant: as for ``project``.

    Returns:
        The decision: backend, tactic and reasons. It prints well, and is true where a low-batch kernel serves.

    Raises:
        ValueError: as for ``project``.
    """
    read = read_head(head)
    dtype = dispatch.check_arguments(read, x, None, out_dtype, batch_invariant)
    return gate.decide(read, x, dtype, batch_invariant)[0]


def applies(head: HeadLike, x: Tensor, *, out_dtype: torch.dtype | None = None, batch_invariant: bool = False) -> bool:
    """Whether ``project`` would use a low-batch kernel for this input: ``explain``, which has the same arguments, as a bool.

    Raises:
        ValueError: as for ``project``.
    """
    return explain(head, x, out_dtype=out_dtype, batch_invariant=batch_invariant).taken


def warmup(
    model_or_head: Any,
    *,
    max_rows: int | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    progress: bool | None = None,
) -> WarmupReport:
    """Compile and check every launch that serving will need, so that ``project`` never compiles.

    Args:
        model_or_head: a model, whose heads are found by ``get_output_embeddings()`` and by registered types, or a head.
            A weight that is met twice is prepared once.
        max_rows: prepare row counts 1 to max_rows; None for all that kernels serve on this GPU (64 on SM90, 16 on
            SM120, 32 on SM100 and SM103). More rows than that stay with the default GEMM.
        out_dtype: prepare for this ``out_dtype`` of ``project``.
        batch_invariant: prepare for ``batch_invariant=True``; its row counts share an order of additions and are prepared
            together. What ``autotune`` chooses serves other calls only.
        progress: a progress bar on stderr; None for one where stderr is a terminal.

    Returns:
        What serves which row count of which head, why, and how long it took. It prints as a table.

    Raises:
        ValueError: no head was found, one cannot be ``batch_invariant``, an argument is not as above, or a CUDA graph is
            being captured. Nothing was prepared then.
    """
    if max_rows is not None and (isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1):
        raise ValueError(f"max_rows must be a whole number of at least 1, or None, got {max_rows!r}")
    check_progress(progress)
    heads = _heads(model_or_head, out_dtype)
    for _, read in heads:
        dispatch.check_invariant(read, batch_invariant)
        if read.weight is not None and devices.is_capturing(read.weight.device):
            raise ValueError("warmup cannot compile and compare inside a CUDA graph capture; call it before")
    return WarmupReport.collect(
        heads, lambda read, bar: warm_head(read, max_rows, out_dtype, bar, batch_invariant), progress
    )


def _heads(model_or_head: Any, out_dtype: torch.dtype | None) -> list[tuple[str, Head]]:
    heads = [(name, read_head(head)) for name, head in find_heads(model_or_head)]
    for _, read in heads:
        dispatch.check_out_dtype(out_dtype, None if read.weight is None else read.weight.dtype)
    return heads


def autotune(
    model_or_head: Any,
    *,
    max_rows: int = gate.MEASURED_ROWS,
    out_dtype: torch.dtype | None = None,
    cache: bool | str | os.PathLike[str] = True,
    refresh: bool = False,
    process_group: Any = None,
    budget_s: float = 30.0,
    progress: bool | None = None,
) -> TuningReport:
    """Measure which kernel serves which row count fastest, and let it serve; ``project`` never compiles after this.

    Every launch that could serve is timed beside the default GEMM on the head's own weight, read from memory. One serves
    where it is quicker by more than the noise, and right. The choice is kept on disk, so that the next process only loads
    it. A call for what is tuned already returns at once. Nothing else should run on the GPU meanwhile.

    Args:
        model_or_head: as for ``warmup``.
        max_rows: tune row counts 1 to max_rows, at most 128. More rows than that are left as ``warmup`` leaves them.
        out_dtype: tune for this ``out_dtype`` of ``project``.
        cache: the folder in which choices are kept, True for the user's cache folder (``LOWBATCH_LMHEAD_CACHE``, else
            ``$XDG_CACHE_HOME/lowbatch-lmhead``, else ``~/.cache/lowbatch-lmhead``), False for none.
        refresh: measure anew, whatever is in the cache.
        process_group: a torch.distributed group whose ranks hold shards of the same shape and all call this with the
            same arguments. They choose alike, by the slowest rank's times; where one fails or stays away, heads that are
            not tuned yet end up as ``warmup`` would leave them on all.
        budget_s: seconds for one head after which the best so far serves; 0 takes a choice from the cache and
            measures nothing.
        progress: a progress bar on stderr; None for one where stderr is a terminal.

    Returns:
        What serves each row count, with times and the fraction of the read limit. It prints as a table.

    Raises:
        ValueError: no head was found, an argument is not as above, a CUDA graph is being captured, or the ranks' heads
            differ. No rank has changed anything then.
    """
    from .tuning import tune

    return tune.autotune(
        lambda: _heads(model_or_head, out_dtype),
        max_rows=max_rows,
        out_dtype=out_dtype,
        cache=cache,
        refresh=refresh,
        process_group=process_group,
        budget_s=budget_s,
        progress=progress,
    )
