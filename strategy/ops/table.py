"""The table of operations: a row for each that runs by kernels of ours, and what is looked up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thunder_memsave.ops import aten_operators
from thunder_memsave.ops.families import (
    aten_scratch,
    attention,
    attention_kernels,
    embedding_gradient,
    linear_cross_entropy,
    linear_cross_entropy_in_fp8,
    packed_kernels,
    rms_norm,
    windowed_attention,
)
from thunder_memsave.ops.operation import (
    ROWS_PER_TILE,
    Derivative,
    Foreign,
    Kernel,
    Operand,
    Operation,
)

OPERATIONS: tuple[Operation, ...] = (
    *attention.OPERATIONS,
    *packed_kernels.OPERATIONS,
    *windowed_attention.OPERATIONS,
    *rms_norm.OPERATIONS,
    *linear_cross_entropy.OPERATIONS,
    *linear_cross_entropy_in_fp8.OPERATIONS,
)

FOREIGN: tuple[Foreign, ...] = (
    attention_kernels.of_pytorch,
    aten_scratch.layer_norm_backward,
    aten_scratch.embedding_backward,
    embedding_gradient.sorted_tokens,
)


def operation_of(function: Callable[..., Any]) -> Operation | None:
    """Return the row of a torch function; None: it runs as it is."""
    return _BY_FUNCTION.get(function)


def scratch_bytes(operator: str, operands: Sequence[Operand]) -> int:
    """Return what an operator of an executed trace takes at most inside of itself, beside its results.

    All that have no row take nothing beyond what libraries keep for good: cuBLAS's workspace is part of the reserve.

    Args:
        operator: Its name in the trace.
        operands: The tensors that it reads.
    """
    if not operands:
        return 0
    if (ours := _OPERATORS.get(operator)) is not None:
        formula = ours.scratch.get(operands[0].device.partition(":")[0])
        return 0 if formula is None else formula(operands)
    foreign = _foreign(operator)
    return 0 if foreign is None else foreign.scratch(operator, operands)


def is_one_kernel(operator: str, operands: Sequence[Operand]) -> bool:
    """Say whether an operator of an executed trace reads its operands and writes its results once, and no more.

    Args:
        operator: Its name in the trace.
        operands: The tensors that it reads; the device of the first counts.
    """
    ours = _OPERATORS.get(operator)
    return ours is not None and bool(operands) and ours.is_one_kernel(operands)


def write_numbers(operator: str, arguments: Sequence[Tensor]) -> None:
    """Write into the zeros that an operator is to be measured on what makes it do the most work."""
    if (numbers := _NUMBERS.get(operator)) is not None:
        numbers(arguments)


def place_of_rows_per_tile(operator: str) -> int | None:
    """Return the place of the argument that says how many tokens a tile has; None: the operator has no such tiles."""
    names = _arguments(operator)
    return names.index(ROWS_PER_TILE) if ROWS_PER_TILE in names else None


def places_on_host(operator: str) -> frozenset[int]:
    """Return the places of arguments on the CPU that a captured graph of the operator does not read."""
    names, on_host = _arguments(operator), _ON_HOST.get(operator, ())
    return frozenset(place for place, name in enumerate(names) if name in on_host)


def _arguments(operator: str) -> tuple[str, ...]:
    """Return the names of what an operator of ours takes; nothing for any other."""
    ours = _OPERATORS.get(operator)
    if ours is None:
        return ()
    return ours.takes if isinstance(ours, Kernel) else ("grad", *ours.reads)


def _foreign(operator: str) -> Foreign | None:
    return next((f for f in FOREIGN if f.matches(operator)), None)


def _by_function(operations: Iterable[Operation]) -> Mapping[Callable[..., Any], Operation]:
    found: dict[Callable[..., Any], Operation] = {}
    for operation in operations:
        for function in operation.functions:
            assert function not in found, f"{found[function].name} and {operation.name} are one"
            found[function] = operation
    return found


_BY_FUNCTION = _by_function(OPERATIONS)
_OPERATORS: Mapping[str, Kernel | Derivative] = {
    name: operator
    for operation in OPERATIONS
    for kernel in operation.kernels
    for name, operator in kernel.operators.items()
}
_ON_HOST = {
    operator: kernel.on_host
    for operation in OPERATIONS
    for kernel in operation.kernels
    for operator in kernel.operators
}
_NUMBERS = dict(aten_operators.NUMBERS) | {
    operator: kernel.numbers
    for operation in OPERATIONS
    for kernel in operation.kernels
    if kernel.numbers is not None
    for operator in kernel.operators
}
