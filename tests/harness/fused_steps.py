"""Steps of small models with and without fusion, for their bits, their memory and what they call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import peft
import torch
from torch import Tensor, nn

from harness import models
from harness.fp8_linears import fp8_module, linears_of, state_of
from harness.memory import measured_peak_bytes
from harness.predicted_peaks import planned_bytes
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.budget.planned_call import PlannedCall
from thunder_memsave.compiler.compile_call import Compiled
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig, MemoryConfig
from thunder_memsave.fusion.region import PREFIX
from thunder_memsave.planner.devices import device


def _lora() -> nn.Module:
    adapters = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    model: nn.Module = peft.get_peft_model(models.llama(2), adapters)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: models.llama(2),
    "qwen2": lambda: models.qwen2(2),
    "gpt2 with dropout": lambda: models.gpt2(2, resid_pdrop=0.1, embd_pdrop=0.1),
    "lora with dropout": _lora,
    "bert": lambda: models.bert(2),
}
"""Functions that make models of transformers, with two layers each."""


WIDTH = 16


class Layer(nn.Module):
    """Turned halves, a dropout, a gate and a residual: runs that fuse, between operations that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        first, second = hidden.chunk(2, dim=-1)
        turned = hidden * turn + torch.cat([-second, first], dim=-1) * (1 - turn)
        dropped = nn.functional.dropout(turned, 0.25, self.training)
        return x + dropped * self.gate(x) * 0.5


class Model(nn.Module):
    """Layers that are alike."""

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, turn)
        return x.float().pow(2).mean()


def batch(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, turn = (torch.randn(5, 3, WIDTH, generator=generator).to(dtype) for _ in range(2))
    return {"x": x, "turn": turn}


@dataclass(frozen=True, slots=True)
class Ran:
    """A step that ran."""

    bits: list[Tensor]
    """Loss, gradients, the generator's state, and scales and histories of fp8."""
    call: PlannedCall
    compiled: Compiled
    measured_bytes: int
    """Peak of a later step, as `predicted_bytes`."""

    @property
    def predicted_bytes(self) -> int:
        """The plan's peak beside what the caller holds."""
        return planned_bytes(self.call)

    @property
    def num_regions(self) -> int:
        return sum(s.op.symbol.startswith(PREFIX) for s in self.call.program.steps)

    @property
    def moved_bytes(self) -> int:
        """Bytes that all operations of a step move."""
        return sum(s.op.moved_bytes for s in self.call.program.steps)

    @property
    def distinct(self) -> set[str]:
        symbols = {s.op.symbol for s in self.call.program.steps}
        return {name for name in symbols if name.startswith(PREFIX)}

    def order_of(self, *parts: str) -> list[str]:
        """The symbols with one of these in their names, in order."""
        names = [s.op.symbol for s in self.call.program.steps]
        return [name for name in names if any(part in name for part in parts)]


def step(
    build: Callable[[], nn.Module],
    inputs: dict[str, Any],
    *,
    fusion: bool,
    policy: str = "keep_all",
    budget_bytes: int | None = None,
    around: AbstractContextManager[Any] | None = None,
    fp8: bool = False,
) -> Ran:
    """Run two steps of a model, the second to measure it.

    Args:
        build: Makes the model.
        inputs: Its batch.
        fusion: Whether operators are fused.
        policy: Of the memory.
        budget_bytes: For the plan.
        around: Entered around each forward: autocast.
        fp8: Whether linears compute in fp8; their scaling state counts as bits then.
    """
    torch.manual_seed(0)
    model = build().train()
    planner = MemoryPlanner(
        MemoryConfig(policy=policy),  # type: ignore[arg-type]
        device=device("cpu"),
        budget_bytes=budget_bytes,
    )
    config = CompileConfig(fusion=fusion)
    module = (
        fp8_module(model, planner=planner, compile_config=config)
        if fp8
        else CompiledModule(model, planner=planner, config=config)
    )

    def run() -> Tensor:
        with around or nullcontext():
            outputs = module(**inputs)  # the caller is taken to hold all of them
        loss = outputs if isinstance(outputs, Tensor) else outputs[0]
        loss.backward()
        return loss.detach()

    torch.manual_seed(1)
    loss = run()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    states = state_of(linears_of(module)).values() if fp8 else ()
    bits = [loss, *gradients, torch.get_rng_state(), *states]
    model.zero_grad()
    measured = measured_peak_bytes(run)
    assert_runs_as_planned(module.captures[0], planner.calls[-1])
    return Ran(bits, planner.calls[-1], module.captures[0], measured)


def assert_runs_as_planned(compiled: Compiled, call: PlannedCall) -> None:
    """Raise AssertionError unless products and regions run in the order in which the plan has them."""
    ran = [
        bsym.sym.name
        for traces in (compiled.forward_traces, compiled.backward_traces)
        for bsym in traces[-1].bound_symbols
        if _is_compared(bsym.sym.name)
    ]
    assert ran == [s.op.symbol for s in call.program.steps if _is_compared(s.op.symbol)]


def _is_compared(symbol: str) -> bool:
    return "mm" in symbol or symbol.startswith(PREFIX)
