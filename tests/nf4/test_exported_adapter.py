"""An adapter that a QLoRA run exported answers alike in transformers, peft and bitsandbytes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from harness.fabric import run_python
from harness.language_model import run_values, write_model, write_run_file

pytest.importorskip("bitsandbytes", reason="not installed; `make against-bitsandbytes` does it")

IN_BFLOAT16 = 2.0**-6
"""The kernel of bitsandbytes for inference on CPUs with AVX-512 rounds inputs, weights and scales to bfloat16."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of whole blocks: its kernel takes no others."""
    directory = tmp_path_factory.mktemp("base")
    return write_model(
        directory, num_hidden_layers=1, hidden_size=64, intermediate_size=128, initializer_range=0.1
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """Return the directory of a run on one process, with its merged model."""
    directory = tmp_path_factory.mktemp("nf4")
    values = run_values(directory, base, train={"max_steps": 8}, eval={"every_n_steps": None})
    values["model"]["frozen_weights"] = "nf4"
    values["optimizer"] = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 1e-2}}
    write_run_file(directory, values)
    run_python(["-m", "thunder_memsave", "train", str(directory / "run.yaml")], num_forks=1)
    export = ["-m", "thunder_memsave", "export", str(directory / "run"), "--merge"]
    run_python([*export, "--out", str(directory / "merged"), "--dtype", "float32"], num_forks=1)
    return directory


def logits(model: Any, *, is_training: bool) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.train(is_training)(input_ids=torch.arange(4, 40)[None]).logits
    return found


@pytest.mark.filterwarnings("ignore")
def test_logits_are_those_of_the_run(finished: Path, base: Path) -> None:
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    kept = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, quantization_config=quantization, device_map="cpu"
    )
    assert type(kept.model.layers[0].mlp.up_proj).__name__ == "Linear4bit"
    merged = AutoModelForCausalLM.from_pretrained(finished / "merged", dtype=torch.float32)
    of_run = logits(merged, is_training=False)

    def far(model: Any, *, is_training: bool) -> float:
        difference = logits(model, is_training=is_training) - of_run
        return float(difference.norm() / of_run.norm())

    adapter = finished / "run" / "adapter"
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without_4_bits = far(PeftModel.from_pretrained(plain, adapter), is_training=False)
    without_adapter = far(kept, is_training=True)
    adapted = PeftModel.from_pretrained(kept, adapter)
    # In training it dequantises weights and multiplies float32; there is no dropout.
    exact, by_kernel = (far(adapted, is_training=is_training) for is_training in (True, False))
    print(
        f"{exact:.1e}, by its kernel {by_kernel:.1e}; {without_4_bits:.1e}, {without_adapter:.1e}"
    )
    assert exact < 1e-6
    assert by_kernel < IN_BFLOAT16
    assert min(without_4_bits, without_adapter) > 5 * IN_BFLOAT16
