"""Thunder 0.2.6 loads an installed TransformerEngine at every import, and warns about an absent one.

`thunder/executors/transformer_engineex.py` and `transformer_engine_v1ex.py` do so for executors that this package never
uses: it takes seconds, `import thunder` raises if TransformerEngine's Python package is installed without an extension
built for the installed PyTorch, and with TransformerEngine 2.10 and later it warns about a removed name. While we
import Thunder, it is told that there is no TransformerEngine, and its warning of that is suppressed. To use Thunder's
own executors for it, import Thunder before this package.

Delete this file when the oldest Thunder that pyproject.toml allows loads TransformerEngine for its executors' users
only, and is silent about an absent one; `tests/compat/test_hidden_transformer_engine.py` fails when the installed one
does or is.
"""

import importlib.metadata
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from lightning_utilities.core import imports
from packaging.version import Version

MESSAGE = "transformer_engine module not found!"
_NAME = "transformer_engine"


def is_needed() -> bool:
    """Return whether the installed version has the defect."""
    return Version(importlib.metadata.version("lightning-thunder")) <= Version("0.2.6")


@contextmanager
def hide() -> Iterator[None]:
    """Tell Thunder that TransformerEngine is not installed."""
    if not is_needed():
        yield
        return
    asked = imports.package_available

    def package_available(package_name: str) -> bool:
        return package_name != _NAME and asked(package_name)

    with patch.object(imports, "package_available", package_available), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=MESSAGE, category=UserWarning)
        yield
