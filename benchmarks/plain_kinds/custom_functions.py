"""torch.autograd.Function and operators of torch.library with derivatives of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plain_kinds.registry import floats, plain

ROWS, WIDTH = 3, 6


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def function(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class _Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


@plain(x=floats(ROWS, WIDTH))
class SavingSwish(Between):
    """EfficientNet's, which keeps its input alone."""

    def function(self, h: Tensor) -> Tensor:
        return _Swish.apply(h)


class _Sign(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= 1).to(grad.dtype)


@plain(x=floats(ROWS, WIDTH))
class BinaryNetwork(Between):
    """Signs of activations and of weights, with straight-through gradients."""

    def function(self, h: Tensor) -> Tensor:
        return nn.functional.linear(_Sign.apply(h), _Sign.apply(self.first.weight))


class _Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.neg() * ctx.factor, None


@plain(x=floats(ROWS, WIDTH))
class ReversedGradient(nn.Module):
    """Domain-adversarial training: two heads, one behind a reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.domain = (nn.Linear(WIDTH, n) for n in (WIDTH, 3, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.label(h), self.domain(_Reversed.apply(h, 0.3))


class _SinCos(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        s, c = x.sin(), x.cos()
        ctx.save_for_backward(s, c)
        return s, c

    @staticmethod
    def backward(ctx: Any, grad_s: Tensor, grad_c: Tensor) -> Any:
        s, c = ctx.saved_tensors
        return grad_s * c - grad_c * s


@plain(x=floats(ROWS, WIDTH))
class TwoOutputs(Between):
    def function(self, h: Tensor) -> Tensor:
        s, c = _SinCos.apply(h)
        return s * 2 + c.square()


@plain(x=floats(ROWS, WIDTH))
class OneOutputUsed(Between):
    """The other output's gradient is zeros."""

    def function(self, h: Tensor) -> Tensor:
        return _SinCos.apply(h)[1]


class _Top(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(dim=-1, keepdim=True)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.width = x.shape[-1]
        return values, places

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Any:
        (places,) = ctx.saved_tensors
        return grad.new_zeros(*grad.shape[:-1], ctx.width).scatter(-1, places, grad)


@plain(x=floats(ROWS, WIDTH))
class NotDifferentiableOutput(Between):
    def function(self, h: Tensor) -> Tensor:
        values, places = _Top.apply(h)
        return h * values + places


class _Exponential(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        result = x.exp_()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


@plain(x=floats(ROWS, WIDTH))
class DirtyInput(Between):
    """An input is changed in place and marked dirty."""

    def function(self, h: Tensor) -> Tensor:
        return _Exponential.apply(h * 0.5)


class _Linear(Function):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = x.mm(weight.t())
        return out if bias is None else out + bias

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        x, weight, bias = inputs
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad_x = grad.mm(weight) if ctx.needs_input_grad[0] else None
        grad_weight = grad.t().mm(x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, grad.sum(0) if ctx.has_bias else None


@plain(x=floats(ROWS, WIDTH))
class OwnLinear(nn.Module):
    """The linear layer of the tutorial, with setup_context and needs_input_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, WIDTH) / 3)
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias) + _Linear.apply(x, self.weight, None)


class _Optional(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * y, x + y

    @staticmethod
    def backward(ctx: Any, of_product: Tensor | None, of_sum: Tensor | None) -> Any:
        x, y = ctx.saved_tensors
        if of_product is None:
            return of_sum, of_sum
        if of_sum is None:
            return of_product * y, of_product * x
        return of_product * y + of_sum, of_product * x + of_sum


@plain(x=floats(ROWS, WIDTH))
class AbsentGradients(Between):
    """set_materialize_grads(False): gradients that nothing asks for are None."""

    def function(self, h: Tensor) -> Tensor:
        product, _ = _Optional.apply(h, h.tanh())
        return product


class _Rounded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return (x / scale).round().clamp(-8, 7) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scale = ctx.saved_tensors
        ratio = x / scale
        inside = ((ratio >= -8) & (ratio <= 7)).to(grad.dtype)
        of_scale = torch.where(inside > 0, ratio.round() - ratio, ratio.clamp(-8, 7).round())
        return grad * inside, (grad * of_scale).sum().reshape(scale.shape)


@plain(x=floats(ROWS, WIDTH))
class LearnedStep(Between):
    """LSQ: fake quantization whose step is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.2))

    def function(self, h: Tensor) -> Tensor:
        return _Rounded.apply(h, self.step)


class _Numpy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = np.exp(-np.square(x.detach().numpy()))
        ctx.save_for_backward(x)
        return torch.from_numpy(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().numpy()
        return torch.from_numpy(grad.numpy() * -2 * x * np.exp(-np.square(x)))


@plain(x=floats(ROWS, WIDTH))
class ThroughNumpy(Between):
    """Forward and backward in numpy."""

    def function(self, h: Tensor) -> Tensor:
        return _Numpy.apply(h)


class _Reversible(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        a = a + torch.tanh(b @ weight)
        ctx.save_for_backward(a.detach(), b.detach(), weight)
        return torch.cat([a, b], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        _, b, weight = ctx.saved_tensors
        b, weight = b.detach().requires_grad_(), weight.detach().requires_grad_()
        grad_a, grad_b = grad.chunk(2, dim=-1)
        with torch.enable_grad():
            inner = torch.tanh(b @ weight)
        of_b, of_weight = torch.autograd.grad(inner, (b, weight), grad_a)
        return torch.cat([grad_a, grad_b + of_b], dim=-1), of_weight


@plain(x=floats(ROWS, WIDTH))
class RunsAutogradInBackward(Between):
    """A reversible layer that computes its inner function again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3) / 2)

    def function(self, h: Tensor) -> Tensor:
        return _Reversible.apply(h, self.weight)


class _Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, options: dict[str, float], names: tuple[str, ...]) -> Tensor:
        ctx.factor = sum(options[n] for n in names)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor, None, None


@plain(x=floats(ROWS, WIDTH))
class ArgumentsThatAreNoTensors(Between):
    def function(self, h: Tensor) -> Tensor:
        return _Scaled.apply(h, {"a": 0.5, "b": 1.5, "c": 9.0}, ("a", "b"))


class _Nested(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _Swish.apply(x) * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _Swish.apply(grad) * x.cos()


@plain(x=floats(ROWS, WIDTH))
class FunctionInFunction(Between):
    def function(self, h: Tensor) -> Tensor:
        return _Nested.apply(h)


@plain(x=floats(ROWS, WIDTH))
class StraightThrough(Between):
    """Rounding behind a detach."""

    def function(self, h: Tensor) -> Tensor:
        return h + (h.round() - h).detach()
