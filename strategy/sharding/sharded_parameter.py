"""A sharded parameter, its gradient, and tensors computed from their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from typing_extensions import override

from thunder_memsave.compat import foreach_subclasses
from thunder_memsave.settings.frozen_format import BytesFormat
from thunder_memsave.sharding.operands import first_of, tensors_in
from thunder_memsave.sharding.reductions import Gather, OverRanks
from thunder_memsave.sharding.row_arithmetic import Rows, marked_like, run
from thunder_memsave.sharding.row_errors import (
    ShardedParameterError,
    gradient_not_by_rows,
    into_a_file,
    not_a_value,
)
from thunder_memsave.sharding.row_operations import Kind, kind_of, name_of

_STATE = ("unsharded_shape", "_first_row", "_num_real_rows", "_parameter_name")
_STORED = "stored_weight"
# torch's own accessors.
_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data
# A caller that reads the memory of a value of `state_dict()` is about to write a file.
_GIVES_BYTES = frozenset(
    {"data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__dlpack__"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """The whole weight that a parameter, or all its shards, hold in a format of fewer bytes."""

    format: Literal["fp8", BytesFormat]
    """`fp8`: numbers in the weight's shape, whose scale is elsewhere; the others: bytes, scales among them, flat in
    `nf4` and by rows in the others."""
    dtype: torch.dtype
    shape: torch.Size


class ShardedRows(Rows):
    """A tensor computed from a sharded parameter's rows, such as `p.detach()`, with the same operations.

    It refuses to be written to a file, where it would look whole. `t.data` is a plain tensor of the rows.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the rows, with this tensor's marks."""
        if id(self) not in memo:
            memo[id(self)] = marked_like(self.data.clone(), self, type(self))
        copied_once: Tensor = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, which is how `torch.save` writes."""
        raise ShardedParameterError(into_a_file(self))


class GradientRows(ShardedRows):
    """This rank's rows of a parameter's gradient, or of what is computed from it.

    `p.grad` is one; the object stays, so that autograd adds to it. The reductions in `reductions.py` are of the whole
    gradient, like those of torch's DTensor: collectives, so every rank calls them. Pickled, it is a plain tensor, like
    the rest of an optimizer's state.
    """

    is_of_gradient = True
    over_ranks: OverRanks | None

    def to_local(self) -> Tensor:
        """Return a plain tensor of this rank's rows, with padding, in the same memory."""
        return as_rows(self)

    @override
    def refusal(self, operation: str) -> str:
        """Return the message for an operation that is neither by rows nor a reduction of the whole."""
        return gradient_not_by_rows(operation, self)

    @property
    def data(self) -> Tensor:
        """The rows without autograd's record; `p.grad.data.norm()` is as much of the whole as `p.grad.norm()`."""
        return marked_like(as_rows(self), self, GradientRows)

    @data.setter
    def data(self, data: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _DATA.__set__(self, data)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the rows."""
        return as_rows(self).__reduce_ex__(protocol)


class StateRows(ShardedRows):
    """A value of the `state_dict()` of a sharded module, this rank's rows without padding, or of its optimizer, with.

    Every operation reads it as a plain tensor, but neither it nor a result can be written to a file. Scripts that
    write whole weights of torch's DTensors by hand do so with these too: `t.full_tensor()`.
    """

    _gather: Gather | None = None
    _padded_rows: int

    def full_tensor(self) -> Tensor:
        """Gather the whole value, a plain tensor, like DTensor's: a collective, in the same order on every rank.

        Raises:
            ShardedParameterError: it is not a value of `state_dict()` or a copy of one, but computed from it.
        """
        if self._gather is None:
            raise ShardedParameterError(not_a_value(self))
        with torch.no_grad():
            rows = as_rows(self)
            padded = rows.new_zeros((self._padded_rows, *rows.shape[1:]))
            padded[: len(rows)] = rows
            return gathered(
                padded, self._gather, self.unsharded_shape
            ).clone()  # a file would get the padding too

    @property
    def _local_tensor(self) -> Tensor:
        """The attribute by which scripts, such as litgpt's, tell a DTensor, whose `full_tensor` they then call."""
        return as_rows(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the rows, with this tensor's marks."""
        copied: Tensor = _as_value(super().__deepcopy__(memo), self)
        return copied

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run `func` on plain tensors, unless it exposes the memory."""
        kwargs = kwargs or {}
        if any(not issubclass(t, StateRows) and issubclass(t, Rows) for t in types):
            return run(func, args, kwargs)
        rows = first_of(StateRows, [*args, kwargs])
        assert rows is not None
        if name_of(func) in _GIVES_BYTES:
            raise ShardedParameterError(into_a_file(rows))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if kind_of(func) is Kind.INSPECTS or "out" in kwargs:
                return result
            marked = _mark_each(result, rows, args)
        is_copy = kind_of(func) is Kind.COPIES and bool(args) and args[0] is rows
        return _as_value(marked, rows) if is_copy else marked


class ShardedParameter(Rows, nn.Parameter):
    """This rank's rows of a parameter: real rows first, then padding rows of zeros.

    Made in place by assigning `__class__`, so that the object keeps its identity. Operations that are correct on each
    rank's rows run: an optimizer's arithmetic, copies, inspection. Their results are marked as rows too. All other
    operations raise `ShardedParameterError`, and so do operations that would record a gradient. `p.data`, a plain
    tensor of the rows, is the only way around that. `p.grad` is `GradientRows`.
    """

    class_of_results = ShardedRows
    _first_row: int
    _gather: Gather | None

    @property
    def grad(self) -> Tensor | None:
        """The gradient; autograd makes plain tensors, so it is marked when it is read."""
        with torch._C.DisableTorchFunctionSubclass():
            grad = _GRAD.__get__(self)
        return None if grad is None else self.mark_gradient(grad)

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__set__(self, grad)

    @grad.deleter
    def grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            _GRAD.__delete__(self)

    @override
    def mark_gradient(self, grad: Tensor) -> Tensor:
        """Mark `grad` in place, unless it is marked already or of someone else's type."""
        if type(grad) in (Tensor, ShardedRows, StateRows):
            over_ranks = OverRanks(self._gather, grad.device, len(grad)) if self._gather else None
            grad.__class__ = GradientRows
            assert isinstance(grad, GradientRows)
            grad.unsharded_shape, grad.over_ranks = self.unsharded_shape, over_ranks
            grad._num_real_rows, grad._parameter_name = self._num_real_rows, self._parameter_name
        return grad

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Copy the rows and the attributes of the whole."""
        if id(self) not in memo:
            copied = nn.Parameter(self.data.clone(), self.requires_grad)
            memo[id(self)] = _rebuild(copied, {**self._state(), "gather": self._gather})
        copied_once: ShardedParameter = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle as a sharded parameter: torch's own way gives a parameter that looks whole."""
        plain = nn.Parameter(self.data, self.requires_grad)
        return _rebuild, (plain, self._state())

    def _state(self) -> dict[str, Any]:
        state = {k.lstrip("_"): vars(self)[k] for k in _STATE}
        return {**state, _STORED: stored_weight(self)}


ShardedRows.class_of_results = ShardedRows
GradientRows.class_of_results = GradientRows


def mark_sharded(
    p: nn.Parameter,
    *,
    unsharded_shape: torch.Size,
    first_row: int,
    num_real_rows: int,
    parameter_name: str,
    gather: Gather | None = None,
) -> ShardedParameter:
    """Turn `p`, which already holds this rank's rows, into a sharded parameter in place.

    Without `gather`, as after unpickling, its gradient is not reduced over the ranks: that is refused.
    """
    p.__class__ = ShardedParameter
    assert isinstance(p, ShardedParameter)
    p.unsharded_shape = unsharded_shape
    p._first_row = first_row
    p._num_real_rows = num_real_rows
    p._parameter_name = parameter_name
    p._gather = gather
    for cls in (ShardedParameter, GradientRows):
        foreach_subclasses.allow(cls)
    return p


def _rebuild(plain: nn.Parameter, state: dict[str, Any]) -> ShardedParameter:
    stored = state.pop(_STORED)
    sharded = mark_sharded(plain, **state)
    if stored is not None:
        mark_quantized(sharded, stored)
    return sharded


def mark_quantized(p: nn.Parameter, stored: StoredWeight) -> None:
    """Mark `p`, sharded or not, as what is stored of a weight."""
    setattr(p, _STORED, stored)


def stored_weight(p: Tensor) -> StoredWeight | None:
    """Return what is stored in `p` in another format; None: `p` holds the weight itself."""
    return vars(p).get(_STORED)


def unquantized_dtype(p: Tensor) -> torch.dtype | None:
    """Return the dtype of the weight that is stored in `p`; None: `p` holds the weight itself."""
    stored = stored_weight(p)
    return None if stored is None else stored.dtype


def gathered(rows: Tensor, gather: Gather, unsharded_shape: torch.Size) -> Tensor:
    """Gather the whole of rows with padding; without it. A collective."""
    of_ranks = gather(rows.contiguous().view(-1))
    return of_ranks.view(-1, *rows.shape[1:])[: unsharded_shape[0]]


def is_sharded(p: Tensor) -> bool:
    """Return whether `p` is a shard."""
    return isinstance(p, ShardedParameter)


def as_rows(t: Tensor) -> Tensor:
    """Return the rows as a plain tensor that shares memory and version with `t`; any other tensor detached."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach()


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are: plain tensors, this rank's rows of sharded ones."""
    return [as_rows(p.grad) for p in parameters if p.grad is not None]


def refuse_rows(t: Tensor, *, operation: str) -> None:
    """Refuse rows as a collective's input: ranks would mix different rows, and torch does not check.

    Args:
        t: The input.
        operation: The collective's name in the error.

    Raises:
        ShardedParameterError: `t` is a sharded parameter, or computed from its rows.
    """
    if isinstance(t, Rows):
        raise ShardedParameterError(t.refusal(operation))


def mark_state(rows: Tensor, p: ShardedParameter) -> StateRows:
    """Mark plain `rows`, of `p` or shaped like it, as a value of `state_dict()`."""
    marked = marked_like(rows, p, StateRows)
    marked._gather, marked._padded_rows = p._gather, p.shape[0]
    return marked


def _as_value(copied: Any, of: StateRows) -> Any:
    """Let a copy of a value be gathered as the value can be."""
    if isinstance(copied, StateRows):
        copied._gather, copied._padded_rows = of._gather, vars(of).get("_padded_rows", 0)
    return copied


def _mark_each(result: Any, of: StateRows, args: Sequence[Any]) -> Any:
    """Mark results with elements of a state dict's value; a single number is read, not written."""
    if isinstance(result, Tensor):
        is_new = not any(result is a for a in tensors_in(args))
        return marked_like(result, of, StateRows) if is_new and result.dim() else result
    if isinstance(result, list | tuple):
        marked = [_mark_each(r, of, args) for r in result]
        return marked if isinstance(result, list) else tuple(marked)
    return result
