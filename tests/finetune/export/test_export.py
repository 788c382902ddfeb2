"""An export writes an adapter, without gathering the base model, or a whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.fabric import Fabric
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from thunder_memsave.callbacks.all_ranks import DiskError
from thunder_memsave.checkpoints import CheckpointError, module_state
from thunder_memsave.distributed.data_parallel import DataParallel
from thunder_memsave.finetune.export.export import export
from thunder_memsave.sharding.rows import gather_full

ADAPTERS: tuple[dict[str, Any], ...] = (
    {"target_modules": ["q_proj"]},
    {"target_modules": ["q_proj"], "use_dora": True, "bias": "lora_only"},
    {"target_modules": ["v_proj"], "modules_to_save": ["lm_head"]},
)


def adapted(model_directory: Path, arguments: dict[str, Any]) -> Any:
    base = AutoModelForCausalLM.from_pretrained(model_directory)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 2, **arguments}))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.uniform_(0.5, 1)
    return model


IN_FP8 = {"target_modules": ["q_proj"], "r": 16}


@pytest.mark.parametrize(
    ("arguments", "fp8"),
    [*((arguments, None) for arguments in ADAPTERS), (IN_FP8, {})],
    ids=["lora", "dora", "modules_to_save", "fp8"],
)
def test_an_adapter_is_what_peft_itself_would_save(
    tmp_path: Path, model_directory: Path, arguments: dict[str, Any], fp8: dict[str, Any] | None
) -> None:
    adapted(model_directory, arguments).save_pretrained(tmp_path / "peft")
    fabric = make_fabric(fp8=fp8)
    model = fabric.setup(adapted(model_directory, arguments))
    export(fabric, model, None, tmp_path / "ours")
    ours, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "peft")
    )
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], expected[name]) for name in ours)


def test_a_disk_that_refuses_what_was_trained_is_told_with_a_way_out(
    tmp_path: Path, model_directory: Path
) -> None:
    fabric = make_fabric()
    model = fabric.setup(adapted(model_directory, ADAPTERS[0]))
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match=r"be written to .*/ours \(Not a directory: .*resume=auto"):
        export(fabric, model, None, tmp_path / "file" / "ours")


def test_exporting_an_adapter_gathers_nothing_of_the_base_model(
    tmp_path: Path, model_directory: Path
) -> None:
    run_on_fabric_ranks(check_what_is_gathered, 2, tmp_path, model_directory)


@on_fabric_rank
def check_what_is_gathered(tmp_path: Path, model_directory: Path) -> None:
    fabric = make_fabric(devices=2, timeout="1min")
    model = fabric.setup(adapted(model_directory, ADAPTERS[0]))
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    gathered: list[int] = []

    def gather(p: Tensor, data_parallel: DataParallel | None) -> Tensor:
        gathered.append(id(p))
        return gather_full(p, data_parallel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module_state, "gather_full", gather)
        export(fabric, model, None, tmp_path / "adapter")
    assert len(gathered) == len(trained)
    assert set(gathered) == trained
    _check_that_a_failed_write_stops_all_ranks(fabric, model, tmp_path)


def _check_that_a_failed_write_stops_all_ranks(fabric: Fabric, model: Any, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:

        def fail(*args: object, **kwargs: object) -> None:
            raise OSError("disk full")

        patch.setattr(peft.PeftModel, "save_pretrained", fail)
        with pytest.raises(
            OSError if fabric.is_global_zero else CheckpointError, match="disk full"
        ):
            export(fabric, model, None, tmp_path / "failed")
