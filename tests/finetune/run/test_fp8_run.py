"""A run that fine-tunes in fp8 on two processes learns, survives `kill -9`, and exports a plain adapter."""

from __future__ import annotations

import csv
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.fabric import run_python
from harness.forked_python import ForkedPython
from harness.language_model import run_values, write_run_file
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.finetune.data.formats import PromptJSONL

FP8 = {
    "backend": "torch",
    "amax_history_len": 4,
    "skip_modules": ["lm_head", "lora_A", "lora_B"],
    "frozen_weights": "fp8",
}
NUM_STEPS, KILLED_AFTER = 5, 2
NUM_LINEARS = 7
"""Linears of the only layer, without its adapters."""


def arguments(directory: Path, *overrides: str) -> list[str]:
    return ["-m", "thunder_memsave", "train", str(directory / "run.yaml"), *overrides]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, one_layer: Path) -> Path:
    """Make a directory with the run file, a run that went through, and one that was killed and resumed."""
    directory = tmp_path_factory.mktemp("fp8")
    monitor = {"class_path": "Fp8Monitor", "init_args": {"every_n_steps": 1}}
    values = run_values(
        directory,
        one_layer,
        train={"max_steps": NUM_STEPS, "micro_batch_size": 2},
        eval={"every_n_steps": None},
        fp8=FP8,
        callbacks=[monitor],
        devices=2,
    )
    write_run_file(directory, values)
    printed = run_python(arguments(directory), num_forks=2)
    (directory / "printed.txt").write_text(printed)
    killed = directory / "killed"
    start_and_kill(directory, killed)
    resumed = arguments(directory, f"--output_dir={killed}", "--resume=auto")
    run_python(resumed, num_forks=2)
    return directory


def start_and_kill(directory: Path, output: Path) -> None:
    process = ForkedPython(
        arguments(directory, f"--output_dir={output}"),
        num_children=1,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while not (output / "checkpoints" / f"step-{KILLED_AFTER:08}").exists():
            assert process.poll() is None, "the run ended before it was killed"
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def rows(path: Path, *, without: tuple[str, ...] = ()) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in without} for row in csv.DictReader(file)]


def test_the_first_lines_say_what_computes_in_fp8(finished: Path) -> None:
    printed = (finished / "printed.txt").read_text()
    assert (
        f"fp8: {NUM_LINEARS} of {3 * NUM_LINEARS + 1} linears, delayed scaling by torch (self_attn.q_proj, self_att"
        in printed
    )
    assert "\nnot 1 (lm_head): skip_modules has 'lm_head'" in printed
    assert f"\n{NUM_LINEARS} frozen weights kept in fp8 alone\n" in printed


def test_checkpoints_hold_neither_frozen_weights_nor_their_numbers_and_scales(
    finished: Path,
) -> None:
    (checkpoint,) = (finished / "run" / "checkpoints").glob(f"step-{NUM_STEPS:08d}")
    names = read_manifest(checkpoint).tensors["model"]
    assert any(name.endswith("lora_A.default.weight") for name in names)
    assert any("fp8_scaling" in name for name in names)
    assert not any("fp8_weight" in name or "base_layer.weight" in name for name in names)


def test_a_killed_run_resumes_to_the_bits_of_one_that_was_not(finished: Path) -> None:
    whole, killed = (
        load_file(finished / name / "adapter" / "adapter_model.safetensors")
        for name in ("run", "killed")
    )
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


def test_scales_and_amax_of_every_step_are_those_of_a_run_that_was_not_killed(
    finished: Path,
) -> None:
    whole, killed = (rows(finished / name / "fp8.csv") for name in ("run", "killed"))
    assert whole == killed
    assert len(whole) == NUM_STEPS * NUM_LINEARS * 2
    assert len({row["scale"] for row in whole}) > NUM_LINEARS


def test_the_loss_falls(finished: Path) -> None:
    losses = [
        float(row["val_loss"]) for row in rows(finished / "run/metrics.csv") if row["val_loss"]
    ]
    assert losses[-1] < losses[0]


@torch.no_grad()
def test_the_adapter_loads_in_plain_transformers_and_peft(finished: Path, one_layer: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(one_layer)
    base = AutoModelForCausalLM.from_pretrained(one_layer)
    model: Any = PeftModel.from_pretrained(base, finished / "run" / "adapter").eval()
    logged = [r["val_loss"] for r in rows(finished / "run/metrics.csv") if r["val_loss"]][-1]
    # e4m3 has 3 bits of mantissa; the plain model's weights and inputs are not rounded to it.
    assert plain_loss(model, tokenizer, finished) == pytest.approx(float(logged), rel=0.02)


def plain_loss(model: Any, tokenizer: Any, directory: Path) -> float:
    """Return the validation loss, one document at a time."""
    total, count = 0.0, 0
    data = PromptJSONL(path=str(directory / "rows.jsonl"), val_fraction=0.25).load(tokenizer)
    assert data.validation is not None
    for document in data.validation:
        prompt, completion = (part.text for part in document.parts)
        ids = torch.tensor([[*tokenizer(prompt + completion)["input_ids"], 1]])
        start = len(tokenizer(prompt)["input_ids"])
        logits = model(input_ids=ids).logits[0, start - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, start:], reduction="sum")
        total += float(loss)
        count += ids.shape[1] - start
    return total / count
