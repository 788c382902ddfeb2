"""Dynamo tokenizes whole Python modules for a log line even if that log is off.

For every call that it puts into a graph it formats the header of that line, with the name of the
function around the line of code, before it asks whether the log is on. To find the name it
tokenizes the file: seconds for `torch/nn/functional.py` and the files of transformers' models.

Delete this file when `tests/compat/test_dynamo_function_names.py` says that torch asks no more.
"""

from __future__ import annotations

import logging

_LOG = "torch._dynamo.output_graph.__trace_call"


def apply() -> None:
    """Let Dynamo look for names of functions only if `TORCH_LOGS=trace_call` shows them."""
    from torch._dynamo import symbolic_convert

    known = symbolic_convert.get_funcname

    def get_funcname(filename: str, lineno: int) -> str | None:
        is_shown = logging.getLogger(_LOG).isEnabledFor(logging.DEBUG)
        return known(filename, lineno) if is_shown else None

    symbolic_convert.get_funcname = get_funcname
