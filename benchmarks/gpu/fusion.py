"""Checks that what fuses has the bits of PyTorch's own kernels: operators side by side in a kernel, and whole steps."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from gpu.checks import Check, Measured, NotRunError, Target, require
from gpu.kernels import error_of
from gpu.plans import (
    ENVIRONMENT,
    POLICIES,
    eager_gradients,
    gradients,
    packed_rows,
    tiny_llama,
)
from thunder_memsave.errors import BudgetError
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.finetune.process.deterministic import unfilled_choice
from thunder_memsave.fusion import functions, inductor, same_bits
from thunder_memsave.fusion.operators import EXACT_ON_CUDA
from thunder_memsave.ops import row_tiles

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
        require(tested <= EXACT_ON_CUDA, "an operator is compared that does not fuse")
        for number, (ours, theirs) in enumerate(zip(found, _results(x, y), strict=True)):
            is_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
            require(bool(is_same.all()), f"result {number} in {dtype}: {int((~is_same).sum())}")
            compared += ours.numel()
    return f"{compared:,} numbers have the bits of the single operators"


def written_functions(target: Target) -> Measured:
    """Compare the functions that have formulas: all pairs of bfloat16, and numbers of float32 with any bits.

    A function that differs stays a kernel of its own, which is right, and slower.
    """
    _require_inductor(target)
    found: dict[str, dict[str, int]] = {}
    # On a CPU one is enough: each is compiled for seconds.
    known = functions.FORMULAS_OF["cuda" if target.is_cuda else "cpu"]
    operators = list(known)[: None if target.is_cuda else 1]
    for operator in operators:
        for dtype in (torch.float32, torch.bfloat16):
            counts = [_differing(c, num, dtype, target) for c, num in functions.calls(operator)]
            different, compared = (sum(numbers) for numbers in zip(*counts, strict=True))
            fuses = same_bits.has_same_bits(operator, dtype, torch.device(target.device, 0))
            require(not (fuses and different), f"{operator} in {dtype}: {different:,} differ")
            numbers = {"compared": compared, "different": different, "fuses": fuses}
            found[f"{operator} {dtype}"] = numbers
    same = [name for name, numbers in found.items() if numbers["fuses"]]
    compared = sum(found[name]["compared"] for name in same)
    return Measured(line=f"the same {compared:,} bits: {', '.join(same)}", numbers=found)


def _differing(call: Any, num: int, dtype: torch.dtype, target: Target) -> tuple[int, int]:
    different = compared = 0
    kernel = None
    for operands in _operands(num, dtype, target):
        with torch.no_grad():
            kernel = kernel or same_bits.compiled(call, operands)
            ours, theirs = kernel(*operands)[0], call(*operands)
        different += same_bits.num_different(ours, theirs)
        compared += ours.numel()
    return different, compared


def _operands(num: int, dtype: torch.dtype, target: Target) -> Iterator[tuple[Tensor, ...]]:
    rows = 1024 if target.is_cuda else 1
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=target.device)
    if dtype == torch.bfloat16:
        numbers = every.to(torch.int16).view(dtype)
        for start in range(0, 2**16 if num > 1 and target.is_cuda else 1, rows):
            others = numbers[start : start + rows].repeat_interleave(2**16)
            yield (others, numbers.repeat(rows))[-num:]
        return
    generator = torch.Generator(target.device).manual_seed(0)
    shape = (num, rows * 2**16)
    bits = torch.randint(-(2**31), 2**31, shape, device=target.device, generator=generator)
    yield tuple(bits.to(torch.int32).view(dtype))
    yield tuple(4 * torch.randn(shape, device=target.device, generator=generator))


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


class GatedMlp(nn.Module):
    """Adds an MLP that is wider than its input; returns a loss."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the mean square of float32 of rows (n, width)."""
        gated = nn.functional.relu(self.gate(x)) * nn.functional.silu(self.up(x))
        loss: Tensor = (x + self.down(gated)).float().square().mean()
        return loss


def in_tiles(target: Target) -> str:
    """Compare a step in tiles of rows, fused and not, by their bits; and with eager in float32."""
    _require_inductor(target)
    tile_bytes = row_tiles.TILE_BYTES if target.is_cuda else 2**20
    with patch.object(row_tiles, "TILE_BYTES", tile_bytes):
        return _in_tiles(target)


def _in_tiles(target: Target) -> str:
    width, inner, num_rows = (512, 8192, 8192) if target.is_cuda else (16, 256, 4096)
    torch.manual_seed(0)
    model, x = GatedMlp(width, inner).to(target.device), torch.randn(num_rows, width)
    errors = []
    for dtype in _dtypes(target):
        own = {"x": x.to(target.device, dtype)}
        make = partial(copy.deepcopy, model.to(dtype))
        wide = {"x": own["x"].float()}
        expected = eager_gradients(make().float(), wide)
        least = _least_in_tiles(make(), own, target)
        memory = {"budget": least * 21 // 20, "limits": "tensors"}
        plain, fused = (
            gradients(make(), own, target, memory=memory, fusion=fusion) for fusion in (False, True)
        )
        differing = [n for n in plain if not torch.equal(plain[n], fused[n])]
        require(not differing, f"{dtype}: other bits in {differing}")
        errors += [error_of(fused[name], expected[name]) for name in expected]
        most = 2.0**-6 if dtype == torch.bfloat16 else 1e-5
        require(max(errors) <= most, f"{dtype}: relative error {max(errors):.1e}")
    return f"the same bits, fused or not; relative error against eager {max(errors):.1e}"


def _least_in_tiles(model: nn.Module, batch: dict[str, Tensor], target: Target) -> int:
    """Return the smallest budget; require that tiles make it clearly smaller."""
    found = []
    for leave_out in ((), ("tile_rows",)):
        memory = {"budget": 1, "limits": "tensors"}
        try:
            gradients(copy.deepcopy(model), batch, target, memory=memory, leave_out=leave_out)
        except BudgetError as error:
            found.append(error.smallest_bytes or 0)
    tiled, whole = found
    require(tiled < 0.7 * whole, f"{tiled:,} bytes in tiles, {whole:,} whole")
    return tiled


def _dtypes(target: Target) -> tuple[torch.dtype, ...]:
    # On a CPU `tests/fusion` compares bfloat16; each kernel is compiled for seconds there.
    return (torch.float32, torch.bfloat16) if target.is_cuda else (torch.float32,)


def _require_inductor(target: Target) -> None:
    if (reason := inductor.why_unavailable(target.device)) is not None:
        raise NotRunError(reason)


_RUNS: dict[str, Callable[[Target], Measured | str]] = {
    "operators": operators,
    "functions": written_functions,
    "steps": steps,
    "tiles": in_tiles,
}

CHECKS = [
    Check(name=f"fusion, {name}", run=run, group="fusion", limit_s=120, environment=ENVIRONMENT)
    for name, run in _RUNS.items()
]
