"""Random and adversarial weights for NF4, and what bitsandbytes makes of them."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from thunder_memsave.stored_weights.nf4 import tables
from thunder_memsave.stored_weights.nf4.layout import groups_of, offset_of, spans

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NUM_KINDS = 10


def weight(number: int) -> Tensor:
    """Return one of infinitely many tensors: its kind, size and dtype follow from the number."""
    generator = torch.Generator().manual_seed(number)

    def size(most: int) -> int:
        return int(torch.randint(1, most + 1, (1,), generator=generator))

    n = (size(200), 64 * size(300), 16384 * size(2), size(40000), 2 * size(2000))[number % 5]
    # Nearly normal, from integers: torch.randn has other bits on other processors.
    whole = torch.randint(-(2**16), 2**16, (6, n), generator=generator).sum(0)
    values = _changed(whole.float() * 2.0**-22, number % NUM_KINDS)
    return values.to(DTYPES[number // NUM_KINDS % 3])


def _changed(values: Tensor, kind: int) -> Tensor:
    n = values.numel()
    match kind:
        case 1:
            values[: n // 2] = 0
        case 2:
            values.fill_(0.3)  # all scales are their mean
        case 3:
            values *= 1e-37
        case 4:
            values *= 1e-40  # denormal, except in float16, where it is 0
        case 5:
            values = values.abs() + 1
        case 6:
            values[::64] *= 1e4
        case 7:
            values.zero_()
        case 8:
            values = torch.arange(n).remainder(16).sub(7.5)  # ties, and scales that are alike
        case 9:
            values = values.sign() * torch.tensor(65504.0)
        case _:
            pass
    return values


def parts_of(stored: Tensor, num_elements: int) -> dict[str, Tensor]:
    """Return the numbers and scales as bitsandbytes keeps them, from the bytes of a weight."""
    found = [
        groups_of(stored, num_elements, first=first, last=last)
        for first, last in spans(num_elements, num_groups=1)
    ]
    return {
        "numbers": torch.cat([g.numbers.flatten() for g in found]),
        "scales": torch.cat([g.scales.flatten() for g in found]),
        "scale": torch.cat([g.scale for g in found]),
        "offset": offset_of(stored).clone(),
    }


def by_bitsandbytes(values: Tensor, bitsandbytes: Any) -> tuple[dict[str, Tensor], Any]:
    """Return its numbers and scales of a weight, and what dequantises to a dtype."""
    functional = bitsandbytes.functional
    numbers, state = functional.quantize_4bit(
        values, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    parts = {
        "numbers": numbers.flatten(),
        "scales": state.absmax,
        "scale": state.state2.absmax,
        "offset": state.offset.reshape(1),
    }

    def dequantized(dtype: torch.dtype) -> Tensor:
        state.dtype = dtype
        result: Tensor = functional.dequantize_4bit(numbers, state).reshape(values.shape)
        return result

    return parts, dequantized


def bits(values: Tensor) -> Tensor:
    """Return a tensor's bits as integers, so that -0 is not 0."""
    return values.contiguous().view(torch.int32 if values.itemsize == 4 else torch.int16)


def digest(*tensors: Tensor) -> str:
    """Return the first half of the SHA-256 of some tensors' bytes."""
    joined = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)
    return hashlib.sha256(joined).hexdigest()[:32]


def in_files(
    name: str, stored: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Return what transformers writes for a weight in NF4, from our bytes of it."""
    parts = parts_of(stored, math.prod(shape))
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": parts["offset"].item(),
    }
    return {
        name: parts["numbers"][:, None],
        f"{name}.absmax": parts["scales"],
        f"{name}.nested_absmax": parts["scale"],
        f"{name}.quant_map": torch.tensor(tables.NF4),
        f"{name}.nested_quant_map": tables.scale_numbers(stored).clone(),
        f"{name}.quant_state.bitsandbytes__nf4": as_json(state),
    }


def as_json(state: dict[str, Any]) -> Tensor:
    """Return the bytes of JSON: uint8."""
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
