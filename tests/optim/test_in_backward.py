"""Weights that backward updates have the bits of `optimizer.step()`, and their gradients are never there together."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import thunder_memsave.optim as own
from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_peak_bytes
from harness.rank_memory import letting_go
from thunder_memsave import ThunderMemsaveStrategy
from thunder_memsave.ops.updated_parameters import updated_names
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.gradients import norm_of_one
from thunder_memsave.sharding.sharded_parameter import as_rows

WIDTH, NUM_ROWS, NUM_STEPS = 32, 8, 3

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: AdamW(ps, lr=1e-2),
    "foreach": lambda ps: AdamW(ps, lr=1e-2, foreach=True),
    "fused": lambda ps: AdamW(ps, lr=1e-2, fused=True),
    "int8 states": lambda ps: own.AdamW(ps, lr=1e-2, states="int8"),
}


class Net(nn.Module):
    """Has a tied weight, one that is read as a view of another's memory, a frozen one, dropout, norms and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 24, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.layers[1].bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.dropout(torch.tanh(layer(norm(x))), 0.1, self.training)
        scores = self.head(x * self.scale)
        return nn.functional.cross_entropy(scores.flatten(0, 1), tokens.flatten())


def batch(seed: int, *, rank: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + seed)
    return torch.randint(0, 24, (NUM_ROWS, 4), generator=generator)


class Run:
    """A model in training."""

    def __init__(self, make: Make, *, in_backward: bool, **arguments: Any) -> None:
        torch.manual_seed(0)
        memory = {**arguments.pop("memory", {}), "optimizer_in_backward": in_backward}
        self.fabric: Fabric = make_fabric(memory=memory, **arguments)
        self.net = Net()
        made = make([p for p in self.net.parameters() if p.requires_grad])
        self.model, self.optimizer = self.fabric.setup(self.net, made)

    def backward(self, seed: int) -> Tensor:
        torch.manual_seed(seed)
        loss: Tensor = self.model(batch(seed, rank=self.fabric.global_rank))
        self.fabric.backward(loss)
        return loss.detach()

    def step(self, seed: int) -> Tensor:
        loss = self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def train(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Return the losses, and copies of all weights and states."""
        losses = [self.step(seed) for seed in range(NUM_STEPS)]
        states = copy.deepcopy(self.optimizer.optimizer.state_dict()["state"])
        weights = {n: as_rows(p).clone() for n, p in self.net.named_parameters()}
        return losses, {"states": states, "weights": weights}

    @property
    def num_updated(self) -> int:
        """Number of the weights that backward updates."""
        (compiled,) = self.model._forward_module.captures
        return len(updated_names(compiled.backward_traces[-1]))

    @property
    def num_trained(self) -> int:
        return sum(p.requires_grad for p in self.net.parameters())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_weights_and_states_have_the_same_bits(name: str) -> None:
    at_once, one_by_one = (Run(OPTIMIZERS[name], in_backward=b) for b in (False, True))

    torch.testing.assert_close(one_by_one.train(), at_once.train(), rtol=0, atol=0)

    assert one_by_one.num_updated == one_by_one.num_trained
    assert at_once.num_updated == 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"memory": {"policy": "recompute_all"}},
        {"fusion": True},
        {"precision": "bf16-mixed"},
        {"fusion": True, "precision": "bf16-mixed", "memory": {"policy": "recompute_all"}},
        {"precision": "bf16-true"},
        {"memory": {"offload": "optimizer"}},
        {"fp8": {"skip_modules": ["head"]}},
    ],
    ids=["recompute", "fusion", "bf16-mixed", "all", "bf16-true", "states on the host", "fp8"],
)
def test_the_same_bits_beside_other_features(arguments: dict[str, Any]) -> None:
    name = "int8 states" if "offload" in str(arguments) else "adamw"
    at_once, one_by_one = (
        Run(OPTIMIZERS[name], in_backward=b, **copy.deepcopy(arguments)) for b in (False, True)
    )

    torch.testing.assert_close(one_by_one.train(), at_once.train(), rtol=0, atol=0)

    assert one_by_one.num_updated == one_by_one.num_trained


class Wide(nn.Sequential):
    """Most of its bytes are weights; its result is a loss."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(96, 96), nn.Tanh()) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = nn.Sequential.forward(self, x)  # type: ignore[no-untyped-call]
        return found.square().mean()


def peaks(make: Make, *, in_backward: bool, **arguments: Any) -> tuple[int, int]:
    """Return the predicted and the measured peak of a step."""
    fabric = make_fabric(memory={"optimizer_in_backward": in_backward}, **arguments)
    torch.manual_seed(0)
    net, x = Wide(), torch.randn(4, 96)
    model, optimizer = fabric.setup(net, make(net.parameters()))

    def step() -> None:
        loss = model(x)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=math.inf)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    with letting_go():
        measured = measured_peak_bytes(step)
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    call = fabric.strategy._planned_call()
    assert call is not None
    held = sum(as_rows(p).nbytes for p in net.parameters()) + x.nbytes
    return call.profile.peak_bytes, measured + held + call.memory.optimizer_bytes


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_predicted_peak_is_the_measured_one_and_has_no_room_for_all_gradients(
    name: str,
) -> None:
    at_once, one_by_one = (peaks(OPTIMIZERS[name], in_backward=b) for b in (False, True))
    gradients = sum(p.nbytes for p in Wide().parameters())
    assert one_by_one[0] == one_by_one[1]
    assert one_by_one[1] < at_once[1] - 0.7 * gradients


def test_the_norm_is_that_of_all_gradients() -> None:
    at_once, one_by_one = (Run(OPTIMIZERS["sgd"], in_backward=b) for b in (False, True))
    for seed in range(2):
        norms = []
        for run in (at_once, one_by_one):
            run.backward(seed)
            norms.append(run.fabric.clip_gradients(run.model, run.optimizer, max_norm=math.inf))
            run.optimizer.step()
            run.optimizer.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_clipping_and_accumulation_are_refused() -> None:
    run = Run(OPTIMIZERS["sgd"], in_backward=True)
    run.backward(0)
    with pytest.raises(RuntimeError, match=r"cannot be clipped with memory.optimizer_in_backward"):
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=1.0)
    with pytest.raises(RuntimeError, match=r"cannot be clipped with memory.optimizer_in_backward"):
        run.fabric.clip_gradients(run.model, run.optimizer, clip_val=1.0)
    with (
        pytest.raises(RuntimeError, match="cannot be accumulated"),
        run.fabric.no_backward_sync(run.model),
    ):
        pass


def test_two_forwards_of_a_step_leave_the_update_to_the_optimizer() -> None:
    """Their gradients are summed first, as without the setting."""
    results = []
    for in_backward in (False, True):
        run = Run(OPTIMIZERS["adamw"], in_backward=in_backward)
        for _ in range(2):
            torch.manual_seed(0)
            loss = run.model(batch(1)) + run.model(batch(2))
            run.fabric.backward(loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        results.append([p.detach().clone() for p in run.net.parameters()])
    assert all(map(torch.equal, *results))


def test_a_second_backward_after_the_update_is_refused() -> None:
    run = Run(OPTIMIZERS["sgd"], in_backward=True)
    run.backward(0)
    with pytest.raises(RuntimeError, match="got a second gradient after its update in this step"):
        run.backward(1)


def test_a_gradient_that_is_asked_for_is_given_and_updates_nothing() -> None:
    run = Run(OPTIMIZERS["sgd"], in_backward=True)
    before = [p.detach().clone() for p in run.net.parameters()]
    trained = [p for p in run.net.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(run.model(batch(0)), trained)
    assert all(g is not None for g in gradients)
    assert all(map(torch.equal, before, run.net.parameters()))


def test_a_hook_gets_its_gradient_and_the_step_updates_its_weight() -> None:
    results = []
    for in_backward in (False, True):
        run = Run(OPTIMIZERS["sgd"], in_backward=in_backward)
        run.net.scale.register_hook(lambda gradient: 2 * gradient)
        run.step(0)
        results.append([p.detach().clone() for p in run.net.parameters()])
        if in_backward:
            assert run.num_updated == run.num_trained - 1
    assert all(map(torch.equal, *results))


class Linear(nn.Module):
    """A layer that runs twice, and a parameter whose gradient is that of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.position = nn.Parameter(torch.zeros(NUM_ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.layer(x) + self.position)).square().mean()


class SharedMemory(Linear):
    """Reads its weight's memory through a buffer, in backward after the weight itself."""

    def __init__(self) -> None:
        super().__init__()
        self.same: Tensor
        self.register_buffer("same", self.layer.weight.detach())

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh((x + self.position) @ self.same)).square().mean()


class TwoCaptures(Linear):
    """Two parameters share a gradient in calls of one kind alone."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.zeros(NUM_ROWS, WIDTH))

    def forward(self, x: Tensor, with_other: bool = False) -> Tensor:
        if with_other:
            return (self.position + self.other + x).square().mean()
        return super().forward(x)


Steps = Callable[[Fabric, Any, Any, Tensor], None]


def plain(fabric: Fabric, model: Any, optimizer: Any, x: Tensor) -> None:
    fabric.backward(model(x))
    optimizer.step()
    optimizer.zero_grad()


def of_two_captures(fabric: Fabric, model: Any, optimizer: Any, x: Tensor) -> None:
    fabric.backward(model(x) + model(x, True))
    optimizer.step()
    optimizer.zero_grad()


def with_evaluation(fabric: Fabric, model: Any, optimizer: Any, x: Tensor) -> None:
    model(x).item()  # with a graph that nobody differentiates
    plain(fabric, model, optimizer, x)


def with_hook_before(fabric: Fabric, model: Any, optimizer: Any, x: Tensor) -> None:
    def halved(of: Optimizer, *_: Any) -> None:
        for p in of.param_groups[0]["params"]:
            p.grad.mul_(0.5)

    handle = optimizer.optimizer.register_step_pre_hook(halved)
    plain(fabric, model, optimizer, x)
    handle.remove()


def nesterov(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Write to gradients."""
    return SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, foreach=True)


@pytest.mark.parametrize(
    ("kind", "make", "step"),
    [
        (SharedMemory, OPTIMIZERS["sgd"], plain),
        (Linear, nesterov, plain),
        (TwoCaptures, OPTIMIZERS["adamw"], of_two_captures),
        (Linear, OPTIMIZERS["adamw"], with_evaluation),
        (Linear, OPTIMIZERS["adamw"], with_hook_before),
    ],
    ids=[
        "memory of a buffer",
        "a gradient that the optimizer writes to",
        "two captures",
        "a graph without backward",
        "a hook before the step",
    ],
)
def test_odd_steps_have_the_same_bits(kind: type[Linear], make: Make, step: Steps) -> None:
    weights = []
    for in_backward in (False, True):
        fabric = make_fabric(memory={"optimizer_in_backward": in_backward})
        torch.manual_seed(0)
        net, x = kind(), torch.randn(NUM_ROWS, WIDTH)
        model, optimizer = fabric.setup(net, make(net.parameters()))
        for _ in range(NUM_STEPS):
            step(fabric, model, optimizer, x)
        weights.append([p.detach().clone() for p in net.parameters()])
    assert all(map(torch.equal, *weights))


def outside_of_the_model(run: Run) -> None:
    loss = run.model(batch(0)) + 0.1 * run.net.scale.square()
    run.fabric.backward(loss)
    run.optimizer.step()


def new_learning_rate(run: Run) -> None:
    run.backward(0)
    run.optimizer.param_groups[0]["lr"] = 0.05
    run.optimizer.step()


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (outside_of_the_model, "a gradient that came after its update"),
        (new_learning_rate, "such as its learning rate, changed between backward and"),
    ],
)
def test_steps_that_would_be_wrong_are_errors(step: Callable[[Run], None], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        step(Run(OPTIMIZERS["adamw"], in_backward=True))


def test_an_optimizer_that_does_not_step_is_noticed() -> None:
    """As in a generative adversarial network, whose discriminator would be trained by the generator's loss."""
    fabric = make_fabric(memory={"optimizer_in_backward": True})
    models, optimizers = zip(
        *(fabric.setup(net, SGD(net.parameters(), lr=0.1)) for net in (Linear(), Linear())),
        strict=True,
    )
    x = torch.randn(NUM_ROWS, WIDTH)
    fabric.backward(models[0](x) + models[1](x))
    optimizers[0].step()
    loss = models[0](x) + models[1](x)
    with pytest.raises(RuntimeError, match="got a second gradient after its update"):
        fabric.backward(loss)


def test_each_optimizer_has_its_norm() -> None:
    norms = []
    for in_backward in (False, True):
        fabric = make_fabric(memory={"optimizer_in_backward": in_backward})
        torch.manual_seed(0)
        net = Linear()
        model = fabric.setup(net)
        parts = (net.layer.parameters(), [net.position])
        optimizers: list[Any] = [fabric.setup_optimizers(SGD(p, lr=0.1)) for p in parts]
        fabric.backward(model(torch.randn(NUM_ROWS, WIDTH)))
        for optimizer in optimizers:
            norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf)
            norms.append(norm)
            optimizer.step()
    torch.testing.assert_close(norms[2:], norms[:2], rtol=1e-6, atol=0)
    assert norms[0] != norms[1]


def test_a_norm_that_is_not_finite_is_an_error_as_ever() -> None:
    run = Run(OPTIMIZERS["sgd"], in_backward=True)
    run.net.scale.data.fill_(math.nan)
    run.backward(0)
    with pytest.raises(RuntimeError, match="the weights were updated by them"):
        run.fabric.clip_gradients(run.model, run.optimizer, max_norm=math.inf)


def test_parameters_of_no_optimizer_keep_their_gradients() -> None:
    fabric = make_fabric(memory={"optimizer_in_backward": True})
    net = Wide()
    weights = [p for p in net.parameters() if p.dim() == 2]
    model, optimizer = fabric.setup(net, AdamW(weights[1:], fused=True))
    x = torch.randn(4, 96)
    fabric.backward(model(x))
    assert {n for n, p in net.named_parameters() if p.grad is not None} == {
        n for n, p in net.named_parameters() if p.dim() == 1 or p is weights[0]
    }
    optimizer.add_param_group({"params": [weights[0]]})
    norm = fabric.clip_gradients(model, optimizer, max_norm=math.inf)
    assert norm is not None
    assert torch.isfinite(norm)


def test_two_optimizers_of_one_parameter_are_refused_while_both_live() -> None:
    fabric = make_fabric(memory={"optimizer_in_backward": True})
    net = Linear()
    first = fabric.setup_optimizers(SGD(net.parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="two optimizers have the same parameter"):
        fabric.setup_optimizers(SGD(net.parameters(), lr=0.1))
    del first
    gc.collect()
    fabric.setup_optimizers(SGD(net.parameters(), lr=0.1))


def test_complex_parameters_have_a_norm() -> None:
    gradient = torch.tensor([3 + 4j, 12j])
    place = torch.zeros(())
    norm_of_one(gradient, place)
    assert place == 13


def test_an_optimizer_of_all_parameters_at_once_is_refused() -> None:
    with pytest.raises(ConfigError, match="LBFGS may compute with all parameters at once"):
        Run(lambda ps: torch.optim.LBFGS(ps), in_backward=True)


@pytest.mark.parametrize(
    ("setting", "value"), [("nonfinite_gradients", "skip"), ("cuda_graphs", True)]
)
def test_what_wants_all_gradients_first_is_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"strategy.{setting}"):
        make_fabric(memory={"optimizer_in_backward": True}, **{setting: value})


@on_fabric_rank
def check_ranks() -> None:
    for mode in ("zero2", "zero3", "none"):
        runs = [
            Run(OPTIMIZERS[name], in_backward=b, devices=2, sharding=mode)
            for name in ("fused", "int8 states")
            for b in (False, True)
        ]
        for at_once, one_by_one in (runs[:2], runs[2:]):
            torch.testing.assert_close(one_by_one.train(), at_once.train(), rtol=0, atol=0)
            assert one_by_one.num_updated == one_by_one.num_trained, mode
            norms = []
            for run in (at_once, one_by_one):
                run.backward(NUM_STEPS)
                norms.append(run.fabric.clip_gradients(run.model, run.optimizer, max_norm=math.inf))
            torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_ranks_update_in_backward_with_the_same_bits() -> None:
    run_on_fabric_ranks(check_ranks, 2)


@on_fabric_rank
def check_peak_on_ranks() -> None:
    for mode in ("zero2", "zero3"):
        predicted, measured = peaks(OPTIMIZERS["fused"], in_backward=True, devices=2, sharding=mode)
        assert predicted == measured, (mode, predicted - measured)


def test_the_predicted_peak_on_ranks_is_the_measured_one() -> None:
    run_on_fabric_ranks(check_peak_on_ranks, 2)
