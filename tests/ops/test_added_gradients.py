"""A backward adds its gradients to those of earlier micro-batches where they are made, with autograd's sums."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import make_fabric
from harness.memory import measured_peak_bytes
from thunder_memsave.fabric.forward_module import ForwardModule
from thunder_memsave.ops.added_gradients import added_names

WIDTH = 48
NUM_MICRO_BATCHES = 3


class Net(nn.Module):
    """Has a weight that is read twice and tied, one that a second loss alone needs, a frozen one and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.first.weight
        self.other = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.hidden[0].bias.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        for layer in self.hidden:
            x = torch.tanh(layer(x))
        x = self.tied(x) * self.scale
        return x.square().mean(), self.other(x).square().mean()


def batch(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


class Run:
    """A model that accumulates, with the backward that adds, or with autograd's sums alone."""

    def __init__(self, *, adds: bool) -> None:
        torch.manual_seed(0)
        self.fabric: Fabric = make_fabric(leave_out=[] if adds else ["add_gradients"])
        self.net = Net()
        optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.model, self.optimizer = self.fabric.setup(self.net, optimizer)

    def losses(self, seed: int) -> tuple[Tensor, Tensor]:
        return self.losses_of(batch(seed))

    def losses_of(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        first, second = self.model(rows)
        return first, second

    def accumulate(self, *, zeros: bool = False) -> None:
        if zeros:
            self.optimizer.zero_grad(set_to_none=False)
        for seed in range(NUM_MICRO_BATCHES):
            with self.keeping(seed < NUM_MICRO_BATCHES - 1):
                first, second = self.losses(seed)
                self.fabric.backward(first + second)

    @contextmanager
    def keeping(self, enabled: bool) -> Iterator[None]:
        with self.fabric.no_backward_sync(self.model, enabled=enabled):
            yield

    def gradients(self) -> dict[str, Tensor | None]:
        found = {n: p.grad for n, p in self.net.named_parameters()}
        return {n: None if g is None else g.clone() for n, g in found.items()}

    @property
    def compiled(self) -> ForwardModule:
        forward = self.model._forward_module
        assert isinstance(forward, ForwardModule)
        return forward

    def added(self) -> list[str]:
        """Return the parameters to whose gradients the backward adds."""
        (capture,) = self.compiled.captures
        return list(added_names(capture.backward_traces[-1]))


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run]:
    both = Run(adds=True), Run(adds=False)
    for run in both:
        run.accumulate()
    return both


@pytest.fixture
def fresh(runs: tuple[Run, Run]) -> tuple[Run, Run]:
    for run in runs:
        run.optimizer.zero_grad()
    return runs


def assert_same(runs: tuple[Run, Run]) -> dict[str, Tensor | None]:
    found, expected = (run.gradients() for run in runs)
    for name, gradient in expected.items():
        assert (found[name] is None) == (gradient is None), name
        if gradient is not None:
            assert torch.equal(found[name], gradient), name  # type: ignore[arg-type]
    return found


def test_the_trace_adds_the_gradients_of_all_trained_parameters(runs: tuple[Run, Run]) -> None:
    adding, returning = (run.added() for run in runs)
    trained = [p for p in runs[0].net.parameters() if p.requires_grad]
    assert len(set(adding)) == len(adding) == len(trained)
    assert returning == []


@pytest.mark.parametrize("zeros", [False, True])
def test_sums_have_the_bits_of_autograds(fresh: tuple[Run, Run], zeros: bool) -> None:
    for run in fresh:
        run.accumulate()
        run.optimizer.step()
        run.accumulate(zeros=zeros)
    found = assert_same(fresh)
    assert found["hidden.0.bias"] is None
    assert found["first.weight"] is not None


def test_a_loss_adds_only_to_what_it_needs(fresh: tuple[Run, Run]) -> None:
    for run in fresh:
        run.accumulate()
        first, _ = run.losses(7)
        before = run.gradients()
        run.fabric.backward(first)
        assert torch.equal(run.net.other.weight.grad, before["other.weight"])  # type: ignore[arg-type]
        assert not torch.equal(run.net.scale.grad, before["scale"])  # type: ignore[arg-type]
    assert_same(fresh)


def test_gradients_that_are_asked_for_are_added_to_nothing(fresh: tuple[Run, Run]) -> None:
    asked = []
    for run in fresh:
        run.accumulate()
        before = run.gradients()
        first, second = run.losses(7)
        weights = [run.net.first.weight, run.net.other.bias]
        asked.append(torch.autograd.grad(first + second, weights))
        after = run.gradients()
        assert all(after[n] is g or torch.equal(after[n], g) for n, g in before.items())  # type: ignore[arg-type]
    assert all(map(torch.equal, *asked))


def test_only_the_inputs_of_backward_are_added_to(fresh: tuple[Run, Run]) -> None:
    for run in fresh:
        run.accumulate()
        before = run.gradients()
        first, _ = run.losses(7)
        first.backward(inputs=[run.net.scale])
        after = run.gradients()
        changed = {
            n
            for n, g in before.items()
            if g is not None and not torch.equal(g, after[n])  # type: ignore[arg-type]
        }
        assert changed == {"scale"}
    assert_same(fresh)


@pytest.mark.parametrize("kind", ["gradient", "accumulated"])
def test_a_hook_sees_every_gradient(fresh: tuple[Run, Run], kind: str) -> None:
    seen: list[list[Tensor]] = [[], []]
    for run, calls in zip(fresh, seen, strict=True):
        run.accumulate()
        weight = run.net.first.weight
        if kind == "gradient":
            handle = weight.register_hook(_remember(calls))
        else:
            handle = weight.register_post_accumulate_grad_hook(_remember(calls))
        run.accumulate()
        handle.remove()
    assert [len(calls) for calls in seen] == [NUM_MICRO_BATCHES] * 2
    assert all(map(torch.equal, *seen))
    assert_same(fresh)


def _remember(calls: list[Tensor]) -> Callable[[Tensor], None]:
    return lambda t: calls.append((t if t.grad is None else t.grad).detach().clone())


def test_a_parameter_with_a_hook_is_returned_by_the_trace() -> None:
    run = Run(adds=True)
    run.net.scale.register_hook(lambda g: g * 2)
    run.accumulate()
    trained = [p for p in run.net.parameters() if p.requires_grad]
    assert len(run.added()) == len(trained) - 1
    alone = Run(adds=False)
    alone.net.scale.register_hook(lambda g: g * 2)
    alone.accumulate()
    assert_same((run, alone))


def test_the_peak_is_the_predicted_one_and_smaller(runs: tuple[Run, Run]) -> None:
    measured, predicted = [], []
    for run in runs:
        run.optimizer.zero_grad()
        run.accumulate()
        rows = batch(3)  # whoever calls holds it

        def one_more(run: Run = run, rows: Tensor = rows) -> None:
            torch.autograd.backward(run.losses_of(rows))

        one_more()
        measured.append(measured_peak_bytes(one_more))
        planner = run.compiled.planner
        assert planner is not None
        call = planner.calls[-1]
        held = sum(call.program.storages[s].nbytes for s in call.program.held)
        predicted.append(call.profile.peak_bytes - held - call.memory.gradient_bytes)
    assert predicted == measured
    adding, returning = measured
    assert adding < returning / 2
