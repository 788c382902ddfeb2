"""Keeps frozen weights as fp8 numbers only: cast once, on each rank its own rows, with one scale."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import OtherRankError, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.distributed.lost_ranks import collective
from thunder_memsave.fp8.recipe import Recipe
from thunder_memsave.fp8.weights.layers import Choice
from thunder_memsave.fp8.weights.loaded import SCALE_NAME
from thunder_memsave.fp8.weights.rows import Rows, shape_of_scales
from thunder_memsave.sharding.quantized_parameter import hold_fp8
from thunder_memsave.sharding.rows import can_shard, whole_shape
from thunder_memsave.sharding.sharded_parameter import unquantized_dtype

T = TypeVar("T")


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One weight to keep as fp8 numbers."""

    name: str
    weight: nn.Parameter
    linears: list[nn.Linear] = field(default_factory=list)
    """The linears that share the weight."""


class FrozenInFp8:
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
        self._recipe, self._data_parallel = recipe, data_parallel
        self._kept = _chosen(module, choices)
        if not self._kept:
            raise ConfigError(
                "fp8.frozen_weights is 'fp8', but the model has no linear in fp8 whose weight is frozen and its own; "
                "leave frozen_weights out, or train with `lora`.",
                key="fp8.frozen_weights",
            )

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._kept)

    def has(self, tensor: Tensor) -> bool:
        """Return whether this is one of the weights, and not cast yet."""
        return id(tensor) in self._kept and unquantized_dtype(tensor) is None

    def cast_rest(self, device: torch.device) -> None:
        """Cast all weights that are not cast yet. A collective, like `cast_each`."""
        rest = [kept.weight for kept in self._kept.values() if self.has(kept.weight)]
        self.cast_each(((weight, lambda: None) for weight in rest), device)

    @torch.no_grad()
    def cast_each(
        self, fills: Iterable[tuple[Tensor, Callable[[], object]]], device: torch.device
    ) -> None:
        """Replace weights by their fp8 numbers on `device`, one after the other. A collective.

        The numbers and the scale are those of the whole weight: `symbols.quantize_frozen`. Ranks synchronise once for
        each weight that is sharded, and at the end.

        Args:
            fills: Each weight, sharded or not, and a function that fills it if it has no values yet.
            device: The device of the numbers.

        Raises:
            OtherRankError: Another rank failed.
        """
        waiting: list[Callable[[], object]] = []
        for weight, fill in fills:
            kept = self._kept[id(weight)]
            waiting.append(fill)
            if self._data_parallel and can_shard(whole_shape(weight), self._data_parallel):
                waiting = [self._reduced(kept, waiting, device, self._data_parallel)]
            else:
                waiting.append(partial(self._cast_whole, kept, device))
        if waiting:
            self._on_all_ranks(partial(_run, waiting))

    def _reduced(
        self,
        kept: _Kept,
        waiting: list[Callable[[], object]],
        device: torch.device,
        data_parallel: DataParallel,
    ) -> Callable[[], None]:
        """All-reduce the amax of a sharded weight; return the rest of its cast, to run at the next synchronisation."""

        def amax_of_rows() -> tuple[Rows, Tensor]:
            _run(waiting)
            rows = Rows.of(kept.weight, device)
            return rows, rows.amax(self._recipe)

        rows, amax = self._on_all_ranks(amax_of_rows)
        with collective(f"amax of {kept.name}", data_parallel.group):
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=data_parallel.group)
        return partial(self._hold, kept, rows, amax)

    def _cast_whole(self, kept: _Kept, device: torch.device) -> None:
        rows = Rows.of(kept.weight, device)
        self._hold(kept, rows, rows.amax(self._recipe))

    def _hold(self, kept: _Kept, rows: Rows, amax: Tensor) -> None:
        values, scale_inv = rows.quantized(amax, self._recipe)
        hold_fp8(kept.weight, values, name=kept.name)
        _hold_scale(kept.linears, scale_inv)

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

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        return together(act, self._data_parallel, error_elsewhere=OtherRankError)


def _run(waiting: list[Callable[[], object]]) -> None:
    """Run the functions in order, and release each afterwards, with the weight that it holds."""
    while waiting:
        waiting.pop(0)()


def _chosen(module: nn.Module, choices: Sequence[Choice]) -> dict[int, _Kept]:
    in_fp8 = {c.name for c in choices if c.reason is None}
    kept: dict[int, _Kept] = {}
    for name, linear in module.named_modules():
        if name not in in_fp8 or linear.weight.requires_grad:
            continue
        assert isinstance(linear, nn.Linear)
        assert isinstance(linear.weight, nn.Parameter)
        found = _Kept(name=f"{name}.weight", weight=linear.weight)
        kept.setdefault(id(linear.weight), found).linears.append(linear)
    for owner, name, parameter in _all_parameters(module):
        linears = kept[id(parameter)].linears if id(parameter) in kept else []
        if name != "weight" or all(linear is not owner for linear in linears):
            # An embedding, or a linear that is not in fp8, shares it.
            kept.pop(id(parameter), None)
    return kept


def _all_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter


def _hold_scale(linears: Sequence[nn.Linear], scale_inv: Tensor) -> None:
    scale = FrozenScale(scale_inv)
    for linear in linears:
        linear.add_module(SCALE_NAME, scale)
