"""Collects the state of all callbacks into one entry of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StatefulCallback(Protocol):
    """A callback with state, under Lightning's names."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values or tensors, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore that state; called before `on_train_start`."""


class CallbackStates:
    """Add it, as `callbacks`, to the state passed to `fabric.save` and `fabric.load`.

    States are named by the callback's class and its number among those of its class. A callback that a
    checkpoint lacks starts anew, and the state of one that the run no longer has is dropped, so callbacks can be
    added and removed between resumes.

    Args:
        callbacks: All callbacks of the run; those without state are left out.
    """

    def __init__(self, callbacks: Iterable[object]) -> None:
        self._stateful = dict(_named(callbacks))

    def state_dict(self) -> dict[str, Any]:
        """Collect the states."""
        return {name: callback.state_dict() for name, callback in self._stateful.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states."""
        for name, callback in self._stateful.items():
            if name in state_dict:
                callback.load_state_dict(state_dict[name])


def _named(callbacks: Iterable[object]) -> Iterator[tuple[str, StatefulCallback]]:
    seen: Counter[str] = Counter()
    for callback in callbacks:
        if isinstance(callback, StatefulCallback):
            name = type(callback).__qualname__
            yield f"{name}.{seen[name]}", callback
            seen[name] += 1
