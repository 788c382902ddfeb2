"""Measures the rates that all arithmetic about speed rests on: products, bytes, and attention by each kernel."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from gpu.checks import Check, Measured, Target
from gpu.kernels import cpu_flash, heads_of
from thunder_memsave.ops.families import attention_kernels

REPEATS = 20


def median_ms(run: Callable[[], Any], target: Target, *, repeats: int = REPEATS) -> float:
    """Return the median of the milliseconds on the device; the host is ahead, so that its own time is hidden."""
    for _ in range(3):
        run()
    if not target.is_cuda:
        return median(_host_ms(run) for _ in range(3))
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(1_000_000)
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return float(median(found))


def _host_ms(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def products(target: Target, *, dtype: torch.dtype) -> Measured:
    """Multiply as the first linear of an 8B's MLP does."""
    rows, wide, inner = (8192, 14336, 4096) if target.is_cuda else (64, 64, 64)
    x = torch.randn(rows, inner, device=target.device, dtype=dtype)
    weight = torch.randn(wide, inner, device=target.device, dtype=dtype)
    ms = median_ms(lambda: x @ weight.t(), target)
    rate = 2 * rows * wide * inner / ms / 1e9
    return Measured(
        line=f"{ms:.3f} ms, {rate:.0f} TFLOP/s", numbers={"ms": ms, "tflops_per_s": rate}
    )


def pointwise(target: Target, *, run: Callable[[Tensor], Tensor]) -> Measured:
    """Read and write a tensor of the size of an 8B's widest activation."""
    size = (8192, 14336) if target.is_cuda else (64, 64)
    x = torch.randn(size, device=target.device, dtype=torch.bfloat16)
    nbytes = x.nbytes + run(x).nbytes
    ms = median_ms(lambda: run(x), target)
    rate = nbytes / ms / 1e9
    return Measured(line=f"{ms:.3f} ms, {rate:.2f} TB/s", numbers={"ms": ms, "tb_per_s": rate})


def attention(target: Target, *, kind: str) -> Measured:
    """Attend causally with the heads of an 8B over 8,192 tokens, forward and backward."""
    length = 8192 if target.is_cuda else 64
    query, key = (heads_of(target, 1, n, length, 128, torch.bfloat16) for n in (32, 8))
    forward, backward = _ATTENTION[kind](query, key)
    saved = forward()
    found = median_ms(forward, target), median_ms(lambda: backward(saved), target)
    work = 2 * 2 * 32 * length * length // 2 * 128
    rates = [times * work / ms / 1e9 for times, ms in zip((1, 2.5), found, strict=True)]
    line = f"forward {found[0]:.2f} ms, {rates[0]:.0f} TFLOP/s; backward {found[1]:.2f} ms, {rates[1]:.0f} TFLOP/s"
    names = ("forward_ms", "backward_ms", "forward_tflops_per_s", "backward_tflops_per_s")
    return Measured(line=line, numbers=dict(zip(names, (*found, *rates), strict=True)))


Runs = tuple[Callable[[], Any], Callable[[Any], Any]]


def _flash(query: Tensor, key: Tensor) -> Runs:
    on_cuda = query.is_cuda
    kernel = attention_kernels.cuda_flash if on_cuda else cpu_flash
    backward: Any = kernel.derivatives[0].run
    return (
        lambda: kernel.run(query, key, key, None, True, None),
        lambda saved: backward(query, query, key, key, *saved, None, True, None),
    )


def _efficient(query: Tensor, key: Tensor) -> Runs:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()[None, None]
    kernel = attention_kernels.cuda_efficient
    backward: Any = kernel.derivatives[0].run
    return (
        lambda: kernel.run(query, key, key, mask, False, None),
        lambda saved: backward(query, query, key, key, *saved, mask, False, None),
    )


def _cudnn(query: Tensor, key: Tensor) -> Runs:
    kernel = attention_kernels.cuda_cudnn
    backward: Any = kernel.derivatives[0].run
    return (
        lambda: kernel.run(query, key, key, None, True, None),
        lambda saved: backward(query, query, key, key, *saved, None, True, None),
    )


_ATTENTION = {"flash": _flash, "efficient, masked": _efficient, "cuDNN": _cudnn}

CHECKS = [
    *(
        Check(name=f"product, {dtype}", run=partial(products, dtype=dtype), group="rates")
        for dtype in (torch.bfloat16, torch.float32)
    ),
    *(
        Check(name=f"pointwise, {name}", run=partial(pointwise, run=run), group="rates")
        for name, run in {
            "copy": torch.clone,
            "square": lambda x: x * x,
            "to float32": lambda x: x.float(),
        }.items()
    ),
    *(
        Check(
            name=f"attention, {kind}",
            run=partial(attention, kind=kind),
            group="rates",
            needs_cuda=kind != "flash",
        )
        for kind in _ATTENTION
    ),
]
