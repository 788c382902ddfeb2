"""Reads DCP's files without running their contents, and without leaving their directory.

DCP unpickles `.metadata` and single values with pickle's full power, and opens whatever file the
metadata names (pytorch/pytorch#189308). Here the metadata is unpickled into inert records, and
DCP's objects are built from those that pass the checks.
"""

from __future__ import annotations

import io
import math
import pickle
import stat
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from thunder_memsave.checkpoints.manifest import DamagedCheckpointError

METADATA_FILE = ".metadata"

_MAX_METADATA_BYTES = 512 * 2**20  # some 2 million shards
_BYTEARRAY = pickle.BYTEARRAY8[0]
_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = frozenset(
    {
        *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
        *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *((_METADATA, name) for name in ("ChunkStorageMetadata", "TensorProperties")),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib", "WindowsPath"),
        ("pathlib._local", "PosixPath"),
        ("pathlib._local", "WindowsPath"),
    }
)


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


def read_metadata(directory: Path) -> Metadata:
    """Read DCP's table of contents, and check it against the files in the directory.

    Raises:
        DamagedCheckpointError: it is not such a table, or says something impossible.
        OSError: it cannot be read.
    """
    path = directory / METADATA_FILE
    if path.is_symlink():
        raise DamagedCheckpointError(f"{METADATA_FILE} is a link, and none is followed")
    if path.stat().st_size > _MAX_METADATA_BYTES:
        raise DamagedCheckpointError(f"{METADATA_FILE} has more than {_MAX_METADATA_BYTES:,} bytes")
    content = io.BytesIO(path.read_bytes())  # a read cannot return more than this
    record = _RecordUnpickler(content).load()
    try:
        return _metadata(record, _sizes_of_files(directory))
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        OverflowError,
        RecursionError,
    ) as error:
        raise DamagedCheckpointError(
            f"{METADATA_FILE} is invalid ({type(error).__name__}: {error})"
        ) from error


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


class _Record:
    """An inert instance of any class, as a pickle describes it."""

    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: Any) -> _Record:
        record = object.__new__(cls)
        record.args = args
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RecordUnpickler(pickle._Unpickler):
    """Makes records of DCP's classes, and refuses all others.

    Based on pickle's Python version: the C version allocates a list as long as the largest index in its memo,
    and a file of nine bytes can claim that it is billions.
    """

    # The unpickler allocates a bytearray before it knows that as many bytes follow; DCP writes none.
    dispatch: ClassVar = {
        code: load for code, load in pickle._Unpickler.dispatch.items() if code != _BYTEARRAY
    }

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        # Created anew for each file, so that a file cannot change them for the next one.
        self._classes: dict[str, type[_Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return self._classes.setdefault(name, type(name, (_Record,), {}))
        if module == "torch" and (name == "Size" or isinstance(vars(torch).get(name), torch.dtype)):
            return vars(torch)[name]
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, which is not part of a checkpoint; loading it could run code"
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


def _sizes_of_files(directory: Path) -> dict[str, int]:
    """Return the sizes of regular files; a link has none."""
    sizes = {}
    for path in directory.iterdir():
        status = path.lstat()
        if stat.S_ISREG(status.st_mode):
            sizes[path.name] = status.st_size
    return sizes


def _metadata(record: Any, sizes: Mapping[str, int]) -> Metadata:
    fields = _fields(record, "Metadata")
    entries = {_text(k): _entry(v, sizes) for k, v in fields["state_dict_metadata"].items()}
    paths = {_text(k): tuple(map(_key, v)) for k, v in fields["planner_data"].items()}
    if paths.keys() != entries.keys() or not all(paths.values()):
        raise ValueError("its entries and their places differ")
    stored = {_index(k): _storage(v, sizes) for k, v in fields["storage_data"].items()}
    _require_places(entries, stored)
    return Metadata(
        state_dict_metadata=entries,
        planner_data=paths,
        storage_data=stored,
        storage_meta=StorageMeta(),
        version=fields.get("version"),
    )


def _fields(record: Any, name: str) -> Mapping[str, Any]:
    _require(record, name)
    if not isinstance(record.state, dict):
        raise TypeError(f"a {name} has no fields")
    return record.state


def _require(record: Any, name: str) -> None:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        raise TypeError(f"a {type(record).__name__} is where a {name} should be")


def _entry(record: Any, sizes: Mapping[str, int]) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        _require(record, "BytesStorageMetadata")
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    _require(fields["properties"], "TensorProperties")
    dtype, size = fields["properties"].state[0], _size(fields["size"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a tensor has the dtype {dtype!r}")
    if math.prod(size) * dtype.itemsize > sum(sizes.values()):
        raise ValueError(f"a tensor of shape {tuple(size)} does not fit into the files there")
    chunks = [_chunk(chunk, size) for chunk in fields["chunks"]]
    _require_tiles([c for c in chunks if math.prod(c.sizes)], size)
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=size, chunks=chunks)


def _chunk(record: Any, whole: torch.Size) -> ChunkStorageMetadata:
    fields = _fields(record, "ChunkStorageMetadata")
    offsets, size = _size(fields["offsets"]), _size(fields["sizes"])
    if not len(offsets) == len(size) == len(whole):
        raise ValueError("a shard has another number of dims than its tensor")
    if any(o + s > w for o, s, w in zip(offsets, size, whole, strict=True)):
        raise ValueError("a shard reaches beyond its tensor")
    return ChunkStorageMetadata(offsets=offsets, sizes=size)


def _require_tiles(chunks: Sequence[ChunkStorageMetadata], whole: torch.Size, dim: int = 0) -> None:
    """Check that non-empty shards cover each value of their tensor exactly once.

    DTensor splits every dim independently, so shards form a grid: those that share their place in
    the dims before have places in this one that follow each other without a gap. In a hole, DCP
    would leave the run's old values.
    """
    if math.prod(whole) == 0 or (dim == len(whole) and len(chunks) == 1):
        return
    if dim == len(whole):
        raise ValueError("shards of a tensor overlap")
    places: dict[tuple[int, int], list[ChunkStorageMetadata]] = {}
    for chunk in chunks:
        places.setdefault((chunk.offsets[dim], chunk.sizes[dim]), []).append(chunk)
    end = 0
    for (offset, size), inner in sorted(places.items(), key=itemgetter(0)):
        if offset != end:
            raise ValueError(f"shards of a tensor {'overlap' if offset < end else 'leave holes'}")
        end += size
        _require_tiles(inner, whole, dim + 1)
    if end != whole[dim]:
        raise ValueError("shards of a tensor leave holes")


def _require_places(
    entries: Mapping[str, TensorStorageMetadata | BytesStorageMetadata],
    stored: Mapping[MetadataIndex, _StorageInfo],
) -> None:
    """Check that the location of each value and of each non-empty shard is known."""
    for name, entry in entries.items():
        places = [MetadataIndex(name)]
        if isinstance(entry, TensorStorageMetadata):
            chunks = [chunk for chunk in entry.chunks if math.prod(chunk.sizes)]
            places = [MetadataIndex(name, chunk.offsets) for chunk in chunks]
        if any(place not in stored for place in places):
            raise ValueError(f"it does not say where all of {name!r} lies")


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset, index = fields.get("offset"), fields.get("index")
    return MetadataIndex(
        _text(fields["fqn"]),
        offset=None if offset is None else _size(offset),
        index=None if index is None else _count(index),
    )


def _storage(record: Any, sizes: Mapping[str, int]) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name, offset, length = (
        fields["relative_path"],
        _count(fields["offset"]),
        _count(fields["length"]),
    )
    if name not in sizes:
        raise ValueError(f"it names the file {name!r}, and there is no such file beside it")
    if offset + length > sizes[name]:
        raise ValueError(f"it reads {name!r} beyond its end")
    if fields.get("transform_descriptors"):
        raise ValueError(f"it has {name!r} transformed before it is read")
    return _StorageInfo(relative_path=name, offset=offset, length=length)


def _size(value: Any) -> torch.Size:
    if not isinstance(value, torch.Size):
        raise TypeError(f"{value!r} is where a shape should be")
    return torch.Size(map(_count, value))


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is where a number of at least 0 should be")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{value!r} is where a name should be")
    return value


def _key(value: Any) -> str | int:
    return value if type(value) is str else _count(value)
