"""A run gets the checkpoint that it resumes from from an address: the right one, whole, and into no other run."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from harness.unsteady_store import (
    KilledError,
    UnsteadyStore,
    fail,
    steady,
    unsteady_store,
    write_checkpoint,
)
from thunder_memsave.callbacks.step_directories import list_checkpoints
from thunder_memsave.checkpoints.addresses import RunAtAddress
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.finetune.output.fetched import with_local_checkpoint
from thunder_memsave.finetune.run_file.config import CheckpointConfig, RunConfig
from thunder_memsave.settings.problems import ConfigError

ADDRESS, FOUR = "unsteady://run", "checkpoints/step-00000004"


@pytest.fixture
def store() -> Iterator[type[UnsteadyStore]]:
    with unsteady_store() as store:
        yield store


@pytest.fixture
def two(store: type[UnsteadyStore], tmp_path: Path) -> RunAtAddress:
    """A run at the address with steps 2 and 4."""
    run = RunAtAddress(ADDRESS)
    for step in (2, 4):
        run.upload(write_checkpoint(tmp_path / "there", step))
    steady()
    return run


def config_of(output: Path, resume: bool | str, *, copy_to: str | None = None) -> RunConfig:
    section = CheckpointConfig(copy_to=copy_to)
    return RunConfig(output_dir=str(output), resume=resume, checkpoint=section)


def steps_in(output: Path) -> list[str]:
    """Return all that is in the directory of checkpoints."""
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def damage(step: int, file: str = "state/meta.pt") -> None:
    """Flip a byte at the address."""
    path = f"/run/checkpoints/step-{step:08d}/{file}"
    content = UnsteadyStore.store[path].getvalue()
    fsspec.filesystem("unsteady").pipe_file(path, bytes([content[0] ^ 1]) + content[1:])


@pytest.mark.parametrize(
    ("address", "step"),
    [
        (ADDRESS, 4),
        (f"{ADDRESS}/", 4),
        (f"{ADDRESS}/checkpoints", 4),
        (f"{ADDRESS}/checkpoints/step-00000002", 2),
        (f"{ADDRESS}/checkpoints/step-00000004/", 4),
    ],
)
def test_an_address_is_that_of_a_run_or_of_a_checkpoint(
    two: RunAtAddress, tmp_path: Path, address: str, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    output, name = tmp_path / "run", f"step-{step:08d}"
    config = with_local_checkpoint(config_of(output, address))
    assert config.resume == str(output / "checkpoints" / name)
    assert steps_in(output) == [name]
    signed = two.find(name)
    assert signed is not None
    shown = f"copying {ADDRESS}/checkpoints/{name} to {output}/checkpoints ({signed.num_bytes:,} b"
    assert capsys.readouterr().out.startswith(shown)
    again = with_local_checkpoint(config_of(output, address))  # of another process
    assert again == config
    assert not capsys.readouterr().out


def test_auto_takes_the_newer_of_both(two: RunAtAddress, tmp_path: Path) -> None:
    output = tmp_path / "run"
    auto = config_of(output, "auto", copy_to=ADDRESS)
    assert with_local_checkpoint(auto) == auto
    assert steps_in(output) == ["step-00000004"]
    write_checkpoint(output / "checkpoints", 5)
    two.upload(write_checkpoint(tmp_path / "there", 3))
    with_local_checkpoint(auto)
    assert steps_in(output) == ["step-00000004", "step-00000005"]
    two.upload(write_checkpoint(tmp_path / "there", 6))
    with_local_checkpoint(auto)
    assert steps_in(output)[-1] == "step-00000006"


def test_auto_without_anything_there_is_a_new_run(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    with_local_checkpoint(config_of(tmp_path / "run", "auto", copy_to=ADDRESS))
    with_local_checkpoint(config_of(tmp_path / "run", False, copy_to=ADDRESS))
    assert not (tmp_path / "run").exists()


def test_of_damaged_checkpoints_the_one_before_is_taken(
    two: RunAtAddress, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    output = tmp_path / "run"
    damage(4)
    with_local_checkpoint(config_of(output, "auto", copy_to=ADDRESS))
    assert steps_in(output) == ["step-00000002"]
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"{ADDRESS}/checkpoints/step-00000004 is damaged: state/meta.pt has")
    assert warning.endswith("changed. The one before is tried.")
    with pytest.raises(ConfigError, match=r"step-00000004 is damaged: state/meta.pt has the SHA-2"):
        with_local_checkpoint(config_of(tmp_path / "other", f"{ADDRESS}/{FOUR}"))
    assert not (tmp_path / "other").exists()
    damage(2, "manifest.json")
    for resume in ("auto", ADDRESS):
        with pytest.raises(
            ConfigError, match=r"every checkpoint at unsteady://run is damaged, and"
        ):
            with_local_checkpoint(config_of(tmp_path / "other", resume, copy_to=ADDRESS))
    assert not (tmp_path / "other").exists()


def test_a_renamed_checkpoint_is_damaged(
    store: type[UnsteadyStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_checkpoint(tmp_path, 4)
    path.rename(tmp_path / "step-00000009")
    RunAtAddress(ADDRESS).upload(tmp_path / "step-00000009")
    with pytest.raises(ConfigError, match="step-00000009 is damaged: it is a checkpoint of step 4"):
        with_local_checkpoint(config_of(tmp_path / "run", "auto", copy_to=ADDRESS))


def test_what_is_not_there_is_said(two: RunAtAddress, tmp_path: Path) -> None:
    for resume, said in (
        ("unsteady://other", "there is no whole checkpoint at unsteady://other."),
        (f"{ADDRESS}/checkpoints/step-00000003", f"at {ADDRESS}/checkpoints/step-00000003."),
    ):
        with pytest.raises(ConfigError) as error:
            with_local_checkpoint(config_of(tmp_path / "run", resume))
        assert said in str(error.value)
    assert not (tmp_path / "run").exists()


def test_an_address_that_cannot_be_read_is_no_new_run(two: RunAtAddress, tmp_path: Path) -> None:
    fail(0, after=True, error=ConnectionError("no route"))
    with pytest.raises(ConfigError) as error:
        with_local_checkpoint(config_of(tmp_path / "run", "auto", copy_to=ADDRESS))
    assert str(error.value) == (
        "unsteady://run cannot be listed (ConnectionError: no route); checkpoint.copy_to may have a newer one, "
        "so no run starts without it. Start again when it can be read, or correct the address."
    )
    with pytest.raises(
        ConfigError, match=r"no route\); start again when it can be read, or correct"
    ):
        with_local_checkpoint(config_of(tmp_path / "run", ADDRESS))


def test_no_run_replaces_another_one_at_an_address(two: RunAtAddress, tmp_path: Path) -> None:
    elsewhere = write_checkpoint(tmp_path / "elsewhere" / "checkpoints", 2)
    two.upload(write_checkpoint(tmp_path / "there", 6))
    RunAtAddress("unsteady://other").upload(elsewhere)
    for resume in (False, str(elsewhere), "unsteady://other"):
        with pytest.raises(
            ConfigError, match=r"which holds step-00000002 of another run, and this"
        ):
            with_local_checkpoint(config_of(tmp_path / "run", resume, copy_to=ADDRESS))
    own = tmp_path / "run" / "checkpoints"
    shutil.copytree(elsewhere, own / "step-00000002")
    same = config_of(tmp_path / "run", str(own / "step-00000002"), copy_to=ADDRESS)
    assert with_local_checkpoint(same) == same
    damage(2, "manifest.json")
    with pytest.raises(ConfigError, match="which holds step-00000002 of another run"):
        with_local_checkpoint(config_of(tmp_path / "new", False, copy_to=ADDRESS))


@pytest.mark.parametrize("file", ["notes.txt", "checkpoints/notes.txt"])
def test_a_directory_with_other_contents_is_refused_before_anything_is_copied(
    two: RunAtAddress, tmp_path: Path, file: str
) -> None:
    output = tmp_path / "run"
    write_checkpoint(output / "checkpoints", 1)
    (output / file).write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty; name another directory"):
        with_local_checkpoint(config_of(output, ADDRESS))
    assert len(list_checkpoints(output / "checkpoints")) == 1
    shutil.rmtree(output / "checkpoints")
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="exists and is not empty; name another directory"):
        with_local_checkpoint(config_of(output, "auto", copy_to=ADDRESS))
    assert [path.name for path in output.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("error", [KilledError(), KeyboardInterrupt()])
def test_an_interrupt_leaves_nothing_half(
    two: RunAtAddress, tmp_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, num_opened = UnsteadyStore.open, 0

    def opened(self: UnsteadyStore, path: str, *args: object, **kwargs: object) -> object:
        nonlocal num_opened
        num_opened += "checkpoints" in path and "manifest" not in path
        if num_opened == 3:
            raise error
        return opens(self, path, *args, **kwargs)

    monkeypatch.setattr(UnsteadyStore, "open", opened)
    with pytest.raises(type(error)):
        with_local_checkpoint(config_of(tmp_path / "run", "auto", copy_to=ADDRESS))
    assert not (tmp_path / "run").exists()
    with_local_checkpoint(config_of(tmp_path / "run", "auto", copy_to=ADDRESS))
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step-00000004").step == 4


def test_what_a_kill_left_is_replaced(two: RunAtAddress, tmp_path: Path) -> None:
    left = tmp_path / "run" / "checkpoints" / ".partial-copy-step-00000004"
    left.mkdir(parents=True)
    (left / "random-00000.pt").write_text("half")
    (left.parent / ".copying").touch()
    with_local_checkpoint(config_of(tmp_path / "run", ADDRESS))
    assert steps_in(tmp_path / "run") == ["step-00000004"]


def test_processes_of_one_machine_copy_once(
    two: RunAtAddress, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths: list[bool | str] = []

    def start() -> None:
        paths.append(with_local_checkpoint(config_of(tmp_path / "run", ADDRESS)).resume)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [str(tmp_path / "run/checkpoints/step-00000004")] * 4
    assert capsys.readouterr().out.count("copying unsteady://run/checkpoints/step-00000004") == 1
    assert steps_in(tmp_path / "run") == ["step-00000004"]


def test_processes_of_one_machine_tell_the_same_damage(two: RunAtAddress, tmp_path: Path) -> None:
    damage(4)
    told: list[str] = []

    def start() -> None:
        try:
            with_local_checkpoint(config_of(tmp_path / "run", f"{ADDRESS}/{FOUR}"))
        except ConfigError as error:
            told.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 4
    assert all("step-00000004 is damaged: state/meta.pt has the SHA-256" in each for each in told)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_cannot_be_written_is_named(two: RunAtAddress, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write to output_dir \S+/file/run: .* Not a dir"):
        with_local_checkpoint(config_of(tmp_path / "file" / "run", ADDRESS))
