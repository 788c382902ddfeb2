"""A disk that is full during a save, at whichever byte, leaves the checkpoints before as they were."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from harness.fabric import run_python

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


def can_mount() -> bool:
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not can_mount(), reason="this user cannot mount a small disk")
def test_a_full_disk_costs_no_checkpoint_and_not_the_run(tmp_path: Path) -> None:
    disk, script = tmp_path / "disk", tmp_path / "script.py"
    disk.mkdir()
    script.write_text(SCRIPT)
    start = (
        "import subprocess, sys; "
        "sys.exit(subprocess.run(['unshare', '--mount', sys.executable, *sys.argv[1:]]).returncode)"
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
