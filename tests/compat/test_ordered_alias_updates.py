"""The views of a changed tensor are passed on in one order; plain Thunder takes that of a set."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
from thunder.core import update_aliases
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from thunder_memsave.compat import ordered_alias_updates
from thunder_memsave.compiler.compiled_module import CompiledModule

NUM_VIEWS = 12


class ChangesWhatHasViews(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        total = torch.stack([y[i] for i in range(NUM_VIEWS)]).sum()
        y.add_(1.0)
        return y + total


@pytest.fixture
def trace() -> TraceCtx:
    """The trace that `insert_alias_updates` gets."""
    compiled = CompiledModule(ChangesWhatHasViews())
    compiled(torch.randn(NUM_VIEWS, 4))
    return compiled.captures[0].forward_traces[1]


def views_by_update(trace: TraceCtx, module: ModuleType) -> list[list[str]]:
    """Return the views that each symbol passes on, by their names before the tensor is changed."""
    first_name: dict[str, str] = {}
    found: list[list[str]] = []
    for bsym in module.insert_alias_updates(trace, []).bound_symbols:
        if bsym.sym.name == "add_":
            return found
        if bsym.sym.name == "update_aliases":
            found.append([first_name.get(a.name, a.name) for a in bsym.flat_proxy_args])
            first_name.update(zip((o.name for o in bsym.flat_proxy_outs), found[-1], strict=True))
    raise AssertionError("nothing is changed")


def test_views_are_passed_on_in_the_order_of_their_names(trace: TraceCtx) -> None:
    found = views_by_update(trace, update_aliases)
    assert len(found[-1]) > NUM_VIEWS
    assert found == list(map(sorted, found))


@pytest.mark.skipif(
    not ordered_alias_updates.is_needed(), reason="this Thunder is newer than the defect"
)
def test_canary_plain_thunder_passes_them_on_in_another_order(trace: TraceCtx) -> None:
    spec = importlib.util.find_spec("thunder.core.update_aliases")
    assert spec is not None
    assert spec.loader is not None
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    found = views_by_update(trace, plain)
    # By chance it is the order of the names once in 12!.
    healed = "Thunder is healed: delete strategy/compat/ordered_alias_updates.py"
    assert found != list(map(sorted, found)), healed
