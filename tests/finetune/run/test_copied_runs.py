"""A run that is copied to an address goes on from there on another machine, with the same bits."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from harness.commands import run_command
from harness.fabric import run_python
from harness.language_model import run_values, write_run_file
from harness.unsteady_store import UnsteadyStore, fail, steady, unsteady_store
from thunder_memsave.callbacks.copies import CheckpointCopies
from thunder_memsave.checkpoints.addresses import RunAtAddress
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.finetune.process.signals import EXIT_SAVED

ADDRESS = "unsteady://bucket/run"
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def store() -> Iterator[type[UnsteadyStore]]:
    with unsteady_store() as store:
        yield store


@pytest.fixture(scope="module")
def whole(
    store: type[UnsteadyStore], tmp_path_factory: pytest.TempPathFactory, one_layer: Path
) -> Path:
    """A finished run, copied to `ADDRESS`; `run.yaml` is beside it."""
    directory = tmp_path_factory.mktemp("whole")
    run_here(write_run(directory, one_layer))
    return directory / "run"


def write_run(directory: Path, model: Path, **sections: Any) -> Path:
    given = {"checkpoint": {"every_n_steps": 2, "keep_last": 2, "copy_to": ADDRESS}, **sections}
    return write_run_file(directory, run_values(directory, model, **given))


def run_here(path: Path, *overrides: str, code: int = 0, command: str = "train") -> str:
    output = run_command(command, str(path), *overrides, code=code)
    assert "Traceback" not in output
    return output


def steps_at(address: str) -> list[str]:
    run = RunAtAddress(address)
    return [name for name in run.names() if run.find(name) is not None]


def test_a_run_is_copied_with_its_export_and_its_run_file(whole: Path) -> None:
    assert steps_at(ADDRESS) == ["step-00000002", "step-00000004"]
    filesystem = fsspec.filesystem("unsteady")
    for name in ("config.yaml", ADAPTER, "adapter/adapter_config.json", "adapter/tokenizer.json"):
        assert filesystem.cat_file(f"/bucket/run/{name}") == (whole / name).read_bytes()


def test_another_machine_goes_on_with_the_same_bits(
    whole: Path, store: type[UnsteadyStore], tmp_path: Path
) -> None:
    """The first machine was taken away after it had copied step 2."""
    run_file, run = whole.with_name("run.yaml"), RunAtAddress(ADDRESS)
    run.delete("step-00000004")
    told = run_here(run_file, f"--output_dir={tmp_path / 'other'}", "--resume=auto")
    assert f"copying {ADDRESS}/checkpoints/step-00000002 to {tmp_path}/other/checkpoints (" in told
    assert f"resuming from {tmp_path}/other/checkpoints/step-00000002\n" in told
    assert told.count(f"copying the checkpoint to {ADDRESS}\n") == 1
    assert (tmp_path / "other" / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    last = "checkpoints/step-00000004"
    there, here = read_manifest(whole / last), read_manifest(tmp_path / "other" / last)
    table = "state/.metadata"  # in which torch writes an identifier of the save
    assert {n: f for n, f in there.files.items() if n != table} == {
        n: f for n, f in here.files.items() if n != table
    }
    assert steps_at(ADDRESS) == ["step-00000002", "step-00000004"]


def test_an_address_is_named_to_resume_from(
    whole: Path, store: type[UnsteadyStore], tmp_path: Path
) -> None:
    run_file, output = whole.with_name("run.yaml"), tmp_path / "other"
    given = (f"--output_dir={output}", f"--resume={ADDRESS}")
    told = run_here(run_file, *given, command="validate")
    assert f"from {ADDRESS}, which only `train` looks at" in told
    assert not output.exists()
    told = run_here(run_file, f"--output_dir={output}", "--resume=auto", command="validate")
    assert f"unless `train` finds a newer checkpoint at {ADDRESS}" in told.replace("\n", " ")
    told = run_here(run_file, *given)
    assert "all steps are done; what they trained is written again" in told
    assert (output / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    told = run_here(run_file, f"--output_dir={tmp_path / 'new'}", code=2)
    assert "which holds step-00000002 of another run, and this one would replace it" in told


def test_a_run_whose_copies_fail_trains_to_the_end_and_then_says_so(
    store: type[UnsteadyStore],
    one_layer: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    address = "unsteady://refused/run"
    run_file = write_run(tmp_path, one_layer, checkpoint={"every_n_steps": 2, "copy_to": address})
    fail(2, after=True, error=PermissionError("the key has expired"))
    told = run_here(run_file, code=1)
    warnings = [r.message for r in caplog.records if "were not copied to" in r.message]
    assert warnings
    assert "(PermissionError: the key has expired). Training goes on, and the next" in warnings[0]
    said = f"error: not everything was copied to {address}: {address}/config.yaml cannot be written"
    assert said in told
    assert f"All of it is whole in {tmp_path}/run, and a start with --resume=auto tries" in told
    assert f"go on with: thunder-memsave train {tmp_path}/run/config.yaml --resume=auto\n" in told
    assert (tmp_path / "run" / ADAPTER).exists()
    steady()
    run_here(tmp_path / "run" / "config.yaml", "--resume=auto")
    assert steps_at(address) == ["step-00000002", "step-00000004"]


def test_a_run_that_is_stopped_copies_its_last_step(
    store: type[UnsteadyStore],
    one_layer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    address, copies = "unsteady://stopped/run", CheckpointCopies.after_commit

    def stop(self: CheckpointCopies) -> None:
        copies(self)
        signal.raise_signal(signal.SIGTERM)

    section = {"every_n_steps": 1, "keep_last": 1, "copy_to": address}
    run_file = write_run(tmp_path, one_layer, checkpoint=section)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointCopies, "after_commit", stop)
        told = run_here(run_file, code=EXIT_SAVED)
    assert f"copying the checkpoint to {address}\n" in told
    assert steps_at(address) == ["step-00000001"]
    assert "/stopped/run/adapter/adapter_config.json" not in store.store


def test_two_ranks_under_torchrun_copy_once(tmp_path: Path, one_layer: Path) -> None:
    first, address = tmp_path / "first", f"file://{tmp_path}/bucket/run"
    first.mkdir()
    section = {"every_n_steps": 1, "keep_last": 2, "copy_to": address}
    run_file = write_run(first, one_layer, checkpoint=section, train={"max_steps": 1})
    run_here(run_file)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    overrides = [f"--output_dir={tmp_path / 'run'}", "--train.max_steps=2", "--resume=auto"]
    train = ["-m", "thunder_memsave", "train", run_file, *overrides]
    told = run_python([*launch, *train], num_forks=3)
    assert told.count(f"copying {address}/checkpoints/step-00000001 to ") == 1
    assert told.count(f"copying the checkpoint to {address}") == 1
    assert steps_at(address) == ["step-00000001", "step-00000002"]
    signed = RunAtAddress(address).find("step-00000002")
    assert signed is not None
    assert signed.manifest.world_size == 2
