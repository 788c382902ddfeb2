"""Makes ResNet-18 and a MobileNetV3 of plain `torch.nn`, with 10 classes, for images of any size from 32 pixels on.

He et al., Deep Residual Learning (arXiv:1512.03385), and Howard et al., Searching for MobileNetV3 (arXiv:1905.02244).
"""

from __future__ import annotations

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10


def resnet18() -> nn.Module:
    """Return a ResNet-18: images `(N, 3, H, W)` to `(N, 10)`, float32."""
    stem = _Normed(3, 64, 7, stride=2, activation=nn.ReLU())
    widths = (64, 64, 128, 256, 512)
    blocks = [
        _Residual(before if first else out, out, stride=2 if first and before != out else 1)
        for before, out in pairwise(widths)
        for first in (True, False)
    ]
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), *blocks, _Head(512))


def mobilenet_v3() -> nn.Module:
    """Return a small MobileNetV3 of six blocks: images `(N, 3, H, W)` to `(N, 10)`, float32."""
    blocks = [
        _Inverted(16, 16, 16, kernel=3, stride=2, is_squeezed=True, activation=nn.ReLU()),
        _Inverted(16, 72, 24, kernel=3, stride=2, is_squeezed=False, activation=nn.ReLU()),
        _Inverted(24, 88, 24, kernel=3, stride=1, is_squeezed=False, activation=nn.ReLU()),
        _Inverted(24, 96, 40, kernel=5, stride=2, is_squeezed=True, activation=nn.Hardswish()),
        _Inverted(40, 240, 40, kernel=5, stride=1, is_squeezed=True, activation=nn.Hardswish()),
        _Inverted(40, 120, 48, kernel=5, stride=1, is_squeezed=True, activation=nn.Hardswish()),
    ]
    stem = _Normed(3, 16, 3, stride=2, activation=nn.Hardswish())
    return nn.Sequential(stem, *blocks, _Normed(48, 288, 1, activation=nn.Hardswish()), _Head(288))


class _Normed(nn.Sequential):
    """A convolution, BatchNorm and an activation."""

    def __init__(
        self,
        channels: int,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        groups: int = 1,
        activation: nn.Module | None = None,
    ) -> None:
        convolution = nn.Conv2d(
            channels, out, kernel, stride, kernel // 2, groups=groups, bias=False
        )
        super().__init__(convolution, nn.BatchNorm2d(out), activation or nn.Identity())


class _Residual(nn.Module):
    def __init__(self, channels: int, out: int, *, stride: int) -> None:
        super().__init__()
        self.first = _Normed(channels, out, 3, stride=stride, activation=nn.ReLU())
        self.second = _Normed(out, out, 3)
        is_same = channels == out and stride == 1
        self.beside = nn.Identity() if is_same else _Normed(channels, out, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(self.first(x)) + self.beside(x))


class _Squeezed(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(channels, max(8, channels // 4), 1)
        self.up = nn.Conv2d(max(8, channels // 4), channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        squeezed = F.relu(self.down(F.adaptive_avg_pool2d(x, 1)))
        return x * F.hardsigmoid(self.up(squeezed))


class _Inverted(nn.Module):
    def __init__(
        self,
        channels: int,
        wide: int,
        out: int,
        *,
        kernel: int,
        stride: int,
        is_squeezed: bool,
        activation: nn.Module,
    ) -> None:
        super().__init__()
        self.is_residual = channels == out and stride == 1
        self.parts = nn.Sequential(
            _Normed(channels, wide, 1, activation=activation),
            _Normed(wide, wide, kernel, stride=stride, groups=wide, activation=activation),
            _Squeezed(wide) if is_squeezed else nn.Identity(),
            _Normed(wide, out, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.parts(x)
        return x + y if self.is_residual else y


class _Head(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return y
