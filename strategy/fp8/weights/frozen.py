"""Keeps frozen weights as fp8 numbers only: cast once, on each rank its own rows, with one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.fp8.recipe import Recipe
from thunder_memsave.fp8.weights.layers import Choice
from thunder_memsave.fp8.weights.loaded import SCALE_NAME
from thunder_memsave.fp8.weights.rows import Rows, shape_of_scales
from thunder_memsave.ops.host_copies.weights import keep_on_host, place_of
from thunder_memsave.sharding.quantized_parameter import hold_fp8
from thunder_memsave.sharding.rows import whole_shape
from thunder_memsave.stored_weights.walk import (
    FrozenWeights,
    Kept,
    Waiting,
    frozen_weights,
    run_all,
)


class FrozenScale(nn.Module):
    """The inverse scale of a weight kept as fp8 numbers only: the buffer `scale_inv`, float32.

    Its shape is `[1]`, or `[rows / 128, columns / 128]` of the whole weight with the recipe `block`.
    """

    scale_inv: Tensor

    def __init__(self, scale_inv: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale_inv", scale_inv)

    def _apply(self, fn: Any, recurse: bool = True) -> FrozenScale:
        # `model.to(torch.bfloat16)` moves and casts what a module has; scales stay float32.
        moved = fn(self.scale_inv)
        is_cast = moved.dtype != torch.float32
        self.scale_inv = self.scale_inv.to(moved.device) if is_cast else moved
        return self


def scale_inv_of(linear: nn.Module) -> Tensor:
    """Return the inverse scale of the fp8 numbers that a linear keeps as its weight."""
    return cast("FrozenScale", linear.get_submodule(SCALE_NAME)).scale_inv


def refuse_trained_again(name: str, weight: Tensor) -> None:
    """Refuse a weight kept as fp8 numbers that is now trained, or whose numbers were cast.

    Raises:
        ConfigError: It is; the message says what to do instead.
    """
    if weight.requires_grad:
        raise ConfigError(
            f"the weight of {name!r} requires a gradient, but it did not when the model was set up, so only its fp8 "
            "numbers are kept (fp8.frozen_weights: fp8); unfreeze it before fabric.setup(), or set "
            "fp8.frozen_weights to 'compute'.",
            key="fp8.frozen_weights",
        )
    if weight.dtype != torch.float8_e4m3fn:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"the weight of {name!r} holds fp8 numbers (fp8.frozen_weights: fp8), but was cast to {dtype} without "
            "their scale; leave out model.to(dtype) and the like after fabric.setup().",
            key="fp8.frozen_weights",
        )


class FrozenInFp8(FrozenWeights):
    """The weights of one module to keep as fp8 numbers only."""

    def __init__(
        self,
        module: nn.Module,
        choices: Sequence[Choice],
        *,
        recipe: Recipe,
        data_parallel: DataParallel | None,
    ) -> None:
        """Choose the frozen weights that only fp8 linears have.

        Raises:
            ConfigError: There are none.
        """
        in_fp8 = {c.name for c in choices if c.reason is None}
        super().__init__(frozen_weights(module, lambda name, _: name in in_fp8), data_parallel)
        self._recipe = recipe
        if not self._kept:
            raise ConfigError(
                "fp8.frozen_weights is 'fp8', but the model has no linear in fp8 whose weight is frozen and its own; "
                "leave frozen_weights out, or train with `lora`.",
                key="fp8.frozen_weights",
            )

    def _cast_with_others(
        self, kept: Kept, waiting: Waiting, device: torch.device, data_parallel: DataParallel
    ) -> Callable[[], None]:
        """All-reduce the amax of a sharded weight; the numbers and the scale are those of the whole."""

        def amax_of_rows() -> tuple[Rows, Tensor]:
            run_all(waiting)
            rows = Rows.of(kept.weight, device)
            return rows, rows.amax(self._recipe)

        rows, amax = self._on_all_ranks(amax_of_rows)
        with collective(f"amax of {kept.name}", data_parallel.group):
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=data_parallel.group)
        return partial(self._hold, kept, rows, amax)

    def _cast(self, kept: Kept, device: torch.device) -> None:
        rows = Rows.of(kept.weight, device)
        self._hold(kept, rows, rows.amax(self._recipe))

    def _hold(self, kept: Kept, rows: Rows, amax: Tensor) -> None:
        values, scale_inv = rows.quantized(amax, self._recipe)
        hold_fp8(kept.weight, values, name=kept.name)
        _hold_scale(kept.linears, scale_inv)
        if (place := place_of(kept.weight)) is not None:
            keep_on_host(kept.weight, place)

    def stand_in(self) -> None:
        """Replace all weights by storage-less fp8 numbers; for a plan, whose weights have no values."""
        for kept in self._kept.values():
            shape = shape_of_scales(whole_shape(kept.weight), self._recipe)
            numbers = torch.empty(kept.weight.shape, dtype=self._recipe.dtype("weight"))
            numbers.untyped_storage().resize_(0)
            scale_inv = torch.empty(shape)
            scale_inv.untyped_storage().resize_(0)
            hold_fp8(kept.weight, numbers, name=kept.name)
            _hold_scale(kept.linears, scale_inv)


def _hold_scale(linears: Sequence[nn.Linear], scale_inv: Tensor) -> None:
    scale = FrozenScale(scale_inv)
    for linear in linears:
        linear.add_module(SCALE_NAME, scale)
