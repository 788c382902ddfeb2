"""Lists the reductions of a gradient to one number, and combines the numbers of all ranks' rows.

It is an allowlist, like `row_operations.py`: with a `dim`, or of another kind, a reduction is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.sharding.row_operations import functions_of

Gather = Callable[[Tensor], Tensor]
"""Takes some numbers, and gives those of each rank, a row for each. A collective."""


@dataclass(frozen=True, slots=True)
class OverRanks:
    """The way to combine numbers of the rows of one gradient."""

    gather: Gather
    device: torch.device
    """The device whose tensors can be gathered: that of the gradient, whatever its copies are on."""
    num_rows: int
    """The rows of each rank, with padding."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The part that this rank's rows have in a reduction."""

    number: Tensor
    """0-dim."""
    combine: Callable[[Tensor, int], Any]
    """Takes the numbers of all ranks that have rows, and the number of elements; gives the result."""


def over_ranks(t: Any) -> OverRanks | None:
    """Return the way to combine numbers of the rows `t` of a gradient; None: `t` is something else."""
    return vars(t).get("over_ranks") if isinstance(t, Tensor) else None


def reduced(operation: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Reduce gradients over all ranks, one or each of a list; `NotImplemented`: it is no reduction to one number.

    One collective, for a list too.
    """
    if args and isinstance(args[0], list | tuple):
        return _reduced_each(operation, args[0], args[1:], kwargs)
    results = _combined(operation, [args], kwargs)
    return results[0] if results else NotImplemented


def _reduced_each(
    operation: Callable[..., Any],
    tensors: Sequence[Tensor],
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    sharded = [t for t in tensors if over_ranks(t)]
    replicated = [t for t in tensors if not over_ranks(t)]
    results = _combined(operation, [(t, *rest) for t in sharded], kwargs)
    if not results:
        return NotImplemented
    of_sharded = iter(results)
    of_replicated = iter(operation(replicated, *rest, **kwargs) if replicated else ())
    return tuple(next(of_sharded if over_ranks(t) else of_replicated) for t in tensors)


def _combined(
    operation: Callable[..., Any], calls: Sequence[Sequence[Any]], kwargs: Mapping[str, Any]
) -> list[Any]:
    """Return the result of each call with a gradient among its arguments; none: it is no such reduction."""
    gradients: list[Any] = [next(filter(over_ranks, call), None) for call in calls]
    parts = _parts_of(operation, calls, kwargs, gradients)
    if not parts:
        return []
    ranks = gradients[0].over_ranks
    numbers = ranks.gather(torch.cat([p.number.to(ranks.device).reshape(1) for p in parts]))
    return [
        part.combine(of_ranks[: _num_ranks_with_rows(of)].to(part.number), _num_elements(of))
        for part, of, of_ranks in zip(parts, gradients, numbers.unbind(1), strict=True)
    ]


def _parts_of(
    operation: Callable[..., Any],
    calls: Sequence[Sequence[Any]],
    kwargs: Mapping[str, Any],
    gradients: Sequence[Any],
) -> list[_Part]:
    part = _PARTS.get(operation)
    if part is None or any(of is None for of in gradients):
        return []
    # torch's own methods pass on what the caller left out, such as `dim=None, keepdim=False`.
    given = {key: v for key, v in kwargs.items() if v is not None and v is not False}
    pairs = zip(calls, gradients, strict=True)
    try:
        return [part(*_real_rows(call, of), **given) for call, of in pairs]
    except (TypeError, ValueError):  # an argument that it does not have here, such as a `dim`
        return []


def _real_rows(call: Sequence[Any], of: Any) -> list[Any]:
    # A rank without real rows computes a number of its padding, which is left out.
    num_rows = of._num_real_rows or of.shape[0]
    return [t[:num_rows] if isinstance(t, Tensor) and t.shape == of.shape else t for t in call]


def _num_ranks_with_rows(of: Any) -> int:
    return -(-of.unsharded_shape[0] // of.over_ranks.num_rows)  # type: ignore[no-any-return]


def _num_elements(of: Any) -> int:
    return of.unsharded_shape.numel()  # type: ignore[no-any-return]


def _norm(t: Tensor, p: Any = 2.0, *, dtype: torch.dtype | None = None) -> _Part:
    order = 2.0 if p == "fro" else float(p)
    number = torch.linalg.vector_norm(t, order, dtype=dtype or _wide(t.dtype))
    result = number.dtype if dtype else t.dtype.to_real()

    def combine(numbers: Tensor, _: int) -> Tensor:
        # A norm of norms is the norm of everything, but order 0 counts.
        norm = torch.linalg.vector_norm(numbers, order) if order else numbers.sum()
        return norm.to(result)

    return _Part(number, combine)


def _vector_norm(t: Tensor, ord: Any = 2.0, *, dtype: torch.dtype | None = None) -> _Part:
    return _norm(t, ord, dtype=dtype)


def _flat_norm(t: Tensor, *, dtype: torch.dtype | None = None) -> _Part:
    """Reduce like `torch.linalg.norm` without an order; with one it is a matrix's norm."""
    return _norm(t, dtype=dtype)


def _sum(t: Tensor, *, dtype: torch.dtype | None = None) -> _Part:
    is_count = not (t.is_floating_point() or t.is_complex())
    result = dtype or (torch.int64 if is_count else t.dtype)
    return _Part(t.sum(dtype=_wide(result)), lambda numbers, _: numbers.sum().to(result))


def _mean(t: Tensor, *, dtype: torch.dtype | None = None) -> _Part:
    result = dtype or t.dtype
    total = t.sum(dtype=_wide(result))
    return _Part(total, lambda numbers, num_elements: (numbers.sum() / num_elements).to(result))


def _max(t: Tensor) -> _Part:
    return _Part(t.max(), lambda numbers, _: numbers.max())


def _min(t: Tensor) -> _Part:
    return _Part(t.min(), lambda numbers, _: numbers.min())


def _all(t: Tensor) -> _Part:
    return _Part(t.all(), lambda numbers, _: numbers.all())


def _any(t: Tensor) -> _Part:
    return _Part(t.any(), lambda numbers, _: numbers.any())


def _count_nonzero(t: Tensor) -> _Part:
    return _Part(t.count_nonzero(), lambda numbers, _: numbers.sum())


def _equal(t: Tensor, other: Tensor) -> _Part:
    is_equal = t.new_tensor(torch.equal(t, other), dtype=torch.bool)
    return _Part(is_equal, lambda numbers, _: bool(numbers.all()))


def _allclose(t: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> _Part:
    close = torch.isclose(t, other, *args, **kwargs)
    return _Part(close.all(), lambda numbers, _: bool(numbers.all()))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return a dtype for sums: those of 16 bits are rounded once, at the end."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _parts() -> dict[Any, Callable[..., _Part]]:
    named: dict[str, Callable[..., _Part]] = {
        "norm _foreach_norm": _norm,
        "sum": _sum,
        "mean": _mean,
        "max amax _foreach_max": _max,
        "min amin": _min,
        "all": _all,
        "any": _any,
        "count_nonzero": _count_nonzero,
        "equal": _equal,
        "allclose": _allclose,
    }
    parts = {f: part for names, part in named.items() for f in functions_of(names.split())}
    parts[torch.linalg.vector_norm] = _vector_norm
    parts[torch.linalg.norm] = _flat_norm
    return parts


_PARTS = _parts()
