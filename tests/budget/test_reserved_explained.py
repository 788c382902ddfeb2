"""A plan for a CUDA device says what the allocator reserves, and one for the CPU does not."""

from __future__ import annotations

from unittest.mock import PropertyMock, patch

import torch
from torch import nn

from harness.fabric import make_fabric
from thunder_memsave import ThunderMemsaveStrategy


def test_only_cuda_devices_reserve() -> None:
    fabric = make_fabric()
    strategy = fabric.strategy
    assert isinstance(strategy, ThunderMemsaveStrategy)
    model = fabric.setup(nn.Sequential(nn.Linear(64, 64), nn.GELU()))
    fabric.backward(model(torch.ones(8, 64)).sum())
    assert "reserved" not in strategy.explain()
    # The plan was made here; its tensors' sizes are those that a CUDA device would have, but for rounding.
    place = PropertyMock(return_value=torch.device("cuda", 0))
    with patch.object(ThunderMemsaveStrategy, "root_device", place):
        text = strategy.explain()
    assert "reserved by PyTorch's allocator, simulated: 2.00 MiB" in text
    assert text.index("reserved by") < text.index("recompute time")
