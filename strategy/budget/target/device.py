"""Stands in for absent models and ranks when planning: tensors without memory, and collectives that do nothing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fp8.compute.linears import Fp8Linears
from thunder_memsave.fp8.compute.operators import BLOCK
from thunder_memsave.fp8.kernels.mx_blocks import MX_BLOCK
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK
from thunder_memsave.fp8.recipe import Recipe
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.sharding.rows import fill_meta, shard_module
from thunder_memsave.sharding.sharded_parameter import is_sharded


def without_memory(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a tensor that says it is on the CPU, but has no memory; the caller must not read it.

    Unlike a meta tensor, it is like any other to autocast and to models that look at devices. One without dims has its
    few bytes: Dynamo reads whole numbers, and takes 0 and 1 for constants.
    """
    if not shape:
        return torch.full((), 1000).to(dtype)
    tensor = torch.empty(shape, dtype=dtype)
    tensor.untyped_storage().resize_(0)
    return tensor


def stand_in(module: nn.Module, data_parallel: DataParallel | None = None) -> None:
    """Turn a module on meta into one that can be captured: sharded, with tensors without memory.

    Raises:
        ValueError: it cannot be sharded (`sharding.rows.shard_module`).
    """
    shard_module(module, data_parallel)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in tensors:
        if tensor.is_meta:
            values = without_memory(tensor.shape, tensor.dtype)
            sharded_over = data_parallel if is_sharded(tensor) else None
            fill_meta(tensor, values, name=name, sharded_over=sharded_over)


def stand_in_fp8(linears: Fp8Linears) -> None:
    """Give the frozen linears of a model that `stand_in` made fp8 copies without memory."""
    recipe = linears.recipe
    for linear in linears.by_name.values():
        shape = linear.linear.weight.shape
        is_copied = linear.is_frozen and not linear.is_kept_in_fp8
        weight = linear.linear.weight
        if is_copied and not is_sharded(weight) and place_of(weight) is None:
            is_nvfp4, transposed = recipe.scaling == "nvfp4", torch.Size(shape[::-1])
            linear.take_frozen(
                _numbers(shape, recipe),
                _scales(shape, recipe),
                _numbers(transposed, recipe),
                _scales(transposed, recipe) if recipe.casts_each_direction else None,
                without_memory(torch.Size((1,)), torch.float32) if is_nvfp4 else None,
            )


def _numbers(shape: torch.Size, recipe: Recipe) -> Tensor:
    """Return the numbers of a weight."""
    if recipe.scaling == "nvfp4":
        return without_memory(torch.Size((shape[0], shape[1] // 2)), torch.uint8)
    return without_memory(shape, recipe.dtype("weight"))


def _scales(shape: torch.Size, recipe: Recipe) -> Tensor:
    """Return the inverse scales of a weight."""
    rows, columns = shape
    if recipe.scaling == "nvfp4":
        return without_memory(torch.Size((rows, columns // NVFP4_BLOCK)), torch.float8_e4m3fn)
    if recipe.scaling == "mx":
        return without_memory(torch.Size((rows, columns // MX_BLOCK)), torch.uint8)
    blocks = (-(-rows // BLOCK), -(-columns // BLOCK)) if recipe.scaling == "block" else (1,)
    return without_memory(torch.Size(blocks), torch.float32)


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Make this process rank 0 of a fake process group of `num_ranks` ranks, whose collectives compute nothing.

    Raises:
        RuntimeError: this process has a process group already.
    """
    if dist.is_initialized():
        raise RuntimeError(
            f"a plan for {num_ranks} ranks was asked for in a process that has a process group of "
            f"{dist.get_world_size()}; plan in another process, or call "
            "torch.distributed.destroy_process_group() first."
        )
    hook = sys.excepthook  # each new group makes it write the rank before each line once more
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
