"""Defines the errors that users see, and finds the line of the user's code that they name."""

from __future__ import annotations

import math
import sysconfig
import traceback
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thunder_memsave.planner.graph import Plan

DOES_NOT_FIT = 3
"""The exit status of a command whose run does not fit its memory budget."""

_LIBRARIES = (
    sysconfig.get_paths()["purelib"],
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent),
)


class ThunderMemsaveError(Exception):
    """An error for the user: `str(error)` is the whole message; programs decide by the fields.

    Every error of this package derives from it, and from the built-in error that fits.

    Args:
        message: What was asked, what is true, and what to do next.
        key: The setting that it is about, by its dotted name in the run file, such as `train.epochs`.
        place: File and line of the mistake, if known, such as `rows.jsonl:7`.
        advice: What to do next, if only a caller can tell; it follows the message.
    """

    code: int | None = 1
    """Exit status of a command that ends with it; None: print a traceback, for a defect or an error in user code."""

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        place: str | None = None,
        advice: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.place = place
        self.advice = advice

    def __str__(self) -> str:
        return self.message if self.advice is None else f"{self.message} {self.advice}"


class CaptureError(ThunderMemsaveError, RuntimeError):
    """A module method cannot be captured as one graph."""


class CompileError(ThunderMemsaveError, RuntimeError):
    """A captured graph cannot be compiled, or would give other results than eager PyTorch."""


class DoubleBackwardError(ThunderMemsaveError, RuntimeError):
    """A derivative of a compiled module's derivative was asked for."""

    code = None  # the traceback shows the user


class SavedTensorsError(ThunderMemsaveError, RuntimeError):
    """A tensor that backward reads was freed by an earlier backward, or overwritten since the forward."""

    code = None  # the traceback shows the user


class LateTensorError(ThunderMemsaveError, RuntimeError):
    """Logits that a compiled call left out were read when they could no longer be made, or differentiated."""

    code = None  # the traceback shows the user


class PlanError(ThunderMemsaveError, RuntimeError):
    """A plan cannot be applied to a trace."""


class HostMemoryError(ThunderMemsaveError, RuntimeError):
    """The host has no room for what a plan offloads to it."""

    code = DOES_NOT_FIT


class ExportError(ThunderMemsaveError, RuntimeError):
    """The exported files differ from the trained model."""


class BudgetError(ThunderMemsaveError, ValueError):
    """No plan was found with which a step stays within the memory budget."""

    code = DOES_NOT_FIT

    def __init__(
        self,
        text: str,
        *,
        budget_bytes: int | None = None,
        smallest_bytes: int | None = None,
        bound_bytes: int | None = None,
        smallest_plan: Plan | None = None,
    ) -> None:
        """`smallest_bytes` is the peak of `smallest_plan`; `bound_bytes` a lower bound on the peak of all plans."""
        super().__init__(text)
        self.budget_bytes = budget_bytes
        self.smallest_bytes = smallest_bytes
        self.bound_bytes = bound_bytes
        self.smallest_plan = smallest_plan

    @classmethod
    def no_plan(
        cls,
        *,
        budget_bytes: int,
        smallest_bytes: int,
        bound_bytes: int,
        smallest_plan: Plan | None = None,
        of: str = "",
    ) -> BudgetError:
        """Make the error for a search without a plan for `budget_bytes`; `of`, if given, says what the plans are of."""
        whose = f" for {of}" if of else ""
        return cls(
            f"the budget is {budget_bytes:,} bytes, and no plan was found that stays within it; the smallest budget "
            f"for which one was found is {smallest_bytes:,} bytes ({_rounded_up(smallest_bytes)}){whose}, and below "
            f"{bound_bytes:,} there is none. Raise the budget to that, lower the micro-batch size or the sequence "
            "length, or shard over more ranks.",
            budget_bytes=budget_bytes,
            smallest_bytes=smallest_bytes,
            bound_bytes=bound_bytes,
            smallest_plan=smallest_plan,
        )


def _rounded_up(nbytes: int) -> str:
    """Return a number of bytes as one types it, and not less, such as `4.58MiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{math.ceil(100 * nbytes / size) / 100:.2f}{unit}"
    return f"{nbytes}B"


def user_frame(stack: Iterable[traceback.FrameSummary] | None) -> str:
    """Return `file:line in function` of the innermost frame outside of installed libraries, else of the innermost."""
    frames = list(stack or ())
    if not frames:
        return "an unknown line"
    own = [f for f in frames if not f.filename.startswith(_LIBRARIES)]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno} in {frame.name}"


@lru_cache(maxsize=1024)
def user_frame_of_text(stack_trace: str | None) -> str:
    """Do the same for the text that FX keeps with a node (`File "x.py", line 3, in f` lines)."""
    frames = []
    for line in (stack_trace or "").splitlines():
        line = line.strip()
        if line.startswith('File "'):
            filename, _, rest = line[6:].partition('", line ')
            number, _, name = rest.partition(", in ")
            frames.append(traceback.FrameSummary(filename, int(number), name, lookup_line=False))
    return user_frame(frames)
