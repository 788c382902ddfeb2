"""Counts the workspaces that are allocated for cuBLAS and kept: tensors of nobody, within what PyTorch reserves.

Sources: docs.pytorch.org/docs/stable/notes/cuda.html, "cuBLAS workspaces": one for each handle and stream;
aten/src/ATen/cuda/CublasHandlePool.cpp of torch 2.11: 32 MiB on Hopper and on data centers' Blackwell, a handle for
each host thread. Forward and the update run on the caller's thread, backward on autograd's thread of the device.
TransformerEngine 2.10 to 2.20 allocates one of its own for each device, which all threads share
(transformer_engine/pytorch/cpp_extensions/gemm.py:40-67).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from thunder_memsave.planner.graph import Device

VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_KIB = 2**10
_NUM_THREADS = 2
_LARGE_BYTES = 32 * 2**20
MOST_BYTES = _NUM_THREADS * _LARGE_BYTES
"""Workspaces of a training step on the devices where they are largest."""
_SMALL_BYTES = (2 * 4096 + 8 * 16) * _KIB
_LARGE_OF_TE_BYTES, _SMALL_OF_TE_BYTES = 32 * 2**20 + 1024, 4 * 2**20


def blas_workspace_bytes(device: Device, environment: Mapping[str, str]) -> int:
    """Return the bytes of all workspaces of a training step; 0 on the CPU.

    Args:
        device: The device that computes.
        environment: Environment variables: `CUBLAS_WORKSPACE_CONFIG` has pairs `:KiB:count`, of which PyTorch
            allocates the sum.
    """
    if device.compute_capability is None:
        return 0
    is_large = device.compute_capability[0] in (9, 10)
    default = _LARGE_BYTES if is_large else _SMALL_BYTES
    return _NUM_THREADS * (_configured_bytes(environment.get(VARIABLE, "")) or default)


def te_workspace_bytes(device: Device) -> int:
    """Return the bytes of TransformerEngine's workspace; 0 on the CPU, where it does not compute."""
    if device.compute_capability is None:
        return 0
    return _LARGE_OF_TE_BYTES if device.compute_capability[0] >= 9 else _SMALL_OF_TE_BYTES


def _configured_bytes(text: str) -> int:
    """Return the bytes that the variable asks for; 0 if it says nothing that can be read."""
    if not re.fullmatch(r"(:\d+:\d+)+", text):
        return 0
    pairs = re.findall(r":(\d+):(\d+)", text)
    return sum(int(kib) * int(count) for kib, count in pairs) * _KIB
