"""Copies come after the last write and before the first reader, each storage once, and only where a plan has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from thunder.core import prims
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from harness.copy_engines import hostile_copies
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler import offload as step_module
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.compiler.cuda_graphs.refusals import reasons
from thunder_memsave.config import MemoryConfig
from thunder_memsave.passes.stored.offload import Offloaded, offload_backward, offload_forward
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.search.mixes import OffloadTerms

Seen = list[tuple[TraceCtx, Sequence[Offloaded], TraceCtx]]


class Model(nn.Module):
    """Values that are read later in forward, written in place, and saved as two views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            one, other = self.up(x).chunk(2, -1)
            hidden = one.sigmoid() * other * 2.0
            hidden.mul_(one)
            x = x + self.down(torch.tanh(hidden))
        return x.square().mean()


def compiled(budget_bytes: int | None) -> tuple[CompiledModule, Tensor]:
    torch.manual_seed(0)
    model = Model()
    terms = OffloadTerms(rates=CopyRates.of(device("cpu")), host_bytes=2**30, least_bytes=1024)
    planner = MemoryPlanner(
        MemoryConfig(), device=device("cpu"), budget_bytes=budget_bytes, offload=terms
    )
    return CompiledModule(model, planner=planner), torch.randn(128, 8)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, Seen]:
    found: dict[str, Seen] = {"forward": [], "backward": []}
    passes = {"forward": offload_forward, "backward": offload_backward}

    def recorded(which: str) -> Any:
        def run(
            trace: TraceCtx, storages: Sequence[Offloaded], places: Mapping[str, int] = {}
        ) -> TraceCtx:
            result = passes[which](trace, storages, places)
            found[which].append((trace, storages, result))
            return result

        return run

    for which in passes:
        monkeypatch.setattr(step_module, f"offload_{which}", recorded(which))
    return found


def position(trace: TraceCtx, name: str) -> int:
    """Return the index of the symbol that makes a value."""
    made = [[o.name for o in b.flat_proxy_outs] for b in trace.bound_symbols]
    (found,) = (number for number, names in enumerate(made) if name in names)
    return found


def reads(trace: TraceCtx, name: str) -> list[int]:
    symbols = enumerate(trace.bound_symbols)
    return [
        number
        for number, b in symbols
        if any(a.name == name for a in b.flat_proxy_args) and b.sym is not prims.python_return
    ]


def test_copies_are_around_what_reads_and_writes(seen: dict[str, Seen]) -> None:
    module, x = compiled(85_000)
    with hostile_copies():
        module(x).backward()
    before, storages, forward = seen["forward"][-1]
    _, _, backward = seen["backward"][-1]
    assert len(storages) >= 3
    assert any(len(each.saved) > 1 for each in storages), "two views of one storage"
    saved = [t.name for t in forward.bound_symbols[-1].args[1][0]]
    for each in storages:
        began, waited = position(forward, each.host), position(forward, each.away)
        assert before.bound_symbols[each.final] in forward.bound_symbols[:began]
        assert began < waited
        assert all(number < waited for number in reads(forward, each.value))
        assert saved.count(each.away) == 1
        assert not {*each.saved} & {*saved}
        back = position(backward, each.back)
        (arrived,) = reads(backward, each.back)
        made = {o.name for o in backward.bound_symbols[arrived].flat_proxy_outs}
        assert made == {*each.saved}
        assert back < arrived < min(n for name in each.saved for n in reads(backward, name))
    for trace in (forward, backward):
        assert "offload" in str(trace.get_provenance())


def test_graphs_of_cuda_refuse_a_plan_with_copies(seen: dict[str, Seen]) -> None:
    module, x = compiled(85_000)
    module(x).backward()
    _, _, forward = seen["forward"][-1]
    _, _, backward = seen["backward"][-1]
    why = reasons(forward, backward, fixed=(), keeps_gradients=False, device_type="cuda")
    (reason,) = why
    assert reason.startswith(
        "the plan copies values to the host (memory.offload); set that to none"
    )


def test_a_plan_without_offload_leaves_the_very_same_traces(seen: dict[str, Seen]) -> None:
    module, x = compiled(None)
    module(x).backward()
    assert seen == {"forward": [], "backward": []}
