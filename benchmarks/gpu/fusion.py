"""Checks that what fuses has the bits of PyTorch's own kernels: operators side by side in a kernel, and whole steps."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from gpu.checks import Check, NotRunError, Target, require
from gpu.plans import (
    ENVIRONMENT,
    POLICIES,
    gradients,
    packed_rows,
    tiny_llama,
)
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.fusion import inductor
from thunder_memsave.fusion.operators import EXACT, INEXACT_ON_CUDA

_aten = torch.ops.aten


def _results(x: Tensor, y: Tensor) -> list[Tensor]:
    """Return what operators of all kinds that fuse make, and chains that a compiler may contract or not round."""
    mask, other = _aten.gt.Scalar(x, 0.5), _aten.le.Tensor(x, y)
    product = _aten.mul.Tensor(x, y)
    made = [
        *(_aten.add.Tensor(x, y), _aten.sub.Tensor(x, y), product, _aten.abs.default(x)),
        *(_aten.add.Tensor(x, 0.5), _aten.mul.Tensor(x, 0.3), _aten.add.Tensor(product, y)),
        *(_aten.where.self(mask, product, x), _aten.masked_fill.Scalar(product, other, -3.1)),
        *(_aten.native_dropout_backward.default(x, mask, 1.1), _aten.relu.default(product)),
        *(_aten.threshold_backward.default(product, y, 0), _aten.neg.default(product)),
        _aten.slice_backward.default(product, list(x.shape), 1, 0, x.shape[1], 1),
    ]
    return [
        *made,
        *(_aten.mul.Tensor(each, y) for each in made),
        *(_aten.logical_and.default(mask, other), _aten.cat.default([product, y], -1)),
        _aten._to_copy.default(x, dtype=torch.bfloat16),
        _aten._to_copy.default(product, dtype=torch.float32),
        _aten.mul.Tensor(_aten.add.Tensor(product, y), _aten.sub.Tensor(x, y)),
    ]


def operators(target: Target) -> str:
    """Compare operators and chains in float32 and bfloat16, on numbers of every size."""
    _require_inductor(target)
    compared = 0
    generator = torch.Generator().manual_seed(0)
    for dtype in _dtypes(target):
        sizes = torch.logspace(-44, 30, 131)
        x, y = (
            (torch.randn(37, 131, generator=generator) * sizes).to(dtype).to(target.device)
            for _ in range(2)
        )
        x[0, 0], x[1, 1], x[2, 2] = float("inf"), float("nan"), -0.0
        with torch.no_grad(), inductor.options():
            graph = make_fx(_results, tracing_mode="fake")(x, y)
            found = inductor.compile_graph(graph, [x, y])(x, y)
        tested = {n.target for n in graph.graph.nodes if n.op == "call_function"}
        require(tested <= EXACT - INEXACT_ON_CUDA, "an operator is compared that does not fuse")
        for number, (ours, theirs) in enumerate(zip(found, _results(x, y), strict=True)):
            is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            require(bool(is_same.all()), f"result {number} in {dtype}: {int((~is_same).sum())}")
            compared += ours.numel()
    return f"{compared:,} numbers have the bits of the single operators"


def steps(target: Target) -> str:
    """Compare two steps of a Llama on packed rows, fused and not, with both extreme plans."""
    _require_inductor(target)
    for dtype in _dtypes(target):
        torch.manual_seed(0)
        model = tiny_llama(target, dtype)
        take_boundaries(model)
        batch = packed_rows(target)
        with unfilled_choice():
            found = [
                gradients(
                    copy.deepcopy(model), batch, target, memory={"policy": policy}, fusion=fusion
                )
                for fusion in (False, True)
                for policy in POLICIES
            ]
        for other in found[1:]:
            differing = [n for n in found[0] if not torch.equal(found[0][n], other[n])]
            require(not differing, f"{dtype}: other bits in {len(differing)}, {differing[:2]}")
    return f"the same bits, fused or not, with {' and '.join(POLICIES)}"


def _dtypes(target: Target) -> tuple[torch.dtype, ...]:
    keeps = inductor.keeps_rounding(target.device)
    return (torch.float32, torch.bfloat16) if keeps else (torch.float32,)


def _require_inductor(target: Target) -> None:
    if (reason := inductor.why_unavailable(target.device)) is not None:
        raise NotRunError(reason)


CHECKS = [
    Check(
        name=f"fusion, {run.__name__}",
        run=run,
        group="fusion",
        limit_s=120,
        environment=ENVIRONMENT,
    )
    for run in (operators, steps)
]
