"""Starts the magnitudes of DoRA as the norms of the rows of the weights that they belong to, as peft does.

The weights are those of the forward: where bytes of a frozen weight are kept, the dequantised one. So they are read
after all weights have their values, whole and one after the other.

Source: Liu et al., DoRA, 2024; `peft.tuners.lora.dora.DoraLinearLayer.update_layer` of peft 0.21.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.fp8.kernels import torch_backend
from thunder_memsave.fp8.weights.frozen import scale_inv_of
from thunder_memsave.ops.host_copies.weights import place_of
from thunder_memsave.sharding.rows import gather_full, own_rows, take_rows
from thunder_memsave.sharding.sharded_parameter import as_rows, is_sharded, stored_weight
from thunder_memsave.stored_weights.formats import format_named

_STARTS = "_thunder_memsave_starts_from_weight"


def magnitudes_of(layer: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    """Yield peft's modules of magnitudes of a layer with a matrix, and the magnitudes: one for each output."""
    of_adapters = layer._modules.get("lora_magnitude_vector")
    base: Any = layer._modules.get("base_layer")
    weight = getattr(base, "weight", None)
    if not isinstance(of_adapters, nn.ModuleDict) or not isinstance(weight, nn.Parameter):
        return
    for owner in of_adapters.values():
        magnitudes = owner._parameters.get("weight")
        if magnitudes is not None and magnitudes.dim() == 1:
            yield owner, magnitudes


def start_later(owner: nn.Module) -> None:
    """Note that the magnitudes of this module have no values yet."""
    setattr(owner, _STARTS, True)


@torch.no_grad()
def start_magnitudes(module: nn.Module, data_parallel: DataParallel | None) -> None:
    """Give magnitudes their values where `start_later` noted it. A collective, if a weight is sharded."""
    for layer in module.modules():
        for owner, magnitudes in magnitudes_of(layer):
            if vars(owner).pop(_STARTS, False):
                base: Any = layer._modules["base_layer"]
                weight = _weight_itself(base, data_parallel)
                norms = torch.linalg.norm(weight.T if _is_transposed(owner) else weight, dim=1)
                _fill(magnitudes, norms.to(weight.dtype), data_parallel)


def _is_transposed(owner: nn.Module) -> bool:
    """Return whether the weight has the shape `[in, out]`, as transformers' Conv1D has it."""
    return bool(getattr(owner, "fan_in_fan_out", False))


def _weight_itself(base: nn.Module, data_parallel: DataParallel | None) -> Tensor:
    """Return the whole weight that the forward computes with, in its own dtype."""
    weight = base._parameters["weight"]
    assert weight is not None
    whole, stored = gather_full(weight, data_parallel), stored_weight(weight)
    whole = whole.to(place_of(weight) or whole.device)  # the norms are those of its kernels
    if stored is None:
        return whole
    if stored.format == "fp8":
        return torch_backend.dequantize(whole, scale_inv_of(base)).to(stored.dtype)
    return format_named(stored.format).dequantize(whole, stored.shape, stored.dtype)


def _fill(magnitudes: nn.Parameter, norms: Tensor, data_parallel: DataParallel | None) -> None:
    if is_sharded(magnitudes):
        assert data_parallel is not None
        norms = take_rows(norms, own_rows(norms.shape, data_parallel))
    as_rows(magnitudes).copy_(norms)
