"""The contract of every joint-trace pass; `check` runs all of it for one pass.

1. With nothing to do it returns the very same trace.
2. Its result is a valid trace: Thunder's `check_trace` re-derives every shape, every value is produced before its use.
3. Gradients are bit-identical to those without the pass.
4. The provenance of a changed trace names the pass.
"""

from __future__ import annotations

import torch
from thunder.core.trace import TraceCtx
from thunder.dev_utils.check_trace import check_trace
from torch import Tensor, nn

from harness.joint_passes import joint_passes
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.passes.step import Pass


class Probe(nn.Module):
    """Linears, a residual, a normalisation, a reused value and a view: something for most passes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        y = x + self.down(hidden)
        return (y * y).view(-1, 4, 2).sum(-1) + y.mean()


def check(
    run: Pass,
    *,
    name: str,
    changes_the_probe: bool = True,
) -> None:
    """Raise AssertionError, naming the clause, where `run` breaks the contract."""
    seen: list[tuple[TraceCtx, TraceCtx]] = []

    def recorded(trace: TraceCtx) -> TraceCtx:
        result = run(trace)
        seen.append((trace, result))
        return result

    expected = _gradients()
    actual = _gradients(recorded)
    before, after = seen[0]
    if changes_the_probe:
        assert after is not before, f"{name}: found nothing to do in the probe model"
        assert name in str(after.get_provenance()), f"{name}: the provenance does not name the pass"
    else:
        assert after is before, f"{name}: returned another trace although it has nothing to do"
    _check_valid(after, name)
    for parameter, ours, reference in zip(Probe().state_dict(), actual, expected, strict=True):
        assert torch.equal(ours, reference), f"{name}: the gradient of {parameter} changed"


def check_identity(run: Pass, *, name: str) -> None:
    """Clause 1 alone, on a trace in which no pass has anything to do."""
    with joint_passes(run):
        compiled = CompiledModule(nn.Identity())
        x = torch.ones(2)
        assert compiled(x) is x, f"{name}: changed a model that does nothing"


def _check_valid(trace: TraceCtx, name: str) -> None:
    try:
        check_trace(trace)
    except Exception as error:
        raise AssertionError(f"{name}: check_trace fails: {error}") from error


def _gradients(*passes: Pass) -> list[Tensor]:
    torch.manual_seed(0)
    model = Probe()
    x = torch.randn(5, 8)
    with joint_passes(*passes):
        CompiledModule(model)(x).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(g is not None for g in gradients)
    return [g for g in gradients if g is not None]
