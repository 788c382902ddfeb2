"""A weight that is only read in bfloat16 is sent in bfloat16."""

from __future__ import annotations

import pytest
import torch

from harness import models
from harness.traces import collectives, fake_ranks
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.sharding.rows import shard_module

IDS = models.token_batch()
MODEL = models.llama()


def compiled(*, autocast: bool, mode: str) -> Compiled:
    model = models.llama()
    with fake_ranks(2, mode=mode) as data_parallel:
        shard_module(model, data_parallel)
        module = CompiledModule(model, data_parallel=data_parallel)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(input_ids=IDS, labels=IDS)
    return module.captures[0]


def gathered(result: Compiled) -> list[dict[str, int]]:
    return [
        {c.name: c.nbytes for c in collectives(trace) if c.kind == "all_gather"}
        for trace in (result.forward_traces[-1], result.backward_traces[-1])
    ]


@pytest.mark.parametrize("mode", ["zero2", "zero3"])
def test_under_autocast_linear_weights_are_gathered_in_half_the_bytes(mode: str) -> None:
    whole, mixed = (gathered(compiled(autocast=on, mode=mode)) for on in (False, True))
    for plain, small in zip(whole, mixed, strict=True):
        assert plain.keys() == small.keys()
        for name, num_bytes in plain.items():
            is_cast = "proj" in name or "lm_head" in name
            assert small[name] == num_bytes // (2 if is_cast else 1), name
    assert any("proj" in name for name in whole[0])


def test_reductions_stay_in_float32() -> None:
    result = compiled(autocast=True, mode="zero3")
    reduced = [c for c in collectives(result.backward_traces[-1]) if c.kind == "reduce_scatter"]
    whole = sorted(p.numel() * 4 + (p.shape[0] % 2) * p[0].numel() * 4 for p in MODEL.parameters())
    assert sorted(c.nbytes for c in reduced) == whole
