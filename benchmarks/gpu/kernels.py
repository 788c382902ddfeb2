"""Checks single kernels: attention and norms against float64, casts by their bits, scratch and FLOPs by formulas."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gpu.checks import Check, Target, require
from thunder_memsave.aten.record import AtenRecord
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.measure.layouts import Value, layout_of
from thunder_memsave.measure.op_profile import Operation, OpProfile
from thunder_memsave.measure.scratch import MeasuredScratch, bounded_scratch
from thunder_memsave.ops.attention_choice import prefers_cudnn
from thunder_memsave.ops.cuda_device import planned_for
from thunder_memsave.ops.families import (
    attention_kernels,
    packed_kernels,
    rms_norm,
    windowed_attention,
)
from thunder_memsave.ops.families.embedding_gradient import (
    NAME,
    add_embedding_gradient,
)
from thunder_memsave.ops.families.packed_attention import boundaries_of, packed_mask
from thunder_memsave.ops.table import scratch_bytes

_LIMIT = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-4, torch.float64: 1e-10}
"""Relative error of a kernel: two-byte floats have 8 or 11 bits; sums of float32 are in another order."""


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| in float64; infinite where a number is not finite."""
    if not bool(found.isfinite().all()):
        return math.inf
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm().clamp_min(1e-300))


def judged(errors: dict[str, float], dtype: torch.dtype) -> str:
    """Return the errors as a line; raise if one is above the limit of the dtype."""
    line = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    require(max(errors.values()) <= _LIMIT[dtype], f"relative errors above {_LIMIT[dtype]}: {line}")
    return f"relative errors against float64: {line}"


def heads_of(
    target: Target, rows: int, num: int, length: int, width: int, dtype: torch.dtype
) -> Tensor:
    """Draw (rows, heads, length, width) in the order of memory that transformers' models have."""
    shape = (rows, length, num, width)
    return torch.randn(shape, device=target.device, dtype=dtype).transpose(1, 2)


def reference(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor) -> Tensor:
    """Attend in float64; rows that attend to nothing are zero."""
    shared = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(shared, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~allowed, -math.inf)
    dead = (~allowed).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return weights @ value


def attention(
    target: Target,
    *,
    cuda: Any,
    heads: int,
    key_heads: int,
    length: int,
    width: int,
    dtype: torch.dtype = torch.bfloat16,
    masked: str = "",
) -> str:
    """Compare a kernel's output and three gradients with float64; on a CPU, that of the CPU in its place."""
    length = length if target.is_cuda else min(length, 100)
    query, key, value = (
        heads_of(target, 2, num, length, width, dtype) for num in (heads, key_heads, key_heads)
    )
    grad = torch.randn_like(query)
    settings, allowed = _settings(masked, length, dtype, target)
    kernel = cuda if target.is_cuda else _on_cpu(cuda)
    backward = kernel.derivatives[0].run
    output, logsumexp = kernel.run(query, key, value, *settings)
    grads = backward(grad, query, key, value, output, logsumexp, *settings)
    exact = [t.detach().double().requires_grad_() for t in (query, key, value)]
    expected = reference(exact[0], exact[1], exact[2], allowed)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    pairs = zip((output, *grads), (expected, *expected_grads), strict=True)
    names = ("output", "of query", "of key", "of value")
    errors = {n: error_of(a, b) for n, (a, b) in zip(names, pairs, strict=True)}
    return f"{kernel.name}: {judged(errors, dtype)}"


def _on_cpu(cuda: Any) -> Any:
    is_packed = cuda is packed_kernels.cuda_packed
    return packed_kernels.cpu_packed if is_packed else cpu_flash


def _cpu_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, _: None
) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, attn_mask=mask
    )


def _cpu_backward(
    saved: attention_kernels.Saved, mask: Tensor | None, is_causal: bool, _: None
) -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *saved, 0.0, is_causal, attn_mask=mask
    )


cpu_flash = attention_kernels.attention_kernel(
    "cpu_flash_attention", forward=_cpu_forward, backward=_cpu_backward
)
"""Stands for CUDA's kernels where the checks run on a CPU."""


def _settings(
    masked: str, length: int, dtype: torch.dtype, target: Target
) -> tuple[Sequence[Any], Tensor]:
    """Return a kernel's arguments besides the operands, and where attention is allowed."""
    causal = torch.ones(length, length, dtype=torch.bool, device=target.device).tril()
    window = length // 4 if "window" in masked else None
    if not masked:
        return (None, True, None), causal
    if masked == "window":
        allowed = causal.triu(1 - length // 4)
        return ((window, None) if target.is_cuda else _added(allowed, dtype)), allowed
    third, last = length // 3, length - length // 10
    ends = torch.tensor([[third, last, last], [length, length, length]], dtype=torch.int32)
    boundaries = boundaries_of(ends.to(target.device), length)
    allowed = packed_mask(boundaries, 2, length, window)
    if "boundaries" in masked:
        inside = torch.arange(length, device=target.device) < ends[:, -1:].to(target.device)
        return (boundaries, None, window), allowed & inside[:, None, :, None]
    if masked == "dead":
        allowed = allowed.clone()
        allowed[:, :, :5] = False
    return ((allowed, False, None) if target.is_cuda else _added(allowed, dtype)), allowed


def _added(allowed: Tensor, dtype: torch.dtype) -> tuple[Tensor, bool, None]:
    """Return the arguments of the CPU's kernel, which takes added masks alone."""
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, -math.inf), False, None


def rms(target: Target, *, weighted: str) -> str:
    """Compare RMS norm and its gradients with float64, and with eager's bits."""
    dtype = torch.bfloat16
    value = torch.randn(64, 1024, device=target.device, dtype=dtype)
    weight_dtype = torch.float32 if weighted == "float32" else dtype
    weight = 1 + 0.1 * torch.randn(1024, device=target.device)
    weight, grad = weight.to(weight_dtype), torch.randn_like(value)
    result, rstd = rms_norm.rms_norm(value, 1, weight, 1e-5)
    same = torch.equal(result, torch.rms_norm(value, (1024,), weight, 1e-5).to(result.dtype))
    of_value = rms_norm._of_value(grad.to(result.dtype), value, 1, rstd, weight, 1e-5)
    of_weight = rms_norm._of_weight(grad.to(result.dtype), value, 1, rstd, weight, 1e-5)
    exact = [t.detach().double().requires_grad_() for t in (value, weight)]
    expected = torch.rms_norm(exact[0], (1024,), exact[1], 1e-5)
    grads = torch.autograd.grad(expected, exact, grad.double())
    errors = {
        "output": error_of(result, expected),
        "of value": error_of(of_value, grads[0]),
        "of weight": error_of(of_weight, grads[1]),
    }
    require(same, "the forward pass has other bits than torch.rms_norm")
    return f"{judged(errors, dtype)}; forward has eager's bits"


class _Chain(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        total = a * b + a.float().bfloat16()
        return (total * nn.functional.silu(b) - total / (b * b + 1.0)) * -a


def skipped_casts(target: Target) -> str:
    """Compare a module compiled without casts to float32 and back with eager PyTorch, which makes them."""
    rows = [torch.randn(512, 1024, device=target.device, dtype=torch.bfloat16) for _ in range(2)]
    found = []
    for module in (_Chain(), CompiledModule(_Chain())):
        leaves = [t.clone().requires_grad_() for t in rows]
        output = module(*leaves)
        found.append([output, *torch.autograd.grad(output.float().square().sum(), leaves)])
    differing = sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))
    require(differing == 0, f"{differing} of 3 tensors have other bits than in eager PyTorch")
    return "output and both gradients have eager's bits"


_SCRATCH = {
    "flash": attention_kernels.cuda_flash,
    "cuDNN": attention_kernels.cuda_cudnn,
    "packed": packed_kernels.cuda_packed,
}


def scratch(target: Target, *, kernel: str) -> str:
    """Compare the bytes that attention's backward takes inside with their bound."""
    return _scratch(target, _SCRATCH[kernel], packed=kernel == "packed")


def _scratch(target: Target, kernel: Any, *, packed: bool) -> str:
    length = 4096
    query = heads_of(target, 1, 32, length, 128, torch.bfloat16)
    key = heads_of(target, 1, 8, length, 128, torch.bfloat16)
    ends = torch.tensor([[length // 2, length]], dtype=torch.int32, device=target.device)
    boundaries = boundaries_of(ends, length)
    settings: tuple[Any, ...] = (boundaries,) if packed else (None, True)
    output, logsumexp = kernel.run(query, key, key, *settings, None)
    tensors = [query, query, key, key, output, logsumexp, *([boundaries] if packed else [])]
    run: Callable[..., Any] = kernel.derivatives[0].run
    rest = (None,) if packed else (None, True, None)
    values = [Value(layout_of(t), n) for n, t in enumerate(tensors)]
    operation = Operation(lambda *given: run(*given, *rest), values, True)
    made = (query.nbytes, key.nbytes, key.nbytes)
    found = OpProfile(
        results=(),
        num_argument_storages=len(tensors),
        made_bytes=made,
        peak_bytes=sum(made),
        moved_bytes=1,
        key=f"{kernel.derivatives[0].name}[]",
    )
    with tempfile.TemporaryDirectory() as directory:
        measured = MeasuredScratch(directory=Path(directory))(operation, found)
    bound = bounded_scratch(operation, found)
    line = f"measured {measured:,} bytes, bound {bound:,}"
    require(0 < measured <= bound, f"the bound does not hold: {line}")
    return line


def flops(target: Target) -> str:
    """Count the operations of grouped-query attention and its gradient as they run."""
    length = 512 if target.is_cuda else 64
    dtype = torch.bfloat16 if target.is_cuda else torch.float32
    query, key = (heads_of(target, 1, n, length, 64, dtype).requires_grad_() for n in (8, 2))
    with AtenRecord() as record:
        attended = nn.functional.scaled_dot_product_attention(
            query, key, key, is_causal=True, enable_gqa=True
        )
        torch.autograd.grad(attended.float().sum(), (query, key))
    pairs = 8 * length * length // 2
    expected = 2 * pairs * 64 * (2 + 5)
    require(record.flops == expected, f"counted {record.flops:,}, expected {expected:,}")
    return f"{record.flops:,} as expected: two products forward, five backward, half of the square"


def embedding_sum(target: Target) -> str:
    """Add the gradient of an embedding to another tensor, and compare bits and bytes with PyTorch's whole one."""
    rows, width = (50_000, 256) if target.is_cuda else (900, 16)
    lines = []
    for num_tokens, dtype in product((800, 8000), (torch.float32, torch.bfloat16)):
        num = num_tokens if target.is_cuda else num_tokens // 10
        ids = torch.randint(0, rows // 9, (num,), device=target.device)
        grad = torch.randn(num, width, device=target.device, dtype=dtype)
        total = torch.randn(rows, width, device=target.device, dtype=dtype)
        whole = torch.ops.aten.embedding_dense_backward(grad, ids, rows, 0, False)
        expected, found = total + whole, total.clone()
        del whole
        arguments = (found, grad, ids, 0, False)
        if target.is_cuda:
            taken, bound = _bytes_of_sum(*arguments)
            lines.append(f"{taken:,} of {bound:,} bytes")
            require(taken <= bound, f"the bound does not hold: {lines[-1]}")
        else:
            add_embedding_gradient(*arguments)
        require(torch.equal(found, expected), f"bits differ for {num:,} tokens in {dtype}")
    return f"the same bits; {'; '.join(lines) or 'bytes are measured on CUDA'}"


def _bytes_of_sum(*arguments: Any) -> tuple[int, int]:
    """Add on CUDA, and return the bytes that it took there, and those that a plan counts at most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with AtenRecord() as record:
        add_embedding_gradient(*arguments)
    torch.cuda.synchronize()
    operands = [layout_of(a) for a in arguments if isinstance(a, Tensor)]
    bound = record.peak_bytes + scratch_bytes(NAME, operands)
    return torch.cuda.max_memory_allocated() - before, bound


def choice(target: Target) -> str:
    """Compare PyTorch's choice of cuDNN on this GPU with the rules by which a plan chooses."""
    chosen = {}
    for width in (64, 128, 192, 256):
        query, key = (
            torch.empty(1, n, 512, width, device=target.device, dtype=torch.bfloat16)
            for n in (8, 2)
        )
        asked = prefers_cudnn(query, key, key, is_causal=True)
        with planned_for(torch.device(target.device), torch.cuda.get_device_capability()):
            planned = prefers_cudnn(query, key, key, is_causal=True)
        ask: Any = torch._fused_sdp_choice
        query.requires_grad_()
        number = ask(query, key, key, None, 0.0, True, enable_gqa=True)
        runs = number == torch.nn.attention.SDPBackend.CUDNN_ATTENTION.value
        chosen[width] = (runs, asked, planned)
    line = ", ".join(
        f"{width} wide: {'cuDNN' if r else 'not'}" for width, (r, *_) in chosen.items()
    )
    differing = [w for w, (runs, asked, planned) in chosen.items() if not runs == asked == planned]
    require(not differing, f"(runs, asked, planned) differ for heads of {differing}: {chosen}")
    return f"plans choose as PyTorch does; {line}"


_causal = partial(attention, cuda=attention_kernels.cuda_flash)
_cudnn = partial(attention, cuda=attention_kernels.cuda_cudnn)
_masked = partial(attention, cuda=attention_kernels.cuda_efficient, masked="mask")
_packed = partial(attention, cuda=packed_kernels.cuda_packed, masked="boundaries")
_windowed = partial(attention, cuda=windowed_attention.cuda_windowed, masked="window")
_SAME: dict[str, Any] = {"heads": 8, "key_heads": 8}
_SHARED: dict[str, Any] = {"heads": 8, "key_heads": 2}

_RUNS: dict[str, Callable[[Target], str]] = {
    "causal attention": partial(_causal, **_SAME, length=100, width=64),
    "causal attention, grouped queries": partial(_causal, **_SHARED, length=1000, width=128),
    "causal attention, float16, 192 wide": partial(
        _causal, **_SHARED, length=129, width=192, dtype=torch.float16
    ),
    "cuDNN's attention": partial(_cudnn, **_SAME, length=100, width=64),
    "cuDNN's attention, grouped queries": partial(_cudnn, **_SHARED, length=1000, width=128),
    "masked attention": partial(_masked, **_SAME, length=1000, width=128),
    "masked attention, rows that attend to nothing": partial(
        _masked, **_SAME, length=77, width=64, masked="dead"
    ),
    "masked attention, float32": partial(
        _masked, **_SAME, length=50, width=32, dtype=torch.float32
    ),
    "packed attention": partial(_packed, **_SAME, length=100, width=64),
    "packed attention, grouped queries": partial(_packed, **_SHARED, length=1000, width=128),
    "packed attention in a window": partial(
        _packed, **_SHARED, length=1000, width=128, masked="boundaries, window"
    ),
    "attention in a window": partial(_windowed, **_SAME, length=100, width=64),
    "attention in a window, grouped queries": partial(_windowed, **_SHARED, length=1000, width=128),
    "attention in a window, 256 wide": partial(_windowed, **_SHARED, length=500, width=256),
    "rms norm": partial(rms, weighted="bfloat16"),
    "rms norm, float32 weight": partial(rms, weighted="float32"),
    "casts that are skipped": skipped_casts,
    "embeddings' gradients, added": embedding_sum,
    "FLOPs of attention": flops,
}

CHECKS = [
    *(Check(name=name, run=run, group="kernels", limit_s=40) for name, run in _RUNS.items()),
    *(
        Check(
            name=f"scratch of {kernel} attention's backward",
            run=partial(scratch, kernel=kernel),
            group="kernels",
            needs_cuda=True,
        )
        for kernel in ("flash", "cuDNN", "packed")
    ),
    Check(name="cuDNN or flash", run=choice, group="kernels", needs_cuda=True),
]
