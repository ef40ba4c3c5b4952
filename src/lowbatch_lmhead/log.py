"""One logger, and warnings that are said once."""

from __future__ import annotations

import logging

logger = logging.getLogger("lowbatch_lmhead")
_said: set[str] = set()


def warn_once(message: str) -> None:
    """Log ``message`` at WARNING the first time it comes up in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)
