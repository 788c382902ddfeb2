"""Checks both fp8 backends: the bits of PyTorch's arithmetic on a CPU, and products against float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu.checks import Check, NotRunError, Target, require
from gpu.kernels import error_of
from thunder_memsave.config import ConfigError
from thunder_memsave.fp8.compute.backends import require as require_backend
from thunder_memsave.fp8.compute.operators import Backend
from thunder_memsave.fp8.kernels import te_backend, torch_backend
from thunder_memsave.fp8.kernels.nvfp4_blocks import NVFP4_BLOCK, dequantize_nvfp4
from thunder_memsave.fp8.recipe import RecipeName

_ROWS, _IN, _OUT = 512, 640, 384
"""Five blocks of the inputs' dim: rows of scales are padded."""
_ODD_ROWS = 500
"""No whole blocks of 32: zeros are added."""
_LIMIT = 2e-2
"""Relative error of a product in bfloat16 against that of the same fp8 numbers in float64."""

Quantized = tuple[Tensor, Tensor]


def quantized_product(target: Target, *, backend: Backend, recipe: RecipeName) -> str:
    """Quantise operands, compare them with the CPU's, and multiply them."""
    device = torch.device(target.device)
    try:
        require_backend(backend, recipe, device)
    except ConfigError as error:
        raise NotRunError(str(error)) from error
    torch.manual_seed(0)
    value = torch.randn(_ROWS, _IN).bfloat16()
    weight = torch.randn(_OUT, _IN).bfloat16()
    library: Any = torch_backend if backend == "torch" else te_backend
    operands = [
        quantized(library, t.to(device), recipe, is_weight=t is weight) for t in (value, weight)
    ]
    same = "this is the reference itself"
    if target.is_cuda:
        references = [
            quantized(torch_backend, t, recipe, is_weight=t is weight) for t in (value, weight)
        ]
        for name, found, expected in zip(("value", "weight"), operands, references, strict=True):
            _require_same_bits(name, found, expected)
        same = "numbers and scales have the CPU's bits"
    product = library.gemm(*operands[0], *operands[1], None, torch.bfloat16, recipe != "block")
    exact = [torch_backend.dequantize(*each).double() for each in operands]
    of_product = error_of(product, exact[0] @ exact[1].t())
    line = f"relative error of the product {of_product:.1e}"
    require(of_product <= _LIMIT, f"{line}, limit {_LIMIT}")
    return f"{same}; {line}"


def quantized(library: Any, x: Tensor, recipe: RecipeName, *, is_weight: bool) -> Quantized:
    """Cast to e4m3 by a recipe; with delayed scales, the amax must be recorded."""
    dtype = torch.float8_e4m3fn
    if recipe == "mxfp8":
        return library.quantize_mx(x, dtype)  # type: ignore[no-any-return]
    if recipe == "block":
        return library.quantize_block(x, dtype, 128 if is_weight else 1)  # type: ignore[no-any-return]
    if recipe == "current":
        return library.quantize_current(x, dtype)  # type: ignore[no-any-return]
    scale = torch.full((2,), 3.0, device=x.device)
    history = torch.zeros(4, 2, device=x.device)
    found = library.quantize_delayed(x, scale, history, int(is_weight), dtype, True)
    recorded, expected = history[0, int(is_weight)], x.abs().max().float()
    require(torch.equal(recorded, expected), f"recorded amax {recorded}, not {expected}")
    return found  # type: ignore[no-any-return]


def products_of_backward(target: Target, *, backend: Backend) -> str:
    """Cast to MXFP8 by columns too, compare with the CPU's bits, and multiply in the layouts of both gradients."""
    device = torch.device(target.device)
    try:
        require_backend(backend, "mxfp8", device)
    except ConfigError as error:
        raise NotRunError(str(error)) from error
    torch.manual_seed(0)
    sizes = {"value": (_ODD_ROWS, _IN), "weight": (_OUT, _IN), "gradient": (_ODD_ROWS, _OUT)}
    library: Any = torch_backend if backend == "torch" else te_backend
    rows, columns = {}, {}
    for name, size in sizes.items():
        value = torch.randn(size).bfloat16()
        found = library.quantize_mx_both(value.to(device), torch.float8_e4m3fn)
        expected = torch_backend.quantize_mx_both(value, torch.float8_e4m3fn)
        _require_same_bits(f"{name} by rows", found[:2], expected[:2])
        _require_same_bits(f"{name} by columns", found[2:], expected[2:])
        rows[name], columns[name] = found[:2], found[2:]
    lines = []
    for wanted, a, b in (
        ("input", rows["gradient"], columns["weight"]),
        ("weight", columns["gradient"], columns["value"]),
    ):
        product = library.gemm(*a, *b, None, torch.bfloat16, False)
        left, right = (torch_backend.dequantize(*each).double() for each in (a, b))
        of_product = error_of(product, left @ right.t())
        lines.append(f"relative error of the gradient of the {wanted} {of_product:.1e}")
        require(of_product <= _LIMIT, f"{lines[-1]}, limit {_LIMIT}")
    return "; ".join(["numbers and scales have the CPU's bits", *lines])


def products_in_nvfp4(target: Target, *, backend: Backend) -> str:
    """Cast to NVFP4 in both directions, compare with the CPU's bits, round by a seed, and multiply in all layouts."""
    device = torch.device(target.device)
    try:
        require_backend(backend, "nvfp4", device)
    except ConfigError as error:
        raise NotRunError(str(error)) from error
    torch.manual_seed(0)
    library: Any = torch_backend if backend == "torch" else te_backend
    sizes = {"value": (_ODD_ROWS, _IN), "weight": (_OUT, _IN), "gradient": (_ODD_ROWS, _OUT)}
    rows: dict[str, Any] = {}
    columns: dict[str, Any] = {}
    values: dict[str, Tensor] = {}
    for name, size in sizes.items():
        value = torch.randn(size).bfloat16()
        block_rows = NVFP4_BLOCK if name == "weight" else 1
        for kind, made in (("quantize_nvfp4", rows), ("quantize_nvfp4_columns", columns)):
            made[name] = getattr(library, kind)(value.to(device), block_rows, None)
            expected = getattr(torch_backend, kind)(value, block_rows, None)
            _require_same_bits(f"{name} by {kind}", made[name][:2], expected[:2])
            require(torch.equal(made[name][2].cpu(), expected[2]), f"amax of the {name} differs")
        values[name] = value.to(device)
    _require_rounding_by_a_seed(library, values["gradient"])
    lines = []
    for wanted, a, b in (
        ("result", rows["value"], rows["weight"]),
        ("gradient of the input", rows["gradient"], columns["weight"]),
        ("gradient of the weight", columns["gradient"], columns["value"]),
    ):
        product = library.gemm_nvfp4(*a, *b, None, torch.bfloat16, False)
        left, right = (dequantize_nvfp4(*each).double() for each in (a, b))
        of_product = error_of(product, left @ right.t())
        lines.append(f"relative error of the {wanted} {of_product:.1e}")
        require(of_product <= _LIMIT, f"{lines[-1]}, limit {_LIMIT}")
    return "; ".join(["numbers and scales have the CPU's bits", *lines])


def _require_rounding_by_a_seed(library: Any, x: Tensor) -> None:
    """Require the same numbers of a seed, others of another, and a mean of many that is the value."""
    seeds = [torch.tensor([seed]) for seed in range(16)]
    numbers = [library.quantize_nvfp4(x, 1, seed) for seed in (seeds[0], seeds[0], seeds[1])]
    require(torch.equal(numbers[0][0], numbers[1][0]), "a seed gives other numbers the second time")
    require(not torch.equal(numbers[0][0], numbers[2][0]), "two seeds give the same numbers")
    mean = torch.zeros_like(x, dtype=torch.float64)
    for seed in seeds:
        mean += dequantize_nvfp4(*library.quantize_nvfp4(x, 1, seed)).double() / len(seeds)
    nearest = dequantize_nvfp4(*library.quantize_nvfp4(x, 1, None)).double()
    of_mean, of_nearest = error_of(mean, x.double()), error_of(nearest, x.double())
    require(of_mean < of_nearest / 2, f"error of the mean {of_mean:.1e}, nearest {of_nearest:.1e}")


def _require_same_bits(name: str, found: Quantized, expected: Quantized) -> None:
    numbers, scales = (t.cpu() for t in found)
    differing = int((numbers.view(torch.uint8) != expected[0].view(torch.uint8)).sum())
    require(differing == 0, f"{differing} of {numbers.numel()} numbers of the {name} differ")
    require(torch.equal(scales, expected[1]), f"scales of the {name} differ")


CHECKS = [
    Check(
        name=f"fp8, {backend}, {recipe}",
        run=partial(quantized_product, backend=backend, recipe=recipe),
        group="fp8",
        limit_s=90,
    )
    for backend in ("torch", "transformer_engine")
    for recipe in ("delayed", "current", "block", "mxfp8")
]
CHECKS += [
    Check(
        name=f"fp8, {backend}, mxfp8 in backward",
        run=partial(products_of_backward, backend=backend),
        group="fp8",
        limit_s=90,
    )
    for backend in ("torch", "transformer_engine")
]
CHECKS += [
    Check(
        name=f"fp8, {backend}, nvfp4",
        run=partial(products_in_nvfp4, backend=backend),
        group="fp8",
        limit_s=90,
    )
    for backend in ("torch", "transformer_engine")
]
