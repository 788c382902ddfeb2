"""Actions say what happens between forward and backward to storages that backward needs; a plan maps storages to them.

To add one, such as `offload` (copied to the host after forward, and back before backward reads it), four files have to
know it: this one its kind and its parameters (before which operation it is copied back), `order.py` what its copies
hold and when, `solve.py` which storages get it, `planned_call.py` its pass, a new file beside `passes/recompute.py`.
Pins, the cache, the agreement of ranks, reports and manifests carry any action as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

ActionKind = Literal[
    "keep",  # stays where it is
    "recompute",  # dies after forward, and is computed again where backward first needs it
    "regather",  # the same for a whole parameter, and for what follows from one alone: from this rank's rows
    "replay",  # the same for random numbers, from a saved generator state
]


@dataclass(frozen=True, slots=True)
class Action:
    """What happens to one storage. Parameters are plain values, so that it can be hashed and written to files."""

    kind: ActionKind

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(ActionKind)):
            raise ValueError(f"no action is called {self.kind!r}; there are {', '.join(kinds)}.")

    @property
    def keeps(self) -> bool:
        """Whether forward leaves the storage for backward; if not, it is computed again, in whichever way."""
        return self.kind == "keep"


KEEP, RECOMPUTE, REGATHER, REPLAY = map(Action, get_args(ActionKind))


class Actions(Mapping[str, Action]):
    """Actions by names, in the order of these: of storages in a plan, of values for passes over a trace.

    It cannot be changed, and has a hash.
    """

    __slots__ = ("_by_name",)

    def __init__(self, actions: Mapping[str, Action] = MappingProxyType({})) -> None:
        """Take them as they are now."""
        self._by_name = {name: actions[name] for name in sorted(actions)}

    def __getitem__(self, name: str) -> Action:
        return self._by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    def __hash__(self) -> int:
        return hash(tuple(self._by_name.items()))

    def __repr__(self) -> str:
        return f"Actions({self._by_name})"

    @property
    def kept(self) -> frozenset[str]:
        """Names of what is kept."""
        return frozenset(name for name, action in self.items() if action.keeps)

    def only(self, names: Iterable[str]) -> Actions:
        """Those of these names that are here."""
        return Actions({name: self[name] for name in names if name in self})


NO_ACTIONS = Actions()


def keeping(names: Iterable[str]) -> Actions:
    """Keep these; what else is needed is computed again."""
    return Actions(dict.fromkeys(names, KEEP))
