"""The results of a collective do not depend on the other tensors in it."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

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
