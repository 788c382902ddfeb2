"""Checkpoints at an address of fsspec, such as `s3://bucket/runs/first`: written, checked, read and deleted there."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from thunder_memsave.checkpoints.commit import sync_directory
from thunder_memsave.checkpoints.manifest import (
    CHECKSUM,
    MANIFEST,
    MAX_BYTES,
    STATE,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    SignedManifest,
    checksum_line,
    parse_signed,
    read_signed,
    require_layout,
)
from thunder_memsave.errors import ThunderMemsaveError

_CHECKPOINTS = "checkpoints"
_EXPORTS = {"adapter": "adapter_config.json", "model": "config.json"}
"""Directories of what was trained, and the file that each is found by."""
_PIECE_BYTES = 8 * 2**20
_CHECKSUM_BYTES = len(checksum_line(b""))
_VERSION_KEYS = (
    *("size", "ETag", "etag", "md5Hash", "content_settings", "checksum", "generation", "mtime"),
    *("LastModified", "last_modified", "updated", "modified", "created"),
)
"""Keys under which fsspec's file systems give a file's size, and its times or checksums."""


class AddressError(ThunderMemsaveError, RuntimeError):
    """An address cannot be read or written; the message says which, and why."""


class FilesAtAddress:
    """Files in a directory at an address.

    Args:
        address: One that `require_address` accepts. Credentials come from fsspec's configuration and the environment.

    Raises:
        AddressError: it cannot be reached.
    """

    def __init__(self, address: str) -> None:
        import fsspec  # not needed by runs without addresses

        self.address = address.rstrip("/")
        # Other machines write there too, so that what was listed before says nothing.
        options: dict[str, Any] = {"use_listings_cache": False}
        if address.startswith(("file:", "local:")):
            options["auto_mkdir"] = True  # others have no directories, or make them
        self._fs: Any
        with self._telling(f"{address} cannot be reached"):
            self._fs, root = fsspec.url_to_fs(self.address, **options)
            self._root = root.rstrip("/")

    def versions(self) -> dict[str, str]:
        """Return what tells a file from an earlier one of its name: size, and time or checksum; by name.

        Raises:
            AddressError: the address cannot be listed, or there is no such directory.
        """
        with self._telling(f"{self.address} cannot be listed"):
            entries = [e for e in self._fs.ls(self._root, detail=True) if e["type"] == "file"]
            return {
                _name_of(entry): repr({k: entry[k] for k in _VERSION_KEYS if k in entry})
                for entry in entries
            }

    def get(self, name: str, path: Path) -> None:
        """Copy one file to the local disk.

        Raises:
            AddressError: the address cannot be read, or the disk not be written.
        """
        with (
            self._telling(f"{self.address}/{name} cannot be copied to {path}"),
            self._opened(f"{self._root}/{name}") as source,
            path.open("xb") as local,
        ):
            shutil.copyfileobj(source, local, _PIECE_BYTES)

    def _opened(self, path: str) -> Any:
        """Open a file to read it once, from its beginning to its end."""
        return self._fs.open(path, "rb", block_size=_PIECE_BYTES, cache_type="none")

    def _list(self, path: str) -> dict[str, int | None]:
        """Return the sizes of what is in a directory, by name; None for directories."""
        try:
            entries = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return {}
        return {_name_of(e): e["size"] if e["type"] == "file" else None for e in entries}

    @contextmanager
    def _telling(self, what: str) -> Iterator[None]:
        try:
            yield
        except ThunderMemsaveError:
            raise
        # Each file system has errors of its own.
        except Exception as error:
            raise AddressError(f"{what} ({type(error).__name__}: {error})") from error


class RunAtAddress(FilesAtAddress):
    """What an address holds of a run: `checkpoints/<name>`, and files beside them.

    A checkpoint is there as long as its `manifest.sha256` is, which is written last and deleted first. So a kill at
    any moment leaves whole checkpoints, and parts that nobody takes for one, also where objects are not
    written atomically.
    """

    def shown(self, name: str) -> str:
        """Return the address of a checkpoint."""
        return f"{self.address}/{_CHECKPOINTS}/{name}"

    def names(self) -> list[str]:
        """List the directories of checkpoints, whole or not.

        Raises:
            AddressError: the address cannot be listed; a directory that is not there is empty.
        """
        with self._telling(f"{self.address} cannot be listed"):
            entries = self._list(f"{self._root}/{_CHECKPOINTS}")
            return sorted(name for name, size in entries.items() if size is None)

    def find(self, name: str) -> SignedManifest | None:
        """Read the manifest of a checkpoint, and compare names and sizes of its files; None if there is none.

        Raises:
            DamagedCheckpointError: it was whole, and is not as it was written.
            AddressError: the address cannot be read.
        """
        with self._telling(f"{self.shown(name)} cannot be read"):
            sizes = self._sizes(name)
            if sizes.get(CHECKSUM, 0) < _CHECKSUM_BYTES:
                return None  # a shorter one is being written
            _require_readable(sizes)
            try:
                content, checksum = self._read(name, MANIFEST), self._read(name, CHECKSUM)
            except FileNotFoundError:
                return None  # another machine is deleting it
        signed = parse_signed(content, checksum, where=self.shown(name))
        wrong = _wrong_size(sizes, signed.manifest)
        if wrong is not None:
            raise DamagedCheckpointError(wrong)
        return signed

    def upload(self, directory: Path) -> None:
        """Write a checkpoint of the local disk, unless it is there already.

        One that is deleted or replaced meanwhile is left out.

        Raises:
            AddressError: the address cannot be written, or the local manifest is damaged.
        """
        try:
            signed = read_signed(directory)
        except DamagedCheckpointError as error:
            if directory.exists():
                raise AddressError(f"{directory} is damaged: {error}") from error
            return
        try:
            with self._telling(f"{self.shown(directory.name)} cannot be written"):
                self._upload(directory, signed)
        except AddressError:
            if _is_still(directory, signed):
                raise

    def delete(self, name: str) -> None:
        """Delete a checkpoint, or what is left of one.

        Raises:
            AddressError: the address cannot be written.
        """
        with self._telling(f"{self.shown(name)} cannot be deleted"):
            self._unsign(name, self._sizes(name))
            with suppress(FileNotFoundError):  # that was all
                self._fs.rm(self._path(name), recursive=True)

    def download(self, name: str, signed: SignedManifest, directory: Path) -> None:
        """Copy a checkpoint into a new local directory; every file is compared with the manifest while it arrives.

        Raises:
            DamagedCheckpointError: a file is not what was written.
            AddressError: the address cannot be read, or the disk not be written.
        """
        with self._telling(f"{self.shown(name)} cannot be copied to {directory.parent}"):
            directory.mkdir(parents=True)
            for file, record in signed.manifest.files.items():
                (directory / file).parent.mkdir(exist_ok=True)
                self._fetch(name, file, record, directory)
            for file, content in ((MANIFEST, signed.content), (CHECKSUM, signed.checksum)):
                (directory / file).write_bytes(content)
            require_layout(directory, signed.manifest)
            for each in (directory / STATE, directory):
                if each.is_dir():
                    sync_directory(each)

    def put(self, path: Path, name: str) -> None:
        """Write one file of the run.

        Raises:
            AddressError: the address cannot be written, or the file not be read.
        """
        with self._telling(f"{self.address}/{name} cannot be written"):
            self._fs.put_file(str(path), f"{self._root}/{name}")

    def put_export(self, directory: Path) -> None:
        """Write an exported model or adapter; its config, by which it is found, comes last.

        Raises:
            AddressError: the address cannot be written, or a file not be read.
        """
        names = [str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()]
        configs = [name for name in _EXPORTS.values() if name in names]
        at = f"{self._root}/{directory.name}"
        with self._telling(f"{self.address}/{directory.name} cannot be written"):
            for name in self._list(at).keys() & set(configs):
                self._fs.rm_file(f"{at}/{name}")
        for name in sorted(set(names) - set(configs)) + configs:
            self.put(directory / name, f"{directory.name}/{name}")

    def newest_export(self) -> str | None:
        """Return the name of the exported adapter or model; None if there is none, or a checkpoint is newer.

        Raises:
            AddressError: the address cannot be read.
        """
        with self._telling(f"{self.address} cannot be listed"):
            configs = [
                f"{name}/{config}"
                for name, config in _EXPORTS.items()
                if config in self._list(f"{self._root}/{name}")
            ]
            written = {self._fs.modified(f"{self._root}/{each}"): each for each in configs}
            if not written:
                return None
            newest = max(written)
            signed = [name for name in self.names() if CHECKSUM in self._sizes(name)]
            is_older = any(self._fs.modified(self._path(n, CHECKSUM)) > newest for n in signed)
            return None if is_older else written[newest].partition("/")[0]

    def get_export(self, name: str, directory: Path) -> None:
        """Copy the files of an exported adapter or model, or of a directory in it, into a new local directory.

        Raises:
            AddressError: the address cannot be read, or the disk not be written.
        """
        with self._telling(f"{self.address}/{name} cannot be copied to {directory}"):
            directory.mkdir(parents=True)
            sizes = self._list(f"{self._root}/{name}")
        for file, size in sizes.items():
            copy = self.get_export if size is None else self.get
            copy(f"{name}/{file}", directory / file)

    def _upload(self, directory: Path, signed: SignedManifest) -> None:
        name, sizes = directory.name, self._sizes(directory.name)
        is_signed = CHECKSUM in sizes and self._read(name, CHECKSUM) == signed.checksum
        is_described = is_signed and sizes.get(MANIFEST) == len(signed.content)
        if is_described and _wrong_size(sizes, signed.manifest) is None:
            return
        self._unsign(name, sizes)
        for file in signed.manifest.files:
            self._fs.put_file(str(directory / file), self._path(name, file))
        if not _is_still(directory, signed):
            return  # another checkpoint took its name, and some of these files may be that one's
        wrong = _wrong_size(self._sizes(name), signed.manifest)
        if wrong is not None:
            raise AddressError(f"{self.shown(name)} was not written as it is here: {wrong}")
        self._fs.pipe_file(self._path(name, MANIFEST), signed.content)
        self._fs.pipe_file(self._path(name, CHECKSUM), signed.checksum)

    def _unsign(self, name: str, sizes: Mapping[str, int]) -> None:
        if CHECKSUM in sizes:
            self._fs.rm_file(self._path(name, CHECKSUM))

    def _fetch(self, name: str, file: str, record: FileRecord, directory: Path) -> None:
        digest, num_bytes, remote = hashlib.sha256(), 0, self._path(name, file)
        try:
            source = self._opened(remote)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(f"{file} is missing") from error
        with source, (directory / file).open("xb") as local:
            while piece := source.read(_PIECE_BYTES):
                digest.update(piece)
                num_bytes += len(piece)
                if num_bytes > record.num_bytes:
                    break
                local.write(piece)
            local.flush()
            os.fsync(local.fileno())
        if num_bytes != record.num_bytes:
            raise DamagedCheckpointError(_other_size(file, num_bytes, record))
        if digest.hexdigest() != record.sha256:
            raise DamagedCheckpointError(
                f"{file} has the SHA-256 {digest.hexdigest()[:12]}..., and had {record.sha256[:12]}... when it was "
                "written: some of its bytes changed"
            )

    def _path(self, name: str, *file: str) -> str:
        return "/".join((self._root, _CHECKPOINTS, name, *file))

    def _read(self, name: str, file: str) -> bytes:
        content: bytes = self._fs.cat_file(self._path(name, file))
        return content

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the files of a checkpoint, by name inside it."""
        found = self._list(self._path(name))
        inner = self._list(self._path(name, STATE)) if STATE in found else {}
        of_all = {**found, **{f"{STATE}/{file}": size for file, size in inner.items()}}
        return {file: size for file, size in of_all.items() if size is not None}


def _name_of(entry: Mapping[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rpartition("/")[2]


def _require_readable(sizes: Mapping[str, int]) -> None:
    if MANIFEST not in sizes:
        raise DamagedCheckpointError(f"{MANIFEST} is missing")
    for file, most in ((MANIFEST, MAX_BYTES), (CHECKSUM, _CHECKSUM_BYTES)):
        if sizes[file] > most:
            raise DamagedCheckpointError(f"{file} has more than {most:,} bytes")


def _wrong_size(sizes: Mapping[str, int], manifest: Manifest) -> str | None:
    """Describe a file that is missing or has another size; None if there is none."""
    for file, record in manifest.files.items():
        if file not in sizes:
            return f"{file} is missing"
        if sizes[file] != record.num_bytes:
            return _other_size(file, sizes[file], record)
    return None


def _other_size(file: str, num_bytes: int, record: FileRecord) -> str:
    return f"{file} has {num_bytes:,} bytes, and had {record.num_bytes:,} when it was written"


def _is_still(directory: Path, signed: SignedManifest) -> bool:
    """Tell whether the directory holds this very checkpoint."""
    try:
        return (directory / CHECKSUM).read_bytes() == signed.checksum
    except OSError:
        return False
