"""What Thunder would take apart runs as PyTorch's own operators: values and gradients have eager's bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.parity import Twins

Function = Callable[..., Tensor]
IMAGE, MATRIX = (2, 4, 6, 6), (3, 8)
FUNCTIONS: dict[str, tuple[Function, tuple[tuple[int, ...], ...]]] = {
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, padding="same"), ((2, 4, 6), (6, 4, 3), (6,))),
    "conv2d": (
        lambda x, w: F.conv2d(x, w, stride=2, dilation=2, groups=2),
        (IMAGE, (6, 2, 2, 2)),
    ),
    "depthwise": (lambda x, w: F.conv2d(x, w, padding=1, groups=4), (IMAGE, (4, 1, 3, 3))),
    "conv3d": (lambda x, w: F.conv3d(x[None], w), (IMAGE, (3, 2, 2, 2, 2))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w, stride=2), (IMAGE, (4, 3, 2, 2))),
    "max_pool2d": (lambda x: F.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False), (IMAGE,)),
    "avg_pool1d": (lambda x: F.avg_pool1d(x[0], 2), (IMAGE,)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (1, 1)), (IMAGE,)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x[0], 4), (IMAGE,)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 2), (IMAGE,)),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        (IMAGE, (4,), (4,)),
    ),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGE, (4,), (4,))),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (IMAGE, (4,))),
    "bilinear": (F.bilinear, (MATRIX, MATRIX, (5, 8, 8), (5,))),
    "prelu": (F.prelu, (IMAGE, (4,))),
    **{
        f.__name__: (f, (MATRIX,))
        for f in (
            *(F.hardswish, F.hardsigmoid, F.hardtanh, F.relu6, F.leaky_relu, F.elu, F.selu),
            *(F.celu, F.mish, F.softplus, F.logsigmoid, F.softshrink, F.hardshrink),
        )
    },
}


class Applied(nn.Module):
    """All functions, each of parameters of its own, times numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values = nn.ModuleDict(
            {
                name: nn.ParameterList(torch.randn(s, dtype=dtype) * 3 for s in shapes)
                for name, (_, shapes) in FUNCTIONS.items()
            }
        )

    def forward(self) -> dict[str, Tensor]:
        found = {}
        for name, values in self.values.items():
            assert isinstance(values, nn.ParameterList)
            y = FUNCTIONS[name][0](*values)
            found[name] = y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape) / y.numel()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    def total(found: dict[str, Tensor]) -> Tensor:
        return torch.stack([v.float().square().sum() for v in found.values()]).sum()

    Twins(Applied(dtype)).assert_equal(loss=total, rtol=0.0, atol=0.0)
