"""A sharded parameter, and tensors computed from its rows: each operation on them is correct or raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from thunder_memsave.compat import foreach_subclasses
from thunder_memsave.errors import ThunderMemsaveError
from thunder_memsave.sharding.row_operations import Kind, kind_of, name_of

TensorT = TypeVar("TensorT", bound=Tensor)

_STATE = ("unsharded_shape", "_first_row", "_num_real_rows", "_parameter_name")
_UNQUANTIZED = "unquantized_dtype"
# A caller that reads the memory of a value of `state_dict()` is about to write a file.
_GIVES_BYTES = frozenset(
    {"data_ptr", "numpy", "storage", "untyped_storage", "__array__", "__dlpack__"}
)


class ShardedParameterError(ThunderMemsaveError, ValueError):
    """This rank's rows of a weight were used as if they were the whole weight."""

    code = None  # the traceback shows the user


class ShardedParameter(nn.Parameter):
    """This rank's rows of a parameter: real rows first, then padding rows of zeros.

    Made in place by assigning `__class__`, so that the object keeps its identity. Operations that are correct on each
    rank's rows run: an optimizer's arithmetic, copies, inspection. Their results are marked as rows too. All other
    operations raise `ShardedParameterError`, and so do operations that would record a gradient. `p.data`, a plain
    tensor of the rows, is the only way around that.
    """

    unsharded_shape: torch.Size
    _first_row: int
    _num_real_rows: int
    _parameter_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func` on plain tensors, or refuses it."""
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """Copy the rows and the attributes of the whole."""
        if id(self) not in memo:
            copied = nn.Parameter(self.data.clone(), self.requires_grad)
            memo[id(self)] = _rebuild(copied, self._state())
        copied_once: ShardedParameter = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Pickle as a sharded parameter: torch's own way gives a parameter that looks whole."""
        plain = nn.Parameter(self.data, self.requires_grad)
        return _rebuild, (plain, self._state())

    def _state(self) -> dict[str, Any]:
        state = {k.lstrip("_"): vars(self)[k] for k in _STATE}
        return {**state, _UNQUANTIZED: unquantized_dtype(self)}


class ShardedRows(Tensor):
    """A tensor computed from a sharded parameter's rows, such as `p.detach()`, with the same operations.

    It refuses to be written to a file, where it would look whole. `t.data` is a plain tensor of the rows.
    """

    unsharded_shape: torch.Size
    _num_real_rows: int
    _parameter_name: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs `func` on plain tensors, or refuses it."""
        return _run(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Copy the rows, with this tensor's marks."""
        if id(self) not in memo:
            memo[id(self)] = _marked(self.data.clone(), self, type(self))
        copied_once: Tensor = memo[id(self)]
        return copied_once

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled, which is how `torch.save` writes."""
        raise ShardedParameterError(_message_of_file(self))


class StateRows(ShardedRows):
    """A value of a sharded module's `state_dict()`: this rank's rows without padding.

    Every operation reads it as a plain tensor, but neither it nor a result can be written to a file.
    """

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
        if any(not issubclass(t, StateRows) and issubclass(t, _STRICT) for t in types):
            return _run(func, args, kwargs)
        rows = first_of(StateRows, [*args, kwargs])
        assert rows is not None
        if name_of(func) in _GIVES_BYTES:
            raise ShardedParameterError(_message_of_file(rows))
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if kind_of(func) is Kind.INSPECTS or "out" in kwargs:
                return result
            return _mark_each(result, rows, args)


_STRICT = (ShardedParameter, ShardedRows)


def mark_sharded(
    p: nn.Parameter,
    *,
    unsharded_shape: torch.Size,
    first_row: int,
    num_real_rows: int,
    parameter_name: str,
) -> ShardedParameter:
    """Turn `p`, which already holds this rank's rows, into a sharded parameter in place."""
    p.__class__ = ShardedParameter
    assert isinstance(p, ShardedParameter)
    p.unsharded_shape = unsharded_shape
    p._first_row = first_row
    p._num_real_rows = num_real_rows
    p._parameter_name = parameter_name
    foreach_subclasses.allow(ShardedParameter)
    return p


def _rebuild(plain: nn.Parameter, state: dict[str, Any]) -> ShardedParameter:
    dtype = state.pop(_UNQUANTIZED)
    sharded = mark_sharded(plain, **state)
    if dtype is not None:
        mark_quantized(sharded, unquantized_dtype=dtype)
    return sharded


def mark_quantized(p: nn.Parameter, *, unquantized_dtype: torch.dtype) -> None:
    """Mark `p`, sharded or not, as the fp8 numbers of a weight of this dtype."""
    setattr(p, _UNQUANTIZED, unquantized_dtype)


def unquantized_dtype(p: Tensor) -> torch.dtype | None:
    """Return the dtype of the weight whose fp8 numbers `p` holds; None: `p` holds the weight itself."""
    return vars(p).get(_UNQUANTIZED)


def is_sharded(p: Tensor) -> bool:
    """Return whether `p` is a shard."""
    return isinstance(p, ShardedParameter)


def first_of(kind: type[TensorT], args: Sequence[Any]) -> TensorT | None:
    """Return the first tensor of this type among arguments, also within lists and mappings."""
    return next((a for a in tensors_in(args) if isinstance(a, kind)), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments, also within lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def as_rows(t: Tensor) -> Tensor:
    """Return the rows as a plain tensor that shares memory and version with `t`; any other tensor detached."""
    with torch._C.DisableTorchFunctionSubclass():
        return t.detach()


def refuse_rows(t: Tensor, *, operation: str) -> None:
    """Refuse rows as a collective's input: ranks would mix different rows, and torch does not check.

    Args:
        t: The input.
        operation: The collective's name in the error.

    Raises:
        ShardedParameterError: `t` is a sharded parameter, or computed from its rows.
    """
    if _is_rows(t):
        raise ShardedParameterError(_message(operation, t))


def mark_state(rows: Tensor, p: ShardedParameter) -> StateRows:
    """Mark plain `rows` as a value of `state_dict()`."""
    marked = _marked(rows, p, StateRows)
    assert isinstance(marked, StateRows)
    return marked


def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    kind = kind_of(func)
    with torch._C.DisableTorchFunctionSubclass():
        if kind is Kind.INSPECTS or (kind is Kind.DIFFERENTIATES and not _gives_rows(args, kwargs)):
            return func(*args, **kwargs)
        of = next(t for t in tensors_in([*args, kwargs]) if _is_rows(t))
        if kind is None or kind is Kind.DIFFERENTIATES:
            is_for_a_file = func is Tensor.data_ptr  # safetensors copies from there
            text = _message_of_file(of) if is_for_a_file else _message(name_of(func), of)
            raise ShardedParameterError(text)
        if args and isinstance(args[0], list | tuple):
            return _run_each(func, kind, args, kwargs, of)
        if kind is Kind.COPIES:
            return _copied(func(*args, **kwargs), of, args)
        return _computed(func, kind, args, kwargs, of)


def _computed(
    func: Callable[..., Any],
    kind: Kind,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: Tensor,
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
        raise ShardedParameterError(_message(name_of(func), of))
    return _marked(result, of, ShardedRows)


def _gives_rows(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    outputs = args[0] if args else kwargs["outputs"]
    return any(map(_is_rows, tensors_in(outputs)))


def _copied(result: Any, of: Tensor, args: Sequence[Any]) -> Any:
    """Mark the result if it is a copy of rows; `x.type_as(p)` is not."""
    is_own = bool(args) and not _is_rows(args[0])
    if is_own or _is_rows(result) or not isinstance(result, Tensor):
        return result
    return _marked(result, of, ShardedRows)


def _run_each(
    func: Callable[..., Any],
    kind: Kind,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    of: Tensor,
) -> Any:
    """Run an operation on lists of tensors, such as an optimizer's `_foreach_add_`."""
    _refuse_gradient(func, of, [*args, kwargs])
    results = func(*args, **kwargs)
    if kind is Kind.CHANGES:
        return results
    marked = []
    for number, result in enumerate(results):
        operands = [a[number] for a in args if isinstance(a, list | tuple) and number < len(a)]
        rows = next((t for t in operands if _is_rows(t)), None)
        if rows is not None:
            _refuse_misfit(func, rows, operands)
        is_rows = rows is not None and not (kind is Kind.ADDS and _is_plain(operands, rows))
        marked.append(
            _marked(result, rows, ShardedRows) if is_rows and rows is not None else result
        )
    return type(results)(marked)


def _is_rows(t: Any) -> bool:
    return isinstance(t, _STRICT)


def _is_plain(operands: Sequence[Any], of: Tensor) -> bool:
    """Return whether the first operand is a plain tensor of the rows' shape: a gradient or optimizer state."""
    first = operands[0] if operands else None
    return isinstance(first, Tensor) and not _is_rows(first) and first.shape == of.shape


def _refuse_misfit(func: Callable[..., Any], of: Tensor, operands: Sequence[Any]) -> None:
    """Refuse operands that have neither a row for each row of `of` nor one for all of them."""
    for t in tensors_in(operands):
        is_other_weight = _is_rows(t) and whole_rows(t) != whole_rows(of)
        if is_other_weight or not (t.shape == of.shape or _is_one_for_all(t, of)):
            raise ShardedParameterError(_message(name_of(func), of))


def whole_rows(t: Any) -> int:
    """Return the number of rows of the whole weight that `t` is a shard of."""
    rows: int = t.unsharded_shape[0]
    return rows


def _is_one_for_all(t: Tensor, of: Tensor) -> bool:
    return t.dim() < of.dim() or (t.dim() == of.dim() and t.shape[:1] in ((), (1,)))


def _refuse_gradient(func: Callable[..., Any], of: Tensor, operands: Sequence[Any]) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(operands)):
        raise ShardedParameterError(
            f"{_message(name_of(func), of)} Its gradient would be that of these rows alone: compute a penalty in the "
            "module's forward, or of the weight as forward returns it; arithmetic on rows goes under torch.no_grad()."
        )


def _mark_each(result: Any, of: StateRows, args: Sequence[Any]) -> Any:
    """Mark results with elements of a state dict's value; a single number is read, not written."""
    if isinstance(result, Tensor):
        is_new = not any(result is a for a in tensors_in(args))
        return _marked(result, of, StateRows) if is_new and result.dim() else result
    if isinstance(result, list | tuple):
        marked = [_mark_each(r, of, args) for r in result]
        return marked if isinstance(result, list) else tuple(marked)
    return result


def _marked(t: Tensor, of: Tensor, cls: type[Tensor]) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        marked: Any = t.as_subclass(cls)
    whole = vars(of)["unsharded_shape"]
    marked.unsharded_shape = torch.Size((whole[0], *t.shape[1:])) if t.dim() else whole
    marked._num_real_rows = vars(of)["_num_real_rows"]
    marked._parameter_name = vars(of)["_parameter_name"]
    return marked  # type: ignore[no-any-return]


def _rows_held(of: Tensor) -> str:
    rows = vars(of)
    whole = rows["unsharded_shape"]
    return (
        f"{rows['_parameter_name']!r} of shape {tuple(whole)} {{}}; this rank holds only {rows['_num_real_rows']} of "
        f"its {whole[0]} rows."
    )


def _message(operation: str, of: Tensor) -> str:
    return (
        f"{operation}() was asked to use {_rows_held(of).format('outside the compiled forward')} Run it inside "
        "`with strategy.summon_full(module):`, on every rank, which gathers the whole weights."
    )


def _message_of_file(of: Tensor) -> str:
    return (
        f"Refused to write rows of {_rows_held(of).format('to a file as if they were all of it')} Gather the whole "
        "weights first, on every rank: `with strategy.summon_full(module):` around the call that writes, such as "
        "save_pretrained, or strategy.get_module_state_dict(module), or fabric.save with state_dict_type='full'. To "
        "write only these rows, pass `value.data`."
    )
