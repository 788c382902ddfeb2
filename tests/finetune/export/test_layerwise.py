"""A model that runs layer by layer has one layer in memory, and the logits of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from harness.language_model import llama_config
from harness.mxfp4_tensors import gpt_oss
from thunder_memsave.finetune.export.layerwise import logits_of
from thunder_memsave.finetune.export.verified_export import _on_meta

IDS = torch.tensor([[3, 1, 4, 1, 5]])


def make(*, tied: bool) -> Any:
    config = {**llama_config(), "num_hidden_layers": 4, "tie_word_embeddings": tied}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config)).eval()


def num_filled(model: Any) -> int:
    """Count the layers that have any tensor in memory."""
    return sum(any(not p.is_meta for p in layer.parameters()) for layer in model.model.layers)


@pytest.mark.parametrize("tied", [False, True])
def test_one_layer_at_a_time_gives_the_logits_of_all(tied: bool) -> None:
    whole, model = make(tied=tied), _on_meta(make(tied=tied).config)
    weights, most = whole.state_dict(), 0

    def read(name: str) -> Tensor:
        nonlocal most
        most = max(most, num_filled(model))
        return weights[name]

    ours = logits_of(model, IDS, read)
    assert most == 1
    assert num_filled(model) == 0
    assert all(p.is_meta for p in model.parameters())
    assert ours.dtype == torch.float64
    with torch.no_grad():
        theirs = whole.double()(input_ids=IDS).logits
    assert torch.equal(ours, theirs)


def test_experts_of_a_mixture_are_called_in_turn_in_float64() -> None:
    """Grouped products, which its config asks for, know no float64."""
    torch.manual_seed(0)
    whole: Any = gpt_oss()
    model: Any = _on_meta(whole.config)
    weights = whole.state_dict()
    ours = logits_of(model, IDS, weights.__getitem__)
    assert model.config._experts_implementation == "grouped_mm"
    with torch.no_grad():
        theirs = whole(input_ids=IDS).logits
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-4, atol=1e-5)


def test_a_failure_leaves_the_model_on_meta() -> None:
    model = _on_meta(make(tied=False).config)
    weights = make(tied=False).state_dict()

    def read(name: str) -> Tensor:
        if name.startswith("model.layers.2"):
            raise OSError("gone")
        return weights[name]

    with pytest.raises(OSError, match="gone"):
        logits_of(model, IDS, read)
    assert all(p.is_meta for p in model.parameters())


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("made", torch.empty(2, device="meta"), persistent=False)


def test_a_constant_that_nobody_makes_is_named() -> None:
    message = r"^nothing says what the buffer made starts as; such a model cannot be run layer"
    with pytest.raises(ValueError, match=message):
        logits_of(Unknown(), IDS, lambda name: torch.zeros(2))
