"""Twenty steps on two ranks equal a plain PyTorch loop in one process on the same data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from harness.fabric import all_reduced, make_fabric, on_fabric_rank, run_on_fabric_ranks

NUM_RANKS = 2
SHARDING = ("zero2", "none")
NUM_STEPS = 20
NUM_MICRO_BATCHES = 3
MICRO_BATCH_SIZE = 2
SEQUENCE_LENGTH = 12
VOCABULARY = 101  # odd: the embedding is padded on the last rank
MAX_NORM = 0.5  # below the norms of the first steps: clipping really scales


class TiedModel(nn.Module):
    """A plain module with tied weights and dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 30)
        self.norm = nn.LayerNorm(30)
        self.up = nn.Linear(30, 45)
        self.dropout = nn.Dropout(0.0)
        self.down = nn.Linear(45, 30)
        self.head = nn.Linear(30, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(30, 30)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embedding(input_ids)
        x = x + self.down(self.dropout(nn.functional.gelu(self.up(self.norm(x)))))
        logits = self.head(x + self.frozen(x).tanh())
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE_LENGTH,
        n_embd=36,
        n_layer=2,
        n_head=4,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        use_cache=False,
    )
    return freeze(GPT2LMHeadModel(config), "h.0.attn")


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return freeze(LlamaForCausalLM(LlamaConfig(**decoder_sizes())), "q_proj")


def qwen() -> nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**decoder_sizes(), tie_word_embeddings=True)
    return freeze(Qwen2ForCausalLM(config), "layers.0")


def tied() -> nn.Module:
    return freeze(TiedModel(), "frozen")


def decoder_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 40,
        "intermediate_size": 53,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }


def freeze(model: nn.Module, part: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    assert any(not p.requires_grad for p in model.parameters())
    return model


def build(make_model: Callable[[], nn.Module]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = make_model().train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.AdamW(trainable, lr=1e-3, weight_decay=0.1)


def micro_batches() -> Iterator[Tensor]:
    """Return each step's micro-batches over all ranks; the same few recur, so that losses fall."""
    generator = torch.Generator().manual_seed(1)
    size = (4, NUM_MICRO_BATCHES, NUM_RANKS * MICRO_BATCH_SIZE, SEQUENCE_LENGTH)
    steps = torch.randint(VOCABULARY, size, generator=generator)
    for i in range(NUM_STEPS):
        yield steps[i % len(steps)]


def train_plainly(make_model: Callable[[], nn.Module]) -> list[float]:
    model, optimizer = build(make_model)
    losses = []
    for step in micro_batches():
        for batch in step:
            loss = model(input_ids=batch, labels=batch)["loss"]
            (loss / NUM_MICRO_BATCHES).backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_fabric_rank
def train_on_ranks(make_model: Callable[[], nn.Module], result: Path) -> None:
    for sharding in SHARDING:
        fabric = make_fabric(devices=NUM_RANKS, sharding=sharding)
        losses = train(fabric, *fabric.setup(*build(make_model)))
        if fabric.is_global_zero:
            (result / sharding).write_text(json.dumps(losses))


def train(fabric: Fabric, model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in micro_batches():
        for i, batch in enumerate(step):
            rows = batch[fabric.global_rank :: NUM_RANKS]
            with fabric.no_backward_sync(model, enabled=i < NUM_MICRO_BATCHES - 1):
                loss = model(input_ids=rows, labels=rows)["loss"]
                fabric.backward(loss / NUM_MICRO_BATCHES)
            losses.append(all_reduced(fabric, loss.detach()).item())
        fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("make_model", [gpt2, llama, qwen, tied])
def test_losses_equal_a_single_process_loop(
    make_model: Callable[[], nn.Module], tmp_path: Path
) -> None:
    run_on_fabric_ranks(train_on_ranks, NUM_RANKS, make_model, tmp_path)
    expected = train_plainly(make_model)
    assert len(expected) == NUM_STEPS * NUM_MICRO_BATCHES
    assert expected[-1] < expected[0] - 0.1
    for sharding in SHARDING:
        losses = json.loads((tmp_path / sharding).read_text())
        # Float32 sums in another order: 1e-5 is a hundred roundings.
        assert losses == pytest.approx(expected, rel=1e-5)
