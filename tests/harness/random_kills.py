"""Runs `thunder-memsave train` under torchrun with ranks that kill themselves at random, and reports each attempt."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric import Fabric

from harness.fabric import run_python
from harness.language_model import write_run_file

NUM_RANKS = 2
MOST_STEPS = 4
"""Most steps between a start and its kill."""

_LOG = "kills.log"
_FILE_OPERATIONS = frozenset(
    {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
)
_MOST_OPERATIONS = (36, 6)
"""Most file operations of a save, on rank 0 and on the others."""
_STEP_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """The record that a process wrote before it killed itself."""

    attempt: int
    rank: int
    committed: int
    """The newest step with a checkpoint."""
    is_mid_save: bool
    """True if a checkpoint was being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """The step from which a process of an attempt resumed."""

    attempt: int
    rank: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lives:
    """All starts and kills of a launch."""

    starts: list[Start]
    kills: list[Kill]

    def num_lost_steps(self) -> int:
        """Return the number of committed steps that the next attempt did not resume from."""
        lost = 0
        for kill in self.kills:
            steps = [start.step for start in self.starts if start.attempt == kill.attempt + 1]
            # The difference may be negative: the other rank can commit while this one ends.
            lost += max(0, kill.committed - min(steps, default=0))
        return lost


class KillsItself:
    """A callback for run files: each attempt of a launch ends by SIGKILL of one rank, at a moment drawn from the seed.

    The moments alternate between a save, before one of a rank's file operations, and anywhere in a step.
    """

    def __init__(self, run: str, seed: int, num_kills: int) -> None:
        self.checkpoints = Path(run) / "checkpoints"
        self.seed, self.num_kills = seed, num_kills
        self.log = os.open(Path(run).parent / _LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.rank = int(os.environ["RANK"])
        self.chance = random.Random(f"{seed} {self.attempt}")
        self.at_step = -1
        self.operations_left = -1

    def on_train_start(self, *, fabric: Fabric, step: int) -> None:
        os.write(self.log, f"start {self.attempt} {self.rank} {step}\n".encode())
        victim, later = self.chance.randrange(NUM_RANKS), self.chance.randrange(MOST_STEPS - 1)
        if self.attempt < self.num_kills and victim == fabric.global_rank:
            self.at_step = step + later
            sys.addaudithook(self._watch)

    def on_train_batch_start(self, *, step: int) -> None:
        if step != self.at_step:
            return
        if (self.seed + self.attempt) % 2:
            threading.Timer(self.chance.uniform(0, _STEP_S), self._kill).start()
        else:
            self.operations_left = self.chance.randrange(_MOST_OPERATIONS[min(self.rank, 1)])

    def _watch(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.operations_left < 0 or event not in _FILE_OPERATIONS:
            return
        if str(arguments[0]).startswith(str(self.checkpoints)):
            self.operations_left -= 1
            if self.operations_left < 0:
                self._kill()

    def _kill(self) -> None:
        names = os.listdir(self.checkpoints) if self.checkpoints.exists() else []
        steps = [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]
        is_mid_save = any(name.startswith(".partial-step-") for name in names)
        line = f"kill {self.attempt} {self.rank} {max(steps, default=0)} {int(is_mid_save)}\n"
        os.write(self.log, line.encode())
        os.kill(os.getpid(), signal.SIGKILL)


def train_with_kills(
    directory: Path, values: Mapping[str, Any], *, seed: int, num_kills: int, timeout_s: float
) -> Lives:
    """Train to the end, and kill each attempt but the last.

    Args:
        directory: Directory of the run file; that of the run is `directory / "run"`.
        values: Keys of a run file, with a checkpoint of every step and enough steps: `MOST_STEPS` for each attempt.
        seed: Decides when which rank is killed.
        num_kills: Attempts that are killed; 0 trains undisturbed.
        timeout_s: Seconds after which all processes are ended.

    Raises:
        AssertionError: the run failed; carries its output.
    """
    run = directory / "run"
    arguments = {"run": str(run), "seed": seed, "num_kills": num_kills}
    killer = {"class_path": "harness.random_kills.KillsItself", "init_args": arguments}
    run_file = write_run_file(directory, {**values, "output_dir": str(run), "callbacks": [killer]})
    launch = [
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"),
        *(f"--max-restarts={num_kills}", "--monitor-interval=0.1"),
    ]
    train = ["-m", "thunder_memsave", "train", run_file, "--resume=auto"]
    print(f"seed {seed}: {num_kills} kills")
    num_forks = 1 + NUM_RANKS * (1 + num_kills)
    run_python([*launch, *train], num_forks=num_forks, timeout=timeout_s)
    return _lives(directory / _LOG)


def _lives(log: Path) -> Lives:
    starts, kills = [], []
    for line in log.read_text().splitlines():
        kind, *numbers = line.split()
        attempt, rank, step, *more = map(int, numbers)
        if kind == "start":
            starts.append(Start(attempt=attempt, rank=rank, step=step))
        else:
            is_mid_save = bool(more[0])
            kill = Kill(attempt=attempt, rank=rank, committed=step, is_mid_save=is_mid_save)
            kills.append(kill)
    return Lives(starts=starts, kills=kills)
