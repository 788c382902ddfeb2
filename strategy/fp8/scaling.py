"""The state of delayed scaling: for each linear, the amax history of its tensors and their scales.

The casts of a step read the scales and raise the first row of the histories (`quantize_delayed` of the backends).
`update_scales` runs once per optimizer step, between the last backward and the next forward. So all casts of a step,
in every micro-batch and recomputation, use the same scales.

The schedule is bit-identical to TransformerEngine's Python one, `_amax_and_scale_update` in
transformer_engine/pytorch/quantization.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from thunder_memsave.fp8.recipe import Recipe

INPUT, WEIGHT, GRAD = 0, 1, 0
"""Columns of the state: input and weight in the forward one, the output's gradient in the backward one."""

_FLOAT32_MAX = torch.finfo(torch.float32).max


class ScalingState(nn.Module):
    """The scales of one linear and the amax that they come from, as float32 buffers.

    - `forward_amax_history` `[amax_history_len, 2]`: amax of the input and the weight; the first row is the current
      step's, the last one the previous step's.
    - `forward_scale` `[2]`: the factors that input and weight are multiplied with before the cast; 1 at first.
    - `backward_amax_history` `[amax_history_len, 1]` and `backward_scale` `[1]`: the same for the output's gradient.
    """

    forward_amax_history: Tensor
    forward_scale: Tensor
    backward_amax_history: Tensor
    backward_scale: Tensor

    def __init__(self, recipe: Recipe, *, device: torch.device | None = None) -> None:
        """Start like TransformerEngine, with no amax and scales of 1."""
        super().__init__()
        self.recipe = recipe
        for direction, tensors in (("forward", 2), ("backward", 1)):
            # Not torch's default dtype, which is bfloat16 while a model is made under bf16-true.
            shape = (recipe.amax_history_len, tensors)
            history = torch.zeros(shape, dtype=torch.float32, device=device)
            scale = torch.ones(tensors, dtype=torch.float32, device=device)
            self.register_buffer(f"{direction}_amax_history", history)
            self.register_buffer(f"{direction}_scale", scale)

    def reset_parameters(self) -> None:
        """Reset the state to its start; also initialises a module that was made on the meta device."""
        for part in (self.forward_amax_history, self.backward_amax_history):
            part.zero_()
        for part in (self.forward_scale, self.backward_scale):
            part.fill_(1.0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `model.to(torch.bfloat16)` moves and casts what a module has; scales stay float32.
        for name, buffer in self._buffers.items():
            assert buffer is not None, f"{name} is always there"
            moved = fn(buffer)
            is_cast = moved.dtype != torch.float32
            self._buffers[name] = buffer.to(moved.device) if is_cast else moved
        return self

    def update(self) -> None:
        """Update the scales of this linear alone; `update_scales` does many at once."""
        update_scales([self])


@torch.no_grad()
def reduce_amax(states: Sequence[ScalingState], all_reduce_max: Callable[[Tensor], object]) -> None:
    """Take the maximum of the current step's amax over all ranks, in one collective; call it before `update_scales`.

    Args:
        states: States on one device, in the same order on all ranks.
        all_reduce_max: Replaces a float32 tensor by the elementwise maximum over the ranks, in place.
    """
    newest = [part.history[0] for part in _parts(states)]
    if not newest:
        return
    joined = torch.cat(newest)
    all_reduce_max(joined)
    torch._foreach_copy_(newest, joined.split([row.numel() for row in newest]))


@torch.no_grad()
def update_scales(states: Sequence[ScalingState]) -> None:
    """Compute the next step's scales from the histories, and start its row of the histories.

    All states are updated together, so that the number of kernels does not grow with the number of linears.

    Args:
        states: States on one device, of one recipe.
    """
    parts = list(_parts(states))
    if not parts:
        return
    recipe = states[0].recipe
    widths = [part.scale.numel() for part in parts]
    history = torch.cat([part.history for part in parts], dim=1)
    amax = history.amax(0) if recipe.amax_compute_algo == "max" else history[0].clone()
    old = torch.cat([part.scale for part in parts])
    scale = _next_scale(amax, old, _fp8_max(recipe, len(states), old.device), recipe.margin)
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    torch._foreach_copy_([part.scale for part in parts], scale.split(widths))
    torch._foreach_copy_([part.history for part in parts], rolled.split(widths, dim=1))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One direction of one linear."""

    history: Tensor
    scale: Tensor


def _parts(states: Sequence[ScalingState]) -> Iterator[_Part]:
    """Yield the forward parts of all states, then their backward parts, in the order of `_fp8_max`."""
    for state in states:
        yield _Part(history=state.forward_amax_history, scale=state.forward_scale)
    for state in states:
        yield _Part(history=state.backward_amax_history, scale=state.backward_scale)


def _fp8_max(recipe: Recipe, num_states: int, device: torch.device) -> Tensor:
    """Return the largest number of the fp8 dtype of each scale."""
    forward, backward = (torch.finfo(recipe.dtype(role)).max for role in ("input", "grad"))
    return torch.cat(
        [
            torch.full((2 * num_states,), forward, dtype=torch.float32, device=device),
            torch.full((num_states,), backward, dtype=torch.float32, device=device),
        ]
    )


def _next_scale(amax: Tensor, scale: Tensor, fp8_max: Tensor, margin: int) -> Tensor:
    """Return the scales for these amaxes; if an amax is 0 or infinite, the old scale stays."""
    # TransformerEngine writes `fp8_max / amax`, which torch computes as this product: a division rounds differently.
    new = amax.reciprocal() * fp8_max / 2**margin
    new = torch.where((amax > 0) & amax.isfinite(), new, scale)
    return torch.where(new.isinf(), _FLOAT32_MAX, new)
