"""The plan of any model keeps its budget for what the allocator is simulated to reserve, expandable segments or not."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from thunder_memsave.finetune.plan import plan_run
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.caching_allocator.allocator import CachingAllocator
from thunder_memsave.planner.caching_allocator.replay import replay
from thunder_memsave.planner.caching_allocator.settings import AllocatorSettings
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.reserved import ReservedMemory
from thunder_memsave.planner.step_events import Inside, training_events
from thunder_memsave.settings.schema import parse_section

LENGTH = 4096
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 8192,
    "max_position_embeddings": LENGTH,
}
GPT = {"n_embd": 1024, "n_head": 8, "n_layer": 2, "n_positions": LENGTH, "vocab_size": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": None},
    "qwen2": SHAPE,
    "qwen3": {**SHAPE, "head_dim": 128},
    "phi3": {**SHAPE, "pad_token_id": 0},
    "olmo2": SHAPE,
    "granite": SHAPE,
    "smollm3": {**SHAPE, "pad_token_id": 0},
    "starcoder2": SHAPE,
    "stablelm": SHAPE,
    "gpt_neox": {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"},
    "gpt2": GPT,
}
BETWEEN = (0.1, 0.4, 0.8)
"""Budgets, as parts of the way from the smallest peak of tensors to what keeping all reserves."""
ALWAYS = {("gpt2", True)}
CASES = [
    pytest.param(n, e, id=f"{n}-{e}", marks=() if (n, e) in ALWAYS else pytest.mark.soak)
    for n in MODELS
    for e in (True, False)
]


def planned(name: str, budget_bytes: int | None, *, is_expandable: bool) -> RunPlan:
    memory: dict[str, Any] = {"expandable_segments": is_expandable}
    if budget_bytes is not None:
        memory["budget"] = budget_bytes
    values = {
        "model": {
            "name_or_path": "org/not-here",
            "architecture": {"model_type": name, **MODELS[name]},
            "dtype": "bfloat16",
            "trainable_dtype": "bfloat16",
        },
        "data": {
            "dataset": {"class_path": "ChatJSONL", "init_args": {"path": "nowhere.jsonl"}},
            "max_seq_length": LENGTH,
        },
        "memory": memory,
        "train": {"global_batch_size": 2, "micro_batch_size": 1},
        "output_dir": "runs/x",
    }
    config = parse_section(RunConfig, values, where="")
    return plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)


def reserved_bytes(plan: RunPlan) -> int:
    assert isinstance(plan.reserved, ReservedMemory)
    return plan.reserved.reserved_bytes


def assert_kept(plan: RunPlan, *, is_expandable: bool) -> None:
    """The device may have as many bytes as the budget, and every allocation succeeds in each order."""
    assert plan.fits
    assert plan.budget_bytes is not None
    for inside in get_args(Inside):
        settings = AllocatorSettings(expandable_segments=is_expandable)
        allocator = CachingAllocator(settings, limit_bytes=plan.budget_bytes)
        events = training_events(plan.call.program, plan.call.memory, inside=inside)
        replayed = replay(events, allocator)
        assert replayed.peak_reserved_bytes <= plan.budget_bytes
        if not plan.call.empties_cache:
            assert replayed.num_retries == 0
    assert plan.call.empties_cache or reserved_bytes(plan) <= plan.budget_bytes


@pytest.mark.parametrize(("name", "is_expandable"), CASES)
def test_a_budget_is_kept_for_what_is_reserved(
    name: str, is_expandable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_run, "_SMALLEST_S", 0.1)
    keep_all = planned(name, None, is_expandable=is_expandable)
    most, least = reserved_bytes(keep_all), keep_all.smallest_bytes
    assert least < most
    fits = []
    for part in BETWEEN:
        budget_bytes = int(least + part * (most - least))
        plan = planned(name, budget_bytes, is_expandable=is_expandable)
        fits.append(plan.fits)
        if not plan.fits:
            assert plan.smallest_bytes > budget_bytes
            plan = planned(name, plan.smallest_bytes, is_expandable=is_expandable)
        assert_kept(plan, is_expandable=is_expandable)
    assert fits[-1]
