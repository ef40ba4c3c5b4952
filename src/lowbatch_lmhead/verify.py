"""The check that every launch passes before it serves: its logits beside the default GEMM's, logit by logit."""

from __future__ import annotations

import torch
from torch import Tensor

from .backends.base import Launch
from .backends.default_gemm import logits

# The reference is computed this many vocabulary rows at a time, which bounds the memory that the check takes.
CHUNK = 32768
# |error| allowed, in units of |x| * |weight row| / sqrt(hidden) (the standard deviation of a logit for random x), on
# top of the output's own rounding: float32 sums in another order differ by less than 1e-5 of that.
TOLERANCE = 1e-3
SEED = 20261201


def mistake(launch: Launch, weight: Tensor, bias: Tensor | None, rows: int, out_dtype: torch.dtype) -> str | None:
    """What is wrong with ``launch`` on ``rows`` random rows and this weight, or None.

    Every logit is compared, the ends of the vocabulary included, in an output that was filled with NaN. What a launch
    raises is raised. The global random state is not touched.
    """
    vocab, hidden = weight.shape
    with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
        generator = torch.Generator(weight.device).manual_seed(SEED)
        x = torch.randn(rows, hidden, device=weight.device, dtype=torch.float32, generator=generator).to(weight.dtype)
        out = torch.full((rows, vocab), float("nan"), device=weight.device, dtype=out_dtype)
        launch.call(weight, x, bias, out)
        rounding = 0.0 if out_dtype is torch.float32 else torch.finfo(out_dtype).eps
        compared = False
        for start in range(0, vocab, CHUNK):
            part = weight[start : start + CHUNK]
            expected = logits(x, part, None if bias is None else bias[start : start + CHUNK], torch.float32)
            scale = torch.linalg.vector_norm(part, dim=1, dtype=torch.float32)
            allowed = TOLERANCE * scale + rounding * expected.abs()
            # Logits that are not finite (a weight not loaded yet) say nothing.
            counts = allowed.isfinite()
            wrong = ((out[:, start : start + CHUNK] - expected).abs() <= allowed).logical_not_() & counts
            compared = compared or bool(counts.any())
            if wrong.any():
                row, column = wrong.nonzero()[0].tolist()
                return (
                    f"{int(wrong.sum())} of {wrong.numel()} logits differ from the default GEMM, the first of row {row} "
                    f"at vocabulary row {start + column}: {out[row, start + column].item():.6g} instead of "
                    f"{expected[row, column].item():.6g}"
                )
    return None if compared else "the weight is not finite, so nothing can be compared"
