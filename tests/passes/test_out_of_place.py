"""What forward writes in place of its own is computed elsewhere, unless something else would notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from thunder.core.trace import TraceCtx
from thunder.dev_utils.check_trace import check_trace
from torch import Tensor, nn
from torch.nn import functional as F

from harness.memory import joint_traces
from thunder_memsave.budget.extract import memory_of
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.passes.out_of_place import TraceMemory, out_of_place
from thunder_memsave.passes.symbols import written_in_place

ROWS, WIDTH = 4, 6
RUN = partial(out_of_place, memory=memory_of)

Forward = Callable[["InPlace", Tensor], object]


class Names(NamedTuple):
    """Of the one write, and of what is there before it and read after it."""

    source: str
    target: str
    other: str
    result: str


Change = Callable[[TraceMemory, Names], TraceMemory]


class InPlace(nn.Module):
    """Computes `forward` with a linear and a buffer."""

    seen: Tensor

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.ones(ROWS, WIDTH))
        self._forward = forward

    def forward(self, x: Tensor) -> object:
        return self._forward(self, x)


def added(module: InPlace, x: Tensor) -> Tensor:
    hidden = module.linear(x)
    hidden += x
    return torch.sin(hidden)


def beside_another(module: InPlace, x: Tensor) -> Tensor:
    other, hidden = torch.cos(x), module.linear(x)
    hidden += x
    return torch.sin(hidden) * other


def twice(module: InPlace, x: Tensor) -> Tensor:
    return torch.sin(F.dropout(F.silu(module.linear(x), inplace=True), 0.5, True, True))


def through_a_view(module: InPlace, x: Tensor) -> Tensor:
    return torch.sin(F.silu(module.linear(x).view(-1), inplace=True).view(ROWS, WIDTH))


GONE: dict[str, Forward] = {
    "added": added,
    "twice": twice,
    "through a view": through_a_view,
}


def into_the_buffer(module: InPlace, x: Tensor) -> Tensor:
    module.seen.add_(1.0)
    return torch.sin(module.linear(x) * module.seen)


def of_the_batch(module: InPlace, x: Tensor) -> Tensor:
    hidden = module.linear(x)
    hidden.copy_(x)
    return torch.sin(hidden) + module.linear(x)


def before_one_that_stays(module: InPlace, x: Tensor) -> Tensor:
    hidden = module.linear(x)
    hidden.mul_(2.0)
    hidden.copy_(x)
    return torch.sin(hidden) + module.linear(x)


def for_nobody(module: InPlace, x: Tensor) -> Tensor:
    hidden = module.linear(x)
    result = F.gelu(hidden)
    hidden.zero_()
    return result


def returned(module: InPlace, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden, other = module.linear(x), torch.cos(module.linear(x))
    hidden.copy_(other)
    return torch.sin(hidden), other


def laid_out_otherwise(module: InPlace, x: Tensor) -> Tensor:
    hidden = module.linear(x)
    hidden.copy_(torch.cos(module.linear.weight.T[:ROWS]))
    return torch.sin(hidden) + module.linear(x)


STAYS: dict[str, Forward] = {
    "into the buffer": into_the_buffer,
    "of the batch": of_the_batch,
    "before one that stays": before_one_that_stays,
    "for nobody": for_nobody,
    "returned": returned,
    "laid out otherwise": laid_out_otherwise,
}


def joint_trace(forward: Forward) -> TraceCtx:
    torch.manual_seed(0)
    with joint_traces() as joint:
        CompiledModule(InPlace(forward).train())(torch.randn(ROWS, WIDTH))
    return joint[-1]


def num_writes(trace: TraceCtx) -> int:
    return sum(written_in_place(b) is not None for b in trace.bound_symbols)


@pytest.mark.parametrize("forward", GONE.values(), ids=GONE)
def test_a_write_that_nobody_notices_is_left_out(forward: Forward) -> None:
    trace = joint_trace(forward)
    changed = RUN(trace)
    assert num_writes(trace) > num_writes(changed) == 0
    names = [b.sym.name for b in changed.bound_symbols]
    assert "update_aliases" not in names
    check_trace(changed)
    assert RUN(changed) is changed


@pytest.mark.parametrize("forward", STAYS.values(), ids=STAYS)
def test_a_write_that_something_would_notice_stays(forward: Forward) -> None:
    trace = joint_trace(forward)
    assert num_writes(trace) > 0
    assert RUN(trace) is trace


def names_of(trace: TraceCtx) -> Names:
    (write,) = (b for b in trace.bound_symbols if written_in_place(b) is not None)
    other = next(b for b in trace.bound_symbols if b.sym.name == "cos")
    source, target = (a.name for a in write.args)
    (result,) = trace.bound_symbols[-1].args[0]["fw_flat_out"]
    return Names(source, target, other.output.name, result.name)


def in_memory_of(name: str, other: str) -> Change:
    def changed(found: TraceMemory, names: Names) -> TraceMemory:
        ours, its = getattr(names, name), found.values[getattr(names, other)]
        value = found.values[ours]._replace(storage=its.storage)
        return replace(found, values={**found.values, ours: value})

    return changed


def laid_out(**changes: Any) -> Change:
    def changed(found: TraceMemory, names: Names) -> TraceMemory:
        value = found.values[names.source]
        value = value._replace(layout=value.layout._replace(**changes))
        return replace(found, values={**found.values, names.source: value})

    return changed


def of_the_caller(name: str) -> Change:
    def changed(found: TraceMemory, names: Names) -> TraceMemory:
        storage = found.values[getattr(names, name)].storage
        return replace(found, inputs=found.inputs | {storage})

    return changed


NOTICED: dict[str, Change] = {
    "what is copied is an argument": of_the_caller("source"),
    "what is written to is an argument": of_the_caller("target"),
    "both are the same memory": in_memory_of("source", "target"),
    "another view of it is read later": in_memory_of("other", "target"),
    "the caller gets what is copied": in_memory_of("result", "source"),
    "other strides": laid_out(stride=(1, ROWS)),
    "another dtype": laid_out(dtype=torch.float64),
}
"""Each changes one fact of a write that is left out otherwise."""


def test_each_fact_by_which_a_write_is_noticed_keeps_it() -> None:
    trace = joint_trace(beside_another)
    names, found = names_of(trace), memory_of(trace)
    assert out_of_place(trace, memory=lambda _: found) is not trace
    for fact, change in NOTICED.items():
        changed = change(found, names)
        assert out_of_place(trace, memory=partial(_given, changed)) is trace, fact


def _given(memory: TraceMemory, trace: TraceCtx) -> TraceMemory:
    return memory


def test_memory_is_asked_for_only_where_something_is_written_in_place() -> None:
    def refused(trace: TraceCtx) -> TraceMemory:
        raise AssertionError("nothing is written")

    trace = joint_trace(lambda module, x: torch.sin(module.linear(x)))
    assert out_of_place(trace, memory=refused) is trace
