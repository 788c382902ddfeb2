"""Two ranks choose the same tiles, of MLPs and of the loss, and have the gradients of one process without them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_memory
from harness.rank_memory import letting_go
from harness.row_mlps import WIDTH, Mlp
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.errors import BudgetError
from thunder_memsave.ops import row_tiles
from thunder_memsave.sharding.rows import gather_rows
from thunder_memsave.sharding.sharded_parameter import is_sharded
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_TOKENS, CLASSES, NUM_MICRO_BATCHES = 1024, 2048, 2


class Model(nn.Module):
    """Two gated MLPs, and a head with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mlps = nn.ModuleList(Mlp("gated") for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for mlp in self.mlps:
            x = x + mlp(x)
        return F.cross_entropy(self.head(x), targets)


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(NUM_TOKENS, WIDTH, generator=generator)
    return x, torch.randint(0, CLASSES, (NUM_TOKENS,), generator=generator)


def set_up(sharding: str, budget_bytes: int) -> tuple[Fabric, Any]:
    fabric = make_fabric(
        devices=2, sharding=sharding, memory={"budget": budget_bytes}, timeout="2min"
    )
    module = Model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)  # whose gradients are counted
    model, kept = fabric.setup(module, optimizer)
    model.of_test = kept  # the strategy counts an optimizer as long as the script has it
    return fabric, model


def accumulate(fabric: Fabric, model: Any) -> None:
    for number, batch in enumerate(batches_of(fabric.global_rank), 1):
        with fabric.no_backward_sync(model, enabled=number < NUM_MICRO_BATCHES):
            fabric.backward(model(*batch) / NUM_MICRO_BATCHES)


@cache
def batches_of(rank: int) -> list[tuple[Tensor, Tensor]]:
    return [micro_batch(rank * NUM_MICRO_BATCHES + number) for number in range(NUM_MICRO_BATCHES)]


def at_the_floor(sharding: str) -> tuple[Fabric, Any, int]:
    """Accumulate with the smallest budget: that of the second micro-batch, which adds to gradients of the first."""
    budget_bytes = 1
    while True:
        fabric, model = set_up(sharding, budget_bytes)
        try:
            accumulate(fabric, model)
            return fabric, model, budget_bytes
        except (BudgetError, OtherRankError) as error:
            of_ranks: list[Any] = [None, None]
            dist.all_gather_object(of_ranks, getattr(error, "smallest_bytes", None))
            assert of_ranks[0] > budget_bytes
            budget_bytes = of_ranks[0]


def check(sharding: str) -> None:
    fabric, model, budget_bytes = at_the_floor(sharding)
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    (module,) = strategy._modules
    assert module.planner is not None
    calls: list[PlannedCall] = module.planner.calls
    ways: list[Any] = [None, None]
    dist.all_gather_object(ways, [call.way for call in calls])
    assert ways[0] == ways[1]
    assert any(call.way.is_tiled for call in calls), ways
    assert any(call.way.loss_divisor > 1 for call in calls), ways
    assert max(call.profile.peak_bytes for call in calls) <= budget_bytes
    check_gradients(model, strategy)
    model.zero_grad()
    held = (*model.parameters(), *batches_of(fabric.global_rank)[0])
    with letting_go():
        measured = measured_memory(lambda: accumulate(fabric, model)).peak_bytes
    measured += sum(t.nbytes for t in held)
    assert measured <= budget_bytes, f"{measured:,} of {budget_bytes:,} bytes"


def check_gradients(model: Any, strategy: ThunderMemsaveStrategy) -> None:
    eager = Model()
    assert strategy.data_parallel is not None
    for number in range(2 * NUM_MICRO_BATCHES):
        (eager(*micro_batch(number)) / (2 * NUM_MICRO_BATCHES)).backward()
    for mine, theirs in zip(model._original_module.parameters(), eager.parameters(), strict=True):
        found = mine.grad
        if is_sharded(mine):
            found = gather_rows(found, mine.unsharded_shape, strategy.data_parallel)
        torch.testing.assert_close(found, theirs.grad, rtol=1e-4, atol=1e-7)


@on_fabric_rank
def check_modes() -> None:
    row_tiles.LEAST_ROWS, row_tiles.TILE_BYTES = 64, 2**16
    for sharding in ("zero3", "zero2"):
        check(sharding)


def test_ranks_choose_the_same_tiles() -> None:
    run_on_fabric_ranks(check_modes, 2)
