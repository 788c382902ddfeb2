"""Which calls get graphs: what forbids them by name, and launches against kernels."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from thunder.core.trace import TraceCtx
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from harness.fake_cuda_graphs import FakeRuntime
from harness.traces import fake_ranks
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.compiler.cuda_graphs import torch_runtime
from thunder_memsave.compiler.cuda_graphs.host_waits import HostWaits
from thunder_memsave.compiler.cuda_graphs.refusals import numbers_of_the_host, reasons
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.errors import CompileError
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.measure.devices import device_at
from thunder_memsave.ops.families.counted_targets import counted_targets
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import Op
from thunder_memsave.planner.launches import launches_of
from thunder_memsave.sharding.rows import shard_module


def planner(**memory: Any) -> MemoryPlanner:
    place = device_at(torch.device("cpu"))
    return MemoryPlanner(MemoryConfig(**memory), device=place, budget_bytes=None)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))


def traces_of(module: CompiledModule) -> tuple[TraceCtx, TraceCtx]:
    module(torch.ones(3, 4))
    (compiled,) = module.captures
    return compiled.forward_traces[-1], compiled.backward_traces[-1]


def fixed(traces: tuple[TraceCtx, TraceCtx]) -> set[str]:
    """Name all arguments but the batch."""
    return {a.name for a in traces[0].args if not a.name.startswith("t_l_")}


class Writer(nn.Module):
    """Changes its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        return (self.weight * x).sum()


def test_a_batch_that_is_written_to_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_runtime, "runtime_of", lambda place: FakeRuntime())
    module = CompiledModule(Writer(), config=CompileConfig(cuda_graphs=True))
    with pytest.raises(
        CompileError, match=r"forward changes t_\w+ of the batch in place; let it ch"
    ):
        module(torch.ones(3))


def test_random_numbers_that_are_drawn_again_are_refused_by_name() -> None:
    traces = traces_of(CompiledModule(model(), planner=planner(recompute=("1",))))
    (reason,) = reasons(*traces, fixed=fixed(traces), keeps_gradients=False, device_type="cuda")
    assert "draws forward's random numbers again" in reason
    assert "memory.keep" in reason


def test_tensors_of_the_host_are_refused_by_the_operation_that_has_them() -> None:
    traces = traces_of(CompiledModule(model(), planner=planner(policy="keep_all")))
    (reason,) = reasons(*traces, fixed=fixed(traces), keeps_gradients=False, device_type="cuda")
    assert re.match(r"\w+ has a tensor on the CPU \(t_\w+\); move it to the GPU", reason)
    assert not list(reasons(*traces, fixed=fixed(traces), keeps_gradients=False, device_type="cpu"))


class Counted(nn.Module):
    """Its loss knows how many targets are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, hidden: Tensor, targets: Tensor, num_kept: Tensor) -> Tensor:
        return cross_entropy(self.head(hidden), counted_targets(targets, num_kept))


def test_a_number_on_the_host_that_a_graph_does_not_read_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)
    module = CompiledModule(Counted())
    module(torch.ones(3, 4), torch.tensor([0, 1, -100]), torch.tensor(2)).backward()
    (compiled,) = module.captures
    traces = (compiled.forward_traces[-1], compiled.backward_traces[-1])
    symbols = [b for trace in traces for b in trace.bound_symbols]
    (name,) = numbers_of_the_host(symbols)
    assert name.startswith("t_l_num_kept")


def test_collectives_that_need_the_host_are_refused_and_those_of_nccl_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_ranks(2, mode="zero3") as ranks:
        sharded = model()
        shard_module(sharded, ranks)
        traces = traces_of(CompiledModule(sharded, data_parallel=ranks))
        (reason,) = reasons(*traces, fixed=fixed(traces), keeps_gradients=False, device_type="cpu")
        assert reason.startswith(
            "its collectives run on fake, which needs the host; only those of n"
        )
        monkeypatch.setattr(torch.distributed, "get_backend", lambda group: "nccl")
        assert not list(
            reasons(*traces, fixed=fixed(traces), keeps_gradients=False, device_type="cpu")
        )
        (reason,) = reasons(*traces, fixed=fixed(traces), keeps_gradients=True, device_type="cpu")
        assert "set strategy.accumulate to reduce_every" in reason


def test_what_waits_for_the_device_is_noticed() -> None:
    x = torch.ones(3)
    with HostWaits() as noted:
        x.sum().item()
        x.nonzero()
        torch.equal(x, x)
        x[x > 0]
        x[torch.tensor([0, 2])]
    assert list(noted.names) == ["_local_scalar_dense", "nonzero", "equal", "index"]
    with HostWaits() as noted:
        x[torch.tensor([0, 2])] = (x + 1)[:2]
    assert not noted.names


def op(**values: Any) -> Op:
    settings: dict[str, Any] = {
        "symbol": "mul",
        "index": 0,
        "arguments": (),
        "results": (),
        "reads": (),
        "makes": (),
        "peak_bytes": 0,
        "repeat": "yes",
        "moved_bytes": 0,
    }
    return Op(**{**settings, **values})


def test_a_step_is_launch_bound_if_its_kernels_take_less_time() -> None:
    h200 = device("h200")
    small = launches_of([op(moved_bytes=10_000)] * 100 + [op(repeat="free")], h200)
    assert (small.num_ops, small.launch_us) == (100, 500.0)
    assert small.kernel_us < 1.0
    assert small.bound
    large = launches_of([op(moved_bytes=10**9)], h200)
    # 4.8 TB/s, of which kernels sustain 79 %
    assert large.kernel_us == pytest.approx(1e9 / (4.8e12 * 0.79) * 1e6)
    assert not large.bound


def graphed(
    monkeypatch: pytest.MonkeyPatch, setting: Any, *, with_planner: bool = True
) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch_runtime, "runtime_of", lambda place: fake)
    module = CompiledModule(
        model(),
        config=CompileConfig(cuda_graphs=setting),
        planner=planner(policy="keep_all") if with_planner else None,
    )
    for _ in range(3):
        module(torch.ones(3, 4)).sum().backward()
    return fake


def test_auto_makes_graphs_of_a_step_that_the_host_limits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert len(graphed(monkeypatch, "auto").graphs) == 2
    assert "CUDA graphs of Sequential.forward: " in caplog.text
    assert " launches take 0." in caplog.text


def test_auto_says_why_it_makes_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert not graphed(monkeypatch, "auto", with_planner=False).graphs
    assert "no CUDA graphs of Sequential.forward: nothing is planned" in caplog.text
    monkeypatch.setattr("thunder_memsave.planner.launches.HOST_US_PER_OPERATION", 1e-9)
    assert not graphed(monkeypatch, "auto").graphs
    assert "no CUDA graphs of Sequential.forward: " in caplog.text
    assert len(graphed(monkeypatch, True).graphs) == 2
    assert not graphed(monkeypatch, False).graphs


def test_graphs_that_are_asked_for_on_a_device_without_any_are_refused() -> None:
    module = CompiledModule(model(), config=CompileConfig(cuda_graphs=True))
    with pytest.raises(
        CompileError, match=r"cuda_graphs is true, but the model is on cpu, which has"
    ):
        module(torch.ones(3, 4))
