"""Executors claim what Thunder's own transform lets them claim, and nothing else of a trace is made anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from passes.contract import Probe
from passes.test_drop_unread import Attention, described
from thunder.core.trace import TraceCtx, from_trace
from thunder.executors import passes
from torch import Tensor, nn

from thunder_memsave.compiler import claim, joint_steps
from thunder_memsave.compiler.compiled_module import CompiledModule


class Casts(nn.Module):
    """Casts, which executors claim, around what runs as it is."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).double().sin().float()
        return x.sum()


def traces(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[TraceCtx, TraceCtx, TraceCtx]]:
    """Traces before their operations are claimed, after, and after Thunder's transform, of the compiling of a model."""
    seen = []

    def recorded(trace: TraceCtx, executors: Any) -> TraceCtx:
        other = from_trace(trace)
        other.names = set(trace.names)
        other.bound_symbols = [b.from_bsym() for b in trace.bound_symbols]
        expected = passes._transform_for_operator_executor_execution(other, executors)
        seen.append((trace, found := claim.claimed(trace, executors), expected))
        return found

    monkeypatch.setattr(joint_steps, "claimed", recorded)
    CompiledModule(model)(torch.randn(5, 8)).sum().backward()
    monkeypatch.undo()
    return seen


@pytest.mark.parametrize("make", [Probe, Attention, Casts])
def test_the_trace_is_that_of_thunders_transform(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    ((_, found, expected),) = traces(make(), monkeypatch)
    assert described(found.bound_symbols) == described(expected.bound_symbols)
    assert found.names == expected.names


def test_what_no_executor_claims_is_not_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    ((before, found, _),) = traces(Casts(8), monkeypatch)
    casts = [b for b in before.bound_symbols if b.sym.name == "convert_element_type"]
    made = {o.name for b in casts for o in b.flat_proxy_outs}
    others = [
        b
        for b in before.bound_symbols
        if b.sym.name != "convert_element_type" and not {a.name for a in b.flat_proxy_args} & made
    ]
    assert len(others) > len(casts)
    assert set(map(id, others)) <= set(map(id, found.bound_symbols))


def test_operations_with_a_rule_of_their_own_are_claimed_by_thunders_transform() -> None:
    with torch.no_grad():
        x = torch.randn(5, 8)
        model = Casts()
        assert torch.equal(CompiledModule(model)(x), model(x))
