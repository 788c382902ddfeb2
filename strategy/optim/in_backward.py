"""Updates parameters one by one while backward runs, with the bits of `optimizer.step()`.

In: optimizers of PyTorch, or of ours, whose update of a parameter reads nothing of the others. `optimizer.step()` then
updates what is left, such as parameters whose gradients autograd had to get. Norms of the gradients are kept, as those
are gone at the end of backward.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_pre_hooks

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.ops.added_gradients import lies_alike
from thunder_memsave.optim.muon import MuonByRows
from thunder_memsave.optim.on_host import (
    Copy,
    StatesOnHost,
    begin_in,
    begin_out,
    drop,
    end,
    move_out,
)
from thunder_memsave.optim.one_by_one import numbers_kept, only, refuse_updates_at_once
from thunder_memsave.settings.problems import ConfigError
from thunder_memsave.sharding.gradients import norm_dtype, norm_of_kept, norm_of_one
from thunder_memsave.sharding.sharded_parameter import as_rows

KEY = "memory.optimizer_in_backward"

_SECOND = (
    "a parameter of shape {shape} got a second gradient after its update in this step, so its weight has changed: with "
    f"{KEY} a step is one forward, one backward and the step() of the optimizer that fabric.setup returned, of each "
    "optimizer. Call them in turn, or leave that key out."
)

_log = logging.getLogger(__name__)


class Expected:
    """A call of the module whose backward has gradients of some parameters; its node of autograd's graph holds it."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.of = frozenset(id(p) for p in parameters)


class UpdatesInBackward:
    """The optimizers of one strategy that update in backward. It keeps neither them nor their parameters alive."""

    def __init__(self) -> None:
        self._owners: dict[int, weakref.ref[Optimizer]] = {}
        """The optimizer of each parameter, by its `id`, which is the parameter's as long as the optimizer lives."""
        self._expected: weakref.WeakSet[Expected] = weakref.WeakSet()
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Step] = weakref.WeakKeyDictionary()
        self._is_taken = False

    @property
    def is_on(self) -> bool:
        """Whether an optimizer updates in backward."""
        return self._is_taken and self.may_be_taken

    @property
    def may_be_taken(self) -> bool:
        """Whether an optimizer does so, or would if it were asked to (`take`)."""
        return any(owner() is not None for owner in self._owners.values())

    def take(self) -> None:
        """Let the optimizers that were offered update in backward from now on."""
        self._is_taken = True

    def add(self, optimizer: Optimizer) -> None:
        """Let an optimizer update in backward from now on.

        Raises:
            ConfigError: as for `offer`.
        """
        self.offer(optimizer)
        self.take()

    def offer(self, optimizer: Optimizer) -> None:
        """Let an optimizer update in backward once it is asked to.

        Raises:
            ConfigError: it is not known that it updates each parameter by itself, or another one has a parameter of
                its.
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
        parameters = _parameters(optimizer)
        if any(self._owner(p) not in (None, optimizer) for p in parameters):
            raise ConfigError(
                f"{KEY} is true, but two optimizers have the same parameter, so it is not known which one updates it; "
                "give each its own, delete the first one, or leave that key out.",
                key=KEY,
            )
        self._owners.update((id(p), weakref.ref(optimizer)) for p in parameters)
        self._steps[optimizer] = _Step()

    def owns(self, parameter: Tensor) -> bool:
        """Return whether an optimizer updates this parameter, and no hook has to run before its step."""
        owner = self._owner(parameter)
        return owner is not None and not _has_hooks_before(owner)

    def owner(self, parameter: Tensor) -> Optimizer:
        """Return the optimizer of a parameter."""
        found = self._owner(parameter)
        assert found is not None, "it was asked whether there is one"
        return found

    def _owner(self, parameter: Tensor) -> Optimizer | None:
        owner = self._owners.get(id(parameter))
        return None if owner is None else owner()

    def expect(self, parameters: Iterable[Tensor]) -> Expected:
        """Note a forward whose backward has a gradient of each of these parameters, as long as the result lives."""
        expected = Expected(parameters)
        self._expected.add(expected)
        return expected

    def takes(self, parameter: Tensor) -> bool:
        """Return whether the gradient that comes now is the parameter's only one of this step.

        Raises:
            RuntimeError: it has been updated in this step already.
        """
        if (owner := self._owner(parameter)) is None:
            return False
        if id(parameter) in self._steps[owner].updated:
            raise RuntimeError(_SECOND.format(shape=tuple(parameter.shape)))
        if _has_hooks_before(owner):
            _warn_once(
                f"a hook runs before the optimizer's step, and may change gradients, so {KEY} has no effect"
            )
            return False
        num = sum(id(parameter) in each.of for each in self._expected)
        return num == 1

    def update(self, parameter: Tensor, gradient: Tensor, *, is_shared: bool = False) -> None:
        """Update a parameter by its gradient, which nothing of this holds afterwards.

        Args:
            parameter: One of an optimizer's.
            gradient: All of it, in this step.
            is_shared: Whether its memory is not to be written to.
        """
        owner = self.owner(parameter)
        step = self._steps[owner]
        # Parameters that are shards are a class of their own, which a compiled backward turns off.
        with torch._C._EnableTorchFunction(), torch.no_grad():
            step.note_settings(owner)
            total = parameter.grad
            if total is None:
                parameter.grad = _as_autograd(gradient, parameter, is_shared=is_shared)
            else:
                as_rows(total).add_(as_rows(gradient))
            del total, gradient
            try:
                norm_of_one(cast(Tensor, parameter.grad), step.place(owner, parameter))
                fetched = step.fetched.get(id(parameter))
                if fetched is not None and isinstance(owner, StatesOnHost):
                    end(fetched)
                    update_alone(owner, parameter, update=type(owner)._updates)
                else:
                    update_alone(owner, parameter)
            finally:
                parameter.grad = None
        step.updated.add(id(parameter))

    def fetch_states(self, parameter: Tensor) -> None:
        """Begin to copy the states of a parameter to the device, if they are on the host."""
        owner = self._owner(parameter)
        if isinstance(owner, StatesOnHost):
            begin_in(owner, [parameter], self._steps[owner].fetched.setdefault(id(parameter), []))

    def store_states(self, parameter: Tensor) -> None:
        """Begin to copy them back to the host, or let them go where the parameter was not updated."""
        owner = self._owner(parameter)
        if isinstance(owner, StatesOnHost):
            step = self._steps[owner]
            drop(step.fetched.pop(id(parameter), []))
            begin_out(owner, [parameter], step.stored.setdefault(id(parameter), []))

    def wait_states(self, parameter: Tensor) -> None:
        """Wait for that, and free their memory on the device."""
        owner = self._owner(parameter)
        if isinstance(owner, StatesOnHost):
            end(self._steps[owner].stored.pop(id(parameter), []))

    def end_copies(self) -> None:
        """Wait for all copies of states that have begun."""
        for owner, step in self._steps.items():
            if step.fetched:  # backward failed, maybe in the middle of an update
                for fetched in step.fetched.values():
                    drop(fetched)
                step.fetched.clear()
                assert isinstance(owner, StatesOnHost), "others fetch none"
                move_out(owner)
            while step.stored:
                end(step.stored.popitem()[1])

    def norm(self, optimizer: Optimizer, data_parallel: DataParallel | None) -> Tensor:
        """Return the norm of the gradients of an optimizer in this step. A collective if parameters are sharded."""
        parameters, places = _parameters(optimizer), self._steps[optimizer].places(optimizer)
        for p in parameters:
            if p.grad is not None:
                norm_of_one(p.grad, places[id(p)])
        return norm_of_kept(parameters, [places[id(p)] for p in parameters], data_parallel)

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

    def check_step(self, optimizer: Optimizer) -> None:
        """Check that a step's updates in backward are those of the step that is asked for now.

        Raises:
            RuntimeError: a parameter got another gradient after its update, or a setting changed since.
        """
        if (step := self._steps.get(optimizer)) is None or not step.updated:
            return
        if any(p.grad is not None for p in _parameters(optimizer) if id(p) in step.updated):
            raise RuntimeError(
                f"a parameter has a gradient that came after its update: with {KEY} all of it comes from one call of "
                "the model. Compute such terms of the loss inside of the model, or leave that key out."
            )
        if step.settings != _settings(optimizer):
            raise RuntimeError(
                f"a setting of the optimizer, such as its learning rate, changed between backward and "
                f"optimizer.step(): with {KEY} the weights were updated in backward, with the old one. Set it before "
                "backward, or leave that key out."
            )

    def end_step(self, optimizer: Optimizer) -> None:
        """End a step of an optimizer: gradients that come from now on are those of its next one."""
        if (step := self._steps.get(optimizer)) is None:
            return
        own = {id(p) for p in _parameters(optimizer)}
        for each in list(self._expected):
            each.of -= own
        step.end()


class _Step:
    """What an optimizer has done in the step that is on."""

    def __init__(self) -> None:
        self.updated: set[int] = set()
        """Parameters that were updated."""
        self.settings: Any = None
        """Those of the optimizer at the first update."""
        self.fetched: dict[int, list[Copy]] = {}
        """Copies of states to the device that have begun, by parameter; empty once it is updated."""
        self.stored: dict[int, list[Copy]] = {}
        """Those back to the host."""
        self._norms: dict[int, Tensor] = {}
        """A place for the norm of each parameter's gradient in one tensor, zero while it has none."""

    def note_settings(self, optimizer: Optimizer) -> None:
        """Remember the settings of the first update."""
        if not self.updated:
            self.settings = _settings(optimizer)

    def place(self, optimizer: Optimizer, parameter: Tensor) -> Tensor:
        """Return the place of one parameter's norm."""
        known = self._norms.get(id(parameter))
        return self.places(optimizer)[id(parameter)] if known is None else known

    def places(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Return the place of each parameter's norm."""
        parameters = _parameters(optimizer)
        if self._norms.keys() != {id(p) for p in parameters}:  # a group was added
            before = self._norms
            dtype, device = norm_dtype(parameters), parameters[0].device
            whole = torch.zeros(len(parameters), dtype=dtype, device=device)
            # Not `whole[i]`: PyTorch looks for the device, which a plan may do without.
            self._norms = {id(p): whole.select(0, i) for i, p in enumerate(parameters)}
            for number in before.keys() & self._norms.keys():
                self._norms[number].copy_(before[number])
        return self._norms

    def end(self) -> None:
        """Begin anew."""
        self.updated.clear()
        self.settings = None
        if self._norms:
            next(iter(self._norms.values()))._base.zero_()  # type: ignore[union-attr]


def _has_hooks_before(optimizer: Optimizer) -> bool:
    """Return whether a hook runs before the optimizer's step."""
    own = optimizer._optimizer_step_pre_hooks
    return bool(own or _global_optimizer_pre_hooks)


@cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def _settings(optimizer: Optimizer) -> list[Any]:
    """Return the settings of all groups; of a tensor which one it is and its version, so that nothing waits for it."""
    return [
        (name, (id(value), value._version) if isinstance(value, Tensor) else value)
        for group in optimizer.param_groups
        for name, value in group.items()
        if name != "params"
    ]


def update_alone(optimizer: Optimizer, parameter: Tensor, update: Any = None) -> None:
    """Take the optimizer's step with one parameter, without the hooks of whole steps.

    Args:
        optimizer: Of any class.
        parameter: One of its.
        update: The step; None: that of its class.
    """
    kind = type(optimizer)
    # The class hooks its step when its first instance is made.
    update = update or getattr(kind.step, "__wrapped__", kind.step)
    with numbers_kept(optimizer), only(optimizer, [parameter]):
        update(optimizer)


def _parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _as_autograd(gradient: Tensor, parameter: Tensor, *, is_shared: bool) -> Tensor:
    """Return the gradient as autograd stores it: with the parameter's strides, which kernels of optimizers count on."""
    rows = as_rows(parameter)
    is_alike = not rows.numel() or lies_alike(rows.shape, gradient.stride(), rows.stride())
    if is_alike and not is_shared:
        return gradient.detach()
    # As the parameter: one in a bucket of ranks is not dense.
    return torch.empty_strided(
        rows.shape, rows.stride(), dtype=gradient.dtype, device=gradient.device
    ).copy_(gradient)
