"""Replays TransformerEngine's scaling state of forward when eager code is recomputed, without updating it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HOME = "transformer_engine.pytorch.quantization"


@dataclass(frozen=True, slots=True)
class _Use:
    """One use of delayed scaling by a module of TransformerEngine."""

    state: Any
    scale: Tensor
    """Copy of the scale at that time."""


class ScalingRecord:
    """The scales with which TransformerEngine's modules quantised in one forward.

    Its own record (`te.checkpoint`) is a queue per module, which gives a recompute the scales of another forward if
    backwards run in another order, and is empty for a second backward. This one belongs to a forward.
    """

    def __init__(self) -> None:
        self._autocast: Any = None
        self._uses: list[_Use] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the scales of the forward inside."""
        manager = _global_state()
        if manager is None:
            yield
            return
        self._autocast = manager.get_autocast_state()

        def note(fp8_meta: Any) -> None:
            state = _delayed_scaling(fp8_meta)
            if state is not None:
                self._uses.append(_Use(state, state.scale.clone()))

        with _noticing_uses(manager, note):
            yield

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Use the recorded scales for the recompute inside, and restore the state afterwards."""
        manager = _global_state()
        if manager is None or self._autocast is None:
            yield
            return
        uses = iter(self._uses)
        before: list[tuple[Any, Tensor, Tensor]] = []

        @torch.no_grad()
        def rewind(fp8_meta: Any) -> None:
            state = _delayed_scaling(fp8_meta)
            if state is None:
                return
            before.append((state, state.scale.clone(), state.amax_history.clone()))
            state.scale.copy_(_same_use(next(uses, None), state).scale)

        with ExitStack() as stack:
            stack.callback(_restore, before)
            stack.callback(manager.set_autocast_state, manager.get_autocast_state())
            manager.set_autocast_state(self._autocast)
            stack.enter_context(_without_updates(manager))
            stack.enter_context(_noticing_uses(manager, rewind))
            yield


def _global_state() -> Any:
    """Return TransformerEngine's global state; None if it is not imported."""
    return getattr(sys.modules.get(_HOME), "FP8GlobalStateManager", None)


def _delayed_scaling(fp8_meta: Any) -> Any:
    """Return the forward state of delayed scaling; None if the recipe has none."""
    state = fp8_meta.get("scaling_fwd")
    return state if hasattr(state, "amax_history") and hasattr(state, "scale") else None


def _same_use(use: _Use | None, state: Any) -> _Use:
    if use is None or use.state is not state:
        raise RuntimeError(
            "a function under thunder_memsave.checkpoint ran other fp8 modules, or the same in another order, when it "
            "was recomputed. Make it do the same each time, or leave checkpoint out."
        )
    return use


@torch.no_grad()
def _restore(before: list[tuple[Any, Tensor, Tensor]]) -> None:
    for state, scale, amax_history in reversed(before):
        state.scale.copy_(scale)
        state.amax_history.copy_(amax_history)


@contextmanager
def _noticing_uses(manager: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` when a module registers its state, which it does in each forward before it quantises."""

    def add(register: Callable[[Any], None], fp8_meta: Any) -> None:
        register(fp8_meta)
        note(fp8_meta)

    with _wrapped(manager, "add_fp8_tensors_to_global_buffer", add):
        yield


@contextmanager
def _without_updates(manager: Any) -> Iterator[None]:
    """Disable forward's scale updates inside: an autocast that ends there would count this forward twice."""

    def update(really: Callable[..., None], forward: bool = True) -> None:
        if not forward:
            really(forward=False)

    with _wrapped(manager, "reduce_and_update_fp8_tensors", update):
        yield


@contextmanager
def _wrapped(owner: Any, name: str, wrapper: Callable[..., None]) -> Iterator[None]:
    method, bound = vars(owner)[name], getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> None:
        wrapper(bound, *args, **kwargs)

    setattr(owner, name, staticmethod(call))
    try:
        yield
    finally:
        setattr(owner, name, method)
