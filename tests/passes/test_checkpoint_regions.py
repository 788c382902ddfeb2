"""Regions of torch.utils.checkpoint are recomputed, with forward's random numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from thunder.core.trace import TraceCtx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from harness.recompute import everything, forward_values, joint_trace, recomputing
from harness.traces import saved_for_backward
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.errors import CompileError
from thunder_memsave.passes.checkpoint_regions import checkpointed


class Regions(nn.Module):
    """Two regions, the first with one inside; dropout in each."""

    def __init__(self, *, checkpoints: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.call: Any = partial(checkpoint, use_reentrant=False) if checkpoints else _call

    def block(self, number: int, x: Tensor) -> Tensor:
        return nn.functional.dropout(nn.functional.gelu(self.layers[number](x)), 0.5)

    def outer(self, x: Tensor) -> Tensor:
        return self.block(1, self.call(self.block, 0, x)).exp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[3](self.call(self.outer, x)).tanh()
        return self.call(self.block, 2, x).sin()


def _call(function: Any, *args: Any) -> Any:
    return function(*args)


def outside(trace: TraceCtx) -> set[str]:
    return set(everything(trace)) - checkpointed(trace)


def gradients(model: nn.Module, x: Tensor) -> tuple[list[Tensor], list[str]]:
    with recomputing(outside):
        module = CompiledModule(model)
        torch.manual_seed(0)
        module(x).square().sum().backward()
    (capture,) = module.captures
    forward = capture.forward_traces[-1]
    there = {a.name for a in forward.args}  # parameters, which linears read again
    saved = [t.name for t in saved_for_backward(forward) if t.name not in there]
    state = torch.get_rng_state()
    return [state, *(p.grad for p in model.parameters() if p.grad is not None)], saved


def test_gradients_are_those_without_checkpoints_and_less_is_saved() -> None:
    torch.manual_seed(0)
    x, model, plain = torch.randn(3, 4), Regions(), Regions(checkpoints=False)
    plain.load_state_dict(model.state_dict())
    ours, few = gradients(model, x)
    reference, many = gradients(plain, x)
    assert len(ours) == len(reference) == 9
    assert all(torch.equal(a, b) for a, b in zip(ours, reference, strict=True))
    assert len(few) < len(many)


def test_a_region_keeps_what_is_read_outside_of_it() -> None:
    trace = joint_trace(Regions(), torch.randn(3, 4))
    names, inside = forward_values(trace), checkpointed(trace)
    producers = {o.name: b.sym.name for b in trace.bound_symbols for o in b.flat_proxy_outs}
    assert [producers[n] for n in set(names) - inside if "addmm" in producers[n]] == ["aten_addmm"]
    assert "aten_exp" in {producers[n] for n in set(names) - inside}
    assert [producers[n] for n in names if n in inside].count("aten_bernoulli_p") == 3


def test_without_checkpoints_there_are_none() -> None:
    assert not checkpointed(joint_trace(Regions(checkpoints=False), torch.randn(3, 4)))


def test_a_policy_is_refused_by_name() -> None:
    class Selective(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
            return checkpoint(super().forward, x, use_reentrant=False, context_fn=contexts)

    with pytest.raises(
        CompileError, match=r"context_fn \(at .*test_checkpoint_regions.* memory.keep"
    ):
        CompiledModule(Selective(4, 4))(torch.randn(3, 4))
