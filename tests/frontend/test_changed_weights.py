"""Forward cannot change a sharded parameter or a part of a buffer; it can change a whole buffer or what it computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from harness.traces import fake_ranks
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError
from thunder_memsave.sharding.rows import shard_module


class Counter(nn.Module):
    def __init__(self, count: Tensor, *, is_buffer: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        if is_buffer:
            self.register_buffer("count", count)
        else:
            self.count = nn.Parameter(count, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(1)
        y = self.linear(x)
        y.mul_(2)
        return y * self.count


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
@pytest.mark.parametrize("num_rows", [4, 5])  # the latter are cut out of padded ones
def test_a_write_to_a_sharded_parameter_is_refused(mode: str, num_rows: int) -> None:
    model = Counter(torch.ones(num_rows, 1, 1))
    with fake_ranks(2, mode=mode) as data_parallel:
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        with pytest.raises(CompileError, match=r"'count' in place \(at .*each rank holds"):
            module(torch.ones(3, 4))


@pytest.mark.parametrize("model", [Counter(torch.ones(())), Counter(torch.ones(5), is_buffer=True)])
def test_other_writes_happen(model: Counter) -> None:
    with fake_ranks(2) as data_parallel:
        shard_module(model, data_parallel)
        CompiledModule(model, data_parallel=data_parallel)(torch.ones(3, 4))
    assert torch.equal(model.count, torch.full_like(model.count, 2))


class Partly(nn.Module):
    """Reads a buffer, and writes to a row of it."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + self.count
        self.count[0].add_(1.0)
        return y


def test_a_write_to_a_part_of_a_buffer_happens_once() -> None:
    model, x = Partly(), torch.ones(3, 4)
    for times in (1, 2, 3):
        with torch.set_grad_enabled(times < 3):
            y = CompiledModule(model)(x)
        assert model.count.tolist() == [[1.0 + times] * 4, [1.0] * 4, [1.0] * 4]
    assert not y.requires_grad


class Remembers(nn.Module):
    """Writes what it computed to a buffer."""

    def __init__(self, *, is_detached: bool) -> None:
        super().__init__()
        self.linear, self.is_detached = nn.Linear(4, 5), is_detached
        self.register_buffer("last", torch.zeros(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.get_buffer("last").copy_(y.detach() if self.is_detached else y)
        return y * 2


def test_a_buffer_cannot_lead_back_to_a_compiled_call() -> None:
    model = Remembers(is_detached=False)
    with pytest.raises(
        CompileError, match=r"requires a gradient to the buffer 'last' \(at .*detach"
    ):
        CompiledModule(model)(torch.ones(3, 4))
    assert not model.get_buffer("last").any()
    assert not model.get_buffer("last").requires_grad


@pytest.mark.parametrize("is_detached", [False, True])
def test_a_buffer_takes_values_that_lead_nowhere(is_detached: bool) -> None:
    model = Remembers(is_detached=is_detached)
    compiled = CompiledModule(model)
    with torch.set_grad_enabled(is_detached):
        y = compiled(torch.ones(3, 4))
    assert y.any()
    assert torch.equal(model.get_buffer("last") * 2, y)
