"""A run with `model.frozen_weights` trains, resumes to the same bits, and exports what it trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from harness.fabric import run_python
from harness.language_model import run_values, write_run_file
from harness.nf4_tensors import in_files
from thunder_memsave import ConfigError
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.config import load_strategy_config
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.formats import NF4, format_named

NUM_STEPS, NUM_LINEARS = 4, 7


@pytest.fixture(scope="module", params=["nf4", "int8", "nf4 in files"])
def case(request: pytest.FixtureRequest) -> str:
    """The format, and for NF4 whether the base model's files have it already."""
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def kept(case: str) -> StoredFormat:
    return format_named(case.partition(" ")[0])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one_layer: Path, case: str) -> Path:
    """Return the base model's directory, as transformers writes it with bitsandbytes if it is to have NF4."""
    if case != "nf4 in files":
        return one_layer
    directory = tmp_path_factory.mktemp("base")
    shutil.copytree(one_layer, directory, dirs_exist_ok=True)
    tensors = load_file(one_layer / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        tensors |= in_files(name, NF4.quantize(weight, name=name), tuple(weight.shape))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((directory / "config.json").read_text())
    values["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    }
    (directory / "config.json").write_text(json.dumps(values))
    return directory


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path, kept: StoredFormat) -> Path:
    """Make a directory with a run, one that was resumed half-way, and the merged model of the first."""
    directory = tmp_path_factory.mktemp(kept.name)
    values = run_values(
        directory,
        base,
        train={"max_steps": NUM_STEPS, "micro_batch_size": 2},
        eval={"every_n_steps": None},
    )
    values["checkpoint"] = {"every_n_steps": 2, "keep_last": 9}
    values["model"]["frozen_weights"] = kept.name
    values["lora"]["use_dora"] = kept.name == "int8"
    write_run_file(directory, values)
    train = ["-m", "thunder_memsave", "train", str(directory / "run.yaml")]
    (directory / "printed.txt").write_text(run_python(train, num_forks=1))
    resumed = f"--output_dir={directory / 'resumed'}"
    half = f"--resume={directory / 'run' / 'checkpoints' / 'step-00000002'}"
    run_python([*train, resumed, half], num_forks=1)
    export = ["-m", "thunder_memsave", "export", str(directory / "run"), "--merge"]
    run_python([*export, "--out", str(directory / "merged"), "--dtype", "float32"], num_forks=1)
    return directory


def test_the_first_lines_say_how_many_weights_are_in_fewer_bytes(
    finished: Path, kept: StoredFormat
) -> None:
    printed = (finished / "printed.txt").read_text()
    assert f"{NUM_LINEARS} frozen weights kept in " in printed
    assert f" bytes ({kept.title})" in printed


def test_checkpoints_do_not_hold_the_frozen_weights(finished: Path) -> None:
    names = read_manifest(finished / "run/checkpoints/step-00000004").tensors["model"]
    assert any(name.endswith("lora_A.default.weight") for name in names)
    assert not any("base_layer" in name for name in names)


def test_a_resumed_run_has_the_bits_of_one_that_went_through(finished: Path) -> None:
    whole, resumed = (
        load_file(finished / name / "adapter" / "adapter_model.safetensors")
        for name in ("run", "resumed")
    )
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@torch.no_grad()
def test_the_merged_model_is_the_adapter_on_the_dequantised_base(
    finished: Path, one_layer: Path, kept: StoredFormat
) -> None:
    """Not on the base's own weights: the adapter was trained on others."""
    ids = torch.arange(4, 40)[None]
    merged = AutoModelForCausalLM.from_pretrained(finished / "merged", dtype=torch.float32)
    logits = []
    for dequantises in (True, False):
        base = AutoModelForCausalLM.from_pretrained(one_layer, dtype=torch.float32)
        for name, module in base.named_modules() if dequantises else ():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(kept.round_trip(module.weight, name=name))
        adapted = PeftModel.from_pretrained(base, finished / "run" / "adapter").eval()
        logits.append(adapted(input_ids=ids).logits)
    found = merged(input_ids=ids).logits
    assert (found - logits[0]).norm() / found.norm() < 1e-6
    assert (found - logits[1]).norm() / found.norm() > {"nf4": 1e-3, "int8": 1e-4}[kept.name]


def test_a_script_that_reads_the_run_file_keeps_its_weights_so_too(
    finished: Path, kept: StoredFormat
) -> None:
    assert load_strategy_config(finished / "run.yaml").frozen_weights == kept.name
    other = finished / "other.yaml"
    other.write_text("model: {frozen_weights: int4}\n")
    with pytest.raises(
        ConfigError,
        match=r"model\.frozen_weights is 'int4'; write 'nf4' or 'int8' or 'mxfp4', or null",
    ):
        load_strategy_config(other)
