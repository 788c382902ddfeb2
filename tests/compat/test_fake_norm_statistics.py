"""Statistics of norms have the kernels' dtypes in fakes, so a plan's bytes are the step's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.fused_steps import step
from thunder_memsave.compat import fake_norm_statistics

CHANNELS = 16
Norm = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]


def layer_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    x = x.transpose(1, -1)
    return torch.ops.aten.native_layer_norm.default(x, [CHANNELS], weight, weight, 1e-5)


def group_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (x.shape[0], CHANNELS, x[0, 0].numel())
    return torch.ops.aten.native_group_norm.default(x, weight, weight, *sizes, 4, 1e-5)


def batch_norm(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    norm = torch.ops.aten._native_batch_norm_legit.no_stats
    results: tuple[Tensor, Tensor, Tensor] = norm(x, weight, weight, True, 0.1, 1e-5)
    return results


NORMS: list[Norm] = [layer_norm, group_norm, batch_norm]


@contextmanager
def pytorchs_rules() -> Iterator[None]:
    fake_norm_statistics.remove()
    try:
        yield
    finally:
        fake_norm_statistics.apply()


def facts(results: tuple[Tensor, Tensor, Tensor]) -> list[Any]:
    return [(tuple(t.shape), t.stride(), t.dtype) for t in results]


def facts_of_fake(norm: Norm, x: Tensor, weight: Tensor | None) -> list[Any]:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return facts(norm(x, weight))


@pytest.mark.parametrize("norm", NORMS)
def test_canary_pytorchs_fakes_have_the_inputs_dtype(norm: Norm) -> None:
    x, weight = torch.randn(2, CHANNELS, 4).bfloat16(), torch.ones(CHANNELS)
    assert facts(norm(x, weight))[1][2] == torch.float32
    with pytorchs_rules():
        found = facts_of_fake(norm, x, weight)[1][2]
    assert found == torch.bfloat16, "PyTorch mended it: delete the work-around"


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("is_mixed", [None, False, True])
@pytest.mark.parametrize("shape", [(2, CHANNELS, 4), (2, CHANNELS, 4, 3)])
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_shapes_strides_and_dtypes_are_those_of_kernels(
    norm: Norm,
    dtype: torch.dtype,
    is_mixed: bool | None,
    shape: tuple[int, ...],
    is_channels_last: bool,
) -> None:
    x = torch.randn(shape).to(dtype)
    if is_channels_last and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    weight = None
    if is_mixed is not None:
        weight = torch.ones(CHANNELS, dtype=torch.float32 if is_mixed else dtype)
    assert facts_of_fake(norm, x, weight) == facts(norm(x, weight))


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, CHANNELS), nn.Linear(CHANNELS, CHANNELS)
        self.of_layers, self.of_groups = nn.LayerNorm(CHANNELS), nn.GroupNorm(4, CHANNELS)
        self.image, self.of_batches = nn.Conv1d(CHANNELS, 4, 3), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.of_layers(self.up(x))
        x = self.of_groups(self.down(x).transpose(1, 2))
        x = self.of_batches(self.image(x))
        return x.float().square().mean()


@pytest.mark.parametrize("policy", ["keep_all", "recompute_all"])
def test_under_autocast_the_peak_is_the_predicted_one(policy: str) -> None:
    casts = torch.autocast("cpu", torch.bfloat16)
    ran = step(Norms, {"x": torch.randn(3, 5, 8)}, fusion=False, policy=policy, around=casts)
    assert ran.measured_bytes == ran.predicted_bytes
