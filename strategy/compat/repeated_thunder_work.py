"""Thunder finds out again and again what it knows: a fifth of the time of compiling a large model.

- `tree_flatten_with_dataclass` goes through the operands of each symbol twice, the first time to find dataclasses
  without a registration, of which there are none as a rule. Here they are looked for among the leaves of the second.
  A lone proxy, the result of most symbols, is not first looked for in a set of types that is made for each call.
- `BoundSymbol.gather_ctxs` makes all operands printable twice, though the first time fills both of the tables.
- `TraceCtx.python_callable` gathers what all symbols read for the text, and once more for the function.
- `Symbol.normalize` asks `inspect` for the signature of the same function each time.

What all return is the same.

Delete this file when `tests/compat/test_repeated_thunder_work.py` says that Thunder does none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

_without_fields: set[type] = set()
"""Types of leaves that are no dataclasses."""
_signatures: weakref.WeakKeyDictionary[Callable[..., Any], inspect.Signature] = (
    weakref.WeakKeyDictionary()
)


def apply() -> None:
    """Let Thunder flatten once, and keep signatures."""
    from thunder.core import pytree, symbol, trace
    from thunder.core import transforms as core_transforms
    from thunder.transforms import autodiff

    is_other_thunder = symbol.tree_flatten_with_dataclass is not pytree.tree_flatten_with_dataclass
    if is_other_thunder or symbol.BoundSymbol.gather_ctxs is _gather_ctxs:
        return
    flatten = _flattening(pytree)
    for module in (pytree, symbol, core_transforms, autodiff):
        module.tree_flatten_with_dataclass = flatten
    symbol.Symbol.normalize = _normalize
    symbol.BoundSymbol.gather_ctxs = _gather_ctxs
    trace.TraceCtx.python_callable = _gathering_once(trace.TraceCtx.python_callable)


def _flattening(pytree: Any) -> Callable[[Any], tuple[list[Any], Any]]:
    import optree

    registering, checking = pytree.tree_flatten_with_dataclass, pytree.tree_flatten
    proxy = pytree.ProxyInterface
    flatten, namespace = optree.tree_flatten, pytree.OPTREE_NAMESPACE

    def tree_flatten_with_dataclass(tree: Any) -> tuple[list[Any], Any]:
        """Flatten a tree, dataclasses in it too."""
        found: tuple[list[Any], Any]
        if type(tree) in (tuple, list, dict) or isinstance(tree, proxy):
            found = flatten(tree, none_is_leaf=True, namespace=namespace)
        else:
            found = checking(tree, namespace=namespace)
        for leaf in found[0]:
            kind = type(leaf)
            if kind not in _without_fields:
                if dataclasses.is_dataclass(kind):
                    found = registering(tree)
                    return found
                _without_fields.add(kind)
        return found

    return tree_flatten_with_dataclass


def _gather_ctxs(self: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what a symbol's line of Python imports, calls, and reads as objects."""
    return self.import_ctx(), self._get_call_ctx(), self._object_ctx


def _gathering_once(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def python_callable(self: Any, **options: Any) -> Any:
        """Return the function that a trace describes."""
        gather = functools.cache(self._gather_ctxs)
        self._gather_ctxs = lambda: tuple(map(dict, gather()))  # both add to what they get
        try:
            return make(self, **options)
        finally:
            del self._gather_ctxs

    return python_callable


def _normalize(self: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a symbol with the defaults of those that are not given."""
    assert self.meta is not None
    bound = _signature_of(self.meta).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _signature_of(meta: Callable[..., Any]) -> inspect.Signature:
    try:
        if (known := _signatures.get(meta)) is None:
            known = _signatures[meta] = inspect.signature(meta)
    except TypeError:  # no weak reference, or no hash
        return inspect.signature(meta)
    return known
