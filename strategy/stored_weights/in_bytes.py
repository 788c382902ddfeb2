"""Keeps frozen weights of linears as bytes of a format alone, on each rank its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.quantized_parameter import hold_bytes
from thunder_memsave.sharding.rows import gather_full, own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded, stored_weight
from thunder_memsave.stored_weights.format import DTYPES, StoredFormat
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.walk import (
    FrozenWeights,
    Kept,
    Waiting,
    frozen_weights,
    run_all,
)

_SKIPPED = "lm_head"
"""The output layer stays as it is, as in transformers with bitsandbytes: its errors go straight into the logits."""


def refuse_other_storage(name: str, weight: Tensor, kept_in: StoredFormat) -> None:
    """Refuse a weight kept in a format whose bytes were cast.

    Raises:
        ConfigError: They were; the message says what to do instead.
    """
    if weight.dtype != torch.uint8:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name!r} holds bytes in {kept_in.title} (frozen_weights: {kept_in.name}), but was cast to {dtype}; leave "
            "out model.to(dtype) and the like after fabric.setup().",
            key="model.frozen_weights",
        )


def frozen_in_bytes(
    module: nn.Module, name: str | None, *, data_parallel: DataParallel | None
) -> FrozenInBytes | None:
    """Choose the frozen weights to keep in the format that `model.frozen_weights` names; None: it names none.

    Raises:
        ConfigError: It names one, and there are no such weights.
    """
    if name is None:
        return None
    return FrozenInBytes(module, format_named(name), data_parallel=data_parallel)


class FrozenInBytes(FrozenWeights):
    """The weights of one module to keep in a format: those of `nn.Linear` that are frozen and only linears have."""

    def __init__(
        self, module: nn.Module, kept_in: StoredFormat, *, data_parallel: DataParallel | None
    ) -> None:
        """Choose them.

        Raises:
            ConfigError: There are none.
        """
        super().__init__(frozen_weights(module, _can_be_kept), data_parallel)
        self._format = kept_in
        if not self._kept:
            raise ConfigError(
                f"frozen_weights is {kept_in.name!r}, but the model has no nn.Linear, beside lm_head, whose weight is "
                "frozen and its own; leave frozen_weights out, or train with `lora`.",
                key="model.frozen_weights",
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them in the format, over all ranks."""
        return sum(self._format.num_bytes(kept.shape) for kept in self._kept.values())

    @property
    def kept_in(self) -> StoredFormat:
        """The format."""
        return self._format

    def take(self, weight: Tensor, stored: Tensor) -> None:
        """Keep these bytes of a weight, which were not made here: the whole weight's, of which a shard takes its own.

        Args:
            weight: One of the weights, on the device, with any values or none.
            stored: uint8, in the shape that the format gives them, on the device.
        """
        kept = self._kept[id(weight)]
        if is_sharded(weight):
            assert self._data_parallel is not None
            stored = take_rows(stored, own_rows(stored.shape, self._data_parallel))
        self._keep(kept, stored, kept.shape)

    def _needs_other_ranks(self, kept: Kept) -> bool:
        return not self._format.is_by_rows and super()._needs_other_ranks(kept)

    def _cast(self, kept: Kept, device: torch.device) -> None:
        # Of a shard, a padding row has zeros, and its bytes are zeros too.
        values = as_rows(kept.weight).to(device)
        shape = kept.shape
        self._keep(kept, self._format.quantize(values, name=kept.name), shape)

    def _cast_with_others(
        self, kept: Kept, waiting: Waiting, device: torch.device, data_parallel: DataParallel
    ) -> Callable[[], None]:
        self._on_all_ranks(partial(run_all, waiting))
        if kept.weight.device != device:
            kept.weight.data = kept.weight.data.to(device)
        return partial(self._hold, kept, gather_full(kept.weight, data_parallel), data_parallel)

    def _hold(self, kept: Kept, whole: Tensor, data_parallel: DataParallel) -> None:
        stored = self._format.quantize(whole, name=kept.name)
        rows = own_rows(stored.shape, data_parallel)
        self._keep(kept, take_rows(stored, rows), whole.shape)

    def stand_in(self) -> None:
        """Replace all weights by bytes without memory; for a plan, whose weights have no values."""
        for kept in self._kept.values():
            shape = kept.shape
            size = self._format.stored_shape(shape)
            if is_sharded(kept.weight):
                assert self._data_parallel is not None
                size = torch.Size([own_rows(size, self._data_parallel).num_rows, *size[1:]])
            stored = torch.empty(size, dtype=torch.uint8)
            stored.untyped_storage().resize_(0)
            self._keep(kept, stored, shape)

    def _keep(self, kept: Kept, stored: Tensor, shape: torch.Size) -> None:
        hold_bytes(
            kept.weight,
            stored,
            kept_in=self._format.name,
            whole=self._format.stored_shape(shape),
            name=kept.name,
            data_parallel=self._data_parallel,
        )


def _can_be_kept(name: str, linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        (weight.dtype in DTYPES or stored_weight(weight) is not None)
        and weight.numel() > 0
        and name.rpartition(".")[2] != _SKIPPED
    )
