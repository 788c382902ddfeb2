"""The kinds of models that can be trained: their transformers class, and their name in peft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One kind of model; a second kind would be a key of the run file that names one of these."""

    description: str
    auto_class: Any
    peft_type: str


CAUSAL_LM = Task(
    description="causal language model",
    auto_class=transformers.AutoModelForCausalLM,
    peft_type="CAUSAL_LM",
)
