"""The planner knows what fp8 linears keep and cost, and whatever it decides the bits stay the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from thunder.core import dtypes
from torch import Tensor, nn

from harness.fp8_linears import fp8_module, linears_of, ops, saved, state_of
from harness.memory import measured_memory
from harness.models import llama, token_batch
from thunder_memsave.budget.extract import profiles
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.running_program import program
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.errors import BudgetError
from thunder_memsave.measure.devices import device_at
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.measure.scratch import MeasuredScratch
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.planner.graph import Plan
from thunder_memsave.planner.search import solve
from thunder_memsave.planner.search.problem import Problem
from thunder_memsave.planner.simulate import simulate
from thunder_memsave.settings.value_kinds import BytesOrFraction


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> OpProfiles:
    return profiles(scratch=MeasuredScratch(directory=tmp_path_factory.mktemp("scratch")))


class Deep(nn.Module):
    """Blocks of two linears; the first of each may be frozen."""

    def __init__(self, num_blocks: int = 3, *, frozen: bool = False) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(32, 96) for _ in range(num_blocks))
        self.down = nn.ModuleList(nn.Linear(96, 32) for _ in range(num_blocks))
        if frozen:
            self.up.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(x)))
        return x.square().mean()


def lora() -> nn.Module:
    config = peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(llama(1, vocab_size=112), config)
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "trained": (Deep, "delayed"),
    "frozen": (lambda: Deep(frozen=True), "delayed"),
    "current": (Deep, "current"),
    "block": (Deep, "block"),
    "mxfp8": (Deep, "mxfp8"),
    "mxfp8, frozen": (lambda: Deep(frozen=True), "mxfp8"),
    "nvfp4": (lambda: Deep().to(torch.bfloat16), "nvfp4"),
    "nvfp4, frozen": (lambda: Deep(frozen=True).to(torch.bfloat16), "nvfp4"),
    "bf16": (lambda: nn.Module.to(Deep(frozen=True), torch.bfloat16), "delayed"),
    "lora": (lora, "delayed"),
}


def batch(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, Deep):
        dtype = model.up[0].weight.dtype
        assert isinstance(dtype, torch.dtype)
        return {"x": torch.randn(64, 32, dtype=dtype)}
    tokens = token_batch(2, 24)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(result: object) -> Tensor:
    loss = result if isinstance(result, Tensor) else result.loss  # type: ignore[attr-defined]
    assert isinstance(loss, Tensor)
    return loss


@pytest.mark.parametrize("case", CASES)
def test_predicted_peaks_are_the_measured_ones_to_the_byte(case: str, known: OpProfiles) -> None:
    make, recipe = CASES[case]
    model = make()
    module, inputs = fp8_module(model, recipe=recipe), batch(model)
    module(**inputs)
    (compiled,) = module.captures
    found = program(
        compiled.forward_traces[-1], compiled.backward_traces[-1], known=known, differentiated={0}
    )
    constant_bytes = sum(found.storages[s].nbytes for s in found.held)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        result = module(**inputs)  # the caller holds all of it
        loss_of(result).backward()

    step()
    model.zero_grad(set_to_none=True)
    measured = measured_memory(step)
    assert simulate(found).peak_bytes - constant_bytes == measured.peak_bytes


def gradients(module: CompiledModule, inputs: dict[str, Tensor]) -> list[Tensor]:
    module.module.zero_grad(set_to_none=True)
    torch.manual_seed(1)  # `nvfp4` draws
    loss_of(module(**inputs)).backward()
    return [p.grad.clone() for p in module.module.parameters() if p.grad is not None]


def planned(model: nn.Module, recipe: str, budget_bytes: int | None) -> CompiledModule:
    memory = MemoryConfig()
    if budget_bytes is not None:
        memory = MemoryConfig(budget=BytesOrFraction(budget_bytes))
    planner = MemoryPlanner(
        memory,
        device=device_at(torch.device("cpu")),
        budget_bytes=budget_bytes,
    )
    return fp8_module(model, recipe=recipe, planner=planner)


def peak_bytes(module: CompiledModule) -> int:
    assert module.planner is not None
    (call,) = module.planner.calls
    return call.profile.peak_bytes


@pytest.mark.parametrize("case", ["trained", "frozen", "block", "mxfp8", "nvfp4"])
def test_gradients_and_state_are_the_same_bits_under_any_budget(case: str) -> None:
    make, recipe = CASES[case]
    model = make()
    inputs = batch(model)
    free = planned(copy.deepcopy(model), recipe, None)
    expected, state = gradients(free, inputs), state_of(linears_of(free))
    smallest = smallest_budget(copy.deepcopy(model), recipe, inputs)
    largest = peak_bytes(free)
    assert smallest < 0.96 * largest
    num_requantized = []
    for part in (0.0, 0.5):
        budget = smallest + int(part * (largest - smallest))
        module = planned(copy.deepcopy(model), recipe, budget)
        for ours, theirs in zip(gradients(module, inputs), expected, strict=True):
            assert torch.equal(ours, theirs)
        assert all(torch.equal(v, state[k]) for k, v in state_of(linears_of(module)).items())
        assert peak_bytes(module) <= budget
        num_requantized.append(requantized(module))
    assert max(num_requantized) > 0


def test_in_mxfp8_gradients_are_the_same_bits_where_all_is_recomputed_as_where_all_is_kept() -> (
    None
):
    model = Deep()
    inputs, found, num_again = batch(model), {}, {}
    for policy in ("keep_all", "recompute_all"):
        planner = MemoryPlanner(
            MemoryConfig(policy=policy),
            device=device_at(torch.device("cpu")),
            budget_bytes=None,
        )
        module = fp8_module(copy.deepcopy(model), recipe="mxfp8", planner=planner)
        found[policy] = gradients(module, inputs)
        num_again[policy] = requantized(module)
    assert num_again["keep_all"] == 0
    assert num_again["recompute_all"] >= 6  # each linear's input, in both directions
    for ours, theirs in zip(found["recompute_all"], found["keep_all"], strict=True):
        assert torch.equal(ours, theirs)


def smallest_budget(model: nn.Module, recipe: str, inputs: dict[str, Tensor]) -> int:
    with pytest.raises(BudgetError) as error:
        planned(model, recipe, 1)(**inputs)
    assert error.value.smallest_bytes is not None
    return error.value.smallest_bytes


def requantized(module: CompiledModule) -> int:
    """Count the tensors that forward quantised and backward requantises."""
    backward = module.captures[0].backward_traces[-1]
    return sum(b.flat_proxy_outs[0].name.startswith(PREFIX) for b in ops(backward, "quantize"))


@pytest.mark.parametrize("recipe", ["delayed", "current", "block", "mxfp8"])
def test_where_not_all_fits_less_is_saved_than_without_fp8(recipe: str) -> None:
    model = Deep().to(torch.bfloat16)
    plain = recomputing_cheaply(
        lambda planner: CompiledModule(copy.deepcopy(model), planner=planner), batch(model)
    )
    module = in_fp8_recomputing_cheaply(model, recipe)
    # `block` casts the input along its other dimension in backward.
    num_bytes, num_plain_bytes = saved_bytes(module), saved_bytes(plain)
    assert num_bytes == num_plain_bytes if recipe == "block" else num_bytes < num_plain_bytes
    (compiled,) = module.captures
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    assert not saved(compiled).fp8.keys() & weights


def test_a_recomputed_cast_records_no_amax() -> None:
    module = in_fp8_recomputing_cheaply(Deep(), "delayed")
    casts = ops(module.captures[0].backward_traces[-1], "quantize")
    again = [b for b in casts if b.flat_proxy_outs[0].name.startswith(PREFIX)]
    assert {b.args[-1] for b in again} == {False}
    assert {b.args[-1] for b in casts if b not in again} == {True}


def in_fp8_recomputing_cheaply(model: nn.Module, recipe: str) -> CompiledModule:
    return recomputing_cheaply(
        lambda planner: fp8_module(copy.deepcopy(model), recipe=recipe, planner=planner),
        batch(model),
    )


def cheap_plan(problem: Problem, *_: Any, **__: Any) -> Plan:
    return problem.plan(problem.evaluate(problem.cheap), None, bound_us=0.0)


def recomputing_cheaply(
    make: Callable[[MemoryPlanner], CompiledModule], inputs: dict[str, Tensor]
) -> CompiledModule:
    """Compile with a budget that lacks one byte for keeping all, and a plan that recomputes all that is cheap."""
    budget_bytes = None
    for _ in range(2):
        planner = MemoryPlanner(
            MemoryConfig(), device=device_at(torch.device("cpu")), budget_bytes=budget_bytes
        )
        module = make(planner)
        with patch.object(solve, "_planned", cheap_plan):
            module(**inputs)
        budget_bytes = peak_bytes(module) - 1
    return module


def saved_bytes(module: CompiledModule) -> int:
    """Return the saved bytes that forward computed."""
    forward = module.captures[0].forward_traces[-1]
    given = {a.name for a in forward.args}
    kept = {p.name: p for p in forward.output[1][0] if p.name not in given}
    return sum(p.numel * dtypes.to_torch_dtype(p.dtype).itemsize for p in kept.values())
