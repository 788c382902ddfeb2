"""Every change that eager would notice is noticed: no call ever runs a graph that no longer fits.

Each test calls the compiled module, changes something, calls it again and compares with eager.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from harness.parity import Twins, weighted_sum
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module


class Switchable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.scale = 2.0
        self.squared = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.first(x)) * self.scale
        y = self.second(torch.tanh(y))
        return y * y if self.squared else y


@pytest.fixture
def twins() -> Twins:
    twins = Twins(Switchable().eval())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.num_captures == 1
    return twins


def test_an_unchanged_call_reuses_the_capture(twins: Twins) -> None:
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.num_captures == 1


def test_a_flipped_attribute_is_noticed_and_flipping_back_reuses_the_first_capture(
    twins: Twins,
) -> None:
    twins.change(lambda m: setattr(m, "squared", True))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.num_captures == 2
    twins.change(lambda m: setattr(m, "squared", False))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.num_captures == 2


def test_a_changed_number_is_noticed(twins: Twins) -> None:
    twins.change(lambda m: setattr(m, "scale", 3.0))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


def test_another_shape_is_noticed(twins: Twins) -> None:
    twins.assert_equal(torch.randn(5, 4), loss=weighted_sum)
    assert twins.num_captures == 2


def test_another_dtype_is_noticed() -> None:
    twins = Twins(nn.Sequential(nn.Softmax(-1)))
    twins.assert_equal(torch.randn(3, 4))
    twins.assert_equal(torch.randn(3, 4, dtype=torch.float64))


def test_no_grad_is_noticed(twins: Twins) -> None:
    with torch.no_grad():
        output = twins.assert_equal(torch.randn(3, 4))
    assert not output.requires_grad
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.num_captures == 2


def test_inference_mode_is_noticed(twins: Twins) -> None:
    with torch.inference_mode():
        twins.assert_equal(torch.randn(3, 4))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


def test_autocast_on_and_off_is_noticed(twins: Twins) -> None:
    x = torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        output = twins.assert_equal(x, loss=weighted_sum, rtol=2e-2, atol=2e-2)
    assert output.dtype is torch.bfloat16
    assert twins.assert_equal(x, loss=weighted_sum).dtype is torch.float32
    assert twins.num_captures == 2


def test_eval_of_one_submodule_is_noticed() -> None:
    twins = Twins(Switchable().train())
    x = torch.ones(3, 4)
    assert not torch.equal(twins.compiled(x), twins.compiled(x)), "dropout is active"
    twins.change(lambda m: m.drop.eval())
    twins.assert_equal(x, loss=weighted_sum)


def test_train_and_eval_are_captured_separately() -> None:
    twins = Twins(Switchable().train())
    x = torch.ones(3, 4)
    twins.compiled(x)
    twins.change(lambda m: m.eval())
    twins.assert_equal(x, loss=weighted_sum)
    twins.change(lambda m: m.train())
    twins.compiled(x)
    assert twins.num_captures == 2


def test_gradual_unfreezing_is_noticed(twins: Twins) -> None:
    twins.change(lambda m: m.first.requires_grad_(False))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.model.get_parameter("first.weight").grad is None
    twins.change(lambda m: m.first.requires_grad_(True))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    assert twins.model.get_parameter("first.weight").grad is not None


def test_an_input_that_starts_to_require_grad_is_noticed(twins: Twins) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    weighted_sum(twins.compiled(x)).backward()
    ours, x.grad = x.grad, None
    weighted_sum(twins.eager(x)).backward()
    torch.testing.assert_close(ours, x.grad)


def test_a_replaced_parameter_is_used(twins: Twins) -> None:
    weight = torch.randn(4, 4)
    twins.change(lambda m: setattr(m.first, "weight", nn.Parameter(weight.clone())))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


def test_a_replaced_submodule_is_noticed(twins: Twins) -> None:
    torch.manual_seed(1)
    bias_free = nn.Linear(4, 4, bias=False).state_dict()

    def replace(module: Switchable) -> None:
        module.first = nn.Linear(4, 4, bias=False)
        module.first.load_state_dict(bias_free)

    twins.change(replace)
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


def test_a_hook_added_later_is_noticed(twins: Twins) -> None:
    twins.change(lambda m: m.first.register_forward_hook(lambda module, args, output: output * 3))
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)


class TwoInputs(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * 2 + y.exp()


def test_the_same_tensor_twice_and_then_two_different_ones() -> None:
    twins = Twins(TwoInputs())
    x, y = torch.randn(3), torch.randn(3)
    twins.assert_equal(x, x)
    twins.assert_equal(x, y)
    twins.assert_equal(y, y)


def test_two_different_tensors_and_then_the_same_twice() -> None:
    twins = Twins(TwoInputs())
    x, y = torch.randn(3), torch.randn(3)
    twins.assert_equal(x, y)
    twins.assert_equal(x, x)


def test_a_recapture_logs_its_reason(twins: Twins, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="thunder_memsave.compiler.compiled_module"):
        twins.assert_equal(torch.randn(5, 4))
    assert "capture 2 of Switchable.forward: " in caplog.text
    assert "size" in twins.compiled.captures[0].capture.reason


def test_many_captures_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    twins = Twins(nn.Sequential(nn.Tanh()))
    with caplog.at_level(logging.WARNING, logger="thunder_memsave.compiler.compiled_module"):
        for rows in range(1, 10):
            twins.assert_equal(torch.randn(rows, 4))
    assert caplog.text.count("Pad or pack batches to one shape") == 1


class TiedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) + self.c(x)


def _untie_shards(rank: int) -> None:
    torch.manual_seed(0)
    model = TiedPair()
    eager = copy.deepcopy(model)
    data_parallel = DataParallel(mode="zero2", group=dist.group.WORLD)  # type: ignore[arg-type]
    shard_module(model, data_parallel)
    compiled = CompiledModule(model, data_parallel=data_parallel)
    x = torch.randn(3, 4)
    torch.testing.assert_close(compiled(x), eager(x))
    for m in (model, eager):
        m.b.weight = m.c.weight
    torch.testing.assert_close(compiled(x), eager(x))
    assert len(compiled.captures) == 2


def test_untied_shards_are_noticed(tmp_path: Path) -> None:
    run_on_ranks(_untie_shards, 2, tmp_path / "rendezvous")
