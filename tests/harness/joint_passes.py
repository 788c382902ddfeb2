"""Puts other passes over the joint trace into the list of steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import thunder_memsave.compiler.pipeline as pipeline_module
from thunder_memsave.compiler.pipeline import STEPS
from thunder_memsave.compiler.state import State
from thunder_memsave.passes.step import Pass, Step, on_joint

JOINT_PASSES = (
    *("keep_overwritten", "leave_out_zeros", "join_views", "merge_equal"),
    *("gather_in_compute_dtype", "gather_in_fp8"),
    *("add_embedding_gradients", "fetch_weights", "tile_rows", "regather"),
)
"""Steps that come after the executors have claimed operations, and before the plan."""


@contextmanager
def joint_passes(*passes: str | Pass) -> Iterator[None]:
    """What is compiled inside has these instead: steps by name, and passes of the test's own."""
    first = next(number for number, step in enumerate(STEPS) if step.name in JOINT_PASSES)
    rest = [step for step in STEPS[first:] if step.name not in JOINT_PASSES]
    changed = (*STEPS[:first], *map(_step, passes), *rest)
    with patch.object(pipeline_module, "STEPS", changed):
        yield


def _step(step: str | Pass) -> Step[State]:
    if isinstance(step, str):
        return next(each for each in STEPS if each.name == step)
    return Step(name="of a test", does="what the test says", do=on_joint(step))
