"""Before torch 2.13, Dynamo logs an error after every capture if two functions are to be ignored.

To log its own settings it sorts every set among them, and `ignore_logging_functions` is a set of
functions, which cannot be sorted: "Unexpected exception logging compilation metrics", a traceback of
thirty lines per capture, although nothing went wrong. torch 2.13 does not log that setting.

Delete this file when pyproject.toml no longer allows a torch below 2.13.
"""

from __future__ import annotations

import torch
from packaging.version import Version


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(torch.__version__) < Version("2.13")


def apply() -> None:
    """Leave Dynamo's settings out of its log after a capture, if it cannot log them."""
    if is_needed():
        import torch._dynamo.utils

        torch._dynamo.utils._get_dynamo_config_for_logging = _unknown


def _unknown() -> str | None:
    return None
