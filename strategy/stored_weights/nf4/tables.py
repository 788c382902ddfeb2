"""The tables of NF4: its 16 numbers, and the 256 numbers in which scales are kept.

Source: bitsandbytes 0.50.2: `functional.get_4bit_type`, `functional.create_dynamic_map`, and for the choice of a
scale's number `csrc/cpu_ops.cpp`, which rounds to one of 65,536 steps before it looks for the nearest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thunder_memsave.aten.constant_tables import on_device_of

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
"""Quantiles of the normal distribution between -1 and 1."""

STEPS = 65536
"""Steps between -1 and 1 to which a scale is rounded before its number is chosen."""


def _of_pairs(of_codes: Tensor) -> Tensor:
    byte = torch.arange(256, device="cpu")
    return torch.stack([of_codes[byte >> 4], of_codes[byte & 15]], dim=1)


def _of_scales() -> Tensor:
    """Compute the dynamic map of 8 bits: seven decades, each with twice the fractions of the one below it.

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, 2015.
    """
    found = [0.0, 1.0]
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, 2**exponent + 1, device="cpu", dtype=torch.float32)
        fractions = (bounds[:-1] + bounds[1:]) / 2.0
        decade = 10 ** (exponent - 6)
        found += (decade * fractions).tolist() + (-decade * fractions).tolist()
    return torch.tensor(sorted(found), device="cpu", dtype=torch.float32)


def _of_steps(of_scales: Tensor) -> Tensor:
    middles = 0.5 * (of_scales[:-1] + of_scales[1:])
    # In float32 like the source: 2 i is exact, and its quotient is rounded, then the sum.
    values = -1.0 + (2.0 * torch.arange(STEPS, device="cpu", dtype=torch.float32)) / (STEPS - 1)
    return torch.bucketize(values, middles).to(torch.uint8)


# Made now: a plan may read them first, on tensors without numbers.
_NUMBERS = torch.tensor(NF4, device="cpu", dtype=torch.float32)
_PAIRS = _of_pairs(_NUMBERS)
_SCALE_NUMBERS = _of_scales()
_SCALE_CODES = _of_steps(_SCALE_NUMBERS)


def numbers(like: Tensor) -> Tensor:
    """Return the 16 numbers: float32, on the device of `like`."""
    return on_device_of(like, _NUMBERS)


def pairs(like: Tensor) -> Tensor:
    """Return the two numbers that each byte stands for: float32, shape `[256, 2]`."""
    return on_device_of(like, _PAIRS)


def scale_numbers(like: Tensor) -> Tensor:
    """Return the 256 numbers of scales, ascending: float32."""
    return on_device_of(like, _SCALE_NUMBERS)


def scale_codes(like: Tensor) -> Tensor:
    """Return the code of the number nearest to each step: uint8, shape `[65536]`."""
    return on_device_of(like, _SCALE_CODES)
