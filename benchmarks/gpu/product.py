"""Runs the command line: train, resume, zero3 under torchrun, LoRA, and out of memory, each as a user would.

The runs share a directory, so a check says what it lacks if the one before it has failed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from gpu.checks import Check, Measured, NotRunError, Target, WrongError, require

STEPS, MORE_STEPS = 40, 50
OUT_OF_MEMORY = 4
_MEMORY = re.compile(r"memory: predicted peak (.*?), (measured .*|not measured.*)")
_LIMIT_S = 110.0

_WITH_LESS_MEMORY = """
import sys, torch
total = torch.cuda.get_device_properties(0).total_memory
torch.cuda.set_per_process_memory_fraction(1.3 * 2**30 / total)
from thunder_memsave.finetune.cli import main
sys.exit(main())
"""
"""The command with 1.3 GiB. Weights, gradients and moments of the enlarged model take 1.8 GiB in float32."""


def directory() -> Path:
    """Return where the runs of this user are."""
    return Path(tempfile.gettempdir(), f"thunder_memsave_gpu_product.{os.getuid()}")


def start(target: Target) -> str:
    """Write tokenizer and texts into an empty directory."""
    shutil.rmtree(directory(), ignore_errors=True)
    directory().mkdir()
    run = _python("-m", "thunder_memsave.configs.tiny")
    _require_success(run)
    return "tokenizer and texts are written"


def train(target: Target) -> Measured:
    """Train the enlarged model, with checkpoints on the way."""
    run = _command("train", "tiny_pretrain", *_larger(target), "--output_dir=runs/first")
    _require_success(run)
    found = _MEMORY.search(run.stdout)
    require(found is not None, "the log compares no predicted with a measured peak")
    assert found is not None
    require(not target.is_cuda or found[2].startswith("measured"), f"the peak is {found[2]}")
    return Measured(
        line=f"predicted peak {found[1]}, {found[2]}; {_last_loss('first')}",
        numbers={"predicted": found[1], "measured": found[2]},
    )


def resume(target: Target, *, asynchronous: bool = False) -> str:
    """Go on from the last checkpoint for more steps."""
    _require_directory("runs/first/config.yaml")
    steps = _steps(target, MORE_STEPS) + 2 * asynchronous
    options = [f"--train.max_steps={steps}", "--resume=auto"]
    options += ["--checkpoint.asynchronous=true"] if asynchronous else []
    _require_success(_command("train", "runs/first/config.yaml", *options))
    return f"went on to step {steps}; {_last_loss('first')}"


def torchrun(target: Target) -> str:
    """Train under torchrun with one process and sharding, and end cleanly."""
    _require_directory("tiny")
    options = [*_larger(target), "--strategy.sharding=zero3", "--output_dir=runs/zero3"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    run = _python(*launch, "-m", "thunder_memsave", "train", "tiny_pretrain", *options)
    _require_success(run)
    return f"ended with exit code 0; {_last_loss('zero3')}"


def out_of_memory(target: Target) -> str:
    """Train with less memory than the plan counts on: exit code 4, one message, and the allocator's state."""
    _require_directory("tiny")
    options = ["train", "tiny_pretrain", *_larger(target), "--output_dir=runs/full"]
    run = _python("-c", _WITH_LESS_MEMORY, *options)
    require(run.returncode == OUT_OF_MEMORY, f"{_ended(run)}, not with {OUT_OF_MEMORY}")
    require("Traceback" not in run.stderr, "a traceback is shown")
    snapshots = list(directory().glob("runs/full/**/out_of_memory-rank*.pickle"))
    require(len(snapshots) == 1, f"{len(snapshots)} snapshots were written")
    said = " ".join(run.stderr.split())
    num_said = said.count("the plan predicts a peak")
    require(num_said == 1, f"{num_said} messages compare the plan with what was measured")
    return f"exit code 4, a snapshot of {snapshots[0].stat().st_size:,} bytes: {said[:200]}"


def recipe(
    target: Target, *, name: str, config: str = "tiny_pretrain", options: Sequence[str]
) -> Measured:
    """Train the enlarged model, or fine-tune the trained one, with other settings."""
    if config == "tiny_pretrain":
        more = _larger(target)
    else:
        _require_directory("runs/first/model")
        more = ["--model.name_or_path=runs/first/model", "--model.dtype=bfloat16", "--devices=1"]
        more += [f"--train.max_steps={_steps(target, STEPS)}", "--train.epochs=null"]
    run = _command("train", config, *more, *options, f"--output_dir=runs/{name}")
    _require_success(run)
    found = _MEMORY.search(run.stdout)
    memory = f"predicted peak {found[1]}, {found[2]}" if found else "no peak was compared"
    return Measured(line=f"{_last_loss(name)}; {memory}")


def preferences(target: Target) -> Measured:
    """Train with DPO on pairs of a right and a wrong answer."""
    rows = [
        {"prompt": f"What comes after {n}?", "chosen": f"{n + 1}.", "rejected": f"{n + 2}."}
        for n in range(200)
    ]
    path = directory() / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = [
        "--data.dataset.class_path=DataFiles",
        "--data.dataset.init_args={path: pairs.jsonl}",
    ]
    options += ["--data.packing=true", "--preference={loss: dpo, beta: 0.1}"]
    options += ["--optimizer.init_args.lr=5e-5", "--eval.every_n_steps=null"]
    return recipe(target, name="dpo", config="tiny_lora", options=options)


def _larger(target: Target) -> list[str]:
    """Return overrides that enlarge the shipped model on a GPU, and make its run short elsewhere."""
    steps = _steps(target, STEPS)
    options = [f"--train.max_steps={steps}", f"--checkpoint.every_n_steps={steps // 2}"]
    options += ["--eval.every_n_steps=null", "--devices=1"]
    if target.is_cuda:
        options += ["--model.config.hidden_size=1024", "--model.config.intermediate_size=4096"]
        options += ["--model.config.num_hidden_layers=8", "--model.config.num_attention_heads=16"]
        options += ["--model.config.num_key_value_heads=4", "--model.dtype=bfloat16"]
        options += ["--model.config.max_position_embeddings=512", "--optimizer.init_args.lr=2e-4"]
    return options


def _steps(target: Target, steps: int) -> int:
    return steps if target.is_cuda else steps // 10


Run = subprocess.CompletedProcess[str]


def _command(*arguments: str) -> Run:
    return _python("-m", "thunder_memsave", *arguments)


def _python(*arguments: str) -> Run:
    command: Sequence[str] = [sys.executable, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=directory(), capture_output=True, text=True, check=False)


def _require_success(run: Run) -> None:
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or run.stdout.strip().splitlines() or [""])[-1]
        raise WrongError(f"{_ended(run)}: {last[:300]}", {"stderr": run.stderr[-4000:]})


def _ended(run: Run) -> str:
    return f"it ended with exit code {run.returncode}"


def _require_directory(name: str) -> None:
    if not Path(directory(), name).exists():
        raise NotRunError(f"needs {name}, which an earlier check writes")


def _last_loss(run: str) -> str:
    """Return the last line of a run's metrics in words."""
    import csv

    path = Path(directory(), "runs", run, "metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("loss")]
    require(bool(rows), f"{path.name} of {run} has no loss")
    return f"loss {float(rows[0]['loss']):.3f} first, {float(rows[-1]['loss']):.3f} last"


_LAST = "resume, saving in the background"
"""The check after which the trained model stays as it is."""
_RUNS: dict[str, Callable[[Target], Measured | str]] = {
    "tokenizer and texts": start,
    "train": train,
    "resume": resume,
    _LAST: lambda target: resume(target, asynchronous=True),
}
_AFTER_THEM: dict[str, Callable[[Target], Measured | str]] = {
    "torchrun, zero3": torchrun,
    "LoRA": partial(recipe, name="lora", config="tiny_lora", options=[]),
}
_RECIPES: dict[str, Callable[[Target], Measured]] = {
    "QLoRA": partial(
        recipe, name="qlora", config="tiny_lora", options=["--model.frozen_weights=nf4"]
    ),
    "fp8, PyTorch": partial(recipe, name="fp8", config="tiny_fp8_cpu", options=[]),
    "fp8, TransformerEngine": partial(
        recipe,
        name="te",
        config="tiny_fp8_cpu",
        options=["--fp8.backend=transformer_engine"],
    ),
    "DPO": preferences,
    "AdamW in 8 bits": partial(recipe, name="states", options=["--optimizer.states=int8"]),
    "offload": partial(recipe, name="offload", options=["--memory.offload=all"]),
    "CUDA graphs": partial(recipe, name="graphs", options=["--strategy.cuda_graphs=true"]),
    "fusion": partial(recipe, name="fusion", options=["--strategy.fusion=true"]),
}
"""On a CPU, tests run the same settings."""

CHECKS = [
    *(Check(name=name, run=run, group="product", limit_s=_LIMIT_S) for name, run in _RUNS.items()),
    *(
        Check(name=name, run=run, group="sharded", limit_s=_LIMIT_S, after=_LAST)
        for name, run in _AFTER_THEM.items()
    ),
    *(
        Check(name=name, run=run, limit_s=_LIMIT_S, after=_LAST, needs_cuda=True)
        for name, run in _RECIPES.items()
    ),
    Check(name="out of memory", run=out_of_memory, needs_cuda=True, limit_s=_LIMIT_S),
]
