"""Runs operations on rows of parameters and gradients: each is correct or raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from thunder_memsave.sharding.operands import first_of, tensors_in
from thunder_memsave.sharding.reductions import over_ranks, reduced
from thunder_memsave.sharding.row_errors import (
    ShardedParameterError,
    into_a_file,
    not_by_rows,
)
from thunder_memsave.sharding.row_operations import Kind, kind_of, name_of

RowsT = TypeVar("RowsT", bound="Rows")
# Of results with the same rows; `unsharded_shape` depends on the result's own.
_MARKS = ("_num_real_rows", "_parameter_name", "over_ranks")


class Rows(Tensor):
    """This rank's rows of a whole, with the operations that are correct on them."""

    is_of_gradient: ClassVar[bool] = False
    """Whether its reductions are those of the whole."""
    class_of_results: ClassVar[type[Rows]]
    unsharded_shape: torch.Size
    _num_real_rows: int
    _parameter_name: str

    def refusal(self, operation: str) -> str:
        """Return the message for an operation that is not correct by rows."""
        return not_by_rows(operation, self)

    def mark_gradient(self, grad: Tensor) -> Tensor:
        """Mark a gradient of these rows in place; that of a copy stays plain."""
        return grad

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func` on plain tensors, or refuses it."""
        return run(func, args, kwargs or {})


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` on plain tensors, or refuse it; rows are among the arguments."""
    kind = kind_of(func)
    with torch._C.DisableTorchFunctionSubclass():
        if kind is Kind.INSPECTS:
            return func(*args, **kwargs)
        if kind is Kind.DIFFERENTIATES and not _gives_rows(args, kwargs):
            return _differentiated(func(*args, **kwargs), args, kwargs)
        of = _rows_among([*args, kwargs])
        if kind is None and _sets_where(func, args, of):
            kind = Kind.CHANGES
        if kind is None or kind is Kind.DIFFERENTIATES:
            return _reduced(func, args, kwargs, of)
        if args and isinstance(args[0], list | tuple):
            return _run_each(func, kind, args, kwargs, of)
        if kind is Kind.COPIES:
            return _copied(func(*args, **kwargs), of, args)
        return _computed(func, kind, args, kwargs, of)


def marked_like(t: Tensor, of: Tensor, cls: type[RowsT]) -> RowsT:
    """Return `t`, computed from the rows `of`, as rows of this class."""
    with torch._C.DisableTorchFunctionSubclass():
        marked = t.as_subclass(cls)
    whole = vars(of)["unsharded_shape"]
    marked.unsharded_shape = torch.Size((whole[0], *t.shape[1:])) if t.dim() else whole
    vars(marked).update({mark: vars(of)[mark] for mark in _MARKS if mark in vars(of)})
    return marked


def _rows_among(operands: Sequence[Any]) -> Rows:
    """Return the first rows of a gradient, else the first rows: the result is like these."""
    first: Rows | None = None
    for t in tensors_in(operands):
        if isinstance(t, Rows):
            first = t if first is None else first
            if t.is_of_gradient:
                return t
    assert first is not None
    return first


def _sets_where(func: Callable[..., Any], args: Sequence[Any], of: Rows) -> bool:
    """Return whether it is `t[mask] = value` with a mask of each element of the rows."""
    if func is not Tensor.__setitem__ or not isinstance(args[1], Tensor):
        return False
    return args[1].dtype is torch.bool and args[0].shape == args[1].shape == of.shape


def _differentiated(result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Mark the results of `torch.autograd.grad` that are gradients of sharded parameters."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    for of, grad in zip(tensors_in(inputs), result, strict=True):
        if isinstance(of, Rows) and grad is not None:
            of.mark_gradient(grad)
    return result


def _reduced(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], of: Rows
) -> Any:
    """Reduce gradients over all ranks; refuse what is no such reduction."""
    if of.is_of_gradient and func is Tensor.data_ptr:
        return func(*args, **kwargs)  # for kernels; to a file gradients go as plain tensors
    result = NotImplemented
    if all(over_ranks(t) for t in tensors_in([*args, kwargs]) if isinstance(t, Rows)):
        is_each = bool(args) and isinstance(args[0], list | tuple)
        _refuse_gradient(func, of, [*args, kwargs])
        _refuse_misfit(func, of, [] if is_each else args)
        result = reduced(func, args, kwargs)
    if result is NotImplemented:
        raise ShardedParameterError(_refusal(func, of))
    return result


def _computed(
    func: Callable[..., Any],
    kind: Kind,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: Rows,
) -> Any:
    _refuse_misfit(func, of, [*args, kwargs])
    if kind is not Kind.COMPARES:
        _refuse_gradient(func, of, [*args, kwargs])
    result = func(*args, **kwargs)
    is_callers = kind is Kind.CHANGES or "out" in kwargs or result is NotImplemented
    if is_callers or (kind is Kind.ADDS and _is_plain(args, of)):
        return result
    # Such as the row numbers that `torch.where(p > 0)` gives.
    if not isinstance(result, Tensor):
        raise ShardedParameterError(_refusal(func, of))
    return marked_like(result, of, of.class_of_results)


def _gives_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    outputs = args[0] if args else kwargs["outputs"]
    return first_of(Rows, [outputs]) is not None


def _copied(result: Any, of: Rows, args: Sequence[Any]) -> Any:
    """Mark the result if it is a copy of rows; `x.type_as(p)` is not."""
    is_own = bool(args) and not isinstance(args[0], Rows)
    if is_own or isinstance(result, Rows) or not isinstance(result, Tensor):
        return result
    return marked_like(result, of, of.class_of_results)


def _run_each(
    func: Callable[..., Any],
    kind: Kind,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: Rows,
) -> Any:
    """Run an operation on lists of tensors, such as an optimizer's `_foreach_add_`."""
    _refuse_gradient(func, of, [*args, kwargs])
    results = func(*args, **kwargs)
    if kind is Kind.CHANGES:
        return results
    marked = []
    for number, result in enumerate(results):
        operands = [a[number] for a in args if isinstance(a, list | tuple) and number < len(a)]
        if first_of(Rows, operands) is not None:
            rows = _rows_among(operands)
            _refuse_misfit(func, rows, operands)
            if not (kind is Kind.ADDS and _is_plain(operands, rows)):
                result = marked_like(result, rows, rows.class_of_results)
        marked.append(result)
    return type(results)(marked)


def _is_plain(operands: Sequence[Any], of: Rows) -> bool:
    """Return whether the first operand is a plain tensor of the rows' shape: a gradient or optimizer state."""
    first = operands[0] if operands else None
    return isinstance(first, Tensor) and not isinstance(first, Rows) and first.shape == of.shape


def _refuse_misfit(func: Callable[..., Any], of: Rows, operands: Sequence[Any]) -> None:
    """Refuse operands that have neither a row for each row of `of` nor one for all of them."""
    for t in tensors_in(operands):
        is_other_weight = isinstance(t, Rows) and whole_rows(t) != whole_rows(of)
        if is_other_weight or not (t.shape == of.shape or _is_one_for_all(t, of)):
            raise ShardedParameterError(_refusal(func, of))


def whole_rows(t: Any) -> int:
    """Return the number of rows of the whole weight that `t` is a shard of."""
    rows: int = t.unsharded_shape[0]
    return rows


def _is_one_for_all(t: Tensor, of: Rows) -> bool:
    return t.dim() < of.dim() or (t.dim() == of.dim() and t.shape[:1] in ((), (1,)))


def _refuse_gradient(func: Callable[..., Any], of: Rows, operands: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(operands)):
        raise ShardedParameterError(
            f"{_refusal(func, of)} Its gradient would be that of these rows alone: compute a penalty in the "
            "module's forward, or of the weight as forward returns it; arithmetic on rows goes under torch.no_grad()."
        )


def _refusal(func: Callable[..., Any], of: Rows) -> str:
    is_for_a_file = (
        func is Tensor.data_ptr and not of.is_of_gradient
    )  # safetensors copies from there
    return into_a_file(of) if is_for_a_file else of.refusal(name_of(func))
