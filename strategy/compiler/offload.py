"""The step that copies to the host what the plan says, and places the copies within the plan's budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from thunder.core.trace import TraceCtx
from thunder.executors.passes import del_last_used

from thunder_memsave.budget.extract import Values, is_bookkeeping, profiles, returned_by
from thunder_memsave.compiler.state import State
from thunder_memsave.passes.step import CopyTerms
from thunder_memsave.passes.stored.offload import Offloaded, offload_backward, offload_forward
from thunder_memsave.passes.symbols import is_tensor
from thunder_memsave.planner.offload.place import place
from thunder_memsave.planner.simulate import simulate


def offload(state: State) -> State:
    """Copy values out in forward and back in each backward, if the plan has any on the host."""
    forward, backward, actions = state.forward, state.backward, state.actions
    if backward is None or forward is None or actions is None or not actions.offloaded:
        return state
    storages = _offloaded(state, forward, actions.offloaded)
    if not storages:
        return state
    assert state.copies is not None, "a plan with copies says how to place them"
    placed = _Placed(forward, storages, state.copies)
    waits, starts = placed.beside(backward)
    keeping = state.keeping
    if keeping is not None:
        keeping = offload_backward(keeping, storages, _same_places(starts, backward, keeping))
    return replace(
        state,
        forward=offload_forward(forward, storages, waits),
        backward=offload_backward(backward, storages, starts),
        keeping=keeping,
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """Finds positions for the copies of a forward and its backwards."""

    forward: TraceCtx
    storages: Sequence[Offloaded]
    terms: CopyTerms

    def beside(self, backward: TraceCtx) -> tuple[Mapping[str, int], Mapping[str, int]]:
        """Return the indices of symbols before which to wait for copies out, and to begin those back."""
        least = (
            del_last_used(offload_forward(self.forward, self.storages)),
            del_last_used(
                offload_backward(backward, self.storages), clear_mutable_collections=True
            ),
        )
        program = self.terms.program_of(*least)
        where = place(
            program,
            self.terms.costs_us(program),
            simulate(program, self.terms.memory).step_peak_bytes,
            target_bytes=self.terms.target_bytes,
            rates=self.terms.rates,
        )
        of_forward, of_backward = _computing(self.forward), _computing(backward)
        end = len(self.forward.bound_symbols) - 1
        waits = {name: [*of_forward, end][number] for name, number in where.waits.items()}
        starts = {
            name: of_backward[number - len(of_forward)] for name, number in where.starts.items()
        }
        return waits, starts


def _same_places(
    starts: Mapping[str, int], backward: TraceCtx, keeping: TraceCtx
) -> Mapping[str, int]:
    """Return the positions in a backward that keeps gradients, which is the other one but for its reductions."""
    at = {o.name: i for i, b in enumerate(keeping.bound_symbols) for o in b.flat_proxy_outs}
    found: dict[str, int] = {}
    for name, start in starts.items():
        after = (o.name for b in backward.bound_symbols[start:] for o in b.flat_proxy_outs)
        place = next((at[made] for made in after if made in at), None)
        if place is not None:
            found[name] = place
    return found


def _computing(trace: TraceCtx) -> list[int]:
    """Return the indices of the symbols that are steps of a program."""
    return [i for i, bsym in enumerate(trace.bound_symbols) if not is_bookkeeping(bsym)]


def _offloaded(state: State, forward: TraceCtx, names: frozenset[str]) -> list[Offloaded]:
    """Find the storages to copy: those of the named values that backward reads, and that nothing else holds."""
    seen = _Seen.of(state, forward)
    returned = returned_by(forward)
    stay = seen.values.inputs | seen.values.storages_of(returned.outputs)
    saved: dict[int, list[str]] = {}
    for proxy in returned.saved:
        if is_tensor(proxy):
            storage = seen.values.by_name[proxy.name].storage
            saved.setdefault(storage, []).append(proxy.name)
    return [
        seen.offloaded(storage, group)
        for storage, group in saved.items()
        if storage not in stay and not names.isdisjoint(group)
    ]


@dataclass(slots=True)
class _Seen:
    """The storages of a forward, with the symbols that make, write and read them."""

    values: Values
    value: dict[int, str] = field(default_factory=dict)
    made: dict[int, int] = field(default_factory=dict)
    read: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: State, forward: TraceCtx) -> _Seen:
        arguments, planner = state.facts.arguments, state.facts.planner
        known = profiles() if planner is None else planner.profiles
        seen = cls(Values(forward.args, arguments.kinds, arguments.tensors, known))
        for index, bsym in enumerate(forward.bound_symbols):
            if is_bookkeeping(bsym):
                continue
            ran = seen.values.run(bsym, index, "activation")
            for name in ran.op.results:
                seen.value.setdefault(seen.values.by_name[name].storage, name)
            seen.made.update(dict.fromkeys(ran.made, index))
            seen.read.update(dict.fromkeys((*ran.made, *ran.op.reads), index))
        return seen

    def offloaded(self, storage: int, saved: Sequence[str]) -> Offloaded:
        layouts = [self.values.by_name[name].layout for name in saved]
        return Offloaded(
            value=self.value[storage],
            saved=tuple(saved),
            layouts=tuple(
                (str(x.dtype).removeprefix("torch."), x.shape, x.stride, x.offset) for x in layouts
            ),
            nbytes=layouts[0].storage_bytes,
            place=layouts[0].device,
            final=max([self.made[storage], *self.values.written_at.get(storage, ())]),
            last_read=self.read[storage],
        )
