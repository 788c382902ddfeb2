"""Exports refuse a run, files or an adapter that are not what they should be."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft.tuners.lora import Linear
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from harness.fabric import make_fabric
from harness.language_model import llama_config, run_values, write_run_file
from harness.run_checkpoints import save, sign_again
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError
from thunder_memsave.checkpoints.sources import open_source
from thunder_memsave.errors import ExportError
from thunder_memsave.finetune.export import export_command
from thunder_memsave.finetune.export.checkpoint_weights import model_in, verified_manifest
from thunder_memsave.finetune.export.merged import MergedWeights
from thunder_memsave.finetune.export.trained_model import find_trained_model
from thunder_memsave.finetune.export.verified_export import _file_names, _on_meta
from thunder_memsave.finetune.model.build import build_model, load_tokenizer
from thunder_memsave.finetune.model.trained_part import trained_part
from thunder_memsave.finetune.model.weight_names import stored_names
from thunder_memsave.finetune.output.run_directory import RunDirectory
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.settings.problems import ConfigError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Write two checkpoints beside a run file, without a model."""
    for step in (1, 2):
        save(make_fabric(), tmp_path / "run" / "checkpoints", step=step)
    (tmp_path / "run" / "config.yaml").touch()
    return tmp_path / "run"


def test_the_checkpoint_before_a_damaged_one_is_named(run: Path) -> None:
    (run / "checkpoints" / "step-00000002" / "state" / "meta.pt").write_bytes(b"")
    with pytest.raises(
        ConfigError, match=r"step-00000002 is damaged: state/meta\.pt has"
    ) as raised:
        find_trained_model(run)
    assert f"Name another checkpoint, such as {run}/checkpoints/step-00000001." in str(raised.value)


def test_base_weights_that_a_checkpoint_has_in_fp8_alone_are_named(
    tmp_path: Path, tokenizer_directory: Path
) -> None:
    fp8 = {"backend": "torch", "skip_modules": ["lora_A", "lora_B"], "frozen_weights": "fp8"}
    values = run_values(
        tmp_path,
        tokenizer_directory,
        model={"config": {"model_type": "llama", **llama_config()}},
        fp8=fp8,
    )
    config = load_run_config(write_run_file(tmp_path, values))
    fabric = make_fabric(fp8=fp8)
    model: Any = build_model(config, load_tokenizer(config.model))
    fabric.setup(model)
    directory = RunDirectory(root=tmp_path / "run")
    directory.create(config)
    state = {"model": trained_part(model, in_files=()), "step": 1}
    ModelCheckpoint(directory.checkpoints).save(fabric, state, step=1)
    message = (
        r"step-00000001 holds 15 frozen weights in fp8 alone \(fp8\.frozen_weights: fp8\), such as "
        r"base_model\..*weight, which export does not read and no base model's files have; train "
        r"with fp8\.frozen_weights: compute, or on a model\.name_or_path that has weights"
    )
    with pytest.raises(ConfigError, match=message):
        find_trained_model(directory.root)


def test_a_checkpoint_that_is_a_link_is_not_followed(run: Path) -> None:
    last = run / "checkpoints" / "step-00000002"
    shutil.move(last, run / "elsewhere")
    os.symlink(run / "elsewhere", last)
    with pytest.raises(ConfigError, match="is a link, and none is followed"):
        find_trained_model(run)


def test_the_weights_of_a_checkpoint_are_those_that_were_saved(tmp_path: Path) -> None:
    path = save(make_fabric(), tmp_path, step=3)
    verified_manifest(path)
    weights = model_in(path)
    assert sorted(weights.names()) == ["bias", "weight"]
    assert weights.spec("weight").shape == (3, 5)
    assert torch.allclose(weights.read("weight"), torch.tensor(2.9), atol=0.01)
    assert weights.read("weight", slice(1, 3)).shape == (2, 5)


def test_a_table_of_contents_that_is_none_is_refused(run: Path) -> None:
    path = run / "checkpoints" / "step-00000002"
    (path / "state" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    sign_again(path)
    with pytest.raises(
        DamagedCheckpointError, match=r"\.metadata cannot be read: it names os\.sys"
    ):
        model_in(path)
    assert not Path("ran").exists()


def test_a_weight_that_is_code_is_refused(tmp_path: Path) -> None:
    path = save(make_fabric(), tmp_path, step=3)
    shards = path / "state" / "__0_0.distcp"
    shards.write_bytes(bytes(shards.stat().st_size))
    weights = model_in(path)
    message = r"'model\.weight' cannot be read: .*torch\.save"
    with pytest.raises(DamagedCheckpointError, match=message):
        weights.read("weight")
    message = r"step-00000003 is damaged: no weight; name another checkpoint\.$"
    with pytest.raises(ConfigError, match=message), export_command._refused(path):
        raise DamagedCheckpointError("no weight")


def test_a_checkpoint_that_is_one_file_is_read_too(tmp_path: Path) -> None:
    torch.save({"model": {"weight": torch.arange(3.0)}}, tmp_path / "state")
    assert torch.equal(model_in(tmp_path).read("weight"), torch.arange(3.0))


def test_a_disk_with_too_little_space_is_found_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    message = r"the weights take 2,000 bytes, and the disk of .*/out has 1,000 left; free some"
    with pytest.raises(ConfigError, match=message):
        export_command._check_space(tmp_path / "out", 2000)
    export_command._check_space(tmp_path / "out", 1000)


def test_what_peft_cannot_merge_is_named(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    model: Any = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj"]))

    def refuse(self: object) -> None:
        raise NotImplementedError("not this one")

    monkeypatch.setattr(Linear, "merge", refuse)
    merged = MergedWeights(model, lambda name: model.state_dict()[name])
    message = r"^peft cannot merge Linear at .*layers\.0\.self_attn\.q_proj \(not this one\); leave --merge out"
    with pytest.raises(ConfigError, match=message):
        merged.read("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("change", ["missing", "more"])
def test_files_with_other_weights_than_the_model_are_found(
    change: str, model_directory: Path, tmp_path: Path
) -> None:
    weights = load_file(model_directory / "model.safetensors")
    if change == "missing":
        del weights["model.norm.weight"]
        message = r"the files hold \[\] for \['model\.norm\.weight'\], and not one weight; nothing"
    else:
        weights["more"] = torch.zeros(1)
        message = r"the files hold \['more'\], which the model has not; nothing was exported"
    save_file(weights, tmp_path / "model.safetensors")
    model = _on_meta(AutoConfig.from_pretrained(model_directory))
    source = open_source(tmp_path)
    with pytest.raises(ExportError, match=message):
        _file_names(model, source, stored_names(model, source.names()).of)
