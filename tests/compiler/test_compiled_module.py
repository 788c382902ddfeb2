"""Compiled transformers and PEFT models give eager's losses, outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from harness import models
from harness.custom_experts import skip_if_untraceable
from harness.parity import Twins, weighted_sum
from thunder_memsave.budget.memory_planner import MemoryPlanner
from thunder_memsave.compiler import split as split_module
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import MemoryConfig
from thunder_memsave.measure.devices import device_at


def _loss(output: CausalLMOutputWithPast) -> Tensor:
    assert output.loss is not None
    return output.loss


def _lora(model: nn.Module, **changes: object) -> nn.Module:
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    return get_peft_model(model, LoraConfig(**{**settings, **changes}))


@pytest.mark.parametrize(
    "build", [models.gpt2, models.llama, models.qwen2, models.qwen3, models.bert]
)
def test_transformers_models_match_eager_and_return_their_own_output_type(
    build: Callable[[], nn.Module],
) -> None:
    twins, ids = Twins(build()), models.token_batch()
    output = twins.assert_equal(input_ids=ids, labels=ids, loss=_loss)
    assert type(output).__module__.startswith("transformers.")
    assert output.logits.shape == (2, 12, models.VOCAB_SIZE)


def test_evaluation_with_a_key_value_cache_returns_the_cache() -> None:
    model, ids = models.llama(use_cache=True).eval(), models.token_batch()
    with torch.no_grad():
        ours, theirs = CompiledModule(model)(input_ids=ids), model(input_ids=ids)
    torch.testing.assert_close(ours.logits, theirs.logits)
    assert type(ours.past_key_values) is type(theirs.past_key_values)
    assert ours.past_key_values.get_seq_length() == ids.shape[1]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_of_transformers_matches_eager(use_reentrant: bool) -> None:
    model = models.llama(num_layers=2)
    # transformers 5.23 renamed it and warns about the old name, the only one that 5.17 has.
    known = hasattr(model, "activation_checkpointing_enable")
    enable = "activation_checkpointing_enable" if known else "gradient_checkpointing_enable"
    getattr(model, enable)({"use_reentrant": use_reentrant})
    twins, ids = Twins(model.train()), models.token_batch()
    if use_reentrant:
        twins.change(lambda m: m.enable_input_require_grads())
    twins.assert_equal(input_ids=ids, labels=ids, loss=_loss)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
def test_left_padding_matches_eager(attn_implementation: str) -> None:
    ids, mask = models.token_batch(), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    twins = Twins(models.llama(attn_implementation=attn_implementation))
    output = twins.assert_equal(input_ids=ids, attention_mask=mask, labels=ids, loss=_loss)
    assert output.logits.isfinite().all()


def test_bfloat16_weights_match_eager_to_bfloat16_rounding() -> None:
    ids = models.token_batch()
    Twins(models.llama().bfloat16()).assert_equal(
        input_ids=ids, labels=ids, loss=_loss, rtol=5e-2, atol=2e-2
    )


def test_bfloat16_autocast_matches_eager_to_bfloat16_rounding() -> None:
    ids = models.token_batch()
    with torch.autocast("cpu", torch.bfloat16):
        Twins(models.llama()).assert_equal(
            input_ids=ids, labels=ids, loss=_loss, rtol=5e-2, atol=2e-2
        )


def test_disable_adapter_and_back_are_noticed() -> None:
    twins, ids = Twins(_lora(models.llama())), models.token_batch()
    adapted = twins.assert_equal(input_ids=ids, labels=ids, loss=_loss)
    with twins.model.disable_adapter(), twins.eager.disable_adapter():  # type: ignore[operator]
        plain = twins.assert_equal(input_ids=ids, labels=ids)
    assert not torch.equal(adapted.loss, plain.loss)
    twins.assert_equal(input_ids=ids, labels=ids, loss=_loss)
    assert twins.num_captures == 2


class Alternating(nn.Module):
    """Linears of different sizes; every second one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (4, 5, 6, 7, 8)
        self.linears = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        for linear in self.linears[::2]:
            linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
        return x


def test_frozen_weights_cost_no_matrix_product_in_backward() -> None:
    """Two of four weights are trainable (2 products), and the gradient passes back through the last three (2 more)."""
    twins = Twins(Alternating())
    twins.assert_equal(torch.randn(3, 4), loss=weighted_sum)
    backward = twins.compiled.captures[0].backward_traces[-1]
    products = [b for b in backward.bound_symbols if b.sym.name in ("aten_mm", "aten_addmm")]
    assert len(products) == 2 + 2


def test_dora_equals_eager() -> None:
    model, ids = _lora(models.llama(), use_dora=True), models.token_batch()
    Twins(model).assert_equal(input_ids=ids, labels=ids, loss=_loss)


def test_lora_dropout_is_redrawn_and_reproducible() -> None:
    compiled = CompiledModule(_lora(models.llama(), lora_dropout=0.5).train())
    ids = models.token_batch()
    losses = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        losses.append(compiled(input_ids=ids, labels=ids).loss.item())
    assert losses[0] == losses[2] != losses[1]


def test_a_mixture_of_experts_with_a_custom_operator_equals_eager() -> None:
    skip_if_untraceable()
    ids = models.token_batch()
    Twins(models.mixtral()).assert_equal(input_ids=ids, labels=ids, loss=_loss)


def test_saved_tensors_are_freed_during_backward() -> None:
    """The backward trace deletes each saved tensor after its last use, not at the end."""
    twins, ids = Twins(models.llama()), models.token_batch()
    twins.assert_equal(input_ids=ids, labels=ids, loss=_loss)
    backward = twins.compiled.captures[0].backward_traces[-1]
    deletions = [i for i, b in enumerate(backward.bound_symbols) if b.sym.name == "python_del"]
    assert len(deletions) > 20
    assert deletions[0] < len(backward.bound_symbols) // 4


def test_what_the_planner_simulated_is_what_runs_and_is_not_made_twice() -> None:
    planner = MemoryPlanner(
        MemoryConfig(), device=device_at(torch.device("cpu")), budget_bytes=None
    )
    module, ids = CompiledModule(models.gpt2(), planner=planner), models.token_batch()
    split = "split_into_forward_and_backward"
    with patch.object(split_module, split, wraps=getattr(split_module, split)) as calls:
        module(input_ids=ids, labels=ids)
    assert calls.call_count == 1
    (planned,), (capture,) = planner.calls, module.captures
    traces = (capture.forward_traces[-1], capture.backward_traces[-1])
    ran = [b.sym.name for t in traces for b in t.bound_symbols]
    for step in planned.program.steps:
        assert step.op.symbol in (*ran, "accumulate_grad", "zeros")
    assert planned.program.num_forward > 10
