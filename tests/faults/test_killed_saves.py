"""A process that is killed before any file operation of a save has lost no checkpoint.

So it is where one of two ranks is killed, in saves that wait and in those in the background.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from harness.fabric import run_python
from harness.killed_ranks import Case, all_cases, ended_ranks

SECONDS_TO_START, SECONDS_FOR_A_CASE = 60, 30

SCRIPT = """
import os
import shutil
import signal
import sys
from pathlib import Path

from harness.fabric import make_fabric
from harness.run_checkpoints import make_state, weight_of
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.checkpoint import list_checkpoints
from thunder_memsave.callbacks.verified import load_checkpoint, list_damaged, newest_valid

run, pristine = Path(sys.argv[1]) / "run", Path(sys.argv[1]) / "pristine"
fabric = make_fabric()
ModelCheckpoint(pristine, keep_last=1).save(fabric, make_state(fabric, 1.0, step=1), step=1)
counted = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
left = -1


def count(event, arguments):
    global left
    if left >= 0:
        left -= 1
        if left < 0:
            name = arguments[0] if arguments else ""
            os.write(1, f"{event} {Path(os.fsdecode(name)).name}\\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)


def watch(event, arguments):
    if event in counted and left >= 0:
        if str(arguments[0]).startswith(str(run)) or isinstance(arguments[0], bytes):
            count(event, arguments)


def synced(descriptor, fsync=os.fsync):
    count("fsync", [os.readlink(f"/proc/self/fd/{descriptor}")])
    fsync(descriptor)


sys.addaudithook(watch)
os.fsync = synced
number, steps = 0, []
while True:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(pristine, run)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        left = number
        ModelCheckpoint(run, keep_last=1).save(fabric, make_state(fabric, 2.0, step=2), step=2)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = list_checkpoints(run)
    valid = newest_valid(fabric, run)
    assert valid.path == found[-1], (valid, found)
    assert not list_damaged(run)
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, valid, state)
    assert weight_of(state) == state["step"] == valid.values["step"]
    steps.append(state["step"])
    # The next save clears what the kill left.
    ModelCheckpoint(run, keep_last=1).save(fabric, make_state(fabric, 3.0, step=3), step=3)
    assert [path.name for path in run.iterdir()] == ["step-00000003"]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    number += 1
assert steps == sorted(steps), steps  # committed once, it stays
print("kills", number, "of which after the commit", steps.count(2) - 1)
"""


@pytest.mark.line("kill points")
def test_a_kill_before_any_file_operation_loses_no_checkpoint(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    harness = str(Path(__file__).parents[1])
    output = run_python(["-W", "ignore", script, tmp_path], num_forks=1, PYTHONPATH=harness)
    lines = output.splitlines()
    _, num_kills, *_, num_after = lines[-1].split()
    assert int(num_kills) > 25, output
    assert int(num_after) > 3, output
    for point in ("os.mkdir", "open __0_0.distcp", "open manifest.json", "fsync manifest.json"):
        assert any(line.startswith(point) for line in lines), (point, output)
    for point in ("os.rename .partial-step-00000002", "fsync run", "shutil.rmtree .partial-step"):
        assert any(line.startswith(point) for line in lines), (point, output)


@pytest.mark.line("kill points")
def test_a_kill_of_one_of_two_ranks_loses_no_checkpoint(tmp_path: Path) -> None:
    chosen = [
        "data:1:async",
        "fsync of data:0:sync",
        "hash:1:async",
        "manifest:1:sync",
        "rename:0:async",
        "purge:0:sync",
    ]
    killed(tmp_path, [Case.parse(text) for text in chosen], patience_seconds=0.3)


def start_sleeper(seconds: float) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", str(seconds)])


def test_a_hang_is_no_kill() -> None:
    sleepers = [start_sleeper(60), start_sleeper(60)]
    with pytest.raises(TimeoutError, match=r"no rank ended within 0.1 s, by the kill or other"):
        ended_ranks([each.pid for each in sleepers], patience_seconds=9, longest_seconds=0.1)
    assert [each.wait() for each in sleepers] == [0, 0]  # reaped before


def test_who_hangs_after_another_ended_is_told_from_who_was_killed() -> None:
    sleepers = [start_sleeper(0), start_sleeper(60)]
    statuses = ended_ranks([each.pid for each in sleepers], patience_seconds=0.1)
    assert [os.WTERMSIG(status) for status in statuses] == [0, signal.SIGTERM]
    assert [each.wait() for each in sleepers] == [0, 0]


@pytest.mark.soak
@pytest.mark.line("kill points")
@pytest.mark.timeout(SECONDS_TO_START + SECONDS_FOR_A_CASE * (len(all_cases()) + 2))
def test_a_kill_of_either_rank_at_every_point_of_every_kind_of_save_loses_no_checkpoint(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    output = killed(tmp_path, all_cases(), patience_seconds=10.0)
    record_property("measured", f"{output.count(' left step ')} kills, 0 checkpoints lost")


def killed(directory: Path, cases: Sequence[Case], *, patience_seconds: float) -> str:
    arguments = ["-W", "ignore", "-m", "harness.killed_ranks", directory, patience_seconds]
    timeout = SECONDS_TO_START + SECONDS_FOR_A_CASE * len(cases)
    output = run_python([*arguments, *cases], num_forks=1, timeout=timeout)
    for case in cases:
        assert f"{case} left step " in output, output
    return output
