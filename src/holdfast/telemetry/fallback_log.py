"""Warnings in a program that has not configured logging.

Python prints those bare on stderr, where a user cannot tell who speaks. `install` puts `holdfast:` in front of them. A
program with handlers of its own, for all loggers or for ours, and the command line, which has its own lines, see no
difference.
"""

from __future__ import annotations

import logging
import sys

from holdfast import escape, stdio

_logger = logging.getLogger("holdfast")


class _FallbackHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        has_others = bool(logging.getLogger().handlers) or any(each is not self for each in _logger.handlers)
        if not has_others and logging.lastResort is not None:
            stdio.write(sys.stderr, self.format(record) + "\n")


def install() -> None:
    """May be called any number of times."""
    if not any(isinstance(each, _FallbackHandler) for each in _logger.handlers):
        handler = _FallbackHandler(logging.WARNING)
        handler.setFormatter(escape.LogFormatter("holdfast: %(message)s"))
        _logger.addHandler(handler)
