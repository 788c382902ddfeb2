"""The paths of a run, and the checkpoint that it resumes from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thunder_memsave.callbacks.checkpoint import CheckpointInfo, list_checkpoints, read_info
from thunder_memsave.callbacks.verified import refuse_only_damaged
from thunder_memsave.checkpoints.commit import write_file
from thunder_memsave.checkpoints.disk_errors import told
from thunder_memsave.checkpoints.manifest import DamagedCheckpointError, UnverifiableCheckpointError
from thunder_memsave.finetune.model.safetensors_files import sync_file
from thunder_memsave.finetune.output.absolute_paths import with_absolute_paths
from thunder_memsave.finetune.output.defaults_written import with_defaults
from thunder_memsave.finetune.run_file.batch_sizes import batch_sizes
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.finetune.run_file.launch import is_under_torchrun, world_size
from thunder_memsave.finetune.run_file.reading.parse import dump_run_config
from thunder_memsave.settings.fsspec_address import is_address
from thunder_memsave.settings.problems import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunDirectory:
    """The paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """The resolved run file."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """Metrics of every step, such as the loss."""
        return self.root / "metrics.csv"

    @property
    def answers(self) -> Path:
        """What the model answered at evaluations, if it was asked."""
        return self.root / "answers.jsonl"

    @property
    def environment(self) -> Path:
        """Versions, devices and command of every start."""
        return self.root / "environment.json"

    @property
    def plan(self) -> Path:
        """The plan of the memory, as text."""
        return self.root / "plan.txt"

    @property
    def reference(self) -> Path:
        """Log-probabilities of the reference model, for losses of preferences."""
        return self.root / "reference.safetensors"

    @property
    def loss_curve(self) -> Path:
        """Plot of losses and learning rate."""
        return self.root / "loss.png"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints that the run can resume from."""
        return self.root / "checkpoints"

    @property
    def adapter(self) -> Path:
        """The exported adapter, in PEFT's format."""
        return self.root / "adapter"

    @property
    def model(self) -> Path:
        """The exported model of a full run, in transformers' format."""
        return self.root / "model"

    def has_begun(self) -> bool:
        """Tell whether a run may have begun here, also if the disk does not answer."""
        try:
            return self.config.exists()
        except OSError:
            return True

    def run_file_text(self) -> str | None:
        """Return the run file's text; None if there is none."""
        return self.config.read_text(encoding="utf-8") if self.config.exists() else None

    def take_back(self, run_file_before: str | None) -> None:
        """Undo a start that took no step: remove its own files, and no others.

        Args:
            run_file_before: Result of `run_file_text` before the start; a resumed run gets it back and keeps its files.
        """
        if run_file_before is not None:
            write_text(self.config, run_file_before)
            return
        written = (self.config, self.metrics, self.environment, self.plan, self.loss_curve)
        for path in (*written, self.reference, self.answers):
            path.unlink(missing_ok=True)
        for directory in (self.checkpoints, self.root):
            with contextlib.suppress(OSError):  # it has other contents
                directory.rmdir()

    def create(self, config: RunConfig) -> None:
        """Create the directory and write the resolved run file into it.

        The file has two of the three batch sizes, so that an override of one does not contradict it; whole paths, so
        that it means the same in another directory; and defaults of other packages, so that it does with their next
        versions.

        Raises:
            ConfigError: the directory cannot be written.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._write_run_file(
                dump_run_config(with_absolute_paths(with_defaults(_with_two_sizes(config)))),
                config,
            )
        except FileExistsError as error:
            message = (
                f"another run has just begun in output_dir {self.root}; name another directory."
            )
            raise ConfigError(message, key="output_dir") from error
        except OSError as error:
            message = f"cannot write to output_dir {self.root}: {error}"
            raise ConfigError(message, key="output_dir") from error

    def _write_run_file(self, text: str, config: RunConfig) -> None:
        if config.resume is not False:
            write_text(self.config, text)
            return
        # Claims the name: a run that started at the same moment also found the directory empty.
        self.config.open("x").close()
        try:
            write_text(self.config, text)
        except OSError:
            self.config.unlink()  # so that the next try finds the directory as this one did
            raise


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: at any time, the old or the new one is whole.

    Raises:
        OSError: the disk refused it; the old file stays.
    """

    def write(temporary: Path) -> None:
        temporary.write_text(text, encoding="utf-8")
        sync_file(temporary)

    write_file(path, write)


def _with_two_sizes(config: RunConfig) -> RunConfig:
    sizes = batch_sizes(config.train, world_size=world_size(config))
    train = dataclasses.replace(
        config.train,
        global_batch_size=sizes.global_batch_size,
        micro_batch_size=sizes.micro_batch_size,
        gradient_accumulation_steps=None,
    )
    return dataclasses.replace(config, train=train)


def checkpoint_to_resume(config: RunConfig) -> CheckpointInfo | None:
    """Find the checkpoint that the run starts from; None means the beginning.

    Only manifests are read here; the files themselves are verified once all processes have joined.

    Raises:
        ConfigError: the directory holds a run that is not to be continued, or the checkpoint is
            missing or damaged.
    """
    directory = RunDirectory(root=Path(config.output_dir))
    # `train` looks at an address, and goes on from a copy on the disk.
    if config.resume is False or is_address(config.resume):
        refuse_existing(directory)
        return None
    if config.resume == "auto":
        found = list_checkpoints(directory.checkpoints)
        if not found:
            _refuse_only_damaged(directory)
            if not directory.config.exists():  # else a run that ended before its first checkpoint
                refuse_existing(directory)
            return None
        info = _newest_readable(found)
    else:
        info = _named_checkpoint(Path(str(config.resume)))
        if info.path.resolve().parent != directory.checkpoints.resolve():
            refuse_existing(directory)
    return info


def refuse_existing(directory: RunDirectory) -> None:
    """Refuse to begin a run in a directory that holds something.

    Raises:
        ConfigError: it does.
    """
    if directory.root.exists() and not directory.root.is_dir():
        raise ConfigError(
            f"output_dir {directory.root} is a file; name a directory.", key="output_dir"
        )
    if directory.root.exists() and any(directory.root.iterdir()):
        raise ConfigError(
            f"output_dir {directory.root} exists and is not empty; name another directory, or go "
            "on with the run in it by --resume=auto.",
            key="output_dir",
        )


def how_to_go_on(
    directory: RunDirectory,
    *,
    num_processes: int,
    started_from: CheckpointInfo | None,
    change: str = "",
) -> str:
    """Name the last checkpoint of a run that ended early, and the command that resumes it.

    Args:
        directory: Directory of that run.
        num_processes: Number of its processes; with as many it resumes bit-exactly.
        started_from: The checkpoint that it resumed from, if any.
        change: An override that the command needs in order to end differently.
    """
    devices = f" --devices={num_processes}" if num_processes > 1 and not is_under_torchrun() else ""
    run_file = shlex.quote(str(directory.config))
    command = f"{_launcher()}thunder-memsave train {run_file}{devices}{change}"
    try:
        own = list_checkpoints(directory.checkpoints)
    except OSError as error:  # which must not hide why the run ended
        return (
            f"the last checkpoint is unknown, for {directory.checkpoints} cannot be listed ({told(error)}); see that "
            f"the disk works, and go on with: {command} --resume=auto"
        )
    if own:
        return f"the last checkpoint is {own[-1]}; go on with: {command} --resume=auto"
    if started_from is not None:
        return (
            f"the last checkpoint is {started_from.path}, which this run started from; start again "
            f"with: {command} --resume={shlex.quote(str(started_from.path))} --output_dir=ANOTHER"
        )
    return f"there is no checkpoint yet; start again with: {command} --resume=auto"


def _named_checkpoint(path: Path) -> CheckpointInfo:
    if not path.is_dir():
        raise ConfigError(
            f"resume is {str(path)!r}, which is not a checkpoint; name a directory such as "
            "runs/first/checkpoints/step-00000100, or write 'auto'.",
            key="resume",
        )
    return _readable_info(path)


def _readable_info(path: Path) -> CheckpointInfo:
    try:
        return read_info(path)
    except UnverifiableCheckpointError as error:
        raise ConfigError(str(error), key="resume") from error
    except (OSError, DamagedCheckpointError) as error:
        raise ConfigError(
            f"{path} is damaged, or no checkpoint: {error}; resume from another one, or restore it from a copy.",
            key="resume",
        ) from error


def _newest_readable(found: Sequence[Path]) -> CheckpointInfo:
    """Return the newest readable manifest; damaged checkpoints are renamed later, when the files are verified."""
    reasons = []
    for path in reversed(found):
        try:
            return read_info(path)
        except UnverifiableCheckpointError as error:
            raise ConfigError(str(error), key="resume") from error
        except (OSError, DamagedCheckpointError) as error:
            reasons.append(f"{path.name}: {error}")
    raise ConfigError(
        f"every checkpoint in {found[0].parent} is damaged, and no run starts over by itself ({'; '.join(reasons)}); "
        "restore one from a copy, or start a new run in another output_dir.",
        key="resume",
    )


def _refuse_only_damaged(directory: RunDirectory) -> None:
    try:
        refuse_only_damaged(directory.checkpoints)
    except DamagedCheckpointError as error:
        raise ConfigError(str(error), key="resume") from error


def _launcher() -> str:
    """Return this run's own launch command, as it resumes bit-exactly with the same number of processes."""
    if not is_under_torchrun():
        return ""
    num_local, num_processes = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    nodes = f"--nnodes {num_processes // num_local} ... " if num_processes > num_local else ""
    return f"torchrun {nodes}--nproc-per-node {num_local} --no-python "
