"""Kills one of two ranks at a named point of a save, and checks the files left; `python -m harness.killed_ranks`.

Each life of the ranks is a fork of a process that has imported everything, so that it takes a second.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.fabric import free_port, make_fabric
from harness.run_checkpoints import make_state, weight_of
from thunder_memsave.callbacks import ModelCheckpoint
from thunder_memsave.callbacks.step_directories import list_checkpoints
from thunder_memsave.callbacks.verified import list_damaged, load_checkpoint, newest_valid

Kind = Literal["os.mkdir", "os.rename", "shutil.rmtree", "fsync", "write", "read"]
_LONGEST_SECONDS = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A moment of a save: just before a file operation."""

    kind: Kind
    name: str
    """Name of the file or directory; `{rank}` stands for the rank that is killed."""

    @property
    def is_of_each_rank(self) -> bool:
        """True if every rank reaches the point; otherwise only rank 0 does, and may kill the other there."""
        return "{rank}" in self.name


POINTS = {
    "directory": Point(kind="os.mkdir", name=".partial-step-00000002"),
    "data": Point(kind="write", name="__{rank}_0.distcp"),
    "fsync of data": Point(kind="fsync", name="__{rank}_0.distcp"),
    "table of data": Point(kind="os.rename", name=".metadata.tmp"),
    "other state": Point(kind="write", name="meta.pt"),
    "random state": Point(kind="write", name="random-0000{rank}.pt"),
    "hash": Point(kind="read", name="random-0000{rank}.pt"),
    "manifest": Point(kind="write", name="manifest.json"),
    "fsync of manifest": Point(kind="fsync", name="manifest.json"),
    "rename": Point(kind="os.rename", name=".partial-step-00000002"),
    "fsync of rename": Point(kind="fsync", name="run"),
    "purge": Point(kind="os.rename", name="step-00000001"),
    "deletion": Point(kind="shutil.rmtree", name=".partial-step-00000001"),
}
COMMITTED = ("fsync of rename", "purge", "deletion")
"""Points at which the new checkpoint already has its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A rank to kill, at a point of a kind of save."""

    point: str
    rank: int
    asynchronous: bool

    @classmethod
    def parse(cls, text: str) -> Case:
        """Parse the result of `str`."""
        point, rank, mode = text.split(":")
        return cls(point=point, rank=int(rank), asynchronous=mode == "async")

    def __str__(self) -> str:
        return f"{self.point}:{self.rank}:{'async' if self.asynchronous else 'sync'}"


def all_cases() -> list[Case]:
    """Return every point, for either rank, in synchronous and asynchronous saves."""
    return [
        Case(point=point, rank=rank, asynchronous=asynchronous)
        for point in POINTS
        for rank in (0, 1)
        for asynchronous in (False, True)
    ]


def main(root: Path, cases: Sequence[Case], *, patience_seconds: float) -> None:
    """Run the cases one after the other, and print the step that each left.

    Args:
        root: An empty directory.
        cases: Ranks and points to kill.
        patience_seconds: Seconds in which the other rank has to end by itself; then it is killed too.
    """
    pristine, run = root / "pristine", root / "run"
    _live(pristine, step=1, asynchronous=False, patience_seconds=_LONGEST_SECONDS)
    assert [path.name for path in pristine.iterdir()] == ["step-00000001"]
    for case in cases:
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(pristine, run)
        ended = _live(
            run,
            step=2,
            asynchronous=case.asynchronous,
            case=case,
            patience_seconds=patience_seconds,
        )
        # Not by `ended_ranks`, whose signal is another: the point was come to.
        assert os.WTERMSIG(ended[case.rank]) == signal.SIGKILL, (str(case), ended)
        print(
            f"{case} left step {_check(run, case)}; the other rank ended with {ended[1 - case.rank]}"
        )


def _check(run: Path, case: Case) -> int:
    """Check that nothing committed is lost, nothing is damaged, and the next save clears up."""
    found, fabric = list_checkpoints(run), make_fabric()
    valid = newest_valid(fabric, run)
    assert valid is not None
    assert valid.path == found[-1]
    assert not list_damaged(run)
    state = make_state(fabric, 0.0, step=0)
    load_checkpoint(fabric, valid, state)
    step = int(state["step"])
    assert weight_of(state) == step == valid.values["step"]
    assert step in _steps_that_may_be_left(case), (str(case), found)
    ModelCheckpoint(run, keep_last=1).save(fabric, make_state(fabric, 3.0, step=3), step=3)
    assert [path.name for path in run.iterdir()] == ["step-00000003"]
    return step


def _steps_that_may_be_left(case: Case) -> tuple[int, ...]:
    if case.point in COMMITTED:
        return (2,)
    # Rank 0 may still commit what rank 1 had finished.
    return (1,) if case.rank == 0 or POINTS[case.point].is_of_each_rank else (1, 2)


def _live(
    run: Path,
    *,
    step: int,
    asynchronous: bool,
    patience_seconds: float,
    case: Case | None = None,
) -> list[int]:
    """Let two ranks save, and return their exit statuses from `os.waitpid`."""
    pids = run.with_name("pids")
    shutil.rmtree(pids, ignore_errors=True)
    pids.mkdir()
    port = free_port()
    sys.stdout.flush()

    def act(rank: int) -> None:
        _become(rank, port)
        (pids / str(rank)).write_text(str(os.getpid()))
        _save(run, rank, pids, step=step, asynchronous=asynchronous, case=case)

    children = [_fork(lambda rank=rank: act(rank)) for rank in (0, 1)]  # type: ignore[misc]
    return ended_ranks(children, patience_seconds=patience_seconds if case else _LONGEST_SECONDS)


def _save(
    run: Path, rank: int, pids: Path, *, step: int, asynchronous: bool, case: Case | None
) -> None:
    fabric = make_fabric(devices=2, sharding="zero2", timeout="20s")
    state = make_state(fabric, float(step), step=step)
    saves = ModelCheckpoint(run, every_n_steps=1, keep_last=1, asynchronous=asynchronous)
    saves.on_train_start(fabric=fabric, step=0)
    if case is not None:
        _arm(case, rank, int((pids / str(case.rank)).read_text()))
    saves.on_train_batch_end(fabric=fabric, step=step, state=state)
    saves.on_train_end(fabric=fabric, step=step, state=state)


def _arm(case: Case, rank: int, victim: int) -> None:
    """Let this rank kill the victim, which may be itself, when it reaches the point."""
    point = POINTS[case.point]
    if rank != (case.rank if point.is_of_each_rank else 0):
        return
    name = point.name.format(rank=case.rank)
    synced = os.fsync

    def reach(kind: str, path: object) -> None:
        if kind == point.kind and Path(os.fsdecode(path)).name == name:  # type: ignore[arg-type]
            os.kill(victim, signal.SIGKILL)

    def fsync(fd: Any) -> None:
        reach("fsync", os.readlink(f"/proc/self/fd/{fd}"))
        synced(fd)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            is_read = arguments[2] & os.O_ACCMODE == os.O_RDONLY
            reach("read" if is_read else "write", arguments[0])
        elif event in ("os.mkdir", "os.rename", "shutil.rmtree"):
            reach(event, arguments[0])

    os.fsync = fsync
    sys.addaudithook(watch)


def _become(rank: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )


def _fork(act: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        act()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def ended_ranks(
    children: Sequence[int],
    *,
    patience_seconds: float,
    longest_seconds: float = 3 * _LONGEST_SECONDS,
) -> list[int]:
    """Wait for all processes; after the first has ended, the others have some time until SIGTERM ends them.

    Not SIGKILL, which marks a rank that reached its point.

    Args:
        children: Process ids.
        patience_seconds: Seconds for the others, from the first end on.
        longest_seconds: Seconds until the first end.

    Returns:
        The exit status of each, from `os.waitpid`.

    Raises:
        TimeoutError: none ended; all were killed.
    """
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + longest_seconds
    while len(statuses) < len(children):
        for pid in (pid for pid in children if pid not in statuses):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                statuses[pid] = status
                deadline = min(deadline, time.monotonic() + patience_seconds)
        if time.monotonic() > deadline:
            is_hang = not statuses
            for pid in (pid for pid in children if pid not in statuses):
                os.kill(pid, signal.SIGTERM)
                statuses[pid] = os.waitpid(pid, 0)[1]
            if is_hang:
                raise TimeoutError(
                    f"no rank ended within {longest_seconds:g} s, by the kill or otherwise: they hang, or the point is "
                    "not come to; look at where they wait."
                )
        time.sleep(0.02)
    return [statuses[pid] for pid in children]


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        [Case.parse(text) for text in sys.argv[3:]],
        patience_seconds=float(sys.argv[2]),
    )
