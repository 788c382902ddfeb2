from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from harness.language_model import llama_config, rotary_flops_per_token
from thunder_memsave.callbacks.flops import training_flops

LENGTH, WIDTH, KV, HIDDEN, VOCAB, NUM_LAYERS, RANK = 16, 32, 16, 64, 320, 2, 4


def llama(device: str, *, lora: bool, tied: bool = False) -> Any:
    config = LlamaConfig(**{**llama_config(), "tie_word_embeddings": tied})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        if lora:
            adapter = peft.LoraConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
            model = peft.get_peft_model(model, adapter)
    return model


def call(model: Any, device: str) -> Any:
    ids = torch.zeros(1, LENGTH, dtype=torch.long, device=device)
    mask = torch.zeros(1, 1, LENGTH, LENGTH, device=device)
    return model(input_ids=ids, attention_mask=mask, position_ids=ids, use_cache=False).logits


def counted(*, lora: bool, tied: bool = False) -> int:
    model = llama("meta", lora=lora, tied=tied)
    return training_flops(model, lambda: call(model, "meta"))


# Weights in matrix products of one layer, and attention's FLOPs per token in forward.
LAYER = 2 * WIDTH * WIDTH + 2 * WIDTH * KV + 3 * WIDTH * HIDDEN
HEAD = WIDTH * VOCAB
ATTENTION = 4 * LENGTH * WIDTH * NUM_LAYERS


def test_full_fine_tuning_costs_three_times_the_forward() -> None:
    # The input of the first products comes from the embedding, which is trained.
    weights = NUM_LAYERS * LAYER + HEAD
    rotary = rotary_flops_per_token()
    assert counted(lora=False) == LENGTH * (6 * weights + 3 * ATTENTION + rotary)


def test_a_tied_head_is_a_product_though_the_embedding_is_not() -> None:
    assert counted(lora=False, tied=True) == counted(lora=False)


def test_frozen_weights_cost_two_times_the_forward() -> None:
    adapters = RANK * (2 * (WIDTH + WIDTH) + 2 * (WIDTH + KV) + 3 * (WIDTH + HIDDEN)) * NUM_LAYERS
    frozen = NUM_LAYERS * LAYER + HEAD
    # Nothing before the first adapters needs a gradient: neither q, k and v nor their A.
    no_grad_input = WIDTH * WIDTH + 2 * WIDTH * KV + 3 * RANK * WIDTH
    products = 4 * frozen + 6 * adapters - 2 * no_grad_input
    assert counted(lora=True) == LENGTH * (products + 3 * ATTENTION + rotary_flops_per_token())


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_count_is_that_of_a_real_step(lora: bool) -> None:
    model = llama("cpu", lora=lora)
    with FlopCounterMode(display=False) as counter:
        call(model, "cpu").sum().backward()
    assert counted(lora=lora) == counter.get_total_flops()


def test_counting_leaves_no_gradients_behind() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 2, bias=False)
    inputs = torch.zeros(3, 4, device="meta")
    assert training_flops(model, lambda: model(inputs)) == 2 * (2 * 3 * 4 * 2)
    assert model.weight.grad is None
