"""Finds the storages that each step of the running traces makes and frees, by following Python's references.

The trace's function, `compiler/autograd.py` and the caller hold references.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from thunder.core import prims
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx
from torch import Tensor

from thunder_memsave.budget.extract import (
    Values,
    is_bookkeeping,
    profiles,
    returned_by,
)
from thunder_memsave.measure.layouts import Layout, Value, contiguous, numel_of
from thunder_memsave.measure.op_profile import OpProfiles
from thunder_memsave.measure.used_gradients import uses_gradient
from thunder_memsave.ops.added_gradients import added_if_given, lies_alike
from thunder_memsave.ops.families.collectives import is_wait
from thunder_memsave.ops.host_copies.states import waits_for_states
from thunder_memsave.ops.host_copies.symbols import waits_for_copy
from thunder_memsave.passes.symbols import (
    is_tensor,
)
from thunder_memsave.planner.graph import (
    Op,
    Program,
    Step,
    StorageKind,
)


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
    """Build the program of the traces that run, with the storages that each operation frees.

    Args:
        forward: The final forward trace, after `del_last_used`; or an inference trace.
        backward: The final backward trace; None for inference.
        kinds: As for `training_graph`, and so are the next two.
        tensors: The arguments' tensors.
        known: `profiles(...)`.
        differentiated: Indices of forward's flat outputs for which the caller passes a gradient, such as the loss
            alone; None: all that can have one. For the others autograd.py makes zeros, which die at their last use;
            gradients from the caller live to the end of backward.
        accumulates: True if parameters have a gradient already, to which autograd adds what backward returns.

    Returns:
        The program. The caller holds arguments, all outputs until backward ends, and then the gradients. Its last steps
        may be autograd's own: a gradient whose strides differ from its parameter's is copied.
    """
    values = Values(forward.args, kinds or {}, tensors or {}, known or profiles())
    return _Running(values, differentiated, accumulates=accumulates).program(forward, backward)


class _Running:
    """Follows references while forward and backward run."""

    def __init__(
        self, values: Values, differentiated: Collection[int] | None, *, accumulates: bool
    ) -> None:
        self._values = values
        self._differentiated, self._accumulates = differentiated, accumulates
        self._freed: set[int] = set()
        self._names: dict[int, set[str]] = {}
        """Names that hold each storage; those of holders outside of the traces begin with a dot."""
        self._steps: list[Step] = []

    def program(self, forward: TraceCtx, backward: TraceCtx | None) -> Program:
        values = self._values
        self._hold(values.inputs, ".caller")
        self._run(forward, "activation")
        returned = returned_by(forward)
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
            outputs=outputs,
        )

    def _backward(
        self, backward: TraceCtx, arguments: Sequence[Any], outputs: Sequence[Any]
    ) -> frozenset[int]:
        cotangents = self._enter_backward(backward, outputs)
        self._run(backward, "temporary")
        returned = returned_by(backward).outputs
        added = [b.args[0] for b in backward.bound_symbols if uses_gradient(b)]
        gradients = self._values.storages_of([*returned, *added]) - self._values.inputs
        self._values.set_kind(gradients, "gradient")
        names = {p.name for p in returned if is_tensor(p)}
        self._leave(keep=names)
        if not self._accumulates:
            self._store_gradients(arguments, returned)
        self._drop(names)
        self._release(".caller", except_for=self._values.inputs)
        return cotangents

    def _store_gradients(self, arguments: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Store gradients as `AccumulateGrad` does: it copies those that are shared or have other strides."""
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
        return lies_alike(value.layout.shape, value.layout.stride, like.stride)

    def _copy_gradient(self, name: str, value: Value, like: Layout) -> None:
        nbytes = numel_of(like) * like.dtype.itemsize
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
        """Add the cotangents: those that the caller passes, and zeros."""
        made, unread = set(), -1
        absent = added_if_given(backward.bound_symbols)
        for place, (proxy, output) in enumerate(zip(backward.args[1], outputs, strict=True)):
            if isinstance(proxy, TensorProxy):
                storage = self._values.add_cotangent(proxy)
                if proxy.name in absent:
                    self._values.storages[storage] = replace(
                        self._values.storages[storage], nbytes=0
                    )
                made.add(storage)
                self._refer(proxy.name)
                if self._differentiated is None or place in self._differentiated:
                    self._hold([storage], ".caller")
            elif isinstance(output, TensorProxy):
                name = f"{output.name}.zeros"
                unread = self._values.new(contiguous(output), "cotangent", name).storage
        if unread >= 0:
            # The trace unpacks arguments that it does not read to `_`, so the last of them lives to the end.
            made.add(unread)
            self._hold([unread], "_")
        return frozenset(made)

    def _run(self, trace: TraceCtx, kind: StorageKind) -> None:
        for index, bsym in enumerate(trace.bound_symbols):
            if bsym.sym is prims.python_del:
                self._drop([a.name for a in bsym.flat_proxy_args])
            elif not is_bookkeeping(bsym):
                ran = self._values.run(bsym, index, kind)
                is_repeated = ran.is_repeated and kind == "temporary"
                self._steps.append(
                    Step(op=ran.op, makes=ran.made, frees=(), is_repeated=is_repeated)
                )
                for name in ran.op.results:
                    self._refer(name)
                if is_wait(bsym) or waits_for_copy(bsym) or waits_for_states(bsym):
                    self._end(bsym.flat_proxy_args[0].name)
                self._free(ran.made)  # results without a name

    def _end(self, future: str) -> None:
        """End a collective, which holds its storages no longer."""
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
        """Delete these names, and free the storages that nothing else holds."""
        storages = dict.fromkeys(s for name in names for s in self._values.kept_by(name))
        for storage in storages:
            self._names.get(storage, set()).difference_update(names)
        self._free(storages)

    def _free(self, storages: Collection[int]) -> None:
        """Let the last step free those of these storages that nothing holds any more."""
        freed = tuple(s for s in storages if s not in self._freed and not self._names.get(s))
        self._freed.update(freed)
        if freed and self._steps:
            last = self._steps[-1]
            self._steps[-1] = replace(last, frees=(*last.frees, *freed))

    def _leave(self, *, keep: Collection[str]) -> None:
        """Return from the function: delete its names, except those of its results."""
        kept = set(keep)
        names = {n for held in self._names.values() for n in held if not n.startswith(".")}
        self._drop(names - kept)

    def _release(self, name: str, *, except_for: Collection[int]) -> None:
        """Drop a name from all storages but these."""
        storages = [s for s, names in self._names.items() if name in names and s not in except_for]
        for storage in storages:
            self._names[storage].discard(name)
        self._free(storages)
