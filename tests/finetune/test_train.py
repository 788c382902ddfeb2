"""Whole runs of the command, as a user starts them."""

from __future__ import annotations

import csv
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.language_model import run_values, write_run_file
from thunder_memsave.finetune.batches import Sharding, step_rows
from thunder_memsave.finetune.data import PromptJSONL
from thunder_memsave.finetune.model import build_model
from thunder_memsave.finetune.parse import load_run_config
from thunder_memsave.materialize import materialize

# float32 sums in another order
SUM_ORDER = 1e-5

DROPOUT = {"r": 4, "target_modules": "all-linear", "lora_dropout": 0.2}


def command(path: Path, *overrides: str, num_processes: int) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    arguments = ["-m", "thunder_memsave", "train", str(path), *overrides]
    return [sys.executable, *(launch if num_processes > 1 else []), *arguments]


def run(path: Path, *overrides: str, num_processes: int) -> str:
    result = subprocess.run(
        command(path, *overrides, num_processes=num_processes),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def metrics_of(directory: Path) -> list[dict[str, float]]:
    with (directory / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{key: float(value) for key, value in row.items() if value} for row in rows]


def last_loss(directory: Path, name: str) -> float:
    return [row[name] for row in metrics_of(directory) if name in row][-1]


@torch.no_grad()
def plain_loss(model: Any, tokenizer: Any, path: Path) -> float:
    """The validation loss, one document at a time, without anything of ours but the split."""
    total, count = 0.0, 0
    for document in PromptJSONL(path=str(path), val_fraction=0.25).load(tokenizer).validation:
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


def test_two_processes_log_what_one_logs(two_ranks: Path, one_rank: Path) -> None:
    clocks = ("step_seconds", "tokens_per_s")
    runs = [
        [{k: v for k, v in row.items() if k not in clocks} for row in metrics_of(path / "run")]
        for path in (two_ranks, one_rank)
    ]
    assert [row["step"] for row in runs[0]] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    for measured, expected in zip(*runs, strict=True):
        assert measured == pytest.approx(expected, rel=SUM_ORDER)


def test_the_run_equals_a_plain_loop_over_transformers_and_peft(
    two_ranks: Path, model_directory: Path
) -> None:
    """One sequence at a time, without padding: the mean over tokens needs no other care."""
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
    measured = plain_loss(model, tokenizer, two_ranks / "rows.jsonl")
    logged = last_loss(two_ranks / "run", "val_loss")
    assert measured == pytest.approx(logged, rel=SUM_ORDER)
    first = next(row["val_loss"] for row in metrics_of(two_ranks / "run") if "val_loss" in row)
    assert logged < first


def test_the_run_directory_holds_config_metrics_checkpoints_and_adapter(two_ranks: Path) -> None:
    found = {path.name for path in (two_ranks / "run").iterdir()}
    assert found == {"config.yaml", "metrics.csv", "checkpoints", "adapter"}
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
    measured = plain_loss(model, tokenizer, tmp_path / "rows.jsonl")
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


def test_a_run_killed_at_any_time_resumes_to_bit_identical_weights(
    tmp_path: Path, model_directory: Path
) -> None:
    values = run_values(tmp_path, model_directory, lora=DROPOUT, train={"max_steps": 14})
    del values["data"]["dataset"]["init_args"]["val_fraction"]  # one capture less to wait for
    whole, killed = tmp_path / "run", tmp_path / "killed"
    run(write_run_file(tmp_path, values), num_processes=2)
    path = whole / "config.yaml"  # the run wrote it, so it repeats the run
    seed = int(os.environ.get("KILL_SEED", random.SystemRandom().randrange(10**6)))
    print(f"KILL_SEED={seed}")
    start_and_kill(path, killed, random.Random(seed), num_steps=14)
    output = run(path, f"--output_dir={killed}", "--resume=auto", num_processes=2)
    assert "resuming from" in output
    assert_same_adapter(killed, whole)
    clocks = ("step_seconds", "tokens_per_s")
    histories = [
        [{k: v for k, v in row.items() if k not in clocks} for row in metrics_of(directory)]
        for directory in (killed, whole)
    ]
    assert histories[0] == histories[1]


def start_and_kill(path: Path, directory: Path, chance: random.Random, *, num_steps: int) -> None:
    """Start a run and `kill -9` all its processes somewhere after its first checkpoint."""
    process = subprocess.Popen(
        command(path, f"--output_dir={directory}", num_processes=2),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    kill_at = chance.randrange(2, num_steps - 2)
    try:
        while not reached(directory, kill_at):
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.01)
        time.sleep(chance.random() * 0.3)  # anywhere within a step or a save
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


def test_a_resumed_run_takes_the_optimizers_arguments_from_its_run_file(
    tmp_path: Path, model_directory: Path
) -> None:
    values = run_values(tmp_path, model_directory, train={"max_steps": 2})
    values["lr_scheduler"] = {"warmup_steps": 0, "min_lr_ratio": 1.0}
    run(write_run_file(tmp_path, values), num_processes=1)
    path = tmp_path / "run" / "config.yaml"
    changes = ("--train.max_steps=3", "--optimizer.init_args.lr=5e-4", "--resume=auto")
    run(path, *changes, num_processes=1)
    assert [row["lr"] for row in metrics_of(tmp_path / "run") if "lr" in row] == [1e-2, 1e-2, 5e-4]


def test_a_checkpoint_that_does_not_fit_leaves_the_run_as_it_was(two_ranks: Path) -> None:
    path = two_ranks / "run" / "config.yaml"
    before = path.read_text()
    arguments = command(path, "--resume=auto", "--lora.r=8", num_processes=2)
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert result.stderr.count("error: cannot go on from ") == 1
    assert "shape (4, 32) in the file, (8, 32) in the model" in result.stderr
    assert "finetune/" not in result.stderr
    assert path.read_text() == before


def test_a_finished_run_that_is_resumed_says_that_nothing_is_left(two_ranks: Path) -> None:
    metrics = (two_ranks / "run" / "metrics.csv").read_text()
    output = run(two_ranks / "run" / "config.yaml", "--resume=auto", num_processes=2)
    assert "all steps are done" in output
    assert (two_ranks / "run" / "metrics.csv").read_text() == metrics
