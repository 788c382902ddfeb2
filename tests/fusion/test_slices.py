"""What reads concatenations is computed in slices: the same bits and layouts, and no memory beside the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from harness.fused_steps import step
from harness.memory import measured_peak_bytes
from thunder_memsave.fusion import inductor, region
from thunder_memsave.fusion.same_bits import num_different
from thunder_memsave.fusion.slices import in_slices

ATEN = torch.ops.aten
HEADS, LENGTH, WIDTH = 4, 32, 16
Program = Callable[..., list[Tensor]]


def numbers(*shape: int) -> Tensor:
    """Numbers at random, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(len(shape))
    made = torch.randn(shape, generator=generator)
    made.view(-1)[::3], made.view(-1)[1::5] = -0.0, 0.0
    return made


X, COS, SIN = numbers(2, LENGTH, HEADS * WIDTH), numbers(LENGTH, WIDTH), numbers(LENGTH, WIDTH)


def rotated(heads: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    first = ATEN.slice.Tensor(heads, 3, 0, half)
    second = ATEN.slice.Tensor(heads, -1, half, 2**63 - 1)
    return ATEN.cat.default([ATEN.neg.default(second), first], -1)


def heads_of(x: Tensor) -> Tensor:
    heads = ATEN.view.default(x, [2, LENGTH, HEADS, WIDTH])
    return ATEN.transpose.int(heads, 1, 2)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A rotary embedding of transposed heads."""
    heads = heads_of(x)
    return [ATEN.add.Tensor(ATEN.mul.Tensor(heads, cos), ATEN.mul.Tensor(rotated(heads), sin))]


def turned_in_part(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A rotary embedding of half of each head, as of Phi, which is joined with the other half."""
    heads = heads_of(x)
    part, rest = (ATEN.slice.Tensor(heads, 3, *ends) for ends in ((0, 8), (8, WIDTH)))
    cos, sin = (ATEN.slice.Tensor(each, 1, 0, 8) for each in (cos, sin))
    added = ATEN.add.Tensor(ATEN.mul.Tensor(part, cos), ATEN.mul.Tensor(rotated(part), sin))
    return [ATEN.cat.default([added, rest], -1)]


def gradient_of_turned(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """The gradient of a rotary embedding, laid out as products of matrices read it, with the parts that it has."""
    heads = heads_of(x)
    of_rotated = ATEN.mul.Tensor(heads, sin)
    sizes, half = list(heads.shape), WIDTH // 2
    first = ATEN.neg.default(ATEN.slice.Tensor(of_rotated, 3, 0, half))
    second = ATEN.slice.Tensor(of_rotated, 3, half, WIDTH)
    parts = (
        ATEN.slice_backward.default(first, sizes, 3, half, 2**63 - 1, 1),
        ATEN.slice_backward.default(second, sizes, 3, 0, half, 1),
    )
    added = ATEN.add.Tensor(ATEN.add.Tensor(*parts), ATEN.mul.Tensor(heads, cos))
    copied = ATEN.clone.default(
        ATEN.transpose.int(added, 1, 2), memory_format=torch.contiguous_format
    )
    return [ATEN.view.default(copied, [2 * LENGTH, HEADS * WIDTH])]


def two_results(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A result that another is computed from, which broadcasts along the slices, and one without a concatenation."""
    (first,) = turned(x, cos, sin)
    factor = ATEN.slice.Tensor(cos, 1, 0, 1)
    return [first, ATEN.mul.Tensor(ATEN.mul.Tensor(first, first), factor), ATEN.neg.default(x)]


def traced(program: Program, *inputs: Tensor) -> tuple[fx.GraphModule, Sequence[Tensor]]:
    with inductor.options():
        graph = make_fx(program, tracing_mode="fake")(*inputs)
    return graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]


def joins(graph: fx.GraphModule) -> list[fx.Node]:
    """The concatenations of a graph that something computes with."""
    of = (ATEN.cat.default, ATEN.slice_backward.default)
    views = (ATEN.permute.default, ATEN.view.default)
    return [
        node
        for node in graph.graph.nodes
        if node.target in of
        and any(user.op != "output" and user.target not in views for user in node.users)
    ]


PROGRAMS = [turned, turned_in_part, gradient_of_turned, two_results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("program", PROGRAMS)
def test_slices_have_the_same_bits_and_layout_compiled_too(
    program: Program, dtype: torch.dtype
) -> None:
    given = X.to(dtype), COS.to(dtype), SIN.to(dtype)
    expected = program(*given)
    graph, inputs = traced(program, *given)
    (sliced,) = in_slices(graph, inputs)
    assert joins(graph)
    assert not joins(sliced)
    ways = [sliced(*given)]
    may_compile = dtype is torch.float32 or inductor.keeps_rounding("cpu")
    if may_compile and inductor.why_unavailable("cpu") is None:
        with torch.no_grad():
            ways.append(inductor.compile_graph(sliced, inputs)(*given))
    for found in ways:
        for ours, theirs in zip(found, expected, strict=True):
            assert num_different(ours, theirs) == 0
            assert ours.stride() == theirs.stride()


def test_zeros_are_added_to_numbers_whose_sign_they_change() -> None:
    """A canary of the test above: without the sum, -0.0 would stay."""
    cos = torch.full_like(COS, -0.0)
    (gradient,) = gradient_of_turned(X, cos, SIN)
    (sliced,) = in_slices(*traced(gradient_of_turned, X, COS, SIN))
    added = [n for n in sliced.graph.nodes if "fma" in str(n.target)]
    assert len(added) == 2
    for node in added:
        node.replace_all_uses_with(node.args[0])
    sliced.recompile()
    assert num_different(sliced(X, cos, SIN)[0], gradient) > 0


def merged(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A view in which no dim of the concatenation is left."""
    joined = ATEN.view.default(rotated(heads_of(x)), [-1])
    return [ATEN.neg.default(joined), ATEN.mul.Tensor(cos, sin)]


def multiplied_zeros(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Zeros that something else than a sum reads: -1 times 0.0 is -0.0."""
    padded = ATEN.slice_backward.default(cos, [LENGTH, 2 * WIDTH], 1, 0, WIDTH, 1)
    return [ATEN.neg.default(padded), ATEN.neg.default(x), ATEN.neg.default(sin)]


def number_added_to_zeros(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    padded = ATEN.slice_backward.default(cos, [LENGTH, 2 * WIDTH], 1, 0, WIDTH, 1)
    return [ATEN.add.Tensor(padded, 2.0), ATEN.neg.default(x), ATEN.neg.default(sin)]


def doubled_zeros(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    padded = ATEN.slice_backward.default(cos, [LENGTH, 2 * WIDTH], 1, 0, WIDTH, 1)
    return [ATEN.add.Tensor(padded, padded), ATEN.neg.default(x), ATEN.neg.default(sin)]


def many(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """More operands than kernels are made for."""
    return [ATEN.neg.default(ATEN.cat.default([cos, sin, cos, sin, cos], 0)), ATEN.neg.default(x)]


def of_two_types(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """An operand of float16, whose numbers are float32 once they are joined: their double may be no float16."""
    joined = ATEN.cat.default([ATEN._to_copy.default(cos, dtype=torch.float16), sin], 1)
    return [ATEN.mul.Tensor(joined, 2.0), ATEN.neg.default(x)]


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Gradients of every second number."""
    padded = ATEN.slice_backward.default(cos, [LENGTH, 2 * WIDTH], 1, 0, 2**63 - 1, 2)
    return [ATEN.neg.default(padded), ATEN.neg.default(x), ATEN.neg.default(sin)]


def joined_alone(x: Tensor, cos: Tensor, sin: Tensor) -> list[Tensor]:
    """A concatenation that nothing reads, which is a result."""
    return [ATEN.cat.default([ATEN.neg.default(cos), sin], 1), ATEN.neg.default(x)]


@pytest.mark.parametrize(
    "program",
    [
        merged,
        multiplied_zeros,
        number_added_to_zeros,
        doubled_zeros,
        many,
        of_two_types,
        interleaved,
        joined_alone,
    ],
)
def test_what_cannot_be_computed_in_slices_or_gains_nothing_stays(program: Program) -> None:
    assert in_slices(*traced(program, X, COS, SIN)) == []


def test_a_sum_whose_type_zeros_decide_stays() -> None:
    def program(x: Tensor, cos: Tensor) -> list[Tensor]:
        padded = ATEN.slice_backward.default(x, [LENGTH, 2 * WIDTH], 1, 0, WIDTH, 1)
        return [ATEN.add.Tensor(padded, ATEN.cat.default([cos, cos], 1))]

    assert in_slices(*traced(program, COS, SIN.bfloat16())) == []
    assert len(in_slices(*traced(program, COS, SIN))) == 1


def test_a_kernel_in_slices_takes_no_memory_beside_its_results() -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    graph, inputs = traced(turned, X, COS, SIN)
    peaks = []
    for each in (*in_slices(graph, inputs), graph):
        with torch.no_grad():
            kernel = inductor.direct(inductor.compile_graph(each, inputs))
            kernel([X, COS, SIN])
            peaks.append(measured_peak_bytes(lambda kernel=kernel: kernel([X, COS, SIN])))  # type: ignore[misc]
    assert peaks[0] == X.nbytes
    assert peaks[1] > X.nbytes, "a canary: inductor writes the concatenation to memory"


class Rotated(nn.Module):
    """A rotary embedding between products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        first, second = y[..., : WIDTH // 2], y[..., WIDTH // 2 :]
        turned = y * 0.5 + torch.cat([-second, first], -1) * 0.25
        loss: Tensor = self.outer(turned).square().mean()
        return loss


class OfIntegers(nn.Module):
    """Integers that are joined with numbers: their square is no integer of 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        joined = torch.cat([numbers, self.inner(x)], -1)
        loss: Tensor = self.outer(joined * joined * 1e-9).square().mean()
        return loss


def test_integers_that_are_joined_with_numbers_are_numbers() -> None:
    inputs = {"x": numbers(4, 8, WIDTH), "numbers": torch.arange(4 * 8 * WIDTH).view(4, 8, WIDTH)}
    inputs["numbers"] = (100_000 * inputs["numbers"]).int()
    fused, unfused = (step(OfIntegers, inputs, fusion=fusion) for fusion in (True, False))
    assert all(map(torch.equal, fused.bits, unfused.bits))


@pytest.mark.parametrize("fails", ["compilation", "bits"])
def test_where_slices_fail_the_region_is_compiled_whole(
    fails: str, caplog: pytest.LogCaptureFixture
) -> None:
    if (reason := inductor.why_unavailable("cpu")) is not None:
        pytest.skip(reason)
    bad: list[fx.GraphModule] = []
    compile_graph = inductor.compile_graph

    def instead(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> list[fx.GraphModule]:
        found = in_slices(graph, inputs)
        for each in found if fails == "bits" else []:
            output = each.graph.output_node()
            results: Any = output.args[0]
            with each.graph.inserting_before(output):
                other = each.graph.call_function(ATEN.neg.default, (results[0],))
            other.meta = dict(results[0].meta)
            output.args = ([other, *results[1:]],)
            each.recompile()
        bad.extend(found)
        return found

    def compiled(graph: fx.GraphModule, inputs: Sequence[Tensor]) -> inductor.Kernel:
        if fails == "compilation" and any(graph is each for each in bad):
            raise RuntimeError("out of registers")
        return compile_graph(graph, inputs)

    inputs = {"x": numbers(4, 8, WIDTH)}
    unfused = step(Rotated, inputs, fusion=False)
    with (
        patch.object(region, "in_slices", instead),
        patch.object(inductor, "compile_graph", compiled),
        patch.dict(region._regions, clear=True),
        caplog.at_level("WARNING"),
    ):
        fused = step(Rotated, inputs, fusion=True)
    assert bad
    assert fused.num_regions > 0
    assert all(map(torch.equal, fused.bits, unfused.bits))
    assert not any("is not fused" in record.message for record in caplog.records)
