"""Extracts what the planner plans with from traces: storages, operations, and when what dies.

`training_graph` reads the joint trace, before anything is computed again; `program` reads the traces that run, with
their `del` statements, and follows Python's references: what the trace's function holds, what autograd.py holds, and
what the caller holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from thunder_memsave import compat

compat.apply()

from thunder.core import prims  # noqa: E402
from thunder.core.prims import PrimIDs  # noqa: E402
from thunder.core.proxies import Proxy, TensorProxy  # noqa: E402
from thunder.core.pytree import tree_flatten  # noqa: E402
from thunder.core.symbol import BoundSymbol  # noqa: E402
from thunder.core.trace import TraceCtx  # noqa: E402

from thunder_memsave.aten_record import FP8_DTYPES  # noqa: E402
from thunder_memsave.collective_memory import CollectiveRules  # noqa: E402
from thunder_memsave.collectives import gathers, is_wait  # noqa: E402
from thunder_memsave.location import Location, location  # noqa: E402
from thunder_memsave.op_profile import (  # noqa: E402
    Layout,
    OpProfile,
    OpProfiles,
    Scratch,
    Value,
    contiguous,
    layout_of,
    no_scratch,
)
from thunder_memsave.passes.out_of_place import TraceMemory  # noqa: E402
from thunder_memsave.passes.repeatable import why_not_repeatable  # noqa: E402
from thunder_memsave.passes.symbols import (  # noqa: E402
    decisive_args,
    forward_symbols,
    is_tensor,
    records_amax,
)
from thunder_memsave.planner.graph import (  # noqa: E402
    Op,
    Program,
    Repeat,
    Step,
    Storage,
    StorageKind,
    TrainingGraph,
)

_BOOKKEEPING = {
    PrimIDs.UNPACK_TRIVIAL,
    PrimIDs.UNPACK_SEQUENCE,
    PrimIDs.COMMENT,
    PrimIDs.RETURN,
    PrimIDs.GET_GRAD,
}
_NAMES = {"clear_mutable_collection"}


def profiles(*, scratch: Scratch = no_scratch, device_type: str = "") -> OpProfiles:
    """What a symbol does, remembered; to be shared by all extractions of one compiled call.

    Args:
        scratch: What kernels take inside of themselves (`scratch.py`).
        device_type: Of the planned device, where the trace's tensors live on another one, such as meta.
    """
    found = OpProfiles(scratch=scratch, device_type=device_type)
    found.rules = (CollectiveRules(found.allocated_bytes, device_type=device_type),)
    return found


def training_graph(
    trace: TraceCtx,
    *,
    kinds: Mapping[str, StorageKind] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    known: OpProfiles | None = None,
) -> TrainingGraph:
    """The storages and operations of a joint trace, forward first, in the order that Thunder's split gives them.

    Args:
        trace: A joint trace with operations claimed by executors; or an inference trace, which has no backward.
        kinds: Of the trace's arguments by name; others are parameters where they need a gradient, else the batch.
        tensors: The arguments' tensors where they are known: which share memory, and how they are laid out.
        known: `profiles(...)`, to share what was found out.

    Raises:
        CompileError: an operation does not run on tensors without data.
    """
    values = _Values(trace.args, kinds or {}, tensors or {}, known or profiles())
    symbols = trace.bound_symbols
    forward = forward_symbols(symbols)
    order = sorted(range(len(symbols)), key=lambda i: id(symbols[i]) not in forward)
    cotangents = _cotangents(symbols, values)
    ops, num_forward = [], 0
    for index in order:
        if not _is_bookkeeping(symbols[index]):
            is_forward = id(symbols[index]) in forward
            num_forward += is_forward
            kind: StorageKind = "activation" if is_forward else "temporary"
            ops.append(values.run(symbols[index], index, kind).op)
    returned = _returned(trace)
    gradients = values.storages_of(returned.gradients) - values.inputs
    values.set_kind(gradients, "gradient")
    return TrainingGraph(
        storages=tuple(values.storages),
        ops=tuple(_with_unrepeatable(ops, symbols, values.written_at)),
        num_forward=num_forward,
        storage_of={name: v.storage for name, v in values.by_name.items()},
        inputs=frozenset(values.inputs),
        outputs=values.storages_of(returned.outputs),
        gradients=gradients,
        cotangents=frozenset(cotangents),
    )


def memory_of(
    trace: TraceCtx,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    known: OpProfiles | None = None,
) -> TraceMemory:
    """Where the tensors of a joint trace are, and how they are laid out; the arguments are those of `training_graph`.

    Raises:
        CompileError: an operation does not run on tensors without data.
    """
    values = _Values(trace.args, {}, tensors or {}, known or profiles())
    _cotangents(trace.bound_symbols, values)
    for index, bsym in enumerate(trace.bound_symbols):
        if not _is_bookkeeping(bsym):
            values.run(bsym, index, "activation")
    return TraceMemory(values.by_name, values.inputs)


def program(
    forward: TraceCtx,
    backward: TraceCtx | None,
    *,
    kinds: Mapping[str, StorageKind] | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    known: OpProfiles | None = None,
    differentiated: Collection[int] | None = None,
    accumulates: bool = False,
) -> Program:
    """What runs, in order, with what each operation frees.

    Args:
        forward: The final forward trace, after `del_last_used`; or an inference trace.
        backward: The final backward trace; None for inference.
        kinds: As for `training_graph`, and so are the next two.
        tensors: The arguments' tensors.
        known: `profiles(...)`.
        differentiated: Which of forward's flat outputs the caller passes a gradient for, such as the loss alone; None:
            each that has one. For the others autograd.py makes zeros, which die at their last use; what the caller
            passes lives to the end of backward.
        accumulates: Whether parameters have a gradient already, to which autograd adds these.

    Returns:
        The program. The caller holds arguments, all outputs until backward ends, and then the gradients. Its last steps
        may be autograd's own: a gradient that is laid out otherwise than its parameter is copied.
    """
    values = _Values(forward.args, kinds or {}, tensors or {}, known or profiles())
    return _Running(values, differentiated, accumulates=accumulates).program(forward, backward)


@dataclass(frozen=True, slots=True)
class _Ran:
    """A symbol that ran."""

    op: Op
    made: tuple[int, ...]
    """Storages, also those without a name of their own."""
    is_repeated: bool


@dataclass(slots=True)
class _Values:
    """The tensors of a trace by name, and their storages."""

    arguments: Sequence[Proxy]
    kinds: Mapping[str, StorageKind]
    tensors: Mapping[str, Tensor]
    known: OpProfiles
    storages: list[Storage] = field(default_factory=list)
    by_name: dict[str, Value] = field(default_factory=dict)
    held_by: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Storages that the future of a collective keeps alive beside its own."""
    inputs: set[int] = field(default_factory=set)
    written_at: dict[int, list[int]] = field(default_factory=dict)
    """Indices of the symbols that write to a storage that exists."""
    _futures: set[str] = field(default_factory=set)
    """Names of gathers under way."""
    _fresh: Iterator[int] = field(default_factory=itertools.count)
    _numbers: dict[Hashable, list[int]] = field(default_factory=dict)
    """Of the results of a symbol, by what it does to which values."""
    _number_of: dict[str, int] = field(default_factory=dict)
    """Equal for values that are computed alike from equal ones."""
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
        if (tensor := self.tensors.get(proxy.name)) is None:
            self.by_name[proxy.name] = self.new(contiguous(proxy), kind, proxy.name)
            return
        layout, memory = layout_of(tensor), tensor.untyped_storage()._cdata
        if memory not in shared:
            shared[memory] = self.new(layout, kind, proxy.name).storage
        self.by_name[proxy.name] = Value(layout, shared[memory])

    def new(self, layout: Layout, kind: StorageKind, name: str) -> Value:
        device_type = layout.device.partition(":")[0]
        nbytes = self.known.allocated_bytes(layout.storage_bytes, device_type)
        return Value(layout, self._add(nbytes, kind, name))

    def _add(self, nbytes: int, kind: StorageKind, name: str) -> int:
        self.storages.append(Storage(nbytes=nbytes, kind=kind, name=name))
        return len(self.storages) - 1

    def add_cotangent(self, proxy: TensorProxy) -> int:
        """What the caller passes for one output."""
        value = self.new(contiguous(proxy), "cotangent", proxy.name)
        self.by_name[proxy.name] = value
        return value.storage

    def storages_of(self, proxies: Sequence[Any]) -> frozenset[int]:
        """Each once; numbers have none."""
        names = (p.name for p in proxies if is_tensor(p))
        return frozenset(self.by_name[name].storage for name in names)

    def kept_by(self, name: str) -> tuple[int, ...]:
        """Storages that live while this name does; a number has none."""
        value = self.by_name.get(name)
        own = () if value is None else (value.storage,)
        return (*own, *self.held_by.get(name, ()))

    def set_kind(self, storages: Collection[int], kind: StorageKind) -> None:
        for index in storages:
            self.storages[index] = replace(self.storages[index], kind=kind)

    def run(self, bsym: BoundSymbol, index: int, kind: StorageKind) -> _Ran:
        """Give the symbol's results their storages, and say what it does."""
        arguments = [self.by_name.get(a.name) for a in bsym.flat_proxy_args]
        profile = self.known.profile(bsym, arguments)
        if records_amax(bsym):
            profile = replace(profile, written=frozenset())
        tensors = [a for a in arguments if a is not None]
        numbers = list(dict.fromkeys(a.storage for a in tensors))
        for storage in profile.written:
            self.written_at.setdefault(numbers[storage], []).append(index)
        repeat = self._repeat(bsym, profile)
        decisive = [self.by_name[a.name] for a in decisive_args(bsym) if a.name in self.by_name]
        makes = self._make(bsym, profile, numbers, self._kind(decisive, profile, repeat, kind))
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
            sent_bytes=profile.sent_bytes,
            dtype=profile.dtype,
            key=profile.key,
            source=place.source,
            module=place.module,
        )
        return _Ran(op, makes, is_repeated)

    def _make(
        self, bsym: BoundSymbol, profile: OpProfile, numbers: list[int], kind: StorageKind
    ) -> tuple[int, ...]:
        """Storages that are new, by the names that are in them."""
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
        self, arguments: Sequence[Value], profile: OpProfile, repeat: Repeat, kind: StorageKind
    ) -> StorageKind:
        """What is made of one parameter alone, and has as many elements, is the parameter once more."""
        if len(arguments) != 1 or repeat == "no" or not profile.made_bytes:
            return kind
        if self.storages[arguments[0].storage].kind not in ("parameter", "gathered"):
            return kind
        results = [r.layout for r in profile.results if r is not None]
        if results[0].dtype in FP8_DTYPES:  # the scale beside it is no part of it
            results = results[:1]
        sizes = set(map(_numel, results))
        grows = profile.is_collective
        return "gathered" if grows or sizes == {_numel(arguments[0].layout)} else kind

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
        """Whether the same was computed before, from the same."""
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


def _numel(layout: Layout) -> int:
    result = 1
    for length in layout.shape:
        result *= length
    return result


@dataclass(frozen=True, slots=True)
class _Returned:
    outputs: Sequence[Any]
    gradients: Sequence[Any]
    saved: Sequence[Any] = ()


def _returned(trace: TraceCtx) -> _Returned:
    """What forward and backward return, of any of the traces that a compiled call goes through."""
    result, *saved = trace.bound_symbols[-1].args
    if not isinstance(result, dict):
        return _Returned(tree_flatten((result, *saved))[0], ())
    if "fw_flat_out" in result:
        return _Returned(tree_flatten(result["fw_flat_out"])[0], list(result["output"]))
    held = list(saved[0][0]) if saved else []
    return _Returned(tree_flatten(result["output"])[0], (), held)


def _is_bookkeeping(bsym: BoundSymbol) -> bool:
    """Whether nothing runs."""
    return bsym.sym.id in _BOOKKEEPING or bsym.sym is prims.python_del or bsym.sym.name in _NAMES


def _cotangents(symbols: Sequence[BoundSymbol], values: _Values) -> list[int]:
    return [values.add_cotangent(b.output) for b in symbols if b.sym.id is PrimIDs.GET_GRAD]


def _with_unrepeatable(
    ops: Sequence[Op], symbols: Sequence[BoundSymbol], written_at: Mapping[int, Sequence[int]]
) -> Iterator[Op]:
    """Yield the operations, saying of each that `recompute` would refuse that it cannot be computed again.

    That pass knows names only, and so takes more for one memory than is. What reads a storage that is written to later
    is of no use the second time, and a view that waits for what is in other storages would need these.
    """
    refused = why_not_repeatable(symbols)
    position = {op.index: place for place, op in enumerate(ops)}
    last = {s: max(position[i] for i in indices) for s, indices in written_at.items()}
    for place, op in enumerate(ops):
        is_overwritten = any(last.get(s, -1) > place for s in op.reads)
        is_joining = op.repeat == "free" and len(op.reads) > 1
        is_refused = is_overwritten or is_joining or id(symbols[op.index]) in refused
        yield replace(op, repeat="no") if is_refused else op


class _Running:
    """Follows references while forward and backward run."""

    def __init__(
        self, values: _Values, differentiated: Collection[int] | None, *, accumulates: bool
    ) -> None:
        self._values = values
        self._differentiated, self._accumulates = differentiated, accumulates
        self._freed: set[int] = set()
        self._names: dict[int, set[str]] = {}
        """Names that hold a storage, by storage; the caller's have no dot in front."""
        self._steps: list[Step] = []

    def program(self, forward: TraceCtx, backward: TraceCtx | None) -> Program:
        values = self._values
        self._hold(values.inputs, ".caller")
        self._run(forward, "activation")
        returned = _returned(forward)
        outputs = values.storages_of(returned.outputs)
        self._hold(outputs, ".caller")
        saved = [p.name for p in returned.saved if is_tensor(p)]
        self._leave(keep=saved)
        num_forward, cotangents = len(self._steps), frozenset[int]()
        if backward is not None:
            cotangents = self._backward(backward, forward.args, returned.outputs)
        return Program(
            storages=tuple(values.storages),
            steps=tuple(self._steps),
            num_forward=num_forward,
            held=frozenset(values.inputs),
            cotangents=cotangents,
        )

    def _backward(
        self, backward: TraceCtx, arguments: Sequence[Any], outputs: Sequence[Any]
    ) -> frozenset[int]:
        cotangents = self._enter_backward(backward, outputs)
        self._run(backward, "temporary")
        returned = _returned(backward).outputs
        gradients = self._values.storages_of(returned) - self._values.inputs
        self._values.set_kind(gradients, "gradient")
        names = {p.name for p in returned if is_tensor(p)}
        self._leave(keep=names)
        if not self._accumulates:
            self._store_gradients(arguments, returned)
        self._drop(names)
        self._release(".caller", except_for=self._values.inputs)
        return cotangents

    def _store_gradients(self, arguments: Sequence[Any], gradients: Sequence[Any]) -> None:
        """As `AccumulateGrad` does: it takes over what nobody else has and is laid out like the parameter."""
        for number, (argument, gradient) in enumerate(zip(arguments, gradients, strict=True)):
            if not is_tensor(gradient):
                continue
            others = [g.name for g in gradients[number + 1 :] if is_tensor(g)]
            value, like = (self._values.by_name[p.name] for p in (gradient, argument))
            if gradient.name in others or not self._can_be_taken(value, like.layout):
                self._copy_gradient(gradient.name, value, like.layout)
            else:
                self._hold([value.storage], ".grad")
            if gradient.name not in others:
                self._drop([gradient.name])

    def _can_be_taken(self, value: Value, like: Layout) -> bool:
        if ".caller" in self._names.get(value.storage, ()) or value.storage in self._values.inputs:
            return False
        strides = zip(value.layout.shape, value.layout.stride, like.stride, strict=True)
        return all(ours == theirs for length, ours, theirs in strides if length != 1)

    def _copy_gradient(self, name: str, value: Value, like: Layout) -> None:
        nbytes = _numel(like) * like.dtype.itemsize
        layout = like._replace(offset=0, storage_bytes=nbytes)
        copy = self._values.new(layout, "gradient", f"{name}.grad.{len(self._steps)}").storage
        nbytes = self._values.storages[copy].nbytes
        op = Op(
            symbol="accumulate_grad",
            index=len(self._steps),
            arguments=(name,),
            results=(self._values.storages[copy].name,),
            reads=(value.storage,),
            makes=(copy,),
            peak_bytes=nbytes,
            repeat="no",
            moved_bytes=2 * nbytes,
            dtype=str(like.dtype).removeprefix("torch."),
            key=f"accumulate_grad({like})",
        )
        self._steps.append(Step(op=op, makes=(copy,), frees=()))
        self._hold([copy], ".grad")

    def _enter_backward(self, backward: TraceCtx, outputs: Sequence[Any]) -> frozenset[int]:
        """Cotangents appear: those that the caller passes, and zeros."""
        made, unread = set(), -1
        for place, (proxy, output) in enumerate(zip(backward.args[1], outputs, strict=True)):
            if isinstance(proxy, TensorProxy):
                storage = self._values.add_cotangent(proxy)
                made.add(storage)
                self._refer(proxy.name)
                if self._differentiated is None or place in self._differentiated:
                    self._hold([storage], ".caller")
            elif isinstance(output, TensorProxy):
                name = f"{output.name}.zeros"
                unread = self._values.new(contiguous(output), "cotangent", name).storage
        if unread >= 0:
            # The trace unpacks what it does not read to `_`, of which the last one lives to the end.
            made.add(unread)
            self._hold([unread], "_")
        return frozenset(made)

    def _run(self, trace: TraceCtx, kind: StorageKind) -> None:
        for index, bsym in enumerate(trace.bound_symbols):
            if bsym.sym is prims.python_del:
                self._drop([a.name for a in bsym.flat_proxy_args])
            elif not _is_bookkeeping(bsym):
                ran = self._values.run(bsym, index, kind)
                is_repeated = ran.is_repeated and kind == "temporary"
                self._steps.append(
                    Step(op=ran.op, makes=ran.made, frees=(), is_repeated=is_repeated)
                )
                for name in ran.op.results:
                    self._refer(name)
                if is_wait(bsym):
                    self._end(bsym.flat_proxy_args[0].name)
                self._free(ran.made)  # results without a name

    def _end(self, future: str) -> None:
        """A collective has ended, and holds nothing more."""
        held_by = self._values.held_by
        held = held_by.get(future, ())
        for storage in held:
            self._names[storage] = {n for n in self._names[storage] if n not in held_by}
        self._free(held)

    def _refer(self, name: str) -> None:
        self._hold(self._values.kept_by(name), name)

    def _hold(self, storages: Collection[int], name: str) -> None:
        for storage in storages:
            self._names.setdefault(storage, set()).add(name)

    def _drop(self, names: Collection[str]) -> None:
        """These names are gone, and with them what nothing else holds."""
        storages = dict.fromkeys(s for name in names for s in self._values.kept_by(name))
        for storage in storages:
            self._names.get(storage, set()).difference_update(names)
        self._free(storages)

    def _free(self, storages: Collection[int]) -> None:
        """Those that nothing holds, and that are not free yet, die with the last step."""
        freed = tuple(s for s in storages if s not in self._freed and not self._names.get(s))
        self._freed.update(freed)
        if freed and self._steps:
            last = self._steps[-1]
            self._steps[-1] = replace(last, frees=(*last.frees, *freed))

    def _leave(self, *, keep: Collection[str]) -> None:
        """The function returns: its names are gone but for what was returned."""
        kept = set(keep)
        names = {n for held in self._names.values() for n in held if not n.startswith(".")}
        self._drop(names - kept)

    def _release(self, name: str, *, except_for: Collection[int]) -> None:
        """The caller lets go."""
        storages = [s for s, names in self._names.items() if name in names and s not in except_for]
        for storage in storages:
            self._names[storage].discard(name)
        self._free(storages)
