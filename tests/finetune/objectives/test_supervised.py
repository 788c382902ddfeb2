"""Supervised fine-tuning as the loop and planning see it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from harness.language_model import sample_of
from thunder_memsave.finetune.data.packing import pack
from thunder_memsave.finetune.model.documents_apart import MaskKind
from thunder_memsave.finetune.objectives.supervised import SupervisedFineTuning, perplexity
from thunder_memsave.finetune.plan.plan_run import _inputs


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (1e4, math.inf), (math.inf, math.inf)])
def test_a_perplexity_that_is_too_large_is_infinite(loss: float, expected: float) -> None:
    assert perplexity(loss) == expected


@pytest.mark.parametrize("mask", ["none", "boundaries", "additive"])
def test_planning_calls_the_model_with_what_the_loop_does(mask: MaskKind) -> None:
    objective = SupervisedFineTuning(mask=mask, length=8, num_documents=2)
    rows = pack([sample_of([4, 5, 6]), sample_of([7, 8])], length=8, pad_id=0, seed=0)
    given = objective.model_inputs(rows.lay_out([0, None]))
    planned = _inputs(objective, num_rows=2)
    assert planned.keys() == given.keys()
    for name, value in given.items():
        if isinstance(value, Tensor):
            assert (planned[name].shape, planned[name].dtype) == (value.shape, value.dtype)
            assert planned[name].untyped_storage().nbytes() == 0
        else:
            assert planned[name] is value


def test_the_loss_weighs_as_many_tokens_as_are_trained_on() -> None:
    rows = pack([sample_of([4, 5, 6]), sample_of([7, 8])], length=8, pad_id=0, seed=0)
    objective = SupervisedFineTuning(mask="additive", length=8)
    assert int(objective.weight(rows.lay_out([0]))) == 3
    assert int(objective.weight(rows.lay_out([None, None]))) == 0
    nothing = torch.zeros(2, 8, 11)
    assert float(objective.loss(_Output(nothing), rows.lay_out([None, None]))) == 0.0


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
