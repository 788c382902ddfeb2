"""LoRA on parameters that are no linear's, such as the experts of a mixture: one graph, with eager's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.compat import wrapped_parameters
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded

EXPERTS, WIDTH = 4, 6


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(torch.bmm(x, self.up).tanh(), self.down)


class Router(nn.Module):
    """Has one matrix, as the routers of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight).softmax(-1)


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.experts(x.expand(EXPERTS, -1, -1))
        return torch.einsum("ne,enw->nw", self.router(x), outputs)


def adapted() -> Any:
    torch.manual_seed(0)
    names = ["experts.up", "experts.down", "router.weight"]
    # Not zeros: both factors get gradients.
    config = LoraConfig(r=2, target_parameters=names, init_lora_weights=False)
    return get_peft_model(Mixture(), config)


def stepped(model: Any, x: Tensor, backward: Any = Tensor.backward) -> Tensor:
    loss = model(x).square().mean()
    backward(loss)
    return loss.detach()


def test_canary_peft_cannot_be_captured() -> None:
    model = adapted()
    wrapper, activate = model.base_model.model.router, wrapped_parameters.upstream()

    def call(x: Tensor) -> Any:
        with activate(wrapper, ["default"]):
            return wrapper.base_layer(x)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="set_"):
        torch.compile(call, backend="eager", fullgraph=True)(torch.randn(3, WIDTH))


def test_numbers_are_eagers_with_and_without_the_adapter() -> None:
    eager, x = adapted(), torch.randn(3, WIDTH)
    model: PeftModel = copy.deepcopy(eager)
    called = make_fabric(fullgraph=True).setup(model)
    for _ in range(2):
        torch.testing.assert_close(stepped(called, x), stepped(eager, x))
    assert len(called._forward_module.captures) == 1
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    with torch.no_grad(), model.disable_adapter(), eager.disable_adapter():
        torch.testing.assert_close(called(x), eager(x))
    with torch.no_grad():
        torch.testing.assert_close(called(x), eager(x))


@on_fabric_rank
def check_ranks() -> None:
    fabric = make_fabric(devices=2, sharding="zero3", fullgraph=True)
    eager, model, x = adapted(), adapted(), torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    torch.testing.assert_close(stepped(fabric.setup(model), x), stepped(eager, x))
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        if p.grad is None or q.grad is None:
            assert p.grad is q.grad, name
            continue
        found = as_rows(p.grad)
        first = found.shape[0] * fabric.global_rank if is_sharded(p) else 0
        expected = q.grad[first : first + found.shape[0]]
        torch.testing.assert_close(found[: expected.shape[0]], expected, msg=name)


def test_shards_are_gathered_and_gradients_averaged() -> None:
    run_on_fabric_ranks(check_ranks, 2)
