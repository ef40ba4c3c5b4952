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
# logits: float32 sums in another order differ by less than 1e-5.
TOLERANCE = 1e-3


class Reference:
    """The default GEMM's logits of random rows for one weight, kept on the CPU while launches are checked.

    The global random state is not touched.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int = ROWS) -> None:
        generator = torch.Generator().manual_seed(SEED)
        rows = max(rows, ROWS)
        with _plainly(weight):
            # Drawn on the CPU, so that every device checks with the same rows.
            self.x = torch.randn(rows, weight.shape[1], generator=generator).to(weight.dtype).to(weight.device)
            self._logits = torch.empty(rows, weight.shape[0])
            for start in range(0, weight.shape[0], CHUNK):
                part = slice(start, start + CHUNK)
                self._logits[:, part] = logits(
                    self.x, weight[part], None if bias is None else bias[part], torch.float32
                )
        self._usual = self._logits.square().mean(0).sqrt_()
        # A weight that is not loaded yet can hold anything; what is not finite says nothing.
        self._counts = self._usual.isfinite()

    def mistake(
        self, launch: Launch, weight: Tensor, bias: Tensor | None, rows: int, out_dtype: torch.dtype
    ) -> str | None:
        """What is wrong with ``launch`` on the first ``rows`` rows, or None. What it raises is raised.

        Every logit is compared, the ends of the vocabulary included, in an output that was filled with NaN.
        """
        with _plainly(weight):
            out = torch.full((rows, weight.shape[0]), float("nan"), dtype=out_dtype).to(weight.device)
            launch.call(weight, self.x[:rows], bias, out)
            got = out.to("cpu", torch.float32)
        expected = self._logits[:rows]
        rounding = 0.0 if out_dtype is torch.float32 else torch.finfo(out_dtype).eps / 2
        allowed = expected.abs().mul_(rounding).add_(self._usual, alpha=TOLERANCE)
        # Not (error <= allowed), so that NaN is wrong.
        wrong = ((got - expected).abs_() <= allowed).logical_not_().logical_and_(self._counts)
        if not wrong.any():
            return None if self._counts.any() else "the weight is not finite, so nothing can be compared"
        row, column = wrong.nonzero()[0].tolist()
        return (
            f"{int(wrong.sum())} of {wrong.numel()} logits differ from the default GEMM, the first of row {row} at "
            f"vocabulary row {column}: {got[row, column].item():.6g} instead of {expected[row, column].item():.6g}"
        )


class _plainly:
    """Without gradients and autocast, whatever the caller has on."""

    def __init__(self, weight: Tensor) -> None:
        self._contexts = (torch.no_grad(), torch.autocast(weight.device.type, enabled=False))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)


def mistake(launch: Launch, weight: Tensor, bias: Tensor | None, rows: int, out_dtype: torch.dtype) -> str | None:
    """``Reference.mistake`` for a single check."""
    return Reference(weight, bias, rows).mistake(launch, weight, bias, rows, out_dtype)
