"""Casts to float32 and back go where PyTorch's kernel rounds once by itself; no bit changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from thunder.core.trace import TraceCtx
from torch import Tensor, nn
from torch.nn import functional as F

from harness.memory import joint_traces
from harness.random_graphs import graph
from harness.recompute import Step, run_joint
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig
from thunder_memsave.passes.fold_casts import fold_casts
from thunder_memsave.passes.overwritten import keep_overwritten

WIDTH = 16
SMALL = (torch.bfloat16, torch.float16)

CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "difference": torch.sub,
    "product": torch.mul,
    "quotient": torch.div,
    "negative": lambda a, b: -a * b,
    "numbers": lambda a, b: a * 0.1 / 3 - b * 7,
    "a row": lambda a, b: a * b[0] + a[:, :1],
    "another layout": lambda a, b: a.t() * b + b.t() / a,
    "a slice": lambda a, b: a[:, ::2] * b[:, 1::2],
    "used twice": lambda a, b: (s := a + b) * s - s,
    "residual": lambda a, b: a + F.silu(a) * b,
}


ROUNDED_FIRST: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "numbers first": lambda a, b: 0.3 - a + 1e-3 / (b + 4.1),
    "a large and a small number": lambda a, b: (a * b) * 1e3 * 1e-3,
    "a factor of a term": lambda a, b: torch.add(a, b, alpha=1 / 3),
}
"""Eager rounds a number to two bytes, or a product in between; Thunder does not."""


class Calls(nn.Module):
    def __init__(self, calls: dict[str, Callable[[Tensor, Tensor], Tensor]]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return tuple(call(a, b) for call in self.calls.values())


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    a, b = ((torch.rand(WIDTH, WIDTH) + 0.5) * torch.randn(WIDTH).sign() for _ in range(2))
    a *= torch.logspace(-1, 1, WIDTH)
    return a.to(dtype).requires_grad_(), b.to(dtype).requires_grad_()


def results(module: nn.Module, a: Tensor, b: Tensor) -> list[Tensor]:
    outputs = module(a, b)
    loss = sum((o.float() * n).sum() for n, o in enumerate(outputs, start=1))
    assert isinstance(loss, Tensor)
    return [*outputs, *torch.autograd.grad(loss, (a, b))]


@pytest.mark.parametrize("dtype", SMALL)
def test_outputs_and_gradients_have_the_bits_of_the_casts(dtype: torch.dtype) -> None:
    a, b = operands(dtype)
    calls = Calls(CALLS | ROUNDED_FIRST)
    folded = results(CompiledModule(calls), a, b)
    spelled = CompiledModule(calls, config=CompileConfig(leave_out=("fold_casts",)))
    expected = results(spelled, a, b)
    assert all(map(torch.equal, folded, expected))
    assert all(t.isfinite().all() for t in expected)


@pytest.mark.parametrize("dtype", SMALL)
def test_the_kernels_compute_in_float32_and_round_once(dtype: torch.dtype) -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    every = every[every.isfinite()]
    for second in (every[torch.randperm(len(every))], 0.1, 1 / 3, 257.0, -1e5, 1e-8, 7):
        wide = second.float() if isinstance(second, Tensor) else second
        of_numbers = (torch.mul, torch.div)
        operations = of_numbers if wide is second else (*of_numbers, torch.add, torch.sub)
        for run in operations:
            once = run(every.float(), wide).to(dtype)
            torch.testing.assert_close(run(every, second), once, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", SMALL)
def test_outputs_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    a, b = operands(dtype)
    names = list(CALLS)
    ours, eager = CompiledModule(Calls(CALLS))(a, b), Calls(CALLS)(a, b)
    differ = [n for n, x, y in zip(names, ours, eager, strict=True) if not torch.equal(x, y)]
    assert differ == []


def test_no_operation_of_a_swiglu_is_in_float32() -> None:
    class SwiGLU(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.silu(self.gate(x)) * self.up(x))

    x = torch.randn(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with joint_traces() as joint:
        CompiledModule(SwiGLU().bfloat16())(x).float().sum().backward()
    assert float32_values(joint[-1]) != []
    assert float32_values(fold_casts(joint[-1])) == []


def float32_values(trace: TraceCtx) -> list[str]:
    outputs = (o for b in trace.bound_symbols for o in b.flat_proxy_outs)
    return [o.name for o in outputs if "float32" in str(getattr(o, "dtype", ""))]


def test_a_value_that_is_also_read_in_float32_stays() -> None:
    class Both(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            product = a.float() * b.float()
            return product.bfloat16(), product.sum()

    a, b = operands(torch.bfloat16)
    (ours, total), (eager, eager_total) = CompiledModule(Both())(a, b), Both()(a, b)
    assert torch.equal(ours, eager)
    assert torch.equal(total, eager_total)


def test_a_source_that_is_written_over_meanwhile_is_read_before() -> None:
    class Counts(nn.Module):
        seen: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.ones(WIDTH, dtype=torch.bfloat16))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            before = self.seen.float()
            self.seen.add_(1.0)
            return (a.float() * before).bfloat16() + b

    a, b = (t.detach() for t in operands(torch.bfloat16))
    ours, eager = Counts(), Counts()
    compiled = CompiledModule(ours)
    for _ in range(2):
        assert torch.equal(compiled(a, b), eager(a, b))
    assert torch.equal(ours.seen, eager.seen)


def test_no_bit_of_random_graphs_changes() -> None:
    changed = 0
    for seed in range(12):
        with joint_traces() as joint:
            CompiledModule(graph(seed).bfloat16())(torch.zeros(4, 6, dtype=torch.bfloat16))
        trace = joint[-1]
        folded = fold_casts(trace)
        changed += folded is not trace
        ours, reference = (step_of(t) for t in (folded, trace))
        for x, y in zip(values(ours), values(reference), strict=True):
            assert torch.equal(x, y), seed
    assert changed > 6


def step_of(trace: TraceCtx) -> Step:
    kept = keep_overwritten(trace)  # the split moves casts for backward behind writes
    return run_joint(kept, inputs(kept))


def values(step: Step) -> list[Tensor]:
    return [value for value in (*step.outputs, *step.gradients) if value is not None]


def inputs(trace: TraceCtx) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(tuple(a.shape), generator=generator) / 3).bfloat16() for a in trace.args]
