"""A scalar on the host is a number for an operator of a device: what reads it can be recomputed there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from thunder_memsave.measure.op_profile import _changes_device

HOST_SCALAR, HOST_ROW = torch.zeros(()), torch.zeros(2)
ON_DEVICE = torch.zeros(2, device="meta")  # any other device


@pytest.mark.parametrize(
    ("operands", "results", "changes"),
    [
        ([ON_DEVICE, HOST_SCALAR], [ON_DEVICE], False),
        ([HOST_SCALAR], [HOST_SCALAR], False),
        ([ON_DEVICE, HOST_ROW], [ON_DEVICE], True),
        ([ON_DEVICE], [HOST_SCALAR], True),
        ([HOST_SCALAR], [ON_DEVICE], True),
    ],
    ids=["number", "host alone", "row", "to the host", "to the device"],
)
def test_a_scalar_of_the_host_changes_no_device(
    operands: list[Tensor], results: list[Tensor], changes: bool
) -> None:
    assert _changes_device(operands, results) is changes
