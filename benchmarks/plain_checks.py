"""Trains a plain module beside eager PyTorch: alone, evaluated, under half the budget, and sharded over two ranks."""

from __future__ import annotations

import copy
import logging
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from beside_eager import (
    NUM_RANKS,
    DiffersError,
    doubled,
    launched,
    named_parameters,
    refuse_far,
    refuse_farther,
    relative,
    under_half,
    widened,
    with_rows,
    without_paths,
)
from plain_kinds import PLAIN, Plain
from plain_steps import (
    Record,
    batches_of,
    called,
    finite,
    loss_of,
    optimizer_of,
    refuse_other_bits,
    refuse_other_facts,
    trained,
    trained_on_ranks,
)
from torch import Tensor, nn

from harness.fabric import on_fabric_rank
from thunder_memsave.compiler.pieces.piecewise_module import PiecewiseModule
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.sharded_parameter import is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

CLOSE = 2e-6
"""Largest difference of a number, as a part of the largest one of its tensor: over 8 batches, the gradients of spectral
norm, whose sums are taken in another order, lay between 2e-7 and 1.3e-6 from float64, eager's between 1e-7 and 5e-7. A
larger one passes if float64 says that it is eager's own rounding."""
ZERO = 1e-12
"""Numbers of float64 below it are zero but for rounding, such as gradients of a bias before softmax."""
NUM_SEEDS = 24
DEVIATIONS = 6.0
"""How many standard errors a mean over seeds may be off; the seeds are fixed, so what passes once always does."""
FINITE_STEP = 1e-6
FINITE_CLOSE = 1e-5
"""Of differences in float64, whose rounding is 1e-16 / 1e-6 = 1e-10, and whose curvature counts as 1e-6."""
CHECKS = ("train", "evaluate", "budget", "zero3")


@dataclass(kw_only=True)
class Outcome:
    """What became of one module."""

    name: str
    group: str = ""
    states: dict[str, str] = field(default_factory=dict)
    """By check: `pass`, `pieces`, `refused`, `wrong`, `crash`, `hangs`; or `not here`: eager does not train it."""
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    difference: float | None = None
    """The largest one of training alone, as `CLOSE` counts."""

    @property
    def runs(self) -> bool:
        """Whether all that was checked passes, be it in pieces."""
        return set(self.states.values()) <= {"pass", "pieces"}


def checked(name: str, checks: tuple[str, ...]) -> Outcome:
    """Make the checks of one process."""
    start, plain = time.monotonic(), PLAIN[name]
    outcome = Outcome(name=name, group=plain.group)
    expected = _passes(outcome, "not here", lambda: _eager(plain))
    runs: dict[str, Callable[[], object]] = {
        "train": lambda: _train(plain, expected, outcome),
        "evaluate": lambda: _evaluate(plain),
        "budget": lambda: _budget(plain),
    }
    for check in checks:
        if check in runs and "not here" not in outcome.states:
            _passes(outcome, check, runs[check])
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def checked_on_rank(name: str, rank: int, port: int) -> Outcome:
    """Train under `zero3` as one of two ranks, each with batches of its own."""
    start, plain = time.monotonic(), PLAIN[name]
    outcome = Outcome(name=name, group=plain.group)

    @on_fabric_rank
    def check() -> None:
        _passes(outcome, "zero3", lambda: zero3(plain, rank))

    check(rank, NUM_RANKS, port)
    outcome.seconds = round(time.monotonic() - start, 1)
    return outcome


def _passes(outcome: Outcome, check: str, run: Callable[[], Any]) -> Any:
    """Run a check, and note what became of it; what precedes all checks is noted only if it fails."""
    reason, result = "", None
    with _pieces_said() as pieces:
        try:
            result = run()
        except DiffersError as error:
            state, reason = "wrong", str(error)
        except ThunderMemsaveError as error:
            state, reason = "refused", str(error)
        except Exception as error:
            traceback.print_exc()
            state, reason = "crash", f"{type(error).__name__}: {error}"
        else:
            state, reason = ("pieces", pieces[0]) if pieces else ("pass", "")
    if (check == "not here" and state != "pass") or check != "not here":
        outcome.states[check] = state
    if reason and check in outcome.states:
        outcome.reasons[check] = without_paths(reason)[:600]
    return result


@contextmanager
def _pieces_said() -> Iterator[list[str]]:
    """Collect what the log says about code that runs in eager PyTorch."""
    said: list[str] = []

    class _Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "in eager PyTorch" in (text := record.getMessage()):
                said.append(text)

    log, handler = logging.getLogger("thunder_memsave"), _Keeps(logging.WARNING)
    log.addHandler(handler)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def _eager(plain: Plain) -> Record:
    """Train the module in eager, twice.

    Raises:
        DiffersError: the second time gives other numbers, though nothing is drawn.
    """
    runs = [_trained_in_eager(plain) for _ in range(2)]
    if not plain.draws:
        refuse_other_bits(runs[0].values, runs[1].values)
    return runs[0]


def _trained_in_eager(plain: Plain) -> Record:
    model = plain.made()
    return trained(model, optimizer_of(model), batches_of(plain))


def _trained_by(strategy: ThunderMemsaveStrategy, plain: Plain, *, rank: int | None = None) -> Any:
    """Return the record of the strategy's steps, and the model."""
    model = plain.made()
    fabric = launched(strategy, devices=1 if rank is None else NUM_RANKS)
    called, optimizer = fabric.setup(model, optimizer_of(model))
    return trained(called, optimizer, batches_of(plain, rank or 0), fabric.backward), called


def _train(plain: Plain, expected: Record, outcome: Outcome) -> None:
    found, _ = _trained_by(ThunderMemsaveStrategy(), plain)
    if plain.draws:
        refuse_other_facts(_of_shapes(expected), _of_shapes(found))
        again, _ = _trained_by(ThunderMemsaveStrategy(), plain)
        _refuse_other_draws(plain, found, again)
        _refuse_other_statistics(plain)
        return
    outcome.difference = _refuse_far(
        expected, found, lambda: trained(*_in_float64(plain), _doubled(batches_of(plain)))
    )


def _of_shapes(record: Record) -> dict[str, Any]:
    return {n: f for n, f in record.facts.items() if n in record.values or "type" in n}


def _in_float64(plain: Plain) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = plain.made().double()
    return model, optimizer_of(model)


def _doubled(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def leaf(value: Any) -> Any:
        return value.detach().requires_grad_(value.requires_grad)

    found = [doubled(b) for b in batches]
    for batch in found:
        for name, value in batch.items():
            if isinstance(value, Tensor):
                batch[name] = leaf(value)
            elif isinstance(value, tuple):
                batch[name] = tuple(leaf(v) if isinstance(v, Tensor) else v for v in value)
    return found


def _refuse_far(expected: Record, found: Record, exact: Callable[[], Record]) -> float:
    """Compare with eager, and with float64 where eager's rounding may differ; return the largest difference."""
    refuse_other_facts(expected.facts, found.facts)
    theirs, ours = finite(expected.values), finite(found.values)
    try:
        return refuse_far(theirs, ours, CLOSE)
    except DiffersError as error:
        try:
            true = exact()
        except Exception:
            raise error from None  # eager itself has no float64 of it
        if true.values.keys() != theirs.keys():
            raise
        known = {n: widened(v) for n, v in finite(true.values).items()}
        largest = {n: float(v.abs().max()) for n, v in known.items() if v.numel()}
        zeros = {n for n, size in largest.items() if size < ZERO}
        for n in zeros:
            if float(ours[n].abs().max()) > CLOSE * max(largest.values()):
                raise
        rest = {n: v for n, v in theirs.items() if n not in zeros}
        refuse_farther(known, rest, ours, CLOSE)
        return max(relative(v, ours[n]) for n, v in rest.items())


def _refuse_other_draws(plain: Plain, found: Record, again: Record) -> None:
    """Refuse what one seed does not repeat, and gradients that are not those of the output with its random numbers."""
    if plain.is_smooth or plain.group == "drawn":
        refuse_other_bits(found.values, again.values)
    if plain.is_smooth:
        _refuse_other_slopes(plain)


def _refuse_other_slopes(plain: Plain) -> None:
    """Compare the gradients along one direction with a finite difference, in float64, from one seed."""
    model = plain.made().double()
    called = launched().setup(model)
    batch = _doubled([plain.batch(1)])[0]
    tensors = [v for v in batch.values() if isinstance(v, Tensor) and v.requires_grad]
    tensors += [p for p in model.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(3)
    ways = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in tensors]

    def loss(by: float) -> Tensor:
        with torch.no_grad():
            for tensor, way in zip(tensors, ways, strict=True):
                tensor += by * way
        torch.manual_seed(2)
        return loss_of(called(**batch))

    def number(by: float) -> float:
        return float(loss(by).detach())

    loss(0.0).backward()
    slope = sum(
        float((t.grad * w).sum()) for t, w in zip(tensors, ways, strict=True) if t.grad is not None
    )
    high, low = number(FINITE_STEP), number(-2 * FINITE_STEP)
    difference = (high - low) / (2 * FINITE_STEP)
    if abs(slope - difference) > FINITE_CLOSE * max(abs(slope), abs(difference), 1e-3):
        raise DiffersError(
            f"the gradient along a direction is {slope:.8f}, by differences {difference:.8f}"
        )


def _refuse_other_statistics(plain: Plain) -> None:
    """Compare means over seeds with eager's: of outputs, of their squares, and of the sizes of gradients."""
    eager, ours = plain.made(), launched().setup(plain.made())
    theirs = [_statistics(eager, plain, seed) for seed in range(NUM_SEEDS)]
    found = [_statistics(ours, plain, seed) for seed in range(NUM_SEEDS)]
    for name in theirs[0]:
        a, b = [t[name] for t in theirs], [f[name] for f in found]
        error = math.sqrt((statistics.variance(a) + statistics.variance(b)) / NUM_SEEDS)
        off = abs(statistics.fmean(a) - statistics.fmean(b))
        if off > DEVIATIONS * error + CLOSE * abs(statistics.fmean(a)):
            raise DiffersError(
                f"the mean {name} is off by {off / max(error, 1e-12):.1f} standard errors"
            )


def _statistics(model: Any, plain: Plain, seed: int) -> dict[str, float]:
    batch = plain.batch(1)
    torch.manual_seed(100 + seed)
    record = Record()
    output = called(model, batch, record, "")
    found = {f"{n}": float(v.double().mean()) for n, v in record.values.items()}
    found |= {f"{n} squared": float(v.double().square().mean()) for n, v in record.values.items()}
    if torch.is_grad_enabled():
        loss_of(output).backward()
        for name, p in (*named_parameters(model), *batch.items()):
            if isinstance(p, Tensor) and p.grad is not None:
                found[f"size of the gradient of {name}"] = float(p.grad.abs().double().mean())
        model.zero_grad()
    return found


@torch.no_grad()
def _evaluate(plain: Plain) -> None:
    eager = plain.made().eval()
    ours = launched().setup(plain.made()).eval()
    steady = torch.equal(*(_statistic(plain.made().eval(), plain, seed) for seed in (1, 2)))
    for batch_of in (plain.batch(1), plain.batch(2)):
        expected, found = Record(), Record()
        for called_model, record in ((eager, expected), (ours, found)):
            torch.manual_seed(1)
            called(called_model, copy.deepcopy(batch_of), record, "")
        if plain.draws and not steady:
            refuse_other_facts(_of_shapes(expected), _of_shapes(found))
        else:
            _refuse_far(expected, found, lambda: _evaluated_in_float64(plain, batch_of))  # noqa: B023
    if plain.draws and not steady:
        _refuse_other_statistics_in(plain)


def _statistic(model: Any, plain: Plain, seed: int) -> Tensor:
    return torch.tensor(list(_statistics(model, plain, seed).values()))


def _refuse_other_statistics_in(plain: Plain) -> None:
    evaluated = Plain(
        group=plain.group,
        make=lambda: plain.made().eval(),
        inputs=plain.inputs,
        draws=True,
        is_smooth=plain.is_smooth,
    )
    _refuse_other_statistics(evaluated)


def _evaluated_in_float64(plain: Plain, batch: Any) -> Record:
    record = Record()
    called(plain.made().double().eval(), _doubled([batch])[0], record, "")
    return record


def _budget(plain: Plain) -> None:
    free = ThunderMemsaveStrategy(memory={"budget": 2**40})
    expected, kept = _trained_by(free, plain)
    assert kept is not None, "the strategy knows the plans of models that are alive"
    # Without a plan, what is eager alone decides what a step takes.
    keep_all = 0 if free.plan is None else free.plan.keep_all_peak_bytes
    found, _ = under_half(lambda s: _trained_by(s, plain), keep_all)
    refuse_other_facts(expected.facts, found.facts)
    refuse_other_bits(expected.values, found.values)


def zero3(plain: Plain, rank: int) -> None:
    """Train under `zero3` as one of two ranks that are there already.

    Raises:
        DiffersError: something is not what the means of eager's gradients make it.
    """
    strategy = ThunderMemsaveStrategy(sharding={"mode": "zero3"})
    found, model = _trained_by(strategy, plain, rank=rank)
    batches = [batches_of(plain, r) for r in range(NUM_RANKS)]
    make = (lambda: _Compiled(plain.made(), may_be_split=True)) if plain.draws else plain.made
    expected = _on_ranks(make, rank, batches)
    sharded = {n for n, p in named_parameters(model) if is_sharded(p)}
    for key in found.values.keys() & expected.values.keys():
        if (
            key.partition("parameter .")[2] in sharded
            or key.partition("gradient of ")[2] in sharded
        ):
            found.values[key] = with_rows(expected.values[key], found.values[key], rank)
            found.facts[key] = expected.facts[key]
    exact = [_doubled(b) for b in copy.deepcopy(batches)]
    _refuse_far(expected, found, lambda: _on_ranks(lambda: plain.made().double(), rank, exact))


class _Compiled(PiecewiseModule):
    """Draws the same numbers as the strategy on ranks does."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call("forward", *args, **kwargs)


def _on_ranks(make: Callable[[], nn.Module], rank: int, batches: Any) -> Record:
    models = [make() for _ in range(NUM_RANKS)]
    return trained_on_ranks(models, copy.deepcopy(batches), rank)
