"""A linear in fp8 that is computed after a call, outside of its trace, with the bits that the trace would have."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor, nn

from thunder_memsave.fp8.compute.operators import BLOCK, name_of_kernels, quantize_frozen
from thunder_memsave.fp8.compute.symbols import Computation
from thunder_memsave.fp8.recipe import Role
from thunder_memsave.fp8.scaling import INPUT, WEIGHT


class LateLinear(nn.Module):
    """`x @ weight.t() + bias` in fp8, without gradients; it records no amax."""

    def __init__(self, computation: Computation, dtype: torch.dtype) -> None:
        """`dtype` is that of the result."""
        super().__init__()
        self._computation, self._dtype = computation, dtype
        self._kernels = importlib.import_module(name_of_kernels(computation.backend))

    def forward(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, forward_scale: Tensor | None
    ) -> Tensor:
        """Compute.

        Args:
            x: Shape [..., in].
            weight: Shape [out, in], in its own dtype.
            bias: Shape [out].
            forward_scale: The scales of input and weight, of the recipe `delayed`.
        """
        of, recipe = self._computation, self._computation.recipe
        rows = x.to(self._dtype).reshape(-1, x.shape[-1])
        if of.is_frozen:
            quantized = quantize_frozen(of.backend, recipe, weight)
        else:
            quantized = self._quantized(weight, "weight", forward_scale)
        found: Tensor = self._kernels.gemm(
            *self._quantized(rows, "input", forward_scale),
            *quantized,
            None if bias is None else bias.to(self._dtype),
            self._dtype,
            recipe.use_fast_accum("forward"),
        )
        return found.reshape(*x.shape[:-1], -1)

    def _quantized(self, value: Tensor, role: Role, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        dtype = self._computation.recipe.dtype(role)
        found: tuple[Tensor, Tensor]
        scaling = self._computation.recipe.scaling
        if scaling == "mx":
            found = self._kernels.quantize_mx(value, dtype)
        elif scaling == "block":
            rows = BLOCK if role == "weight" else 1
            found = self._kernels.quantize_block(value, dtype, rows, BLOCK)
        elif scale is None:
            found = self._kernels.quantize_current(value, dtype)
        else:
            index = WEIGHT if role == "weight" else INPUT
            found = self._kernels.quantize_delayed(value, scale, scale, index, dtype, False)
        return found
