"""One logger, warnings that are said once, and exceptions on one line."""

from __future__ import annotations

import logging

logger = logging.getLogger("lowbatch_lmhead")
_said: set[str] = set()


def warn_once(message: str) -> None:
    """Log ``message`` at WARNING the first time it comes up in this process."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


def said(error: BaseException) -> str:
    """An exception's type and message on one line; a compiler's message can be pages."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def one_line(error: BaseException) -> str:
    """An exception's message on one line, at most 300 characters of it."""
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:300] + " ..."
