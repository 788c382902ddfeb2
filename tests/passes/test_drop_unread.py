"""Dropping what nothing reads leaves what Thunder's own pass leaves, in steps that grow with the trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from thunder.core import devices, dtypes, prims
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, from_trace, tracectx
from thunder.core.transform_common import dce
from torch import Tensor, nn

from passes.contract import Probe
from thunder_memsave.compiler import joint_steps, pipeline
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.passes import drop_unread as module
from thunder_memsave.passes.drop_unread import drop_unread
from thunder_memsave.passes.step import Step, on_joint


class Attention(nn.Module):
    """Kernels of ours, draws, and results that nothing reads."""

    num_calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(8, 24)
        self.register_buffer("num_calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        q, k, v = (t.view(1, 5, 2, 4).transpose(1, 2) for t in self.query(x).chunk(3, -1))
        x.exp().cos()
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return nn.functional.dropout(found, 0.2).sum()


def traces(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[TraceCtx]:
    """Traces as the pass gets them while a model is compiled."""
    seen: list[TraceCtx] = []

    def recorded(trace: TraceCtx) -> TraceCtx:
        seen.append(_copied(trace))
        return drop_unread(trace)

    steps = tuple(
        Step(name=s.name, does=s.does, do=on_joint(recorded)) if s.name == "drop_unread" else s
        for s in pipeline.STEPS
    )
    monkeypatch.setattr(pipeline, "STEPS", steps)
    monkeypatch.setattr(joint_steps, "drop_unread", recorded)
    monkeypatch.setattr(module, "drop_unread", recorded)
    CompiledModule(model)(x).sum().backward()
    # Before, in and after Thunder's derivative, after what executors claim, and in Thunder's split.
    assert len(seen) == 5
    return seen


@pytest.mark.parametrize("make", [Probe, Attention])
def test_it_leaves_what_thunders_pass_leaves(
    make: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for trace in traces(make(), torch.randn(5, 8), monkeypatch):
        expected = described(dce(_copied(trace)).bound_symbols)
        assert described(drop_unread(trace).bound_symbols) == expected
        assert expected


def test_it_looks_at_each_part_of_an_operation_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked = [0]
    always_stays = module._always_stays

    def counted(bsym: BoundSymbol) -> bool:
        looked[0] += 1
        return always_stays(bsym)

    seen = {}
    for count in (10, 40):
        model = nn.Sequential(*(Probe().norm for _ in range(count)))
        trace = traces(model, torch.randn(5, 8), monkeypatch)[2]
        parts = [b for b in trace.bound_symbols if b.flat_proxy_outs]
        whole = parts[-1].from_bsym(subsymbols=parts)
        trace.bound_symbols[trace.bound_symbols.index(parts[-1])] = whole
        monkeypatch.setattr(module, "_always_stays", counted)
        looked[0] = 0
        drop_unread(trace)
        seen[count] = looked[0], len(whole.subsymbols)
        monkeypatch.undo()
    assert seen[40][1] > 3 * seen[10][1]
    assert seen[40][0] < 5 * seen[10][0]


def test_it_drops_what_is_read_by_what_it_drops() -> None:
    trace = _trace_of_two()
    names = [b.output.name for b in drop_unread(trace).bound_symbols if b.sym is prims.sin]
    assert names == ["kept"]


def _trace_of_two() -> TraceCtx:
    """`a = sin(x); b = sin(a); kept = sin(x)`, of which only `kept` is returned."""
    trace = TraceCtx(lambda x: None)
    with tracectx(trace):
        x = _proxy("x")
        trace.args, trace.kwargs = (x,), {}
        a, b, kept = map(_proxy, ("a", "b", "kept"))
        trace.bound_symbols = [
            prims.sin.bind(x, output=a),
            prims.sin.bind(a, output=b),
            prims.sin.bind(x, output=kept),
            prims.python_return.bind(kept, output=()),
        ]
    return trace


def _proxy(name: str) -> Any:
    return TensorProxy(
        name, shape=(2,), device=devices.to_device("cpu"), dtype=dtypes.float32, requires_grad=False
    )


def _copied(trace: TraceCtx) -> TraceCtx:
    """Copy a trace with the parts of its operations, which the passes change."""
    new = from_trace(trace)
    new.bound_symbols = list(map(_copied_symbol, trace.bound_symbols))
    return new


def _copied_symbol(bsym: BoundSymbol) -> BoundSymbol:
    return bsym.from_bsym(subsymbols=list(map(_copied_symbol, bsym.subsymbols)))


def described(symbols: Sequence[BoundSymbol]) -> list[Any]:
    """What each operation is, with its parts."""
    return [
        (
            b.sym.name,
            [a.name for a in b.flat_proxy_args],
            [o.name for o in b.flat_proxy_outs],
            sorted(map(str, b.tags)),
            described(b.subsymbols),
        )
        for b in symbols
    ]
