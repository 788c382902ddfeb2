"""Keeps frozen weights of linears as bytes in NF4 alone: quantised one after the other, on each rank its own bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.agreement import OtherRankError, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.nf4.layout import num_bytes
from thunder_memsave.nf4.numbers import DTYPES, quantize
from thunder_memsave.sharding.quantized_parameter import hold_nf4
from thunder_memsave.sharding.rows import (
    can_shard,
    gather_full,
    own_rows,
    take_rows,
    whole_shape,
)
from thunder_memsave.sharding.sharded_parameter import is_sharded, stored_weight

T = TypeVar("T")

_SKIPPED = "lm_head"
"""The output layer stays as it is, as in transformers with bitsandbytes: its errors go straight into the logits."""


def refuse_other_storage(name: str, weight: Tensor) -> None:
    """Refuse a weight kept in NF4 whose bytes were cast.

    Raises:
        ConfigError: They were; the message says what to do instead.
    """
    if weight.dtype != torch.uint8:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name!r} holds bytes in NF4 (frozen_weights: nf4), but was cast to {dtype}; leave out model.to(dtype) "
            "and the like after fabric.setup().",
            key="model.frozen_weights",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """One weight to keep in NF4."""

    name: str
    weight: nn.Parameter


class FrozenInNf4:
    """The weights of one module to keep in NF4: those of `nn.Linear` that are frozen and that only linears have."""

    def __init__(self, module: nn.Module, *, data_parallel: DataParallel | None) -> None:
        """Choose them.

        Raises:
            ConfigError: There are none.
        """
        self._data_parallel = data_parallel
        self._kept = _chosen(module)
        if not self._kept:
            raise ConfigError(
                "frozen_weights is 'nf4', but the model has no nn.Linear, beside lm_head, whose weight is frozen and "
                "its own; leave frozen_weights out, or train with `lora`.",
                key="model.frozen_weights",
            )

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """The names of the weights in the module."""
        return [kept.name for kept in self._kept.values()]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them in NF4, over all ranks."""
        return sum(num_bytes(whole_shape(k.weight).numel()) for k in self._kept.values())

    def has(self, tensor: Tensor) -> bool:
        """Return whether this is one of the weights, and not quantised yet."""
        return id(tensor) in self._kept and stored_weight(tensor) is None

    def cast_rest(self, device: torch.device) -> None:
        """Quantise all weights that are not quantised yet. A collective, like `cast_each`."""
        rest = [kept.weight for kept in self._kept.values() if self.has(kept.weight)]
        self.cast_each(((weight, lambda: None) for weight in rest), device)

    @torch.no_grad()
    def cast_each(
        self, fills: Iterable[tuple[Tensor, Callable[[], object]]], device: torch.device
    ) -> None:
        """Replace weights by their bytes on `device`, one after the other. A collective.

        Each rank gathers a weight that is sharded, quantises all of it, and keeps its part: so the bytes do not depend
        on the number of ranks. Ranks synchronise once for each weight that is sharded, and at the end.

        Args:
            fills: Each weight, sharded or not, and a function that fills it if it has no values yet.
            device: The device of the bytes.

        Raises:
            NonFiniteWeightError: A weight is not finite.
            OtherRankError: Another rank failed.
        """
        waiting: list[Callable[[], object]] = []
        for weight, fill in fills:
            kept = self._kept[id(weight)]
            waiting.append(fill)
            if self._data_parallel and can_shard(whole_shape(weight), self._data_parallel):
                self._on_all_ranks(partial(_run, waiting))
                waiting = [partial(self._hold, kept, self._gathered(kept, device))]
            else:
                waiting.append(partial(self._hold_whole, kept, device))
        if waiting:
            self._on_all_ranks(partial(_run, waiting))

    def _gathered(self, kept: _Kept, device: torch.device) -> Tensor:
        if kept.weight.device != device:
            kept.weight.data = kept.weight.data.to(device)
        return gather_full(kept.weight, self._data_parallel)

    def _hold_whole(self, kept: _Kept, device: torch.device) -> None:
        self._hold(kept, kept.weight.detach().to(device))

    def _hold(self, kept: _Kept, whole: Tensor) -> None:
        stored = quantize(whole, name=kept.name)
        if is_sharded(kept.weight):
            assert self._data_parallel is not None
            stored = take_rows(stored, own_rows(stored.shape, self._data_parallel))
        self._keep(kept, stored, num_bytes(whole.numel()))

    def stand_in(self) -> None:
        """Replace all weights by bytes without memory; for a plan, whose weights have no values."""
        for kept in self._kept.values():
            size = whole = num_bytes(whole_shape(kept.weight).numel())
            if is_sharded(kept.weight):
                assert self._data_parallel is not None
                size = own_rows(torch.Size([whole]), self._data_parallel).num_rows
            stored = torch.empty(size, dtype=torch.uint8)
            stored.untyped_storage().resize_(0)
            self._keep(kept, stored, whole)

    def _keep(self, kept: _Kept, stored: Tensor, whole_bytes: int) -> None:
        hold_nf4(
            kept.weight,
            stored,
            num_bytes=whole_bytes,
            name=kept.name,
            data_parallel=self._data_parallel,
        )

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        return together(act, self._data_parallel, error_elsewhere=OtherRankError)


def _run(waiting: list[Callable[[], object]]) -> None:
    """Run the functions in order, and release each afterwards, with the weight that it holds."""
    while waiting:
        waiting.pop(0)()


def _chosen(module: nn.Module) -> dict[int, _Kept]:
    kept: dict[int, _Kept] = {}
    for name, linear in module.named_modules():
        if type(linear) is nn.Linear and _can_be_kept(name, linear):
            weight = linear._parameters["weight"]
            assert weight is not None
            kept.setdefault(id(weight), _Kept(name=f"{name}.weight", weight=weight))
    for owner, name, parameter in _all_parameters(module):
        if type(owner) is not nn.Linear or name != "weight":
            kept.pop(id(parameter), None)  # an embedding, or a module of the user's, shares it
    return kept


def _can_be_kept(name: str, linear: nn.Linear) -> bool:
    weight = linear._parameters.get("weight")
    return (
        weight is not None  # computed, as by spectral_norm
        and not weight.requires_grad
        and (weight.dtype in DTYPES or stored_weight(weight) is not None)
        and weight.numel() > 0
        and name.rpartition(".")[2] != _SKIPPED
    )


def _all_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter
