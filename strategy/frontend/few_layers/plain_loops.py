"""Finds lists of layers of a module that its code calls one after the other, each alike."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class LayerList:
    """A list of layers, and the module whose `forward` calls them."""

    owner: nn.Module
    name: str
    """Name of the list in its owner."""
    path: str
    """Dotted name of the list in the whole module."""

    @property
    def loop(self) -> CodeType:
        """The code that calls the layers."""
        code: CodeType = inspect.unwrap(type(self.owner).forward).__code__
        return code

    @property
    def layers(self) -> nn.ModuleList:
        """The list."""
        found = self.owner._modules[self.name]
        assert isinstance(found, nn.ModuleList)
        return found


def longest_list(module: nn.Module) -> LayerList | None:
    """Return the longest list that a plain loop calls; None: there is none."""
    return max(_lists(module), key=lambda found: len(found.layers), default=None)


def _lists(module: nn.Module) -> Iterator[LayerList]:
    for path, owner in module.named_modules():
        for name, child in owner.named_children():
            if isinstance(child, nn.ModuleList) and is_called_alike(owner, name):
                yield LayerList(owner, name, f"{path}.{name}" if path else name)


def is_called_alike(owner: nn.Module, name: str) -> bool:
    """Return whether `owner.forward` reads the list in one loop alone, which does the same with each layer.

    Such a loop calls nothing else and has no condition; its counter, if it has one, reads nothing but the type of the
    layer, which is the same for all: `self.config.layer_types[i]`.
    """
    tree = _forward_of(owner)
    if tree is None or type(owner._modules[name]) is not nn.ModuleList:
        return False
    loops = [n for n in ast.walk(tree) if isinstance(n, ast.For) and _reads(n.iter, name)]
    num_reads = sum(_is_self(node, name) for node in ast.walk(tree))
    if len(loops) != 1 or num_reads != 1 or loops[0].orelse:
        return False
    (loop,) = loops
    layer, counter = _targets(loop, owner, name)
    if counter is not None and _count(tree, counter) != _count(loop, counter):
        return False
    return layer is not None and _does_the_same(loop.body, layer, counter, owner)


def layer_types(owner: nn.Module) -> tuple[str, ...] | None:
    """Return the types by which `owner.forward` may choose what its layers get."""
    types: Any = getattr(getattr(owner, "config", None), "layer_types", None)
    return tuple(types) if types else None


def _is_all(bounds: ast.expr, owner: nn.Module, name: str) -> bool:
    """Return whether a slice of the list is `[: self.config.name]`, of at least all layers."""
    if not isinstance(bounds, ast.Slice) or bounds.lower or bounds.step or not bounds.upper:
        return False
    config, _, attribute = ast.unparse(bounds.upper).rpartition(".")
    most: Any = getattr(getattr(owner, "config", None), attribute, None)
    layers: Any = owner._modules[name]
    return config == "self.config" and isinstance(most, int) and most >= len(layers)


def _forward_of(owner: nn.Module) -> ast.AST | None:
    return None if "forward" in vars(owner) else _tree_of(type(owner).forward)


@functools.lru_cache(maxsize=64)
def _tree_of(forward: Callable[..., Any]) -> ast.AST | None:
    """Return the source of a method, read once for the many modules of a class."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
        return ast.parse(textwrap.dedent(source))
    except (OSError, TypeError, SyntaxError):
        return None


def _is_self(node: ast.AST, name: str) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _reads(node: ast.AST, name: str) -> bool:
    return any(_is_self(each, name) for each in ast.walk(node))


def _targets(loop: ast.For, owner: nn.Module, name: str) -> tuple[str | None, str | None]:
    """Return the names of a loop's layer and counter; None where it is of another form, or has no counter."""
    target, read = loop.target, loop.iter
    counter = None
    if isinstance(read, ast.Call) and isinstance(read.func, ast.Name):
        is_counted = read.func.id == "enumerate" and len(read.args) == 1 and not read.keywords
        if not (is_counted and isinstance(target, ast.Tuple) and len(target.elts) == 2):
            return None, None
        (first, target), read = target.elts, read.args[0]
        counter = first.id if isinstance(first, ast.Name) else None
    if isinstance(read, ast.Subscript):
        read = read.value if _is_all(read.slice, owner, name) else read
    is_list = _is_self(read, name) and isinstance(target, ast.Name)
    return (target.id if is_list and isinstance(target, ast.Name) else None), counter


_DECIDES = (
    ast.If,
    ast.IfExp,
    ast.BoolOp,
    ast.Compare,
    ast.NamedExpr,
    ast.Lambda,
    ast.comprehension,
)


def _does_the_same(body: list[ast.stmt], layer: str, counter: str | None, owner: nn.Module) -> bool:
    """Return whether the body does nothing but to call the layer and to give its result a name."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    if any(isinstance(node, _DECIDES) for node in nodes):
        return False
    if not all(isinstance(each, ast.Assign) and _gives_names(each) for each in body):
        return False
    called = [n for n in nodes if isinstance(n, ast.Call)]
    if len(called) != 1 or not _is_name(called[0].func, layer):
        return False
    if sum(_count(each, layer) for each in body) != 1:
        return False
    if counter is None:
        return True
    of_type = [n for n in nodes if ast.unparse(n) == f"self.config.layer_types[{counter}]"]
    types = layer_types(owner)
    is_one_type = types is not None and len(set(types)) == 1
    num_counters = sum(_count(each, counter) for each in body)
    return num_counters == len(of_type) and (not of_type or is_one_type)


def _gives_names(statement: ast.Assign) -> bool:
    """Return whether a statement gives names alone, and changes nothing that exists."""
    allowed = (ast.Name, ast.Tuple, ast.expr_context)
    return all(isinstance(n, allowed) for target in statement.targets for n in ast.walk(target))


def _count(tree: ast.AST, name: str) -> int:
    return sum(_is_name(node, name) for node in ast.walk(tree))


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
