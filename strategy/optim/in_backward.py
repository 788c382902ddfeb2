"""Updates parameters one by one while backward runs, with the bits of `optimizer.step()`.

In: optimizers of PyTorch, or of ours, whose update of a parameter reads nothing of the others. `optimizer.step()` then
updates what is left, such as parameters whose gradients autograd had to get. Norms of the gradients are kept, as those
are gone at the end of backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.optim.muon import MuonByRows
from thunder_memsave.optim.one_by_one import numbers_kept, only, refuse_updates_at_once
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.gradients import norm_of_kept, norm_of_one
from thunder_memsave.sharding.sharded_parameter import as_rows

KEY = "memory.optimizer_in_backward"


@dataclass(slots=True)
class UpdatesInBackward:
    """The optimizers of one strategy that update in backward."""

    _owners: dict[int, Optimizer] = field(default_factory=dict)
    """The optimizer of each parameter, by its `id`; optimizers keep their parameters alive."""
    _expected: Counter[int] = field(default_factory=Counter)
    """Forwards of this step whose backward has a gradient of the parameter."""
    _updated: set[int] = field(default_factory=set)
    """Parameters that were updated in this step."""
    _norms: dict[int, Tensor] = field(default_factory=dict)
    """A place for the norm of each parameter's gradient in one tensor, zero while it has none."""

    @property
    def is_on(self) -> bool:
        """Whether an optimizer updates in backward."""
        return bool(self._owners)

    def add(self, optimizer: Optimizer) -> None:
        """Let an optimizer update in backward from now on.

        Raises:
            ConfigError: it is not known that it updates each parameter by itself.
        """
        refuse_updates_at_once(
            optimizer,
            does="updates each parameter as soon as its gradient is there",
            key=KEY,
            instead="false",
        )
        if isinstance(optimizer, MuonByRows):
            raise ConfigError(
                f"{KEY} is true, but the update of Muon sends rows of sharded weights between the ranks, which waits "
                "for the end of backward; use another optimizer, strategy.sharding: none, or leave that key out.",
                key=KEY,
            )
        for p in _parameters([optimizer]):
            self._owners[id(p)] = optimizer
        self._norms.clear()

    def owner(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer of a parameter."""
        return self._owners[id(parameter)]

    def expect(self, parameters: Iterable[Tensor]) -> None:
        """Note that a forward ran whose backward has a gradient of each of these parameters."""
        self._expected.update(id(p) for p in parameters)

    def takes(self, parameter: Tensor) -> bool:
        """Return whether the gradient that comes now is the parameter's only one of this step.

        Raises:
            RuntimeError: it has been updated in this step already.
        """
        if id(parameter) in self._updated:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} got a second gradient after its update in this step: "
                f"with {KEY} a step is one forward and one backward. Call optimizer.step() after each, or leave that "
                "key out."
            )
        return id(parameter) in self._owners and self._expected[id(parameter)] == 1

    def update(self, parameter: Tensor, gradient: Tensor) -> None:
        """Update a parameter by its gradient, which nothing of this holds afterwards."""
        # Parameters that are shards are a class of their own, which a compiled backward turns off.
        with torch._C._EnableTorchFunction(), torch.no_grad():
            total = parameter.grad
            if total is None:
                parameter.grad = _as_autograd(gradient, parameter)
            else:
                as_rows(total).add_(as_rows(gradient))
            del total, gradient
            try:
                self._note_norm(parameter)
                update_alone(self.owner(parameter), parameter)
            finally:
                parameter.grad = None
        self._updated.add(id(parameter))

    def norm(self, data_parallel: DataParallel | None) -> Tensor:
        """Return the norm of all gradients of this step. A collective if parameters are sharded."""
        parameters = list(_parameters(self._optimizers))
        for p in parameters:
            if p.grad is not None:
                self._note_norm(p)
        norms = self._places(parameters)
        return norm_of_kept(parameters, [norms[id(p)] for p in parameters], data_parallel)

    def unclipped_norm(
        self, max_norm: float, *, norm_type: float, data_parallel: DataParallel | None
    ) -> Tensor:
        """Return the norm of order 2 of all gradients of this step, which are not to be clipped. A collective.

        Raises:
            RuntimeError: they are to be clipped, or another norm is asked for.
        """
        if max_norm != math.inf or norm_type != 2:
            self.refuse_clipping()
        return self.norm(data_parallel)

    def refuse_clipping(self) -> None:
        """Refuse to clip gradients that were used already.

        Raises:
            RuntimeError: an optimizer updates in backward.
        """
        if self.is_on:
            raise RuntimeError(
                f"gradients cannot be clipped with {KEY}: each was used and freed before the next was there. Leave "
                "clipping out (max_norm=math.inf returns their norm of order 2), or leave that key out."
            )

    def end_step(self) -> None:
        """End a step: gradients that come from now on are those of the next one."""
        self._expected.clear()
        self._updated.clear()
        if self._norms:
            next(iter(self._norms.values()))._base.zero_()  # type: ignore[union-attr]

    @property
    def _optimizers(self) -> Sequence[Optimizer]:
        return list({id(each): each for each in self._owners.values()}.values())

    def _note_norm(self, parameter: Tensor) -> None:
        place = self._places(list(_parameters(self._optimizers)))[id(parameter)]
        norm_of_one(cast(Tensor, parameter.grad), place)

    def _places(self, parameters: Sequence[nn.Parameter]) -> dict[int, Tensor]:
        if not self._norms:
            is_double = any(p.dtype in (torch.float64, torch.complex128) for p in parameters)
            dtype = torch.float64 if is_double else torch.float32
            whole = torch.zeros(len(parameters), dtype=dtype, device=parameters[0].device)
            # Not `whole[i]`: PyTorch looks for the device, which a plan may do without.
            self._norms = {id(p): whole.select(0, i) for i, p in enumerate(parameters)}
        return self._norms


def update_alone(optimizer: Optimizer, parameter: Tensor) -> None:
    """Take the optimizer's step with one parameter, without the hooks of whole steps."""
    kind = type(optimizer)
    # The class hooks its step when its first instance is made.
    update: Any = getattr(kind.step, "__wrapped__", kind.step)
    with numbers_kept(optimizer), only(optimizer, [parameter]):
        update(optimizer)


def _parameters(optimizers: Iterable[Optimizer]) -> Iterable[nn.Parameter]:
    return (p for each in optimizers for group in each.param_groups for p in group["params"])


def _as_autograd(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient as autograd stores it: with the parameter's strides, which kernels of optimizers count on."""
    rows = as_rows(parameter)
    pairs = zip(rows.shape, gradient.stride(), rows.stride(), strict=True)
    if not rows.numel() or all(own == wanted or n == 1 for n, own, wanted in pairs):
        return gradient.detach()
    return torch.empty_like(rows).copy_(gradient)
