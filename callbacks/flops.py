"""Counts the floating-point operations of a training step, from the model itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode


def training_flops(model: nn.Module, forward: Callable[[], Tensor]) -> int:
    """Count the FLOPs of one forward and backward pass, as model FLOPs utilisation defines them.

    With P the weights in matrix products, P_t the trained ones among them, P_g those whose
    input needs a gradient, and per token:

        forward 2 P  +  grad_input 2 P_g  +  grad_weight 2 P_t  +  attention

    Frozen weights cost 2 x forward in all instead of 3 x, and nothing backward before the first
    trained one. An embedding is a look-up (0), a language model's head is a product, tied or not.
    Attention is 4 T d per layer and token forward, for T positions and d = heads x head size, and
    twice that backward; masked positions count. Recomputation in the backward does not count.

    The passes run on the meta device: they need no memory, and take moments.

    Args:
        model: On the meta device, before `fabric.setup`.
        forward: Calls the model with inputs on the meta device and returns its output.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    # Attention as plain products: a fused kernel's backward counts what it recomputes.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        output = forward()
        torch.autograd.grad(output.sum(), trained, allow_unused=True)
    return int(counter.get_total_flops())
