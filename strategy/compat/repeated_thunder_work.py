"""Thunder finds out again and again what it knows: a fifth of the time of compiling a large model.

- `tree_flatten_with_dataclass` goes through the operands of each symbol twice, the first time to find dataclasses
  without a registration, of which there are none as a rule. Here they are looked for among the leaves of the second.
  A lone proxy, the result of most symbols, is not first looked for in a set of types that is made for each call.
- `BoundSymbol.gather_ctxs` makes all operands printable twice, though the first time fills both of the tables.
- `TraceCtx.python_callable` gathers what all symbols read for the text, and once more for the function.
- `Symbol.normalize` asks `inspect` for the signature of the same function each time, and binds to it, also
  where it takes whatever is given.
- The proxies of a symbol are found by way of optree and of three properties with a lock each (Python 3.11).
- `BoundSymbol.from_bsym` forgets the proxies even where operands and results stay.
- `TensorProxy` checks and derives the same for each tensor of a shape, dtype and device.
- `to_printable` and `prettyprint` flatten each list of numbers, such as a shape, to look at each alone. And the text
  of strings in a list is escaped twice: an operator would get two backslashes for one.

What all return is the same, but for the text of such strings.

Delete this file when `tests/compat/test_repeated_thunder_work.py` says that Thunder does none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

_PLAIN = frozenset((int, float, bool, str, type(None)))
_LEAVES = _PLAIN | {torch.dtype, torch.device, torch.memory_format}
_without_fields: set[type] = set()
"""Types of leaves that are no dataclasses."""
_Signature = tuple[inspect.Signature, tuple[Any, ...]]
"""A signature, and the kinds of its parameters."""
_signatures: weakref.WeakKeyDictionary[Callable[..., Any], _Signature] = weakref.WeakKeyDictionary()


def apply() -> None:
    """Let Thunder flatten once, and keep signatures."""
    from thunder.core import codeutils, proxies, pytree, symbol, trace
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
    _find_proxies_at_once(symbol.BoundSymbol)
    symbol.BoundSymbol.from_bsym = _keeping_proxies(symbol.BoundSymbol.from_bsym)
    proxies._infer_tensor_properties = _inferring_once(proxies)
    trace.TraceCtx.python_callable = _gathering_once(trace.TraceCtx.python_callable)
    codeutils.to_printable = _plain_at_once(codeutils.to_printable, pytree.ProxyInterface)
    codeutils.prettyprint = _plain_text(codeutils.prettyprint, pytree.ProxyInterface)


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


class _Kept:
    """A property that is computed once for each object."""

    def __init__(self, compute: Callable[[Any], Any], name: str) -> None:
        self.compute, self.name = compute, name

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        if owner is None:
            return self
        found = owner.__dict__[self.name] = self.compute(owner)
        return found


def _find_proxies_at_once(symbol: Any) -> None:
    """Let symbols find the proxies among their operands and results without a copy of the trees that they are in."""
    known = {n: p.func for n, p in vars(symbol).items() if type(p) is functools.cached_property}
    for name, compute in known.items():
        setattr(symbol, name, _Kept(compute, name))
    of_arguments, of_outputs = known["flat_proxy_args"], known["flat_proxy_outs"]

    def flat_proxy_args(self: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        named = (self.kwargs[name] for name in sorted(self.kwargs))
        is_plain = _take_proxies(self.args, found) and _take_proxies(named, found)
        return tuple(found) if is_plain else of_arguments(self)

    def flat_proxy_outs(self: Any) -> tuple[Any, ...]:
        found: list[Any] = []
        return tuple(found) if _take_proxies((self.output,), found) else of_outputs(self)

    symbol.flat_proxy_args = _Kept(flat_proxy_args, "flat_proxy_args")
    symbol.flat_proxy_outs = _Kept(flat_proxy_outs, "flat_proxy_outs")


def _take_proxies(values: Iterable[Any], found: list[Any]) -> bool:
    """Add the proxies among values and in lists of them; return False where a value is of a type that may hold some."""
    from thunder.core.baseutils import ProxyInterface

    for value in values:
        if isinstance(value, ProxyInterface):
            found.append(value)
        elif (kind := type(value)) in (tuple, list):
            if not _take_proxies(value, found):
                return False
        elif kind not in _LEAVES:
            return False
    return True


def _keeping_proxies(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def from_bsym(self: Any, **changes: Any) -> Any:
        """Return a symbol that is as another one but for what changes."""
        made = make(self, **changes)
        if made.sym._bind_postprocess is None and _OPERANDS.isdisjoint(changes):
            known = self.__dict__
            made.__dict__.update((name, known[name]) for name in _PROXIES if name in known)
        return made

    return from_bsym


_OPERANDS = frozenset(("args", "kwargs", "output"))
_PROXIES = ("flat_proxy_args", "flat_proxy_outs")


def _inferring_once(proxies: Any) -> Callable[..., Any]:
    infer = proxies._infer_tensor_properties
    is_symbolic = proxies.using_symbolic_values

    @functools.lru_cache(maxsize=4096)
    def known(shape: tuple[int, ...], device: Any, dtype: Any, requires_grad: bool) -> Any:
        return infer(None, shape, device, dtype, requires_grad)

    @functools.wraps(infer)
    def infer_tensor_properties(
        like: Any = None,
        shape: Any = None,
        device: Any = None,
        dtype: Any = None,
        requires_grad: Any = None,
        *others: Any,
        **named: Any,
    ) -> Any:
        """Return what a proxy knows of a tensor, in the order in which it takes it."""
        is_plain = like is None and type(shape) is tuple and all(type(n) is int for n in shape)
        has_more = any(o is not None for o in (*others, *named.values()))
        if not is_plain or has_more or is_symbolic():
            return infer(like, shape, device, dtype, requires_grad, *others, **named)
        return known(shape, device, dtype, requires_grad)

    return infer_tensor_properties


def _normalize(self: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a symbol with the defaults of those that are not given."""
    assert self.meta is not None
    signature, kinds = _signature_of(self.meta)
    if kinds == _ANYTHING or (kinds == _ANYTHING[:1] and not kwargs):
        return args, kwargs
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


def _plain_at_once(make: Callable[..., Any], proxy: type) -> Callable[..., Any]:
    @functools.wraps(make)
    def to_printable(trace: Any, x: Any, **contexts: Any) -> Any:
        """Return what stands for an operand in a text: numbers, proxies and lists of them as they are."""
        kind = type(x)
        if kind in _PLAIN or isinstance(x, proxy):
            return x
        inside = x if kind in (tuple, list) else x.values() if kind is dict else (x,)
        if all(type(e) in _PLAIN or isinstance(e, proxy) for e in inside):
            return x
        return make(trace, x, **contexts)

    return to_printable


def _plain_text(write: Callable[..., str], proxy: type) -> Callable[..., str]:
    @functools.wraps(write)
    def prettyprint(x: Any, **options: Any) -> str:
        """Return the text of an operand: of a list or a tuple that of what is in it."""
        if not options:
            kind = type(x)
            if isinstance(x, proxy):
                return x.name  # type: ignore[attr-defined, no-any-return]
            if kind is int:
                return str(x)
            if kind in (tuple, list):
                inside = ", ".join(map(prettyprint, x))
                comma = "," if kind is tuple and len(x) == 1 else ""
                return f"[{inside}]" if kind is list else f"({inside}{comma})"
            if kind is dict:
                return f"{{{', '.join(f'{key!r}: {prettyprint(e)}' for key, e in x.items())}}}"
        return write(x, **options)

    return prettyprint


_ANYTHING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _signature_of(meta: Callable[..., Any]) -> _Signature:
    try:
        if (known := _signatures.get(meta)) is None:
            known = _signatures[meta] = _asked(meta)
    except TypeError:  # no weak reference, or no hash
        return _asked(meta)
    return known


def _asked(meta: Callable[..., Any]) -> _Signature:
    signature = inspect.signature(meta)
    return signature, tuple(each.kind for each in signature.parameters.values())
