"""Dynamo before torch 2.13 asks nothing of a module's parameters while the module's dictionary of them is unchanged.

A parameter that begins to require a gradient, or whose `.data` gets another shape, does not change that dictionary, so
that the graph for what it was before runs on: its gradient stays None, under `torch.compile` too.

Delete this file when torch 2.13 is the oldest supported version; `tests/compat/test_stale_tensor_guards.py` has the
canary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from packaging.version import Version

IS_NEEDED = Version(torch.__version__).release < (2, 13)


def settings() -> Mapping[str, bool]:
    """Return the settings of Dynamo with which each call asks about each parameter."""
    return {"skip_tensor_guards_with_matching_dict_tags": False} if IS_NEEDED else {}
