"""Finds the weights that files hold quantised, and opens the source that reads them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from thunder_memsave.checkpoints.quantized_files.mxfp4_source import Mxfp4Source, parts_in_mxfp4
from thunder_memsave.checkpoints.quantized_files.nf4_source import Nf4Source
from thunder_memsave.checkpoints.sources import TensorSource
from thunder_memsave.stored_weights.format import StoredFormat
from thunder_memsave.stored_weights.nf4.bitsandbytes import quantized_names


@runtime_checkable
class StoredSource(TensorSource, Protocol):
    """Tensors, some of which files have in a format of bytes; `read` gives their values."""

    def format_of(self, name: str) -> StoredFormat | None:
        """Return the format in which the files have a weight; None: they have its values."""

    def stored(self, name: str, rows: slice | None = None) -> Tensor:
        """Return the bytes of such a weight, which are not quantised again, or some rows of them."""


def with_dequantized(source: TensorSource) -> TensorSource:
    """Return a source that has quantised weights under their names alone; the same source if there are none.

    Raises:
        QuantizedFilesError: Weights are in a format that is not read, or parts of them are missing.
    """
    if state_of := quantized_names(source.names()):
        return Nf4Source(source, state_of)
    parts_of = parts_in_mxfp4(source)
    return Mxfp4Source(source, parts_of) if parts_of else source


def format_in_files(source: TensorSource, name: str) -> StoredFormat | None:
    """Return the format in which the files of a source have a weight; None: they have its values."""
    return source.format_of(name) if isinstance(source, StoredSource) else None
