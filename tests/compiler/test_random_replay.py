"""Random numbers are drawn once: backward gives the same from the generator's state, and leaves it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from harness.recompute import Step, everything, joint_trace, nothing, run_joint
from thunder_memsave.ops.random_ops import draws_random_numbers, is_replayable, replay
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.planner.actions import keeping


class Dropout(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(x).sin(), 0.5).exp()


class Attention(nn.Linear):
    def __init__(self, num_in: int, num_out: int, dropout: float = 0.1) -> None:
        super().__init__(num_in, num_out)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        q = super().forward(x)[None, None]
        return nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=self.dropout)


class Bernoulli(nn.Linear):
    """Draws through another function than dropout."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * torch.bernoulli(torch.full_like(y, 0.5)).exp()


class Noise(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return (y * torch.randn(y.shape)).exp()


MODELS = (Dropout, Attention, Bernoulli, Noise)


def steps(model: nn.Module) -> tuple[Step, Step, TraceCtx]:
    trace = joint_trace(model, torch.zeros(5, 4))
    again = recompute(trace, actions=keeping(nothing(trace)))
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(tuple(a.shape), generator=g) for a in trace.args]
    return run_joint(again, inputs, seed=3), run_joint(trace, inputs, seed=3), again


@pytest.mark.parametrize("build", MODELS)
def test_backward_sees_the_numbers_of_forward_and_the_generator_moves_once(build: Any) -> None:
    ours, reference, again = steps(build(4, 4))
    names = [b.sym.name for b in again.bound_symbols]
    assert any(n.endswith("_drawing") for n in names), names
    assert any(n.endswith("_replaying") for n in names), names
    for measured, expected in zip(ours.gradients, reference.gradients, strict=True):
        assert (measured is None) == (expected is None)
        assert measured is None or expected is None or torch.equal(measured, expected)
    assert torch.equal(ours.generator, reference.generator)
    assert torch.equal(ours.outputs[0], reference.outputs[0])


def random_symbol(build: Any = Dropout) -> tuple[BoundSymbol, TraceCtx]:
    trace = joint_trace(build(4, 4), torch.zeros(5, 4))
    return next(b for b in trace.bound_symbols if draws_random_numbers(b)), trace


def test_where_the_mask_is_kept_nothing_is_replayed() -> None:
    symbol, trace = random_symbol()
    kept = everything(trace) - {symbol.output.name}
    assert not any(
        "drawing" in b.sym.name for b in recompute(trace, actions=keeping(kept)).bound_symbols
    )


def test_a_state_is_5056_bytes_of_the_cpu_and_16_of_cuda() -> None:
    symbol, trace = random_symbol()
    with tracectx(trace):
        state = replay(symbol).state
    assert state.numel == torch.get_rng_state().numel() == 5056
    assert (state.device.type, state.dtype.bytes) == ("cpu", 1)


def test_planning_draws_nothing() -> None:
    symbol, trace = random_symbol()
    with tracectx(trace):
        pair = replay(symbol)
    (draw,) = pair.drawing._call_ctx.values()
    (again,) = pair.replaying(symbol)._call_ctx.values()
    before = torch.get_rng_state()
    with FakeTensorMode():
        read = [
            torch.empty(tuple(a.shape)) if isinstance(a, TensorProxy) else a for a in symbol.args
        ]
        values, state = draw(*read, **symbol.kwargs)
        repeated = again(state, *read, **symbol.kwargs)
    assert values.shape == repeated.shape == (5, 4)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("dropout", "draws"), [(0.0, False), (0.1, True)])
def test_attention_draws_only_with_dropout(dropout: float, draws: bool) -> None:
    trace = joint_trace(Attention(4, 4, dropout), torch.zeros(5, 4))
    drawing = [b for b in trace.bound_symbols if draws_random_numbers(b)]
    assert bool(drawing) is draws
    assert all(map(is_replayable, drawing))
