"""An address holds the checkpoints that the disk holds, whatever fails or is killed meanwhile."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric import Fabric

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state
from harness.unsteady_store import (
    KilledError,
    UnsteadyStore,
    fail,
    steady,
    unsteady_store,
    write_checkpoint,
)
from thunder_memsave.callbacks.checkpoint import ModelCheckpoint
from thunder_memsave.callbacks.copies import CheckpointCopies
from thunder_memsave.callbacks.step_directories import Best
from thunder_memsave.checkpoints.addresses import AddressError, RunAtAddress

ADDRESS = "unsteady://run"


@pytest.fixture
def store() -> Iterator[type[UnsteadyStore]]:
    with unsteady_store() as store:
        yield store


@pytest.fixture(scope="module")
def fabric() -> Fabric:
    return make_fabric()


def steps_there() -> list[int]:
    """Return the steps of whole checkpoints; damaged ones raise."""
    run = RunAtAddress(ADDRESS)
    return [int(name[5:]) for name in run.names() if run.find(name) is not None]


def saved(copies: CheckpointCopies) -> None:
    copies.after_commit()
    copies.wait()


def test_the_address_follows_the_disk(
    store: type[UnsteadyStore], fabric: Fabric, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 1")
    here, beside = tmp_path / "here", [tmp_path / "config.yaml"]
    copies = CheckpointCopies(here, ADDRESS, keep_last=2, beside=beside)
    copies.on_train_start(fabric=fabric)
    copies.wait()
    assert list(store.store) == ["/run/config.yaml"]
    for step in (1, 2, 3):
        write_checkpoint(here, step)
        if step == 3:
            shutil.rmtree(here / "step-00000001")
        saved(copies)
    assert steps_there() == [2, 3]
    assert RunAtAddress(ADDRESS).names() == ["step-00000002", "step-00000003"]


def test_a_save_during_a_copy_leads_to_one_more(
    store: type[UnsteadyStore],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reached, opened, num_syncs = threading.Event(), threading.Event(), 0
    syncs = CheckpointCopies.sync

    def sync(self: CheckpointCopies) -> None:
        nonlocal num_syncs
        num_syncs += 1
        reached.set()
        assert opened.wait(60)
        syncs(self)

    monkeypatch.setattr(CheckpointCopies, "sync", sync)
    copies = CheckpointCopies(tmp_path, ADDRESS)
    copies.after_commit()
    assert reached.wait(60)
    for step in (1, 2, 3):
        write_checkpoint(tmp_path, step)
        copies.after_commit()
    opened.set()
    copies.wait()
    assert num_syncs == 2
    assert steps_there() == [1, 2, 3]


def test_a_save_in_the_background_is_copied_as_soon_as_it_is_whole(
    store: type[UnsteadyStore], fabric: Fabric, tmp_path: Path
) -> None:
    saves = ModelCheckpoint(tmp_path, every_n_steps=1, asynchronous=True)
    copies = CheckpointCopies(tmp_path, ADDRESS)
    saves.after_commit = copies.after_commit
    saves.on_train_start(fabric=fabric, step=0)
    saves.on_train_batch_end(fabric=fabric, step=1, state=make_state(fabric, 1.0, step=1))
    thread = saves._background._thread
    assert thread is not None
    thread.join()
    copies.wait()
    assert steps_there() == [1]  # before the run asks how the save ended
    saves.on_exception()


def test_the_newest_goes_first(store: type[UnsteadyStore], tmp_path: Path) -> None:
    for step in (1, 2):
        write_checkpoint(tmp_path, step)
    CheckpointCopies(tmp_path, ADDRESS).sync()
    signed = [each for each in store.done if each.endswith("manifest.sha256")]
    assert [each.split("/")[3] for each in signed] == ["step-00000002", "step-00000001"]


def test_a_kill_at_any_operation_leaves_whole_checkpoints_and_the_next_sync_repairs(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    """Before: 2 and 3 there, of a run that went back to 2; here 2 with other bytes, and 4; so 3 goes."""
    before, here = tmp_path / "before", tmp_path / "here"
    for step in (2, 3):
        write_checkpoint(before, step, text="before")
    write_checkpoint(here, 2)
    write_checkpoint(here, 4)

    def begin() -> CheckpointCopies:
        store.store.clear()
        steady()
        CheckpointCopies(before, ADDRESS).sync()
        copies = CheckpointCopies(here, ADDRESS, keep_last=1)
        copies._has_saved = True
        steady()
        return copies

    begin().sync()
    num_operations, left = len(store.done), set()
    assert num_operations > 30
    for at in range(num_operations):
        copies = begin()
        fail(at)
        with pytest.raises(KilledError):
            copies.sync()
        steady()
        found = steps_there()
        left.add(tuple(found))
        for step in found:
            name, run = f"step-{step:08d}", RunAtAddress(ADDRESS)
            signed = run.find(name)
            assert signed is not None
            run.download(name, signed, tmp_path / f"back{at}-{step}")
        copies.sync()
        assert steps_there() == [2, 4]
    assert {(2, 3), (2, 3, 4), (3, 4), (2, 4)} == left


def test_what_another_machine_wrote_stays_while_it_is_among_the_last_or_the_best(
    store: type[UnsteadyStore], fabric: Fabric, tmp_path: Path
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for step, val_loss in ((2, 0.5), (4, 3.0), (6, 2.0)):
        write_checkpoint(there, step, val_loss=val_loss)
    CheckpointCopies(there, ADDRESS).sync()
    shutil.copytree(there / "step-00000004", here / "step-00000004")
    best = Best(metric="val_loss", num_kept=1)
    copies = CheckpointCopies(here, ADDRESS, keep_last=2, best=best)
    copies.on_train_start(fabric=fabric)
    copies.wait()
    assert steps_there() == [2, 4, 6]  # nothing was saved yet
    write_checkpoint(here, 5)
    saved(copies)
    assert steps_there() == [2, 4, 5]  # the run went back before 6
    shutil.rmtree(here / "step-00000004")
    write_checkpoint(here, 7)
    saved(copies)
    assert steps_there() == [2, 5, 7]
    write_checkpoint(here, 9, val_loss=0.1)
    saved(copies)
    assert steps_there() == [5, 7, 9]


def test_what_fails_is_a_warning_and_tried_again(
    store: type[UnsteadyStore], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    copies = CheckpointCopies(tmp_path, ADDRESS)
    write_checkpoint(tmp_path, 1)
    fail(0, after=True, error=ConnectionError("no route"))
    for _ in range(2):
        saved(copies)
    assert [record.message for record in caplog.records] == [
        "the checkpoints were not copied to unsteady://run: unsteady://run/checkpoints/step-00000001 cannot be written "
        "(ConnectionError: no route). Training goes on, and the next checkpoint, or the end, tries it again."
    ] * 2
    with pytest.raises(AddressError, match="no route"):
        copies.finish()
    copies.on_exception()
    steady()
    saved(copies)
    assert steps_there() == [1]
    assert len(caplog.records) == 2


def test_the_end_waits_and_copies_what_was_trained(
    store: type[UnsteadyStore], tmp_path: Path
) -> None:
    here, adapter = tmp_path / "here", tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    write_checkpoint(here, 1)
    copies = CheckpointCopies(here, ADDRESS)
    copies.after_commit()
    copies.finish(adapter)
    assert steps_there() == [1]
    assert "/run/adapter/adapter_config.json" in store.store


def test_other_ranks_copy_nothing(store: type[UnsteadyStore], tmp_path: Path) -> None:
    class OtherRank:
        is_global_zero = False

    other: Any = OtherRank()
    write_checkpoint(tmp_path, 1)
    copies = CheckpointCopies(tmp_path, ADDRESS)
    copies.on_train_start(fabric=other)
    copies.wait()
    assert not store.done
