"""A model with every kind of state that checkpoints must carry to other numbers of ranks, and its training."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from thunder_memsave.checkpoints import unsharded_state_dict
from thunder_memsave.config import Fp8Config
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fp8.compute.linears import STATE_NAME
from thunder_memsave.fp8.recipe import recipe_of
from thunder_memsave.fp8.scaling import ScalingState
from thunder_memsave.optim import AdamW
from thunder_memsave.optim.formats import FORMATS
from thunder_memsave.sharding.rows import (
    gather_rows,
    num_real_rows,
    own_rows,
    shard_module,
    take_rows,
)
from thunder_memsave.sharding.sharded_parameter import is_sharded

OptimizerName = Literal["AdamW", "SGD"]
StatesName = Literal["bfloat16", "int8", "fp8"]


class Net(nn.Module):
    """A model with odd, tied, frozen, bf16, one-row, 0-dim and fp8 weights, both kinds of buffers, and fp8 scales."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, width)
        self.up = nn.Linear(width, 5)
        self.down = nn.Linear(5, 11, bias=False)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.emb.weight
        self.up.bias.requires_grad_(False)
        scaling = ScalingState(recipe_of(Fp8Config(recipe="delayed", amax_history_len=4)))
        self.down.add_module(STATE_NAME, scaling)
        self.mixed = nn.Parameter(torch.randn(5, 2, dtype=torch.bfloat16))
        self.kept = nn.Parameter(torch.randn(9, 3).to(torch.float8_e4m3fn), requires_grad=False)
        self.single = nn.Parameter(torch.randn(1, 4))
        self.scale = nn.Parameter(torch.randn(()))
        self.count: Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("cache", torch.zeros(3), persistent=False)


def make_net(seed: int = 0, width: int = 3) -> Net:
    """Build an unsharded model, with the weights of this seed."""
    torch.manual_seed(seed)
    return Net(width)


def make_optimizer(
    net: nn.Module, lr: float = 0.1, name: OptimizerName | StatesName = "AdamW"
) -> torch.optim.Optimizer:
    """Make an optimizer with two groups of parameters with different settings; a format of states names our AdamW."""
    named = [(n, p) for n, p in net.named_parameters() if p.requires_grad]
    decayed = [p for n, p in named if p.dim() > 1]
    others = [p for n, p in named if p.dim() <= 1]
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0},
    ]
    if name in FORMATS:
        return AdamW(groups, lr=lr, states=name, rounding="stochastic", seed=5)
    if name == "SGD":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)
    return torch.optim.AdamW(groups, lr=lr)


def train(
    net: Net, optimizer: torch.optim.Optimizer, steps: range, dp: DataParallel | None
) -> None:
    """Run steps with gradients that depend only on the step and the unsharded parameter."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            shape = vars(p)["unsharded_shape"] if is_sharded(p) else p.shape
            grad = torch.randn(shape, generator=generator).to(p.dtype)
            if p.requires_grad:
                p.grad = take_rows(grad, own_rows(grad.shape, dp)) if dp and is_sharded(p) else grad
        optimizer.step()
        net.count += 1
        _new_scales(net, generator)


def _new_scales(net: Net, generator: torch.Generator) -> None:
    scaling = net.down.get_submodule(STATE_NAME)
    assert isinstance(scaling, ScalingState)
    for history in (scaling.forward_amax_history, scaling.backward_amax_history):
        history[0] = torch.rand(history.shape[1:], generator=generator)
    scaling.update()


def trained(
    dp: DataParallel | None = None,
    steps: int = 3,
    name: OptimizerName | StatesName = "AdamW",
    width: int = 3,
) -> tuple[Net, torch.optim.Optimizer]:
    """Train a new model, with the same result on any number of ranks."""
    net = make_net(width=width)
    shard_module(net, dp)
    optimizer = make_optimizer(net, name=name)
    train(net, optimizer, range(steps), dp)
    return net, optimizer


def fresh(
    dp: DataParallel | None = None, name: OptimizerName | StatesName = "AdamW", width: int = 3
) -> tuple[Net, torch.optim.Optimizer]:
    """Make a model and an optimizer to load a checkpoint into: other weights and settings, and no state."""
    net = make_net(seed=9, width=width)
    shard_module(net, dp)
    return net, make_optimizer(net, lr=0.7, name=name)


def assert_same(
    net: Net,
    optimizer: torch.optim.Optimizer,
    reference: tuple[Net, torch.optim.Optimizer],
    dp: DataParallel | None = None,
) -> None:
    """Check that all that a step depends on is bit-equal to the single-process reference."""
    for name, value in unsharded_state_dict(net, dp).items():
        assert torch.equal(value, reference[0].state_dict()[name]), name
    for (name, p), q in zip(net.named_parameters(), reference[0].parameters(), strict=True):
        here, there = optimizer.state.get(p, {}), reference[1].state.get(q, {})
        assert here.keys() == there.keys(), name
        for key, value in here.items():
            if is_sharded(p) and value.shape[:1] == p.shape[:1]:
                assert not value[num_real_rows(p) :].any(), (name, key)
            assert torch.equal(_whole(value, p, dp), there[key]), (name, key)
    for mine, other in zip(optimizer.param_groups, reference[1].param_groups, strict=True):
        assert {**mine, "params": 0} == {**other, "params": 0}


def _whole(value: Tensor, p: Tensor, dp: DataParallel | None) -> Tensor:
    if dp and is_sharded(p) and value.shape[:1] == p.shape[:1]:
        return gather_rows(value, vars(p)["unsharded_shape"], dp)
    return value
