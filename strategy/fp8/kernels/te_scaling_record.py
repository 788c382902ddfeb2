"""TransformerEngine's scaling for eager code that is computed again: what it was in forward, and not updated."""

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
    """A module of TransformerEngine is about to quantize with delayed scaling."""

    state: Any
    scale: Tensor
    """A copy."""


class ScalingRecord:
    """What TransformerEngine's modules quantized with in one forward.

    Its own record of that (`te.checkpoint`) is a queue per module, which gives a recompute the scales of another
    forward where backwards run in another order, and is empty for a second backward. This one belongs to a forward.
    """

    def __init__(self) -> None:
        self._autocast: Any = None
        self._uses: list[_Use] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Around forward."""
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
        """Around the same computation again: the state is afterwards what it was before."""
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
    """TransformerEngine's, or None where nobody has imported it."""
    return getattr(sys.modules.get(_HOME), "FP8GlobalStateManager", None)


def _delayed_scaling(fp8_meta: Any) -> Any:
    """The state of forward, None where the recipe has none."""
    state = fp8_meta.get("scaling_fwd")
    return state if hasattr(state, "amax_history") and hasattr(state, "scale") else None


def _same_use(use: _Use | None, state: Any) -> _Use:
    if use is None or use.state is not state:
        raise RuntimeError(
            "a function that thunder_memsave.checkpoint computes again ran other fp8 modules, or the same in another "
            "order, than in forward. Make it do the same each time, or leave checkpoint out."
        )
    return use


@torch.no_grad()
def _restore(before: list[tuple[Any, Tensor, Tensor]]) -> None:
    for state, scale, amax_history in reversed(before):
        state.scale.copy_(scale)
        state.amax_history.copy_(amax_history)


@contextmanager
def _noticing_uses(manager: Any, note: Callable[[Any], None]) -> Iterator[None]:
    """Modules say here, in each forward and before they quantize, that they have a state of delayed scaling."""

    def add(register: Callable[[Any], None], fp8_meta: Any) -> None:
        register(fp8_meta)
        note(fp8_meta)

    with _wrapped(manager, "add_fp8_tensors_to_global_buffer", add):
        yield


@contextmanager
def _without_updates(manager: Any) -> Iterator[None]:
    """An autocast that ends inside updates the scales of all forwards; this one was counted already."""

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
