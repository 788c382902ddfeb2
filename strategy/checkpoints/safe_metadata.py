"""Reads DCP's table of contents into inert records, and builds DCP's objects from those that pass the checks.

DCP unpickles `.metadata` with pickle's full power (pytorch/pytorch#189308).
"""

from __future__ import annotations

import io
import math
import pickle
import stat
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
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
