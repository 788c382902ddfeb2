"""The work of a step is added up by kind of operation, and per layer, at the rates that kernels sustain."""

from __future__ import annotations

from typing import Any

import pytest

from thunder_memsave.planner.cost import roofline_us
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Op, Program, Step
from thunder_memsave.planner.report.step_work import (
    KINDS,
    ops_of_layers,
    work_by_kind,
    work_table,
)

H200 = device("h200")


def op(symbol: str, **values: Any) -> Op:
    settings: dict[str, Any] = {"index": 0, "arguments": (), "results": (), "reads": ()}
    return Op(symbol=symbol, makes=(), peak_bytes=0, dtype="bfloat16", **settings, **values)


def program(*ops: Op) -> Program:
    steps = tuple(Step(op=each, makes=(), frees=()) for each in ops)
    return Program(storages=(), steps=steps, num_forward=len(ops), held=frozenset())


def layer(number: int, *, name: str = "model.layers") -> list[Op]:
    module = f"{name}.{number}.mlp"
    return [
        op("linear", flops=650 * 10**9, moved_bytes=10**6, module=module),
        op("mul", moved_bytes=38 * 10**8, module=module),
        op("reshape", repeat="free", module=module),
    ]


OPS = [
    *layer(0),
    *layer(1),
    *layer(0, name="model.layers.0.experts"),
    op("cuda_flash_attention", flops=3 * 10**11),
    op("cuda_flash_attention_backward", flops=3 * 10**11),
    op("all_gather_rows", sent_bytes=4 * 10**8),
]


def test_work_is_added_up_by_kind_without_views() -> None:
    works = work_by_kind(OPS, H200)
    assert tuple(works) == KINDS
    assert [w.num_ops for w in works.values()] == [3, 2, 1, 3]
    assert [w.flops for w in works.values()] == [1950 * 10**9, 6 * 10**11, 0, 0]
    assert works["other operations"].moved_bytes == 3 * 38 * 10**8


@pytest.mark.parametrize(
    ("operation", "ms"),
    [
        (op("linear", flops=989 * 10**9), 1 / 0.66),
        (op("mul", moved_bytes=48 * 10**8), 1 / 0.79),
        (op("cuda_packed_attention", flops=989 * 10**9), 1 / 0.35),
        (op("cuda_packed_attention_backward", flops=989 * 10**9), 1 / 0.30),
        (op("cuda_cudnn_attention", flops=989 * 10**9), 1 / 0.53),
        (op("cuda_cudnn_attention_backward", flops=989 * 10**9), 1 / 0.43),
        (op("all_gather_rows", sent_bytes=4 * 10**8), 1.0),
        (op("mul", moved_bytes=8), 0.002),
    ],
)
def test_each_kind_has_the_rate_that_its_kernels_sustain(operation: Op, ms: float) -> None:
    assert roofline_us(operation, H200) == pytest.approx(1e3 * ms)


def test_layers_are_the_numbered_modules_that_occur_most_and_not_the_ones_inside() -> None:
    num_layers, ops = ops_of_layers(program(*OPS))
    assert num_layers == 2
    assert len(ops) == 9


def test_the_table_has_each_kind_the_sum_and_a_layer() -> None:
    lines = work_table(program(*OPS), H200).splitlines()
    assert [line.split("  ")[0] for line in lines[2:7]] == [*KINDS, "sum"]
    assert lines[6].split() == ["sum", "9", "2.55", "11.40", "8.87"]
    assert lines[7] == "each of 2 layers moves 5.70 GB in 2 other operations"


def test_without_numbered_modules_no_layer_is_named() -> None:
    assert len(work_table(program(op("mul", moved_bytes=8)), H200).splitlines()) == 7
