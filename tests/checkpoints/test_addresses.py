"""Checkpoints at an address are whole or none, and come back with the bytes that were written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from harness.unsteady_store import (
    KilledError,
    UnsteadyStore,
    content_of,
    fail,
    steady,
    unsteady_store,
    write_checkpoint,
)
from thunder_memsave.checkpoints.addresses import AddressError, RunAtAddress
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError, read_manifest

NAME = "step-00000004"
AT = f"/run/checkpoints/{NAME}"


@pytest.fixture
def store() -> Iterator[type[UnsteadyStore]]:
    with unsteady_store() as store:
        yield store


@pytest.fixture(params=["memory", "file"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RunAtAddress]:
    if request.param == "file":
        yield RunAtAddress(f"file://{tmp_path}/bucket/run")
        return
    yield RunAtAddress("memory://addresses/run/")
    fsspec.filesystem("memory").rm("/addresses", recursive=True)


def test_a_checkpoint_comes_back_as_it_was_written(run: RunAtAddress, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "here", 4)
    assert run.names() == []
    assert run.find(NAME) is None
    run.upload(path)
    assert run.names() == [NAME]
    signed = run.find(NAME)
    assert signed is not None
    assert signed.manifest == read_manifest(path)
    run.download(NAME, signed, tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(path)
    assert signed.num_bytes == sum(map(len, content_of(path).values()))
    run.delete(NAME)
    assert run.find(NAME) is None
    run.upload(path)
    assert run.find(NAME) is not None


def test_the_manifest_is_written_last_and_its_checksum_goes_first(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path, 4)
    run.upload(path)
    written = [each.removeprefix(f"put {AT}/") for each in store.done if each.startswith("put")]
    assert len(written) == 6
    assert written[-2:] == ["manifest.json", "manifest.sha256"]
    steady()
    run.upload(path)
    assert not [each for each in store.done if each.startswith(("put", "delete"))]
    steady()
    shutil.rmtree(path)
    run.upload(write_checkpoint(tmp_path, 4, text="after a rollback"))
    changes = [each for each in store.done if each.startswith(("put", "delete"))]
    assert changes[0] == f"delete {AT}/manifest.sha256"
    assert len(changes) == 7
    steady()
    run.delete(NAME)
    deleted = [each for each in store.done if each.startswith("delete")]
    assert deleted[0] == f"delete {AT}/manifest.sha256"
    assert not store.store


def test_a_kill_at_any_operation_leaves_a_whole_checkpoint_or_none(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    run, other = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path / "other", 4, text="old")
    path = write_checkpoint(tmp_path / "here", 4)
    run.upload(other)
    steady()
    run.upload(path)
    num_operations, was_there, was_none = len(store.done), 0, 0
    assert num_operations > 9
    for at in range(num_operations):
        store.store.clear()
        steady()
        run.upload(other)
        fail(at)
        with pytest.raises(KilledError):
            run.upload(path)
        steady()
        signed = run.find(NAME)  # raises if it is damaged
        was_none += signed is None
        was_there += signed is not None
        if signed is not None:
            assert signed.manifest == read_manifest(other)
            run.download(NAME, signed, tmp_path / f"back{at}")
        run.upload(path)
        repaired = run.find(NAME)
        assert repaired is not None
        assert repaired.manifest == read_manifest(path)
    assert was_there
    assert was_none


def test_what_is_not_as_it_was_written_is_refused_by_the_name_of_the_file(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path / "here", 4)
    run.upload(path)
    signed = run.find(NAME)
    assert signed is not None
    tensors = f"{AT}/state/__0_0.distcp"
    content = store.store[tensors].getvalue()
    filesystem = fsspec.filesystem("unsteady")
    filesystem.pipe_file(tensors, b"X" + content[1:])
    assert run.find(NAME) == signed  # which reads no file
    with pytest.raises(DamagedCheckpointError, match=r"state/__0_0.distcp has the SHA-256"):
        run.download(NAME, signed, tmp_path / "flipped")
    filesystem.pipe_file(tensors, content[1:])
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp has \d+ bytes, and had \d+"):
        run.find(NAME)
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp has \d+ bytes, and had \d+"):
        run.download(NAME, signed, tmp_path / "short")
    filesystem.pipe_file(tensors, content + b"more")
    with pytest.raises(DamagedCheckpointError, match=r"__0_0.distcp has \d+ bytes, and had \d+"):
        run.download(NAME, signed, tmp_path / "long")
    filesystem.rm_file(tensors)
    with pytest.raises(DamagedCheckpointError, match=r"state/__0_0.distcp is missing"):
        run.find(NAME)
    with pytest.raises(DamagedCheckpointError, match=r"state/__0_0.distcp is missing"):
        run.download(NAME, signed, tmp_path / "missing")
    run.upload(path)  # repairs it
    assert run.find(NAME) == signed
    filesystem.rm_file(f"{AT}/manifest.json")
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is missing"):
        run.find(NAME)
    filesystem.pipe_file(f"{AT}/manifest.json", signed.content + b" ")
    with pytest.raises(DamagedCheckpointError, match="does not have the SHA-256"):
        run.find(NAME)
    filesystem.pipe_file(f"{AT}/manifest.sha256", signed.checksum * 2)
    with pytest.raises(DamagedCheckpointError, match=r"manifest.sha256 has more than 80 bytes"):
        run.find(NAME)


def test_a_checkpoint_that_is_deleted_meanwhile_is_left_out(
    store: type[UnsteadyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path / "here", 4)
    puts = UnsteadyStore.put_file

    def put_file(self: UnsteadyStore, lpath: str, rpath: str) -> None:
        puts(self, lpath, rpath)
        shutil.rmtree(path, ignore_errors=True)

    monkeypatch.setattr(UnsteadyStore, "put_file", put_file)
    run.upload(path)
    run.upload(path)  # which is not there at all
    assert run.find(NAME) is None
    assert run.names() == [NAME]


def test_a_checkpoint_that_is_replaced_meanwhile_is_not_mixed_with_the_other(
    store: type[UnsteadyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path / "here", 4, text="one")
    puts = UnsteadyStore.put_file

    def put_file(self: UnsteadyStore, lpath: str, rpath: str) -> None:
        puts(self, lpath, rpath)
        if lpath.endswith("random-00000.pt"):
            shutil.rmtree(path)
            write_checkpoint(tmp_path / "here", 4, text="two")

    with monkeypatch.context() as patch:
        patch.setattr(UnsteadyStore, "put_file", put_file)
        run.upload(path)
    assert run.find(NAME) is None
    run.upload(path)
    signed = run.find(NAME)
    assert signed is not None
    run.download(NAME, signed, tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(path)


def test_errors_name_the_address_and_the_reason(store: type[UnsteadyStore], tmp_path: Path) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path, 4)
    refused = PermissionError("no such key")
    fail(0, after=True, error=refused)
    with pytest.raises(
        AddressError, match=r"unsteady://run cannot be listed \(PermissionError: no"
    ):
        run.names()
    with pytest.raises(AddressError, match=rf"checkpoints/{NAME} cannot be read \(Permission"):
        run.find(NAME)
    with pytest.raises(AddressError, match=rf"checkpoints/{NAME} cannot be written \(Permission"):
        run.upload(path)
    with pytest.raises(AddressError, match=rf"checkpoints/{NAME} cannot be deleted \(Permission"):
        run.delete(NAME)
    with pytest.raises(AddressError, match=r"unsteady://run/config.yaml cannot be written \(Perm"):
        run.put(path / "manifest.json", "config.yaml")


def test_a_truncated_upload_is_no_checkpoint(
    store: type[UnsteadyStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = RunAtAddress("unsteady://run"), write_checkpoint(tmp_path, 4)
    puts = UnsteadyStore.pipe_file
    cut = lambda self, lpath, rpath: puts(self, rpath, b"cut")  # noqa: E731
    monkeypatch.setattr(UnsteadyStore, "put_file", cut)
    with pytest.raises(AddressError, match=r"was not written as it is here: .* has 3 bytes, and"):
        run.upload(path)
    assert run.find(NAME) is None


def test_an_export_is_found_only_when_it_is_whole_and_no_checkpoint_is_newer(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    run, adapter = RunAtAddress("unsteady://run"), tmp_path / "adapter"
    adapter.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "tokenizer.json"):
        (adapter / name).write_text(name)
    (adapter / "templates").mkdir()
    (adapter / "templates" / "tools.jinja").write_text("tools")
    for _ in range(2):
        steady()
        run.put_export(adapter)
        assert store.done[-1] == "put /run/adapter/adapter_config.json"
        assert run.newest_export() == "adapter"
    assert store.done[1] == "delete /run/adapter/adapter_config.json"
    assert len(store.store) == 4
    run.get_export("adapter", tmp_path / "back")
    assert content_of(tmp_path / "back") == content_of(adapter)
    fail(2)
    with pytest.raises(KilledError):
        run.put_export(adapter)
    steady()
    assert run.newest_export() is None
    run.put_export(adapter)
    run.upload(write_checkpoint(tmp_path, 4))
    assert run.newest_export() is None
    with pytest.raises(AddressError, match=r"run/config.yaml cannot be copied to \S+ \(FileNotFo"):
        run.get("config.yaml", tmp_path / "config.yaml")


def test_a_damaged_local_checkpoint_is_not_copied(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, 4)
    (path / "manifest.json").write_text("{}")
    with pytest.raises(
        AddressError, match=r"step-00000004 is damaged: manifest.json does not have"
    ):
        RunAtAddress("unsteady://run").upload(path)
    assert not store.done
