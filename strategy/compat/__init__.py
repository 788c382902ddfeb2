"""Work-arounds for other projects' defects and changed names, one file each.

`apply` imports Thunder with those that it needs; the others are imported where they are used. A file that begins with
`torch214_` is for that version and later ones, and so on for others. What Thunder misses only while it is imported goes
into `removed_names`, all else into `apply`. Each file has a version guard, the condition for deleting it, and a canary
in tests/compat/. `foreign_messages.py` reads other projects' error texts.
A private function that a version renamed belongs here too: its caller imports it from a file of this package.
"""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from thunder_memsave.compat import (
    average_batch_norms,
    byte_targets,
    dynamo_compile_metrics,
    dynamo_function_names,
    fake_norm_statistics,
    fake_views,
    hidden_transformer_engine,
    ignored_mark_dirty,
    padded_encoders,
    repeated_thunder_work,
    torch213_named_tensors,
    torch214_function_apply,
)


@functools.cache
def apply() -> None:
    """Import Thunder with its work-arounds; each package that needs it calls this before importing its modules."""
    with removed_names(), hidden_transformer_engine.hide():
        importlib.import_module("thunder")
    average_batch_norms.apply()
    byte_targets.apply()
    dynamo_function_names.apply()
    padded_encoders.apply()
    dynamo_compile_metrics.apply()
    fake_norm_statistics.apply()
    fake_views.apply()
    ignored_mark_dirty.apply()
    repeated_thunder_work.apply()


@contextmanager
def removed_names() -> Iterator[None]:
    """Give torch what Thunder reads at import and newer versions of torch lack."""
    with torch213_named_tensors.stubs(), torch214_function_apply.as_method():
        yield
