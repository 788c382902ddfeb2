"""Compares numbers with eager's and with float64's, and finds half of a budget, for scripts that run many models."""

from __future__ import annotations

import site
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.fabric import Fabric
from lightning.fabric.wrappers import _FabricModule
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import BudgetError
from thunder_memsave.strategy import ThunderMemsaveStrategy

ROOT = Path(__file__).parents[1]
AS_FAR = 3.0
"""Most times eager's distance from float64 that the strategy's may be."""
NUM_RANKS = 2

MOST_GRAPHS = 8

Values = dict[str, Tensor]
Result = TypeVar("Result")


class DiffersError(Exception):
    """A number is not eager's, or not the one of another plan; the message says which and by how much."""


def relative(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference as a part of the largest expected number; tiny tensors count as 1e-6."""
    if not expected.numel():
        return 0.0
    largest = max(float(expected.abs().max()), 1e-6)
    difference = float((expected - found).abs().max())
    return difference / largest if difference == difference else float("inf")


def refuse_far(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], close: float) -> float:
    """Return the largest relative difference.

    Raises:
        DiffersError: it is larger than `close`, or a number is there on one side only.
    """
    if missing := sorted(expected.keys() ^ found.keys()):
        raise DiffersError(f"{missing[0]} is there on one side only")
    worst, where = max(((relative(a, found[n]), n) for n, a in expected.items()), default=(0.0, ""))
    if not worst <= close:
        raise DiffersError(f"{where} by {worst:.1e}")
    return worst


def refuse_farther(
    exact: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    found: Mapping[str, Tensor],
    close: float,
) -> None:
    """Refuse numbers that are far from eager's, and farther from float64's than eager's are.

    Raises:
        DiffersError: there are such.
    """
    for name, theirs in expected.items():
        far = relative(exact[name], widened(found[name]))
        allowed = AS_FAR * relative(exact[name], widened(theirs))
        if relative(theirs, found[name]) > close and not far <= allowed:
            raise DiffersError(f"{name} by {far:.1e} from float64, eager by {allowed / AS_FAR:.1e}")


def widened(value: Any) -> Any:
    """Return a tensor of real or complex numbers in twice the precision; anything else as it is."""
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def doubled(batch: dict[str, Any]) -> dict[str, Any]:
    """Return a batch in twice the precision."""
    found: dict[str, Any] = tree_map(widened, batch)
    return found


def under_half(step: Callable[[ThunderMemsaveStrategy], Result], keep_all_bytes: int) -> Result:
    """Return what a step gives under the bytes half the way between the smallest plan and that of keeping everything.

    A later graph of the same step, such as one for another number of Python, may need more; then it gets its smallest.

    Args:
        step: Makes a step by the strategy that it is given.
        keep_all_bytes: The peak of keeping everything.
    """
    budget_bytes = 1
    for num_raised in range(MOST_GRAPHS):
        try:
            result = step(ThunderMemsaveStrategy(memory={"budget": budget_bytes}))
        except BudgetError as error:
            if error.smallest_bytes is None:
                raise
            half = (error.smallest_bytes + keep_all_bytes) // 2 if num_raised == 0 else 0
            budget_bytes = max(error.smallest_bytes, half)
        else:
            assert num_raised > 0, "no step takes one byte"
            return result
    raise AssertionError(f"a step has more than {MOST_GRAPHS} graphs")


def launched(strategy: ThunderMemsaveStrategy | None = None, *, devices: int = 1) -> Fabric:
    """Return a Fabric on the CPU."""
    fabric = Fabric(
        accelerator="cpu", devices=devices, strategy=strategy or ThunderMemsaveStrategy()
    )
    fabric.launch()
    return fabric


def with_rows(whole: Tensor, rows: Tensor, rank: int) -> Tensor:
    """Return `whole` with this rank's rows in their place."""
    new, first = whole.clone(), rank * rows.shape[0]
    part = new[first : first + rows.shape[0]]
    part.copy_(rows[: part.shape[0]])
    return new


def without_paths(text: str) -> str:
    """Return a message in one line, without the folders of this machine."""
    text = " ".join(text.split())
    for directory in (*site.getsitepackages(), ROOT):
        text = text.replace(f"{directory}/", "")
    return text


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters by the names that they have in the model that was set up."""
    return list(inner(model).named_parameters())


def inner(model: nn.Module) -> nn.Module:
    """Return the model that was set up or compiled."""
    return model.module if isinstance(model, (_FabricModule, CompiledModule)) else model
