"""Imports Thunder with the work-arounds that the installed versions need, one file per defect."""

import functools
import importlib

from thunder_memsave.compat import (
    absent_transformer_engine,
    cpu_scalar_gradients,
    derivatives_by_name,
    dynamo_function_names,
    hidden_transformer_engine,
    ordered_alias_updates,
    torch211_compile_metrics,
    torch213_named_tensors,
)


@functools.cache
def apply() -> None:
    """Import Thunder with its work-arounds; each package that needs it calls this before importing its modules."""
    with (
        torch213_named_tensors.stubs(),
        absent_transformer_engine.silence(),
        hidden_transformer_engine.hide(),
    ):
        importlib.import_module("thunder")
    cpu_scalar_gradients.apply()
    derivatives_by_name.apply()
    dynamo_function_names.apply()
    ordered_alias_updates.apply()
    torch211_compile_metrics.apply()
