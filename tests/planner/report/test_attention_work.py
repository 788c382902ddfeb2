"""The work of a plan names attention's kernels, and the modules whose scores are in memory, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from thunder_memsave.planner.graph import Op, Program, Step
from thunder_memsave.planner.report.attention_work import attention_lines, scores_in_memory


def op(symbol: str, arguments: str, results: str, module: str, **values: Any) -> Op:
    return Op(
        symbol=symbol,
        arguments=tuple(arguments.split()),
        results=tuple(results.split()),
        module=module,
        index=0,
        reads=(),
        makes=(),
        peak_bytes=0,
        **values,
    )


def eager(number: int, *, capped: bool) -> list[Op]:
    module = f"layers.{number}.self_attn"
    return [
        op("matmul", "q k", "s", module, flops=8),
        *([op("tanh_kernel", "s", "s", module)] if capped else []),
        op("add", "s mask", "masked", module),
        op("softmax_kernel", "masked", "w", module),
        op("to", "w", "w2", module),
        op("matmul", "w2 v", "o", module, flops=8),
    ]


ROUTER = [
    op("linear", "x gate", "logits", "layers.0.mlp", flops=8),
    op("softmax_kernel", "logits", "p", "layers.0.mlp"),
    op("topk", "p", "top", "layers.0.mlp"),
    op("linear", "x up", "y", "layers.0.mlp", flops=8),
]
PLAIN = [
    op("softmax_kernel", "x", "w", "mix"),
    op("matmul", "w v", "o", "mix", flops=8),
]
KERNELS = [
    op("cuda_flash_attention", "q k v", "o", "layers.0.self_attn", flops=8),
    op("cuda_windowed_attention", "q k v", "o", "layers.1.self_attn", flops=8),
    op("cuda_windowed_attention", "q k v", "o", "layers.2.self_attn", flops=8),
]


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (
            [*eager(0, capped=True), *eager(1, capped=False)],
            {"soft-capped": ["layers.0.self_attn"], "others": ["layers.1.self_attn"]},
        ),
        (ROUTER, {}),
        (PLAIN, {}),
        (KERNELS, {}),
    ],
    ids=["eager", "router", "no scores", "kernels"],
)
def test_scores_in_memory_are_a_softmax_between_two_products(
    ops: list[Op], expected: dict[str, list[str]]
) -> None:
    assert scores_in_memory(ops) == expected


def test_backward_and_recomputation_are_not_named_again() -> None:
    forward = [*KERNELS, *eager(3, capped=True), *eager(4, capped=True)]
    steps = [Step(op=each, makes=(), frees=()) for each in forward]
    backward = op("cuda_flash_attention_backward", "g", "dq", "layers.0.self_attn", flops=8)
    again = [Step(op=each, makes=(), frees=(), is_repeated=True) for each in forward]
    program = Program(
        storages=(),
        steps=(*steps, Step(op=backward, makes=(), frees=()), *again),
        num_forward=len(steps),
        held=frozenset(),
    )
    assert attention_lines(program) == [
        "kernels of attention: cuda_flash_attention 1, cuda_windowed_attention 2",
        "scores in memory, soft-capped (tanh), which no kernel of PyTorch does: "
        "layers.3.self_attn and 1 more",
    ]
