"""Logits that are returned beside their loss are made when they are read, with eager's bits; else an error says why."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.memory import measured_peak_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.errors import LateTensorError
from thunder_memsave.frontend.rewrites import linear_losses
from thunder_memsave.frontend.rewrites.late_tensor import LateTensor
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.graph import StepMemory

ROWS, LENGTH, WIDTH, CLASSES = 2, 9, 16, 50


@pytest.fixture(autouse=True)
def _small_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_losses, "FEWEST_LOGITS", 1)


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Model(nn.Module):
    """Returns its logits, capped or not, beside the loss, as models of transformers do that are given `labels=`."""

    def __init__(self, *, cap: float | None = None, bias: bool = False, last: int = -100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cap, self.last = cap, last
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, ids: Tensor, labels: Tensor) -> Output:
        hidden = torch.tanh(self.layer(self.embedding(ids)))
        logits = self.head(hidden[:, slice(0, None), :])
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        shifted = F.pad(labels, (0, 1), value=self.last)[..., 1:].contiguous()
        loss = F.cross_entropy(logits.float().view(-1, CLASSES), shifted.view(-1))
        return Output(loss, logits)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(0, CLASSES, (ROWS, LENGTH))
    return ids, ids


def compiled(model: nn.Module | None = None, **settings: Any) -> CompiledModule:
    return CompiledModule(model or Model(), config=CompileConfig(**settings))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("options", [{}, {"cap": 3.0}, {"bias": True}], ids=str)
def test_they_have_the_bits_of_eager(options: dict[str, Any], dtype: torch.dtype | None) -> None:
    model = Model(**options).to(dtype or torch.float32)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is None):
        expected, found = eager(*batch()), compiled(model)(*batch())
    assert isinstance(found.logits, LateTensor)
    assert (found.logits.shape, found.logits.dtype) == (
        expected.logits.shape,
        expected.logits.dtype,
    )
    as_float = found.logits.float()
    assert isinstance(as_float, LateTensor) or dtype is torch.float32
    assert as_float.dtype is torch.float32
    assert torch.equal(found.logits.argmax(-1), expected.logits.argmax(-1))
    assert torch.equal(as_float + 0.0, expected.logits.float())
    found.loss.backward()
    expected.loss.backward()
    if dtype is torch.float32:
        for mine, theirs in zip(model.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


def test_without_gradients_too() -> None:
    model = compiled()
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = model(*batch()).logits
            assert isinstance(found, LateTensor)
            assert torch.equal(found + 0.0, copy.deepcopy(model.module)(*batch()).logits)


def test_after_an_update_they_can_no_longer_be_made() -> None:
    model = compiled()
    read, unread = model(*batch()), model(*batch())
    before = read.logits + 0.0
    unread.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(read.logits + 0.0, before)
    with pytest.raises(LateTensorError, match=r"before optimizer\.step.*return_logits"):
        print(unread.logits)


def test_a_loss_of_them_is_refused_rather_than_left_out() -> None:
    found = compiled()(*batch())
    loss = found.loss + found.logits.square().mean()
    with pytest.raises(LateTensorError, match="return_logits"):
        loss.backward()


def test_the_setting_returns_them_as_they_are() -> None:
    model = compiled(return_logits=True)
    eager = copy.deepcopy(model.module)
    for call in (model, eager):
        found = call(*batch())
        assert type(found.logits) is Tensor
        (found.loss + found.logits.square().mean()).backward()
    for mine, theirs in zip(model.module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("last", [0, -100])
def test_the_peak_is_that_of_the_plan(last: int) -> None:
    planner = MemoryPlanner(
        MemoryConfig(), device=device("cpu"), budget_bytes=None, step_memory=StepMemory
    )
    model = CompiledModule(Model(last=last), planner=planner)

    def step() -> None:
        found = model(*given)
        found.loss.backward()

    given = batch()
    step()
    model.module.zero_grad()
    call = planner.calls[-1]
    held = sum(call.program.storages[s].nbytes for s in call.program.held)
    predicted, measured = call.profile.peak_bytes - held, measured_peak_bytes(step)
    assert predicted == measured or (last == -100 and predicted > measured)


@on_fabric_rank
def _read_on_ranks() -> None:
    linear_losses.FEWEST_LOGITS = 1
    fabric = make_fabric(devices=2, sharding="zero3")
    model: Any = fabric.setup(Model())
    found = model(*batch())
    fabric.backward(found.loss)
    with pytest.raises(LateTensorError, match=r"sharded.*strategy\.return_logits"):
        print(found.logits)


def test_of_shards_an_error_names_the_setting() -> None:
    run_on_fabric_ranks(_read_on_ranks, 2)


def of_tokens(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).amax(-1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_function_that_the_user_compiled_reads_them(backend: str, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    counter = CompileCounterWithBackend(backend)
    read = torch.compile(of_tokens, backend=counter, fullgraph=True)
    model = compiled(Model().to(dtype))
    eager = copy.deepcopy(model.module)
    for learning in (True, True, False, False):
        with torch.set_grad_enabled(learning):
            found = model(*batch())
            tokens = read(found.logits)
            assert torch.equal(tokens, of_tokens(eager(*batch()).logits))
        assert tokens.requires_grad is learning
    assert counter.frame_count == 2, "once with gradients, and once without"


def test_a_loss_that_the_user_compiled_is_refused_too() -> None:
    torch.compiler.reset()
    read = torch.compile(of_tokens, backend="aot_eager")
    model = compiled()
    found = model(*batch())
    tokens = read(found.logits)
    for extra in (
        tokens.mean(),
        found.logits.square().mean(),
    ):  # the latter after a graph read them
        with pytest.raises(LateTensorError, match="return_logits"):
            (found.loss + extra).backward(retain_graph=True)
    found.loss.backward()
    read(model(*batch()).logits.detach()).sum()


def test_a_function_that_the_user_compiled_reads_none_after_an_update() -> None:
    torch.compiler.reset()
    model = compiled()
    found = model(*batch())
    found.loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    with pytest.raises(
        Exception, match=r"LateTensorError: .*before optimizer\.step.*return_logits"
    ):
        torch.compile(of_tokens, backend="eager")(found.logits)


def test_another_compiled_module_reads_them() -> None:
    class Judge(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(CLASSES, 1)

        def forward(self, logits: Tensor) -> tuple[Tensor]:
            return (self.layer(logits).mean(),)

    model, judge = compiled(), Judge()
    eager = copy.deepcopy((model.module, judge))
    CompiledModule(judge)(model(*batch()).logits.detach())[0].backward()
    eager[1](eager[0](*batch()).logits.detach())[0].backward()
    torch.testing.assert_close(judge.layer.weight.grad, eager[1].layer.weight.grad)


def test_a_hook_is_for_a_gradient_that_never_comes() -> None:
    found = compiled()(*batch())
    found.logits.register_hook(lambda gradient: pytest.fail("it has no gradient"))
    found.loss.backward()
    assert found.logits.requires_grad
