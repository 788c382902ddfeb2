from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from lightning.fabric import Fabric

from thunder_memsave.callbacks import MemoryMonitor, ThroughputMonitor
from thunder_memsave.callbacks.peak_flops import peak_tflops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def cpu_fabric(*callbacks: object) -> Fabric:
    return Fabric(accelerator="cpu", devices=1, callbacks=list(callbacks))


def step_metrics(monitor: ThroughputMonitor, **metrics: float) -> dict[str, Any]:
    """Run one step of two seconds with an evaluation of four inside it."""
    times = iter([10.0, 11.0, 15.0, 16.0])
    monitor._clock = lambda: next(times)
    fabric = cpu_fabric(monitor)
    fabric.call("on_train_start", fabric=fabric, step=0)
    fabric.call("on_train_batch_start")
    fabric.call("on_validation_start")
    fabric.call("on_validation_end", metrics={})
    fabric.call("on_train_batch_end", metrics=metrics)
    return metrics


def test_throughput_leaves_out_the_time_of_an_evaluation() -> None:
    assert step_metrics(ThroughputMonitor(), num_tokens=100.0, num_input_tokens=400.0) == {
        "num_tokens": 100.0,
        "num_input_tokens": 400.0,
        "step_seconds": 2.0,
        "tokens_per_s": 50.0,
        "tokens_per_s_per_device": 50.0,
        "input_tokens_per_s": 200.0,
        "total_tokens": 100.0,
    }


def test_a_step_lasts_until_its_last_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 10.0

    def finish_kernels(device: torch.device) -> None:
        nonlocal seconds
        seconds += 3.0

    monkeypatch.setattr(torch.cuda, "synchronize", finish_kernels)
    monitor = ThroughputMonitor(peak_tflops=1.0, clock=lambda: seconds)
    metrics: dict[str, Any] = {}
    monitor.on_train_start(fabric=cast(Fabric, SimpleNamespace(device=CUDA, world_size=1)))
    monitor.on_train_batch_start()
    monitor.on_train_batch_end(metrics=metrics)
    assert metrics["step_seconds"] == 3.0


def test_steps_that_the_host_did_not_wait_for_share_the_speed_of_the_one_it_waited_for() -> None:
    times = iter([0.0, 1.0, 1.0, 2.0, 2.0, 12.0])
    monitor = ThroughputMonitor(clock=lambda: next(times))
    fabric = cpu_fabric(monitor)
    fabric.call("on_train_start", fabric=fabric, step=0)
    steps: list[dict[str, Any]] = [
        {"loss": torch.ones(()), "num_tokens": 30.0},
        {"loss": torch.ones(()), "num_tokens": 30.0},
        {"loss": 1.0, "num_tokens": 60.0},
    ]
    for metrics in steps:
        fabric.call("on_train_batch_start")
        fabric.call("on_train_batch_end", metrics=metrics)
    assert ["step_seconds" in metrics for metrics in steps] == [False, False, True]
    assert (steps[2]["step_seconds"], steps[2]["tokens_per_s"]) == (4.0, 10.0)
    assert [metrics["total_tokens"] for metrics in steps] == [30.0, 60.0, 120.0]


def test_an_evaluation_before_the_first_step_needs_no_clock() -> None:
    fabric = cpu_fabric(ThroughputMonitor())
    metrics: dict[str, Any] = {}
    fabric.call("on_validation_start")
    fabric.call("on_validation_end", metrics={})
    fabric.call("on_train_batch_end", metrics=metrics)
    assert metrics == {}


def test_mfu_is_what_the_model_needs_over_what_the_device_can_do() -> None:
    monitor = ThroughputMonitor(flops_per_token=1e9, peak_tflops=2.0)
    assert step_metrics(monitor, num_tokens=100.0, num_input_tokens=400.0)["mfu"] == 0.1
    assert "mfu" in monitor.metric_names


def test_without_a_known_peak_there_is_no_mfu() -> None:
    monitor = ThroughputMonitor(flops_per_token=1e9)
    assert "mfu" not in step_metrics(monitor, num_tokens=100.0, num_input_tokens=400.0)
    assert "mfu" not in monitor.metric_names
    assert monitor.peak_of(CPU) is None


def test_the_tokens_of_a_resumed_run_are_counted_on() -> None:
    first, second = ThroughputMonitor(), ThroughputMonitor()
    step_metrics(first, num_tokens=100.0)
    second.load_state_dict(first.state_dict())
    assert step_metrics(second, num_tokens=50.0)["total_tokens"] == 150.0


def test_a_peak_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"peak_tflops is 0, but must be positive\."):
        ThroughputMonitor(peak_tflops=0)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
    ],
)
def test_a_device_is_found_by_its_whole_name(name: str, expected: float) -> None:
    assert peak_tflops(name, "bfloat16") == peak_tflops(name, "float16") == expected


@pytest.mark.parametrize(
    "name",
    ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA X1", ""],
)
def test_an_unknown_or_smaller_device_has_no_peak(name: str) -> None:
    assert peak_tflops(name, "bfloat16") is None


def test_slower_formats_have_lower_peaks() -> None:
    name = "NVIDIA H200"
    tf32, float32 = peak_tflops(name, "tf32"), peak_tflops(name, "float32")
    assert (tf32, float32) == (494.7, 66.9)


def test_on_a_cpu_memory_is_that_of_the_process() -> None:
    fabric = cpu_fabric(MemoryMonitor())
    metrics: dict[str, Any] = {}
    fabric.call("on_train_start", fabric=fabric)
    fabric.call("on_train_batch_end", metrics=metrics)
    held = torch.ones(2**26)  # 0.25 GiB
    fabric.call("on_train_batch_end", metrics=(later := dict[str, Any]()))
    assert list(metrics) == list(MemoryMonitor().metric_names) == ["process_peak_rss_gib"]
    assert later["process_peak_rss_gib"] > 0.25
    assert later["process_peak_rss_gib"] >= metrics["process_peak_rss_gib"] > 0.05
    del held


def test_on_cuda_memory_is_the_allocators_peak_since_the_row_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    resets: list[torch.device] = []
    retries = iter([3, 3, 5])
    replaced: dict[str, Any] = {
        "reset_peak_memory_stats": resets.append,
        "max_memory_allocated": lambda device: 3 * 2**30,
        "max_memory_reserved": lambda device: 4 * 2**30,
        "memory_stats": lambda device: {"num_alloc_retries": next(retries)},
    }
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monitor, rows = MemoryMonitor(), [dict[str, Any](), dict[str, Any]()]
    monitor.on_train_start(fabric=cast(Fabric, SimpleNamespace(device=CUDA, strategy=None)))
    for metrics in rows:
        monitor.on_train_batch_end(metrics=metrics)
    assert set(rows[1]) == set(monitor.metric_names)
    peaks = {"peak_allocated_gib": 3.0, "peak_reserved_gib": 4.0, "peak_bytes": 3 * 2**30}
    assert rows[0] == {**peaks, "num_alloc_retries": 0}
    assert rows[1] == {**peaks, "num_alloc_retries": 2}
    assert resets == [CUDA] * 3


def test_where_the_strategy_makes_plans_their_prediction_is_a_metric() -> None:
    strategy = SimpleNamespace(plan=None)
    monitor, before, after = MemoryMonitor(), dict[str, Any](), dict[str, Any]()
    fabric = SimpleNamespace(device=torch.device("cpu"), strategy=strategy)
    monitor.on_train_start(fabric=cast(Fabric, fabric))
    monitor.on_train_batch_end(metrics=before)
    strategy.plan = SimpleNamespace(predicted_peak_bytes=1234)
    monitor.on_train_batch_end(metrics=after)
    assert "predicted_peak_bytes" in monitor.metric_names
    assert "predicted_peak_bytes" not in before
    assert after["predicted_peak_bytes"] == 1234


@pytest.mark.parametrize(
    ("matmul_format", "precision", "expected"),
    [
        ("bfloat16", "highest", 989.4),
        ("float32", "highest", 66.9),
        ("float32", "high", 494.7),
    ],
)
def test_the_peak_is_that_of_the_format_that_products_are_computed_in(
    matmul_format: Any, precision: str, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: precision)
    assert ThroughputMonitor(matmul_format=matmul_format).peak_of(CUDA) == expected
