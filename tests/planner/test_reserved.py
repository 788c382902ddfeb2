"""A training step reserves more than it allocates, and less in expandable segments."""

from __future__ import annotations

import pytest

from harness.training_graphs import GraphBuilder, chain
from thunder_memsave.planner.caching_allocator.environment import NotSimulatedError
from thunder_memsave.planner.graph import Program, StepMemory
from thunder_memsave.planner.order import order
from thunder_memsave.planner.report.reserved_shown import describe_reserved
from thunder_memsave.planner.reserved import (
    Found,
    ReservedMemory,
    least_reserved_bytes,
    reserved_memory,
    reserved_or_reason,
)
from thunder_memsave.planner.simulate import simulate

M = 2**20


def growing() -> Program:
    """Return a program whose activations grow, so that no freed block has room for the next."""
    b = GraphBuilder()
    b.input("x", 12 * M, "batch")
    b.op("x", {"a": 20 * M})
    b.op("a", {"b": 30 * M})
    b.op("b", {"c": 40 * M})
    b.op("c", {"y": 50 * M})
    b.backward(g=10 * M)
    b.op("g y", {"dx": 12 * M}, kind="gradient")
    return order(b.graph(outputs="y", gradients="dx"))


def test_what_is_reserved_is_what_segments_add_up_to() -> None:
    program = growing()
    found = reserved_memory(program, StepMemory(), environment={})
    # x, a, b, c and y have a segment each; a's is split for the cotangent, and b's for the gradient.
    assert found.reserved_bytes == (12 + 20 + 30 + 40 + 50) * M
    assert found.allocated_bytes == simulate(program).peak_bytes
    # One segment: c follows b in what a, b and c leave.
    assert found.allocated_bytes < found.expandable_bytes < found.reserved_bytes


def test_the_settings_of_the_environment_count() -> None:
    program = growing()
    plain = reserved_memory(program, StepMemory(), environment={})
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    expandable = reserved_memory(program, StepMemory(), environment=conf)
    assert expandable.reserved_bytes == expandable.expandable_bytes == plain.expandable_bytes


def test_what_is_known_is_not_simulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    program = growing()
    found: Found = {}
    first = reserved_memory(program, StepMemory(), environment={}, found=found)
    monkeypatch.setattr("thunder_memsave.planner.reserved.replay", None)
    assert reserved_memory(program, StepMemory(), environment={}, found=found) == first
    with pytest.raises(TypeError):
        reserved_memory(program, StepMemory(), environment={})


def test_small_tensors_take_a_small_segment() -> None:
    found = reserved_memory(order(chain(2)), StepMemory(), environment={})
    assert found.reserved_bytes == 2 * M


def test_what_is_not_simulated_is_said() -> None:
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    found = reserved_or_reason(order(chain(2)), StepMemory(), environment=conf)
    assert isinstance(found, NotSimulatedError)
    assert describe_reserved(found, peak_bytes=1) == (
        "reserved by PyTorch's allocator: the CUDA allocator's setting backend:cudaMallocAsync is not simulated, so "
        "what it reserves is not known."
    )
    with pytest.raises(NotSimulatedError):
        reserved_memory(order(chain(2)), StepMemory(), environment=conf)


def test_the_text_compares_with_the_peak() -> None:
    found = ReservedMemory(
        allocated_bytes=100 * M, reserved_bytes=125 * M, expandable_bytes=110 * M
    )
    assert describe_reserved(found, peak_bytes=100 * M).splitlines() == [
        "allocated at the peak, simulated: 100.00 MiB (+0.0% against the predicted peak)",
        "reserved by PyTorch's allocator, simulated: 125.00 MiB (+25.0% against the predicted peak)",
        "reserved with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, simulated: 110.00 MiB (+10.0% against the "
        "predicted peak)",
    ]
    same = ReservedMemory(allocated_bytes=M, reserved_bytes=2 * M, expandable_bytes=2 * M)
    assert "expandable" not in describe_reserved(same, peak_bytes=M)


def test_a_limit_counts_a_growing_segment_as_torch_does() -> None:
    b = GraphBuilder()
    b.input("x", 12 * M, "batch")
    b.op("x", {"a": 30 * M})
    b.op("a", {"y": 30 * M})
    b.backward(g=12 * M)
    b.op("g y", {"dx": 12 * M}, kind="gradient")
    program = order(b.graph(outputs="y", gradients="dx"))
    conf = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    peak = reserved_memory(program, StepMemory(), environment=conf).reserved_bytes
    assert peak == 80 * M
    least = least_reserved_bytes(
        program, StepMemory(), environment=conf, wanted_bytes=peak, enough_bytes=peak
    )
    # For y one page is mapped to the 60 MiB of x, a and a free tail, but its 30 MiB are what the limit is asked for.
    assert 90 * M <= least < 92 * M
