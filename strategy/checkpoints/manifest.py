"""`manifest.json`: the files of a run's checkpoint with sizes and hashes, so that damage is noticed.

Beside it is `manifest.sha256`, so that changes of the manifest itself are noticed too;
`sha256sum -c manifest.sha256` checks it. Plain Python: nothing in a file is ever run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thunder_memsave.errors import ThunderMemsaveError

MANIFEST = "manifest.json"
CHECKSUM = "manifest.sha256"
STATE = "state"
"""The one directory inside a checkpoint, written by `fabric.save`."""
MAX_BYTES = 64 * 2**20
"""Most bytes of a manifest: some 500,000 tensors."""

_READ_BY_NAME = (f"{STATE}/.metadata", f"{STATE}/meta.pt")
_FORMAT = 2
_READ_FORMATS = (1, 2)
_MAX_NAME = 255  # characters, as file systems have it
_FILE_NAME = re.compile(rf"(?:{STATE}/)?[A-Za-z0-9_.-]*[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DamagedCheckpointError(ThunderMemsaveError, ValueError):
    """A file of a checkpoint is not what was written; the message says which, and how."""


class UnverifiableCheckpointError(ThunderMemsaveError, ValueError):
    """A checkpoint was written by another version: before manifests existed, or with newer ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and hash of a file as it was written."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a checkpoint: its step, its ranks, and its files."""

    step: int
    """Finished optimizer steps."""
    world_size: int
    """Number of ranks that wrote it."""
    sharding: str
    """Sharding mode of the weights."""
    versions: Mapping[str, str]
    values: Mapping[str, Any]
    """The plain entries of the state."""
    tensors: Mapping[str, Mapping[str, Mapping[str, Any]]]
    """Key of the module -> name -> whole `shape`, `dtype`, and `is_trained`."""
    files: Mapping[str, FileRecord]
    """Records by name inside the checkpoint, such as `state/meta.pt`."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the evaluation at this very step, if there was one."""
    config: Mapping[str, Any] | None = None
    """The whole run file with its defaults, for comparison and for people; None if there is none."""
    precision: str | None = None
    """Fabric's precision, such as `bf16-true`."""
    plan_sha256: str | None = None
    """Hash of the plan, of what backward kept and recomputed; None if nothing was planned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignedManifest:
    """A manifest and the bytes of its two files, whose checksum fits."""

    manifest: Manifest
    content: bytes
    checksum: bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the checkpoint."""
        own = len(self.content) + len(self.checksum)
        return own + sum(record.num_bytes for record in self.manifest.files.values())


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum; both are on the disk afterwards."""
    content = {"format": _FORMAT, **dataclasses.asdict(manifest)}
    text = json.dumps(content, indent=1, allow_nan=True) + "\n"
    _write_synced(directory / MANIFEST, text.encode())
    _write_synced(directory / CHECKSUM, checksum_line(text.encode()))


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest, and check that no byte of it changed.

    Raises:
        DamagedCheckpointError: it changed, or is missing.
        UnverifiableCheckpointError: the checkpoint was written before manifests existed, or by a newer version.
    """
    return read_signed(directory).manifest


def read_signed(directory: Path) -> SignedManifest:
    """Do the same as `read_manifest`, and keep the bytes that were read."""
    if (directory / "checkpoint.json").exists() and not os.path.lexists(directory / MANIFEST):
        raise UnverifiableCheckpointError(
            f"{directory} was written without a {MANIFEST} by a version of this package before its first release, so "
            "what it holds cannot be verified; start a new run in another output_dir."
        )
    checksum = _small_file(directory, CHECKSUM, max_bytes=1024)
    content = _small_file(directory, MANIFEST, max_bytes=MAX_BYTES)
    return parse_signed(content, checksum, where=str(directory))


def parse_signed(content: bytes, checksum: bytes, *, where: str) -> SignedManifest:
    """Parse the bytes of both files; `where` names the checkpoint.

    Raises:
        DamagedCheckpointError: they do not fit together, or are no manifest.
        UnverifiableCheckpointError: the manifest is a newer version's.
    """
    if checksum != checksum_line(content):
        raise DamagedCheckpointError(
            f"{MANIFEST} does not have the SHA-256 that {CHECKSUM} gives: bytes of one of the two changed"
        )
    try:
        parsed = json.loads(content)
        _require_format(where, parsed["format"])
        return SignedManifest(manifest=_parsed(parsed), content=content, checksum=checksum)
    except UnverifiableCheckpointError:
        raise
    # RecursionError: thousands of nested brackets.
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(
            f"{MANIFEST} is invalid ({type(error).__name__}: {error})"
        ) from error


def checksum_line(content: bytes) -> bytes:
    """Return the content of `manifest.sha256` for that of a manifest."""
    return f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n".encode()


def record_file(directory: Path, name: str) -> FileRecord:
    """Return the size and hash of a file as it is now.

    Raises:
        DamagedCheckpointError: it is not a regular file inside the directory.
    """
    with _opened(directory, name) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(num_bytes=os.fstat(file.fileno()).st_size, sha256=digest)


def files_in(directory: Path) -> list[str]:
    """List a checkpoint's files, except for the manifest's own."""
    own = {MANIFEST, CHECKSUM}
    names = [entry.name for entry in directory.iterdir() if entry.name not in own | {STATE}]
    inner = directory / STATE
    if inner.is_dir() and not inner.is_symlink():
        names += [f"{STATE}/{entry.name}" for entry in inner.iterdir()]
    elif os.path.lexists(inner):
        names.append(STATE)
    return sorted(names)


def share_of_files(names: Iterable[str], *, rank: int, world_size: int) -> list[str]:
    """Return the files that a rank hashes: those that it wrote, if the name tells."""
    return [name for name in names if _writer_of(name) % world_size == rank]


def require_layout(directory: Path, manifest: Manifest) -> None:
    """Check that the manifest names a whole checkpoint, without reading any file.

    Raises:
        DamagedCheckpointError: it does not.
    """
    num_random = sum(name.startswith("random-") for name in manifest.files)
    if num_random != manifest.world_size or not any(n.startswith(STATE) for n in manifest.files):
        raise DamagedCheckpointError(
            f"{MANIFEST} names {num_random} random states of {manifest.world_size} ranks and "
            f"{len(manifest.files) - num_random} other files, which is not a whole checkpoint"
        )
    if (directory / STATE).is_symlink():
        raise DamagedCheckpointError(f"{STATE} is a link, and none is followed")
    # Other files may be there, such as .nfs0001: nothing reads them.
    read = _READ_BY_NAME if (directory / STATE).is_dir() else (STATE,)
    for name in read:
        if name not in manifest.files:
            raise DamagedCheckpointError(f"{MANIFEST} does not name {name}, which is read")


def require_files(directory: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Check that files are as they were written, sizes first.

    Raises:
        DamagedCheckpointError: one is not.
    """
    names = list(names)
    for name in names:
        _require_size(directory, name, manifest.files[name].num_bytes)
    for name in names:
        found, written = record_file(directory, name), manifest.files[name]
        if found != written:
            raise DamagedCheckpointError(
                f"{name} has the SHA-256 {found.sha256[:12]}..., and had {written.sha256[:12]}... when it was "
                "written: some of its bytes changed"
            )


def _require_size(directory: Path, name: str, num_bytes: int) -> None:
    with _opened(directory, name) as file:
        found = os.fstat(file.fileno()).st_size
    if found != num_bytes:
        raise DamagedCheckpointError(
            f"{name} has {found:,} bytes, and had {num_bytes:,} when it was written"
        )


def _writer_of(name: str) -> int:
    """Return the rank in a file's name; files that all ranks share are rank 0's."""
    match = re.fullmatch(rf"(?:{STATE}/__(\d+)_\d+\.distcp|random-(\d+)\.pt)", name)
    return 0 if match is None else int(match[1] or match[2])


def _opened(directory: Path, name: str) -> io.BufferedReader:
    """Open a regular file; a link, a device or a pipe is never opened for reading."""
    path = directory / name
    try:
        if path.parent != directory and path.parent.is_symlink():
            raise DamagedCheckpointError(f"{path.parent.name} is a link, and none is followed")
        if path.is_symlink():
            raise DamagedCheckpointError(f"{name} is a link, and none is followed")
        file = open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")  # noqa: SIM115
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{name} is missing") from error
    except NotADirectoryError as error:
        raise DamagedCheckpointError(f"{path.parent.name} is not a directory") from error
    except IsADirectoryError as error:
        raise DamagedCheckpointError(f"{name} is a directory, not a file") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise DamagedCheckpointError(f"{name} is not a regular file")
    return file


def _small_file(directory: Path, name: str, *, max_bytes: int) -> bytes:
    with _opened(directory, name) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DamagedCheckpointError(f"{name} has more than {max_bytes:,} bytes")
    return content


def _require_format(where: str, format: object) -> None:
    if type(format) is int and format > _FORMAT:
        raise UnverifiableCheckpointError(
            f"{where} has a {MANIFEST} of format {format}, and this version reads up to {_FORMAT}: it was written "
            "by a newer thunder-memsave; go on with that one."
        )
    if format not in _READ_FORMATS:
        raise ValueError(f"its format is {format!r}, and this version reads {_READ_FORMATS}")


def _parsed(content: Any) -> Manifest:
    content.pop("format")
    files = {name: _file_record(name, **record) for name, record in content.pop("files").items()}
    manifest = Manifest(files=files, **content)
    for name in ("step", "world_size"):
        if type(getattr(manifest, name)) is not int or getattr(manifest, name) < 0:
            raise ValueError(f"{name} is {getattr(manifest, name)!r}")
    for name in ("versions", "values", "tensors", "metrics"):
        if not isinstance(getattr(manifest, name), dict):
            raise ValueError(f"{name} is not a mapping")
    if not all(isinstance(value, float | int) for value in manifest.metrics.values()):
        raise ValueError("a metric is not a number")
    if not isinstance(manifest.config, dict | None):
        raise ValueError("config is not a mapping")
    return manifest


def _file_record(name: str, *, num_bytes: object, sha256: object) -> FileRecord:
    # The length first: the pattern's time grows with its square.
    if len(name) > _MAX_NAME or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name[:_MAX_NAME]!r} is not the name of a file within the checkpoint")
    if type(num_bytes) is not int or num_bytes < 0:
        raise ValueError(f"{name} cannot have {num_bytes!r} bytes")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        raise ValueError(f"{name} has no SHA-256")
    return FileRecord(num_bytes=num_bytes, sha256=sha256)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
