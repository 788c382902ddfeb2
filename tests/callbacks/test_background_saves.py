"""A save in the background holds the state at its call, equals a waiting save, and hides no error."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from harness.fabric import make_fabric, on_fabric_rank, run_on_fabric_ranks
from harness.run_checkpoints import make_state, weight_of
from thunder_memsave.callbacks import ModelCheckpoint, background_saves
from thunder_memsave.callbacks.all_ranks import DiskFullError
from thunder_memsave.callbacks.step_directories import list_checkpoints
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid
from thunder_memsave.checkpoints.disk_errors import TellingWriter
from thunder_memsave.checkpoints.manifest import read_manifest
from thunder_memsave.config import ConfigError


class Gate:
    """Lets a save write its tensors only once the gate is open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.threads: list[str] = []
        self.error: OSError | None = None
        writes = TellingWriter.write_data

        def write_data(*args: Any, **kwargs: Any) -> Any:
            self.threads.append(threading.current_thread().name)
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error
            return writes(*args, **kwargs)

        monkeypatch.setattr(TellingWriter, "write_data", write_data)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def started(directory: Path, **settings: Any) -> tuple[Fabric, ModelCheckpoint]:
    fabric = make_fabric()
    saves = ModelCheckpoint(directory, every_n_steps=1, asynchronous=True, **settings)
    saves.on_train_start(fabric=fabric, step=0)
    return fabric, saves


def change(state: dict[str, Any]) -> None:
    """Change the state, as the next steps do."""
    with torch.no_grad():
        for parameter in state["model"].parameters():
            parameter.fill_(-7.0)
        for moments in state["optimizer"].state.values():
            for value in moments.values():
                value.fill_(-7.0)
    state["optimizer"].param_groups[0]["lr"] = -7.0
    state["others"]["list"].append(-7.0)
    torch.manual_seed(77)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, gate: Gate) -> None:
    fabric, saves = started(tmp_path)
    state = make_state(fabric, 1.0, step=1) | {"others": {"list": [1.0]}}
    random_state = torch.get_rng_state()
    saves.on_train_batch_end(fabric=fabric, step=1, state=state)
    assert gate.reached.wait(60)
    assert list_checkpoints(tmp_path) == []
    change(state)
    gate.opened.set()
    saves.on_train_end(fabric=fabric, step=1, state=state)
    assert gate.threads == ["save of step 1"]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    loaded = make_state(fabric, 0.0, step=0) | {"others": {}}
    info = newest_valid(fabric, tmp_path)
    assert info is not None
    load_checkpoint(fabric, info, loaded)
    assert (weight_of(loaded), loaded["step"], loaded["others"]) == (1.0, 1, {"list": [1.0]})
    assert loaded["optimizer"].param_groups[0]["lr"] == 0.1
    (moments,) = loaded["optimizer"].state.values()
    assert float(moments["step"]) == 1.0
    assert torch.equal(torch.get_rng_state(), random_state)


def refuse_devices_in_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that CUDA exists, raise where a background save uses it, and return who asked."""
    asked = []

    def is_available(is_available: Callable[[], bool] = torch.cuda.is_available) -> bool:
        name = threading.current_thread().name
        asked.append(name)
        return name.startswith("save of step") or is_available()

    def refuse(is_used: Callable[..., Any], *args: Any) -> Any:
        assert not threading.current_thread().name.startswith("save of step"), "it uses a device"
        return is_used(*args)

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    for name in ("_lazy_init", "current_device", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, partial(refuse, getattr(torch.cuda, name)))
    return asked


def test_the_thread_uses_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = refuse_devices_in_threads(monkeypatch)
    fabric, saves = started(tmp_path)
    state = make_state(fabric, 1.0, step=1)
    saves.on_train_batch_end(fabric=fabric, step=1, state=state)
    saves.on_train_end(fabric=fabric, step=1, state=state)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    assert "save of step 1" in asked


def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path, gate: Gate) -> None:
    fabric, saves = started(tmp_path)
    saves.on_train_batch_end(fabric=fabric, step=1, state=make_state(fabric, 1.0, step=1))
    assert gate.reached.wait(60)
    threading.Timer(0.3, gate.opened.set).start()
    saves.on_train_batch_end(fabric=fabric, step=2, state=make_state(fabric, 2.0, step=2))
    assert list_checkpoints(tmp_path)[0].name == "step-00000001"
    saves.on_train_end(fabric=fabric, step=3, state=make_state(fabric, 3.0, step=3))
    assert gate.threads == ["save of step 1", "save of step 2", "MainThread"]
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "3"]


def test_an_error_in_the_background_is_told_at_the_next_save(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, saves = started(tmp_path)
    gate.opened.set()
    gate.error = OSError(errno.EIO, "Input/output error", "/a/file")
    state = make_state(fabric, 1.0, step=1)
    for step in (1, 2):
        saves.on_train_batch_end(fabric=fabric, step=step, state=state)
    assert "no checkpoint of step 1 was written, because a file cannot be" in caplog.text
    assert "(Input/output error: /a/file); the last one is none. Training goes on; see that" in (
        caplog.text
    )
    gate.error = OSError(errno.ENOSPC, "No space left on device", "/a/file")
    saves.on_train_batch_end(fabric=fabric, step=3, state=state)
    with pytest.raises(DiskFullError, match=r"of step 3 was .*the 3rd save in a row that failed"):
        saves.on_train_batch_end(fabric=fabric, step=4, state=state)
    assert list(tmp_path.iterdir()) == []
    fabric, saves = started(tmp_path)
    saves.on_train_batch_end(fabric=fabric, step=1, state=state)
    saves.on_train_end(fabric=fabric, step=1, state=state)
    for end in ("The end of the training is saved next", "The training has ended and saves no mor"):
        assert caplog.text.count(f"the last one is none. {end}") == 1


def test_a_run_that_ends_with_an_error_still_gets_the_save_under_way(
    tmp_path: Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    fabric, saves = started(tmp_path)
    saves.on_exception()
    saves.on_train_batch_end(fabric=fabric, step=1, state=make_state(fabric, 1.0, step=1))
    threading.Timer(0.3, gate.opened.set).start()
    saves.on_exception()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    gate.error = OSError(errno.EIO, "Input/output error", "/a/file")
    saves.on_train_batch_end(fabric=fabric, step=2, state=make_state(fabric, 2.0, step=2))
    saves.on_exception()
    assert "the checkpoint of step 2 was not completed: Input/output error: /a/file" in caplog.text


def test_without_room_for_the_copy_training_waits(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    gate.opened.set()
    fabric, saves = started(tmp_path)
    state = make_state(fabric, 1.0, step=1)
    num_bytes = fabric.strategy.snapshot_bytes(dict(state))  # type: ignore[attr-defined]
    assert num_bytes == 5 * 512  # weight, bias, two moments, number of steps: each takes that much
    for free, told in ((num_bytes, "0.00 GiB are free"), (None, "an unknown amount is free")):
        monkeypatch.setattr(background_saves, "free_host_bytes", lambda free=free: free)
        saves.on_train_batch_end(fabric=fabric, step=1, state=state)
        assert (
            "while training goes on: until one is, the copy of the state takes 0.00" in caplog.text
        )
        assert told in caplog.text
        saves.on_train_end(fabric=fabric, step=1, state=state)
        saves = ModelCheckpoint(tmp_path, every_n_steps=1, asynchronous=True)
    fabric.strategy._host_buffers.lend(num_bytes, device_type="cpu")  # type: ignore[attr-defined]
    monkeypatch.setattr(background_saves, "free_host_bytes", lambda: num_bytes - 1)
    saves.on_train_batch_end(fabric=fabric, step=2, state=state)
    saves.on_train_batch_end(fabric=fabric, step=3, state=state)
    assert gate.threads == ["save of step 1"] * 2 + ["MainThread"] * 2
    assert caplog.text.count("training waits while this checkpoint is written, though") == 1


def test_strategies_that_cannot_copy_are_refused(tmp_path: Path) -> None:
    saves = ModelCheckpoint(tmp_path, asynchronous=True)
    with pytest.raises(ConfigError, match=r"needs ThunderMemsaveStrategy, and this run has a Sin"):
        saves.on_train_start(fabric=Fabric(accelerator="cpu", devices=1), step=0)
    with pytest.raises(ConfigError, match=r"state_dict_type is 'full', which gathers whole tensor"):
        saves.on_train_start(fabric=make_fabric(state_dict_type="full"), step=0)


def test_two_ranks_write_the_same_bytes_as_a_save_that_waits(tmp_path: Path) -> None:
    run_on_fabric_ranks(check_ranks, 2, tmp_path)


@on_fabric_rank
def check_ranks(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        asked = refuse_devices_in_threads(patch)
        check_bytes(root)
    assert "save of step 2" in asked


def check_bytes(root: Path) -> None:
    fabric = make_fabric(devices=2, sharding="zero2")
    manifests = []
    for asynchronous in (False, True):
        saves = ModelCheckpoint(root / str(asynchronous), every_n_steps=1)
        saves.asynchronous = asynchronous
        saves.on_train_start(fabric=fabric, step=0)
        state = make_state(fabric, 1.0, step=1) | {"others": {"list": [1.0]}}
        for step in (1, 2):
            saves.on_train_batch_end(fabric=fabric, step=step, state=state | {"step": step})
            if asynchronous:
                change(state)
                assert fabric.all_reduce(torch.ones(1), reduce_op="sum") == 2  # beside the thread's
                restored = make_state(fabric, 1.0, step=step)
                state.update(restored, others={"list": [1.0]})
        saves.on_train_end(fabric=fabric, step=2, state=state)
        fabric.barrier()
        manifests.append([read_manifest(p) for p in list_checkpoints(root / str(asynchronous))])
    waited, background = manifests
    assert [m.step for m in waited] == [m.step for m in background] == [1, 2]
    for one, other in zip(waited, background, strict=True):
        assert {"state/__0_0.distcp", "state/__1_0.distcp"} < one.files.keys()
        differing = {name for name in one.files if one.files[name] != other.files[name]}
        assert one.files.keys() == other.files.keys()
        assert differing == {"state/.metadata"}  # where torch writes an identifier of the save
