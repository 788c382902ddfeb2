"""RMS norm beyond what every row of the table is tested for: weights of another dtype, autocast, recomputation."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from thunder.core import dtypes
from thunder.core.devices import Device
from thunder.core.proxies import TensorProxy
from thunder.core.trace import TraceCtx, tracectx
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.memory import measured_peak_bytes
from thunder_memsave.budget import memory_planner
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.measure.scratch import MeasuredScratch
from thunder_memsave.ops import families
from thunder_memsave.ops.families.rms_norm import OPERATIONS, rms_norm
from thunder_memsave.ops.kernel_calls import own_executor
from thunder_memsave.passes.repeatable import roots
from thunder_memsave.planner.devices import device

WIDTH = 16
OPERATORS = {name: o for row in OPERATIONS for k in row.kernels for name, o in k.operators.items()}


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(WIDTH).to(weight_dtype)
        self.linear = nn.Linear(WIDTH, WIDTH).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


def results(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    output = call(x)
    return [output, *torch.autograd.grad(output.float().square().sum(), [x, *module.parameters()])]


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # eager says it too
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_over_bfloat16_values_it_has_the_bits_of_eager(weight_dtype: torch.dtype) -> None:
    block = Block(torch.bfloat16, weight_dtype)
    x = torch.randn(8, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    expected = results(block, block, x)
    assert all(map(torch.equal, results(block, CompiledModule(block), x), expected))
    memory = MemoryConfig(policy="recompute_all")
    planner = MemoryPlanner(memory, device=device("cpu"), budget_bytes=None)
    planned = CompiledModule(block, planner=planner)
    assert all(map(torch.equal, results(block, planned, x), expected))


def test_under_autocast_it_has_eagers_dtypes_and_bits() -> None:
    block = Block(torch.float32, torch.float32)
    x = torch.randn(8, WIDTH, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        expected = results(block, block, x)
        found = results(block, CompiledModule(block), x)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    assert all(map(torch.equal, found, expected))


def test_its_results_are_new_memory() -> None:
    trace = TraceCtx(None)
    with tracectx(trace):
        value = TensorProxy(shape=(8, WIDTH), device=Device("cpu"), dtype=dtypes.bfloat16)
        results = own_executor.opmap["rms_norm_kernel"](value, 1, None, None)
    found = roots(trace.bound_symbols)
    assert [found[r.name] for r in results] == [{r.name} for r in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lead", [(2, 16), (7,), (3, 5, 33), (1, 1), (300,)], ids=str)
@pytest.mark.parametrize("eps", [1e-6, None])
@pytest.mark.parametrize("is_weighted", [True, False])
def test_the_formula_of_its_gradients_has_the_bits_of_autograd(
    dtype: torch.dtype,
    lead: tuple[int, ...],
    eps: float | None,
    is_weighted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does backward run autograd again, where nothing is cast."""
    torch.manual_seed(0)
    shape = (4, 6)
    value = (torch.randn(*lead, *shape, dtype=dtype) * 3).requires_grad_()
    weight = torch.rand(shape, dtype=dtype, requires_grad=True) if is_weighted else None
    operands = [value] if weight is None else [value, weight]
    result = torch.rms_norm(value, shape, weight, eps)
    grad = torch.randn_like(result)
    expected = torch.autograd.grad(result, operands, grad)
    monkeypatch.setattr(torch.autograd, "grad", None)
    x, w = value.detach(), None if weight is None else weight.detach()
    _, rstd = rms_norm(x, len(shape), w, eps)
    found = [
        OPERATORS[name].run(grad, x, len(shape), rstd, w, eps)
        for name in ("rms_norm_kernel_backward", "rms_norm_kernel_weight_backward")[: len(operands)]
    ]
    assert all(map(torch.equal, found, expected))


GRADIENTS: tuple[Callable[[], Tensor], ...] = (
    lambda: torch.randn(2, 5, 5, 4),
    lambda: torch.randn(2, 4, 5, 5).permute(0, 2, 3, 1),
    lambda: torch.randn(2, 5, 5, 1).expand(2, 5, 5, 4),
)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_is_laid_out_as_it_was_traced(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    derivative: Any = OPERATORS["rms_norm_kernel_backward"]
    weight = None if weight_dtype is None else torch.randn(4, dtype=weight_dtype)
    for value, grad in product(GRADIENTS[:2], GRADIENTS):
        x = value().to(dtype)
        y, rstd = rms_norm(x, 1, weight, 1e-5)
        operands = (grad().to(y.dtype), x, 1, rstd, weight, 1e-5)
        real = derivative.run(*operands)
        mode: Any = FakeTensorMode
        with mode() as fake:
            given = [fake.from_tensor(o) if isinstance(o, Tensor) else o for o in operands]
            traced = derivative.fake(*given)
        assert (traced.stride(), traced.dtype) == (real.stride(), real.dtype)


class Permuted(nn.Module):
    """A kernel behind the norm reads memory as it was traced: GroupNorm's of a gradient that two norms sum up."""

    def __init__(self) -> None:
        super().__init__()
        self.response, self.group = nn.LocalResponseNorm(3), nn.GroupNorm(2, 4)
        self.layer, self.rms = nn.LayerNorm(4), nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.response(self.group(x)).permute(0, 2, 3, 1)
        return nn.functional.cosine_similarity(self.layer(h), self.rms(h) + 0.1, dim=-1)


def test_what_reads_the_gradient_of_a_permuted_value_is_right() -> None:
    torch.manual_seed(0)
    eager = Permuted()
    compiled = CompiledModule(copy.deepcopy(eager))
    x = torch.randn(2, 4, 5, 5)
    gradients = []
    for module in (eager, compiled):
        leaf = x.clone().requires_grad_()
        output = module(leaf)
        (output * torch.arange(1.0, 1.0 + output.numel()).view_as(output)).sum().backward()
        gradients.append([leaf.grad, *(p.grad for p in module.parameters())])
    for mine, theirs in zip(*gradients, strict=True):
        assert mine is not None
        assert torch.equal(mine, theirs)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families.rms_norm, "_TILE_ELEMENTS", 2**11)
    monkeypatch.setattr(families.rms_norm, "_FEWEST_ROWS", 16)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_gradient_of_a_tile_of_rows_has_the_bits_of_the_whole(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(0)
    weight = None if weight_dtype is None else torch.rand(4, 32, dtype=weight_dtype)
    for lead in ((2, 77), (333,), (3, 5, 11)):
        value = (torch.randn(*lead, 4, 32, dtype=dtype) * 3).requires_grad_()
        result = torch.rms_norm(value, (4, 32), weight, 1e-6)
        rstd = rms_norm(value.detach(), 2, weight, 1e-6)[1]
        of_columns = torch.randn(result.mT.shape, dtype=result.dtype).mT
        grads = (torch.randn_like(result), of_columns)
        for grad in grads:
            given = (grad, value.detach(), 2, rstd, weight, 1e-6)
            found = OPERATORS["rms_norm_kernel_backward"].run(*given)
            (expected,) = torch.autograd.grad(result, value, grad, retain_graph=True)
            assert torch.equal(found, expected)
        num_tiles = [len(families.rms_norm._tiles(grad, value, 2)) for grad in grads]
        assert num_tiles[0] > 1
        assert num_tiles[1] == 1


class Wide(nn.Module):
    """A norm of rows that are wider than all else, which PyTorch differentiates by operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return torch.rms_norm(y, (y.shape[-1],), None, 1e-6).float().square().mean()


def test_tiles_of_rows_take_fewer_bytes_and_those_that_are_planned(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    x = torch.randn(512, WIDTH, dtype=torch.bfloat16)
    gradients, peaks = [], []
    for is_tiled in (False, True):
        if is_tiled:
            request.getfixturevalue("small_tiles")
        scratch = MeasuredScratch(directory=tmp_path / str(is_tiled))  # tables know no patched size
        monkeypatch.setattr(memory_planner, "measured_scratch", lambda found=scratch: found)
        model = Wide(128).bfloat16()
        planner = MemoryPlanner(MemoryConfig(), device=device("cpu"), budget_bytes=None)
        compiled = CompiledModule(model, planner=planner)
        compiled(x).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
        measured = measured_peak_bytes(lambda: compiled(x).backward())  # noqa: B023
        (call,) = planner.calls
        held = sum(call.program.storages[s].nbytes for s in call.program.held)
        assert measured == call.profile.peak_bytes - held
        peaks.append(measured)
    assert peaks[1] < 0.7 * peaks[0]
    for whole, tiled in zip(*gradients, strict=True):
        assert whole is not None
        assert torch.equal(whole, tiled)
