"""Full tensors are read row by row, without reading anything else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from thunder_memsave.checkpoints.sources import load_mapped, open_source

TENSORS = {
    "w": torch.arange(6.0).reshape(3, 2),
    "b": torch.ones(3, dtype=torch.bfloat16),
    "n": torch.tensor(4),
}


@pytest.fixture(params=["state.pt", "one.safetensors", "hf", "hf-split"])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = tmp_path / request.param
    if path.suffix == ".pt":
        torch.save(TENSORS, path)
    elif path.suffix == ".safetensors":
        save_file(TENSORS, path)
    else:
        path.mkdir()
        files = dict.fromkeys(TENSORS, "model.safetensors")
        if path.name == "hf-split":
            files["w"] = "model-2.safetensors"
            (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
        for file in set(files.values()):
            save_file({n: t for n, t in TENSORS.items() if files[n] == file}, path / file)
    return path


def test_every_kind_gives_names_specs_and_rows(stored: Path) -> None:
    source = open_source(stored)
    assert set(source.names()) == set(TENSORS)
    for name, t in TENSORS.items():
        assert (source.spec(name).shape, source.spec(name).dtype) == (t.shape, t.dtype)
        assert torch.equal(source.read(name), t)
    assert torch.equal(source.read("w", slice(1, 3)), TENSORS["w"][1:3])


def test_a_missing_path_and_a_directory_without_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone.pt was to be loaded and does not exist"):
        open_source(tmp_path / "gone.pt")
    with pytest.raises(ValueError, match=r"holds neither model.safetensors nor .*save_pretrained"):
        open_source(tmp_path)


def test_an_index_may_only_name_files_beside_itself(tmp_path: Path) -> None:
    index = {"weight_map": {"w": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names '../secret.safetensors', which is not a file bes"):
        open_source(tmp_path)


def test_whole_checkpoints_and_other_objects_are_told_apart(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match=r"maps 'model' to a dict.*fabric.load\(path"):
        open_source(tmp_path / "checkpoint.pt")
    torch.save([torch.ones(1)], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"holds a list; a mapping from names to tensors"):
        open_source(tmp_path / "list.pt")


def test_files_that_could_run_code_and_old_formats_are_refused(tmp_path: Path) -> None:
    torch.save({"w": Path("x")}, tmp_path / "unsafe.pt")
    with pytest.raises(ValueError, match=r"holds more than tensors.*pass weights_only=False"):
        load_mapped(tmp_path / "unsafe.pt", weights_only=True)
    assert load_mapped(tmp_path / "unsafe.pt", weights_only=False) == {"w": Path("x")}
    old = tmp_path / "old.pt"
    torch.save({"w": torch.ones(1)}, old, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"old.pt cannot be read as a file written by torch.save"):
        open_source(old)


def test_a_dtype_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2, dtype=torch.uint16)}, tmp_path / "w.safetensors")
    source = open_source(tmp_path / "w.safetensors")
    with pytest.raises(ValueError, match=r"'w' in .* has dtype U16, which cannot be read"):
        source.spec("w")
