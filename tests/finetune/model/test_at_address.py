"""A model at an address is copied once, whole, and again when it changes there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from harness.unsteady_store import UnsteadyStore, unsteady_store
from thunder_memsave.finetune.model.at_address import model_from_address
from thunder_memsave.finetune.model.hub import model_directory as directory_of
from thunder_memsave.finetune.run_file.config import ModelConfig, RunConfig
from thunder_memsave.finetune.run_file.reading.checks import check_config
from thunder_memsave.finetune.run_file.reading.problems import Problems
from thunder_memsave.settings.problems import ConfigError

ADDRESS = "unsteady://models/a.model"
OF_MODEL = ModelConfig(name_or_path=ADDRESS)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[UnsteadyStore]]:
    monkeypatch.setenv("THUNDER_MEMSAVE_CACHE", str(tmp_path / "cache"))
    model_from_address.cache_clear()
    with unsteady_store() as store:
        yield store
    model_from_address.cache_clear()


@pytest.fixture
def files(store: type[UnsteadyStore], model_directory: Path) -> dict[str, bytes]:
    """A model, and files beside it that no run needs; those of the model."""
    content = {path.name: path.read_bytes() for path in model_directory.iterdir()}
    others = {"pytorch_model.bin": b"pickled", "original/consolidated.pth": b"pickled"}
    put({**content, **others})
    return content


def put(files: dict[str, bytes]) -> None:
    filesystem = fsspec.filesystem("unsteady")
    for name, content in files.items():
        filesystem.pipe_file(f"/models/a.model/{name}", content)


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_what_a_run_needs_is_copied(files: dict[str, bytes], tmp_path: Path) -> None:
    assert content(directory_of(OF_MODEL)) == files
    assert sorted(p.suffix for p in (tmp_path / "cache/models").iterdir()) != []
    assert not list((tmp_path / "cache/models").glob("*.partial*"))


def test_of_a_model_with_an_own_config_only_the_tokenizer_is_copied(
    files: dict[str, bytes],
) -> None:
    with_config = ModelConfig(name_or_path=ADDRESS, config={"model_type": "llama"})
    names = set(content(directory_of(with_config)))
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"config.json", "model.safetensors"}


def test_a_second_run_copies_nothing(
    files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    first = directory_of(OF_MODEL)
    assert f"copying {ADDRESS} to {first}" in capsys.readouterr().err
    model_from_address.cache_clear()
    assert directory_of(OF_MODEL) == first
    assert not capsys.readouterr().err


def test_a_changed_model_is_copied_again_by_the_next_process(files: dict[str, bytes]) -> None:
    first = directory_of(OF_MODEL)
    put({"generation_config.json": b"{}"})
    assert directory_of(OF_MODEL) == first
    model_from_address.cache_clear()
    second = directory_of(OF_MODEL)
    assert content(second) == {**files, "generation_config.json": b"{}"}
    assert content(first) == files


def test_a_copy_that_breaks_off_is_made_anew(
    files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = UnsteadyStore.open

    def broken(self: UnsteadyStore, path: str, *args: object, **kwargs: object) -> object:
        if path.endswith("model.safetensors"):
            raise KeyboardInterrupt
        return taken(self, path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(UnsteadyStore, "open", broken)
        with pytest.raises(KeyboardInterrupt):
            directory_of(OF_MODEL)
    assert not [path for path in (tmp_path / "cache/models").iterdir() if path.is_dir()]
    assert content(directory_of(OF_MODEL)) == files


def test_what_is_left_of_a_killed_copy_is_not_taken(files: dict[str, bytes]) -> None:
    directory = directory_of(OF_MODEL)
    partial = directory.with_name(f"{directory.name}.partial-host-1")
    directory.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    model_from_address.cache_clear()
    assert content(directory_of(OF_MODEL)) == files
    assert not partial.exists()


def test_of_several_at_once_one_copies(
    files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(directory_of(OF_MODEL))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 4
    assert capsys.readouterr().err.count("copying ") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unsteady://models/none", r"unsteady://models/none cannot be listed \(FileNotFound"),
        ("unsteady://models", "which has neither a config.json nor weights; check the address"),
    ],
)
def test_an_address_without_a_model(files: dict[str, bytes], name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        directory_of(ModelConfig(name_or_path=name))
    assert caught.value.key == "model.name_or_path"


def test_a_damaged_model(files: dict[str, bytes]) -> None:
    put({"model.safetensors": files["model.safetensors"][:-5]})
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged or cut short"):
        directory_of(OF_MODEL)


def test_a_revision_of_an_address(files: dict[str, bytes]) -> None:
    with pytest.raises(ConfigError, match="is an address; revisions are the hub's"):
        directory_of(ModelConfig(name_or_path=ADDRESS, revision="main"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("s4://bucket/model", "fsspec knows no protocol 's4'"),
        ("s3://me:secret@bucket/model", "model.name_or_path has a user and a password"),
    ],
)
def test_addresses_are_checked_before_anything_is_asked(address: str, message: str) -> None:
    problems = Problems()
    check_config(RunConfig(model=ModelConfig(name_or_path=address)), problems)
    assert message in "\n".join(map(str, problems.found))
