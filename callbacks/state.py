"""Makes what callbacks remember one entry of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class StatefulCallback(Protocol):
    """A callback that remembers something between steps, by Lightning's names."""

    def state_dict(self) -> dict[str, Any]:
        """Return plain values or tensors, the same on all ranks."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what was returned; called before `on_train_start`."""


class CallbackStates:
    """Put it into the state that `fabric.save` and `fabric.load` get, as `callbacks`.

    States go by the callback's class and its number among those of its class. One that a checkpoint
    does not have yet starts anew, one that the run no longer has is dropped: adding and removing
    a callback is no reason not to go on.

    Args:
        callbacks: All of the run; those that remember nothing are left out.
    """

    def __init__(self, callbacks: Iterable[object]) -> None:
        self._stateful = dict(_named(callbacks))

    def state_dict(self) -> dict[str, Any]:
        """Collect the states."""
        return {name: callback.state_dict() for name, callback in self._stateful.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the states out."""
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
