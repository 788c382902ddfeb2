"""DoRA is one graph, although peft asks for what Dynamo does not trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packaging.version import Version
from peft import LoraConfig, get_peft_model
from torch import nn

from harness.fabric import make_fabric
from thunder_memsave.compat import dora_weights


def adapted() -> Any:
    torch.manual_seed(0)
    # Not zeros: both factors get gradients.
    config = LoraConfig(r=2, target_modules=["0"], use_dora=True, init_lora_weights=False)
    return get_peft_model(nn.Sequential(nn.Linear(6, 5)), config)


@pytest.mark.skipif(
    not (2, 13) <= Version(torch.__version__).release[:2] < (2, 15),
    reason="Dynamo of torch 2.11 and of 2.15 traces the name of a class's module",
)
def test_canary_peft_cannot_be_captured() -> None:
    own, linear = dora_weights.upstream(), nn.Linear(6, 5)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="startswith"):
        torch.compile(lambda: own(linear) * 2, backend="eager", fullgraph=True)()


def test_it_is_one_graph_with_eagers_numbers() -> None:
    eager, model, x = adapted(), adapted(), torch.randn(3, 6)
    called = make_fabric(fullgraph=True).setup(model)
    results = []
    for each in (called, eager):
        result = each(x)
        result.square().sum().backward()
        results.append(result)
    torch.testing.assert_close(*results)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad)
