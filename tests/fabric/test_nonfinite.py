"""Steps with non-finite gradients on one rank are taken, left out or refused on all alike."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.config import ConfigError
from thunder_memsave.fabric.nonfinite import NonfiniteGradientsError
from thunder_memsave.sharding.sharded_parameter import as_rows

ADAM: tuple[dict[str, Any], ...] = ({}, {"foreach": True}, {"fused": True})
STOPPED = r"the step was not taken on any rank: .* set strategy.nonfinite_gradients to 'skip'"


class Trained:
    """A small model that has taken a step, so that its optimizer has state."""

    def __init__(self, fabric: Fabric, **optimizer: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        adam = torch.optim.AdamW(net.parameters(), lr=0.1, **optimizer)
        self.fabric, self.net = fabric, net
        self.model, self.optimizer = fabric.setup(net, adam)
        self.step()

    def step(self, *, poison: float | None = None, rank: int = 0, clip: bool = False) -> None:
        """Take a step whose gradient has one non-finite element, on one rank only."""
        self.fabric.backward(self.model(torch.ones(2, 3)).sum())
        if poison is not None and self.fabric.global_rank == rank:
            grad = self.net[0].weight.grad
            assert isinstance(grad, Tensor)
            as_rows(grad).view(-1)[0] = poison
        if clip:
            self.fabric.clip_gradients(self.model, self.optimizer, max_norm=1e3)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.zero_grad()

    def numbers(self) -> list[Tensor]:
        """Return the parameters and the optimizer's state."""
        states = self.optimizer.state.values()
        state = [t for values in states for t in values.values() if isinstance(t, Tensor)]
        return [t.data.clone() for t in (*self.net.parameters(), *state)]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@on_fabric_rank
def check_two_ranks() -> None:
    for sharding in ("zero3", "none"):
        for options in ADAM if sharding == "zero3" else ADAM[:1]:
            check_skip(sharding, options)
    check_stop()
    check_one_collective()


def check_skip(sharding: str, options: dict[str, Any]) -> None:
    fabric = make_fabric(devices=2, sharding=sharding, nonfinite_gradients="skip", timeout="60s")
    run = Trained(fabric, **options)
    before = run.numbers()
    run.step(poison=math.nan, rank=1)
    run.step(poison=math.inf, rank=0, clip=True)
    assert same(before, run.numbers())
    assert skipped(fabric) == 2
    run.step()
    assert not same(before, run.numbers())
    assert skipped(fabric) == 2


def check_stop() -> None:
    fabric = make_fabric(devices=2, sharding="zero2", nonfinite_gradients="stop", timeout="60s")
    run = Trained(fabric)
    before = run.numbers()
    with pytest.raises(NonfiniteGradientsError, match=STOPPED):
        run.step(poison=-math.inf, rank=1)
    assert same(before, run.numbers())
    run.step()


def skipped(fabric: Fabric) -> int:
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    return fabric.strategy._nonfinite.num_skipped


def test_two_ranks_leave_the_same_steps_out_with_at_most_one_collective() -> None:
    run_on_fabric_ranks(check_two_ranks, 2)


@on_fabric_rank
def check_hybrid() -> None:
    """Only one of the two sharding groups has the non-finite gradient."""
    settings: dict[str, Any] = {"sharding": {"mode": "hybrid", "size": 2}, "timeout": "60s"}
    fabric = make_fabric(devices=4, nonfinite_gradients="skip", **settings)
    run = Trained(fabric)
    before = run.numbers()
    run.step(poison=math.nan, rank=3, clip=True)
    assert same(before, run.numbers())
    with fabric.no_backward_sync(run.model):
        fabric.backward(run.model(torch.full((2, 3), math.inf)).sum())
    run.step()
    assert same(before, run.numbers())
    assert skipped(fabric) == 2


@pytest.mark.soak
def test_all_groups_of_hybrid_sharding_agree() -> None:
    run_on_fabric_ranks(check_hybrid, 4)


def test_a_step_is_left_out_with_a_warning_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    run = Trained(make_fabric(nonfinite_gradients="skip"))
    with caplog.at_level(logging.WARNING, logger="thunder_memsave"):
        run.step(poison=math.nan)
        run.step()
        run.step(poison=math.nan)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("thunder_memsave")]
    text = "left out an optimizer step on all ranks: a gradient is infinite or not a number"
    assert messages == [f"{text} ({n} steps left out so far)" for n in (1, 2)]


def test_the_default_takes_every_step() -> None:
    run = Trained(make_fabric())
    run.step(poison=math.nan)
    assert not all(p.isfinite().all() for p in run.net.parameters())


def test_under_the_default_and_stop_clipping_still_refuses() -> None:
    for policy in ("ignore", "stop"):
        run = Trained(make_fabric(nonfinite_gradients=policy))
        with pytest.raises(RuntimeError, match="norm of order 2 is nan"):
            run.step(poison=math.nan, clip=True)


def count_agreements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    asked: list[str] = []

    def all_reduce(*_: object, **__: object) -> None:
        asked.append("all_reduce")

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return asked


def check_one_collective() -> None:
    """The norm from clipping is not recomputed."""
    run = Trained(
        make_fabric(sharding="zero3", devices=2, nonfinite_gradients="skip", timeout="60s")
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = count_agreements(monkeypatch)
        run.step(clip=True)
        assert asked == [], "clipping knows already"
        run.step()
        assert len(asked) == 1
    check_that_a_later_backward_is_noticed(run)


def check_that_a_later_backward_is_noticed(run: Trained) -> None:
    """The norm from clipping does not apply to later gradients."""
    before = run.numbers()
    run.fabric.backward(run.model(torch.ones(2, 3)).sum())
    run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1e3)
    run.step(poison=math.nan)
    assert same(before, run.numbers())


def half_precision() -> MixedPrecision:
    """Fabric itself takes bfloat16 on the CPU."""
    return MixedPrecision("16-mixed", device="cpu")


def test_a_gradient_scaler_leaves_steps_out_itself() -> None:
    message = (
        r"nonfinite_gradients is 'stop', but with precision 16-mixed .* use 'ignore' or 'skip'"
    )
    with pytest.raises(ConfigError, match=message):
        make_fabric(nonfinite_gradients="stop", plugins=half_precision())
    run = Trained(make_fabric(nonfinite_gradients="skip", plugins=half_precision()))
    before, scaler = run.numbers(), scale(run)
    run.step(poison=math.inf)
    assert same(before, run.numbers())
    assert scale(run) == scaler / 2
    assert skipped(run.fabric) == 0


def scale(run: Trained) -> float:
    return float(vars(run.fabric._precision)["scaler"].get_scale())


def test_a_closure_is_refused_where_its_gradients_would_be_checked() -> None:
    run = Trained(make_fabric(nonfinite_gradients="skip"))
    message = r"nonfinite_gradients is 'skip', but optimizer.step\(closure\) makes gradients inside"
    with pytest.raises(ConfigError, match=message):
        run.optimizer.step(lambda: torch.zeros(()))
