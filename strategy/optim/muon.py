"""`torch.optim.Muon` on sharded weights: one whole matrix at a time is gathered, and orthogonalized by every rank.

Momentum and the update of weights are elementwise, so each rank does them for its own rows, and its state has their
shape. Only what is orthogonalized must be whole: it is gathered in bfloat16, the dtype in which PyTorch orthogonalizes.
So weights and states have the bits of one process, on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz
from torch.optim.optimizer import _to_scalar
from typing_extensions import override

from thunder_memsave.optim.changed_class import change_class
from thunder_memsave.sharding.rows import gather_whole
from thunder_memsave.sharding.sharded_parameter import as_rows


class MuonByRows(Muon):
    """Updates this rank's rows of each matrix as `torch.optim.Muon` would update the whole.

    Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/.
    """

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update each matrix that has a gradient, one after the other. A collective for each."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, as_rows(p.grad), group)
        return loss

    def _update(self, p: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        rows, state = as_rows(p), self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = as_rows(state["momentum_buffer"])
        momentum.lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        orthogonal = _orthogonalized(update, p, group)
        lr = _to_scalar(group["lr"])
        rows.mul_(1 - lr * group["weight_decay"])
        shape = vars(p).get("unsharded_shape", p.shape)
        adjusted_lr = _adjust_lr(lr, group["adjust_lr_fn"], shape)
        rows[: len(orthogonal)].add_(orthogonal, alpha=-adjusted_lr)


def _orthogonalized(update: Tensor, p: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Return this rank's rows, without padding, of the whole update's nearest orthogonal matrix."""
    whole = gather_whole(update.to(torch.bfloat16), p)
    orthogonal = _zeropower_via_newtonschulz(
        whole, group["ns_coefficients"], group["ns_steps"], group["eps"]
    )
    first = vars(p).get("_first_row", 0)
    own: Tensor = orthogonal[first : first + vars(p).get("_num_real_rows", len(p))]
    return own


def update_by_rows(optimizer: Muon) -> None:
    """Let an optimizer of exactly this class, which has taken no step, update sharded weights, in place."""
    assert type(optimizer) is Muon
    change_class(optimizer, MuonByRows)
