"""Chooses the frozen weights of a module to store in fewer bytes, and replaces one after the other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from thunder_memsave.distributed.agreement import OtherRankError, together
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.sharding.rows import can_shard, whole_shape
from thunder_memsave.sharding.sharded_parameter import stored_weight

T = TypeVar("T")
Waiting = list[Callable[[], object]]
"""What a rank does before it next synchronises with the others, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One weight to store in fewer bytes."""

    name: str
    weight: nn.Parameter
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)
    """The modules that share the weight, each with its name there."""

    @property
    def linears(self) -> list[nn.Linear]:
        """The linears among them."""
        return [owner for owner, _ in self.owners if isinstance(owner, nn.Linear)]

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole weight, stored already or not."""
        stored = stored_weight(self.weight)
        return whole_shape(self.weight) if stored is None else stored.shape


IsStack = Callable[[nn.Module, nn.Parameter], bool]


def frozen_weights(
    module: nn.Module,
    is_chosen: Callable[[str, nn.Linear], bool],
    is_stack: IsStack = lambda owner, parameter: False,
) -> dict[int, Kept]:
    """Return the frozen weights that only chosen modules have, by the ids of the parameters.

    Args:
        module: The model.
        is_chosen: Takes the name of a linear, and the linear.
        is_stack: Takes any other module, and a parameter of its own: whether that is chosen, as a stack of matrices.
    """
    kept: dict[int, Kept] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or parameter.requires_grad:
                continue
            if type(owner) is nn.Linear:
                chosen = name == "weight" and is_chosen(prefix, owner)
            else:
                chosen = is_stack(owner, parameter)
            if chosen:
                full_name = f"{prefix}.{name}" if prefix else name
                found = kept.setdefault(id(parameter), Kept(name=full_name, weight=parameter))
                found.owners.append((owner, name))
    for owner, name, parameter in _all_parameters(module):
        owners = kept[id(parameter)].owners if id(parameter) in kept else []
        if all(each is not owner or its != name for each, its in owners):
            # An embedding, a linear that is not chosen, or a module of the user's shares it.
            kept.pop(id(parameter), None)
    return kept


class FrozenWeights(ABC):
    """The weights of one module to store in fewer bytes; subclasses say how."""

    def __init__(self, kept: dict[int, Kept], data_parallel: DataParallel | None) -> None:
        self._kept, self._data_parallel = kept, data_parallel

    def __len__(self) -> int:
        """Return the number of weights."""
        return len(self._kept)

    @property
    def names(self) -> list[str]:
        """The names of the weights in the module."""
        return [kept.name for kept in self._kept.values()]

    def has(self, tensor: Tensor) -> bool:
        """Return whether this is one of the weights, and not stored in fewer bytes yet."""
        return id(tensor) in self._kept and stored_weight(tensor) is None

    def cast_rest(self, device: torch.device) -> None:
        """Replace all weights that are not replaced yet. A collective, like `cast_each`."""
        rest = [kept.weight for kept in self._kept.values() if self.has(kept.weight)]
        self.cast_each(((weight, lambda: None) for weight in rest), device)

    @torch.no_grad()
    def cast_each(
        self, fills: Iterable[tuple[Tensor, Callable[[], object]]], device: torch.device
    ) -> None:
        """Replace weights on `device`, one after the other. A collective.

        Bytes and scales are those of the whole weight, whatever the number of ranks. Ranks synchronise once for each
        weight of which a rank needs more than its own rows, and at the end.

        Args:
            fills: Each weight, sharded or not, and a function that fills it if it has no values yet.
            device: The device of the bytes.

        Raises:
            NonFiniteWeightError: A weight is not finite, and the format has no numbers for that.
            OtherRankError: Another rank failed.
        """
        waiting: Waiting = []
        for weight, fill in fills:
            kept = self._kept[id(weight)]
            waiting.append(fill)
            if self._data_parallel and self._needs_other_ranks(kept):
                waiting = [self._cast_with_others(kept, waiting, device, self._data_parallel)]
            else:
                waiting.append(partial(self._cast, kept, device))
        if waiting:
            self._on_all_ranks(partial(run_all, waiting))

    @abstractmethod
    def stand_in(self) -> None:
        """Replace all weights by bytes without memory; for a plan, whose weights have no values."""

    def _needs_other_ranks(self, kept: Kept) -> bool:
        return can_shard(whole_shape(kept.weight), self._data_parallel)

    @abstractmethod
    def _cast(self, kept: Kept, device: torch.device) -> None:
        """Replace a weight from what this rank has of it."""

    @abstractmethod
    def _cast_with_others(
        self, kept: Kept, waiting: Waiting, device: torch.device, data_parallel: DataParallel
    ) -> Callable[[], None]:
        """Do what waits, with all ranks; communicate; return the rest, to run at the next synchronisation."""

    def _on_all_ranks(self, act: Callable[[], T]) -> T:
        return together(act, self._data_parallel, error_elsewhere=OtherRankError)


def run_all(waiting: Waiting) -> None:
    """Run the functions in order, and release each afterwards, with the weight that it holds."""
    while waiting:
        waiting.pop(0)()


def _all_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                yield owner, name, parameter
