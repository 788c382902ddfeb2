"""LoRA on weights in 4 bits over two ranks takes the steps of transformers and peft on the dequantised weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.stored_weights.nf4.numbers import dequantize, quantize

NUM_RANKS, NUM_STEPS, VOCABULARY = 2, 20, 64
FROZEN = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def base() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def adapted(model: nn.Module) -> Any:
    torch.manual_seed(1)
    targets = ["q_proj", "v_proj", "down_proj"]
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=targets)).train()


def dequantised() -> nn.Module:
    """Return the model with the numbers that its frozen linears have after 4 bits."""
    model = base()
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in FROZEN:
            stored = quantize(module.weight, name=name)
            module.weight.data = dequantize(stored, module.weight.shape, torch.float32)
    return model


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def batch(rank: int, number: int) -> dict[str, Tensor]:
    """Return rows that count in threes."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    first = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    ids = (first + 3 * torch.arange(16)) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def steps_of_peft(model: nn.Module) -> list[list[float]]:
    """Return the losses of all ranks' batches, step by step, of one process without this package."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    found = []
    for number in range(NUM_STEPS):
        losses = [model(**batch(rank, number)).loss for rank in range(NUM_RANKS)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([float(loss) for loss in losses])
    return found


@on_fabric_rank
def check_steps() -> None:
    expected = steps_of_peft(adapted(dequantised()))
    assert expected[-1][0] < 0.9 * expected[0][0], "nothing is learned, so nothing is shown"
    for sharding in ("zero2", "zero3"):
        fabric = make_fabric(
            devices=NUM_RANKS, sharding=sharding, frozen_weights="nf4", timeout="2min"
        )
        model = adapted(base())
        module, optimizer = fabric.setup(model, torch.optim.AdamW(trained(model), lr=1e-2))
        for number in range(NUM_STEPS):
            loss = module(**batch(fabric.global_rank, number)).loss
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            theirs = expected[number][fabric.global_rank]
            assert abs(float(loss) - theirs) <= 1e-5 * theirs, (
                sharding,
                number,
                float(loss),
                theirs,
            )


def test_twenty_steps_are_those_of_one_process_of_transformers_and_peft() -> None:
    run_on_fabric_ranks(check_steps, NUM_RANKS)
