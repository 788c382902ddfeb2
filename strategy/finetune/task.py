"""What a kind of model decides: its transformers class, its name in peft, its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor

from thunder_memsave.finetune.loss import loss_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One kind of model; a second kind would be a key of the run file that names one of these."""

    description: str
    auto_class: Any
    peft_type: str
    loss_sum: Callable[..., Tensor]
    """From the model, a batch and the mask's kind to a sum over targets."""


CAUSAL_LM = Task(
    description="causal language model",
    auto_class=transformers.AutoModelForCausalLM,
    peft_type="CAUSAL_LM",
    loss_sum=loss_sum,
)
