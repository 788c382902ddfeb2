"""A run with frozen weights on the host: its adapters' bits, `plan`'s bytes, and which layers a device cannot hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from harness.host_weights import small_host_weights
from harness.language_model import run_values, write_model, write_run_file
from thunder_memsave.finetune.cli import main
from thunder_memsave.finetune.model.build import describe_model
from thunder_memsave.finetune.plan.plan_run import plan_run
from thunder_memsave.finetune.run import weights_on_host
from thunder_memsave.finetune.run.weights_on_host import frozen_bytes, layers_on_host
from thunder_memsave.finetune.run_file.reading.parse import load_run_config
from thunder_memsave.planner.devices import device
from thunder_memsave.planner.report.offload_shown import weights_shown

ON_HOST = {"offload_weights": ["*.layers.0"], "host_budget": "1GiB"}


@pytest.fixture(autouse=True)
def small_weights() -> Iterator[None]:
    """Let small weights stay on the host too."""
    with small_host_weights():
        yield


def written(directory: Path, model: Path, **sections: Any) -> str:
    directory.mkdir()
    train = {"global_batch_size": 2, "micro_batch_size": 2, "max_steps": 2}
    return str(write_run_file(directory, run_values(directory, model, train=train, **sections)))


def adapters(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "run" / "adapter" / "adapter_model.safetensors")


def test_a_run_trains_the_adapters_of_one_with_weights_on_the_device(
    one_layer: Path, tmp_path: Path
) -> None:
    here, there = (
        written(tmp_path / name, one_layer, memory=memory)
        for name, memory in (("here", {}), ("there", ON_HOST))
    )
    assert main(["train", here]) == main(["train", there]) == 0
    expected, found = adapters(tmp_path / "here"), adapters(tmp_path / "there")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_plan_says_which_weights_are_there(
    one_layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, report = written(tmp_path / "run", one_layer, memory=ON_HOST), tmp_path / "plan.json"
    options = ["--device=h200", "--world-size=1", "--host-memory=8GiB", f"--json={report}"]
    assert main(["plan", file, *options]) == 0
    assert (
        " of frozen weights, of layer 0 of base_model.model.model.layers" in capsys.readouterr().out
    )
    ((module, nbytes),) = (
        each.values() for each in json.loads(report.read_text())["weights_on_host"]
    )
    assert module == "base_model.model.model.layers.0"
    assert nbytes > 0


def test_validate_refuses_what_a_run_would(
    one_layer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path / "run", one_layer, memory={**ON_HOST, "offload_weights": ["*.layer.0"]}
    )
    assert main(["validate", file]) == 2
    assert "has '*.layer.0', which names no module of this model" in capsys.readouterr().err
    options = ["--memory.offload_weights=['*.layers.0']", "--lora=null"]
    assert main(["validate", file, *options]) == 2
    assert "names modules without frozen weights of at least" in capsys.readouterr().err
    options = ["--memory.offload_weights=['*.layers.0']", "--memory.host_budget=1KiB"]
    assert main(["train", file, *options]) == 3
    assert "raise it, name fewer modules, or make weights smaller" in capsys.readouterr().err


def test_shards_of_several_processes_stay_on_their_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of a layer are gathered before it, and said to be its own."""
    two_layers = write_model(tmp_path / "model", num_hidden_layers=2)
    memory = {**ON_HOST, "offload_weights": ["*.layers.1"]}
    file = written(tmp_path / "run", two_layers, memory=memory)
    options = ["--device=h200", "--host-memory=8GiB", "--train.micro_batch_size=1"]
    said = []
    for size in (1, 2):
        assert main(["plan", file, *options, f"--world-size={size}"]) == 0
        lines = capsys.readouterr().out.splitlines()
        said += [line for line in lines if "of frozen weights, of layer 1 of base_model." in line]
    alone, shared = (float(line.split()[3]) for line in said)
    assert shared == alone / 2


def test_what_a_device_cannot_hold_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    two_layers = write_model(tmp_path / "model", num_hidden_layers=2)
    file = written(tmp_path / "run", two_layers, memory={"limits": "tensors"})
    config = load_run_config(file)
    model, h200 = describe_model(config), replace(device("h200"), host_memory_bytes=2**33)
    needed = plan_run(config, device=h200, num_ranks=1, has_curve=False)
    nbytes = frozen_bytes(config, model)
    assert layers_on_host(config, model, h200, 10 * nbytes) == ((), "")
    with patch.object(weights_on_host, "_MUCH", 0.0):  # cuBLAS's workspaces alone are much more
        names, line = layers_on_host(config, model, h200, needed.smallest_bytes - nbytes // 9)
    assert 0 < len(names) <= 2
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert "of frozen weights, of layer" in line


@pytest.mark.soak
def test_a_rank_plans_in_another_process(tmp_path: Path) -> None:
    """A plan for ranks has a process group, and so has the rank."""
    wide = write_model(
        tmp_path / "model", num_hidden_layers=2, hidden_size=256, intermediate_size=512
    )
    memory = {"limits": "tensors", "offload": "auto"}
    config = load_run_config(
        written(tmp_path / "run", wide, memory=memory), ["--train.micro_batch_size=1"]
    )
    model, h200 = describe_model(config), replace(device("h200"), host_memory_bytes=2**33)
    needed = plan_run(config, device=h200, num_ranks=2, has_curve=False)
    budget_bytes = needed.smallest_bytes - 2**17
    with patch.object(weights_on_host, "_MUCH", 0.0):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            names, line = layers_on_host(config, model, h200, budget_bytes, num_ranks=2)
        finally:
            dist.destroy_process_group()
    assert 0 < len(names) <= 2
    assert "of frozen weights, of layer" in line


def test_a_plan_with_fp8_copies_leaves_weights_where_they_are(
    one_layer: Path, tmp_path: Path
) -> None:
    memory = {"limits": "tensors", "budget": 2**26}  # cuBLAS's workspaces alone
    config = load_run_config(
        written(tmp_path / "run", one_layer, memory=memory, fp8={}),
        ["--train.micro_batch_size=1"],
    )
    h200 = replace(device("h200"), host_memory_bytes=2**33)
    made = plan_run(config, device=h200, num_ranks=1, has_curve=False)
    assert not made.fits
    assert not weights_shown(made.call.program)
