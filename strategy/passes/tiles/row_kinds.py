"""Tells of the values of a joint trace where their rows of tokens are, and which operators compute each row alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from thunder.core.prims import OpTags
from thunder.core.proxies import FutureTensorProxy, TensorProxy
from thunder.core.symbol import BoundSymbol

from thunder_memsave.ops.aten_operators import operator_of


@dataclass(frozen=True, slots=True)
class Rows:
    """Where a value has its rows."""

    kind: Literal["rows", "columns", "whole"]
    """Its first dims are rows; or the columns of a matrix are; or it has none, and no row has a part in it alone."""
    dims: int = 0
    """How many dims the rows have."""


WHOLE = Rows("whole")
COLUMNS = Rows("columns")


@dataclass(frozen=True, slots=True)
class RowWise:
    """How an operator can run on a tile of rows."""

    results: tuple[Rows, ...]
    """`whole`: a sum over rows, to be added up over tiles."""
    view: tuple[int, tuple[int, ...]] | None = None
    """Of a view, as `ops.row_tiles.RowStep.view`."""


@dataclass(frozen=True, slots=True)
class RowKinds:
    """The rows of a trace's values, and the symbols that can run on tiles of them."""

    num_rows: int
    of: Mapping[str, Rows]
    """By name, as far as it is known."""
    row_wise: Mapping[int, RowWise]
    """By the ids of the symbols that can run on tiles."""

    def width(self, proxy: TensorProxy) -> int:
        """Return the elements of a row; 0 of a value without rows."""
        kind = self.of.get(proxy.name, WHOLE)
        return 0 if kind.kind == "whole" else int(proxy.numel) // self.num_rows


def row_kinds(symbols: Sequence[BoundSymbol], *, weights: Collection[str]) -> RowKinds | None:
    """Follow rows of tokens through a trace.

    Args:
        symbols: Of a joint trace, with operations claimed by executors.
        weights: Names of the arguments that are no part of a batch.

    Returns:
        None if no product of a matrix reads rows.
    """
    num_rows = _num_rows(symbols, weights)
    if num_rows is None:
        return None
    of: dict[str, Rows] = dict.fromkeys(weights, WHOLE)
    whole = set(weights)
    row_wise: dict[int, RowWise] = {}
    for bsym in symbols:
        if _is_of(bsym, whole):
            of.update((o.name, WHOLE) for o in bsym.flat_proxy_outs)
            whole.update(o.name for o in bsym.flat_proxy_outs)
            continue
        results = [o for o in bsym.flat_proxy_outs if isinstance(o, TensorProxy)]
        found = _row_wise(bsym, of, num_rows)
        if found is not None:
            row_wise[id(bsym)] = found
            of.update(zip((o.name for o in results), found.results, strict=True))
            whole.update(o.name for o in results if of[o.name] == WHOLE)
            continue
        for o in results:
            if o.name not in of and (dims := _leading(o.shape, num_rows)) is not None:
                of[o.name] = Rows("rows", dims)
    return RowKinds(num_rows, of, row_wise)


def _num_rows(symbols: Sequence[BoundSymbol], weights: Collection[str]) -> int | None:
    """Return the rows that most of what products of matrices make has."""
    whole = set(weights)
    made: Counter[int] = Counter()
    for bsym in symbols:
        if _is_of(bsym, whole):
            whole.update(o.name for o in bsym.flat_proxy_outs)
        elif operator_of(bsym) in (_MM, _ADDMM):
            made[int(bsym.output.shape[0])] += int(bsym.output.numel)
    return max(made, key=lambda rows: (made[rows], rows)) if made else None


def _is_of(bsym: BoundSymbol, values: Collection[str]) -> bool:
    """Tell whether all tensors that it reads are among these, those on their way too, such as a gathered weight."""
    read = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy | FutureTensorProxy)]
    return bool(read) and all(a.name in values for a in read)


def _leading(shape: Sequence[int], num_rows: int) -> int | None:
    """Return how many first dims have as many elements as there are rows."""
    for dims in range(1, len(shape) + 1):
        if math.prod(shape[:dims]) == num_rows:
            return dims
    return None


_ATEN = torch.ops.aten
_MM, _ADDMM = _ATEN.mm.default, _ATEN.addmm.default
_VIEWS = (_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default)
_LIKE_POINTWISE = (_ATEN._to_copy.default, _ATEN.clone.default)


def _row_wise(bsym: BoundSymbol, of: Mapping[str, Rows], num_rows: int) -> RowWise | None:
    """Return how a symbol can run on tiles; None: it cannot, or not for certain."""
    operator = operator_of(bsym)
    if operator is None or OpTags.RANDOM_OP in bsym.tags:
        return None
    tensors = [a for a in bsym.flat_proxy_args if isinstance(a, TensorProxy)]
    kinds = [of.get(a.name) for a in tensors]
    if any(kind is None for kind in kinds):
        return None
    call = _Call(bsym, [k for k in kinds if k is not None], num_rows)
    if operator in _VIEWS:
        return _view(call)
    if operator in _RULES:
        return _RULES[operator](call)
    if torch.Tag.pointwise in operator.tags or operator in _LIKE_POINTWISE:
        return _pointwise(call)
    return None


@dataclass(frozen=True, slots=True)
class _Call:
    bsym: BoundSymbol
    kinds: Sequence[Rows]
    """Of the tensors that it reads."""
    num_rows: int

    @property
    def tensors(self) -> list[TensorProxy]:
        return [a for a in self.bsym.flat_proxy_args if isinstance(a, TensorProxy)]


def _view(call: _Call) -> RowWise | None:
    kind, shape = call.kinds[0], call.bsym.output.shape
    dims = _leading(shape, call.num_rows)
    if kind.kind != "rows" or dims is None:
        return None
    return RowWise((Rows("rows", dims),), view=(dims, tuple(map(int, shape[dims:]))))


def _transposed(call: _Call) -> RowWise | None:
    kind, is_matrix = call.kinds[0], call.tensors[0].ndim == 2
    if not is_matrix:
        return None
    return RowWise((COLUMNS if kind.kind == "rows" else Rows("rows", 1),))


def _product(call: _Call) -> RowWise | None:
    """Rows times a matrix; or a sum over rows of products of two values of a row."""
    left, right = call.kinds
    if left == Rows("rows", 1) and right == WHOLE:
        return RowWise((left,))
    is_sum = left == COLUMNS and right == Rows("rows", 1)
    return RowWise((WHOLE,)) if is_sum else None


def _added_product(call: _Call) -> RowWise | None:
    is_plain = call.kinds == [WHOLE, Rows("rows", 1), WHOLE] and not call.bsym.kwargs
    return RowWise((Rows("rows", 1),)) if is_plain else None


def _pointwise(call: _Call) -> RowWise | None:
    """Every tensor has the rows of the result, or none and no dim that would meet them."""
    shape = call.bsym.output.shape
    with_rows = [k for k in call.kinds if k.kind != "whole"]
    if not with_rows or any(k != with_rows[0] or k.kind != "rows" for k in with_rows):
        return None
    dims = with_rows[0].dims
    for tensor, kind in zip(call.tensors, call.kinds, strict=True):
        has_rows = tuple(tensor.shape[:dims]) == tuple(shape[:dims]) and tensor.ndim == len(shape)
        is_row = tensor.ndim <= len(shape) - dims
        if not (has_rows if kind.kind == "rows" else is_row):
            return None
    return RowWise((with_rows[0],))


def _sum(call: _Call) -> RowWise | None:
    """Over dims of a row, or over all rows alone."""
    kind, tensor = call.kinds[0], call.tensors[0]
    given: Any = call.bsym.args[1] if len(call.bsym.args) > 1 else None
    if kind.kind != "rows" or not given:
        return None
    summed = sorted(int(d) % tensor.ndim for d in given)
    if summed[0] >= kind.dims:
        return RowWise((kind,))
    is_over_rows = summed == list(range(kind.dims)) and call.bsym.sym.name.startswith("aten_sum")
    return RowWise((WHOLE,)) if is_over_rows else None


def _part(call: _Call) -> RowWise | None:
    """Parts of each row: all results have the rows of the operand."""
    kind, tensor = call.kinds[0], call.tensors[0]
    dim = call.bsym.args[2] if len(call.bsym.args) > 2 else 0
    if _ATEN.slice.Tensor is operator_of(call.bsym):
        dim = call.bsym.args[1] if len(call.bsym.args) > 1 else 0
    if kind.kind != "rows" or int(dim) % tensor.ndim < kind.dims:
        return None
    return RowWise((kind,) * len(call.bsym.flat_proxy_outs))


def _joined(call: _Call) -> RowWise | None:
    """Rows one after the other in the dims of a row."""
    kind, args = call.kinds[0], call.bsym.args
    dim = int(args[1]) if len(args) > 1 else 0
    alike = all(k == kind for k in call.kinds) and kind.kind == "rows"
    return RowWise((kind,)) if alike and dim % call.tensors[0].ndim >= kind.dims else None


_RULES: Mapping[Any, Callable[[_Call], RowWise | None]] = {
    _MM: _product,
    _ADDMM: _added_product,
    _ATEN.t.default: _transposed,
    _ATEN.sum.dim_IntList: _sum,
    _ATEN.mean.dim: _sum,
    _ATEN.split.Tensor: _part,
    _ATEN.slice.Tensor: _part,
    _ATEN.cat.default: _joined,
}
