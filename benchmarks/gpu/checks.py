"""A check, where it runs, and its outcome: passed, failed, or not run with the reason."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["passed", "failed", "not run"]
NEEDS_CUDA = "needs CUDA"


@dataclass(frozen=True)
class Target:
    """The kind of device that checks run on."""

    device: Literal["cuda", "cpu"]

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a check found: a line, numbers for the JSON, and rows of a table of their own."""

    line: str
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Check:
    """A question to the machine; `run` returns the evidence, or raises."""

    name: str
    run: Callable[[Target], Measured | str]
    needs_cuda: bool = False
    limit_s: float = 60.0
    """Seconds after which it counts as hanging."""
    group: str = ""
    """Checks of one group share a process; an empty name is a process of its own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of its process, the same for all checks of a group."""
    after: str = ""
    """The check that must have ended before, where groups run side by side."""
    alone: bool = False
    """Whether nothing else may run meanwhile: it measures time."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a check."""

    name: str
    state: State
    reason: str
    seconds: float = 0.0
    numbers: Mapping[str, Any] = field(default_factory=dict)


class NotRunError(Exception):
    """A check cannot run here; the message says what it lacks."""


def require_triton(target: Target, why_not: Callable[[], str | None]) -> None:
    """Raise `NotRunError` where neither a GPU, as `why_not` says, nor Triton's interpreter runs kernels."""
    reason = why_not() if target.is_cuda else _why_not_interpreted()
    if reason is not None:
        raise NotRunError(reason)


def _why_not_interpreted() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") != "1":
        return "TRITON_INTERPRET is not 1, and Triton launches nothing on a CPU"
    return None


class WrongError(Exception):
    """A check found something else than it must; the message has the numbers."""

    def __init__(self, text: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(text)
        self.numbers = numbers or {}


def require(condition: bool, text: str) -> None:
    """Raise `WrongError` unless the condition holds."""
    if not condition:
        raise WrongError(text)


def outcome_of(check: Check, target: Target) -> Outcome:
    """Run a check in this process; no error of it leaves this function."""
    if check.needs_cuda and not target.is_cuda:
        return Outcome(name=check.name, state="not run", reason=NEEDS_CUDA)
    start = time.monotonic()
    state, reason, numbers = _run(check, target)
    if target.is_cuda:
        gc.collect()  # the next check counts the device's bytes
    return Outcome(
        name=check.name,
        state=state,
        reason=reason,
        seconds=round(time.monotonic() - start, 1),
        numbers=numbers,
    )


def _run(check: Check, target: Target) -> tuple[State, str, Mapping[str, Any]]:
    try:
        found = check.run(target)
    except NotRunError as error:
        return "not run", str(error), {}
    except WrongError as error:
        return "failed", str(error), error.numbers
    except Exception as error:  # the other checks go on
        traceback.print_exc()
        return "failed", _one_line(error), {}
    if isinstance(found, str):
        found = Measured(line=found)
    return "passed", found.line, found.numbers


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else 'without a message'}"
