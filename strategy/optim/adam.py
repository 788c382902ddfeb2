"""AdamW and Adam, with moments in a format of fewer bits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from thunder_memsave.optim.by_rows import ByRows, Rounding, refuse_out_of_range
from thunder_memsave.optim.formats import Format, State


class AdamW(ByRows):
    """`torch.optim.AdamW` with states in fewer bits. For the run file's `optimizer.states`, and for scripts.

    Args:
        params: Parameters or groups of them, as for PyTorch.
        lr: Learning rate.
        betas: Decay of the first and of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Part of a weight that is taken away, times the learning rate.
        states: Format of the moments.
        rounding: Of weights in bfloat16: `stochastic` keeps updates that are smaller than half a step, on average.
        seed: Of stochastic rounding.

    Raises:
        ConfigError: An argument is out of range, or has no effect.
    """

    kept: ClassVar = (
        State(name="exp_avg", is_signed=True),
        State(name="exp_avg_sq", is_signed=False),
    )
    _decouples: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        states: Format = "int8",
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        in_range = {
            "lr": (lr, lr >= 0),
            "eps": (eps, eps >= 0),
            "weight_decay": (weight_decay, weight_decay >= 0),
            "betas": (betas, len(betas) == 2 and all(0 <= beta < 1 for beta in betas)),
        }
        refuse_out_of_range(in_range)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults, states=states, rounding=rounding, seed=seed)

    @override
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        states: tuple[Tensor, ...],
        group: Mapping[str, Any],
        step: int,
    ) -> None:
        average, square = states
        (beta1, beta2), lr, decay = group["betas"], float(group["lr"]), group["weight_decay"]
        if decay and self._decouples:
            weight.mul_(1 - lr * decay)
        elif decay:
            gradient = (weight * decay).add_(gradient)
        average.mul_(beta1).add_(gradient * (1 - beta1))
        square.mul_(beta2).add_((gradient * gradient).mul_(1 - beta2))
        change = square.sqrt().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
        # In its place: another tensor would be a fourth of the size of a tile.
        torch.div(average, change, out=change)
        weight.sub_(change.mul_(lr / (1 - beta1**step)))


class Adam(AdamW):
    """`torch.optim.Adam` with states in fewer bits; weight decay is part of the gradient. Arguments as of `AdamW`."""

    _decouples = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        states: Format = "int8",
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, states=states, rounding=rounding, seed=seed
        )
