"""Hooks of modules, of tensors and of parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from plain_kinds.registry import floats, mlp, plain

ROWS, WIDTH = 3, 6


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x).tanh())


@plain(x=floats(ROWS, WIDTH))
class OutputHook(_Two):
    """A forward hook changes an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, args, output: output * 2 + args[0])


@plain(x=floats(ROWS, WIDTH))
class InputHook(_Two):
    """Hooks before forward, one with keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        self.second.register_forward_pre_hook(self._scaled, with_kwargs=True)

    @staticmethod
    def _scaled(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args[0] / 2, *args[1:]), kwargs


@plain(x=floats(ROWS, WIDTH))
class FeatureHooks(_Two):
    """Features of inner layers are collected in a dictionary, as by torchvision's and timm's extractors."""

    def __init__(self) -> None:
        super().__init__()
        self.features: dict[str, Tensor] = {}
        for name in ("first", "second"):
            getattr(self, name).register_forward_hook(self._kept(name))

    def _kept(self, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self.features[name] = output

        return keep

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.features.clear()
        super().forward(x)
        return dict(self.features)


@plain(x=floats(ROWS, WIDTH))
class OwnHooks(_Two):
    """Hooks of the module itself, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_pre_hook(
            lambda module, args, kwargs: (args, {"x": kwargs["x"] + 1}), with_kwargs=True
        )
        self.register_forward_hook(
            lambda module, args, output: {"y": output, "mean": output.mean()}
        )


@plain(x=floats(ROWS, WIDTH))
class CountingHook(_Two):
    """A hook counts calls, and removes itself after the second."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._handle = self.first.register_forward_hook(self._counted)

    def _counted(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        self.count += 1
        if self.count == 2:
            self._handle.remove()
        return output * self.count


@plain(x=floats(ROWS, WIDTH))
class BackwardHook(_Two):
    """A full backward hook changes the gradient of a module's input."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_full_backward_hook(lambda module, given, wanted: (given[0] * 3,))


@plain(x=floats(ROWS, WIDTH))
class BackwardPreHook(_Two):
    """Gradients of a module's output are clipped before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_pre_hook(
            lambda module, grads: (grads[0].clamp(-0.05, 0.05),)
        )


@plain(x=floats(ROWS, WIDTH))
class RootBackwardHook(_Two):
    """A full backward hook of the module itself counts backward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_backward = 0
        self.register_full_backward_hook(self._count)

    def _count(self, module: nn.Module, given: Any, wanted: Any) -> None:
        self.num_backward += 1


@plain(x=floats(ROWS, WIDTH))
class TensorHook(_Two):
    """A hook on an activation, registered in forward, scales its gradient."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5)
        return self.second(h)


@plain(x=floats(ROWS, WIDTH))
class GradientKeeper(_Two):
    """Grad-CAM: an activation and its gradient are kept on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[float] = []

    def _keep(self, grad: Tensor) -> None:
        self.gradients.append(round(float(grad.abs().sum()), 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        if h.requires_grad:
            h.register_hook(self._keep)
        return self.second(h)


@plain(x=floats(ROWS, WIDTH))
class RetainedGradient(_Two):
    """retain_grad on an activation that is handed out."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x).tanh()
        if h.requires_grad:
            h.retain_grad()
        return self.second(h), h


@plain(x=floats(ROWS, WIDTH))
class ParameterHook(_Two):
    """Hooks on parameters scale their gradients; under zero3 they get this rank's rows of the means."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda grad: grad * 0.25)
        self.first.bias.register_hook(lambda grad: grad * 2)


@plain(x=floats(ROWS, WIDTH))
class HookInSequence(nn.Module):
    """Hooks on parts of nn.Sequential, one always called, registered for all layers of a kind by apply."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(WIDTH, 5, 4, 2)
        self.layers.apply(self._hooked)

    @staticmethod
    def _hooked(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, a, out: out.clamp(-1, 1), always_call=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@plain(x=floats(ROWS, WIDTH))
class ActivationStatistics(_Two):
    """A hook writes statistics of activations into buffers, as observers of quantization do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("high", torch.tensor(float("-inf")))
        self.first.register_forward_hook(self._observe)

    def _observe(self, module: nn.Module, args: Any, output: Tensor) -> None:
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, output.min()))
            self.high = torch.maximum(self.high, output.max())


@plain(x=floats(ROWS, WIDTH))
class AccumulatedGradientHook(_Two):
    """Hooks after the accumulation of gradients, as for an optimizer step in backward: they scale what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self._scale)

    def _scale(self, p: Tensor) -> None:
        assert p.grad is not None
        self.count += 1
        p.grad.mul_(0.5)


@plain(x=floats(ROWS, WIDTH))
class HooksTakenAway(_Two):
    """A hook is registered and removed again before the model is used, another registered by a loop each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda m, args, out: out * 5).remove()

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        handle = self.first.register_forward_hook(lambda m, args, out: kept.append(out))
        try:
            y = self.second(self.first(x).tanh())
        finally:
            handle.remove()
        return y + kept[0].mean()
