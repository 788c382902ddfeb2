"""With `memory.compress: fp8`, plans store values in fp8 where that is quicker, keep budgets, and change little."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from harness.distributed import run_on_ranks
from harness.memory import measured_peak_bytes
from harness.predicted_peaks import planned_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.budget.ways import compressible
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.distributed.agreement import OtherRankError
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.errors import BudgetError
from thunder_memsave.fp8.kernels import casting
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import COMPRESS, DECOMPRESS
from thunder_memsave.planner.offload.engines import CopyRates
from thunder_memsave.planner.search.mixes import OffloadTerms
from thunder_memsave.sharding.rows import shard_module

WIDTH, TOKENS = 64, 128
_CPU = device("cpu")
SLOW = replace(_CPU, flops_per_s={name: rate / 20 for name, rate in _CPU.flops_per_s.items()})
"""A device whose products take long, so that to store a value in fp8 takes less."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compressible, "LEAST_BYTES", 1024)
    # Chunks of a cast are of this size, so that its scratch is small beside such values.
    monkeypatch.setitem(casting._CAST_ELEMENTS, "cpu", 1024)


class Gated(nn.Module):
    """An MLP as in Llama."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.low = nn.Linear(WIDTH, 4, bias=False) if kind == "lora" else None
        self.high = nn.Linear(4, 4 * WIDTH, bias=False) if kind == "lora" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        gate = self.gate(h)
        if self.low is not None and self.high is not None:
            gate = gate + self.high(self.low(h)) * 2
        return x + self.down(F.silu(gate) * self.up(h))


class Plain(nn.Module):
    """An MLP as in GPT-2, with dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = Plain if kind == "gpt" else Gated
        self.layers = nn.ModuleList(layer(kind) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().pow(2).mean()


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran."""

    loss: Tensor
    gradients: list[Tensor]
    call: PlannedCall
    measured_bytes: int

    @property
    def counts(self) -> Counter[str]:
        return Counter(step.op.symbol for step in self.call.program.steps)


def step(
    kind: str,
    budget_bytes: int | None,
    *,
    dtype: torch.dtype = torch.float32,
    fusion: bool = False,
    offload: OffloadTerms | None = None,
    **memory: Any,
) -> Ran:
    torch.manual_seed(0)
    model = Model(kind).to(dtype)
    if kind == "lora":
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("low" in name or "high" in name)
    x = torch.randn(4, TOKENS // 4, WIDTH).to(dtype)
    planner = MemoryPlanner(
        MemoryConfig(**memory), device=SLOW, budget_bytes=budget_bytes, offload=offload
    )
    module = CompiledModule(model, planner=planner, config=CompileConfig(fusion=fusion))

    def run() -> Tensor:
        torch.manual_seed(1)
        loss: Tensor = module(x)
        loss.backward()
        return loss.detach()

    loss = run()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    measured_bytes = measured_peak_bytes(run)
    return Ran(loss, gradients, planner.calls[-1], measured_bytes)


def between(kept: Ran, kind: str, part: float, **settings: Any) -> int:
    """Return a budget between the smallest and what keeping all takes."""
    with pytest.raises(BudgetError) as refused:
        step(kind, kept.call.profile.peak_bytes // 100, **settings)
    smallest_bytes = refused.value.smallest_bytes
    assert smallest_bytes is not None
    return int(smallest_bytes + part * (kept.call.profile.peak_bytes - smallest_bytes))


@pytest.mark.parametrize(
    ("kind", "dtype", "fusion"),
    [
        ("llama", torch.bfloat16, False),
        ("llama", torch.float32, True),
        pytest.param("gpt", torch.float32, False, marks=pytest.mark.soak),
        pytest.param("lora", torch.bfloat16, False, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_plans_store_values_in_fp8_where_that_is_quicker(
    kind: str, dtype: torch.dtype, fusion: bool
) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "fusion": fusion}
    kept = step(kind, None, policy="keep_all", **settings)
    budget_bytes = between(kept, kind, 0.15, **settings)
    exact = step(kind, budget_bytes, **settings)
    stored = step(kind, budget_bytes, compress="fp8", **settings)
    assert exact.counts[COMPRESS] == 0
    assert stored.counts[COMPRESS] == stored.counts[DECOMPRESS] > 0
    assert stored.call.plan is not None
    assert exact.call.plan is not None
    assert stored.call.plan.added_us < exact.call.plan.added_us
    for each in (exact, stored):
        assert each.call.profile.peak_bytes <= budget_bytes
        assert each.measured_bytes == planned_bytes(each.call)
        assert torch.equal(each.loss, kept.loss)  # forward reads what it made
    for mine, others in zip(exact.gradients, kept.gradients, strict=True):
        assert torch.equal(mine, others)
    errors = [
        float((mine.double() - others.double()).norm() / others.double().norm())
        for mine, others in zip(stored.gradients, kept.gradients, strict=True)
    ]
    assert 0 < max(errors) < 2**-4  # the rounding of one number at most


def test_where_all_fits_numbers_are_exact() -> None:
    kept = step("llama", None, policy="keep_all")
    stored = step("llama", kept.call.profile.peak_bytes, compress="fp8")
    assert stored.counts[COMPRESS] == 0
    for mine, others in zip(stored.gradients, kept.gradients, strict=True):
        assert torch.equal(mine, others)


@pytest.mark.soak
def test_with_copies_to_the_host_the_quicker_plan_is_taken() -> None:
    rates = CopyRates(bytes_per_s=2e8, copy_us=5.0)
    terms = OffloadTerms(rates=rates, host_bytes=2**30, least_bytes=1024)
    kept = step("llama", None, policy="keep_all")
    for part in (0.02, 0.1):
        budget_bytes = between(kept, "llama", part, offload=terms)
        exact = step("llama", budget_bytes, offload=terms)
        either = step("llama", budget_bytes, offload=terms, compress="fp8")
        assert exact.call.plan is not None
        assert either.call.plan is not None
        assert either.call.plan.added_us <= exact.call.plan.added_us
        assert either.call.plan.actions.offloaded
        assert either.measured_bytes == planned_bytes(either.call)
        assert either.call.profile.peak_bytes <= budget_bytes
        assert torch.equal(either.loss, kept.loss)


class Linear(nn.Module):
    """A linear, and something that reads its result."""

    def __init__(self, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.read = nn.Linear(WIDTH, WIDTH), read
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x))


class WithGain(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.linear(x) * self.gain)


def causal(h: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(h * 2, h, h, is_causal=True).mean()


def scores(h: Tensor) -> Tensor:
    return (F.softmax(h @ h.transpose(-1, -2), -1) @ h).mean()


def loss_of_two(h: Tensor) -> Tensor:
    return (F.softplus(h) - h).mean()


def squares(h: Tensor) -> Tensor:
    return (h * h).mean()


def whole_numbers(h: Tensor) -> Tensor:
    return (F.silu(h) * h.to(torch.int32).to(h.dtype) @ h.new_ones(WIDTH, 2)).mean()


def masked(h: Tensor) -> Tensor:
    mask = torch.full((WIDTH,), torch.finfo(h.dtype).min).where(torch.arange(WIDTH) == 3, 0.0)
    return (F.silu(h + mask) @ h.new_ones(WIDTH, 2)).mean()


def near_another(h: Tensor) -> Tensor:
    return ((h - 30) * h @ h.new_ones(WIDTH, 2)).mean()


def normed(h: Tensor) -> Tensor:
    return F.layer_norm(F.silu(h), (WIDTH,)).square().mean()


def rectified(h: Tensor) -> Tensor:
    return (torch.relu(h) @ h.new_ones(WIDTH, 2)).mean()


def activated(h: Tensor) -> Tensor:
    return (F.silu(h) @ h.new_ones(WIDTH, 2)).mean()


@pytest.mark.parametrize(
    ("read", "num_values"),
    [
        *((f, 0) for f in (causal, scores, loss_of_two, squares, masked, near_another)),
        *((f, 0) for f in (normed, rectified)),
        (activated, 1),
        (whole_numbers, 1),  # what is rounded to them is exact
    ],
)
@pytest.mark.parametrize("build", [Linear, WithGain])
def test_where_sums_could_cancel_or_jump_nothing_is_stored_in_fp8(
    read: Callable[[Tensor], Tensor], num_values: int, build: type[Linear]
) -> None:
    seen: list[Any] = []
    find = compressible.compressible

    def found(*args: Any, **kwargs: Any) -> Any:
        seen.append(find(*args, **kwargs))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("thunder_memsave.budget.planned_call.compressible", found)
        planner = MemoryPlanner(MemoryConfig(compress="fp8"), device=SLOW, budget_bytes=10**4)
        module = CompiledModule(build(read), planner=planner, config=CompileConfig())
        with pytest.raises(BudgetError):
            module(torch.randn(4, TOKENS, WIDTH))
    assert seen
    # What a gain has multiplied is no product any more.
    assert {len(values) for values in seen} == {num_values if build is Linear else 0}


def test_a_table_says_what_is_in_fp8_and_the_log_that_a_cpu_is_slow(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept = step("llama", None, policy="keep_all")
    stored = step("llama", between(kept, "llama", 0.15), compress="fp8")
    assert stored.call.plan is not None
    reasons = {decision.reason for decision in stored.call.plan.decisions}
    assert "in fp8 meanwhile: faster than to recompute" in reasons
    assert "leave memory.compress out" in caplog.text


def check_on_rank(rank: int) -> None:
    compressible.LEAST_BYTES, casting._CAST_ELEMENTS["cpu"] = 1024, 1024
    kept = on_rank(rank, None, policy="keep_all")
    with pytest.raises((BudgetError, OtherRankError)) as refused:
        on_rank(rank, 10**5)
    smallest: list[Any] = [None, None]
    dist.all_gather_object(smallest, getattr(refused.value, "smallest_bytes", None))
    budget_bytes = int(smallest[0] + 0.15 * (kept.call.profile.peak_bytes - smallest[0]))
    stored = on_rank(rank, budget_bytes, compress="fp8")
    ways: list[Any] = [None, None]
    dist.all_gather_object(ways, (stored.call.way, stored.counts[COMPRESS]))
    assert ways[0] == ways[1]
    assert stored.counts[COMPRESS] > 0
    assert stored.call.profile.peak_bytes <= budget_bytes
    assert torch.equal(stored.loss, kept.loss)
    for mine, others in zip(stored.gradients, kept.gradients, strict=True):
        error = (mine.double() - others.double()).norm() / others.double().norm()
        assert error < 2**-4


def on_rank(rank: int, budget_bytes: int | None, **memory: Any) -> Ran:
    """Run a step with weights sharded as in ZeRO-3."""
    torch.manual_seed(0)
    model = Model("llama")
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(mode="zero3", group=dist.group.WORLD)
    shard_module(model, data_parallel)
    planner = MemoryPlanner(
        MemoryConfig(**memory),
        device=SLOW,
        budget_bytes=budget_bytes,
        data_parallel=data_parallel,
    )
    module = CompiledModule(model, planner=planner, data_parallel=data_parallel)
    torch.manual_seed(1 + rank)
    loss = module(torch.randn(4, TOKENS // 4, WIDTH))
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return Ran(loss.detach(), gradients, planner.calls[-1], 0)


@pytest.mark.soak
def test_ranks_store_the_same_values(tmp_path: Path) -> None:
    run_on_ranks(check_on_rank, 2, tmp_path / "rendezvous")
