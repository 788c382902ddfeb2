"""Recompute: values of forward that backward reads and no action keeps are recomputed right before their first reader.

Before, with `t1` kept and nothing else:

    t1 = torch.nn.functional.linear(x, w1, None)
    t2 = torch.nn.functional.gelu(t1)
    t3 = torch.nn.functional.linear(t2, w2, None)   # an output
    ...
    t8 = torch.matmul(g, t2)                        # backward; t2 is saved

After:

    t1 = torch.nn.functional.linear(x, w1, None)
    t2 = torch.nn.functional.gelu(t1)
    t3 = torch.nn.functional.linear(t2, w2, None)
    ...
    bw_t2 = torch.nn.functional.gelu(t1)            # a clone; t1 is saved
    t8 = torch.matmul(g, bw_t2)

Thunder's split, which runs later, derives what is saved: the kept values that backward or a clone reads, and the
arguments and outputs of forward, which are live anyway. Several names for one storage need no special case: if the
first of them is kept, a view of it is cloned like any operation, at no cost.

Gathered parameters. `regather`, which runs before this pass, gives backward's readers of a weight a gather of their
own. A clone that reads the weight moves that gather earlier instead of adding another: one gather per weight in
backward, shared, and freed after its last reader. The clone gets a gather of its own only if none is to come (the
weight's last reader in backward has run, or there is none). So no whole weight is saved, and without clones the trace
does not change.

Random numbers are drawn once: see `random_ops`. A kernel that makes a loss and its gradients makes the loss alone in
forward, where a clone makes the gradients.

Clones are tagged as backward's and with `RECOMPUTE_IN_BACKWARD`, and have names that begin with `bw_`. What fuses after
the plan must not join them with forward, nor a clone of one layer with the backward of another.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from thunder.core import prims
from thunder.core.proxies import Proxy
from thunder.core.symbol import BoundSymbol, BoundSymbolTag
from thunder.core.trace import TraceCtx, TraceProvenance, tracectx

from thunder_memsave.errors import PlanError
from thunder_memsave.ops.families.collectives import is_all_gather, is_wait
from thunder_memsave.ops.kernel_calls import alone
from thunder_memsave.ops.random_ops import draws_random_numbers, replay
from thunder_memsave.passes.repeatable import roots, why_not_repeatable
from thunder_memsave.passes.symbols import (
    emptied,
    forward_symbols,
    is_joint,
    is_tensor,
    renamed,
    without_recording,
    written_in_place,
)
from thunder_memsave.planner.actions import Actions

PREFIX = "bw_"
"""Prefix of the names of recomputed values."""


def recompute(trace: TraceCtx, *, actions: Actions) -> TraceCtx:
    """Recompute in backward the values of forward that it reads and `actions` does not keep.

    Linear in the number of symbols.

    Args:
        trace: A joint trace, with operations claimed by executors; an inference trace is returned unchanged.
        actions: Actions by names of values. A kept value is saved if backward needs it; the first name of a storage
            keeps the storage. Values without an action are recomputed.

    Returns:
        A trace in which each symbol of forward has at most one clone, in backward, as late as its readers allow.

    Raises:
        PlanError: An action names a value that the trace does not have, or a value would be recomputed that cannot be.
    """
    symbols = trace.bound_symbols
    if not is_joint(symbols):
        return trace
    _refuse_unknown(actions, trace)
    new = emptied(trace)
    with tracectx(new):
        backward = _Backward(symbols, actions.kept)
        rewritten = [s for bsym in symbols for s in backward.placed(bsym)]
        if not backward.clones:
            return trace
        new.bound_symbols = [backward.instead.get(id(b), b) for b in rewritten]
    new.set_provenance(TraceProvenance("Joint pass recompute"))
    return new


def _refuse_unknown(actions: Actions, trace: TraceCtx) -> None:
    known = {o.name for b in trace.bound_symbols for o in b.flat_proxy_outs}
    if unknown := sorted(actions.keys() - known - {a.name for a in trace.args}):
        raise PlanError(
            f"The plan has actions for {unknown[0]!r} and {len(unknown) - 1} other values that the trace does not "
            "have. It was made for another trace: make a new plan."
        )


class _Backward:
    """Emits the symbols of a joint trace in order, clones before their first readers."""

    def __init__(self, symbols: Sequence[BoundSymbol], keep: Set[str]) -> None:
        self._forward = forward_symbols(symbols)
        self._position = {id(b): i for i, b in enumerate(symbols)}
        self._refused = why_not_repeatable(symbols)
        self._producers = self._missing_values(symbols, keep)
        of_backward = [b for b in symbols if id(b) not in self._forward]
        self._gathers = _BackwardGathers(of_backward, self._position)
        self._named: dict[str, Proxy] = {}
        """Recomputed values, by the names of the originals."""
        self.clones: set[int] = set()
        """Ids of the symbols of forward that have a clone."""
        self.instead: dict[int, BoundSymbol] = {}
        """Symbols that forward runs instead of those that have a clone, by their ids: of random ones, and of kernels
        whose gradients only backward makes."""

    def _missing_values(
        self, symbols: Sequence[BoundSymbol], keep: Set[str]
    ) -> dict[str, BoundSymbol]:
        """Return the producers of forward's values that backward has only if they are recomputed."""
        available = set(keep) | _written_arguments(symbols, self._refused)
        available.update(o.name for o in symbols[-1].args[0]["fw_flat_out"] if isinstance(o, Proxy))
        for bsym in symbols:  # keeping a future keeps the tensor that it becomes
            if is_wait(bsym) and bsym.args[0].name in available:
                available.add(bsym.output.name)
        return {
            o.name: b
            for b in symbols
            if id(b) in self._forward and not _is_argument(b)
            for o in b.flat_proxy_outs
            if is_tensor(o) and o.name not in available
        }

    def placed(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        """Yield the clones that the symbol is the first to read, then the symbol."""
        if id(bsym) in self._forward or bsym.sym in (prims.python_return, prims.get_grad):
            yield bsym
        elif not self._gathers.is_placed(bsym):
            yield from self._recomputed(bsym)
            self._gathers.place(bsym)
            yield self._renamed(bsym)

    def _recomputed(self, reader: BoundSymbol) -> Iterator[BoundSymbol]:
        """Yield clones of the missing values that the reader needs, in the order of forward."""
        position = self._position[id(reader)]
        for producer in sorted(self._missing(reader), key=lambda b: self._position[id(b)]):
            self.clones.add(id(producer))
            inputs = self._names_of_inputs(producer)
            same = self._gathers.same_as(producer, inputs, position=position)
            if same is not None:
                self._call(producer, same)
                yield from self._gathers.bring_forward(same)
                continue
            yield self._clone(producer, inputs)

    def _missing(self, reader: BoundSymbol) -> list[BoundSymbol]:
        """Return every symbol that must be recomputed before the reader can run."""
        found: dict[int, BoundSymbol] = {}
        stack = [reader]
        while stack:
            for argument in stack.pop().flat_proxy_args:
                producer = self._producers.get(argument.name)
                if producer is None or id(producer) in self.clones or id(producer) in found:
                    continue
                self._refuse(producer, argument.name)
                found[id(producer)] = producer
                stack.append(producer)
        return list(found.values())

    def _refuse(self, producer: BoundSymbol, name: str) -> None:
        if (reason := self._refused.get(id(producer))) is not None:
            raise PlanError(
                f"Backward needs {name!r}, which the plan does not keep and which cannot be recomputed: "
                f"{producer.sym.name} {reason} (at {producer.source_filename or 'an unknown line'}). Keep {name!r}."
            )

    def _clone(self, producer: BoundSymbol, inputs: Mapping[str, Proxy]) -> BoundSymbol:
        clone = _clone(producer, inputs)
        self._call(producer, clone)
        if not draws_random_numbers(producer):
            self._make_less(producer)
            return clone
        pair = replay(producer)
        self.instead[id(producer)] = pair.drawing
        return pair.replaying(clone)

    def _make_less(self, producer: BoundSymbol) -> None:
        """Let forward make the first result alone, if nothing reads the others there."""
        _, *others = producer.flat_proxy_outs
        if all(o.name in self._producers for o in others):
            less = alone(producer)
            if less is not None:
                less.source_filename = producer.source_filename
                self.instead[id(producer)] = less

    def _call(self, producer: BoundSymbol, clone: BoundSymbol) -> None:
        """Let later readers read the clone's results; kept values they read directly."""
        for before, after in zip(producer.flat_proxy_outs, clone.flat_proxy_outs, strict=True):
            if before.name in self._producers:
                self._named[before.name] = after

    def _names_of_inputs(self, bsym: BoundSymbol) -> dict[str, Proxy]:
        inputs = (a.name for a in bsym.flat_proxy_args)
        return {name: self._named[name] for name in inputs if name in self._named}

    def _renamed(self, bsym: BoundSymbol) -> BoundSymbol:
        names = self._names_of_inputs(bsym)
        return renamed(bsym, names, skip_output=True) if names else bsym


def _written_arguments(symbols: Sequence[BoundSymbol], refused: Mapping[int, str]) -> set[str]:
    """Return the names of arguments, such as buffers, after writes to them: live, as arguments are."""
    if not any(written_in_place(b) is not None for b in symbols):
        return set()
    arguments = {o.name for b in symbols if _is_argument(b) for o in b.flat_proxy_outs}
    memory = roots(symbols)
    made = {o.name for b in symbols if id(b) in refused for o in b.flat_proxy_outs}
    return {name for name in made if memory[name] & arguments}


def _is_argument(bsym: BoundSymbol) -> bool:
    return bsym.sym.id is prims.PrimIDs.UNPACK_TRIVIAL


def _clone(producer: BoundSymbol, inputs: Mapping[str, Proxy]) -> BoundSymbol:
    given = {a.name for a in producer.flat_proxy_args}
    made = [o for o in producer.flat_proxy_outs if o.name not in given]
    named = {o.name: o.replace_name(f"{PREFIX}{o.name}") for o in made}
    clone = without_recording(renamed(producer, {**inputs, **named}))
    clone.tags.update((BoundSymbolTag.BACKWARD, BoundSymbolTag.RECOMPUTE_IN_BACKWARD))
    return clone


class _BackwardGathers:
    """Backward's own gathers, and the values that one gathered parameter alone decides; clones share them."""

    def __init__(self, symbols: Sequence[BoundSymbol], position: Mapping[int, int]) -> None:
        self._by_expression: dict[Any, list[BoundSymbol]] = defaultdict(list)
        self._last_read: dict[int, int] = {}
        self._placed: set[int] = set()
        self._gather_of: dict[str, int] = {}
        for bsym in symbols:
            gathers = self._gathers_of_inputs(bsym)
            self._last_read.update((g, position[id(bsym)]) for g in gathers if g is not None)
            if is_all_gather(bsym):
                gathers = {id(bsym)}
            if len(gathers) == 1 and None not in gathers:
                self._by_expression[bsym.rhs].append(bsym)
                self._gather_of.update((o.name, *gathers) for o in bsym.flat_proxy_outs)

    def place(self, bsym: BoundSymbol) -> None:
        self._placed.add(id(bsym))

    def bring_forward(self, bsym: BoundSymbol) -> Iterator[BoundSymbol]:
        """Yield the symbol now, unless it has run."""
        if not self.is_placed(bsym):
            self.place(bsym)
            yield bsym

    def is_placed(self, bsym: BoundSymbol) -> bool:
        return id(bsym) in self._placed

    def same_as(
        self, producer: BoundSymbol, inputs: Mapping[str, Proxy], *, position: int
    ) -> BoundSymbol | None:
        """Find backward's symbol that computes what the clone would; a gather only if still to run or read later."""
        of_gathers = {self._gather_of.get(p.name) for p in inputs.values()}
        if not is_all_gather(producer) and (not of_gathers or None in of_gathers):
            return None
        same = self._by_expression.get(renamed(producer, inputs, skip_output=True).rhs, ())
        return next((b for b in same if self._is_usable(b, position)), None)

    def _is_usable(self, bsym: BoundSymbol, position: int) -> bool:
        if not self.is_placed(bsym) or not is_all_gather(bsym):
            return True
        return self._last_read.get(id(bsym), -1) > position

    def _gathers_of_inputs(self, bsym: BoundSymbol) -> set[int | None]:
        return {self._gather_of.get(a.name) for a in bsym.flat_proxy_args if is_tensor(a)}
