"""Reads DCP's files without running their contents, and without leaving their directory.

DCP unpickles single values with pickle's full power, and opens whatever file the metadata names
(pytorch/pytorch#189308); `safe_metadata.py` has read and checked these.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from thunder_memsave.checkpoints.manifest import DamagedCheckpointError


class SafeReader(dcp.FileSystemReader):
    """DCP's reader, which runs nothing and reads only files beside the metadata."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        """`metadata` is what `read_metadata` returned for `path`."""
        super().__init__(path)
        self._directory = path
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that was read and checked before."""
        assert self._metadata.storage_meta is not None
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what this rank needs, checking each part of a file first."""
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            path = self._directory / info.relative_path
            require_stored(path, offset=info.offset, num_bytes=info.length)
            with _named(item.dest_index.fqn), path.open("rb") as file:
                self._read(item, _Part(file, info.offset, info.length), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, part: _Part, planner: LoadPlanner) -> None:
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, io.BytesIO(part.read()))
            return
        shard = torch.load(cast(BinaryIO, part), map_location="cpu", weights_only=True)
        self._require_as_planned(item.storage_index, shard)
        target = planner.resolve_tensor(item).detach()
        target.copy_(narrow_tensor_by_index(shard, item.storage_offsets, item.lengths))
        planner.commit_tensor(item, target)

    def _require_as_planned(self, index: MetadataIndex, shard: object) -> None:
        """Check a shard's shape and dtype: DCP would take a part of a larger shard, and convert another dtype."""
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        chunk = next(chunk for chunk in entry.chunks if chunk.offsets == index.offset)
        wanted = (chunk.sizes, entry.properties.dtype, torch.strided)
        found = None
        if type(shard) is torch.Tensor:
            found = (shard.shape, shard.dtype, shard.layout)
        if found != wanted:
            raise ValueError(
                f"a shard of shape {tuple(chunk.sizes)} and {entry.properties.dtype} should be there, "
                f"and {_described(shard)} is"
            )


@contextmanager
def _named(entry: str) -> Iterator[None]:
    """Name the entry in the error if it cannot be read."""
    try:
        yield
    except (OSError, MemoryError, torch.OutOfMemoryError, DamagedCheckpointError):
        raise
    # It is not documented what torch raises for bytes that are no tensor, or another one.
    except Exception as error:
        raise DamagedCheckpointError(
            f"{entry!r} does not hold what the run saved, or more than tensors and plain values; "
            f"loading it could run code. The reason: {type(error).__name__}: {error}"
        ) from error


def _described(value: object) -> str:
    if type(value) is not torch.Tensor:
        return f"a {type(value).__name__}"
    return f"one of shape {tuple(value.shape)} and {value.dtype}, {value.layout}"


class SafePlanner(DefaultLoadPlanner):
    """DCP's planner for flat states, which unpickles single values as its caller says."""

    def __init__(self, *, weights_only: bool) -> None:
        super().__init__()
        self._weights_only = weights_only

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value that is not a tensor."""
        try:
            loaded = torch.load(value, weights_only=self._weights_only)
        except pickle.UnpicklingError as error:
            raise DamagedCheckpointError(
                f"{read_item.dest_index.fqn!r} holds more than plain values, or is damaged; loading it could run code. "
                f"If you trust where it comes from, pass weights_only=False. torch says: {error}"
            ) from error
        self.original_state_dict[read_item.dest_index.fqn] = loaded


def require_stored(path: Path, *, offset: int = 0, num_bytes: int | None = None) -> None:
    """Check that a file of `torch.save`, or a part of it, takes no more bytes in memory than on disk.

    Raises:
        DamagedCheckpointError: it takes more, or is not such a file.
    """
    with path.open("rb") as file:
        num_bytes = path.stat().st_size - offset if num_bytes is None else num_bytes
        try:
            with zipfile.ZipFile(_Part(file, offset, num_bytes)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
            raise DamagedCheckpointError(
                f"{path.name} does not hold what torch.save writes ({error})"
            ) from error
    is_stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
    if not is_stored or sum(entry.file_size for entry in entries) > num_bytes:
        raise DamagedCheckpointError(
            f"{path.name} holds compressed entries, which torch.save does not write and which may grow without bound"
        )


class _Part(io.RawIOBase):
    """A range of a file's bytes, as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._offset, self._num_bytes = file, offset, num_bytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._num_bytes}[whence]
        if start + to < 0:
            raise ValueError("a seek before the beginning")
        self._at = start + to
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._num_bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        self._file.seek(self._offset + self._at)
        content = self._file.read(size)
        self._at += len(content)
        return content

    def readinto(self, buffer: Any) -> int:
        """Read into a tensor's memory without a copy; torch reads tensors this way."""
        place = memoryview(buffer).cast("B")
        self._file.seek(self._offset + self._at)
        num_read = self._file.readinto(place[: max(0, self._num_bytes - self._at)])
        self._at += num_read
        return num_read
