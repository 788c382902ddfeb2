"""Describes in a few lines which weights of a run are in fewer bits than the others, and why others are not."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import world_size
from thunder_memsave.fp8.compute.backends import choose_backend
from thunder_memsave.fp8.compute.linears import choose_linears, frozen_in_fp8
from thunder_memsave.fp8.recipe import refuse_own_scales
from thunder_memsave.fp8.weights.layers import Choice, by_reason, shown
from thunder_memsave.stored_weights.formats import format_named
from thunder_memsave.stored_weights.in_bytes import FrozenInBytes

_NUM_CHOSEN, _NUM_OTHERS = 8, 2

# PEFT adds these around a linear's name; they do not tell linears apart.
_OF_PEFT = ("base_model.model.", ".base_layer")


def fp8_shown(config: RunConfig, model: nn.Module) -> str | None:
    """Return a line on the linears in fp8, and one for each reason why others are not; None if fp8 is off.

    Raises:
        ConfigError: no linear would compute in fp8, this machine cannot, its ranks would scale differently, or
            there are no frozen weights to keep in fp8.
    """
    fp8 = config.fp8
    if fp8 is None:
        return None
    refuse_own_scales(fp8, num_ranks=world_size(config))
    choices = choose_linears(model, fp8)
    backend = choose_backend(fp8, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    lines = describe_choices(choices, recipe=fp8.recipe, backend=backend)
    frozen = frozen_in_fp8(model, fp8, data_parallel=None)
    return lines if frozen is None else f"{lines}\n{len(frozen)} frozen weights kept in fp8 alone"


def bytes_shown(config: RunConfig, model: nn.Module) -> str | None:
    """Return a line on the frozen weights that are kept in a format of bytes; None if there are to be none.

    Raises:
        ConfigError: no weight would be kept so.
    """
    if config.model.frozen_weights is None:
        return None
    kept_in = format_named(config.model.frozen_weights)
    frozen = FrozenInBytes(model, kept_in, data_parallel=None)
    line = f"{len(frozen)} frozen weights kept in {frozen.num_bytes:,} bytes ({kept_in.title})"
    if not frozen.others:
        return line
    named = shown(_kinds(frozen.others), _NUM_OTHERS)
    return f"{line}, not {len(frozen.others)} ({named}): inputs are no multiple of {kept_in.block}"


def describe_choices(choices: Sequence[Choice], *, recipe: str, backend: str) -> str:
    """Write the lines; linears that differ only by the number of their layer are named once."""
    chosen, others = by_reason(choices)
    first = f"{len(chosen)} of {len(choices)} linears, {recipe} scaling by {backend}"
    lines = [f"{first} ({shown(_kinds(chosen), _NUM_CHOSEN)})"]
    for reason, names in others.items():
        lines.append(f"not {len(names)} ({shown(_kinds(names), _NUM_OTHERS)}): {reason}")
    return "\n".join(lines)


def _kinds(names: Sequence[str]) -> list[str]:
    """Return the distinct kinds of these linears."""
    return list(dict.fromkeys(map(_kind, names)))


def _kind(name: str) -> str:
    """Return the part of a name after the layer's number, which tells kinds of linears apart."""
    *_, last = re.split(r"\.\d+\.", name.removeprefix(_OF_PEFT[0]))
    return last.removesuffix(_OF_PEFT[1])
