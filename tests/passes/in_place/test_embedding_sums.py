"""Gradients of embeddings are added to those of heads that share their weights, with the same bits and less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from harness.memory import measured_peak_bytes
from harness.models import llama, token_batch
from harness.predicted_peaks import predicted_of_capture
from thunder_memsave.compiler.compiled_module import CompiledModule
from thunder_memsave.config import CompileConfig
from thunder_memsave.ops.families.embedding_gradient import add_embedding_gradient

ROWS, WIDTH = 600, 8
STEP = "add_embedding_gradients"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("padding", [-1, 0, 3, ROWS - 1])
def test_each_row_has_the_bits_of_the_whole_gradient(
    dtype: torch.dtype, scales: bool, padding: int
) -> None:
    made = torch.Generator().manual_seed(padding + 1)
    for num_ids, most in ((1, ROWS), (50, 6), (500, ROWS), (500, 1)):
        ids = torch.randint(0, most, (2, num_ids), generator=made)
        ids[0, 0], ids[1, -1] = ROWS - 1, 0
        grad = torch.randn(2, num_ids, WIDTH, generator=made).to(dtype)
        total = torch.randn(WIDTH, ROWS, generator=made).to(dtype).T  # as a product leaves it
        whole = torch.ops.aten.embedding_dense_backward(grad, ids, ROWS, padding, scales)
        assert torch.equal(
            add_embedding_gradient(total.clone(), grad, ids, padding, scales), total + whole
        )
        as_int32 = add_embedding_gradient(total.clone(), grad, ids.int(), padding, scales)
        assert torch.equal(as_int32, total + whole)


class Tied(nn.Module):
    """Embeddings and a head that share a weight, as `how` says, on both sides of a layer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=2)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.embedding.weight
        x = self.layer(self.embedding(ids)).tanh()
        if self.how == "two embeddings":
            return x.square().sum() + (x * self.embedding(ids.flip(0))).sum()
        if self.how == "expanded":  # the other gradient is one row, seen as all
            return x.square().sum() + (weight.sum(0) * x).sum()
        if self.how == "returned too":
            return (x @ weight.T).square().sum() + (weight * x.mean((0, 1))).sum()
        return (x @ weight.T).logsumexp(-1).sum()


HOWS = ("head", "two embeddings", "expanded", "returned too")


def gradients(model: nn.Module, leave_out: tuple[str, ...], *arguments: Any, **named: Any) -> Any:
    """Return the gradients of two backwards of one step, and the names of what backward runs."""
    compiled = CompiledModule(model, config=CompileConfig(leave_out=leave_out))
    model.zero_grad()
    result = compiled(*arguments, **named)
    loss = result if isinstance(result, Tensor) else result.loss
    loss.backward(retain_graph=True)
    loss.backward()
    (capture,) = compiled.captures
    names = [b.sym.name for b in capture.backward_traces[-1].bound_symbols]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], names


@pytest.mark.parametrize("how", HOWS)
def test_gradients_have_the_same_bits(how: str) -> None:
    model = Tied(how)
    ids = torch.randint(0, ROWS, (4, 9), generator=torch.Generator().manual_seed(0))
    found, names = gradients(model, (), ids)
    plain, others = gradients(model, (STEP,), ids)
    assert all(map(torch.equal, found, plain))
    assert names.count("add_embedding_gradient") == (how != "expanded")
    assert "add_embedding_gradient" not in others


def test_as_many_tokens_as_rows_get_a_whole_gradient() -> None:
    ids = torch.zeros(1, ROWS, dtype=torch.int64)
    _, names = gradients(Tied("head"), (), ids)
    assert "add_embedding_gradient" not in names


def test_encoder_and_decoder_add_to_the_gradient_of_their_head() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": ROWS, "d_model": 16, "d_ff": 16, "num_layers": 1}
    sizes |= {"num_heads": 2, "d_kv": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0}
    config = T5Config(**sizes, use_cache=False)
    model = T5ForConditionalGeneration(config)
    ids = torch.arange(4, 24).view(2, 10)
    found, names = gradients(model, (), input_ids=ids, labels=ids)
    plain, _ = gradients(model, (STEP,), input_ids=ids, labels=ids)
    assert all(map(torch.equal, found, plain))
    assert names.count("add_embedding_gradient") == 2


def test_a_head_in_bfloat16_waits_for_its_embedding_and_the_peak_is_as_predicted(
    tmp_path: Path,
) -> None:
    model = llama(vocab_size=40_000, tie_word_embeddings=True)
    ids = token_batch(1, 2)
    peaks, found = {}, {}
    for leave_out in ((), (STEP,)):
        compiled = CompiledModule(model, config=CompileConfig(leave_out=leave_out))

        def step(compiled: CompiledModule = compiled) -> None:
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                output = compiled(input_ids=ids, labels=ids)  # holds the logits during backward
            output.loss.backward()

        step()
        model.zero_grad()
        (capture,) = compiled.captures
        peaks[leave_out] = measured_peak_bytes(step)
        assert peaks[leave_out] == predicted_of_capture(capture, directory=tmp_path)
        found[leave_out] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        names = [b.sym.name for b in capture.backward_traces[-1].bound_symbols]
        if not leave_out:
            before = names[: names.index("add_embedding_gradient")]
            assert [n for n in before if n != "python_del"][-1] == "to"
    assert all(map(torch.equal, found[()], found[(STEP,)]))
    nbytes = model.get_parameter("model.embed_tokens.weight").nbytes
    # The head's gradient of half the bytes is in the place of the embedding's; on CPUs whose products of bfloat16 take
    # scratch memory, another moment holds a little more than that one.
    assert 0.9 * (nbytes // 2) < peaks[(STEP,)] - peaks[()] <= nbytes // 2
