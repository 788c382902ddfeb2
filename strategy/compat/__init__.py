"""Imports Thunder with the work-arounds that the installed versions need, one file per defect."""

import importlib
import sys

from thunder_memsave.compat import (
    absent_transformer_engine,
    cpu_scalar_gradients,
    torch213_named_tensors,
)


def apply() -> None:
    """Import thunder; every module of ours that needs it calls this before its own imports."""
    if "thunder" in sys.modules:
        return
    with torch213_named_tensors.stubs(), absent_transformer_engine.silence():
        importlib.import_module("thunder")
    cpu_scalar_gradients.apply()
