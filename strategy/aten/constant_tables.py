"""Constant tables that code reads on whichever device its operands are: each is copied there once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_kept: dict[tuple[int, torch.device], Tensor] = {}


def on_device_of(like: Tensor, table: Tensor) -> Tensor:
    """Return a table on the device of `like`.

    Args:
        like: An operand; a FakeTensor gets a copy of its own, which is not kept.
        table: On the CPU, never changed, and as long-lived as the process.
    """
    if isinstance(like, FakeTensor):
        return table.to(like.device)
    if like.device.type == "cpu":
        return table
    if (id(table), like.device) not in _kept:
        with torch.inference_mode(mode=False):
            _kept[id(table), like.device] = table.to(like.device)
    return _kept[id(table), like.device]
