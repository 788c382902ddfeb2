"""Supervised fine-tuning as the loop and planning see it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from harness.language_model import sample_of
from thunder_memsave.finetune.data.packing import pack
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.choose import objective_of
from thunder_memsave.finetune.objectives.loss_in_model import call_inputs
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning, perplexity
from thunder_memsave.finetune.plan.plan_run import _inputs
from thunder_memsave.finetune.run_file.reading.parse import load_run_config

SHIPPED = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (1e4, math.inf), (math.inf, math.inf)])
def test_a_perplexity_that_is_too_large_is_infinite(loss: float, expected: float) -> None:
    assert perplexity(loss) == expected


@pytest.mark.parametrize(("graphs", "counts"), [("false", True), ("auto", False), ("true", False)])
def test_a_loss_in_a_cuda_graph_asks_the_host_for_no_number(graphs: str, counts: bool) -> None:
    config = load_run_config(SHIPPED / "tiny_pretrain.yaml", [f"--strategy.cuda_graphs={graphs}"])
    objective = objective_of(config)
    batch = objective.blank(2)
    assert ("num_targets" in objective.loss_inputs(batch)) is counts
    batch.targets[0, :3] = 1
    logits = torch.randn(*batch.targets.shape, 7)
    targets = batch.targets.flatten()
    expected = cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    batch.num_targets.fill_(3)
    found = objective.loss(SimpleNamespace(logits=logits), **objective.loss_inputs(batch))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("mask", ["none", "boundaries", "additive"])
def test_planning_calls_the_model_with_what_the_loop_does(mask: MaskKind) -> None:
    objective = SupervisedFineTuning(mask=mask, length=8, num_documents=2)
    rows = pack([sample_of([4, 5, 6]), sample_of([7, 8])], length=8, pad_id=0, seed=0)
    given = call_inputs(objective, rows.lay_out([0, None]))
    planned = _inputs(objective, num_rows=2)
    assert planned.keys() == given.keys()
    for part, arguments in given.items():
        assert planned[part].keys() == arguments.keys()
        for name, value in arguments.items():
            of_plan = planned[part][name]
            if isinstance(value, Tensor):
                assert (of_plan.shape, of_plan.dtype) == (value.shape, value.dtype)
                # Dynamo reads scalars.
                assert of_plan.untyped_storage().nbytes() == (0 if value.ndim else value.nbytes)
            else:
                assert of_plan is value


def test_the_loss_weighs_as_many_tokens_as_are_trained_on() -> None:
    rows = pack([sample_of([4, 5, 6]), sample_of([7, 8])], length=8, pad_id=0, seed=0)
    objective = SupervisedFineTuning(mask="additive", length=8)
    assert int(objective.weight(rows.lay_out([0]))) == 3
    assert int(objective.weight(rows.lay_out([None, None]))) == 0
    output, inputs = _Output(torch.zeros(2, 8, 11)), objective.loss_inputs(rows.lay_out([None] * 2))
    assert float(objective.loss(output, **inputs)) == 0.0


def test_a_model_whose_flops_cannot_be_counted_is_trained_without_mfu() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    with torch.device("meta"):  # its distances come from a mask of two dimensions
        architecture = AutoConfig.for_model("falcon", alibi=True, **sizes)
        model = AutoModelForCausalLM.from_config(architecture)
    objective = SupervisedFineTuning(mask="none", length=16)
    with pytest.warns(UserWarning, match="no MFU, because the FLOPs of a FalconForCausalLM cannot"):
        assert objective.flops_per_token(model) is None


class _Output:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
