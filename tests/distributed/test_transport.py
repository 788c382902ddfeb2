"""The results of a collective do not depend on the other tensors in it."""

from __future__ import annotations

from functools import reduce
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from harness.distributed import run_on_ranks
from thunder_memsave.distributed.transport import (
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)

WORLD = 3
SHAPES = ((3, 5), (6,), (300, 7), (3, 1, 2))


def whole(rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def rows(t: Tensor, rank: int) -> Tensor:
    return t.chunk(WORLD)[rank]


def bits_equal(ours: Tensor, reference: Tensor) -> bool:
    return torch.equal(ours.view(torch.uint8), reference.contiguous().view(torch.uint8))


def check_all(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        check_reduce_scatter(rank, dtype, group)
        check_all_reduce(rank, dtype, group)
        check_means(rank, dtype, group)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        check_all_gather(rank, dtype, group)
    check_several_in_flight(rank, group)


def check_reduce_scatter(rank: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Sums run from rank 0 to the last one, each rounded to the dtype; non-contiguous inputs too."""
    everyone = [whole(r, dtype) for r in range(WORLD)]
    mine = [*everyone[rank][:-1], everyone[rank][-1].transpose(0, 2).contiguous().transpose(0, 2)]
    together = start_reduce_scatter(mine, group)
    alone = [start_reduce_scatter([t], group)[0] for t in mine]
    for number, ((handle, joined), (other, single)) in enumerate(zip(together, alone, strict=True)):
        handle.wait()
        other.wait()
        parts = [rows(tensors[number], rank) for tensors in everyone]
        assert bits_equal(joined, reduce(torch.add, parts)), (dtype, number)
        assert bits_equal(single, joined), (dtype, number)


def check_all_reduce(rank: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Sums run from rank 0 to the last one, in place; also of a 0-dim and of a non-contiguous tensor."""
    everyone = [[*whole(r, dtype), torch.tensor(r / 3, dtype=dtype)] for r in range(WORLD)]
    mine = [t.clone() for t in everyone[rank]]
    mine[2] = mine[2].t().contiguous().t()
    singles = [t.clone() for t in mine]
    together = start_all_reduce(mine, group)
    alone = [start_all_reduce([t], group)[0] for t in singles]
    for number, ((handle, joined), (other, single)) in enumerate(zip(together, alone, strict=True)):
        handle.wait()
        other.wait()
        assert joined is mine[number]
        assert single is singles[number]
        total = reduce(torch.add, (tensors[number] for tensors in everyone))
        assert torch.equal(joined, total), (dtype, number)
        assert torch.equal(single, total), (dtype, number)


def check_means(rank: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    """Each rank's numbers are divided before they are summed: large ones do not overflow."""
    largest = 0.9 * torch.finfo(dtype).max
    everyone = [[*whole(r, dtype), torch.full((6,), largest, dtype=dtype)] for r in range(WORLD)]
    parts = [[t / WORLD for t in tensors] for tensors in everyone]
    expected = [reduce(torch.add, same) for same in zip(*parts, strict=True)]
    for tensors in (everyone[rank], everyone[rank][-1:]):
        scattered = start_reduce_scatter(tensors, group, mean=True)
        reduced = start_all_reduce([t.clone() for t in tensors], group, mean=True)
        wanted = expected[-len(tensors) :]
        for (waiting, shard), (other, mean), total in zip(scattered, reduced, wanted, strict=True):
            waiting.wait()
            other.wait()
            assert bits_equal(shard, rows(total, rank)), dtype
            assert bits_equal(mean, total), dtype


class Recorder:
    """Stands in for a group of nccl: notes how it is to reduce, and computes nothing."""

    def __init__(self, asked: list[object]) -> None:
        self._asked = asked

    def size(self) -> int:
        return WORLD

    def reduce_scatter_tensor_coalesced(
        self, shards: object, whole: object, options: dist.ReduceScatterOptions
    ) -> dist.Work:
        self._asked.append(options.reduceOp)
        return dist.Work()

    def allreduce_coalesced(
        self, values: object, options: dist.AllreduceCoalescedOptions
    ) -> dist.Work:
        self._asked.append(options.reduceOp)
        return dist.Work()


def test_off_the_cpu_the_collective_computes_the_mean() -> None:
    asked: list[object] = []
    tensors = [t.to("meta") for t in whole(0, torch.float32)]
    group = cast(dist.ProcessGroup, Recorder(asked))
    for mean in (True, False):
        start_reduce_scatter(tensors, group, mean=mean)
        start_all_reduce(tensors, group, mean=mean)
    assert asked == [dist.ReduceOp.AVG] * 2 + [dist.ReduceOp.SUM] * 2


def check_all_gather(rank: int, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
    expected = [t.to(dtype) for t in whole(0, torch.float32)]
    shards = [rows(t, rank).clone() for t in expected]
    results = [*start_all_gather(shards, group), *start_all_gather(shards[:1], group)]
    for (handle, gathered), reference in zip(results, [*expected, expected[0]], strict=True):
        handle.wait()
        assert bits_equal(gathered, reference), dtype
    storages = {gathered.untyped_storage().data_ptr() for _, gathered in results}
    assert len(storages) == len(results)


def check_several_in_flight(rank: int, group: dist.ProcessGroup) -> None:
    """Inputs are released right after the start, and waits come in another order."""
    started = [start_reduce_scatter(whole(rank + k, torch.float32), group) for k in range(4)]
    filler = [torch.full((300, 7), float("nan")) for _ in range(16)]
    for k, results in reversed(list(enumerate(started))):
        for number, (handle, shard) in reversed(list(enumerate(results))):
            handle.wait()
            handle.wait()
            everyone = (whole(r + k, torch.float32)[number] for r in range(WORLD))
            assert bits_equal(shard, reduce(torch.add, (rows(t, rank) for t in everyone)))
    assert len(filler) == 16


def check_pair(rank: int) -> None:
    """Two ranks use another algorithm than more do."""
    group = dist.group.WORLD
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        totals = [a + b for a, b in zip(whole(0, dtype), whole(1, dtype), strict=True)]
        joined = start_all_reduce(whole(rank, dtype), group)
        alone = start_all_reduce(whole(rank, dtype)[2:3], group)
        for (handle, summed), total in zip([*joined, *alone], [*totals, totals[2]], strict=True):
            handle.wait()
            assert torch.equal(summed, total), dtype


def test_two_ranks_sum_alike_together_and_alone(tmp_path: Path) -> None:
    run_on_ranks(check_pair, 2, tmp_path / "rendezvous")


def test_results_are_those_of_one_collective_per_tensor(tmp_path: Path) -> None:
    run_on_ranks(check_all, WORLD, tmp_path / "rendezvous")
