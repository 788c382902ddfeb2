"""The directory that an export writes: it gets its name once it is whole, and a failed export leaves nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from thunder_memsave.errors import ExportError
from thunder_memsave.settings.problems import ConfigError


def check_out(out: Path) -> None:
    """Refuse, before any work, an output path that a directory cannot be renamed to.

    Raises:
        ConfigError: the path is taken, or cannot be replaced.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out is {out}, which is a file; name a directory.")
    if out.is_symlink():
        raise ConfigError(
            f"--out is {out}, which is a link to {out.readlink()}; name a directory that is not there yet, "
            f"such as {out.resolve() / 'model'}."
        )
    for what in _kept(out):
        raise ConfigError(
            f"--out is {out}, which is {what} and cannot be replaced; name a directory in it, such as {out / 'model'}."
        )
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"--out is {out}, which is not empty; name another directory.")


@contextmanager
def directory_for(out: Path) -> Iterator[Path]:
    """Yield a directory beside `out`, and rename it to `out` at the end, when all of it is on the disk.

    Raises:
        ConfigError: the disk refused it, or one of its sources could not be read.
    """
    # Imported here, because they import torch, which takes seconds.
    from thunder_memsave.checkpoints.commit import remove, sync_directory, temporary_name

    temporary = temporary_name(out.absolute())
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _sync_all(temporary)
        os.rename(temporary, out)  # onto an empty directory too
        sync_directory(temporary.parent)
    except (ConfigError, ExportError):  # which may quote a disk error
        raise
    # By type, safetensors' errors are not disk errors.
    except Exception as error:
        found = _disk_error(error)
        if found is None:
            raise
        raise _refusal(found, out, temporary) from error
    finally:
        remove(temporary)


def _kept(out: Path) -> Iterator[str]:
    """Yield why a directory cannot be replaced by another one, if so."""
    if os.path.ismount(out):
        yield "where a file system is mounted"
    elif out.is_dir() and out.samefile(Path.cwd()):
        yield "the directory that you are in"


def _sync_all(directory: Path) -> None:
    """Sync files that transformers, tokenizers and peft wrote to the disk too: a rename is durable only then."""
    from thunder_memsave.checkpoints.commit import sync_directory
    from thunder_memsave.finetune.model.safetensors_files import sync_file

    for path in directory.rglob("*"):
        if path.is_file():
            sync_file(path)
        else:
            sync_directory(path)
    sync_directory(directory)


def _disk_error(error: Exception) -> OSError | None:
    from thunder_memsave.checkpoints.disk_errors import disk_error

    found = disk_error(error)
    # An error that has only a text, such as transformers' own.
    return error if found is None and isinstance(error, OSError) else found


def _refusal(error: OSError, out: Path, temporary: Path) -> ConfigError:
    """Name what failed: the output path, if the failing file is in it or unknown, or else another file."""
    name = None if error.filename is None else Path(os.fsdecode(error.filename)).absolute()
    if name is None or name.is_relative_to(temporary) or name in temporary.parents:
        return ConfigError(
            f"cannot export to {out}: {error}; nothing was written. Correct that, or name another directory by --out."
        )
    return ConfigError(
        f"cannot export: {error}; nothing was written to {out}. Correct that, and export again."
    )
