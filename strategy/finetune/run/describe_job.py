"""Describes what a run would do, for `thunder-memsave validate`."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thunder_memsave.finetune.data.sample_text import TRAINED_FROM, TRAINED_TO, describe_sample
from thunder_memsave.finetune.run.job import Job
from thunder_memsave.finetune.run_file.launch import world_size
from thunder_memsave.finetune.training.optimizer import states_of
from thunder_memsave.settings.fsspec_address import is_address

_WIDTH = 100
_NUM_TOKENS_SHOWN = 256
_FEW_STEPS = 30


def describe_job(job: Job) -> str:
    """Describe model, data, batches, steps, one sample and the place of the results."""
    facts = {
        "model": _model(job),
        **({} if job.fp8 is None else {"fp8": job.fp8}),
        **({} if job.in_bytes is None else {"frozen weights": job.in_bytes}),
        **_attention(job),
        "data": job.data.summary,
        "batch": _batch(job),
        "steps": _steps(job),
        "start": _start(job),
        "writes to": f"{job.directory.root}/",
    }
    lines = [_fact(name, text) for name, text in facts.items()]
    return "\n".join([*lines, "", *_sample(job), *_advice(job)])


def _attention(job: Job) -> dict[str, str]:
    length = job.config.data.max_seq_length
    if job.config.model.attn_implementation != "eager":
        return {}
    return {"attention": f"eager: where it has scores, {length:,} x {length:,} of each head"}


def card_facts(job: Job) -> dict[str, str]:
    """Return what the model card of the run's adapter says; no values that depend on where the run was."""
    config = job.config
    dataset = config.data.dataset
    path = (dataset.get("init_args") or {}).get("path", "")
    names = [_name_of_data(each) for each in (path if isinstance(path, list) else [path])]
    arguments = config.optimizer.get("init_args") or {}
    optimizer = config.optimizer["class_path"].rpartition(".")[2]
    if (states := states_of(config)) is not None:
        optimizer += f" with states in {states}"
    return {
        "trained weights": f"{job.num_trained_parameters:,} of {job.num_parameters:,}",
        "data": f"{', '.join(names)} ({dataset['class_path']}), {len(job.data.train):,} rows of "
        f"{config.data.max_seq_length:,} tokens",
        "steps": f"{_steps(job)}, {_count(job.batch_sizes.global_batch_size, 'row')} each",
        "optimizer": f"{optimizer}, learning rate {arguments.get('lr', 'its default')}, "
        f"{config.lr_scheduler.name} schedule",
        "number format": f"{config.model.dtype}, trained weights in {config.model.trainable_dtype}",
        "seed": str(config.train.seed),
    }


def _name_of_data(entry: Any) -> str:
    """Return the name of a file, or of a data set of the hub."""
    if isinstance(entry, Mapping):
        return str(entry.get("hub") or Path(str(entry.get("path", ""))).name)
    return Path(str(entry)).name


def _fact(name: str, text: str) -> str:
    first, *others = text.splitlines()
    return "\n".join([f"{name + ':':<11}{first}", *(f"{'':<11}{line}" for line in others)])


def _model(job: Job) -> str:
    num_trained, num_all = job.num_trained_parameters, job.num_parameters
    percent = 100 * num_trained / num_all
    return (
        f"{job.config.model.name_or_path}, {num_trained:,} of {num_all:,} parameters are trained "
        f"({percent:.3g} %)"
    )


def _start(job: Job) -> str:
    if is_address(job.config.resume):
        return f"from {job.config.resume}, which only `train` looks at"
    start = "from the beginning" if job.resume_from is None else str(job.resume_from.path)
    if job.config.resume == "auto" and job.config.checkpoint.copy_to is not None:
        return (
            f"{start}, unless `train` finds a newer checkpoint at {job.config.checkpoint.copy_to}"
        )
    return start


def _batch(job: Job) -> str:
    sizes = job.batch_sizes
    num_processes = world_size(job.config)
    return (
        f"{_count(sizes.global_batch_size, 'row')} per step = "
        f"{_count(sizes.micro_batch_size, 'row')} x "
        f"{_count(sizes.gradient_accumulation_steps, 'pass')} x "
        f"{_count(num_processes, 'process')}; "
        f"{sizes.global_batch_size * job.config.data.max_seq_length:,} tokens with padding"
    )


def _advice(job: Job) -> list[str]:
    """Say that a run trains hardly at all, if it takes few steps because its batches are large for its data."""
    if job.num_steps >= _FEW_STEPS or job.config.train.max_steps is not None:
        return []
    return [
        "",
        f"note: {_count(job.num_steps, 'step')} may be too few to learn from; a smaller train.global_batch_size "
        "or more train.epochs gives more.",
    ]


def _steps(job: Job) -> str:
    num_steps, per_epoch = job.num_steps, job.steps_per_epoch
    epochs_text = f"{num_steps / per_epoch:.3g}"
    noun = "epoch" if epochs_text == "1" else "epochs"
    return f"{num_steps:,} = {epochs_text} {noun} of {_count(per_epoch, 'step')}"


def _count(number: int, noun: str) -> str:
    plural = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number:,} {noun}{plural}"


def _sample(job: Job) -> list[str]:
    text = describe_sample(job.data.example, job.tokenizer, max_tokens=_NUM_TOKENS_SHOWN)
    heading = f"one sample; what stands in {TRAINED_FROM} {TRAINED_TO} is trained on:"
    lines = [heading, textwrap.indent(text, "    ", lambda line: True)]
    if job.data.rejected is not None:
        text = describe_sample(job.data.rejected, job.tokenizer, max_tokens=_NUM_TOKENS_SHOWN)
        lines += ["it is preferred to:", textwrap.indent(text, "    ", lambda line: True)]
    return lines
