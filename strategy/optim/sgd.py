"""SGD with momentum in a format of fewer bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from typing_extensions import override

from thunder_memsave.optim.by_rows import ByRows, Rounding, refuse_out_of_range
from thunder_memsave.optim.formats import Format, State
from thunder_memsave.settings.problems import ConfigError


class SGD(ByRows):
    """`torch.optim.SGD` with momentum in fewer bits.

    Args:
        params: Parameters or groups of them, as for PyTorch.
        lr: Learning rate.
        momentum: Part of the last update that is taken again; above 0, for without it there is no state.
        weight_decay: Factor of weights in their gradients.
        nesterov: Whether the update looks ahead.
        states: Format of the momentum.
        rounding: Of weights in bfloat16, as for `AdamW`.
        seed: Of stochastic rounding.

    Raises:
        ConfigError: An argument is out of range, or has no effect.
    """

    kept: ClassVar = (State(name="momentum_buffer", is_signed=True),)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        states: Format = "int8",
        rounding: Rounding = "nearest",
        seed: int = 0,
    ) -> None:
        if momentum == 0:
            raise ConfigError(
                f"states is {states!r}, but SGD without momentum has no states; set momentum, or leave states out.",
                key="optimizer.states",
            )
        in_range = {
            "lr": (lr, lr >= 0),
            "momentum": (momentum, 0 < momentum < 1),
            "weight_decay": (weight_decay, weight_decay >= 0),
        }
        refuse_out_of_range(in_range)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
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
        (velocity,) = states
        momentum = group["momentum"]
        if group["weight_decay"]:
            gradient = (weight * group["weight_decay"]).add_(gradient)
        velocity.mul_(momentum).add_(gradient)
        change = (velocity * momentum).add_(gradient) if group["nesterov"] else velocity
        weight.sub_(change * float(group["lr"]))
