"""A call that changes what its own guards read is compiled once, if the graph stays the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from thunder_memsave.compiler.compiled_module import CompiledModule


class Settings:
    kind: str | None = None


class ChoosesOnce(nn.Module):
    """Sets an attribute in its first call; `differs`: and computes something else afterwards."""

    def __init__(self, *, differs: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.settings = Settings()
        self.differs = differs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        if self.settings.kind is None:
            self.settings.kind = "chosen"
            return y
        return y.exp() if self.differs else y


@pytest.mark.parametrize("differs", [False, True])
def test_what_the_first_call_sets_is_captured_anew_only_if_the_graph_differs(differs: bool) -> None:
    torch.manual_seed(0)
    net, eager = ChoosesOnce(differs=differs), ChoosesOnce(differs=differs)
    eager.load_state_dict(net.state_dict())
    compiled, x = CompiledModule(net), torch.randn(2, 4)
    for _ in range(3):
        assert torch.equal(compiled(x), eager(x))
    assert len(compiled.captures) == (2 if differs else 1)
    net.settings.kind = "another"
    assert torch.equal(compiled(x), eager(x))


def test_a_classifier_that_chooses_its_loss_is_captured_once_with_the_bits_of_eager() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=16,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    net = BertForSequenceClassification(config)
    eager = BertForSequenceClassification(BertConfig(**config.to_dict()))
    eager.load_state_dict(net.state_dict())
    compiled, ids, labels = CompiledModule(net), torch.arange(8).view(2, 4), torch.tensor([0, 1])
    for _ in range(3):
        loss = compiled(ids, labels=labels).loss
        expected = eager(ids, labels=labels).loss
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
    for (name, p), q in zip(net.named_parameters(), eager.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        assert torch.equal(p.grad, q.grad), name
    assert len(compiled.captures) == 1
