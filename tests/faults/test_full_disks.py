"""A disk that fills up during a save, at whichever byte, leaves the earlier checkpoints as they were."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.fabric import run_python

pytestmark = pytest.mark.line("full disks")

SCRIPT = """
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, weight_of
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.all_ranks import DiskFullError
from thunder_memsave.callbacks.checkpoint import list_checkpoints
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid

disk = Path(sys.argv[1])


def resize(kib):
    subprocess.run(["mount", "-o", f"remount,size={kib}k", disk], check=True)


def used_kib():
    usage = shutil.disk_usage(disk)
    return (usage.total - usage.free) // 1024


subprocess.run(["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", disk], check=True)
logging.basicConfig(stream=sys.stdout, format="%(message)s")
fabric = make_fabric()
run = disk / "run"
saves = ModelCheckpoint(run, every_n_steps=1, keep_last=9)
two = make_state(fabric, 2.0, step=2)
three = make_state(fabric, 3.0, step=3)
saves.save(fabric, make_state(fabric, 1.0, step=1), step=1)
first = used_kib()
saves.save(fabric, two, step=2)
both = used_kib()
shutil.rmtree(run / "step-00000002")
num_full = 0
for kib in range(first, both + 16, 4):
    resize(kib)
    try:
        saves.save(fabric, two, step=2)
    except DiskFullError:
        num_full += 1
        shutil.rmtree(run / ".partial-step-00000002", ignore_errors=True)
        assert newest_valid(fabric, run).path.name == "step-00000001"
    else:
        assert newest_valid(fabric, run).path.name == "step-00000002"
        shutil.rmtree(run / "step-00000002")
print("full at", num_full, "sizes of", (both + 16 - first) // 4)

resize(first + 8)
for step in (3, 4):
    saves.on_train_batch_end(fabric=fabric, step=step, state=three)
assert [path.name for path in run.iterdir()] == ["step-00000001"]
resize(9000)
saves.on_train_batch_end(fabric=fabric, step=5, state=three | {"step": 5})  # the count begins anew
resize(used_kib() + 8)
for step in (6, 7):
    saves.on_train_batch_end(fabric=fabric, step=step, state=three)
try:
    saves.on_train_batch_end(fabric=fabric, step=8, state=three)
except DiskFullError as error:
    print("ended:", error)
saves.on_train_end(fabric=fabric, step=9, state=three)
state = make_state(fabric, 0.0, step=0)
load_checkpoint(fabric, newest_valid(fabric, run), state)
assert (weight_of(state), state["step"]) == (3.0, 5)
assert sorted(path.name for path in run.iterdir()) == ["step-00000001", "step-00000005"]
"""


AT_EVERY_OPERATION = """
import errno
import io
import logging
import os
import shutil
import sys
from pathlib import Path

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, weight_of
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.verified import load_checkpoint, newest_valid

run = Path(sys.argv[1]) / "run"
left = None  # operations that the disk still takes
names = set()


def use(name):
    global left
    if left is not None:
        left -= 1
        if left < 0:
            names.add(Path(os.fsdecode(name)).name)
            raise OSError(errno.ENOSPC, "No space left on device", os.fsdecode(name))


class Full(io.FileIO):
    def write(self, content):
        try:
            use(self.name)
        except OSError:
            super().write(memoryview(content)[: len(content) // 2])
            raise
        return super().write(content)


def open_on_disk(file, mode="r", *args, opened=io.open, **kwargs):
    if mode in ("wb", "xb") and str(file).startswith(str(run)):
        return io.BufferedWriter(Full(file, mode), buffer_size=4096)
    return opened(file, mode, *args, **kwargs)


def watch(event, arguments):
    if event == "open" and arguments[0] is not None and not isinstance(arguments[0], int):
        if arguments[2] & os.O_ACCMODE != os.O_RDONLY and str(arguments[0]).startswith(str(run)):
            use(arguments[0])
    elif event in ("os.mkdir", "os.rename") and str(arguments[0]).startswith(str(run)):
        use(arguments[0])


logging.basicConfig(stream=sys.stdout, format="%(message)s")
fabric = make_fabric()
two = make_state(fabric, 2.0, step=2)
io.open = open_on_disk
sys.addaudithook(watch)
for asynchronous in (False, True):
    saves = ModelCheckpoint(run, every_n_steps=1, keep_last=1, asynchronous=asynchronous)
    saves.save(fabric, make_state(fabric, 1.0, step=1), step=1)
    number = 0
    while True:
        left, saves._num_failed = number, 0
        saves.on_train_batch_end(fabric=fabric, step=2, state=two)
        saves.on_rollback_start(fabric=fabric)  # it waits
        is_saved, was_full, left = not saves._num_failed, left < 0, None
        assert is_saved or was_full
        valid = newest_valid(fabric, run)
        assert valid.values["step"] == (2 if is_saved else 1)
        # An old one that is not needed may still be there; nothing else is.
        assert (run / "step-00000001").exists() == was_full
        assert {path.name[:5] for path in run.iterdir()} == {"step-"}
        if not was_full:
            break
        shutil.rmtree(run / "step-00000002", ignore_errors=True)
        number += 1
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, valid, state)
    assert weight_of(state) == state["step"] == 2
    print("full at", number, "operations", asynchronous)
    shutil.rmtree(run)
print("at", sorted(names))
"""


def test_a_disk_that_is_full_at_any_operation_costs_no_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(AT_EVERY_OPERATION)
    harness = str(Path(__file__).parents[1])
    output = run_python(["-W", "ignore", script, tmp_path], num_forks=1, PYTHONPATH=harness)
    counts = [line.split() for line in output.splitlines() if line.startswith("full at")]
    assert [int(count[2]) > 20 for count in counts] == [True, True], output
    num_failed = sum(int(count[2]) for count in counts) - 2  # those of deletions
    assert output.count("step-00000001 is no longer needed and could not be deleted (No space") == 2
    assert output.count("no checkpoint of step 2 was written, because the disk of") == num_failed
    failed_at = output.splitlines()[-1]
    for name in (".metadata.tmp", "__0_0.distcp", "meta.pt", "random-00000.pt", "manifest.json"):
        assert f"'{name}'" in failed_at
    assert "'.partial-step-00000002'" in failed_at


def way_to_mount() -> list[str] | None:
    """Return a command that can mount a small disk for itself alone; not every machine gives root."""
    for way in (["unshare", "--mount"], ["unshare", "--user", "--map-root-user", "--mount"]):
        try:
            command = [*way, "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
            if subprocess.run(command, capture_output=True).returncode == 0:
                return way
        except OSError:
            return None
    return None


@pytest.mark.skipif(way_to_mount() is None, reason="this user cannot mount a small disk")
def test_a_full_disk_costs_no_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(SCRIPT)
    start = (
        "import subprocess, sys; "
        f"sys.exit(subprocess.run([*{way_to_mount()}, sys.executable, *sys.argv[1:]]).returncode)"
    )
    harness = str(Path(__file__).parents[1])
    output = run_python(["-c", start, "-W", "ignore", script, disk], PYTHONPATH=harness)
    full_at = next(line for line in output.splitlines() if line.startswith("full at"))
    assert int(full_at.split()[2]) > 5, output
    advice = "free some space, or lower checkpoint.keep_last"
    goes_on = f"Training goes on; {advice}, for it ends after 3 such saves in a row."
    assert output.count(goes_on) == 4
    ended = f"The training has ended and saves no more; {advice}, and go on with --resume=auto,"
    assert f"the last one is step-00000005. {ended} which repeats the steps since" in output
    assert f"no checkpoint of step 3 was written, because the disk of {disk / 'run'} is" in output
    assert "the last one is step-00000001. Training goes on" in output
    ended = next(line for line in output.splitlines() if line.startswith("ended:"))
    assert "no checkpoint of step 8 was written" in ended
    assert "This was the 3rd save in a row that failed, so the run ends; free some space" in ended
    assert not any(disk.iterdir()), "it was mounted for the script alone"
