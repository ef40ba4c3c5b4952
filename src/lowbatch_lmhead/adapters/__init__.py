"""Engines that use the library without a line of theirs changed: one module for each."""

import os

from ..log import logger

DISABLE = "LOWBATCH_LMHEAD_DISABLE"


def disabled(engine: str) -> bool:
    """Whether ``LOWBATCH_LMHEAD_DISABLE`` keeps the plugin of ``engine`` from doing anything."""
    if os.environ.get(DISABLE, "") in ("", "0"):
        return False
    logger.info("%s is set: %s projects by itself", DISABLE, engine)
    return True
