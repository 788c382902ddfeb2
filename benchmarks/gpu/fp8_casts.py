"""Checks that fp8 casts in one launch have the bits of PyTorch's arithmetic on a CPU, whatever is cast.

On a CPU it runs under Triton's interpreter, where Triton is installed and `TRITON_INTERPRET=1` is set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from gpu.checks import Check, Target, require, require_triton
from thunder_memsave.fp8.kernels import one_launch, torch_backend

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (1.0, 3.0, 0.37, 2.0**-20, 2.0**30)
_NAN, _INF = float("nan"), float("inf")


def casts(target: Target) -> str:
    """Cast every 16-bit number, float32 ones, and matrices in several layouts, with one scale."""
    require_triton(target, one_launch.why_not)
    compared = 0
    for name, x in {**_numbers(), **_layouts()}.items():
        for dtype in _DTYPES:
            about = f"{name} as {dtype}"
            for factor in _SCALES:
                _require_same_cast(f"{about} with scale {factor}", x, target, dtype, factor)
            for epsilon, powers in ((0.0, False), (0.0, True), (1e-3, False)):
                own = one_launch.quantize_current(_moved(x, target), dtype, epsilon, powers)
                expected = torch_backend.quantize_current(x, dtype, epsilon, powers)
                _require_same_pair(f"{about} with its own scale", own, expected)
            compared += x.numel() * (len(_SCALES) + 3)
    return f"{compared:,} numbers, their amaxes and scales have the CPU's bits"


def _require_same_cast(
    about: str, x: Tensor, target: Target, dtype: torch.dtype, factor: float
) -> None:
    on_device, scale, amax = _moved(x, target), torch.tensor([factor]), torch.tensor(0.25)
    there, recorded = scale.to(target.device), torch.full((), 0.25, device=target.device)
    expected = torch_backend.cast(x, scale, dtype, raised=amax), scale.reciprocal()
    found = one_launch.quantize_delayed(on_device, there, dtype, recorded)
    _require_same_pair(about, found, expected)
    _require_same(f"recorded amax of {about}", recorded, amax)
    _require_same(f"{about}, no amax recorded", one_launch.cast(on_device, there, dtype), found[0])
    _require_same(f"amax of {about}", one_launch.amax(on_device), torch_backend.amax(x))


def blocks(target: Target) -> str:
    """Cast blocks with scales of their own, transpose the result, and dequantise rows with one scale each."""
    require_triton(target, one_launch.why_not)
    compared = 0
    for name, x in _matrices():
        for dtype in _DTYPES:
            for rows in (1, 128):
                for epsilon, powers in ((0.0, True), (0.0, False), (1e-3, False)):
                    on_device = _moved(x, target)
                    arguments = (dtype, rows, 128, epsilon, powers)
                    found = one_launch.quantize_block(on_device, *arguments)
                    expected = torch_backend.quantize_block(x, *arguments)
                    about = f"{name} as {dtype} in blocks of {rows} rows"
                    _require_same_pair(about, found, expected)
                    transposed = one_launch.transpose(found[0])
                    _require_same(f"transpose of {about}", transposed, expected[0].t())
                    if rows == 1 and powers and x.shape[1] <= 128:
                        back = one_launch.dequantize_rows(*found, x.dtype)
                        again = torch_backend.dequantize_rows(*expected, x.dtype)
                        _require_same(f"{about}, and back", back.isnan(), again.isnan())
                        back, again = back.nan_to_num(0.0), again.nan_to_num(0.0)  # of any bits
                        _require_same(f"{about}, and back", back, again)
                    compared += x.numel()
    return f"{compared:,} numbers, their scales and transposes have the CPU's bits"


def _numbers() -> Mapping[str, Tensor]:
    """Return all numbers of 16 bits, and float32 ones: special, ties, and of every magnitude."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(0)
    float32 = [
        torch.tensor([_NAN, -_NAN, _INF, -_INF, 0.0, -0.0, 2.0**-149, -(2.0**-149)]),
        torch.arange(-4096, 4096) / 64,  # ties of either format, and the numbers beside them
        torch.logspace(-46, 38, 2**13),
        -torch.logspace(-46, 38, 2**13),
        torch.randn(2**14 + 7, generator=generator) * 100,
    ]
    return {
        "every bfloat16": bits.view(torch.bfloat16),
        "every float16": bits.view(torch.float16),
        "float32": torch.cat(float32),
        "subnormal float32": torch.logspace(-45, -39, 77),
        "large float32": -torch.logspace(30, 38, 77),
        "zeros": torch.tensor([0.0, -0.0]),
        "none": torch.empty(0),
        "NaN alone": torch.full((3,), _NAN),
    }


def _layouts() -> Mapping[str, Tensor]:
    matrix = torch.randn(67, 131, generator=torch.Generator().manual_seed(1)).bfloat16()
    return {
        "an odd matrix": matrix,
        "every second column": matrix[:, ::2],
        "a transpose": matrix.t(),
        "an expanded row": matrix[:1].expand(5, -1),
        "three dims": matrix[:66].reshape(3, 22, 131)[:, 1:-1],
    }


def _matrices() -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    for shape in ((130, 300), (5, 7), (1, 1)):
        for dtype, top in ((torch.float32, 30), (torch.bfloat16, 30), (torch.float16, 4)):
            x = torch.randn(shape, generator=generator) * torch.logspace(-40, top, shape[1])
            x[0, 0], x[-1, -1] = _NAN, -_INF
            x[:, 128:200] = 0.0
            yield f"{dtype} {shape}", x.to(dtype)
            yield f"transposed {dtype} {shape}", x.to(dtype).t()


def _moved(x: Tensor, target: Target) -> Tensor:
    """Return the tensor on the device, in its own layout."""
    there = torch.empty(x.untyped_storage().nbytes() // x.element_size(), dtype=x.dtype)
    there.set_(x.untyped_storage())
    return there.to(target.device).as_strided(x.shape, x.stride(), x.storage_offset())


def _require_same_pair(
    about: str, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]
) -> None:
    for of, a, b in zip(("numbers", "inverse scales"), found, expected, strict=True):
        _require_same(f"{of} of {about}", a, b)


def _require_same(about: str, found: Tensor, expected: Tensor) -> None:
    a, b = (t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (found, expected))
    differing = int((a != b).sum())
    require(differing == 0, f"{about}: {differing} of {b.numel()} bytes differ")


CHECKS = [
    Check(name=f"fp8, {name} in one launch", run=run, group="fp8 casts", limit_s=300)
    for name, run in {"casts": casts, "blocks": blocks}.items()
]
