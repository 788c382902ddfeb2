"""A compiled module's backward runs as often as it is asked to, and holds what it reads no longer than needed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from harness.fabric import make_fabric
from harness.memory import measured_memory, measured_peak_bytes
from harness.recompute import everything, nothing, recomputing
from thunder_memsave.compiler import autograd
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module

WIDTH = 8
NUM_BACKWARDS = 4


def network(*, width: int = WIDTH, depth: int = 3, dropout: float = 0.25) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(depth)
    ]
    return nn.Sequential(*layers)


def repeated_backwards(module: nn.Module, loss: Tensor) -> list[list[Tensor]]:
    results = []
    for _ in range(NUM_BACKWARDS):
        module.zero_grad()
        loss.backward(retain_graph=True)
        results.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    return results


def assert_all_equal(results: list[list[Tensor]]) -> None:
    assert len(results[0]) > 1
    for later in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], later, strict=True))


@pytest.mark.parametrize("keep", [nothing, everything])
def test_any_number_of_backwards_has_the_same_bits_with_and_without_recompute(keep: Any) -> None:
    module = network()
    with recomputing(keep):
        loss = CompiledModule(module)(torch.randn(4, WIDTH)).square().sum()
        assert_all_equal(repeated_backwards(module, loss))


def check_on_ranks(rank: int) -> None:
    """Gathered weights are saved (zero2) or gathered again (zero3) in each backward."""
    bits = []
    modes: list[tuple[Any, Any]] = [("zero2", everything), ("zero3", nothing)]
    for mode, keep in modes:
        module = network(width=16, depth=2)
        assert dist.group.WORLD is not None
        data_parallel = DataParallel(mode=mode, group=dist.group.WORLD)
        shard_module(module, data_parallel)
        torch.manual_seed(rank)
        x = torch.randn(4, 16)
        with recomputing(keep):
            loss = CompiledModule(module, data_parallel=data_parallel)(x).square().sum()
        results = repeated_backwards(module, loss)
        assert_all_equal(results)
        bits.append(results[0])
    assert_all_equal(bits)


def test_any_number_of_backwards_has_the_same_bits_on_two_ranks(tmp_path: Path) -> None:
    run_on_ranks(check_on_ranks, 2, tmp_path / "rendezvous")


def test_everything_saved_is_a_plain_tensor_that_autograd_knows() -> None:
    loss = CompiledModule(network())(torch.randn(4, WIDTH))
    node = loss.grad_fn
    assert node is not None
    assert all(type(t) in (Tensor, nn.Parameter) for t in node.saved_tensors)
    held = [v for v in vars(node).values() if isinstance(v, Tensor)]
    assert not held


def test_a_second_backward_without_retain_graph_has_pytorchs_own_error() -> None:
    loss = CompiledModule(network())(torch.randn(4, WIDTH)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_two_losses_of_one_forward_have_pytorchs_own_error_and_what_to_do() -> None:
    output = CompiledModule(network())(torch.randn(4, WIDTH))
    output[0].sum().backward()
    with pytest.raises(
        RuntimeError,
        match=r"(?s)Trying to backward through the graph a second time.*One forward of it is one node of the graph: "
        r"pass retain_graph=True to every backward but the last",
    ):
        output[1].sum().backward()


def test_a_backward_after_an_optimizer_step_says_to_run_forward_again() -> None:
    model = network()
    loss = CompiledModule(model)(torch.randn(4, WIDTH)).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    with pytest.raises(
        RuntimeError,
        match=r"(?s)modified by an inplace operation.* an optimizer step \(with new scales of fp8\), by the backward "
        r"before \(memory.optimizer_in_backward\), or a write to a parameter, a result or an argument .*"
        r"Run the forward again",
    ) as error:
        loss.backward()
    assert "retain_graph" not in str(error.value)


class Watched:
    """Three tensors that a forward saves, and which of them are there at each step of its backward."""

    def __init__(self, *, fails: bool = False) -> None:
        self.saved: list[weakref.ref[Tensor]] = []
        self.counts: list[int] = []
        self._fails = fails

    def function(self) -> autograd.Differentiable:
        return autograd.Differentiable(self._forward, self._backward, (frozenset({0}),))

    def num_alive(self) -> int:
        return sum(r() is not None for r in self.saved)

    def _forward(self, x: Tensor) -> tuple[list[Tensor], tuple[list[Tensor], list[Any]]]:
        saved = [x + i for i in range(3)]
        self.saved = [weakref.ref(t) for t in saved]
        return [x.clone()], (saved, [])

    def _backward(self, saved: list[Any], cotangents: list[Tensor], reached: Any) -> list[Tensor]:
        """As the traces do it: take what was saved out of the lists, delete each at its last use."""
        tensors, _ = saved
        first, second, third = tensors
        tensors.clear()
        self.counts.append(self.num_alive())
        del third
        self.counts.append(self.num_alive())
        if self._fails:
            raise KeyError("mine")
        del second
        self.counts.append(self.num_alive())
        return [cotangents[0] * first]


def test_each_saved_tensor_dies_at_its_last_use() -> None:
    watched = Watched()
    (y,) = autograd.run(watched.function(), [torch.ones(3, requires_grad=True)])
    assert watched.num_alive() == 3
    y.sum().backward()
    assert watched.counts == [3, 2, 1]
    assert watched.num_alive() == 0


def test_with_retain_graph_they_stay_until_a_backward_without() -> None:
    watched = Watched()
    (y,) = autograd.run(watched.function(), [torch.ones(3, requires_grad=True)])
    for retain in (True, True, False):
        y.sum().backward(retain_graph=retain)
    assert watched.counts == [3, 3, 3, 3, 3, 3, 3, 2, 1]
    assert watched.num_alive() == 0


def test_they_are_gone_after_a_backward_that_an_exception_ended() -> None:
    watched = Watched(fails=True)
    (y,) = autograd.run(watched.function(), [torch.ones(3, requires_grad=True)])
    with contextlib.suppress(KeyError):
        y.sum().backward()
    assert watched.counts == [3, 2]
    assert watched.num_alive() == 0


@pytest.mark.parametrize("saved", ["itself", "view", "view of the view", "base", "beside", "input"])
@pytest.mark.parametrize("output", ["base", "view"])
def test_a_result_dies_with_its_last_name_whatever_is_saved_of_it(saved: str, output: str) -> None:
    """PyTorch keeps an output for ever of which a view is saved (pytorch #94990)."""

    def forward(x: Tensor) -> Any:
        made = x + 1
        given = made if output == "base" else made.view(-1)
        kept = {
            "itself": given,
            "view": given.view(3, 1),
            "view of the view": given.view(3, 1)[:2],
            "base": made,
            "beside": made[1:],
            "input": x.view(3, 1),
        }
        return [given], ([kept[saved]], [])

    def backward(saved: list[Any], cotangents: list[Tensor], reached: Any) -> list[Tensor]:
        return [cotangents[0] * saved[0][0].sum()]

    function = autograd.Differentiable(forward, backward, (frozenset({0}),))
    x = torch.ones(3, requires_grad=True)
    (y,) = autograd.run(function, [x])
    of_result = weakref.ref(y)
    del y
    assert of_result() is None
    (y,) = autograd.run(function, [x])
    y.sum().backward()
    assert x.grad is not None
    x.grad = None
    of_result = weakref.ref(y)
    del y
    assert of_result() is None


def big_step(module: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> None:
    forward(x).square().sum().backward()
    module.zero_grad()


def test_saved_tensors_are_freed_one_by_one_in_backward() -> None:
    """The peak is what forward saved and a little: not that and all of backward's beside it."""
    depth, width = 8, 64
    module = network(width=width, depth=depth, dropout=0.0)
    x = torch.randn(4096, width)
    one = x.untyped_storage().nbytes()
    compiled = CompiledModule(module)
    run: Callable[[], None] = lambda: big_step(module, compiled, x)  # noqa: E731
    run()
    # Each layer saves its activation; at most three more of that size are there at any moment.
    assert measured_peak_bytes(run) <= (depth + 3.5) * one


def test_nothing_is_alive_after_the_step() -> None:
    module = network(width=64)
    x = torch.randn(256, 64)
    compiled = CompiledModule(module)
    big_step(module, compiled, x)
    assert measured_memory(lambda: big_step(module, compiled, x)).end_bytes == 0


def test_nothing_is_alive_after_the_step_of_a_module_that_fabric_wraps() -> None:
    fabric, depth = make_fabric(), 8
    module = fabric.setup(network(width=64, depth=depth, dropout=0.0))
    x = torch.randn(4096, 64)

    def step() -> None:
        fabric.backward(module(x).square().sum())
        module.zero_grad()

    step()
    measured = measured_memory(step)
    assert measured.end_bytes == 0
    assert measured.peak_bytes <= (depth + 3.5) * x.untyped_storage().nbytes()
