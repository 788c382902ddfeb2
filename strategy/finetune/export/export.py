"""Writes the trained model or adapter in the formats that transformers and peft load."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import peft
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from thunder_memsave.callbacks.all_ranks import DiskError, on_all_ranks
from thunder_memsave.checkpoints import unsharded_state_dict
from thunder_memsave.finetune.export.model_card import write_card
from thunder_memsave.fp8.compute.linears import is_scaling_state
from thunder_memsave.strategy import ThunderMemsaveStrategy


def export(
    fabric: Fabric,
    module: nn.Module,
    tokenizer: Any,
    directory: Path,
    *,
    card: Mapping[str, str] | None = None,
) -> None:
    """Write the trained weights, gathered from all ranks. A collective; rank 0 writes.

    Of a model with an adapter, only what peft saves is gathered. The fp8 scaling state is not exported.

    Args:
        fabric: Launched.
        module: The result of `fabric.setup`.
        tokenizer: Saved beside the weights, also of an adapter, so that its directory is all that a server needs;
            None saves none.
        directory: Directory to write, overwritten if it exists.
        card: Facts of the run for an adapter's model card; None leaves peft's own.

    Raises:
        DiskError: the disk refused it; on all ranks.
        CheckpointError: rank 0 could not write for another reason, which rank 0 itself raises.
    """
    assert isinstance(fabric.strategy, ThunderMemsaveStrategy)
    model: Any = getattr(module, "module", module)
    data_parallel = fabric.strategy.data_parallel
    is_adapter = is_adapted(model)
    wanted = saved_by_peft(model) if is_adapter else None
    weights = unsharded_state_dict(
        model,
        data_parallel,
        rank_zero_only=True,
        names=lambda name: not is_scaling_state(name) and (wanted is None or wanted(name)),
    )

    def write() -> None:
        save_as_peft_does(model, directory, weights)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        if is_adapter and card is not None:
            write_card(directory, card)

    try:
        on_all_ranks(fabric, write if fabric.is_global_zero else lambda: None)
    except DiskError as error:
        raise type(error)(
            f"what was trained could not be written to {directory} ({error}). See that the disk has space and may be "
            "written to, and start the run again with --resume=auto, which writes it from the last checkpoint."
        ) from error


def save_as_peft_does(model: Any, directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write the files of a model or adapter as its own `save_pretrained` does.

    peft asks the base model's config whether the vocabulary was changed, which no run does, and warns if it is neither
    in a directory nor on the hub.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Could not find a config file in")
        model.save_pretrained(directory, state_dict=weights)


def is_adapted(model: nn.Module) -> bool:
    """Tell whether a model has adapters of peft, so that only these are exported."""
    return isinstance(model, peft.PeftModel)


def saved_by_peft(model: Any) -> Callable[[str], bool]:
    """Return a predicate for the names that peft saves; peft itself is asked, as it knows all parts of an adapter."""
    placeholders = {name: torch.empty(0) for name in model.state_dict(keep_vars=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns again when it saves
        saved = {
            id(placeholder)
            for adapter in model.peft_config
            for placeholder in peft.get_peft_model_state_dict(
                model, state_dict=placeholders, adapter_name=adapter
            ).values()
        }
    return lambda name: id(placeholders[name]) in saved
