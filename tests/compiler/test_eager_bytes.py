"""With all kept, forward never saves more bytes than eager PyTorch does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn

from harness import models
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.planner.devices import device

BUILDS = (models.gpt2, models.llama, models.qwen2, models.qwen3)
IDS = models.token_batch(2, 64)


def as_by_default(module: nn.Module) -> CompiledModule:
    """What `budget: auto` is on the CPU."""
    planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=None)
    return CompiledModule(module, planner=planner)


def saved_bytes(module: nn.Module, call: Callable[..., object]) -> int:
    """Of the storages that a forward saves, each once; parameters, buffers and the batch are there anyway."""
    there = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers(), IDS)}
    saved: dict[int, int] = {}
    held = []

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)  # an address stays one storage's
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = call(input_ids=IDS, labels=IDS)
    assert output is not None
    return sum(saved.values())


def check(
    build: Callable[..., nn.Module], dtype: torch.dtype, context: AbstractContextManager[object]
) -> None:
    module: nn.Module = build(2)
    nn.Module.to(module, dtype)
    compiled = as_by_default(module)
    with context:
        compiled(input_ids=IDS, labels=IDS)
        ours, eager = saved_bytes(module, compiled), saved_bytes(module, module)
    assert 0 < ours <= eager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("build", BUILDS, ids=lambda b: b.__name__)
def test_no_more_is_saved_than_by_eager(
    build: Callable[..., nn.Module], dtype: torch.dtype
) -> None:
    check(build, dtype, nullcontext())


@pytest.mark.parametrize("build", [models.gpt2, models.qwen3], ids=lambda b: b.__name__)
def test_no_more_is_saved_than_by_eager_under_autocast(build: Callable[..., nn.Module]) -> None:
    check(build, torch.float32, torch.autocast("cpu", torch.bfloat16))


def test_without_a_plan_exactly_what_eager_saves_is_saved() -> None:
    module: nn.Module = models.gpt2(2)
    module.to(torch.bfloat16)
    compiled = CompiledModule(module)
    compiled(input_ids=IDS, labels=IDS)
    assert saved_bytes(module, compiled) == saved_bytes(module, module) > 0
