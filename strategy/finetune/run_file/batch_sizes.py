"""Computes global batch, micro-batch and accumulation: any two of the three give the third."""

from __future__ import annotations

from dataclasses import dataclass

from thunder_memsave.finetune.run_file.config import RunConfig, TrainConfig
from thunder_memsave.settings.problems import ConfigError

_DEFAULT_GLOBAL_BATCH_SIZE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchSizes:
    """`global_batch_size` is the product of the other two and the number of processes."""

    global_batch_size: int
    micro_batch_size: int
    gradient_accumulation_steps: int


def batch_sizes(train: TrainConfig, *, world_size: int) -> BatchSizes:
    """Compute the sizes that the run file leaves out; all values in it are positive.

    Raises:
        ConfigError: the three contradict each other, or the global batch cannot be divided evenly.
    """
    in_all, micro = train.global_batch_size, train.micro_batch_size
    accumulation = train.gradient_accumulation_steps
    if in_all is None:
        if accumulation is not None:
            micro = micro or 1
            in_all = micro * accumulation * world_size
        else:
            in_all = _DEFAULT_GLOBAL_BATCH_SIZE
    if micro is None:
        made_of = f"gradient_accumulation_steps {accumulation} x {_processes(world_size)}"
        micro = _exact(in_all, accumulation * world_size, made_of) if accumulation else 1
    if accumulation is None:
        made_of = f"micro_batch_size {micro} x {_processes(world_size)}"
        accumulation = _exact(in_all, micro * world_size, made_of)
    if micro * accumulation * world_size != in_all:
        raise ConfigError(
            f"train.global_batch_size is {in_all}, but micro_batch_size {micro} x "
            f"gradient_accumulation_steps {accumulation} x {_processes(world_size)} is "
            f"{micro * accumulation * world_size}; leave one of the three out.",
            key="train.global_batch_size",
        )
    return BatchSizes(
        global_batch_size=in_all, micro_batch_size=micro, gradient_accumulation_steps=accumulation
    )


def sizes_of(config: RunConfig, *, world_size: int) -> BatchSizes:
    """Compute the sizes of a run, of which one that updates in backward has no accumulation.

    Raises:
        ConfigError: as for `batch_sizes`; or backward would update the weights between micro-batches.
    """
    sizes = batch_sizes(config.train, world_size=world_size)
    steps = sizes.gradient_accumulation_steps
    if config.memory.optimizer_in_backward is True and steps > 1:
        raise ConfigError(
            f"memory.optimizer_in_backward is true, but a step accumulates the gradients of {steps} micro-batches, "
            "which are all there before the last one: no byte would be saved. Set train.gradient_accumulation_steps: 1 "
            "and leave global_batch_size out, or leave optimizer_in_backward out.",
            key="memory.optimizer_in_backward",
        )
    return sizes


def _processes(number: int) -> str:
    return f"{number} process{'' if number == 1 else 'es'}"


def _exact(in_all: int, share: int, made_of: str) -> int:
    if in_all % share:
        raise ConfigError(
            f"train.global_batch_size is {in_all}, which is not a multiple of {share} ({made_of}); "
            f"make it {in_all + share - in_all % share}, or change the others.",
            key="train.global_batch_size",
        )
    return in_all // share
