"""Thunder 0.2.6 warns at every import where the optional TransformerEngine is not installed.

`thunder/executors/transformer_engineex.py` does so whether or not fp8 is used, once per
process and rank. Nothing is wrong and nobody can act on it, so the warning is suppressed.

Delete this file when the oldest Thunder that pyproject.toml allows is silent about it;
`tests/compat/test_absent_transformer_engine.py` fails when the installed one is.
"""

import importlib.metadata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from packaging.version import Version

MESSAGE = "transformer_engine module not found!"


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(importlib.metadata.version("lightning-thunder")) <= Version("0.2.6")


@contextmanager
def silence() -> Iterator[None]:
    """Drop this one warning while Thunder is imported."""
    with warnings.catch_warnings():
        if is_needed():
            warnings.filterwarnings("ignore", message=MESSAGE, category=UserWarning)
        yield
