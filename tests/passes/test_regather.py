"""Under zero3 no gathered parameter outlives the operations that read it, and the numbers are zero2's."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from thunder.core.trace import TraceCtx
from thunder.dev_utils.check_trace import check_trace
from torch import nn

from harness import models
from harness.joint_passes import joint_passes
from harness.traces import (
    collectives,
    fake_ranks,
    live_gathered,
    saved_for_backward,
    unlimited_planner,
)
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.frontend.calls import Call
from thunder_memsave.measure.devices import device_at
from thunder_memsave.ops.families.collectives import gathers
from thunder_memsave.passes.recompute import PREFIX
from thunder_memsave.passes.regather import regather
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch()


def lora() -> nn.Module:
    config: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.1}
    return get_peft_model(models.llama(num_layers=2), LoraConfig(**config))


def partly_frozen() -> nn.Module:
    model = models.gpt2(num_layers=2, resid_pdrop=0.1)
    for number, p in enumerate(model.parameters()):
        p.requires_grad_(number % 3 > 0)
    return model


def tied() -> nn.Module:
    return models.qwen2(num_layers=2, tie_word_embeddings=True)


MODELS = {"lora": lora, "partly_frozen": partly_frozen, "tied": tied}


def compiled(
    model: nn.Module, data_parallel: DataParallel, planner: MemoryPlanner | None = None
) -> Compiled:
    shard_module(model, data_parallel)
    module = CompiledModule(model, data_parallel=data_parallel, planner=planner)
    module(input_ids=IDS, labels=IDS)
    return module.captures[0]


def planner_within(budget_bytes: int, data_parallel: DataParallel) -> MemoryPlanner:
    return MemoryPlanner(
        MemoryConfig(),
        device=device_at(torch.device("cpu")),
        budget_bytes=budget_bytes,
        data_parallel=data_parallel,
    )


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_live_gathered_parameters_are_those_that_the_operation_reads(
    build: Callable[[], nn.Module],
) -> None:
    with fake_ranks(2) as data_parallel:
        result = compiled(build(), data_parallel)
    for trace in (result.forward_traces[-1], result.backward_traces[-1]):
        points = live_gathered(trace)
        assert any(point.live for point in points)
        for point in points:
            assert set(point.live) == point.read, f"{point.symbol} keeps what it does not read"


def test_zero2_keeps_what_zero3_regathers() -> None:
    """The count of live parameters sees a difference where there is one."""
    with fake_ranks(2, mode="zero2") as data_parallel:
        result = compiled(models.llama(num_layers=2), data_parallel)
    assert not collectives_of(result.backward_traces[-1], "all_gather")
    assert any(set(p.live) > p.read for p in live_gathered(result.forward_traces[-1]))


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_nothing_of_the_size_of_a_parameter_is_saved_but_shards_and_activations(
    build: Callable[[], nn.Module],
) -> None:
    with fake_ranks(2) as data_parallel:
        result = compiled(build(), data_parallel)
    forward = result.forward_traces[-1]
    gathered = {o.name for b in forward.bound_symbols for o in b.flat_proxy_outs if _gathers(b)}
    assert gathered
    saved = {t.name for t in saved_for_backward(forward)}
    of_parameters = _derived(forward, gathered)
    assert not saved & of_parameters


@pytest.mark.parametrize("mode", ["zero3", "auto"])
def test_a_llama_communicates_each_weight_as_often_as_it_is_read(mode: str) -> None:
    """One gather in forward; one in backward, but for the embedding; one reduce-scatter if trained.

    `auto` has no budget here.
    """
    model = models.llama(num_layers=2)
    model.model.layers[0].mlp.requires_grad_(False)
    named = {f"t_{n.replace('.', '_')}": p for n, p in model.named_parameters()}
    with fake_ranks(2, mode=mode) as data_parallel:
        result = compiled(model, data_parallel)
    forward = [c.name for c in collectives(result.forward_traces[-1])]
    backward = collectives_of(result.backward_traces[-1], "all_gather")
    reduced = collectives_of(result.backward_traces[-1], "reduce_scatter")
    assert sorted(forward) == sorted(named)
    assert sorted(backward) == sorted(set(named) - {"t_model_embed_tokens_weight"})
    assert len(reduced) == sum(p.requires_grad for p in named.values())


def test_where_the_plan_decides_forward_holds_no_more_than_zero3_but_what_backward_reads() -> None:
    """A tied weight is gathered for each of its two readers in forward, and the second one's stays."""
    with fake_ranks(2, mode="auto") as data_parallel:
        result = compiled(tied(), data_parallel, planner_within(10**12, data_parallel))
    forward, backward = result.forward_traces[-1], result.backward_traces[-1]
    names = collectives_of(forward, "all_gather")
    assert not collectives_of(backward, "all_gather")
    assert names.count("t_model_embed_tokens_weight") == 2
    assert len(names) == len(set(names)) + 1
    points = live_gathered(forward)
    pairs = [pair for b in forward.bound_symbols for pair in gathers(b)]
    tied_weight = {f.name for shard, f in pairs if shard.name == "t_model_embed_tokens_weight"}
    is_live = [bool(tied_weight & set(point.live)) for point in points]
    from_embedding = is_live[is_live.index(True) :]
    assert [live for live, _ in groupby(from_embedding)] == [True, False, True]
    assert len(points[-1].live) > 10


def test_with_all_recomputed_one_layers_weights_are_whole_at_a_time() -> None:
    model = models.llama(num_layers=3)
    layer_bytes = sum(p.numel() * p.element_size() for p in model.model.layers[0].parameters())
    with fake_ranks(2) as data_parallel:
        planner = unlimited_planner(MemoryConfig(policy="recompute_all"), data_parallel)
        result = compiled(model, data_parallel, planner)
    backward = result.backward_traces[-1]
    assert any(o.name.startswith(PREFIX) for b in backward.bound_symbols for o in b.flat_proxy_outs)
    most = max(sum(point.live.values()) for point in live_gathered(backward))
    assert 0 < most <= layer_bytes


def test_evaluation_frees_each_weight_after_its_use() -> None:
    with fake_ranks(2) as data_parallel, torch.no_grad():
        result = compiled(models.llama(num_layers=2), data_parallel)
    assert all(set(p.live) == p.read for p in live_gathered(result.forward_traces[-1]))


def test_the_joint_trace_stays_valid() -> None:
    seen: list[TraceCtx] = []

    def recorded(trace: TraceCtx) -> TraceCtx:
        seen.append(regather(trace))
        return seen[-1]

    with (
        fake_ranks(2) as data_parallel,
        joint_passes(recorded),
    ):
        compiled(tied(), data_parallel)
    assert "Joint pass regather" in str(seen[0].get_provenance())
    check_trace(seen[0])


def collectives_of(trace: Any, kind: str) -> list[str]:
    return [c.name for c in collectives(trace) if c.kind == kind]


def _gathers(bsym: Any) -> bool:
    return bool(bsym.sym.name.startswith("all_gather"))


def _derived(trace: Any, names: set[str]) -> set[str]:
    """Return every value that depends on these values alone."""
    derived = set(names)
    for bsym in trace.bound_symbols:
        inputs = {a.name for a in bsym.flat_proxy_args if hasattr(a, "numel")}
        if inputs and inputs <= derived:
            derived |= {o.name for o in bsym.flat_proxy_outs}
    return derived


@pytest.mark.parametrize("num_layers", [3, pytest.param(32, marks=pytest.mark.soak)])
def test_sixty_four_ranks_of_a_large_model_hold_one_operations_weights_at_a_time(
    num_layers: int,
) -> None:
    """The shapes of Llama-3-8B, planned as the strategy does; on meta, so that nothing is computed."""
    shapes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = models.llama(num_layers=num_layers, **shapes, **heads).bfloat16()
        ids = torch.zeros(1, 2048, dtype=torch.long)
    sizes = {n: p.numel() * 2 for n, p in model.named_parameters()}
    embedding = sizes["model.embed_tokens.weight"]
    with fake_ranks(64) as data_parallel:
        shard_module(model, data_parallel)
        call = Call.of(model, (), {"input_ids": ids, "labels": ids})
        compiler = CallCompiler(
            config=CompileConfig(),
            data_parallel=data_parallel,
            planner=unlimited_planner(MemoryConfig(), data_parallel),
        )
        result = compiler.compile(model, call, name="forward", reason="test")
    forward, backward = result.forward_traces[-1], result.backward_traces[-1]
    assert any(o.name.startswith(PREFIX) for b in backward.bound_symbols for o in b.flat_proxy_outs)
    assert num_bytes_of(forward, "all_gather") == sum(sizes.values())
    # Backward reads neither: the loss has made the head's gradients in forward.
    unread = embedding + sizes["lm_head.weight"]
    assert num_bytes_of(backward, "all_gather") == sum(sizes.values()) - unread
    assert num_bytes_of(backward, "reduce_scatter") == 2 * sum(sizes.values())  # in float32
    of_layers = sizes["model.layers.0.mlp.up_proj.weight"]
    for trace, largest in ((forward, embedding), (backward, of_layers)):
        points = live_gathered(trace)
        assert all(point.live.keys() <= set(point.read) for point in points)
        assert max(sum(point.live.values()) for point in points) == largest


def num_bytes_of(trace: Any, kind: str) -> int:
    return sum(c.nbytes for c in collectives(trace) if c.kind == kind)
