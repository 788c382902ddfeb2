"""Lists the devices for which costs can be estimated: rates from data sheets, without sparsity.

Sources: NVIDIA's data sheets of H100 SXM, H200 SXM, HGX B200, A100 80GB SXM, and L40S. `float32` is without TF32, which
torch uses only when asked. Memory is the size that torch reports, rounded down, not the number in the name. The
network rate is the smaller of the device's link within a node and the rate of all adapters of a node together (eight of
400 Gbit/s; A100: 200 Gbit/s); an L40S has PCIe alone. A real device stays below all of these; measured costs win.

To the host: PCIe 5.0 x16 (H100, H200, B200) has 63 GB/s each way, of which copies from and to page-locked memory reach
about 55; PCIe 4.0 x16 (A100, L40S) half of that. Measured on one H200: 55.0 GB/s out and back, 50.5 each way at once
(benchmarks/results/gpu_correct_2026-11-27_h200.md). Two A100 of a node are behind one PCIe switch, whose link to
the host they share (`nvidia-smi topo -m` of a DGX A100, NVIDIA/nccl#1505), as L40S of most servers do; each H100, H200
and B200 has a link of its own (NVIDIA/nccl#1264). Memory of the host is an eighth of what machines with eight of these
are sold with: 2 TiB, with A100 and L40S 1 TiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from thunder_memsave.planner.graph import Device

_T = 1e12
_GIB = 2**30


def _flops(
    *, half: float, single: float, double: float, fp8: float | None = None
) -> Mapping[str, float]:
    rates = {"bfloat16": half, "float16": half, "float32": single, "float64": double}
    if fp8 is not None:
        rates |= {"float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType({dtype: rate * _T for dtype, rate in rates.items()})


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        device.name: device
        for device in (
            Device(
                name="h100",
                flops_per_s=_flops(half=989, single=67, double=67, fp8=1979),
                memory_bytes_per_s=3.35 * _T,
                network_bytes_per_s=0.4 * _T,
                launch_us=2.0,
                memory_bytes=79 * _GIB,
                compute_capability=(9, 0),
                host_bytes_per_s=0.055 * _T,
                host_memory_bytes=256 * _GIB,
            ),
            Device(
                name="h200",
                flops_per_s=_flops(half=989, single=67, double=67, fp8=1979),
                memory_bytes_per_s=4.8 * _T,
                network_bytes_per_s=0.4 * _T,
                launch_us=2.0,
                memory_bytes=139 * _GIB,
                compute_capability=(9, 0),
                host_bytes_per_s=0.055 * _T,
                host_memory_bytes=256 * _GIB,
            ),
            Device(
                name="b200",
                flops_per_s=_flops(half=2250, single=75, double=37, fp8=4500),
                memory_bytes_per_s=7.7 * _T,
                network_bytes_per_s=0.4 * _T,
                launch_us=2.0,
                memory_bytes=178 * _GIB,
                compute_capability=(10, 0),
                host_bytes_per_s=0.055 * _T,
                host_memory_bytes=256 * _GIB,
            ),
            Device(
                name="a100",
                flops_per_s=_flops(half=312, single=19.5, double=19.5),
                memory_bytes_per_s=2.039 * _T,
                network_bytes_per_s=0.2 * _T,
                launch_us=2.0,
                memory_bytes=79 * _GIB,
                compute_capability=(8, 0),
                host_bytes_per_s=0.0275 * _T,
                devices_per_link=2,
                host_memory_bytes=128 * _GIB,
            ),
            Device(
                name="l40s",
                flops_per_s=_flops(half=362, single=91.6, double=1.4, fp8=733),
                memory_bytes_per_s=0.864 * _T,
                network_bytes_per_s=0.032 * _T,
                launch_us=2.0,
                memory_bytes=44 * _GIB,
                compute_capability=(8, 9),
                host_bytes_per_s=0.0275 * _T,
                devices_per_link=2,
                host_memory_bytes=128 * _GIB,
            ),
            # A few cores of a server; what it has of memory is other programs' too.
            Device(
                name="cpu",
                flops_per_s=_flops(half=0.05, single=0.1, double=0.05),
                memory_bytes_per_s=0.02 * _T,
                network_bytes_per_s=0.001 * _T,
                launch_us=1.0,
            ),
        )
    }
)


def device(name: str) -> Device:
    """Find a device by its name.

    Raises:
        ValueError: no device has this name.
    """
    if name not in DEVICES:
        raise ValueError(
            f"device {name!r} is not known; known are {', '.join(DEVICES)}. Choose the nearest, or pass a `Device` "
            "with the rates of yours."
        )
    return DEVICES[name]
