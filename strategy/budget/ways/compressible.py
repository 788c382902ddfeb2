"""Finds the values of a joint trace that may be stored in fp8 between forward and backward.

These are results of matrix products, and sums with one, such as what an MLP's activation function reads: contiguous,
large, and read by a smooth function in forward, and in backward by those and products alone, which a small change of
an element changes little.
Nor is anything in backward computed of them by other operators: attention, norms and losses also read sums of the exact
numbers there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import Tensor

from thunder_memsave.budget.extract import Values, is_bookkeeping, returned_by
from thunder_memsave.fp8.compressed import BLOCK
from thunder_memsave.measure.layouts import Layout, numel_of
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops.aten_operators import find_operator
from thunder_memsave.passes.compress import Compressible
from thunder_memsave.passes.symbols import forward_symbols, is_joint
from thunder_memsave.planner.graph import Op, StorageKind

LEAST_BYTES = 2**20
"""Smaller values stay as they are."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLOATING = frozenset({"float64", *(str(d).removeprefix("torch.") for d in _DTYPES)})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"})
_DERIVED = _PRODUCTS | {"convolution_backward"}
_SMOOTH = frozenset(
    {
        *("silu", "silu_backward", "gelu", "gelu_backward", "sigmoid", "sigmoid_backward"),
        *("tanh", "tanh_backward", "softplus", "softplus_backward", "mish", "mish_backward"),
        *("mul", "add", "sub", "neg", "_to_copy"),
    }
)


def compressible(
    trace: TraceCtx,
    *,
    kinds: Mapping[str, StorageKind],
    tensors: Mapping[str, Tensor],
    known: OpProfiles,
) -> Sequence[Compressible]:
    """Find them, in the order of forward.

    Args:
        trace: A joint trace; others have none.
        kinds: As for `training_graph`, and so are the others.
        tensors: Tensors of the arguments.
        known: Profiles to share.
    """
    if not is_joint(trace.bound_symbols):
        return ()
    return tuple(_Seen.of(trace, Values(trace.args, kinds, tensors, known)).found())


@dataclass(slots=True)
class _Seen:
    """The storages of a trace, with the symbols that make and read them."""

    trace: TraceCtx
    values: Values
    made: dict[int, tuple[BoundSymbol, Op]] = field(default_factory=dict)
    """Forward's symbols that make one storage each, by it."""
    views: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Forward's views of one storage each."""
    first: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Forward's readers of a storage that are no views."""
    later: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Backward's."""

    @classmethod
    def of(cls, trace: TraceCtx, values: Values) -> _Seen:
        seen, symbols = cls(trace, values), trace.bound_symbols
        forward = forward_symbols(symbols)
        for bsym in symbols:
            if bsym.sym.name == "get_grad":
                values.add_cotangent(bsym.output)
        for index in sorted(range(len(symbols)), key=lambda i: id(symbols[i]) not in forward):
            if not is_bookkeeping(symbols[index]):
                seen._add(symbols[index], index, id(symbols[index]) in forward)
        return seen

    def _add(self, bsym: BoundSymbol, index: int, is_forward: bool) -> None:
        op = self.values.run(bsym, index, "activation" if is_forward else "temporary").op
        is_view = op.repeat == "free" and len(op.reads) == 1
        if is_view and not is_forward:
            return
        if is_view:
            self.views.setdefault(op.reads[0], []).append(bsym)
        else:
            readers = self.first if is_forward else self.later
            for storage in op.reads:
                readers.setdefault(storage, []).append(bsym)
        if is_forward and len(op.makes) == 1 and op.repeat == "yes":
            self.made[op.makes[0]] = bsym, op

    def found(self) -> Iterator[Compressible]:
        returned = returned_by(self.trace)
        stay = self.values.inputs | self.values.storages_of(returned.outputs)
        for storage, (bsym, op) in self.made.items():
            later = self.later.get(storage, ())
            if storage in stay or not later or not self._is_worth_it(storage, bsym, op):
                continue
            first = self.first.get(storage, ())
            exact = frozenset(id(r) for r in first if not _is_smooth(r))
            if len(exact) == len(first) or not self._changes_little(storage):
                continue
            views = self.views.get(storage, ())
            names = frozenset(o.name for view in views for o in view.flat_proxy_outs)
            yield Compressible(op.results[0], names, exact)

    def _changes_little(self, storage: int) -> bool:
        """Tell whether smooth functions and products alone read a value in backward, and what those make of it."""
        reached, stack = {storage}, [storage]
        while stack:
            found = stack.pop()
            if not all(_is_tolerant(reader) for reader in self.later.get(found, ())):
                return False
            smooth = {id(r) for r in self.first.get(found, ()) if _is_smooth(r)}
            new = {s for s, (maker, _) in self.made.items() if id(maker) in smooth} - reached
            reached |= new
            stack += new
        return True

    def _is_worth_it(self, storage: int, bsym: BoundSymbol, op: Op) -> bool:
        """Tell whether a value is large and costly to recompute, and can be stored row by row."""
        if storage in self.values.written_at or len(op.results) != 1:
            return False
        if not _is_product(bsym):
            made = (self.made.get(s) for s in op.reads)
            if not _is_sum(bsym) or not any(each and _is_product(each[0]) for each in made):
                return False
        return _fills_rows(self.values.by_name[op.results[0]].layout)


def _fills_rows(layout: Layout) -> bool:
    """Tell whether a value is large, contiguous, in memory of its own, and of whole rows with one scale each."""
    numel = numel_of(layout)
    is_whole = layout.offset == 0 and layout.storage_bytes == numel * layout.dtype.itemsize
    strides = torch.empty(layout.shape, device="meta").stride()
    return (
        layout.dtype in _DTYPES
        and layout.storage_bytes >= LEAST_BYTES
        and numel % BLOCK == 0
        and is_whole
        and layout.stride == strides
    )


def _is_product(bsym: BoundSymbol) -> bool:
    return _name(bsym.sym.name) in _PRODUCTS


def _is_sum(bsym: BoundSymbol) -> bool:
    return _name(bsym.sym.name) == "add"


def is_smooth(symbol: str, dtype: str) -> bool:
    """Tell whether it is a function, element by element, whose result changes little with what it reads.

    Args:
        symbol: The name of an operation in a trace.
        dtype: The name of its result's: whole numbers jump.
    """
    return dtype in _FLOATING and (symbol == "to" or _name(symbol) in _SMOOTH)


def _is_smooth(bsym: BoundSymbol) -> bool:
    (made, *_) = bsym.flat_proxy_outs or (None,)
    if not isinstance(made, TensorProxy):
        return False
    dtype = str(dtypes.to_torch_dtype(made.dtype)).removeprefix("torch.")
    return is_smooth(bsym.sym.name, dtype)


def _is_tolerant(reader: BoundSymbol) -> bool:
    """Tell whether it is such a function, or a product that makes gradients."""
    return _is_smooth(reader) or _name(reader.sym.name) in _DERIVED


def _name(symbol: str) -> str:
    """Return the name of PyTorch's operator that an operation runs; empty: it runs none."""
    operator = find_operator(symbol)
    return "" if operator is None else operator.overloadpacket.__name__
