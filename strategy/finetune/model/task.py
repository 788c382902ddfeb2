"""The kinds of models that can be trained: their transformers class, and their name in peft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A kind of model; to support a second one, a key of the run file would select it."""

    description: str
    auto_class: Any
    peft_type: str


CAUSAL_LM = Task(
    description="causal language model",
    auto_class=transformers.AutoModelForCausalLM,
    peft_type="CAUSAL_LM",
)
