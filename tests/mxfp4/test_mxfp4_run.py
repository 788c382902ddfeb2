"""A run on a base in MXFP4 trains, and exports the experts that its files have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from harness.fabric import run_python
from harness.language_model import VOCAB_SIZE, run_values, write_run_file, write_tokenizer
from harness.mxfp4_tensors import gpt_oss, write_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a directory with a base, a run and its merged model."""
    directory = tmp_path_factory.mktemp("mxfp4")
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 1, "pad_token_id": 0, "eos_token_id": 1}
    base = write_model(write_tokenizer(directory / "base"), gpt_oss(**sizes))
    values = run_values(
        directory,
        base,
        train={"max_steps": 2, "micro_batch_size": 2},
        eval={"every_n_steps": None},
        lora={"target_modules": ["q_proj", "v_proj"]},
    )
    values["model"] |= {"frozen_weights": "mxfp4", "attn_implementation": "eager"}
    write_run_file(directory, values)
    train = ["-m", "thunder_memsave", "train", str(directory / "run.yaml")]
    (directory / "printed.txt").write_text(run_python(train, num_forks=1))
    export = ["-m", "thunder_memsave", "export", str(directory / "run"), "--merge"]
    run_python([*export, "--out", str(directory / "merged"), "--dtype", "float32"], num_forks=1)
    return directory


def test_the_first_lines_say_that_experts_alone_are_in_fewer_bytes(finished: Path) -> None:
    """The base's makers left the others as they are."""
    num_elements = 3 * 64 * 96 * (2 + 1)
    num_bytes = num_elements // 2 + num_elements // 32
    printed = (finished / "printed.txt").read_text()
    assert f"2 frozen weights kept in {num_bytes:,} bytes (MXFP4)" in printed


@torch.no_grad()
def test_the_merged_model_is_the_adapter_on_the_dequantised_base(finished: Path) -> None:
    ids = torch.arange(4, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(finished / "merged", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(finished / "base", dtype=torch.float32)
    experts = {
        name: value.clone() for name, value in base.state_dict().items() if ".mlp.experts." in name
    }
    assert len(experts) == 4
    found = merged.state_dict()
    assert all(torch.equal(found[name], value) for name, value in experts.items())
    before = base(input_ids=ids).logits
    expected = (
        PeftModel.from_pretrained(base, finished / "run/adapter").eval()(input_ids=ids).logits
    )
    logits = merged(input_ids=ids).logits
    assert (logits - expected).norm() / expected.norm() < 1e-6
    assert (logits - before).norm() / expected.norm() > 1e-4
