"""Actions say what happens between forward and backward to the storages that backward needs; a plan maps them.

A value that a plan may keep in fewer bits has no action of its own: the trace says what that would be
(`passes/stored/compress.py`), and a plan keeps or recomputes its parts. A new action changes:

- this file: its kind, and its parameters;
- `order.py` and `fast_simulate.py`: the lifetimes of its copies;
- `search/` and `linear/`, which choose between kept and not kept only, and `search/describe.py`, which names it;
- `budget/extract.py`, where bytes are not on the device;
- a pass, a file of its own beside `passes/recompute.py` (which recomputes all whose action is not `keeps`), as a step
  in `compiler/joint_steps.py` and `compiler/pipeline.py`, with its reason in `settings/step_names.py`.

The plan cache, the agreement of ranks, reports and manifests carry any action unchanged; pins keep or recompute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

ActionKind = Literal[
    "keep",  # stays where it is
    "recompute",  # freed after forward, and recomputed where backward first needs it
    "regather",  # recompute for an unsharded parameter, or a value that depends on one alone: from this rank's shard
    "replay",  # recompute for random numbers, from a saved generator state
    "offload",  # copied to the host in forward, freed, and copied back before backward reads it
]


@dataclass(frozen=True, slots=True)
class Action:
    """The fate of one storage. Its parameters are plain values, so that it can be hashed and written to files."""

    kind: ActionKind

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(ActionKind)):
            raise ValueError(f"no action is called {self.kind!r}; there are {', '.join(kinds)}.")

    @property
    def keeps(self) -> bool:
        """True if forward leaves it for backward, on the device or on the host; otherwise it is made again."""
        return self.kind in ("keep", "offload")


KEEP, RECOMPUTE, REGATHER, REPLAY, OFFLOAD = map(Action, get_args(ActionKind))


class Actions(Mapping[str, Action]):
    """Immutable, hashable mapping from names to actions, sorted by name.

    The names are of storages in a plan, and of values for passes over a trace.
    """

    __slots__ = ("_by_name", "_offloaded")

    def __init__(self, actions: Mapping[str, Action] = MappingProxyType({})) -> None:
        """Copy the mapping."""
        self._by_name = {name: actions[name] for name in sorted(actions)}
        self._offloaded: frozenset[str] | None = None

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
        """Names whose action keeps them, on the device or on the host."""
        return frozenset(name for name, action in self.items() if action.keeps)

    @property
    def offloaded(self) -> frozenset[str]:
        """Names that wait for backward on the host."""
        if self._offloaded is None:
            of_host = (name for name, action in self._by_name.items() if action.kind == "offload")
            self._offloaded = frozenset(of_host)
        return self._offloaded

    def only(self, names: Iterable[str]) -> Actions:
        """Return the actions of these names, without the names that have none."""
        return Actions({name: self[name] for name in names if name in self})


NO_ACTIONS = Actions()


def keeping(names: Iterable[str]) -> Actions:
    """Return actions that keep these names; a plan recomputes whatever else backward needs."""
    return Actions(dict.fromkeys(names, KEEP))
