"""Keeps frozen weights of linears as bytes of a format alone, on each rank its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from thunder_memsave.config import ConfigError
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.host_copies.weights import keep_on_host, place_of
from thunder_memsave.sharding.quantized_parameter import hold_bytes
from thunder_memsave.sharding.rows import RowRange, gather_full, own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded
from thunder_memsave.stored_weights.choice import (
    format_of_linear,
    format_of_stack,
    is_candidate,
)
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.walk import (
    FrozenWeights,
    Kept,
    Waiting,
    frozen_weights,
    run_all,
)


def refuse_other_storage(name: str, weight: Tensor, kept_in: StoredFormat) -> None:
    """Refuse a weight kept in a format whose bytes were cast.

    Raises:
        ConfigError: They were; the message says what to do instead.
    """
    if weight.dtype != torch.uint8:
        dtype = str(weight.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{name!r} holds bytes in {kept_in.title} (frozen_weights: {kept_in.setting}), but was cast to {dtype}; "
            "leave out model.to(dtype) and the like after fabric.setup().",
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
    """The weights of one module to keep in a format: those that are frozen and only chosen modules have.

    These are `nn.Linear`, and in a format that has stacks of matrices, modules with such parameters.
    """

    def __init__(
        self, module: nn.Module, kept_in: StoredFormat, *, data_parallel: DataParallel | None
    ) -> None:
        """Choose them.

        Raises:
            ConfigError: There are none.
        """
        self._format = kept_in
        self._formats: dict[int, StoredFormat] = {}
        self._others: list[str] = []
        chosen = frozen_weights(module, self._is_chosen, self._is_stack)
        super().__init__(chosen, data_parallel)
        if not self._kept:
            of_blocks = f" of whole blocks of {kept_in.block} inputs" if kept_in.block > 1 else ""
            raise ConfigError(
                f"frozen_weights is {kept_in.setting!r}, but the model has no nn.Linear{of_blocks}, beside lm_head, "
                "whose weight is frozen and its own; leave frozen_weights out, or train with `lora`.",
                key="model.frozen_weights",
            )

    def _is_chosen(self, name: str, linear: nn.Linear) -> bool:
        if not is_candidate(name, linear):
            return False
        found = format_of_linear(self._format, linear)
        if found is None:
            self._others.append(name)
        return self._note(linear.weight, found)

    def _is_stack(self, owner: nn.Module, parameter: nn.Parameter) -> bool:
        return self._note(parameter, format_of_stack(self._format, owner, parameter))

    def _note(self, weight: Tensor, found: StoredFormat | None) -> bool:
        if found is not None:
            self._formats[id(weight)] = found
        return found is not None

    @property
    def has_stacks(self) -> bool:
        """Whether any of the weights is a stack of matrices."""
        return any(not kept.linears for kept in self._kept.values())

    @property
    def others(self) -> list[str]:
        """The names of the linears whose weights stay as they are, because their inputs are not whole blocks."""
        return self._others

    def format_of(self, name: str) -> StoredFormat:
        """Return the format of one of the weights, by its name."""
        return next(self._of(kept) for kept in self._kept.values() if kept.name == name)

    def _of(self, kept: Kept) -> StoredFormat:
        return self._formats[id(kept.weight)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them in the format, over all ranks."""
        return sum(self._of(kept).num_bytes(kept.shape) for kept in self._kept.values())

    @property
    def kept_in(self) -> StoredFormat:
        """The format."""
        return self._format

    def take(
        self, weight: Tensor, kept_in: StoredFormat, read: Callable[[slice | None], Tensor]
    ) -> None:
        """Keep bytes of a weight that were not made here: all, or of a shard its own.

        Args:
            weight: One of the weights, on the device, with any values or none.
            kept_in: Their format, another than ours only in where blocks lie.
            read: Returns some rows of the bytes, if they follow rows, or all: uint8, on the device.
        """
        kept = self._kept[id(weight)]
        self._formats[id(weight)] = kept_in
        if not is_sharded(weight):
            self._keep(kept, read(None), kept.shape)
            return
        assert self._data_parallel is not None
        rows = own_rows(kept_in.stored_shape(kept.shape), self._data_parallel)
        if kept_in.is_by_rows:
            some = read(slice(rows.start, rows.stop))
            own = RowRange(start=0, stop=rows.num_real_rows, num_rows=rows.num_rows)
            self._keep(kept, take_rows(some, own), kept.shape)
        else:
            self._keep(kept, take_rows(read(None), rows), kept.shape)

    def _needs_other_ranks(self, kept: Kept) -> bool:
        return not self._of(kept).is_by_rows and super()._needs_other_ranks(kept)

    def _cast(self, kept: Kept, device: torch.device) -> None:
        # Of a shard, a padding row has zeros, and its bytes are zeros too.
        values = as_rows(kept.weight).to(device)
        shape = kept.shape
        self._keep(kept, self._of(kept).quantize(values, name=kept.name), shape)

    def _cast_with_others(
        self, kept: Kept, waiting: Waiting, device: torch.device, data_parallel: DataParallel
    ) -> Callable[[], None]:
        self._on_all_ranks(partial(run_all, waiting))
        if kept.weight.device != device:
            kept.weight.data = kept.weight.data.to(device)
        return partial(self._hold, kept, gather_full(kept.weight, data_parallel), data_parallel)

    def _hold(self, kept: Kept, whole: Tensor, data_parallel: DataParallel) -> None:
        stored = self._of(kept).quantize(whole, name=kept.name)
        rows = own_rows(stored.shape, data_parallel)
        self._keep(kept, take_rows(stored, rows), whole.shape)

    def stand_in(self) -> None:
        """Replace all weights by bytes without memory; for a plan, whose weights have no values."""
        for kept in self._kept.values():
            shape = kept.shape
            size = self._of(kept).stored_shape(shape)
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
            kept_in=self._of(kept).name,
            whole=self._of(kept).stored_shape(shape),
            name=kept.name,
            data_parallel=self._data_parallel,
        )
        if (place := place_of(kept.weight)) is not None:
            keep_on_host(kept.weight, place)
