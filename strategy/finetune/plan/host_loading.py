"""Predicts the bytes of weights that each process holds on the host at once while a model is loaded or initialised."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from thunder_memsave.finetune.plan.planned_ranks import num_shards, ranks_per_node
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.planner.report.explain import in_units


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLoading:
    """The tensor, or module, of which a process holds the most while loading."""

    name: str
    num_bytes: int
    """A process holds these: its rows as the files have them, and converted, if they are of another dtype."""
    num_processes: int
    """A node has so many."""

    @property
    def sentence(self) -> str:
        """The line to print has the bytes and the tensor."""
        in_all = ""
        if self.num_processes > 1:
            in_all = f", {in_units(self.num_bytes * self.num_processes)} for the {self.num_processes} of a node"
        return (
            f"on the host, loading holds at most {in_units(self.num_bytes)} of weights for each process{in_all} "
            f"({self.name}), beside Python and its libraries"
        )


def host_loading(model: nn.Module, config: RunConfig, num_ranks: int) -> HostLoading:
    """Predict it for devices that are no CPUs, whose weights leave the host one after the other.

    Files are taken to have `model.dtype`. A rank reads its own rows of one tensor at a time (`materialize/fill.py`),
    also of weights that are then quantised. A module without files is whole while it is initialised.

    Args:
        model: As `describe_model` returns it.
        config: The run.
        num_ranks: The number of all ranks.
    """
    if config.model.config is not None:
        sizes = _of_modules(model)
    else:
        in_files = getattr(torch, config.model.dtype)
        sizes = _of_tensors(model, in_files, num_shards=num_shards(config.of_strategy, num_ranks))
    num_bytes, name = max(sizes, key=lambda size: size[0])
    return HostLoading(name=name, num_bytes=num_bytes, num_processes=ranks_per_node(num_ranks))


def _of_modules(model: nn.Module) -> Iterator[tuple[int, str]]:
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        yield sum(t.numel() * t.element_size() for t in own), name


def _of_tensors(
    model: nn.Module, in_files: torch.dtype, *, num_shards: int
) -> Iterator[tuple[int, str]]:
    for name, parameter in model.named_parameters():
        length = parameter.shape[0] if parameter.dim() else 1
        numel = -(-length // num_shards) * (parameter.numel() // max(length, 1))
        yield numel * sum(d.itemsize for d in {in_files, parameter.dtype}), name
