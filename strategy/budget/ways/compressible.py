"""Finds the values of a joint trace that may be stored in fp8 between forward and backward.

These are what an MLP's activation function reads, and what is multiplied with its result: large, contiguous results of
matrix products, or sums of those, as adapters make.

    t1 = mm(x, w1)      t2 = mm(x, w2)      t3 = silu(t1)      t4 = mul(t3, t2)      t5 = mm(t4, w3)

Of what activation functions make of a value, forward makes products alone, and backward reads all of it by such
functions and products alone. There a small change of an element changes little. Where sums could cancel, as in a norm,
an attention, a loss or a sum with anything else, numbers are exact.
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

from thunder_memsave.budget.extract import Values, add_cotangents, forward_first, returned_by
from thunder_memsave.fp8.compressed import BLOCK
from thunder_memsave.measure.layouts import Layout, numel_of
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.ops.aten_operators import find_operator
from thunder_memsave.passes.stored.compress import Compressible
from thunder_memsave.passes.symbols import is_joint
from thunder_memsave.planner.graph import StorageKind

LEAST_BYTES = 2**20
"""Smaller values stay as they are."""
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_FLOATING = frozenset({"float64", *(str(d).removeprefix("torch.") for d in _DTYPES)})
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "convolution"})
_ACTIVATIONS = frozenset({"silu", "gelu", "sigmoid", "tanh", "softplus", "mish"})
_SMOOTH = _ACTIVATIONS | {"mul", "_to_copy"}
_OF_RESULTS = _SMOOTH | _PRODUCTS | {"native_dropout"}
"""Operators that may read in forward what activation functions make of a value."""
_IN_BACKWARD = (
    _SMOOTH | _PRODUCTS | {"convolution_backward"} | {f"{name}_backward" for name in _ACTIVATIONS}
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
    made: dict[int, BoundSymbol] = field(default_factory=dict)
    """Forward's symbols that make one storage each, by it."""
    makes: dict[int, int] = field(default_factory=dict)
    """The storage that such a symbol makes, by its id."""
    reads: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The storages that a symbol reads, by its id."""
    views: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Forward's views of one storage each."""
    first: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Forward's readers of a storage that are no views."""
    later: dict[int, list[BoundSymbol]] = field(default_factory=dict)
    """Backward's."""
    activated: set[int] = field(default_factory=set)
    """Storages of results of activation functions, and of what is made of these element by element."""

    @classmethod
    def of(cls, trace: TraceCtx, values: Values) -> _Seen:
        seen, symbols = cls(trace, values), trace.bound_symbols
        add_cotangents(symbols, values)
        for index, is_forward in forward_first(symbols):
            seen._add(symbols[index], index, is_forward)
        return seen

    def _add(self, bsym: BoundSymbol, index: int, is_forward: bool) -> None:
        op = self.values.run(bsym, index, "activation" if is_forward else "temporary").op
        is_view = op.repeat == "free" and len(op.reads) == 1
        if is_view:
            if is_forward:
                self.views.setdefault(op.reads[0], []).append(bsym)
            return
        self.reads[id(bsym)] = op.reads
        readers = self.first if is_forward else self.later
        for storage in op.reads:
            readers.setdefault(storage, []).append(bsym)
        if not is_forward or len(op.makes) != 1 or op.repeat != "yes":
            return
        (storage,) = op.makes
        self.made[storage], self.makes[id(bsym)] = bsym, storage
        is_of_those = _is_smooth(bsym) and not self.activated.isdisjoint(op.reads)
        if is_of_those or _name(bsym.sym.name) in _ACTIVATIONS:
            self.activated.add(storage)

    def found(self) -> Iterator[Compressible]:
        returned = returned_by(self.trace)
        stay = self.values.inputs | self.values.storages_of(returned.outputs)
        for storage, bsym in self.made.items():
            if storage in stay or storage not in self.later or not self._is_costly(storage, bsym):
                continue
            smooth, exact = self._readers(storage)
            if not smooth or not self._changes_little(storage, smooth):
                continue
            views = self.views.get(storage, ())
            names = frozenset(o.name for view in views for o in view.flat_proxy_outs)
            yield Compressible(
                bsym.flat_proxy_outs[0].name, names, frozenset(id(reader) for reader in exact)
            )

    def _readers(self, storage: int) -> tuple[list[BoundSymbol], list[BoundSymbol]]:
        """Return forward's readers of a value that activation functions are to read: those, and all others."""
        smooth, exact = list[BoundSymbol](), list[BoundSymbol]()
        for reader in self.first.get(storage, ()):
            others = set(self.reads[id(reader)]) - {storage}
            multiplies = _name(reader.sym.name) == "mul" and bool(others)
            is_activation = _name(reader.sym.name) in _ACTIVATIONS or _is_cast(reader)
            fits = is_activation or (multiplies and others <= self.activated)
            (smooth if fits and _is_smooth(reader) else exact).append(reader)
        return smooth, exact

    def _changes_little(self, storage: int, smooth: Sequence[BoundSymbol]) -> bool:
        """Tell whether what these readers make of a value, and backward of both, changes little with it."""
        if not all(map(_is_of_backward, self.later.get(storage, ()))):
            return False
        for reader in smooth:
            made = self.makes.get(id(reader))
            if made is None:
                return False
            if made in self.activated:
                readers = self.first.get(made, ())
                if not all(_is_cast(r) or _name(r.sym.name) in _OF_RESULTS for r in readers):
                    return False
                again = [r for r in readers if _is_smooth(r)]
            else:  # a cast
                again, others = self._readers(made)
                if others:
                    return False
            if not self._changes_little(made, again):
                return False
        return True

    def _is_costly(self, storage: int, bsym: BoundSymbol) -> bool:
        """Tell whether a value is large and costly to recompute, and can be stored row by row."""
        if storage in self.values.written_at or len(bsym.flat_proxy_outs) != 1:
            return False
        if not _is_product(bsym) and not self._adds_products(bsym):
            return False
        return _fills_rows(self.values.by_name[bsym.flat_proxy_outs[0].name].layout)

    def _adds_products(self, bsym: BoundSymbol) -> bool:
        """Tell whether it adds results of products, which may be multiplied with numbers before."""
        reads = self.reads[id(bsym)]
        return _name(bsym.sym.name) == "add" and len(reads) > 1 and all(map(self._is_of_one, reads))

    def _is_of_one(self, storage: int) -> bool:
        maker = self.made.get(storage)
        while maker is not None and not _is_product(maker):
            reads = self.reads[id(maker)]
            is_scaled = len(reads) == 1 and (_name(maker.sym.name) == "mul" or _is_cast(maker))
            maker = self.made.get(reads[0]) if is_scaled else None
        return maker is not None


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


def _is_cast(bsym: BoundSymbol) -> bool:
    """Tell whether it converts to another floating dtype."""
    return _is_smooth(bsym) and (bsym.sym.name == "to" or _name(bsym.sym.name) == "_to_copy")


def _is_of_backward(reader: BoundSymbol) -> bool:
    """Tell whether an operation of backward is a product that makes a gradient, or changes little."""
    return _is_cast(reader) or _name(reader.sym.name) in _IN_BACKWARD


def _name(symbol: str) -> str:
    """Return the name of PyTorch's operator that an operation runs; empty: it runs none."""
    operator = find_operator(symbol)
    return "" if operator is None else operator.overloadpacket.__name__
