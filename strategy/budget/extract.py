"""Extracts the planner's input from traces: storages, operations and lifetimes.

`training_graph` reads the joint trace, before recomputation; `running_program.py` reads the traces that run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from thunder.core import prims
from thunder.core.prims import PrimIDs
from thunder.core.proxies import Proxy, TensorProxy
from thunder.core.pytree import tree_flatten
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import Tensor

from thunder_memsave.aten.record import FP8_DTYPES
from thunder_memsave.measure.collective_memory import CollectiveRules
from thunder_memsave.measure.host_copies import HostCopyRules
from thunder_memsave.measure.layouts import Layout, Value, contiguous, layout_of, numel_of
from thunder_memsave.measure.op_profile import OpProfile, OpProfiles, Scratch, no_scratch
from thunder_memsave.measure.used_gradients import UsedGradientRules
from thunder_memsave.ops.families.collectives import gathers, is_wait
from thunder_memsave.ops.kernel_calls import alone
from thunder_memsave.ops.location import Location, location
from thunder_memsave.passes.repeatable import why_not_repeatable
from thunder_memsave.passes.symbols import (
    decisive_args,
    forward_symbols,
    is_tensor,
    raises_amax,
)
from thunder_memsave.planner.graph import (
    Op,
    Repeat,
    Storage,
    StorageKind,
    TrainingGraph,
)
from thunder_memsave.planner.riding import with_riding
from thunder_memsave.stored_weights.symbols import is_dequantized

Fuses: TypeAlias = Callable[[BoundSymbol, "Values"], bool]
"""Tells whether a symbol becomes one kernel with neighbours that do, from the values that it reads."""

_BOOKKEEPING = {
    PrimIDs.UNPACK_TRIVIAL,
    PrimIDs.UNPACK_SEQUENCE,
    PrimIDs.COMMENT,
    PrimIDs.RETURN,
    PrimIDs.GET_GRAD,
}
_NAMES = {"clear_mutable_collection"}


def nothing_fuses(bsym: BoundSymbol, values: Values) -> bool:
    """Return False: each symbol is a kernel of its own."""
    return False


def profiles(*, scratch: Scratch = no_scratch, device_type: str = "") -> OpProfiles:
    """Make a cache of symbols' profiles, to be shared by all extractions of one compiled call.

    Args:
        scratch: Gives the bytes that kernels allocate inside (`measure/scratch.py`).
        device_type: Type of the planned device, if the trace's tensors are on another one, such as meta.
    """
    found = OpProfiles(scratch=scratch, device_type=device_type)
    found.rules = (
        CollectiveRules(found.allocated_bytes, device_type=device_type),
        UsedGradientRules(found.allocated_bytes),
        HostCopyRules(found.allocated_bytes),
    )
    return found


def training_graph(
    trace: TraceCtx,
    *,
    kinds: Mapping[str, StorageKind] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    known: OpProfiles | None = None,
    used: Collection[str] = (),
    fuses: Fuses = nothing_fuses,
) -> TrainingGraph:
    """Extract the storages and operations of a joint trace, forward first, in the order of Thunder's split.

    Args:
        trace: A joint trace with operations claimed by executors; or an inference trace, which has no backward.
        kinds: Kinds of the trace's arguments by name; others are parameters if they need a gradient, else the batch.
        tensors: Tensors of the arguments, if known: they give shared memory and strides.
        known: Profiles to share, from `profiles(...)`.
        used: Names of the arguments whose gradients die where they are made: they are added to earlier ones, or used
            to update.
        fuses: Tells which symbols become one kernel with neighbours that do.

    Raises:
        CompileError: an operation does not run on tensors without data.
    """
    values = Values(trace.args, kinds or {}, tensors or {}, known or profiles())
    symbols = trace.bound_symbols
    cotangents = add_cotangents(symbols, values)
    ops: list[Op] = []
    num_forward, fusing = 0, set[int]()
    for index, is_forward in forward_first(symbols):
        num_forward += is_forward
        kind: StorageKind = "activation" if is_forward else "temporary"
        if fuses(symbols[index], values):
            fusing.add(len(ops))
        ops.append(values.run(symbols[index], index, kind).op)
    returned = returned_by(trace)
    gradients = values.storages_of(returned.gradients) - values.inputs
    values.set_kind(gradients, "gradient")
    graph = TrainingGraph(
        storages=tuple(values.storages),
        ops=tuple(_with_unrepeatable(ops, symbols, values.written_at)),
        num_forward=num_forward,
        storage_of={name: v.storage for name, v in values.by_name.items()},
        inputs=frozenset(values.inputs),
        outputs=values.storages_of(returned.outputs),
        gradients=values.storages_of(_staying(trace, returned.gradients, used)) - values.inputs,
        cotangents=frozenset(cotangents),
    )
    return with_riding(graph, fusing)


def _staying(trace: TraceCtx, gradients: Sequence[Any], used: Collection[str]) -> Sequence[Any]:
    """Return the gradients that do not die where they are made."""
    pairs = itertools.zip_longest(trace.args, gradients)
    return [g for a, g in pairs if not (isinstance(a, Proxy) and a.name in used)]


@dataclass(frozen=True, slots=True)
class _Ran:
    """A symbol after it ran."""

    op: Op
    made: tuple[int, ...]
    """Storages that it made, including those without a name."""
    is_repeated: bool


@dataclass(slots=True)
class Values:
    """The tensors of a trace by name, and their storages."""

    arguments: Sequence[Proxy]
    kinds: Mapping[str, StorageKind]
    tensors: Mapping[str, Tensor]
    known: OpProfiles
    storages: list[Storage] = field(default_factory=list)
    by_name: dict[str, Value] = field(default_factory=dict)
    held_by: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Storages that the future of a collective keeps live beside its own."""
    inputs: set[int] = field(default_factory=set)
    written_at: dict[int, list[int]] = field(default_factory=dict)
    """Indices of the symbols that write to a storage in place."""
    _futures: set[str] = field(default_factory=set)
    """Names of gathers in flight."""
    _fresh: Iterator[int] = field(default_factory=itertools.count)
    _numbers: dict[Hashable, list[int]] = field(default_factory=dict)
    """Value numbers of a symbol's results, by its profile's key and the value numbers of its arguments."""
    _number_of: dict[str, int] = field(default_factory=dict)
    """Value number by name: equal for values that are computed alike from equal ones."""
    _last_location: Location = field(default_factory=Location)

    def __post_init__(self) -> None:
        shared: dict[int, int] = {}
        for proxy in self.arguments:
            if isinstance(proxy, TensorProxy):
                self._add_argument(proxy, shared)
        self.inputs = set(range(len(self.storages)))

    def _add_argument(self, proxy: TensorProxy, shared: dict[int, int]) -> None:
        default: StorageKind = "parameter" if proxy.requires_grad else "batch"
        kind = self.kinds.get(proxy.name, default)
        if kind == "host":
            self.by_name[proxy.name] = Value(contiguous(proxy), self._add(0, kind, proxy.name))
            return
        if (tensor := self.tensors.get(proxy.name)) is None:
            self.by_name[proxy.name] = self.new(contiguous(proxy), kind, proxy.name)
            return
        layout, memory = layout_of(tensor), tensor.untyped_storage()._cdata
        if memory not in shared:
            shared[memory] = self.new(layout, kind, proxy.name).storage
        self.by_name[proxy.name] = Value(layout, shared[memory])

    def new(self, layout: Layout, kind: StorageKind, name: str) -> Value:
        """Make a value with a storage of its own."""
        device_type = layout.device.partition(":")[0]
        nbytes = self.known.allocated_bytes(layout.storage_bytes, device_type)
        return Value(layout, self._add(nbytes, kind, name))

    def _add(self, nbytes: int, kind: StorageKind, name: str) -> int:
        self.storages.append(Storage(nbytes=nbytes, kind=kind, name=name))
        return len(self.storages) - 1

    def add_cotangent(self, proxy: TensorProxy) -> int:
        """Add the gradient that the caller passes for one output; return its storage."""
        value = self.new(contiguous(proxy), "cotangent", proxy.name)
        self.by_name[proxy.name] = value
        return value.storage

    def storages_of(self, proxies: Sequence[Any]) -> frozenset[int]:
        """Return the storages of these proxies, each once; numbers have none."""
        names = (p.name for p in proxies if is_tensor(p))
        return frozenset(self.by_name[name].storage for name in names)

    def kept_by(self, name: str) -> tuple[int, ...]:
        """Return the storages that a name keeps live; a number has none."""
        value = self.by_name.get(name)
        own = () if value is None else (value.storage,)
        return (*own, *self.held_by.get(name, ()))

    def set_kind(self, storages: Collection[int], kind: StorageKind) -> None:
        """Change the kind of storages."""
        for index in storages:
            self.storages[index] = replace(self.storages[index], kind=kind)

    def run(self, bsym: BoundSymbol, index: int, kind: StorageKind) -> _Ran:
        """Give the symbol's results their storages, and return its operation."""
        arguments = [self.by_name.get(a.name) for a in bsym.flat_proxy_args]
        profile = self.known.profile(bsym, arguments)
        if raises_amax(bsym):
            profile = replace(profile, written=frozenset())
        tensors = [a for a in arguments if a is not None]
        numbers = list(dict.fromkeys(a.storage for a in tensors))
        for storage in profile.written:
            self.written_at.setdefault(numbers[storage], []).append(index)
        repeat = self._repeat(bsym, profile)
        decisive = [self.by_name[a.name] for a in decisive_args(bsym) if a.name in self.by_name]
        made = self._kind(bsym, decisive, profile, repeat, kind)
        makes = self._make(bsym, profile, numbers, made)
        is_repeated = self._number(bsym, profile)
        place = self._last_location = location(bsym) or self._last_location
        op = Op(
            symbol=bsym.sym.name,
            index=index,
            arguments=tuple(dict.fromkeys(a.name for a in bsym.flat_proxy_args if is_tensor(a))),
            results=tuple(o.name for o in bsym.flat_proxy_outs if is_tensor(o)),
            reads=tuple(numbers),
            makes=makes,
            peak_bytes=profile.peak_bytes,
            scratch_bytes=profile.scratch_bytes,
            repeat=repeat,
            flops=profile.flops,
            moved_bytes=profile.moved_bytes,
            beside_bytes=profile.beside_bytes,
            sent_bytes=profile.sent_bytes,
            copied_bytes=profile.copied_bytes,
            dtype=profile.dtype,
            key=profile.key,
            alone=self._alone(bsym, index, arguments),
            source=place.source,
            module=place.module,
        )
        return _Ran(op, makes, is_repeated)

    def _alone(self, bsym: BoundSymbol, index: int, arguments: Sequence[Value | None]) -> Op | None:
        """Return what forward runs instead where the symbol is recomputed."""
        if (less := alone(bsym)) is None:
            return None
        profile = self.known.profile(less, arguments)
        return Op(
            symbol=less.sym.name,
            index=index,
            arguments=(),
            results=(),
            reads=(),
            makes=(),
            peak_bytes=profile.peak_bytes,
            flops=profile.flops,
            moved_bytes=profile.moved_bytes,
            beside_bytes=profile.beside_bytes,
            dtype=profile.dtype,
            key=profile.key,
        )

    def _make(
        self, bsym: BoundSymbol, profile: OpProfile, numbers: list[int], kind: StorageKind
    ) -> tuple[int, ...]:
        """Add the storages that a symbol makes, and map its results to storages; return the new ones."""
        storages, made = list(numbers), []
        names = [o.name for o in bsym.flat_proxy_outs]
        for name, result in zip(names, profile.results, strict=True):
            if result is None:
                continue
            if result.storage == len(storages):
                nbytes = profile.made_bytes[result.storage - profile.num_argument_storages]
                storages.append(self._add(nbytes, kind, name))
                made.append(storages[-1])
            self.by_name[name] = Value(result.layout, storages[result.storage])
        held = [numbers[storage] for storage in sorted(profile.held)]
        if profile.held_bytes:
            made.append(self._add(profile.held_bytes, kind, f"{names[0]}.held"))
            held.append(made[-1])
        if held:
            self.held_by.update((name, tuple(held)) for name in names)
        return tuple(made)

    def _kind(
        self,
        bsym: BoundSymbol,
        arguments: Sequence[Value],
        profile: OpProfile,
        repeat: Repeat,
        kind: StorageKind,
    ) -> StorageKind:
        """Return `gathered` for a gather of a parameter, or its copy with as many elements; else `kind`."""
        if len(arguments) != 1 or repeat == "no" or not profile.made_bytes:
            return kind
        if self.storages[arguments[0].storage].kind not in ("parameter", "host", "gathered"):
            return kind
        results = [r.layout for r in profile.results if r is not None]
        if results[0].dtype in FP8_DTYPES:  # the scale beside it is no part of it
            results = results[:1]
        sizes = set(map(numel_of, results))
        grows = profile.is_collective or is_dequantized(bsym)
        return "gathered" if grows or sizes == {numel_of(arguments[0].layout)} else kind

    def _repeat(self, bsym: BoundSymbol, profile: OpProfile) -> Repeat:
        if gathers(bsym):
            self._futures.update(o.name for o in bsym.flat_proxy_outs)
            return "yes"
        if is_wait(bsym):
            return "free" if bsym.flat_proxy_args[0].name in self._futures else "no"
        if profile.is_collective or profile.changes_device or profile.written:
            return "no"
        if profile.is_random:
            return "replay"
        return "free" if profile.is_view else "yes"

    def _number(self, bsym: BoundSymbol, profile: OpProfile) -> bool:
        """Number the results; tell whether the same symbol ran before on the same values."""
        inputs = tuple(self._number_of_value(a.name) for a in bsym.flat_proxy_args)
        key = (profile.key, inputs)
        is_known = key in self._numbers
        if not is_known or profile.is_random:
            self._numbers[key] = [next(self._fresh) for _ in bsym.flat_proxy_outs]
        for result, number in zip(bsym.flat_proxy_outs, self._numbers[key], strict=True):
            self._number_of[result.name] = number
        return is_known and not profile.is_random

    def _number_of_value(self, name: str) -> int:
        if name not in self._number_of:
            self._number_of[name] = next(self._fresh)
        return self._number_of[name]


@dataclass(frozen=True, slots=True)
class _Returned:
    outputs: Sequence[Any]
    gradients: Sequence[Any]
    saved: Sequence[Any] = ()


def returned_by(trace: TraceCtx) -> _Returned:
    """Return the outputs, gradients and saved tensors of any of the traces that a compiled call goes through."""
    result, *saved = trace.bound_symbols[-1].args
    if not isinstance(result, dict):
        return _Returned(tree_flatten((result, *saved))[0], ())
    if "fw_flat_out" in result:
        return _Returned(tree_flatten(result["fw_flat_out"])[0], list(result["output"]))
    held = list(saved[0][0]) if saved else []
    return _Returned(tree_flatten(result["output"])[0], (), held)


def is_bookkeeping(bsym: BoundSymbol) -> bool:
    """Tell whether a symbol runs nothing on the device."""
    return bsym.sym.id in _BOOKKEEPING or bsym.sym is prims.python_del or bsym.sym.name in _NAMES


def forward_first(symbols: Sequence[BoundSymbol]) -> Iterator[tuple[int, bool]]:
    """Yield the index of each symbol of a joint trace that runs, and whether it is forward's, which come first."""
    forward = forward_symbols(symbols)
    for index in sorted(range(len(symbols)), key=lambda i: id(symbols[i]) not in forward):
        if not is_bookkeeping(symbols[index]):
            yield index, id(symbols[index]) in forward


def add_cotangents(symbols: Sequence[BoundSymbol], values: Values) -> list[int]:
    """Add the gradients that the caller passes for the outputs of a joint trace; return their storages."""
    return [values.add_cotangent(b.output) for b in symbols if b.sym.id is PrimIDs.GET_GRAD]


def _with_unrepeatable(
    ops: Sequence[Op], symbols: Sequence[BoundSymbol], written_at: Mapping[int, Sequence[int]]
) -> Iterator[Op]:
    """Yield the operations, with `no` for those that cannot be recomputed.

    These are the ones that the pass `recompute` would refuse, which knows only names and so is stricter than storages
    require; readers of a storage that is overwritten later; and views that also depend on other storages.
    """
    refused = why_not_repeatable(symbols)
    position = {op.index: place for place, op in enumerate(ops)}
    last = {s: max(position[i] for i in indices) for s, indices in written_at.items()}
    for place, op in enumerate(ops):
        is_overwritten = any(last.get(s, -1) > place for s in op.reads)
        is_joining = op.repeat == "free" and len(op.reads) > 1
        is_refused = is_overwritten or is_joining or id(symbols[op.index]) in refused
        yield replace(op, repeat="no") if is_refused else op
