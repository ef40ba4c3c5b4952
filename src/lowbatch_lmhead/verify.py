"""The check that every launch passes before it serves: its logits beside the default GEMM's, on the real weight.

The comparison itself runs on the CPU, on copies of the logits: a process that loads a compiled kernel would otherwise
wait longer for the GPU code of a dozen PyTorch operators to be loaded (150 ms on an H200) than for the kernel.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .backends.base import Launch
from .backends.default_gemm import logits

SEED = 20261201
ROWS = 16  # at least; so many random logits tell the scale of a vocabulary row
# What a logit may differ by besides the rounding of the output, in units of the usual size of its vocabulary row's
# products. Sums of float32 in another order differ by far less: all logits, and the last ones of a vocabulary, by 4.5e-6 in
# the norm (benchmarks/results/h200/tuned.json). And by what adding a bias rounds away.
TOLERANCE = 1e-3
SUMMATION = 1e-6


NOTHING = "most of the weight is zero or not finite, so nothing can be compared yet"


class NotYet(Exception):
    """The weight says too little to check a launch with: most of it is zero or not finite, as before it is loaded."""


class Reference:
    """The default GEMM's logits of random rows for one weight, kept on the CPU while launches are checked.

    Global random state, default dtype and default device are neither touched nor followed.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = ROWS) -> None:
        """``NotYet`` for a weight that most launches would agree on."""
        rows, vocab, cpu = max(rows, ROWS), weight.shape[0], torch.device("cpu")
        with plainly(weight):
            # Drawn on the CPU, so that every device checks with the same rows.
            generator = torch.Generator(cpu).manual_seed(SEED)
            x = torch.randn(rows, weight.shape[1], generator=generator, dtype=torch.float32, device=cpu)
            # A launch may ask for rows of x that are a multiple of 16 bytes apart.
            # What lies between them would show in the logits.
            spread = torch.ones(rows, weight.shape[1] + 8 + -weight.shape[1] % 8, dtype=weight.dtype, device=cpu)
            spread[:, : weight.shape[1]] = x
            self.x = spread.to(weight.device)[:, : weight.shape[1]]
            self._logits = torch.empty(rows, vocab, dtype=torch.float32, device=cpu)
            # A few rows at a time, which bounds the memory on the GPU and lets their logits be copied as they lie.
            for start in range(0, rows, ROWS):
                part = slice(start, start + ROWS)
                self._logits[part] = logits(self.x[part], weight, None, torch.float32)
            # Of the products alone: a large bias must not hide them.
            self._tolerance = self._logits.abs().mean(0).mul_(TOLERANCE)
            # What is not finite says nothing; a row of zeros says little.
            self._ignored = ~(self._tolerance < math.inf)
            if 2 * int(((self._tolerance > 0) & ~self._ignored).sum()) < vocab:
                raise NotYet(NOTHING)
            if bias is not None:
                wide = bias.to(cpu, torch.float32)
                self._ignored |= ~wide.isfinite()  # -inf bars a padding token
                self._logits += wide
                self._tolerance += wide.abs() * SUMMATION
            self._tolerance += torch.finfo(torch.float32).tiny
            self._last_prepared: tuple[torch.dtype, Tensor, Tensor] | None = None

    def mistake(
        self, launch: Launch, weight: Tensor, bias: Tensor | None, rows: int, out_dtype: torch.dtype
    ) -> str | None:
        """What is wrong with ``launch`` on the first ``rows`` rows, or None. What it raises is raised.

        Every logit is compared, the ends of the vocabulary included. Rows of x and of the output lie apart, and what lies
        between and behind them in the output, NaN as all of it was before, has to stay as it is. That is done with rows of
        the output a multiple of 16 bytes apart and with others: a kernel may write one in other ways than the other.
        """
        vocab, unit = weight.shape[0], 16 // out_dtype.itemsize
        nothing, allowed = self._prepared(out_dtype)
        odd = vocab + 1 if (vocab + 1) % unit else vocab + 2
        first = None
        for pitch in (odd, -(-vocab // unit) * unit):
            with plainly(weight):
                around = nothing[: (rows + 1) * pitch].view(rows + 1, pitch).to(weight.device, copy=True)
                launch.call(weight, self.x[:rows], bias, around[:rows, :vocab])
                copied = around.to("cpu", torch.float32, copy=True)
                del around  # before the next one: a head is checked with little memory left
            if not (copied[rows].isnan().all() and copied[:, vocab:].isnan().all()):
                return "it writes outside of its output"
            found = copied[:rows, :vocab]
            if first is not None and torch.equal(found, first):
                return None
            wrong = self._difference(found, allowed[:rows])
            if wrong:
                return wrong
            first = found
        return None

    def _difference(self, found: Tensor, allowed: Tensor) -> str | None:
        """Which of the logits differ by more than they may."""
        error = found.sub(self._logits[: len(found)]).abs_()
        # Not (error > allowed), so that NaN is wrong.
        right = (error <= allowed).logical_or_(self._ignored)
        if right.all():
            return None
        wrong = right.logical_not_()
        row, column = wrong.nonzero()[0].tolist()
        got, expected = found[row, column].item(), self._logits[row, column].item()
        return (
            f"{int(wrong.sum())} of {wrong.numel()} logits differ from the default GEMM, the first of row {row} at "
            f"vocabulary row {column}: {got:.6g} instead of {expected:.6g}"
        )

    def _prepared(self, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """NaN for one more row than there are logits and up to 8 more columns, and what each logit may differ by."""
        if self._last_prepared is None or self._last_prepared[0] is not out_dtype:
            rows, vocab = self._logits.shape
            nothing = torch.full(((rows + 1) * (vocab + 8),), math.nan, dtype=out_dtype, device="cpu")
            rounding = 0.0 if out_dtype is torch.float32 else torch.finfo(out_dtype).eps / 2
            allowed = self._logits.abs().mul_(rounding).add_(self._tolerance)
            self._last_prepared = out_dtype, nothing, allowed
        return self._last_prepared[1:]


@contextlib.contextmanager
def plainly(weight: Tensor) -> Iterator[None]:
    """Without gradients and autocast, whatever the caller has on."""
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        yield
