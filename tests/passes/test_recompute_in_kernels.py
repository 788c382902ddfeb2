"""Products whose input kernels of backward recompute run behind those, with what needs them, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from harness.joint_passes import joint_passes
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.passes.recompute import PREFIX, recompute
from thunder_memsave.passes.recompute_in_kernels import recompute_in_kernels
from thunder_memsave.planner.actions import NO_ACTIONS, Actions, keeping

WIDTH = 8


class Gated(nn.Module):
    """Two layers, each with a gate, whose weights may have another dtype than what they compute in."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
            for _ in range(num_layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleList)
            gate, up, down = layer
            x = x + down(nn.functional.silu(gate(x)) * up(x))
        return x.square().sum()


Joins = Mapping[str, str]


def joins_of(trace: TraceCtx) -> dict[str, str]:
    """Return what reads each gate's activation first in backward, by the names of the products of gates."""
    symbols = [b for b in trace.bound_symbols if b.flat_proxy_outs]
    made = [b.output.name for b in symbols if b.sym.name == "aten_silu"]
    silus = [name for name in made if not name.startswith(PREFIX)]
    names = {name for silu in silus for name in (silu, f"{PREFIX}{silu}")}
    found: dict[str, str] = {}
    first = {
        b.args[1].name.removeprefix(PREFIX): b.output.name for b in symbols if _reads(b, names)
    }
    for b in symbols:
        if b.sym.name == "aten_mul_Tensor" and b.args[0].name in silus:
            found[b.output.name] = first[b.args[0].name]
    return found


def _reads(bsym: BoundSymbol, names: set[str]) -> bool:
    return bsym.sym.name == "aten_mul_Tensor" and bsym.args[1].name in names


def products_kept(trace: TraceCtx) -> Actions:
    """Keep what is no activation and no product of a gate."""
    again = {"aten_silu", "aten_mul_Tensor", "aten_gelu"}
    kept = (b for b in trace.bound_symbols if b.sym.name not in again)
    return keeping(o.name for b in kept for o in b.flat_proxy_outs)


def stepped(
    kept: Callable[[TraceCtx], Actions] = products_kept, *, moves: bool = True
) -> tuple[list[Tensor], list[str]]:
    """Return gradients, and the symbols of the joint trace."""
    module = CompiledModule(Gated())
    seen: list[list[str]] = []

    def run(trace: TraceCtx) -> TraceCtx:
        trace = recompute(trace, actions=kept(trace))
        joins = joins_of(trace) if moves else {}
        trace = recompute_in_kernels(trace, joins=joins)
        seen.append([b.sym.name for b in trace.bound_symbols])
        return trace

    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    with joint_passes(run):
        module(x).backward()
    return [p.grad for p in module.parameters() if p.grad is not None], seen[0]


def test_products_come_behind_the_first_operation_of_the_kernel() -> None:
    gradients, symbols = stepped()
    expected, before = stepped(moves=False)
    assert all(map(torch.equal, gradients, expected))
    assert len(gradients) == len(expected) == 6
    assert sorted(symbols) == sorted(before)
    assert symbols != before
    backward = symbols[symbols.index("get_grad") :]
    assert backward.count("aten_silu") == 2
    for number in (n for n, name in enumerate(backward) if name == "aten_silu"):
        # silu is computed beside its reader, the product of the gate behind that, and then the weight's gradient.
        names = [n for n in backward[number : number + 8] if "aten_t" not in n and "view" not in n]
        assert names[:4] == ["aten_silu", "aten_mul_Tensor", "aten_mul_Tensor", "aten_mm"]


def test_what_is_kept_moves_nothing() -> None:
    def all_kept(trace: TraceCtx) -> Actions:
        return keeping([*joins_of(trace), *products_kept(trace)])

    _, symbols = stepped(all_kept)
    _, before = stepped(all_kept, moves=False)
    assert symbols == before


def test_one_may_be_kept_and_another_moves() -> None:
    def one_kept(trace: TraceCtx) -> Actions:
        return keeping([next(iter(joins_of(trace))), *products_kept(trace)])

    gradients, symbols = stepped(one_kept)
    expected, before = stepped(one_kept, moves=False)
    assert all(map(torch.equal, gradients, expected))
    assert symbols != before
    assert sorted(symbols) == sorted(before)


def test_an_inference_trace_and_unknown_values_stay() -> None:
    seen: list[tuple[TraceCtx, TraceCtx]] = []

    def run(trace: TraceCtx, joins: Joins) -> TraceCtx:
        seen.append((trace, recompute_in_kernels(trace, joins=joins)))
        return trace

    module = CompiledModule(Gated())
    with joint_passes(partial(run, joins={"no_such_value": "t1"})), torch.no_grad():
        module(torch.randn(4, WIDTH))
    assert all(before is after for before, after in seen)
    assert len(seen) == 1


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 3))])
def test_random_places_never_change_a_bit(seed: int) -> None:
    """Whatever a plan asks for, what cannot wait stays: any value of forward, behind any operation of backward."""
    generator = torch.Generator().manual_seed(seed)

    def run(trace: TraceCtx) -> TraceCtx:
        trace = recompute(trace, actions=products_kept(trace) if seed % 2 else NO_ACTIONS)
        symbols = trace.bound_symbols
        clones = [o.name for b in symbols for o in b.flat_proxy_outs if o.name.startswith(PREFIX)]
        first = max(n for n, b in enumerate(symbols) if b.sym.name == "get_grad")
        later = [o.name for b in symbols[first:-1] for o in b.flat_proxy_outs]
        picks = torch.randint(len(later), (len(clones),), generator=generator).tolist()
        names = (name.removeprefix(PREFIX) for name in clones)
        return recompute_in_kernels(
            trace, joins={n: later[p] for n, p in zip(names, picks, strict=True)}
        )

    expected, _ = stepped(moves=False)
    module = CompiledModule(Gated())
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))
    with joint_passes(run):
        module(x).backward()
    found = [p.grad for p in module.parameters()]
    assert all(g is not None and torch.equal(g, e) for g, e in zip(found, expected, strict=True))
