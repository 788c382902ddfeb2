"""Gradients of bfloat16 parameters are summed over the ranks in float32, or as they are; to the bit."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.distributed import run_on_ranks
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import own_rows, shard_module, take_rows

WORLD = 3  # so that already the division rounds


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(7, 6).bfloat16())
        self.gain = nn.Parameter(torch.randn(6).float())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t()).tanh().sum() + (x.float() * self.gain).sum()


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def x(rank: int) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(rank)).bfloat16()


def own_gradient(rank: int) -> Tensor:
    """Return the gradient that one process computes from this rank's data."""
    alone = model()
    CompiledModule(alone)(x(rank)).backward()
    assert alone.weight.grad is not None
    return alone.weight.grad


def mean(dtype: torch.dtype) -> Tensor:
    shares = (own_gradient(rank).to(dtype) / WORLD for rank in range(WORLD))
    return reduce(torch.add, shares).bfloat16()


def check_all(rank: int) -> None:
    expected = {torch.float32: mean(torch.float32), None: mean(torch.bfloat16)}
    assert not torch.equal(expected[torch.float32], expected[None])
    for mode, bucket_bytes in (("zero2", 0), ("zero3", 10**6)):
        for reduce_dtype, whole in expected.items():
            assert dist.group.WORLD is not None
            data_parallel = DataParallel(
                mode=mode,  # type: ignore[arg-type]
                group=dist.group.WORLD,
                reduce_dtype=reduce_dtype,
                prefetch=10**6,
                bucket_bytes=bucket_bytes,
            )
            ours = model()
            shard_module(ours, data_parallel)
            CompiledModule(ours, data_parallel=data_parallel)(x(rank)).backward()
            rows = take_rows(whole, own_rows(whole.shape, data_parallel))
            assert ours.weight.grad is not None
            assert ours.weight.grad.dtype is torch.bfloat16
            assert torch.equal(ours.weight.grad, rows), (mode, reduce_dtype)


def test_the_sum_is_computed_in_the_chosen_dtype(tmp_path: Path) -> None:
    run_on_ranks(check_all, WORLD, tmp_path / "rendezvous")
