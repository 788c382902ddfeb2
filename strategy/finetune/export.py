"""Writes the trained model or adapter in the formats that transformers and peft load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
from lightning.fabric import Fabric
from torch import nn


def export(fabric: Fabric, module: nn.Module, tokenizer: Any, directory: Path) -> None:
    """Write what was trained, gathered from all ranks. A collective; rank 0 writes.

    Args:
        fabric: Launched.
        module: As `fabric.setup` returned it.
        tokenizer: Saved beside a whole model; an adapter uses its base model's.
        directory: Where to; overwritten.
    """
    model: Any = getattr(module, "module", module)
    weights = fabric.strategy.get_module_state_dict(module)
    if not fabric.is_global_zero:
        return
    model.save_pretrained(directory, state_dict=weights)
    if not isinstance(model, peft.PeftModel):
        tokenizer.save_pretrained(directory)
