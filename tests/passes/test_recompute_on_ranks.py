"""Under zero3 a clone shares backward's gather of its weight: none is added, and the bits are zero2's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from harness import models
from harness.distributed import run_on_ranks
from harness.joint_passes import JOINT_PASSES
from harness.recompute import Choice, at_random, everything, forward_values, nothing, recomputing
from harness.traces import collectives, fake_ranks, saved_for_backward
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.accumulation import accumulated_names
from thunder_memsave.passes.regather import regather_forward
from thunder_memsave.passes.step import Pass
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch()
PLANNED_GATHERS = (*JOINT_PASSES[:-1], regather_forward)
"""`sharding: auto` under a budget: whole weights that backward reads may be kept."""


def block_inputs(trace: TraceCtx) -> set[str]:
    """Keep only the residual stream, as checkpointing each block does."""
    residual = (2, 12, 32)
    sums = [
        b.output for b in trace.bound_symbols if b.sym.name in ("aten_add_Tensor", "aten_embedding")
    ]
    named = {s.name for s in sums if isinstance(s, TensorProxy) and tuple(s.shape) == residual}
    return named & set(forward_values(trace))


def compiled(build: Callable[[], nn.Module], choose: Choice, mode: str = "zero3") -> Compiled:
    with fake_ranks(2, mode=mode) as data_parallel, recomputing(choose):
        model = build()
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        module(input_ids=IDS, labels=IDS)
        return module.captures[0]


def gathers(trace: TraceCtx) -> Counter[str]:
    return Counter(c.name for c in collectives(trace) if c.kind == "all_gather")


def llama() -> nn.Module:
    return models.llama(num_layers=2)


def test_each_weight_is_gathered_once_in_backward_also_where_clones_read_it() -> None:
    plain = compiled(llama, everything).backward_traces[-1]
    ours = compiled(llama, block_inputs).backward_traces[-1]
    assert any(o.name.startswith("bw_") for b in ours.bound_symbols for o in b.flat_proxy_outs)
    assert gathers(ours) == gathers(plain)
    assert set(gathers(ours).values()) == {1}


def test_no_whole_weight_is_saved() -> None:
    for choose in (nothing, block_inputs):
        forward = compiled(llama, choose).forward_traces[-1]
        whole = {o.name for b in forward.bound_symbols for o in b.flat_proxy_outs if _is_wait(b)}
        assert whole
        assert not whole & {t.name for t in saved_for_backward(forward)}


def test_under_zero2_a_weight_that_is_not_kept_is_regathered() -> None:
    kept = compiled(llama, everything, mode="zero2").backward_traces[-1]
    ours = compiled(llama, nothing, mode="zero2").backward_traces[-1]
    assert not gathers(kept)
    assert set(gathers(ours).values()) == {1}


def _is_wait(bsym: Any) -> bool:
    return bool(bsym.sym.name == "torch_wait_prim_impl")


def dropout() -> nn.Module:
    return models.gpt2(num_layers=2, resid_pdrop=0.1)


def tied() -> nn.Module:
    return models.qwen2(num_layers=2, tie_word_embeddings=True)


def gradients(
    build: Callable[[], nn.Module],
    choose: Choice,
    rank: int,
    passes: Sequence[str | Pass] = JOINT_PASSES,
    **settings: Any,
) -> list[Tensor]:
    """Return the gradients of two micro-batches; the first may run under `no_backward_sync`."""
    torch.manual_seed(0)
    model = build()
    assert dist.group.WORLD is not None
    data_parallel = DataParallel(group=dist.group.WORLD, **settings)
    shard_module(model, data_parallel)
    ids = models.token_batch(seed=rank)
    with recomputing(choose, passes=passes):
        module = CompiledModule(model, data_parallel=data_parallel)
        torch.manual_seed(1)
        keeps = settings.get("accumulate") == "accumulate_unsharded"
        for is_last in (False, True):
            with module.unreduced.keeping(enabled=keeps and not is_last):
                module(input_ids=ids, labels=ids)[0].backward()
    (capture,) = module.captures
    assert bool(accumulated_names(capture.backward_traces[-1])) is keeps
    return [p.grad for p in model.parameters() if p.grad is not None]


def check_all(rank: int) -> None:
    window: dict[str, Any] = {"prefetch": 20_000, "bucket_bytes": 4_000}
    unsharded: dict[str, Any] = {"accumulate": "accumulate_unsharded"}
    cases: list[tuple[Callable[[], nn.Module], Choice, dict[str, Any]]] = [
        (dropout, nothing, window),
        (tied, at_random(0.3), {}),
        (llama, block_inputs, {**window, **unsharded}),
        (tied, at_random(0.5), {**window, "passes": PLANNED_GATHERS}),
    ]
    references: dict[tuple[object, ...], list[Tensor]] = {}
    for build, choose, settings in cases:
        accumulate = {k: v for k, v in settings.items() if k == "accumulate"}
        if (key := (build, *accumulate)) not in references:
            references[key] = gradients(build, everything, rank, mode="zero2", **accumulate)
        reference = references[key]
        ours = gradients(build, choose, rank, mode="zero3", **settings)
        assert len(ours) == len(reference) > 10
        for measured, expected in zip(ours, reference, strict=True):
            assert torch.equal(measured, expected), build


def test_two_ranks_have_the_bits_of_zero2_without_recomputing(tmp_path: Path) -> None:
    run_on_ranks(check_all, 2, tmp_path / "rendezvous")
