"""Checks states before they are loaded, and keeps their dtypes, which PyTorch would convert to the parameter's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.optim.formats import FP8_MAX, Format, State, format_of

Layout = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shape and dtype of state tensors by key."""

_MOST_STEPS = 2**24
"""Steps that float32 counts."""


class StateError(ThunderMemsaveError, ValueError):
    """A state is none that a step of the optimizer writes; nothing was changed."""

    problem = ""
    """The text of what is wrong: a sentence without its subject and its end."""
    number = 0
    """The parameter's, in the order of the groups."""

    @classmethod
    def of(cls, problem: str, *, number: int) -> StateError:
        """Make the error for a parameter; the arguments are the fields."""
        error = cls(
            f"the state of parameter {number} {problem}; load what was saved with these states"
        )
        error.problem, error.number = problem, number
        return error


@dataclass(frozen=True, slots=True)
class Held:
    """Keeps a tensor from being converted."""

    value: Tensor


def state_device(optimizer: Optimizer, p: Tensor) -> torch.device:
    """Return the device on which an optimizer keeps the states of a parameter between steps."""
    find: Callable[[Tensor], torch.device] | None = getattr(optimizer, "device_of_states", None)
    return p.device if find is None else find(p)


def refuse_other_states(
    current: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse groups whose states were saved in another format.

    Raises:
        StateError: They were.
    """
    number = 0
    for mine, theirs in zip(current, saved, strict=False):
        if (text := other_states(mine, theirs)) is not None:
            raise StateError.of(f"has {text}", number=number)
        number += len(mine["params"])


def other_states(group: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """Say how the formats of the states of two groups differ; None: they do not."""
    here, there = group.get("states", "float32"), saved.get("states", "float32")
    return None if here == there else f"states in {there} in the file, {here} in the optimizer"


def layout_problem(values: Mapping[str, Any], expected: Layout) -> str | None:
    """Say which state tensor is missing, not known, or of another shape or dtype; None: all are right."""
    for key in (*expected, *values):
        if key not in values:
            return f"has no {key!r}"
        if key not in expected:
            return f"has {key!r}, which is none of {list(expected)}"
        value, (shape, dtype) = values[key], expected[key]
        if not isinstance(value, Tensor):
            return f"has a {type(value).__name__} as {key!r}, which must be a tensor"
        if value.shape != shape or value.dtype != dtype:
            return (
                f"has {key!r} of shape {tuple(value.shape)} in {value.dtype}, which must be of shape {tuple(shape)} "
                f"in {dtype}"
            )
    return None


def value_problem(
    values: Mapping[str, Tensor], kept: Sequence[State], states: Format, shape: torch.Size
) -> str | None:
    """Say which value is none that a step writes; None: all are possible."""
    step = float(values["step"])
    if not (1 <= step <= _MOST_STEPS and step.is_integer()):
        return f"has 'step' {step:g}, which must be a whole number from 1 to {_MOST_STEPS}"
    found = format_of(states, shape)
    for state in kept:
        stored = values[state.name]
        if found in ("float32", "bfloat16"):
            what = _bad_numbers(stored, is_signed=state.is_signed)
        else:
            what = _bad_codes(stored, state) if found == "fp8" else None
            what = what or _bad_scales(values[state.scales], state, found)
        if what is not None:
            return f"has {what} in {state.name!r}"
    return None


def _bad_numbers(values: Tensor, *, is_signed: bool) -> str | None:
    if not bool(torch.isfinite(values).all()):
        return "a value that is not finite"
    return "a negative value" if not is_signed and bool((values < 0).any()) else None


def _bad_codes(codes: Tensor, state: State) -> str | None:
    if bool((codes.bitwise_and(0x7F) == 0x7F).any()):
        return "a code that stands for no number"
    return "a negative value" if not state.is_signed and bool((codes > 0x7F).any()) else None


def _bad_scales(scales: Tensor, state: State, states: Format) -> str | None:
    largest = scales * (FP8_MAX if states == "fp8" else 1)
    if not state.is_signed:
        largest = largest.square()
    if not bool(torch.isfinite(largest).all()):
        return "a scale that is not finite, or too large"
    return "a negative scale" if bool((scales < 0).any()) else None
