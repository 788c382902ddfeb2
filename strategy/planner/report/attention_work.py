"""Names the kernels that attention runs by, and the modules whose scores are computed in memory, with the reason.

Scores in memory are a softmax between two products of one module. Gemma 2's are soft-capped before it, as
`tanh(scores / cap) * cap`. PyTorch's attention takes no cap (its flash kernels are called with `softcap = 0`,
transformers/cuda/attention.cu), so such a model attends by its own products.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from thunder_memsave.planner.graph import Op, Program

Scores = Literal["soft-capped", "others"]
_REASONS: dict[Scores, str] = {
    "soft-capped": "soft-capped (tanh), which no kernel of PyTorch does",
    "others": "by the model's own products and softmax",
}


def attention_lines(program: Program) -> list[str]:
    """Describe how a program attends; no lines if it does not."""
    ops = [step.op for step in program.steps[: program.num_forward] if not step.is_repeated]
    kernels = Counter(op.symbol for op in ops if op.flops and "attention" in op.symbol)
    named = [f"{name} {num}" for name, num in sorted(kernels.items())]
    lines = [f"kernels of attention: {', '.join(named)}"] if named else []
    for kind, modules in scores_in_memory(ops).items():
        others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        lines.append(f"scores in memory, {_REASONS[kind]}: {modules[0]}{others}")
    return lines


def scores_in_memory(ops: Iterable[Op]) -> dict[Scores, list[str]]:
    """Return the modules that compute the scores of their attention in memory, by the reason.

    Args:
        ops: Those of forward, in the order in which they run.
    """
    by_module: dict[str, list[Op]] = defaultdict(list)
    for op in ops:
        by_module[op.module].append(op)
    found: dict[Scores, list[str]] = defaultdict(list)
    for module, own in by_module.items():
        for op in own:
            if "softmax" in op.symbol and (before := _scores(op, own)) and _weighs(op, own):
                is_capped = any("tanh" in each.symbol for each in before)
                found["soft-capped" if is_capped else "others"].append(module)
    return dict(found)


def _scores(softmax: Op, ops: Sequence[Op]) -> list[Op]:
    """Return the operations between a product and a softmax of its result; none if there is no such product."""
    wanted, passed = set(softmax.arguments), []
    for op in reversed(ops[: ops.index(softmax)]):
        if wanted.isdisjoint(op.results):
            continue
        passed.append(op)
        if op.flops:
            return passed
        wanted.update(op.arguments)
    return []


def _weighs(softmax: Op, ops: Sequence[Op]) -> bool:
    """Return whether a product reads what a softmax makes."""
    weights = set(softmax.results)
    for op in ops[ops.index(softmax) + 1 :]:
        if not weights.isdisjoint(op.arguments):
            if op.flops:
                return True
            weights.update(op.results)
    return False
