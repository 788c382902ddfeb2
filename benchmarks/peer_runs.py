"""Trains a small Llama through one tool for some steps, and writes each step's CPU time, the loss and a step's peak.

    python benchmarks/peer_runs.py TOOL DIRECTORY [BUDGET]     # `peers.py` does, once for each tool and round

Every tool trains the same model in DIRECTORY on the same rows, in float32 on one CPU thread, with AdamW, clipping and a
constant learning rate. All rows are one batch, so that no tool's order of rows matters.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

LEARNING_RATE = 1e-3
MAX_GRAD_NORM = 1.0
LITGPT = "litgpt"
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained, and where its files are."""

    directory: Path
    has_adapter: bool
    """LoRA on all linear layers; otherwise all weights are trained."""
    num_rows: int
    length: int
    num_steps: int
    """The last one is profiled, and its time does not count."""

    @classmethod
    def read(cls, directory: Path) -> Task:
        """Read it from the directory in which `write` has put it."""
        return cls(directory=directory, **json.loads((directory / "task.json").read_text()))

    @property
    def rows(self) -> list[list[int]]:
        """Token numbers of each row."""
        lines = (self.directory / "rows.jsonl").read_text().splitlines()
        return [json.loads(line)["input_ids"] for line in lines]


class Seen:
    """Notes the end of each step; the tools' callbacks call it."""

    def __init__(self, num_steps: int) -> None:
        self._num_steps, self._stack = num_steps, ExitStack()
        self._profile: profile | None = None
        self.times = [time.process_time()]
        self.losses: list[float] = []
        self.peak_bytes = 0

    def starts(self, step: int) -> None:
        """Begin a step; they are counted from 1."""
        if step == self._num_steps:
            gc.collect()
            self.peak_bytes = _live_bytes()
            self._profile = self._stack.enter_context(
                profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)
            )

    def ends(self, step: int) -> None:
        """End a step, after the update."""
        self.times.append(time.process_time())
        if step == self._num_steps:
            self._stack.close()
            assert self._profile is not None
            self.peak_bytes += _profiled_peak_bytes(self._profile)

    def as_dict(self) -> dict[str, Any]:
        """Return what is written."""
        seconds = [
            after - before for before, after in zip(self.times, self.times[1:], strict=False)
        ]
        return {
            "first_s": seconds[0],
            "steps_s": seconds[1:-1],
            "losses": self.losses,
            "peak_bytes": self.peak_bytes,
        }


def _live_bytes() -> int:
    """Return the bytes of all tensors that there are: weights, states of the optimizer, and what else a tool keeps."""
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter) and each.device.type == "cpu":
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _profiled_peak_bytes(seen: profile) -> int:
    assert seen.profiler is not None
    assert seen.profiler.kineto_results is not None
    found: list[Any] = seen.profiler.kineto_results.events()
    events = [e for e in found if e.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return int(peak)


def _model(task: Task) -> nn.Module:
    """Return the model, with an adapter if the task has one."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        task.directory / "model", dtype=torch.float32
    )
    if not task.has_adapter:
        return model
    torch.manual_seed(0)
    adapter: Any = LoraConfig(task_type="CAUSAL_LM", **LORA)  # type: ignore[arg-type]
    adapted: nn.Module = get_peft_model(model, adapter)
    return adapted


def _with_trainer(
    task: Task,
    seen: Seen,
    *,
    of_trl: bool = False,
    checkpointing: bool = False,
    compiles: bool = False,
) -> None:
    from datasets import Dataset
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Watching(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.starts(state.global_step + 1)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen.ends(state.global_step)

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in (logs or {}):
                seen.losses.append(float(logs["loss"]))

    rows = {"input_ids": task.rows}
    arguments: dict[str, Any] = {
        "output_dir": str(task.directory / "of_trainer"),
        "max_steps": task.num_steps,
        "per_device_train_batch_size": task.num_rows,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "gradient_checkpointing": checkpointing,
        "torch_compile": compiles,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    if checkpointing:
        arguments["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
    model = _model(task)
    if checkpointing and task.has_adapter:
        model.enable_input_require_grads()  # type: ignore[operator]
    if of_trl:
        from trl import SFTConfig, SFTTrainer

        made = SFTConfig(max_length=task.length, packing=False, **arguments)
        data = Dataset.from_dict(rows)
        trainer: Any = SFTTrainer(
            model=model,
            args=made,
            train_dataset=data,
            processing_class=_tokenizer(task),
            callbacks=[Watching()],
        )
    else:
        data = Dataset.from_dict({**rows, "labels": task.rows})
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**arguments),
            train_dataset=data,
            callbacks=[Watching()],
        )
    trainer.train()


def _tokenizer(task: Task) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(task.directory / "model")


def _with_fabric(task: Task, seen: Seen) -> None:
    """Train as a script for Lightning Fabric does, on one device without a strategy."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    module = _model(task)
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    model, optimizer = fabric.setup(module, optimizer)
    ids = torch.tensor(task.rows)
    for step in range(1, task.num_steps + 1):
        seen.starts(step)
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        seen.losses.append(float(loss))
        seen.ends(step)


def _with_litgpt(task: Task, seen: Seen) -> None:
    """Train by litgpt's scripts."""
    from peer_litgpt import train

    train(
        task.rows,
        task.directory,
        seen,
        ranks=LORA if task.has_adapter else None,
        learning_rate=LEARNING_RATE,
        num_steps=task.num_steps,
    )


class Watched:
    """The callback of our command."""

    seen: Seen

    def on_train_batch_start(self, *, step: int) -> None:
        """Begin a step; `step` counts those that are done."""
        self.seen.starts(step + 1)

    def on_train_batch_end(self, *, step: int, metrics: dict[str, Any]) -> None:
        """End a step."""
        self.seen.losses.append(float(metrics["loss"]))
        self.seen.ends(step)


def _with_ours(task: Task, seen: Seen, budget_bytes: int | None) -> None:
    """Train by `thunder-memsave train`."""
    from thunder_memsave.finetune.cli import main

    Watched.seen = seen
    values: dict[str, Any] = {
        "model": {"name_or_path": str(task.directory / "model"), "dtype": "float32"},
        "data": {
            "dataset": {
                "class_path": "DataFiles",
                "init_args": {"path": str(task.directory / "rows.jsonl"), "format": "tokens"},
            },
            "max_seq_length": task.length,
            "packing": False,
        },
        "train": {
            "micro_batch_size": task.num_rows,
            "global_batch_size": task.num_rows,
            "max_steps": task.num_steps,
            "max_grad_norm": MAX_GRAD_NORM,
            "seed": 0,
        },
        "optimizer": {
            "class_path": "torch.optim.AdamW",
            "init_args": {"lr": LEARNING_RATE, "weight_decay": 0.0},
        },
        "lr_scheduler": {"name": "constant", "warmup_steps": 0},
        "callbacks": [{"class_path": "peer_runs.Watched"}],
        "output_dir": str(task.directory / f"of_ours_{budget_bytes}"),
    }
    if task.has_adapter:
        values["lora"] = LORA
    if budget_bytes is not None:
        values["memory"] = {"budget": budget_bytes}
    file = task.directory / f"run_{budget_bytes}.json"
    file.write_text(json.dumps(values))  # which is YAML too
    code = main(["train", str(file)])
    if code:
        raise SystemExit(code)


TOOLS: dict[str, Callable[[Task, Seen], None]] = {
    "Trainer": _with_trainer,
    "Trainer, checkpointing": partial(_with_trainer, checkpointing=True),
    "Trainer, torch_compile": partial(_with_trainer, compiles=True),
    "TRL": partial(_with_trainer, of_trl=True),
    "TRL, checkpointing": partial(_with_trainer, of_trl=True, checkpointing=True),
    "Lightning Fabric": _with_fabric,
    LITGPT: _with_litgpt,
}
"""The others; ours is `ours`."""


def main() -> None:
    """Train, and write `seen.json` into the directory."""
    tool, directory, *budget = sys.argv[1:]
    torch.set_num_threads(1)
    task = Task.read(Path(directory))
    seen = Seen(task.num_steps)
    if tool == "ours":
        _with_ours(task, seen, int(budget[0]) if budget else None)
    else:
        TOOLS[tool](task, seen)
    (task.directory / "seen.json").write_text(json.dumps(seen.as_dict()))


if __name__ == "__main__":
    # Our command imports this module by its name for the callback: both must be one.
    import peer_runs

    peer_runs.main()
