"""A call is compiled for a GPU that is not here, for ranks that are not here, from tensors without memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from transformers import LlamaConfig, LlamaForCausalLM

from harness.traces import num_calls
from thunder_memsave.budget.target.device import fake_ranks, stand_in, without_memory
from thunder_memsave.compiler.compile_call import CallCompiler, Compiled
from thunder_memsave.config import CompileConfig, ShardingConfig, StrategyConfig
from thunder_memsave.distributed.process_group import make_data_parallel
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.frontend.calls import Call

LENGTH = 8192
SHAPE_OF_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": LENGTH,
}
NUM_LAYERS = 2


@pytest.fixture(scope="module", params=["boundaries", "nothing"])
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """An 8B shape for packed rows, or for rows of one document each, which are given no mask."""
    with torch.device("meta"):
        shape = LlamaConfig(**SHAPE_OF_8B, num_hidden_layers=NUM_LAYERS)
        model: Any = LlamaForCausalLM(shape)
        model = model.to(torch.bfloat16)
    take_boundaries(model)
    ids = without_memory(torch.Size((1, LENGTH)), torch.int64)
    batch = {"input_ids": ids, "use_cache": False}
    if request.param == "boundaries":
        boundaries = without_memory(torch.Size((34,)), torch.int32)
        batch.update(attention_mask=boundaries, position_ids=ids)
    with fake_ranks(64):
        config = StrategyConfig(sharding=ShardingConfig(mode="zero3"))
        data_parallel = make_data_parallel(config, ranks_per_node=8)
        stand_in(model, data_parallel)
        compiler = CallCompiler(
            config=CompileConfig(), data_parallel=data_parallel, target=torch.device("cuda:3")
        )
        call = Call.of(model, (), batch)
        return compiler.compile(model, call, name="forward", reason="first call")


def tensors(trace: TraceCtx) -> list[TensorProxy]:
    proxies = [p for b in trace.bound_symbols for p in (*b.flat_proxy_args, *b.flat_proxy_outs)]
    return [p for p in proxies if isinstance(p, TensorProxy)]


def test_attention_of_an_8b_shape_is_a_flash_kernel_and_neither_scores_nor_a_mask_are_planned(
    compiled: Compiled,
) -> None:
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    symbols = [b.sym.name for trace in traces for b in trace.bound_symbols]
    packed = any("attention_mask" in a.name for a in traces[0].args)
    kernel = "cuda_packed_attention" if packed else "cuda_flash_attention"
    operators = [s for s in symbols if "attention" in s]
    assert operators == [kernel] * NUM_LAYERS + [f"{kernel}_backward"] * NUM_LAYERS
    found = [p for trace in traces for p in tensors(trace)]
    assert [p.name for p in found if p.shape.count(LENGTH) > 1] == []


def test_grouped_queries_share_their_keys_without_a_copy(compiled: Compiled) -> None:
    kernels = ("cuda_packed_attention", "cuda_flash_attention")
    forward = compiled.forward_traces[-1]
    keys = [b.args[1].shape for b in forward.bound_symbols if b.sym.name in kernels]
    assert keys == [(1, SHAPE_OF_8B["num_key_value_heads"], LENGTH, 128)] * NUM_LAYERS


def test_every_tensor_is_on_the_target(compiled: Compiled) -> None:
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    assert {p.device for trace in traces for p in tensors(trace)} == {Device("cuda:3")}


def test_weights_are_gathered_from_as_many_ranks_as_were_asked_for(compiled: Compiled) -> None:
    forward = compiled.forward_traces[-1]
    assert num_calls(forward, "all_gather") > NUM_LAYERS
    (embedding,) = [p for p in forward.args if "embed_tokens" in p.name]
    assert tuple(embedding.shape) == (128256 // 64, 4096)


def test_a_number_has_its_memory_because_dynamo_reads_it() -> None:
    number = without_memory(torch.Size([]), torch.int64)
    assert number.nbytes == number.untyped_storage().nbytes()
    assert int(number) > 1


def test_tensors_without_memory_hold_none() -> None:
    tensor = without_memory(torch.Size((2**15, 2**15)), torch.float32)
    assert tensor.shape == (2**15, 2**15)
    assert tensor.untyped_storage().nbytes() == 0


def test_a_model_keeps_its_ties_and_its_buffers() -> None:
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=32,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                tie_word_embeddings=True,
            )
        )
    names = list(dict(model.named_parameters()))
    stand_in(model)
    assert list(dict(model.named_parameters())) == names
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    gc.collect()


def test_ranks_in_a_process_that_has_some_are_refused() -> None:
    with (
        fake_ranks(4),
        pytest.raises(
            RuntimeError, match=r"a plan for 2 ranks .* has a process group of 4; plan in"
        ),
        fake_ranks(2),
    ):
        raise AssertionError("not reached")
    assert not dist.is_initialized()
