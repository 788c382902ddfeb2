"""What is extracted from traces, and that it predicts the measured peak to the byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness.memory import joint_traces, measured_memory
from harness.models import gpt2, llama, qwen2, token_batch
from thunder_memsave.compile import CompiledModule
from thunder_memsave.extract import profiles, program, training_graph
from thunder_memsave.op_profile import OpProfiles
from thunder_memsave.planner.graph import Program, TrainingGraph
from thunder_memsave.planner.simulate import simulate
from thunder_memsave.scratch import MeasuredScratch


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> OpProfiles:
    return profiles(scratch=MeasuredScratch(directory=tmp_path_factory.mktemp("scratch")))


@dataclass
class Extracted:
    """A model that was called once, and what was extracted from its traces."""

    module: CompiledModule
    graph: TrainingGraph
    program: Program

    @property
    def constant_bytes(self) -> int:
        """What was there before."""
        return sum(self.program.storages[s].nbytes for s in self.program.held)


def extracted(
    model: nn.Module,
    known: OpProfiles,
    *,
    differentiated: set[int] | None = None,
    **inputs: Tensor,
) -> Extracted:
    module = CompiledModule(model)
    with joint_traces() as joint:
        module(**inputs)
    compiled = module.captures[0]
    backward = compiled.backward_traces[-1] if compiled.backward_traces else None
    return Extracted(
        module,
        training_graph(joint[0], known=known),
        program(compiled.forward_traces[-1], backward, known=known, differentiated=differentiated),
    )


def lora() -> nn.Module:
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(llama(1), config)


def bf16_llama() -> nn.Module:
    return nn.Module.to(llama(2), torch.bfloat16)


def autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", torch.bfloat16)


def dropping_gpt2() -> nn.Module:
    return gpt2(1, resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)


Context = Callable[[], AbstractContextManager[object]]


@pytest.mark.parametrize(
    ("model", "context"),
    [
        pytest.param(llama, nullcontext, id="llama"),
        pytest.param(lambda: qwen2(2), nullcontext, id="qwen2"),
        pytest.param(lambda: gpt2(2), nullcontext, id="gpt2"),
        pytest.param(dropping_gpt2, nullcontext, id="gpt2-dropout"),
        pytest.param(lora, nullcontext, id="lora-dropout"),
        pytest.param(bf16_llama, nullcontext, id="llama-bf16"),
        pytest.param(llama, autocast, id="llama-autocast"),
    ],
)
def test_predicted_peaks_are_the_measured_ones_to_the_byte(
    model: Callable[[], nn.Module], context: Context, known: OpProfiles
) -> None:
    torch.manual_seed(0)
    module, tokens = model(), token_batch(2, 24)
    with context():
        found = extracted(module, known, differentiated={0}, input_ids=tokens, labels=tokens)
        forward, step = measured_call(found.module, tokens)
    predicted = simulate(found.program)
    assert predicted.peak_bytes - found.constant_bytes == step.peak_bytes
    assert predicted.forward_peak_bytes - found.constant_bytes == forward.peak_bytes
    outputs = [found.graph.storages[s].nbytes for s in found.graph.outputs]
    assert predicted.live_bytes[-1] - found.constant_bytes + sum(outputs) == step.end_bytes


def measured_call(module: CompiledModule, tokens: Tensor) -> Any:
    """Forward alone, and forward and backward, while the caller holds the outputs."""

    def step() -> object:
        output = module(input_ids=tokens, labels=tokens)
        output.loss.backward()
        return output

    measured_memory(step)
    module.zero_grad()
    forward = measured_memory(lambda: module(input_ids=tokens, labels=tokens))
    result = forward, measured_memory(step)
    module.zero_grad()
    return result
