"""Each shipped run file, cut to two layers, does the work that a fast step on a GPU does, and no more.

It attends by a flash kernel, or cuDNN's: causal, and without scores or masks. A layer's other operations keep to a
budget of bytes and of launches, and no product is computed in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import pytest
from thunder.core.proxies import TensorProxy

from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.finetune.plan import plan_run
from thunder_memsave.finetune.plan.plan_run import RunPlan
from thunder_memsave.finetune.run_file.config import RunConfig, RunMemoryConfig
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Op
from thunder_memsave.planner.report.step_work import ops_of_layers, work_by_kind
from thunder_memsave.settings.yaml_file import load_yaml

DIRECTORY = Path(str(files("thunder_memsave.configs")))
ALWAYS = ("llama3_8b_full", "qwen3_8b_lora", "llama3_8b_lora_fp8")
CONFIGS = [
    pytest.param(path, id=path.stem, marks=() if path.stem in ALWAYS else pytest.mark.soak)
    for path in sorted(DIRECTORY.glob("*.yaml"))
]
SHAPE_OF_TINY = load_yaml(DIRECTORY / "tiny_pretrain.yaml")["model"]["config"]
LENGTH = 1344  # like no other dimension
NUM_LAYERS = 2
MOST_MOVED_BYTES = 16e9 / 8192 / (4096 + 14336)
"""Of a layer, per token and number of its two widths: 16 GB of Llama 3.1 8B at 8,192 tokens."""
MOST_IN_FP8 = 1.2
"""Quantising reads and writes some of it once more."""
MOST_OF_NF4 = 25
"""Bytes that dequantising an element moves, in operators of PyTorch; one kernel would move 2.6."""
MOST_OPS = 140
"""Operations of a layer besides products and attention in forward and backward: each is at least one launch."""


def short(config: RunConfig) -> RunConfig:
    model = config.model
    shape = model.architecture or model.config or SHAPE_OF_TINY
    shape = {**shape, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": LENGTH}
    if shape["hidden_size"] < 1024:  # heads of as many numbers as the kernel needs
        shape["hidden_size"] = 64 * shape["num_attention_heads"]
    return dataclasses.replace(
        config,
        model=dataclasses.replace(
            model,
            architecture=shape,
            config=None,
            dtype="bfloat16",
            trainable_dtype="float32" if config.lora is not None else "bfloat16",
        ),
        data=dataclasses.replace(config.data, max_seq_length=LENGTH),
        memory=RunMemoryConfig(policy="keep_all"),
    )


@pytest.mark.parametrize("path", CONFIGS)
def test_a_shipped_file_runs_causal_flash_within_its_budget_of_work(
    path: Path, compiled: list[Compiled]
) -> None:
    config = short(load_run_config(path, ["--devices=1"]))
    plan = plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
    forward, backward = compiled[0].forward_traces[-1], compiled[0].backward_traces[-1]
    symbols = [*forward.bound_symbols, *backward.bound_symbols]
    kernel = "cuda_packed_attention" if config.data.packing else "cuda_cudnn_attention"
    names = [b.sym.name for b in symbols if "attention" in b.sym.name]
    assert names == [kernel] * NUM_LAYERS + [f"{kernel}_backward"] * NUM_LAYERS
    proxies = [p for b in symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)]
    squares = [p for p in proxies if isinstance(p, TensorProxy) and p.shape.count(LENGTH) > 1]
    assert squares == []
    (query,) = {b.args[0].shape for b in symbols if b.sym.name == kernel}
    steps = [s.op for s in plan.call.program.steps if "attention" in s.op.symbol]
    flops = sum(op.flops for op in steps)
    num_rows, num_heads, _, width = query
    backward_ops = [s.op for s in plan.call.program.steps if s.op.symbol == f"{kernel}_backward"]
    # The sums of the queries' gradients in float32, which the CPU's kernel does not have.
    assert all(op.scratch_bytes > 4 * math.prod(query) for op in backward_ops)
    assert flops == NUM_LAYERS * num_rows * num_heads * 7 * LENGTH * LENGTH * width
    # Backward adds up the gradient of the queries in float32, which no tensor shows.
    scratch = [op.scratch_bytes for op in steps if op.symbol.endswith("backward")]
    assert min(scratch) > 4 * num_rows * num_heads * LENGTH * width
    check_work(plan, config)


def check_work(plan: RunPlan, config: RunConfig) -> None:
    num_layers, found = ops_of_layers(plan.call.program)
    assert num_layers == NUM_LAYERS
    ops = [op for op in found if op.symbol != "add_gradient"]  # autograd's own work elsewhere
    work = work_by_kind(ops, plan.device)["other operations"]
    assert work.num_ops <= MOST_OPS * NUM_LAYERS
    assert {op.dtype for op in ops if op.flops} <= {"bfloat16", "float8_e4m3fn", "float8_e5m2"}
    shape = config.model.architecture
    assert shape is not None
    if shape["intermediate_size"] > 2 * shape["hidden_size"]:  # not the tiny ones
        widths = shape["hidden_size"] + shape["intermediate_size"]
        in_fp8 = 1.0 if config.fp8 is None else MOST_IN_FP8
        most = in_fp8 * MOST_MOVED_BYTES * plan.num_rows * LENGTH * widths * NUM_LAYERS
        assert work.moved_bytes <= most + _dequantised_bytes(ops)


def test_casts_of_autocast_are_in_kernels_with_what_makes_and_reads_them() -> None:
    config = short(load_run_config(DIRECTORY / "llama3_8b_full.yaml", ["--devices=1"]))
    model = dataclasses.replace(config.model, trainable_dtype="float32")
    config = dataclasses.replace(config, model=model)
    plan = plan_run.plan_run(config, device=device("h200"), num_ranks=1, has_curve=False)
    num_layers, found = ops_of_layers(plan.call.program)
    others = [op for op in found if op.repeat != "free" and not op.flops]
    names = [op.symbol for op in others if op.symbol != "add_gradient"]
    # Those of weights and their gradients alone, between products of matrices.
    assert names.count("to") <= 9 * num_layers
    assert len(names) <= 28 * num_layers


def _dequantised_bytes(ops: Sequence[Op]) -> float:
    """Return the bytes that dequantising may move: weights have 2 bytes of result for each element."""
    made = [op for op in ops if op.symbol == "nf4_dequantized"]
    return sum(MOST_OF_NF4 * op.peak_bytes / 2 for op in made)


@pytest.mark.soak
def test_a_plan_counts_the_memory_of_cuda_graphs() -> None:
    config = short(load_run_config(DIRECTORY / "tiny_pretrain.yaml", ["--devices=1"]))
    peaks = []
    for setting in (False, True):
        strategy = dataclasses.replace(config.strategy, cuda_graphs=setting)
        asked = dataclasses.replace(config, strategy=strategy)
        plan = plan_run.plan_run(asked, device=device("h200"), num_ranks=1, has_curve=False)
        peaks.append(plan.call.profile.peak_bytes)
        assert plan.call.plan is not None
        assert plan.call.plan.predicted_peak_bytes == peaks[-1]
        assert sum(plan.call.profile.peak_bytes_by_kind.values()) == peaks[-1]
    assert peaks[1] - peaks[0] > 64 * 2**20
