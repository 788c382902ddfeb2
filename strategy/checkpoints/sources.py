"""Sources of full tensors: a state dict, safetensors files, or a model directory."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Shape and dtype of a stored tensor, known without reading it."""

    shape: torch.Size
    dtype: torch.dtype


class TensorSource(Protocol):
    """Named full tensors, any rows of which can be read without the others."""

    def names(self) -> Iterable[str]:
        """Return all stored names."""

    def spec(self, name: str) -> TensorSpec:
        """Return the shape and dtype of the whole tensor."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read some rows of a tensor, or all of it, to the CPU."""


class StateDictSource:
    """Tensors of a mapping in memory, or of a memory-mapped file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        """Return all names."""
        return self._tensors.keys()

    def spec(self, name: str) -> TensorSpec:
        """Return shape and dtype."""
        return TensorSpec(shape=self._tensors[name].shape, dtype=self._tensors[name].dtype)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a view; pages of a mapped file are read when it is copied."""
        t = self._tensors[name].detach()
        return t if rows is None else t[rows]


class SafetensorsSource:
    """Tensors in one or several safetensors files, each opened at first use."""

    def __init__(self, file_of: Mapping[str, Path]) -> None:
        self._file_of = file_of
        self._open: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        """Return all names."""
        return self._file_of.keys()

    def spec(self, name: str) -> TensorSpec:
        """Read shape and dtype from the file's header."""
        stored = self._slice(name)
        dtype = stored.get_dtype()
        if dtype not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"{name!r} in {self._file_of[name]} has dtype {dtype}, which cannot be read; "
                f"convert it to one of {', '.join(_SAFETENSORS_DTYPES)}."
            )
        shape = torch.Size(stored.get_shape())
        return TensorSpec(shape=shape, dtype=_SAFETENSORS_DTYPES[dtype])

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read only these rows."""
        if rows is None:
            whole: Tensor = self._file(name).get_tensor(name)
            return whole
        some: Tensor = self._slice(name)[rows]
        return some

    def _slice(self, name: str) -> Any:
        return self._file(name).get_slice(name)

    def _file(self, name: str) -> Any:
        path = self._file_of[name]
        if path not in self._open:
            self._open[path] = _safe_open()(path, framework="pt", device="cpu")
        return self._open[path]


def open_source(path: str | Path) -> TensorSource:
    """Open a model directory, a safetensors file, or a file with a state dict of tensors.

    Code in a pickled file is never run: `torch.load` runs with `weights_only=True`.

    Raises:
        ValueError: there is nothing that can be read as full tensors.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise ValueError(f"{path} was to be loaded and does not exist; check the path.")
    if path.suffix == ".safetensors":
        return SafetensorsSource(_names_in(path))
    return StateDictSource(require_tensors(load_mapped(path, weights_only=True), path))


def load_mapped(path: Path, *, weights_only: bool) -> Any:
    """Load with `torch.load`, mapping the file instead of reading it.

    Raises:
        ValueError: the file holds objects that could run code, or is not of torch's zip format.
    """
    try:
        return torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as e:
        raise ValueError(
            f"{path} holds more than tensors and plain values, or is damaged; loading it could "
            "run code. If you trust where it comes from, pass weights_only=False. "
            f"torch says: {e}"
        ) from e
    except RuntimeError as e:
        raise ValueError(
            f"{path} cannot be read as a file written by torch.save in the zip format, "
            f"the default since torch 1.6; write it again with torch.save. torch says: {e}"
        ) from e


def require_tensors(loaded: object, path: Path) -> Mapping[str, Tensor]:
    """Check that the loaded object maps names to tensors.

    Raises:
        ValueError: it does not; nested mappings are named, for they are whole checkpoints.
    """
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{path} holds a {type(loaded).__name__}; a mapping from names to tensors is needed, "
            "as written by torch.save(module.state_dict(), path)."
        )
    other = {k: type(v).__name__ for k, v in loaded.items() if not isinstance(v, Tensor)}
    if other:
        key, kind = next(iter(other.items()))
        raise ValueError(
            f"{path} maps {key!r} to a {kind}, not to a tensor; if it is a whole checkpoint, load "
            "it with fabric.load(path, {...}) under the names it was saved with."
        )
    return loaded


def _open_directory(path: Path) -> TensorSource:
    index, single = path / "model.safetensors.index.json", path / "model.safetensors"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        return SafetensorsSource({n: _inside(path, file) for n, file in weight_map.items()})
    if single.is_file():
        return SafetensorsSource(_names_in(single))
    raise ValueError(
        f"{path} holds neither model.safetensors nor model.safetensors.index.json; save the model "
        "with save_pretrained(path), which writes safetensors."
    )


def _inside(directory: Path, file: str) -> Path:
    """Return the path of a file that an index names; in a downloaded model it must be beside the index."""
    if Path(file).name != file:
        raise ValueError(
            f"{directory / 'model.safetensors.index.json'} names {file!r}, which is not a file "
            "beside it; do not use this model directory."
        )
    return directory / file


def _names_in(path: Path) -> dict[str, Path]:
    with _safe_open()(path, framework="pt", device="cpu") as f:
        return dict.fromkeys(f.keys(), path)


def _safe_open() -> Callable[..., Any]:
    try:
        from safetensors import safe_open
    except ImportError as e:
        raise ValueError(
            "reading safetensors files needs the safetensors package; "
            "pip install 'thunder-memsave[hf]'."
        ) from e
    opener: Callable[..., Any] = safe_open
    return opener
