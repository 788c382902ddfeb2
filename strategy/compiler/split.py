"""The steps that make of the joint trace a forward and a backward, in the order in which they run, with deletions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import replace

from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from thunder.executors.passes import (
    del_last_used,
)
from thunder.transforms.autodiff import (
    split_into_forward_and_backward,
)

from thunder_memsave.compiler.state import State
from thunder_memsave.ops.accumulation import accumulated_names, without_reductions
from thunder_memsave.ops.added_gradients import with_added
from thunder_memsave.ops.updated_parameters import with_updates
from thunder_memsave.passes.drop_unread import instead_of_thunders
from thunder_memsave.passes.in_place.results import write_in_place
from thunder_memsave.passes.in_place.updates import update_in_place
from thunder_memsave.passes.overlap.state_copies import copy_states
from thunder_memsave.passes.repeatable import roots
from thunder_memsave.passes.symbols import emptied, forward_symbols, is_joint, is_unread_draw


def split(state: State) -> State:
    """Make a forward, and a backward where something needs a gradient."""
    if not is_joint(state.joint.bound_symbols):
        return replace(state, forward=state.joint)
    with instead_of_thunders():
        forward, backward = split_into_forward_and_backward(state.joint)
    if any(map(is_unread_draw, state.joint.bound_symbols)):
        forward, backward = _drawn_in_forward(forward, backward, state.joint)
    return replace(state, forward=forward, backward=backward)


def _drawn_in_forward(
    forward: TraceCtx, backward: TraceCtx | None, joint: TraceCtx
) -> tuple[TraceCtx, TraceCtx | None]:
    """Let forward, in its order, draw what nothing reads, and backward no more: Thunder's split puts it there."""
    place = {o.name: i for i, b in enumerate(forward.bound_symbols) for o in b.flat_proxy_outs}
    of_forward = forward_symbols(joint.bound_symbols)
    given = {a.name for a in forward.args}
    lost: dict[int, list[BoundSymbol]] = defaultdict(list)
    """By the index in forward before which they belong: the draws, and what they alone read."""
    at = 0
    for bsym in joint.bound_symbols:
        places = [place[o.name] for o in bsym.flat_proxy_outs if o.name in place]
        if places:
            at = max(at, max(places) + 1)
        elif id(bsym) in of_forward and any(o.name not in given for o in bsym.flat_proxy_outs):
            lost[at].append(bsym)
    new = emptied(forward)
    for index, bsym in enumerate(forward.bound_symbols):
        new.bound_symbols += [*lost[index], bsym]
    names = {o.name for symbols in lost.values() for bsym in symbols for o in bsym.flat_proxy_outs}
    return new, None if backward is None else _without(backward, names)


def _without(backward: TraceCtx, names: Set[str]) -> TraceCtx:
    """Return the backward without the symbols that make these, unless others read what they make."""
    read = {
        a.name
        for bsym in backward.bound_symbols
        for a in bsym.flat_proxy_args
        if names.isdisjoint(o.name for o in bsym.flat_proxy_outs)
    }
    unread = names - read
    new = emptied(backward)
    new.bound_symbols = [
        bsym
        for bsym in backward.bound_symbols
        if not bsym.flat_proxy_outs or any(o.name not in unread for o in bsym.flat_proxy_outs)
    ]
    return new


def check(state: State) -> State:
    """Assert that every gradient that eager gives is computed, in the shape and dtype of its input."""
    lowered, forward, backward = state.facts.lowered, state.forward, state.backward
    assert forward is not None
    gradients = () if backward is None else backward.output
    for index in frozenset().union(*lowered.depends_on):
        name, proxy = lowered.input_names[index], forward.args[index]
        gradient = gradients[index] if gradients else None
        assert gradient is not None, f"backward has no gradient for {name!r}"
        found, expected = ((p.shape, p.dtype) for p in (gradient, proxy))
        assert found == expected, f"the gradient of {name!r} is {found}, the tensor {expected}"
    return state


def order(state: State) -> State:
    """Start collectives beside what computes, within the window and the plan's room."""
    schedule, room = state.facts.schedule, state.room
    assert state.forward is not None
    forward = schedule(state.forward, room=room)
    backward = None if state.backward is None else schedule(state.backward, room=room)
    return replace(state, forward=forward, backward=backward)


def keep_gradients(state: State) -> State:
    """Add the backward of micro-batches before the last, where that keeps whole gradients."""
    backward = state.backward
    if backward is None or not accumulated_names(backward):
        return state
    return replace(state, keeping=without_reductions(backward))


def add_gradients(state: State) -> State:
    """Use gradients where they are made, if the plan says so: to update weights, or add to earlier ones."""
    backward, forward = state.backward, state.forward
    if backward is None or forward is None or not (state.added or state.updated):
        return state
    if state.updated:
        memory = roots([*forward.bound_symbols, *backward.bound_symbols])
        backward = with_updates(backward, forward.args, state.updated, memory)
        backward = copy_states(backward, state.room)
    if state.added:
        backward = with_added(backward, forward.args, state.added)
    return replace(state, backward=backward)


def update_buffers(state: State) -> State:
    """Update buffers in place where forward makes new values of them and copies these back."""
    assert state.forward is not None
    forward = update_in_place(state.forward)
    return state if forward is state.forward else replace(state, forward=forward)


def write_results(state: State) -> State:
    """Write results over operands that nothing reads any more.

    Not over gradients in a piece of a module: the room of the others is told from the moments of a plan's peaks, which
    would be lower than planned in some pieces and not in others.
    """
    planner = state.facts.planner
    is_piece = planner is not None and planner.is_of_piece

    def written(trace: TraceCtx | None) -> TraceCtx | None:
        return None if trace is None else write_in_place(trace, over_gradients=not is_piece)

    return replace(
        state,
        forward=written(state.forward),
        backward=written(state.backward),
        keeping=written(state.keeping),
    )


def delete(state: State) -> State:
    """Delete values after their last use."""
    assert state.forward is not None
    return replace(
        state,
        forward=del_last_used(state.forward),
        backward=_with_deletions(state.backward),
        keeping=_with_deletions(state.keeping),
    )


def _with_deletions(backward: TraceCtx | None) -> TraceCtx | None:
    """Delete the values of a backward after their last use, saved ones too."""
    if backward is None:
        return None
    return del_last_used(backward, clear_mutable_collections=True)
