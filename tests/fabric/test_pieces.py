"""What cannot be one graph runs in eager PyTorch, and its submodules compiled: with eager's numbers, on ranks too."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.errors import CaptureError
from thunder_memsave.sharding.same_on_all_ranks import RankMismatchError
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded

# Dynamo looks at it, and hides the warning unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Branching(Block):
    """Cannot be captured either."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x if x.abs().max().item() < 1e3 else x / 2)


class Net(nn.Module):
    """Its own parameter, leaves, one of them read directly, a list, and a shared block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.blocks = nn.ModuleList([Block(), Branching(), Branching()])
        self.again = self.blocks[0]
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4, bias=False)
        self.last.weight = nn.Parameter(self.first.weight.detach().t().clone())
        self.num_hooks = 0
        self.blocks[0].register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.num_hooks += 1

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * self.scale
        for block in self.blocks:
            h = block(h)
            if h.sum().item() > 1e6:
                h = h.clamp(-1.0, 1.0)
        return F.linear(self.norm(self.again(h)), self.last.weight)


class ReadsInside(nn.Module):
    """Reads a weight within a submodule that has submodules, which are compiled; a buffer is made in the first call."""

    seen: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.norm(x), 0.5)
        self.seen = torch.ones(1) if self.seen is None else self.seen + 1.0
        if x.sum().item() > 1e6:
            return x
        return F.linear(self.block(x), self.block.up.weight)


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def batch(seed: int, width: int = 4) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(seed))


def stepped(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("memory", [{}, {"budget": "1GiB"}, {"policy": "recompute_all"}], ids=str)
def test_gradients_buffers_and_hooks_are_eagers(
    memory: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """On one CPU without a budget compiled submodules would only be slower: all of it is eager."""
    eager = made(Net)
    model = copy.deepcopy(eager)
    called = make_fabric(memory=memory).setup(model)
    with caplog.at_level(logging.WARNING, logger="thunder_memsave"):
        for seed in range(3):
            assert torch.equal(stepped(called, batch(seed)), stepped(eager, batch(seed)))
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    assert all(map(torch.equal, model.buffers(), eager.buffers()))
    assert model.num_hooks == eager.num_hooks == 6
    in_pieces = [
        "Net.forward runs in eager PyTorch, 3 of its submodules compiled",
        "Branching.forward runs in eager PyTorch, 1 of its submodules compiled",
    ]
    all_eager = ["Net.forward runs in eager PyTorch, 0 of its submodules compiled"]
    said = [r.message for r in caplog.records if "runs in eager PyTorch" in r.message]
    assert [m.partition(":")[0] for m in said] == (in_pieces if memory else all_eager)
    assert all("test_pieces.py" in m for m in said)


def test_a_wrong_batch_raises_what_eager_raises_and_the_next_one_is_one_graph() -> None:
    model = made(Block)
    called = make_fabric().setup(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        called(batch(0, width=7))
    called(batch(0, width=6))
    assert len(called._forward_module._compiled["forward"]) == 1


def test_threads_take_turns() -> None:
    model = made(Net).eval()
    called, x = make_fabric().setup(model), batch(0)
    expected = called(x)
    with ThreadPoolExecutor(3) as pool:
        results = [future.result() for future in [pool.submit(called, x) for _ in range(9)]]
    assert all(torch.equal(r, expected) for r in results)
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_modules_are_as_before_also_after_an_error() -> None:
    model = made(Net)
    called = make_fabric().setup(model)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        called(batch(0, width=7))
    called(batch(0))
    assert not [m for m in model.modules() if "forward" in vars(m)]


def test_in_evaluation_what_can_be_one_graph_is() -> None:
    class InTraining(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                return super().forward(x)
            result: Tensor = self.last(self.first(x))
            return result

    model = made(InTraining)
    called = make_fabric().setup(model)
    stepped(called, batch(0))
    model.eval()
    with torch.no_grad():
        assert torch.equal(called(batch(0)), model(batch(0)))
    assert len(called._forward_module._compiled["forward"]) == 1


def test_it_is_refused_by_fullgraph() -> None:
    called = make_fabric(fullgraph=True).setup(made(Net))
    with pytest.raises(CaptureError, match="numbers in a tensor"):
        called(batch(0))


class Rescales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() < 1e6:
            with torch.no_grad():
                self.scale.mul_(0.5)
        return x * self.scale


class RescalesData(Rescales):
    """Writes through `.data`, which no version counts."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() < 1e6:
            self.scale.data.mul_(0.5)
        return x * self.scale


def check_gradients(mode: str) -> None:
    fabric = make_fabric(devices=2, sharding=mode)
    eager, model = made(Net), made(Net)
    called = fabric.setup(model)
    for seed in (0, 2):
        stepped(called, batch(seed + fabric.global_rank))
    for seed in (0, 1, 2, 3):
        (eager(batch(seed)).square().mean() / 2).backward()
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad, name
            continue
        found, expected = as_rows(p.grad), q.grad
        if is_sharded(p):
            first = found.shape[0] * fabric.global_rank
            expected = expected[first : first + found.shape[0]]
            found = found[: expected.shape[0]]
        torch.testing.assert_close(found, expected, msg=f"{mode} {name}")


def check_weights_that_are_read_inside() -> None:
    """What the first try drew and wrote to buffers is taken back before all of it runs eagerly."""
    fabric = make_fabric(devices=2, sharding="zero3")
    eager, model = made(ReadsInside), made(ReadsInside)
    # One batch for both ranks: a norm's statistics are rank 0's before each forward.
    called, x = fabric.setup(model), batch(0, width=6)
    for _ in range(2):
        assert torch.equal(stepped(called, x), stepped(eager, x))
    results = []
    for one in (eager, called):
        torch.manual_seed(4)
        with torch.inference_mode():
            results.append(one.eval()(x))
    assert torch.equal(*results)
    assert all(map(torch.equal, model.buffers(), eager.buffers()))


class OtherBlocks(nn.Module):
    """Ranks call different submodules, or one of them none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Block(), Block()

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 0:
            x = self.one(x)
        return x if x.sum().item() > 100 else self.other(x)


class OtherLeaves(nn.Module):
    """Ranks use different weights of eager code; one is used by none."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.none = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.one(x) if x.sum().item() > 0 else self.other(x)
        return result


def check_ranks_that_go_other_ways(rank: int) -> None:
    sign = 1 if rank == 0 else -1
    x = sign * batch(0, width=6).abs()
    called = make_fabric(devices=2, sharding="zero3").setup(made(OtherBlocks))
    with pytest.raises(RankMismatchError, match="rank 0 one, rank 1 other"):
        called(x)
    for mode in ("none", "zero2"):
        eager, model = made(OtherLeaves), made(OtherLeaves)
        stepped(make_fabric(devices=2, sharding=mode).setup(model), x)
        own = (-1, 1)[rank == 0]
        for each in (own, -own):
            (eager(own * each * x).square().mean() / 2).backward()
        for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None) == name.startswith("none"), name
            if p.grad is not None and q.grad is not None:
                found = as_rows(p.grad)
                first = found.shape[0] * rank if is_sharded(p) else 0
                torch.testing.assert_close(found, q.grad[first : first + found.shape[0]], msg=name)


@on_fabric_rank
def check_ranks() -> None:
    for mode in ("none", "zero2", "zero3"):
        check_gradients(mode)
    check_weights_that_are_read_inside()
    check_ranks_that_go_other_ways(make_fabric(devices=2).global_rank)
    changed = r"changes its parameter 'scale' in place.*summon_full"
    for kind in (Rescales, RescalesData):
        called = make_fabric(devices=2, sharding="zero3").setup(kind())
        for guard in (torch.enable_grad, torch.inference_mode):
            with guard(), pytest.raises(CaptureError, match=changed):
                called(batch(0))


def test_gradients_are_the_means_of_two_ranks() -> None:
    run_on_fabric_ranks(check_ranks, 2)


class Penalised(nn.Module):
    """Asks its block for a second derivative, after it has counted and drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.count = Block(), 0
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(x.detach() * 2)
        mixed = (x + torch.rand(())).detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.block(mixed).sum(), mixed, create_graph=True)
        return self.block(x) * slope.norm()


def test_a_second_derivative_makes_all_of_it_eager_and_takes_back_what_was_counted_and_drawn() -> (
    None
):
    eager = made(Penalised)
    model = copy.deepcopy(eager)
    called, x = make_fabric().setup(model), batch(0, width=6)
    for _ in range(2):
        assert torch.equal(stepped(called, x), stepped(eager, x))
    assert model.count == eager.count == len(vars(model)["seen"]) == 2
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
