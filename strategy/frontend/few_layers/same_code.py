"""Compares two captures of a module, one with a layer more: they must be the same but for what that layer does.

What depends on the number of layers then shows: a number that is computed of it, an effect on an object that each layer
has. What only depends on whether they are many cannot show, so that no code but the loop may name the list, and none
may list the module's parts.
"""

from __future__ import annotations

import dis
import inspect
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from thunder_memsave.aten.equal_layers import are_values_alike, same_setting

_LISTS_PARTS = {
    getattr(nn.Module, name).__code__
    for name in ("named_modules", "named_children", "state_dict", "get_submodule")
}
"""Code of PyTorch that lists parts of modules, or that all other code which does so calls."""
_STANDARD = os.path.join(os.path.dirname(os.__file__), "")
_OF_PYTORCH = (os.path.join(*torch.__path__, ""), inspect.__file__, "<frozen ")
"""Starts of the names of files whose code counts nothing by itself."""
_KNOWN = ("transformers", "peft", "thunder_memsave")
"""Packages whose layers keep no state that only another layer reads."""
_MADE = re.compile(r"tmp_\d+|___?\w+_\d\w*")
"""Names that Dynamo makes: numbered in the order in which it needs them."""
_GRAPH_RESULT = "graph_out"
"""Start of the name of the variable for what the graph returns."""
_NOTHING = ("EXTENDED_ARG", "NOP", "CACHE")
_HAS_EFFECT = re.compile("CALL|STORE_(?!FAST)|DELETE_(?!FAST)|LIST|MAP|SET_")


def is_of_known_packages(codes: Iterable[CodeType], *, known: Sequence[str] = ()) -> bool:
    """Return whether all code is of packages whose layers are known to do the same, however many there are.

    Other code may pass something on from layer to layer that only matters after many: a counter, a list, an iterator.

    Args:
        codes: All code that was traced.
        known: More folders of such packages.
    """
    folders = [f for name in _KNOWN if name in sys.modules for f in sys.modules[name].__path__]
    starts = (*_OF_PYTORCH, *(os.path.join(folder, "") for folder in (*folders, *known)))
    return all(
        code.co_filename.startswith(starts)
        or (code.co_filename.startswith(_STANDARD) and "site-packages" not in code.co_filename)
        or (code.co_filename == "<string>" and code.co_name.startswith("__"))  # of dataclasses
        for code in codes
    )


def names_elsewhere(codes: Sequence[CodeType], loop: CodeType, name: str) -> bool:
    """Return whether other code than the one with the loop names the list, or any lists parts of modules.

    Args:
        codes: All code that was traced.
        loop: That of the method with the loop.
        name: Of the list in its module.
    """
    for code in codes:
        if code in _LISTS_PARTS:
            return True
        if code is loop or code.co_filename.startswith(_OF_PYTORCH):
            continue
        named = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))}
        if name in named or "_modules" in named:
            return True
    return False


@dataclass(frozen=True, slots=True)
class Pairing:
    """A graph with a layer more, that layer, and the one before it."""

    graph: fx.Graph
    operands: Sequence[fx.Node]
    """Operands of the layer."""
    added: Sequence[fx.Node]
    """Operations of the layer."""
    before: Sequence[fx.Node]
    """Operations of the layer before it: as many, aligned."""

    def equals(self, other: fx.Graph) -> bool:
        """Return whether the other graph is this one without the layer."""
        left_out = {*self.operands, *self.added}
        nodes = [n for n in self.graph.nodes if n not in left_out]
        others = list(other.nodes)
        if len(nodes) != len(others) or len(self.added) != len(self.before):
            return False
        counterpart = dict(zip(nodes, others, strict=True))
        instead = zip(self.added, self.before, strict=True)
        counterpart |= {n: counterpart[same] for n, same in instead}
        return all(self._is_same(a, b, counterpart) for a, b in zip(nodes, others, strict=True))

    def _is_same(self, one: fx.Node, other: fx.Node, counterpart: dict[fx.Node, fx.Node]) -> bool:
        is_end = one.op in ("placeholder", "output")
        if one.op != other.op or (one.target != other.target and not is_end):
            return False
        (leaves, tree), (others, other_tree) = (
            tree_flatten((n.args, n.kwargs)) for n in (one, other)
        )
        return (
            tree == other_tree
            and all(_reads_same(a, b, counterpart) for a, b in zip(leaves, others, strict=True))
            and are_values_alike(*(n.meta.get("example_value") for n in (one, other)))
        )


def _reads_same(one: Any, other: Any, counterpart: dict[fx.Node, fx.Node]) -> bool:
    if isinstance(one, fx.Node):
        return counterpart.get(one) is other
    return same_setting(one, other)


def does_as_much_else(more: CodeType, fewer: CodeType) -> bool:
    """Return whether the code that Dynamo made does nothing else around the graph than with a layer less.

    It reads more operands before the graph runs, and does the very same with its results.
    """
    (before, after), (fewer_before, fewer_after) = _parts(more), _parts(fewer)
    if not after or list(_numbered(after)) != list(_numbered(fewer_after)):
        return False
    added = Counter(op for op, _ in before) - Counter(op for op, _ in fewer_before)
    is_as_long = len(before) - len(fewer_before) == added.total()
    return is_as_long and not any(_HAS_EFFECT.search(op) for op in added)


_Instruction = tuple[str, str]
"""Name of the operation, and its argument."""


def _parts(code: CodeType) -> tuple[list[_Instruction], list[_Instruction]]:
    """Return the instructions that run the graph, and those after it; all are of the first if it returns nothing."""
    each = [
        (i.opname, "" if i.opcode in (*dis.hasjrel, *dis.hasjabs) else repr(i.argval))
        for i in dis.get_instructions(code)
        if i.opname not in _NOTHING
    ]
    at = (i for i, (_, value) in enumerate(each) if _GRAPH_RESULT in value)
    begin = next(at, len(each))
    return each[:begin], each[begin:]


def _numbered(instructions: Sequence[_Instruction]) -> Iterator[_Instruction]:
    """Yield them with the names that Dynamo makes numbered in the order in which they are used."""
    numbers: dict[str, str] = {}
    for op, value in instructions:
        yield op, _MADE.sub(lambda name: numbers.setdefault(name[0], f"#{len(numbers)}"), value)
