"""Micro-batches inside `no_backward_sync` communicate nothing, keep their sum, and give one process's gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from harness.fabric import all_reduced, make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.traces import collectives
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.sharding.rows import own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2
NUM_MICRO_BATCHES = 3


class Net(nn.Module):
    """Has an odd number of rows, a scalar, a frozen bias, and a part that only one method uses."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 5)
        self.down = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.extra = nn.Linear(3, 3, bias=False)
        self.up.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale

    def with_extra(self, x: Tensor) -> Tensor:
        return self.extra(self(x))

    def two(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.up(x), self.extra(x[:, :3])


NUM_TRAINED = 4  # up.weight, down.weight, down.bias, scale: `extra` is not in forward


def build(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(seed: int) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))


class Traffic(TorchDispatchMode):
    """Counts the collectives of each kind that this rank starts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.started: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d":
            self.started["gather" if "gather" in func.__name__ else "reduction"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def traffic() -> Iterator[Counter[str]]:
    with Traffic() as mode:
        yield mode.started


def run(fabric: Fabric, model: Any, method: str, seed: int, *, last: bool) -> None:
    """Return one micro-batch of this rank, half of the rows."""
    with fabric.no_backward_sync(model, enabled=not last):
        rows = batch(seed)[fabric.global_rank :: NUM_RANKS].to(next(model.parameters()).dtype)
        fabric.backward(getattr(model, method)(rows).square().mean())


def expected(*calls: tuple[str, int]) -> dict[str, Tensor | None]:
    """Return the gradients of one process on all rows."""
    reference = build()
    for method, seed in calls:
        getattr(reference, method)(batch(seed)).square().mean().backward()
    return {name: p.grad for name, p in reference.named_parameters()}


def check_gradients(fabric: Fabric, model: Any, whole: dict[str, Tensor | None]) -> None:
    dp = strategy_of(fabric).data_parallel
    assert dp is not None
    for name, p in model._original_module.named_parameters():
        if (grad := whole[name]) is None:
            assert p.grad is None, name
            continue
        rows = take_rows(grad, own_rows(grad.shape, dp)) if is_sharded(p) else grad
        torch.testing.assert_close(p.grad, rows)


def strategy_of(fabric: Fabric) -> ThunderMemsaveStrategy:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy


def set_up(fabric: Fabric) -> tuple[Any, Any]:
    model = build()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model.mark_forward_method("with_extra")
    model.mark_forward_method("two")
    return model, optimizer


def test_micro_batches_are_summed_with_the_traffic_that_was_chosen() -> None:
    run_on_fabric_ranks(check_traffic, NUM_RANKS)


@on_fabric_rank
def check_traffic() -> None:
    modes = ("none", "zero2", "zero3")
    cases = [(sharding, "accumulate_unsharded", "auto", 1) for sharding in modes]
    cases += [("zero3", "auto", "auto", NUM_MICRO_BATCHES), ("zero3", "auto", "1MiB", 1)]
    for sharding, accumulate, budget, num_reductions in cases:
        fabric = make_fabric(
            devices=NUM_RANKS,
            sharding=sharding,
            accumulate=accumulate,
            memory={"budget": budget},
            bucket=0,
            timeout="2min",
        )
        check_traffic_of(fabric, num_reductions)
    check_the_choice_of_auto()


def check_the_choice_of_auto() -> None:
    """Whole gradients are kept if they take at most a tenth of the budget: 48 numbers of 4 bytes here."""
    for budget, keeps in [(1920, True), (1919, False)]:
        fabric = make_fabric(devices=NUM_RANKS, sharding="zero3", memory={"budget": budget})
        model, _ = set_up(fabric)
        assert model._forward_module.unreduced.may_keep is keeps


def check_traffic_of(fabric: Fabric, num_reductions: int) -> None:
    model, optimizer = set_up(fabric)
    with traffic():  # a call that is compiled has the ranks agree on its plan; under another mode, it is compiled anew
        run(fabric, model, "forward", 0, last=True)
    optimizer.zero_grad()
    for step in range(2):
        seeds = [10 * step + i for i in range(NUM_MICRO_BATCHES)]
        with traffic() as started:
            for seed in seeds:
                run(fabric, model, "forward", seed, last=seed == seeds[-1])
        assert started["reduction"] == num_reductions * NUM_TRAINED
        check_gathers(fabric, started["gather"])
        check_gradients(fabric, model, expected(*(("forward", s) for s in seeds)))
        optimizer.zero_grad()


def check_gathers(fabric: Fabric, num_gathers: int) -> None:
    """Forward gathers every weight; under zero3 backward regathers the one it reads, `down.weight`."""
    mode = strategy_of(fabric).config.sharding.mode
    per_micro_batch = {"none": 0, "zero2": 4, "zero3": 5}[mode]
    assert num_gathers == NUM_MICRO_BATCHES * per_micro_batch


def test_kept_gradients_follow_zero_grad_methods_and_outputs(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_keeping, NUM_RANKS, tmp_path)


@on_fabric_rank
def check_keeping(directory: Path) -> None:
    fabric = make_fabric(devices=NUM_RANKS, sharding="zero3", accumulate="accumulate_unsharded")
    check_a_dropped_micro_batch(fabric)
    check_a_loss_with_the_parameters_themselves(fabric)
    check_weights_that_the_last_micro_batch_does_not_use(fabric)
    check_outputs_without_a_gradient(fabric)
    check_that_nothing_is_lost_without_a_word(fabric)
    check_saving(fabric, directory)
    check_bfloat16(fabric)
    check_the_keeping_trace(fabric)


def check_a_dropped_micro_batch(fabric: Fabric) -> None:
    """`zero_grad` drops the kept gradients, in both of its forms and the module's."""
    model, optimizer = set_up(fabric)
    drops: list[Any] = [
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=False),
        model.zero_grad,
    ]
    for drop in drops:
        run(fabric, model, "forward", 0, last=False)
        drop()
        run(fabric, model, "forward", 1, last=False)
        run(fabric, model, "forward", 2, last=True)
        check_gradients(fabric, model, expected(("forward", 1), ("forward", 2)))
        optimizer.zero_grad()


def check_a_loss_with_the_parameters_themselves(fabric: Fabric) -> None:
    """Zeros added by autograd are not mistaken for `zero_grad(set_to_none=False)`."""
    model, optimizer = set_up(fabric)
    for step in (0, 10):
        for seed in range(step, step + NUM_MICRO_BATCHES):
            with fabric.no_backward_sync(model, enabled=seed < step + NUM_MICRO_BATCHES - 1):
                loss = model(batch(seed)[fabric.global_rank :: NUM_RANKS]).square().mean()
                # Rows refuse a sum, which is another one on each rank.
                with torch._C.DisableTorchFunctionSubclass():
                    zero = 0 * sum(p.sum() for p in model.parameters())
                fabric.backward(loss + zero)
        whole = expected(*(("forward", step + i) for i in range(NUM_MICRO_BATCHES)))
        whole["extra.weight"] = torch.zeros(3, 3)
        check_gradients(fabric, model, whole)
        optimizer.zero_grad(set_to_none=False)
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def check_weights_that_the_last_micro_batch_does_not_use(fabric: Fabric) -> None:
    model, _ = set_up(fabric)
    run(fabric, model, "with_extra", 0, last=False)
    run(fabric, model, "forward", 1, last=True)
    check_gradients(fabric, model, expected(("with_extra", 0), ("forward", 1)))
    assert model.extra.weight.grad is not None
    # Sums go on after a reduction, too.
    run(fabric, model, "forward", 2, last=False)
    run(fabric, model, "forward", 3, last=True)
    calls = [("with_extra", 0), ("forward", 1), ("forward", 2), ("forward", 3)]
    check_gradients(fabric, model, expected(*calls))


def check_outputs_without_a_gradient(fabric: Fabric) -> None:
    """A weight that only the unused output needs keeps no gradient, as in eager."""
    model, _ = set_up(fabric)
    for last in (False, True):
        with fabric.no_backward_sync(model, enabled=not last):
            first, _ = model.two(batch(0))
            fabric.backward(first.sum())
    assert model.extra.weight.grad is None
    assert model.up.weight.grad is not None


def check_that_nothing_is_lost_without_a_word(fabric: Fabric) -> None:
    model, optimizer = set_up(fabric)
    run(fabric, model, "forward", 0, last=False)
    message = r"the gradients of 4 parameters are not reduced over the ranks yet: every backward"
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()
    with pytest.raises(RuntimeError, match=message):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match=message):
        fabric.clip_gradients(model, optimizer, clip_val=1.0)
    optimizer.zero_grad()
    optimizer.step()


def check_saving(fabric: Fabric, directory: Path) -> None:
    """A checkpoint has no gradients, says so, and leaves unreduced ones as they are; so does `summon_full`."""
    model, optimizer = set_up(fabric)
    state = {"model": model, "optimizer": optimizer}
    message = "'model' is saved while the gradients of 4 parameters wait for the last micro-batch"
    run(fabric, model, "forward", 0, last=False)
    logs = TestCase().assertLogs if fabric.global_rank == 0 else TestCase().assertNoLogs
    with logs("thunder_memsave", "WARNING") as logged:
        fabric.save(directory / "between", state)
    assert logged is None or [message in line for line in logged.output] == [True]
    with strategy_of(fabric).summon_full(model):
        fabric.save(directory / "whole", state)
    run(fabric, model, "forward", 1, last=True)
    check_gradients(fabric, model, expected(("forward", 0), ("forward", 1)))
    optimizer.step()
    with TestCase().assertNoLogs("thunder_memsave", "WARNING"):
        fabric.save(directory / "after", state)


def check_bfloat16(fabric: Fabric) -> None:
    """Sums over micro-batches and ranks have float32's bits; the result is rounded once."""
    model, alone = fabric.setup(build(torch.bfloat16)), build(torch.bfloat16)
    compiled = CompiledModule(alone)
    total = torch.zeros_like(alone.down.weight, dtype=torch.float32)
    for seed in range(8):
        run(fabric, model, "forward", seed, last=seed == 7)
        rows = batch(seed)[fabric.global_rank :: NUM_RANKS].bfloat16()
        compiled(rows).square().mean().backward()
        assert alone.down.weight.grad is not None
        total += alone.down.weight.grad.float() / NUM_RANKS
        alone.zero_grad()
    whole = all_reduced(fabric, total, reduce_op="sum").bfloat16()
    dp = strategy_of(fabric).data_parallel
    assert dp is not None
    assert torch.equal(model.down.weight.grad, take_rows(whole, own_rows(whole.shape, dp)))


def check_the_keeping_trace(fabric: Fabric) -> None:
    model, _ = set_up(fabric)
    run(fabric, model, "forward", 0, last=True)
    (capture,) = model._forward_module.captures
    kinds = Counter(c.kind for c in collectives(capture.keeping_trace))
    assert kinds == {"all_gather": 1}
    kinds = Counter(c.kind for c in collectives(capture.backward_traces[-1]))
    assert kinds == {"all_gather": 1, "reduce_scatter": NUM_TRAINED - 1, "all_reduce": 1}
