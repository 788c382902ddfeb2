"""Whole runs of the command, as a user starts them."""

from __future__ import annotations

import csv
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.commands import run_command
from harness.fabric import run_python
from harness.language_model import (
    prompt_rows,
    rotary_flops_per_token,
    run_values,
    write_jsonl,
    write_run_file,
)
from thunder_memsave.budget import plan_request
from thunder_memsave.callbacks.checkpoint import CheckpointInfo
from thunder_memsave.checkpoints import StateMismatchError
from thunder_memsave.finetune.data.batches import Sharding, step_rows
from thunder_memsave.finetune.data.formats import PromptJSONL
from thunder_memsave.finetune.model.build import build_model
from thunder_memsave.finetune.run import train as train_module
from thunder_memsave.finetune.run.resume import _does_not_fit
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.finetune.training.loop import Ending, fit
from thunder_memsave.materialize.fill import materialize
from thunder_memsave.planner.search.solve import solve

# float32 sums in another order
SUM_ORDER = 1e-5

DROPOUT = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.2}


def command(path: Path, *overrides: str, num_processes: int) -> list[str]:
    """Return the arguments of Python that launch a run."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*launch, "-m", "thunder_memsave", "train", str(path), *overrides]


def run(path: Path, *overrides: str, num_processes: int) -> str:
    if num_processes == 1:
        return run_here(path, *overrides)
    arguments = command(path, *overrides, num_processes=num_processes)
    return run_python(arguments, num_forks=1 + num_processes)


def run_here(path: Path, *overrides: str, exit_code: int = 0) -> str:
    """Run in this process, without the seconds that a new one takes to import everything; return the output."""
    return run_command("train", str(path), *overrides, code=exit_code)


def metrics_of(directory: Path) -> list[dict[str, float]]:
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


# Keys that differ between any two runs.
CLOCKS = (
    "input_tokens_per_s",
    "mfu",
    "predicted_peak_bytes",
    "process_peak_rss_gib",
    "step_seconds",
    "tokens_per_s",
    "tokens_per_s_per_device",
)


def history(directory: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in metrics_of(directory)]


def last_loss(directory: Path, name: str) -> float:
    return [row[name] for row in metrics_of(directory) if name in row][-1]


@torch.no_grad()
def plain_loss(model: Any, tokenizer: Any, **dataset: Any) -> float:
    """Return the validation loss, one document at a time, using nothing of ours but the split."""
    total, count = 0.0, 0
    for document in PromptJSONL(**dataset).load(tokenizer).validation:
        prompt, completion = (part.text for part in document.parts)
        ids = torch.tensor([[*tokenizer(prompt + completion)["input_ids"], 1]])
        start = len(tokenizer(prompt)["input_ids"])
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
        total += float(cross_entropy(logits, ids[0, start:], reduction="sum"))
        count += ids.shape[1] - start
    return total / count


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, model_directory: Path) -> Path:
    """A finished LoRA run on two processes, with accumulation and clipping."""
    directory = tmp_path_factory.mktemp("two_ranks")
    train = {"max_grad_norm": 0.1, "max_steps": 6}
    values = run_values(directory, model_directory, train=train)
    run(write_run_file(directory, values), num_processes=2)
    return directory


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory, two_ranks: Path) -> Path:
    """The same run on one process."""
    directory = tmp_path_factory.mktemp("one_rank")
    run(two_ranks / "run.yaml", f"--output_dir={directory / 'run'}", num_processes=1)
    return directory


def assert_same_history(first: Path, second: Path) -> None:
    for measured, expected in zip(history(first), history(second), strict=True):
        assert measured == pytest.approx(expected, rel=SUM_ORDER)


def test_two_processes_log_what_one_logs(two_ranks: Path, one_rank: Path) -> None:
    steps = [row["step"] for row in metrics_of(two_ranks / "run")]
    assert steps == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert_same_history(two_ranks / "run", one_rank / "run")


@pytest.mark.soak
def test_two_nodes_log_what_one_process_logs(
    two_ranks: Path, one_rank: Path, tmp_path: Path
) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    meet = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}"]
    train = [
        "-m",
        "thunder_memsave",
        "train",
        two_ranks / "run.yaml",
        f"--output_dir={tmp_path}/run",
    ]
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(*meet, f"--node-rank={node}", *map(str, train)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    outputs = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert_same_history(tmp_path / "run", one_rank / "run")
    (printed,) = [output for output in outputs if "adapter: " in output]
    assert printed.count("step 6/6 | loss") == 1


def test_the_run_equals_a_plain_loop_over_transformers_and_peft(
    two_ranks: Path, model_directory: Path
) -> None:
    """Train on one sequence at a time, without padding, so that the mean over tokens is plain."""
    config = load_run_config(two_ranks / "run.yaml")
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    model: Any = build_model(config, tokenizer)
    torch.manual_seed(42)
    materialize(model, device=torch.device("cpu"), data_parallel=None)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    documents = PromptJSONL(path=str(two_ranks / "rows.jsonl"), val_fraction=0.25).load(tokenizer)
    logged = [row for row in metrics_of(two_ranks / "run") if "loss" in row]
    for step, row in enumerate(logged):
        sharding = Sharding(global_batch_size=4, micro_batch_size=4)
        (chosen,) = step_rows(len(documents.train), sharding, seed=42, step=step)
        losses, num_tokens = [], 0
        for number in chosen:
            if number < 0:
                continue
            prompt, completion = (part.text for part in documents.train[number].parts)
            ids = torch.tensor([[*tokenizer(prompt + completion)["input_ids"], 1]])
            start = len(tokenizer(prompt)["input_ids"])
            logits = model(input_ids=ids).logits[0, start - 1 : -1]
            losses.append(cross_entropy(logits, ids[0, start:], reduction="sum"))
            num_tokens += ids.shape[1] - start
        loss = torch.stack(losses).sum() / num_tokens
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for group in optimizer.param_groups:
            group["lr"] = row["lr"]
        optimizer.step()
        optimizer.zero_grad()
        assert row["num_tokens"] == num_tokens
        assert row["loss"] == pytest.approx(float(loss.detach()), rel=SUM_ORDER)
        assert row["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_the_adapter_gives_the_logged_loss_in_plain_transformers_and_peft(
    two_ranks: Path, model_directory: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    model = PeftModel.from_pretrained(base, two_ranks / "run" / "adapter").eval()
    measured = plain_loss(model, tokenizer, path=str(two_ranks / "rows.jsonl"), val_fraction=0.25)
    logged = last_loss(two_ranks / "run", "val_loss")
    assert measured == pytest.approx(logged, rel=SUM_ORDER)
    first = next(row["val_loss"] for row in metrics_of(two_ranks / "run") if "val_loss" in row)
    assert logged < first


def test_the_run_directory_holds_config_metrics_checkpoints_and_adapter(two_ranks: Path) -> None:
    found = {path.name for path in (two_ranks / "run").iterdir()}
    assert found == {
        *("config.yaml", "environment.json", "metrics.csv", "loss.png", "plan.txt"),
        *("checkpoints", "adapter"),
    }
    names = [path.name for path in sorted((two_ranks / "run" / "checkpoints").iterdir())]
    assert names == ["step-00000005", "step-00000006"]


def test_full_fine_tuning_of_a_packed_tied_model_writes_a_model_that_loads(
    tmp_path: Path, model_directory: Path
) -> None:
    values = run_values(
        tmp_path,
        model_directory,
        model={"config": {"model_type": "llama", "tie_word_embeddings": True, **SMALL}},
        data={"packing": True},
        train={"max_steps": 2, "max_grad_norm": None},
    )
    values["lora"] = None
    run(write_run_file(tmp_path, values), num_processes=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    metrics = metrics_of(tmp_path / "run")
    assert all("grad_norm" in row for row in metrics if "loss" in row)
    measured = plain_loss(model, tokenizer, path=str(tmp_path / "rows.jsonl"), val_fraction=0.25)
    assert measured == pytest.approx(last_loss(tmp_path / "run", "val_loss"), rel=SUM_ORDER)


SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": 1,
}


@pytest.mark.soak
def test_a_run_killed_at_any_time_resumes_to_bit_identical_weights(
    tmp_path: Path, model_directory: Path
) -> None:
    values = run_values(tmp_path, model_directory, lora=DROPOUT, train={"max_steps": 14})
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    whole, killed = tmp_path / "run", tmp_path / "killed"
    run(write_run_file(tmp_path, values), num_processes=2)
    path = whole / "config.yaml"  # the run wrote it, so it repeats the run
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILL_SEED={seed}")
    start_and_kill(path, killed, random.Random(seed), num_steps=14)
    output = run(path, f"--output_dir={killed}", "--resume=auto", num_processes=2)
    assert "resuming from" in output
    assert_same_adapter(killed, whole)
    assert history(killed) == history(whole)


def start_and_kill(path: Path, directory: Path, chance: random.Random, *, num_steps: int) -> None:
    """Start a run and `kill -9` all its processes some time after its first checkpoint."""
    process = subprocess.Popen(
        [sys.executable, *command(path, f"--output_dir={directory}", num_processes=2)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    kill_at = chance.randrange(2, num_steps - 2)
    try:
        while not reached(directory, kill_at):
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)  # anywhere in a step or a save
    finally:
        for rank in children_of(process.pid):
            os.kill(rank, signal.SIGKILL)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def reached(directory: Path, step: int) -> bool:
    if not (directory / "metrics.csv").exists():
        return False
    return any(row.get("step", 0) >= step for row in whole_rows(directory))


def whole_rows(directory: Path) -> list[dict[str, float]]:
    text = (directory / "metrics.csv").read_text()
    rows = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
    return [{"step": float(row["step"])} for row in rows]


def children_of(pid: int) -> list[int]:
    """torchrun puts each rank into a session of its own."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def adapter_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "adapter" / "adapter_model.safetensors")


def assert_same_adapter(first: Path, second: Path) -> None:
    weights, expected = adapter_weights(first), adapter_weights(second)
    assert weights.keys() == expected.keys()
    different = [name for name in weights if not torch.equal(weights[name], expected[name])]
    assert not different


@pytest.fixture(scope="module")
def stopped_early(tmp_path_factory: pytest.TempPathFactory, one_layer: Path) -> Path:
    """Packed rows, accumulation, dropout, loggers; ended by a callback after step 4 of 9."""
    directory = tmp_path_factory.mktemp("stopped_early")
    patience = {"patience": 2, "min_delta": 10.0}
    values = run_values(
        directory,
        one_layer,
        lora=DROPOUT,
        data={"packing": True},
        train={"max_steps": 9, "micro_batch_size": None, "gradient_accumulation_steps": 2},
        checkpoint={"every_n_steps": 1, "keep_last": 9},
    )
    fresh = write_jsonl(directory / "validation.jsonl", prompt_rows(40)[30:])
    rows = str(directory / "rows.jsonl")
    values["data"]["dataset"]["init_args"] = {"path": rows, "val_path": str(fresh)}
    values["callbacks"] = [
        {"class_path": "EarlyStopping", "init_args": patience},
        {"class_path": "ThroughputMonitor", "init_args": {"peak_tflops": 0.5}},
    ]
    values["loggers"] = [{"class_path": "TensorBoardLogger"}, {"class_path": "CSVLogger"}]
    output = run_here(write_run_file(directory, values))
    assert "stopped after step 4 of 9: val_loss has not improved in the last 2 eval" in output
    return directory


def test_a_run_resumes_bit_exactly_from_every_checkpoint(
    stopped_early: Path, tmp_path: Path
) -> None:
    """The state of early stopping is restored: it ends after the same step."""
    whole = stopped_early / "run"
    for step in (1, 2, 3, 4):
        resumed = tmp_path / str(step)
        last = whole / "checkpoints" / f"step-{step:08d}"
        shutil.copytree(last, resumed / "checkpoints" / last.name)
        shutil.copy(whole / "metrics.csv", resumed)
        shutil.copy(whole / "config.yaml", resumed)
        output = run_here(resumed / "config.yaml", "--resume=auto", f"--output_dir={resumed}")
        assert "stopped after step 4 of 9" in output
        assert_same_adapter(resumed, whole)
        assert history(resumed) == history(whole)


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(
    stopped_early: Path, tmp_path: Path
) -> None:
    whole, resumed = stopped_early / "run", tmp_path / "resumed"
    shutil.copytree(whole / "checkpoints", resumed / "checkpoints")
    shutil.copy(whole / "metrics.csv", resumed)
    shutil.copy(whole / "config.yaml", resumed)
    damaged = resumed / "checkpoints" / "step-00000004" / "state" / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    output = run_here(resumed / "config.yaml", "--resume=auto", f"--output_dir={resumed}")
    assert f"resuming from {resumed / 'checkpoints' / 'step-00000003'}" in output
    assert (resumed / "checkpoints" / "damaged-step-00000004").is_dir()
    assert_same_adapter(resumed, whole)
    assert history(resumed) == history(whole)


def test_an_adapter_of_packed_rows_gives_the_logged_loss_of_another_file(
    stopped_early: Path, one_layer: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one_layer)
    base = AutoModelForCausalLM.from_pretrained(one_layer)
    model = PeftModel.from_pretrained(base, stopped_early / "run" / "adapter").eval()
    rows, fresh = (str(stopped_early / name) for name in ("rows.jsonl", "validation.jsonl"))
    measured = plain_loss(model, tokenizer, path=rows, val_path=fresh)
    assert measured == pytest.approx(last_loss(stopped_early / "run", "val_loss"), rel=SUM_ORDER)


def test_tensorboard_has_every_metric_and_the_hyperparameters(stopped_early: Path) -> None:
    (file,) = (stopped_early / "run" / "lightning_logs").glob("version_*/events*")
    events = EventAccumulator(str(file.parent)).Reload()
    logged = {event.step: event.value for event in events.Scalars("val_loss")}
    expected = {
        row["step"]: row["val_loss"] for row in history(stopped_early / "run") if "val_loss" in row
    }
    assert logged == pytest.approx(expected, rel=1e-6)  # TensorBoard stores float32
    assert len(events.Scalars("loss")) == 4
    assert "global_batch_size: 4" in (file.parent / "hparams.yaml").read_text()


def test_a_monitor_with_a_peak_measures_the_utilisation(stopped_early: Path) -> None:
    # Per token, as tests/callbacks/test_flops.py counts it.
    frozen, adapters = 4 * 32 * 32 + 3 * 32 * 64 - 2 * 32 * 16 + 32 * 320, 4 * 512
    no_grad_input, attention = 32 * 32 + 2 * 32 * 16 + 3 * 4 * 32, 4 * 32 * 32
    expected = 4 * frozen + 6 * adapters - 2 * no_grad_input + 3 * attention
    expected += rotary_flops_per_token()
    for row in metrics_of(stopped_early / "run"):
        if "loss" in row:
            measured = row["mfu"] * 0.5e12 / row["input_tokens_per_s"]
            assert measured == pytest.approx(expected)


def test_the_resolved_run_file_has_two_of_the_three_batch_sizes(stopped_early: Path) -> None:
    train = yaml.safe_load((stopped_early / "run" / "config.yaml").read_text())["train"]
    assert (train["global_batch_size"], train["micro_batch_size"]) == (4, 2)
    assert train["gradient_accumulation_steps"] is None


def test_a_second_run_into_the_same_directory_is_refused(stopped_early: Path) -> None:
    before = sorted((stopped_early / "run").rglob("*"))
    output = run_here(stopped_early / "run.yaml", exit_code=2)
    assert "exists and is not empty; name another directory, or go on with the run" in output
    assert sorted((stopped_early / "run").rglob("*")) == before


def test_a_checkpoint_of_other_frozen_weights_is_refused(
    stopped_early: Path, one_layer: Path, tmp_path: Path
) -> None:
    other = tmp_path / "model"
    shutil.copytree(one_layer, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    path = stopped_early / "run" / "config.yaml"
    output = run_here(path, "--resume=auto", f"--model.name_or_path={other}", exit_code=2)
    assert "step-00000004 was written with other frozen weights than those of model" in output


def test_every_start_of_a_run_is_in_its_environment(stopped_early: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(stopped_early / "run", resumed)
    run_here(resumed / "config.yaml", "--resume=auto", f"--output_dir={resumed}")
    first, second = json.loads((resumed / "environment.json").read_text())
    assert (first["step"], second["step"]) == (0, 4)
    assert second["world_size"] == 1
    assert second["versions"]["torch"] == torch.__version__
    assert second["argv"] == sys.argv


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory: pytest.TempPathFactory, one_layer: Path) -> Path:
    """A finished run of two steps on one process, without validation."""
    directory = tmp_path_factory.mktemp("two_steps")
    values = run_values(directory, one_layer, train={"max_steps": 2})
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    run(write_run_file(directory, values), num_processes=1)
    return directory


def test_a_resumed_run_takes_the_optimizers_arguments_from_its_run_file(
    two_steps: Path, tmp_path: Path
) -> None:
    resumed = tmp_path / "run"
    shutil.copytree(two_steps / "run", resumed)
    changes = ("--optimizer.init_args.lr=5e-4", "--lr_scheduler.name=constant")
    where = ("--resume=auto", "--train.max_steps=3", f"--output_dir={resumed}")
    run_here(resumed / "config.yaml", *changes, *where)
    assert [row["lr"] for row in metrics_of(resumed) if "lr" in row][2:] == [5e-4]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record, for every run here, whether its optimizer is fused."""
    seen: list[bool] = []

    def recorded(*args: Any, **kwargs: Any) -> Ending:
        seen.append(bool(kwargs["state"]["optimizer"].param_groups[0]["fused"]))
        return fit(*args, **kwargs)

    monkeypatch.setattr(train_module, "fit", recorded)
    return seen


def test_a_resumed_run_updates_as_it_began_unless_its_run_file_says_how(
    two_steps: Path, tmp_path: Path, fused: list[bool]
) -> None:
    def resume(name: str, whole: Path, num_steps: int, *changes: str) -> Path:
        shutil.copytree(whole, tmp_path / name)
        where = (f"--output_dir={tmp_path / name}", "--resume=auto")
        run_here(two_steps / "run.yaml", *where, f"--train.max_steps={num_steps}", *changes)
        return tmp_path / name

    plain = resume("plain", two_steps / "run", 3, "--optimizer.init_args.fused=false")
    still_plain = resume("still_plain", plain, 4)
    fused_again = resume("fused_again", plain, 4, "--optimizer.init_args.fused=true")
    assert fused == [False, False, True]
    assert_same_history(still_plain, fused_again)


def test_a_budget_that_is_too_small_leaves_no_files_and_names_one_that_trains(
    tmp_path: Path, one_layer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_request, "solve", partial(solve, time_limit_s=1.0))
    values = run_values(tmp_path, one_layer, train={"max_steps": 1})
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # saves one capture
    path = write_run_file(tmp_path, values)
    before = sorted(tmp_path.iterdir())
    output = run_here(path, "--memory.budget=1000", exit_code=3)
    assert "error: the budget is 1,000 bytes, and no plan was found that stays within" in output
    assert sorted(tmp_path.iterdir()) == before
    smallest = re.search(r"the smallest budget for which one was found is ([\d,]+) bytes", output)
    assert smallest is not None
    output = run_here(path, f"--memory.budget={smallest[1].replace(',', '')}")
    assert "memory: predicted peak" in output
    assert (tmp_path / "run" / "adapter").is_dir()


def test_a_checkpoint_that_does_not_fit_leaves_the_run_as_it_was(one_rank: Path) -> None:
    path = one_rank / "run" / "config.yaml"
    before = path.read_text()
    output = run_here(path, "--resume=auto", "--lora.r=8", exit_code=2)
    words = " ".join(output.split())
    assert words.count("step-00000006 was written with other settings than this run has") == 1
    assert "so it cannot resume from there: key checkpoint this run lora.r 4 8 Restore the" in words
    assert path.read_text() == before


def test_a_checkpoint_of_another_model_is_told_with_all_places_that_differ() -> None:
    checkpoint = CheckpointInfo(path=Path("step-00000006"), world_size=1, values={})
    error = StateMismatchError("unread", places=["a: missing", "b: shape (4,) in the file"])
    told = _does_not_fit(checkpoint, error)
    assert (
        "another model or optimizer than this run file describes (a: missing; b: shape (4,) in"
        in told
    )
    assert "in the file); restore 'model', 'lora', 'adapter' and 'optimizer' as in the" in told


def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(one_rank: Path) -> None:
    metrics = (one_rank / "run" / "metrics.csv").read_text()
    output = run_here(one_rank / "run" / "config.yaml", "--resume=auto")
    assert "all steps are done" in output
    assert (one_rank / "run" / "metrics.csv").read_text() == metrics
