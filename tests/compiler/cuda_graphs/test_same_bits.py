"""Training steps as graphs have the bits of ordinary steps, on a runtime that stands for CUDA's."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness import models
from harness.fabric import make_fabric
from harness.fake_cuda_graphs import FakeRuntime
from thunder_memsave.compiler.cuda_graphs import torch_runtime
from thunder_memsave.errors import CompileError
from thunder_memsave.finetune.model.documents_apart import take_boundaries
from thunder_memsave.ops.families.packed_attention import boundaries_of
from thunder_memsave.planner.graph import Plan
from thunder_memsave.strategy import ThunderMemsaveStrategy

NUM_STEPS = 5
LENGTH = 12
FP8 = {"amax_history_len": 4, "skip_modules": ["lm_head"]}


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()
    monkeypatch.setattr(torch_runtime, "runtime_of", lambda device: fake)
    return fake


def lora_model() -> nn.Module:
    torch.manual_seed(0)
    model = models.llama()
    take_boundaries(model)
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.25}
    return get_peft_model(model, LoraConfig(**settings))


def packed(seed: int) -> dict[str, Tensor]:
    """Make two rows of documents; their boundaries differ from batch to batch."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, models.VOCAB_SIZE, (2, LENGTH), generator=generator)
    cuts = torch.randint(1, LENGTH, (2, 1), generator=generator, dtype=torch.int32)
    ends = torch.cat([cuts, torch.full_like(cuts, LENGTH)], dim=1)
    positions = torch.arange(LENGTH).repeat(2, 1)
    positions = torch.where(positions < cuts, positions, positions - cuts)
    mask = boundaries_of(ends, LENGTH)
    return {"input_ids": ids, "labels": ids, "attention_mask": mask, "position_ids": positions}


def train(**settings: Any) -> tuple[list[Tensor], Plan]:
    """Train with dropout, LoRA, packed rows and an accumulation of two; return all that came of it."""
    fabric = make_fabric(**settings)
    model = lora_model()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    module, optimizer = fabric.setup(model, optimizer)
    torch.manual_seed(1)
    seen: list[Tensor] = []
    for step in range(NUM_STEPS):
        for micro in range(2):
            with fabric.no_backward_sync(module, enabled=micro == 0):
                loss = module(**packed(2 * step + micro)).loss
                fabric.backward(loss / 2)
            seen.append(loss.detach())
        seen.append(fabric.clip_gradients(module, optimizer, max_norm=1.0))  # type: ignore[arg-type]
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    seen += [*(p.detach() for p in model.parameters()), *model.buffers()]
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    assert fabric.strategy.plan is not None
    return seen, fabric.strategy.plan


@pytest.mark.parametrize("fp8", [None, FP8], ids=["float32", "fp8"])
def test_five_steps_have_the_bits_of_steps_without_graphs(
    fp8: dict[str, Any] | None, runtime: FakeRuntime
) -> None:
    expected, _ = train(fp8=fp8, cuda_graphs=False)
    assert not runtime.graphs
    found, _ = train(fp8=fp8, cuda_graphs=True)
    # Two micro-batches were ordinary.
    assert [graph.num_replays for graph in runtime.graphs] == [2 * NUM_STEPS - 2] * 2
    assert len(found) == len(expected) > 100
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_plan_counts_the_pool(runtime: FakeRuntime) -> None:
    _, without = train(cuda_graphs=False)
    _, graphed = train(cuda_graphs=True)
    added = graphed.predicted_peak_bytes - without.predicted_peak_bytes
    trained = 4 * sum(_trained_sizes())
    assert added > trained + 64 * 2**20  # its gradients, and cuBLAS's workspaces


def _trained_sizes() -> list[int]:
    return [p.numel() for p in lora_model().parameters() if p.requires_grad]


def test_graphs_that_do_not_fit_the_budget_are_not_made(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    budget = {"memory": {"budget": "16MiB"}}
    train(**budget, cuda_graphs="auto")
    assert not runtime.graphs
    with pytest.raises(
        CompileError, match=r"they take [\d,]+ bytes more, and memory\.budget lacks"
    ):
        train(**budget, cuda_graphs=True)


def test_another_shape_drops_the_graphs(
    runtime: FakeRuntime, caplog: pytest.LogCaptureFixture
) -> None:
    fabric = make_fabric(cuda_graphs=True)
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    module = fabric.setup(model)
    for rows in (3, 3, 3, 5, 3, 5):
        model.weight.grad = None
        x = torch.ones(rows, 4)
        fabric.backward(module(x).square().sum())
        (expected,) = torch.autograd.grad(model(x).square().sum(), model.weight)
        assert torch.equal(model.weight.grad, expected)  # type: ignore[arg-type]
    assert [graph.num_replays for graph in runtime.graphs] == [1, 1]
    assert "another shape of its batch came" in caplog.text
    assert "pad or pack to one shape" in caplog.text


def test_an_evaluation_is_ordinary_and_may_come_between(runtime: FakeRuntime) -> None:
    fabric = make_fabric(cuda_graphs=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    module = fabric.setup(model)
    x, outputs = torch.ones(3, 4), list[Tensor]()
    for number in range(5):
        loss = module(x).sum()
        if number >= 3:
            module.eval()
            with torch.no_grad():
                outputs.append(module(x))
            module.train()
        fabric.backward(loss)
    assert [graph.num_replays for graph in runtime.graphs] == [3, 3]
    model.eval()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], model(x).detach())


class WithHidden(nn.Module):
    """Returns what its loss is computed from beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.second(torch.tanh(self.first(x)))
        return hidden.tanh().square().mean(), hidden


def test_a_graph_takes_gradients_of_outputs_beside_the_loss_in_some_steps_alone(
    runtime: FakeRuntime,
) -> None:
    fabric = make_fabric(cuda_graphs=True)
    torch.manual_seed(0)
    model = WithHidden()
    module = fabric.setup(model)
    for step in range(6):
        x = torch.randn(5, 4)
        gradients = []
        for run in (module, model):
            model.zero_grad()
            loss, hidden = run(x)
            (loss + hidden.sum() if step % 2 else loss).backward()
            gradients.append([p.grad for p in model.parameters()])
        torch.testing.assert_close(*gradients)
    assert [graph.num_replays for graph in runtime.graphs] == [4, 4]
