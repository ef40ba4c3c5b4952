"""Fast LM-head projections for decoding: the logits of a few rows at the cost of one read of the weight.

    import lowbatch_lmhead

    lowbatch_lmhead.autotune(model)                        # measure and compile before serving
    logits = lowbatch_lmhead.project(model.lm_head, x)     # (..., hidden) -> (..., vocab)

Importing this package imports torch and nothing else, and works on a machine without a GPU.
"""

from ._version import __version__
from .api import Projection, applies, autotune, bind, explain, project, warmup
from .gate import Decision
from .head import register_head
from .report import WarmupReport
from .tuning import TunedHead, TunedRow, TuningReport

__all__ = [
    "Decision",
    "Projection",
    "TunedHead",
    "TunedRow",
    "TuningReport",
    "WarmupReport",
    "__version__",
    "applies",
    "autotune",
    "bind",
    "explain",
    "project",
    "register_head",
    "warmup",
]
