"""The traces of a sharded and of a replicated module communicate exactly what they must."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from harness.parity import weighted_sum
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import shard_module


class Model(nn.Module):
    """Five parameters: odd sizes, one frozen, one tied pair, one without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.linear.bias.requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.linear(self.embed(ids))) * self.gain


def _counts(compiled: Compiled) -> Counter[str]:
    traces = [compiled.forward_traces[-1], *(t for t in compiled.backward_traces[-1:])]
    names = (b.sym.name for trace in traces for b in trace.bound_symbols)
    return Counter(n for n in names if n in _COLLECTIVES)


_COLLECTIVES = ("all_gather_rows", "reduce_scatter_rows", "all_reduce_values")


def _communicates(rank: int) -> None:
    ids = torch.randint(0, 7, (2, 5), generator=torch.Generator().manual_seed(rank))
    for mode, expected in (
        # Embedding, weight and bias are gathered; the two trainable ones are scattered; gain is whole.
        (
            "zero2",
            {"all_gather_rows": 3, "reduce_scatter_rows": 2, "all_reduce_values": 1},
        ),
        ("none", {"all_reduce_values": 3}),
    ):
        torch.manual_seed(0)
        model = Model()
        data_parallel = DataParallel(mode=mode, group=dist.group.WORLD)  # type: ignore[arg-type]
        if mode == "zero2":
            shard_module(model, data_parallel)
        compiled = CompiledModule(model, data_parallel=data_parallel)
        weighted_sum(compiled(ids)).backward()
        assert _counts(compiled.captures[0]) == expected, (mode, _counts(compiled.captures[0]))
        with torch.no_grad():
            compiled(ids)
        gathers = {"all_gather_rows": 3} if mode == "zero2" else {}
        assert _counts(compiled.captures[0]) == gathers, mode
        model.requires_grad_(False)
        compiled(ids)
        assert _counts(compiled.captures[0]) == gathers, mode


def test_collectives_are_counted_exactly(tmp_path: Path) -> None:
    run_on_ranks(_communicates, 2, tmp_path / "rendezvous")
