"""DoRA on stored weights takes the steps of peft on the dequantised ones, and its adapter loads in peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave import load_on_setup
from thunder_memsave.finetune.export.export import export
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.formats import format_named

NUM_STEPS, VOCABULARY = 10, 64
FORMATS = pytest.mark.parametrize("name", ["nf4", "int8"])


def base() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def filled() -> Any:
    torch.manual_seed(0)
    return base()


def dequantised(kept_in: StoredFormat) -> Any:
    model = filled()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = kept_in.round_trip(module.weight, name=name)
    return model


def adapted(model: nn.Module, **settings: Any) -> Any:
    config = LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=True
    )
    return get_peft_model(model, config, **settings).train()


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def batch(rank: int, number: int) -> dict[str, Tensor]:
    """Return rows that count in threes."""
    generator = torch.Generator().manual_seed(10 * number + rank)
    first = torch.randint(0, VOCABULARY, (2, 1), generator=generator)
    ids = (first + 3 * torch.arange(16)) % VOCABULARY
    return {"input_ids": ids, "labels": ids}


def set_up(fabric: Any, path: Path) -> tuple[Any, Any]:
    """Read the base from files while the adapter is on it, as `train` does."""
    with fabric.init_module(empty_init=True):
        model = base()
    load_on_setup(model, path)
    model = adapted(model, low_cpu_mem_usage=True)
    return fabric.setup(model, torch.optim.AdamW(trained(model).values(), lr=1e-2))


def peft_from(start: dict[str, Tensor], kept_in: StoredFormat) -> Any:
    """Return peft's model on the dequantised base, with the same start of A and B; magnitudes are its own."""
    model = adapted(dequantised(kept_in))
    for name, p in trained(model).items():
        if "magnitude" in name:
            assert torch.equal(start[name], p), name
        p.data.copy_(start[name])
    return model


def steps_of_peft(model: Any, num_ranks: int) -> list[list[float]]:
    optimizer = torch.optim.AdamW(trained(model).values(), lr=1e-2)
    found = []
    for number in range(NUM_STEPS):
        losses = [model(**batch(rank, number)).loss for rank in range(num_ranks)]
        torch.stack(losses).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append([loss.item() for loss in losses])
    return found


def check_steps(num_ranks: int, sharding: str, kept_in: StoredFormat, directory: Path) -> None:
    fabric = make_fabric(
        devices=num_ranks, sharding=sharding, frozen_weights=kept_in.name, timeout="2min"
    )
    path = fabric.broadcast(directory) / "model.safetensors"
    if fabric.global_rank == 0:
        save_file(filled().state_dict(), path)
    fabric.barrier()
    module, optimizer = set_up(fabric, path)
    start = {n: t.clone() for n, t in fabric.strategy.get_module_state_dict(module).items()}
    reference = peft_from(start, kept_in)
    expected = steps_of_peft(reference, num_ranks)
    assert expected[-1][0] < 0.95 * expected[0][0], "nothing is learned, so nothing is shown"
    for number, theirs in enumerate(expected):
        loss = module(**batch(fabric.global_rank, number)).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        assert loss.item() == pytest.approx(theirs[fabric.global_rank], rel=1e-5), number
    assert len(module._forward_module.captures) == 1
    whole = fabric.strategy.get_module_state_dict(module)
    for name, p in trained(reference).items():
        # AdamW divides by roots of tiny second moments, so the last bits of gradients are larger in a step.
        torch.testing.assert_close(whole[name], p.detach(), rtol=1e-3, atol=1e-4, msg=name)
    check_export(fabric, module, kept_in, directory)


def check_export(fabric: Any, module: Any, kept_in: StoredFormat, directory: Path) -> None:
    out = fabric.broadcast(directory) / "adapter"
    export(fabric, module, None, out)
    loaded = PeftModel.from_pretrained(dequantised(kept_in), out)
    with torch.no_grad():
        found, expected = (each.eval()(**batch(0, 99)).logits for each in (module, loaded))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@FORMATS
def test_ten_steps_and_an_export_on_one_rank(name: str, tmp_path: Path) -> None:
    check_steps(1, "none", format_named(name), tmp_path)


@on_fabric_rank
def check_two_ranks(name: str, directory: Path) -> None:
    check_steps(2, "zero3", format_named(name), directory)


@FORMATS
def test_ten_steps_and_an_export_on_two_ranks(name: str, tmp_path: Path) -> None:
    run_on_fabric_ranks(check_two_ranks, 2, name, tmp_path)


def test_the_norm_and_the_product_each_read_a_dequantised_weight() -> None:
    """Or one of its own, where other operations lie between; backward reads a frozen weight's copy of forward."""
    fabric = make_fabric(sharding="none", frozen_weights="int8", fullgraph=True)
    module = fabric.setup(adapted(filled()))
    module(**batch(0, 0)).loss.backward()
    (compiled,) = module._forward_module.captures
    symbols = compiled.forward_traces[-1].bound_symbols
    made = [b for b in symbols if b.sym.name == "int8_dequantized"]
    num_frozen, num_adapted = 7, 3
    assert len(made) == num_frozen + num_adapted, len(made)
