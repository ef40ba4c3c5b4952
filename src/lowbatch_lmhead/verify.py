"""The check that every launch passes before it serves: its logits beside the default GEMM's, on the real weight.

The comparison itself runs on the CPU, on copies of the logits: a process that loads a compiled kernel would otherwise
wait longer for the GPU code of a dozen PyTorch operators to be loaded (150 ms on an H200) than for the kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backends.base import Launch
from .backends.default_gemm import logits

SEED = 20261201
ROWS = 16  # at least; so many random logits tell the scale of a vocabulary row
CHUNK = 65536  # vocabulary rows of the reference that are computed at a time, which bounds the memory on the GPU
# What a logit may differ by besides the rounding of the output, in units of the usual size of its vocabulary row's
# products: float32 sums in another order differ by 2e-5 at the most (benchmarks/results/h200/tuned.json). And by what adding
# a bias rounds away.
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
            self.x = x.to(weight.dtype).to(weight.device)
            self._logits = torch.empty(rows, vocab, dtype=torch.float32, device=cpu)
            for start in range(0, vocab, CHUNK):
                part = slice(start, start + CHUNK)
                self._logits[:, part] = logits(self.x, weight[part], None, torch.float32)
            # Of the products alone: a large bias must not hide them.
            self._tolerance = self._logits.abs().mean(0).mul_(TOLERANCE)
            # What is not finite says nothing; a row of zeros says little.
            self._counts = self._tolerance.isfinite()
            if 2 * int((self._counts & (self._tolerance > 0)).sum()) < vocab:
                raise NotYet(NOTHING)
            if bias is not None:
                wide = bias.to(cpu, torch.float32)
                self._counts &= wide.isfinite()  # -inf bars a padding token
                self._logits += wide
                self._tolerance += wide.abs() * SUMMATION
            self._tolerance += torch.finfo(torch.float32).tiny

    def mistake(
        self, launch: Launch, weight: Tensor, bias: Tensor | None, rows: int, out_dtype: torch.dtype
    ) -> str | None:
        """What is wrong with ``launch`` on the first ``rows`` rows, or None. What it raises is raised.

        Every logit is compared, the ends of the vocabulary included. Rows of x and of the output lie apart, and what lies
        between and behind them in the output, NaN as all of it was before, has to stay as it is.
        """
        vocab, hidden = weight.shape
        with plainly(weight):
            # A launch may ask for rows of x that are a multiple of 16 bytes apart.
            spread = self.x.new_empty((rows, hidden + 8 + -hidden % 8))
            x = spread[:, :hidden].copy_(self.x[:rows])
            around = torch.full((rows + 1, vocab + 1), float("nan"), dtype=out_dtype, device="cpu")
            around = around.to(weight.device, copy=True)
            launch.call(weight, x, bias, around[:rows, :vocab])
            around = around.to("cpu", torch.float32)
        if not (around[rows].isnan().all() and around[:, vocab].isnan().all()):
            return "it writes outside of its output"
        got = around[:rows, :vocab]
        expected = self._logits[:rows]
        rounding = 0.0 if out_dtype is torch.float32 else torch.finfo(out_dtype).eps / 2
        allowed = expected.abs().mul_(rounding).add_(self._tolerance)
        # Not (error <= allowed), so that NaN is wrong.
        wrong = ((got - expected).abs_() <= allowed).logical_not_().logical_and_(self._counts)
        if not wrong.any():
            return None
        row, column = wrong.nonzero()[0].tolist()
        return (
            f"{int(wrong.sum())} of {wrong.numel()} logits differ from the default GEMM, the first of row {row} at "
            f"vocabulary row {column}: {got[row, column].item():.6g} instead of {expected[row, column].item():.6g}"
        )


class plainly:
    """Without gradients and autocast, whatever the caller has on."""

    def __init__(self, weight: Tensor) -> None:
        self._contexts = (torch.no_grad(), torch.autocast(weight.device.type, enabled=False))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
