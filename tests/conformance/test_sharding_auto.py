"""A larger budget gathers fewer bytes under `sharding: auto`, with zero3's bits."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from harness import models
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from harness.rates import by_rates
from harness.traces import collectives
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.planner.actions import REGATHER
from thunder_memsave.planner.graph import Plan
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_RANKS = 2
UNLIMITED = "1TiB"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model that has taken one step."""

    fabric: Fabric
    model: Any
    optimizer: Any
    gradients: list[Tensor]
    """Gradients of that step."""

    @property
    def strategy(self) -> ThunderMemsaveStrategy:
        assert isinstance(self.fabric.strategy, ThunderMemsaveStrategy)
        return self.fabric.strategy

    @property
    def plan(self) -> Plan:
        assert self.strategy.plan is not None
        return self.strategy.plan

    @property
    def num_regathered(self) -> int:
        return sum(self.plan.actions[d.name] == REGATHER for d in self.plan.decisions)

    @property
    def capture(self) -> Compiled:
        (capture,) = self.model._forward_module.captures
        assert isinstance(capture, Compiled)
        return capture

    def gathered_bytes(self, *, backward: bool) -> int:
        """Bytes of whole parameters that one forward, or backward, gathers."""
        capture = self.capture
        trace = (capture.backward_traces if backward else capture.forward_traces)[-1]
        return sum(c.nbytes for c in collectives(trace) if c.kind == "all_gather")

    def step(self) -> None:
        """Hold the outputs until backward ends, as plans assume of callers."""
        ids = models.token_batch(1, 8, seed=self.fabric.global_rank)
        output = self.model(input_ids=ids, labels=ids)
        self.fabric.backward(output.loss)
        self.optimizer.step()


def trained(sharding: str, **memory: Any) -> Trained:
    """Train on a batch so small that zero3 peaks where the last gradients are computed: no plan needs less."""
    fabric = make_fabric(
        devices=NUM_RANKS, sharding=sharding, memory=memory, bucket=0, prefetch=0, timeout="2min"
    )
    torch.manual_seed(0)
    module = models.llama(2)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-3))
    made = Trained(fabric=fabric, model=model, optimizer=optimizer, gradients=[])
    made.step()
    made.gradients.extend(p.grad.clone() for p in model.parameters())
    optimizer.zero_grad()
    return made


@on_fabric_rank
@by_rates()
def check_auto() -> None:
    zero3 = trained("zero3")
    unlimited = trained("auto", budget=UNLIMITED)
    least, most = (made.plan.predicted_peak_bytes for made in (zero3, unlimited))
    rising = [*(trained("auto", budget=b) for b in (least, (least + most) // 2)), unlimited]
    for made in rising:
        check_equal(made, zero3)
        check_memory(made)
        check_explanation(made)
    check_traffic(rising, zero3)


def check_equal(made: Trained, reference: Trained) -> None:
    assert len(set(map(str, gathered(made.plan.actions)))) == 1
    assert len(made.gradients) == len(reference.gradients) > 10
    for measured, expected in zip(made.gradients, reference.gradients, strict=True):
        assert torch.equal(measured, expected)


def check_memory(made: Trained) -> None:
    with letting_go():
        made.step()
        made.optimizer.zero_grad()
        existing = existing_bytes(made)
        measured = existing + measured_memory(made.step).peak_bytes
    made.optimizer.zero_grad()
    assert measured == pytest.approx(made.plan.predicted_peak_bytes, rel=0.01)
    assert made.plan.budget_bytes is not None
    assert max(measured, made.plan.predicted_peak_bytes) <= made.plan.budget_bytes


def existing_bytes(made: Trained) -> int:
    """Return the bytes of parameters, buffers, and optimizer state."""
    states = [v for state in made.optimizer.state.values() for v in state.values()]
    tensors = [*made.model.parameters(), *made.model.buffers(), *states]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def check_explanation(made: Trained) -> None:
    count = made.num_regathered
    assert (f"regather {count}" in made.strategy.explain()) is (count > 0)


def check_traffic(rising: list[Trained], zero3: Trained) -> None:
    """Forward gathers each weight once; backward at most as zero3 does, then less and less, at last nothing."""
    once = zero3.gathered_bytes(backward=False)
    assert all(made.gathered_bytes(backward=False) == once for made in rising)
    again = [made.gathered_bytes(backward=True) for made in rising]
    assert zero3.gathered_bytes(backward=True) >= again[0]
    assert all(more > less for more, less in pairwise(again))
    assert again[-1] == 0
    counts = [made.num_regathered for made in rising]
    assert all(more > less for more, less in pairwise(counts))


def gathered(value: object) -> list[Any]:
    values: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(values, value)
    return values


def test_a_larger_budget_gathers_fewer_bytes_for_the_same_gradients() -> None:
    run_on_fabric_ranks(check_auto, NUM_RANKS)
