"""The steps of the joint trace: from what was captured to forward and backward in one, claimed and planned."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from thunder.core.trace import TraceCtx
from thunder.transforms.autodiff import (
    grad_transform_on_trace,
)

from thunder_memsave.budget.planned_call import without_gradient
from thunder_memsave.compiler.claim import claimed
from thunder_memsave.compiler.fuse import fuses_as_planned
from thunder_memsave.compiler.state import State
from thunder_memsave.frontend.recorded_joint import taken_apart
from thunder_memsave.passes.absent_gradients import without_zeros
from thunder_memsave.passes.drop_unread import drop_unread, instead_of_thunders
from thunder_memsave.passes.fetch_weights import fetch_weights
from thunder_memsave.passes.overlap.early_reductions import reduce_early
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.passes.recompute_in_kernels import recompute_in_kernels
from thunder_memsave.passes.regather import dequantize_at_use, regather, regather_forward
from thunder_memsave.passes.stored.compress import as_planned
from thunder_memsave.passes.symbols import is_joint
from thunder_memsave.passes.tiles.tile_rows import tile_rows
from thunder_memsave.passes.weight_gradients_first import weight_gradients_first
from thunder_memsave.progress import stage


def differentiate(state: State) -> State:
    """Add the backward, where a gradient is wanted."""
    if not state.facts.lowered.training:
        return state
    stage("differentiate")
    with instead_of_thunders():
        joint = grad_transform_on_trace(state.joint)
    return replace(state, joint=drop_unread(taken_apart(joint)))


def claim(state: State) -> State:
    """Let executors claim operations; what they need not compute goes.

    This is Thunder's `transform_for_execution`, without what that does for Thunder's own data parallelism.
    """
    stage("claim operations")
    joint = drop_unread(claimed(state.joint, state.facts.executors))
    # Nothing after this asks what an operation was made of.
    joint.bound_symbols = [b.from_bsym(subsymbols=()) for b in joint.bound_symbols]
    return replace(state, joint=reduce_early(weight_gradients_first(joint)))


def leave_out_zeros(state: State) -> State:
    """Add nothing for outputs beside a loss; a piece gets gradients of all that it returns."""
    planner = state.facts.planner
    if not is_joint(state.joint.bound_symbols) or (
        planner is not None and planner.follow is not None
    ):
        return state
    return replace(state, joint=without_zeros(state.joint, without_gradient(state.joint)))


def fetch(state: State) -> State:
    """Copy the weights that are on the host to the device where they are read."""
    return replace(state, joint=fetch_weights(state.joint, state.facts.arguments.on_host))


def tile(state: State) -> State:
    """Offer the same trace with wide values in tiles, of which plans make use where nothing else fits."""
    facts = state.facts
    if facts.planner is None or not facts.planner.has_budget:
        return state
    kinds = facts.arguments.kinds
    weights = [a.name for a in state.joint.args if kinds.get(a.name) in ("parameter", "buffer")]

    def tiled() -> TraceCtx | None:
        found = tile_rows(state.joint, weights=weights)
        return None if found is state.joint else found

    return replace(state, tiled=cache(tiled))


def gather_again(state: State) -> State:
    """Gather whole weights for each reader; gathered weights stay from forward to backward where the mode says so.

    With a planner they always seem to. Its plan is what gathers them again, once, for the first in backward that reads
    them, clones among those: so it knows from when on they are there. Weights in NF4 are dequantised for each reader in
    every mode.
    """
    change = regather if state.facts.planner is None else regather_forward
    if not state.facts.regathers:
        change = partial(dequantize_at_use, in_backward=state.facts.planner is None)

    def tiled() -> TraceCtx | None:
        found = state.tiled()
        return None if found is None else change(found)

    return replace(state, joint=change(state.joint), tiled=cache(tiled))


def plan(state: State) -> State:
    """Decide what backward keeps, by trying plans: the steps that are tried are done with each."""
    facts = state.facts
    if facts.planner is None:
        return state
    tried = [step for step in facts.steps if step.is_tried]
    return facts.planner.planned(
        state, steps=tried, arguments=facts.arguments, fuses=fuses_as_planned(state)
    )


def compute_again(state: State) -> State:
    """Do what the plan says."""
    if state.actions is None:
        return state
    return replace(state, joint=recompute(state.joint, actions=state.actions))


def compute_in_kernels(state: State) -> State:
    """Recompute as results of other kernels what the plan counts on there."""
    return replace(state, joint=recompute_in_kernels(state.joint, joins=state.joins))


def compress(state: State) -> State:
    """Store in fp8 what the plan says, and what it says of nothing as it is."""
    if state.actions is None:
        return state
    joint, actions = as_planned(state.joint, state.actions)
    return replace(state, joint=joint, actions=actions)
