"""If torch's DCP cannot plan a save or load, our own error says so, and nothing is changed."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from thunder_memsave.checkpoints import StateMismatchError, load_checkpoint, save_checkpoint
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return {"net": net, "opt": optimizer}


def saved(path: Path, change: Callable[[Metadata], None]) -> Path:
    save_checkpoint(path, make_state(), state_dict_type="sharded", data_parallel=None)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


def refusal(path: Path, kind: type[Exception]) -> str:
    state = make_state()
    before = [p.detach().clone() for p in state["net"].parameters()]
    with pytest.raises(kind) as caught:
        load_checkpoint(path, state, data_parallel=None)
    after = list(state["net"].parameters())
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    return str(caught.value)


def test_names_that_are_one_in_the_file_are_refused(tmp_path: Path) -> None:
    state = {"net": nn.ModuleDict({"inner": nn.Linear(1, 1)}), "net.inner": nn.Linear(1, 1)}
    with pytest.raises(
        ValueError, match=r"cannot write this state as shards \(ValueError: duplicated.*use state_"
    ):
        save_checkpoint(tmp_path / "c", state, state_dict_type="sharded", data_parallel=None)
    assert not list(tmp_path.iterdir())


def test_a_tensor_where_a_setting_should_be_is_refused(tmp_path: Path) -> None:
    def change(metadata: Metadata) -> None:
        tensor = metadata.state_dict_metadata["net.bias"]
        assert isinstance(tensor, TensorStorageMetadata)
        metadata.state_dict_metadata["opt.param_groups.0.lr"] = tensor
        storage: Any = metadata.storage_data
        of_bias = next(v for k, v in storage.items() if k.fqn == "net.bias")
        index = next(k for k in storage if k.fqn == "opt.param_groups.0.lr")
        del storage[index]
        storage[type(index)(index.fqn, offset=torch.Size([0]), index=0)] = of_bias

    said = refusal(saved(tmp_path / "c", change), DamagedCheckpointError)
    assert "cannot read these shards into this state (ValueError: Invalid checkpoint meta" in said


@pytest.mark.parametrize(
    ("flat", "place"),
    [
        ("net.weight", ("net",)),
        ("opt.state.weight.exp_avg", ("opt", "state", "weight", "exp_avg", 0)),
        ("opt.param_groups.0.lr", ("opt", "param_groups", "first", "lr")),
    ],
)
def test_an_entry_in_no_place_of_a_checkpoint_is_refused(
    tmp_path: Path, flat: str, place: tuple[str | int, ...]
) -> None:
    def change(metadata: Metadata) -> None:
        metadata.planner_data[flat] = place

    said = refusal(saved(tmp_path / "c", change), DamagedCheckpointError)
    assert f"{flat!r} lies at " in said
    assert "no save writes that" in said


@pytest.mark.parametrize("format", ["sharded", "full"])
def test_state_of_a_parameter_that_is_not_trained_is_refused(tmp_path: Path, format: Any) -> None:
    state, path = make_state(), tmp_path / "c"
    if format == "full":
        save_checkpoint(path, state, state_dict_type=format, data_parallel=None)
        loaded = torch.load(path)
        loaded["opt"]["state"]["other"] = loaded["opt"]["state"].pop("bias")
        torch.save(loaded, path)
    else:

        def change(metadata: Metadata) -> None:
            metadata.planner_data["opt.state.bias.step"] = ("opt", "state", "other", "step")

        saved(path, change)
    said = refusal(path, StateMismatchError)
    assert "other (step): in the file, and the optimizer does not train this parameter" in said
