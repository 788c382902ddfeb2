"""Profiles one symbol of an executed trace: its costs and the memory it shares, by running it once on FakeTensors.

There is no table of views and of writes in place: the run shows what memory a result shares. A trace of 80 layers has a
few hundred different symbols, so a cache makes this fast: its key is the operation, its other arguments, and shape,
strides, dtype, device and shared memory of its tensors. Torch's own operators are run once in a process. Collectives
are not run; their rules are in `collective_memory.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from thunder.core import devices, dtypes, prims
from thunder.core.codeutils import SigInfo
from thunder.core.proxies import (
    FutureTensorProxy,
    NumberProxy,
    Proxy,
    TensorProxy,
)
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, tracectx
from thunder.extend import TemporaryExecutor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from thunder_memsave.aten.record import (
    FP8_DTYPES,
    AtenRecord,
    allocated_bytes,
    storage_id,
)
from thunder_memsave.errors import CompileError
from thunder_memsave.measure.absent_device import WithoutAbsentDevices
from thunder_memsave.measure.layouts import (
    Value,
    layout_of,
    make_arguments,
    on_planned_device,
)
from thunder_memsave.ops.aten_operators import aten_executor
from thunder_memsave.ops.table import is_one_kernel

_WRITTEN_OUT = (
    *(bool, int, float, complex, str, bytes, Enum, type(None), type(...)),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Size),
    *(devices.Device, dtypes.dtype),
)
"""Types whose `repr` is the value, and the same in every process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpProfile:
    """The costs of a symbol. Its storages are numbered: those of its arguments in order, then those that it makes."""

    results: tuple[Value | None, ...]
    """One value for each of the symbol's result proxies; None for numbers."""
    num_argument_storages: int
    made_bytes: tuple[int, ...]
    """Bytes of each new storage, as the allocator counts."""
    held_bytes: int = 0
    """Bytes without a name that a collective in flight holds until the wait for one of its results."""
    held: frozenset[int] = frozenset()
    """Storages of arguments that a collective in flight holds until then."""
    peak_bytes: int = 0
    """Peak of the bytes allocated inside, results and scratch included."""
    scratch_bytes: int = 0
    flops: int = 0
    moved_bytes: int = 0
    beside_bytes: int = 0
    """The part of `moved_bytes` that operators without FLOPs move, where others inside have some."""
    sent_bytes: int = 0
    copied_bytes: int = 0
    """Bytes that a copy to or from the host moves, beside what computes."""
    is_random: bool = False
    is_collective: bool = False
    changes_device: bool = False
    written: frozenset[int] = frozenset()
    """Storages of arguments that are written to."""
    dtype: str = ""
    key: str = ""

    @property
    def is_view(self) -> bool:
        """True if it moves no data."""
        return not (self.made_bytes or self.moved_bytes or self.written or self.sent_bytes)


class Operation(NamedTuple):
    """A symbol that can be run alone."""

    run: Callable[..., Any]
    """Takes one value for each argument proxy, and returns one for each result."""
    arguments: Sequence[Value | None]
    """None for a number."""
    can_run_alone: bool
    """False for an opaque function of the model, which may have side effects."""
    name: str = ""
    """In the trace; one of an opaque function says nothing."""


class Scratch(Protocol):
    """A function that gives the bytes that kernels allocate without a tensor."""

    def __call__(self, operation: Operation, profile: OpProfile, /) -> int:
        """Return the bytes at the operation's peak beyond those of `profile`."""


class Rule(Protocol):
    """A function that gives the profiles of symbols that must not be run."""

    def __call__(self, bsym: BoundSymbol, arguments: Sequence[Value], /) -> OpProfile | None:
        """Return the symbol's profile; None if it may be run."""


_of_torch: dict[Hashable, OpProfile] = {}
"""What runs of torch's own operators showed, before scratch is added."""


def no_scratch(operation: Operation, profile: OpProfile) -> int:
    """Return 0."""
    return 0


class OpProfiles:
    """Profiles symbols, and runs each kind once."""

    def __init__(
        self, *, rules: Sequence[Rule] = (), scratch: Scratch = no_scratch, device_type: str = ""
    ) -> None:
        """`device_type`: that of the planned device, if the trace's proxies are on another one, such as meta."""
        self.rules, self._scratch, self._device_type = tuple(rules), scratch, device_type
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._known: dict[Hashable, OpProfile] = {}

    def allocated_bytes(self, nbytes: int, device_type: str) -> int:
        """Return the bytes that the allocator of the planned device counts for a request."""
        return allocated_bytes(nbytes, self._device_type or device_type)

    @property
    def num_runs(self) -> int:
        """Number of kinds of symbols that were profiled."""
        return len(self._known)

    def profile(self, bsym: BoundSymbol, arguments: Sequence[Value | None]) -> OpProfile:
        """Return the profile of `bsym`.

        Args:
            bsym: A symbol of an executed trace.
            arguments: One value for each of its `flat_proxy_args`; None for a number.

        Raises:
            CompileError: it does not run on FakeTensors.
        """
        local = _renumbered(arguments)
        constants = _constants((bsym.args, bsym.kwargs))
        key = (bsym.sym.name, _identity(bsym), constants, tuple(local), len(bsym.flat_proxy_outs))
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._found(bsym, local, kind=key)
        return known

    def _found(
        self, bsym: BoundSymbol, arguments: Sequence[Value | None], kind: Hashable
    ) -> OpProfile:
        key = _key(bsym, arguments)
        tensors = [a for a in arguments if a is not None]
        for rule in self.rules:
            if (ruled := rule(bsym, tensors)) is not None:
                return replace(ruled, key=key)
        is_opaque = isinstance(bsym.sym.executor, TemporaryExecutor)
        operation = Operation(_callable(bsym), arguments, not is_opaque, bsym.sym.name)
        profile = replace(self._run_once(bsym, operation, kind), key=key)
        on_device = on_planned_device(tensors, self._device_type)
        if is_one_kernel(operation.name, on_device):
            profile = _by_one_kernel(profile, tensors)
        scratch_bytes = self._scratch(operation, profile)
        return replace(
            profile,
            peak_bytes=profile.peak_bytes + scratch_bytes,
            scratch_bytes=max(scratch_bytes, 0),
        )

    def _run_once(self, bsym: BoundSymbol, operation: Operation, kind: Hashable) -> OpProfile:
        if bsym.sym.executor is not aten_executor:  # others of one name may be others
            return self._run(bsym, operation)
        key = (kind, self._device_type, torch.are_deterministic_algorithms_enabled())
        if (known := _of_torch.get(key)) is None:
            known = _of_torch[key] = self._run(bsym, operation)
        return known

    def _run(self, bsym: BoundSymbol, operation: Operation) -> OpProfile:
        with self._fake:
            arguments = make_arguments(operation.arguments)
            tensors = [t for t in arguments if isinstance(t, Tensor)]
            record = AtenRecord(tensors, allocated=self.allocated_bytes)
            try:
                with record, WithoutAbsentDevices():
                    results = operation.run(*arguments)
            except Exception as error:
                raise CompileError(
                    f"{bsym.sym.name} cannot be planned for: it does not run on tensors without data ({error}). "
                    "Write it with other operations, or keep it out of the compiled model."
                ) from error
        return self._described(tensors, results, record)

    def _described(
        self, tensors: Sequence[Tensor], results: Sequence[Any], record: AtenRecord
    ) -> OpProfile:
        numbers: dict[int, int] = {}
        for t in tensors:
            numbers.setdefault(storage_id(t), len(numbers))
        num_arguments = len(numbers)
        made = []
        for t in results:
            if isinstance(t, Tensor) and storage_id(t) not in numbers:
                numbers[storage_id(t)] = len(numbers)
                made.append(self.allocated_bytes(t.untyped_storage().nbytes(), t.device.type))
        values = tuple(_value(t, numbers) if isinstance(t, Tensor) else None for t in results)
        found = [t for t in results if isinstance(t, Tensor)]
        return OpProfile(
            results=values,
            num_argument_storages=num_arguments,
            made_bytes=tuple(made),
            peak_bytes=max(record.peak_bytes, sum(made)),
            flops=record.flops,
            moved_bytes=record.moved_bytes,
            beside_bytes=record.moved_bytes - record.product_bytes if record.flops else 0,
            is_random=record.is_random,
            changes_device=_changes_device(tensors, found),
            written=frozenset(numbers[s] for s in record.written),
            dtype=_computed_in(tensors, found, record.flops_dtype),
        )


def _changes_device(operands: Sequence[Tensor], results: Sequence[Tensor]) -> bool:
    """Tell whether values go from one device to another; any operator may read a scalar of the host as a number."""
    read = [t for t in operands if t.ndim or not t.is_cpu]
    return len({t.device for t in (*(read or operands), *results)}) > 1


def _by_one_kernel(profile: OpProfile, arguments: Sequence[Value]) -> OpProfile:
    """Return the profile without what the run on FakeTensors made and moved between arguments and results."""
    whole = [*arguments, *(r for r in profile.results if r is not None)]
    return replace(
        profile,
        peak_bytes=sum(profile.made_bytes),
        moved_bytes=sum(v.layout.dtype.itemsize * math.prod(v.layout.shape) for v in whole),
        beside_bytes=0,
    )


def _computed_in(
    arguments: Sequence[Tensor], results: Sequence[Tensor], of_flops: torch.dtype | None
) -> str:
    """Return the dtype that gives the peak rate: that of products inside; of fp8 the operands alone tell."""
    dtypes_read = {t.dtype for t in arguments}
    fp8 = next((d for d in FP8_DTYPES if d in dtypes_read), None)
    found = fp8 or of_flops or next((t.dtype for t in results), None)
    return "" if found is None else str(found).removeprefix("torch.")


def _value(tensor: Tensor, numbers: Mapping[int, int]) -> Value:
    return Value(layout_of(tensor), numbers[storage_id(tensor)])


def _renumbered(values: Sequence[Value | None]) -> list[Value | None]:
    """Renumber storages in the order in which they appear."""
    numbers: dict[int, int] = {}
    return [
        None if v is None else Value(v.layout, numbers.setdefault(v.storage, len(numbers)))
        for v in values
    ]


def _callable(bsym: BoundSymbol) -> Callable[..., Any]:
    """Return a function that runs the symbol alone; it is made when it is called first."""
    made = cache(partial(_made, bsym))
    return lambda *values: made()(*values)


def _made(bsym: BoundSymbol) -> Callable[..., Any]:
    """Make it as Thunder would generate it, with the symbol's own constants."""
    arguments = _distinct(bsym.flat_proxy_args)
    trace = TraceCtx()
    trace.args, trace.kwargs = tuple(arguments), {}
    trace._siginfo = SigInfo.from_name_and_args("operation", trace.args)
    with tracectx(trace):
        for proxy in arguments:
            prims.unpack_trivial(proxy, name=proxy.name)
        trace.bound_symbols.append(bsym)
        prims.python_return(tuple(bsym.flat_proxy_outs))
    run = trace.python_callable()
    names = [a.name for a in bsym.flat_proxy_args]
    first = [names.index(a.name) for a in arguments]

    def operation(*values: Any) -> Any:
        return run(*(values[i] for i in first))

    return operation


def _distinct(proxies: Sequence[Proxy]) -> list[Proxy]:
    return list({p.name: p for p in proxies}.values())


def _identity(bsym: BoundSymbol) -> Hashable:
    """Return a key that tells operations of one name apart: the executor, and for opaque ones the function."""
    executor = bsym.sym.executor
    functions = tuple(map(_Same, (bsym._call_ctx or {}).values()))
    return (None if executor is None else str(executor.name), functions)


@dataclass(frozen=True, eq=False, slots=True)
class _Same:
    """Compares by object identity, and keeps the object alive, so that its address is not reused."""

    of: object

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def _constants(tree: Any) -> Hashable:
    """Return the arguments without the tensors, as a hashable key."""
    if isinstance(tree, TensorProxy | FutureTensorProxy):
        return "tensor"
    if isinstance(tree, NumberProxy):
        return ("number", tree.value)
    if isinstance(tree, (tuple, list)):
        return tuple(map(_constants, tree))
    if isinstance(tree, Mapping):
        return tuple((k, _constants(v)) for k, v in tree.items())
    if isinstance(tree, slice):
        return ("slice", *map(_constants, (tree.start, tree.stop, tree.step)))
    if isinstance(tree, float):
        return ("float", repr(tree))  # nan equals itself, and 1.0 is not 1
    if isinstance(tree, bool):
        return ("bool", tree)
    return tree if isinstance(tree, Hashable) else _Same(tree)


def _key(bsym: BoundSymbol, arguments: Sequence[Value | None]) -> str:
    """Return a key for files: equal in every process, without addresses."""
    executor = bsym.sym.executor
    tensors = " ".join("number" if v is None else _written_out(v) for v in arguments)
    numbers = ",".join(text_of(leaf) for leaf in tree_leaves((bsym.args, bsym.kwargs)))
    return f"{bsym.sym.name}[{executor.name if executor else ''}]({tensors})({numbers})"


def _written_out(value: Value) -> str:
    layout, dtype = value.layout, str(value.layout.dtype).removeprefix("torch.")
    shape, stride = (",".join(map(str, n)) for n in (layout.shape, layout.stride))
    device = layout.device.partition(":")[0]
    return f"{dtype}[{shape}]/[{stride}]+{layout.offset}@{device}#{value.storage}"


def text_of(leaf: Any) -> str:
    """Return an argument that is no tensor as text: equal in every process, without addresses."""
    if isinstance(leaf, NumberProxy):
        return str(leaf.value)
    if isinstance(leaf, Proxy):
        return "_"
    if isinstance(leaf, dist.ProcessGroup):
        return f"{leaf.size()} ranks"
    if isinstance(leaf, slice):
        return f"slice({', '.join(map(text_of, (leaf.start, leaf.stop, leaf.step)))})"
    if isinstance(leaf, set | frozenset):
        return f"{{{','.join(sorted(map(text_of, leaf)))}}}"
    if isinstance(leaf, _WRITTEN_OUT):
        return repr(leaf)
    # The `repr` of other objects may have an address.
    return str(getattr(leaf, "__name__", type(leaf).__qualname__))
