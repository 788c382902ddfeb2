"""Shows what this package logs on stderr, each message with its level: `warning: ...`."""

from __future__ import annotations

import logging
import sys

_LOGGER = "thunder_memsave"


class _Labelled(logging.Handler):
    """Looks stderr up for each message, as tests and notebooks replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        print(f"{record.levelname.lower()}: {record.getMessage()}", file=sys.stderr, flush=True)


def label_messages() -> None:
    """Label the messages of this process from here on, unless the program that calls has handlers of its own."""
    logger = logging.getLogger(_LOGGER)
    if not logger.hasHandlers():
        logger.addHandler(_Labelled(level=logging.WARNING))
