"""Trains a small model beside eager PyTorch: alone, evaluated, under half the budget, and sharded over two ranks."""

from __future__ import annotations

import copy
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from beside_eager import (
    NUM_RANKS,
    DiffersError,
    Values,
    doubled,
    launched,
    named_parameters,
    refuse_far,
    refuse_farther,
    relative,
    under_half,
    with_rows,
    without_paths,
)
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from toy_architectures import Batch, Made, NotHereError, toys

from harness.fabric import on_fabric_rank
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

CLOSE = 1e-5
"""Largest difference of a number, as a part of the largest one of its tensor. A larger one passes if float64 says that
it is eager's own rounding, such as in gradients that would be zero without any."""
CHECKS = ("train", "evaluate", "budget", "zero3")


@dataclass(kw_only=True)
class Outcome:
    """What became of one architecture."""

    name: str
    state: str = "trains"
    """`trains`, `differs`, `refused`, `fails`, `hangs`; or `not here`: eager itself does not train it so."""
    check: str = ""
    """The check of `CHECKS` that did not pass."""
    reason: str = ""
    seconds: float = 0.0
    difference: float | None = None
    """The largest one of training alone, as `CLOSE` counts."""
    passed: list[str] = field(default_factory=list)


def checked(name: str, checks: tuple[str, ...]) -> Outcome:
    """Make the checks in this process, but that of several ranks; the first that does not pass ends them."""
    start = time.monotonic()
    outcome = Outcome(name=name)
    try:
        made, expected = eager(name)
        _refuse_unsteady(made, expected)
    except Exception as error:
        outcome.state, outcome.reason = "not here", f"{type(error).__name__}: {error}"
        return _ended(outcome, start)
    run: Mapping[str, Callable[[], None]] = {
        "train": lambda: _train(made, expected, outcome),
        "evaluate": lambda: _evaluate(made),
        "budget": lambda: _budget(made),
    }
    for check in checks:
        if check in run and not _passes(outcome, check, run[check]):
            break
    return _ended(outcome, start)


def checked_on_rank(name: str, rank: int, port: int) -> Outcome:
    """Train under `zero3` as one of two ranks, each with a batch of its own."""
    start = time.monotonic()
    outcome = Outcome(name=name)

    @on_fabric_rank
    def check() -> None:
        _passes(outcome, "zero3", lambda: _zero3(name, rank))

    check(rank, NUM_RANKS, port)
    return _ended(outcome, start)


def eager(name: str, *, scale: int = 1) -> tuple[Made, Values]:
    """Return a model that eager trains, and the loss and gradients of a copy: some models keep values of a step.

    Args:
        name: Of the architecture.
        scale: Of its widths and of the length of rows.

    Raises:
        Exception: that of the last way to make it, if eager trains none.
    """
    *others, last = toys(name, scale=scale)
    for make in others:
        try:
            made = make()
            return made, stepped(copy.deepcopy(made[0]), made[1](1))
        except Exception:
            continue
    made = last()
    return made, stepped(copy.deepcopy(made[0]), made[1](1))


def _refuse_unsteady(made: Made, expected: Values) -> None:
    """Refuse models whose own second step from one seed has other numbers, such as Reformer's."""
    again = stepped(copy.deepcopy(made[0]), made[1](1))
    worst = max(relative(a, again[n]) for n, a in expected.items())
    if worst > CLOSE:
        raise NotHereError(f"eager's own second step differs by {worst:.1e}")


def stepped(
    model: nn.Module, batch: Batch, backward: Callable[[Tensor], object] = Tensor.backward
) -> Values:
    """Return the loss and all gradients of one step; the model is left without gradients."""
    torch.manual_seed(1)
    loss = loss_of(model(**batch))
    backward(loss)
    found = {n: _rows(p.grad) for n, p in named_parameters(model) if p.grad is not None}
    model.zero_grad()
    return {"the loss": loss.detach(), **found}


def loss_of(output: Any) -> Tensor:
    """Return the model's loss; if it has none, the mean square of its floating outputs."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = tree_leaves(dict(output) if hasattr(output, "keys") else vars(output))
    floating = [v for v in leaves if isinstance(v, Tensor) and v.is_floating_point()]
    return torch.stack([v.float().square().mean() for v in floating if v.requires_grad]).sum()


def _ended(outcome: Outcome, start: float) -> Outcome:
    outcome.seconds = round(time.monotonic() - start, 1)
    outcome.reason = without_paths(outcome.reason)[:400]
    return outcome


def _passes(outcome: Outcome, check: str, run: Callable[[], None]) -> bool:
    outcome.check = check
    try:
        run()
    except DiffersError as error:
        outcome.state, outcome.reason = "differs", str(error)
    except ThunderMemsaveError as error:
        outcome.state, outcome.reason = "refused", str(error)
    except Exception as error:
        traceback.print_exc()
        outcome.state, outcome.reason = "fails", f"{type(error).__name__}: {error}"
    else:
        outcome.check = ""
        outcome.passed.append(check)
    return not outcome.check


def _train(made: Made, expected: Values, outcome: Outcome) -> None:
    model, batch = made
    found = stepped(_set_up(model), batch(1))
    try:
        outcome.difference = refuse_far(expected, found, CLOSE)
    except DiffersError as error:
        try:
            exact = stepped(copy.deepcopy(model).double(), doubled(batch(1)))
        except Exception:
            raise error from None  # eager itself has no float64 of it
        refuse_farther(exact, expected, found, CLOSE)


def _evaluate(made: Made) -> None:
    model, batch = copy.deepcopy(made[0]).eval(), made[1](1)
    with torch.no_grad():
        expected = tree_leaves(dict(model(**batch)))
        found = tree_leaves(dict(_set_up(model)(**batch)))
    for index, (theirs, ours) in enumerate(zip(expected, found, strict=True)):
        if isinstance(theirs, Tensor) and theirs.is_floating_point():
            refuse_far({f"output {index}": theirs}, {f"output {index}": ours}, CLOSE)


def _budget(made: Made) -> None:
    model, batch = made
    free = ThunderMemsaveStrategy(memory={"budget": 2**40})
    expected, peak_bytes = _planned_step(model, batch, free)
    found, _ = under_half(lambda strategy: _planned_step(model, batch, strategy), peak_bytes)
    for name, values in expected.items():
        if not torch.equal(values, found[name]):
            raise DiffersError(f"{name} has other bits, by {relative(values, found[name]):.1e}")


def _planned_step(
    model: nn.Module, batch: Callable[[int], Batch], strategy: ThunderMemsaveStrategy
) -> tuple[Values, int]:
    """Return the second of two steps, which is planned also where it runs in pieces, and its peak; 0: no plan."""
    fabric = launched(strategy)
    called = fabric.setup(copy.deepcopy(model))
    for _ in range(2):
        values = stepped(called, batch(1), fabric.backward)
    plan = strategy.plan
    if plan is None:
        return values, 0
    return values, max(plan.keep_all_peak_bytes, plan.predicted_peak_bytes)


def _zero3(name: str, rank: int) -> None:
    (model, batch), _ = eager(name)
    sharded = _set_up(model, ThunderMemsaveStrategy(sharding={"mode": "zero3"}), devices=NUM_RANKS)
    found = stepped(sharded, batch(rank + 1))
    parts = {n for n, p in named_parameters(sharded) if is_sharded(p)}
    expected = _means(model, batch, rank)

    def whole(values: Values) -> Values:
        """Put this rank's rows in the place of eager's."""
        return {
            n: with_rows(v, found[n], rank) if n in parts else found[n] for n, v in values.items()
        }

    try:
        refuse_far(expected, whole(expected), CLOSE)
    except DiffersError as error:
        try:
            exact = _means(copy.deepcopy(model).double(), lambda seed: doubled(batch(seed)), rank)
        except Exception:
            raise error from None
        refuse_farther(exact, expected, whole(expected), CLOSE)


def _means(model: nn.Module, batch: Callable[[int], Batch], rank: int) -> Values:
    """Return eager's loss of one rank's batch, and the means of the gradients of all."""
    steps = [stepped(model, batch(seed)) for seed in range(1, NUM_RANKS + 1)]
    names = dict.fromkeys(n for step in steps for n in step)
    means = {
        n: torch.stack([step[n] for step in steps if n in step]).sum(0) / NUM_RANKS for n in names
    }
    return {**means, "the loss": steps[rank]["the loss"]}


def _set_up(
    model: nn.Module, strategy: ThunderMemsaveStrategy | None = None, *, devices: int = 1
) -> Any:
    return launched(strategy, devices=devices).setup(copy.deepcopy(model))


def _rows(grad: Tensor) -> Tensor:
    return as_rows(grad).detach().clone()
