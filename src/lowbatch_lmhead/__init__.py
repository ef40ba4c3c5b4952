"""Fast LM-head projections for decoding: the logits of 1 to 32 rows at the cost of one read of the weight.

    import lowbatch_lmhead

    lowbatch_lmhead.warmup(model)                          # compile before serving
    logits = lowbatch_lmhead.project(model.lm_head, x)     # (..., hidden) -> (..., vocab)

Importing this package imports torch and nothing else, and works on a machine without a GPU.
"""

from ._version import __version__
from .api import Projection, applies, bind, explain, project, warmup
from .gate import Decision
from .head import register_head
from .report import WarmupReport

__all__ = [
    "Decision",
    "Projection",
    "WarmupReport",
    "__version__",
    "applies",
    "bind",
    "explain",
    "project",
    "register_head",
    "warmup",
]
