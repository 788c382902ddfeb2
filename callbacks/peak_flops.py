"""Peak floating-point operations per second of GPUs, by name.

Dense matrix products in TFLOPS, without structured sparsity; bfloat16 and float16 accumulate in
float32. Sources: NVIDIA's data sheets of A10, A30, A40, A100, H100, H200, L4, L40, L40S, HGX B200
and GB200 NVL72 (where they print sparse values, half of them), the GA102, Ada and RTX Blackwell
whitepapers for GeForce, AMD's data sheets of MI300X and MI325X, AWS for A10G.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

MatmulFormat = Literal["bfloat16", "float16", "tf32", "float32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Peak:
    bfloat16: float
    tf32: float
    float32: float


_H100_SXM = _Peak(bfloat16=989.4, tf32=494.7, float32=66.9)
_H100_NVL = _Peak(bfloat16=835.5, tf32=417.5, float32=60.0)
_MI300X = _Peak(bfloat16=1307.4, tf32=653.7, float32=163.4)

# Whole names: the name of a laptop's or a cut-down GPU is that of the larger one with a suffix.
_PEAKS = {
    r"A10": _Peak(bfloat16=125.0, tf32=62.5, float32=31.2),
    r"A10G": _Peak(bfloat16=70.0, tf32=35.0, float32=35.0),
    r"A30": _Peak(bfloat16=165.0, tf32=82.0, float32=10.3),
    r"A40": _Peak(bfloat16=149.7, tf32=74.8, float32=37.4),
    r"A100[- ].*": _Peak(bfloat16=312.0, tf32=156.0, float32=19.5),
    r"H100 80GB HBM3": _H100_SXM,
    r"H100 PCIe": _Peak(bfloat16=756.0, tf32=378.0, float32=51.0),
    r"H100 NVL": _H100_NVL,
    r"H200": _H100_SXM,
    r"H200 NVL": _H100_NVL,
    r"GH200 .*": _H100_SXM,
    r"B200": _Peak(bfloat16=2250.0, tf32=1125.0, float32=75.0),
    r"GB200": _Peak(bfloat16=2500.0, tf32=1250.0, float32=80.0),
    r"L4": _Peak(bfloat16=121.0, tf32=60.0, float32=30.3),
    r"L40": _Peak(bfloat16=181.0, tf32=90.5, float32=90.5),
    r"L40S": _Peak(bfloat16=362.0, tf32=183.0, float32=91.6),
    r"GeForce RTX 3090": _Peak(bfloat16=71.0, tf32=35.6, float32=35.6),
    r"GeForce RTX 4090": _Peak(bfloat16=165.2, tf32=82.6, float32=82.6),
    r"GeForce RTX 5090": _Peak(bfloat16=209.5, tf32=104.8, float32=104.8),
    r"Instinct MI300X.*": _MI300X,
    r"Instinct MI325X.*": _MI300X,
}


def peak_tflops(device_name: str, matmul_format: MatmulFormat) -> float | None:
    """Look up a device by its name from `torch.cuda.get_device_name`; None if unknown."""
    name = re.sub(r"^(NVIDIA|AMD) ", "", device_name)
    if " MIG " in name:  # a slice of the device
        return None
    for pattern, peak in _PEAKS.items():
        if re.fullmatch(pattern, name):
            # The same hardware computes both 16-bit formats.
            field = "bfloat16" if matmul_format == "float16" else matmul_format
            return float(getattr(peak, field))
    return None
