"""Models of transformers that record outputs of their parts are one graph, with eager's numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from harness.fabric import make_fabric
from thunder_memsave.compat import recorded_outputs
from thunder_memsave.errors import CaptureError

SIZES: dict[str, Any] = {
    **{"hidden_sizes": [8, 8, 8, 8], "depths": [1] * 4, "num_attention_heads": [1] * 4},
    **{"decoder_hidden_size": 8, "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0},
    **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3},
}


def segformer() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.SegformerConfig(**SIZES)
    return transformers.SegformerForSemanticSegmentation(config).train()


def step(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = model(pixel_values=images, labels=labels).loss
    loss.backward()
    return loss.detach()


def test_a_model_that_asks_for_hidden_states_is_one_graph() -> None:
    images, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 3, (2, 32, 32))
    model = segformer()
    eager = copy.deepcopy(model)
    expected = step(eager, images, labels)
    fabric = make_fabric(fullgraph=True)
    compiled = fabric.setup(model)
    torch.testing.assert_close(step(compiled, images, labels), expected, rtol=1e-6, atol=0)
    for theirs, ours in zip(eager.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_canary_upstream_still_installs_hooks_where_no_tracer_follows() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_outputs, "install_if_it_asks", lambda *_: False)
        fabric = make_fabric(fullgraph=True)
        compiled = fabric.setup(segformer())
        with pytest.raises(CaptureError, match="output_capturing"):
            compiled(pixel_values=torch.randn(2, 3, 32, 32))
