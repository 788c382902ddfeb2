"""When a call is ordinary, captured or replayed; the runtime checks the rules of CUDA graphs on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from harness.fake_cuda_graphs import FakeRuntime
from thunder_memsave.compiler.autograd import Differentiable, run
from thunder_memsave.compiler.cuda_graphs.graphed_call import GraphedCall
from thunder_memsave.errors import CompileError


class Call:
    """`tanh(weight * x) * noise`, with a graphed forward and backward; its Python counts its runs."""

    def __init__(self, *, is_required: bool = False) -> None:
        self.weight = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.state = torch.zeros(3)
        """Written in place by each forward, as the history of fp8 is."""
        self.runtime = FakeRuntime()
        self.graphed = GraphedCall(
            self.runtime,
            name="Model.forward",
            is_fixed=[True, True, False],
            is_required=is_required,
        )
        self.num_python = 0
        self.waits_in = ""

    def __call__(self, x: Tensor) -> Tensor:
        function = Differentiable(
            forward=lambda *inputs: self.graphed.forward(self.compute, inputs),
            backward=lambda saved, cotangents, reached: self.graphed.backward(
                self.differentiate, saved, cotangents, reached.inputs
            ),
            output_depends_on=(frozenset({0}),),
        )
        (output,) = run(function, (self.weight, self.state, x))
        assert isinstance(output, Tensor)
        return output

    def compute(self, weight: Tensor, state: Tensor, x: Tensor) -> Any:
        self._count("forward", x)
        noise = torch.rand(3)
        torch.maximum(state, x.abs(), out=state)
        y = torch.tanh(weight * x)
        return [y * noise], ([weight, x, y, noise], [])

    def differentiate(self, saved: list[Any], cotangents: list[Any]) -> list[Any]:
        weight, x, y, noise = saved[0]
        saved[0].clear()
        self._count("backward", x)
        gradient = cotangents[0] * noise * (1 - y * y)
        return [gradient * x + 0 * weight, None, None]

    def _count(self, where: str, tensor: Tensor) -> None:
        self.num_python += not self.runtime.is_running
        if where == self.waits_in:
            float(tensor.sum())


def steps(call: Call, xs: Sequence[float]) -> list[Tensor]:
    """Take steps on batches of one value; return what each gave: output, gradient, state."""
    torch.manual_seed(0)
    seen = []
    for value in xs:
        output = call(torch.full((3,), value))
        output.sum().backward()
        assert call.weight.grad is not None
        seen += [output.detach(), call.weight.grad, call.state.clone()]
        call.weight.grad = None
    return seen


def ordinary(xs: Sequence[float]) -> list[Tensor]:
    call = Call()
    call.graphed.why_off = "this is how it would be"
    return steps(call, xs)


def assert_same(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(seen) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


VALUES = [0.5, 1.0, -2.0, 0.25, 3.0, -0.125]


def test_replays_have_the_bits_of_ordinary_steps_and_run_no_python() -> None:
    """Random numbers, state that is written in place, and results that are kept until after the last step."""
    call = Call()
    assert_same(steps(call, VALUES), ordinary(VALUES))
    assert call.graphed.is_captured
    assert call.num_python == 2 * 2
    assert [graph.num_replays for graph in call.runtime.graphs] == [4, 4]


def test_gradients_accumulate_wherever_they_are() -> None:
    """A replay never writes into `.grad`: it is the caller's, set to None or zeroed."""
    sums: list[Tensor | None] = []
    for call in (Call(), Call()):
        call.graphed.why_off = "without" if sums else None
        torch.manual_seed(0)
        for number, value in enumerate(VALUES):
            call(torch.full((3,), value)).sum().backward()
            if number == 3:
                assert call.weight.grad is not None
                call.weight.grad.zero_()
        sums.append(call.weight.grad)
    assert sums[0] is not None
    assert sums[1] is not None
    assert torch.equal(sums[0], sums[1])


def test_gradients_that_autograd_grad_returns_are_kept() -> None:
    call, kept = Call(), list[Tensor]()
    for value in VALUES:
        (gradient,) = torch.autograd.grad(call(torch.full((3,), value)).sum(), call.weight)
        kept.append(gradient)
    assert all(gradient.isfinite().all() for gradient in kept)
    assert len({float(gradient[0]) for gradient in kept}) == len(kept)


def test_a_second_forward_before_the_backward_of_the_first_is_ordinary() -> None:
    call, other = Call(), Call()
    other.graphed.why_off = "without"
    results = []
    for each in (call, other):
        torch.manual_seed(0)
        steps(each, VALUES[:4])
        first, second = each(torch.full((3,), 0.5)), each(torch.full((3,), -1.5))
        (second.sum() + 2 * first.sum()).backward()
        assert each.weight.grad is not None
        results.append(each.weight.grad)
        each.weight.grad = None
    assert torch.equal(*results)
    before = call.num_python
    steps(call, VALUES[:1])
    assert call.num_python == before, "replayed again"


def test_a_retained_graph_keeps_what_it_reads() -> None:
    call = Call()
    steps(call, VALUES[:4])
    output = call(torch.full((3,), 0.5)).sum()
    gradients = [torch.autograd.grad(output, call.weight, retain_graph=True)[0] for _ in range(2)]
    before = call.num_python
    call(torch.full((3,), -2.0))  # its backward may come as well
    assert call.num_python == before + 1
    gradients.append(torch.autograd.grad(output, call.weight)[0])
    assert all(torch.equal(gradients[0], gradient) for gradient in gradients)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(output, call.weight)


def test_a_forward_without_a_backward_costs_nothing() -> None:
    call = Call()
    steps(call, VALUES[:3])
    with torch.no_grad():
        call(torch.full((3,), 0.5))
    del_me = call(torch.full((3,), 0.5))
    del del_me
    assert_same(steps(call, VALUES), ordinary_after_state(call))


def ordinary_after_state(call: Call) -> list[Tensor]:
    other = Call()
    other.state.fill_(2.0)  # the largest of the first three
    assert float(call.state.max()) == 3.0
    other.graphed.why_off = "without"
    return steps(other, VALUES)


def test_a_weight_that_changed_before_the_backward_is_an_error() -> None:
    call = Call()
    steps(call, VALUES[:4])
    output = call(torch.full((3,), 0.5)).sum()
    with torch.no_grad():
        call.weight.mul_(2)
    with pytest.raises(RuntimeError, match="what it reads was overwritten since its forward"):
        output.backward()


def test_a_moved_weight_is_captured_again_but_not_forever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = Call()
    steps(call, VALUES[:3])
    for _ in range(2):
        call.weight.data = call.weight.data.clone()
        assert_same(steps(call, VALUES[:1]), ordinary_state_of(call, VALUES[:1]))
    assert len(call.runtime.graphs) == 2 * 3
    call.weight.data = call.weight.data.clone()
    steps(call, VALUES[:1])
    assert not call.graphed.is_captured
    assert "it was captured 3 times: weights were moved" in caplog.text


def ordinary_state_of(call: Call, xs: Sequence[float]) -> list[Tensor]:
    other = Call()
    other.state.copy_(call.state)
    other.graphed.why_off = "without"
    return steps(other, xs)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_makes_the_host_wait_is_not_captured(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    call = Call()
    call.waits_in = where
    assert_same(steps(call, VALUES), ordinary(VALUES))
    assert not call.runtime.graphs
    assert "no CUDA graphs of Model.forward: it makes the host wait: _local_scalar" in caplog.text
    asked = Call(is_required=True)
    asked.waits_in = where
    with pytest.raises(
        CompileError, match=r"cuda_graphs is true, but Model\.forward is no CUDA gr"
    ):
        steps(asked, VALUES)


def test_what_waits_only_while_it_is_captured_is_refused_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    call = Call()
    steps(call, VALUES[:2])
    call.waits_in = "forward"
    steps(call, VALUES)
    assert "its forward cannot be captured: operation not permitted when stream" in caplog.text
    call = Call()
    steps(call, VALUES[:2])
    call.waits_in = "backward"
    with pytest.raises(
        CompileError, match=r"the backward of Model\.forward cannot be captured .*f"
    ):
        steps(call, VALUES)


def test_dropped_graphs_still_serve_the_backward_that_needs_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    call = Call()
    steps(call, VALUES[:4])
    output = call(torch.full((3,), 0.5)).sum()
    call.graphed.drop("another shape came")
    output.backward()
    assert call.weight.grad is not None
    assert call.weight.grad.isfinite().all()
    assert "no CUDA graphs of Model.forward any more: another shape came" in caplog.text


def test_the_runtime_refuses_a_moved_argument_and_memory_of_others() -> None:
    runtime, tensor, elsewhere = FakeRuntime(), torch.ones(3), torch.ones(3)
    graph, result = runtime.capture(lambda arguments: arguments[0] * 2, [tensor], pool=None)
    tensor.fill_(4.0)
    graph.replay()
    assert result.tolist() == [8.0] * 3
    tensor.data = torch.ones(3)
    with pytest.raises(AssertionError, match="an argument was moved"):
        graph.replay()
    with pytest.raises(Exception, match="allocated outside of the pool"):
        runtime.capture(lambda _: elsewhere, [tensor], pool=None)
