"""Writes results over operands that nothing reads any more, and parts of tensors where these are.

    t = relu(x)                                      t = relu_in_place(x)
    h1 = select_scatter(h0, x, 1, 7)                 h1 = write_at_in_place(h0, x, 1, 7)
    t = select_backward(g, [2, 128, 256], 1, 7)
    s1 = add(s0, t)                                  s1 = add_at_in_place(s0, g, 1, 7)

Eager PyTorch's autograd adds up gradients so, and many models their activations. A loop over tokens moves as many
bytes as it has tokens then, not their square. Sums skip the zeros around a part, so that a negative zero may keep its
sign; all else has the same bits. The tensor must be made by an operator of PyTorch, a cast or a fused region in the
same trace, and have been read by no others, which may read it later than where they stand (collectives, copies to the
host). This runs where the trace is final: until then a plan may compute any value again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import inf
from typing import Any

import torch
from thunder.core.dtypes import to_torch_dtype
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx

from thunder_memsave.ops.aten_operators import makes_new_memory, operator_of
from thunder_memsave.ops.in_place import (
    BACKWARDS,
    BATCH_NORMS,
    ELEMENTWISE,
    SUMS_OF_PARTS,
    WRITES_OF_PARTS,
)
from thunder_memsave.passes.symbols import is_tensor, makes_copy, with_others

_SUM = "aten_add_Tensor"
_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
_NUM_SIZES = 1
"""The arguments of the backward of a view between the gradient and the place: the sizes of the whole."""


def write_in_place(trace: TraceCtx, *, over_gradients: bool = True) -> TraceCtx:
    """Return the trace with results in place; the same one if there are none.

    Args:
        trace: A final trace, before values are deleted after their last use.
        over_gradients: Whether backwards of functions may write over the gradients that they read.
    """
    names = {b.sym.name for b in trace.bound_symbols}
    if not names & {*ELEMENTWISE, *WRITES_OF_PARTS, *SUMS_OF_PARTS}:
        return trace
    found = _Results(trace.bound_symbols, frozenset() if over_gradients else BACKWARDS)
    return with_others(trace, found.instead, found.left_out)


def written_over(symbols: Sequence[BoundSymbol]) -> tuple[dict[int, str], set[int]]:
    """Return what `write_in_place` would do with symbols in their order.

    Returns:
        The name of the tensor over which a symbol would write its result, by the symbol's index; and the indices of
        those that would be left out.
    """
    found = _Results(symbols)
    return {i: b.args[0].name for i, b in found.instead.items()}, found.left_out


class _Results:
    """The symbols of a trace, and who shares memory with whom where one of them runs."""

    def __init__(self, symbols: Sequence[BoundSymbol], left: frozenset[str] = frozenset()) -> None:
        self._symbols, self._left = symbols, left
        self._sharing: dict[str, list[str]] = {}
        """The tensors that may share memory with each that was made or read so far, itself among them, by name."""
        self._whole: set[str] = set()
        """The tensors that were made with memory of their own: no views."""
        self._reshaped: set[str] = set()
        """Views of these that have all of their numbers, in another shape."""
        self._made_at = {p.name: i for i, b in enumerate(symbols) for p in b.flat_proxy_outs}
        self._last_read: dict[str, float] = {}
        """Where it is read for the last time; infinite where others than PyTorch's operators read it."""
        self._num_reads = Counter(p.name for b in symbols for p in b.flat_proxy_args)
        for index, bsym in enumerate(symbols):
            last = index if _runs_at_once(bsym) else inf
            for p in bsym.flat_proxy_args:
                self._last_read[p.name] = max(last, self._last_read.get(p.name, -1))
        self._sums = {i: found for i, b in enumerate(symbols) if (found := self._part_of_sum(b))}
        for index, part in self._sums.items():  # read there from now on
            read = part.args[0].name
            self._last_read[read] = max(self._last_read[read], index)
        self.instead: dict[int, BoundSymbol] = {}
        self.left_out: set[int] = set()
        """The symbols that give way to others, by index."""
        for index, bsym in enumerate(symbols):
            found = self._in_place(index, bsym)
            if found is None:
                self._remember(bsym)
            else:
                self._replace(index, found)

    def _in_place(self, index: int, bsym: BoundSymbol) -> BoundSymbol | None:
        if operator_of(bsym) is None:
            return None
        if bsym.sym.name in WRITES_OF_PARTS:
            base, source, *where = bsym.args
            if bsym.kwargs or not self._may_be_written(index, base, source):
                return None
            return WRITES_OF_PARTS[bsym.sym.name].bind(base, source, *where, output=bsym.output)
        part = self._sums.get(index)
        if part is not None:
            base = next(a for a in bsym.args if a.name != part.output.name)
            source, place = part.args[0], part.args[1 + _NUM_SIZES :]
            if self._may_be_written(index, base, source):
                return SUMS_OF_PARTS[part.sym.name].bind(base, source, *place, output=bsym.output)
        return self._elementwise(index, bsym)

    def _elementwise(self, index: int, bsym: BoundSymbol) -> BoundSymbol | None:
        if bsym.sym.name not in ELEMENTWISE or bsym.sym.name in self._left:
            return None
        base, *others = bsym.args
        if not isinstance(base, TensorProxy) or _facts(base) != _facts(bsym.output):
            return None
        if to_torch_dtype(base.dtype).is_complex:  # products and quotients in place have other bits
            return None
        # A gradient is mostly a view of a product. Over other views, a region would take more than what it is made of.
        is_reshaped = bsym.sym.name in BACKWARDS and base.name in self._reshaped
        if not self._may_be_written(index, base, *others, is_reshaped=is_reshaped):
            return None
        symbol = ELEMENTWISE[bsym.sym.name]
        return symbol.bind(*bsym.args, **bsym.kwargs, output=bsym.output)

    def _replace(self, index: int, found: BoundSymbol) -> None:
        self.instead[index] = found
        if index in self._sums and found.sym in SUMS_OF_PARTS.values():
            self.left_out.add(self._made_at[self._sums[index].output.name])
        base, result = found.args[0].name, found.output.name
        sharing = self._sharing[result] = self._sharing[base]
        sharing.append(result)
        self._whole.add(result)

    def _part_of_sum(self, bsym: BoundSymbol) -> BoundSymbol | None:
        """Return what makes the summand that is zero around a part, if the sum alone reads it."""
        if bsym.sym.name != _SUM or bsym.kwargs or len(bsym.args) != len(("a", "b")):
            return None
        if not all(isinstance(a, TensorProxy) for a in bsym.args):
            return None
        for summand, other in (bsym.args, bsym.args[::-1]):
            index = self._made_at.get(summand.name)
            made = None if index is None else self._symbols[index]
            if made is None or made.sym.name not in SUMS_OF_PARTS or made.kwargs:
                continue
            is_read_once = self._num_reads[summand.name] == 1
            same = _facts(other) == _facts(bsym.output) == _facts(summand)
            if is_read_once and same and isinstance(made.args[0], TensorProxy):
                return made
        return None

    def _may_be_written(
        self, index: int, base: Any, *others: Any, is_reshaped: bool = False
    ) -> bool:
        """Return whether the memory of `base` is the trace's, nothing reads it later, and `others` are not in it."""
        if base.name not in self._whole and not is_reshaped:
            return False
        sharing = self._sharing[base.name]
        if any(isinstance(o, Proxy) and self._sharing.get(o.name) is sharing for o in others):
            return False
        return all(self._last_read.get(n, -1) <= index for n in sharing)

    def _remember(self, bsym: BoundSymbol) -> None:
        """Note whose memory the results of a symbol may have."""
        results = [p.name for p in bsym.flat_proxy_outs if is_tensor(p)]
        makes_new = makes_new_memory(bsym) or makes_copy(bsym) or bsym.sym.is_fusion
        if makes_new or bsym.sym in BATCH_NORMS.values():
            self._sharing.update({name: [name] for name in results})
            self._whole.update(results)
            return
        read = [p.name for p in bsym.flat_proxy_args if is_tensor(p)]
        groups = {id(g): g for g in (self._sharing.setdefault(n, [n]) for n in read)}
        largest, *others = sorted(groups.values(), key=len, reverse=True) or [[]]
        new = [*results, *(n for group in others for n in group)]
        largest += new
        self._sharing.update(dict.fromkeys(new, largest))
        if operator_of(bsym) in _RESHAPES and (self._whole | self._reshaped).issuperset(read):
            self._reshaped.update(results)


def _runs_at_once(bsym: BoundSymbol) -> bool:
    return operator_of(bsym) is not None or makes_copy(bsym) or bsym.sym.is_fusion


def _facts(proxy: TensorProxy) -> Any:
    return tuple(proxy.shape), proxy.dtype, proxy.device
