"""Brings the checkpoint that a run resumes from to the local disk, if it is at an address."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from thunder_memsave.callbacks.step_directories import is_checkpoint_name, list_checkpoints, step_of
from thunder_memsave.checkpoints.addresses import AddressError, RunAtAddress
from thunder_memsave.checkpoints.commit import sync_directory
from thunder_memsave.checkpoints.manifest import (
    DamagedCheckpointError,
    SignedManifest,
    UnverifiableCheckpointError,
    read_signed,
)
from thunder_memsave.finetune.output.run_directory import RunDirectory, refuse_existing
from thunder_memsave.finetune.run_file.config import RunConfig
from thunder_memsave.settings.fsspec_address import is_address
from thunder_memsave.settings.problems import ConfigError

_PARTIAL_PREFIX = ".partial-copy-"
"""Saves remove what begins like this, too."""
_LOCK = ".copying"
_OF_AUTO = "checkpoint.copy_to may have a newer one, so no run starts without it. Start again when it can be read"

_log = logging.getLogger(__name__)


def with_local_checkpoint(config: RunConfig) -> RunConfig:
    """Copy the checkpoint that the run resumes from to its directory, and return the run that resumes from there.

    With `resume: auto` that is the newest one at `checkpoint.copy_to`, if no local one is as new.

    Raises:
        ConfigError: the address cannot be read or has no such checkpoint, or it or the directory holds another run.
    """
    try:
        return _with_local_checkpoint(config)
    except (AddressError, UnverifiableCheckpointError) as error:
        advice = _OF_AUTO if config.resume == "auto" else "start again when it can be read"
        raise ConfigError(f"{error}; {advice}, or correct the address.", key="resume") from error


def fetch_run(address: str, root: Path) -> Path:
    """Copy a run file and what the run trained into a new directory: its export, or a checkpoint if that is newer.

    Args:
        address: Address of a run, or of one of its checkpoints, which is then taken.
        root: The directory to make.

    Raises:
        ConfigError: the address cannot be read, or has no run.
    """
    run_address, name = _run_and_name(address)
    directory = RunDirectory(root=root)
    try:
        run = RunAtAddress(run_address)
        export = run.newest_export() if name is None else None
        if export is None:
            _fetch_named(run, name, directory)
        else:
            print(f"copying {run.address}/{export}", flush=True)
            run.get_export(export, root / export)
        run.get(directory.config.name, directory.config)
    except (AddressError, UnverifiableCheckpointError) as error:
        raise ConfigError(str(error)) from error
    return root


def _with_local_checkpoint(config: RunConfig) -> RunConfig:
    copy_to, directory = config.checkpoint.copy_to, RunDirectory(root=Path(config.output_dir))
    if is_address(config.resume):
        address, name = _run_and_name(str(config.resume))
        if copy_to is not None and copy_to.rstrip("/") != address:
            _refuse_another_run(copy_to)
        path = _fetch_named(RunAtAddress(address), name, directory)
        return dataclasses.replace(config, resume=str(path))
    if copy_to is None:
        return config
    if config.resume == "auto":
        _fetch_newer(RunAtAddress(copy_to), directory)
    elif config.resume is False or _is_elsewhere(Path(str(config.resume)), directory):
        _refuse_another_run(copy_to)
    return config


def _run_and_name(address: str) -> tuple[str, str | None]:
    """Split the address of a checkpoint into its run's and its name; that of a run has none."""
    address = address.rstrip("/")
    parent, _, name = address.rpartition("/")
    if is_checkpoint_name(name):
        return parent.removesuffix("/checkpoints"), name
    return address.removesuffix("/checkpoints"), None


def _is_elsewhere(path: Path, directory: RunDirectory) -> bool:
    return path.resolve().parent != directory.checkpoints.resolve()


def _refuse_another_run(copy_to: str) -> None:
    run = RunAtAddress(copy_to)
    for name in _checkpoint_names(run):
        try:
            is_there = run.find(name) is not None
        except (DamagedCheckpointError, UnverifiableCheckpointError):
            is_there = True
        if is_there:
            raise ConfigError(
                f"checkpoint.copy_to is {copy_to!r}, which holds {name} of another run, and this one would replace it; "
                "name another address, or go on with that run by --resume=auto.",
                key="checkpoint.copy_to",
            )


def _checkpoint_names(run: RunAtAddress) -> list[str]:
    return sorted(filter(is_checkpoint_name, run.names()), key=lambda name: step_of(Path(name)))


def _fetch_named(run: RunAtAddress, name: str | None, directory: RunDirectory) -> Path:
    """Copy this checkpoint, or the newest whole one of the run."""
    if name is None:
        fetched = _fetch_newest(run, directory, later_than=-1, is_begun=False)
        if fetched is None:
            raise ConfigError(f"there is no whole checkpoint at {run.address}.", key="resume")
        return fetched
    try:
        return _fetch(run, name, _required(run, name), directory, is_begun=False)
    except DamagedCheckpointError as error:
        raise ConfigError(
            f"{run.shown(name)} is damaged: {error}; resume from another one.", key="resume"
        ) from error


def _required(run: RunAtAddress, name: str) -> SignedManifest:
    signed = run.find(name)
    if signed is None:
        raise ConfigError(f"there is no whole checkpoint at {run.shown(name)}.", key="resume")
    return signed


def _fetch_newer(run: RunAtAddress, directory: RunDirectory) -> None:
    """Copy the newest whole checkpoint that is newer than the local ones."""
    own = list_checkpoints(directory.checkpoints)
    is_begun = bool(own) or directory.has_begun()
    _fetch_newest(run, directory, later_than=step_of(own[-1]) if own else -1, is_begun=is_begun)


def _fetch_newest(
    run: RunAtAddress, directory: RunDirectory, *, later_than: int, is_begun: bool
) -> Path | None:
    reasons = []
    for name in reversed(_checkpoint_names(run)):
        if step_of(Path(name)) <= later_than:
            break
        try:
            signed = run.find(name)
            if signed is not None:
                return _fetch(run, name, signed, directory, is_begun=is_begun)
        except DamagedCheckpointError as error:
            reasons.append(f"{run.shown(name)} is damaged: {error}")
            _log.warning("%s. The one before is tried.", reasons[-1])
    if reasons and later_than < 0:
        raise ConfigError(
            f"every checkpoint at {run.address} is damaged, and no run starts over by itself. {'. '.join(reasons)}.",
            key="resume",
        )
    return None


def _fetch(
    run: RunAtAddress,
    name: str,
    signed: SignedManifest,
    directory: RunDirectory,
    *,
    is_begun: bool,
) -> Path:
    """Copy a checkpoint, unless another process of this run was faster; `is_begun`: into a run that is there."""
    if signed.manifest.step != step_of(Path(name)):
        raise DamagedCheckpointError(f"it is a checkpoint of step {signed.manifest.step}")
    path = directory.checkpoints / name
    with _locked(directory):
        if _is_local(path, signed):
            return path
        if not is_begun:
            _refuse_others(directory)
        print(
            f"copying {run.shown(name)} to {path.parent} ({signed.num_bytes:,} bytes)", flush=True
        )
        partial = path.with_name(f"{_PARTIAL_PREFIX}{name}")
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
        try:
            run.download(name, signed, partial)
            os.rename(partial, path)
            sync_directory(path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return path


def _is_local(path: Path, signed: SignedManifest) -> bool:
    try:
        return read_signed(path).checksum == signed.checksum
    except (DamagedCheckpointError, UnverifiableCheckpointError):
        return False


def _refuse_others(directory: RunDirectory) -> None:
    """Refuse a directory that holds more than what `_fetch` itself has written into it."""
    inner = directory.checkpoints
    others = [path for path in directory.root.iterdir() if path != inner]
    others += [
        path
        for path in inner.iterdir()
        if path.name != _LOCK and not path.name.startswith(_PARTIAL_PREFIX)
    ]
    if others:
        refuse_existing(directory)


@contextmanager
def _locked(directory: RunDirectory) -> Iterator[None]:
    """Let one process of this machine copy at a time; what it made is removed if nothing was copied."""
    try:
        path = directory.checkpoints / _LOCK
        descriptor = _lock(path)
    except OSError as error:
        message = f"cannot write to output_dir {directory.root}: {error}"
        raise ConfigError(message, key="output_dir") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        for each in (directory.checkpoints, directory.root):
            with suppress(OSError):  # it has other contents
                each.rmdir()


def _lock(path: Path) -> int:
    """Wait for the lock file, and return it open; one that was removed meanwhile locks nobody out."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:
            continue  # a process that failed removed the directory again
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
