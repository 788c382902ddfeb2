"""Every pass over the joint trace satisfies the contract, and the contract notices each way of breaking it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from thunder.core import prims
from thunder.core.proxies import variableify
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx, TraceProvenance, from_trace, tracectx
from thunder.core.transform_common import dce
from thunder.executors import torchex

from harness.joint_passes import JOINT_PASSES
from passes import contract
from thunder_memsave.compiler.pipeline import STEPS
from thunder_memsave.passes.absent_gradients import without_zeros
from thunder_memsave.passes.cast_before_gather import gather_in_compute_dtype
from thunder_memsave.passes.fetch_weights import fetch_weights
from thunder_memsave.passes.in_place.embedding_sums import add_embedding_gradients
from thunder_memsave.passes.in_place.overwritten import keep_overwritten
from thunder_memsave.passes.join_views import join_views
from thunder_memsave.passes.merge_equal import merge_equal
from thunder_memsave.passes.overlap.early_reductions import reduce_early
from thunder_memsave.passes.quantize_before_gather import gather_in_fp8
from thunder_memsave.passes.recompute import recompute
from thunder_memsave.passes.recompute_in_kernels import recompute_in_kernels
from thunder_memsave.passes.regather import regather, regather_forward
from thunder_memsave.passes.step import Pass
from thunder_memsave.passes.tiles.loss_tiles import divide_loss_tiles
from thunder_memsave.passes.tiles.tile_rows import tile_rows
from thunder_memsave.passes.weight_gradients_first import weight_gradients_first
from thunder_memsave.planner.actions import NO_ACTIONS, keeping

# Alone, nothing is gathered; tests/passes/test_on_ranks.py checks that on two ranks. The probe writes nothing in place.
IDLE: tuple[Pass, ...] = (
    gather_in_compute_dtype,
    gather_in_fp8,
    regather,
    regather_forward,
    add_embedding_gradients,
    keep_overwritten,
    merge_equal,
    reduce_early,
    weight_gradients_first,  # no layer of the probe has a bias
)


def test_every_pass_satisfies_the_contract() -> None:
    for run in IDLE:
        contract.check(run, name=run.__name__, changes_the_probe=False)
        contract.check_identity(run, name=run.__name__)


def test_no_pass_of_the_list_is_left_out_of_these_tests() -> None:
    names = [step.name for step in STEPS]
    found = names[names.index("claim") + 1 : names.index("plan")]
    assert found == [*JOINT_PASSES]
    assert set(JOINT_PASSES) < {
        *(run.__name__ for run in IDLE),
        "leave_out_zeros",
        "join_views",
        "fetch_weights",
        "tile_rows",
    }


def test_leaving_out_zeros_satisfies_the_contract() -> None:
    leaving_out = partial(without_zeros, absent=frozenset())
    contract.check(
        leaving_out, name="leave_out_zeros", changes_the_probe=False
    )  # it has a loss alone
    contract.check_identity(leaving_out, name="leave_out_zeros")


def test_joining_views_satisfies_the_contract() -> None:
    contract.check(join_views, name="join_views")
    contract.check_identity(join_views, name="join_views")


def test_fetching_weights_satisfies_the_contract() -> None:
    fetching = partial(fetch_weights, names=frozenset())
    contract.check(fetching, name="fetch_weights", changes_the_probe=False)  # none is on the host
    contract.check_identity(fetching, name="fetch_weights")


def test_tiles_satisfy_the_contract() -> None:
    tiled = partial(tile_rows, weights=frozenset())
    contract.check(tiled, name="tile_rows", changes_the_probe=False)  # its values are narrow
    contract.check_identity(tiled, name="tile_rows")


def test_smaller_tiles_of_losses_satisfy_the_contract() -> None:
    smaller = partial(divide_loss_tiles, divisor=4)
    contract.check(smaller, name="divide_loss_tiles", changes_the_probe=False)  # it has no loss
    contract.check_identity(smaller, name="divide_loss_tiles")


def test_recompute_satisfies_the_contract() -> None:
    contract.check(partial(recompute, actions=NO_ACTIONS), name="recompute")
    contract.check_identity(partial(recompute, actions=NO_ACTIONS), name="recompute")


def recompute_in_a_kernel(trace: TraceCtx) -> TraceCtx:
    """Let the gradient of a weight wait for the kernel that computes its input again."""
    (gelu,) = (b for b in trace.bound_symbols if b.sym.name == "aten_gelu")
    made = {o.name for b in trace.bound_symbols for o in b.flat_proxy_outs}
    name = gelu.output.name
    again = recompute(trace, actions=keeping(made - {name}))
    (first,) = (b.output.name for b in again.bound_symbols if b.sym.name == "aten_gelu_backward")
    return recompute_in_kernels(again, joins={name: first})


def test_recomputing_in_kernels_satisfies_the_contract() -> None:
    contract.check(recompute_in_a_kernel, name="recompute_in_kernels")
    idle = partial(recompute_in_kernels, joins={})
    contract.check(idle, name="recompute_in_kernels", changes_the_probe=False)
    contract.check_identity(idle, name="recompute_in_kernels")


def recompute_one(trace: TraceCtx) -> TraceCtx:
    """The smallest real pass: backward reads a clone of one value of the forward."""
    return _with_clone(trace, "recompute_one", clone_of="aten_gelu")


def keep(trace: TraceCtx) -> TraceCtx:
    return trace


def test_a_recomputing_pass_satisfies_the_contract() -> None:
    contract.check(recompute_one, name="recompute_one")
    contract.check_identity(recompute_one, name="recompute_one")


def test_a_pass_with_nothing_to_do_satisfies_the_contract() -> None:
    contract.check(keep, name="keep", changes_the_probe=False)


def rebuilds_for_nothing(trace: TraceCtx) -> TraceCtx:
    copy = from_trace(trace)
    copy.bound_symbols = list(trace.bound_symbols)
    return copy


def anonymous(trace: TraceCtx) -> TraceCtx:
    return _with_clone(trace, "somebody else", clone_of="aten_gelu")


def changes_numbers(trace: TraceCtx) -> TraceCtx:
    """Swaps the operands of the first subtraction-like use in backward: valid, but another gradient."""
    return _edited(trace, "changes_numbers", _negate_a_gradient(trace))


def loses_a_producer(trace: TraceCtx) -> TraceCtx:
    without = [b for b in trace.bound_symbols if "aten_gelu" not in b.sym.name]
    return _edited(trace, "loses_a_producer", without)


@pytest.mark.parametrize(
    ("run", "changes_the_probe", "complaint"),
    [
        (rebuilds_for_nothing, False, "although it has nothing to do"),
        (keep, True, "found nothing to do"),
        (anonymous, True, "provenance does not name"),
        (changes_numbers, True, "the gradient of .* changed"),
    ],
)
def test_the_contract_notices(run: Pass, changes_the_probe: bool, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        contract.check(run, name=run.__name__, changes_the_probe=changes_the_probe)


def test_a_value_without_producer_does_not_get_past_the_contract() -> None:
    with pytest.raises((AssertionError, NameError, RuntimeError, ValueError, KeyError)):
        contract.check(loses_a_producer, name="loses_a_producer")


def _with_clone(trace: TraceCtx, name: str, *, clone_of: str) -> TraceCtx:
    symbols = list(trace.bound_symbols)
    backward = next((i for i, b in enumerate(symbols) if b.sym is prims.get_grad), None)
    if backward is None:
        return trace
    producers = [b for b in symbols[:backward] if clone_of in b.sym.name]
    for producer in producers:
        (value,) = producer.flat_proxy_outs
        with tracectx(trace):
            copy = value.replace_name(f"bw_{value.name}")
        outputs, inputs = {variableify(value): copy}, {variableify(value): copy}
        clone = producer.from_bsym_swap_proxies(outputs, skip_inputs=True)
        rest = [b.from_bsym_swap_proxies(inputs, skip_output=True) for b in symbols[backward:-1]]
        return _edited(trace, name, [*symbols[:backward], clone, *rest, symbols[-1]])
    return trace


def _negate_a_gradient(trace: TraceCtx) -> Sequence[BoundSymbol]:
    symbols = list(trace.bound_symbols)
    result = symbols[-1].args[0]
    gradients = list(result["output"])
    with tracectx(trace):
        negated = gradients[0].replace_name("negated")
    negation = torchex.ex.opmap["neg"].bind(gradients[0], output=negated)
    returned = symbols[-1].from_bsym(args=({**result, "output": (negated, *gradients[1:])},))
    return [*symbols[:-1], negation, returned]


def _edited(trace: TraceCtx, name: str, symbols: Sequence[BoundSymbol]) -> TraceCtx:
    new = from_trace(trace)
    new.bound_symbols = list(symbols)
    new = dce(new)
    new.set_provenance(TraceProvenance(f"Joint pass {name}"))
    return new
