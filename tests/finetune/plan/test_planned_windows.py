"""Run files of models with sliding windows, planned for an H200: a window's work, and neither its mask nor scores."""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from thunder.core.proxies import TensorProxy

from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.finetune.plan import plan_run
from thunder_memsave.finetune.run_file.config import RunConfig, RunMemoryConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.report.step_work import work_table

TINY = Path(str(files("thunder_memsave.configs"))) / "tiny_pretrain.yaml"
LENGTH, WINDOW, HEADS, WIDTH = 1344, 256, 4, 64  # a length like no other dimension
LONG = 131_072
"""A mask of 2^34 elements, 16 GiB."""
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": HEADS * WIDTH,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "sliding_window": WINDOW,
}
MISTRAL = {"model_type": "mistral", **SHAPE}
GEMMA = {
    "model_type": "gemma3_text",
    **SHAPE,
    "head_dim": WIDTH,
    "layer_types": ["sliding_attention", "full_attention"],
}


def run_of(architecture: dict[str, Any], *, packing: bool = False, **model: Any) -> RunConfig:
    config = load_run_config(TINY, ["--devices=1"])
    values = {"architecture": architecture, "config": None, "dtype": "bfloat16", **model}
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, trainable_dtype="bfloat16", **values),
        data=dataclasses.replace(config.data, max_seq_length=LENGTH, packing=packing),
        memory=RunMemoryConfig(policy="keep_all"),
    )


@pytest.mark.parametrize("packing", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("architecture", "num_windowed"), [(MISTRAL, 2), (GEMMA, 1)], ids=["mistral", "gemma3"]
)
def test_on_an_h200_a_window_costs_its_own_pairs_and_no_square_is_planned(
    architecture: dict[str, Any], num_windowed: int, packing: bool, compiled: list[Compiled]
) -> None:
    config = run_of(architecture, packing=packing)
    plan = plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
    traces = (compiled[0].forward_traces[-1], compiled[0].backward_traces[-1])
    symbols = [b for trace in traces for b in trace.bound_symbols]
    proxies = [p for b in symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)]
    squares = [p for p in proxies if isinstance(p, TensorProxy) and p.shape.count(LENGTH) > 1]
    assert squares == []
    steps = [s.op for s in plan.call.program.steps if "attention" in s.op.symbol]
    doubled = num_windowed * WINDOW * (2 * LENGTH - WINDOW) + (2 - num_windowed) * LENGTH**2
    assert sum(op.flops for op in steps) == 7 * plan.num_rows * HEADS * WIDTH * doubled
    scratch = [op.scratch_bytes for op in steps if op.symbol.endswith("backward")]
    assert min(scratch) > 4 * plan.num_rows * HEADS * LENGTH * WIDTH
    windows = [s for s in symbols if s.sym.name == "cuda_windowed_attention"]
    assert len(windows) == (0 if packing else num_windowed)


@pytest.mark.parametrize(
    ("architecture", "kernels"),
    [
        ({**MISTRAL, "sliding_window": LONG}, ["cuda_cudnn_attention"] * 2),
        (GEMMA, ["cuda_windowed_attention", "cuda_cudnn_attention"]),
    ],
    ids=["mistral", "gemma3"],
)
def test_masks_too_large_to_be_made_here_are_recognised(
    architecture: dict[str, Any], kernels: list[str], compiled: list[Compiled]
) -> None:
    config = run_of({**architecture, "max_position_embeddings": LONG})
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, max_seq_length=LONG))
    plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
    symbols = compiled[0].forward_traces[-1].bound_symbols
    assert [b.sym.name for b in symbols if "attention" in b.sym.name] == kernels


def test_heads_that_a_gpu_has_no_kernel_for_keep_the_mask(compiled: list[Compiled]) -> None:
    shape = {**GEMMA, "head_dim": 208}
    for name in ("h200", "l40s"):
        plan_run.plan_run(run_of(shape), device=device(name), num_ranks=1, has_curve=False)
    names = [
        [b.sym.name for b in each.forward_traces[-1].bound_symbols if "attention" in b.sym.name]
        for each in compiled
    ]
    assert names[0][0] == "cuda_windowed_attention"
    assert names[1] == ["cuda_efficient_attention"] * 2


def test_the_work_of_a_plan_says_why_scores_are_in_memory() -> None:
    shape = {**GEMMA, "model_type": "gemma2"}
    for architecture, implementation, line in (
        (shape, "eager", "scores in memory, soft-capped (tanh), which no kernel of PyTorch does: "),
        (GEMMA, "sdpa", "kernels of attention: cuda_cudnn_attention 1, cuda_windowed_attention 1"),
    ):
        config = run_of(architecture, attn_implementation=implementation)
        plan = plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
        assert line in work_table(plan.call.program, plan.device)


def test_a_run_of_deterministic_kernels_is_planned_with_flash(compiled: list[Compiled]) -> None:
    config = run_of({**GEMMA, "layer_types": ["full_attention"] * 2})
    repeated = dataclasses.replace(
        config, train=dataclasses.replace(config.train, deterministic=True)
    )
    for each in (config, repeated):
        plan_run.plan_run(each, device=device("h200"), num_ranks=1, has_curve=False)
    names = [
        {b.sym.name for b in each.forward_traces[-1].bound_symbols if "attention" in b.sym.name}
        for each in compiled
    ]
    assert names == [{"cuda_cudnn_attention"}, {"cuda_flash_attention"}]
    assert not torch.are_deterministic_algorithms_enabled()
