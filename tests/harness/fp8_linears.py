"""Compiles models whose linears run in fp8, counts operations of their traces, and computes the same eagerly."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from thunder.core import dtypes
from thunder.core.proxies import TensorProxy
from thunder.core.symbol import BoundSymbol
from thunder.core.trace import TraceCtx
from torch import Tensor, nn

from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, Fp8Config
from thunder_memsave.fp8.compute.linears import Fp8Linear, Fp8Linears, frozen_in_fp8
from thunder_memsave.fp8.compute.operators import Backend, quantize_frozen
from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.fp8.recipe import Recipe, recipe_of
from thunder_memsave.fp8.weights.layers import choose, feature_multiple

Shape = tuple[int, ...]


def fp8_module(
    model: nn.Module,
    *,
    backend: Backend = "torch",
    planner: MemoryPlanner | None = None,
    compile_config: CompileConfig | None = None,
    **options: Any,
) -> CompiledModule:
    """Compile `model` with its linears in fp8; `options` are those of the section `fp8`."""
    config = Fp8Config(**{**_defaults(options), **options})
    multiple = feature_multiple(config.recipe)
    choices = choose(model, skip_modules=config.skip_modules, multiple=multiple)
    frozen = frozen_in_fp8(model, config, data_parallel=None)
    if frozen is not None:
        frozen.cast_rest(torch.device("cpu"))
    linears = Fp8Linears(model, choices, recipe=recipe_of(config), backend=backend)
    return CompiledModule(model, fp8=linears, planner=planner, config=compile_config)


def _defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    is_delayed = options.get("recipe", "delayed") == "delayed"
    return {"skip_modules": (), **({"amax_history_len": 4} if is_delayed else {})}


def linears_of(module: CompiledModule) -> Fp8Linears:
    """Return the linears of an `fp8_module`."""
    assert module.fp8 is not None
    return module.fp8


def is_fp8(proxy: Any) -> bool:
    """Tell whether a proxy stands for an fp8 tensor."""
    return isinstance(proxy, TensorProxy) and "float8" in str(dtypes.to_torch_dtype(proxy.dtype))


def ops(trace: TraceCtx, kind: str) -> list[BoundSymbol]:
    """Return the fp8 operations of a kind (`gemm`, `transpose`, `quantize`) in a trace."""
    return [b for b in trace.bound_symbols if b.sym.name.startswith(f"fp8_{kind}")]


def results(trace: TraceCtx, kind: str) -> Counter[Shape]:
    """Count the results of these operations by shape."""
    return Counter(tuple(b.flat_proxy_outs[0].shape) for b in ops(trace, kind))


@dataclass(frozen=True, slots=True)
class Saved:
    """Shapes of activations kept for backward, without parameters and state."""

    fp8: Counter[Shape]
    other: Counter[Shape]


def saved(compiled: Compiled) -> Saved:
    """Return the kept activations of a call with a backward."""
    forward = compiled.forward_traces[-1]
    given = {a.name for a in forward.args}
    kept = [p for p in forward.output[1][0] if p.name not in given]
    return Saved(
        Counter(tuple(p.shape) for p in kept if is_fp8(p) and len(p.shape) == 2),
        Counter(tuple(p.shape) for p in kept if not is_fp8(p) and math.prod(p.shape) > 1),
    )


class _ComputesEverything(torch.autograd.Function):
    """A linear in fp8 that computes all three gradients, needed or not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, linear: Fp8Linear) -> Any:
        recipe, records = linear._recipe, torch.is_grad_enabled() or ctx is not None
        rows = x.reshape(-1, x.shape[-1])
        quantized_x = _quantize(linear, rows, "input", records=records)
        if linear.is_frozen:
            numbers, scale_inv = quantize_frozen("torch", recipe, weight)
            quantized_weight = numbers, scale_inv
        else:
            quantized_weight = _quantize(linear, weight, "weight", records=records)
        fast = recipe.use_fast_accum("forward")
        bias = None if bias is None else bias.to(x.dtype)
        product = torch_backend.gemm(*quantized_x, *quantized_weight, bias, x.dtype, fast)
        ctx.linear, ctx.kept = linear, (rows, quantized_x, quantized_weight)
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        return product.reshape(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows, x, weight), linear, (grad,) = ctx.kept, ctx.linear, grads
        flat = grad.reshape(-1, grad.shape[-1])
        quantized = _quantize(linear, flat, "grad", records=True)
        transpose = torch_backend.transpose
        is_block = linear._recipe.name == "block"
        is_mx = linear._recipe.name == "mxfp8"
        scale = weight[1].t().contiguous() if is_block else weight[1]
        columns_of_weight, scale = (
            _quantize_columns(linear, linear.linear.weight, "weight")
            if is_mx
            else (transpose(weight[0]), scale)
        )
        grad_input = torch_backend.gemm(
            *quantized, columns_of_weight, scale, None, grad.dtype, False
        )
        if is_mx:
            a = _quantize_columns(linear, flat, "grad")
            b = _quantize_columns(linear, rows, "input")
        elif is_block:
            a = _quantize(linear, flat.t().contiguous(), "grad", records=True)
            b = _quantize(linear, rows.t().contiguous(), "input", records=True)
        else:
            a, b = (transpose(quantized[0]), quantized[1]), (transpose(x[0]), x[1])
        grad_weight = torch_backend.gemm(*a, *b, None, grad.dtype, False)
        return (
            grad_input.reshape(*grad.shape[:-1], -1),
            grad_weight.to(ctx.dtypes[0]),
            None if ctx.dtypes[1] is None else flat.sum(0),
            None,
        )


def _quantize(linear: Fp8Linear, x: Tensor, role: Any, *, records: bool) -> tuple[Tensor, Tensor]:
    recipe: Recipe = linear._recipe
    dtype = recipe.dtype(role)
    if recipe.name == "mxfp8":
        return torch_backend.quantize_mx(x, dtype)
    if recipe.name == "block":
        return torch_backend.quantize_block(x, dtype, 128 if role == "weight" else 1, 128)
    if recipe.name == "current":
        return torch_backend.quantize_current(x, dtype)
    state = linear.state
    assert state is not None
    direction = "backward" if role == "grad" else "forward"
    scale, history = (getattr(state, f"{direction}_{part}") for part in ("scale", "amax_history"))
    column = 1 if role == "weight" else 0
    return torch_backend.quantize_delayed(x, scale, history.data, column, dtype, records)


def _quantize_columns(linear: Fp8Linear, x: Tensor, role: Any) -> tuple[Tensor, Tensor]:
    return torch_backend.quantize_mx_columns(x.detach(), linear._recipe.dtype(role))


class EagerTwin:
    """A copy of a model before its first step, which computes the same eagerly, with all gradients."""

    def __init__(self, module: CompiledModule) -> None:
        self.model = copy.deepcopy(module.module)
        self.linears = linears_of(module).for_copy(self.model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with self._in_fp8():
            return self.model(*args, **kwargs)

    @contextmanager
    def _in_fp8(self) -> Iterator[None]:
        found = {id(f.linear): f for f in self.linears.by_name.values()}
        plain = nn.Linear.forward

        def forward(linear: nn.Linear, x: Tensor) -> Tensor:
            if id(linear) not in found:
                return plain(linear, x)
            own = found[id(linear)]
            self.linears.note_recorded()
            result = _ComputesEverything.apply(x, linear.weight, linear.bias, own)  # type: ignore[no-untyped-call]
            assert isinstance(result, Tensor)
            return result

        with patch.object(nn.Linear, "forward", forward):
            yield


def state_of(linears: Fp8Linears) -> dict[str, Tensor]:
    """Return copies of all scaling state."""
    return {
        f"{name}.{key}": value.clone()
        for name, linear in linears.by_name.items()
        if linear.state is not None
        for key, value in linear.state.state_dict().items()
    }
