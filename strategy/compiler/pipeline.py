"""The one list of what happens to a trace, step by step, between its capture and what runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from thunder.core.transform_common import wrap_return_value_together_with_arguments

from thunder_memsave.compiler import joint_steps, run, split
from thunder_memsave.compiler.fuse import fuse
from thunder_memsave.compiler.offload import offload
from thunder_memsave.compiler.state import State
from thunder_memsave.passes.cast_before_gather import gather_in_compute_dtype
from thunder_memsave.passes.drop_unread import drop_unread
from thunder_memsave.passes.in_place.embedding_sums import add_embedding_gradients
from thunder_memsave.passes.in_place.overwritten import keep_overwritten
from thunder_memsave.passes.join_views import join_views
from thunder_memsave.passes.merge_equal import merge_equal
from thunder_memsave.passes.quantize_before_gather import gather_in_fp8
from thunder_memsave.passes.step import Pass, Step, on_joint


def _pass(name: str, does: str, change: Pass) -> Step[State]:
    return _step(name, does, on_joint(change))


def _step(name: str, does: str, do: Callable[[State], State]) -> Step[State]:
    return Step(name=name, does=does, do=do)


def _tried(name: str, does: str, do: Callable[[State], State]) -> Step[State]:
    return Step(name=name, does=does, do=do, is_tried=True)


def _acted(name: str, does: str, do: Callable[[State], State]) -> Step[State]:
    return Step(name=name, does=does, do=do, is_tried=True, reads_actions_alone=True)


STEPS: tuple[Step[State], ...] = (
    _pass(
        "wrap_results",
        "return the results together with the arguments",
        wrap_return_value_together_with_arguments,
    ),
    _pass("drop_unread", "drop what nothing reads", drop_unread),
    _step("differentiate", "add the backward", joint_steps.differentiate),
    _step("claim", "let executors claim operations", joint_steps.claim),
    # Passes over the joint trace: operations are claimed.
    _pass("keep_overwritten", "copy what is written over and read by backward", keep_overwritten),
    _step(
        "leave_out_zeros",
        "add no zeros for outputs without a gradient",
        joint_steps.leave_out_zeros,
    ),
    _pass("join_views", "make views of views at once", join_views),
    _pass("merge_equal", "compute equal casts and views once", merge_equal),
    _pass(
        "gather_in_compute_dtype", "cast weights before they are gathered", gather_in_compute_dtype
    ),
    _pass("gather_in_fp8", "cast weights to fp8 before they are gathered", gather_in_fp8),
    _pass(
        "add_embedding_gradients",
        "add gradients of embeddings to those of heads that share their weights",
        add_embedding_gradients,
    ),
    _step("fetch_weights", "copy weights from the host", joint_steps.fetch),
    _step("tile_rows", "offer the plan wide values in tiles of tokens", joint_steps.tile),
    _step("regather", "gather weights again for each reader", joint_steps.gather_again),
    # The plan is carried out, here and by all that is `_acted` or `_tried`.
    _step("plan", "decide what backward keeps, within the budget", joint_steps.plan),
    _acted("recompute", "recompute in backward what the plan says", joint_steps.compute_again),
    _acted(
        "recompute_in_kernels",
        "recompute what products read beside what kernels make of the same",
        joint_steps.compute_in_kernels,
    ),
    _acted("compress", "store in fp8 what the plan says", joint_steps.compress),
    # Two traces from here on.
    _acted("split", "make a forward and a backward", split.split),
    _acted("check_gradients", "assert that backward lacks no gradient", split.check),
    _tried("schedule", "communicate beside what computes", split.order),
    _tried("keep_gradients", "make a backward that does not reduce", split.keep_gradients),
    _tried("add_gradients", "use gradients where they are made", split.add_gradients),
    _tried("update_in_place", "update buffers where they are", split.update_buffers),
    _tried("fuse", "compile neighbours that compute element by element to one kernel", fuse),
    _tried("offload", "copy to the host and back what the plan says", offload),
    _tried("write_in_place", "write results over what nothing reads any more", split.write_results),
    _tried("delete_last_used", "delete values after their last use", split.delete),
    _step("unwrap_results", "return the results alone, without a backward", run.unwrap_results),
    _step("run", "make what the call runs", run.make_callable),
)


def steps_without(leave_out: Collection[str]) -> Sequence[Step[State]]:
    """List the steps but those that are left out, which the settings have checked."""
    return tuple(step for step in STEPS if step.name not in leave_out)
